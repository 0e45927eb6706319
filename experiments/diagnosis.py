"""What measurements of a draft and its target mean, in words: numbers in, findings and a verdict out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jspec import costs, metrics, theory

Status = Literal["ok", "warning", "fault"]

PAYS = 1.05  # below that, a predicted gain is within what the clocks of a shared machine leave open
# A draft that was trained for its target gets half or more of its first drafts accepted. Word counts alone, which any
# stale draft has learned as well, reach up to about a fifth (Leviathan et al. 2023, table 3).
NEAR_CHANCE = 0.2
# Medusa's heads guess a token without having seen the one before it: word counts then reach what a unigram does (same).
NEAR_CHANCE_UNSEEN = 0.13
COVERED = 0.9  # share of the target's tokens in the draft vocabulary; the rest can never be accepted
SLOW_PASS = 1.3  # steps; a pass that takes fewer is not to blame when a round emits hardly more than one token
DISTURBED = 0.25  # prediction and measurement that differ by more than this share were not taken under equal conditions
MIN_ROUNDS = 20  # in each half of the answers, before a decay is looked for


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    name:   what was looked at.
    status: whether it is as it should be; a fault is a mismatch, whatever the speed.
    text:   what was found.
    """

    name: str
    status: Status
    text: str


@dataclasses.dataclass(frozen=True)
class Method:
    """What is known of a drafter before it runs.

    by_call: its draft runs once for each depth, so that cutting the proposals saves time.
    chain:   it proposes chains.
    learned: its draft was trained, and may have been trained for something else.
    words:   how a sentence calls its draft.
    """

    by_call: bool
    chain: bool
    learned: bool
    words: str

    @property
    def unit(self) -> str:
        """What the length of its proposals is called."""
        return "gamma" if self.by_call and self.chain else "depth"


@dataclasses.dataclass(frozen=True)
class Forecast:
    """What proposals cut at depth 0 (no speculation), 1, .. D promise; D is the configured depth.

    acceptance: `[D]` share of rounds that accept a draft there.
    nodes:      `[D + 1]` of a target pass.
    tokens:     `[D + 1]` emitted per round.
    verify:     `[D + 1]` time of the target pass with its verdict, in autoregressive steps.
    draft:      `[D + 1]` time of drafting, likewise.
    speedups:   `[D + 1]` over autoregressive decoding.
    """

    acceptance: tuple[float, ...]
    nodes: tuple[float, ...]
    tokens: tuple[float, ...]
    verify: tuple[float, ...]
    draft: tuple[float, ...]
    speedups: tuple[float, ...]

    @property
    def depth(self) -> int:
        """The configured one."""
        return len(self.acceptance)

    @property
    def best(self) -> int:
        """The depth with the largest speedup."""
        return theory.best_depth(self.speedups)


def forecast(
    method: Method,
    summary: metrics.Summary,
    step: float,
    cost: costs.Costs,
    passes: Mapping[int, float],
    nodes: Sequence[float],
) -> Forecast:
    """Predict the speedup of proposals cut at each depth.

    The bare pass says how the cost of verifying changes with the number of nodes; what a verdict, a commit and the
    drafter's update add is taken from the configured setting, whose prediction is therefore `metrics.expected_speedup`.

    Args:
      method: of the drafter.
      summary: its acceptance at the configured setting.
      step: seconds of one autoregressive step.
      cost: of a round's parts.
      passes: seconds of the bare target pass by number of nodes; between two sizes it is interpolated.
      nodes: `[D + 1]` nodes of proposals cut at each depth.
    """
    depth = len(nodes) - 1
    if method.by_call:
        acceptance = summary.acceptance_by_position
    else:
        # Rounds that find nothing to propose emit one token all the same, so they count in every denominator.
        reached = np.cumsum(summary.acceptance_histogram[::-1])[::-1][1:]
        acceptance = reached / max(summary.target_calls, 1)
    sizes = sorted(passes)
    bare = np.interp(nodes, sizes, [passes[size] for size in sizes])
    verify = cost.verify * bare[1:] / bare[-1]
    draft = cost.draft * (np.arange(1, depth + 1) / depth if method.by_call else np.ones(depth))
    return Forecast(
        acceptance=tuple(map(float, acceptance)),
        nodes=tuple(map(float, nodes)),
        tokens=tuple(theory.tokens_by_depth(acceptance).tolist()),
        verify=(1.0, *(verify / step).tolist()),
        draft=(0.0, *(draft / step).tolist()),
        speedups=tuple(theory.speedup_by_depth(acceptance, step, verify, draft).tolist()),
    )


# Findings.


def coverage(ids: np.ndarray | None, tokens: np.ndarray, vocab_size: int) -> Finding:
    """How much of the target's answers a draft vocabulary can propose.

    Args:
      ids: of the draft vocabulary, or None when it is the target's.
      tokens: that the target emitted.
      vocab_size: of the target.
    """
    if ids is None or len(ids) >= vocab_size:
        return Finding("coverage", "ok", "the draft can propose every token of the target")
    share = float(np.isin(tokens, ids).mean())
    text = f"{share:.1%} of the target's own tokens are among the {len(ids)} of {vocab_size} the draft can propose"
    if share >= COVERED:
        return Finding("coverage", "ok", text)
    return Finding("coverage", "warning", f"{text}; no other is ever accepted, so the vocabulary is too small")


def acceptance(method: Method, summary: metrics.Summary, expected: Forecast) -> Finding:
    """Acceptance by depth, and whether the first one is near chance."""
    numbers = (
        f"tau {summary.tau:.2f}, alpha {_number(summary.alpha)}; by depth {_numbers(expected.acceptance)}, given that "
        f"the one before stands {_numbers(summary.conditional_acceptance_by_position)}"
    )
    cause = _near_chance(method, expected)
    return Finding("acceptance", "warning" if cause else "ok", f"{numbers}. {cause}" if cause else numbers)


def decay(accepted: Sequence[Sequence[int]]) -> Finding:
    """Whether later rounds accept less than earlier ones, which a draft whose state is out of step does.

    Args:
      accepted: of each answer, accepted drafts by round.
    """
    # The budget or a stop id cuts the last round.
    halves = [(row[: len(row[:-1]) // 2], row[len(row[:-1]) // 2 : -1]) for row in accepted]
    first, second = (np.array([count for half in halves for count in half[index]], float) for index in (0, 1))
    if min(len(first), len(second)) < MIN_ROUNDS:
        return Finding("over time", "ok", f"too few rounds ({len(first) + len(second)}) to see a decay")
    text = f"{first.mean():.2f} drafts accepted a round in the first half of the answers, {second.mean():.2f} after it"
    noise = math.sqrt(first.var() / len(first) + second.var() / len(second))
    if second.mean() < first.mean() / 2 and first.mean() - second.mean() > 3 * noise:
        return Finding(
            "over time", "warning", f"{text}: it decays, as it does when the draft's state is out of step with the text"
        )
    return Finding("over time", "ok", text)


def prices(method: Method, expected: Forecast, step: float, passes: Mapping[int, float]) -> Finding:
    """What a round costs, and which part of it is too slow for its tokens."""
    relative = ", ".join(f"{size}: {passes[size] / passes[1]:.2f}" for size in sorted(passes))
    text = (
        f"a step {step * 1e3:.1f} ms; in steps: verify {expected.verify[-1]:.2f} at {expected.nodes[-1]:g} nodes, "
        f"draft {expected.draft[-1]:.2f}"
    )
    if method.unit == "gamma":
        text += f" (c = {expected.draft[1]:.2f} a call)"
    text += f"; the bare pass by nodes, over one node: {relative}"
    cause = _too_slow(method, expected)
    return Finding("costs", "warning" if cause else "ok", f"{text}. {cause}" if cause else text)


def speed(expected: Forecast, measured: metrics.Speedup | None) -> Finding:
    """The clock beside the prediction, at the configured setting."""
    predicted = expected.speedups[-1]
    if measured is None:
        return Finding("speed", "warning", f"predicted {predicted:.2f}; the answers are too short to measure it")
    found = measured.ratio_of_totals
    text = f"{found:.2f} times autoregressive decoding measured, {predicted:.2f} predicted from the parts"
    if abs(found / predicted - 1) <= DISTURBED:
        return Finding("speed", "ok", text)
    return Finding(
        "speed",
        "warning",
        f"{text}; they differ: few tokens, a disturbed machine, or "
        "parts so short that starting them is most of their time",
    )


# Causes: a sentence when one applies, else nothing.


def chance(method: Method) -> float:
    """Share of first drafts that one which learned nothing but word counts gets accepted, at most."""
    return NEAR_CHANCE_UNSEEN if method.learned and not method.by_call else NEAR_CHANCE


def _near_chance(method: Method, expected: Forecast) -> str:
    first = expected.acceptance[0]
    if not first < chance(method):
        return ""
    if not method.learned:
        return f"Only {first:.0%} of first drafts stand: {method.words} has little to offer on these prompts"
    return (
        f"Only {first:.0%} of first drafts stand, about what chance gives: {method.words} does not speak like this "
        "target. It may be trained for another one or an older version, or with another chat template or dtype"
    )


def _too_slow(method: Method, expected: Forecast) -> str:
    if expected.speedups[-1] >= PAYS:
        return ""
    tokens, verify, draft = expected.tokens[-1], expected.verify[-1], expected.draft[-1]
    if verify >= max(tokens, SLOW_PASS):
        return (
            f"Verifying is too slow here: a pass over {expected.nodes[-1]:g} nodes takes {verify:.2f} steps and a "
            f"round emits {tokens:.2f} tokens, so not even free drafts would pay"
        )
    first = expected.acceptance[0]
    if method.unit == "gamma" and expected.draft[1] > first:
        return (
            f"The draft is too slow: one call costs {expected.draft[1]:.2f} steps and its first draft stands in "
            f"{first:.0%} of rounds, so no gamma pays"
        )
    if draft > 0.1 * tokens:
        return f"The draft is too slow: {draft:.2f} steps of a round that emits {tokens:.2f} tokens"
    return ""


# Verdict.


def pays(expected: Forecast, measured: metrics.Speedup | None) -> bool:
    """Whether the best setting is a gain. Where it is the configured one, the clock must not contradict."""
    if expected.best == expected.depth and measured is not None and measured.ratio_of_totals < 1:
        return False
    return expected.speedups[expected.best] >= PAYS


def verdict(
    method: Method, expected: Forecast, measured: metrics.Speedup | None, device: str, findings: Sequence[Finding]
) -> str:
    """Whether speculation pays on this device, and what to do, in plain words."""
    best, depth, unit = expected.best, expected.depth, method.unit
    round_cost = expected.verify[-1] + expected.draft[-1]
    configured = (
        f"at {unit} {depth} a round emits {expected.tokens[-1]:.2f} tokens and costs {round_cost:.2f} autoregressive "
        f"steps, which makes {expected.speedups[-1]:.2f} times the speed"
    )
    if measured is not None:
        configured += f" ({measured.ratio_of_totals:.2f} measured)"
    sentences = []
    faults = [finding.name for finding in findings if finding.status == "fault"]
    if faults:
        sentences.append(f"This draft and target do not belong together (see: {', '.join(faults)}).")
    if pays(expected, measured):
        sentences.append(f"Speculation pays on {device}: {configured}.")
        if best < depth:
            sentences.append(f"Best is {unit} {best}, which promises {expected.speedups[best]:.2f}.")
        else:
            sentences.append(f"This is the best of {unit} 0 to {depth}; more may pay more.")
    else:
        sentences.append(f"Speculation does not pay on {device}: {configured}.")
        gain = expected.speedups[best]
        if best == 0:
            sentences.append(f"Best is not to speculate ({unit} 0).")
        elif gain < PAYS:
            sentences.append(f"Best is {unit} {best}, which promises {gain:.2f}: no more than noise.")
        else:
            sentences.append("The clock contradicts the prediction; trust the clock, or measure more prompts.")
    causes = [_near_chance(method, expected), _too_slow(method, expected)]
    causes += [finding.text for finding in findings if finding.status == "warning" and finding.name in _CAUSES]
    sentences += [f"{cause[:1].upper()}{cause[1:]}." for cause in causes if cause]
    return " ".join(sentences)


# Findings that explain a slow draft, beside acceptance and costs, whose sentences the verdict takes itself.
_CAUSES = ("coverage", "over time")


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _numbers(values: Sequence[float]) -> str:
    return " ".join(map(_number, values)) or "-"


def table(method: Method, expected: Forecast) -> list[list[Any]]:
    """The forecast as rows of cells, the first one its header."""
    columns = expected.nodes, (math.nan, *expected.acceptance), expected.tokens, expected.verify, expected.draft
    header = [method.unit, "nodes", "accepted", "tokens", "verify", "draft", "speedup"]
    rows = zip(*columns, expected.speedups)
    return [header, *([str(at), f"{row[0]:g}", *map(_number, row[1:])] for at, row in enumerate(rows))]
