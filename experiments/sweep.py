"""A benchmark at every point of a grid of settings.

    python -m experiments.sweep CONFIG 'methods.0.drafter.gamma=[1,2,4,8]' ['more.axes=[..]' dotted.key=value ...]

CONFIG is a benchmark's. A setting with a list of values is an axis, unless the setting itself takes that list
(`temperatures=[0.0,1.0]`); several axes are a grid. In a config of one method `drafter.gamma` is short for
`methods.0.drafter.gamma`. If every axis changes a method, the methods that none of them changes are left out.

One run folder holds a record for each cell of each point, with the point under `sweep`; the same command resumes. All
points run in one process, so that a program is compiled once for all that it fits: another temperature, prompt or seed
compiles nothing. `table.md` has a row for each record, `sweep.png` a curve (one axis) or heat maps (two or more).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import benchmark, cli, greedy_check, papers, records, run_folder, settings, sweep_results
from jspec import config as config_lib
from jspec import extras

CELL_KEYS = (*records.CELL_KEYS, sweep_results.SWEEP)

_METHOD_FIELDS = tuple(field.name for field in dataclasses.fields(settings.Method))


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The config.

    base:   the benchmark at no point in particular.
    axes:   setting -> its values.
    points: a benchmark for each point of the grid, the last axis fastest.
    run:    the run folder.
    """

    base: benchmark.Benchmark
    axes: dict[str, tuple[Any, ...]]
    points: tuple[benchmark.Benchmark, ...]
    run: run_folder.RunSettings = run_folder.RunSettings()

    @property
    def target(self) -> settings.TargetSettings:
        """Of the base; decides how this process compiles."""
        return self.base.target

    @property
    def paper(self) -> papers.PaperSettings | None:
        """Of the base; names the run folder."""
        return self.base.paper

    @property
    def values(self) -> list[dict[str, Any]]:
        """The axes' values at each point."""
        return [dict(zip(self.axes, chosen)) for chosen in itertools.product(*self.axes.values())]


def load(
    config_class: type, path: str, overrides: Sequence[str], registries: config_lib.Registries | None = None
) -> Sweep:
    """Read a benchmark's config and the axes among the overrides. Every point is built: a bad one costs no time.

    Args:
      config_class: `Sweep`.
      path, overrides, registries: as for `jspec.config.load`.

    Raises:
      ConfigError: there is no axis, or a point is at fault.
    """
    read = lambda overrides: config_lib.load(benchmark.Benchmark, path, overrides, registries)
    lists = {override: values for override in overrides if (values := _list_of(override)) is not None}
    others = [override for override in overrides if override not in lists]
    short = [override for override in others if _is_short(override)]
    bare = read([override for override in others if override not in short])
    others = [_in_full(override, bare) if override in short else override for override in others]
    axes: dict[str, list[Any]] = {}
    for override, values in lists.items():
        override = _in_full(override, bare) if _is_short(override) else override
        try:
            read([*others, override])
            others.append(override)
        except config_lib.ConfigError:  # the setting takes no list: one value at a time
            axes[override.partition("=")[0]] = values
    if not axes:
        raise config_lib.ConfigError(f"{path}: no axis; give a setting several values: 'drafter.gamma=[1,2,4]'")
    for key, values in axes.items():
        if len(values) != len({json.dumps(value, sort_keys=True) for value in values}) or not values:
            raise config_lib.ConfigError(f"axis {key}: {json.dumps(values)} is empty or holds a value twice")
    base = read(others)
    points = []
    for chosen in itertools.product(*axes.values()):
        point = read([*others, *(f"{key}={_text(value)}" for key, value in zip(axes, chosen))])
        points.append(dataclasses.replace(point, methods=_changed_methods(point, axes), run=run_folder.RunSettings()))
    axes = {key: tuple(values) for key, values in axes.items()}
    return config_class(dataclasses.replace(base, run=run_folder.RunSettings()), axes, tuple(points), base.run)


def main(config: Sweep) -> dict[str, Any]:
    """Run every cell of every point that has no record yet."""
    for point in config.points:
        benchmark.check(point)
    folder = run_folder.open_folder(config.run.folder, config, cell_keys=CELL_KEYS)
    load_target = functools.lru_cache(maxsize=1)(settings.load_target)
    for number, (point, values) in enumerate(zip(config.points, config.values), start=1):
        shown = ", ".join(f"{key} = {value}" for key, value in values.items())
        print(f"point {number} of {len(config.points)}: {shown}", file=sys.stderr, flush=True)
        benchmark.fill(point, _Point(folder, values), load_target(point.target))
        sweep_results.write(folder.path, tuple(config.axes), folder.records)
    print(sweep_results.table(tuple(config.axes), folder.records))
    plain = map(sweep_results.without_point, folder.records)
    greedy_check.limit_near_ties([records.Record.from_json(record) for record in plain])
    return folder.document()


class _Point:
    """One point's cells in the sweep's folder: what `benchmark.fill` asks of a run folder."""

    def __init__(self, folder: run_folder.RunFolder, values: Mapping[str, Any]):
        self._folder, self._values = folder, dict(values)

    @property
    def path(self) -> pathlib.Path:
        """A folder of the point's own, for what a benchmark keeps beside its records."""
        path = sweep_results.point_folder(self._folder.path, self._values)
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def records(self) -> list[dict[str, Any]]:
        """Of this point, as a benchmark writes them."""
        own = [record for record in self._folder.records if record[sweep_results.SWEEP] == self._values]
        return [sweep_results.without_point(record) for record in own]

    def finished(self, cell: Mapping[str, Any]) -> bool:
        """See `RunFolder.finished`."""
        return self._folder.finished({**cell, sweep_results.SWEEP: self._values})

    def append(self, record: Mapping[str, Any]) -> None:
        """See `RunFolder.append`."""
        self._folder.append({**record, sweep_results.SWEEP: self._values})

    def write_table(self, text: str) -> None:
        """A sweep's table is another one."""


def _list_of(override: str) -> list[Any] | None:
    """The values of an override that is a list, or None."""
    yaml = extras.require("yaml", "experiments")
    try:
        value = yaml.safe_load(override.partition("=")[2])
    except yaml.YAMLError:
        return None  # `config.load` says what is wrong with it
    return value if isinstance(value, list) else None


def _is_short(override: str) -> bool:
    return override.partition("=")[0].partition(".")[0] in _METHOD_FIELDS


def _in_full(override: str, config: benchmark.Benchmark) -> str:
    """`drafter.gamma=2` as `methods.0.drafter.gamma=2`."""
    own = [i for i, method in enumerate(config.methods) if method.name != benchmark.BASELINE]
    if len(own) != 1:
        known = ", ".join(f"methods.{i} is {config.methods[i].name!r}" for i in own)
        raise config_lib.ConfigError(f"override {override!r}: of which method? {known}")
    return f"methods.{own[0]}.{override}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _changed_methods(point: benchmark.Benchmark, axes: Mapping[str, Any]) -> tuple[settings.Method, ...]:
    """Those that an axis changes; all of them if an axis changes something else."""
    parts = [key.split(".") for key in axes]
    if any(part[0] != "methods" or len(part) < 2 or not part[1].isdecimal() for part in parts):
        return point.methods
    return tuple(point.methods[i] for i in sorted({int(part[1]) for part in parts}))


if __name__ == "__main__":
    sys.exit(cli.run(main, Sweep, __doc__, load=load))
