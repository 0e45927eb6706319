"""Medusa heads in files (Cai et al., arXiv:2401.10774), in and out.

Read are the layout of the released code (FasterDecoding/Medusa, and TGI's spelling of it) and the one of vLLM up to
about 0.23:

    released    medusa_lm_head.pt, medusa_lm_head.safetensors, or names behind `medusa_head.` in a whole model's files
                {head}.{layer}.linear.weight [E, E], .bias [E];  {head}.{num_layers}.weight [V, E], absent from version
                "2", whose heads share the target's output matrix
    vLLM        blocks.{head}.layers.{layer}.weight, .bias (none unless medusa_fc_bias);  lm_heads.{head}.weight, one
                for all heads if original_lm_head;  token_map [Vd], the ids of a reduced vocabulary;  all of them
                optionally behind `medusa_heads.`

Heads of the released layout that share the target's output matrix may have a reduced vocabulary, in a file of its own
(`vocabulary_files`).

Heads and blocks are counted from the names: configs of uploads say 2 heads where the file holds 5. The released code is
written, which it and TGI run, as does TensorRT-LLM's older engine; no current vLLM or SGLang runs Medusa.

Differs from the released code: each block has its own parameters, as the files store them; there the blocks of a head
are one module, so that a file with more than one block per head holds copies.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import types
from jspec.models import heads as heads_lib
from jspec.models import transformer
from jspec.weights import assembly, head_files, pairing, references, vocabulary_files

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_PREFIXES = ("medusa_head.", "medusa_heads.")
_TOKEN_MAP = "token_map"


class _Layout(NamedTuple):
    """Names of one layout; `{0}` is the head, `{1}` the layer."""

    block: str
    bias: str
    head: str

    def counted(self, pattern: str, names: set[str]) -> list[tuple[int, ...]]:
        """The numbers in the names that fit one of the three."""
        expression = re.escape(pattern).replace(r"\{0\}", r"(\d+)").replace(r"\{1\}", r"(\d+)")
        return [tuple(map(int, found.groups())) for found in map(re.compile(expression).fullmatch, names) if found]


_VLLM = _Layout("blocks.{0}.layers.{1}.weight", "blocks.{0}.layers.{1}.bias", "lm_heads.{0}.weight")


def _released(num_layers: int) -> _Layout:
    return _Layout("{0}.{1}.linear.weight", "{0}.{1}.linear.bias", f"{{0}}.{num_layers}.weight")


class _Stored(NamedTuple):
    """What the names say.

    parts:     the stored tensors behind each leaf.
    config:    of all heads.
    token_map: name of the ids of a reduced vocabulary, or None.
    """

    parts: dict[str, list[assembly.Part]]
    config: heads_lib.MedusaConfig
    token_map: str | None = None


def holds(names: set[str]) -> bool:
    """Whether a file with tensors of these names holds heads, be it beside a whole model."""
    inside = {name.removeprefix(prefix) for prefix in _PREFIXES for name in names if name.startswith(prefix)}
    return any(layout.counted(layout.block, inside or names) for layout in (_released(0), _VLLM))


def load(
    reference: str,
    target: types.Target,
    *,
    num_heads: int | None = None,
    sha256: str | None = None,
    force: bool = False,
) -> heads_lib.MedusaHeads:
    """Load Medusa heads, in the target's dtype.

    Args:
      reference: a folder or a file; see `references`.
      target: the model they were trained for.
      num_heads: keep the first so many; None keeps all.
      sha256: expected digest of the file that is read, or of a folder's shards in order.
      force: load them although they say that they were trained for another target (`pairing`).

    Raises:
      ValueError: the reference or a file cannot be read; tensors are unknown, missing or misshapen (all are named),
        also for this target; more heads are asked for than are stored; they were trained for another target; or a
        vocabulary file stands beside heads with output matrices of their own, or leaves the target's vocabulary.
    """
    if num_heads is not None and num_heads < 1:
        raise ValueError(f"num_heads {num_heads} is below 1")
    source = head_files.open_source(reference, sha256, FILES)
    where = head_files.config_path(source)
    content = references.read_json(where) if where.is_file() else {}
    pairing.check_trained_for(pairing.recorded(content, where), target, where, force)
    names, prefix = _names(source)
    stored = (_vllm if any(name.startswith("blocks.") for name in names) else _plain)(
        source, names, prefix, content, target
    )
    held = stored.config.num_heads
    if num_heads is not None and num_heads > held:
        raise ValueError(f"{source.path}: num_heads {num_heads} asked for, {held} stored: {', '.join(sorted(names))}")
    heads = _read(source, stored, num_heads or held, target)
    ids = head_files.draft_ids(source, target.model.config.vocab_size)
    if ids is not None and heads.config.vocab_size is not None:
        raise ValueError(
            f"{where.with_name(vocabulary_files.NAME)}: the heads have output matrices of their own; a file like this "
            "belongs to heads that share the target's"
        )
    return _restrict(heads, target, ids)


def _restrict(heads: heads_lib.MedusaHeads, target: types.Target, ids: np.ndarray | None) -> heads_lib.MedusaHeads:
    """Heads that share the target's output matrix with these of its rows alone; None leaves all."""
    if ids is None:
        return heads
    ids = jnp.asarray(ids)
    rows = {"draft_ids": ids, "head": transformer.output_matrix(target.model)[ids]}
    return heads_lib.MedusaHeads(heads.params | rows, heads.config)


def save(
    heads: heads_lib.MedusaHeads,
    target: types.Target,
    folder: str | os.PathLike,
    *,
    base_model: str,
    dtype: Any = None,
) -> None:
    """Write heads in the released layout, `config.json` and `medusa_lm_head.safetensors`.

    They are read back and their logits compared before the folder gets its name. The released code and TGI read them,
    and TensorRT-LLM's older engine; vLLM (since about 0.23), SGLang, llama.cpp and transformers run no Medusa heads.
    The reduced vocabulary of heads that share the target's output matrix goes to `draft_vocabulary.npy`, which no other
    engine reads: they draft from all tokens.

    Args:
      heads: the heads.
      target: the model they were trained for; its sha256 is recorded.
      folder: an empty or no folder, inside an existing one.
      base_model: what config.json calls the target.
      dtype: of the stored parameters: float32, bfloat16 or float16; None keeps the heads'.

    Raises:
      ValueError: there is something in the folder already; output matrices of the heads' own over a reduced vocabulary,
        which the layout cannot hold; or the heads do not fit the target.
      OSError: the disk does not take them. Nothing is left of what was written.
    """
    config = heads.config
    if config.reduced:
        raise ValueError(
            f"output matrices over a reduced vocabulary ({config.vocab_size} tokens) have no place in the released "
            "layout"
        )
    heads = heads_lib.MedusaHeads(head_files.cast(heads.params, dtype), config)
    ids = vocabulary_files.reduced(heads.params.get("draft_ids"), target.model.config.vocab_size, "draft_ids")
    content = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": base_model,
        "version": "2" if config.vocab_size is None else "1",
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "hidden_size": config.width,
        "vocab_size": target.model.config.vocab_size,
        "torch_dtype": np.dtype(heads.params["blocks"].dtype).name,
        **pairing.record(target.provenance.sha256),
    }
    tensors = {}
    for name, parts in _parts(_released(config.num_layers), config, config.vocab_size).items():
        tensors |= head_files.split_leaf(heads.params[name], parts)
    in_target = {name: leaf for name, leaf in heads.params.items() if name not in heads_lib.MEDUSA_SHARED}
    in_target = heads_lib.MedusaHeads(head_files.cast(in_target, target.model.dtype), config)
    expected = _sample_logits(_restrict(in_target, target, ids), target)

    def check(written: pathlib.Path) -> None:
        found = load(str(written), target)
        vocabulary_files.same(found.params.get("draft_ids"), ids, written)
        head_files.check_logits(_sample_logits(found, target), expected, target.model.dtype, written)

    head_files.write_folder(folder, content, tensors, FILES[0], check, draft_ids=ids)


def _sample_logits(heads: heads_lib.MedusaHeads, target: types.Target) -> jax.Array:
    rng = np.random.default_rng(0)
    features = jnp.asarray(rng.standard_normal((2, target.model.config.width)), target.model.dtype)
    return heads_lib.medusa_logits(heads, target.model, features)


def _names(source: assembly.Source) -> tuple[set[str], str]:
    """Names without their prefix, and the prefix. A whole model's own tensors are left out."""
    names = set(source.names())
    for prefix in _PREFIXES:
        inside = {name for name in names if name.startswith(prefix)}
        if inside:
            others = sorted(name for name in names - inside if not name.startswith(("model.", "lm_head.")))
            if others:
                raise ValueError(f"{source.path}: unknown tensors beside {prefix}*: {', '.join(others)}")
            return {name.removeprefix(prefix) for name in inside}, prefix
    return names, ""


def _parts(
    layout: _Layout, config: heads_lib.MedusaConfig, vocab_rows: int | None, prefix: str = "", shared: bool = False
) -> dict[str, list[assembly.Part]]:
    """The stored tensors behind each leaf; `vocab_rows` of each output matrix, `shared` when one serves all heads."""
    heads, width = range(config.num_heads), config.width
    blocks = [(head, layer) for head in heads for layer in range(config.num_layers)]
    part = lambda name, *shape: assembly.Part(prefix + name, shape)
    parts = {
        "blocks": [part(layout.block.format(*place), width, width) for place in blocks],
        "biases": [part(layout.bias.format(*place), width) for place in blocks],
    }
    if vocab_rows is not None:
        parts["heads"] = [part(layout.head.format(0 if shared else head), vocab_rows, width) for head in heads]
    return parts


def _plain(source, names, prefix, content, target) -> _Stored:
    """The released layout."""
    blocks = _released(0).counted(_released(0).block, names)
    if not blocks:
        raise ValueError(f"{source.path} holds no Medusa heads; unknown tensors: {', '.join(sorted(names))}")
    num_layers = 1 + max(layer for _, layer in blocks)
    layout = _released(num_layers)
    matrices = layout.counted(layout.head, names)
    num_heads = 1 + max(head for head, *_ in (*blocks, *matrices))
    vocab_size = target.model.config.vocab_size if matrices else None
    config = heads_lib.MedusaConfig(num_heads, num_layers, target.model.config.width, vocab_size)
    if (said := content.get("medusa_num_layers")) is not None and said != num_layers:
        raise ValueError(
            f"{head_files.config_path(source)}: medusa_num_layers is {said}; {source.path} holds {num_layers} in a "
            f"head: {', '.join(sorted(names))}"
        )
    parts = _parts(layout, config, vocab_size, prefix)
    _check(source, names, prefix, parts, {})
    return _Stored(parts, config)


def _vllm(source, names, prefix, content, target) -> _Stored:
    """The layout of vLLM."""
    model, where = target.model.config, head_files.config_path(source)
    blocks = _VLLM.counted(_VLLM.block, names)
    if not blocks:
        raise ValueError(f"{source.path} holds no Medusa heads; unknown tensors: {', '.join(sorted(names))}")
    matrices, biases = _VLLM.counted(_VLLM.head, names), _VLLM.counted(_VLLM.bias, names)
    shared = bool(content.get("original_lm_head", False))
    num_heads = 1 + max(head for head, *_ in (*blocks, *matrices))
    num_layers = 1 + max(layer for _, layer in blocks)
    layout = _VLLM
    if shared and "lm_head.weight" in names and not matrices:
        layout = _VLLM._replace(head="lm_head.weight")
    # The map counts only where the config says that the vocabulary is cut.
    size = content.get("truncated_vocab_size") or model.vocab_size
    token_map = _TOKEN_MAP if size < model.vocab_size else None
    if token_map and _TOKEN_MAP not in names:
        raise ValueError(
            f"{where}: truncated_vocab_size is {size} of {model.vocab_size}; missing: {prefix}{_TOKEN_MAP}"
        )
    first = prefix + layout.head.format(0)
    # Matrices may be stored whole and be cut by the map.
    whole = first in source.names() and source.shape(first)[:1] == (model.vocab_size,)
    config = heads_lib.MedusaConfig(num_heads, num_layers, model.width, size, token_map is not None)
    parts = _parts(layout, config, model.vocab_size if whole else size, prefix, shared)
    if not content.get("medusa_fc_bias", bool(biases)):
        del parts["biases"]
    extra = {}
    if _TOKEN_MAP in names:
        extra[prefix + _TOKEN_MAP] = (size,) if token_map else source.shape(prefix + _TOKEN_MAP)
    _check(source, names, prefix, parts, extra)
    return _Stored(parts, config, token_map and prefix + token_map)


def _check(source, names, prefix, parts, extra) -> None:
    expected = {part.name: part.shape for stored in parts.values() for part in stored} | extra
    assembly.check_tensors(source, expected, {prefix + name for name in names})


def _read(source: assembly.Source, stored: _Stored, num_heads: int, target: types.Target) -> heads_lib.MedusaHeads:
    dtype, held = target.model.dtype, stored.config
    config = dataclasses.replace(held, num_heads=num_heads)
    params: dict[str, Any] = {}
    for name, leaf in heads_lib.medusa_shapes(config, dtype).items():
        if name == "draft_ids":
            params[name] = _ids(source, stored.token_map, target.model.config.vocab_size)
        elif name in stored.parts:
            parts = stored.parts[name][: len(stored.parts[name]) * num_heads // held.num_heads]
            whole = jax.ShapeDtypeStruct((num_heads, parts[0].shape[0], *leaf.shape[2:]), dtype)
            params[name] = head_files.read_leaf(source, parts, whole if name == "heads" else leaf)
        else:
            params[name] = jnp.zeros(leaf.shape, dtype)
    if config.reduced and params["heads"].shape[1] != config.vocab_size:
        params["heads"] = params["heads"][:, params["draft_ids"]]
    # One matrix for all heads that is the target's own (vLLM's original_lm_head) need not be held once more for each.
    if "heads" in params and not config.reduced and len({part.name for part in stored.parts["heads"]}) == 1 < num_heads:
        if head_files.same_values(params["heads"][0], transformer.output_matrix(target.model)):
            del params["heads"]
            config = dataclasses.replace(config, vocab_size=None)
    return heads_lib.MedusaHeads(params, config)


def _ids(source: assembly.Source, name: str, vocab_size: int) -> jax.Array:
    """The target's ids of a reduced vocabulary."""
    ids = source.read(name)
    heads_lib.check_draft_ids(ids, vocab_size, f"{source.where(name)}: tensor {name}")
    return jnp.asarray(ids, jnp.int32)
