"""Standard speculative sampling with a draft model (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318).

A smaller model drafts gamma tokens one by one, each drawn from its own law under the row's filters; the target judges
them all in one pass. The draft is an independent model, or the first layers of the target under the target's norm and
head (early-exit self-speculation, as in LayerSkip, arXiv:2404.16710, but with a cache of its own). Instead of a chain
it can fill a static token tree (SpecInfer, arXiv:2305.09781; Sequoia, arXiv:2402.12374; see `growth` for the laws).

The draft keeps its own cache. While drafting, its keys and values grow in a scratch block behind it, and only what the
target accepted is committed. A draft token's keys and values exist once it has been fed back, so behind an accepted
leaf (the last of a chain) they are missing: the first pass of the next round feeds it too, beside the pending token.
(The papers leave this open; without it the draft's cache has a hole and acceptance decays from round to round.)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache as kv
from jspec import sampling as sampling_lib
from jspec import topology as topology_lib
from jspec import tree as tree_lib
from jspec import types
from jspec.drafters import base, draft_vocabulary, growth
from jspec.models import transformer
from jspec.weights import load, pairing, shapes, tokenizer


@dataclasses.dataclass(frozen=True)
class Draft:
    """Where the draft model comes from: exactly one of `layers`, `reference` and `shape`.

    layers:    use the first layers of the target, with the target's final norm and head.
    reference: load a model (see `weights.references`).
    sha256:    expected of the referenced file.
    shape:     random weights in the shape of a known model, and the target's vocabulary, for timing.
    force:     load it though it was trained for another target.
    """

    layers: int | None = None
    reference: str | None = None
    sha256: str | None = None
    shape: shapes.Shape | None = None
    force: bool = False

    def __post_init__(self):
        base.check_one_source(layers=self.layers, reference=self.reference, shape=self.shape)
        if self.layers is not None:
            base.check_count("layers", self.layers, 1)


@base.register("standard")
@dataclasses.dataclass(frozen=True)
class Standard:
    """Settings. The proposals are a chain of `gamma`, unless `tree` is given.

    gamma:      draft length of a chain.
    draft:      where the draft model comes from; None when it is handed to `build`.
    tree:       a static tree.
    vocabulary: draft these tokens only (FR-Spec); None means all.
    """

    gamma: int = 4
    draft: Draft | None = None
    tree: topology_lib.Tree | None = None
    vocabulary: draft_vocabulary.Vocabulary | None = None

    def __post_init__(self):
        base.check_count("gamma", self.gamma, 0)  # 0 is plain decoding

    @property
    def topology(self) -> topology_lib.Topology:
        """Of the proposals."""
        return topology_lib.chain(self.gamma) if self.tree is None else self.tree.topology

    def build(self, target: types.Target, *, draft: types.Target | None = None) -> tuple[BoundStandard, dict[str, Any]]:
        """See `types.Drafter`.

        Args:
          target: the model to speed up.
          draft: a draft already in memory, used instead of `self.draft`.

        Raises:
          ValueError: the draft cannot be loaded, does not share the target's vocabulary, or brings a reduced one
            although `vocabulary` is set.
        """
        if draft is not None:
            check_vocabulary(target, draft)
        elif self.draft is None:
            raise ValueError("draft is not given: set draft.layers, draft.reference or draft.shape")
        elif self.draft.layers is not None:
            draft = types.Target(transformer.first_layers(target.model, self.draft.layers))
        elif self.draft.shape is not None:
            draft = types.Target(self.draft.shape.build(target.model.dtype, target.model.config.vocab_size))
        else:
            given = self.draft
            draft = load_draft(given.reference, target, sha256=given.sha256, force=given.force)
        return bind(self.topology, target, draft.model, draft_ids(draft, target, self.vocabulary))


def draft_ids(
    draft: types.Target, target: types.Target, vocabulary: draft_vocabulary.Vocabulary | None
) -> np.ndarray | None:
    """What a draft model proposes: the vocabulary it was trained with, or the one that is set.

    Args:
      draft, target: models of one vocabulary.
      vocabulary: the setting.

    Returns:
      `[Vd]` as `draft_vocabulary.check` gives them, or None for all tokens.

    Raises:
      ValueError: both are given, or one is none of the target's.
    """
    if draft.draft_ids is None:
        return vocabulary and vocabulary.load(target)
    if vocabulary is not None:
        raise ValueError("vocabulary: the draft has a reduced vocabulary of its own")
    return draft_vocabulary.check(draft.draft_ids, target, where="of the draft")


def bind(
    topology: topology_lib.Topology,
    target: types.Target,
    model: transformer.Model,
    draft_ids: np.ndarray | None = None,
) -> tuple[BoundStandard, Any]:
    """A drafter from a draft model in memory.

    Args:
      topology: shape of the proposals.
      target: the model to speed up.
      model: the draft; its vocabulary is the target's but for padding.
      draft_ids: `[Vd]` from `draft_vocabulary.check`, or None.

    Raises:
      ValueError: the draft lacks an id of the draft vocabulary, or has fewer tokens than the tree asks for.
    """
    vocab_size = target.model.config.vocab_size
    candidates = vocab_size if draft_ids is None else len(draft_ids)
    widest = max(len(topology.children(node)) for node in range(topology.num_nodes))
    if widest > candidates:
        raise ValueError(f"the tree asks for {widest} candidates of {candidates} draft tokens")
    params = {"model": model}
    if draft_ids is not None:
        if draft_ids[-1] >= model.config.vocab_size:
            raise ValueError(f"draft vocabulary: the draft has no id {draft_ids[-1]}, only {model.config.vocab_size}")
        params = {"model": draft_vocabulary.restrict(model, draft_ids), "draft_ids": jnp.asarray(draft_ids)}
    return BoundStandard(topology, vocab_size, model.config.max_positions), params


def load_draft(reference: str, target: types.Target, *, sha256: str | None = None, force: bool = False) -> types.Target:
    """Load a draft model for a target. (`loading.load_draft` loads whatever a reference holds.)

    Args:
      reference: see `weights.references`.
      target: the model to speed up; the draft is loaded in its dtype, and may borrow from it (`weights.borrowing`).
      sha256: expected of the file.
      force: load it although it says that it was trained for another target (`weights.pairing`).

    Raises:
      ValueError: the reference or the files are bad, the vocabularies differ, or it was trained for another target.
    """
    draft = load.load_target(reference, sha256=sha256, dtype=target.model.dtype, lender=target)
    check_vocabulary(target, draft)
    pairing.check_trained_for(draft.provenance.trained_for, target, reference, force)
    return draft


def check_vocabulary(target: types.Target, draft: types.Target) -> None:
    """Refuse a draft whose token ids mean other strings than the target's.

    Sizes may differ by padding: the draft's law is cut or filled with zeros to the target's size.

    Raises:
      ValueError: naming the first id that differs.
    """
    if target.tokenizer is not None and draft.tokenizer is not None:
        tokenizer.same_vocabulary(target.tokenizer, draft.tokenizer)


@flax.struct.dataclass
class State:
    """Of the draft.

    cache:   committed tokens; one or two fewer than the context holds.
    scratch: what this round's passes computed: first the tokens the cache lacked (two places, the second unused when it
             lacked only the pending token), then the drafts that were fed back.
    """

    cache: kv.KVCache
    scratch: kv.BlockKV


@dataclasses.dataclass(frozen=True)
class BoundStandard(base.StaticTree):
    """See `types.BoundDrafter`. Its parameters: `model`, and `draft_ids` of a reduced vocabulary."""

    topology: topology_lib.Topology
    vocab_size: int
    max_positions: int | None = None

    @property
    def _proposes(self) -> bool:
        return self.max_depth > 0

    def init(self, params: types.Params, batch: int, capacity: int) -> Any:
        """Empty cache and scratch."""
        if not self._proposes:
            return ()
        model = params.draft["model"]
        return State(
            cache=kv.init(model.config, batch, capacity, model.dtype),
            scratch=kv.init_block(model.config, batch, 2 + len(growth.inner_nodes(self.topology)), model.dtype),
        )

    def extend(self, params, state, tokens, outputs, valid):
        """Feed committed tokens to the draft and commit them to its cache."""
        if not self._proposes:
            return state
        batch, length = tokens.shape
        order = jnp.arange(length)
        _, block = self._forward(
            params.draft["model"],
            tokens,
            state.cache.length[:, None] + order,
            state.cache,
            jnp.broadcast_to(order[:, None] >= order, (batch, length, length)),
            logits_at=jnp.zeros((batch, 0), jnp.int32),
        )
        path = jnp.broadcast_to(order, (batch, length))
        return state.replace(cache=kv.commit(state.cache, block, path, jnp.sum(valid, axis=1)))

    def propose(self, params, rng_keys, state, context, sampling):
        """Draft, each token drawn from the draft's law."""
        if not self._proposes:
            nothing = jnp.zeros((context.length.shape[0], 0), jnp.int32)
            return tree_lib.chain(base.pending(context), nothing), state
        draft_ids = params.draft.get("draft_ids")
        first, real = self._catch_up(params.draft["model"], state, context, draft_ids)
        grow = self._grow_chain if self.topology.is_chain else self._grow_tree
        tree, scratch = grow(params.draft["model"], rng_keys, state, context, sampling, first, real, draft_ids)
        return tree, state.replace(scratch=scratch)

    def _catch_up(self, model, state, context, draft_ids):
        """Feed the tokens that the cache lacks, left-aligned: the pending one, and the one before it after an accepted
        leaf. Returns the pending token's level, T = 1 with a block of two places, and which of them are real."""
        batch, cache = context.length.shape[0], state.cache
        missing = context.length - cache.length
        places = cache.length[:, None] + jnp.arange(2)
        tokens = jnp.take_along_axis(context.tokens, jnp.minimum(places, context.length[:, None] - 1), axis=1)
        lower = jnp.broadcast_to(jnp.tril(jnp.ones((2, 2), bool)), (batch, 2, 2))
        outputs, block = self._forward(model, tokens, places, cache, lower, logits_at=(missing - 1)[:, None])
        real = jnp.stack([missing >= 1, missing == 2], axis=1)
        return growth.Level(self._match_vocabulary(outputs.logits, draft_ids), None, block), real

    def _grow_chain(self, model, rng_keys, state, context, sampling, first, real, draft_ids):
        """One draft after the other in a loop, so that a long chain is no long program."""
        batch, gamma, size = context.length.shape[0], self.max_depth, first.logits.shape[-1]
        to_target = lambda ids: ids if draft_ids is None else draft_ids[ids]
        keys = jax.vmap(lambda key: jax.random.split(key, gamma), out_axes=1)(rng_keys)
        scratch = kv.write_block(state.scratch, first.block, 0)
        token, law = sampling_lib.draw(keys[0], first.logits[:, 0], sampling)
        order = jnp.arange(gamma + 1)
        real = jnp.pad(real, ((0, 0), (0, gamma - 1)), constant_values=True)  # places that hold a token once written

        def draft_next(step, carry):
            drafts, laws, scratch = carry
            behind = real & (order <= step)  # places 0 and 1 are the catch-up, place 1 + i is draft i
            mask = jnp.concatenate([behind, jnp.ones((batch, 1), bool)], axis=1)[:, None]
            positions = (context.length - 1 + step)[:, None]
            last = jax.lax.dynamic_slice_in_dim(drafts, step - 1, 1, axis=1)
            outputs, block = self._forward(model, last, positions, state.cache, mask, scratch=scratch)
            logits = self._match_vocabulary(outputs.logits[:, 0], draft_ids)
            token, law = sampling_lib.draw(keys[step], logits, sampling)
            drafts, laws = drafts.at[:, step].set(to_target(token)), laws.at[:, step].set(law)
            return drafts, laws, kv.write_block(scratch, block, step + 1)

        drafts = jnp.zeros((batch, gamma), jnp.int32).at[:, 0].set(to_target(token))
        laws = jnp.zeros((batch, gamma, size), jnp.float32).at[:, 0].set(law)
        drafts, laws, scratch = jax.lax.fori_loop(1, gamma, draft_next, (drafts, laws, scratch))
        tree = tree_lib.chain(base.pending(context), drafts, draft_probs=laws)
        return tree.replace(draft_ids=draft_ids), scratch

    def _grow_tree(self, model, rng_keys, state, context, sampling, first, real, draft_ids):
        """All nodes of a depth in one pass."""

        def step(tokens, states, depth, mask, scratch):
            positions = jnp.broadcast_to((context.length - 1 + depth)[:, None], tokens.shape)
            outputs, block = self._forward(model, tokens, positions, state.cache, mask, scratch=scratch)
            return growth.Level(self._match_vocabulary(outputs.logits, draft_ids), None, block)

        root = base.pending(context)
        return growth.grow_static(
            self.topology, root, first, real, step, rng_keys, sampling, sampled=True, draft_ids=draft_ids
        )

    def update(self, params, state, context, tree, outputs, verdict):
        """Commit what the target accepted; the draft's view of it is in the scratch block already."""
        if not self._proposes:
            return state
        missing = context.length - state.cache.length
        # Scratch place of each node on the path: what the cache lacked comes first, leaves were never fed back.
        inner = growth.inner_nodes(self.topology)
        place = np.zeros(self.num_nodes, np.int32)
        place[inner] = 2 + np.arange(len(inner))
        fed_back = np.zeros(self.num_nodes, bool)
        fed_back[inner] = True
        drafts = verdict.path[:, 1:]
        accepted = jnp.arange(self.max_depth) < verdict.num_accepted[:, None]
        count = missing + jnp.sum(accepted & jnp.array(fed_back)[drafts], axis=1)
        count = jnp.where(verdict.num_accepted < 0, 0, count)
        lacked = jnp.broadcast_to(jnp.arange(2), (drafts.shape[0], 2))
        path = jnp.concatenate([lacked, jnp.array(place)[drafts]], axis=1)
        without_second = jnp.concatenate([path[:, :1], path[:, 2:], path[:, -1:]], axis=1)
        path = jnp.where((missing == 2)[:, None], path, without_second)
        return state.replace(cache=kv.commit(state.cache, state.scratch, path, count))

    def _forward(self, model, tokens, *args, **kwargs):
        # A target token the draft's vocabulary lacks reads as its last one; that costs acceptance, never correctness.
        return transformer.forward(model, jnp.minimum(tokens, model.config.vocab_size - 1), *args, **kwargs)

    def _match_vocabulary(self, logits: jax.Array, draft_ids: jax.Array | None) -> jax.Array:
        """Cut or fill draft logits to the target's vocabulary, so that a law never leaves it."""
        size = logits.shape[-1]
        if draft_ids is not None:
            return logits
        if size >= self.vocab_size:
            return logits[..., : self.vocab_size]
        padding = [(0, 0)] * (logits.ndim - 1) + [(0, self.vocab_size - size)]
        return jnp.pad(logits, padding, constant_values=-jnp.inf)


@base.register("early_exit")
@dataclasses.dataclass(frozen=True)
class EarlyExit:
    """A preset of `standard`: the target's own first layers draft, under its norm and head.

    gamma:  draft length.
    layers: how many; None means a quarter of the target's, at least one.
    """

    gamma: int = 4
    layers: int | None = None

    def __post_init__(self):
        base.check_count("gamma", self.gamma, 0)
        if self.layers is not None:
            base.check_count("layers", self.layers, 1)

    def build(self, target: types.Target) -> tuple[BoundStandard, dict[str, Any]]:
        """See `types.Drafter`.

        Raises:
          ValueError: the target has fewer layers.
        """
        layers = self.layers or max(1, target.model.config.num_layers // 4)
        return Standard(self.gamma, Draft(layers=layers)).build(target)
