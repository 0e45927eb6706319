"""End to end: checkpoints of every kind to parameters and logits."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import weights
from jspec.models import config as model_config
from jspec.models import transformer
from jspec.weights import safetensors_files
from tests import checkpoints

TOKENS = np.random.default_rng(1).integers(0, 64, 24)


def assert_trees_equal(found, expected):
    """Same structure, and every array bit for bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, left), right in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right), err_msg=jax.tree_util.keystr(path))


CONFIGS = {
    "llama": ("LlamaForCausalLM", "llama", {}),
    "llama-tied": ("LlamaForCausalLM", "llama", {"tied_head": True}),
    "llama-biases": ("LlamaForCausalLM", "llama", {"qkv_bias": True, "output_bias": True, "ffn_bias": True}),
    "mistral": ("MistralForCausalLM", "llama", {}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {"qkv_bias": True, "tied_head": True}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {"qk_norm": True, "head_size": 16}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_dev22_dev24_huggingface_and_gguf_agree(name, tmp_path, logits):
    family, architecture, changes = CONFIGS[name]
    config = checkpoints.with_options(**changes)
    params = checkpoints.random_params(config)
    folder = weights.load_target(str(checkpoints.write_huggingface(tmp_path / "hf", config, params, family)))
    file = weights.load_target(str(checkpoints.write_gguf(tmp_path / "model.gguf", config, params, architecture)))
    assert folder.model.config == file.model.config == config
    assert_trees_equal(folder.model.params, params)
    assert_trees_equal(file.model.params, params)
    difference = np.abs(logits(folder.model, TOKENS) - logits(file.model, TOKENS)).max()
    assert difference < 1e-5


def test_single_file_and_dtype(tmp_path):
    params = checkpoints.random_params()
    folder = checkpoints.write_huggingface(tmp_path, params=params)
    target = weights.load_target(str(folder / "model.safetensors"), dtype=jnp.bfloat16)
    assert_trees_equal(target.model.params, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params))
    assert target.tokenizer is None and target.stop_ids == (2,)


def test_bfloat16_checkpoint(tmp_path):
    params = jax.tree.map(lambda leaf: np.asarray(jnp.asarray(leaf, jnp.bfloat16)), checkpoints.random_params())
    target = weights.load_target(str(checkpoints.write_huggingface(tmp_path, params=params)))
    assert_trees_equal(target.model.params, jax.tree.map(lambda leaf: leaf.astype(np.float32), params))


def test_folder_with_one_gguf(tmp_path):
    checkpoints.write_gguf(tmp_path / "model.gguf")
    assert_trees_equal(weights.load_target(str(tmp_path)).model.params, checkpoints.random_params())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "BF16"])
def test_quantised_gguf(kind, tmp_path):
    import gguf

    config = checkpoints.with_options(width=64, head_size=16)
    params = checkpoints.random_params(config)
    path = checkpoints.write_gguf(tmp_path / "model.gguf", config, params, quantization=kind)
    target = weights.load_target(str(path))
    number = gguf.GGMLQuantizationType[kind]

    def rounded(matrix):
        return gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(matrix), number), number)

    np.testing.assert_array_equal(target.model.params["embed"], rounded(params["embed"]))
    # Blocks lie along rows, so reordering and fusing rows commutes with rounding.
    np.testing.assert_array_equal(target.model.params["layers"][1]["qkv"], rounded(params["layers"][1]["qkv"]))
    np.testing.assert_array_equal(target.model.params["layers"][0]["ffn_norm"], params["layers"][0]["ffn_norm"])


def test_dev19a_tied_and_no_head(tmp_path, states_and_logits):
    config = checkpoints.with_options(tied_head=True)
    params = checkpoints.random_params(config)
    target = weights.load_target(str(checkpoints.write_huggingface(tmp_path, config, params)))
    assert target.model.config.tied_head and "head" not in target.model.params
    states, found = states_and_logits(target.model, TOKENS)
    np.testing.assert_allclose(found, states @ params["embed"].T, atol=1e-4)


def test_dev19b_tied_flag_but_another_head(tmp_path, states_and_logits):
    params = checkpoints.random_params()  # with a head
    folder = checkpoints.write_huggingface(tmp_path, params=params, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="lm_head.weight is stored and differs"):
        target = weights.load_target(str(folder))
    assert not target.model.config.tied_head
    states, found = states_and_logits(target.model, TOKENS)
    np.testing.assert_allclose(found, states @ params["head"].T, atol=1e-4)


def test_dev19b_tied_flag_and_the_same_head(tmp_path):
    params = checkpoints.random_params()
    params["head"] = params["embed"]
    folder = checkpoints.write_huggingface(tmp_path, params=params, tie_word_embeddings=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target = weights.load_target(str(folder))
    assert target.model.config.tied_head and "head" not in target.model.params


def test_dev19c_untied_and_no_head_is_refused(tmp_path):
    params = checkpoints.random_params(checkpoints.with_options(tied_head=True))
    folder = checkpoints.write_huggingface(tmp_path, params=params)
    with pytest.raises(ValueError, match="lm_head.weight is not stored"):
        weights.load_target(str(folder))


def test_unknown_missing_and_misshapen_tensors_are_all_named(tmp_path):
    folder = checkpoints.write_huggingface(tmp_path)
    tensors = safetensors_files.load(folder)
    del tensors["model.norm.weight"], tensors["model.layers.1.self_attn.k_proj.weight"]
    tensors["model.layers.0.mlp.extra.weight"] = np.zeros(3, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)  # harmless
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((63, 32), np.float32)
    safetensors_files.save(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError) as error:
        weights.load_target(str(folder))
    message = str(error.value)
    assert "missing: " in message and "model.norm.weight" in message and "1.self_attn.k_proj.weight" in message
    assert "unknown: model.layers.0.mlp.extra.weight (in model.safetensors)" in message
    assert "mlp.up_proj.weight in model.safetensors has shape (63, 32), expected (64, 32)" in message
    assert "inv_freq" not in message


def test_dev24_bias_that_the_family_does_not_have(tmp_path):
    config = checkpoints.with_options(qkv_bias=True)
    folder = checkpoints.write_huggingface(tmp_path, config, architecture="MistralForCausalLM")
    with pytest.raises(ValueError, match="unknown: .*self_attn.q_proj.bias"):
        weights.load_target(str(folder))


def test_integer_weights_are_refused(tmp_path):
    folder = checkpoints.write_huggingface(tmp_path)
    tensors = safetensors_files.load(folder)
    tensors["model.norm.weight"] = np.zeros(32, np.int8)
    safetensors_files.save(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="model.norm.weight holds int8"):
        weights.load_target(str(folder))


def test_config_without_weights_and_weights_without_config(tmp_path):
    folder = checkpoints.write_huggingface(tmp_path / "a")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no .safetensors file"):
        weights.load_target(str(folder))
    folder = checkpoints.write_huggingface(tmp_path / "b")
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json is missing"):
        weights.load_target(str(folder))
    with pytest.raises(ValueError, match="config.json is missing"):
        weights.load_target(str(folder / "model.safetensors"))


def test_provenance_and_expected_digest(tmp_path):
    import hashlib

    folder = checkpoints.write_huggingface(tmp_path)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    target = weights.load_target(str(folder), sha256=digest)
    assert (target.provenance.reference, target.provenance.sha256) == (str(folder), digest)
    with pytest.raises(ValueError) as error:
        weights.load_target(str(folder), sha256="0" * 64)
    assert digest in str(error.value) and "0" * 64 in str(error.value)


def test_dev23_gguf_and_huggingface_llama3_scaling(tmp_path, logits):
    """llama.cpp stores divisors instead of the rule; beyond 64 positions the two must still agree."""
    scaling = model_config.RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
    config = checkpoints.with_options(rope_scaling=scaling, head_size=16)
    params = checkpoints.random_params(config)
    folder = checkpoints.write_huggingface(
        tmp_path / "hf",
        config,
        params,
        rope_scaling={
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    theta = config.rope_theta ** (-np.arange(0, 16, 2) / 16)
    turns = 64 * theta / (2 * np.pi)
    smooth = (turns - 1) / 3
    divisors = np.where(turns > 4, 1, np.where(turns < 1, 8, 1 / ((1 - smooth) / 8 + smooth))).astype(np.float32)
    path = checkpoints.write_gguf(tmp_path / "model.gguf", config, params, tensors={"rope_freqs.weight": divisors})
    first, second = weights.load_target(str(folder)), weights.load_target(str(path))
    assert first.model.config == config
    stored = model_config.RopeScaling("factors", 1.0, factors=tuple(map(float, divisors)))
    assert second.model.config.rope_scaling == stored
    tokens = np.random.default_rng(2).integers(0, 64, 120)
    np.testing.assert_allclose(logits(first.model, tokens), logits(second.model, tokens), atol=2e-4)
    plain = transformer.Model(first.model.params, dataclasses.replace(config, rope_scaling=None))
    assert np.abs(logits(first.model, tokens) - logits(plain, tokens))[100:].max() > 0.1


GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "families.npz"


def test_dev23_dev24_families_match_transformers(tmp_path, logits):
    """Logits of tiny checkpoints against what transformers computed (tests/golden/make_families_golden.py)."""
    with np.load(GOLDEN) as golden:
        names = sorted(name.removesuffix("/logits") for name in golden if name.endswith("/logits"))
        assert len(names) >= 9
        for name in names:
            architecture, changes, content = json.loads(str(golden[f"{name}/checkpoint"]))
            if "rope_scaling" in changes:
                changes["rope_scaling"] = model_config.RopeScaling(**changes["rope_scaling"])
            changes |= {"windows": tuple(changes["windows"])} if "windows" in changes else {}
            config = checkpoints.with_options(**changes)
            folder = checkpoints.write_huggingface(tmp_path / name, config, None, architecture, **content)
            target = weights.load_target(str(folder))
            assert target.model.config == config, name
            found = logits(target.model, golden["tokens"])[golden["positions"]]
            assert np.abs(found - golden[f"{name}/logits"]).max() < 1e-4, name


@pytest.mark.real_model
def test_smollm2(smollm2_path):
    target = weights.load_target(str(smollm2_path))
    config = target.model.config
    assert (config.num_layers, config.width, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.ffn_size, config.vocab_size, config.tied_head, config.rope_theta) == (1536, 49152, True, 100000.0)
    assert config.norm_eps == 1e-5 and config.max_positions == 8192 and config.head_size == 64
    assert target.stop_ids == (2,) and target.tokenizer.bos_id == 1 and not target.tokenizer.add_bos
