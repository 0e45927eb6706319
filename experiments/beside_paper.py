"""Our figures laid out as a paper's table: a block per temperature, columns by task and quantity, and for every method
three lines: ours, theirs, the difference. Without published numbers, the same layout with our lines alone.

Where the paper prints a figure over all its tasks, ours over all of the run's stands beside it, made by the same rule
(`means`). The run may have fewer tasks than the paper: the note below the table names them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from experiments import grids, means, papers, published, reported

Source = tuple[str, str]  # paper and table
Column = tuple[str, str]  # task, or `papers.OVERALL`, and quantity


@dataclasses.dataclass(frozen=True)
class Entry:
    """One figure: ours, its bootstrap interval, theirs, and the table that prints theirs; None where there is none."""

    ours: float | None
    interval: tuple[float, float] | None
    theirs: float | None
    table: str | None = None


NOTHING = Entry(None, None, None)


@dataclasses.dataclass(frozen=True)
class Line:
    """One method.

    label:   of the method.
    row:     what the published rows of its cells have in common.
    entries: by column; a task that has not finished has none.
    """

    label: str
    row: str
    entries: Mapping[Column, Entry]


@dataclasses.dataclass(frozen=True)
class Block:
    """One published table at one temperature, and one of each of `reported.SETTINGS`.

    name:    what tells it from the table's other blocks.
    columns: in order.
    titles:  of tasks, the paper's name behind ours.
    lines:   in order.
    notes:   how figures over all tasks are made.
    """

    name: str
    columns: tuple[Column, ...]
    titles: Mapping[str, str]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


def sources(cells: Sequence[reported.Cell]) -> list[Source]:
    """The published tables that cells have numbers from."""
    return list(dict.fromkeys(found for cell in cells if (found := source(cell)) is not None))


def source(cell: reported.Cell) -> Source | None:
    """The table that a cell, or its method over all tasks, has a published number from."""
    found = cell.record.published or cell.overall
    return None if found is None else (found.paper, found.table)


def compared(cells: Sequence[reported.Cell], whose: Source) -> list[grids.Grid]:
    """One published table, a grid per temperature."""
    return [_compared(f"{whose[0]}, {whose[1]}, {block.name}", block) for block in blocks(cells, whose)]


def alone(cells: Sequence[reported.Cell]) -> list[grids.Grid]:
    """Our speedup and tau in the same layout, a grid per temperature."""
    named = _by_group([cell for cell in cells if not cell.is_baseline])
    return [_alone(f"Speedup and tau by task, {name}", members) for name, members in named]


def blocks(cells: Sequence[reported.Cell], whose: Source) -> list[Block]:
    """One published table, a block per temperature."""
    return [_block(name, members, whose) for name, members in _by_group([c for c in cells if source(c) == whose])]


def _by_group(cells: Sequence[reported.Cell]) -> list[tuple[str, list[reported.Cell]]]:
    groups = list(dict.fromkeys(cell.group for cell in cells))
    return [(reported.group_name(group, groups), [cell for cell in cells if cell.group == group]) for group in groups]


def _block(name: str, cells: Sequence[reported.Cell], whose: Source) -> Block:
    tasks = list(dict.fromkeys(cell.record.task for cell in cells))
    lines = []
    for label in dict.fromkeys(cell.label for cell in cells):
        by_task = {cell.record.task: cell for cell in cells if cell.label == label}
        entries = {
            (task, quantity): _entry(cell, quantity) for task, cell in by_task.items() for quantity in papers.QUANTITIES
        }
        if len(by_task) == len(tasks):
            entries |= _over_tasks(list(by_task.values()), whose)
        row = ", ".join(_shared(cell.record.published or cell.overall for cell in by_task.values()))
        lines.append(Line(label, row, entries))
    known = lambda column: any(line.entries.get(column, NOTHING).theirs is not None for line in lines)
    columns = [(task, quantity) for task in tasks for quantity in papers.QUANTITIES if known((task, quantity))]
    # Over one task it says nothing new, unless that is all that the paper gives.
    over = [(papers.OVERALL, quantity) for quantity in papers.QUANTITIES if known((papers.OVERALL, quantity))]
    over = [column for column in over if len(tasks) > 1 or (tasks[0], column[1]) not in columns]
    titles = {task: _task_name(task, [cell for cell in cells if cell.record.task == task]) for task in tasks}
    notes = [_rule_note(over, tasks, whose)] if over else []
    return Block(name, (*columns, *over), titles, tuple(lines), tuple(notes))


def _entry(cell: reported.Cell, quantity: str) -> Entry:
    found = cell.record.published
    theirs = None if found is None else getattr(found, quantity)
    table = None if theirs is None else found.source(quantity)
    return Entry(getattr(cell.record, quantity), getattr(cell.record, f"{quantity}_ci"), theirs, table)


def _over_tasks(cells: Sequence[reported.Cell], whose: Source) -> dict[Column, Entry]:
    """One method's figures over all its tasks."""
    found = cells[0].overall
    if found is None:
        return {}
    rules = published.load(whose[0]).table(whose[1]).overall.rules
    members = [cell.record for cell in cells]
    baselines = [cell.baseline for cell in cells if cell.baseline is not None]
    entries = {}
    for quantity, rule in rules.items():
        ours = means.over_tasks(rule, quantity, members, baselines) if len(baselines) == len(members) else None
        entries[papers.OVERALL, quantity] = Entry(ours, None, getattr(found, quantity), found.source(quantity))
    return entries


def _rule_note(columns: Sequence[Column], tasks: Sequence[str], whose: Source) -> str:
    made = published.load(whose[0]).table(whose[1]).overall
    rules = "; ".join(f"{quantity}: {published.RULES[made.rules[quantity]]}" for _, quantity in columns)
    return f"overall: {rules}. Ours over {', '.join(tasks)}; theirs over all tasks of the paper. Why so: {made.source}."


def _compared(title: str, block: Block) -> grids.Grid:
    rows = []
    for line in block.lines:
        found = [line.entries.get(column, NOTHING) for column in block.columns]
        for head, name, text in (
            ((line.label, line.row), "ours", _ours_text),
            (("", ""), "theirs", lambda entry: grids.number(entry.theirs)),
            (("", ""), "difference", _difference_text),
        ):
            rows.append((*head, name, *map(text, found)))
    names = (f"{block.titles.get(task, task)}: {quantity}" for task, quantity in block.columns)
    headers = ("method", "row of the paper", "", *names)
    return grids.Grid(title, headers, tuple(rows), (*block.notes, grids.TAU), words=3)


def _shared(found: Iterable) -> list[str]:
    """What published rows have in common: `column=value`, each."""
    first, *others = [number.row.split(", ") for number in found]
    return [part for part in first if all(part in other for other in others)]


def _task_name(task: str, cells: Sequence[reported.Cell]) -> str:
    """Our name of a task, and the paper's behind it where its rows have one."""
    rows = [cell.record.published for cell in cells if cell.record.published is not None]
    theirs = [part.removeprefix("task=") for part in (_shared(rows) if rows else ()) if part.startswith("task=")]
    return f"{task} ({theirs[0]})" if theirs and theirs[0] != task else task


def _alone(title: str, cells: Sequence[reported.Cell]) -> grids.Grid:
    tasks = list(dict.fromkeys(cell.record.task for cell in cells))
    rows = []
    for label in dict.fromkeys(cell.label for cell in cells):
        by_task = {cell.record.task: cell for cell in cells if cell.label == label}
        places = [(by_task.get(task), name) for task in tasks for name in ("speedup", "tau")]
        rows.append((label, *(_ours_text(_entry(*place)) if place[0] else "-" for place in places)))
    headers = ("method", *(f"{task}: {name}" for task in tasks for name in ("speedup", "tau")))
    return grids.Grid(title, headers, tuple(rows), (grids.TAU,))


def _ours_text(entry: Entry) -> str:
    return grids.with_interval(entry.ours, entry.interval)


def _difference_text(entry: Entry) -> str:
    return "-" if None in (entry.ours, entry.theirs) else f"{entry.ours - entry.theirs:+.2f}"
