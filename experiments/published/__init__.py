"""The numbers that papers report, one YAML file a paper, with citation and provenance.

    paper = published.load("eagle1_2024")
    paper.table("table1").rows[0]["tau"]

A file holds `citation`, facts (`hardware`, `setting`, notes) and `tables`: by id, a `title`, a `provenance` whose first
word says how far to trust it (`LEVELS`), and `rows`, mappings with the same columns in every row of a table. Numbers
are as the paper prints them; null where it prints none. A table that prints figures over all its tasks says in
`overall` how it comes by them: one of `RULES` for each quantity, and how that is known (`source`).
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from jspec import config, extras

_FOLDER = pathlib.Path(__file__).parent

# verified: read in the source itself. secondary: in notes that transcribe it. recalled: from memory, not checked.
LEVELS = ("verified", "secondary", "recalled")

# How a figure over all tasks follows from theirs.
RULES = {
    "tasks": "the mean of the tasks' figures",
    "rates": "tokens per second averaged over tasks, over the same of the baseline",
    "pooled": "of all tasks' tokens together",
}


@dataclasses.dataclass(frozen=True)
class Overall:
    """How a table's figures over all tasks are made.

    rules:  quantity (speedup, tau, alpha) -> one of `RULES`.
    source: how that is known.
    """

    rules: Mapping[str, str]
    source: str


@dataclasses.dataclass(frozen=True)
class Table:
    """One table, or the labels of a figure.

    id:         within its paper.
    title:      what it shows.
    provenance: one of `LEVELS`, a colon, and from where.
    columns:    of every row, in order.
    rows:       column -> value.
    overall:    of its figures over all tasks; None where it has none.
    """

    id: str
    title: str
    provenance: str
    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    overall: Overall | None = None

    @property
    def level(self) -> str:
        """How far to trust it: one of `LEVELS`."""
        return self.provenance.partition(":")[0]


@dataclasses.dataclass(frozen=True)
class Paper:
    """One paper.

    name:     of its file.
    citation: title, authors, year, venue, arxiv.
    facts:    what the tables were measured on, as the paper says it: `hardware`, `setting`, notes.
    tables:   by id, in the paper's order.
    """

    name: str
    citation: Mapping[str, Any]
    facts: Mapping[str, Any]
    tables: Mapping[str, Table]

    def table(self, id: str) -> Table:
        """The table of that id.

        Raises:
          ValueError: there is none; the message gives the nearest.
        """
        if id not in self.tables:
            raise ValueError(f"{self.name} has no table {id!r}; {config.nearest(id, self.tables)}")
        return self.tables[id]


def names() -> tuple[str, ...]:
    """Of all papers, in alphabetical order."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


@functools.cache
def load(paper: str) -> Paper:
    """One paper.

    Raises:
      ValueError: no such paper (the message gives the nearest), or its file is no paper's.
      ImportError: the `experiments` extra is missing.
    """
    if paper not in names():
        raise ValueError(f"no published numbers of {paper!r}; {config.nearest(paper, names())}")
    return read(_FOLDER / f"{paper}.yaml")


def read(path: pathlib.Path) -> Paper:
    """A paper's file.

    Raises:
      ValueError: not one, naming table and row.
      OSError: it cannot be read.
    """
    yaml = extras.require("yaml", "experiments")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("tables"), dict) or "citation" not in content:
        raise ValueError(f"{path}: expected a mapping with citation and tables")
    tables = {id: _table(id, table, f"{path}: {id}") for id, table in content["tables"].items()}
    facts = {key: value for key, value in content.items() if key not in ("citation", "tables")}
    return Paper(path.stem, content["citation"], facts, tables)


def _table(id: str, content: Any, where: str) -> Table:
    if not isinstance(content, dict) or set(content) - {"overall"} != {"title", "provenance", "rows"}:
        raise ValueError(f"{where}: expected title, provenance and rows, and perhaps overall")
    if not content["rows"]:
        raise ValueError(f"{where}: rows is empty")
    if content["provenance"].partition(":")[0] not in LEVELS:
        raise ValueError(f"{where}: provenance {content['provenance']!r} begins with none of {', '.join(LEVELS)}")
    columns = tuple(content["rows"][0])
    for number, row in enumerate(content["rows"], start=1):
        if tuple(row) != columns:
            raise ValueError(f"{where}: row {number} has the columns {list(row)}; the first has {list(columns)}")
    overall = None if "overall" not in content else _overall(content["overall"], where)
    return Table(id, content["title"], content["provenance"], columns, tuple(content["rows"]), overall)


def _overall(content: Any, where: str) -> Overall:
    rules = dict(content) if isinstance(content, dict) else {}
    source = rules.pop("source", None)
    if source is None or not rules or set(rules) - {"speedup", "tau", "alpha"}:
        raise ValueError(f"{where}: overall: expected a source, and a rule for speedup, tau or alpha")
    for quantity, rule in rules.items():
        known = [name for name in RULES if name != "rates" or quantity == "speedup"]
        if rule not in known:
            raise ValueError(f"{where}: overall: {quantity} has the rule {rule!r}; {config.nearest(rule, known)}")
    return Overall(rules, source)
