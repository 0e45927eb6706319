"""The papers' numbers, as printed, with where they were read."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from jspec import extras

FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Table:
    """One table: title, where its numbers were read, and its rows as printed."""

    title: str
    provenance: str
    rows: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Paper:
    """One paper: whom to cite, and its tables by id."""

    citation: dict[str, Any]
    tables: dict[str, Table]


def load(name: str) -> Paper:
    """A paper by the name of its file.

    Raises:
      ValueError: there is none of that name.
    """
    path = FOLDER / f"{name}.yaml"
    if not path.exists():
        raise ValueError(f"paper {name!r} is not published here")
    content = extras.require("yaml", "experiments").safe_load(path.read_text(encoding="utf-8"))
    return Paper(content["citation"], {key: Table(**table) for key, table in content["tables"].items()})
