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
import numpy as np

from jspec import topology as topology_lib
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
    own = jnp.eye(tokens.shape[1], dtype=bool)
    has_parent, above = parents >= 0, jnp.maximum(parents, 0)
    mask = jnp.broadcast_to(own, (*parents.shape, tokens.shape[1]))
    for _ in range(max_depth):  # each round adds the ancestors one edge further up
        mask = own | (along_path(mask, above) & has_parent[..., None])
    depth = jnp.sum(mask, axis=2, dtype=jnp.int32) - 1
    return types.TokenTree(
        tokens=tokens.astype(jnp.int32),
        parents=parents.astype(jnp.int32),
        depth=depth,
        mask=mask,
        draft_probs=draft_probs,
        draft_ids=draft_ids,
        max_depth=max_depth,
    )


def from_topology(
    topology: topology_lib.Topology,
    tokens: jax.Array,
    valid: jax.Array,
    *,
    draft_probs: jax.Array | None = None,
    draft_ids: jax.Array | None = None,
) -> types.TokenTree:
    """A tree of a static shape.

    Args:
      topology: the shape, of N nodes.
      tokens: `[B, N]`, the root's first.
      valid: `[B, N]` bool; the others are padding, and so must be what hangs below them.
      draft_probs: `[B, N, Vd]` or None.
      draft_ids: `[Vd]` or None.
    """
    mask = np.zeros((topology.num_nodes, topology.num_nodes), bool)
    for node in range(topology.num_nodes):
        mask[node, topology.ancestors(node)] = True
    return types.TokenTree(
        tokens=tokens.astype(jnp.int32),
        parents=jnp.where(valid, jnp.array(topology.parents, jnp.int32), PADDING),
        depth=jnp.broadcast_to(jnp.array(topology.depth, jnp.int32), tokens.shape),
        mask=jnp.broadcast_to(mask, (tokens.shape[0], *mask.shape)),
        draft_probs=draft_probs,
        draft_ids=draft_ids,
        max_depth=topology.max_depth,
    )


def from_scores(
    root: jax.Array, tokens: jax.Array, parents: jax.Array, scores: jax.Array, *, num_nodes: int, max_depth: int
) -> types.TokenTree:
    """The best nodes of a pool of candidates (the rerank of EAGLE-2, arXiv:2406.16858, section 4.2).

    Args:
      root: `[B]` pending tokens.
      tokens: `[B, M]` candidates, no child before its parent.
      parents: `[B, M]` places in the pool, -1 for children of the root.
      scores: `[B, M]`, none above its parent's. Of equal ones the earlier is taken, so a node never without its parent.
      num_nodes: of the tree, the root included; at most M + 1.
      max_depth: of the deepest candidate.
    """

    def one_row(root, tokens, parents, scores):
        kept = jnp.sort(jax.lax.top_k(scores, num_nodes - 1)[1])
        place = jnp.searchsorted(kept, parents[kept]) + 1  # a parent that is kept stands at its own rank
        row_parents = jnp.where(parents[kept] < 0, 0, place)
        return jnp.append(root, tokens[kept]), jnp.append(-1, row_parents)

    return from_parents(*jax.vmap(one_row)(root, tokens, parents, scores), max_depth=max_depth)


def trie(sequences: jax.Array, valid: jax.Array, *, first: int) -> jax.Array:
    """Parents of the nodes of sequences that all start behind the root, with shared beginnings merged.

    A verifier tries siblings one after the other and follows one of them, so of two guesses with the same first token
    it would never see the second. Each beginning is kept where it comes first; its copies are padding.

    Args:
      sequences: `[B, G, n]` tokens; node `first + g * n + k` is token k of sequence g.
      valid: `[B, G]` bool, which sequences are there.
      first: index of the first of these nodes.

    Returns:
      `[B, G * n]`.
    """
    _, num, length = sequences.shape

    def one_row(sequences, valid):
        equal = jnp.cumprod(sequences[:, None] == sequences[None], axis=2).astype(bool)  # [G, G, n]: up to token k
        equal &= (valid[:, None] & valid[None])[:, :, None]
        owner = jnp.argmax(equal, axis=1)  # of each beginning, the first sequence that has it
        own = (owner == jnp.arange(num)[:, None]) & valid[:, None]
        above = first + owner[:, :-1] * length + jnp.arange(length - 1)
        above = jnp.concatenate([jnp.zeros((num, 1), above.dtype), above], axis=1)
        return jnp.where(own, above, PADDING).reshape(-1)

    return jax.vmap(one_row)(sequences, valid)


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
