"""A draft model as a folder that borrows its target's embedding, output matrix and tokenizer (`borrowing`)."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax.numpy as jnp

from jspec import types
from jspec.models import transformer
from jspec.weights import borrowing, families, head_files, model_exports


def shared_with(draft: types.Target, target: types.Target) -> tuple[str, ...]:
    """The parameters of a draft that are its target's: of equal values, once in the draft's dtype."""
    lent = {"embed": target.model.params["embed"], "head": transformer.output_matrix(target.model)}
    own = draft.model.params
    return tuple(
        name
        for name in borrowing.LENT
        if name in own and head_files.same_values(own[name], lent[name].astype(draft.model.dtype))
    )


def save_shared(draft: types.Target, target: types.Target, folder: str | os.PathLike, *, dtype: Any = None) -> None:
    """Write what is a draft's own: config.json, model.safetensors and a reduced vocabulary, if it has one.

    It is loaded again for the target and compared, logits and vocabulary, before the folder gets its name.

    Args:
      draft: a draft model; its tokenizer is the target's.
      target: the model it was trained for; its sha256 is recorded.
      folder: an empty or no folder, inside an existing one.
      dtype: of the stored parameters: float32, bfloat16 or float16; None keeps the draft's.

    Raises:
      ValueError: the draft shares nothing with the target; no family has such a model (`families.config_json`); there
        is something in the folder already; or what was written reads back differently.
      OSError: the disk does not take it. Nothing is left of what was written.
    """
    shared = shared_with(draft, target)
    if not shared:
        raise ValueError(
            f"{folder}: the draft shares neither embedding nor output matrix with {target.provenance.reference}; "
            "write a whole model instead (save_huggingface)"
        )
    config, dtype = draft.model.config, draft.model.dtype if dtype is None else dtype
    own = {name: leaf for name, leaf in draft.model.params.items() if name not in shared}
    own = head_files.cast(own, jnp.dtype(dtype))
    # Whoever lends has the tokenizer: there is nothing to compare.
    lender = dataclasses.replace(target, tokenizer=None)
    written = model_exports.prepare(dataclasses.replace(draft, tokenizer=None), target.provenance.sha256)
    params = head_files.cast(own, jnp.float32) | borrowing.lend(shared, config, target, jnp.float32, folder)
    written = dataclasses.replace(written, model=transformer.Model(params, config), stop_ids=target.stop_ids)
    content = families.config_json(config) | {"torch_dtype": jnp.dtype(dtype).name}
    content |= borrowing.record(shared, written.provenance.trained_for)
    tensors = model_exports.tensors(transformer.Model(own, config), families.NAMES)
    check = model_exports.checker(written, lender)
    head_files.write_folder(folder, content, tensors, "model.safetensors", check, draft_ids=written.draft_ids)
