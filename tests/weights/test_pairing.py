"""Drafts record the sha256 of their target, and loading them for another is refused."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from jspec import drafters, topology, types
from jspec.drafters import eagle, standard
from jspec.models import heads as heads_lib
from jspec.weights import eagle_files, head_files, load, medusa_files, pairing
from tests import checkpoints, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

OWN, OTHER = "a" * 64, "b" * 64


def with_sha256(sha256: str | None) -> types.Target:
    return dataclasses.replace(tiny.random_target(), provenance=types.Provenance("target.gguf", sha256))


def save_eagle(version: int, layout: str = "native"):
    def save(folder, target):
        head = heads_lib.init_eagle(jax.random.key(0), eagle.like_target(target, version), target.model.dtype)
        eagle_files.save(head, target, folder, layout=layout, base_model="base")

    return save


def save_medusa(folder, target):
    config = heads_lib.MedusaConfig(2, 1, target.model.config.width, None)
    medusa_files.save(heads_lib.init_medusa(jax.random.key(0), config), target, folder, base_model="base")


TREE = drafters.Medusa(tree=topology.Tree(widths=(1, 1)))
# How each is written and read, where its tensors lie, and a drafter that takes it (three features need more layers).
HEADS = {
    "eagle 1": (save_eagle(1), eagle_files.load, (), drafters.Eagle(), drafters.EagleDraft),
    "eagle 3": (save_eagle(3), eagle_files.load, (), None, None),
    "speculators": (save_eagle(3, "speculators"), eagle_files.load, (), None, None),
    "medusa": (save_medusa, medusa_files.load, medusa_files.FILES, TREE, drafters.MedusaDraft),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_know_their_target(tmp_path, name):
    save, read, first, settings, draft = HEADS[name]
    folder = tmp_path / "head"
    save(folder, with_sha256(OWN))
    assert json.loads((folder / "config.json").read_text())["jspec"] == {"target_sha256": OWN}
    assert head_files.trained_for(str(folder), first) == OWN
    read(str(folder), with_sha256(OWN))
    read(str(folder), with_sha256(OWN.upper()))
    read(str(folder), with_sha256(None))  # a target in memory has nothing to compare
    with pytest.raises(pairing.WrongTarget, match=f"config.json was trained for .*{OWN}; target.gguf has {OTHER}"):
        read(str(folder), with_sha256(OTHER))
    read(str(folder), with_sha256(OTHER), force=True)
    if settings is not None:
        refused = dataclasses.replace(settings, draft=draft(reference=str(folder)))
        with pytest.raises(pairing.WrongTarget):
            refused.build(with_sha256(OTHER))
        dataclasses.replace(settings, draft=draft(reference=str(folder), force=True)).build(with_sha256(OTHER))


@pytest.mark.parametrize("name", ["eagle 1", "medusa"])
def test_heads_of_a_target_in_memory_record_nothing(tmp_path, name):
    save, read, first, *_ = HEADS[name]
    folder = tmp_path / "head"
    save(folder, with_sha256(None))
    assert "jspec" not in json.loads((folder / "config.json").read_text())
    assert head_files.trained_for(str(folder), first) is None
    read(str(folder), with_sha256(OTHER))


@pytest.mark.parametrize("own", ["abc", 7, {"target_sha256": "abc"}, {"target_sha256": 7}])
def test_what_is_no_digest_is_refused(own):
    with pytest.raises(ValueError, match=r"config.json: jspec.* is "):
        pairing.recorded({"jspec": own}, "config.json")
    assert pairing.recorded({"jspec": {"other": 1}}, "config.json") is None
    assert pairing.recorded({"jspec": {"target_sha256": OWN.upper()}}, "config.json") == OWN


def test_standard_drafts_know_their_target(tmp_path, monkeypatch):
    folder = str(checkpoints.write_huggingface(tmp_path / "draft"))
    read = load.load_target

    def recording(reference, **settings):
        draft = read(reference, **settings)
        return dataclasses.replace(draft, provenance=dataclasses.replace(draft.provenance, trained_for=OWN))

    standard.load_draft(folder, with_sha256(OTHER))  # it does not say
    monkeypatch.setattr(load, "load_target", recording)
    standard.load_draft(folder, with_sha256(OWN))
    standard.load_draft(folder, with_sha256(None))
    with pytest.raises(pairing.WrongTarget, match=f"{OWN}.*{OTHER}"):
        drafters.Standard(draft=drafters.Draft(reference=folder)).build(with_sha256(OTHER))
    drafters.Standard(draft=drafters.Draft(reference=folder, force=True)).build(with_sha256(OTHER))
