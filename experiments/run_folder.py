"""Run folders: everything one run leaves behind, safe against being interrupted.

    config.yaml         the resolved config; starts a new run of the same kind
    environment.json    the config's hash, versions, device
    results.jsonl       a record per finished cell, on the disk before the next cell starts
    traces.jsonl        a benchmark's: some answers token by token
    table.md            what the records say
    .lock               which process is writing, while one is

Opening the folder again with the same config resumes: finished cells are known by their keys and need not run again.
A last line that was cut off by a kill is dropped.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import jspec
from experiments import records
from jspec import config as config_lib
from jspec import files, folder_lock

# Top-level config keys that do not change what is computed.
NOT_HASHED = ("run", "traces")


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The field `run` of every config.

    folder:  where results go; None means `runs/<config name>-<hash>`, which the same command finds again.
    command: what started the run; the command line fills it in.
    """

    folder: str | None = None
    command: str | None = None

    def __post_init__(self):
        if self.folder == "":
            raise ValueError("folder is empty")


def config_hash(config: Any, registries: config_lib.Registries | None = None) -> str:
    """The hash that a run folder and its records carry; `NOT_HASHED` do not enter."""
    return config_lib.config_hash(config, registries, ignore=NOT_HASHED)


def default_folder(name: str, config: Any, registries: config_lib.Registries | None = None) -> pathlib.Path:
    """`runs/<config name>-<hash>`, below the working directory."""
    return pathlib.Path("runs") / f"{name}-{config_hash(config, registries)}"


def environment() -> dict[str, Any]:
    """Versions and device of this process."""
    device = jax.devices()[0]
    return {
        "versions": {
            "python": platform.python_version(),
            "jspec": getattr(jspec, "__version__", "unknown"),
            **({"commit": commit} if (commit := _commit()) else {}),
            **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        },
        "device": device.device_kind,
        "platform": device.platform,
        "num_devices": jax.device_count(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def _commit() -> str | None:
    """The commit that this code is a checkout of, "+" behind it if files were changed since; None where unknown."""
    root = pathlib.Path(jspec.__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        if pathlib.Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return None  # installed inside another project
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(environment: Mapping[str, Any]) -> str:
    """The device of an `environment`, as records name it."""
    if environment["platform"] == "cpu":
        return f"{environment['device']} ({environment['cores']} cores)"
    return f"{environment['device']} x {environment['num_devices']}"


class RunFolder:
    """An open run folder. Made by `open_folder`.

    path:    the folder.
    records: plain data of the finished cells, in the order they finished.
    """

    def __init__(
        self,
        path: pathlib.Path,
        finished: Sequence[dict[str, Any]],
        cell_keys: Sequence[str],
        claim: folder_lock.Claim,
    ):
        self.path, self._claim = path, claim
        self.records = list(finished)
        self._cell_keys = tuple(cell_keys)

    def finished(self, cell: Mapping[str, Any]) -> bool:
        """Whether the cell has a record.

        Args:
          cell: a value for each of the folder's cell keys, and no others.
        """
        if set(cell) != set(self._cell_keys):
            raise ValueError(f"a cell is told by {', '.join(self._cell_keys)}; got {', '.join(cell)}")
        return any(all(record[key] == value for key, value in cell.items()) for record in self.records)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a finished cell. It is on the disk when this returns.

        Raises:
          OSError: the folder cannot be written, or the disk is full.
        """
        record = dict(record)
        missing = [key for key in self._cell_keys if key not in record]
        if missing:
            raise ValueError(f"the record lacks the cell keys {', '.join(missing)}")
        line = json.dumps(record, allow_nan=False) + "\n"
        path = self.path / "results.jsonl"
        with files.naming(path), open(path, "ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)

    def write_table(self, text: str) -> None:
        """Replace `table.md`."""
        write_text_atomic(self.path / "table.md", text)

    def document(self) -> dict[str, Any]:
        """What a script prints as its last line."""
        return {"run": str(self.path), "records": self.records}


def open_folder(
    path: str | pathlib.Path,
    config: Any,
    *,
    cell_keys: Sequence[str] = records.CELL_KEYS,
    registries: config_lib.Registries | None = None,
) -> RunFolder:
    """Make a run folder, or open one again to resume.

    Nothing is computed or downloaded; do it first, so that a folder that cannot be used costs no time.

    Args:
      path: the folder; parents are made.
      config: the resolved config.
      cell_keys: record keys that tell the cells of this config apart.
      registries: of the config, as for `jspec.config.load`.

    Raises:
      ValueError: the folder belongs to another config, another process writes it, or its files are damaged.
      OSError: it cannot be written.
    """
    path = pathlib.Path(path)
    own = {"config_hash": config_hash(config, registries), **environment()}
    with files.naming(path):
        path.mkdir(parents=True, exist_ok=True)
    environment_file, results_file = path / "environment.json", path / "results.jsonl"
    claim = folder_lock.claim(path)
    if environment_file.exists():
        stored = _read_environment(environment_file)
        if stored["config_hash"] != own["config_hash"]:
            raise ValueError(
                f"{path} belongs to a run of another config (hash {stored['config_hash']}, this one's is "
                f"{own['config_hash']}; see its config.yaml): choose another run.folder"
            )
        changed = [key for key in own if stored.get(key) != own[key]]
        if changed:
            warnings.warn(f"{path}: not as it was started: {', '.join(changed)}; records tell which", stacklevel=2)
    elif strangers := sorted(
        item.name for item in path.iterdir() if item.name not in ("config.yaml", folder_lock.NAME)
    ):
        raise ValueError(
            f"{path} has {strangers[0]} but no environment.json, so it is no run's: choose another run.folder"
        )
    else:
        write_text_atomic(path / "config.yaml", config_lib.dump(config, registries))
        write_text_atomic(environment_file, json.dumps(own, indent=2) + "\n")
    finished = _read_results(results_file, cell_keys)
    with files.naming(results_file), open(results_file, "ab"):
        pass  # fails now rather than after the first cell
    return RunFolder(path, finished, cell_keys, claim)


@dataclasses.dataclass(frozen=True)
class PastRun:
    """What a run has left behind, read and not touched. Made by `read`.

    path:        the folder.
    environment: versions, device, the config's hash.
    records:     plain data of the finished cells.
    """

    path: pathlib.Path
    environment: dict[str, Any]
    records: list[dict[str, Any]]


def read(path: str | pathlib.Path, cell_keys: Sequence[str] = records.CELL_KEYS) -> PastRun:
    """Look at a run folder, of whatever config.

    Args:
      path: the folder.
      cell_keys: record keys that tell the cells apart.

    Raises:
      ValueError: it is no run's, nothing is finished in it, or its files are damaged.
    """
    path = pathlib.Path(path)
    if not (path / "environment.json").is_file():
        raise ValueError(f"{path} is no run folder: it has no environment.json")
    environment, results = _read_environment(path / "environment.json"), path / "results.jsonl"
    lines = results.read_bytes().split(b"\n")[:-1] if results.is_file() else []  # a cut-off last line is no record
    found = [_parse_record(line, cell_keys) for line in lines]
    if None in found:
        raise ValueError(f"{results}, line {found.index(None) + 1}: not a record")
    if not found:
        raise ValueError(f"{path} holds no finished cell")
    return PastRun(path, environment, found)


def write_text_atomic(path: str | pathlib.Path, text: str) -> None:
    """Write a text file so that a reader, or a kill, meets the old content or the new, never a part.

    Raises:
      OSError: it cannot be written; the message names the file.
    """
    files.replace(path, lambda file: file.write(text.encode()))


def _read_environment(path: pathlib.Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        stored["config_hash"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: not the environment of a run") from error
    return stored


def _read_results(path: pathlib.Path, cell_keys: Sequence[str]) -> list[dict[str, Any]]:
    """The finished cells. Repairs a last line that was never finished."""
    if not path.exists():
        return []
    content = path.read_bytes()
    lines = content.split(b"\n")
    tail = lines.pop()  # empty when the last line is whole
    finished = []
    for number, line in enumerate(lines, start=1):
        record = _parse_record(line, cell_keys)
        if record is None:
            raise ValueError(f"{path}, line {number}: not a record; remove the line to run its cell again")
        finished.append(record)
    if tail:
        record = _parse_record(tail, cell_keys)
        with files.naming(path), open(path, "r+b") as file:
            if record is None:
                file.truncate(len(content) - len(tail))
            else:  # only its line end was lost
                finished.append(record)
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())
    return finished


def _parse_record(line: bytes, cell_keys: Sequence[str]) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and all(key in record for key in cell_keys) else None
