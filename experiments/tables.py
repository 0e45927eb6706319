"""The results of a run as a table: Markdown for `table.md`, rich for the terminal, both from the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import rich.box
import rich.table
import rich.text

from experiments import overall, records

DEFINITIONS = (
    "tau: tokens emitted per target call, the corrected or bonus token included, prefill's first token not counted; "
    "autoregressive = 1. alpha: accepted / tested drafts. accepted: target calls that accepted 0/1/2/... drafts. "
    "tokens/s: while decoding, prefill (TTFT) apart. "
    "speedup: tokens/s over those of autoregressive decoding with the same target, prompts and run (ratio of totals) "
    "[bootstrap interval over prompts]. expected: tau * t_autoregressive / (t_verify + t_draft), each timed alone."
)

OVERALL_DEFINITIONS = (
    "All tasks together. accepted at depth: of the target calls that offered a draft at depth 1, 2, ..., the share "
    "that accepted it. before repeats: the same figures over the tokens before the first 8-gram of each answer that "
    "stood in it already, as if the answer had ended there; share: of all tokens."
)

_BASELINE = "autoregressive"
_COLUMNS = ["method", "tau", "alpha", "accepted", "target calls", "tokens/s", "TTFT ms", "TPOT ms", "speedup"]
_COLUMNS += ["expected", "greedy check"]
_OVERALL_COLUMNS = ["T", "method", "prompts", "tau", "alpha", "accepted at depth", "tokens/s", "speedup"]
_OVERALL_COLUMNS += ["before repeats: share", "tau", "alpha", "accepted at depth"]
_MAX_BINS = 8  # of the printed histogram; the records hold all


def markdown(headers: Sequence[Any], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table."""
    line = lambda cells: "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
    return [line(headers), line(["---"] * len(headers)), *map(line, rows)]


def results_table(results: Sequence[records.Record]) -> str:
    """Markdown: a row per task, temperature and method, the definitions, and a note for every speedup below 1."""
    return "\n".join([*markdown(*cells(results)), "", DEFINITIONS, *(f"\n{note}" for note in notes(results))]) + "\n"


def cells(results: Sequence[records.Record]) -> tuple[list[str], list[list[str]]]:
    """The table's headers and rows."""
    group_headers, rows = _rows(results)
    return [*group_headers, *_COLUMNS], [[*group, *columns] for group, columns in rows]


def report(results: Sequence[records.Record]) -> str:
    """Markdown: the results task by task, then over all tasks."""
    return f"{results_table(results)}\n{overall_table(results)}"


def overall_table(results: Sequence[records.Record]) -> str:
    """Markdown: a row per temperature and method, all tasks together, and the definitions."""
    return "\n".join([*markdown(*overall_cells(results)), "", OVERALL_DEFINITIONS]) + "\n"


def overall_cells(results: Sequence[records.Record]) -> tuple[list[str], list[list[str]]]:
    """That table's headers and rows."""
    return _OVERALL_COLUMNS, _overall_rows(results)


def overall_terminal_table(results: Sequence[records.Record]) -> Any:
    """The same as a `rich.table.Table`, without the definitions."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for header in _OVERALL_COLUMNS:
        words = header == "method"
        table.add_column(header.replace(" ", "\n"), justify="left" if words else "right", overflow="fold")
    for row in _overall_rows(results):
        table.add_row(*map(rich.text.Text, row))
    return table


def terminal_table(results: Sequence[records.Record]) -> Any:
    """The same as a `rich.table.Table`, without the definitions and notes; made for 120 columns."""
    group_headers, rows = _rows(results)
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for header in _COLUMNS:
        words = header in ("method", "greedy check")
        table.add_column(
            header.replace(" ", "\n"),
            justify="left" if words else "right",
            min_width=len("autoregressive:") if words else None,  # in a narrow terminal, break between words
            overflow="fold",
        )
    shown = None
    for group, columns in rows:
        if group != shown:
            table.add_section()
            task, *settings = group
            lines = [task, *(f"{name} = {value}" for name, value in zip(group_headers[1:], settings, strict=True))]
            table.add_row(rich.text.Text("\n".join(lines), style="bold"))
            shown = group
        table.add_row(*map(rich.text.Text, columns))  # Text: "[0.9, 1.1]" is no markup
    return table


def notes(results: Sequence[records.Record]) -> list[str]:
    """A sentence for every method that did not speed decoding up. It is the first thing a reader must see."""
    sentences = []
    for record in results:
        if record.method == _BASELINE or record.speedup is None or record.speedup >= 1:
            continue
        maybe_noise = record.speedup_ci is not None and record.speedup_ci[1] >= 1
        verdict = "no gain here, within the noise" if maybe_noise else "drafting costs more than it saves here"
        causes = {"alpha": record.alpha, "c": record.cost.c if record.cost else None}
        given = ", ".join(f"{name} {value:.2f}" for name, value in causes.items() if value is not None)
        sentences.append(
            f"{record.method} ({record.task}, T = {record.temperature:g}): {record.speedup:.2f}x - {verdict}"
            + (f" ({given})" if given else "")
        )
    return sentences


def greedy_text(check: records.GreedyCheck | None) -> str:
    """What the comparison with autoregressive decoding found."""
    if check is None:
        return "-"
    text = f"equal to autoregressive: {check.equal} of {check.prompts}"
    if check.near_ties:
        text += f", {check.near_ties} near-tie{'s' if check.near_ties > 1 else ''}"
    different = check.prompts - check.equal - check.near_ties
    return text + (f", {different} different" if different else "")


def _rows(results: Sequence[records.Record]) -> tuple[list[str], list[tuple[list[str], list[str]]]]:
    """Headers of what rows are grouped by, and each row as its group's cells and its own."""
    # Settings that are the same everywhere stand in the config, not in every row.
    varied = [key for key in ("target", "batch", "dtype", "seed") if len({getattr(r, key) for r in results}) > 1]
    places = {group: i for i, group in enumerate(dict.fromkeys(map(_group, results)))}
    ordered = sorted(results, key=lambda record: places[_group(record)])
    rows = []
    for record in ordered:
        group = [record.task, f"{record.temperature:g}", *(str(getattr(record, key)) for key in varied)]
        rows.append((group, _columns(record)))
    return ["task", "T", *varied], rows


def _group(record: records.Record) -> tuple:
    return record.task, record.temperature, record.target, record.batch, record.dtype, record.seed


def _columns(record: records.Record) -> list[str]:
    drafts = len(record.acceptance_histogram) > 1
    speedup = _number(record.speedup, 2)
    if record.speedup_ci is not None and record.method != _BASELINE:
        speedup += f" [{record.speedup_ci[0]:.2f}, {record.speedup_ci[1]:.2f}]"
    return [
        record.method + ("" if record.lossless else " (lossy)"),
        _number(record.tau, 2),
        _number(record.alpha, 2),
        _histogram(record.acceptance_histogram) if drafts else "-",
        str(record.target_calls),
        _number(record.tokens_per_second, 1),
        _number(record.ttft_ms, 0),
        _number(record.tpot_ms, 1),
        speedup,
        _number(record.expected_speedup, 2),
        greedy_text(record.greedy_check),
    ]


def _overall_rows(results: Sequence[records.Record]) -> list[list[str]]:
    rows = []
    for each in overall.overall(results):
        before = each.before_repeat
        rest = ["-"] * 4
        if before is not None:
            share = before.new_tokens / each.new_tokens
            rest = [f"{share:.0%}", _number(before.tau, 2), _number(before.alpha, 2)]
            rest.append(_numbers(before.acceptance_by_position))
        rows.append(
            [
                f"{each.temperature:g}",
                each.method + ("" if each.lossless else " (lossy)"),
                str(each.num_prompts),
                _number(each.tau, 2),
                _number(each.alpha, 2),
                _numbers(each.acceptance_by_position),
                _number(each.tokens_per_second, 1),
                _number(each.speedup, 2),
                *rest,
            ]
        )
    return rows


def _numbers(values: Sequence[float | None]) -> str:
    return " ".join(_number(value, 2) for value in values) or "-"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def _histogram(counts: Sequence[int]) -> str:
    shown, rest = counts[:_MAX_BINS], counts[_MAX_BINS:]
    return "/".join(map(str, shown)) + (f"/+{sum(rest)}" if rest else "")
