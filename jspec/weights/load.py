"""A reference to a `Target`: parameters on the device, tokenizer, provenance, stop ids."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec import types
from jspec.models import config as model_config
from jspec.models import transformer
from jspec.weights import (
    assembly,
    borrowing,
    families,
    gguf_files,
    gguf_models,
    gguf_tokenizers,
    pairing,
    references,
    safetensors_files,
    vocabulary_files,
)
from jspec.weights import tokenizer as tokenizers


class _Loaded(NamedTuple):
    config: model_config.TransformerConfig
    params: dict
    tokenizer: tokenizers.Tokenizer | None
    stop_ids: tuple[int, ...]
    trained_for: str | None = None
    draft_ids: np.ndarray | None = None


def load_target(
    reference: str, *, sha256: str | None = None, dtype: Any = jnp.float32, lender: types.Target | None = None
) -> types.Target:
    """Load a decoder-only model: a target, or a draft model for one.

    A reference means a Hugging Face folder (config.json with safetensors), a GGUF file, a folder with one GGUF file in
    it, or a single .safetensors file with config.json beside it; see `references` for where they come from. A folder
    without tokenizer.json gives a target for bare token ids.

    Args:
      reference: see `references`.
      sha256: expected digest of the file, or of the folder's weight files in order.
      dtype: of the parameters.
      lender: of a draft, its target, for folders that borrow from it (`borrowing`).

    Raises:
      ValueError: the reference, a file, the architecture or a tensor is not as expected; a draft borrows, and there is
        no lender or one of another size; each named.
    """
    path = references.resolve(reference, sha256, also=(vocabulary_files.NAME,))
    file = gguf_file(path)
    loaded = _load_gguf(file, dtype) if file is not None else _load_huggingface(path, dtype, lender)
    return types.Target(
        model=transformer.Model(loaded.params, loaded.config),
        tokenizer=loaded.tokenizer,
        # An expected digest has just been checked; a large file is not read for it again.
        provenance=types.Provenance(
            str(reference), sha256.lower() if sha256 else references.digest(path), loaded.trained_for
        ),
        stop_ids=loaded.stop_ids,
        draft_ids=loaded.draft_ids,
    )


def gguf_file(path: pathlib.Path) -> pathlib.Path | None:
    """The GGUF file that a path means, or None when it is a Hugging Face checkpoint."""
    if path.is_file():
        with open(path, "rb") as file:
            # By content: caches rename files.
            return path if path.suffix == ".gguf" or file.read(4) == b"GGUF" else None
    if (path / "config.json").is_file():
        return None
    files = references.weight_files(path)
    return files[0] if len(files) == 1 and files[0].suffix == ".gguf" else None


def _load_gguf(path: pathlib.Path, dtype: Any) -> _Loaded:
    file = gguf_files.GgufFile(path)
    config = assembly.settle_head(file, gguf_models.transformer_config(file), gguf_models.NAMES)
    adjust = gguf_models.row_order(file.metadata["general.architecture"], config)
    params = assembly.assemble(file, config, gguf_models.NAMES, dtype=dtype, adjust=adjust)
    trained_for = file.metadata.get(pairing.GGUF_KEY)
    ids = vocabulary_files.reduced(
        file.metadata.get(vocabulary_files.GGUF_KEY), config.vocab_size, f"{path}: {vocabulary_files.GGUF_KEY}"
    )
    if file.metadata.get("tokenizer.ggml.model", "none") in gguf_tokenizers.NO_VOCABULARY:
        stop_ids = gguf_tokenizers.stated_stop_ids(file.metadata, config.vocab_size)
        return _Loaded(config, params, None, stop_ids, trained_for, ids)
    tokenizer = tokenizers.Tokenizer.from_gguf(file.metadata, path)
    return _Loaded(config, params, tokenizer, tokenizer.stop_ids, trained_for, ids)


def _load_huggingface(path: pathlib.Path, dtype: Any, lender: types.Target | None) -> _Loaded:
    folder = path.parent if path.is_file() else path
    where = folder / "config.json"
    if not where.is_file():
        raise ValueError(f"{where} is missing; a model needs it beside its safetensors")
    content = references.read_json(where)
    config, borrowed = families.transformer_config(content, where), borrowing.borrowed(content, where)
    lent = borrowing.lend(borrowed, config, lender, dtype, where)
    source = safetensors_files.SafetensorsFiles(path)
    if not lent:
        config = assembly.settle_head(source, config, families.NAMES)
    params = assembly.assemble(source, config, families.NAMES, dtype=dtype, lent=lent)
    draft_ids = vocabulary_files.read(folder, config.vocab_size)
    trained_for = pairing.recorded(content, where)
    if lent:  # whoever lends the embedding lends the tokens that its rows stand for
        return _Loaded(config, params, lender.tokenizer, lender.stop_ids, trained_for, draft_ids)
    if (folder / "tokenizer.json").is_file():
        tokenizer = tokenizers.Tokenizer.from_folder(folder)
        return _Loaded(config, params, tokenizer, tokenizer.stop_ids, trained_for, draft_ids)
    ids = content.get("eos_token_id")
    stop = ids if isinstance(ids, list) else [ids]
    stop_ids = tuple(sorted(index for index in stop if index is not None))
    return _Loaded(config, params, None, stop_ids, trained_for, draft_ids)
