"""A start in closed form: every matrix that a state is linear in, by ridge regression, one after another.

A draft's state is a sum: what its residual stream starts from, what attention adds, what the feed-forward unit adds.
Each is a matrix times something that is known once the matrices before it are. So they are found in this order, each
as the one that comes nearest to the state that the target will have. That takes one pass over the training text each,
and finds at once what gradient descent needs thousands of steps for; training then goes on from there.

Differs from the papers, whose heads start at random.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import types
from jspec.models import config as model_config
from jspec.models import layers, transformer
from jspec.training import data, objectives, unroll, views

# Of the mean square of an input: what is seen too rarely to be known stays near zero.
RIDGE = 1e-2
# Sizes of the last norm that are tried, and the batches they are tried on.
_SIZES = (1.0, 0.7, 0.5, 0.35, 0.25)
_TEMPERING_BATCHES = 8


def solve(pairs: Iterable[tuple[jax.Array, jax.Array, jax.Array]], ridge: float = RIDGE) -> np.ndarray:
    """Weights W that minimise `sum w |W x - y|^2 + ridge n sum_i mean(x_i^2) |W_i|^2`, i over inputs.

    The penalty is relative to each input's own size, so the answer does not depend on their units.

    Args:
      pairs: inputs `[..., I]`, outputs `[..., O]` and how much they count, w `[...]`: bool, or weights.
      ridge: strength of the penalty.

    Returns:
      `[O, I]` float32.

    Raises:
      ValueError: no pair counts.
    """
    gram = cross = None
    count = 0.0
    for inputs, outputs, counts in pairs:
        squares, products, number = jax.device_get(_sums(inputs, outputs, counts))
        gram = squares.astype(np.float64) if gram is None else gram + squares
        cross = products.astype(np.float64) if cross is None else cross + products
        count += float(number)
    if not count:
        raise ValueError("the training text has no pair of neighbouring answer tokens to start from")
    # An input that is always zero keeps weight zero.
    penalty = ridge * np.diag(gram)
    return np.linalg.solve(gram + np.diag(np.where(penalty > 0, penalty, 1.0)), cross).T.astype(np.float32)


class Reading(NamedTuple):
    """What the layer of a draft starts from at the places of a batch, and what it should make of it.

    residual: `[B, N, E]` what its residual stream starts from.
    gathered: `[B, N, H D]` what its attention gathers.
    wanted:   `[B, N, E]` the state behind it.
    counts:   `[B, N]` how much each place counts.
    """

    residual: jax.Array
    gathered: jax.Array
    wanted: jax.Array
    counts: jax.Array


def fit_layer(
    layer: Mapping[str, Any],
    shape: model_config.TransformerConfig,
    text: Callable[[dict[str, Any]], Iterable[Reading]],
) -> dict[str, Any]:
    """A layer whose attention and feed-forward unit add what brings the residual stream nearest to what is wanted.

    Args:
      layer: where it looks (`qkv`) and what its units see (`gate_up`) stay as they are.
      shape: of the layer.
      text: goes through the training text anew each time it is called, with the layer as it is known by then.
    """
    layer = dict(layer)
    missing = lambda reading: reading.wanted - reading.residual - layer.get("output_bias", 0.0)
    pairs = ((reading.gathered, missing(reading), reading.counts) for reading in text(layer))
    layer["output"] = jnp.asarray(solve(pairs))
    hidden = jax.jit(lambda layer, reading: (*_hidden(layer, shape, reading), reading.counts))
    layer["down"] = jnp.asarray(solve(hidden(layer, reading) for reading in text(layer)))
    return layer


def gather(
    layer: Mapping[str, Any], shape: model_config.TransformerConfig, batch: data.Batch, normed: jax.Array
) -> jax.Array:
    """What the last layer of a model gathers at the places of a batch.

    Args:
      layer: its parameters.
      shape: of the model: a sliding window in its last layer hides what it hides when the draft runs.
      batch: the text.
      normed: `[B, T, in]` what its attention reads.

    Returns:
      `[B, N, H D]`.
    """
    tables = layers.rope_tables(shape, batch.positions)
    query, key, value = transformer.project(layer, normed, shape, tables)
    visible = _visible(batch, shape.window(shape.num_layers - 1))
    return unroll.attend(batch.at_places(query), [key], [value], visible)


def _visible(batch: data.Batch, window: int | None) -> jax.Array:
    """Which tokens each place sees, `[B, N, T]`."""
    causal = batch.at_places(batch.causal)
    if window is None:
        return causal
    distance = batch.at_places(batch.positions)[:, :, None] - batch.positions[:, None, :]
    return causal & (distance < window)


def _hidden(layer, shape, reading: Reading):
    """The units' values, `[B, N, ffn]`, and what they should become."""
    state = reading.residual + layers.linear(reading.gathered, layer["output"], layer.get("output_bias"))
    units = {name: leaf for name, leaf in layer.items() if name != "down_bias"}
    units["down"] = jnp.eye(shape.ffn_size, dtype=state.dtype)
    return transformer.feed_forward(units, state, shape), reading.wanted - state - layer.get("down_bias", 0.0)


@jax.jit
def _sums(inputs, outputs, counts):
    root = jnp.sqrt(counts.astype(jnp.float32))[..., None]
    flat = lambda z: jnp.where(root > 0, z.astype(jnp.float32) * root, 0.0).reshape(-1, z.shape[-1])
    x, y = flat(inputs), flat(outputs)
    return x.T @ x, x.T @ y, jnp.sum(counts)


def temper(
    trained: dict[str, Any],
    norm: str,
    objective: objectives.Objective,
    target: types.Target,
    vocabulary: objectives.Vocabulary,
    text: Callable[[], Iterable[tuple[data.Batch, views.View]]],
) -> dict[str, Any]:
    """The draft with its last norm as small as makes the loss smallest.

    A norm gives every guess the same length, and so the law behind it the same certainty; a least-squares guess is
    worth less. What is guessed as the best token does not change.

    Args:
      trained: parameters.
      norm: name of the norm among them.
      objective, target, vocabulary: whose loss.
      text: goes through the training text; its first batches are looked at.
    """

    @jax.jit
    def losses(batch, view):
        def loss(size):
            draft = objectives.Draft({**trained, norm: trained[norm] * size}, vocabulary)
            return objective.loss(types.Params(target.model, draft), batch, view, None)[0]

        return jax.lax.map(loss, jnp.array(_SIZES))

    total = sum(losses(*each) for each in itertools.islice(text(), _TEMPERING_BATCHES))
    return {**trained, norm: trained[norm] * _SIZES[int(jnp.argmin(total))]}
