"""One process at a time writes a folder: a lock of the system's, on a file that says who holds it.

`flock` of the standard library, which the system gives back when its process ends, however that happens: so no lock is
ever stale, and none has to be judged by a process number that may by now be somebody else's. Packages for locks would
be one more need of the core, which writes folders too, and either empty the file that names the holder or judge by
number.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import warnings
import weakref

from jspec import files

try:
    import fcntl
except ImportError:  # not a POSIX system: folders are not guarded there
    fcntl = None

NAME = ".lock"


class Claim:
    """Holds a folder for this process until nothing refers to it any more. Made by `claim`."""

    def __init__(self, path: pathlib.Path, descriptor: int):
        weakref.finalize(self, _give_back, path, descriptor, os.getpid())


_CLAIMS: weakref.WeakValueDictionary[pathlib.Path, Claim] = weakref.WeakValueDictionary()


def claim(folder: str | pathlib.Path) -> Claim:
    """Keep other processes from writing a folder.

    Args:
      folder: exists. This process may claim it several times over: it is given back when the last claim is gone.

    Raises:
      ValueError: another process has it; its number and its host are named.
      OSError: the folder cannot be written.
    """
    folder = pathlib.Path(folder).resolve()
    held = _CLAIMS.get(folder)
    if held is None:
        held = _CLAIMS[folder] = Claim(folder / NAME, _take(folder))
    return held


def _take(folder: pathlib.Path) -> int:
    """An open descriptor of the folder's lock file, locked."""
    path = folder / NAME
    while True:
        with files.naming(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(folder, descriptor)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed the file between our opening and locking it


def _lock(folder: pathlib.Path, descriptor: int) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        raise ValueError(
            f"{folder} is being written by {holder}: wait until that ends, or choose another folder"
        ) from error
    except OSError as error:  # a file system without locks
        warnings.warn(f"{folder} cannot be locked ({error.strerror}): let no other process write it", stacklevel=4)


def _give_back(path: pathlib.Path, descriptor: int, owner: int) -> None:
    # Removed first: whoever locks it afterwards sees that it is gone. A forked child holds a copy and must not.
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            path.unlink()
    os.close(descriptor)
