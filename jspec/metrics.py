"""What a run amounts to: acceptance statistics into alpha and tau, clock readings into speedups and latencies.

The words, used one way:

* tau (acceptance length, block efficiency): tokens emitted per target call, the corrected or bonus token included.
  Prefill emits the first token; it belongs to no round and is not counted. Autoregressive decoding has tau = 1.
* mean accepted: accepted drafts per target call, nothing else counted. tau = 1 + mean accepted, less what a stop id
  inside an accepted block cuts off.
* alpha: accepted / tested drafts. A draft behind a rejected one was never tested, whatever it would have matched.
* accepted per drafted: accepted / offered drafts, tested or not; it falls with gamma where alpha does not.
* acceptance by position: unconditional, accepted at depth i / rounds that offered a draft there.
* conditional acceptance by position: accepted at depth i / rounds that tested a draft there.
* speedup: tokens per second over those of autoregressive decoding on the same prompts.
* TTFT: time to the first token, that of prefill. TPOT: time per later token. Inter-token latency: time between two
  deliveries, each of which brings one round's tokens.

What others call by these names, in ours:

* EAGLE, EAGLE-2, EAGLE-3: average acceptance length tau = 1 + mean accepted (accepted drafts of a round plus one,
  averaged over rounds). n-alpha = conditional acceptance by position at n + 1, of a chain.
* Medusa: acceleration rate = tau, overhead = (t_verify + t_draft) / t_autoregressive; speedup = one over the other.
* vLLM: mean acceptance length = 1 + num_accepted_tokens / num_drafts = 1 + mean accepted, over the rounds that offered
  a draft (those that offered none, as prompt lookup's without a match, do not count); draft acceptance rate =
  accepted per drafted; per-position acceptance rate = accepted at depth i / all rounds that offered any draft. Its
  benchmark's ITL takes one sample a delivery, as ours.
* Spec-Bench: mean accepted tokens = 1 + mean accepted, the last round whole. Its speedup is a ratio of means of each
  question's tokens per second, prefill's time included.
* Leviathan et al. 2023: alpha = E[sum_x min(p, q)], over all places of a text; with independent drafts tau =
  (1 - alpha^(gamma + 1)) / (1 - alpha). Block efficiency = tau.

A rate whose denominator is zero is NaN. Plain NumPy on the host; clocks are in `timing.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from jspec import types


@dataclasses.dataclass(frozen=True)
class Summary:
    """Acceptance of a run, all rows and rounds together. Words as in the module's docstring.

    new_tokens:   tokens generated, prefill's first ones included.
    target_calls: verifying calls of the target, summed over rows (prefill is none).
    tau:          (new_tokens - prefill's first ones) / target_calls.
    alpha:        accepted / tested drafts.
    accepted_per_drafted: accepted / offered drafts.
    mean_accepted: accepted drafts per target call.
    acceptance_histogram: target calls that accepted exactly a drafts, a = 0, 1, ...
    acceptance_by_position: unconditional, by depth 1, 2, ...
    conditional_acceptance_by_position: given that every shallower draft was accepted.
    offered, tested: target calls that offered, that tested a draft at depth 1, 2, ...
    """

    new_tokens: int
    target_calls: int
    tau: float
    alpha: float
    accepted_per_drafted: float
    mean_accepted: float
    acceptance_histogram: tuple[int, ...]
    acceptance_by_position: tuple[float, ...]
    conditional_acceptance_by_position: tuple[float, ...]
    offered: tuple[int, ...]
    tested: tuple[int, ...]


def summarize(acceptance: types.Acceptance, new_tokens: np.ndarray) -> Summary:
    """Turn acceptance statistics into rates.

    Args:
      acceptance: per row, or already summed over rows; on the device or not.
      new_tokens: `[B]` (a scalar for one row) tokens each row generated, prefill's first one included. It is needed
        because a stop token inside an accepted block ends it without a corrected or bonus token.

    Raises:
      ValueError: the counts contradict each other.
    """
    rounds, drafted = (int(np.asarray(x).sum()) for x in (acceptance.rounds, acceptance.drafted))
    histogram, offered, tested = (
        np.asarray(x).sum(axis=tuple(range(np.ndim(x) - 1)), dtype=np.int64)
        for x in (acceptance.histogram, acceptance.offered, acceptance.tested)
    )
    accepted_at = histogram[::-1].cumsum()[::-1][1:]  # rounds that accepted at least i + 1 drafts
    accepted = int(accepted_at.sum())
    new_tokens = np.atleast_1d(np.asarray(new_tokens))
    round_tokens = int(np.maximum(new_tokens - 1, 0).sum())
    if histogram.sum() != rounds:
        raise ValueError(f"the histogram counts {histogram.sum()} rounds, not {rounds}")
    if (accepted_at > tested).any() or (tested > offered).any():
        raise ValueError(f"drafts accepted {accepted_at}, tested {tested}, offered {offered}: each must bound the last")
    if not accepted <= round_tokens <= accepted + rounds:
        raise ValueError(
            f"{round_tokens} tokens after prefill's first do not fit {rounds} rounds that accepted {accepted} drafts"
        )
    return Summary(
        new_tokens=int(new_tokens.sum()),
        target_calls=rounds,
        tau=_ratio(round_tokens, rounds),
        alpha=_ratio(accepted, tested.sum()),
        accepted_per_drafted=_ratio(accepted, drafted),
        mean_accepted=_ratio(accepted, rounds),
        acceptance_histogram=tuple(histogram.tolist()),
        acceptance_by_position=tuple(map(_ratio, accepted_at.tolist(), offered.tolist())),
        conditional_acceptance_by_position=tuple(map(_ratio, accepted_at.tolist(), tested.tolist())),
        offered=tuple(offered.tolist()),
        tested=tuple(tested.tolist()),
    )


class AcceptanceIntervals(NamedTuple):
    """Bootstrap intervals over prompts, low and high; NaN with fewer than two prompts."""

    tau: tuple[float, float]
    alpha: tuple[float, float]


def acceptance_intervals(
    acceptance: types.Acceptance, new_tokens: np.ndarray, *, confidence: float = 0.95, seed: int = 0
) -> AcceptanceIntervals:
    """How sure tau and alpha are, given that other prompts might have been drawn.

    Args:
      acceptance: per row, `[B, ...]`.
      new_tokens: `[B]` tokens each row generated, prefill's first one included.
      confidence: coverage.
      seed: of the bootstrap.
    """
    histogram = np.asarray(acceptance.histogram)
    accepted = (histogram * np.arange(histogram.shape[-1])).sum(axis=-1)
    round_tokens = np.maximum(np.asarray(new_tokens) - 1, 0)
    settings = dict(confidence=confidence, seed=seed)
    return AcceptanceIntervals(
        tau=ratio_interval(round_tokens, acceptance.rounds, **settings),
        alpha=ratio_interval(accepted, np.asarray(acceptance.tested).sum(axis=-1), **settings),
    )


def from_matches(matches: np.ndarray, offered: np.ndarray | None = None) -> types.Acceptance:
    """Acceptance statistics of chains whose drafts were compared one by one, summed over rounds.

    Only the prefix before the first mismatch is accepted; matches behind it count for nothing.

    Args:
      matches: `[R, K]` whether draft i of round r agrees with the target.
      offered: `[R]` drafts really offered, at most K; None means K each.
    """
    matches = np.asarray(matches, bool)
    num_rounds, gamma = matches.shape
    offered = np.full(num_rounds, gamma) if offered is None else np.asarray(offered)
    positions = np.arange(gamma)
    is_offered = positions < offered[:, None]
    accepted = np.logical_and.accumulate(matches & is_offered, axis=1).sum(axis=1)
    return types.Acceptance(
        rounds=np.asarray(num_rounds),
        histogram=np.bincount(accepted, minlength=gamma + 1),
        offered=is_offered.sum(axis=0),
        tested=(is_offered & (positions <= accepted[:, None])).sum(axis=0),
        drafted=offered.sum(),
    )


# Speed.


class Calls(NamedTuple):
    """Calls of one method in the order made, one per prompt. Methods that are compared ran the same prompts.

    tokens:  `[N]` new tokens of each call.
    seconds: `[N]` its wall-clock time.
    """

    tokens: np.ndarray
    seconds: np.ndarray


@dataclasses.dataclass(frozen=True)
class Speedup:
    """Tokens per second of a method over those of a baseline on the same prompts. 1 is no gain, below 1 a loss.

    ratio_of_totals:  all tokens / all seconds, one over the other; long answers weigh more. The headline.
    mean_of_ratios:   mean over prompts of each prompt's ratio; every prompt weighs the same.
    median_of_ratios: the same with the median: robust to a disturbed call.
    interval:         bootstrap interval of `ratio_of_totals`; NaN with fewer than two prompts.
    confidence:       its coverage.
    """

    ratio_of_totals: float
    mean_of_ratios: float
    median_of_ratios: float
    interval: tuple[float, float]
    confidence: float


def tokens_per_second(calls: Calls, *, compiling_calls: int) -> float:
    """Total tokens over total seconds. `compiling_calls` is explained at `speedup`."""
    tokens, seconds = _steady(calls, compiling_calls)
    return float(tokens.sum() / seconds.sum())


def speedup(
    baseline: Calls,
    method: Calls,
    *,
    compiling_calls: int,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Speedup:
    """Compare two methods prompt by prompt.

    Tokens per second are compared, not seconds: a method that stopped early did less work.

    Args:
      baseline: autoregressive decoding.
      method: what is compared with it, on the same prompts in the same order.
      compiling_calls: leading calls of both that compiled; they enter no number. It has no default, so that nobody
        forgets them: 0 says that everything was compiled before the first call.
      confidence: coverage of the interval.
      resamples: of the bootstrap, which draws prompts with replacement and keeps each prompt's pair together.
      seed: of the bootstrap.

    Raises:
      ValueError: different numbers of calls, none left, or a time or token count that is not positive.
    """
    if len(baseline.seconds) != len(method.seconds):
        raise ValueError(f"{len(baseline.seconds)} baseline calls cannot be paired with {len(method.seconds)}")
    (base_tokens, base_seconds), (tokens, seconds) = (_steady(calls, compiling_calls) for calls in (baseline, method))
    ratios = (tokens / seconds) / (base_tokens / base_seconds)

    def ratio_of_totals(chosen):
        throughput = tokens[chosen].sum(axis=-1) / seconds[chosen].sum(axis=-1)
        return throughput / (base_tokens[chosen].sum(axis=-1) / base_seconds[chosen].sum(axis=-1))

    return Speedup(
        ratio_of_totals=float(ratio_of_totals(np.arange(len(tokens)))),
        mean_of_ratios=float(ratios.mean()),
        median_of_ratios=float(np.median(ratios)),
        interval=_bootstrap(ratio_of_totals, len(tokens), confidence, resamples, seed),
        confidence=confidence,
    )


def ratio_interval(
    numerators: np.ndarray,
    denominators: np.ndarray,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Bootstrap interval over prompts of a ratio of sums: tau (tokens / target calls), alpha (accepted / tested).

    Args:
      numerators: `[N]`, one per prompt.
      denominators: `[N]`.
      confidence: coverage.
      resamples: of the bootstrap.
      seed: of the bootstrap.
    """
    numerators, denominators = np.asarray(numerators, float), np.asarray(denominators, float)
    if not denominators.any():
        return math.nan, math.nan

    def ratio(chosen):
        with np.errstate(divide="ignore", invalid="ignore"):
            return numerators[chosen].sum(axis=-1) / denominators[chosen].sum(axis=-1)

    return _bootstrap(ratio, len(numerators), confidence, resamples, seed)


def time_per_token(gaps: np.ndarray, tokens: np.ndarray) -> float:
    """TPOT in milliseconds: how long requests wait for a token behind their first; NaN without any.

    Args:
      gaps: `[N]` seconds between deliveries, of all requests: those of one batch wait side by side (`equal_gaps`).
      tokens: those that the gaps brought, in any shape.
    """
    return _ratio(float(np.sum(gaps)) * 1e3, int(np.sum(tokens)))


class LatencyPercentiles(NamedTuple):
    """Milliseconds that half, nine tenths and all but a hundredth of the gaps stay within."""

    p50: float
    p90: float
    p99: float


def inter_token_latency(gaps: np.ndarray) -> LatencyPercentiles:
    """Percentiles of the time between deliveries; between two of them, linear. NaN without any.

    A reader of a stream sees the tokens of one round land together. Each delivery after the first is one sample,
    however many tokens it brings, as in vLLM's benchmark; the mean time per token is TPOT, this mean tau times as long.

    Args:
      gaps: `[N]` seconds between one delivery and the one before.
    """
    gaps = np.asarray(gaps, float)
    if not gaps.size:
        return LatencyPercentiles(math.nan, math.nan, math.nan)
    return LatencyPercentiles(*map(float, np.percentile(gaps, [50, 90, 99]) * 1e3))


def equal_gaps(rounds: np.ndarray, seconds: float) -> np.ndarray:
    """Gaps between the deliveries of one call that ran on the device without a word to the host.

    Nobody saw its tokens land, so its rounds are taken to be equally long: the call's time over the rounds of the row
    that took most.

    Args:
      rounds: `[B]` of each row.
      seconds: of the call, from the first tokens on.

    Returns:
      `[sum of rounds]` seconds.
    """
    rounds = np.asarray(rounds)
    return np.full(int(rounds.sum()), seconds / max(int(rounds.max(initial=0)), 1))


def expected_speedup(tau: float, autoregressive_ms: float, verify_ms: float, draft_ms: float) -> float:
    """`tau * t_autoregressive / (t_verify + t_draft)`: what the parts, each timed alone, promise.

    Args:
      tau: tokens emitted per target call.
      autoregressive_ms: one autoregressive step.
      verify_ms: one target pass over all nodes of a round.
      draft_ms: all of a round's drafting.
    """
    return tau * autoregressive_ms / (verify_ms + draft_ms)


def _ratio(numerator, denominator) -> float:
    return float(numerator / denominator) if denominator else math.nan


def _steady(calls: Calls, compiling_calls: int) -> tuple[np.ndarray, np.ndarray]:
    tokens, seconds = (np.asarray(x, float)[compiling_calls:] for x in calls)
    if len(tokens) != len(seconds) or not len(tokens):
        raise ValueError(f"{len(tokens)} token counts and {len(seconds)} times are left after {compiling_calls} calls")
    if not (tokens > 0).all() or not (seconds > 0).all():
        raise ValueError("every call needs a positive number of tokens and a positive time")
    return tokens, seconds


def _bootstrap(statistic, size: int, confidence: float, resamples: int, seed: int) -> tuple[float, float]:
    if size < 2:  # one prompt says nothing about how prompts vary
        return math.nan, math.nan
    chosen = np.random.default_rng(seed).integers(size, size=(resamples, size))
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(statistic(chosen), [tail, 1 - tail])
    return float(low), float(high)
