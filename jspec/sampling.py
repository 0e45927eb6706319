"""From logits to the law a token is drawn from, and the draw.

One order everywhere, for target, draft and plain decoding alike: temperature, then top-k, then top-p on what top-k left
(renormalised), then min-p. Temperature 0 is the one-hot law of the argmax, the lowest index on exact ties. All settings
are arrays with one entry per row, so that changing them compiles nothing.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import types

STOP_IDS_STEP = 8  # places for stop ids come in steps, so that another list of stop ids is no other shape


def _per_row(name: str, value: Any, batch: int, dtype, valid, limit: str) -> np.ndarray:
    array = np.asarray(value)
    if array.shape not in ((), (batch,)):
        raise ValueError(f"{name} has shape {array.shape}; expected one value or one per row ({batch})")
    if array.dtype == bool or not np.issubdtype(array.dtype, np.number):
        raise ValueError(f"{name} {value!r} is not a number")
    bad = ~valid(array) | ~np.isfinite(array)
    if bad.any():
        raise ValueError(f"{name} {array[bad].flat[0] if array.shape else array.item()} is outside {limit}")
    if np.issubdtype(dtype, np.integer) and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} {value!r} is not a whole number")
    largest = np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else np.finfo(dtype).max
    if (array > largest).any():  # a cast would wrap
        raise ValueError(f"{name} {value!r} is above {largest}")
    return np.broadcast_to(array, (batch,)).astype(dtype)


def token_ids(name: str, ids: Iterable[Any]) -> list[int]:
    """Token ids as plain integers.

    Raises:
      ValueError: one of them is no whole number in [0, 2^31).
    """
    ids = list(ids)
    for index in ids:
        if isinstance(index, bool) or not isinstance(index, numbers.Integral) or not 0 <= index < 2**31:
            raise ValueError(f"{name}: {index!r} is no token id; expected a whole number in [0, 2^31)")
    return [int(index) for index in ids]


def make(
    batch: int,
    *,
    max_new_tokens: int | Sequence[int],
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
) -> types.Sampling:
    """Per-row settings from single values or one per row, as NumPy arrays: no device is touched before they are used.

    Args:
      batch: B.
      max_new_tokens: token budget, at least 1.
      temperature: at least 0; 0 is greedy.
      top_k: at least 0; 0 keeps all.
      top_p: in (0, 1]; 1 keeps all.
      min_p: in [0, 1]; smallest probability kept, relative to the largest.
      stop_ids: ids that end a row: one list for all rows, or one per row.

    Raises:
      ValueError: a value is outside its range, or of another shape.
    """
    if not isinstance(stop_ids, Iterable):
        raise ValueError(f"stop_ids {stop_ids!r} is not a list")
    stop_ids = list(stop_ids)
    if not any(isinstance(ids, Iterable) for ids in stop_ids):
        stop_ids = [stop_ids] * batch
    if len(stop_ids) != batch:
        raise ValueError(f"stop_ids has {len(stop_ids)} lists for {batch} rows")
    stop_ids = [token_ids("stop_ids", ids) for ids in stop_ids]
    places = STOP_IDS_STEP * max(1, math.ceil(max(map(len, stop_ids), default=0) / STOP_IDS_STEP))
    stops = np.full((batch, places), -1, np.int32)
    for row, ids in enumerate(stop_ids):
        stops[row, : len(ids)] = ids
    return types.Sampling(
        temperature=_per_row("temperature", temperature, batch, np.float32, lambda t: t >= 0, "[0, inf)"),
        top_k=_per_row("top_k", top_k, batch, np.int32, lambda k: k >= 0, "[0, inf)"),
        top_p=_per_row("top_p", top_p, batch, np.float32, lambda p: (p > 0) & (p <= 1), "(0, 1]"),
        min_p=_per_row("min_p", min_p, batch, np.float32, lambda p: (p >= 0) & (p <= 1), "[0, 1]"),
        stop_ids=stops,
        max_new_tokens=_per_row("max_new_tokens", max_new_tokens, batch, np.int32, lambda n: n >= 1, "[1, inf)"),
    )


def all_greedy(sampling: types.Sampling) -> jax.Array:
    """Whether no row samples, a scalar."""
    return jnp.all(sampling.temperature == 0)


def any_filter(sampling: types.Sampling) -> jax.Array:
    """Whether any row that samples cuts its law, a scalar. Without a cut nothing needs sorting."""
    cuts = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    return jnp.any(cuts & (sampling.temperature > 0))


def _cut(probs: jax.Array, row: types.Sampling) -> jax.Array:
    """Top-k, then top-p, then min-p. Each keeps a head of the descending order, so one number says what is kept."""
    size = probs.shape[0]
    descending = jnp.sort(probs, descending=True)
    rank = jnp.arange(size)
    keep = (row.top_k == 0) | (rank < row.top_k)
    kept = jnp.where(keep, descending, 0)
    before = jnp.cumsum(kept) - kept  # mass before each token; a token is kept while that is below top_p
    keep &= (row.top_p >= 1) | (before < row.top_p * jnp.sum(kept))
    keep &= descending >= row.min_p * descending[0]
    count = jnp.maximum(jnp.sum(keep), 1)
    # Ties at the last kept value go to the lowest index.
    last = descending[count - 1]
    tied = probs == last
    room = count - jnp.sum(probs > last)
    probs = jnp.where((probs > last) | (tied & (jnp.cumsum(tied) <= room)), probs, 0)
    return probs / jnp.sum(probs)


def law(logits: jax.Array, row: types.Sampling, filtered: jax.Array) -> jax.Array:
    """The law of one row's next token.

    Args:
      logits: `[V]`.
      row: its settings, without the row axis.
      filtered: scalar `any_filter` of the whole batch: a scalar stays a branch under `vmap`, so that a batch without
        filters sorts nothing.

    Returns:
      `[V]` float32 probabilities.
    """
    logits = logits.astype(jnp.float32)
    greedy = row.temperature == 0
    # Shifted first: dividing by a tiny temperature may overflow to -inf then, which is a probability of 0, never NaN.
    scaled = (logits - jnp.max(logits)) / jnp.where(greedy, 1.0, row.temperature)
    probs = jax.lax.cond(filtered, lambda p: _cut(p, row), lambda p: p, jax.nn.softmax(scaled))
    return jnp.where(greedy, jax.nn.one_hot(jnp.argmax(logits), logits.shape[0]), probs)


def sample(rng_key: jax.Array, probs: jax.Array) -> jax.Array:
    """Draw one token from a `[V]` law. A token of probability 0 is never drawn."""
    return jax.random.categorical(rng_key, jnp.log(probs)).astype(jnp.int32)


def draw(rng_keys: jax.Array, logits: jax.Array, sampling: types.Sampling) -> tuple[jax.Array, jax.Array]:
    """Draw one token per row, and the law it was drawn from.

    Args:
      rng_keys: `[B]`.
      logits: `[B, V]`.
      sampling: settings per row.

    Returns:
      `[B]` tokens and `[B, V]` laws.
    """
    filtered = any_filter(sampling)

    def greedy():
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return tokens, jax.nn.one_hot(tokens, logits.shape[-1])

    def general():
        laws = jax.vmap(lambda logits, row: law(logits, row, filtered))(logits, sampling)
        return jax.vmap(sample)(rng_keys, laws), laws

    return jax.lax.cond(all_greedy(sampling), greedy, general)
