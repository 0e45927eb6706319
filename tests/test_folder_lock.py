"""One process at a time writes a folder, and no lock outlives its process."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from jspec import folder_lock
from tests import folder_locks

ROOT = pathlib.Path(__file__).parents[1]
HOLD = """
import sys, time
from jspec import folder_lock
held = folder_lock.claim(sys.argv[1])
print("held", flush=True)
time.sleep(600)
"""


def test_a_process_names_itself_and_may_claim_twice(tmp_path):
    first = folder_lock.claim(tmp_path)
    second = folder_lock.claim(str(tmp_path / ".." / tmp_path.name))
    assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    del first
    assert (tmp_path / ".lock").exists()
    del second
    assert not list(tmp_path.iterdir())


def test_a_held_folder_is_refused_and_taken_over_when_its_holder_is_killed(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        expected = f"{tmp_path} is being written by process {holder.pid} on {socket.gethostname()}: wait until that"
        with pytest.raises(ValueError, match=expected):
            folder_lock.claim(tmp_path)
        assert f"process {holder.pid}" in (tmp_path / ".lock").read_text()  # the refused one has left it alone
    finally:
        holder.kill()
        holder.communicate()
    assert (tmp_path / ".lock").exists()  # a kill leaves the file, not the lock
    held = folder_lock.claim(tmp_path)
    assert f"process {os.getpid()} " in (tmp_path / ".lock").read_text()
    del held


def test_a_holder_that_has_not_named_itself_yet(tmp_path):
    with folder_locks.held_elsewhere(tmp_path, holder=""):
        with pytest.raises(ValueError, match="is being written by another process"):
            folder_lock.claim(tmp_path)


def test_a_file_removed_by_its_last_holder_is_no_lock(tmp_path, monkeypatch):
    """Else two processes could each lock a file, one of them without a name."""
    lock, calls = fcntl.flock, []

    def removed_meanwhile(descriptor, operation):
        if not calls:
            (tmp_path / ".lock").unlink()
        calls.append(descriptor)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    held = folder_lock.claim(tmp_path)
    monkeypatch.undo()
    assert len(calls) == 2
    with open(tmp_path / ".lock") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    del held


def test_a_forked_child_does_not_give_back_its_parents_folder(tmp_path):
    held = folder_lock.claim(tmp_path)
    folder_lock._give_back(tmp_path / ".lock", os.open(os.devnull, os.O_RDONLY), owner=os.getpid() + 1)
    assert (tmp_path / ".lock").exists()
    del held


def test_a_file_system_without_locks_is_pointed_out(tmp_path, monkeypatch):
    def unsupported(descriptor, operation):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.warns(UserWarning, match="cannot be locked .Operation not supported.: let no other process write it"):
        held = folder_lock.claim(tmp_path)
    del held


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="cannot write .*none/.lock"):
        folder_lock.claim(tmp_path / "none")
