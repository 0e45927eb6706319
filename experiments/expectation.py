"""Measured speedup beside the expected one, and where they part.

`expected_speedup = tau * t_autoregressive / (t_verify + t_draft)` puts together parts that were timed alone, in the
middle of a typical answer. The run itself has both times too: an autoregressive step of the run, and a round of it. So

    measured / expected = (autoregressive step, run / alone) / (round, run / alone)

and whatever the two speedups differ by shows in one of these two factors. What the run's round takes beyond its timed
parts, and its step beyond the step alone, is what the loop adds: other lengths than the middle of an answer, longer or
shorter walks of the verifier, and whatever else the machine did.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from experiments import reported

# Beyond these the parts do not explain the whole, and a reader has to be told why.
LOWEST, HIGHEST = 0.8, 1.25


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One cell's two speedups.

    cell:      of a method that drafts.
    ratio:     measured / expected.
    step:      milliseconds of an autoregressive step, in the run; `step_alone` timed alone.
    round:     milliseconds of one of the method's rounds, in the run; `round_alone` timed alone.
    """

    cell: reported.Cell
    ratio: float
    step: float
    step_alone: float
    round: float
    round_alone: float

    @property
    def is_outside(self) -> bool:
        """Whether the parts do not explain the whole."""
        return not LOWEST <= self.ratio <= HIGHEST

    @property
    def mark(self) -> str:
        """▼ below the band, ▲ above it, nothing within."""
        return "" if not self.is_outside else "▼" if self.ratio < LOWEST else "▲"

    @property
    def added_to_step(self) -> float:
        """Milliseconds that the loop adds to an autoregressive step; negative where it takes less than alone."""
        return self.step - self.step_alone

    @property
    def added_to_round(self) -> float:
        """Milliseconds that the loop adds to the parts of a round; negative where it takes less than them."""
        return self.round - self.round_alone

    def explain(self) -> str:
        """By the timed parts: which of the two factors did it, what the loop adds, and whether noise alone would do."""
        cost, interval = self.cell.record.cost, self.cell.record.speedup_ci
        step, round_ = self.step / self.step_alone, self.round / self.round_alone
        by_round = abs(math.log(round_)) >= abs(math.log(step))
        factor = round_ if by_round else step
        cause = f"{'rounds' if by_round else 'autoregressive steps'} {'slower' if factor > 1 else 'faster'} than alone"
        sentence = (
            f"{cause}: a round took {self.round:.1f} ms in the run, {cost.verify_ms:.1f} verify + {cost.draft_ms:.1f} "
            f"draft alone, so the loop adds {self.added_to_round:+.1f} (x{round_:.2f}); an autoregressive step took "
            f"{self.step:.1f}, {self.step_alone:.1f} alone, the loop adds {self.added_to_step:+.1f} (x{step:.2f})"
        )
        if interval is not None and interval[0] <= self.cell.record.expected_speedup <= interval[1]:
            sentence += "; the measured interval holds the expected speedup"
        return sentence


def compare(cells: Sequence[reported.Cell]) -> list[Comparison]:
    """Of every cell that drafts and has both speedups and its baseline's times."""
    found = []
    for cell in cells:
        record, baseline = cell.record, cell.baseline
        if cell.is_baseline or baseline is None or record.cost is None:
            continue
        if None in (record.speedup, record.expected_speedup, record.tau, record.tpot_ms, baseline.tpot_ms):
            continue
        found.append(
            Comparison(
                cell=cell,
                ratio=record.speedup / record.expected_speedup,
                step=baseline.tpot_ms,
                step_alone=record.cost.autoregressive_ms,
                round=record.tpot_ms * record.tau,
                round_alone=record.cost.verify_ms + record.cost.draft_ms,
            )
        )
    return found


def median_ratio(comparisons: Sequence[Comparison]) -> float | None:
    """Of measured / expected over all cells; None without any."""
    return statistics.median(comparison.ratio for comparison in comparisons) if comparisons else None
