"""What files of draft heads have in common: how they are opened, fused into leaves and split again, and written.

Whole models are written the same way. A folder is written beside its place under a temporary name, read back through
the loader and compared, and only then renamed, so that nothing half-written and nothing that reads back differently
ever stands there.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.weights import assembly, pairing, references, safetensors_files, torch_files, vocabulary_files

_TORCH_MODEL = "pytorch_model.bin"


def open_source(reference: str, sha256: str | None, first: Sequence[str] = ()) -> assembly.Source:
    """The tensors that a reference means.

    A file is taken as it is. Of a folder, the first of these that exists: the names in `first`, safetensors as
    `references.weight_files` finds them, `pytorch_model.bin`.

    Args:
      reference: see `references`.
      sha256: expected digest of the file that is read, or of a folder's shards in order.
      first: file names.

    Raises:
      ValueError: the reference or the digest is wrong, there is no such file, or it cannot be read.
    """
    path = references.resolve(reference, also=(*first, _TORCH_MODEL, vocabulary_files.NAME))
    if path.is_dir():
        named = [path / name for name in first if (path / name).is_file()]
        if named:
            path = named[0]
        elif not references.weight_files(path) and (path / _TORCH_MODEL).is_file():
            path = path / _TORCH_MODEL
    if sha256 is not None:
        references.resolve(str(path), sha256)
    if path.is_file() and path.suffix != ".safetensors":
        return torch_files.TorchFile(path)
    return safetensors_files.SafetensorsFiles(path)


def config_path(source: assembly.Source) -> pathlib.Path:
    """The config.json that belongs to tensors, whether or not it exists."""
    return (source.path.parent if source.path.is_file() else source.path) / "config.json"


def draft_ids(source: assembly.Source, vocab_size: int) -> np.ndarray | None:
    """The reduced vocabulary that lies beside tensors; see `vocabulary_files.read`."""
    return vocabulary_files.read(config_path(source).parent, vocab_size)


def trained_for(reference: str, first: Sequence[str] = ()) -> str | None:
    """The sha256 of the target that a head's config.json names, or None if it does not say.

    Args:
      reference, first: as for `open_source`.

    Raises:
      ValueError: as `open_source`; or what is recorded is no digest.
    """
    where = config_path(open_source(reference, None, first))
    return pairing.recorded(references.read_json(where), where) if where.is_file() else None


def read_leaf(source: assembly.Source, parts: Sequence[assembly.Part], leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """A parameter from the tensors that lie behind one another in it, in row-major order."""
    rows = sum(part.shape[0] for part in parts)
    flat = jax.ShapeDtypeStruct((rows, *parts[0].shape[1:]), leaf.dtype)
    return jax.device_put(assembly.read_leaf(source, parts, flat).reshape(leaf.shape))


def split_leaf(leaf: jax.Array, parts: Sequence[assembly.Part]) -> dict[str, np.ndarray]:
    """The tensors of a parameter by name: the inverse of `read_leaf`."""
    flat, tensors, start = np.asarray(leaf).ravel(), {}, 0
    for part in parts:
        size = math.prod(part.shape)
        tensors[part.name] = flat[start : start + size].reshape(part.shape)
        start += size
    return tensors


def cast(params: Any, dtype: Any) -> Any:
    """Parameters in another dtype, ids as they are; None leaves all as they are."""
    if dtype is None:
        return params
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params)


def same_values(one: jax.Array, other: jax.Array) -> bool:
    """Of the same shape and dtype, and equal."""
    return one.shape == other.shape and one.dtype == other.dtype and bool(jnp.array_equal(one, other))


def check_logits(
    found: jax.Array, expected: jax.Array, dtype: Any, where: pathlib.Path, limit: float | None = None
) -> None:
    """Compare the logits of what was read back with those of what was to be written.

    Args:
      found, expected: logits of one shape.
      dtype: they were computed in.
      where: what was written, for the message.
      limit: of the difference, over the largest logit (or 1). None allows some units in the last place: the numbers are
        the same, but their programs need not be (a bias of zeros, a matrix that is the target's after all).

    Raises:
      ValueError: they differ.
    """
    found, expected = np.asarray(found), np.asarray(expected)
    limit = 64 * float(jnp.finfo(dtype).eps) if limit is None else limit
    limit *= max(1.0, float(np.abs(expected).max()))
    if found.shape != expected.shape or not np.abs(found - expected).max() <= limit:
        raise ValueError(f"{where}: what was written does not give the same logits when read back; nothing is kept")


def write_folder(
    folder: str | os.PathLike,
    config: Mapping[str, Any],
    tensors: Mapping[str, Any],
    name: str,
    check: Callable[[pathlib.Path], None],
    more: Mapping[str, Mapping[str, Any]] | None = None,
    draft_ids: np.ndarray | None = None,
) -> None:
    """Write `config.json`, one safetensors file and what else belongs to them into a new folder.

    Args:
      folder: an empty or no folder, inside an existing one.
      config: content of config.json.
      tensors: arrays by name.
      name: of the safetensors file.
      check: reads what was written from the folder it is given, before the folder gets its name.
      more: contents of further JSON files by name.
      draft_ids: `[Vd]` a reduced vocabulary that has no place in the others (`vocabulary_files`).

    Raises:
      ValueError: there is something in the folder already, or no folder to put it in; or `check` says so.
      OSError: the disk does.
    """
    folder = pathlib.Path(folder).expanduser().absolute()
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; weights are written into a new folder")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; weights are written into a new folder")
    if not folder.parent.is_dir():
        raise ValueError(f"{folder} cannot be written: {folder.parent} is not a folder")
    work = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    work.mkdir()
    try:
        for file, content in {"config.json": config, **(more or {})}.items():
            (work / file).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        # transformers refuses a file that does not say whose tensors it holds.
        safetensors_files.save(tensors, work / name, metadata={"format": "pt"})
        if draft_ids is not None:
            np.save(work / vocabulary_files.NAME, draft_ids)
        check(work)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
