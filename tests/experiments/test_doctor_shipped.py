"""The doctor knows the drafts that come with the package from a stale one, on the model they were made for."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from experiments import cli, doctor
from jspec import costs
from jspec.weights import references, safetensors_files

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs" / "doctor.yaml")
STALE = "does not speak like this target"
DRAFTERS = {
    "standard": "{kind: standard, gamma: 1, draft: {reference: 'pretrained:smollm2-135m/standard'}}",
    "medusa": "{kind: medusa, tree: {widths: [1]}, draft: {reference: 'pretrained:smollm2-135m/medusa'}}",
    "eagle1": "{kind: eagle, gamma: 1, draft: {reference: 'pretrained:smollm2-135m/eagle1'}}",
    "eagle3": "{kind: eagle, gamma: 1, draft: {reference: 'pretrained:smollm2-135m/eagle3'}}",
}

pytestmark = [pytest.mark.slow, pytest.mark.real_model, pytest.mark.usefixtures("kept")]


@pytest.fixture(scope="module")
def cache():
    """The user's own, which has the model; read before `own_folder` gives each test another."""
    return references.cache_folder()


@pytest.fixture
def kept(cache, own_folder, monkeypatch):
    """A folder for each test, but one cache for all: they share the model and the target's compiled programs."""
    monkeypatch.setenv("JSPEC_CACHE", str(cache))


def examine(capsys, monkeypatch, drafter: str) -> tuple[dict, dict]:
    """Document and findings by name. Whether it pays is not asked here, so nothing is timed."""
    monkeypatch.setattr(costs, "measure", lambda parts: {name: costs.Costs(0.02, 0.002) for name in parts})
    monkeypatch.setattr(costs, "measure_passes", lambda program, sizes: {size: 0.02 for size in sizes})
    overrides = [f"drafter={drafter}", "prompts.tasks=[maths,code]", "max_new_tokens=48"]
    code = cli.run(doctor.main, doctor.Doctor, "", [CONFIG, *overrides])
    out, err = capsys.readouterr()
    assert code == 0, err
    document = json.loads(out.splitlines()[-1])
    return document, {finding["name"]: finding for finding in document["findings"]}


@pytest.mark.parametrize("name", DRAFTERS)
def test_shipped_drafts_are_healthy(name, capsys, monkeypatch):
    document, findings = examine(capsys, monkeypatch, DRAFTERS[name])
    assert findings["target"]["status"] == "ok" and findings["greedy text"]["status"] == "ok"
    assert findings["acceptance"]["status"] == "ok", findings["acceptance"]
    assert STALE not in document["verdict"]


def test_a_shipped_head_with_shuffled_weights_is_stale(capsys, monkeypatch):
    """The mutant: the same numbers, each somewhere else in its matrix, behind the same names and fingerprint."""
    folder = pathlib.Path("shuffled").absolute()
    shutil.copytree(references.pretrained_folder() / "smollm2-135m" / "eagle3", folder)
    tensors, rng = safetensors_files.load(folder / "model.safetensors"), np.random.default_rng(0)
    for key, tensor in tensors.items():
        if tensor.ndim == 2 and key.startswith(("midlayer", "fc")):
            tensors[key] = rng.permutation(tensor.ravel()).reshape(tensor.shape)
    safetensors_files.save(tensors, folder / "model.safetensors")
    document, findings = examine(capsys, monkeypatch, f"{{kind: eagle, gamma: 1, draft: {{reference: '{folder}'}}}}")
    assert findings["target"]["status"] == "ok" and findings["greedy text"]["status"] == "ok"
    assert findings["acceptance"]["status"] == "warning" and STALE in document["verdict"]
