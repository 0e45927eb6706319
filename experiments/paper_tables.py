"""One short table a paper, ours / theirs in each cell, with what made our numbers: `papers.md`, ready for a README.

The report's own tables (`beside_paper`) have intervals, differences and everything that differs from the paper; these
are to be read at a glance. All tables of a paper that the runs have share one: a column per task, a row per run, table,
method, temperature and quantity.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from experiments import beside_paper, grids, papers, report_facts, reported, tables

FILE = "papers.md"


def text(runs: Sequence[reported.Run]) -> str:
    """Markdown, a section per paper; empty if no cell has a published number.

    Args:
      runs: to be told.
    """
    # Run by run: a method that several have needs no other name, since its row says which table and target it is for.
    found = [(run, reported.cells([run])) for run in runs]
    names = dict.fromkeys(paper for _, cells in found for paper, _ in beside_paper.sources(cells))
    parts = [_section(name, found) for name in names]
    return "\n\n".join(parts) + "\n" if parts else ""


def _section(paper: str, found: Iterable[tuple[reported.Run, Sequence[reported.Cell]]]) -> str:
    blocks, made = [], []
    for run, cells in found:
        sources = [source for source in beside_paper.sources(cells) if source[0] == paper]
        for source in sources:
            found_blocks = beside_paper.blocks(cells, source)
            blocks += [(run.paper and run.paper.target, block) for block in found_blocks]
            made.append(_made_by(run, cells, _printed_in(found_blocks)))
    columns = [column for _, block in blocks for column in block.columns]
    tasks = sorted(dict.fromkeys(task for task, _ in columns), key=lambda task: task == papers.OVERALL)  # which is last
    quantities = [quantity for quantity in papers.QUANTITIES if any(quantity == of for _, of in columns)]
    rows = []
    for target, block in blocks:
        for line in block.lines:
            for quantity in quantities:
                entries = [line.entries.get((task, quantity), beside_paper.NOTHING) for task in tasks]
                printed_in = dict.fromkeys(entry.table for entry in entries if entry.theirs is not None)
                if printed_in:
                    name = ", ".join(filter(None, (*printed_in, target)))
                    rows.append([name, line.label, block.name.removeprefix("T = "), quantity, *map(_cell, entries)])
    note = "Each cell: ours / theirs."
    if papers.OVERALL in tasks:
        note += " overall: ours over the tasks shown, theirs over all of the paper's."
    table = "\n".join(tables.markdown(["table", "method", "T", "", *tasks], rows))
    return "\n\n".join([f"**{report_facts.citation(paper)}**", table, note, "\n".join(made)])


def _printed_in(blocks: Iterable[beside_paper.Block]) -> list[str]:
    """The tables that print what stands beside ours."""
    entries = [entry for block in blocks for line in block.lines for entry in line.entries.values()]
    return list(dict.fromkeys(entry.table for entry in entries if entry.theirs is not None))


def _cell(entry: beside_paper.Entry) -> str:
    return "-" if entry == beside_paper.NOTHING else f"{grids.number(entry.ours)} / {grids.number(entry.theirs)}"


def _made_by(run: reported.Run, cells: Sequence[reported.Cell], names: Iterable[str]) -> str:
    """The line of one run, whose numbers stand in the tables of these names."""
    listed = lambda values: ", ".join(dict.fromkeys(values))
    target = listed(cell.record.target.rpartition("/")[2] for cell in cells)
    theirs = f" for {run.paper.target}" if run.paper is not None and run.paper.target else ""
    where = listed(f"{cell.record.device}, {cell.record.dtype}, batch {cell.record.batch}" for cell in cells)
    return (
        f"* {listed(names)}: `{report_facts.command(run)}` at commit {run.commit or 'unknown'}; "
        f"{target}{theirs}; {where}; {report_facts.data(run)}"
    )
