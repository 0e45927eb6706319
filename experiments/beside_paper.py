"""Our figures laid out as a paper's table: a block per temperature, columns by task and quantity, and for every method
three lines: ours, theirs, the difference. Without published numbers, the same layout with our lines alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from experiments import grids, reported

Source = tuple[str, str]  # paper and table

_QUANTITIES = ("speedup", "tau", "alpha")


def sources(cells: Sequence[reported.Cell]) -> list[Source]:
    """The published tables that cells have numbers from."""
    return list(dict.fromkeys(source(cell) for cell in cells if cell.record.published is not None))


def source(cell: reported.Cell) -> Source | None:
    """The table that a cell has a published number from."""
    published = cell.record.published
    return None if published is None else (published.paper, published.table)


def compared(cells: Sequence[reported.Cell], whose: Source) -> list[grids.Grid]:
    """One published table, a grid per temperature."""
    own = [cell for cell in cells if source(cell) == whose]
    return [_compared(f"{whose[0]}, {whose[1]}, {name}", members) for name, members in _blocks(own)]


def alone(cells: Sequence[reported.Cell]) -> list[grids.Grid]:
    """Our speedup and tau in the same layout, a grid per temperature."""
    blocks = _blocks([cell for cell in cells if not cell.is_baseline])
    return [_alone(f"Speedup and tau by task, {name}", members) for name, members in blocks]


def _blocks(cells: Sequence[reported.Cell]) -> list[tuple[str, list[reported.Cell]]]:
    groups = list(dict.fromkeys(cell.group for cell in cells))
    return [(reported.group_name(group, groups), [cell for cell in cells if cell.group == group]) for group in groups]


def _compared(title: str, cells: Sequence[reported.Cell]) -> grids.Grid:
    tasks = list(dict.fromkeys(cell.record.task for cell in cells))
    quantities = [name for name in _QUANTITIES if any(_theirs(cell, name) is not None for cell in cells)]
    rows = []
    for label in dict.fromkeys(cell.label for cell in cells):
        by_task = {cell.record.task: cell for cell in cells if cell.label == label}
        row = ", ".join(_shared(by_task.values()))
        places = [(by_task.get(task), name) for task in tasks for name in quantities]
        for head, line, text in (
            ((label, row), "ours", _ours_text),
            (("", ""), "theirs", _theirs_text),
            (("", ""), "difference", _difference_text),
        ):
            rows.append((*head, line, *(text(*place) if place[0] else "-" for place in places)))
    names = [_task_name(task, [cell for cell in cells if cell.record.task == task]) for task in tasks]
    headers = ("method", "row of the paper", "", *(f"{task}: {name}" for task in names for name in quantities))
    return grids.Grid(title, headers, tuple(rows), (grids.TAU,), words=3)


def _shared(cells: Iterable[reported.Cell]) -> list[str]:
    """What the published rows of these cells have in common: `column=value`, each."""
    first, *others = [cell.record.published.row.split(", ") for cell in cells]
    return [part for part in first if all(part in other for other in others)]


def _task_name(task: str, cells: Sequence[reported.Cell]) -> str:
    """Our name of a task, and the paper's behind it where its rows have one."""
    theirs = [part.removeprefix("task=") for part in _shared(cells) if part.startswith("task=")]
    return f"{task} ({theirs[0]})" if theirs and theirs[0] != task else task


def _alone(title: str, cells: Sequence[reported.Cell]) -> grids.Grid:
    tasks = list(dict.fromkeys(cell.record.task for cell in cells))
    rows = []
    for label in dict.fromkeys(cell.label for cell in cells):
        by_task = {cell.record.task: cell for cell in cells if cell.label == label}
        places = [(by_task.get(task), name) for task in tasks for name in ("speedup", "tau")]
        rows.append((label, *(_ours_text(*place) if place[0] else "-" for place in places)))
    headers = ("method", *(f"{task}: {name}" for task in tasks for name in ("speedup", "tau")))
    return grids.Grid(title, headers, tuple(rows), (grids.TAU,))


def _theirs(cell: reported.Cell, name: str) -> float | None:
    return getattr(cell.record.published, name)


def _ours_text(cell: reported.Cell, name: str) -> str:
    return grids.with_interval(getattr(cell.record, name), getattr(cell.record, f"{name}_ci"))


def _theirs_text(cell: reported.Cell, name: str) -> str:
    return grids.number(_theirs(cell, name))


def _difference_text(cell: reported.Cell, name: str) -> str:
    ours, theirs = getattr(cell.record, name), _theirs(cell, name)
    return "-" if None in (ours, theirs) else f"{ours - theirs:+.2f}"
