"""EAGLE: draft by continuing the sequence of the target's features.

EAGLE-1 (Li et al., arXiv:2401.15077): one decoder layer reads pairs of a token and the feature one place before it, and
gives the next feature; the target's output head turns that into a token. EAGLE-2 (arXiv:2406.16858): the same head, and
a tree whose shape follows the head's own confidence. EAGLE-3 (arXiv:2503.01840): low, middle and high features of the
target fused into one, a head with its own output matrix over a reduced vocabulary, and no feature prediction: what the
layer returns is fed back as it is.

The head has its own cache. Pair i holds token i and the feature of token i - 1, so the first token of a text has none,
and the cache is one shorter than what the target has read. While drafting, the features are the head's own guesses;
what the target then accepts is fed again with the target's features, as in the released code.

Differs from the released code: there a chain or static tree is either sampled or greedy for the whole batch; here each
row follows its own settings.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache as kv
from jspec import topology as topology_lib
from jspec import types
from jspec.drafters import base, draft_vocabulary, growth
from jspec.models import heads as heads_lib
from jspec.weights import eagle_files


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's dynamic tree. The paper's values for a 7B target: 6, 10, 60.

    depth:     levels of drafts.
    top_k:     candidates per node, and nodes expanded per level.
    num_nodes: of the tree after the rerank, the root included.
    """

    depth: int = 6
    top_k: int = 10
    num_nodes: int = 60

    def __post_init__(self):
        base.check_count("dynamic.depth", self.depth, 1)
        base.check_count("dynamic.top_k", self.top_k, 1)
        base.check_count("dynamic.num_nodes", self.num_nodes, 2)
        pool = self.top_k + (self.depth - 1) * self.top_k**2
        if self.num_nodes > pool + 1:
            raise ValueError(f"dynamic.num_nodes {self.num_nodes} is more than the root and a pool of {pool}")


@dataclasses.dataclass(frozen=True)
class RandomEagle:
    """A head with random weights and the target's sizes, for tests and timing.

    version:    1 or 3.
    vocab_size: Vd, of the draft vocabulary (the first ids); None means the target's.
    seed:       of the weights.
    """

    version: Literal[1, 3] = 3
    vocab_size: int | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class EagleDraft(base.HeadSource):
    """Where the head comes from."""

    random: RandomEagle | None = None


@base.register("eagle")
@dataclasses.dataclass(frozen=True)
class Eagle:
    """Settings. The proposals are a chain of `gamma`, unless `tree` or `dynamic` is given.

    gamma:          draft length of a chain.
    tree:           a static tree; EAGLE-1's is `{name: eagle_25}`.
    dynamic:        EAGLE-2's tree.
    law:            `sampled`: drafts are drawn from the head's law; `one_hot`: its best candidates, judged as
                    deterministic. None means `one_hot` for a dynamic tree, which allows nothing else, and `sampled`.
    draft:          where the head comes from; None when it is handed to `build`.
    feature_layers: EAGLE-3: layers of the target whose inputs are fused; None means those the head names, or its
                    default.
    vocabulary:     draft these tokens only, in place of a reduced vocabulary of the head if it borrows the target's
                    output rows; None leaves the head's as it is.
    """

    gamma: int = 4
    tree: topology_lib.Tree | None = None
    dynamic: Dynamic | None = None
    law: Literal["sampled", "one_hot"] | None = None
    draft: EagleDraft | None = None
    feature_layers: tuple[int, ...] | None = None
    vocabulary: draft_vocabulary.Vocabulary | None = None

    def __post_init__(self):
        base.check_count("gamma", self.gamma, 1)
        if self.tree is not None and self.dynamic is not None:
            raise ValueError("tree and dynamic exclude each other")
        if self.dynamic is not None and self.law == "sampled":
            raise ValueError(
                "law 'sampled' with a dynamic tree is not lossless: children that are drawn and then pruned by their "
                "score are no draws any more; use law 'one_hot'"
            )

    @property
    def topology(self) -> topology_lib.Topology | None:
        """Of the proposals; None when it is dynamic."""
        if self.dynamic is not None:
            return None
        return topology_lib.chain(self.gamma) if self.tree is None else self.tree.topology

    def build(
        self, target: types.Target, *, head: heads_lib.EagleHead | None = None
    ) -> tuple[BoundEagle, heads_lib.EagleHead]:
        """See `types.Drafter`.

        Args:
          target: the model to speed up.
          head: a head already in memory, used instead of `self.draft`.

        Raises:
          ValueError: the head cannot be loaded or does not fit the target, or the tree needs more candidates than the
            draft vocabulary has.
        """
        if head is None:
            head = self._load(target)
        ids = None if self.vocabulary is None else self.vocabulary.load(target)
        head = _fit(head, target, ids)
        feature_layers = resolve_feature_layers(head.config, self.feature_layers, target.model.config.num_layers)
        wanted = self.dynamic.top_k if self.dynamic is not None else self.topology.num_ranks
        if self.topology is not None:
            wanted = max(wanted, *(len(self.topology.children(node)) for node in range(self.topology.num_nodes)))
        if wanted > head.config.vocab_size:
            raise ValueError(f"the tree asks for {wanted} candidates of {head.config.vocab_size} draft tokens")
        sampled = self.law == "sampled" or (self.law is None and self.dynamic is None)
        return BoundEagle(self.topology, self.dynamic, sampled, feature_layers), head

    def _load(self, target: types.Target) -> heads_lib.EagleHead:
        if self.draft is None:
            raise ValueError("draft is not given: set draft.reference or draft.random")
        if self.draft.random is None:
            draft = self.draft
            return eagle_files.load(draft.reference, target, sha256=draft.sha256, force=draft.force)
        random = self.draft.random
        if random.vocab_size is not None and not 1 <= random.vocab_size <= target.model.config.vocab_size:
            raise ValueError(f"vocab_size {random.vocab_size} is not between 1 and {target.model.config.vocab_size}")
        config = like_target(target, random.version, random.vocab_size)
        return heads_lib.init_eagle(jax.random.key(random.seed), config, target.model.dtype)


def like_target(target: types.Target, version: Literal[1, 3], vocab_size: int | None = None) -> heads_lib.EagleConfig:
    """A head with one layer of the target's sizes. EAGLE-3 brings its own output matrix, EAGLE-1 borrows the target's
    unless its vocabulary is reduced."""
    model = target.model.config
    vocab_size = vocab_size or model.vocab_size
    layer = dataclasses.replace(model, num_layers=1, windows=(), qk_norm=False)
    return heads_lib.EagleConfig(
        version=version,
        layer=layer,
        target_width=model.width,
        vocab_size=vocab_size,
        num_features=1 if version == 1 else 3,
        own_head=version == 3 or vocab_size != model.vocab_size,
    )


def _fit(head: heads_lib.EagleHead, target: types.Target, ids: np.ndarray | None) -> heads_lib.EagleHead:
    """Check a head against the target, and give it the output rows that its vocabulary needs."""
    config, model = head.config, target.model.config
    if config.target_width != model.width:
        raise ValueError(f"the head reads features of width {config.target_width}; the target's have {model.width}")
    if config.layer.vocab_size != model.vocab_size:
        raise ValueError(f"the head was made for {config.layer.vocab_size} tokens; the target has {model.vocab_size}")
    own = head.params.get("draft_ids")
    if own is not None:
        draft_vocabulary.check(own, target, where="of the head")
    if ids is not None:
        if own is not None and "head" in head.params:
            raise ValueError("vocabulary: the head has a reduced vocabulary of its own, and no output rows beyond it")
        if "head" in head.params:
            rows = head.params["head"][jnp.asarray(ids)]
        else:
            rows = draft_vocabulary.head_rows(target.model, ids)
        params = {**head.params, "draft_ids": jnp.asarray(ids), "head": rows}
        head = heads_lib.EagleHead(params, dataclasses.replace(config, vocab_size=len(ids), own_head=True))
    elif own is not None and "head" not in head.params:
        rows = draft_vocabulary.head_rows(target.model, np.asarray(own))
        head = heads_lib.EagleHead({**head.params, "head": rows}, dataclasses.replace(config, own_head=True))
    if "head" not in head.params and config.layer.width != model.width:
        raise ValueError(f"the head's states have width {config.layer.width}, the target's output matrix {model.width}")
    return head


def resolve_feature_layers(
    config: heads_lib.EagleConfig, given: tuple[int, ...] | None, num_layers: int
) -> types.FeatureLayers:
    """Layers of the target that a head reads: those given, those it names, or the default.

    Raises:
      ValueError: they are not as many as it fuses, collide, or the target does not have them.
    """
    if config.version == 1:
        if given is not None:
            raise ValueError("feature_layers: an EAGLE-1 head reads the last feature")
        return ("final",)
    chosen = given or config.feature_layers or heads_lib.default_feature_layers(num_layers)
    if len(chosen) != config.num_features:
        raise ValueError(f"feature_layers {chosen}: the head fuses {config.num_features}")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"feature_layers {chosen} collide: each must be another layer")
    for layer in chosen:
        if not 0 <= layer < num_layers:
            raise ValueError(f"feature_layers {chosen}: {layer} is not between 0 and {num_layers - 1}")
    return tuple(chosen)


@flax.struct.dataclass
class State:
    """Of the head.

    cache:   pairs of all tokens read but the first.
    feature: of the last token read.
    seen:    tokens read.
    """

    cache: kv.KVCache
    feature: jax.Array  # [B, F, Et]
    seen: jax.Array  # [B] int32


@dataclasses.dataclass(frozen=True)
class BoundEagle(base.Bound):
    """See `types.BoundDrafter`."""

    topology: topology_lib.Topology | None
    dynamic: Dynamic | None
    sampled: bool
    feature_layers: types.FeatureLayers

    @property
    def num_nodes(self) -> int:
        return self.dynamic.num_nodes if self.topology is None else self.topology.num_nodes

    @property
    def max_depth(self) -> int:
        return self.dynamic.depth if self.topology is None else self.topology.max_depth

    @property
    def proposes_chains(self) -> bool:
        return self.topology is not None and self.topology.is_chain

    def init(self, params: types.Params, batch: int, capacity: int) -> State:
        """Nothing read."""
        head, width = params.draft, params.target.config.width
        return State(
            cache=kv.init(head.config.layer, batch, capacity, head.dtype),
            feature=jnp.zeros((batch, len(self.feature_layers), width), params.target.dtype),
            seen=jnp.zeros(batch, jnp.int32),
        )

    def extend(self, params, state, tokens, outputs, valid):
        """Pair each token with the target's feature one place before it, and commit the pairs."""
        head = params.draft
        batch, length = tokens.shape
        order = jnp.arange(length)
        count = jnp.sum(valid, axis=1)
        features = jnp.concatenate([state.feature[:, None], outputs.features], axis=1)
        positions = state.seen[:, None] - 1 + order
        first = (state.seen == 0) & (count > 0)  # the first token of a text has no feature before it: no pair
        visible = (order[:, None] >= order) & ~(first[:, None, None] & (order == 0) & (order[:, None] > 0))
        _, block = heads_lib.eagle_forward(
            head,
            params.target,
            tokens,
            heads_lib.fuse(head, features[:, :-1]),
            jnp.maximum(positions, 0),
            state.cache,
            visible,
        )
        path = jnp.minimum(order + first[:, None], length - 1)
        return State(
            cache=kv.commit(state.cache, block, path, count - first),
            feature=jnp.take_along_axis(features, count[:, None, None, None], axis=1)[:, 0],
            seen=state.seen + count,
        )

    def propose(self, params, rng_keys, state, context, sampling):
        """Grow a tree behind the pending token, whose feature the target has just given."""
        head, target, cache = params.draft, params.target, state.cache
        root = base.pending(context)
        batch = root.shape[0]
        draft_ids = head.params.get("draft_ids")

        def step(tokens, states, depth, mask, scratch):
            positions = jnp.broadcast_to((context.length - 2 + depth)[:, None], tokens.shape)
            states, block = heads_lib.eagle_forward(
                head, target, tokens, states, positions, cache, mask, scratch=scratch
            )
            return growth.Level(heads_lib.eagle_logits(head, target, states), states, block)

        fused = heads_lib.fuse(head, context.features)[:, None]
        alone = jnp.ones((batch, 1, 1), bool)
        first = step(root[:, None], fused, 0, alone, None)
        if self.topology is None:
            tree = growth.grow_dynamic(
                root, first, alone[:, 0], step, **dataclasses.asdict(self.dynamic), draft_ids=draft_ids
            )
        else:
            tree = growth.grow_static(
                self.topology,
                root,
                first,
                alone[:, 0],
                step,
                rng_keys,
                sampling,
                sampled=self.sampled,
                draft_ids=draft_ids,
            ).tree
        return tree, state
