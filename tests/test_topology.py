"""Static tree shapes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from jspec import topology

# Nodes at each depth, as counted from the released files.
PUBLISHED = {
    "mc_sim_7b_63": [10, 28, 23, 2],
    "vicuna_7b_stage1": [10, 32, 20, 1],
    "vicuna_7b_stage2": [10, 23, 23, 7],
    "vicuna_7b_stage1_ablation": [10, 21, 25, 7],
    "vicuna_13b_stage1": [10, 29, 23, 1],
    "vicuna_13b_stage2": [10, 19, 25, 9],
    "vicuna_33b_stage1": [10, 34, 19],
    "vicuna_33b_stage2": [10, 24, 24, 5],
    "zephyr_stage2": [10, 27, 23, 3],
    "eagle_25": [4, 8, 8, 3, 2],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trees(name):
    tree = topology.Tree(name=name).topology
    assert [len(tree.level(depth)) for depth in range(1, tree.max_depth + 1)] == PUBLISHED[name]
    assert tree.num_nodes == 1 + sum(PUBLISHED[name]) == (26 if name == "eagle_25" else 64)
    assert tree.num_ranks == (4 if name == "eagle_25" else 10)


def test_levels_are_spread_evenly():
    tree = topology.Tree(levels=(3, 4, 2)).topology
    #  0 -> 1 2 3;  4 nodes over 3: the first has two;  2 over 4: behind (0, 0) and (1, 0)
    assert tree.parents == (-1, 0, 0, 0, 1, 1, 2, 3, 4, 6)
    assert tree.ranks == (0, 0, 1, 2, 0, 1, 0, 0, 0, 0)
    with pytest.raises(ValueError, match=r"tree levels \[2, 0\]: each must be at least 1"):
        topology.levels((2, 0))


def test_a_tree_by_hand():
    tree = topology.from_choices([[1], [0], [1, 0], [0, 2], [0, 0], [0, 0, 1]])
    #  0 -> 1 (0), 2 (1);  1 -> 3 (0), 4 (2);  2 -> 5 (0);  3 -> 6 (1)
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 3)
    assert tree.ranks == (0, 0, 1, 0, 2, 0, 1)
    assert tree.depth == (0, 1, 1, 2, 2, 2, 3) and tree.max_depth == 3 and tree.num_ranks == 3
    assert tree.inner(0) == [0] and tree.inner(1) == [1, 2] and tree.inner(2) == [3] and tree.inner(3) == []
    assert tree.children(1) == [3, 4] and tree.ancestors(6) == [0, 1, 3, 6]
    assert not tree.is_chain and topology.chain(3).is_chain and topology.chain(0).num_nodes == 1
    assert topology.cartesian([1, 1, 1]) == topology.chain(3)


def test_cartesian_sizes():
    """Medusa, section 2.1.2: the sum over depths of the product of the widths so far."""
    for widths in [(2, 3), (4, 1, 2), (3,)]:
        tree = topology.cartesian(widths)
        assert tree.num_nodes == 1 + sum(math.prod(widths[:depth]) for depth in range(1, len(widths) + 1))
        for node, depth in enumerate(tree.depth):
            assert len(tree.children(node)) == (*widths, 0)[depth]


def test_greedy_growth_takes_the_likeliest_nodes():
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.3], [0.9]]
    values = {
        path: math.prod(accuracies[depth][rank] for depth, rank in enumerate(path))
        for length in (1, 2, 3)
        for path in itertools.product(*(range(len(row)) for row in accuracies[:length]))
    }
    best = sorted(values, key=values.get, reverse=True)
    for num_nodes in range(1, len(values) + 2):
        tree = topology.grow(accuracies, num_nodes)
        assert tree == topology.from_choices(best[: num_nodes - 1]) and tree.num_nodes == num_nodes
    # Equal values (a candidate that is always right): the parent comes first.
    assert topology.grow([[1.0, 0.0], [1.0]], 3) == topology.chain(2)
    with pytest.raises(ValueError, match="num_nodes 17 is more than the 16"):
        topology.grow(accuracies, 17)
    with pytest.raises(ValueError, match="num_nodes 0 is below 1"):
        topology.grow(accuracies, 0)
    with pytest.raises(ValueError, match=r"accuracies \[1.5\] are no probabilities"):
        topology.grow([[1.5]], 2)


def test_growth_is_the_best_of_all_trees():
    accuracies = np.random.default_rng(0).dirichlet(np.ones(3), 2).round(3).tolist()
    paths = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    value = lambda path: math.prod(accuracies[depth][rank] for depth, rank in enumerate(path))
    connected = lambda nodes: all(path[:-1] in nodes or len(path) == 1 for path in nodes)
    best = max(
        (nodes for nodes in itertools.combinations(paths, 5) if connected(nodes)), key=lambda n: sum(map(value, n))
    )
    assert topology.grow(accuracies, 6) == topology.from_choices(best)


def test_a_tree_from_accuracies_as_a_setting():
    """.5, .25 (0 0), .2, .1 (0 1 / 1 0) ...: the root and the three best of them."""
    tree = topology.Tree(accuracies=((0.5, 0.2), (0.5, 0.2)), num_nodes=4)
    assert tree.topology == topology.from_choices([(0,), (0, 0), (1,)])
    assert hash(tree) == hash(topology.Tree(accuracies=((0.5, 0.2), (0.5, 0.2)), num_nodes=4))


def test_a_tree_from_acceptance_by_rank_as_a_setting():
    """.6, .3, .36 (0 0), .18 (0 1 / 1 0), .216 (0 0 0): without a limit the chain of three comes before the others."""
    deep = topology.Tree(acceptance=(0.6, 0.3), num_nodes=5)
    assert deep.topology == topology.from_choices([(0,), (0, 0), (1,), (0, 0, 0)])
    flat = topology.Tree(acceptance=(0.6, 0.3), num_nodes=5, max_depth=2)
    # .18 twice: either child of the second depth is as good.
    assert flat.topology.max_depth == 2 and flat.topology.level(1) == [1, 2]
    assert hash(flat) == hash(topology.Tree(acceptance=(0.6, 0.3), num_nodes=5, max_depth=2))


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"choices": ((0,), (1, 0))}, r"tree choice \[1, 0\] has no ancestor: \[1\] is not among the choices"),
        ({"choices": ((0,), ())}, r"tree choice \[\] is no path of ranks"),
        ({"choices": ((0,), (-1,))}, r"tree choice \[-1\] is no path of ranks"),
        ({"choices": ((0,), (0,))}, r"tree choice \[0\] is named twice"),
        ({"choices": ()}, "tree proposes nothing"),
        ({"widths": (2, 0)}, r"tree widths \[2, 0\]: each must be at least 1"),
        ({"name": "vicuna"}, "tree 'vicuna' is not published; known are eagle_25, mc_sim_7b_63"),
        ({}, "tree needs exactly one of name, choices, widths, levels, accuracies and acceptance; got name None"),
        ({"accuracies": ((0.5, 0.2),)}, "num_nodes belongs to accuracies or acceptance, and they to it"),
        ({"acceptance": (0.5, 0.2)}, "num_nodes belongs to accuracies or acceptance, and they to it"),
        ({"widths": (2,), "num_nodes": 3}, "num_nodes belongs to accuracies or acceptance, and they to it"),
        ({"widths": (2,), "max_depth": 3}, "max_depth 3 belongs to acceptance"),
        ({"acceptance": (0.5, 0.7), "num_nodes": 3}, r"acceptance \[0.5, 0.7\] sums to 1.2"),
        ({"acceptance": (0.5, 0.2), "num_nodes": 8, "max_depth": 2}, "num_nodes 8: no tree of depth 2 with 2 children"),
        ({"accuracies": ((0.5, 0.2),), "num_nodes": 4}, "num_nodes 4 is more than the 3"),
        ({"accuracies": ((0.5,),), "num_nodes": 1}, "tree proposes nothing"),
        ({"name": "eagle_25", "widths": (2,)}, "tree needs exactly one of"),
    ],
)
def test_bad_trees(settings, words):
    with pytest.raises(ValueError, match=words):
        topology.Tree(**settings)
