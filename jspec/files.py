"""Files that a kill or a full disk never leaves half written."""

from __future__ import annotations

import os
import pathlib
import secrets
from collections.abc import Callable
from typing import Any, BinaryIO


def replace(path: str | os.PathLike, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file so that a reader, or a kill, meets the old content or the new, never a part.

    Args:
      path: the file.
      write: is given an open binary file under a temporary name beside it.

    Raises:
      OSError: it cannot be written; the message names the file, and nothing of the attempt is left.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
