"""A report of one or several benchmark runs: tables beside the paper's, figures, traces.

    python -m experiments.report RUN... [--out FOLDER]

RUN is a run folder of `experiments.benchmark` or `experiments.sweep`, also one that is not finished. Into FOLDER
(default: the first RUN) go `table.md`, the figures as SVG, and `report.html`, one page that needs no other file and no
network; `papers.md` has one short table for each paper whose numbers stand beside ours, with the command and commit
that made them. The last line is JSON: what was written, and how far the measured speedups agree with the expected ones.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from experiments import (
    beside_paper,
    cli,
    expectation,
    figures,
    grids,
    paper_tables,
    report_facts,
    report_page,
    reported,
    run_folder,
)
from jspec import files


def main(folders: Sequence[str], out: str | None = None) -> dict[str, Any]:
    """Write the report.

    Args:
      folders: of the runs.
      out: where to; None means the first of them.

    Returns:
      What was written, and the comparison of measured and expected speedups.

    Raises:
      ValueError: a folder is no run's, is given twice, or has nothing to report.
      OSError: the report cannot be written.
    """
    paths = [pathlib.Path(folder).resolve() for folder in folders]
    for path, folder in zip(paths, folders):
        if paths.count(path) > 1:
            raise ValueError(f"{folder} is given twice")
    runs = [reported.load(folder) for folder in folders]
    folder = runs[0].path if out is None else pathlib.Path(out)
    with files.naming(folder):
        folder.mkdir(parents=True, exist_ok=True)

    cells = reported.cells(runs)
    comparisons = expectation.compare(cells)
    parts = sections(runs, cells, comparisons)
    pictures = [picture for part in parts for picture in part.pictures]
    title = f"Report: {', '.join(run.path.resolve().name for run in runs)}"
    summary = [grids.expected(comparisons).notes[0], report_facts.provenance(runs)]
    markdown = "\n\n".join([f"# {title}", *summary, *(part.markdown() for part in parts)]) + "\n"
    page = report_page.render(title, summary, parts, report_page.examples(runs, cells))
    for picture in pictures:
        run_folder.write_text_atomic(folder / f"{picture.name}.svg", picture.file())
    run_folder.write_text_atomic(folder / "table.md", markdown)
    run_folder.write_text_atomic(folder / "report.html", page)
    short = paper_tables.text(runs)
    if short:
        run_folder.write_text_atomic(folder / paper_tables.FILE, short)
    print("\n".join(grids.expected(comparisons).notes))
    return {
        "report": str(folder),
        "files": [
            *("report.html", "table.md"),
            *([paper_tables.FILE] if short else []),
            *(f"{picture.name}.svg" for picture in pictures),
        ],
        "cells": len(cells),
        "median_measured_over_expected": expectation.median_ratio(comparisons),
        "outside": [
            {
                "method": comparison.cell.label,
                "task": comparison.cell.record.task,
                "temperature": comparison.cell.record.temperature,
                "measured_over_expected": comparison.ratio,
                "explanation": comparison.explain(),
            }
            for comparison in comparisons
            if comparison.is_outside
        ],
    }


def sections(
    runs: Sequence[reported.Run],
    cells: Sequence[reported.Cell],
    comparisons: Sequence[expectation.Comparison],
) -> list[report_page.Section]:
    """The parts of the report, in order."""
    source = (report_facts.provenance(runs),)
    beside = [
        report_page.Section(
            f"{paper}-{table}",
            f"Beside {paper}, {table}",
            (report_facts.citation(paper), report_facts.provenance(report_facts.behind((paper, table), cells, runs))),
            (*beside_paper.compared(cells, (paper, table)), report_facts.differences((paper, table), cells, runs)),
        )
        for paper, table in beside_paper.sources(cells)
    ]
    ours = report_page.Section("by-task", "By task", source, tuple(beside_paper.alone(cells)))
    drawn = _drawn(runs)
    name = (lambda cell: _named(cell.reproduces)) if len(drawn) > 1 else (lambda cell: cell.label)
    agreement = tuple(figures.measured_and_expected(comparisons, name))
    return [
        *(beside or [ours]),
        *drawn,
        report_page.Section("expected", "Measured and expected", source, (grids.expected(comparisons),), agreement),
        report_page.Section("overall", "All tasks together", source, (grids.overall(runs),)),
        report_page.Section("cells", "All cells", source, (grids.results(cells),)),
        report_page.Section("details", "Acceptance and latency", source, (grids.details(cells),)),
        report_page.Section("runs", "Runs", (), (report_facts.runs_grid(runs),)),
    ]


def _drawn(runs: Sequence[reported.Run]) -> list[report_page.Section]:
    """The figures: of all runs side by side; where they are for several published tables, of each table's."""
    tables = list(dict.fromkeys(run.reproduces for run in runs))
    if len(tables) == 1:
        return [report_page.Section("figures", "Figures", pictures=tuple(figures.draw(reported.cells(runs))))]
    found = []
    for table in tables:
        own = [run for run in runs if run.reproduces == table]
        prefix = "".join(f"{part}-" for part in table or ())
        pictures = tuple(figures.draw(reported.cells(own), prefix))
        title = f"Figures, {_named(table)}"
        found.append(report_page.Section(f"{prefix}figures", title, (report_facts.provenance(own),), pictures=pictures))
    return found


def _named(table: tuple[str, str] | None) -> str:
    return ", ".join(table) if table else "no paper's"


def _work(argv: Sequence[str] | None) -> dict[str, Any]:
    parser = cli.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run folder of experiments.benchmark or .sweep")
    parser.add_argument("--out", metavar="FOLDER", help="where to; default: the first RUN")
    arguments = parser.parse_args(argv)
    return main(arguments.runs, arguments.out)


def run(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    return cli.guarded(lambda: _work(argv))


if __name__ == "__main__":
    sys.exit(run())
