"""A model as a Hugging Face folder: config.json, model.safetensors, tokenizer.json and what belongs to them.

The folder is for transformers (tested with 5.24) and for the engines that read its folders. `weights.load_target` reads
it back.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jspec import types
from jspec.weights import families, head_files, model_exports, pairing
from jspec.weights import tokenizer as tokenizers


def save_huggingface(
    target: types.Target, folder: str | os.PathLike, *, dtype: Any = None, target_sha256: str | None = None
) -> None:
    """Write a target, or a standard draft, as a Hugging Face folder.

    It is loaded again and compared, logits and token ids, before the folder gets its name; see `model_exports`.

    Args:
      target: model, tokenizer and end tokens; of a draft, its reduced vocabulary (`vocabulary_files`). Without a
        tokenizer the folder has none either.
      folder: an empty or no folder, inside an existing one.
      dtype: of the stored parameters: float32, bfloat16 or float16; None keeps the model's.
      target_sha256: digest of the model that a draft was trained for, kept in config.json under `jspec`; None keeps
        what the target's provenance says.

    Raises:
      ValueError: no family has such a model (`families.config_json`); there is something in the folder already; the
        digest is none; or what was written reads back differently.
      OSError: the disk does not take it. Nothing is left of what was written.
    """
    target = model_exports.prepare(target, target_sha256)
    model = model_exports.cast(target.model, target.model.dtype if dtype is None else dtype)
    content = families.config_json(model.config) | {"torch_dtype": jnp.dtype(model.dtype).name}
    ids = _token_ids(target)
    content |= ids
    content |= pairing.record(target.provenance.trained_for)
    more = {"generation_config.json": ids} if ids else {}
    if target.tokenizer is not None:
        more["tokenizer.json"] = tokenizer_json(target.tokenizer)
        more["tokenizer_config.json"] = _tokenizer_config(target.tokenizer, model.config.max_positions)
    check = model_exports.checker(dataclasses.replace(target, model=model))
    tensors = model_exports.tensors(model, families.NAMES)
    head_files.write_folder(folder, content, tensors, "model.safetensors", check, more, target.draft_ids)


def _token_ids(target: types.Target) -> dict[str, Any]:
    """`bos_token_id` and `eos_token_id`, of config.json and generation_config.json alike."""
    ids: dict[str, Any] = {}
    if target.tokenizer is not None and target.tokenizer.bos_id is not None:
        ids["bos_token_id"] = target.tokenizer.bos_id
    if target.stop_ids:
        ids["eos_token_id"] = target.stop_ids[0] if len(target.stop_ids) == 1 else list(target.stop_ids)
    return ids


def tokenizer_json(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """Content of tokenizer.json.

    Its post-processor writes BOS where the model wants it, and only there, for readers that know no `add_bos_token`.
    """
    backend, bos_id = tokenizer.backend, tokenizer.bos_id
    content = json.loads(backend.to_str())
    vocabulary = tokenizer.vocab()
    entries = content["model"].get("vocab")
    if isinstance(entries, Mapping):
        # A GGUF file spells its padding out; a tokenizer.json has gaps.
        content["model"]["vocab"] = {token: index for token, index in entries.items() if vocabulary[index]}
    writes_bos = bos_id is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]
    if tokenizer.add_bos and not writes_bos:
        steps = [content["post_processor"]] if content["post_processor"] is not None else []
        content["post_processor"] = {"type": "Sequence", "processors": [*steps, _bos_processor(vocabulary, bos_id)]}
    elif writes_bos and not tokenizer.add_bos:
        content["post_processor"] = None
    return content


def _bos_processor(vocabulary: list[str], bos_id: int) -> dict[str, Any]:
    bos, place = vocabulary[bos_id], lambda kind, name, number: {kind: {"id": name, "type_id": number}}
    single = [place("SpecialToken", bos, 0), place("Sequence", "A", 0)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, place("SpecialToken", bos, 1), place("Sequence", "B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _tokenizer_config(tokenizer: tokenizers.Tokenizer, max_positions: int) -> dict[str, Any]:
    """Content of tokenizer_config.json, under the class that takes tokenizer.json as it is."""
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.special_tokens,
        "add_bos_token": tokenizer.add_bos,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    return content if tokenizer.chat_template is None else content | {"chat_template": tokenizer.chat_template}
