"""What a run will read, hold and take, from shapes alone: no weights, no compute.

A target pass at batch 1 reads every parameter once and does little with each, so memory bandwidth bounds it; with many
nodes or rows arithmetic does (the roofline model, Williams et al., CACM 2009). The time of a pass is the longer of the
two, its bytes over the bandwidth and its operations over the peak: a lower bound that no program beats.

Counted as bytes: parameters that are multiplied with (embedding rows that are looked up do not count), filled cache
slots read, new ones written, and logits. As operations: two for each parameter and token, and the products of the
attention. Draft and target run one after the other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache as kv
from jspec import config as config_lib
from jspec import types
from jspec.drafters import eagle, medusa, ngram, standard
from jspec.models import config as model_config
from jspec.models import heads as heads_lib
from jspec.models import transformer
from jspec.weights import shapes

_GB, _TERA = 1e9, 1e12
_MEMORY_GB = 2**30  # what vendors mean by a gigabyte of memory, but not of bandwidth
_LOGIT_BYTES = 4  # float32, whatever the parameters are


@dataclasses.dataclass(frozen=True)
class Device:
    """An accelerator, by its vendor's figures.

    title:     what it is called.
    memory:    bytes.
    bandwidth: of the memory, bytes per second.
    peak:      operations per second on dense matrices, by dtype.
    source:    of the figures.
    """

    title: str
    memory: float
    bandwidth: float
    peak: Mapping[str, float]
    source: str


def _device(title: str, memory_gb: float, gb_per_s: float, bf16: float, fp32: float, source: str) -> Device:
    peak = {"bfloat16": bf16 * _TERA, "float32": fp32 * _TERA}
    return Device(title, memory_gb * _MEMORY_GB, gb_per_s * _GB, peak, source)


# Peaks are for dense matrices: vendors print twice as much for sparse ones. float32 stands for what its products run at
# by default: TF32 on NVIDIA's tensor cores, bfloat16 on a TPU.
DEVICES = {
    "h200": _device("NVIDIA H200 SXM", 141, 4800, 989, 495, "NVIDIA H200 data sheet"),
    "h100": _device("NVIDIA H100 SXM 80 GB", 80, 3350, 989, 495, "NVIDIA H100 data sheet"),
    "a100": _device("NVIDIA A100 SXM 80 GB", 80, 2039, 312, 156, "NVIDIA A100 data sheet"),
    "a100_40": _device("NVIDIA A100 40 GB", 40, 1555, 312, 156, "NVIDIA A100 data sheet"),
    "l40": _device("NVIDIA L40", 48, 864, 181, 90.5, "NVIDIA L40 data sheet"),
    "a6000": _device("NVIDIA RTX A6000", 48, 768, 154.8, 77.4, "NVIDIA RTX A6000 data sheet"),
    "rtx4090": _device("NVIDIA GeForce RTX 4090", 24, 1008, 165.2, 82.6, "NVIDIA Ada architecture white paper"),
    "rtx3090": _device("NVIDIA GeForce RTX 3090", 24, 936, 71, 35.6, "NVIDIA GA102 architecture white paper"),
    "tpu_v4": _device("Google TPU v4, one chip", 32, 1200, 275, 275, "Google Cloud TPU documentation"),
    "tpu_v5e": _device("Google TPU v5e, one chip", 16, 819, 197, 197, "Google Cloud TPU documentation"),
    "tpu_v5p": _device("Google TPU v5p, one chip", 95, 2765, 459, 459, "Google Cloud TPU documentation"),
    # 25 GB/s is what reading memory was measured at; the peak is 2 cores of 32 operations a cycle at 2.5 GHz.
    "cpu2": _device("2 x86 cores with AVX2", 16, 25, 0.08, 0.16, "bandwidth measured; 2 multiply-adds of 8 a cycle"),
}  # fmt: skip


def device(name: str) -> Device:
    """A device by name.

    Raises:
      ValueError: it is not known; the message gives the nearest.
    """
    if name not in DEVICES:
        raise ValueError(f"device {name!r} is not known; {config_lib.nearest(name, DEVICES)}")
    return DEVICES[name]


@dataclasses.dataclass(frozen=True)
class Work:
    """What has to move and to be computed.

    bytes:      read and written.
    operations: floating-point additions and multiplications.
    """

    bytes: float = 0.0
    operations: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations)

    def __mul__(self, times: float) -> Work:
        return Work(self.bytes * times, self.operations * times)

    def seconds(self, device: Device, dtype: str) -> float:
        """The roofline: the longer of moving and computing."""
        return max(self.bytes / device.bandwidth, self.operations / device.peak[dtype])


def num_bytes(tree: Any) -> int:
    """Of all arrays of a pytree."""
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def num_parameters(tree: Any) -> int:
    """Entries of all arrays of a pytree that are not integers."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _product(matrices: int, tokens: int, itemsize: int) -> Work:
    """`tokens` vectors times matrices of so many entries together."""
    return Work(matrices * itemsize, 2 * matrices * tokens)


def _attention(config: model_config.TransformerConfig, batch: int, tokens: int, length: int, itemsize: int) -> Work:
    """All layers: `tokens` queries a row over `length` cached slots and one another."""
    kv_entries = 2 * config.num_kv_heads * config.head_size
    work = Work()
    for layer in range(config.num_layers):
        seen = min(length, config.window(layer) or length)
        moved = batch * (seen + tokens) * kv_entries * itemsize
        work += Work(moved, 4 * batch * tokens * (seen + tokens) * config.num_heads * config.head_size)
    return work


def _matrices(params: Any) -> int:
    """Entries of the matrices of a pytree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params) if len(leaf.shape) > 1)


def model_pass(model: transformer.Model, *, batch: int, tokens: int, length: int, logits: int | None = None) -> Work:
    """One pass over blocks of `tokens` behind `length` cached ones.

    Args:
      model: its parameters may be shapes.
      batch: rows.
      tokens: in each row's block.
      length: filled cache slots.
      logits: tokens of a block whose logits are wanted; None means all.
    """
    itemsize = jnp.dtype(model.dtype).itemsize
    inner = {name: leaf for name, leaf in model.params.items() if name not in ("embed", "head")}
    matrix = transformer.output_matrix(model)
    wanted = batch * (tokens if logits is None else logits)
    return (
        _product(_matrices(inner), batch * tokens, itemsize)
        + _product(math.prod(matrix.shape), wanted, itemsize)
        + Work(wanted * matrix.shape[0] * _LOGIT_BYTES)
        + _attention(model.config, batch, tokens, length, itemsize)
    )


def encoder_decoder_pass(shape: shapes.EncoderDecoder, *, batch: int, tokens: int, length: int, itemsize: int) -> Work:
    """One pass of a decoder that also attends to `length` encoder states; the encoder ran once before.

    Keys and values of both attentions are cached, so that a layer multiplies with its query and output matrices twice
    and with its key and value matrices once.
    """
    inner = shape.num_heads * shape.head_size
    layer = 6 * shape.width * inner + 3 * shape.width * shape.ffn_size
    one = Work(2 * batch * (length + tokens) * 2 * inner * itemsize, 2 * 4 * batch * tokens * (length + tokens) * inner)
    head = shape.vocab_size * shape.width
    return (
        _product(shape.decoder_layers * layer + head, batch * tokens, itemsize)
        + Work(batch * tokens * shape.vocab_size * _LOGIT_BYTES)
        + one * shape.decoder_layers
    )


def encoder_decoder_parameters(shape: shapes.EncoderDecoder) -> int:
    """Of both stacks, embedding and head; norms and position biases, below a thousandth, are left out."""
    attention, ffn = 4 * shape.width * shape.num_heads * shape.head_size, 3 * shape.width * shape.ffn_size
    encoder, decoder = shape.encoder_layers * (attention + ffn), shape.decoder_layers * (2 * attention + ffn)
    return encoder + decoder + 2 * shape.vocab_size * shape.width


# Drafters on shapes.


@dataclasses.dataclass(frozen=True, eq=False)
class Bound:
    """A drafter bound to a target of shapes.

    drafter: the bound drafter.
    draft:   shapes of its parameters.
    own:     those of them that the target does not have.
    """

    drafter: types.BoundDrafter
    draft: Any
    own: tuple[jax.ShapeDtypeStruct, ...]


def bind(drafter: types.Drafter, target: types.Target) -> Bound:
    """What `drafter.build` gives, of shapes: it is traced. A draft that would be downloaded has its known shape, one on
    this machine is read.

    Args:
      drafter: settings.
      target: its model holds shapes.

    Raises:
      ValueError: what the draft looks like is not known, or it does not fit the target.
    """
    vocabulary = getattr(drafter, "vocabulary", None)
    if vocabulary is not None and vocabulary.file is not None and vocabulary.size is not None:
        # Which tokens they are changes no shape.
        drafter = dataclasses.replace(drafter, vocabulary=dataclasses.replace(vocabulary, file=None))
    stand_in, as_keyword = _stand_in(drafter, target)
    bound, own = [], []

    def build(params, stand_in):
        model = transformer.Model(params, target.model.config)
        made, draft = drafter.build(dataclasses.replace(target, model=model), **as_keyword(stand_in))
        shared = {id(leaf) for leaf in jax.tree.leaves(params)}
        bound.append(made)
        own.extend(jax.typeof(leaf) for leaf in jax.tree.leaves(draft) if id(leaf) not in shared)
        return draft

    draft = jax.eval_shape(build, target.model.params, stand_in)
    return Bound(bound[0], draft, tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in own))


def _stand_in(drafter: types.Drafter, target: types.Target) -> tuple[Any, Callable[[Any], dict[str, Any]]]:
    """Shapes of a draft that is not at hand, and the keyword by which `build` takes what is traced in their place."""
    if isinstance(drafter, ngram.Unigram | ngram.Bigram):
        return (), lambda _: {"sequences": [[0, 1]]}  # its tables are as large for any corpus
    given = getattr(drafter, "draft", None)
    reference = getattr(given, "reference", None)
    dtype = target.model.dtype
    if (
        isinstance(drafter, eagle.Eagle)
        and given is not None
        and (reference is None or reference.startswith(shapes.ELSEWHERE))
    ):
        if reference is None:
            config = eagle.like_target(target, given.random.version, given.random.vocab_size)
        else:
            config = shapes.eagle(reference)
        params = heads_lib.eagle_shapes(config, dtype)
        # Which ids they are is looked at while building.
        ids = {"draft_ids": np.arange(config.vocab_size)} if params.pop("draft_ids", None) is not None else {}
        return params, lambda params: {"head": heads_lib.EagleHead({**params, **ids}, config)}
    if reference is None or not reference.startswith(shapes.ELSEWHERE):
        return (), lambda _: {}
    if isinstance(drafter, standard.Standard):
        return shapes.abstract(shapes.model(reference), dtype), lambda model: {"draft": types.Target(model)}
    if isinstance(drafter, medusa.Medusa):
        config = shapes.medusa(reference, target.model.config)
        return heads_lib.MedusaHeads(heads_lib.medusa_shapes(config, dtype), config), lambda heads: {"heads": heads}
    raise ValueError(f"{reference}: what a draft of {drafter.kind!r} looks like is not known without its files")


def draft_work(bound: Bound, target: types.Target, *, batch: int, length: int) -> tuple[int, Work]:
    """Passes of the draft in one round, and what they read and compute together.

    Drafts without parameters (prompt lookup, lookahead) and those that look up counts cost next to nothing.
    """
    drafter, draft = bound.drafter, bound.draft
    itemsize = jnp.dtype(target.model.dtype).itemsize
    if isinstance(drafter, standard.BoundStandard):
        # A chain's passes hold one token each; the first also the one that the cache lacks.
        widths = [len(drafter.topology.inner(depth)) for depth in range(drafter.max_depth)]
        passes = [model_pass(draft["model"], batch=batch, tokens=width, length=length) for width in widths]
        return len(passes), sum(passes, Work())
    if isinstance(drafter, eagle.BoundEagle):
        if drafter.topology is None:
            widths = [1] + [drafter.dynamic.top_k] * (drafter.max_depth - 1)
        else:
            widths = [len(drafter.topology.inner(depth)) for depth in range(drafter.max_depth)]
        passes = [_eagle_pass(draft, target, batch, width, length, itemsize) for width in widths]
        return len(passes), sum(passes, Work())
    if isinstance(drafter, medusa.BoundMedusa):
        heads = drafter.max_depth * batch
        if "heads" in draft:
            rows, output = draft["heads"].shape[1], _product(_matrices(draft["heads"]), batch, itemsize)
        else:
            matrix = draft.get("head", transformer.output_matrix(target.model))
            rows, output = matrix.shape[0], _product(math.prod(matrix.shape), heads, itemsize)
        blocks = _product(_matrices(draft["blocks"]), batch, itemsize)
        return 1, blocks + output + Work(heads * rows * _LOGIT_BYTES)
    return 0, Work()


def _eagle_pass(
    head: heads_lib.EagleHead, target: types.Target, batch: int, tokens: int, length: int, itemsize: int
) -> Work:
    layer, params = head.config.layer, head.params
    inner = {name: params[name] for name in ("layer", "fc")}
    matrix = params.get("head", transformer.output_matrix(target.model))
    return (
        _product(_matrices(inner), batch * tokens, itemsize)
        + _product(math.prod(matrix.shape), batch * tokens, itemsize)
        + Work(batch * tokens * matrix.shape[0] * _LOGIT_BYTES)
        + _attention(layer, batch, tokens, length, itemsize)
    )


def state_bytes(bound: Bound, target: types.Target, *, batch: int, capacity: int) -> tuple[int, int]:
    """Bytes of the target's cache and of the drafter's state, by abstract evaluation of what makes them."""
    model = target.model
    cache = jax.eval_shape(lambda: kv.init(model.config, batch, capacity, model.dtype))
    params = types.Params(model, bound.draft)
    state = jax.eval_shape(lambda params: bound.drafter.init(params, batch, capacity), params)
    return num_bytes(cache), num_bytes(state)


def check_proposal(bound: Bound, target: types.Target, *, batch: int, capacity: int) -> None:
    """Trace one proposal: the drafter runs with these shapes, and gives the tree that it says.

    Raises:
      ValueError: it gives another one.
    """
    model, drafter = target.model, bound.drafter
    shape = lambda *sizes, dtype=jnp.int32: jax.ShapeDtypeStruct(sizes, dtype)
    features = shape(batch, len(drafter.feature_layers), model.config.width, dtype=model.dtype)
    context = types.Context(shape(batch, capacity), shape(batch), features)
    reals = [shape(batch, dtype=jnp.float32) for _ in range(3)]
    sampling = types.Sampling(reals[0], shape(batch), *reals[1:], shape(batch, 8), shape(batch))

    def propose(params, keys, context, sampling):
        tree, _ = drafter.propose(params, keys, drafter.init(params, batch, capacity), context, sampling)
        return tree

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    tree = jax.eval_shape(propose, types.Params(model, bound.draft), keys, context, sampling)
    if tree.tokens.shape != (batch, drafter.num_nodes) or tree.max_depth != drafter.max_depth:
        raise ValueError(
            f"{type(drafter).__name__} proposes {tree.tokens.shape[1]} nodes of depth {tree.max_depth}; it says "
            f"{drafter.num_nodes} of depth {drafter.max_depth}"
        )


def lowered_operations(target: types.Target, *, batch: int, tokens: int, capacity: int) -> float:
    """Operations of one target pass over `tokens` nodes as the compiler counts them, of the lowered program: nothing is
    compiled. Its attention runs over the whole capacity, in a loop whose body is counted once."""
    model = target.model
    shape = lambda *sizes, dtype=jnp.int32: jax.ShapeDtypeStruct(sizes, dtype)
    cache = jax.eval_shape(lambda: kv.init(model.config, batch, capacity, model.dtype))
    ids, mask = shape(batch, tokens), shape(batch, tokens, tokens, dtype=bool)
    lowered = jax.jit(transformer.forward).lower(model, ids, ids, cache, mask)
    return float(lowered.cost_analysis()["flops"])
