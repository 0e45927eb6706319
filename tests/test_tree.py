"""Token trees against plain loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import tree as tree_lib

pytestmark = pytest.mark.usefixtures("small_programs")


def test_the_documented_example():
    @jax.jit
    def build(parents):
        tree = tree_lib.from_parents(jnp.arange(5)[None], parents, max_depth=2)
        return tree, tree_lib.offered_depth(tree), [tree_lib.has_children(tree, jnp.array([i])) for i in range(5)]

    tree, offered, children = build(jnp.array([[-1, 0, 0, 1, -2]]))
    assert tree.depth.tolist() == [[0, 1, 1, 2, 0]]
    assert tree.mask[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    assert offered.tolist() == [2]
    assert [bool(has[0]) for has in children] == [True, True, False, False, False]


def test_random_trees_of_one_batch():
    rng = np.random.default_rng(0)
    batch, num_nodes = 64, 9
    parents = np.stack([[rng.integers(0, max(i, 1)) for i in range(num_nodes)] for _ in range(batch)])
    parents = np.where(rng.random(parents.shape) < 0.2, tree_lib.PADDING, parents)
    parents[:, 0] = -1
    tokens = rng.integers(0, 50, parents.shape)
    limits = rng.integers(0, 4, batch)
    nodes = rng.integers(0, num_nodes, batch)

    @jax.jit
    def build(tokens, parents):
        tree = tree_lib.from_parents(tokens, parents, max_depth=num_nodes - 1)
        limited = tree_lib.limit_depth(tree, limits)
        measures = tree_lib.offered_depth(tree), tree_lib.offered_depth(limited), tree_lib.has_children(tree, nodes)
        return tree, limited, measures, tree_lib.along_path(tree.tokens, parents[:, 1:4] % num_nodes)

    tree, limited, (offered, offered_within, children), gathered = build(jnp.asarray(tokens), jnp.asarray(parents))
    assert np.array_equal(tree.tokens, tokens) and np.array_equal(tree.parents, parents)
    assert tree.tokens.dtype == tree.parents.dtype == tree.depth.dtype == jnp.int32
    for row in range(batch):
        depth, deepest, deepest_within = np.zeros(num_nodes, int), 0, 0
        for node in range(num_nodes):
            line, above = {node}, parents[row, node]
            while above >= 0:
                line.add(above)
                above = parents[row, above]
            depth[node] = len(line) - 1
            assert set(np.flatnonzero(tree.mask[row, node])) == line
            if parents[row, node] >= 0:
                deepest = max(deepest, depth[node])
                deepest_within = max(deepest_within, depth[node] * (depth[node] <= limits[row]))
        assert tree.depth[row].tolist() == depth.tolist()
        assert limited.parents[row].tolist() == np.where(depth > limits[row], -2, parents[row]).tolist()
        assert (offered[row], offered_within[row]) == (deepest, deepest_within)
        assert children[row] == (nodes[row] in parents[row])
        assert gathered[row].tolist() == tokens[row, parents[row, 1:4] % num_nodes].tolist()


def test_a_chain_is_a_tree_of_width_one():
    drafts, root = jnp.array([[5, 6, 7], [8, 9, 0]]), jnp.array([1, 2])
    chain = jax.jit(tree_lib.chain)(root, drafts)
    build = jax.jit(tree_lib.from_parents, static_argnames="max_depth")
    tree = build(jnp.array([[1, 5, 6, 7], [2, 8, 9, 0]]), jnp.array([[-1, 0, 1, 2]] * 2), max_depth=3)
    assert jax.tree.structure(chain) == jax.tree.structure(tree)
    assert all(
        np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(jax.tree.leaves(chain), jax.tree.leaves(tree))
    )


def test_a_chain_may_be_shorter_in_some_rows_and_carries_its_laws():
    laws = jax.random.uniform(jax.random.key(0), (2, 3, 4))
    valid = jnp.array([[True, True, False], [False] * 3])
    chain = jax.jit(tree_lib.chain)
    tree = chain(jnp.array([1, 2]), jnp.ones((2, 3), jnp.int32), valid=valid, draft_probs=laws)
    assert tree.parents.tolist() == [[-1, 0, 1, -2], [-1, -2, -2, -2]]
    assert tree_lib.offered_depth(tree).tolist() == [2, 0]
    assert np.array_equal(tree.draft_probs[:, 1:], laws)

    alone = chain(jnp.array([1, 2]), jnp.zeros((2, 0), jnp.int32))
    assert alone.tokens.tolist() == [[1], [2]] and alone.parents.tolist() == [[-1], [-1]] and alone.max_depth == 0
    assert tree_lib.offered_depth(alone).tolist() == [0, 0]
