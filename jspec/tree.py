"""Token trees: how the proposals of one round hang together.

A chain is a tree of width 1. Nodes stand in topological order (`parents[i] < i`), the root is node 0 and its parent -1;
auxiliary and padding nodes carry -2. Tree attention (SpecInfer, arXiv:2305.09781, section 4.2): a node attends to the
cached prefix, to its ancestors and to itself, at the position of its depth.

Example, a root with two children, the first of which has a child, and one padding node:

    parents  -1  0  0  1  -2
    depth     0  1  1  2   0
    mask      1 . . . .
              1 1 . . .
              1 . 1 . .
              1 1 . 1 .
              . . . . 1
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec import types

PADDING = -2


def chain(
    root: jax.Array, drafts: jax.Array, *, valid: jax.Array | None = None, draft_probs: jax.Array | None = None
) -> types.TokenTree:
    """A tree of width 1: the pending token and gamma drafts behind it.

    Args:
      root: `[B]` pending tokens.
      drafts: `[B, gamma]`; gamma = 0 gives the root alone.
      valid: `[B, gamma]` bool, true up to where a row has drafts; None means everywhere.
      draft_probs: `[B, gamma, V]` laws the drafts were drawn from; None means one-hot.
    """
    batch, gamma = drafts.shape
    order = jnp.arange(gamma + 1, dtype=jnp.int32)
    parents = jnp.broadcast_to(order - 1, (batch, gamma + 1))
    if valid is not None:
        parents = parents.at[:, 1:].set(jnp.where(valid, parents[:, 1:], PADDING))
    if draft_probs is not None:
        draft_probs = jnp.pad(draft_probs, ((0, 0), (1, 0), (0, 0)))
    return types.TokenTree(
        tokens=jnp.concatenate([root[:, None], drafts], axis=1).astype(jnp.int32),
        parents=parents,
        depth=jnp.broadcast_to(order, (batch, gamma + 1)),
        mask=jnp.broadcast_to(order[:, None] >= order, (batch, gamma + 1, gamma + 1)),
        draft_probs=draft_probs,
        draft_ids=None,
        max_depth=gamma,
    )


def from_parents(
    tokens: jax.Array,
    parents: jax.Array,
    *,
    max_depth: int,
    draft_probs: jax.Array | None = None,
    draft_ids: jax.Array | None = None,
) -> types.TokenTree:
    """A tree from its parent array, which may differ from row to row.

    Args:
      tokens: `[B, N]`.
      parents: `[B, N]` in topological order.
      max_depth: of the deepest node over all rows, in edges; static.
      draft_probs: `[B, N, Vd]` or None.
      draft_ids: `[Vd]` or None.
    """
    num_nodes = tokens.shape[1]
    own = jnp.eye(num_nodes, dtype=bool)

    def grow(node, carry):  # parents come first, so each node adds itself to a finished line of ancestors
        mask, depth = carry
        parent = parents[:, node]
        has_parent = parent >= 0
        above = jnp.maximum(parent, 0)
        line = jnp.take_along_axis(mask, above[:, None, None], axis=1)[:, 0] & has_parent[:, None]
        level = jnp.take_along_axis(depth, above[:, None], axis=1)[:, 0] + 1
        return mask.at[:, node].set(line | own[node]), depth.at[:, node].set(jnp.where(has_parent, level, 0))

    empty = jnp.zeros((*parents.shape, num_nodes), bool), jnp.zeros(parents.shape, jnp.int32)
    mask, depth = jax.lax.fori_loop(0, num_nodes, grow, empty)
    return types.TokenTree(
        tokens=tokens.astype(jnp.int32),
        parents=parents.astype(jnp.int32),
        depth=depth,
        mask=mask,
        draft_probs=draft_probs,
        draft_ids=draft_ids,
        max_depth=max_depth,
    )


def limit_depth(tree: types.TokenTree, limit: jax.Array) -> types.TokenTree:
    """Turn nodes deeper than `limit` (`[B]`, in edges) into padding: they are neither offered nor counted."""
    return tree.replace(parents=jnp.where(tree.depth > limit[:, None], PADDING, tree.parents))


def offered_depth(tree: types.TokenTree) -> jax.Array:
    """Depth of the deepest offered node of each row, `[B]`."""
    return jnp.max(jnp.where(tree.parents >= 0, tree.depth, 0), axis=1)


def has_children(tree: types.TokenTree, node: jax.Array) -> jax.Array:
    """Whether anything was offered behind `node` (`[B]`), `[B]` bool."""
    return jnp.any(tree.parents == node[:, None], axis=1)


def along_path(values: jax.Array, path: jax.Array) -> jax.Array:
    """Gather `[B, N, ...]` node values along `[B, P]` paths: `[B, P, ...]`."""
    return jax.vmap(lambda row, nodes: row[nodes])(values, path)
