"""Printed numbers recomputed from other printed numbers, with their rounding taken seriously.

A printed 0.68 stands for anything between 0.675 and 0.685. From inputs as printed one value follows, and from all that
they may stand for an interval. The value either rounds to the printed digits (`equal`), or the interval holds numbers
that do (`inside`), or the table contradicts the relation however its inputs were rounded.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments import published

_SLACK = 1e-9  # binary fractions of decimal numbers


@dataclasses.dataclass(frozen=True)
class Printed:
    """A number as a table prints it.

    value:    as printed.
    decimals: digits behind the point; None for what is not rounded, such as a draft length.
    """

    value: float
    decimals: int | None = None

    def __str__(self) -> str:
        return f"{self.value:g}" if self.decimals is None else f"{self.value:.{self.decimals}f}"

    @property
    def half(self) -> float:
        """Half a unit of the last digit."""
        return 0.0 if self.decimals is None else 0.5 * 10.0**-self.decimals

    @property
    def ends(self) -> tuple[float, ...]:
        """Of what it may stand for."""
        return (self.value - self.half, self.value + self.half) if self.half else (self.value,)


@dataclasses.dataclass(frozen=True)
class Value:
    """A number that follows from printed ones.

    row:     in the table.
    column:  of the printed number, or the name of a quantity that the table does not print.
    value:   from the inputs as printed.
    low, high: from all that the inputs may stand for.
    printed: what it is compared with, or None.
    """

    row: int
    column: str
    value: float
    low: float
    high: float
    printed: Printed | None = None

    @property
    def equal(self) -> bool:
        """Whether it rounds to the printed digits."""
        return abs(self.value - self.printed.value) <= self.printed.half + _SLACK

    @property
    def inside(self) -> bool:
        """Whether inputs that print as printed can give a number that does."""
        reach = self.printed.half + _SLACK
        return self.low <= self.printed.value + reach and self.high >= self.printed.value - reach


def follow(
    row: int, column: str, formula: Callable[..., float], *inputs: Printed, printed: Printed | None = None
) -> Value:
    """Apply a formula to printed inputs.

    Args:
      row, column, printed: of the `Value`.
      formula: takes numbers; monotone in each of them, so that its extremes lie where all inputs are at an end.
      inputs: of the formula, in its order.
    """
    corners = [formula(*corner) for corner in itertools.product(*(number.ends for number in inputs))]
    value = formula(*(number.value for number in inputs))
    return Value(row, column, value, min(value, *corners), max(value, *corners), printed)


class Sheet:
    """A published table whose numbers know how they were rounded.

    A file cannot tell 1.6 from 1.60: a column's numbers count as printed to the digits of its longest one. Columns of
    whole numbers are not rounded.
    """

    def __init__(self, table: published.Table):
        self.title = table.title
        self.rows: Sequence[Mapping[str, Any]] = table.rows

    def number(self, row: int, column: str, decimals: int | None = None) -> Printed:
        """One number.

        Args:
          row, column: where.
          decimals: where a column mixes them; None means those of the column.
        """
        entries = [other.get(column) for other in self.rows]
        lengths = [len(repr(entry).partition(".")[2]) for entry in entries if isinstance(entry, float)]
        return Printed(self.rows[row][column], max(lengths, default=None) if decimals is None else decimals)

    def has(self, row: int, *columns: str) -> bool:
        """Whether the row has a number in all of the columns."""
        return all(isinstance(self.rows[row].get(column), int | float) for column in columns)

    def follows(self, row: int, column: str, formula: Callable[..., float], *inputs: str | Printed) -> Value:
        """The printed number of a column, recomputed from other columns of its row, or from given numbers."""
        return follow(row, column, formula, *self._inputs(row, inputs), printed=self.number(row, column))

    def implies(self, row: int, quantity: str, formula: Callable[..., float], *inputs: str | Printed) -> Value:
        """A quantity that the table does not print."""
        return follow(row, quantity, formula, *self._inputs(row, inputs))

    def where(self, **wanted: Any) -> Iterator[int]:
        """Rows with these entries."""
        return (i for i, row in enumerate(self.rows) if all(row.get(key) == value for key, value in wanted.items()))

    def label(self, row: int) -> str:
        """A row in words: its texts and settings."""
        settings = ("temperature", "gamma", "alpha", "batch")
        entries = self.rows[row]
        words = [entry for entry in entries.values() if isinstance(entry, str)]
        return ", ".join([*words, *(f"{key} {entries[key]}" for key in settings if entries.get(key) is not None)])

    def _inputs(self, row: int, inputs: Iterable[str | Printed]) -> list[Printed]:
        return [entry if isinstance(entry, Printed) else self.number(row, entry) for entry in inputs]


@dataclasses.dataclass(frozen=True)
class Report:
    """What could be recomputed of one table.

    paper, table, title: which.
    relation: by what; None where nothing could be.
    reason:   why the rest could not.
    labels:   of its rows.
    values:   compared with print.
    implied:  that it does not print.
    """

    paper: str
    table: str
    title: str
    relation: str | None
    reason: str | None
    labels: tuple[str, ...]
    values: tuple[Value, ...]
    implied: tuple[Value, ...]

    def rows(self, test: Callable[[Value], bool]) -> int:
        """Recomputed rows whose every value passes."""
        by_row: dict[int, list[bool]] = {}
        for value in self.values:
            by_row.setdefault(value.row, []).append(test(value))
        return sum(map(all, by_row.values()))

    def summary(self) -> dict[str, Any]:
        """Plain data: rows by how they came out, each value that is not equal, and the range of what is implied."""
        recomputed = self.rows(lambda value: True)
        inside = self.rows(lambda value: value.inside)
        quantities = {value.column: [] for value in self.implied}
        for value in self.implied:
            quantities[value.column].append(value.value)
        return {
            "paper": self.paper,
            "table": self.table,
            "title": self.title,
            "relation": self.relation,
            "rows": len(self.labels),
            "recomputed": recomputed,
            "equal": self.rows(lambda value: value.equal),
            "within_rounding": inside,
            "outside": recomputed - inside,
            "not_recoverable": len(self.labels) - recomputed,
            "reason": self.reason if recomputed < len(self.labels) else None,
            "not_equal": [self.describe(value) for value in self.values if not value.equal],
            "implied": {
                name: {"rows": len(numbers), "least": min(numbers), "median": statistics.median(numbers)}
                | {"most": max(numbers)}
                for name, numbers in quantities.items()
            },
        }

    def describe(self, value: Value) -> dict[str, Any]:
        """One value as plain data."""
        described = {
            "row": self.labels[value.row],
            "column": value.column,
            "value": value.value,
            "low": value.low,
            "high": value.high,
        }
        if value.printed is None:
            return described
        return described | {"printed": value.printed.value, "equal": value.equal, "inside": value.inside}
