"""One forward pass for every decoder-only family: Llama, Mistral, Qwen2, Qwen3 are values of `TransformerConfig`.

`forward` reads the cache and returns the block's keys and values beside the logits; it writes nothing.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jspec import cache as kv
from jspec import types
from jspec.models import config as model_config
from jspec.models import layers


@flax.struct.dataclass
class Model:
    """Parameters (`config.param_shapes` gives their tree) and what they mean."""

    params: dict[str, Any]
    config: model_config.TransformerConfig = flax.struct.field(pytree_node=False)

    @property
    def dtype(self):
        """Of the parameters, and so of the cache."""
        return self.params["embed"].dtype


def first_layers(model: Model, num_layers: int) -> Model:
    """The first layers of a model under its own final norm and head; shares the arrays.

    Raises:
      ValueError: `num_layers` is not between 1 and the model's.
    """
    total = model.config.num_layers
    if not 1 <= num_layers <= total:
        raise ValueError(f"layers {num_layers} is not between 1 and the target's {total}")
    windows = model.config.windows[:num_layers]
    config = model.config.__class__(**{**vars(model.config), "num_layers": num_layers, "windows": windows})
    return Model({**model.params, "layers": model.params["layers"][:num_layers]}, config)


def output_matrix(model: Model) -> jax.Array:
    """`[V, E]`, what logits are made with."""
    return model.params["embed" if model.config.tied_head else "head"]


def head(model: Model, states: jax.Array) -> jax.Array:
    """Logits of `[..., E]` states after the final norm, in float32."""
    return layers.linear(states, output_matrix(model)).astype(jnp.float32)


def project(layer, normed, config, tables):
    """Queries `[B, T, H, D]`, keys and values `[B, K, T, D]` of one layer, normed and rotated.

    Args:
      layer: its parameters.
      normed: `[B, T, in]` what the projections read.
      config: of the layer.
      tables: `layers.rope_tables` at the block's positions.
    """
    batch, length, _ = normed.shape
    fused = layers.linear(normed, layer["qkv"], layer.get("qkv_bias"))
    fused = fused.reshape(batch, length, config.num_heads + 2 * config.num_kv_heads, config.head_size)
    query, key, value = jnp.split(fused, [config.num_heads, config.num_heads + config.num_kv_heads], axis=2)
    if config.qk_norm:
        query = layers.rms_norm(query, layer["query_norm"], config.norm_eps)
        key = layers.rms_norm(key, layer["key_norm"], config.norm_eps)
    query, key = layers.rotate(query, tables), layers.rotate(key, tables)
    return query, key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)


def attend(layer, normed, config, cache, scratch, index, tables, positions, visible):
    """Self-attention of one layer: its `[B, T, E]` contribution, and the block's keys and values `[B, K, T, D]`.

    Args:
      layer: its parameters.
      normed: `[B, T, in]` what the projections read.
      config: of the layer.
      cache: of all layers, read at `index`; None without one.
      scratch: earlier blocks that are not committed, or None.
      index: of the layer.
      tables: `layers.rope_tables` at the block's positions.
      positions: `[B, T]`.
      visible: `[B, T, M + T]` over scratch and block.
    """
    query, key, value = project(layer, normed, config, tables)
    block = (key, value)
    if scratch is not None:
        earlier = (scratch.keys[index], scratch.values[index])
        block = tuple(jnp.concatenate(pair, axis=2) for pair in zip(earlier, block))
    prefix = None if cache is None else (cache.keys[index], cache.values[index])
    filled = None if cache is None else cache.length
    mixed = layers.attention(query, positions, prefix, filled, block, visible, config.window(index))
    mixed = mixed.reshape(*normed.shape[:2], -1)
    return layers.linear(mixed, layer["output"], layer.get("output_bias")), key, value


def feed_forward(layer, x, config):
    """The gated unit behind its norm: its `[B, T, E]` contribution."""
    normed = layers.rms_norm(x, layer["ffn_norm"], config.norm_eps)
    gate, up = jnp.split(layers.linear(normed, layer["gate_up"], layer.get("gate_up_bias")), 2, axis=-1)
    return layers.linear(layers.GATED[config.activation](gate, up), layer["down"], layer.get("down_bias"))


def embed(model: Model, tokens: jax.Array) -> jax.Array:
    """What the first layer reads, `[..., E]`."""
    x = model.params["embed"][tokens]
    scale = model.config.embedding_scale
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def forward(
    model: Model,
    tokens: jax.Array,
    positions: jax.Array,
    cache: kv.KVCache | None,
    mask: jax.Array,
    *,
    scratch: kv.BlockKV | None = None,
    feature_layers: types.FeatureLayers = (),
    logits_at: jax.Array | None = None,
) -> tuple[types.Outputs, kv.BlockKV]:
    """One pass over a block of tokens behind the cached prefix.

    Args:
      model: parameters and config.
      tokens: `[B, T]`.
      positions: `[B, T]`.
      cache: read, not written; None when nothing stands before the block, as in training (only then are gradients
        defined: a loop of unknown length has none).
      mask: `[B, T, M + T]` bool over scratch (M tokens, 0 without one) and block: who sees whom. A token that does not
        see itself gives undefined numbers.
      scratch: keys and values of earlier blocks that are not committed.
      feature_layers: which residual streams to return.
      logits_at: `[B, Q]` places in the block whose logits are wanted; None means all, Q = 0 none.

    Returns:
      `Outputs` and the keys and values of the block's T tokens.
    """
    config, params = model.config, model.params
    tables = layers.rope_tables(config, positions)
    key_positions = positions
    if scratch is not None:
        key_positions = jnp.concatenate([scratch.positions, positions], axis=1)
    distance = positions[:, :, None] - key_positions[:, None, :]

    x = embed(model, tokens)
    features, keys, values = {}, [], []
    for index, layer in enumerate(params["layers"]):
        features[index] = x
        window = config.window(index)
        visible = mask if window is None else mask & (distance < window)
        normed = layers.rms_norm(x, layer["attention_norm"], config.norm_eps)
        mixed, key, value = attend(layer, normed, config, cache, scratch, index, tables, positions, visible)
        x = x + mixed
        x = x + feed_forward(layer, x, config)
        keys.append(key)
        values.append(value)
    features["final"] = final = layers.rms_norm(x, params["final_norm"], config.norm_eps)

    wanted = final if logits_at is None else jnp.take_along_axis(final, logits_at[..., None], axis=1)
    outputs = types.Outputs(
        logits=head(model, wanted),
        features=jnp.stack([features[i] for i in feature_layers], axis=2)
        if feature_layers
        else jnp.zeros((*tokens.shape, 0, config.width), x.dtype),
    )
    return outputs, kv.BlockKV(tuple(keys), tuple(values), positions)
