"""EAGLE heads written for each engine, and read again."""

from __future__ import annotations

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import types
from jspec.models import config as model_config
from jspec.models import heads as heads_lib
from jspec.models import transformer
from jspec.weights import eagle_files, safetensors_files
from tests import checkpoints, tiny
from tests.weights.eagle_tensors import IDS, LLAMA, D, E, H, K, V, eagle1, eagle3, load

pytestmark = pytest.mark.usefixtures("small_programs")


def one_layer(**changes) -> model_config.TransformerConfig:
    return checkpoints.with_options(num_layers=1, **changes)


def made(version: int, reduced: bool = False, dtype=jnp.float32, layer=None, **changes) -> heads_lib.EagleHead:
    """A random head; a reduced vocabulary in no order."""
    layer = layer or one_layer()
    config = dict(version=version, layer=layer, target_width=E, vocab_size=len(IDS) if reduced else V)
    if version == 3:
        config |= {"num_features": 3, "own_head": True}
    head = heads_lib.init_eagle(jax.random.key(3), heads_lib.EagleConfig(**(config | changes)), dtype)
    params = {**head.params, "draft_ids": jnp.asarray(IDS, jnp.int32)} if reduced else head.params
    return heads_lib.EagleHead(params, head.config)


def save(head, folder, **rest):
    eagle_files.save(head, tiny.random_target(), folder, base_model="org/base", **rest)


LLAMA3 = model_config.RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = model_config.RopeScaling("yarn", 4.0, 64, beta_fast=16.0, attention_factor=1.25, truncate=False)
ROUND_TRIPS = [
    (dict(version=1), {}),
    (dict(version=1, fc_bias=True, own_embedding=True, input_norm=True), {}),
    (dict(version=1), {"engine": "vllm"}),
    (dict(version=1, fc_bias=True), {"engine": "sglang"}),
    (dict(version=3), {}),
    (dict(version=3, reduced=True, norm_before_fc=True, norm_output=True, feature_layers=(0, 1, 2)), {}),
    (dict(version=3, reduced=True, fc_norm=True, own_embedding=True), {"engine": "sglang"}),
    (dict(version=3, own_head=False), {}),
    (dict(version=3, reduced=True, norm_before_residual=True, feature_layers=(0, 1, 2)), {"layout": "speculators"}),
    (dict(version=3, layer=one_layer(qk_norm=True)), {"layout": "speculators"}),
    (dict(version=3, layer=one_layer(qkv_bias=True, rope_scaling=LLAMA3)), {}),
    (dict(version=1, layer=one_layer(rope_scaling=YARN, activation="gelu_tanh")), {}),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(ROUND_TRIPS)))
def test_round_trip(tmp_path, index):
    changes, settings = ROUND_TRIPS[index]
    head = made(**changes)
    save(head, tmp_path / "out", **settings)
    assert os.listdir(tmp_path) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    found = load(str(tmp_path / "out"))
    assert found.config == head.config
    jax.tree.map(np.testing.assert_array_equal, found.params, head.params)


def stored(folder) -> tuple[dict, dict[str, np.ndarray]]:
    return json.loads((folder / "config.json").read_text()), safetensors_files.load(folder / "model.safetensors")


def test_what_is_written(tmp_path):
    """Names, offsets and switches, by layout."""
    head = made(3, reduced=True)
    rows = {"qkv": np.split(np.asarray(head.params["layer"]["qkv"]), [H * D, H * D + K * D])}
    for layout, inner in (("native", "midlayer."), ("speculators", "layers.0.")):
        save(head, tmp_path / layout, layout=layout)
        content, tensors = stored(tmp_path / layout)
        assert set(tensors) == set(eagle3(inner))
        assert {name: tensor.shape for name, tensor in tensors.items()} == {
            n: t.shape for n, t in eagle3(inner).items()
        }
        for name, part in zip("qkv", rows["qkv"]):
            np.testing.assert_array_equal(tensors[f"{inner}self_attn.{name}_proj.weight"], part)
        np.testing.assert_array_equal(tensors["d2t"], IDS - np.arange(len(IDS)))
        np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), np.sort(IDS))
        assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
        off = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
        said = off | {"tie_word_embeddings": False, "draft_vocab_size": len(IDS), "target_hidden_size": E}
        assert content.items() >= said.items()
    native, speculators = stored(tmp_path / "native")[0], content
    assert native.items() >= (LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}).items()
    assert native["eagle_config"] == {"use_aux_hidden_state": True, "norm_before_fc": False}
    assert speculators["transformer_layer_config"].items() >= LLAMA.items()
    assert speculators["speculators_model_type"] == "eagle3"
    assert speculators["speculators_config"]["verifier"]["name_or_path"] == "org/base"
    assert speculators["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0


def test_eagle1_for_each_engine(tmp_path):
    """vLLM gets no bias, SGLang one of zeros; neither is told of it, since they would give it to the attention."""
    for engine, stored_bias, architecture in (
        ("eagle", False, "LlamaForCausalLM"),
        ("vllm", False, "LlamaForCausalLM"),
        ("sglang", True, "LlamaForCausalLMEagle"),
    ):
        save(made(1), tmp_path / engine, engine=engine)
        content, tensors = stored(tmp_path / engine)
        assert set(tensors) == {name for name in eagle1() if name != "fc.bias" or stored_bias}
        assert content["bias"] is False and content["architectures"] == [architecture]
    assert not tensors["fc.bias"].any()
    biased = made(1, fc_bias=True)
    save(biased, tmp_path / "zero", engine="vllm")  # a bias of zeros is none
    assert "fc.bias" not in stored(tmp_path / "zero")[1]
    biased = heads_lib.EagleHead({**biased.params, "fc_bias": jnp.ones(E)}, biased.config)
    save(biased, tmp_path / "biased")
    assert stored(tmp_path / "biased")[0]["bias"] is True
    with pytest.raises(ValueError, match="fc_bias is not zero, and vLLM's EAGLE-1 heads have none"):
        save(biased, tmp_path / "no", engine="vllm")


def test_a_borrowed_output_matrix_is_written_out(tmp_path):
    target = np.asarray(tiny.random_target().model.params["head"])
    save(made(3, own_head=False), tmp_path / "whole")
    np.testing.assert_array_equal(stored(tmp_path / "whole")[1]["lm_head.weight"], target)
    save(made(3, reduced=True, own_head=False), tmp_path / "reduced")
    np.testing.assert_array_equal(stored(tmp_path / "reduced")[1]["lm_head.weight"], target[IDS])


def test_dtypes_follow_heads_and_target(tmp_path):
    head = made(3, reduced=True, dtype=jnp.bfloat16)
    save(head, tmp_path / "out")
    content, tensors = stored(tmp_path / "out")
    assert content["torch_dtype"] == "bfloat16" and tensors["fc.weight"].dtype.name == "bfloat16"
    assert load(str(tmp_path / "out")).dtype == jnp.float32
    model = tiny.random_target().model
    half = types.Target(transformer.Model(jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params), model.config))
    jax.tree.map(np.testing.assert_array_equal, eagle_files.load(str(tmp_path / "out"), half).params, head.params)


FACTORS = model_config.RopeScaling("factors", 1.0, factors=(1.0,) * 4)


@pytest.mark.parametrize(
    ("changes", "settings", "match"),
    [
        (dict(version=1), {"layout": "speculators"}, "this one is EAGLE-1"),
        (dict(version=1, own_head=True), {}, "no place for an output matrix"),
        (dict(version=1, input_norm=True), {"engine": "sglang"}, "sglang applies no norm"),
        (dict(version=3), {"layout": "gguf"}, "layout 'gguf' is not one of native, speculators"),
        (dict(version=3), {"engine": "trt"}, "engine 'trt' is not one of eagle, vllm, sglang"),
        (dict(version=3, norm_before_residual=True), {"engine": "sglang"}, "norm_before_residual: SGLang ignores it"),
        (dict(version=3, feature_layers=(0, 1, 2)), {"engine": "sglang"}, "would read the layers after these"),
        (dict(version=3), {"engine": "sglang", "layout": "speculators"}, "is vLLM's"),
        (dict(version=3, layer=one_layer(qkv_bias=True)), {"engine": "sglang"}, "attention biases"),
        (dict(version=3, layer=one_layer(qk_norm=True)), {}, "write layout speculators"),
        (
            dict(version=3, layer=one_layer(qk_norm=True, ffn_bias=True)),
            {"layout": "speculators"},
            "no feed-forward bias",
        ),
        (dict(version=3, layer=one_layer(vocab_size=65)), {}, "vocab_size is 65"),
        (dict(version=3, layer=one_layer(rope_scaling=FACTORS)), {}, "no place in config.json"),
    ],
)
def test_heads_that_cannot_be_written(tmp_path, changes, settings, match):
    with pytest.raises(ValueError, match=match):
        save(made(**changes), tmp_path / "out", **settings)
    assert not os.listdir(tmp_path)


def test_draft_ids_that_cannot_be_written(tmp_path):
    head = made(3, reduced=True)
    for ids, match in ((IDS + 10, "is outside the target's 64 tokens"), (0 * IDS, "id 0 stands twice")):
        wrong = heads_lib.EagleHead({**head.params, "draft_ids": jnp.asarray(ids)}, head.config)
        with pytest.raises(ValueError, match=match):
            save(wrong, tmp_path / "out")


def test_default_layers_are_left_unsaid_for_sglang(tmp_path):
    config = checkpoints.with_options(num_layers=8)
    target = tiny.target(config, checkpoints.random_params(config))
    head = made(3, feature_layers=(2, 4, 5))
    eagle_files.save(head, target, tmp_path / "sglang", engine="sglang", base_model="base")
    assert eagle_files.load(str(tmp_path / "sglang"), target).config == dataclasses.replace(
        head.config, feature_layers=None
    )
    eagle_files.save(head, target, tmp_path / "eagle", base_model="base")
    assert eagle_files.load(str(tmp_path / "eagle"), target).config == head.config


def test_nothing_is_left_of_a_failed_write(tmp_path, monkeypatch):
    head = made(3, reduced=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(ValueError, match="full is not empty"):
        save(head, tmp_path / "full")
    real = safetensors_files.save

    def full_disk(tensors, path, **rest):
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    def wrong_values(tensors, path, **rest):
        real(tensors | {"norm.weight": 1.01 * tensors["norm.weight"]}, path, **rest)

    def wrong_ids(tensors, path, **rest):
        marks = np.roll(tensors["t2d"], -1)
        real(tensors | {"d2t": np.flatnonzero(marks) - np.arange(len(IDS)), "t2d": marks}, path, **rest)

    for fault, match in ((full_disk, "No space"), (wrong_values, "same logits"), (wrong_ids, "vocabulary reads back")):
        monkeypatch.setattr(safetensors_files, "save", fault)
        with pytest.raises((OSError, ValueError), match=match):
            save(head, tmp_path / "out")
        assert os.listdir(tmp_path) == ["full"]
