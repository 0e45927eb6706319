"""config.json of EAGLE heads: what it and the stored names say together, and how it is written.

The layouts are described in `eagle_files`. What a file leaves open is settled so:

* EAGLE-1's `bias` (of fc): absent means true, as in the released code, but false for vLLM's architecture
  (EagleLlamaForCausalLM), which has none; SGLang's (LlamaForCausalLMEagle) has one whatever the key says, and takes the
  key for the attention's.
* `norm_before_residual`: absent means false natively and true in the speculators layout, as vLLM reads them. (The
  speculators package itself always writes the key; SGLang ignores it.)
* Other switches of EAGLE-3: absent means off. A tensor whose switch is off is unknown, one whose switch is on and that
  is not there is missing.
* `eagle_aux_hidden_state_layer_ids` name layers by their input, as vLLM reads them; SGLang adds one to each.
* `tie_word_embeddings` is not looked at where a head's matrix is stored; without one it is refused for EAGLE-3.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, NamedTuple

from jspec.models import config as model_config
from jspec.models import heads as heads_lib
from jspec.weights import families

_SGLANG_EAGLE1 = "LlamaForCausalLMEagle"
_VLLM_EAGLE1 = "EagleLlamaForCausalLM"
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # of the layer, by model_type
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# What the speculators layout asks for and a head does not say: drafts per round, unless the server is told otherwise,
# and a version of the package whose layout this is.
_SPECULATIVE_TOKENS = 5
_SPECULATORS_VERSION = "0.3.0"


class Stored(NamedTuple):
    """Which tensors a file has.

    eagle3:    some that only EAGLE-3 has.
    embedding, head, fc_bias, input_norm: of these leaves.
    """

    eagle3: bool
    embedding: bool
    head: bool
    fc_bias: bool
    input_norm: bool


def read(content: dict, stored: Stored, where: pathlib.Path) -> heads_lib.EagleConfig:
    """What a config.json and the stored names describe.

    Args:
      content: the parsed file.
      stored: what lies beside it.
      where: its name, for messages.

    Raises:
      ValueError: a head, a layer or a value that is not known.
    """
    try:
        return _read(content, stored, where)
    except ValueError as error:
        raise error if str(where) in str(error) else ValueError(f"{where}: {error}") from error


def _read(content: dict, stored: Stored, where: pathlib.Path) -> heads_lib.EagleConfig:
    speculators = content.get("speculators_model_type")
    if speculators not in (None, "eagle3"):
        raise ValueError(f"speculators_model_type {speculators!r} is not supported; known is 'eagle3'")
    if speculators is None:
        layer = _layer(content, where)
    else:
        inner = content.get("transformer_layer_config")
        if not isinstance(inner, dict):
            raise ValueError(f"transformer_layer_config is {inner!r}, expected an object")
        layer = _layer(inner, f"{where}: transformer_layer_config")
    target_width = _number(content, "target_hidden_size", layer.width)
    eagle3_named = any("Eagle3" in str(name) for name in content.get("architectures") or [])
    if speculators is None and not (eagle3_named or stored.eagle3):
        return heads_lib.EagleConfig(
            version=1,
            layer=layer,
            target_width=target_width,
            vocab_size=layer.vocab_size,
            fc_bias=_fc_bias(content, stored),
            own_embedding=stored.embedding,
            input_norm=stored.input_norm,
        )
    nested = content.get("eagle_config") or {}
    if not _flag(nested, "use_aux_hidden_state", True):
        raise ValueError("eagle_config.use_aux_hidden_state is false: heads that read one feature are not supported")
    if not stored.head and _flag(content, "tie_word_embeddings", False):
        raise ValueError("tie_word_embeddings is true and no lm_head.weight stored; engines differ in whose they take")
    feature_layers = _layer_ids(content.get(_LAYER_IDS, nested.get(_LAYER_IDS)))
    return heads_lib.EagleConfig(
        version=3,
        layer=layer,
        target_width=target_width,
        vocab_size=_number(content, "draft_vocab_size", layer.vocab_size),
        num_features=_number(content, "num_aux_hidden_states", 3 if feature_layers is None else len(feature_layers)),
        own_embedding=stored.embedding,
        own_head=stored.head,
        norm_before_residual=_flag(content, "norm_before_residual", speculators is not None),
        norm_before_fc=_flag(content, "norm_before_fc", _flag(nested, "norm_before_fc", False)),
        fc_norm=_flag(content, "fc_norm", _flag(content, "use_aux_norm", False)),
        norm_output=_flag(content, "norm_output", False),
        feature_layers=feature_layers,
    )


def _layer(content: dict, where: Any) -> model_config.TransformerConfig:
    """The one decoder layer. What a head does not use (tied head, windows, embedding scale) is at its default."""
    named = " ".join(map(str, content.get("architectures") or []))
    kind = content.get("model_type") or ("qwen3" if "Qwen3" in named else "llama")
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"{where}: model_type {kind!r} is not supported for a head; known: {', '.join(_ARCHITECTURES)}"
        )
    layer = families.transformer_config(content | {"architectures": [_ARCHITECTURES[kind]]}, where)
    if layer.num_layers != 1:
        raise ValueError(f"{where}: num_hidden_layers is {layer.num_layers}; an EAGLE head has one layer")
    if layer.windows:
        raise ValueError(f"{where}: use_sliding_window is not supported for a head")
    # The released code and vLLM let this key switch the biases of q, k and v alone.
    return dataclasses.replace(layer, qkv_bias=_flag(content, "qkv_bias", layer.qkv_bias), tied_head=False)


def _fc_bias(content: dict, stored: Stored) -> bool:
    architectures = content.get("architectures") or []
    if _SGLANG_EAGLE1 in architectures and stored.fc_bias:
        return True
    return _flag(content, "bias", _VLLM_EAGLE1 not in architectures)


def _flag(content: dict, key: str, default: bool) -> bool:
    value = content.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}, expected true or false")
    return default if value is None else value


def _number(content: dict, key: str, default: int) -> int:
    value = content.get(key)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{key} is {value!r}, expected a whole number above 0")
    return default if value is None else value


def _layer_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(layer) is int and layer >= 0 for layer in value):
        raise ValueError(f"{_LAYER_IDS} is {value!r}, expected layers of the target")
    return tuple(value)


def eagle1(config: heads_lib.EagleConfig, base_model: str, *, for_sglang: bool, say_bias: bool) -> dict[str, Any]:
    """A Llama config. `say_bias`: the reader takes `bias` for that of fc; others take it for the attention's."""
    return {
        "architectures": [_SGLANG_EAGLE1 if for_sglang else "LlamaForCausalLM"],
        "base_model_name_or_path": base_model,
        "bias": say_bias and config.fc_bias,
        **_layer_content(config.layer),
    }


def native(config: heads_lib.EagleConfig, base_model: str, *, name_layers: bool) -> dict[str, Any]:
    """EAGLE-3's own. `name_layers`: say which layers are fused, if the head does."""
    nested = {"use_aux_hidden_state": True, "norm_before_fc": config.norm_before_fc}
    content = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "base_model_name_or_path": base_model,
        **_layer_content(config.layer),
        **_switches(config),
        "eagle_config": nested,
    }
    if config.feature_layers is not None and name_layers:
        content[_LAYER_IDS] = nested[_LAYER_IDS] = list(config.feature_layers)
    return content


def speculators(config: heads_lib.EagleConfig, base_model: str) -> dict[str, Any]:
    """EAGLE-3 as the speculators package writes it."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": _SPECULATIVE_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    content = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            # A target in memory does not know its architecture's name, and vLLM asks for the model's alone.
            "verifier": {"name_or_path": base_model, "architectures": []},
        },
        "transformer_layer_config": _layer_content(config.layer),
        "embed_requires_grad": False,
        **_switches(config),
    }
    if config.feature_layers is not None:
        content[_LAYER_IDS] = list(config.feature_layers)
    return content


def _switches(config: heads_lib.EagleConfig) -> dict[str, Any]:
    return {
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.target_width,
        "num_aux_hidden_states": config.num_features,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "tie_word_embeddings": False,
    }


def _layer_content(layer: model_config.TransformerConfig) -> dict[str, Any]:
    """A Llama or Qwen3 config.json of one layer: the inverse of `families.transformer_config`."""
    names = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
    content = {
        "model_type": "qwen3" if layer.qk_norm else "llama",
        "vocab_size": layer.vocab_size,
        "hidden_size": layer.width,
        "intermediate_size": layer.ffn_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_size,
        "hidden_act": names[layer.activation],
        "max_position_embeddings": layer.max_positions,
        "rms_norm_eps": layer.norm_eps,
        "rope_theta": layer.rope_theta,
        "rope_scaling": _rope_content(layer.rope_scaling),
        "attention_bias": layer.output_bias,
        "mlp_bias": layer.ffn_bias,
        "tie_word_embeddings": False,
    }
    return content if layer.qkv_bias == layer.output_bias else content | {"qkv_bias": layer.qkv_bias}


def _rope_content(scaling: model_config.RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "factors":
        raise ValueError("rope scaling by stored factors (a GGUF target's) has no place in config.json")
    return families.rope_content(scaling) | {"type": scaling.kind}  # older engines know the older key alone
