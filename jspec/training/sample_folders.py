"""Samples on disk: shards, and a journal of what is finished before its shard is full.

A folder holds

    data.json         whose answers these are (sha256, vocabulary), what made them
    shard-00000.npz   samples 0 .. n - 1: token ids, the role of each token, where each sample ends
    journal.jsonl     finished samples whose shard is not full yet
    .lock             which process is writing, while one is
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jspec import files, folder_lock, types
from jspec.training import samples as samples_lib

_MANIFEST, _JOURNAL = "data.json", "journal.jsonl"


class Writer:
    """Writes samples in any order, in shards of `shard_size` samples in order. Made by `open_writer`.

    Every sample is on the disk when `add` returns; a shard gets its name when it is whole.

    finished: numbers of the samples it holds.
    """

    def __init__(self, folder: pathlib.Path, origin: samples_lib.Origin, shard_size: int, claim: folder_lock.Claim):
        self._claim = claim
        self._folder, self._shard_size = folder, shard_size
        self._dtype = np.uint16 if origin.vocab_size <= 2**16 else np.uint32
        stored = {sample.number: sample for sample in _read_shards(folder)}
        self.finished = set(stored)
        # A last shard that was closed before it was full may grow.
        self._waiting = {}
        if stored:
            last = max(stored) // shard_size
            if len([number for number in stored if number // shard_size == last]) < shard_size:
                self._waiting = {n: sample for n, sample in stored.items() if n // shard_size == last}
        for sample in _read_journal(folder / _JOURNAL, self._dtype):
            if sample.number not in self.finished:  # else a kill came between a shard and its journal
                self._waiting[sample.number] = sample
        self.finished |= set(self._waiting)
        self._rewrite_journal()

    def add(self, samples: Iterable[samples_lib.Sample]) -> None:
        """Keep finished samples.

        Raises:
          OSError: the disk does not take them; what it held before stays.
        """
        samples = [sample for sample in samples if sample.number not in self.finished]
        with open(self._folder / _JOURNAL, "a", encoding="utf-8") as file:
            file.writelines(_journal_line(sample) for sample in samples)
            file.flush()
            os.fsync(file.fileno())
        for sample in samples:
            self._waiting[sample.number] = sample
            self.finished.add(sample.number)
        full = [shard for shard in self._shards() if self._is_whole(shard)]
        for shard in full:
            self._write_shard(shard)
        if full:
            self._rewrite_journal()

    def close(self) -> None:
        """Write what is left as a last, shorter shard, and let other processes write the folder.

        Raises:
          OSError: the disk does not take it.
        """
        for shard in self._shards():
            self._write_shard(shard)
        self._rewrite_journal()
        self._claim = None

    def _shards(self) -> list[int]:
        return sorted({number // self._shard_size for number in self._waiting})

    def _is_whole(self, shard: int) -> bool:
        first = shard * self._shard_size
        return all(number in self._waiting for number in range(first, first + self._shard_size))

    def _write_shard(self, shard: int) -> None:
        numbers = sorted(n for n in self._waiting if n // self._shard_size == shard)
        samples = [self._waiting[number] for number in numbers]
        _write_npz(
            self._folder / f"shard-{shard:05d}.npz",
            numbers=np.array(numbers, np.int32),
            ends=np.cumsum([len(sample.tokens) for sample in samples], dtype=np.int32),
            tokens=np.concatenate([np.asarray(sample.tokens, self._dtype) for sample in samples]),
            roles=np.concatenate([sample.roles for sample in samples]),
        )
        for number in numbers:
            del self._waiting[number]

    def _rewrite_journal(self) -> None:
        lines = "".join(_journal_line(self._waiting[number]) for number in sorted(self._waiting))
        files.replace(self._folder / _JOURNAL, lambda file: file.write(lines.encode()))


def open_writer(folder: str | pathlib.Path, origin: samples_lib.Origin, *, shard_size: int = 256) -> Writer:
    """Make a folder of samples, or open one again to go on.

    Args:
      folder: parents are made.
      origin: whose answers.
      shard_size: samples per shard.

    Raises:
      ValueError: the folder holds something else, or samples of another origin or other settings; or another process
        writes it.
      OSError: it cannot be written.
    """
    folder = pathlib.Path(folder)
    if shard_size < 1:
        raise ValueError(f"shard_size {shard_size} is below 1")
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {**dataclasses.asdict(origin), "shard_size": shard_size}
    path = folder / _MANIFEST
    claim = folder_lock.claim(folder)
    if path.exists():
        stored = _read_manifest(folder)
        for name, value in manifest.items():
            if stored.get(name) != value:
                raise ValueError(f"{folder} was made with {name} {stored.get(name)!r}, not {value!r}: choose another")
    elif strangers := sorted(item.name for item in folder.iterdir() if item.name != folder_lock.NAME):
        raise ValueError(f"{folder} has {strangers[0]} but no {_MANIFEST}, so it holds no samples: choose another")
    else:
        files.replace(path, lambda file: file.write((json.dumps(manifest, indent=2) + "\n").encode()))
    return Writer(folder, origin, shard_size, claim)


def read(folder: str | pathlib.Path, target: types.Target) -> list[samples_lib.Sample]:
    """All samples of a folder, in order.

    Args:
      folder: made by `open_writer`.
      target: whose answers they must be.

    Raises:
      ValueError: there are none, they are another target's, or a file is damaged.
    """
    folder = pathlib.Path(folder)
    stored = _read_manifest(folder)
    names = [field.name for field in dataclasses.fields(samples_lib.Origin)]
    samples_lib.Origin(**{name: stored.get(name) for name in names}).check(target, folder)
    dtype = np.uint16 if stored["vocab_size"] <= 2**16 else np.uint32
    samples = {sample.number: sample for sample in _read_journal(folder / _JOURNAL, dtype)}
    samples |= {sample.number: sample for sample in _read_shards(folder)}
    if not samples:
        raise ValueError(f"{folder} holds no samples yet")
    return [samples[number] for number in sorted(samples)]


def _read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / _MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} holds no samples: it has no {_MANIFEST}")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored["vocab_size"], int):
            raise ValueError
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged") from error
    return stored


def _read_shards(folder: pathlib.Path) -> Iterator[samples_lib.Sample]:
    for path in sorted(folder.glob("shard-*.npz")):
        try:
            with np.load(path, allow_pickle=False) as stored:
                numbers, ends, tokens, roles = (stored[key] for key in ("numbers", "ends", "tokens", "roles"))
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        starts = np.concatenate([[0], ends[:-1]])
        for number, start, end in zip(numbers.tolist(), starts, ends):
            yield samples_lib.Sample(number, tokens[start:end], roles[start:end])


def _journal_line(sample: samples_lib.Sample) -> str:
    content = {"number": sample.number, "tokens": sample.tokens.tolist(), "roles": sample.roles.tolist()}
    return json.dumps(content) + "\n"


def _read_journal(path: pathlib.Path, dtype: Any) -> Iterator[samples_lib.Sample]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            content = json.loads(line)
            yield samples_lib.Sample(
                content["number"], np.array(content["tokens"], dtype), np.array(content["roles"], np.uint8)
            )
        except (ValueError, KeyError, TypeError):
            return  # cut off by a kill: the sample is made again


def _write_npz(path: pathlib.Path, **arrays: np.ndarray) -> None:
    files.replace(path, lambda file: np.savez(file, **arrays))
