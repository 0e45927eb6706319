"""`load_draft`: whatever a reference holds, told apart by its tensors, and ready for its drafter."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jspec
from jspec import drafters, topology, types, weights
from jspec.drafters import eagle, loading
from jspec.models import heads as heads_lib
from jspec.models import transformer
from jspec.weights import eagle_files, medusa_files, pairing, references, shared_export
from tests import checkpoints, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

OWN, OTHER = "a" * 64, "b" * 64
CHAIN = drafters.Medusa(tree=topology.Tree(widths=(1, 1)))


def target(sha256: str | None = OWN) -> types.Target:
    return dataclasses.replace(tiny.random_target(), provenance=types.Provenance("target.gguf", sha256))


def save_eagle(version, **rest):
    def save(folder):
        head = heads_lib.init_eagle(jax.random.key(0), eagle.like_target(target(), version))
        eagle_files.save(head, target(), folder, base_model="base", **rest)

    return save


def save_medusa(folder, own: bool = False):
    width, vocab_size = tiny.random_target().model.config.width, tiny.VOCAB if own else None
    heads = heads_lib.init_medusa(jax.random.key(0), heads_lib.MedusaConfig(2, 1, width, vocab_size))
    medusa_files.save(heads, target(), folder, base_model="base")


def first_layer() -> types.Target:
    return types.Target(transformer.first_layers(target().model, 1))


# How each is written, what it is loaded as, and the drafter that takes it.
EAGLE = (heads_lib.EagleHead, lambda draft: drafters.Eagle(gamma=2).build(target(), head=draft))
MEDUSA = (heads_lib.MedusaHeads, lambda draft: CHAIN.build(target(), heads=draft))
STANDARD = (types.Target, lambda draft: drafters.Standard(gamma=2).build(target(), draft=draft))
# Three features need more layers than the tiny target has.
FORMS = {
    "eagle 1": (save_eagle(1), *EAGLE),
    "eagle 3": (save_eagle(3), heads_lib.EagleHead, None),
    "speculators": (save_eagle(3, layout="speculators"), heads_lib.EagleHead, None),
    "medusa": (save_medusa, *MEDUSA),
    "medusa, own matrices": (lambda folder: save_medusa(folder, own=True), *MEDUSA),
    "shared": (lambda folder: shared_export.save_shared(first_layer(), target(), folder), *STANDARD),
    "whole": (lambda folder: weights.save_huggingface(first_layer(), folder, target_sha256=OWN), *STANDARD),
    "gguf": (lambda folder: weights.save_gguf(first_layer(), f"{folder}.gguf", target_sha256=OWN), *STANDARD),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_known_by_its_tensors(tmp_path, name):
    save, cls, build = FORMS[name]
    save(tmp_path / "draft")
    reference = str(next(tmp_path.iterdir()))
    draft = jspec.load_draft(reference, target())
    assert isinstance(draft, cls)
    if build is not None:
        bound, _ = build(draft)
        assert bound.max_depth == 2
    with pytest.raises(pairing.WrongTarget, match=OWN):
        jspec.load_draft(reference, target(OTHER))
    assert isinstance(jspec.load_draft(reference, target(OTHER), force=True), cls)
    assert isinstance(jspec.load_draft(reference, target(None)), cls)
    digest = references.digest(references.resolve(reference))
    assert isinstance(jspec.load_draft(reference, target(), sha256=digest), cls)
    with pytest.raises(ValueError, match=f"is {digest}, expected {'0' * 64}"):
        jspec.load_draft(reference, target(), sha256="0" * 64)


def test_heads_inside_a_whole_model_and_in_other_spellings(tmp_path):
    """Names as they stand in files of other engines."""
    assert medusa_files.holds({"model.norm.weight", "medusa_head.0.0.linear.weight"})
    assert medusa_files.holds({"medusa_heads.blocks.0.layers.0.weight"}) and medusa_files.holds({"0.0.linear.weight"})
    assert eagle_files.holds({"model.fc.weight", "model.layers.0.mlp.up_proj.weight"})
    model = set(checkpoints.huggingface_tensors(checkpoints.RANDOM, checkpoints.random_params()))
    assert not medusa_files.holds(model) and not eagle_files.holds(model)


def test_torch_files(tmp_path):
    tensors = {"0.0.linear.weight": np.eye(32, dtype=np.float32), "0.0.linear.bias": np.zeros(32, np.float32)}
    (tmp_path / "draft").mkdir()
    checkpoints.write_torch(tmp_path / "draft" / "medusa_lm_head.pt", tensors)
    assert loading.kind(str(tmp_path / "draft")) == "medusa"
    assert jspec.load_draft(str(tmp_path / "draft"), target()).config.num_heads == 1


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        jspec.load_draft(str(tmp_path / "none"), target())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no .safetensors file"):
        jspec.load_draft(str(tmp_path / "empty"), target())
    smaller = checkpoints.with_options(width=16, head_size=4)
    save_medusa(tmp_path / "heads")
    with pytest.raises(ValueError, match="0.0.linear.weight in medusa_lm_head.safetensors has shape"):
        jspec.load_draft(str(tmp_path / "heads"), tiny.target(smaller, checkpoints.random_params(smaller)))
