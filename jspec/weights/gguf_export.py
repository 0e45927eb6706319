"""A model as a float32 GGUF file, through the writer of the `gguf` package.

Keys and tensor names are llama.cpp's for `llama`, `qwen2` and `qwen3`, from the tables that `gguf_models` and
`gguf_tokenizers` read with; the format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec import extras, files, types
from jspec.weights import gguf_models, gguf_tokenizers, model_exports, pairing, vocabulary_files


def save_gguf(target: types.Target, path: str | os.PathLike, *, target_sha256: str | None = None) -> None:
    """Write a target, or a standard draft, as a float32 GGUF file.

    It is loaded again and compared, logits and token ids, before the file gets its name; see `model_exports`.

    Args:
      target: model, tokenizer and end tokens; of a draft, its reduced vocabulary, kept under `jspec.draft_vocabulary`.
        Without a tokenizer the file names only the end tokens.
      path: of a file that does not exist, inside a folder that does.
      target_sha256: digest of the model that a draft was trained for, kept under `jspec.target_sha256`; None keeps what
        the target's provenance says.

    Raises:
      ValueError: no architecture has such a model (`gguf_models.architecture`); GGUF cannot say what its tokenizer does
        (`gguf_tokenizers.metadata`); there is something at the path already; the digest is none; or what was written
        reads back differently.
      OSError: the disk does not take it. Nothing is left of what was written.
    """
    extras.require("gguf", "weights")
    path = pathlib.Path(path).expanduser().absolute()
    if path.exists():
        raise ValueError(f"{path} exists already; models are written into a new file")
    target = model_exports.prepare(target, target_sha256)
    model = model_exports.cast(target.model, jnp.float32)
    architecture = gguf_models.architecture(model.config)
    metadata = gguf_models.metadata(model.config)
    metadata |= gguf_tokenizers.metadata(target.tokenizer, model.config.vocab_size, target.stop_ids)
    if target.provenance.trained_for is not None:
        metadata[pairing.GGUF_KEY] = target.provenance.trained_for
    if target.draft_ids is not None:
        metadata[vocabulary_files.GGUF_KEY] = target.draft_ids.tolist()
    adjust = gguf_models.row_order(architecture, model.config, writing=True)
    tensors = model_exports.tensors(model, gguf_models.NAMES, adjust)
    if (divisors := gguf_models.rope_divisors(model.config)) is not None:
        tensors[gguf_models.DIVISORS] = divisors
    check = model_exports.checker(dataclasses.replace(target, model=model))
    with files.complete(path) as temporary:
        _write(temporary, architecture, metadata, tensors)
        check(temporary)


def _write(
    path: pathlib.Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    try:
        for key, value in metadata.items():
            (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
        for name, values in tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
