"""Optimal trees against every small tree there is."""

import itertools

import numpy as np
import pytest

from jspec import optimal_trees, theory, topology, tree

FALLING = (0.5, 0.2, 0.1)
RISING = (0.1, 0.2, 0.5)  # a verifier tries rank 0 first all the same
WITH_ZERO = (0.4, 0.0, 0.3)


def every_tree(num_nodes, branches, max_depth):
    """Choices of every tree of so many nodes whose nodes have children of ranks 0, 1, .. without gaps."""
    found, waiting = set(), [frozenset()]
    while waiting:
        choices = waiting.pop()
        if len(choices) == num_nodes - 1:
            found.add(choices)
            continue
        for path in ((), *choices):
            rank = sum(other[:-1] == path for other in choices if len(other) == len(path) + 1)
            if rank < branches and len(path) < max_depth:
                grown = choices | {(*path, rank)}
                if grown not in found:
                    waiting.append(grown)
                    found.add(grown)
    return [choices for choices in found if len(choices) == num_nodes - 1]


def value(choices, acceptance):
    return 1 + sum(np.prod([acceptance[rank] for rank in path]) for path in choices)


def test_every_tree_is_listed_once():
    # Ordered trees of n nodes: the Catalan numbers. Of at most two children: the Motzkin numbers.
    assert [len(every_tree(n, 9, 9)) for n in range(1, 7)] == [1, 1, 2, 5, 14, 42]
    assert [len(every_tree(n, 2, 9)) for n in range(1, 7)] == [1, 1, 2, 4, 9, 21]


@pytest.mark.parametrize("acceptance", [FALLING, RISING, WITH_ZERO, (0.9,), (0.3, 0.3, 0.3)])
@pytest.mark.parametrize("max_depth", [None, 1, 2, 3])
def test_no_small_tree_is_better(acceptance, max_depth):
    optimum = optimal_trees.Optimum(acceptance, 7, max_depth)
    for num_nodes in range(1, 8):
        trees = every_tree(num_nodes, len(acceptance), 9 if max_depth is None else max_depth)
        if not trees:
            assert optimum.tokens()[num_nodes] == -np.inf
            with pytest.raises(ValueError, match=f"num_nodes {num_nodes}: no tree of depth {max_depth}"):
                optimum.topology(num_nodes)
            continue
        best = max(value(choices, acceptance) for choices in trees)
        assert optimum.tokens()[num_nodes] == pytest.approx(best, abs=1e-12)
        found = optimum.topology(num_nodes)
        assert found.num_nodes == num_nodes and (max_depth is None or found.max_depth <= max_depth)
        levels = [acceptance] * max(found.max_depth, 1)
        assert optimal_trees.expected_tokens(found, levels) == pytest.approx(best, abs=1e-12)


def test_by_hand():
    """Three nodes: a chain emits 1 + .5 + .25, two children 1 + .5 + .2; with a second rank of .3 the other wins."""
    chain = optimal_trees.Optimum((0.5, 0.2), 3)
    assert chain.topology() == topology.chain(2) and chain.tokens()[3] == pytest.approx(1.75)
    wide = optimal_trees.Optimum((0.5, 0.3), 3)
    assert wide.topology() == topology.cartesian([2]) and wide.tokens()[3] == pytest.approx(1.8)


def test_depth_limits_are_searched_together():
    deep = optimal_trees.Optimum(FALLING, 12, 4)
    for depth in range(5):
        alone = optimal_trees.Optimum(FALLING, 12, depth)
        np.testing.assert_array_equal(deep.tokens(depth), alone.tokens())
    assert deep.topology(4, 1) == topology.cartesian([3])
    np.testing.assert_array_equal(
        optimal_trees.Optimum(FALLING, 12).tokens(), optimal_trees.Optimum(FALLING, 12, 11).tokens()
    )


def test_medusas_growth_finds_trees_of_the_same_value_where_acceptance_falls():
    for depth, num_nodes in itertools.product((2, 4), (5, 20)):
        grown = topology.grow([FALLING] * depth, min(num_nodes, 13 if depth == 2 else 20))
        found = optimal_trees.Optimum(FALLING, grown.num_nodes, depth)
        levels = [FALLING] * depth
        assert optimal_trees.expected_tokens(grown, levels) == pytest.approx(found.tokens()[grown.num_nodes])


def test_expected_tokens_of_a_sparse_tree():
    """Medusa's sum by hand, with other accuracies at the second depth."""
    shape = topology.from_choices([[0], [1], [0, 0], [1, 2]])
    accuracies = [[0.6, 0.2], [0.5, 0.1, 0.05]]
    expected = 1 + 0.6 + 0.2 + 0.6 * 0.5 + 0.2 * 0.05
    assert optimal_trees.expected_tokens(shape, accuracies) == pytest.approx(expected)
    chain = optimal_trees.expected_tokens(topology.chain(5), [[0.7]] * 5)
    assert chain == pytest.approx(theory.expected_tokens(0.7, 5))
    with pytest.raises(ValueError, match="no acceptance is given for rank 2 at depth 2"):
        optimal_trees.expected_tokens(shape, [[0.6, 0.2], [0.5]])


def test_a_tree_of_choices_is_what_the_decoder_takes():
    found = optimal_trees.Optimum(FALLING, 16).topology()
    # Topological order with siblings side by side, as `Topology` promises; and a setting can name it.
    assert all(parent < node for node, parent in enumerate(found.parents))
    paths = [tuple(found.ranks[node] for node in found.ancestors(node)[1:]) for node in range(1, 16)]
    assert topology.Tree(choices=tuple(paths)).topology == found
    tokens = np.arange(found.num_nodes)[None]
    proposed = tree.from_topology(found, tokens, np.ones_like(tokens, bool))
    np.testing.assert_array_equal(proposed.parents[0], found.parents)


def test_the_best_tree_weighs_its_time():
    optimum = optimal_trees.Optimum(FALLING, 32, 6)
    free = optimal_trees.best(optimum, {size: 1.0 for size in range(1, 33)}, 0.0)
    assert free.topology.num_nodes == 32 and free.speedup == pytest.approx(optimum.tokens()[32])
    # Draft calls as slow as the target's: 1 + .5 + .2 + .1 tokens for two steps is a loss.
    none = optimal_trees.best(optimum, {size: 1.0 for size in range(1, 33)}, 1.0)
    assert none == optimal_trees.Best(topology.chain(0), 1.0, 1.0)
    times = {1: 10.0, 2: 10.5, 4: 11.0, 8: 14.0, 16: 25.0, 32: 50.0}
    found = optimal_trees.best(optimum, times, 0.5)
    every = {
        (size, depth): 10 * optimum.tokens(depth)[size] / (depth * 0.5 + time)
        for size, time in times.items()
        for depth in range(7)
    }
    assert found.speedup == pytest.approx(max(every.values())) and found.speedup > 1.5
    assert found.tokens == pytest.approx(optimum.tokens(found.topology.max_depth)[found.topology.num_nodes])


def test_bad_input():
    optimum = optimal_trees.Optimum(FALLING, 4)
    for make, words in (
        (lambda: optimal_trees.Optimum((), 4), "is no list of probabilities"),
        (lambda: optimal_trees.Optimum((0.5, -0.1), 4), "is no list of probabilities"),
        (lambda: optimal_trees.Optimum((0.8, 0.3), 4), "sums to 1.1; at most one"),
        (lambda: optimal_trees.Optimum(FALLING, 0), "num_nodes 0 is below 1"),
        (lambda: optimal_trees.Optimum(FALLING, 4, -1), "max_depth -1 is below 0"),
        (lambda: optimum.topology(5), "num_nodes 5: .* the search went up to 4 nodes"),
        (lambda: optimum.tokens(2), "max_depth 2: none was searched by depth"),
        (lambda: optimal_trees.Optimum(FALLING, 4, 1).tokens(2), "max_depth 2: 0 to 1 were searched"),
        (lambda: optimal_trees.best(optimum, {1: 1.0}, 0.1), "max_depth is not given"),
        (lambda: optimal_trees.best(optimal_trees.Optimum(FALLING, 4, 2), {2: 1.0}, 0.1), "pass over 1 node"),
        (lambda: optimal_trees.best(optimal_trees.Optimum(FALLING, 4, 2), {1: 0.0}, 0.1), "times are above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
