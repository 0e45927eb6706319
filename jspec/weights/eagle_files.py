"""EAGLE heads in files, in and out: EAGLE-1 and -2 (arXiv:2401.15077, 2406.16858) and EAGLE-3 (arXiv:2503.01840).

A folder holds config.json and safetensors (or `pytorch_model.bin`). Three layouts are read:

    EAGLE-1      a Llama config; fc.weight [E, 2E] over [embedding; feature], layers.0.*
    EAGLE-3      the released code's midlayer.* or layers.0.*; fc.weight [E, F Et], norm.weight, lm_head.weight [Vd, E];
                 d2t [Vd], what to add to a draft id to get the target's; t2d [V], which tokens have a draft id
    speculators  EAGLE-3's tensors under layers.0.*, and config.json of the speculators package

Names may stand behind `model.`, as vLLM writes them. `eagle_configs` says how the switches are read.

`embed_tokens` and EAGLE-3's `lm_head` are dropped when they equal the target's and used when they do not; without them
the target's serve. An EAGLE-1 head has no output matrix of its own: a stored one that differs from the target's is
refused, since SGLang ignores it and the released code has no place for it. Nor is there one for a reduced vocabulary,
which EAGLE-1 heads have in a file of its own (`vocabulary_files`).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache as kv
from jspec import types
from jspec.models import heads as heads_lib
from jspec.models import transformer
from jspec.weights import assembly, eagle_configs, families, head_files, pairing, references, vocabulary_files

_HEAD, _OFFSETS, _MARKS = "lm_head.weight", "d2t", "t2d"
_LEGACY_NORMS = ("low", "mid", "high")


class _Spelling(NamedTuple):
    """How a file names its tensors.

    layer:  prefix of the layer's.
    root:   prefix of all but lm_head, d2t and t2d.
    legacy: SGLang's older names of `fc_norm`.
    """

    layer: str
    root: str = ""
    legacy: bool = False

    @classmethod
    def of(cls, names: set[str]) -> _Spelling:
        root = "model." if any(name.startswith("model.") for name in names) else ""
        midlayer = any(name.startswith(f"{root}midlayer.") for name in names)
        legacy = any(name.startswith(f"{root}aux_norm_") for name in names)
        return cls("midlayer." if midlayer else "layers.0.", root, legacy)

    def stored(self, path: tuple[str, ...], config: heads_lib.EagleConfig) -> tuple[str, ...]:
        """Names behind one leaf of `heads.eagle_shapes`, in the order they are fused."""
        if path[0] == "layer":
            own = {"embed_norm": ("input_layernorm.weight",), "hidden_norm": ("hidden_norm.weight",)}
            leaves = families.NAMES.leaves | own
            return tuple(self.root + self.layer + name for name in leaves[path[1]])
        if path[0] == "head":
            return (_HEAD,)
        if path[0] == "fc_norm":
            each = [f"fc_norm.{index}" for index in range(config.num_features)]
            if self.legacy and len(each) == len(_LEGACY_NORMS):
                each = [f"aux_norm_{name}" for name in _LEGACY_NORMS]
            return tuple(f"{self.root}{name}.weight" for name in each)
        names = {"fc": "fc.weight", "fc_bias": "fc.bias", "embed": "embed_tokens.weight"}
        return (self.root + names.get(path[0], f"{path[0]}.weight"),)


def _parts(config: heads_lib.EagleConfig, spelling: _Spelling) -> dict[tuple[str, ...], list[assembly.Part]]:
    """The stored tensors behind each leaf but `draft_ids`, by the leaf's path."""
    fused, parts = assembly.fused_rows(config.layer), {}
    for path, leaf in jax.tree.flatten_with_path(heads_lib.eagle_shapes(config))[0]:
        keys = tuple(step.key for step in path)
        if keys == ("draft_ids",):
            continue
        names = spelling.stored(keys, config)
        if keys == ("fc_norm",):
            shapes = [leaf.shape[1:]] * len(names)
        else:
            rows = fused.get(keys[-1].removesuffix("_bias"), leaf.shape[:1])
            shapes = [(count, *leaf.shape[1:]) for count in rows]
        parts[keys] = [assembly.Part(name, shape) for name, shape in zip(names, shapes, strict=True)]
    return parts


# Reading.


def holds(names: set[str]) -> bool:
    """Whether a file with tensors of these names holds a head: every head has the product that takes features in."""
    return bool({"fc.weight", "model.fc.weight"} & names)


def load(
    reference: str, target: types.Target, *, sha256: str | None = None, force: bool = False
) -> heads_lib.EagleHead:
    """Load an EAGLE head of any of the layouts above, in the target's dtype.

    Args:
      reference: a folder, or a file with config.json beside it; see `references`.
      target: the model it was trained for.
      sha256: expected digest of the file that is read, or of a folder's shards in order.
      force: load it although it says that it was trained for another target (`pairing`).

    Raises:
      ValueError: the reference or a file cannot be read; config.json describes no head that is known, or one for
        another target; tensors are unknown, missing or misshapen (all are named); d2t or a vocabulary file leaves the
        target's vocabulary or names a token twice, d2t contradicts t2d, or an EAGLE-3 head has a vocabulary file.
    """
    source = head_files.open_source(reference, sha256)
    where = head_files.config_path(source)
    if not where.is_file():
        raise ValueError(f"{where} is missing; an EAGLE head needs it beside its tensors")
    names = {name for name in source.names() if not families.NAMES.ignored.fullmatch(name)}
    spelling = _Spelling.of(names)
    content = references.read_json(where)
    config = eagle_configs.read(content, _stored(names, spelling), where)
    _check_target(config, target, where)
    pairing.check_trained_for(pairing.recorded(content, where), target, where, force)
    parts = _parts(config, spelling)
    _check_tensors(source, names, parts, config)
    config, ids = _vocabulary(source, names, config)
    shapes, treedef = jax.tree.flatten_with_path(heads_lib.eagle_shapes(config, target.model.dtype))
    leaves = []
    for path, leaf in shapes:
        keys = tuple(step.key for step in path)
        leaves.append(ids if keys == ("draft_ids",) else head_files.read_leaf(source, parts[keys], leaf))
    if config.version == 1 and _HEAD in names:
        _check_borrowed_head(source, target)
    return _borrow(heads_lib.EagleHead(jax.tree.unflatten(treedef, leaves), config), target)


def _stored(names: set[str], spelling: _Spelling) -> eagle_configs.Stored:
    root, layer = spelling.root, spelling.root + spelling.layer
    only_eagle3 = {f"{layer}hidden_norm.weight", f"{root}norm.weight", _OFFSETS, _MARKS}
    return eagle_configs.Stored(
        eagle3=spelling.layer == "midlayer." or bool(only_eagle3 & names),
        embedding=f"{root}embed_tokens.weight" in names,
        head=_HEAD in names,
        fc_bias=f"{root}fc.bias" in names,
        input_norm=f"{layer}input_layernorm.weight" in names,
    )


def _check_target(config: heads_lib.EagleConfig, target: types.Target, where: Any) -> None:
    model = target.model.config
    if config.target_width != model.width:
        raise ValueError(
            f"{where}: the head reads features of width {config.target_width}; the target's have {model.width}"
        )
    if config.layer.vocab_size != model.vocab_size:
        raise ValueError(f"{where}: vocab_size is {config.layer.vocab_size}; the target's is {model.vocab_size}")
    if config.vocab_size > model.vocab_size:
        raise ValueError(f"{where}: draft_vocab_size {config.vocab_size} is more than the target's {model.vocab_size}")
    if not config.own_head and config.layer.width != model.width:
        raise ValueError(
            f"{where}: a head of width {config.layer.width} needs {_HEAD}; the target's is {model.width} wide"
        )


def _check_tensors(source, names, parts, config: heads_lib.EagleConfig) -> None:
    expected = {part.name: part.shape for stored in parts.values() for part in stored}
    total, reduced = config.layer.vocab_size, config.vocab_size != config.layer.vocab_size
    if config.version == 3:
        if reduced or _OFFSETS in names:
            expected[_OFFSETS] = (config.vocab_size,)
        if reduced:
            expected[_HEAD] = (config.vocab_size, config.layer.width)
        if _MARKS in names:
            expected[_MARKS] = (total,)
    elif _HEAD in names:
        expected[_HEAD] = (total, config.layer.width)
    assembly.check_tensors(source, expected, names)


def _vocabulary(
    source: assembly.Source, names: set[str], config: heads_lib.EagleConfig
) -> tuple[heads_lib.EagleConfig, jax.Array]:
    """The target's id of each draft token, from the file of EAGLE-1 or from EAGLE-3's d2t; the config says how many."""
    ids = head_files.draft_ids(source, config.layer.vocab_size)
    if config.version == 3:
        if ids is not None:
            where = head_files.config_path(source).with_name(vocabulary_files.NAME)
            raise ValueError(f"{where}: an EAGLE-3 head says in d2t which tokens it drafts; remove the file")
        return config, _draft_ids(source, names, config)
    if ids is None:
        return config, jnp.arange(config.vocab_size)
    return dataclasses.replace(config, vocab_size=len(ids)), jnp.asarray(ids)


def _draft_ids(source: assembly.Source, names: set[str], config: heads_lib.EagleConfig) -> jax.Array:
    """The target's id of each draft token, from d2t (which holds differences) and checked against t2d."""
    total, ids = config.layer.vocab_size, np.arange(config.vocab_size)
    if _OFFSETS in names:
        where, offsets = source.where(_OFFSETS), source.read(_OFFSETS)
        if not np.issubdtype(offsets.dtype, np.integer):
            raise ValueError(f"{where}: tensor d2t holds {offsets.dtype}, expected whole numbers")
        if config.vocab_size == total and offsets.any():
            raise ValueError(
                f"{where}: d2t moves tokens although the draft vocabulary is the target's ({total} tokens)"
            )
        ids = ids + offsets
        outside = np.flatnonzero((ids < 0) | (ids >= total))
        if outside.size:
            index = outside[0]
            raise ValueError(
                f"{where}: d2t[{index}] = {offsets[index]} makes token {ids[index]}, which is not in 0 .. {total - 1} "
                "(d2t holds what is added to the draft id)"
            )
        heads_lib.check_draft_ids(ids, total, f"{where}: d2t")
    if config.version == 3 and _MARKS in names:
        marked, drafted = source.read(_MARKS) != 0, np.zeros(total, bool)
        drafted[ids] = True
        differing = np.flatnonzero(marked != drafted)
        if differing.size:
            token = differing[0]
            says = ("marks", "does not make") if marked[token] else ("does not mark", "makes")
            raise ValueError(f"{source.where(_MARKS)}: t2d {says[0]} token {token}, which d2t {says[1]}")
    return jnp.asarray(ids, jnp.int32)


def _check_borrowed_head(source: assembly.Source, target: types.Target) -> None:
    theirs = transformer.output_matrix(target.model)
    part = assembly.Part(_HEAD, theirs.shape)
    stored = head_files.read_leaf(source, [part], jax.ShapeDtypeStruct(theirs.shape, theirs.dtype))
    if not head_files.same_values(stored, theirs):
        raise ValueError(
            f"{source.where(_HEAD)}: {_HEAD} differs from the target's output matrix, which an EAGLE-1 head drafts "
            "with; engines ignore or refuse it"
        )


def _borrow(head: heads_lib.EagleHead, target: types.Target) -> heads_lib.EagleHead:
    """Drop matrices that equal the target's."""
    params, config, model = dict(head.params), head.config, target.model
    if config.own_embedding and model.config.embedding_scale == 1.0:
        if head_files.same_values(params["embed"], model.params["embed"]):
            del params["embed"]
            config = dataclasses.replace(config, own_embedding=False)
    if config.own_head and "draft_ids" not in params:
        if head_files.same_values(params["head"], transformer.output_matrix(model)):
            del params["head"]
            config = dataclasses.replace(config, own_head=False)
    return heads_lib.EagleHead(params, config)


# Writing.


def save(
    head: heads_lib.EagleHead,
    target: types.Target,
    folder: str | os.PathLike,
    *,
    layout: Literal["native", "speculators"] = "native",
    engine: Literal["eagle", "vllm", "sglang"] = "eagle",
    base_model: str,
    dtype: Any = None,
) -> None:
    """Write a head, `config.json` and `model.safetensors`, every switch spelled out.

    It is read back and its logits compared before the folder gets its name. An EAGLE-3 head that borrows the target's
    output matrix is written with a copy, since most engines want one; reading drops it again. The reduced vocabulary of
    an EAGLE-1 head goes to `draft_vocabulary.npy`, which no other engine reads: they draft from all tokens.

    Which engine matters where one would silently draft with something else than the head:

    * EAGLE-1: vLLM's fc has no bias (a head with one is refused unless it is zero), SGLang's always has (zeros are
      written). Both take config.json's `bias` for the attention's, so it is false for them. Neither applies a norm
      before the layer's attention.
    * EAGLE-3: SGLang ignores `norm_before_residual`, has no attention biases, and counts layer ids from another place
      (the default layers are left unsaid for it, others refused).

    Args:
      head: the head.
      target: the model it was trained for; its sha256 is recorded.
      folder: an empty or no folder, inside an existing one.
      layout: `native` (`midlayer.*`: the released code, vLLM, SGLang, TensorRT-LLM, llama.cpp) or `speculators`
        (`layers.0.*`, EAGLE-3 for vLLM).
      engine: which is to run it: the released code, vLLM or SGLang.
      base_model: what config.json calls the target.
      dtype: of the stored parameters: float32, bfloat16 or float16; None keeps the head's.

    Raises:
      ValueError: there is something in the folder already; the head does not fit the target, the layout or the engine.
      OSError: the disk does not take it. Nothing is left of what was written.
    """
    for name, value, known in (
        ("layout", layout, ("native", "speculators")),
        ("engine", engine, ("eagle", "vllm", "sglang")),
    ):
        if value not in known:
            raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}")
    _check_target(head.config, target, "the head")
    _check_writable(head, target, layout, engine)
    head = heads_lib.EagleHead(head_files.cast(head.params, dtype), head.config)
    written = _for_engine(_with_head(head, target), engine)
    config, ids = written.config, written.params.get("draft_ids")
    spelling = _Spelling("layers.0." if config.version == 1 or layout == "speculators" else "midlayer.")
    flat = dict(
        (tuple(step.key for step in path), leaf) for path, leaf in jax.tree.flatten_with_path(written.params)[0]
    )
    tensors = {}
    for path, parts in _parts(config, spelling).items():
        tensors |= head_files.split_leaf(flat[path], parts)
    if config.version == 1:
        ids = vocabulary_files.reduced(ids, config.layer.vocab_size, "draft_ids")
    elif ids is not None:
        tensors |= _vocabulary_tensors(np.asarray(ids, np.int64), config.layer.vocab_size)
    if config.version == 1:
        content = eagle_configs.eagle1(config, base_model, for_sglang=engine == "sglang", say_bias=engine == "eagle")
    elif layout == "native":
        # SGLang would add one to each layer; the default it finds itself.
        content = eagle_configs.native(config, base_model, name_layers=engine != "sglang")
    else:
        content = eagle_configs.speculators(config, base_model)
    content |= {"torch_dtype": np.dtype(head.dtype).name, **pairing.record(target.provenance.sha256)}
    in_target = heads_lib.EagleHead(head_files.cast(written.params, target.model.dtype), config)
    expected = _sample_logits(in_target, target)

    def check(work: pathlib.Path) -> None:
        found = _with_head(load(str(work), target), target)
        vocabulary_files.same(found.params.get("draft_ids"), ids, work)
        head_files.check_logits(_sample_logits(found, target), expected, target.model.dtype, work)

    head_files.write_folder(
        folder, content, tensors, "model.safetensors", check, draft_ids=ids if config.version == 1 else None
    )


def _check_writable(head: heads_lib.EagleHead, target: types.Target, layout: str, engine: str) -> None:
    config, layer = head.config, head.config.layer
    if config.version == 1:
        if layout == "speculators":
            raise ValueError("layout speculators holds EAGLE-3 heads; this one is EAGLE-1")
        if config.own_head:
            raise ValueError("an EAGLE-1 file has no place for an output matrix of the head's own")
        if engine == "vllm" and config.fc_bias and bool(jnp.any(head.params["fc_bias"] != 0)):
            raise ValueError("fc_bias is not zero, and vLLM's EAGLE-1 heads have none")
        if engine != "eagle" and config.input_norm:
            raise ValueError(f"input_norm: {engine} applies no norm before an EAGLE-1 head's attention")
    if layer.qk_norm and layout == "native":
        raise ValueError("q/k norms (qwen3) have no place in the native layout; write layout speculators")
    if layer.qk_norm and (layer.ffn_bias or layer.qkv_bias != layer.output_bias):
        raise ValueError("a qwen3 layer has both attention biases or none, and no feed-forward bias")
    if engine == "sglang":
        if layout == "speculators":
            raise ValueError("layout speculators is vLLM's; SGLang reads native")
        if config.norm_before_residual:
            raise ValueError("norm_before_residual: SGLang ignores it and would draft with the bare residual")
        if layer.qkv_bias or layer.output_bias:
            raise ValueError("attention biases: SGLang's heads have none")
        if config.feature_layers is not None and not _default_layers(config, target):
            raise ValueError(f"feature_layers {config.feature_layers}: SGLang would read the layers after these")
    if "draft_ids" in head.params:
        heads_lib.check_draft_ids(np.asarray(head.params["draft_ids"]), layer.vocab_size, "draft_ids")


def _default_layers(config: heads_lib.EagleConfig, target: types.Target) -> bool:
    num_layers = target.model.config.num_layers
    return config.feature_layers == (2, num_layers // 2, num_layers - 3)


def _with_head(head: heads_lib.EagleHead, target: types.Target) -> heads_lib.EagleHead:
    """EAGLE-3 with an output matrix of its own, copied from the target's if need be."""
    if head.config.version == 1 or head.config.own_head:
        return head
    rows = transformer.output_matrix(target.model)
    if "draft_ids" in head.params:
        rows = rows[head.params["draft_ids"]]
    config = dataclasses.replace(head.config, own_head=True)
    return heads_lib.EagleHead({**head.params, "head": rows.astype(head.dtype)}, config)


def _for_engine(head: heads_lib.EagleHead, engine: str) -> heads_lib.EagleHead:
    """EAGLE-1 with or without a bias of zeros, as the engine expects."""
    config, params = head.config, dict(head.params)
    if config.version == 1 and engine == "sglang" and not config.fc_bias:
        params["fc_bias"] = jnp.zeros(config.layer.width, head.dtype)
    if config.version == 1 and engine == "vllm" and config.fc_bias:
        del params["fc_bias"]
    return heads_lib.EagleHead(params, dataclasses.replace(config, fc_bias="fc_bias" in params))


def _vocabulary_tensors(ids: np.ndarray, total: int) -> dict[str, np.ndarray]:
    marks = np.zeros(total, bool)
    marks[ids] = True
    return {_OFFSETS: ids - np.arange(len(ids)), _MARKS: marks}


def _sample_logits(head: heads_lib.EagleHead, target: types.Target) -> jax.Array:
    """Of a fixed prompt of random features."""
    rng, length, config = np.random.default_rng(0), 4, head.config
    tokens = jnp.asarray(rng.integers(0, config.layer.vocab_size, (1, length)), jnp.int32)
    drawn = rng.standard_normal((1, length, config.num_features, config.target_width))
    positions = jnp.arange(length)[None]
    states, _ = heads_lib.eagle_forward(
        head,
        target.model,
        tokens,
        heads_lib.fuse(head, jnp.asarray(drawn, head.dtype)),
        positions,
        kv.init(config.layer, 1, 1, head.dtype),
        jnp.tril(jnp.ones((1, length, length), bool)),
    )
    return heads_lib.eagle_logits(head, target.model, states)
