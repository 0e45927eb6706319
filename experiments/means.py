"""Our figure over all tasks of a run, made as a paper makes its own: the Mean and Overall columns.

`published.Table.overall` says by which rule; see `published.RULES`. `pooled` and `rates` are not the mean of the tasks'
speedups: a task with long answers weighs more in the one, a task that decodes fast in the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from experiments import overall, records


def over_tasks(
    rule: str, quantity: str, members: Sequence[records.Record], baselines: Sequence[records.Record]
) -> float | None:
    """One figure for several tasks.

    Args:
      rule: of `published.RULES`.
      quantity: speedup, tau or alpha.
      members: a method's records, one a task, at one temperature.
      baselines: the baseline's on the same tasks.

    Returns:
      None where a task lacks what the rule needs.
    """
    if rule == "tasks":
        return _mean([getattr(record, quantity) for record in members])
    if rule == "rates":
        own, base = (_mean([record.tokens_per_second for record in records]) for records in (members, baselines))
        return own / base if own and base else None
    found = {each.method: each for each in overall.overall([*baselines, *members])}.get(members[0].method)
    return getattr(found, quantity) if found is not None and found.tasks == len(members) else None


def _mean(values: Sequence[float | None]) -> float | None:
    return statistics.fmean(values) if values and None not in values else None
