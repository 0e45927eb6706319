"""A folder's lock as another process would hold it: the system tells descriptors apart, not processes."""

from __future__ import annotations

import contextlib
import fcntl
import pathlib
from collections.abc import Iterator

from jspec import folder_lock


@contextlib.contextmanager
def held_elsewhere(folder: pathlib.Path, holder: str = "process 7 on elsewhere\n") -> Iterator[None]:
    """As long as the block runs."""
    with open(folder / folder_lock.NAME, "w") as file:
        file.write(holder)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
