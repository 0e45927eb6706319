"""What a report is about: the cells of one or several run folders, and how each is called there."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import omegaconf
import yaml

from experiments import records, run_folder, runner, traces

# Cells that differ in one of these do not stand in one column.
SETTINGS = ("target", "batch", "dtype", "seed")

SWEEP = "sweep"  # key under which a record of a sweep tells its point: settings and their values


@dataclasses.dataclass(frozen=True)
class Run:
    """One run folder, as it is now; a benchmark may be writing to it.

    path:        of the folder.
    config:      what `config.yaml` says.
    environment: what `environment.json` says.
    records:     of the finished cells.
    points:      of a sweep, where each record stands in it, in words; else empty strings.
    traces:      kept answers.
    """

    path: pathlib.Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    records: tuple[records.Record, ...]
    points: tuple[str, ...]
    traces: tuple[traces.Trace, ...]

    @property
    def commit(self) -> str | None:
        """Of the code that ran, where it is known."""
        return self.environment["versions"].get("commit")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A record, and what the report says of it.

    record:   the record.
    label:    its method's name; with the run behind it where several runs have that name.
    baseline: the record of autoregressive decoding beside it; None if that cell has not finished.
    """

    record: records.Record
    label: str
    baseline: records.Record | None

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
    points = tuple(map(_point, past.records))
    results = tuple(
        records.Record.from_json({key: value for key, value in record.items() if key != SWEEP})
        for record in past.records
    )
    # The traces of a sweep do not say at which point.
    kept = () if any(points) else tuple(traces.read(past.path))
    return Run(past.path, config, past.environment, results, points, kept)


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
            where = [run.path.name] if record.method in shared else []
            where += [at] if at and record.method != runner.BASELINE else []
            label = f"{record.method} ({', '.join(where)})" if where else record.method
            found.append(Cell(record, label, baselines.get((_place(record), at))))
    return found


def group_name(group: tuple, groups: Sequence[tuple]) -> str:
    """A `Cell.group` in words: the temperature, and the settings in which `groups` differ."""
    names = ("T", *SETTINGS)
    shown = [i for i in range(len(names)) if i == 0 or len({other[i] for other in groups}) > 1]
    return ", ".join(f"{names[i]} = {group[i]:g}" if i == 0 else f"{names[i]} {group[i]}" for i in shown)


def label_of(trace: traces.Trace, run: Run, found: Sequence[Cell]) -> str:
    """What the report calls the method of a trace."""
    with_run = f"{trace.cell['method']} ({run.path.name})"
    return with_run if any(cell.label == with_run for cell in found) else trace.cell["method"]


def _point(record: Mapping[str, Any]) -> str:
    """Where a record of a sweep stands: the last names of its settings, and their values."""
    return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in record.get(SWEEP, {}).items())


def _place(record: records.Record) -> tuple:
    return record.task, record.temperature, *(getattr(record, name) for name in SETTINGS)
