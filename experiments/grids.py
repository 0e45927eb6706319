"""The report's tables of our own cells, as text ready for Markdown and HTML."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from experiments import expectation, reported, tables

TAU = (
    "tau: tokens emitted per target call, the corrected or bonus token included, prefill's first token not counted, "
    "nothing after the end; autoregressive decoding has 1."
)


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table ready to be printed.

    title:   what it shows.
    headers: of the columns.
    rows:    cells as text, as many as headers.
    notes:   lines to stand below it.
    words:   leading columns that hold words, not numbers.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    words: int = 1

    def markdown(self, *, titled: bool = True) -> str:
        """With its notes, and its title above."""
        title = [f"### {self.title}"] if titled else []
        return "\n\n".join([*title, "\n".join(tables.markdown(self.headers, self.rows)), *self.notes])


def results(cells: Sequence[reported.Cell]) -> Grid:
    """Every cell as the benchmark prints it."""
    renamed = [dataclasses.replace(cell.record, method=cell.label) for cell in cells]
    headers, rows = tables.cells(renamed)
    words = headers.index("method") + 1
    slow = tuple(tables.notes(renamed))
    return Grid("All cells", tuple(headers), tuple(map(tuple, rows)), (tables.DEFINITIONS, *slow), words)


def overall(runs: Sequence[reported.Run]) -> Grid:
    """Every method of every run, and of every point of a sweep, over all its tasks."""
    headers, rows = [], []
    for run in runs:
        for point in dict.fromkeys(run.points):
            members = [record for record, at in zip(run.records, run.points) if at == point]
            headers, own = tables.overall_cells(members)
            rows += [(", ".join(filter(None, (str(run.path), point))), *row) for row in own]
    return Grid("All tasks together", ("run", *headers), tuple(rows), (tables.OVERALL_DEFINITIONS, TAU), words=3)


def details(cells: Sequence[reported.Cell]) -> Grid:
    """Acceptance and latency of every cell, in the words users of other tools know."""
    headers = ("method", "tau", "mean accepted", "alpha", "acceptance by position", "conditional", "TTFT ms", "TPOT ms")
    rows = []
    for cell in cells:
        record = cell.record
        latency = record.inter_token_ms
        rows.append(
            (
                *_place(cell),
                with_interval(record.tau, None if cell.is_baseline else record.tau_ci),
                number(record.mean_accepted),
                with_interval(record.alpha, record.alpha_ci),
                _rates(record.acceptance_by_position),
                _rates(record.conditional_acceptance_by_position),
                number(record.ttft_ms, 0),
                number(record.tpot_ms, 1),
                *((number(value, 1) for value in vars(latency).values()) if latency else "---"),
            )
        )
    notes = (
        TAU,
        "mean accepted: accepted drafts per target call. alpha: accepted / tested drafts. By position: accepted at "
        "depth 1/2/... over the target calls that offered a draft there; conditional: over those that tested one "
        "there. Brackets: bootstrap intervals over prompts. ITL: time between deliveries, each of one round's tokens; "
        "the rounds of a call are taken to be equally long.",
    )
    return Grid(
        "Acceptance and latency",
        ("task", "T", *headers, "ITL ms p50", "p90", "p99"),
        tuple(rows),
        notes,
        words=3,
    )


def expected(comparisons: Sequence[expectation.Comparison]) -> Grid:
    """Measured speedup beside the expected one; cells that part are marked and explained below."""
    rows, outside = [], []
    for comparison in comparisons:
        cell, record = comparison.cell, comparison.cell.record
        rows.append(
            (
                *_place(cell),
                number(record.tau),
                with_interval(record.speedup, record.speedup_ci),
                number(record.expected_speedup),
                f"{comparison.ratio:.2f} {comparison.mark}".rstrip(),
                f"{comparison.step:.1f} / {comparison.step_alone:.1f}",
                f"{comparison.round:.1f} / {comparison.round_alone:.1f}",
                f"{record.cost.verify_ms:.1f} + {record.cost.draft_ms:.1f}",
                f"{comparison.added_to_step:+.1f}, {comparison.added_to_round:+.1f}",
            )
        )
        if comparison.is_outside:
            outside.append(f"{comparison.mark} {_name(cell)}, {comparison.ratio:.2f}: {comparison.explain()}.")
    median = expectation.median_ratio(comparisons)
    band = f"{expectation.LOWEST:g} - {expectation.HIGHEST:g}"
    notes = (
        f"Median of measured / expected over {len(comparisons)} cells: {number(median)}. "
        f"Outside {band} (▼ below, ▲ above): {len(outside) or 'none'}.",
        *outside,
        "expected: tau * t_autoregressive / (t_verify + t_draft), each timed alone. Step and round: milliseconds in "
        "the run / timed alone, so that measured / expected is the first ratio over the second. The loop adds: their "
        "differences, to a step and to a round.",
        TAU,
    )
    headers = ("task", "T", "method", "tau", "measured", "expected", "measured / expected", "step ms", "round ms")
    return Grid("Measured and expected", (*headers, "verify + draft ms", "loop adds ms"), tuple(rows), notes, words=3)


def number(value: float | None, digits: int = 2) -> str:
    """A dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def with_interval(value: float | None, interval: tuple[float, float] | None) -> str:
    """A value, and its interval in brackets if it has one."""
    return number(value) + ("" if interval is None or value is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]")


def _place(cell: reported.Cell) -> tuple[str, str, str]:
    return cell.record.task, f"{cell.record.temperature:g}", cell.label


def _name(cell: reported.Cell) -> str:
    return f"{cell.label} ({cell.record.task}, T = {cell.record.temperature:g})"


def _rates(rates: Iterable[float | None]) -> str:
    return "/".join(number(rate) for rate in rates) or "-"
