"""What a report is about: the cells of one or several run folders, and how each is called there."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import omegaconf
import yaml

from experiments import papers, records, run_folder, runner, sweep_results, traces
from jspec import config as config_lib

# Cells that differ in one of these do not stand in one column.
SETTINGS = ("target", "batch", "dtype", "seed")

# Axes of a sweep that change what stands beside it: then its base tells no point's paper.
_PAPER_AXES = {"model", "scale", "paper"}

# Settings of a drafter that make its drafts more, or other, than a chain of a length.
_NO_CHAIN = {"tree", "dynamic", "vocabulary"}


@dataclasses.dataclass(frozen=True)
class Run:
    """One run folder, as it is now; a benchmark may be writing to it.

    path:        of the folder.
    config:      what `config.yaml` says.
    environment: what `environment.json` says.
    records:     of the finished cells.
    points:      of a sweep, where each record stands in it, in words; else empty strings.
    traces:      kept answers, each with its point in words.
    paper:       the published table that it reproduces; None without one.
    """

    path: pathlib.Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    records: tuple[records.Record, ...]
    points: tuple[str, ...]
    traces: tuple[tuple[traces.Trace, str], ...]
    paper: papers.PaperSettings | None = None

    @property
    def commit(self) -> str | None:
        """Of the code that ran, where it is known."""
        return self.environment["versions"].get("commit")

    @property
    def benchmark(self) -> Mapping[str, Any]:
        """The benchmark's config: a sweep's holds it as its base."""
        return self.config.get("base") or self.config

    @property
    def reproduces(self) -> tuple[str, str] | None:
        """Paper and table that it is for; None without one."""
        own = self.benchmark.get("paper")
        return (own["name"], own["table"]) if own else None

    def drafts_chains(self, record: records.Record) -> bool:
        """Whether the config has neither a tree nor a part of the vocabulary for the record's method."""
        methods = self.benchmark.get("methods") or ()
        own = [method["drafter"] for method in methods if method.get("name") == record.method]
        varied = {part for axis in self.config.get("axes") or () for part in axis.split(".")}
        return not (_NO_CHAIN & varied or any(drafter.get(key) for drafter in own for key in _NO_CHAIN))


@dataclasses.dataclass(frozen=True)
class Cell:
    """A record, and what the report says of it.

    record:     the record.
    label:      its method's name; with the run behind it where several runs have that name.
    baseline:   the record of autoregressive decoding beside it; None if that cell has not finished.
    overall:    what the paper prints for its method over all tasks; None where it prints nothing, or has no such task.
    reproduces: paper and table that its run is for; None without one.
    is_chain:   whether its drafts are chains, as far as its run's config tells; trees of one depth are not all alike.
    """

    record: records.Record
    label: str
    baseline: records.Record | None
    overall: records.Published | None = None
    reproduces: tuple[str, str] | None = None
    is_chain: bool = True

    @property
    def is_baseline(self) -> bool:
        """Whether it is autoregressive decoding itself."""
        return self.record.method == runner.BASELINE

    @property
    def group(self) -> tuple:
        """Cells with the same one stand in one table: temperature and `SETTINGS`."""
        return self.record.temperature, *(getattr(self.record, name) for name in SETTINGS)

    @property
    def depth(self) -> int:
        """Of its drafts: gamma, for a chain."""
        return len(self.record.acceptance_histogram) - 1


def load(path: str | pathlib.Path) -> Run:
    """Read a run folder of the benchmark; nothing is written.

    Raises:
      ValueError: it is none, has no finished cell, or is damaged.
      OSError: it cannot be read.
    """
    past = run_folder.read(path)
    try:
        config = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(past.path / "config.yaml"))
    except yaml.YAMLError as error:
        raise ValueError(f"{past.path / 'config.yaml'} is damaged: not YAML") from error
    own = config.get("base") or config  # a sweep's config holds its benchmark's
    paper = None if _PAPER_AXES & set(config.get("axes") or ()) else own.get("paper")
    if paper is not None:
        paper = config_lib.parse(papers.PaperSettings, paper, source=f"{past.path / 'config.yaml'}: paper")
    results = tuple(
        _looked_up(records.Record.from_json(sweep_results.without_point(record)), paper) for record in past.records
    )
    points = tuple(_words(record.get(sweep_results.SWEEP, {})) for record in past.records)
    return Run(past.path, config, past.environment, results, points, tuple(_traces(past)), paper)


def _looked_up(record: records.Record, paper: papers.PaperSettings | None) -> records.Record:
    """With the published number as it is on file now; what an older record says of it may have been corrected since."""
    if paper is None:
        return record
    place = dict(task=record.task, temperature=record.temperature, batch=record.batch)
    return dataclasses.replace(record, published=papers.find(paper, record.method, **place))


def _traces(past: run_folder.PastRun) -> Iterator[tuple[traces.Trace, str]]:
    """Kept answers and their points; each point of a sweep keeps its own in a folder of its own."""
    points: list[Mapping[str, Any]] = []
    for record in past.records:
        point = record.get(sweep_results.SWEEP, {})
        if point not in points:
            points.append(point)
    for point in points:
        folder = sweep_results.point_folder(past.path, point) if point else past.path
        for trace in traces.read(folder):
            yield trace, _words(point)


def cells(runs: Sequence[Run]) -> list[Cell]:
    """All cells, in the order of the runs."""
    uses = collections.Counter(
        key for run in runs for key in {(record.method, _place(record)) for record in run.records}
    )
    shared = {method for (method, _), count in uses.items() if count > 1 and method != runner.BASELINE}
    found = []
    for run in runs:
        placed = list(zip(run.records, run.points))
        baselines = {(_place(record), at): record for record, at in placed if record.method == runner.BASELINE}
        for record, at in placed:
            label = _label(record.method, run.path.name if record.method in shared else "", at)
            place = dict(task=papers.OVERALL, temperature=record.temperature, batch=record.batch)
            listed = run.paper is not None and record.task in run.paper.tasks  # other tasks are in no mean of the paper
            over = papers.find(run.paper, record.method, **place) if listed else None
            baseline = baselines.get((_place(record), at))
            found.append(Cell(record, label, baseline, over, run.reproduces, run.drafts_chains(record)))
    return found


def _label(method: str, run: str, point: str) -> str:
    """A method's name, and behind it the run and the sweep's point where they are not empty; the baseline has none."""
    where = [part for part in (run, point) if part and method != runner.BASELINE]
    return f"{method} ({', '.join(where)})" if where else method


def group_name(group: tuple, groups: Sequence[tuple]) -> str:
    """A `Cell.group` in words: the temperature, and the settings in which `groups` differ."""
    names = ("T", *SETTINGS)
    shown = [i for i in range(len(names)) if i == 0 or len({other[i] for other in groups}) > 1]
    return ", ".join(f"{names[i]} = {group[i]:g}" if i == 0 else f"{names[i]} {group[i]}" for i in shown)


def label_of(trace: traces.Trace, point: str, run: Run, found: Sequence[Cell]) -> str:
    """What the report calls the method of a trace.

    Args:
      trace, point: of `Run.traces`.
      run: whose they are.
      found: all cells.
    """
    with_run = _label(trace.cell["method"], run.path.name, point)
    known = any(cell.label == with_run for cell in found)
    return with_run if known else _label(trace.cell["method"], "", point)


def _words(point: Mapping[str, Any]) -> str:
    """A point of a sweep: the last names of its settings, and their values."""
    return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in point.items())


def _place(record: records.Record) -> tuple:
    return record.task, record.temperature, *(getattr(record, name) for name in SETTINGS)
