"""Safetensors: one file or several shards read into NumPy, and trees of arrays written.

bfloat16 becomes NumPy's `ml_dtypes.bfloat16` (which comes with jax), bit for bit and without torch. Of a sharded
checkpoint `model.safetensors.index.json` is the authority: each tensor is read from the shard the index gives it; other
files, and other copies of a tensor inside the shards, are left alone.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  (its import is what teaches NumPy the name bfloat16)
import numpy as np

from jspec import extras
from jspec import files as files_lib
from jspec.weights import references

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class SafetensorsFiles:
    """The tensors of a checkpoint by name, each read when asked for."""

    def __init__(self, path: pathlib.Path):
        """Open a file, or a folder as `references.weight_files` understands it.

        Raises:
          ValueError: no safetensors there, a missing shard, a truncated or corrupt file, or an index that names a
            tensor its shard lacks; the message names file and tensor.
        """
        safetensors = extras.require("safetensors", "weights")
        path = pathlib.Path(path)
        files = [path] if path.is_file() else references.weight_files(path)
        if not files or any(file.suffix != ".safetensors" for file in files):
            raise ValueError(f"{path} holds no .safetensors file")
        self.path = path
        self._readers = {}
        for file in files:
            try:
                name = file.name if path.is_file() else file.relative_to(path).as_posix()
                self._readers[name] = safetensors.safe_open(file, "numpy")
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(f"{file} is not a complete safetensors file: {error}") from error
        self._shards = self._locate()

    def _locate(self) -> dict[str, str]:
        """Which file each tensor is read from."""
        held = {file: set(reader.keys()) for file, reader in self._readers.items()}
        if not (self.path / "model.safetensors.index.json").is_file():
            ((file, names),) = held.items()
            return dict.fromkeys(sorted(names), file)
        shards = references.weight_map(self.path)
        lost = sorted(f"{name} (in {file})" for name, file in shards.items() if name not in held[file])
        if lost:
            raise ValueError(f"{self.path}: the index names tensors that their files lack: {', '.join(lost)}")
        return shards

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._shards)

    def where(self, name: str) -> pathlib.Path:
        """The file that holds a tensor, for messages."""
        return self.path if self.path.is_file() else self.path / self._shards[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return tuple(self._readers[self._shards[name]].get_slice(name).get_shape())

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Rows of one tensor, possibly as a read-only view of the file.

        Raises:
          ValueError: a dtype that is not float, bfloat16, integer or bool.
        """
        tensor = self._readers[self._shards[name]].get_slice(name)
        stored = tensor.get_dtype()
        if stored not in _DTYPES:
            raise ValueError(f"{self.where(name)}: tensor {name!r} has dtype {stored}; known are {', '.join(_DTYPES)}")
        shape = tensor.get_shape()
        if not shape or not shape[0]:
            return self._readers[self._shards[name]].get_tensor(name)
        start, stop, _ = rows.indices(shape[0])  # the library does not clip
        return tensor[start:stop]


def load(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """All tensors of a file or a sharded folder, by name, copied out of the files.

    Raises:
      ValueError: see `SafetensorsFiles`.
    """
    files = SafetensorsFiles(pathlib.Path(path))
    return {name: np.array(files.read(name)) for name in files.names()}


def save(tensors: Mapping[str, Any], path: str | os.PathLike, metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays to one file, bit for bit, under a temporary name that is renamed when complete.

    Args:
      tensors: NumPy or JAX arrays by name, in any memory layout.
      path: of the file; its folder must exist.
      metadata: strings to keep in the header.

    Raises:
      ValueError: a dtype that the reader does not know, or no such folder.
    """
    numpy_io = extras.require("safetensors.numpy", "weights")
    path = pathlib.Path(path)
    # The format has no strides: a transposed view would be written as its base.
    arrays = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    for name, array in arrays.items():
        if array.dtype.name not in _DTYPES.values():
            known = ", ".join(_DTYPES.values())
            raise ValueError(f"{path}: tensor {name!r} has dtype {array.dtype}; known are {known}")
    with files_lib.complete(path) as temporary:
        # The library makes files that their owner alone can read; other users of an exported folder should too.
        temporary.touch()
        mode = temporary.stat().st_mode
        numpy_io.save_file(arrays, temporary, metadata=dict(metadata) if metadata else None)
        temporary.chmod(mode)
