"""What a sweep found, as a table and a picture."""

from __future__ import annotations

import hashlib
import io
import json
import pathlib
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.figure

from experiments import run_folder, runner
from jspec import files

SWEEP = "sweep"  # key under which a record tells its point: settings and their values

_LONGEST_NAME = 180  # of a folder, in characters; file systems end at 255 bytes

_QUANTITIES = {"speedup": "speedup over autoregressive", "tau": "tokens per target call (tau)"}


def without_point(record: Mapping[str, Any]) -> dict[str, Any]:
    """A sweep's record as a benchmark writes it."""
    return {key: value for key, value in record.items() if key != SWEEP}


def point_folder(folder: pathlib.Path, point: Mapping[str, Any]) -> pathlib.Path:
    """Where a sweep keeps what its point leaves beside the records, such as traces.

    Args:
      folder: of the sweep.
      point: settings and their values.
    """
    text = lambda value: value if isinstance(value, str) else json.dumps(value)
    name = ",".join(f"{key}={text(value)}" for key, value in point.items())
    short = re.sub(r"[^\w.,=-]+", "_", name)
    if len(short) > _LONGEST_NAME:
        short = f"{short[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return folder / "points" / short


def write(folder: pathlib.Path, axes: Sequence[str], results: Sequence[Mapping[str, Any]]) -> None:
    """`table.md` and `sweep.png`.

    Args:
      folder: of the run.
      axes: settings that were varied.
      results: records with the point under `sweep`.
    """
    run_folder.write_text_atomic(folder / "table.md", table(axes, results))
    draw(folder / "sweep.png", axes, results)


def table(axes: Sequence[str], results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row per record, the baseline's left out."""
    headers = [
        *axes,
        "task",
        "T",
        "method",
        "tau",
        "alpha",
        "speedup",
        "expected",
        "published speedup",
        "published tau",
    ]
    rows = []
    for record in _own(results):
        published = record["published"] or {}
        speedup = _number(record["speedup"])
        if record["speedup_ci"] is not None:
            speedup += f" [{record['speedup_ci'][0]:.2f}, {record['speedup_ci'][1]:.2f}]"
        rows.append(
            [
                *(_text(record[SWEEP][axis]) for axis in axes),
                record["task"],
                f"{record['temperature']:g}",
                record["method"] + ("" if record["lossless"] else " (lossy)"),
                _number(record["tau"]),
                _number(record["alpha"]),
                speedup,
                _number(record["expected_speedup"]),
                _number(published.get("speedup")),
                _number(published.get("tau")),
            ]
        )
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def draw(path: pathlib.Path, axes: Sequence[str], results: Sequence[Mapping[str, Any]]) -> None:
    """Curves over one axis, or heat maps over the first two, means over tasks; one for each of what else differs.

    Args:
      path: of the PNG.
      axes, results: as for `write`.
    """
    own = _own(results)
    if not own:
        return
    figure = _curves(axes[0], own) if len(axes) == 1 else _heat_maps(axes, own)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=130)
    files.replace(path, lambda file: file.write(content.getvalue()))


def _own(results: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [record for record in results if record["method"] != runner.BASELINE]


def _curves(axis: str, own: Sequence[Mapping[str, Any]]) -> matplotlib.figure.Figure:
    values = _values(axis, own)
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    places = values if numeric else list(range(len(values)))
    figure = matplotlib.figure.Figure(figsize=(11, 4), layout="constrained")
    lines = list(dict.fromkeys(_group(record) for record in own))
    for axes, (quantity, label) in zip(figure.subplots(1, 2), _QUANTITIES.items()):
        for index, group in enumerate(lines):
            found = {value: _mean(quantity, own, group, {axis: value}) for value in values}
            there = [(place, found[value]) for place, value in zip(places, values) if found[value] is not None]
            if there:
                color = f"C{index % 10}"
                axes.plot(*zip(*there), "o-", color=color, markersize=4, label=_title(group))
        if quantity == "speedup":
            axes.axhline(1, color="0.6", linewidth=0.8, linestyle="--")
            axes.legend(frameon=False, fontsize="small")
        axes.set(xlabel=axis, ylabel=label)
        axes.set_xticks(places, [_text(value) for value in values])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.suptitle(_means(own), fontsize="small")
    return figure


def _heat_maps(axes: Sequence[str], own: Sequence[Mapping[str, Any]]) -> matplotlib.figure.Figure:
    down, across, *rest = axes
    rows, columns = _values(down, own), _values(across, own)
    panels = _unique((_group(record), [record[SWEEP][axis] for axis in rest]) for record in own)
    size = 1.2 + 0.8 * len(columns), 1.2 + 0.6 * len(rows)
    figure = matplotlib.figure.Figure(
        figsize=(max(5.0, size[0] * len(panels)), max(5.0, size[1] * len(_QUANTITIES))), layout="constrained"
    )
    grid = figure.subplots(len(_QUANTITIES), len(panels), squeeze=False)
    for line, (quantity, label) in zip(grid, _QUANTITIES.items()):
        maps = []
        for group, fixed in panels:
            at = lambda row, column: {down: row, across: column, **dict(zip(rest, fixed))}
            maps.append([[_mean(quantity, own, group, at(row, column)) for column in columns] for row in rows])
        known = [value for panel in maps for row in panel for value in row if value is not None]
        low, high = (min(known), max(known)) if known else (0.0, 1.0)
        for drawn, (group, fixed), panel in zip(line, panels, maps):
            numbers = [[float("nan") if value is None else value for value in row] for row in panel]
            image = drawn.imshow(numbers, cmap="viridis", vmin=low, vmax=high, aspect="auto", origin="lower")
            for y, row in enumerate(panel):
                for x, value in enumerate(row):
                    dark = value is not None and value < (low + high) / 2
                    drawn.text(
                        x, y, _number(value), ha="center", va="center", fontsize=8, color="white" if dark else "black"
                    )
            drawn.set_xticks(range(len(columns)), [_text(value) for value in columns])
            drawn.set_yticks(range(len(rows)), [_text(value) for value in rows])
            fixed_text = "".join(f"\n{axis} = {_text(value)}" for axis, value in zip(rest, fixed))
            drawn.set(xlabel=across, ylabel=down)
            drawn.set_title(_title(group) + fixed_text, fontsize="small")
        figure.colorbar(image, ax=list(line), label=label)
    figure.suptitle(_means(own), fontsize="small")
    return figure


def _group(record: Mapping[str, Any]) -> tuple[str, float]:
    return record["method"], record["temperature"]


def _title(group: tuple[str, float]) -> str:
    return f"{group[0]}, T = {group[1]:g}"


def _means(own: Sequence[Mapping[str, Any]]) -> str:
    tasks = list(dict.fromkeys(record["task"] for record in own))
    return tasks[0] if len(tasks) == 1 else f"means over {', '.join(tasks)}"


def _values(axis: str, own: Sequence[Mapping[str, Any]]) -> list[Any]:
    """In the order they were given, each once."""
    return _unique(record[SWEEP][axis] for record in own)


def _unique(items: Iterable[Any]) -> list[Any]:
    """Each once; lists may be among them, so that no set will do."""
    found: list[Any] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found


def _mean(quantity: str, own: Sequence[Mapping[str, Any]], group: tuple, at: Mapping[str, Any]) -> float | None:
    """Over tasks; None where nothing was measured (yet)."""
    there = lambda record: all(record[SWEEP][axis] == value for axis, value in at.items())
    values = [record[quantity] for record in own if _group(record) == group and there(record)]
    values = [value for value in values if value is not None]
    return statistics.fmean(values) if values else None


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
