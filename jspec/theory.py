"""What speculative decoding promises: tokens per round, speedup, the best draft length.

Two sets of formulas. Those of Leviathan et al. ("Fast Inference from Transformers via Speculative Decoding", ICML 2023,
arXiv:2211.17192) know one acceptance rate `alpha`, the same for every draft, and one relative cost `c`, and take a
target pass over gamma + 1 tokens for free. Those by depth take acceptance and costs as they were measured, position by
position and size by size: tokens per round are 1 + the sum of the probabilities that a draft at each depth stands, for
a chain or a tree, and a pass over more nodes may cost more. With equal acceptance and free nodes they agree.

Plain NumPy on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Equal acceptance everywhere.


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of one round: `(1 - alpha^(gamma + 1)) / (1 - alpha)` (Leviathan et al. 2023, equation 1).

    Args:
      alpha: probability that a draft is accepted, in [0, 1].
      gamma: draft length.
    """
    return float(np.sum(alpha ** np.arange(gamma + 1)))  # the same sum, and right at alpha = 1


def acceptance(tokens: float, gamma: int) -> float:
    """The alpha whose `expected_tokens` are these: equation 1 the other way round, by bisection.

    Args:
      tokens: of one round, between 1 and gamma + 1.
      gamma: draft length.

    Raises:
      ValueError: no alpha gives so many.
    """
    if not 1 <= tokens <= gamma + 1:
        raise ValueError(f"{tokens} tokens a round are outside [1, {gamma + 1}], what {gamma} drafts can give")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens else (low, middle)
    return high


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Improvement in wall time: `(1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1))` (Leviathan et al. 2023,
    theorem 3.8).

    Args:
      alpha, gamma: as in `expected_tokens`.
      c: time of one draft call over that of one target call.
    """
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def best_gamma(alpha: float, c: float, max_gamma: int = 64) -> int:
    """The draft length with the largest `speedup`, by a scan; 0 means not to speculate (Leviathan et al. 2023,
    section 3.5; corollary 3.9: some gamma pays if and only if alpha > c).

    Args:
      alpha, c: as in `speedup`.
      max_gamma: longest to try.
    """
    return best_depth([speedup(alpha, gamma, c) for gamma in range(max_gamma + 1)])


# As measured.


def tokens_by_depth(acceptance: Sequence[float]) -> np.ndarray:
    """Tokens of one round whose drafts reach no deeper than 0, 1, .. D: 1 + the sum of acceptances down to there.

    The expectation that equation 1 of Leviathan et al. 2023 evaluates for independent drafts; this one holds for any,
    and along the accepted path of a tree.

    Args:
      acceptance: `[D]` share of rounds that accept a draft at depth 1, .. D, unconditional. NaN, where no round offered
        a draft, counts as 0.

    Returns:
      `[D + 1]`.
    """
    return np.concatenate([[1.0], 1 + np.cumsum(np.nan_to_num(np.asarray(acceptance, float)))])


def speedup_by_depth(
    acceptance: Sequence[float], step: float, verify: Sequence[float], draft: Sequence[float]
) -> np.ndarray:
    """Speedup over autoregressive decoding of drafts cut at each depth: `tokens * step / (verify + draft)`.

    What theorem 3.8 of Leviathan et al. 2023 becomes when neither acceptance nor the pass over more nodes is uniform.
    Entry 0 does not speculate and is 1.

    Args:
      acceptance: as in `tokens_by_depth`, `[D]`.
      step: time of one autoregressive step.
      verify: `[D]` time of the target pass over a round's nodes, cut at depth 1, .. D.
      draft: `[D]` time of drafting them.

    Returns:
      `[D + 1]`.
    """
    verify, draft = np.asarray(verify, float), np.asarray(draft, float)
    if not len(acceptance) == len(verify) == len(draft):
        raise ValueError(f"{len(acceptance)} acceptances, {len(verify)} verify and {len(draft)} draft times")
    return np.concatenate([[1.0], tokens_by_depth(acceptance)[1:] * step / (verify + draft)])


def best_depth(speedups: Sequence[float]) -> int:
    """Where a speedup by depth, or by gamma, is largest; the shallower of two that are equal."""
    return int(np.argmax(speedups))
