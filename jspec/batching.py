"""Continuous batching: many requests through one batch of fixed size, a finished row's place taken by the next.

The rounds are those of `decode.run`; the loop only comes back to the host when enough rows have ended to be worth a
prefill. A request's answer depends on its own tokens, seed and settings, never on the row it gets or on its batch
mates (invariant 5 of `decode`), so a run that stops and goes on later answers what it would have answered anyway.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec import decode, generation, types
from jspec import sampling as sampling_lib


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and its settings.

    name:           whatever tells it from the others.
    tokens:         of the prompt.
    seed:           of its sampling.
    max_new_tokens: budget.
    temperature, top_k, top_p, min_p: see `sampling.make`.
    """

    name: int | str
    tokens: tuple[int, ...]
    seed: int
    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of a request.

    request:       the request.
    tokens:        new token ids, the stop id included.
    finish_reason: `stop` or `length`.
    """

    request: Request
    tokens: tuple[int, ...]
    finish_reason: str


def serve(
    params: types.Params,
    requests: collections.deque[Request],
    *,
    drafter: types.BoundDrafter,
    verifier: types.Verifier = decode.REJECTION,
    rows: int,
    refill: int | None = None,
    width: int,
    capacity: int,
    stop_ids: Sequence[int] = (),
) -> Iterator[list[Answer]]:
    """Answer requests as they come, `rows` of them at a time.

    Args:
      params: target and draft.
      requests: taken from the left; the caller may add more while answers come, which end when none is left.
      drafter: bound.
      verifier: which drafts stand.
      rows: B, of the batch.
      refill: rows prefilled together; new requests wait until so many rows are free. None means an eighth of the batch.
      width: longest prompt, in tokens.
      capacity: slots per row; at least width and budget of every request.
      stop_ids: end every answer.

    Yields:
      Answers that ended since the last time, never an empty list.

    Raises:
      ValueError: a size below 1, or a request that does not fit.
    """
    refill = max(1, rows // 8) if refill is None else refill
    for name, value in (("rows", rows), ("refill", refill), ("width", width)):
        if value < 1:
            raise ValueError(f"{name} {value} is below 1")
    batch = _Batch(params, drafter, verifier, rows, min(refill, rows), width, capacity, tuple(stop_ids))
    while True:
        while requests and batch.free >= batch.refill:
            batch.fill([requests.popleft() for _ in range(min(batch.refill, len(requests)))])
        answers = batch.collect()
        if answers:
            yield answers
        elif batch.busy:
            # With no request waiting, an answer may still lead to one: come back for every few.
            batch.run()
        else:
            return


class _Batch:
    """Rows, the requests they answer, and the state on the device."""

    def __init__(self, params, drafter, verifier, rows, refill, width, capacity, stop_ids):
        self.refill = refill
        self._params, self._drafter, self._verifier = params, drafter, verifier
        self._width, self._capacity, self._stop_ids = width, capacity, stop_ids
        self._requests: list[Request | None] = [None] * rows
        self._state: decode.DecodeState | None = None
        self._sampling, self._keys = self._settings([None] * rows)

    @property
    def free(self) -> int:
        return sum(request is None for request in self._requests)

    @property
    def busy(self) -> bool:
        return self.free < len(self._requests)

    def _settings(self, requests: Sequence[Request | None]) -> tuple[types.Sampling, jax.Array]:
        """Settings and keys of rows; those of an empty row mean nothing."""
        each = [request or Request("", (), 0, 1) for request in requests]
        sampling = sampling_lib.make(
            len(each),
            stop_ids=self._stop_ids,
            **{
                name: [getattr(request, name) for request in each]
                for name in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p")
            },
        )
        return sampling, generation.row_keys([request.seed for request in each], len(each))

    def fill(self, requests: list[Request]) -> None:
        """Prefill some requests and give them free rows."""
        for request in requests:
            needed = len(request.tokens) + request.max_new_tokens
            if not 1 <= len(request.tokens) <= self._width or needed > self._capacity:
                raise ValueError(
                    f"request {request.name!r} has {len(request.tokens)} tokens and a budget of "
                    f"{request.max_new_tokens}; between 1 and {self._width} fit, {self._capacity} with the budget"
                )
        empty = self.refill - len(requests)
        sampling, keys = self._settings([*requests, *[None] * empty])
        padded, lengths = generation.pad([request.tokens for request in requests] + [(0,)] * empty, self._width)
        new = decode.prefill_jit(
            self._params,
            keys,
            jnp.asarray(padded),
            jnp.asarray(lengths),
            drafter=self._drafter,
            sampling=sampling,
            capacity=self._capacity,
        )
        if self._state is None:
            self._state = _idle(new, len(self._requests))
        free = [row for row, request in enumerate(self._requests) if request is None][: len(requests)]
        for row, request in zip(free, requests):
            self._requests[row] = request
        beyond = [len(self._requests)] * empty  # dropped
        self._state = _insert(self._state, new, jnp.asarray(free + beyond, jnp.int32))
        self._sampling, self._keys = self._settings(self._requests)

    def run(self) -> None:
        """Rounds until as many more rows have ended as are refilled together, or all have."""
        self._state = decode.run_jit(
            self._params,
            self._keys,
            self._state,
            enough=jnp.int32(self.free + self.refill),
            drafter=self._drafter,
            verifier=self._verifier,
            sampling=self._sampling,
        )

    def collect(self) -> list[Answer]:
        """Take the answers of rows that have ended and free them."""
        if self._state is None:
            return []
        reasons = np.asarray(self._state.finish_reason)
        ended = [r for r, request in enumerate(self._requests) if request and reasons[r] != decode.RUNNING]
        if not ended:
            return []
        tokens, lengths = np.asarray(self._state.tokens), np.asarray(self._state.length)
        answers = []
        for row in ended:
            request = self._requests[row]
            new = tokens[row, len(request.tokens) : lengths[row]].tolist()
            answers.append(Answer(request, tuple(new), decode.FINISH_REASONS[reasons[row]]))
            self._requests[row] = None
        return answers


def _idle(like: decode.DecodeState, rows: int) -> decode.DecodeState:
    """A state of rows that have all ended, shaped like another one's."""
    state = jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape[1:]), leaf.dtype), like)
    return state.replace(finish_reason=jnp.full(rows, decode.LENGTH, jnp.int32))


@functools.partial(jax.jit, donate_argnames="state")
def _insert(state: decode.DecodeState, new: decode.DecodeState, rows: jax.Array) -> decode.DecodeState:
    """Put the rows of `new` at `rows`; those beyond the last are dropped. Rows come first in every leaf of a state."""
    return jax.tree.map(lambda whole, part: whole.at[rows].set(part, mode="drop"), state, new)
