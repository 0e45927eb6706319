"""Models in GGUF files: metadata to `TransformerConfig` and back, and the names of their tensors.

Architectures `llama` (which is Mistral's too), `qwen2` and `qwen3`. llama.cpp rotates neighbouring pairs for `llama`
and reorders the rows of query and key when it converts a checkpoint, so that they come out as pairs; the order is
undone here. The other architectures rotate halves, as we do, and are stored as they were.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np

from jspec.models import config as model_config
from jspec.models import layers
from jspec.weights import assembly, gguf_files

ARCHITECTURES = ("llama", "qwen2", "qwen3")

DIVISORS = "rope_freqs.weight"

NAMES = assembly.Names(
    embed="token_embd.weight",
    final_norm="output_norm.weight",
    head="output.weight",
    layer="blk.{}.",
    leaves={
        "attention_norm": ("attn_norm.weight",),
        "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
        "qkv_bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
        "query_norm": ("attn_q_norm.weight",),
        "key_norm": ("attn_k_norm.weight",),
        "output": ("attn_output.weight",),
        "output_bias": ("attn_output.bias",),
        "ffn_norm": ("ffn_norm.weight",),
        "gate_up": ("ffn_gate.weight", "ffn_up.weight"),
        "gate_up_bias": ("ffn_gate.bias", "ffn_up.bias"),
        "down": ("ffn_down.weight",),
        "down_bias": ("ffn_down.bias",),
    },
    ignored=re.compile(re.escape(DIVISORS)),  # part of the config: `_rope_scaling`
)

# Keys that change the forward pass in ways it does not know, and the values under which they change nothing.
_NEUTRAL = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
}


def transformer_config(file: gguf_files.GgufFile) -> model_config.TransformerConfig:
    """What a file's metadata and tensor names describe.

    Raises:
      ValueError: an architecture, or a setting of it, that is not supported, or a key that is missing.
    """
    metadata, where = file.metadata, file.path
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(f"{where}: architecture {arch!r} is not supported; known are {', '.join(ARCHITECTURES)}")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(f"{where}: {arch}.{key} differs by layer ({value}), which is not supported")
            value = value[0]
        if value is None:
            raise ValueError(f"{where}: metadata {arch}.{key} is missing")
        return value

    for key, neutral in _NEUTRAL.items():
        if (value := get(key, neutral[0])) not in neutral:
            raise ValueError(f"{where}: {arch}.{key} is {value}, which is not supported")
    names = set(file.names())
    if NAMES.embed not in names:
        raise ValueError(f"{where}: tensor {NAMES.embed} is missing")
    width, heads = get("embedding_length"), get("attention.head_count")
    head_size = get("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_size) != head_size:
            raise ValueError(f"{where}: {arch}.{key} is {get(key)}, expected the head size {head_size}")
    window = get("attention.sliding_window", 0)
    layers = get("block_count")
    first = NAMES.layer.format(0)
    try:
        return model_config.TransformerConfig(
            # The embedding decides: the metadata may leave the size out, and the token list may be padded or not.
            vocab_size=file.shape(NAMES.embed)[0],
            num_layers=layers,
            width=width,
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", heads),
            head_size=head_size,
            ffn_size=get("feed_forward_length"),
            max_positions=get("context_length"),
            norm_eps=_shortest(get("attention.layer_norm_rms_epsilon")),
            rope_theta=_shortest(get("rope.freq_base", 10000.0)),
            rope_scaling=_rope_scaling(file, get, head_size),
            qkv_bias=f"{first}attn_q.bias" in names,
            output_bias=f"{first}attn_output.bias" in names,
            ffn_bias=f"{first}ffn_down.bias" in names,
            qk_norm=f"{first}attn_q_norm.weight" in names,
            tied_head=NAMES.head not in names,
            windows=(window,) * layers if window else (),
        )
    except ValueError as error:
        raise error if str(where) in str(error) else ValueError(f"{where}: {error}") from error


def row_order(architecture: str, config: model_config.TransformerConfig, *, writing: bool = False):
    """Rows of query and key back in the order of halves, or with `writing` in that of pairs; for `llama` only.

    Returns:
      A function of a tensor's name and values, the `adjust` of `assembly.assemble`; None where nothing is reordered.
    """
    if architecture != "llama":
        return None

    def adjust(name: str, values: np.ndarray) -> np.ndarray:
        leaf = name.split(".")[-2]
        if leaf not in ("attn_q", "attn_k"):
            return values
        heads = config.num_heads if leaf == "attn_q" else config.num_kv_heads
        stored = (2, config.head_size // 2) if writing else (config.head_size // 2, 2)
        return values.reshape(heads, *stored, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

    return adjust


def architecture(config: model_config.TransformerConfig) -> str:
    """The architecture of `ARCHITECTURES` that llama.cpp can run a model as.

    Raises:
      ValueError: none; the message names the features that stand in the way.
    """
    c = config
    kind = c.rope_scaling.kind if c.rope_scaling else None
    # llama.cpp takes any of the biases, and the tensor of divisors, in `llama` alone.
    divided = kind in ("llama3", "factors")
    like_qwen2 = c.qkv_bias and not (c.output_bias or c.ffn_bias or divided)
    strange = []
    if c.activation != "silu":
        strange.append(f"activation {c.activation}")
    if c.embedding_scale != 1.0:
        strange.append(f"embedding_scale {c.embedding_scale}")
    if len(set(c.windows)) > 1:
        strange.append(f"windows that differ by layer {c.windows}")
    if c.qk_norm and (c.qkv_bias or c.output_bias or c.ffn_bias):
        strange.append("qk_norm together with biases")
    if kind == "yarn" and not c.rope_scaling.truncate:
        strange.append("yarn scaling without truncate")
    if c.qk_norm and divided:
        strange.append(f"qk_norm together with rope scaling {kind}")
    if strange:
        raise ValueError(f"no GGUF architecture ({', '.join(ARCHITECTURES)}) has {', '.join(strange)}")
    return "qwen3" if c.qk_norm else "qwen2" if like_qwen2 else "llama"


def metadata(config: model_config.TransformerConfig) -> dict[str, Any]:
    """What a GGUF file says of a model, its rotary divisors aside: the inverse of `transformer_config`.

    A window in all layers has its key, which `transformer_config` reads; llama.cpp may run these architectures without.

    Raises:
      ValueError: see `architecture`.
    """
    arch = architecture(config)
    keys = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.width,
        "block_count": config.num_layers,
        "feed_forward_length": config.ffn_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_size,
        "attention.value_length": config.head_size,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.head_size,
        "rope.freq_base": float(config.rope_theta),
    }
    if any(config.windows):
        keys["attention.sliding_window"] = config.windows[0]
    scaling = config.rope_scaling
    if scaling is not None and (scaling.kind == "linear" or (scaling.kind == "factors" and scaling.factor != 1.0)):
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    if scaling is not None and scaling.kind == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(scaling.factor),
            "rope.scaling.original_context_length": scaling.original_max_position,
            "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
            "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
        }
        if scaling.attention_factor is not None:
            keys["rope.scaling.attn_factor"] = scaling.attention_factor / _yarn_scale(scaling.factor)
    return {f"{arch}.{key}": value for key, value in keys.items()}


def rope_divisors(config: model_config.TransformerConfig) -> np.ndarray | None:
    """What `rope_freqs.weight` holds, which llama.cpp's converter computes for Llama 3.1.

    Returns:
      `[D / 2]` float32, or None for a model without it.
    """
    scaling = config.rope_scaling
    if scaling is None or scaling.kind not in ("llama3", "factors"):
        return None
    if scaling.kind == "factors":
        return np.asarray(scaling.factors, np.float32)
    plain, _ = layers.rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    scaled, _ = layers.rope_frequencies(config)
    return (plain / scaled).astype(np.float32)


def _yarn_scale(factor: float) -> float:
    """The paper's scale of cosines and sines, which llama.cpp multiplies by what a file states."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _shortest(value: float) -> float:
    """The decimal that a float32 of the metadata was written from: 1e-05, not 9.999999747378752e-06.

    The forward pass rounds to float32 either way; configs of one model then compare equal whatever file they come from.
    """
    return float(str(np.float32(value)))


def _rope_scaling(file: gguf_files.GgufFile, get, head_size: int) -> model_config.RopeScaling | None:
    """Scaling from the metadata, or from the divisors that llama.cpp stores as a tensor for Llama 3.1."""
    kind = get("rope.scaling.type", "none")
    # Files from before the scaling keys have only a linear factor.
    factor = _shortest(get("rope.scaling.factor", get("rope.scale_linear", 1.0)))
    divisors = ()
    if DIVISORS in file.names():
        divisors = tuple(float(value) for value in file.read(DIVISORS).reshape(-1))
        if len(divisors) != head_size // 2:
            raise ValueError(f"{file.path}: rope_freqs.weight has {len(divisors)} values, expected {head_size // 2}")
    if kind == "yarn":
        if divisors:
            raise ValueError(f"{file.path}: rope_freqs.weight together with yarn scaling is not supported")
        if (extent := get("rope.scaling.yarn_ext_factor", 1.0)) not in (1.0, -1.0):  # -1 is llama.cpp's "unset"
            raise ValueError(f"{file.path}: rope.scaling.yarn_ext_factor is {extent}, only 1 is supported")
        # llama.cpp multiplies the paper's factor by what the file states.
        stated = get("rope.scaling.attn_factor", 1.0) * get("rope.scaling.yarn_attn_factor", 1.0)
        attention = None if stated == 1.0 else stated * _yarn_scale(factor)
        return model_config.RopeScaling(
            "yarn",
            factor,
            original_max_position=get("rope.scaling.original_context_length", get("context_length")),
            beta_fast=_shortest(get("rope.scaling.yarn_beta_fast", 32.0)),
            beta_slow=_shortest(get("rope.scaling.yarn_beta_slow", 1.0)),
            attention_factor=attention,
        )
    if kind not in ("none", "linear"):
        raise ValueError(f"{file.path}: rope scaling type {kind!r} is not supported; known are none, linear, yarn")
    if kind == "none" and get("rope.scaling.type", "") == "none":
        factor = 1.0
    if divisors:
        return model_config.RopeScaling("factors", factor, factors=divisors)
    return model_config.RopeScaling("linear", factor) if factor != 1.0 else None
