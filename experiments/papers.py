"""Which published number stands beside a cell: a config says which table it reproduces and which rows are whose.

    paper:
      name: eagle2_2024
      table: table1
      target: Vicuna 7B
      tasks: {chat: MT-bench, code: HumanEval}
      rows:
        eagle 2: [{row: {method: EAGLE-2}}]

A cell's row is the one where the columns of `row` have those values and where `target`, `task`, `temperature` and
`batch`, if the table has such columns, say the same as the cell. A cell whose task is not listed, or whose temperature
the table does not have, has no published number. The task `overall` stands for all tasks together: what a table prints
as their mean (`published.Table.overall` says how it is made).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from experiments import published, records
from jspec import config

QUANTITIES = ("speedup", "tau", "alpha")
OVERALL = "overall"


@dataclasses.dataclass(frozen=True)
class Row:
    """Where a method's numbers stand. `{task}` in a column or a value is the paper's name of the cell's task, `{batch}`
    the batch.

    row:         column -> value.
    table:       another one than the config's.
    task:        of ours that it is for; None means all.
    temperature: of the cells it is for, where the table has no such column; None means all.
    speedup, tau, alpha: their columns; None means those of that name, "" that there are none.
    over:        the row by whose value the speedup is divided, in a table of tokens per second.
    """

    row: dict[str, str | int | float | bool] = dataclasses.field(default_factory=dict)
    table: str | None = None
    task: str | None = None
    temperature: float | None = None
    speedup: str | None = None
    tau: str | None = None
    alpha: str | None = None
    over: dict[str, str | int | float | bool] | None = None


@dataclasses.dataclass(frozen=True)
class PaperSettings:
    """The table that a config reproduces.

    name:   of the paper (`experiments.published`).
    table:  its id.
    target: what the table calls the target.
    tasks:  our tasks -> what the table calls them.
    rows:   our methods -> where their numbers stand; several rows complete one another.
    """

    name: str
    table: str
    target: str | None = None
    tasks: dict[str, str] = dataclasses.field(default_factory=dict)
    rows: dict[str, tuple[Row, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        table = published.load(self.name).table(self.table)
        if OVERALL in self.tasks and table.overall is None:
            raise ValueError(f"{self.name}, {self.table}: it does not say how figures over all tasks are made")
        for column, values in (("target", [self.target] if self.target else []), ("task", self.tasks.values())):
            known = {row[column] for row in table.rows} if column in table.columns else set(values)
            for value in set(values) - known:
                raise ValueError(f"{self.name}, {self.table}: no {column} {value!r}; {config.nearest(value, known)}")
        for method, rows in self.rows.items():
            for row in rows:
                _check(self, row, f"rows of {method!r}: {self.name}, {row.table or self.table}")


def find(
    paper: PaperSettings | None, method: str, *, task: str, temperature: float, batch: int
) -> records.Published | None:
    """The published number of a cell, or None if there is none.

    Args:
      paper: of the config.
      method, task, temperature, batch: of the cell.
    """
    if paper is None or task not in paper.tasks:
        return None
    cell = {"target": paper.target, "task": paper.tasks[task], "temperature": temperature, "batch": batch}
    values: dict[str, float] = {}
    others: dict[str, str] = {}
    texts = []
    for row in paper.rows.get(method, ()):
        if row.temperature not in (None, temperature) or row.task not in (None, task):
            continue
        table = published.load(paper.name).table(row.table or paper.table)
        found = [candidate for candidate in _candidates(table, row.row, cell) if _same(candidate, cell)]
        if not found:
            continue
        columns = _columns(row, cell)
        given = {name: _number(found[0].get(column)) for name, column in columns.items()}
        if row.over is not None and given["speedup"] is not None:
            (base,) = (other for other in _candidates(table, row.over, cell) if _same(other, cell))
            given["speedup"] /= base[columns["speedup"]]
        given = {name: value for name, value in given.items() if value is not None and name not in values}
        values |= given
        others |= dict.fromkeys(given if table.id != paper.table else (), table.id)
        text = ", ".join(f"{column}={found[0][column]}" for column in _telling(table, row, cell))
        texts.append(text if table.id == paper.table else f"{table.id}: {text}")
    if not values:
        return None
    return records.Published(paper.name, paper.table, "; ".join(dict.fromkeys(texts)), **values, others=others)


def _fill(text: Any, cell: Mapping[str, Any]) -> Any:
    try:
        return text.format(task=cell["task"], batch=cell["batch"]) if isinstance(text, str) else text
    except (LookupError, AttributeError, ValueError) as error:
        raise ValueError(f"{text!r}: only {{task}} and {{batch}} can be filled in") from error


def _columns(row: Row, cell: Mapping[str, Any]) -> dict[str, str]:
    named = {name: getattr(row, name) for name in QUANTITIES}
    return {name: _fill(name if column is None else column, cell) for name, column in named.items()}


def _telling(table: published.Table, row: Row, cell: Mapping[str, Any]) -> list[str]:
    """Columns that tell the row from the others."""
    return [column for column in table.columns if column in row.row or (column in cell and cell[column] is not None)]


def _candidates(table: published.Table, wanted: Mapping[str, Any], cell: Mapping[str, Any]) -> list[Mapping]:
    """Rows of the table that are the method's, whatever the cell's temperature and batch."""
    wanted = {column: _fill(value, cell) for column, value in wanted.items()}
    named = {column: cell[column] for column in ("target", "task") if column in table.columns and cell[column]}
    return [found for found in table.rows if all(found[c] == v for c, v in ({**named, **wanted}).items())]


def _same(found: Mapping[str, Any], cell: Mapping[str, Any]) -> bool:
    return all(found[column] == cell[column] for column in ("temperature", "batch") if column in found)


def _number(value: Any) -> float | None:
    ours = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if ours else None


def _check(paper: PaperSettings, row: Row, where: str) -> None:
    """Refuse a row that no cell could ever find.

    Raises:
      ValueError: a column is not the table's, or no row, or several rows for one cell, have those values.
    """
    table = published.load(paper.name).table(row.table or paper.table)
    found = 0
    if row.task is not None and row.task not in paper.tasks:
        raise ValueError(f"{where}: no task {row.task!r}; {config.nearest(row.task, paper.tasks)}")
    tasks = paper.tasks.values() if row.task is None else [paper.tasks[row.task]]
    for task in tasks or [""]:
        cell = {"target": paper.target, "task": task, "temperature": None, "batch": 1}
        columns = [_fill(column, cell) for column in (row.speedup, row.tau, row.alpha) if column]
        for column in (*row.row, *(row.over or ()), *columns):
            if column not in table.columns:
                raise ValueError(f"{where}: no column {column!r}; {config.nearest(column, table.columns)}")
        for wanted in (row.row, *([row.over] if row.over else [])):
            candidates = _candidates(table, wanted, cell)
            found += len(candidates)
            places = [tuple(candidate.get(column) for column in ("temperature", "batch")) for candidate in candidates]
            if len(set(places)) < len(places):
                raise ValueError(f"{where}: several rows of task {task!r} fit {wanted}; name more columns")
    if not found:
        raise ValueError(f"{where}: no row has {row.row}")
