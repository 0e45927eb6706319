import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from experiments import run_folder
from jspec import config as config_lib
from tests import folder_locks


@dataclasses.dataclass(frozen=True)
class Config:
    gamma: int = 4
    run: run_folder.RunSettings = run_folder.RunSettings()


CELLS = [{"task": task, "temperature": t} for task in ("chat", "code") for t in (0.0, 1.0)]


def open_folder(path, gamma=4):
    return run_folder.open_folder(path, Config(gamma), cell_keys=("task", "temperature"), registries={})


def run_cells(folder, until=None):
    ran = []
    for cell in CELLS[:until]:
        if not folder.finished(cell):
            ran.append(cell)
            folder.append({**cell, "tau": 2.0})
    return ran


def results(path):
    return [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]


def test_a_run_folder_says_what_was_run_and_where(tmp_path):
    path = tmp_path / "deep" / "run"
    folder = open_folder(path)
    run_cells(folder)
    folder.write_table("| tau |\n")
    names = ["config.yaml", "environment.json", "results.jsonl", "table.md"]
    assert sorted(p.name for p in path.iterdir()) == [".lock", *names]
    assert config_lib.load(Config, path / "config.yaml", (), {}) == Config()
    environment = json.loads((path / "environment.json").read_text())
    assert environment["config_hash"] == run_folder.config_hash(Config(), {})
    assert environment["versions"].keys() - {"commit"} == {"python", "jax", "jaxlib", "flax", "numpy", "jspec"}
    assert environment["versions"]["jax"] == jax.__version__
    assert environment["platform"] == jax.devices()[0].platform and environment["cores"] >= 1
    assert (path / "table.md").read_text() == "| tau |\n"
    assert results(path) == folder.records == [{**cell, "tau": 2.0} for cell in CELLS]
    assert folder.document() == {"run": str(path), "records": folder.records}
    del folder
    assert sorted(p.name for p in path.iterdir()) == names


def test_resuming_runs_only_what_is_missing(tmp_path):
    assert run_cells(open_folder(tmp_path), until=2) == CELLS[:2]
    again = open_folder(tmp_path)
    assert again.finished({"task": "chat", "temperature": 0})  # 0 and 0.0 are one temperature
    assert run_cells(again) == CELLS[2:]
    assert run_cells(open_folder(tmp_path)) == []
    assert len(results(tmp_path)) == 4


@pytest.mark.parametrize("half", ['{"task": "code", "tem', '{"task": "code", "temperature": 0.0, "tau": 2', "\0\0\0"])
def test_a_half_written_last_line_is_dropped(tmp_path, half):
    run_cells(open_folder(tmp_path), until=2)
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write(half)
    folder = open_folder(tmp_path)
    assert len(folder.records) == len(results(tmp_path)) == 2
    assert run_cells(folder) == CELLS[2:]
    assert results(tmp_path) == folder.records


def test_a_last_line_that_lost_only_its_end_is_kept(tmp_path):
    run_cells(open_folder(tmp_path), until=2)
    file = tmp_path / "results.jsonl"
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    assert run_cells(open_folder(tmp_path)) == CELLS[2:]
    assert len(results(tmp_path)) == 4


def test_a_killed_process_leaves_a_folder_that_resumes(tmp_path):
    code = """
import os, sys
sys.path[:0] = sys.argv[2:]
import test_run_folder
folder = test_run_folder.open_folder(sys.argv[1])
test_run_folder.run_cells(folder, until=3)
with open(folder.path / "results.jsonl", "a") as file:
    file.write('{"task": ')
os.kill(os.getpid(), 9)
"""
    places = [str(pathlib.Path(__file__).parent), str(pathlib.Path(run_folder.__file__).parents[1])]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), *places], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert run_cells(open_folder(tmp_path)) == CELLS[3:]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    run_cells(open_folder(tmp_path), until=2)
    file = tmp_path / "results.jsonl"
    for damage in ("nonsense", '{"task": "chat"}', "[]"):
        lines = file.read_text().splitlines()
        file.write_text("\n".join([lines[0], damage, lines[-1]]) + "\n")
        with pytest.raises(ValueError, match=r"results\.jsonl, line 2: not a record; remove the line"):
            open_folder(tmp_path)


def test_another_configs_folder_is_refused(tmp_path):
    open_folder(tmp_path, gamma=4)
    with pytest.raises(ValueError) as caught:
        open_folder(tmp_path, gamma=5)
    hashes = [run_folder.config_hash(Config(gamma), {}) for gamma in (4, 5)]
    message = str(caught.value)
    assert message.startswith(f"{tmp_path} belongs to a run of another config")
    assert f"(hash {hashes[0]}, this one's is {hashes[1]};" in message
    assert "choose another run.folder" in message and "\n" not in message
    assert config_lib.load(Config, tmp_path / "config.yaml", (), {}) == Config(4)  # untouched


def test_the_folder_itself_does_not_change_the_hash():
    elsewhere = Config(run=run_folder.RunSettings("elsewhere"))
    assert run_folder.config_hash(elsewhere, {}) == run_folder.config_hash(Config(), {})
    assert run_folder.config_hash(Config(5), {}) != run_folder.config_hash(Config(), {})
    name = f"debug-{run_folder.config_hash(Config(), {})}"
    assert run_folder.default_folder("debug", Config(), {}) == pathlib.Path("runs") / name


def test_the_commit_is_that_of_a_checkout_alone(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *arguments], capture_output=True, text=True, check=True
        )

    file = tmp_path / "jspec" / "__init__.py"
    file.parent.mkdir()
    file.write_text("")
    monkeypatch.setattr(run_folder.jspec, "__file__", str(file))
    assert run_folder._commit() is None
    git("init")
    assert run_folder._commit() is None  # no commit yet
    git("add", ".")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD").stdout[:12]
    assert run_folder._commit() == commit == run_folder.environment()["versions"]["commit"]
    (tmp_path / "notes").write_text("untracked files change nothing")
    assert run_folder._commit() == commit
    file.write_text("x = 1")
    assert run_folder._commit() == commit + "+"
    installed = tmp_path / "site-packages" / "jspec" / "__init__.py"  # inside somebody's repository
    monkeypatch.setattr(run_folder.jspec, "__file__", str(installed))
    installed.parent.mkdir(parents=True)
    assert run_folder._commit() is None
    monkeypatch.setenv("PATH", "")
    assert run_folder._commit() is None


def test_folders_that_are_none_of_ours(tmp_path):
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(ValueError, match="has results.jsonl but no environment.json"):
        open_folder(tmp_path)
    for damage in ("{", "[]", "{}"):
        (tmp_path / "environment.json").write_text(damage)
        with pytest.raises(ValueError, match=r"environment\.json is damaged"):
            open_folder(tmp_path)


def test_another_environment_is_pointed_out(tmp_path):
    open_folder(tmp_path)
    file = tmp_path / "environment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "device": "abacus", "cores": 0}))
    with pytest.warns(UserWarning, match="not as it was started: device, cores"):
        open_folder(tmp_path)


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OSError) as caught:
            open_folder(path)
        assert caught.value.strerror.startswith(f"cannot write {path}: ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
def test_a_full_disk_is_one_clear_error(tmp_path):
    folder = open_folder(tmp_path)
    (tmp_path / "results.jsonl").unlink()
    (tmp_path / "results.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"cannot write .*results\.jsonl: No space left on device"):
        run_cells(folder)
    assert folder.records == []


def test_cells_are_told_by_all_their_keys_and_no_others(tmp_path):
    folder = open_folder(tmp_path)
    with pytest.raises(ValueError, match="a cell is told by task, temperature; got task"):
        folder.finished({"task": "chat"})
    with pytest.raises(ValueError, match="the record lacks the cell keys temperature"):
        folder.append({"task": "chat"})
    with pytest.raises(ValueError, match="JSON"):
        folder.append({"task": "chat", "temperature": 0.0, "alpha": float("nan")})
    assert folder.records == results(tmp_path) == []


def test_atomic_writing_keeps_the_old_text_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "table.md"
    run_folder.write_text_atomic(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*table\.md: No space left on device"):
        run_folder.write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["table.md"]
    monkeypatch.undo()
    run_folder.write_text_atomic(path, "new")
    assert path.read_text() == "new"


def test_looking_at_a_past_run_touches_nothing(tmp_path):
    keys = ("task", "temperature")
    for path, message in ((tmp_path / "none", "none is no run folder"), (tmp_path, "is no run folder")):
        with pytest.raises(ValueError, match=message):
            run_folder.read(path, keys)
    folder = open_folder(tmp_path / "run")
    with pytest.raises(ValueError, match="run holds no finished cell"):
        run_folder.read(folder.path, keys)
    run_cells(folder, until=3)
    results_file = folder.path / "results.jsonl"
    results_file.write_bytes(results_file.read_bytes() + b'{"task": "co')  # cut off by a kill
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    found = run_folder.read(folder.path, keys)
    assert found.records == folder.records and found.path == folder.path
    assert found.environment["config_hash"] == run_folder.config_hash(Config(), {})
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    results_file.write_text('{"task": "chat"}\n')
    with pytest.raises(ValueError, match="results.jsonl, line 1: not a record"):
        run_folder.read(folder.path, keys)


def test_a_folder_that_another_process_writes_is_refused(tmp_path):
    open_folder(tmp_path / "run")
    with folder_locks.held_elsewhere(tmp_path / "run"):
        with pytest.raises(ValueError, match="run is being written by process 7 on elsewhere: wait until that ends"):
            open_folder(tmp_path / "run")
    open_folder(tmp_path / "run")
