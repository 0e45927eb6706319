"""config.json to TransformerConfig."""

from __future__ import annotations

import pytest

from jspec.models import config as model_config
from jspec.models import layers
from jspec.weights import families
from tests import checkpoints


def read(architecture="LlamaForCausalLM", **changes):
    content = checkpoints.huggingface_config(checkpoints.RANDOM, architecture) | changes
    return families.transformer_config({key: value for key, value in content.items() if value != "absent"})


def test_what_a_config_may_leave_out():
    config = read(num_key_value_heads="absent", head_dim="absent", rope_theta="absent", rms_norm_eps="absent")
    assert (config.num_kv_heads, config.head_size, config.rope_theta, config.norm_eps) == (4, 8, 10000.0, 1e-6)
    assert read(num_key_value_heads=None, head_dim=None).num_kv_heads == 4
    assert read("Qwen3ForCausalLM", head_dim="absent").head_size == 128
    assert read(architectures="absent") == read(architectures=None) == read()


def test_dev24_biases_and_norms():
    llama = read(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.output_bias, llama.ffn_bias, llama.qk_norm) == (True, True, True, False)
    assert not any((read().qkv_bias, read().output_bias, read().ffn_bias))
    qwen2 = read("Qwen2ForCausalLM")
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.ffn_bias, qwen2.qk_norm) == (True, False, False, False)
    qwen3 = read("Qwen3ForCausalLM", head_dim=16)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_size) == (False, True, 16)
    assert read("Qwen3ForCausalLM", attention_bias=True).output_bias


def test_windows():
    assert read("MistralForCausalLM", sliding_window=5).windows == (5, 5)
    assert read("MistralForCausalLM", sliding_window=None).windows == ()
    assert read("MistralForCausalLM", sliding_window="absent").windows == (4096, 4096)
    assert read(sliding_window=5).windows == ()  # Llama has none, whatever the file says
    qwen = dict(architecture="Qwen2ForCausalLM", sliding_window=5)
    assert read(**qwen).windows == ()
    assert read(**qwen, use_sliding_window=True, max_window_layers=1).windows == (None, 5)
    assert read(**qwen, use_sliding_window=True, max_window_layers=0).windows == (5, 5)
    assert read(**qwen, use_sliding_window=True, max_window_layers=28).windows == ()
    kinds = ["sliding_attention", "full_attention"]
    assert read(**qwen, use_sliding_window=True, layer_types=kinds).windows == (5, None)
    with pytest.raises(ValueError, match="layer_types has chunked; known are"):
        read(**qwen, use_sliding_window=True, layer_types=["chunked", "full_attention"])
    with pytest.raises(ValueError, match="layer_types has 1 entries for num_hidden_layers 2"):
        read(**qwen, use_sliding_window=True, layer_types=["full_attention"])


LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_dev23_llama3_scaling(key):
    scaled = read(rope_scaling=LLAMA3 | {key: "llama3"}, rope_theta=500000.0, head_dim=64)
    assert scaled.rope_scaling == model_config.RopeScaling("llama3", 32.0, 8192, 1.0, 4.0)
    assert scaled.rope_theta == 500000.0
    frequencies, scale = layers.rope_frequencies(scaled)
    assert scale == 1.0
    assert frequencies[15:18] == pytest.approx([0.00129055, 0.00042956, 0.00009708], rel=1e-4)
    newer = read(rope_parameters=LLAMA3 | {key: "llama3", "rope_theta": 500000.0}, rope_theta="absent", head_dim=64)
    assert newer == scaled


def test_dev23_other_scalings():
    assert read(rope_scaling={"rope_type": "default"}).rope_scaling is None
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_theta="absent").rope_theta == 5e5
    assert read(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == model_config.RopeScaling("linear", 2.0)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read(rope_scaling=yarn).rope_scaling == model_config.RopeScaling("yarn", 4.0, 64)
    more = {"beta_fast": 16, "beta_slow": 2, "attention_factor": 0.7, "truncate": False}
    expected = model_config.RopeScaling(
        "yarn", 4.0, 64, beta_fast=16.0, beta_slow=2.0, attention_factor=0.7, truncate=False
    )
    assert read(rope_scaling=yarn | more).rope_scaling == expected
    assert read(rope_scaling={"type": "yarn", "factor": 4.0}).rope_scaling.original_max_position == 256
    ratio = read(rope_scaling=yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}).rope_scaling
    assert ratio.attention_factor == 1.0


def test_dev23_scalings_that_are_refused():
    for kind in ("dynamic", "longrope", "su"):
        with pytest.raises(ValueError, match=f"rope_scaling has type '{kind}', which is not supported; known are"):
            read(rope_scaling={"type": kind, "factor": 2.0})
    with pytest.raises(ValueError, match="rope_scaling: low_freq_factor is None"):
        read(rope_scaling={"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64})
    with pytest.raises(ValueError, match="partial_rotary_factor is 0.5"):
        read(partial_rotary_factor=0.5)
    with pytest.raises(ValueError, match="differs by layer type"):
        read(rope_parameters={"full_attention": {"rope_theta": 1.0}})


def test_what_is_refused():
    with pytest.raises(ValueError, match="architecture GPT2LMHeadModel is not supported; known are Llama"):
        read(architectures=["GPT2LMHeadModel"])
    with pytest.raises(ValueError, match="architecture gpt2 is not supported"):
        read(architectures=None, model_type="gpt2")
    with pytest.raises(ValueError, match="config.json: hidden_size is None, expected a whole number above 0"):
        read(hidden_size="absent")
    for value in ("64", True, 0, 6.5):
        with pytest.raises(ValueError, match="num_hidden_layers is"):
            read(num_hidden_layers=value)
    with pytest.raises(ValueError, match="hidden_act 'relu' is not known"):
        read(hidden_act="relu")
    with pytest.raises(ValueError, match="weights quantised with gptq are not supported"):
        read(quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match="config.json: num_heads 4 is not a multiple of num_kv_heads 3"):
        read(num_key_value_heads=3)
    with pytest.raises(ValueError, match="hidden_size 33 is not a multiple of num_attention_heads 4"):
        read(hidden_size=33, head_dim=None)
