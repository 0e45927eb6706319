"""Drafters for tests only: trees of every kind over a table of next-token logits, so that no draft model is needed.

The shape of a tree is data (a parent array among the parameters), so that trees of one size share a compiled program.
"""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec import sampling as sampling_lib
from jspec import tree as tree_lib
from jspec import types
from jspec.drafters import base

TRACES = collections.Counter()  # Python calls of `propose`, by drafter


@dataclasses.dataclass(frozen=True)
class TokenTree(base.Bound):
    """Deterministic proposals in a tree of any shape.

    Also keeps what the driver hands it: the tokens and features that `extend` saw, and whether the context's features
    belonged to the node that produced the pending token.

    Parameters: `parents` [N] (-2 makes a node auxiliary), `table` [V, R] candidates after each token, best first, and
    `rank` [N], which of them a node takes. An auxiliary node takes its candidate after the root and sees every node.
    """

    num_nodes: int
    max_depth: int
    feature_layers: types.FeatureLayers

    def init(self, params, batch, capacity):
        width = params.target.config.width
        return {
            "tokens": jnp.zeros((batch, capacity), jnp.int32),
            "features": jnp.zeros((batch, capacity, len(self.feature_layers), width)),
            "length": jnp.zeros(batch, jnp.int32),
            "wrong_features": jnp.zeros(batch, jnp.int32),
        }

    def extend(self, params, state, tokens, outputs, valid):
        capacity = state["tokens"].shape[1]
        slots = jnp.where(valid, state["length"][:, None] + jnp.cumsum(valid, axis=1) - 1, capacity)
        write = jax.vmap(lambda row, slots, values: row.at[slots].set(values, mode="drop"))
        return state | {
            "tokens": write(state["tokens"], slots, tokens),
            "features": write(state["features"], slots, outputs.features),
            "length": state["length"] + jnp.sum(valid, axis=1),
        }

    def propose(self, params, rng_keys, state, context, sampling):
        TRACES[self] += 1
        draft = params.draft
        root = base.pending(context)

        def grow(node, tokens):
            above = tokens[:, jnp.maximum(draft["parents"][node], 0)]
            return tokens.at[:, node].set(draft["table"][above, draft["rank"][node]])

        tokens = jnp.zeros((len(root), self.num_nodes), jnp.int32).at[:, 0].set(root)
        tokens = jax.lax.fori_loop(1, self.num_nodes, grow, tokens)
        parents = jnp.broadcast_to(draft["parents"], tokens.shape)
        tree = tree_lib.from_parents(tokens, parents, max_depth=self.max_depth)
        tree = tree.replace(mask=tree.mask | (parents == tree_lib.PADDING)[:, :, None])
        kept = jax.vmap(lambda row, place: row[place])(state["features"], context.length - 2)
        wrong = jnp.any(kept != context.features, axis=(1, 2))
        return tree, state | {"wrong_features": state["wrong_features"] + wrong}


def by_hand(params: dict, tokens: list[int]) -> tuple[list[int], list[int]]:
    """What `TokenTree` proposes, in plain Python: drafts and parents."""
    parents, table, rank = (np.asarray(params[name]).tolist() for name in ("parents", "table", "rank"))
    nodes = [tokens[-1]]
    for parent, place in zip(parents[1:], rank[1:]):
        nodes.append(table[nodes[max(parent, 0)]][place])
    return nodes[1:], parents[1:]


@dataclasses.dataclass(frozen=True)
class SampledTree(base.Bound):
    """Every node drawn from a table's law under the row's filters; siblings with or without replacement.

    Parameters: `parents` [N]; `logits` [V, V] after each token; switches `replace` (siblings are independent draws;
    otherwise each is drawn from what its elder siblings left and carries that conditional law), and three mistakes for
    tests that must fail: `raw` (carry the law before the filters), `argmax` (take the likeliest token but carry the
    law), `joint` (draw without replacement but carry the unconditional law).
    """

    num_nodes: int
    max_depth: int

    def propose(self, params, rng_keys, state, context, sampling):
        TRACES[self] += 1
        draft = params.draft
        size = draft["logits"].shape[1]
        order = jnp.arange(self.num_nodes)
        filtered = sampling_lib.any_filter(sampling)

        def one(rng_key, root, row):
            noise = jax.random.gumbel(rng_key, (self.num_nodes, size))

            def grow(node, carry):
                tokens, parents, laws = carry
                parent = parents[node]
                logits = draft["logits"][tokens[jnp.maximum(parent, 0)]]
                full = sampling_lib.law(logits, row, filtered)
                elder = (parents == parent) & (order < node)
                taken = (
                    jnp.zeros(size, bool).at[jnp.where(elder, tokens, size)].set(True, mode="drop") & ~draft["replace"]
                )
                left = jnp.where(taken, 0, full)
                # A law with nothing left gives no child, and a node that is none has no children.
                there = (parent >= 0) & (jnp.sum(left) > 0) & (parents[jnp.maximum(parent, 0)] != tree_lib.PADDING)
                token = jnp.argmax(jnp.log(left) + jnp.where(draft["argmax"], 0, noise[node]))
                carried = jnp.where(draft["raw"], jax.nn.softmax(logits), full)
                carried = jnp.where(taken & ~draft["joint"], 0, carried)
                law = carried / jnp.maximum(jnp.sum(carried), 1e-30)
                parents = parents.at[node].set(jnp.where(there, parent, tree_lib.PADDING))
                return tokens.at[node].set(token), parents, laws.at[node].set(law)

            tokens = jnp.zeros(self.num_nodes, jnp.int32).at[0].set(root)
            start = tokens, draft["parents"], jnp.zeros((self.num_nodes, size))
            return jax.lax.fori_loop(1, self.num_nodes, grow, start)

        tokens, parents, laws = jax.vmap(one)(rng_keys, base.pending(context), sampling)
        return tree_lib.from_parents(tokens, parents, max_depth=self.max_depth, draft_probs=laws), state


def switches(**on: bool) -> dict:
    """The switches of `SampledTree`."""
    assert on.keys() <= {"replace", "raw", "argmax", "joint"}
    return {name: jnp.asarray(on.get(name, False)) for name in ("replace", "raw", "argmax", "joint")}
