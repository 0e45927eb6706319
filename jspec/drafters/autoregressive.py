"""Plain decoding: a tree of one node, so that the baseline runs through the same loop as every method."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jspec import tree as tree_lib
from jspec import types
from jspec.drafters import base


@base.register("autoregressive")
@dataclasses.dataclass(frozen=True)
class Autoregressive:
    """Propose nothing: one token per target call."""

    def build(self, target: types.Target) -> tuple[BoundAutoregressive, tuple]:
        """See `types.Drafter`."""
        return BoundAutoregressive(), ()


@dataclasses.dataclass(frozen=True)
class BoundAutoregressive(base.Bound):
    """See `types.BoundDrafter`."""

    num_nodes: ClassVar[int] = 1
    max_depth: ClassVar[int] = 0

    def propose(self, params, rng_keys, state, context, sampling):
        """The root alone."""
        nothing = jnp.zeros((context.length.shape[0], 0), jnp.int32)
        return tree_lib.chain(base.pending(context), nothing), state
