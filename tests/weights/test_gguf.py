"""GGUF files: the container, and the models in it."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from jspec import weights
from jspec.models import config as model_config
from jspec.weights import gguf_files, gguf_models
from tests import checkpoints


def test_metadata_and_tensors(tmp_path):
    values = {"a.text": "é🙂", "a.words": ["x", "", "yz"], "a.numbers": [1, -2], "a.floats": [0.5, 2.0], "a.yes": True}
    extra = {"rope_freqs.weight": np.arange(4, dtype=np.float32)}
    file = gguf_files.GgufFile(checkpoints.write_gguf(tmp_path / "m.gguf", metadata=values, tensors=extra))
    assert {key: file.metadata[key] for key in values} == values
    assert file.metadata["general.architecture"] == "llama" and file.metadata["llama.block_count"] == 2
    assert file.shape("blk.0.ffn_down.weight") == (32, 64)
    np.testing.assert_array_equal(file.read("rope_freqs.weight"), extra["rope_freqs.weight"])
    embed = checkpoints.random_params()["embed"]
    np.testing.assert_array_equal(file.read("token_embd.weight", slice(3, 5)), embed[3:5])
    assert file.where("token_embd.weight") == tmp_path / "m.gguf"


def test_dev22_row_order():
    """The order llama.cpp writes is undone for llama, with the key/value head count for keys, and only there."""
    one = model_config.TransformerConfig(8, 1, 8, 1, 1, 8, 8, 8)
    stored = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.float32)[:, None]
    adjust = gguf_models.row_order("llama", one)
    assert adjust("blk.0.attn_q.weight", stored)[:, 0].tolist() == list(range(8))
    assert adjust("blk.0.attn_v.weight", stored) is stored
    two = model_config.TransformerConfig(8, 1, 8, 4, 2, 4, 8, 8)
    keys = np.array([0, 2, 1, 3, 4, 6, 5, 7], np.float32)
    adjust = gguf_models.row_order("llama", two)
    assert adjust("blk.0.attn_k.weight", keys[:, None])[:, 0].tolist() == list(range(8))
    assert adjust("blk.0.attn_k.bias", keys).tolist() == list(range(8))
    queries = np.concatenate([keys, keys + 8])
    assert adjust("blk.0.attn_q.weight", queries[:, None])[:, 0].tolist() == list(range(16))
    np.testing.assert_array_equal(checkpoints.interleave(np.arange(16.0)[:, None], 4)[:, 0], queries)
    for architecture in ("qwen2", "qwen3"):
        assert gguf_models.row_order(architecture, two) is None


def config_of(path, **keys):
    """Config of a file with further metadata."""
    tensors = {"rope_freqs.weight": keys.pop("divisors")} if "divisors" in keys else None
    metadata = {f"llama.{key.replace('__', '.')}": value for key, value in keys.items()}
    return gguf_models.transformer_config(
        gguf_files.GgufFile(checkpoints.write_gguf(path, metadata=metadata, tensors=tensors))
    )


def test_dev23_rope_scaling_keys(tmp_path):
    path = tmp_path / "m.gguf"

    def scaling(**keys):
        return config_of(path, **{f"rope__scaling__{key}": value for key, value in keys.items()}).rope_scaling

    assert scaling() is None and scaling(type="none", factor=2.0) is None
    assert scaling(type="linear", factor=4.0) == model_config.RopeScaling("linear", 4.0)
    assert config_of(path, rope__scale_linear=2.0).rope_scaling == model_config.RopeScaling("linear", 2.0)
    assert scaling(type="yarn", factor=4.0, original_context_length=64) == model_config.RopeScaling("yarn", 4.0, 64)
    stated = scaling(type="yarn", factor=4.0, original_context_length=64, attn_factor=0.5, yarn_beta_fast=16.0)
    assert stated.beta_fast == 16.0 and stated.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4) + 1))
    divisors = np.array([1, 1, 2, 4], np.float32)
    factors = config_of(path, divisors=divisors).rope_scaling
    assert factors == model_config.RopeScaling("factors", 1.0, factors=(1.0, 1.0, 2.0, 4.0))
    with pytest.raises(ValueError, match="rope scaling type 'longrope' is not supported"):
        scaling(type="longrope")
    with pytest.raises(ValueError, match="yarn_ext_factor is 0.5"):
        scaling(type="yarn", factor=2.0, yarn_ext_factor=0.5)
    with pytest.raises(ValueError, match="rope_freqs.weight has 3 values, expected 4"):
        config_of(path, divisors=divisors[:3])
    with pytest.raises(ValueError, match="together with yarn"):
        config_of(path, divisors=divisors, rope__scaling__type="yarn")


def test_other_keys(tmp_path):
    path = tmp_path / "m.gguf"
    assert config_of(path, attention__sliding_window=16).windows == (16, 16)
    assert config_of(path, logit_scale=1.0, expert_count=0).windows == ()
    for key, value in {"expert_count": 8, "logit_scale": 0.5, "attention__scale": 0.25}.items():
        with pytest.raises(ValueError, match=f"llama.{key.replace('__', '.')} is {value}, which is not supported"):
            config_of(path, **{key: value})


def test_dev24_head_size_and_norms_of_qwen3(tmp_path):
    config = checkpoints.with_options(qk_norm=True, head_size=16, tied_head=True)
    path = checkpoints.write_gguf(tmp_path / "m.gguf", config, architecture="qwen3")
    assert gguf_models.transformer_config(gguf_files.GgufFile(path)) == config


def test_unknown_architecture(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="m.gguf: architecture 'mamba' is not supported; known are llama, qw"):
        weights.load_target(str(tmp_path / "m.gguf"))


def test_missing_unknown_and_misshapen_tensors(tmp_path):
    path = tmp_path / "m.gguf"
    checkpoints.write_gguf(path, drop=("blk.1.attn_k.weight", "output_norm.weight"))
    with pytest.raises(ValueError, match="m.gguf: .*missing: output_norm.weight, blk.1.attn_k.weight"):
        weights.load_target(str(path))
    checkpoints.write_gguf(path, tensors={"blk.0.ffn_gate_exps.weight": np.zeros((2, 4), np.float32)})
    with pytest.raises(ValueError, match="unknown: blk.0.ffn_gate_exps.weight"):
        weights.load_target(str(path))
    wrong = checkpoints.random_params(checkpoints.with_options(ffn_size=96))
    checkpoints.write_gguf(path, params=wrong)
    with pytest.raises(ValueError, match=r"blk.0.ffn_gate.weight in m.gguf has shape \(96, 32\), expected \(64, 32\)"):
        weights.load_target(str(path))
    checkpoints.write_gguf(path, drop=("token_embd.weight",))
    with pytest.raises(ValueError, match="tensor token_embd.weight is missing"):
        weights.load_target(str(path))


def test_not_a_gguf_file(tmp_path):
    path = tmp_path / "m.gguf"
    for content in (b"", b"GG", b"<html>not found</html>"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="m.gguf is not a GGUF file"):
            weights.load_target(str(path))
    path.write_bytes(b"GGUF" + struct.pack("<I", 1))
    with pytest.raises(ValueError, match="m.gguf is truncated or corrupt"):
        weights.load_target(str(path))
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(ValueError, match="m.gguf: GGUF version 50331648; known are"):
        weights.load_target(str(path))


def test_truncated_anywhere(tmp_path):
    path = checkpoints.write_gguf(tmp_path / "m.gguf", metadata={"a.words": ["x"] * 20})
    content = path.read_bytes()
    for size in (*range(4, 2400, 61), len(content) - 16):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="m.gguf"):
            weights.load_target(str(path))


def test_one_part_of_several(tmp_path):
    path = checkpoints.write_gguf(tmp_path / "m.gguf", metadata={"split.count": 2})
    with pytest.raises(ValueError, match="m.gguf is one of 2 parts"):
        weights.load_target(str(path))
