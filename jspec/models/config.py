"""What a decoder-only transformer looks like, as data.

A family (Llama, Mistral, Qwen2, Qwen3) is a set of values here, never a copy of the forward pass. The dataclasses are
frozen and hash by value, so a `Model` can carry its config as static data of a pytree.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was first trained on.

    kind:                  `linear` divides every frequency by `factor`; `llama3` leaves short wavelengths alone and
                           blends into the division (Llama 3.1); `yarn` ramps per dimension (Peng et al.,
                           arXiv:2309.00071) and scales the rotated vectors by `attention_factor`; `factors` divides
                           frequency i by `factor * factors[i]` (what a GGUF file stores for Llama 3.1).
    factor:                the stretch.
    original_max_position: positions the model was first trained on (`llama3`, `yarn`).
    low_freq_factor, high_freq_factor:   borders of the blend, in wavelengths per original length (`llama3`).
    beta_fast, beta_slow:  borders of the ramp, in rotations over the original length (`yarn`).
    attention_factor:      scale of the cosines and sines (`yarn`); None means `0.1 ln(factor) + 1`.
    truncate:              round the borders of the ramp to whole dimensions (`yarn`).
    factors:               `head_size / 2` divisors, one per frequency (`factors`).
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and switches of one decoder-only transformer.

    vocab_size:      V, rows of the embedding.
    num_layers:      L.
    width:           E, size of the residual stream.
    num_heads:       H, query heads.
    num_kv_heads:    K, key/value heads; divides `num_heads`.
    head_size:       D, size of one head; `num_heads * head_size` need not equal `width`.
    ffn_size:        hidden size of the gated feed-forward network.
    max_positions:   longest sequence the model was made for, in tokens.
    norm_eps:        added to the mean square in every RMS norm.
    rope_theta:      base of the rotary frequencies.
    rope_scaling:    None, or how the frequencies are stretched.
    qkv_bias, output_bias, ffn_bias:     which products carry a bias (Qwen2: q, k and v).
    qk_norm:         RMS norm of each query and key head before the rotation (Qwen3).
    tied_head:       the output head is the embedding.
    activation:      of the gate: `silu`, `gelu` (exact) or `gelu_tanh`.
    embedding_scale: factor on the embeddings as they enter the first layer.
    windows:         per layer, how many positions back a query may look (its own included); None means all of them.
                     An empty tuple means no layer has a window.
    """

    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    max_positions: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    windows: tuple[int | None, ...] = ()

    def __post_init__(self):
        sizes = ("vocab_size", "num_layers", "width", "num_heads", "num_kv_heads", "head_size", "ffn_size")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_size % 2:
            raise ValueError(f"head_size {self.head_size} is odd; rotary embeddings need an even size")
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(f"windows has {len(self.windows)} entries for num_layers {self.num_layers}")

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer, in positions, or None."""
        return self.windows[layer] if self.windows else None


def param_shapes(config: TransformerConfig, dtype: Any = jnp.float32) -> dict:
    """Shapes of a model's parameters, as a pytree of `jax.ShapeDtypeStruct`.

    Matrices are stored `[out, in]`, the orientation that reads fastest at one token. Query, key and value projections
    are fused into `qkv` (rows in that order), gate and up into `gate_up`. `head` is absent when tied.
    """
    c = config
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, dtype)
    query_rows, kv_rows = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
    layer = {
        "attention_norm": shape(c.width),
        "qkv": shape(query_rows + 2 * kv_rows, c.width),
        "output": shape(c.width, query_rows),
        "ffn_norm": shape(c.width),
        "gate_up": shape(2 * c.ffn_size, c.width),
        "down": shape(c.width, c.ffn_size),
    }
    if c.qkv_bias:
        layer["qkv_bias"] = shape(query_rows + 2 * kv_rows)
    if c.output_bias:
        layer["output_bias"] = shape(c.width)
    if c.ffn_bias:
        layer |= {"gate_up_bias": shape(2 * c.ffn_size), "down_bias": shape(c.width)}
    if c.qk_norm:
        layer |= {"query_norm": shape(c.head_size), "key_norm": shape(c.head_size)}
    params = {
        "embed": shape(c.vocab_size, c.width),
        "layers": [dict(layer) for _ in range(c.num_layers)],
        "final_norm": shape(c.width),
    }
    if not c.tied_head:
        params["head"] = shape(c.vocab_size, c.width)
    return params


def init_params(rng_key: jax.Array, config: TransformerConfig, dtype: Any = jnp.float32) -> dict:
    """Random parameters: normal matrices of variance 1 / fan-in (1 for an untied embedding), norms one, biases zero."""
    shapes = param_shapes(config, dtype)
    leaves, treedef = jax.tree.flatten_with_path(shapes)
    keys = jax.random.split(rng_key, len(leaves))

    def init(key, path, leaf):
        name = path[-1].key
        if name.endswith("norm"):
            return jnp.ones(leaf.shape, dtype)
        if name.endswith("bias"):
            return jnp.zeros(leaf.shape, dtype)
        # A tied head that large would make every token predict itself.
        untied_embedding = name == "embed" and not config.tied_head
        scale = 1.0 if untied_embedding else 1.0 / math.sqrt(leaf.shape[-1])
        return (scale * jax.random.normal(key, leaf.shape)).astype(dtype)

    return jax.tree.unflatten(treedef, [init(key, path, leaf) for key, (path, leaf) in zip(keys, leaves)])
