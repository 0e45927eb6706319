"""The README's claims that code can check."""

import pathlib
import re
import tomllib

import pytest

import jspec
from jspec import drafters, verify

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_every_drafter_and_verifier_has_a_row():
    rows = [line for line in README.splitlines() if line.startswith("| ")]
    for cls in drafters.REGISTRY.values():
        path = cls.__module__.replace(".", "/") + ".py"
        assert any(path in row for row in rows), path
    for kind, cls in verify.REGISTRY.items():
        row = next(row for row in rows if row.startswith(f"| `{kind}`"))
        assert ("yes" if cls.lossless else "no, and says so") in row


def test_every_path_it_names_exists():
    for path in re.findall(r"`((?:jspec|experiments|tests|configs|\.ci)/[\w./]*)`", README):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"configs/[\w/]+\.yaml", README):
        assert (ROOT / path).exists(), path


def test_commands_name_extras_and_scripts_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for extra in re.findall(r"'\.\[(\w+)\]'", README):
        assert extra in project["project"]["optional-dependencies"]
    for module in re.findall(r"python -m ([\w.]+)", README):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module
    assert f"* {jspec.__version__}:" in README
    assert project["project"]["dependencies"][0].startswith("jax>=0.10")


@pytest.mark.slow
@pytest.mark.real_model
def test_the_library_example_runs(capsys):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    assert len(code.strip().splitlines()) <= 10
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "he cat sleeps on the warm roof" in out and re.search(r"tau \d\.\d\d, alpha 0\.\d\d", out)


def test_top_level_is_fixed():
    allowed = {"pyproject.toml", "jspec", "experiments", "configs", "tests", "README.md", "LICENSE"}
    made = {"runs", "build", "jspec.egg-info"}  # by installing and running
    assert {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - made == allowed
