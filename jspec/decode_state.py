"""What the loop of `jspec.decode` carries from round to round, and the numbers by which it tells how things went."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax

from jspec import cache as kv
from jspec import types

# Finish reasons.
RUNNING, STOP, LENGTH = 0, 1, 2
FINISH_REASONS = ("running", "stop", "length")

# How a token came: with the prompt, from prefill, as an accepted draft, as the correction of a rejected one, as the
# bonus behind a fully accepted block, or from a round that offered no draft.
PROMPT, PREFILL, ACCEPTED, CORRECTED, BONUS, UNDRAFTED = range(6)
ORIGINS = ("prompt", "prefill", "accepted", "corrected", "bonus", "undrafted")


@flax.struct.dataclass
class DecodeState:
    """What a round needs from the one before.

    tokens:        prompt and committed tokens.
    length:        committed tokens, the pending one included.
    prompt_length: of each row.
    origin:        how each token came, an index into `ORIGINS`.
    features:      of the node that produced the pending token.
    cache:         the target's.
    draft:         the drafter's state.
    finish_reason: `RUNNING`, `STOP` or `LENGTH`.
    acceptance:    statistics so far.
    """

    tokens: jax.Array  # [B, S] int32
    length: jax.Array  # [B] int32
    prompt_length: jax.Array  # [B] int32
    origin: jax.Array  # [B, S] int8
    features: jax.Array  # [B, F, E]
    cache: kv.KVCache
    draft: Any
    finish_reason: jax.Array  # [B] int32
    acceptance: types.Acceptance

    @property
    def live(self) -> jax.Array:
        """Rows that still decode, `[B]` bool."""
        return self.finish_reason == RUNNING

    @property
    def context(self) -> types.Context:
        """What a drafter sees of it."""
        return types.Context(self.tokens, self.length, self.features)
