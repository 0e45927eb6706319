"""Draft models that borrow their target's embedding, output matrix and tokenizer."""

from __future__ import annotations

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import drafters, types, weights
from jspec.drafters import standard
from jspec.models import transformer
from jspec.weights import load, pairing, safetensors_files, shared_export
from tests import checkpoints
from tests.weights import exports

pytestmark = pytest.mark.usefixtures("small_programs")

IDS = np.array([40, 3, 60, 11, 7], np.int32)
DIGEST, OTHER = "a" * 64, "b" * 64


def target(**changes) -> types.Target:
    made = exports.target(**changes)
    return dataclasses.replace(made, provenance=types.Provenance("target.gguf", DIGEST))


def first_layer(whole: types.Target, draft_ids=None) -> types.Target:
    """A draft that was trained a little: its layer and norm have moved."""
    model = transformer.first_layers(whole.model, 1)
    moved = {name: jax.tree.map(lambda x: 1.01 * x, model.params[name]) for name in ("layers", "final_norm")}
    return types.Target(transformer.Model(model.params | moved, model.config), draft_ids=draft_ids)


@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_comes_back_with_what_it_borrows(tmp_path, tied):
    whole = target(tied_head=tied, tokenizer=exports.byte_level()) if not tied else target(tied_head=True)
    draft = first_layer(whole, IDS)
    folder = tmp_path / "out"
    shared_export.save_shared(draft, whole, folder)
    assert os.listdir(tmp_path) == ["out"]
    assert sorted(os.listdir(folder)) == ["config.json", "draft_vocabulary.npy", "model.safetensors"]
    names = set(safetensors_files.load(folder))
    expected = set(checkpoints.huggingface_tensors(draft.model.config, draft.model.params))
    assert names == expected - {"model.embed_tokens.weight", "lm_head.weight"}
    borrows = ["embed"] if tied else ["embed", "head"]
    content = json.loads((folder / "config.json").read_text())
    assert content["jspec"] == {"target_sha256": DIGEST, "borrows": borrows}

    found = standard.load_draft(str(folder), whole)
    exports.assert_same_model(found.model, draft.model)
    assert found.model.params["embed"] is whole.model.params["embed"]  # lent, not copied
    assert found.tokenizer is whole.tokenizer and found.stop_ids == whole.stop_ids
    assert found.provenance.trained_for == DIGEST
    np.testing.assert_array_equal(found.draft_ids, IDS)
    settings = drafters.Standard(gamma=2, draft=drafters.Draft(reference=str(folder)))
    assert settings.build(whole)[1]["draft_ids"].tolist() == sorted({*IDS.tolist(), *whole.stop_ids})


def test_a_head_of_its_own_is_kept(tmp_path):
    """Only what is the target's is left out."""
    whole = target()
    draft = first_layer(whole)
    params = {**draft.model.params, "head": draft.model.params["head"] + 1}
    draft = dataclasses.replace(draft, model=transformer.Model(params, draft.model.config))
    shared_export.save_shared(draft, whole, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["jspec"]["borrows"] == ["embed"]
    assert "lm_head.weight" in safetensors_files.load(tmp_path / "out")
    exports.assert_same_model(standard.load_draft(str(tmp_path / "out"), whole).model, draft.model)
    other = {**params, "embed": params["embed"] + 1}
    stranger = dataclasses.replace(draft, model=transformer.Model(other, draft.model.config))
    with pytest.raises(ValueError, match="shares neither embedding nor output matrix with target.gguf"):
        shared_export.save_shared(stranger, whole, tmp_path / "none")


def test_dtypes(tmp_path):
    """What is stored is rounded, what is lent is not; a bfloat16 target lends bfloat16."""
    whole = target()
    draft = first_layer(whole)
    shared_export.save_shared(draft, whole, tmp_path / "out", dtype="bfloat16")
    assert {tensor.dtype.name for tensor in safetensors_files.load(tmp_path / "out").values()} == {"bfloat16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    found = standard.load_draft(str(tmp_path / "out"), whole).model.params
    np.testing.assert_array_equal(found["embed"], whole.model.params["embed"])
    rounded = draft.model.params["layers"][0]["qkv"].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(found["layers"][0]["qkv"], rounded)
    half = dataclasses.replace(whole, model=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), whole.model))
    assert {leaf.dtype for leaf in jax.tree.leaves(standard.load_draft(str(tmp_path / "out"), half).model)} == {
        jnp.dtype(jnp.bfloat16)
    }


def test_what_cannot_lend(tmp_path):
    whole = target()
    folder = str(tmp_path / "out")
    shared_export.save_shared(first_layer(whole), whole, folder)
    for load_alone in (weights.load_target, load.load_target):
        with pytest.raises(ValueError, match="config.json: this draft borrows embed and head from its target"):
            load_alone(folder)
    with pytest.raises(pairing.WrongTarget, match=f"{DIGEST}.*{OTHER}"):
        standard.load_draft(folder, dataclasses.replace(whole, provenance=types.Provenance("other", OTHER)))
    wide = target(width=64, head_size=16)
    with pytest.raises(ValueError, match="has width 32; its target target.gguf has 64"):
        standard.load_draft(folder, wide, force=True)
    many = target(vocab_size=96)
    with pytest.raises(ValueError, match="has vocabulary of size 64; its target target.gguf has 96"):
        standard.load_draft(folder, many, force=True)


@pytest.mark.parametrize("value", ["embed", ["embed", "norm"], ["embed", "embed"], [3]])
def test_what_borrows_may_say(tmp_path, value):
    whole = target()
    shared_export.save_shared(first_layer(whole), whole, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    content = json.loads(path.read_text())
    content["jspec"]["borrows"] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="config.json: jspec.borrows is .*, expected some of embed, head"):
        standard.load_draft(str(tmp_path / "out"), whole)


def test_stored_tensors_that_are_borrowed_too_are_refused(tmp_path):
    whole = target(tied_head=True)
    draft = first_layer(whole)
    shared_export.save_shared(draft, whole, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = safetensors_files.load(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        safetensors_files.save(tensors | {name: np.asarray(whole.model.params["embed"])}, file)
        with pytest.raises(ValueError, match=f"unknown: {name}"):
            standard.load_draft(str(tmp_path / "out"), whole)
    path = tmp_path / "out" / "config.json"
    content = json.loads(path.read_text())
    content["jspec"]["borrows"] = ["embed", "head"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="borrows head although tie_word_embeddings is true"):
        standard.load_draft(str(tmp_path / "out"), whole)


def test_nothing_is_left_of_a_failure(tmp_path, monkeypatch):
    whole = target()
    plain = safetensors_files.save

    def wrong(tensors, path, **rest):
        plain({name: 1.01 * value for name, value in tensors.items()}, path, **rest)

    monkeypatch.setattr(safetensors_files, "save", wrong)
    with pytest.raises(ValueError, match="same logits when read back; nothing is kept"):
        shared_export.save_shared(first_layer(whole), whole, tmp_path / "out")
    assert not os.listdir(tmp_path)
