"""Static tree shapes: which candidates of which depth are proposed, whatever their tokens turn out to be.

A shape is written as Medusa writes it (Cai et al., arXiv:2401.10774, section 2.1.2): each choice is a path of ranks, so
`[0, 2]` is the third-best candidate behind the best one. Every prefix of a choice must be a choice itself.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import importlib.resources
import itertools
import json
from collections.abc import Iterable, Sequence

Choice = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Topology:
    """The shape of a token tree: nodes by depth, siblings side by side and in the order of their ranks.

    parents: index of each node's parent; -1 at the root, which is node 0.
    ranks:   which candidate of its parent each node takes, 0 the best; 0 at the root.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        """The root included."""
        return len(self.parents)

    @functools.cached_property
    def depth(self) -> tuple[int, ...]:
        """Of each node, in edges."""
        depth = [0]
        for parent in self.parents[1:]:
            depth.append(depth[parent] + 1)
        return tuple(depth)

    @property
    def max_depth(self) -> int:
        return max(self.depth)

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.num_nodes == self.max_depth + 1

    @property
    def num_ranks(self) -> int:
        """Candidates that a node needs at most."""
        return max(self.ranks) + 1

    def level(self, depth: int) -> list[int]:
        """Nodes at a depth."""
        return [node for node, at in enumerate(self.depth) if at == depth]

    def inner(self, depth: int) -> list[int]:
        """Nodes at a depth that have children."""
        parents = set(self.parents)
        return [node for node in self.level(depth) if node in parents]

    def children(self, node: int) -> list[int]:
        """Of a node, the best candidate first."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def ancestors(self, node: int) -> list[int]:
        """From the root down, the node itself included."""
        line = [node]
        while self.parents[line[0]] >= 0:
            line.insert(0, self.parents[line[0]])
        return line


def from_choices(choices: Iterable[Sequence[int]]) -> Topology:
    """The tree of a list of choices, in any order.

    Raises:
      ValueError: a choice is empty, negative or named twice, or one of its prefixes is no choice.
    """
    paths: list[Choice] = [tuple(choice) for choice in choices]
    given = set(paths)
    for path in paths:
        if not path or min(path) < 0:
            raise ValueError(f"tree choice {list(path)} is no path of ranks from 0 up")
        if path[:-1] and path[:-1] not in given:
            raise ValueError(f"tree choice {list(path)} has no ancestor: {list(path[:-1])} is not among the choices")
    if len(given) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"tree choice {list(twice)} is named twice")
    ordered = sorted(given, key=lambda path: (len(path), path))
    index = {(): 0} | {path: place for place, path in enumerate(ordered, start=1)}
    return Topology((-1, *(index[path[:-1]] for path in ordered)), (0, *(path[-1] for path in ordered)))


def chain(gamma: int) -> Topology:
    """One candidate at each of gamma depths."""
    return Topology(tuple(range(-1, gamma)), (0,) * (gamma + 1))


def _check_sizes(what: str, sizes: Sequence[int]) -> None:
    if any(size < 1 for size in sizes):
        raise ValueError(f"tree {what} {list(sizes)}: each must be at least 1")


def cartesian(widths: Sequence[int]) -> Topology:
    """The best `widths[d]` candidates behind every node of depth d: sum over d of their product nodes, and the root.

    Raises:
      ValueError: a width is below 1.
    """
    _check_sizes("widths", widths)
    return from_choices(
        path for depth in range(1, len(widths) + 1) for path in itertools.product(*map(range, widths[:depth]))
    )


def levels(sizes: Sequence[int]) -> Topology:
    """So many nodes at each depth, spread evenly over those above: each of these has its best candidates.

    Raises:
      ValueError: a size is below 1.
    """
    _check_sizes("levels", sizes)
    above: list[Choice] = [()]
    choices: list[Choice] = []
    for size in sizes:
        above = [(*above[i % len(above)], i // len(above)) for i in range(size)]
        choices += above
    return from_choices(choices)


@functools.cache
def _published() -> dict[str, list[list[int]]]:
    return json.loads(importlib.resources.files("jspec").joinpath("published_trees.json").read_text())


def published(name: str) -> Topology:
    """A tree of the papers by name: the nine that Medusa released, and `eagle_25` (EAGLE-1).

    Raises:
      ValueError: the name is none of them.
    """
    if name not in _published():
        raise ValueError(f"tree {name!r} is not published; known are {', '.join(sorted(_published()))}")
    return from_choices(_published()[name])


def grow(accuracies: Sequence[Sequence[float]], num_nodes: int) -> Topology:
    """The tree of the most accepted tokens: add the likeliest connected node until there are enough.

    Medusa, section 2.3.3. A node is accepted with the product of the accuracies along its path, taken as independent.

    Args:
      accuracies: `accuracies[d][r]`: how often candidate r of depth d + 1 is the right one.
      num_nodes: of the tree, the root included.

    Raises:
      ValueError: fewer nodes than a root, or more than the accuracies describe.
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes {num_nodes} is below 1")
    for row in accuracies:
        if not row or not all(0 <= value <= 1 for value in row):
            raise ValueError(f"accuracies {list(row)} are no probabilities")
    chosen: list[Choice] = []
    waiting: list[tuple[float, int, Choice]] = []

    def consider_children(path: Choice, value: float) -> None:
        for rank, accuracy in enumerate(accuracies[len(path)] if len(path) < len(accuracies) else ()):
            # Ties go to the shallower node, so that no child comes before its parent.
            heapq.heappush(waiting, (-value * accuracy, len(path) + 1, (*path, rank)))

    consider_children((), 1.0)
    while len(chosen) < num_nodes - 1:
        if not waiting:
            raise ValueError(f"num_nodes {num_nodes} is more than the {len(chosen) + 1} that the accuracies describe")
        negated, _, path = heapq.heappop(waiting)
        chosen.append(path)
        consider_children(path, -negated)
    return from_choices(chosen)


@dataclasses.dataclass(frozen=True)
class Tree:
    """A static tree as a setting: exactly one of `name`, `choices`, `widths`, `levels`, `accuracies` and `acceptance`.

    name:       a published tree (see `published`).
    choices:    paths of ranks.
    widths:     candidates behind every node of each depth: a Cartesian product.
    levels:     nodes at each depth, spread evenly over those above.
    accuracies: how often candidate r of depth d is the right one, row d, column r: the tree of `num_nodes` nodes that
                accepts most (see `grow`).
    acceptance: how often the candidate of each rank is the one accepted, at whatever depth: Sequoia's tree of
                `num_nodes` nodes, by dynamic programming (`optimal_trees.Optimum`).
    num_nodes:  of those trees, the root included.
    max_depth:  of Sequoia's tree, in edges; None has no limit.
    """

    name: str | None = None
    choices: tuple[tuple[int, ...], ...] | None = None
    widths: tuple[int, ...] | None = None
    levels: tuple[int, ...] | None = None
    accuracies: tuple[tuple[float, ...], ...] | None = None
    acceptance: tuple[float, ...] | None = None
    num_nodes: int | None = None
    max_depth: int | None = None

    def __post_init__(self):
        given = {name: value for name, value in vars(self).items() if name not in ("num_nodes", "max_depth")}
        if sum(value is not None for value in given.values()) != 1:
            names, values = list(given), ", ".join(f"{name} {value!r}" for name, value in given.items())
            expected = f"{', '.join(names[:-1])} and {names[-1]}"
            raise ValueError(f"tree needs exactly one of {expected}; got {values}")
        if (self.accuracies is None and self.acceptance is None) != (self.num_nodes is None):
            raise ValueError("tree: num_nodes belongs to accuracies or acceptance, and they to it")
        if self.max_depth is not None and self.acceptance is None:
            raise ValueError(f"tree: max_depth {self.max_depth} belongs to acceptance")
        if self.topology.num_nodes < 2:
            raise ValueError("tree proposes nothing")

    @functools.cached_property
    def topology(self) -> Topology:
        """The shape."""
        if self.name is not None:
            return published(self.name)
        if self.accuracies is not None:
            return grow(self.accuracies, self.num_nodes)
        if self.acceptance is not None:
            from jspec import optimal_trees  # which is about the shapes of this file

            return optimal_trees.Optimum(self.acceptance, self.num_nodes, self.max_depth).topology()
        if self.choices is not None:
            return from_choices(self.choices)
        return cartesian(self.widths) if self.widths is not None else levels(self.levels)
