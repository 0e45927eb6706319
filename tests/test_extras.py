"""A missing package names the extra that has it."""

import sys

import pytest

from jspec import extras


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    for error in (ImportError, ValueError):  # scripts catch the one, callers of the library the other
        with pytest.raises(error, match=r"gguf is not installed; .* pip install -e '\.\[weights\]'"):
            extras.require("gguf.quants", "weights")


def test_what_is_there_is_imported_and_its_own_faults_come_through(monkeypatch, tmp_path):
    assert extras.require("json", "weights").loads("1") == 1
    (tmp_path / "broken_package.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency") as error:
        extras.require("broken_package", "weights")
    assert not isinstance(error.value, extras.MissingExtra)
