"""What a method amounts to over all tasks of a run: counts added up, rates computed anew from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import records
from jspec import metrics, types

_BASELINE = "autoregressive"


@dataclasses.dataclass(frozen=True)
class Overall:
    """One method at one temperature. Words as in `records.Record`; None means that there is nothing to measure.

    tasks:             of how many tasks.
    tokens_per_second: while decoding: all tokens after the prompts' first over all seconds.
    speedup:           that over the baseline's.
    before_repeat:     the same acceptance over the tokens before the first repeated 8-gram of each answer.
    """

    method: str
    lossless: bool
    temperature: float
    draft: str | None
    draft_sha256: str | None
    tasks: int
    num_prompts: int
    new_tokens: int
    target_calls: int
    tau: float | None
    alpha: float | None
    acceptance_histogram: tuple[int, ...]
    acceptance_by_position: tuple[float | None, ...]
    tokens_per_second: float | None
    speedup: float | None
    before_repeat: records.BeforeRepeat | None

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return records.plain(dataclasses.asdict(self))


def overall(results: Sequence[records.Record]) -> list[Overall]:
    """Every method over all its tasks, by temperature and in the order of the results.

    Records that do not tell how many drafts were offered and tested, as those of earlier versions, are left out.

    Args:
      results: of one config.
    """
    cells: dict[tuple, list[records.Record]] = {}
    for record in results:
        if record.offered is not None and record.tested is not None:
            cells.setdefault((record.temperature, record.method), []).append(record)
    speeds = {key: _tokens_per_second(members) for key, members in cells.items()}
    return [
        _add_up(members, speeds[key], speeds.get((key[0], _BASELINE)))
        for key, members in sorted(cells.items(), key=lambda item: item[0][0])
    ]


def _add_up(members: Sequence[records.Record], speed: float | None, baseline: float | None) -> Overall:
    first, num_prompts = members[0], sum(record.num_prompts for record in members)
    summary = _summary(members, num_prompts)
    parts = [record.before_repeat for record in members]
    before = None
    if None not in parts:
        found = _summary(parts, num_prompts)
        names = [field.name for field in dataclasses.fields(records.BeforeRepeat)]
        before = records.BeforeRepeat(
            **{name: getattr(found, name) for name in names if name != "new_tokens"},
            new_tokens=sum(part.new_tokens for part in parts),
        )
    return Overall(
        method=first.method,
        lossless=first.lossless,
        temperature=first.temperature,
        draft=first.draft,
        draft_sha256=first.draft_sha256,
        tasks=len(members),
        num_prompts=num_prompts,
        new_tokens=sum(record.new_tokens for record in members),
        target_calls=summary.target_calls,
        tau=summary.tau,
        alpha=summary.alpha,
        acceptance_histogram=summary.acceptance_histogram,
        acceptance_by_position=summary.acceptance_by_position,
        tokens_per_second=speed,
        speedup=speed / baseline if speed and baseline else None,
        before_repeat=before,
    )


def _summary(parts: Sequence[records.Record | records.BeforeRepeat], num_prompts: int) -> metrics.Summary:
    """Rates of the added counts. Every prompt's first token is prefill's."""
    add = lambda name: np.sum([getattr(part, name) for part in parts], axis=0).astype(int)
    offered = add("offered")
    acceptance = types.Acceptance(
        rounds=add("target_calls"),
        histogram=add("acceptance_histogram"),
        offered=offered,
        tested=add("tested"),
        drafted=offered.sum(),
    )
    return metrics.summarize(acceptance, add("new_tokens") - num_prompts + 1)


def _tokens_per_second(members: Sequence[records.Record]) -> float | None:
    """All tokens over all seconds, which each record's own rate implies."""
    tokens = [record.new_tokens - record.num_prompts for record in members]
    seconds = [count / record.tokens_per_second for count, record in zip(tokens, members) if record.tokens_per_second]
    return sum(tokens) / sum(seconds) if sum(seconds) else None
