"""Standard speculative sampling with a draft model (Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318).

A smaller model drafts gamma tokens one by one, each drawn from its own law under the row's filters; the target judges
them all in one pass. The draft is an independent model, or the first layers of the target under the target's norm and
head.

The draft keeps its own cache. While drafting, its keys and values grow in a scratch block behind it, and only what the
target accepted is committed. A draft token's keys and values exist once it has been fed back, so after full acceptance
the last one is missing: the first pass of the next round feeds it too, beside the pending token. (The papers leave this
open; without it the draft's cache has a hole and acceptance decays from round to round.)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jspec import cache as kv
from jspec import sampling as sampling_lib
from jspec import tree as tree_lib
from jspec import types
from jspec.drafters import base
from jspec.models import transformer
from jspec.weights import load, tokenizer


@dataclasses.dataclass(frozen=True)
class Draft:
    """Where the draft model comes from: exactly one of `layers` and `reference`.

    layers:    use the first layers of the target, with the target's final norm and head.
    reference: load a model (see `weights.references`).
    sha256:    expected of the referenced file.
    """

    layers: int | None = None
    reference: str | None = None
    sha256: str | None = None

    def __post_init__(self):
        if (self.layers is None) == (self.reference is None):
            raise ValueError(f"draft needs exactly one of layers and reference; got {self.layers}, {self.reference!r}")
        if self.layers is not None:
            base.check_count("layers", self.layers, 1)


@base.register("standard")
@dataclasses.dataclass(frozen=True)
class Standard:
    """Settings.

    gamma: draft length.
    draft: where the draft model comes from; None when it is handed to `build`.
    """

    gamma: int = 4
    draft: Draft | None = None

    def __post_init__(self):
        base.check_count("gamma", self.gamma, 0)  # 0 is plain decoding

    def build(
        self, target: types.Target, *, draft: types.Target | None = None
    ) -> tuple[BoundStandard, transformer.Model]:
        """See `types.Drafter`.

        Args:
          target: the model to speed up.
          draft: a draft already in memory, used instead of `self.draft`.

        Raises:
          ValueError: the draft cannot be loaded, or does not share the target's vocabulary.
        """
        if draft is not None:
            check_vocabulary(target, draft)
            model = draft.model
        elif self.draft is None:
            raise ValueError("draft is not given: set draft.layers or draft.reference")
        elif self.draft.layers is not None:
            model = transformer.first_layers(target.model, self.draft.layers)
        else:
            model = load_draft(self.draft.reference, target, sha256=self.draft.sha256).model
        config = target.model.config
        return BoundStandard(self.gamma, config.vocab_size, model.config.max_positions), model


def load_draft(reference: str, target: types.Target, *, sha256: str | None = None) -> types.Target:
    """Load a draft model for a target.

    Args:
      reference: see `weights.references`.
      target: the model to speed up; the draft is loaded in its dtype.
      sha256: expected of the file.

    Raises:
      ValueError: the reference or the files are bad, or the vocabularies differ.
    """
    draft = load.load_target(reference, sha256=sha256, dtype=target.model.dtype)
    check_vocabulary(target, draft)
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
class BoundStandard(base.Bound):
    """See `types.BoundDrafter`."""

    gamma: int
    vocab_size: int
    max_positions: int | None = None

    @property
    def num_nodes(self) -> int:
        return self.gamma + 1

    @property
    def max_depth(self) -> int:
        return self.gamma

    def init(self, params: types.Params, batch: int, capacity: int) -> Any:
        """Empty cache and scratch."""
        if self.gamma == 0:
            return ()
        model = params.draft
        return State(
            cache=kv.init(model.config, batch, capacity, model.dtype),
            scratch=kv.init_block(model.config, batch, self.gamma + 1, model.dtype),
        )

    def extend(self, params, state, tokens, outputs, valid):
        """Feed committed tokens to the draft and commit them to its cache."""
        if self.gamma == 0:
            return state
        batch, length = tokens.shape
        order = jnp.arange(length)
        _, block = self._forward(
            params.draft,
            tokens,
            state.cache.length[:, None] + order,
            state.cache,
            jnp.broadcast_to(order[:, None] >= order, (batch, length, length)),
            logits_at=jnp.zeros((batch, 0), jnp.int32),
        )
        path = jnp.broadcast_to(order, (batch, length))
        return state.replace(cache=kv.commit(state.cache, block, path, jnp.sum(valid, axis=1)))

    def propose(self, params, rng_keys, state, context, sampling):
        """Draft a chain of gamma tokens, each drawn from the draft's law."""
        if self.gamma == 0:
            nothing = jnp.zeros((context.length.shape[0], 0), jnp.int32)
            return tree_lib.chain(base.pending(context), nothing), state
        model, cache = params.draft, state.cache
        batch = context.length.shape[0]
        keys = jax.vmap(lambda key: jax.random.split(key, self.gamma), out_axes=1)(rng_keys)
        missing = context.length - cache.length  # 1, or 2 after full acceptance

        # The tokens the cache lacks, left-aligned. The second place is no token when only the pending one is missing.
        places = cache.length[:, None] + jnp.arange(2)
        tokens = jnp.take_along_axis(context.tokens, jnp.minimum(places, context.length[:, None] - 1), axis=1)
        lower = jnp.broadcast_to(jnp.tril(jnp.ones((2, 2), bool)), (batch, 2, 2))
        outputs, block = self._forward(model, tokens, places, cache, lower, logits_at=(missing - 1)[:, None])
        scratch = kv.write_block(state.scratch, block, 0)
        first, law = sampling_lib.draw(keys[0], self._match_vocabulary(outputs.logits[:, 0]), sampling)

        order = jnp.arange(self.gamma + 1)
        real = (order != 1) | (missing == 2)[:, None]  # `[B, M]` scratch places that hold a token, once written

        def draft_next(step, carry):
            drafts, laws, scratch = carry
            behind = real & (order <= step)  # places 0 and 1 are the catch-up, place 1 + i is draft i
            mask = jnp.concatenate([behind, jnp.ones((batch, 1), bool)], axis=1)[:, None]
            positions = (context.length - 1 + step)[:, None]
            last = jax.lax.dynamic_slice_in_dim(drafts, step - 1, 1, axis=1)
            outputs, block = self._forward(model, last, positions, cache, mask, scratch=scratch)
            logits = self._match_vocabulary(outputs.logits[:, 0])
            token, law = sampling_lib.draw(keys[step], logits, sampling)
            return drafts.at[:, step].set(token), laws.at[:, step].set(law), kv.write_block(scratch, block, step + 1)

        drafts = jnp.zeros((batch, self.gamma), jnp.int32).at[:, 0].set(first)
        laws = jnp.zeros((batch, self.gamma, self.vocab_size), jnp.float32).at[:, 0].set(law)
        drafts, laws, scratch = jax.lax.fori_loop(1, self.gamma, draft_next, (drafts, laws, scratch))
        tree = tree_lib.chain(base.pending(context), drafts, draft_probs=laws)
        return tree, state.replace(scratch=scratch)

    def update(self, params, state, context, tree, outputs, verdict):
        """Commit what the target accepted; the draft's view of it is in the scratch block already."""
        if self.gamma == 0:
            return state
        missing = context.length - state.cache.length
        order = jnp.arange(self.gamma + 1)
        skip_unused = jnp.minimum(jnp.where(order > 0, order + 1, order), self.gamma)
        path = jnp.where((missing == 2)[:, None], order, skip_unused)
        # The last draft was never fed back, so of gamma accepted ones gamma - 1 are there.
        count = missing + jnp.minimum(verdict.num_accepted, self.gamma - 1)
        count = jnp.where(verdict.num_accepted < 0, 0, count)
        return state.replace(cache=kv.commit(state.cache, state.scratch, path, count))

    def _forward(self, model, tokens, *args, **kwargs):
        # A target token the draft's vocabulary lacks reads as its last one; that costs acceptance, never correctness.
        return transformer.forward(model, jnp.minimum(tokens, model.config.vocab_size - 1), *args, **kwargs)

    def _match_vocabulary(self, logits: jax.Array) -> jax.Array:
        """Cut or fill draft logits to the target's vocabulary, so that a law never leaves it."""
        size = logits.shape[-1]
        if size >= self.vocab_size:
            return logits[..., : self.vocab_size]
        padding = [(0, 0)] * (logits.ndim - 1) + [(0, self.vocab_size - size)]
        return jnp.pad(logits, padding, constant_values=-jnp.inf)
