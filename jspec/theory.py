"""What speculative decoding promises: tokens per round, speedup, operations, the best draft length.

Three sets of formulas. Those of Leviathan et al. ("Fast Inference from Transformers via Speculative Decoding", ICML
2023, arXiv:2211.17192) know one acceptance rate `alpha`, the same for every draft, and one relative cost `c`, and take
a target pass over gamma + 1 tokens for free. Those by depth take acceptance and costs as they were measured, position
by position and size by size: tokens per round are 1 + the sum of the probabilities that a draft at each depth stands,
for a chain or a tree, and a pass over more nodes may cost more. With equal acceptance and free nodes they agree. Those
of other papers relate tau to the cost of a round, whatever drafts. What a tree accepts is in `optimal_trees`, what
given laws accept in `exact_acceptance`.

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


def operations_increase(alpha: float, gamma: int, c_hat: float) -> float:
    """Operations over those of autoregressive decoding: `(1 - alpha) (gamma c_hat + gamma + 1) / (1 - alpha^(gamma +
    1))` (Leviathan et al. 2023, section 3.4).

    Args:
      alpha, gamma: as in `expected_tokens`.
      c_hat: operations per token of the draft over those of the target.
    """
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def least_gain(alpha: float, c: float) -> float:
    """What the best gamma gains at least where alpha > c, `(1 + alpha) / (1 + c)`: the speedup of one draft (Leviathan
    et al. 2023, corollary 3.9)."""
    return speedup(alpha, 1, c)


def oracle_tokens(alpha: float) -> float:
    """Tokens of one round that drafts exactly as much as will stand, `1 / (1 - alpha)`: the bound of `expected_tokens`
    for every gamma (Leviathan et al. 2023, section 3.5)."""
    return 1 / (1 - alpha) if alpha < 1 else float("inf")


def oracle_speedup(alpha: float, c: float) -> float:
    """Speedup of such rounds, `1 / (1 - alpha + c alpha)`: each spends alpha / (1 - alpha) draft calls on average.

    The paper gives only its size: up to about 60% more than the best fixed gamma. The expression is ours.
    """
    rest = 1 - alpha + c * alpha
    return 1 / rest if rest > 0 else float("inf")


def implied_c(speedup: float, alpha: float, gamma: int) -> float:
    """The relative cost of a draft call that explains a measured speedup: `speedup` solved for c.

    Below 0 where even free drafts would not explain it.

    Raises:
      ValueError: no draft was made, or the speedup is not above 0.
    """
    if gamma < 1:
        raise ValueError(f"gamma {gamma} is below 1: without drafts there is no cost of drafting")
    if not speedup > 0:
        raise ValueError(f"speedup {speedup} is not above 0")
    return (expected_tokens(alpha, gamma) / speedup - 1) / gamma


def expected_calls(alpha: float, gamma: int, num_tokens: int) -> float:
    """Target calls for an answer of so many tokens, exactly.

    With r tokens left at most r - 1 drafts are offered, so that the last rounds are shorter and a short answer has
    fewer tokens per call than `expected_tokens`, which it approaches.

    Args:
      alpha, gamma: as in `expected_tokens`.
      num_tokens: behind the first one, which prefill emits.
    """
    calls = np.zeros(num_tokens + 1)
    for left in range(1, num_tokens + 1):
        offered = min(gamma, left - 1)
        accepted = np.append(alpha ** np.arange(offered) * (1 - alpha), alpha**offered)
        calls[left] = 1 + accepted @ calls[left - 1 - np.arange(offered + 1)]
    return float(calls[-1])


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


# Of other papers.


def speedup_of_rounds(tau: float, overhead: float) -> float:
    """Speedup of a method that emits tau tokens a round: `tau / overhead`.

    Medusa (arXiv:2401.10774, section 3) calls tau the acceleration rate. EAGLE (arXiv:2401.15077) prints tau and
    speedup, whose ratio is the overhead; for drafts of equal cost that is gamma c + 1 (`speedup`).

    Args:
      tau: tokens per target call.
      overhead: time of a round, its drafting included, over that of an autoregressive step; 1 is none.
    """
    return tau / overhead


def implied_overhead(tau: float, speedup: float) -> float:
    """The overhead that explains a measured speedup: `speedup_of_rounds` solved for it."""
    return tau / speedup


def lookahead_tokens(alpha: float, length: int, guesses: int) -> float:
    """Tokens of a call that verifies several guesses side by side: `g + 1 - sum over i = 1 .. g of (1 - alpha^i)^b`.

    Fu et al. ("Break the sequential dependency of LLM inference using lookahead decoding", arXiv:2402.02057), who take
    the guesses as independent. Recalled, not checked against the paper. One guess gives `expected_tokens`.

    Args:
      alpha: probability that a token of a guess is right.
      length: g, tokens of a guess.
      guesses: b.
    """
    return float(length + 1 - np.sum((1 - alpha ** np.arange(1, length + 1)) ** guesses))


def lookahead_compression(tokens: float, every: float) -> float:
    """Autoregressive over lookahead steps when one step in `every` has a guess to verify: `S = (f - 1 + E) / f`.

    Fu et al., arXiv:2402.02057. Recalled, not checked against the paper.

    Args:
      tokens: E, of a step that has one (`lookahead_tokens`).
      every: f.
    """
    return (every - 1 + tokens) / every


def lookahead_nodes(window: int, ngram: int, guesses: int) -> int:
    """Tokens in one step of lookahead decoding, to which its operations are proportional: `(W + G) (N - 1)` (Fu et al.,
    arXiv:2402.02057)."""
    return (window + guesses) * (ngram - 1)
