"""Token trees against plain loops."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import topology
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


def test_tries_against_plain_loops():
    """Two symbols share many beginnings: the first sequence keeps the nodes; missing sequences have none."""
    rng = np.random.default_rng(1)
    batch, num, length, first = 50, 4, 3, 7
    sequences, valid = rng.integers(0, 2, (batch, num, length)), rng.random((batch, num)) < 0.8
    got = jax.jit(tree_lib.trie, static_argnames="first")(jnp.asarray(sequences), jnp.asarray(valid), first=first)
    for row in range(batch):
        nodes, expected = {(): 0}, []
        for index, (sequence, there) in enumerate(zip(sequences[row].tolist(), valid[row])):
            for k in range(length):
                beginning = tuple(sequence[: k + 1])
                if not there or beginning in nodes:
                    expected.append(tree_lib.PADDING)
                else:
                    nodes[beginning] = first + index * length + k
                    expected.append(nodes[beginning[:-1]])
        assert got[row].tolist() == expected


def test_the_rerank_against_a_plain_one():
    rng = np.random.default_rng(0)
    batch, pool, num_nodes = 40, 12, 6
    parents = np.stack([[rng.integers(-1, i) for i in range(pool)] for _ in range(batch)])
    scores = np.zeros((batch, pool))
    for row, place in itertools.product(range(batch), range(pool)):
        above = parents[row, place]
        step = rng.choice([0.0, 0.5, 1.0])  # ties, also between parent and child
        scores[row, place] = (scores[row, above] if above >= 0 else 0) - step
    tokens = rng.integers(0, 50, (batch, pool))
    build = jax.jit(tree_lib.from_scores, static_argnames=("num_nodes", "max_depth"))
    arrays = (jnp.asarray(x) for x in (np.full(batch, 7), tokens, parents, scores))
    got = build(*arrays, num_nodes=num_nodes, max_depth=pool)
    for row in range(batch):
        kept = sorted(sorted(range(pool), key=lambda place: (-scores[row, place], place))[: num_nodes - 1])
        assert got.tokens[row].tolist() == [7, *tokens[row, kept]]
        expected = [-1] + [kept.index(parents[row, i]) + 1 if parents[row, i] >= 0 else 0 for i in kept]
        assert got.parents[row].tolist() == expected


def test_a_static_shape_is_the_tree_of_its_parents():
    """Depth and mask follow from the shape; what is not valid is padding, and nothing else of it changes."""
    shape = topology.from_choices(((0,), (2,), (0, 1), (2, 0), (2, 1), (2, 0, 3)))
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, 50, (2, shape.num_nodes)))
    valid = np.ones((2, shape.num_nodes), bool)
    valid[1, [2, 4, 5, 6]] = False  # a child of the root, and what hangs below
    laws = jnp.asarray(rng.random((2, shape.num_nodes, 5)))
    tree = tree_lib.from_topology(shape, tokens, jnp.asarray(valid), draft_probs=laws, draft_ids=jnp.arange(5))
    parents = jnp.asarray([shape.parents] * 2)
    same = tree_lib.from_parents(tokens, parents, max_depth=3, draft_probs=laws, draft_ids=jnp.arange(5))
    assert jax.tree.structure(tree) == jax.tree.structure(same)
    for name in ("tokens", "depth", "mask", "draft_probs", "draft_ids"):
        one, other = getattr(tree, name), getattr(same, name)
        assert np.array_equal(one, other) and one.dtype == other.dtype, name
    assert tree.parents.tolist() == [list(shape.parents), [-1, 0, -2, 1, -2, -2, -2]]
    assert tree.parents.dtype == jnp.int32
    assert tree_lib.offered_depth(tree).tolist() == [3, 2]
