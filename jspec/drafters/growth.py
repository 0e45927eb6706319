"""Growing a token tree level by level, with any draft that continues its own drafts.

The shape is static (a chain, EAGLE-1's tree, Sequoia's) or chosen by the draft's own confidence (EAGLE-2, Li et al.,
arXiv:2406.16858, sections 4.1 and 4.2). Nodes of one depth run through the draft in one pass under the tree's mask;
their keys and values pile up in a scratch block behind the draft's cache.

Laws. Under `sampled`, siblings are drawn without replacement and each carries its conditional law (Sequoia,
arXiv:2402.12374; EAGLE-1, appendix A); a row at temperature 0 takes the best candidates instead. Under `one_hot`, the
best candidates are proposed and judged as deterministic. Both are lossless. A tree whose children are drawn and then
pruned by score is not, whatever law it states, so dynamic trees are `one_hot` only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache as kv
from jspec import sampling as sampling_lib
from jspec import topology as topology_lib
from jspec import tree as tree_lib
from jspec import types


class Level(NamedTuple):
    """What one pass of the draft says about T nodes.

    logits: `[B, T, Vd]` of the token behind each.
    states: `[B, T, ...]` what the pass over their children reads, or None.
    block:  their keys and values.
    """

    logits: jax.Array
    states: jax.Array | None
    block: kv.BlockKV


# One pass: target ids `[B, T]`, states of their parents, depth, mask `[B, T, M + T]`, scratch of M places -> Level.
Step = Callable[[jax.Array, jax.Array | None, int, jax.Array, kv.BlockKV], Level]


class Grown(NamedTuple):
    """A static tree filled in.

    tree:    to be verified.
    scratch: keys and values of what the root level held, then of the inner nodes in their order (`inner_places`).
    """

    tree: types.TokenTree
    scratch: kv.BlockKV


def inner_nodes(topology: topology_lib.Topology) -> list[int]:
    """Nodes but the root that have children: those that run through the draft, in the order of their scratch places."""
    return [node for depth in range(1, topology.max_depth) for node in topology.inner(depth)]


def _draw_children(rng_key, logits, row, filtered, count):
    """`count` different tokens from one node's law, in the order of the draw (Gumbel top-k).

    Returns:
      `[count]` ids, `[count, Vd]` conditional laws, `[count]` bool: whether the law had that many tokens left.
    """
    greedy = row.temperature == 0
    law = sampling_lib.law(logits, row, filtered)
    noisy = jnp.log(law) + jax.random.gumbel(rng_key, law.shape)
    ids = _best(jnp.where(greedy, logits, noisy), count)
    earlier = jnp.tril(jnp.ones((count, count), bool), -1)
    gone = jnp.zeros((count, law.shape[0]), bool).at[:, ids].max(earlier)
    left = jnp.where(gone, 0, law)
    total = jnp.sum(left, axis=1, keepdims=True)
    conditional = left / jnp.where(total > 0, total, 1)
    one_hot = jax.nn.one_hot(ids, law.shape[0])
    return ids, jnp.where(greedy, one_hot, conditional), greedy | (law[ids] > 0)


def _best(scores, count):
    """Ids of the `count` largest, best first; ties go to the lower id."""
    if count == 1:
        return jnp.argmax(scores, axis=-1, keepdims=True).astype(jnp.int32)
    return jax.lax.top_k(scores, count)[1]


def _children(rng_keys, logits, sampling, count, sampled):
    """Candidates of T nodes: `[B, T, count]` ids, `[B, T, count, Vd]` laws or None, `[B, T, count]` which are real."""
    batch, length, size = logits.shape
    if not sampled:
        return _best(logits, count), None, jnp.ones((batch, length, count), bool)

    def greedy():
        nothing = jnp.zeros((batch, length, count, size), jnp.float32)  # the closed form reads no laws
        return _best(logits, count), nothing, jnp.ones((batch, length, count), bool)

    def general():
        filtered = sampling_lib.any_filter(sampling)

        def one_row(key, logits, row):
            keys = jax.random.split(key, length)
            return jax.vmap(lambda key, logits: _draw_children(key, logits, row, filtered, count))(keys, logits)

        return jax.vmap(one_row)(rng_keys, logits, sampling)

    return jax.lax.cond(sampling_lib.all_greedy(sampling), greedy, general)


def grow_static(
    topology: topology_lib.Topology,
    root: jax.Array,
    first: Level,
    real: jax.Array,
    step: Step,
    rng_keys: jax.Array,
    sampling: types.Sampling,
    *,
    sampled: bool,
    draft_ids: jax.Array | None = None,
) -> Grown:
    """Fill a static shape.

    Args:
      topology: the shape.
      root: `[B]` pending tokens.
      first: the pass over the root, T = 1; its block may hold more places, such as tokens that the cache lacked.
      real: `[B, M]` which places of that block hold a token.
      step: the draft.
      rng_keys: `[B]`.
      sampling: settings per row.
      sampled: which law; see above.
      draft_ids: `[Vd]` target ids of a reduced vocabulary.
    """
    batch, size = root.shape[0], first.logits.shape[-1]
    tokens = [root[:, None]]
    valid = [jnp.ones((batch, 1), bool)]
    laws = [jnp.zeros((batch, 1, size), jnp.float32)]
    place_of = {node: place for place, node in enumerate(inner_nodes(topology))}
    level, scratch = first, first.block
    for depth in range(topology.max_depth):
        inner, nodes = topology.inner(depth), topology.level(depth + 1)
        if depth > 0:
            above = topology.level(depth)
            at = np.array([above.index(node) for node in inner])
            parents = topology.inner(depth - 1)
            states = level.states
            if states is not None:
                states = states[:, np.array([parents.index(topology.parents[node]) for node in inner])]
            before = sum(len(topology.inner(d)) for d in range(1, depth))
            seen = np.zeros((len(inner), before + len(inner)), bool)
            for row, node in enumerate(inner):
                seen[row, [place_of[ancestor] for ancestor in topology.ancestors(node)[1:]]] = True
            mask = jnp.concatenate(
                [
                    jnp.broadcast_to(real[:, None], (batch, len(inner), real.shape[1])),
                    jnp.broadcast_to(seen, (batch, *seen.shape)),
                ],
                axis=2,
            )
            level = step(tokens[depth][:, at], states, depth, mask, scratch)
            scratch = kv.append_block(scratch, level.block)

        # Which candidate of which parent each node takes. Draws have no ranks: siblings take them in order.
        parent = np.array([inner.index(topology.parents[node]) for node in nodes])
        siblings = [topology.children(topology.parents[node]) for node in nodes]
        rank = np.array([topology.ranks[n] if not sampled else s.index(n) for n, s in zip(nodes, siblings)])
        keys = jax.vmap(lambda key: jax.random.fold_in(key, depth))(rng_keys)
        ids, law, there = _children(keys, level.logits, sampling, int(rank.max()) + 1, sampled)
        ids = ids[:, parent, rank]
        tokens.append(ids if draft_ids is None else draft_ids[ids])
        above_valid = valid[depth][:, np.array([topology.level(depth).index(topology.parents[n]) for n in nodes])]
        valid.append(there[:, parent, rank] & above_valid)
        if sampled:
            laws.append(law[:, parent, rank])
    tree = tree_lib.from_topology(
        topology,
        jnp.concatenate(tokens, axis=1),
        jnp.concatenate(valid, axis=1),
        draft_probs=jnp.concatenate(laws, axis=1) if sampled else None,
        draft_ids=draft_ids if sampled else None,
    )
    return Grown(tree, scratch)


def grow_dynamic(
    root: jax.Array,
    first: Level,
    real: jax.Array,
    step: Step,
    *,
    depth: int,
    top_k: int,
    num_nodes: int,
    draft_ids: jax.Array | None = None,
) -> types.TokenTree:
    """EAGLE-2's tree: expand the `top_k` most probable nodes of each depth, then keep the most probable of all.

    A node's value is the product of the draft's probabilities along its path. Children of every frontier node enter the
    pool, the best `top_k` of them are the next frontier (expansion); the `num_nodes - 1` best of the pool are proposed
    (reranking). A value never exceeds its parent's and ties go to the shallower node, so the set is connected.

    Args:
      root, first, real, step, draft_ids: as in `grow_static`.
      depth: levels of drafts.
      top_k: candidates per node, and nodes expanded per level.
      num_nodes: of the tree, the root included.
    """
    batch = root.shape[0]
    to_target = lambda ids: ids if draft_ids is None else draft_ids[ids]

    def candidates(logits):
        values, ids = jax.lax.top_k(jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1), top_k)
        return values, to_target(ids)

    scores, tokens = (part[:, 0] for part in candidates(first.logits))
    pool = [(tokens, jnp.full((batch, top_k), -1), scores)]
    pool_size = top_k
    frontier = jnp.broadcast_to(jnp.arange(top_k), (batch, top_k))  # places in the pool
    states = None if first.states is None else jnp.repeat(first.states[:, :1], top_k, axis=1)
    seen = jnp.zeros((batch, top_k, 0), bool)  # of the scratch places behind the first level
    scratch = first.block
    own = jnp.broadcast_to(jnp.eye(top_k, dtype=bool), (batch, top_k, top_k))
    gather = jax.vmap(lambda values, places: values[places])
    for level_depth in range(1, depth):
        behind = jnp.broadcast_to(real[:, None], (batch, top_k, real.shape[1]))
        seen = jnp.concatenate([seen, own], axis=2)
        level = step(tokens, states, level_depth, jnp.concatenate([behind, seen], axis=2), scratch)
        scratch = kv.append_block(scratch, level.block)
        values, ids = candidates(level.logits)  # [B, top_k, top_k]
        grown = (scores[:, :, None] + values).reshape(batch, -1)
        ids = ids.reshape(batch, -1)
        pool.append((ids, jnp.repeat(frontier, top_k, axis=1), grown))
        scores, best = jax.lax.top_k(grown, top_k)
        tokens, parent = gather(ids, best), best // top_k
        frontier = pool_size + best
        seen = gather(seen, parent)
        states = None if level.states is None else gather(level.states, parent)
        pool_size += top_k * top_k
    tokens, parents, scores = (jnp.concatenate(parts, axis=1) for parts in zip(*pool))
    return tree_lib.from_scores(root, tokens, parents, scores, num_nodes=num_nodes, max_depth=depth)
