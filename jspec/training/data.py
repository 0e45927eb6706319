"""Training text: samples in shards on disk, packed into rows, drawn by a permutation.

A folder holds

    data.json         whose answers these are (sha256, vocabulary), what made them
    shard-00000.npz   samples 0 .. n - 1: token ids, the role of each token, where each sample ends
    journal.jsonl     finished samples whose shard is not full yet

A sample is a conversation: prompt tokens and answer tokens. Losses look at answer tokens alone. Samples are packed one
behind another into rows of a fixed length; each attends to itself only, so nothing is lost to padding.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jspec import files, types

PROMPT, ANSWER = 0, 1
_MANIFEST, _JOURNAL = "data.json", "journal.jsonl"


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One conversation.

    number: its place in the order of samples.
    tokens: ids, `[n]`.
    roles:  of each token, `PROMPT` or `ANSWER`, `[n]` uint8.
    """

    number: int
    tokens: np.ndarray
    roles: np.ndarray

    @property
    def key(self) -> bytes:
        """Equal for equal prompts: the tokens before the first answer."""
        return hashlib.sha256(np.asarray(self.tokens[: self.prompt_length], np.uint32).tobytes()).digest()

    @property
    def prompt_length(self) -> int:
        """Tokens before the first answer."""
        is_answer = self.roles == ANSWER
        return int(np.argmax(is_answer)) if is_answer.any() else len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Whose answers a folder holds.

    target:     reference of the target.
    sha256:     of its weights (`fingerprint`).
    vocab_size: of its ids.
    tokenizer:  fingerprint of its vocabulary, or None for bare ids.
    made_by:    settings of the run that made it; a run that resumes must have the same.
    """

    target: str
    sha256: str
    vocab_size: int
    tokenizer: str | None
    made_by: str

    @classmethod
    def of(cls, target: types.Target, made_by: str) -> Origin:
        """The origin of answers by this target."""
        model = target.model
        return cls(
            target.provenance.reference,
            fingerprint(target),
            model.config.vocab_size,
            None if target.tokenizer is None else target.tokenizer.fingerprint(),
            made_by,
        )

    def check(self, target: types.Target, where: Any) -> None:
        """Refuse answers of another target.

        Raises:
          ValueError: naming what differs.
        """
        own = Origin.of(target, self.made_by)
        if self.vocab_size != own.vocab_size:
            raise ValueError(f"{where}: made with {self.vocab_size} token ids; the target has {own.vocab_size}")
        if self.tokenizer != own.tokenizer:
            raise ValueError(f"{where}: made with another tokenizer than {own.target}'s")
        if self.sha256 != own.sha256:
            raise ValueError(
                f"{where}: made by {self.target} (sha256 {self.sha256}), not by {own.target} (sha256 {own.sha256}); "
                "a draft learns to imitate one target"
            )


def fingerprint(target: types.Target) -> str:
    """The sha256 of a target's file, or of its parameters when it never was a file."""
    if target.provenance.sha256 is not None:
        return target.provenance.sha256
    digest = hashlib.sha256()
    for path, leaf in jax.tree.flatten_with_path(target.model.params)[0]:
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


class Writer:
    """Writes samples in any order, in shards of `shard_size` samples in order. Made by `open_writer`.

    Every sample is on the disk when `add` returns; a shard gets its name when it is whole.

    finished: numbers of the samples it holds.
    """

    def __init__(self, folder: pathlib.Path, origin: Origin, shard_size: int):
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

    def add(self, samples: Iterable[Sample]) -> None:
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
        """Write what is left as a last, shorter shard.

        Raises:
          OSError: the disk does not take it.
        """
        for shard in self._shards():
            self._write_shard(shard)
        self._rewrite_journal()

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


def open_writer(folder: str | pathlib.Path, origin: Origin, *, shard_size: int = 256) -> Writer:
    """Make a folder of samples, or open one again to go on.

    Args:
      folder: parents are made.
      origin: whose answers.
      shard_size: samples per shard.

    Raises:
      ValueError: the folder holds something else, or samples of another origin or other settings.
      OSError: it cannot be written.
    """
    folder = pathlib.Path(folder)
    if shard_size < 1:
        raise ValueError(f"shard_size {shard_size} is below 1")
    folder.mkdir(parents=True, exist_ok=True)
    manifest = {**dataclasses.asdict(origin), "shard_size": shard_size}
    path = folder / _MANIFEST
    if path.exists():
        stored = _read_manifest(folder)
        for name, value in manifest.items():
            if stored.get(name) != value:
                raise ValueError(f"{folder} was made with {name} {stored.get(name)!r}, not {value!r}: choose another")
    elif strangers := sorted(item.name for item in folder.iterdir()):
        raise ValueError(f"{folder} has {strangers[0]} but no {_MANIFEST}, so it holds no samples: choose another")
    else:
        files.replace(path, lambda file: file.write((json.dumps(manifest, indent=2) + "\n").encode()))
    return Writer(folder, origin, shard_size)


def read(folder: str | pathlib.Path, target: types.Target) -> list[Sample]:
    """All samples of a folder, in order.

    Args:
      folder: made by `open_writer`.
      target: whose answers they must be.

    Raises:
      ValueError: there are none, they are another target's, or a file is damaged.
    """
    folder = pathlib.Path(folder)
    stored = _read_manifest(folder)
    names = [field.name for field in dataclasses.fields(Origin)]
    Origin(**{name: stored.get(name) for name in names}).check(target, folder)
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


def _read_shards(folder: pathlib.Path) -> Iterator[Sample]:
    for path in sorted(folder.glob("shard-*.npz")):
        try:
            with np.load(path, allow_pickle=False) as stored:
                numbers, ends, tokens, roles = (stored[key] for key in ("numbers", "ends", "tokens", "roles"))
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        starts = np.concatenate([[0], ends[:-1]])
        for number, start, end in zip(numbers.tolist(), starts, ends):
            yield Sample(number, tokens[start:end], roles[start:end])


def _journal_line(sample: Sample) -> str:
    content = {"number": sample.number, "tokens": sample.tokens.tolist(), "roles": sample.roles.tolist()}
    return json.dumps(content) + "\n"


def _read_journal(path: pathlib.Path, dtype: Any) -> Iterator[Sample]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            content = json.loads(line)
            yield Sample(content["number"], np.array(content["tokens"], dtype), np.array(content["roles"], np.uint8))
        except (ValueError, KeyError, TypeError):
            return  # cut off by a kill: the sample is made again


def _write_npz(path: pathlib.Path, **arrays: np.ndarray) -> None:
    files.replace(path, lambda file: np.savez(file, **arrays))


def split(samples: Sequence[Sample], held_out: float) -> tuple[list[Sample], list[Sample]]:
    """Training and held-out samples. Which is decided by the prompt alone, so equal prompts are on one side.

    Args:
      samples: all.
      held_out: share to hold out, between 0 and 1.

    Raises:
      ValueError: one side is empty.
    """
    chosen = [int.from_bytes(sample.key[:4], "little") < held_out * 2**32 for sample in samples]
    train = [sample for sample, out in zip(samples, chosen) if not out]
    kept = [sample for sample, out in zip(samples, chosen) if out]
    for name, side in (("training", train), ("held-out", kept)):
        if not side:
            raise ValueError(f"held_out {held_out} leaves no {name} sample of {len(samples)}")
    return train, kept


def check_disjoint(train: Sequence[Sample], held_out: Sequence[Sample]) -> None:
    """Refuse a held-out set that shares a prompt with the training set.

    Raises:
      ValueError: naming the first sample that does.
    """
    known = {sample.key: sample.number for sample in train}
    for sample in held_out:
        if sample.key in known:
            raise ValueError(
                f"the held-out set overlaps the training set: its sample {sample.number} has the prompt of training "
                f"sample {known[sample.key]}"
            )


@flax.struct.dataclass
class Batch:
    """Packed rows.

    tokens:    ids; 0 where there is no token.
    segments:  which sample of the row a token belongs to, -1 where there is no token.
    positions: within the sample.
    answer:    tokens of answers.
    places:    where the next token is an answer's, in order; T stands for no place. Losses look there alone: what is
               computed at the other places, prompts mostly, is what those attend to.
    """

    tokens: jax.Array  # [B, T] int32
    segments: jax.Array  # [B, T] int32
    positions: jax.Array  # [B, T] int32
    answer: jax.Array  # [B, T] bool
    places: jax.Array  # [B, N] int32

    @property
    def causal(self) -> jax.Array:
        """Who sees whom: earlier tokens of the same sample. `[B, T, T]`; a place without a token sees its like."""
        order = jnp.arange(self.tokens.shape[1])
        same = self.segments[:, :, None] == self.segments[:, None, :]
        return same & (order[:, None] >= order)

    @property
    def next_tokens(self) -> jax.Array:
        """The answer token behind each of `places`, `[B, N]`."""
        return self.at_places(shift(self.tokens, 1))

    def at_places(self, tree: Any) -> Any:
        """`[B, T, ...]` -> `[B, N, ...]` for every array; anything where there is no place."""
        index = jnp.minimum(self.places, self.tokens.shape[1] - 1)
        take = lambda x: jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)
        return jax.tree.map(take, tree)

    def labelled(self, ahead: int) -> jax.Array:
        """Which of `places` have their token `ahead` places further on in the same answer, `[B, N]` bool.

        An answer's places follow one another, so what stands k places on in the text stands k places on in `places`.
        """
        real = self.places < self.tokens.shape[1]
        follows = shift(self.places, ahead - 1) == self.places + ahead - 1
        return real & shift(real, ahead - 1) & follows


def places(segments: np.ndarray, answer: np.ndarray, count: int) -> np.ndarray:
    """The first `count` places of each row whose next token is an answer token of the same sample: see `Batch`.

    Args:
      segments, answer: `[B, T]`.
      count: N.

    Returns:
      `[B, N]` int32.
    """
    length = segments.shape[1]
    before = (segments[:, :-1] == segments[:, 1:]) & (segments[:, :-1] >= 0) & answer[:, 1:]
    found = np.full((len(segments), length), length, np.int32)
    found[:, :-1] = np.where(before, np.arange(length - 1), length)
    return np.sort(found, axis=1)[:, :count]


def shift(x: jax.Array, count: int) -> jax.Array:
    """What stands `count` places further on, `[B, T, ...]`; zeros from beyond the end."""
    if count == 0:
        return x
    padding = [(0, 0), (0, count), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x[:, count:], padding)


@functools.lru_cache(maxsize=4)
def _permutation(count: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def _cut(sample: Sample, length: int, answers: int) -> Sample:
    """The sample's first tokens: `length` at most, and no more of its answer than `answers`."""
    within = np.cumsum(sample.roles == ANSWER) <= answers
    end = min(length, int(within.sum()))
    return Sample(sample.number, sample.tokens[:end], sample.roles[:end])


class Rows:
    """Samples packed into rows of a fixed length; arrays as in `Batch`, on the host.

    length: T, of a row.
    answers: N, places of a row that carry a loss.
    """

    def __init__(self, samples: Sequence[Sample], length: int, *, shortest: int, answers: int | None = None):
        """Pack samples in order, each into the first of the open rows that has room.

        Args:
          samples: longer ones are cut off.
          length: T, of a row.
          answers: answer tokens in a row, at most; a longer answer is cut off. None sets no limit.
          shortest: answer tokens a sample needs to be of any use; others are left out.

        Raises:
          ValueError: the rows are too short for any label, or no sample is left.
        """
        answers = length if answers is None else answers
        for name, limit in (("length", length), ("answers", answers)):
            if limit <= shortest:
                raise ValueError(f"{name} {limit} is too short: a label stands up to {shortest} tokens ahead")
        cut = [_cut(sample, length, answers) for sample in samples]
        usable = [sample for sample in cut if int((sample.roles == ANSWER).sum()) > shortest]
        if not usable:
            raise ValueError(f"none of {len(samples)} samples has more than {shortest} answer tokens within {length}")
        rows: list[list[Sample]] = []
        room: list[np.ndarray] = []  # tokens and answer tokens that still fit
        for sample in usable:
            size = np.array([len(sample.tokens), int((sample.roles == ANSWER).sum())])
            # Only the last rows are looked at: first fit over all of them would take quadratic time.
            recent = range(max(0, len(rows) - 64), len(rows))
            row = next((row for row in recent if (room[row] >= size).all()), None)
            if row is None:
                row = len(rows)
                rows.append([])
                room.append(np.array([length, answers]))
            rows[row].append(sample)
            room[row] -= size
        self.length, self._members = length, rows
        self._tokens = np.zeros((len(rows), length), np.int32)
        self._segments = np.full((len(rows), length), -1, np.int32)
        self._positions = np.zeros((len(rows), length), np.int32)
        self._answer = np.zeros((len(rows), length), bool)
        for index, row in enumerate(rows):
            start = 0
            for segment, sample in enumerate(row):
                place = slice(start, start + len(sample.tokens))
                self._tokens[index, place] = sample.tokens
                self._segments[index, place] = segment
                self._positions[index, place] = np.arange(len(sample.tokens))
                self._answer[index, place] = sample.roles == ANSWER
                start += len(sample.tokens)
        self.answers = answers
        self._places = places(self._segments, self._answer, answers)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def answer_tokens(self) -> np.ndarray:
        """In each row."""
        return self._answer.sum(axis=1)

    @property
    def num_answer_tokens(self) -> int:
        """In all rows."""
        return int(self._answer.sum())

    def take(self, rows: np.ndarray) -> Batch:
        """A batch of these rows; -1 stands for an empty one."""
        missing = rows < 0
        pick = lambda array, empty: np.where(missing[:, None], empty, array[rows])
        return Batch(
            jnp.asarray(pick(self._tokens, 0)),
            jnp.asarray(pick(self._segments, -1)),
            jnp.asarray(pick(self._positions, 0)),
            jnp.asarray(pick(self._answer, False)),
            jnp.asarray(pick(self._places, self.length)),
        )

    def prompts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first prompt of each row, `[B, T]` ids and `[B]` lengths, with room for an answer behind it."""
        each = [self._members[row][0] for row in rows]
        # At least one token: there is nothing to decode from otherwise.
        lengths = np.array([np.clip(sample.prompt_length, 1, self.length - 1) for sample in each], np.int32)
        padded = np.zeros((len(rows), self.length), np.int32)
        for row, sample, size in zip(padded, each, lengths):
            row[:size] = sample.tokens[:size]
        return padded, lengths

    def at_step(self, step: int, size: int, seed: int) -> np.ndarray:
        """Which rows make up the batch of a step: each epoch is a permutation of all, drawn from (seed, epoch).

        A batch may span two epochs, so that no row is left out and every batch is full.
        """
        first = step * size
        chosen = np.empty(size, np.int64)
        for place in range(size):
            epoch, index = divmod(first + place, len(self))
            chosen[place] = _permutation(len(self), epoch, seed)[index]
        return chosen

    def in_turn(self, size: int) -> Iterator[np.ndarray]:
        """All rows once, in order, in batches of `size`; -1 fills the last."""
        for start in range(0, len(self), size):
            rows = np.arange(start, start + size)
            yield np.where(rows < len(self), rows, -1)
