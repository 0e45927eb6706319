"""Files that `torch.save` wrote (`.pt`, `.bin`), read without torch and without running anything.

Such a file is a zip archive: a pickle, `data.pkl`, and the bytes of each storage in a record of their own. A pickle is
a program that may call whatever it names, so the `pickle` module is left out of it: a small interpreter knows the few
instructions that torch writes, builds dictionaries, lists, tuples, numbers, strings and tensors, and knows three calls.
All else is refused by name. `torch.load(weights_only=True)` follows the same thought and allows more.

Files in the format of before torch 1.6, which are no archives, are refused.
"""

from __future__ import annotations

import math
import mmap
import pathlib
import pickletools
import struct
import zipfile
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

_STORAGES = {
    "torch.DoubleStorage": np.dtype("<f8"),
    "torch.FloatStorage": np.dtype("<f4"),
    "torch.HalfStorage": np.dtype("<f2"),
    "torch.BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch.LongStorage": np.dtype("<i8"),
    "torch.IntStorage": np.dtype("<i4"),
    "torch.BoolStorage": np.dtype(bool),
}
_DICTIONARY = "collections.OrderedDict"
_TENSOR = "torch._utils._rebuild_tensor_v2"
_PARAMETER = "torch._utils._rebuild_parameter"
_KNOWN = (_DICTIONARY, _TENSOR, _PARAMETER, *_STORAGES)

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_MARK = object()


class _Refused(Exception):
    """What the file asks for or holds is not taken; the message lacks the file's name."""


class _Global(NamedTuple):
    name: str


class _Storage(NamedTuple):
    record: str
    dtype: np.dtype
    size: int  # elements


def load(path: pathlib.Path) -> Any:
    """What was saved, with each tensor as a read-only NumPy view of the file.

    Strides and offsets are kept, so tensors that shared a storage still share memory; devices and gradients are not.

    Returns:
      Dictionaries (ordered ones become plain), lists, tuples, numbers, strings and arrays.

    Raises:
      ValueError: no archive of torch's, the format before torch 1.6, a damaged file, another byte order, a dtype that
        is not float64, 32, 16, bfloat16, int64, int32 or bool, or anything in the pickle beyond the types above; the
        global or the instruction that is refused is named.
    """
    path = pathlib.Path(path)
    try:
        archive = _Archive(path)
        return _Machine(archive).run()
    except _Refused as error:
        raise ValueError(f"{path}: {error}") from error


class TorchFile:
    """The tensors of a saved state dict by name; an `assembly.Source`."""

    def __init__(self, path: pathlib.Path):
        """Open a file.

        Raises:
          ValueError: see `load`; or what was saved is no dictionary of tensors.
        """
        self.path = pathlib.Path(path)
        saved = load(self.path)
        if not isinstance(saved, dict) or not saved:
            raise ValueError(f"{self.path} holds a {type(saved).__name__}, expected a dictionary of tensors")
        for name, value in saved.items():
            if not isinstance(name, str) or not isinstance(value, np.ndarray):
                raise ValueError(f"{self.path}: {name!r} is a {type(value).__name__}, expected names and tensors alone")
        self._tensors = saved

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def where(self, name: str) -> pathlib.Path:
        """The file."""
        return self.path

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._tensors[name].shape

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Rows of one tensor, as a read-only view of the file."""
        tensor = self._tensors[name]
        return tensor[rows] if tensor.ndim else tensor


class _Archive:
    """Records of a zip archive as views of the mapped file.

    They are found by their local headers and not read through `zipfile`: its checksums would cost a pass over the file,
    and torch can be told to write none.
    """

    def __init__(self, path: pathlib.Path):
        try:
            with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
                records = archive.infolist()
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except zipfile.BadZipFile as error:
            with open(path, "rb") as file:
                start = file.read(2)
            if start[:1] == b"\x80":
                message = "the file has the format of before torch 1.6; load it with torch and save it again"
            elif start == b"PK":
                message = f"the file is truncated or corrupt ({error})"
            else:
                message = "not a file of torch.save"
            raise _Refused(message) from error
        except OSError as error:
            raise _Refused(f"the file cannot be read: {error}") from error
        pickles = [record.filename for record in records if record.filename.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1:
            raise _Refused("a zip archive without the one data.pkl that torch.save writes")
        self._folder = pickles[0].removesuffix("data.pkl")
        self._records = {record.filename: record for record in records}
        if f"{self._folder}byteorder" in self._records and (order := self.bytes("byteorder")) != b"little":
            raise _Refused(f"byte order is {order.decode(errors='replace')!r}, expected 'little'")

    def bytes(self, name: str) -> bytes:
        """A copy of one record."""
        start, size = self._span(name)
        return self._bytes[start : start + size]

    def values(self, storage: _Storage) -> np.ndarray:
        """All elements of a storage."""
        start, size = self._span(f"data/{storage.record}")
        if size != storage.size * storage.dtype.itemsize:
            expected = f"{storage.size} of {storage.dtype.name}"
            raise _Refused(f"record data/{storage.record} has {size} bytes, which are not {expected}")
        return np.frombuffer(self._bytes, storage.dtype, storage.size, start)

    def _span(self, name: str) -> tuple[int, int]:
        """Where a record's bytes start, and how many they are."""
        record = self._records.get(self._folder + name)
        if record is None:
            raise _Refused(f"record {name} is missing")
        if record.compress_type != zipfile.ZIP_STORED:
            raise _Refused(f"record {name} is compressed, which torch never does")
        header = self._bytes[record.header_offset : record.header_offset + 30]
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise _Refused(f"the file is corrupt: record {name} has no header")
        name_size, extra_size = struct.unpack("<HH", header[26:30])
        start = record.header_offset + 30 + name_size + extra_size
        if start + record.file_size > len(self._bytes):
            raise _Refused(f"the file is truncated: record {name} ends behind the file")
        return start, record.file_size


class _Machine:
    """Interprets the instructions of a pickle that build plain data and tensors."""

    def __init__(self, archive: _Archive):
        self._archive = archive
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The saved object."""
        try:
            for opcode, argument, _ in pickletools.genops(self._archive.bytes("data.pkl")):
                if opcode.name == "STOP":
                    return self._data(self._stack.pop())
                self._step(opcode.name, argument)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise _Refused(f"data.pkl is corrupt: {error}") from error
        raise _Refused("data.pkl is corrupt: it has no end")

    def _step(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                stack.append(_MARK)
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                stack.append(self._global(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(self._global(f"{module}.{name}"))
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(self._call(function, arguments))
            case "BUILD":
                # State dicts carry their modules' versions as an attribute.
                stack.pop()
                if not isinstance(stack[-1], dict):
                    raise _Refused(f"data.pkl sets attributes of a {type(stack[-1]).__name__}, which is not done")
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "APPEND":
                item = stack.pop()
                self._list().append(item)
            case "APPENDS":
                items = self._since_mark()
                self._list().extend(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._dict()[key] = value
            case "SETITEMS":
                items = self._since_mark()
                self._dict().update(zip(items[::2], items[1::2], strict=True))
            case _ if opcode in _CONSTANTS:
                stack.append(_CONSTANTS[opcode])
            case _ if opcode in _EMPTY:
                stack.append(_EMPTY[opcode]())
            case _ if opcode in _VALUES:
                stack.append(argument)
            case _:
                raise _Refused(f"data.pkl uses the instruction {opcode}, which no plain data and no tensor need")

    def _since_mark(self) -> list[Any]:
        start = max(index for index, item in enumerate(self._stack) if item is _MARK)
        items = self._stack[start + 1 :]
        del self._stack[start:]
        return items

    def _list(self) -> list[Any]:
        if not isinstance(self._stack[-1], list):
            raise _Refused(f"data.pkl appends to a {type(self._stack[-1]).__name__}")
        return self._stack[-1]

    def _dict(self) -> dict[Any, Any]:
        if not isinstance(self._stack[-1], dict):
            raise _Refused(f"data.pkl sets items of a {type(self._stack[-1]).__name__}")
        return self._stack[-1]

    def _global(self, name: str) -> _Global:
        if name not in _KNOWN:
            raise _Refused(f"data.pkl asks for {name}, which is refused; known are {', '.join(_KNOWN)}")
        return _Global(name)

    def _storage(self, reference: Any) -> _Storage:
        kind, storage, record, _, size = reference
        name = storage.name if isinstance(storage, _Global) else repr(storage)
        if kind != "storage" or name not in _STORAGES or not isinstance(record, str):
            raise _Refused(f"data.pkl refers to {kind!r} of type {name}; known are storages: {', '.join(_STORAGES)}")
        return _Storage(record, _STORAGES[name], _count(size))

    def _call(self, function: Any, arguments: Any) -> Any:
        name = function.name if isinstance(function, _Global) else repr(function)
        if name == _DICTIONARY and arguments == ():
            return {}
        if name == _TENSOR:
            storage, offset, shape, strides, *_ = arguments
            return self._tensor(storage, offset, shape, strides)
        if name == _PARAMETER and isinstance(arguments[0], np.ndarray):
            return arguments[0]
        raise _Refused(f"data.pkl calls {name} with arguments that torch does not give it")

    def _tensor(self, storage: Any, offset: Any, shape: Any, strides: Any) -> np.ndarray:
        if not isinstance(storage, _Storage) or len(shape) != len(strides):
            raise _Refused("data.pkl describes a tensor without a storage, or with other strides than sizes")
        offset, shape, strides = _count(offset), tuple(map(_count, shape)), tuple(map(_count, strides))
        values = self._archive.values(storage)
        if math.prod(shape):
            last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides))
            if last >= storage.size:
                raise _Refused(f"a tensor of shape {shape} reads beyond the {storage.size} elements of its storage")
        else:
            offset, strides = 0, (0,) * len(shape)
        steps = tuple(stride * storage.dtype.itemsize for stride in strides)
        return np.lib.stride_tricks.as_strided(values[offset:], shape, steps, writeable=False)

    def _data(self, saved: Any) -> Any:
        """Checks that nothing is left over that only makes sense inside the pickle."""
        seen, waiting = set(), [saved]
        while waiting:
            item = waiting.pop()
            if item is _MARK or isinstance(item, (_Global, _Storage)):
                raise _Refused(
                    f"data.pkl holds {getattr(item, 'name', 'a bare storage')}, which is neither data nor tensor"
                )
            if isinstance(item, (dict, list, tuple)) and id(item) not in seen:
                seen.add(id(item))
                waiting.extend(item.values() if isinstance(item, dict) else item)
        return saved


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise _Refused(f"data.pkl gives {value!r} where a count is expected")
    return value
