"""The rounds of an answer, read off how its tokens came; and acceptance over a part of each answer.

The greedy text of a small model repeats itself, and what repeats is easy to guess. So acceptance is also told over the
tokens before the first repeated n-gram of each answer. Plain NumPy on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jspec import decode, types

NGRAM = 8


class Rounds(NamedTuple):
    """The R rounds of one answer. Prefill's token belongs to none.

    starts:   `[R]` place of each round's first token in the answer; it is also the number of tokens before it.
    emitted:  `[R]` tokens.
    accepted: `[R]` drafts among them.
    rejected: `[R]` bool: it ended with the correction of a rejected draft.
    """

    starts: np.ndarray
    emitted: np.ndarray
    accepted: np.ndarray
    rejected: np.ndarray


def of_answer(origin: np.ndarray) -> Rounds:
    """A round ends with a token that was no draft, or with the answer.

    Args:
      origin: `[n]` how each token of the answer came (`decode.ORIGINS`), prefill's token first.
    """
    origin = np.asarray(origin)
    length = len(origin)
    ends = np.flatnonzero(origin[1:] != decode.ACCEPTED) + 2  # behind each round's last token
    whole = len(ends)
    if length > 1 and not (whole and ends[-1] == length):
        ends = np.append(ends, length)  # a stop id cut the last one off
    starts = np.concatenate([[1], ends])[: len(ends)]
    emitted = ends - starts
    is_whole = np.arange(len(ends)) < whole
    rejected = is_whole & (origin[ends - 1] == decode.CORRECTED)
    return Rounds(starts, emitted, emitted - is_whole, rejected)


def first_repeat(tokens: Sequence[int], ngram: int = NGRAM) -> int:
    """Tokens before the first n-gram that stood in the text before, or all of them.

    The two may overlap: nine equal tokens hold their 8-gram twice, the second time behind one token.

    Raises:
      ValueError: `ngram` is below 1.
    """
    if ngram < 1:
        raise ValueError(f"ngram {ngram} is below 1")
    tokens, seen = list(map(int, tokens)), set()
    for start in range(len(tokens) - ngram + 1):
        found = tuple(tokens[start : start + ngram])
        if found in seen:
            return start
        seen.add(found)
    return len(tokens)


def before_repeat(
    output: types.DecodeOutput, prompt_lengths: np.ndarray, *, max_depth: int, max_new_tokens: int, ngram: int = NGRAM
) -> tuple[types.Acceptance, np.ndarray]:
    """Acceptance statistics of answers that end before their first repeat, as if a stop id stood there.

    What is not known of a round is how deep its tree went, so a draft counts as offered wherever the budget left room
    for it. That is exact for chains and static trees; where lookups find less, or a dynamic tree stays flatter, the
    missing draft counts as one that was not accepted. Nodes are counted along one path.

    Args:
      output: on the host.
      prompt_lengths: `[B]`.
      max_depth: of the drafter.
      max_new_tokens: every row's budget.
      ngram: length of what repeats.

    Returns:
      Statistics per row, and `[B]` tokens, prefill's included: what `metrics.summarize` takes.
    """
    rows, tokens = [], []
    for row, (start, end) in enumerate(zip(np.asarray(prompt_lengths), np.asarray(output.lengths))):
        until = first_repeat(output.tokens[row, start:end], ngram)
        rows.append(_count(of_answer(output.origin[row, start:end]), until, max_depth, max_new_tokens))
        tokens.append(until)
    counts = {name: np.stack([getattr(row, name) for row in rows]) for name in types.Acceptance.__dataclass_fields__}
    return types.Acceptance(**counts), np.array(tokens)


def _count(rounds: Rounds, until: int, max_depth: int, budget: int) -> types.Acceptance:
    """One answer that ends after `until` tokens."""
    begun = rounds.starts < until
    starts, emitted, accepted, rejected = (field[begun] for field in rounds)
    count = np.minimum(emitted, until - starts)
    kept = np.minimum(accepted, count)
    # As in `decode`: a rejected draft was tested, unless the end came before its correction.
    tested = kept + (rejected & (count > accepted))
    offered = np.clip(budget - starts - 1, 0, max_depth)
    depth = np.arange(1, max_depth + 1)
    return types.Acceptance(
        rounds=np.asarray(len(starts)),
        histogram=np.bincount(kept, minlength=max_depth + 1),
        offered=(depth <= offered[:, None]).sum(axis=0),
        tested=(depth <= tested[:, None]).sum(axis=0),
        drafted=np.asarray(offered.sum()),
    )
