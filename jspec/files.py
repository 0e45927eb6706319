"""Files that a kill or a full disk never leaves half written."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Let every `OSError` name what could not be written: those of a write or an fsync do not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def complete(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary name beside `path`, which becomes `path` when the block ends well; otherwise nothing is left.

    Raises:
      ValueError: there is no such folder.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: {path.parent} is not a folder")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace(path: str | os.PathLike, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file so that a reader, or a kill, meets the old content or the new, never a part.

    Args:
      path: the file.
      write: is given an open binary file under a temporary name beside it.

    Raises:
      ValueError: there is no such folder.
      OSError: it cannot be written; the message names the file, and nothing of the attempt is left.
    """
    with naming(path), complete(pathlib.Path(path)) as temporary, open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
