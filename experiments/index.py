"""Which tables of which papers are reproduced, by which config: configs/README.md.

    python -m experiments.index

writes it from the configs, the papers' tables and `experiments/index.yaml`, which says why the others are not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from experiments import benchmark, papers, published, run_folder
from jspec import config as config_lib
from jspec import config_files, extras

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
STATUSES = ("run", "planned", "not runnable")
_REASONS = pathlib.Path(__file__).with_suffix(".yaml")

INTRODUCTION = """\
# Configs

Made by `python -m experiments.index`; do not edit.

One file per published table. `python -m experiments.benchmark configs/PAPER/FILE.yaml` runs it on SmolLM2-135M, which
is `scale=smollm2`; `scale=paper` means the paper's models, `scale=shape` random weights in their shapes under the
paper's acceptance, to time a device; `model=NAME` chooses among the paper's targets. `--plan device=NAME` says what a
run would read, hold and take, without weights. `python -m experiments.sweep` runs a grid.

* **run**: gives our numbers beside the paper's on this project's own model.
* **planned**: `--plan` works, or a part is missing that can be had; the models are for machines that have them.
* **not runnable**: cannot be done, and why.

Minutes are those of `scale=smollm2` on 2 cores, measured, with one table run after another, so that some of their
programs were there already, with 45 seconds added and rounded up; *about* is an estimate.

How far a table's numbers can be trusted: *verified* in the source itself, *secondary* from notes that transcribe it,
*recalled* from memory.
"""


class Entry(NamedTuple):
    """One config.

    path:    below `configs/`.
    scales:  scale -> status and the reason if it is not run; those that have numbers of the table.
    models:  the targets it offers.
    minutes: that its header states.
    """

    path: str
    scales: Mapping[str, tuple[str, str]]
    models: tuple[str, ...]
    minutes: str


def text() -> str:
    """The text of configs/README.md.

    Raises:
      ValueError: a table has neither a config nor a reason, or both; a config names no table, or states no time.
    """
    entries = _entries()
    reasons = _reasons()
    lines = [INTRODUCTION]
    for name in published.names():
        paper = published.load(name)
        lines += [f"## {paper.citation['title']}", "", f"{paper.citation['authors']}, {paper.citation['venue']}, "]
        lines[-1] += f"arXiv:{paper.citation['arxiv']} (`experiments/published/{name}.yaml`)"
        lines += ["", "| table | shows | numbers | config | smollm2 | minutes | paper | shape |", "| " + "--- | " * 8]
        lines[-1] = lines[-1].rstrip()
        for id, table in paper.tables.items():
            own, reason = entries.get((name, id), []), reasons.get(name, {}).get(id)
            if bool(own) == (reason is not None):
                both = "both a config and" if own else "neither a config nor"
                raise ValueError(f"{name}, {id}: {both} a reason in {_REASONS.name}")
            head = [id, table.title, table.level]
            if reason is not None:
                lines.append(_row([*head, "-", f"{reason['status']}: {reason['why']}", "-", "-", "-"]))
            for entry in own:
                cells = [_cell(entry.scales.get(scale)) for scale in ("smollm2", "paper", "shape")]
                cells.insert(1, entry.minutes if "smollm2" in entry.scales else "-")
                link = f"[{entry.path}]({entry.path})" + (f": {', '.join(entry.models)}" if entry.models else "")
                lines.append(_row([*head, link, *cells]))
        lines.append("")
    return "\n".join(lines)


def stated_minutes(path: pathlib.Path) -> str:
    """What the line `# Time: ... minutes on 2 cores` of a config's header says, without its words: `about 3`.

    Raises:
      ValueError: there is no such line, or there are several.
    """
    found = re.findall(
        r"^# Time: ((?:about )?\d+) minutes on 2 cores\b", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    if len(found) != 1:
        raise ValueError(f"{path}: {len(found)} lines of its header say `# Time: N minutes on 2 cores`; one is needed")
    return found[0]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cell(found: tuple[str, str] | None) -> str:
    if found is None:
        return "-"
    return found[0] + (f": {found[1]}" if found[1] else "")


def _entries() -> dict[tuple[str, str], list[Entry]]:
    """Configs by paper and table; the tables of single rows count too."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for path in sorted(CONFIGS.glob("*/*.yaml")):
        if path.parent.name not in published.names():
            continue
        name = f"{path.parent.name}/{path.name}"
        offered = config_files.alternatives(path)
        scales, beside = {}, {}
        for scale in offered.get("scale", ()):
            config = config_lib.load(benchmark.Benchmark, path, [f"scale={scale}"])
            if config.paper is None or config.paper.name != path.parent.name:
                raise ValueError(f"{path}: names no table of {path.parent.name}")
            beside[scale] = _beside(config)
            if config.not_runnable is not None:
                scales[scale] = ("planned", f"not runnable, since {config.not_runnable}")
            else:
                scales[scale] = ("planned", "") if scale == "paper" else ("run", "")
        tables = list(dict.fromkeys(table for tables in beside.values() for table in tables))
        if "paper" not in scales:
            scales["paper"], beside["paper"] = ("not runnable", _content()["without_paper_scale"][name]), tables
        for table in tables:
            own = {scale: status for scale, status in scales.items() if table in beside[scale]}
            entry = Entry(name, own, offered.get("model", ()), stated_minutes(path))
            found.setdefault((path.parent.name, table), []).append(entry)
    return found


def _beside(config: benchmark.Benchmark) -> list[str]:
    """The tables that have a number beside a cell of some task, at the config's temperatures and batch."""
    cells = itertools.product((method.name for method in config.methods), config.paper.tasks, config.temperatures)
    numbers = [
        papers.find(config.paper, method, task=task, temperature=temperature, batch=config.batch)
        for method, task, temperature in cells
    ]
    tables = [
        number.source(quantity)
        for number in filter(None, numbers)
        for quantity in papers.QUANTITIES
        if getattr(number, quantity) is not None
    ]
    return list(dict.fromkeys(tables))


def _content() -> dict[str, Any]:
    return extras.require("yaml", "experiments").safe_load(_REASONS.read_text(encoding="utf-8"))


def _reasons() -> dict[str, dict[str, dict[str, str]]]:
    reasons = _content()["tables"]
    for name, tables in reasons.items():
        for id, reason in tables.items():
            published.load(name).table(id)
            if set(reason) != {"status", "why"} or reason["status"] not in STATUSES:
                raise ValueError(f"{_REASONS.name}: {name}, {id}: expected a status ({', '.join(STATUSES)}) and why")
    return reasons


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    target = CONFIGS / "README.md"
    run_folder.write_text_atomic(target, text())
    print(json.dumps({"written": str(target)}))
    sys.exit(0)
