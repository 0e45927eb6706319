"""One short table a paper, ours / theirs in each cell, with what made our numbers: `papers.md`, ready for a README.

The report's own tables (`beside_paper`) have intervals, differences and everything that differs from the paper; these
are to be read at a glance. All tables of a paper that the runs have share one, a row per table, method and temperature.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from experiments import beside_paper, grids, papers, report_facts, reported, tables

FILE = "papers.md"


def text(runs: Sequence[reported.Run], cells: Sequence[reported.Cell]) -> str:
    """Markdown, a section per paper; empty if no cell has a published number.

    Args:
      runs: all.
      cells: of the runs.
    """
    sources = beside_paper.sources(cells)
    names = dict.fromkeys(paper for paper, _ in sources)
    parts = [_section(name, [source for source in sources if source[0] == name], runs, cells) for name in names]
    return "\n\n".join(parts) + "\n" if parts else ""


def _section(
    paper: str,
    sources: Iterable[beside_paper.Source],
    runs: Sequence[reported.Run],
    cells: Sequence[reported.Cell],
) -> str:
    found = [(source, block) for source in sources for block in beside_paper.blocks(cells, source)]
    columns = _in_order({column: None for _, block in found for column in block.columns})
    quantities = dict.fromkeys(quantity for _, quantity in columns)
    shared = next(iter(quantities)) if len(quantities) == 1 else None  # then the header need not repeat it
    headers = ["table", "method", "T", *(task if shared else f"{task}, {quantity}" for task, quantity in columns)]
    rows = []
    for (_, table), block in found:
        for line in block.lines:
            entries = [line.entries.get(column) if column in block.columns else None for column in columns]
            if any(entry is not None and entry.theirs is not None for entry in entries):
                rows.append([table, line.label, block.name.removeprefix("T = "), *map(_cell, entries)])
    note = f"{shared or 'Each cell'}: ours / theirs. {_overall_note(columns)}".rstrip()
    made = "\n".join(filter(None, (_made_by(run, cells, paper) for run in runs)))
    table = "\n".join(tables.markdown(headers, rows))
    return "\n\n".join([f"**{report_facts.citation(paper)}**", table, note, made])


def _in_order(columns: Iterable[beside_paper.Column]) -> list[beside_paper.Column]:
    """What is over all tasks comes last."""
    return sorted(columns, key=lambda column: column[0] == papers.OVERALL)


def _cell(entry: beside_paper.Entry | None) -> str:
    if entry is None or entry == beside_paper.NOTHING:
        return "-"
    return f"{grids.number(entry.ours)} / {grids.number(entry.theirs)}"


def _overall_note(columns: Iterable[beside_paper.Column]) -> str:
    over = any(task == papers.OVERALL for task, _ in columns)
    return "overall: ours over the tasks shown, theirs over all of the paper's." if over else ""


def _made_by(run: reported.Run, cells: Sequence[reported.Cell], paper: str) -> str:
    """The line of one run; empty if it has no number of the paper."""
    own = [cell for cell in cells if cell.record in run.records]
    whose = [source for source in beside_paper.sources(own) if source[0] == paper]
    if not whose:
        return ""
    listed = lambda values: ", ".join(dict.fromkeys(values))
    target = listed(cell.record.target.rpartition("/")[2] for cell in own)
    theirs = f" for {run.paper.target}" if run.paper is not None and run.paper.target else ""
    where = listed(f"{cell.record.device}, {cell.record.dtype}, batch {cell.record.batch}" for cell in own)
    return (
        f"* {listed(table for _, table in whose)}: `{report_facts.command(run)}` at commit {run.commit or 'unknown'}; "
        f"{target}{theirs}; {where}; {report_facts.data(run)}"
    )
