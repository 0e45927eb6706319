"""Whole models as Hugging Face folders."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import types, weights
from jspec.models import config as model_config
from jspec.models import transformer
from jspec.weights import families, huggingface_export, model_exports, safetensors_files
from tests import checkpoints
from tests.weights import exports
from tests.weights.test_tokenizer import sentencepiece_metadata

pytestmark = pytest.mark.usefixtures("small_programs")

# name: family, changes to the random config
MODELS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tied_head": True}),
    "llama-biases": ("llama", exports.ALL_BIASES),
    "llama-attention-biases": ("llama", {"qkv_bias": True, "output_bias": True}),
    "llama-gelu": ("llama", {"activation": "gelu_tanh"}),
    "llama-wide-heads": ("llama", {"head_size": 16, "num_kv_heads": 4, "rope_theta": 5e5, "norm_eps": 1e-6}),
    **{f"llama-{name}": ("llama", {"head_size": 16, "rope_scaling": it}) for name, it in exports.SCALED.items()},
    "mistral-window": ("mistral", {"windows": (7, 7)}),
    "qwen2": ("qwen2", {"qkv_bias": True, "tied_head": True}),
    "qwen2-window-behind": ("qwen2", {"qkv_bias": True, "windows": (None, 7)}),
    "qwen2-window-before": ("qwen2", {"qkv_bias": True, "windows": (7, None)}),
    "qwen3": ("qwen3", {"qk_norm": True, "head_size": 16}),
    "qwen3-biases": ("qwen3", {"qk_norm": True, "qkv_bias": True, "output_bias": True, "windows": (9, 9)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_read_back(name, tmp_path):
    family, changes = MODELS[name]
    target = exports.target(**changes)
    folder = tmp_path / "out"
    huggingface_export.save_huggingface(target, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    found = weights.load_target(str(folder))
    exports.assert_same_model(found.model, target.model)
    assert (found.tokenizer, found.stop_ids, found.provenance.trained_for) == (None, (2,), None)
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    # The names, against those spelled out for the tests.
    tensors = safetensors_files.load(folder)
    expected = checkpoints.huggingface_tensors(target.model.config, target.model.params)
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(tensors[key], value, err_msg=key)


def test_dtypes(tmp_path):
    target = exports.target(dtype=jnp.bfloat16)
    for name, dtype, stored in (("kept", None, "bfloat16"), ("wide", jnp.float32, "float32")):
        huggingface_export.save_huggingface(target, tmp_path / name, dtype=dtype)
        exports.assert_same_model(weights.load_target(str(tmp_path / name)).model, target.model)
        assert safetensors_files.load(tmp_path / name)["lm_head.weight"].dtype.name == stored
        assert json.loads((tmp_path / name / "config.json").read_text())["torch_dtype"] == stored
    target = exports.target()
    huggingface_export.save_huggingface(target, tmp_path / "narrow", dtype=jnp.bfloat16)
    found = weights.load_target(str(tmp_path / "narrow"), dtype=jnp.bfloat16)
    exports.assert_same_model(found.model, model_exports.cast(target.model, jnp.bfloat16))


def tokenizer_cases() -> dict:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}é"
    cases = {pre: (pre, {}) for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o")}
    cases["beginning"] = ("qwen2", {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": template})
    cases["no-beginning"] = ("llama-bpe", {"tokenizer.ggml.add_bos_token": False})
    cases["two-ends"] = ("gpt-2", {"tokenizer.ggml.eot_token_id": 5})
    return cases


@pytest.mark.parametrize("name", tokenizer_cases())
def test_byte_level_tokenizers_read_back(name, tmp_path):
    pre, changes = tokenizer_cases()[name]
    target = exports.target(exports.byte_level(pre, **changes))
    huggingface_export.save_huggingface(target, tmp_path / "out")
    found = weights.load_target(str(tmp_path / "out"))
    exports.assert_same_model(found.model, target.model)
    exports.assert_same_tokenizer(found.tokenizer, target.tokenizer)
    assert found.stop_ids == target.stop_ids
    # Readers of tokenizer.json alone know no add_bos_token.
    backend, bos = found.tokenizer.backend, found.tokenizer.bos_id
    assert (backend.encode("a", add_special_tokens=True).ids[0] == bos) == target.tokenizer.add_bos
    # And once more, from what a tokenizer.json gives.
    huggingface_export.save_huggingface(found, tmp_path / "again")
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        assert (tmp_path / "again" / file).read_text() == (tmp_path / "out" / file).read_text()


def test_sentencepiece_tokenizer_reads_back(tmp_path):
    target = exports.target(weights.Tokenizer.from_gguf(sentencepiece_metadata()))
    huggingface_export.save_huggingface(target, tmp_path / "out")
    exports.assert_same_tokenizer(weights.load_target(str(tmp_path / "out")).tokenizer, target.tokenizer)


def test_beginning_that_only_a_post_processor_wrote(tmp_path):
    """The model does not want it, whatever the tokenizer.json it came from does."""
    wanted = exports.target(exports.byte_level(**{"tokenizer.ggml.add_bos_token": True}))
    huggingface_export.save_huggingface(wanted, tmp_path / "wanted")
    settings = tmp_path / "wanted" / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"add_bos_token": true', '"add_bos_token": false'))
    unwanted = weights.load_target(str(tmp_path / "wanted"))
    huggingface_export.save_huggingface(unwanted, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["post_processor"] is None
    assert not weights.load_target(str(tmp_path / "out")).tokenizer.add_bos


def test_what_a_draft_was_trained_for(tmp_path):
    huggingface_export.save_huggingface(exports.target(), tmp_path / "out", target_sha256=exports.DIGEST.upper())
    found = weights.load_target(str(tmp_path / "out"))
    assert found.provenance.trained_for == exports.DIGEST
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert content["jspec"] == {"target_sha256": exports.DIGEST}
    huggingface_export.save_huggingface(found, tmp_path / "again")  # a copy still says so
    assert weights.load_target(str(tmp_path / "again")).provenance.trained_for == exports.DIGEST
    with pytest.raises(ValueError, match="sha256 'abc' of the model that the draft was trained for is not 64"):
        huggingface_export.save_huggingface(exports.target(), tmp_path / "other", target_sha256="abc")


def test_ends_of_model_and_tokenizer(tmp_path):
    """Whatever either says ends an answer."""
    target = exports.target(exports.byte_level())
    end = target.tokenizer.stop_ids[0]
    target = dataclasses.replace(target, stop_ids=(7,))
    huggingface_export.save_huggingface(target, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [7, end]
    assert weights.load_target(str(tmp_path / "out")).stop_ids == (7, end)
    none = types.Target(target.model)
    huggingface_export.save_huggingface(none, tmp_path / "none")
    assert weights.load_target(str(tmp_path / "none")).stop_ids == ()
    assert not (tmp_path / "none" / "generation_config.json").exists()


def test_models_of_no_family():
    def refused(pattern, **changes):
        with pytest.raises(ValueError, match=pattern):
            families.config_json(checkpoints.with_options(**changes))

    refused("embedding_scale 2.0", embedding_scale=2.0)
    refused(r"windows of several sizes \[5, 7\]", windows=(5, 7))
    factors = model_config.RopeScaling("factors", 1.0, factors=(1.0,) * 4)
    refused("rope scaling factors", rope_scaling=factors)
    refused("MistralForCausalLM: windows in some layers only; Qwen2ForCausalLM: qkv_bias False", windows=(None, 7))
    refused("LlamaForCausalLM: output_bias False", ffn_bias=True, qkv_bias=True)
    refused("LlamaForCausalLM: windows; .*Qwen3ForCausalLM: ffn_bias True", windows=(7, 7), **exports.ALL_BIASES)
    # One window in no layer is none.
    assert families.config_json(checkpoints.with_options(windows=(None, None)))["model_type"] == "llama"


def test_nothing_is_left_of_a_failure(tmp_path, monkeypatch):
    target = exports.target()

    def fails(error, pattern):
        with pytest.raises(error, match=pattern):
            huggingface_export.save_huggingface(target, tmp_path / "out")
        assert not list(tmp_path.iterdir())

    def full(*_, **__):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_files, "save", full)
        fails(OSError, "no space left")
    plain = model_exports.tensors
    with monkeypatch.context() as patch:
        changed = lambda *each: {name: value * 1.01 for name, value in plain(*each).items()}
        patch.setattr(model_exports, "tensors", changed)
        fails(ValueError, "does not give the same logits when read back; nothing is kept")
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_export, "_token_ids", lambda target: {})
        fails(ValueError, r"end tokens read back as \(\), not \(2,\); nothing is kept")
    target = exports.target(exports.byte_level())
    with monkeypatch.context() as patch:
        swapped = huggingface_export.tokenizer_json(exports.byte_level("qwen2"))
        patch.setattr(huggingface_export, "tokenizer_json", lambda tokenizer: swapped)
        fails(ValueError, "token ids of .* read back as")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="out is not empty"):
        huggingface_export.save_huggingface(target, tmp_path / "out")
    assert (tmp_path / "out" / "notes").read_text() == "mine"


@pytest.mark.peers
@pytest.mark.parametrize("name", MODELS)
def test_transformers_gives_the_same_logits(name, tmp_path, logits):
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from tests.golden.make_families_golden import transformers_logits

    target = exports.target(**MODELS[name][1])
    huggingface_export.save_huggingface(target, tmp_path / "out")
    tokens = np.random.default_rng(6).integers(0, 64, 120)
    assert np.abs(logits(target.model, tokens) - transformers_logits(tmp_path / "out", tokens)).max() < 1e-4


@pytest.mark.peers
@pytest.mark.parametrize("name", tokenizer_cases())
def test_transformers_gives_the_same_ids(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    pre, changes = tokenizer_cases()[name]
    target = exports.target(exports.byte_level(pre, **changes))
    huggingface_export.save_huggingface(target, tmp_path / "out")
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        peer.convert_tokens_to_ids(peer.eos_token) in target.stop_ids and peer.bos_token_id == target.tokenizer.bos_id
    )
    for text in exports.TEXTS:
        if not text.startswith("<s>"):  # transformers writes it twice
            assert peer.encode(text) == target.tokenizer.encode(text), text
    if target.tokenizer.chat_template:
        chat = [{"role": "user", "content": "hello 12345"}]
        assert peer.apply_chat_template(chat, return_dict=False) == target.tokenizer.chat(chat)


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_layers(smollm2_path, tmp_path, logits):
    whole = weights.load_target(str(smollm2_path))
    target = dataclasses.replace(whole, model=transformer.first_layers(whole.model, 2))
    huggingface_export.save_huggingface(target, tmp_path / "out", target_sha256=whole.provenance.sha256)
    found = weights.load_target(str(tmp_path / "out"))
    exports.assert_same_model(found.model, target.model)
    exports.assert_same_tokenizer(found.tokenizer, target.tokenizer)
    assert found.provenance.trained_for == whole.provenance.sha256
    tokens = np.array(whole.tokenizer.encode("The capital of France is Paris, and that of Spain"))
    assert np.abs(logits(found.model, tokens) - logits(target.model, tokens)).max() < 1e-4
