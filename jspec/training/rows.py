"""Samples packed into rows of a fixed length, and the batches that are drawn from them.

Samples stand one behind another; each attends to itself only, so little is lost to padding. Batches are drawn by a
permutation that follows from the seed alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jspec.training import samples as samples_lib


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


def _cut(sample: samples_lib.Sample, length: int, answers: int) -> samples_lib.Sample:
    """The sample's first tokens: `length` at most, and no more of its answer than `answers`."""
    within = np.cumsum(sample.roles == samples_lib.ANSWER) <= answers
    end = min(length, int(within.sum()))
    return samples_lib.Sample(sample.number, sample.tokens[:end], sample.roles[:end])


class Rows:
    """Samples packed into rows of a fixed length; arrays as in `Batch`, on the host.

    length: T, of a row.
    answers: N, places of a row that carry a loss.
    """

    def __init__(
        self, samples: Sequence[samples_lib.Sample], length: int, *, shortest: int, answers: int | None = None
    ):
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
        usable = [sample for sample in cut if int((sample.roles == samples_lib.ANSWER).sum()) > shortest]
        if not usable:
            raise ValueError(f"none of {len(samples)} samples has more than {shortest} answer tokens within {length}")
        rows: list[list[samples_lib.Sample]] = []
        room: list[np.ndarray] = []  # tokens and answer tokens that still fit
        for sample in usable:
            size = np.array([len(sample.tokens), int((sample.roles == samples_lib.ANSWER).sum())])
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
                self._answer[index, place] = sample.roles == samples_lib.ANSWER
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
