"""Whole models as GGUF files."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import types, weights
from jspec.models import config as model_config
from jspec.models import transformer
from jspec.weights import gguf_export, gguf_files, gguf_models, gguf_tokenizers, huggingface_export
from tests import checkpoints
from tests.weights import exports
from tests.weights.test_tokenizer import byte_level_metadata, sentencepiece_metadata

pytestmark = pytest.mark.usefixtures("small_programs")

# name: architecture, changes to the random config
MODELS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tied_head": True}),
    "llama-biases": ("llama", exports.ALL_BIASES),
    "llama-wide-heads": ("llama", {"head_size": 16, "num_kv_heads": 1, "rope_theta": 5e5, "norm_eps": 1e-6}),
    "llama-linear": ("llama", {"rope_scaling": exports.SCALED["linear"]}),
    "llama-yarn": ("llama", {"rope_scaling": exports.SCALED["yarn"]}),
    "llama-window": ("llama", {"windows": (7, 7)}),
    "qwen2": ("qwen2", {"qkv_bias": True, "tied_head": True}),
    "qwen3": ("qwen3", {"qk_norm": True, "head_size": 16}),
}


def save(target: types.Target, path, **settings) -> types.Target:
    """Export and load."""
    gguf_export.save_gguf(target, path, **settings)
    return weights.load_target(str(path))


@pytest.mark.parametrize("name", MODELS)
def test_models_read_back(name, tmp_path):
    architecture, changes = MODELS[name]
    target = exports.target(**changes)
    found = save(target, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    exports.assert_same_model(found.model, target.model)
    assert (found.tokenizer, found.stop_ids, found.provenance.trained_for) == (None, (2,), None)
    # Names, order of rows and keys, against a file that the tests write without these tables.
    file = gguf_files.GgufFile(tmp_path / "model.gguf")
    params = checkpoints.random_params(target.model.config)
    other = checkpoints.write_gguf(tmp_path / "other.gguf", target.model.config, params, architecture)
    other = gguf_files.GgufFile(other)
    assert set(file.names()) == set(other.names())
    for tensor in other.names():
        np.testing.assert_array_equal(file.read(tensor), other.read(tensor), err_msg=tensor)
    assert {key: file.metadata.get(key) for key in other.metadata} == other.metadata


def test_the_package_reads_it(tmp_path):
    import gguf

    target = exports.target(exports.byte_level("llama-bpe"))
    gguf_export.save_gguf(target, tmp_path / "model.gguf", target_sha256=exports.DIGEST)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    value = lambda key: reader.fields[key].contents()
    assert value("general.architecture") == "llama" and value("general.file_type") == gguf.LlamaFileType.ALL_F32
    assert value("tokenizer.ggml.tokens") == byte_level_metadata()["tokenizer.ggml.tokens"]
    assert value("tokenizer.ggml.pre") == "llama-bpe" and value("jspec.target_sha256") == exports.DIGEST
    assert {tensor.tensor_type for tensor in reader.tensors} == {gguf.GGMLQuantizationType.F32}
    # llama.cpp takes no tensor that its tables lack.
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for tensor in reader.tensors:
        assert known.get_name(tensor.name, try_suffixes=(".weight", ".bias")) == tensor.name


def test_rounded_scalings(tmp_path, logits):
    """Divisors stand for Llama 3.1's rule, and a float32 for yarn's scale: the config differs, the logits hardly."""
    tokens = np.random.default_rng(2).integers(0, 64, 120)
    scalings = {
        "llama3": exports.SCALED["llama3"],
        "factors": model_config.RopeScaling("factors", 2.0, factors=(1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 4.0)),
        "yarn": model_config.RopeScaling("yarn", 4.0, 64, beta_fast=16.0, beta_slow=2.0, attention_factor=0.7),
    }
    for name, scaling in scalings.items():
        # One of them with biases that are Qwen2's, whose architecture knows no divisors.
        target = exports.target(num_layers=1, head_size=16, rope_scaling=scaling, qkv_bias=name == "llama3")
        found = save(target, tmp_path / f"{name}.gguf")
        kind = "yarn" if name == "yarn" else "factors"
        assert found.model.config.rope_scaling.kind == kind, name
        assert np.abs(logits(found.model, tokens) - logits(target.model, tokens)).max() < 1e-4, name
        exports.assert_same_model(save(found, tmp_path / f"{name}-again.gguf").model, found.model)


def test_bfloat16_is_stored_whole(tmp_path):
    target = exports.target(dtype=jnp.bfloat16)
    exports.assert_same_model(save(target, tmp_path / "model.gguf").model, target.model)


TEMPLATE = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}é"}
TOKENIZERS = {
    **{pre: (pre, {}) for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o")},
    "beginning": ("qwen2", {"tokenizer.ggml.add_bos_token": True} | TEMPLATE),
    "no-beginning": ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}),
    "two-ends": ("gpt-2", {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.unknown_token_id": 263}),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_read_back(name, tmp_path):
    pre, changes = TOKENIZERS[name]
    target = exports.target(exports.byte_level(pre, **changes))
    found = save(target, tmp_path / "model.gguf")
    exports.assert_same_tokenizer(found.tokenizer, target.tokenizer)
    assert found.tokenizer.special_tokens == target.tokenizer.special_tokens
    assert found.stop_ids == target.stop_ids
    expected = byte_level_metadata(pre, **changes)
    metadata = gguf_files.GgufFile(tmp_path / "model.gguf").metadata
    assert {key: metadata[key] for key in expected} == expected
    # By way of a tokenizer.json.
    huggingface_export.save_huggingface(target, tmp_path / "folder")
    folder = weights.load_target(str(tmp_path / "folder"))
    gguf_export.save_gguf(folder, tmp_path / "again.gguf")
    again = gguf_files.GgufFile(tmp_path / "again.gguf").metadata
    assert {key: again[key] for key in expected} == expected


def test_vocabularies_are_filled_up_to_the_model(tmp_path):
    """llama.cpp takes the number of tokens for the number of rows."""
    target = exports.target(exports.byte_level(), vocab_size=270)
    found = save(target, tmp_path / "model.gguf")
    tokens = gguf_files.GgufFile(tmp_path / "model.gguf").metadata["tokenizer.ggml.tokens"]
    assert tokens[-4:] == ["[PAD266]", "[PAD267]", "[PAD268]", "[PAD269]"]
    assert found.tokenizer.vocab()[-4:] == [""] * 4
    exports.assert_same_tokenizer(found.tokenizer, target.tokenizer)
    with pytest.raises(ValueError, match="the tokenizer has 267 tokens, the model only 266"):
        gguf_export.save_gguf(exports.target(exports.byte_level(), vocab_size=266), tmp_path / "small.gguf")


def test_one_end_beside_an_end_of_turn_that_is_none(tmp_path):
    """A reader that is told no end of turn would take this one."""
    metadata = byte_level_metadata(**{"tokenizer.ggml.eot_token_id": 264})
    metadata["tokenizer.ggml.tokens"][263] = "<|im_end|>"
    target = exports.target(weights.Tokenizer.from_gguf(metadata))
    assert target.stop_ids == (264,)
    assert save(target, tmp_path / "model.gguf").stop_ids == (264,)


def test_what_a_draft_was_trained_for(tmp_path):
    found = save(exports.target(), tmp_path / "model.gguf", target_sha256=exports.DIGEST)
    assert found.provenance.trained_for == exports.DIGEST
    assert save(found, tmp_path / "again.gguf").provenance.trained_for == exports.DIGEST
    with pytest.raises(ValueError, match="is not 64 hexadecimal digits"):
        gguf_export.save_gguf(exports.target(), tmp_path / "other.gguf", target_sha256="abc")


def test_models_of_no_architecture():
    def refused(pattern, **changes):
        with pytest.raises(ValueError, match=pattern):
            gguf_models.metadata(checkpoints.with_options(**changes))

    refused("activation gelu", activation="gelu")
    refused("embedding_scale 2.0", embedding_scale=2.0)
    refused("windows that differ by layer", windows=(None, 7))
    refused("qk_norm together with biases", qk_norm=True, qkv_bias=True)
    refused("yarn scaling without truncate", rope_scaling=exports.SCALED["yarn-stated"])
    refused("qk_norm together with rope scaling llama3", qk_norm=True, rope_scaling=exports.SCALED["llama3"])


def changed(**changes) -> weights.Tokenizer:
    """The byte-level tokenizer with parts of its tokenizer.json replaced, `model` merged."""
    import tokenizers

    content = json.loads(exports.byte_level("qwen2").backend.to_str())
    content |= changes | {"model": content["model"] | changes.get("model", {})}
    return weights.Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))


def test_tokenizers_that_gguf_cannot_describe():
    def refused(pattern, tokenizer, stop_ids=()):
        with pytest.raises(ValueError, match=pattern):
            gguf_tokenizers.metadata(tokenizer, 300, stop_ids)

    refused("a BPE model that is not byte-level", weights.Tokenizer.from_gguf(sentencepiece_metadata()))
    refused("the normaliser Lowercase", changed(normalizer={"type": "Lowercase"}))
    refused("end_of_word_suffix '</w>'", changed(model={"end_of_word_suffix": "</w>"}))
    flags = {"single_word": False, "lstrip": True, "rstrip": False, "normalized": False, "special": True}
    refused("added token '<s>' with lstrip", changed(added_tokens=[{"id": 263, "content": "<s>"} | flags]))
    cut = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    refused(
        r"no name for how the tokenizer cuts text, .*known are the cuts of default, gpt-2", changed(pre_tokenizer=cut)
    )
    refused("with ignore_merges True", changed(model={"ignore_merges": True}))
    refused(r"at most 3 tokens that end an answer, the model has \[1, 2, 3, 4\]", exports.byte_level(), (1, 2, 3, 4))


def test_nfc_is_left_out_with_a_warning(tmp_path):
    target = exports.target(changed(normalizer={"type": "NFC"}))
    with pytest.warns(UserWarning, match="NFC"):
        found = save(target, tmp_path / "model.gguf")
    assert found.tokenizer.encode("é") == target.tokenizer.encode("é") == target.tokenizer.encode("e\u0301")
    assert found.tokenizer.encode("e\u0301") != target.tokenizer.encode("e\u0301")


def test_nothing_is_left_of_a_failure(tmp_path, monkeypatch):
    import gguf

    target, path = exports.target(), tmp_path / "model.gguf"

    def fails(error, pattern):
        with pytest.raises(error, match=pattern):
            gguf_export.save_gguf(target, path)
        assert not list(tmp_path.iterdir())

    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
        fails(OSError, "no space left")
    reading = gguf_models.row_order
    with monkeypatch.context() as patch:  # rows written in the order of halves
        patch.setattr(gguf_models, "row_order", lambda *of, writing=False: None if writing else reading(*of))
        fails(ValueError, "does not give the same logits when read back; nothing is kept")
    path.write_bytes(b"mine")
    with pytest.raises(ValueError, match="model.gguf exists already"):
        gguf_export.save_gguf(target, path)
    assert path.read_bytes() == b"mine"
    with pytest.raises(ValueError, match="absent is not a folder"):
        gguf_export.save_gguf(target, tmp_path / "absent" / "model.gguf")


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_layers(smollm2_path, tmp_path, logits):
    whole = weights.load_target(str(smollm2_path))
    target = dataclasses.replace(whole, model=transformer.first_layers(whole.model, 2))
    found = save(target, tmp_path / "model.gguf", target_sha256=whole.provenance.sha256)
    exports.assert_same_model(found.model, target.model)
    exports.assert_same_tokenizer(found.tokenizer, target.tokenizer)
    assert found.provenance.trained_for == whole.provenance.sha256
    # The tokenizer's metadata is that of the original file.
    before, after = (gguf_files.GgufFile(path).metadata for path in (smollm2_path, tmp_path / "model.gguf"))
    keys = [key for key in before if key.startswith("tokenizer.")]
    assert {key: after.get(key) for key in keys if key in after} == {key: before[key] for key in keys if key in after}
    assert {"tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"} <= set(keys)
    tokens = np.array(whole.tokenizer.encode("The capital of France is Paris, and that of Spain"))
    assert np.abs(logits(found.model, tokens) - logits(target.model, tokens)).max() < 1e-4
