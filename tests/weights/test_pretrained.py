"""`pretrained:` references, the drafts that come with the package, and that a wheel holds them."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import jax
import pytest

import jspec
from jspec import drafters
from jspec.drafters import eagle
from jspec.models import heads as heads_lib
from jspec.weights import eagle_files, references, safetensors_files
from tests import tiny

pytestmark = pytest.mark.usefixtures("small_programs")

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 48e6  # bytes of all files together
SHIPPED = references.pretrained()
EACH = pytest.mark.parametrize(
    "name", SHIPPED or [pytest.param("none", marks=pytest.mark.skip(reason="no drafts come with the package yet"))]
)


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A package folder with one draft, an EAGLE-1 head for the tiny target."""
    folder = tmp_path / "pretrained"
    (folder / "tiny-1m").mkdir(parents=True)
    target = tiny.random_target()
    head = heads_lib.init_eagle(jax.random.key(0), eagle.like_target(target, 1))
    eagle_files.save(head, target, folder / "tiny-1m" / "eagle1", base_model="tiny")
    (folder / "tiny-1m" / "notes").mkdir()  # no draft
    monkeypatch.setattr(references, "pretrained_folder", lambda: folder)
    return folder


def test_a_draft_of_the_package_is_loaded_by_its_name(shelf):
    reference = "pretrained:tiny-1m/eagle1"
    assert references.pretrained() == ["tiny-1m/eagle1"] and references.scheme(reference) == "pretrained"
    references.check(reference)
    assert references.resolve(reference) == shelf / "tiny-1m" / "eagle1"
    digest = references.digest(shelf / "tiny-1m" / "eagle1" / "model.safetensors")
    references.resolve(reference, digest)
    target = tiny.random_target()
    assert isinstance(jspec.load_draft(reference, target, sha256=digest), heads_lib.EagleHead)
    settings = drafters.Eagle(gamma=2, draft=drafters.EagleDraft(reference=reference, sha256=digest))
    assert settings.build(target)[0].max_depth == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny-1m/eagle2", "no draft 'tiny-1m/eagle2' here; did you mean 'tiny-1m/eagle1'"),
        ("zzz", "no draft 'zzz' here; known: tiny-1m/eagle1"),
        ("tiny-1m", "no draft 'tiny-1m' here"),
        ("tiny-1m/notes", "no draft 'tiny-1m/notes' here"),
        ("../pretrained/tiny-1m/eagle1", "no draft"),
        ("", "no draft '' here"),
    ],
)
def test_unknown_names(shelf, name, message):
    for call in (references.check, references.resolve, lambda each: jspec.load_draft(each, tiny.random_target())):
        with pytest.raises(ValueError, match=message):
            call(f"pretrained:{name}")


def test_a_package_without_drafts(tmp_path, monkeypatch):
    monkeypatch.setattr(references, "pretrained_folder", lambda: tmp_path / "pretrained")
    with pytest.raises(ValueError, match="'pretrained:a/b': no draft 'a/b' here; known: none"):
        references.resolve("pretrained:a/b")


# What is shipped.


@EACH
def test_every_draft_has_its_card(name):
    folder = references.resolve(f"pretrained:{name}")
    card = json.loads((folder / "card.json").read_text())
    (file,) = folder.glob("*.safetensors")
    assert card["file"] == {
        "name": file.name,
        "sha256": references.digest(file),
        "bytes": file.stat().st_size,
        "dtype": "bfloat16",
    }
    content = json.loads((folder / "config.json").read_text())
    assert card["target"]["sha256"] == content["jspec"]["target_sha256"]
    assert card["reference"] == f"pretrained:{name}" and f"pretrained:{name}" in (folder / "card.md").read_text()
    files = safetensors_files.SafetensorsFiles(file)
    kinds = {str(files.read(tensor).dtype) for tensor in files.names()}
    assert kinds - {"int64", "bool"} == {"bfloat16"}


@pytest.mark.skipif(not SHIPPED, reason="no drafts come with the package yet")
def test_all_of_them_together_are_small():
    files = [path for path in references.pretrained_folder().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LIMIT


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("pip"), reason="a wheel is built by pip, which is not here")
def test_a_wheel_holds_them(tmp_path):
    """Built from a copy, so that nothing of an earlier build gets in; with a draft more, so that there is one.

    By the setuptools that pyproject.toml asks for, which pip fetches as it does to install: one at hand may be older.
    """
    source, wheels, unpacked = (tmp_path / name for name in ("source", "wheels", "unpacked"))
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jspec", "experiments"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    extra = source / "jspec" / "pretrained" / "tiny-1.5m" / "eagle1"
    extra.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "draft_vocabulary.npy", "card.json", "card.md"):
        (extra / name).write_text("{}")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(wheels)]
    built = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    drafts = pathlib.Path("jspec", "pretrained")
    files = sorted(path.relative_to(source) for path in (source / drafts).rglob("*") if path.is_file())
    for file in files:
        assert (unpacked / file).read_bytes() == (source / file).read_bytes(), file
    assert len(files) >= 5 and not list(unpacked.rglob("tests"))

    # From the wheel alone, and from elsewhere.
    code = (
        "import json, jspec; from jspec.weights import references as r\n"
        "print(json.dumps([jspec.__file__, {n: str(r.resolve(f'pretrained:{n}')) for n in r.pretrained()}]))"
    )
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    where, found = json.loads(run.stdout)
    assert pathlib.Path(where).is_relative_to(unpacked)
    assert found == {name: str(unpacked / drafts / name) for name in sorted({*SHIPPED, "tiny-1.5m/eagle1"})}
