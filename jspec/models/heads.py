"""Draft heads: small networks that read the target's own features. Parameters as data, and how they are applied.

Medusa (Cai et al., arXiv:2401.10774): K heads guess the next K tokens from one feature. EAGLE (Li et al.,
arXiv:2401.15077) and EAGLE-3 (arXiv:2503.01840): one decoder layer with its own cache continues the sequence of
features itself.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache as kv
from jspec import types
from jspec.models import config as model_config
from jspec.models import layers, transformer


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Sizes of a set of Medusa heads.

    num_heads:    K, head k (from 0) guesses the token k + 2 places behind the feature's own.
    num_layers:   residual blocks in each head.
    width:        E, of the target.
    vocab_size:   rows of the heads' own output matrices; None when they share the target's.
    reduced:      these rows stand for a reduced vocabulary, whose target ids the parameters hold as `draft_ids`.
    """

    num_heads: int
    num_layers: int
    width: int
    vocab_size: int | None = None
    reduced: bool = False

    def __post_init__(self):
        if min(self.num_heads, self.num_layers, self.width) < 1:
            raise ValueError(f"{self}: every size must be at least 1")
        if self.reduced and self.vocab_size is None:
            raise ValueError(f"{self}: a reduced vocabulary needs output matrices of its own")


# Parameters beyond `medusa_shapes`, of heads that share some rows of the target's output matrix.
MEDUSA_SHARED = ("head", "draft_ids")


@flax.struct.dataclass
class MedusaHeads:
    """Parameters of K heads; `medusa_shapes` gives their tree.

    Heads that share the target's output matrix and have a reduced vocabulary hold, beyond that, its ids `draft_ids`
    `[Vd]` and these rows of the matrix, `head` `[Vd, E]`.
    """

    params: dict[str, Any]
    config: MedusaConfig = flax.struct.field(pytree_node=False)


def medusa_shapes(config: MedusaConfig, dtype: Any = jnp.float32) -> dict:
    """`blocks` and `biases` of the residual blocks and, unless the target's is shared, the output matrices `heads`;
    `draft_ids` `[Vd]` of a reduced vocabulary."""
    c = config
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, dtype)
    shapes = {
        "blocks": shape(c.num_heads, c.num_layers, c.width, c.width),
        "biases": shape(c.num_heads, c.num_layers, c.width),
    }
    if c.vocab_size is not None:
        shapes["heads"] = shape(c.num_heads, c.vocab_size, c.width)
    if c.reduced:
        shapes["draft_ids"] = jax.ShapeDtypeStruct((c.vocab_size,), jnp.int32)
    return shapes


def init_medusa(rng_key: jax.Array, config: MedusaConfig, dtype: Any = jnp.float32) -> MedusaHeads:
    """Random heads for tests and timing: matrices normal of variance 1 / fan-in. (Training starts from zero blocks.)"""
    params = _random(rng_key, medusa_shapes(config, dtype))
    if config.reduced:
        params["draft_ids"] = jnp.arange(config.vocab_size, dtype=jnp.int32)
    return MedusaHeads(params, config)


def medusa_states(heads: MedusaHeads, feature: jax.Array) -> jax.Array:
    """Each head's state, `h + silu(W h + b)` per block: `[B, E]` -> `[B, K, E]`.

    The released code wrote `[block] * n`, so that the n blocks of a head are one; here each has its own parameters, as
    the files store them.
    """
    states = jnp.broadcast_to(feature[:, None], (feature.shape[0], heads.config.num_heads, feature.shape[-1]))
    for layer in range(heads.config.num_layers):
        blocks, biases = heads.params["blocks"][:, layer], heads.params["biases"][:, layer]
        states = states + jax.nn.silu(jnp.einsum("bke,kfe->bkf", states, blocks) + biases)
    return states


def medusa_logits(heads: MedusaHeads, target: transformer.Model, feature: jax.Array) -> jax.Array:
    """`[B, E]` final features of the target -> `[B, K, V]` float32 logits, one row per head; `Vd` for V if reduced.

    Without matrices of their own the heads share the target's, or `head` `[Vd, E]` if the parameters hold one.
    """
    states = medusa_states(heads, feature)
    if "heads" in heads.params:
        return jnp.einsum("bke,kve->bkv", states, heads.params["heads"], preferred_element_type=jnp.float32)
    if "head" in heads.params:  # the rows of a reduced draft vocabulary, shared by all heads
        return layers.linear(states, heads.params["head"]).astype(jnp.float32)
    return transformer.head(target, states)


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """What an EAGLE head looks like.

    version:        1 (EAGLE-1 and -2 share their heads) or 3.
    layer:          of the one decoder layer. `vocab_size` is that of its own embedding, `width` the head's.
    target_width:   of the features.
    num_features:   fused target features: 1 for version 1, 3 for version 3.
    vocab_size:     Vd, draft vocabulary; rows of the head's own output matrix if it has one.
    fc_bias:        version 1: the product over [embedding; feature] carries a bias.
    own_embedding, own_head:  whether the head brings them; else the target's serve.
    input_norm:     version 1: a norm before the layer's attention. The released heads have none.
    norm_before_residual:  version 3: the residual stream starts from the normed feature instead of the bare one.
    norm_before_fc: version 3: one norm over the concatenated features before they are fused.
    fc_norm:        version 3: a norm for each feature before they are fused.
    norm_output:    version 3: what the next step reads is taken after the last norm (EAGLE-3.1).
    feature_layers: target layers whose inputs are fused, as the checkpoint names them; None means the default.
    """

    version: Literal[1, 3]
    layer: model_config.TransformerConfig
    target_width: int
    vocab_size: int
    num_features: int = 1
    fc_bias: bool = False
    own_embedding: bool = False
    own_head: bool = False
    input_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    feature_layers: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.layer.num_layers != 1:
            raise ValueError(f"an EAGLE head has one layer, not {self.layer.num_layers}")
        if self.layer.windows:
            raise ValueError(f"windows {self.layer.windows}: an EAGLE head attends to everything")
        if self.version == 1:
            if self.target_width != self.layer.width:
                raise ValueError(f"target_width {self.target_width} differs from the head's width {self.layer.width}")
            if self.num_features != 1:
                raise ValueError(f"num_features {self.num_features}: an EAGLE-1 head reads one")
            on = [n for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(self, n)]
            if on:
                raise ValueError(f"{on[0]} belongs to version 3")
        elif self.fc_bias or self.input_norm:
            raise ValueError("fc_bias and input_norm belong to version 1")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        if self.feature_layers is not None and len(self.feature_layers) != self.num_features:
            raise ValueError(f"feature_layers {self.feature_layers} are not num_features {self.num_features}")
        if self.layer.width != self.target_width and not self.own_embedding:
            raise ValueError(
                f"width {self.layer.width} differs from target_width {self.target_width}: the head needs own_embedding"
            )


@flax.struct.dataclass
class EagleHead:
    """Parameters of an EAGLE head; `eagle_shapes` gives their tree."""

    params: dict[str, Any]
    config: EagleConfig = flax.struct.field(pytree_node=False)

    @property
    def dtype(self):
        """Of the parameters, and so of the cache."""
        return self.params["fc"].dtype


def eagle_shapes(config: EagleConfig, dtype: Any = jnp.float32) -> dict:
    """Shapes of a head's parameters. `layer` is that of a transformer but for its norms; `draft_ids` `[Vd]` are the
    target's ids of a reduced draft vocabulary and absent when the draft speaks the target's."""
    c, width = config, config.layer.width
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, dtype)
    layer = dict(model_config.param_shapes(c.layer, dtype)["layers"][0])
    if not c.input_norm:
        del layer["attention_norm"]
    shapes = {"layer": layer}
    if c.version == 1:
        shapes["fc"] = shape(width, 2 * width)
        if c.fc_bias:
            shapes["fc_bias"] = shape(width)
    else:
        layer |= {
            "qkv": shape(layer["qkv"].shape[0], 2 * width),
            "embed_norm": shape(width),
            "hidden_norm": shape(width),
        }
        shapes |= {"fc": shape(width, c.num_features * c.target_width), "norm": shape(width)}
        if c.norm_before_fc:
            shapes["input_norm"] = shape(c.num_features * c.target_width)
        if c.fc_norm:
            shapes["fc_norm"] = shape(c.num_features, c.target_width)
    if c.own_embedding:
        shapes["embed"] = shape(c.layer.vocab_size, width)
    if c.own_head:
        shapes["head"] = shape(c.vocab_size, width)
    if c.vocab_size != c.layer.vocab_size:
        shapes["draft_ids"] = jax.ShapeDtypeStruct((c.vocab_size,), jnp.int32)
    return shapes


def init_eagle(rng_key: jax.Array, config: EagleConfig, dtype: Any = jnp.float32) -> EagleHead:
    """Random parameters, for tests and timing; a reduced vocabulary takes the first ids."""
    params = _random(rng_key, eagle_shapes(config, dtype))
    if "draft_ids" in params:
        params["draft_ids"] = jnp.arange(config.vocab_size, dtype=jnp.int32)
    return EagleHead(params, config)


def _random(rng_key: jax.Array, shapes: dict) -> dict:
    leaves, treedef = jax.tree.flatten_with_path(shapes)

    def init(key, path, leaf):
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.ones(leaf.shape, leaf.dtype)
        if name.endswith(("bias", "biases", "draft_ids")):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return (jax.random.normal(key, leaf.shape) / math.sqrt(leaf.shape[-1])).astype(leaf.dtype)

    keys = jax.random.split(rng_key, len(leaves))
    return jax.tree.unflatten(treedef, [init(key, path, leaf) for key, (path, leaf) in zip(keys, leaves)])


def fuse(head: EagleHead, features: jax.Array) -> jax.Array:
    """The target's features as the head reads them: `[..., F, Et]` -> `[..., E]`.

    EAGLE-1 reads the last one as it is; EAGLE-3 multiplies low, middle and high features by `fc` (section 3.1).
    """
    config, params = head.config, head.params
    if config.version == 1:
        return features[..., -1, :]
    if config.fc_norm:
        features = layers.rms_norm(features, params["fc_norm"], config.layer.norm_eps)
    joined = features.reshape(*features.shape[:-2], -1)
    if config.norm_before_fc:
        joined = layers.rms_norm(joined, params["input_norm"], config.layer.norm_eps)
    return layers.linear(joined, params["fc"])


def eagle_forward(
    head: EagleHead,
    target: transformer.Model,
    tokens: jax.Array,
    states: jax.Array,
    positions: jax.Array,
    cache: kv.KVCache,
    mask: jax.Array,
    *,
    scratch: kv.BlockKV | None = None,
) -> tuple[jax.Array, kv.BlockKV]:
    """One pass of the head over a block of (token, state) pairs behind its cached prefix.

    Args:
      head: the head.
      target: lends its embedding if the head has none.
      tokens: `[B, T]`, each one place ahead of its state.
      states: `[B, T, E]`: fused features of the target, or what an earlier pass returned.
      positions: `[B, T]` of the pairs.
      cache: of the head, read, not written.
      mask: `[B, T, M + T]` over scratch and block.
      scratch: keys and values of M earlier pairs that are not committed.

    Returns:
      `[B, T, E]` states, each the head's guess of the feature at its token, and keys and values.
    """
    layer, shape = head.params["layer"], head.config.layer
    residual, normed = eagle_inputs(head, target, tokens, states)
    tables = layers.rope_tables(shape, positions)
    mixed, key, value = transformer.attend(layer, normed, shape, cache, scratch, 0, tables, positions, mask)
    return eagle_finish(head, residual + mixed), kv.BlockKV((key,), (value,), positions)


def eagle_inputs(
    head: EagleHead, target: transformer.Model, tokens: jax.Array, states: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What the layer's residual stream starts from, `[B, T, E]`, and what its attention reads, `[B, T, E or 2 E]`."""
    config, params = head.config, head.params
    layer, shape = params["layer"], config.layer
    if "embed" in params:
        embeddings = params["embed"][tokens]
    else:
        embeddings = transformer.embed(target, tokens).astype(head.dtype)
    states = states.astype(head.dtype)
    if config.version == 1:
        residual = layers.linear(jnp.concatenate([embeddings, states], axis=-1), params["fc"], params.get("fc_bias"))
        normed = layers.rms_norm(residual, layer["attention_norm"], shape.norm_eps) if config.input_norm else residual
        return residual, normed
    normed_state = layers.rms_norm(states, layer["hidden_norm"], shape.norm_eps)
    normed_embedding = layers.rms_norm(embeddings, layer["embed_norm"], shape.norm_eps)
    residual = normed_state if config.norm_before_residual else states
    return residual, jnp.concatenate([normed_embedding, normed_state], axis=-1)


def eagle_finish(head: EagleHead, x: jax.Array) -> jax.Array:
    """The layer's second half: `[B, T, E]` residual stream behind the attention -> states."""
    config, params = head.config, head.params
    x = x + transformer.feed_forward(params["layer"], x, config.layer)
    return layers.rms_norm(x, params["norm"], config.layer.norm_eps) if config.norm_output else x


def eagle_logits(head: EagleHead, target: transformer.Model, states: jax.Array) -> jax.Array:
    """`[..., E]` states of `eagle_forward` -> `[..., Vd]` float32 logits of the token behind each.

    The target's head serves a head without one; EAGLE-1's states are features behind the target's last norm.
    """
    config, params = head.config, head.params
    if config.version == 3 and not config.norm_output:
        states = layers.rms_norm(states, params["norm"], config.layer.norm_eps)
    if "head" in params:
        return layers.linear(states, params["head"]).astype(jnp.float32)
    return transformer.head(target, states.astype(target.dtype))


def check_draft_ids(ids: np.ndarray, vocab_size: int, where: str) -> None:
    """Refuse a draft vocabulary that is none.

    Args:
      ids: `[Vd]` the target's ids.
      vocab_size: of the target.
      where: they stand, for the error.

    Raises:
      ValueError: an id is no whole number, outside the target's vocabulary, or stands twice.
    """
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{where} holds {ids.dtype}, expected whole numbers")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"{where}: id {outside[0]} is outside the target's {vocab_size} tokens")
    unique, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise ValueError(f"{where}: id {unique[counts > 1][0]} stands twice")


def default_feature_layers(num_layers: int) -> types.FeatureLayers:
    """The layers whose inputs EAGLE-3 fuses unless told otherwise: 2, the middle, and the last but two.

    Raises:
      ValueError: the target is so small that two of them are one.
    """
    chosen = (2, num_layers // 2, num_layers - 3)
    if not 0 <= chosen[0] < chosen[1] < chosen[2]:
        raise ValueError(
            f"feature layers 2, {chosen[1]}, {chosen[2]} of a target of {num_layers} layers collide; "
            "set feature_layers to three of its layers"
        )
    return chosen
