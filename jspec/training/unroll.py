"""EAGLE-3's training-time test (arXiv:2503.01840, section 3.2, figure 6): chains of drafts from all places at once.

Step 0 reads the target's features. Step s reads what step s - 1 returned, and the text's token s places further on: at
every place t it is the head's s-th draft of the chain that starts there, given that the drafts before it were right. In
that chain, draft s sees the pairs with the target's features up to t, and its own earlier steps, which stand at places
t + 1 .. t + s: so its attention is causal over the keys of step 0, and diagonal over those of every later step.

Chains start at the N places of a batch that carry a loss (`data.Batch.places`); of all T only the first step's keys and
values are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.models import heads as heads_lib
from jspec.models import layers, transformer
from jspec.training import data


class Step(NamedTuple):
    """Step s of all chains.

    residual: `[B, N, E]` what the layer's residual stream starts from.
    gathered: `[B, N, H D]` what its attention gathers.
    state:    `[B, N, E]` what the head returns: that of place t guesses the feature of token t + 1 + s.
    """

    residual: jax.Array
    gathered: jax.Array
    state: jax.Array


def chains(
    head: heads_lib.EagleHead, target: transformer.Model, batch: data.Batch, states: jax.Array, steps: int
) -> Iterator[Step]:
    """The steps, one after the other.

    Args:
      head: an EAGLE head of any version.
      target: lends its embedding if the head has none.
      batch: the text.
      states: `[B, T, E]` the fused features of the target.
      steps: S.
    """
    shape, layer = head.config.layer, head.params["layer"]
    tokens, positions = data.shift(batch.tokens, 1), batch.positions
    starts = batch.at_places((tokens, positions))
    keys: list[jax.Array] = []
    values: list[jax.Array] = []
    causal = batch.at_places(batch.causal)
    for step in range(steps):
        residual, normed = heads_lib.eagle_inputs(head, target, tokens, states)
        query, key, value = transformer.project(layer, normed, shape, layers.rope_tables(shape, positions))
        keys.append(key)
        values.append(value)
        if step == 0:
            residual, query = batch.at_places((residual, query))
        mixed = attend(query, keys, values, causal)
        added = layers.linear(mixed, layer["output"], layer.get("output_bias"))
        states = heads_lib.eagle_finish(head, residual + added)
        tokens, positions = data.shift(starts[0], step + 1), starts[1] + step + 1
        yield Step(residual, mixed, states)


def attend(query: jax.Array, keys: list[jax.Array], values: list[jax.Array], causal: jax.Array) -> jax.Array:
    """Attention over all keys of step 0 that are visible, and over one key of each later step.

    Args:
      query: `[B, N, H, D]`.
      keys, values: of each step so far, `[B, K, T, D]`, later ones `[B, K, N, D]`.
      causal: `[B, N, T]` bool.

    Returns:
      `[B, N, H D]`.
    """
    batch, count, heads, size = query.shape
    kv_heads, length = keys[0].shape[1:3]
    query = query.reshape(batch, count, kv_heads, heads // kv_heads, size) / math.sqrt(size)
    scores = jnp.einsum("btkgd,bksd->bkgts", query, keys[0], preferred_element_type=jnp.float32)
    scores = jnp.where(causal[:, None, None], scores, layers.MASKED)
    # One scalar per query and later step.
    own = [jnp.einsum("btkgd,bktd->bkgt", query, key, preferred_element_type=jnp.float32) for key in keys[1:]]
    scores = jnp.concatenate([scores, *(score[..., None] for score in own)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(values[0].dtype)
    mixed = jnp.einsum("bkgts,bksd->btkgd", weights[..., :length], values[0])
    for index, value in enumerate(values[1:]):
        mixed = mixed + jnp.einsum("bkgt,bktd->btkgd", weights[..., length + index], value)
    return mixed.reshape(batch, count, heads * size)
