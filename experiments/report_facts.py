"""What a reader must know before comparing two numbers: where each came from, and how the sources differ."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from experiments import beside_paper, grids, published, reported

NOT_STATED = "not stated"


def runs_grid(runs: Sequence[reported.Run]) -> grids.Grid:
    """Per run: config, code, versions and device."""
    rows = []
    for run in runs:
        versions = run.environment["versions"]
        rows.append(
            (
                str(run.path),
                command(run),
                run.environment["config_hash"],
                run.commit or "unknown",
                ", ".join(dict.fromkeys(record.target for record in run.records)),
                ", ".join(dict.fromkeys(record.device for record in run.records)),
                ", ".join(dict.fromkeys(record.dtype for record in run.records)),
                data(run),
                ", ".join(f"{name} {version}" for name, version in versions.items() if name != "commit"),
            )
        )
    headers = ("run", "command", "config hash", "commit", "target", "device", "dtype", "data", "versions")
    note = "A + behind a commit: with changes since."
    return grids.Grid("Runs", headers, tuple(rows), (note,), words=len(headers))


def differences(
    source: beside_paper.Source, cells: Sequence[reported.Cell], runs: Sequence[reported.Run]
) -> grids.Grid:
    """What the paper measured on, beside what we did.

    Args:
      source: paper and table.
      cells: those with a number from it.
      runs: all.
    """
    paper_name, table_id = source
    own = [cell.record for cell in cells if beside_paper.source(cell) == source]
    own_runs = behind(source, cells, runs)
    theirs: dict[str, str] = {}
    if paper_name in published.names():
        targets = {run.paper.target for run in own_runs if run.paper is not None}
        tasks = {run.paper.tasks.get(record.task) for run in own_runs if run.paper is not None for record in own}
        theirs = _paper(published.load(paper_name), table_id, targets, tasks)
    ours = {
        "target": _listed(record.target for record in own),
        "draft": _listed(record.draft or "none" for record in own),
        "hardware": _listed(f"{record.device}, {record.dtype}, batch {record.batch}" for record in own),
        "data": _listed(map(data, own_runs)),
        "numbers": _listed(f"{run.path}, config {run.environment['config_hash']}" for run in own_runs),
    }
    rows = tuple((name, theirs.get(name, NOT_STATED), here) for name, here in ours.items())
    return grids.Grid(
        f"{paper_name}, {table_id}: what differs from the paper", ("", "in the paper", "here"), rows, words=3
    )


def behind(
    source: beside_paper.Source, cells: Sequence[reported.Cell], runs: Sequence[reported.Run]
) -> list[reported.Run]:
    """The runs that have numbers beside a published table."""
    own = [cell.record for cell in cells if beside_paper.source(cell) == source]
    return [run for run in runs if any(record in own for record in run.records)]


def provenance(runs: Sequence[reported.Run]) -> str:
    """Where the numbers of a table come from, on one line."""
    if len(runs) > 3:
        return f"From {len(runs)} runs, listed under Runs."
    return " ".join(
        f"From {run.path}: config {run.environment['config_hash']}, commit {run.commit or 'unknown'}, "
        f"{_listed(record.device for record in run.records)}, jspec {run.environment['versions'].get('jspec')}, "
        f"jax {run.environment['versions'].get('jax')}."
        for run in runs
    )


def citation(paper: str) -> str:
    """Authors, title and source of a paper, on one line; its name where it is not on file."""
    if paper not in published.names():
        return paper
    cited = published.load(paper).citation
    number = f", arXiv:{cited['arxiv']}" if cited.get("arxiv") else ""
    return f"{cited['authors']}: {cited['title']} ({cited.get('venue', cited.get('year'))}{number})"


def _paper(
    paper: published.Paper, table_id: str, targets: Iterable[str | None], tasks: Iterable[str | None]
) -> dict[str, str]:
    """A paper's side of `differences`: from the rows of these targets and tasks, else from what it says of all."""
    table = paper.tables.get(table_id)
    rows = () if table is None else table.rows
    for column, wanted in (("target", set(targets)), ("task", set(tasks))):
        rows = [row for row in rows if row.get(column) in wanted] or rows  # a column may mean something else there
    setting = paper.facts.get("setting", {})

    def stated(column: str, *keys: str) -> str:
        values = [row[column] for row in rows if row.get(column)]
        return _listed(map(str, values)) or "; ".join(_text(setting[key]) for key in keys if key in setting)

    facts = {
        "target": stated("target", "target", "models"),
        "draft": stated("draft", "draft", "drafts"),
        "hardware": _text(paper.facts.get("hardware", "")),
        "data": stated("task", "tasks", "task_mapping", "datasets", "benchmark", "prompts"),
        "numbers": f"{table.title}; {table.provenance}" if table else "",
    }
    return {name: value for name, value in facts.items() if value}


def command(run: reported.Run) -> str:
    """What makes its numbers again."""
    kept = (run.config.get("run") or {}).get("command")
    return kept or f"python -m experiments.{'sweep' if any(run.points) else 'benchmark'} {run.path / 'config.yaml'}"


def data(run: reported.Run) -> str:
    """The prompts of a run, in words."""
    config = run.benchmark
    prompts = config.get("prompts") or {}
    source = pathlib.Path(prompts["file"]).name if prompts.get("file") else "the project's own prompts"
    counts = {record.num_prompts for record in run.records}
    many = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)}-{max(counts)}"
    return f"{source}, {many} a task, {config.get('max_new_tokens', '?')} new tokens each"


def _listed(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key} {_text(item)}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
