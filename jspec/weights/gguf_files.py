"""GGUF files: metadata and tensors, as they are stored.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Blocks are dequantised by the `gguf` package. The
header is parsed here: the package's reader makes a NumPy view of every string, 5 s for a vocabulary of 49152 with its
merges, against 0.2 s.
"""

from __future__ import annotations

import math
import mmap
import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np

from jspec import extras

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Metadata value types of fixed size, as struct formats.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class _Stored(NamedTuple):
    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    start: int  # in the file
    size: int  # in bytes


class GgufFile:
    """One GGUF file. The header is read at once, each tensor when asked for.

    path:     of the file.
    metadata: values by key; arrays as lists.
    """

    def __init__(self, path: pathlib.Path):
        """Read the header.

        Raises:
          ValueError: not a GGUF file, of an unknown version or byte order, truncated, or split over several files.
        """
        gguf = extras.require("gguf", "weights")
        self.path = pathlib.Path(path)
        with open(self.path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{self.path} is not a GGUF file: it does not start with the letters GGUF")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.metadata, table, position = _read_header(self._bytes)
        except _Malformed as error:
            raise ValueError(f"{self.path}: {error}") from error
        except (struct.error, IndexError, UnicodeDecodeError, MemoryError, OverflowError) as error:
            raise ValueError(f"{self.path} is truncated or corrupt: its header ends early ({error})") from error
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError(f"{self.path} is one of {self.metadata['split.count']} parts; join them with gguf-split")
        alignment = self.metadata.get("general.alignment", 32)
        data = -(-position // alignment) * alignment
        self._stored: dict[str, _Stored] = {}
        for name, shape, kind, offset in table:
            try:
                kind = gguf.GGMLQuantizationType(kind)
                block, size = gguf.GGML_QUANT_SIZES[kind]
            except (ValueError, KeyError) as error:
                raise ValueError(f"{self.path}: tensor {name!r} has the unknown type {kind}") from error
            if shape[-1] % block:
                raise ValueError(f"{self.path}: rows of tensor {name!r} ({shape[-1]}) are not a multiple of {block}")
            stored = _Stored(shape, kind, data + offset, math.prod(shape) // block * size)
            if stored.start + stored.size > len(self._bytes):
                raise ValueError(
                    f"{self.path} is truncated: tensor {name!r} ends at byte {stored.start + stored.size}, "
                    f"the file at {len(self._bytes)}"
                )
            self._stored[name] = stored

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._stored)

    def where(self, name: str) -> pathlib.Path:
        """The file that holds a tensor, for messages."""
        return self.path

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first (the file states it the other way round)."""
        return self._stored[name].shape

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Rows of one tensor (entries, when it has one dimension) as float32; float64 and integers as they are.

        Raises:
          ValueError: a block type that the `gguf` package cannot dequantise.
        """
        import gguf

        kinds = gguf.GGMLQuantizationType
        plain = {kinds.F32: "<f4", kinds.F64: "<f8", kinds.F16: "<f2"}
        plain |= {kinds.I8: "<i1", kinds.I16: "<i2", kinds.I32: "<i4", kinds.I64: "<i8"}
        stored = self._stored[name]
        raw = np.frombuffer(self._bytes, np.uint8, stored.size, stored.start)
        if stored.kind in plain:
            array = raw.view(plain[stored.kind]).reshape(stored.shape)[rows]
            return array.astype(np.float32) if stored.kind == kinds.F16 else array
        if len(stored.shape) == 1:
            return self._dequantize(name, raw)[rows]
        raw = raw.reshape(stored.shape[0], -1)[rows]
        return self._dequantize(name, raw).reshape(len(raw), *stored.shape[1:])

    def _dequantize(self, name: str, raw: np.ndarray) -> np.ndarray:
        """Values of whole blocks, flat."""
        import gguf

        kind = self._stored[name].kind
        # gguf works through 16 rows at a time, which for narrow rows is mostly Python. Blocks do not care what a row
        # is, so several rows are presented as one; their bytes lie one after another.
        size = gguf.GGML_QUANT_SIZES[kind][1]
        blocks = raw.reshape(-1)
        joined = math.gcd(blocks.size // size, 1 << 8)
        try:
            return gguf.quants.dequantize(blocks.reshape(-1, joined * size), kind).reshape(-1)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: tensor {name!r} has type {kind.name}, which gguf cannot read") from error


class _Malformed(Exception):
    """A header that says something impossible."""


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], list[tuple], int]:
    """Metadata, the tensor table (name, shape rows first, type, offset) and the position after it."""
    version, num_tensors, num_values = struct.unpack_from("<IQQ", data, 4)
    if version not in _VERSIONS:
        # A big-endian file shows its version in the high bytes.
        raise _Malformed(f"GGUF version {version}; known are {_VERSIONS}, little-endian")
    position = 24
    metadata = {}
    for _ in range(num_values):
        key, position = _read_string(data, position)
        (kind,) = struct.unpack_from("<I", data, position)
        metadata[key], position = _read_value(data, position + 4, kind, key)
    table = []
    names = set()
    for _ in range(num_tensors):
        name, position = _read_string(data, position)
        if name in names:
            raise _Malformed(f"tensor {name!r} is there twice")
        names.add(name)
        (rank,) = struct.unpack_from("<I", data, position)
        if not 1 <= rank <= 4:
            raise _Malformed(f"tensor {name!r} has {rank} dimensions, at most 4 are possible")
        *sizes, kind, offset = struct.unpack_from(f"<{rank}QIQ", data, position + 4)
        position += 4 + 8 * rank + 12
        table.append((name, tuple(reversed(sizes)), kind, offset))
    return metadata, table, position


def _read_string(data: mmap.mmap, position: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", data, position)
    stop = position + 8 + length
    if stop > len(data):
        raise IndexError(f"a string of {length} bytes at byte {position}")
    return data[position + 8 : stop].decode("utf-8"), stop


def _read_value(data: mmap.mmap, position: int, kind: int, key: str) -> tuple[Any, int]:
    if kind == _STRING:
        return _read_string(data, position)
    if kind in _SCALARS:
        form = "<" + _SCALARS[kind]
        return struct.unpack_from(form, data, position)[0], position + struct.calcsize(form)
    if kind != _ARRAY:
        raise _Malformed(f"metadata {key!r} has the unknown type {kind}")
    kind, count = struct.unpack_from("<IQ", data, position)
    position += 12
    if kind in _SCALARS:
        form = f"<{count}{_SCALARS[kind]}"
        return list(struct.unpack_from(form, data, position)), position + struct.calcsize(form)
    values = []
    for _ in range(count):
        value, position = _read_value(data, position, kind, key)
        values.append(value)
    return values, position
