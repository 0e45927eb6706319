"""From tensors by name to the parameter tree of `models.config.param_shapes`.

Checkpoint formats differ in names and in how rows are ordered; what is done with the tensors is the same: fuse query,
key and value, fuse gate and up, check every shape, refuse what is unknown or missing. It is done leaf by leaf, and each
leaf is on its device before another is read, so that loading needs little more memory than the parameters themselves.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models import config as model_config

# Elements read at a time.
_PIECE = 1 << 21


class Source(Protocol):
    """Tensors by name: `safetensors_files.SafetensorsFiles`, `gguf_files.GgufFile`."""

    path: pathlib.Path

    def names(self) -> list[str]: ...

    def where(self, name: str) -> pathlib.Path: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Names:
    """How one format names the tensors of our tree.

    embed, final_norm, head: full names.
    layer:                   prefix of a layer's tensors, with a place for its number.
    leaves:                  for each leaf of a layer, the names behind that prefix, in the order they are fused.
    ignored:                 pattern of names that carry nothing of their own.
    """

    embed: str
    final_norm: str
    head: str
    layer: str
    leaves: dict[str, tuple[str, ...]]
    ignored: re.Pattern


class Part(NamedTuple):
    """A stored tensor that is part of a leaf."""

    name: str
    shape: tuple[int, ...]


def fused_rows(config: model_config.TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Rows of the stored tensors behind the leaves that fuse several."""
    return {
        "qkv": (config.num_heads * config.head_size,) + 2 * (config.num_kv_heads * config.head_size,),
        "gate_up": (config.ffn_size, config.ffn_size),
    }


def model_parts(config: model_config.TransformerConfig, names: Names) -> dict[tuple, list[Part]]:
    """The stored tensors behind each leaf of the tree, by the leaf's path, in the order of the tree's leaves."""
    fused = fused_rows(config)
    parts = {}
    for path, leaf in jax.tree.flatten_with_path(model_config.param_shapes(config))[0]:
        keys = tuple(getattr(step, "key", getattr(step, "idx", None)) for step in path)
        if keys[0] != "layers":
            stored = (getattr(names, keys[0]),)
        else:
            stored = tuple(names.layer.format(keys[1]) + name for name in names.leaves[keys[2]])
        rows = fused.get(str(keys[-1]).removesuffix("_bias"), (leaf.shape[0],))
        parts[keys] = [Part(name, (count, *leaf.shape[1:])) for name, count in zip(stored, rows, strict=True)]
    return parts


def settle_head(source: Source, config: model_config.TransformerConfig, names: Names) -> model_config.TransformerConfig:
    """Make `tied_head` say what the stored tensors say.

    A tied checkpoint may still store a head. If it equals the embedding it is dropped; if it does not, it is used, with
    a warning, since someone trained it. An untied checkpoint without a head is refused: tying it would be a guess.

    Raises:
      ValueError: untied, and no head stored.
    """
    stored = set(source.names())
    if names.head not in stored:
        if not config.tied_head:
            raise ValueError(
                f"{source.path}: the config has an output head of its own (tie_word_embeddings false) and {names.head} "
                "is not stored; if the head is the embedding, set tie_word_embeddings to true in config.json"
            )
        return config
    if config.tied_head and names.embed in stored:
        same = source.shape(names.head) == source.shape(names.embed)
        if not same or not np.array_equal(source.read(names.head), source.read(names.embed)):
            warnings.warn(
                f"{source.where(names.head)}: the config ties the output head to the embedding, but {names.head} is "
                "stored and differs; the stored head is used",
                stacklevel=2,
            )
            return dataclasses.replace(config, tied_head=False)
    return config


def assemble(
    source: Source,
    config: model_config.TransformerConfig,
    names: Names,
    *,
    dtype: Any = jnp.float32,
    adjust: Callable[[str, np.ndarray], np.ndarray] | None = None,
    lent: Mapping[str, jax.Array] | None = None,
) -> dict:
    """Read a model's parameters.

    Args:
      source: the stored tensors.
      config: of the model; `settle_head` has seen it.
      names: how the source names them.
      dtype: of the parameters.
      adjust: called with each tensor's name and values before they are fused, for formats that order rows differently.
      lent: parameters that are not read but taken from here, by their names in the tree (`borrowing`).

    Returns:
      The tree of `models.config.param_shapes`, on the default device.

    Raises:
      ValueError: all unknown, missing and misshapen tensors, by name and file.
    """
    lent = lent or {}
    parts = {path: stored for path, stored in model_parts(config, names).items() if path[0] not in lent}
    _check(source, parts, names, config)
    read = {name: leaf for name, leaf in model_config.param_shapes(config, dtype).items() if name not in lent}
    shapes, treedef = jax.tree.flatten(read)

    def load(leaf, stored):
        return jax.device_put(read_leaf(source, stored, leaf, adjust))

    # Two leaves at a time keep two cores busy; more would only hold more unfinished leaves in memory.
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        leaves = list(pool.map(load, shapes, parts.values()))
    return {**jax.tree.unflatten(treedef, leaves), **lent}


def _check(source: Source, parts: dict[tuple, list[Part]], names: Names, config: model_config.TransformerConfig):
    expected = {part.name: part.shape for stored in parts.values() for part in stored}
    held = {name for name in source.names() if not names.ignored.fullmatch(name)}
    if config.tied_head and names.embed in expected:
        held.discard(names.head)  # equal to the embedding: `settle_head` compared them
    check_tensors(source, expected, held)


def check_tensors(source: Source, expected: Mapping[str, tuple[int, ...]], held: Set[str]) -> None:
    """Compare what is stored with what should be.

    Args:
      source: the stored tensors.
      expected: shapes by name.
      held: the stored names that count; the others carry nothing of their own.

    Raises:
      ValueError: all unknown, missing and misshapen tensors, by name and file.
    """
    problems = []
    if missing := [name for name in expected if name not in held]:
        problems.append(f"missing: {', '.join(missing)}")
    if unknown := sorted(held - set(expected)):
        problems.append(f"unknown: {', '.join(f'{name} (in {source.where(name).name})' for name in unknown)}")
    for name, shape in expected.items():
        if name in held and source.shape(name) != shape:
            problems.append(f"{name} in {source.where(name).name} has shape {source.shape(name)}, expected {shape}")
    if problems:
        raise ValueError(f"{source.path}: the tensors do not fit the config; {'; '.join(problems)}")


def read_leaf(
    source: Source,
    stored: Sequence[Part],
    leaf: jax.ShapeDtypeStruct,
    adjust: Callable[[str, np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """One leaf in host memory: its parts one behind the other along the first axis, cast.

    Raises:
      ValueError: a tensor that holds no floating-point numbers.
    """
    out = _aligned(leaf.shape, leaf.dtype)
    start = 0
    for name, shape in stored:
        view = out[start : start + shape[0]]
        start += shape[0]
        # A piece at a time: an embedding need not be held a second time in the stored dtype.
        step = max(1, _PIECE // math.prod(shape[1:]))
        for row in range(0, shape[0], step):
            values = source.read(name, slice(row, row + step))
            if not jnp.issubdtype(values.dtype, jnp.floating):
                where = source.where(name)
                raise ValueError(f"{where}: tensor {name} holds {values.dtype}; quantised weights are not supported")
            view[row : row + step] = values
        if adjust is not None and (ordered := adjust(name, view)) is not view:
            view[...] = ordered
    return out


def _aligned(shape: tuple[int, ...], dtype) -> np.ndarray:
    """Uninitialised memory at a multiple of 64 bytes: what jax on CPU takes over without copying."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)
