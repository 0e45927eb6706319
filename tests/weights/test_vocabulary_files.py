"""Reduced vocabularies that lie beside drafts: written, read, used by the drafters, and refused."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import drafters, topology, types, weights
from jspec.models import heads as heads_lib
from jspec.models import transformer
from jspec.weights import eagle_files, medusa_files, safetensors_files, vocabulary_files
from tests import checkpoints, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

IDS = np.array([40, 3, 60, 11, 7], np.int32)
E, V = checkpoints.RANDOM.width, checkpoints.RANDOM.vocab_size
CHAIN = topology.Tree(widths=(1, 1))


def eagle1(ids=IDS) -> heads_lib.EagleHead:
    layer = checkpoints.with_options(num_layers=1)
    config = heads_lib.EagleConfig(version=1, layer=layer, target_width=E, vocab_size=V)
    params = heads_lib.init_eagle(jax.random.key(1), config).params
    if ids is None:
        return heads_lib.EagleHead(params, config)
    return heads_lib.EagleHead(
        {**params, "draft_ids": jnp.asarray(ids)}, dataclasses.replace(config, vocab_size=len(ids))
    )


def medusa(ids=IDS) -> heads_lib.MedusaHeads:
    heads = heads_lib.init_medusa(jax.random.key(2), heads_lib.MedusaConfig(2, 1, E))
    return heads if ids is None else heads.replace(params={**heads.params, "draft_ids": jnp.asarray(ids)})


def save_eagle(draft, folder, **rest):
    eagle_files.save(draft, tiny.random_target(), folder, base_model="base", **rest)


def save_medusa(draft, folder, **rest):
    medusa_files.save(draft, tiny.random_target(), folder, base_model="base", **rest)


def save_model(draft, folder, **rest):
    weights.save_huggingface(draft, folder, **rest)


def model(ids=IDS) -> types.Target:
    return dataclasses.replace(tiny.noisy_twin(), draft_ids=ids)


def read_model(folder, target):
    return weights.load_target(folder)


FORMS = {
    "eagle": (eagle1, save_eagle, eagle_files.load, lambda read: read.params.get("draft_ids")),
    "medusa": (medusa, save_medusa, medusa_files.load, lambda read: read.params.get("draft_ids")),
    "standard": (model, save_model, read_model, lambda read: read.draft_ids),
}
EACH = pytest.mark.parametrize("form", FORMS)


@EACH
def test_a_vocabulary_travels_inside_the_folder(tmp_path, form):
    make, save, read, ids_of = FORMS[form]
    target = tiny.random_target()
    save(make(), tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "draft_vocabulary.npy"), IDS)
    np.testing.assert_array_equal(ids_of(read(str(tmp_path / "out"), target)), IDS)
    # None, and one that restricts nothing, leave no file.
    for name, ids in (("without", None), ("all", np.arange(V))):
        save(make(ids), tmp_path / name)
        assert not (tmp_path / name / "draft_vocabulary.npy").exists()
        assert ids_of(read(str(tmp_path / name), target)) is None
    np.save(tmp_path / "without" / "draft_vocabulary.npy", np.arange(V))
    assert ids_of(read(str(tmp_path / "without"), target)) is None


@EACH
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1.5], "holds float64, expected whole numbers"),
        ([[1, 2]], r"has shape \(1, 2\), expected a list"),
        ([], r"has shape \(0,\)"),
        ([1, 64], "id 64 is outside the target's 64 tokens"),
        ([3, 3], "id 3 stands twice"),
        ("text", "cannot be read as an array of token ids"),
    ],
)
def test_files_that_hold_no_vocabulary(tmp_path, form, ids, message):
    make, save, read, _ = FORMS[form]
    save(make(None), tmp_path / "out")
    path = tmp_path / "out" / "draft_vocabulary.npy"
    if isinstance(ids, str):
        path.write_text(ids)
    else:
        np.save(path, np.array(ids))
    with pytest.raises(ValueError, match=f"draft_vocabulary.npy.*{message}"):
        read(str(tmp_path / "out"), tiny.random_target())


def test_what_the_drafters_make_of_it(tmp_path):
    """Only the ids are proposed, with the target's own rows of its output matrix (a draft model's with its own)."""
    target = tiny.random_target()
    rows = np.asarray(transformer.output_matrix(target.model))
    folders = {}
    for form, (make, save, *_) in FORMS.items():
        folders[form] = str(tmp_path / form)
        save(make(), folders[form])
    settings = {
        "eagle": drafters.Eagle(draft=drafters.EagleDraft(reference=folders["eagle"])),
        "medusa": drafters.Medusa(tree=CHAIN, draft=drafters.MedusaDraft(reference=folders["medusa"])),
        "standard": drafters.Standard(draft=drafters.Draft(reference=folders["standard"])),
    }
    _, head = settings["eagle"].build(target)
    np.testing.assert_array_equal(head.params["draft_ids"], IDS)
    np.testing.assert_array_equal(head.params["head"], rows[IDS])
    _, heads = settings["medusa"].build(target)
    np.testing.assert_array_equal(heads["draft_ids"], IDS)
    np.testing.assert_array_equal(heads["head"], rows[IDS])
    states = jnp.asarray(np.random.default_rng(0).standard_normal((1, E)), jnp.float32)
    loaded = medusa_files.load(folders["medusa"], target)
    whole = heads_lib.medusa_logits(medusa(None), target.model, states)
    np.testing.assert_allclose(
        heads_lib.medusa_logits(loaded, target.model, states), whole[:, :, IDS], rtol=1e-5, atol=1e-5
    )
    _, params = settings["standard"].build(target)
    np.testing.assert_array_equal(params["draft_ids"], np.sort(IDS))
    own = np.asarray(transformer.output_matrix(tiny.noisy_twin().model))
    np.testing.assert_array_equal(params["model"].params["head"], own[np.sort(IDS)])

    # Of an EAGLE-1 head, whose rows are the target's, another may take its place; else two are one too many.
    path = tmp_path / "ids.json"
    path.write_text("[1, 2, 3]")
    _, head = dataclasses.replace(settings["eagle"], vocabulary=drafters.Vocabulary(str(path))).build(target)
    np.testing.assert_array_equal(head.params["draft_ids"], [1, 2, 3])
    np.testing.assert_array_equal(head.params["head"], rows[[1, 2, 3]])
    for form, which in (("medusa", "heads have"), ("standard", "draft has")):
        twice = dataclasses.replace(settings[form], vocabulary=drafters.Vocabulary(str(path)))
        with pytest.raises(ValueError, match=f"vocabulary: the {which} a reduced vocabulary of (its|their) own"):
            twice.build(target)
    # A draft that does not bring one takes the setting.
    save_model(model(None), tmp_path / "whole")
    plain = drafters.Standard(
        draft=drafters.Draft(reference=str(tmp_path / "whole")), vocabulary=drafters.Vocabulary(str(path))
    )
    assert plain.build(target)[1]["draft_ids"].tolist() == [1, 2, 3]


def test_stop_ids_join_a_draft_models_vocabulary(tmp_path):
    save_model(model(), tmp_path / "out")
    target = dataclasses.replace(tiny.random_target(), stop_ids=(1,))
    settings = drafters.Standard(draft=drafters.Draft(reference=str(tmp_path / "out")))
    assert settings.build(target)[1]["draft_ids"].tolist() == [1, *sorted(IDS.tolist())]


def test_gguf_keeps_it_in_its_metadata(tmp_path):
    weights.save_gguf(model(), tmp_path / "draft.gguf")
    found = weights.load_target(str(tmp_path / "draft.gguf"))
    np.testing.assert_array_equal(found.draft_ids, IDS)
    weights.save_gguf(model(None), tmp_path / "whole.gguf")
    assert weights.load_target(str(tmp_path / "whole.gguf")).draft_ids is None


def test_formats_that_have_a_place_for_it_refuse_the_file(tmp_path):
    target = tiny.random_target()
    layer = checkpoints.with_options(num_layers=1)
    config = heads_lib.EagleConfig(version=3, layer=layer, target_width=E, vocab_size=V, num_features=3, own_head=True)
    save_eagle(heads_lib.init_eagle(jax.random.key(3), config), tmp_path / "eagle3")
    np.save(tmp_path / "eagle3" / "draft_vocabulary.npy", IDS)
    with pytest.raises(ValueError, match="draft_vocabulary.npy: an EAGLE-3 head says in d2t"):
        eagle_files.load(str(tmp_path / "eagle3"), target)
    own = heads_lib.init_medusa(jax.random.key(4), heads_lib.MedusaConfig(2, 1, E, V))
    save_medusa(own, tmp_path / "own")
    np.save(tmp_path / "own" / "draft_vocabulary.npy", IDS)
    with pytest.raises(ValueError, match="draft_vocabulary.npy: the heads have output matrices of their own"):
        medusa_files.load(str(tmp_path / "own"), target)


@EACH
def test_nothing_is_left_when_it_reads_back_differently(tmp_path, monkeypatch, form):
    make, save, *_ = FORMS[form]
    real = np.save

    def other(path, ids):
        real(path, np.roll(ids, 1) if np.ndim(ids) == 1 else ids)

    monkeypatch.setattr(np, "save", other)
    with pytest.raises(ValueError, match="the draft vocabulary reads back differently; nothing is kept"):
        save(make(), tmp_path / "out")
    assert not os.listdir(tmp_path)

    def full(path, ids):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space"):
        save(make(), tmp_path / "out")
    assert not os.listdir(tmp_path)


@EACH
def test_bfloat16_on_request(tmp_path, form):
    """Float32 drafts are rounded, written as bfloat16, and compared in the rounded values."""
    make, save, read, ids_of = FORMS[form]
    save(make(), tmp_path / "out", dtype="bfloat16")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    stored = safetensors_files.load(file)
    assert {tensor.dtype.name for tensor in stored.values()} == {"bfloat16"}
    found = read(str(tmp_path / "out"), tiny.random_target())
    np.testing.assert_array_equal(ids_of(found), IDS)
    params = lambda draft: draft.params if form != "standard" else draft.model.params
    rounded = jax.tree.map(
        lambda leaf: np.asarray(leaf.astype(jnp.bfloat16), np.float32),
        {name: leaf for name, leaf in params(make()).items() if name != "draft_ids"},
    )
    read_back = {
        name: leaf for name, leaf in params(found).items() if name not in heads_lib.MEDUSA_SHARED or form != "medusa"
    }
    read_back.pop("draft_ids", None)
    jax.tree.map(np.testing.assert_array_equal, read_back, rounded)


def test_reduced_counts_what_restricts():
    assert vocabulary_files.reduced(None, 4, "here") is None
    assert vocabulary_files.reduced([2, 0, 1, 3], 4, "here") is None
    assert vocabulary_files.reduced([2, 0], 4, "here").tolist() == [2, 0]
