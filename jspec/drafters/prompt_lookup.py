"""Prompt lookup: propose what followed the last time the text ended like this.

No draft model: the longest suffix of the text, of at most `max_ngram` tokens, that also stands earlier in it is looked
up, and the tokens behind that place are proposed (Saxena, "Prompt lookup decoding", 2023; the matching of LLMA,
arXiv:2304.04487, is its relative). Proposals are deterministic, so each is judged with a one-hot law and the output law
is the target's.

Differs from the first release: several earlier places give the most recent one by default (there: the first), and
nothing is padded: a match near the end proposes only the tokens there are.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from jspec import tree as tree_lib
from jspec import types
from jspec.drafters import base


@base.register("prompt_lookup")
@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """Settings.

    gamma:     draft length.
    max_ngram: longest suffix looked up, in tokens; longer ones are tried first. None has no limit: the place with the
               longest common suffix wins, however long, as with a suffix automaton (SAM decoding, arXiv:2411.10666).
    min_ngram: shortest.
    prefer:    which of several places with the longest match: the most `recent` or the `first`.
    """

    gamma: int = 7
    max_ngram: int | None = 3
    min_ngram: int = 1
    prefer: Literal["recent", "first"] = "recent"

    def __post_init__(self):
        base.check_count("gamma", self.gamma, 0)  # 0 is plain decoding
        base.check_count("min_ngram", self.min_ngram, 1)
        if self.max_ngram is None:
            return
        base.check_count("max_ngram", self.max_ngram, 1)
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}")

    def build(self, target: types.Target) -> tuple[BoundPromptLookup, tuple]:
        """See `types.Drafter`."""
        return BoundPromptLookup(self), ()


@dataclasses.dataclass(frozen=True)
class BoundPromptLookup(base.Bound):
    """See `types.BoundDrafter`."""

    settings: PromptLookup

    @property
    def num_nodes(self) -> int:
        return self.settings.gamma + 1

    @property
    def max_depth(self) -> int:
        return self.settings.gamma

    def propose(self, params, rng_keys, state, context, sampling):
        """A chain of what followed the match; no drafts where nothing matches."""
        drafts, valid = jax.vmap(lambda tokens, length: lookup(tokens, length, self.settings))(
            context.tokens, context.length
        )
        return tree_lib.chain(base.pending(context), drafts, valid=valid), state


def lookup(tokens: jax.Array, length: jax.Array, settings: PromptLookup) -> tuple[jax.Array, jax.Array]:
    """Find the continuation for one row.

    Args:
      tokens: `[S]`.
      length: tokens there are.
      settings: what may match.

    Returns:
      `[gamma]` drafts, `[gamma]` bool which are real.
    """
    slots = jnp.arange(tokens.shape[0])
    # `matches[e]`: the n tokens before slot e equal the last n. Slot e itself must hold a token, which also keeps the
    # suffix from matching itself.
    start = jnp.int32(1), (slots >= 1) & (slots < length), jnp.int32(0), jnp.bool_(False)

    def lengthen(carry):  # from suffixes of n - 1 tokens to those of n
        n, matches, best, found = carry
        tail = tokens[jnp.maximum(length - n, 0)]
        matches &= (slots >= n) & (n < length) & (jnp.roll(tokens, n) == tail)
        hit = jnp.any(matches) & (n >= settings.min_ngram)
        recent = settings.prefer == "recent"
        place = jnp.max(jnp.where(matches, slots, -1)) if recent else jnp.argmax(matches)
        return n + 1, matches, jnp.where(hit, place, best), found | hit

    if settings.max_ngram is None:  # as many steps as the match is long
        _, _, best, found = jax.lax.while_loop(lambda carry: jnp.any(carry[1]), lengthen, start)
    else:
        for _ in range(settings.max_ngram):
            start = lengthen(start)
        _, _, best, found = start
    places = best + jnp.arange(settings.gamma)
    return tokens[jnp.minimum(places, tokens.shape[0] - 1)], found & (places < length)
