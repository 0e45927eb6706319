"""Hugging Face checkpoints: `config.json` to `TransformerConfig` and back, and the names of their tensors.

A family is a row of `FAMILIES`: what its configs leave unsaid and which products carry a bias. What the keys mean was
read in transformers 5.24 (`models/*/configuration_*.py`, `modeling_rope_utils.py`); older spellings are taken too
(`rope_scaling` beside `rope_theta`, `type` for `rope_type`).
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from typing import Any

from jspec.models import config as model_config
from jspec.weights import assembly

NAMES = assembly.Names(
    embed="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    layer="model.layers.{}.",
    leaves={
        "attention_norm": ("input_layernorm.weight",),
        "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        "query_norm": ("self_attn.q_norm.weight",),
        "key_norm": ("self_attn.k_norm.weight",),
        "output": ("self_attn.o_proj.weight",),
        "output_bias": ("self_attn.o_proj.bias",),
        "ffn_norm": ("post_attention_layernorm.weight",),
        "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "down": ("mlp.down_proj.weight",),
        "down_bias": ("mlp.down_proj.bias",),
    },
    # Rotary frequencies, which old checkpoints store and the config implies.
    ignored=re.compile(r".*rotary_emb\.inv_freq"),
)


@dataclasses.dataclass(frozen=True)
class Family:
    """What one architecture means beyond its config.json.

    model_type:    the config's own word for it, used when `architectures` is absent.
    defaults:      values of keys that a config may leave out.
    qkv_bias:      True, or the config key that says so.
    output_bias, ffn_bias: False, or the config key that says so.
    qk_norm:       queries and keys are normalised.
    window_key:    config key that switches `sliding_window` on; None when its presence is enough.
    """

    model_type: str
    defaults: dict[str, Any]
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    ffn_bias: bool | str = False
    qk_norm: bool = False
    window_key: str | None = None


_LLAMA = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "hidden_act": "silu", "tie_word_embeddings": False}
_QWEN = _LLAMA | {"max_position_embeddings": 32768, "max_window_layers": 28, "use_sliding_window": False}

FAMILIES = {
    "LlamaForCausalLM": Family(
        "llama", _LLAMA, qkv_bias="attention_bias", output_bias="attention_bias", ffn_bias="mlp_bias"
    ),
    "MistralForCausalLM": Family(
        "mistral", _LLAMA | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        _QWEN | {"num_key_value_heads": 32, "sliding_window": 4096},
        qkv_bias=True,
        window_key="use_sliding_window",
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        _QWEN | {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        window_key="use_sliding_window",
    ),
}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


_BIASES = ("qkv_bias", "output_bias", "ffn_bias")


class _Reader:
    """Values of a config.json with the family's defaults; complaints name the file and the key."""

    def __init__(self, content: dict, defaults: dict, where: Any):
        self.content, self.defaults, self.where = content, defaults, where

    def get(self, key: str, default: Any = None) -> Any:
        return self.content[key] if key in self.content else self.defaults.get(key, default)

    def number(self, key: str, kind: type = int) -> Any:
        value = self.get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or value <= 0 or kind(value) != value:
            expected = "a whole number above 0" if kind is int else "a number above 0"
            raise ValueError(f"{self.where}: {key} is {value!r}, expected {expected}")
        return kind(value)

    def flag(self, key: bool | str) -> bool:
        return key if isinstance(key, bool) else bool(self.get(key, False))


def transformer_config(content: dict, where: str | pathlib.Path = "config.json") -> model_config.TransformerConfig:
    """What a config.json describes.

    Args:
      content: the parsed file.
      where: its name, for messages.

    Raises:
      ValueError: an architecture, activation, rope scaling or quantisation that is not known, or a key that is missing
        or makes no sense.
    """
    family = _family(content, where)
    reader = _Reader(content, family.defaults, where)
    if content.get("quantization_config"):
        method = content["quantization_config"].get("quant_method", "unnamed")
        raise ValueError(f"{where}: weights quantised with {method} are not supported; take the unquantised or a GGUF")
    width, heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    layers = reader.number("num_hidden_layers")
    # null and absence both mean one key/value head per query head, unless the family says otherwise.
    kv_heads = reader.number("num_key_value_heads") if reader.get("num_key_value_heads") is not None else heads
    if reader.get("head_dim") is None and width % heads:
        raise ValueError(f"{where}: hidden_size {width} is not a multiple of num_attention_heads {heads}")
    head_size = reader.number("head_dim") if reader.get("head_dim") is not None else width // heads
    activation = reader.get("hidden_act")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{where}: hidden_act {activation!r} is not known; known are {', '.join(_ACTIVATIONS)}")
    max_positions = reader.number("max_position_embeddings")
    theta, scaling = _rope(reader, max_positions)
    try:
        return model_config.TransformerConfig(
            vocab_size=reader.number("vocab_size"),
            num_layers=layers,
            width=width,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_size,
            ffn_size=reader.number("intermediate_size"),
            max_positions=max_positions,
            norm_eps=reader.number("rms_norm_eps", float),
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=reader.flag(family.qkv_bias),
            output_bias=reader.flag(family.output_bias),
            ffn_bias=reader.flag(family.ffn_bias),
            qk_norm=family.qk_norm,
            tied_head=reader.flag("tie_word_embeddings"),
            activation=_ACTIVATIONS[activation],
            windows=_windows(reader, family, layers),
        )
    except ValueError as error:
        raise error if str(where) in str(error) else ValueError(f"{where}: {error}") from error


def _family(content: dict, where: Any) -> Family:
    architectures = content.get("architectures") or []
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    by_type = {family.model_type: family for family in FAMILIES.values()}
    if not architectures and content.get("model_type") in by_type:
        return by_type[content["model_type"]]
    named = ", ".join(map(str, architectures)) or content.get("model_type") or "none"
    raise ValueError(f"{where}: architecture {named} is not supported; known are {', '.join(FAMILIES)}")


def _windows(reader: _Reader, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, counting the query's own position, as transformers' masks do."""
    if "sliding_window" not in family.defaults or (family.window_key and not reader.flag(family.window_key)):
        return ()
    if reader.get("sliding_window") is None:
        return ()
    window = reader.number("sliding_window")
    kinds = reader.get("layer_types")
    if kinds is None:
        first = reader.number("max_window_layers") if family.window_key and reader.get("max_window_layers") else 0
        kinds = ["full_attention"] * min(first, num_layers) + ["sliding_attention"] * (num_layers - first)
    if strange := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        known = "full_attention, sliding_attention"
        raise ValueError(f"{reader.where}: layer_types has {', '.join(map(str, strange))}; known are {known}")
    if len(kinds) != num_layers:
        raise ValueError(f"{reader.where}: layer_types has {len(kinds)} entries for num_hidden_layers {num_layers}")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _rope(reader: _Reader, max_positions: int) -> tuple[float, model_config.RopeScaling | None]:
    """Base and scaling of the rotary embedding, from either spelling."""
    key = "rope_parameters" if reader.get("rope_parameters") else "rope_scaling"
    content = reader.get(key) or {}
    if any(isinstance(value, dict) for value in content.values()):
        raise ValueError(f"{reader.where}: {key} differs by layer type, which is not supported")
    where = f"{reader.where}: {key}"
    rope = _Reader(content, {"rope_theta": reader.get("rope_theta", 10000.0)}, where)
    theta = rope.number("rope_theta", float)
    partial = content.get("partial_rotary_factor", reader.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"{where}.partial_rotary_factor is {partial}; only whole heads can be rotated (1.0)")
    kind = content.get("rope_type", content.get("type", "default"))
    if kind in (None, "default"):
        return theta, None
    if kind == "linear":
        return theta, model_config.RopeScaling("linear", rope.number("factor", float))
    if kind == "llama3":
        return theta, model_config.RopeScaling(
            "llama3",
            rope.number("factor", float),
            original_max_position=rope.number("original_max_position_embeddings"),
            low_freq_factor=rope.number("low_freq_factor", float),
            high_freq_factor=rope.number("high_freq_factor", float),
        )
    if kind == "yarn":
        return theta, _yarn(content, rope, max_positions)
    raise ValueError(f"{where} has type {kind!r}, which is not supported; known are default, linear, llama3, yarn")


def _yarn(content: dict, rope: _Reader, max_positions: int) -> model_config.RopeScaling:
    rope.defaults |= {"original_max_position_embeddings": max_positions}
    original = rope.number("original_max_position_embeddings")
    # A null factor (DeepSeek's habit) means the ratio of the two lengths.
    factor = rope.number("factor", float) if content.get("factor") is not None else max_positions / original
    attention = content.get("attention_factor")
    if attention is None and content.get("mscale") and content.get("mscale_all_dim"):
        attention = _mscale(factor, content["mscale"]) / _mscale(factor, content["mscale_all_dim"])
    return model_config.RopeScaling(
        "yarn",
        factor,
        original_max_position=original,
        beta_fast=float(content.get("beta_fast") or 32.0),
        beta_slow=float(content.get("beta_slow") or 1.0),
        attention_factor=None if attention is None else float(attention),
        truncate=bool(content.get("truncate", True)),
    )


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def config_json(config: model_config.TransformerConfig) -> dict[str, Any]:
    """What config.json says of a model: the inverse of `transformer_config`.

    The family is the first of `FAMILIES` that has all the model's features. Keys are spelled in the older way
    (`rope_theta` beside `rope_scaling`), which transformers 5 reads too.

    Raises:
      ValueError: no family has such models; the message names the features that stand in the way.
    """
    windows = sorted({window for window in config.windows if window is not None})
    kind = config.rope_scaling.kind if config.rope_scaling else "linear"
    strange = [f"rope scaling {kind}"] if kind not in ("linear", "llama3", "yarn") else []
    strange += [f"embedding_scale {config.embedding_scale}"] if config.embedding_scale != 1.0 else []
    strange += [f"windows of several sizes {windows}"] if len(windows) > 1 else []
    if strange:
        raise ValueError(f"config.json of no known family ({', '.join(FAMILIES)}) has {', '.join(strange)}")
    misfits = {name: _misfits(family, config) for name, family in FAMILIES.items()}
    name = next((name for name, found in misfits.items() if not found), None)
    if name is None:
        reasons = "; ".join(f"{name}: {', '.join(found)}" for name, found in misfits.items())
        raise ValueError(f"no known family has such models, since they differ in: {reasons}")
    family = FAMILIES[name]
    content: dict[str, Any] = {
        "architectures": [name],
        "model_type": family.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": next(key for key, value in _ACTIVATIONS.items() if value == config.activation),
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_content(config.rope_scaling),
        "tie_word_embeddings": config.tied_head,
    }
    for feature in _BIASES:
        if isinstance(key := getattr(family, feature), str):
            content[key] = getattr(config, feature)
    if "sliding_window" in family.defaults:
        content["sliding_window"] = windows[0] if windows else None
    if family.window_key:
        content[family.window_key] = bool(windows)
        if windows:
            whole = [config.window(layer) is None for layer in range(config.num_layers)]
            # The older key says only how many layers at the start have none; readers that know both take the list.
            content["max_window_layers"] = whole.index(False)
            content["layer_types"] = ["full_attention" if full else "sliding_attention" for full in whole]
    return content


def _misfits(family: Family, config: model_config.TransformerConfig) -> list[str]:
    """Features of a model that a family does not have, or cannot be without."""
    found, keys = [], {}
    for feature in _BIASES:
        rule, value = getattr(family, feature), getattr(config, feature)
        # A key is one switch for all that it names.
        differs = keys.setdefault(rule, value) != value if isinstance(rule, str) else rule != value
        if differs:
            found.append(f"{feature} {value}")
    if family.qk_norm != config.qk_norm:
        found.append(f"qk_norm {config.qk_norm}")
    if any(config.windows):
        if "sliding_window" not in family.defaults:
            found.append("windows")
        elif not family.window_key and None in config.windows:
            found.append("windows in some layers only")
    return found


def rope_content(scaling: model_config.RopeScaling | None) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json."""
    if scaling is None:
        return None
    content: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        content["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.kind == "llama3":
        content |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        content |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        if scaling.attention_factor is not None:
            content["attention_factor"] = scaling.attention_factor
    return content
