"""Which static trees accept the most tokens, and how many.

Both papers take a node's acceptance from its rank among its siblings, and a path's as the product along it:

* Medusa (Cai et al., arXiv:2401.10774, section 2.3.3): one accuracy per head and rank. `topology.grow` adds the
  likeliest connected node until there are enough.
* Sequoia (Chen et al., arXiv:2402.12374): one acceptance per rank, the same at every depth, with siblings drawn without
  replacement. `Optimum` finds the best tree of every size and depth by dynamic programming, `best` the one to use on
  hardware whose times are known.

Where acceptance falls with rank both find trees of the same value; where it does not, the second tries siblings in the
order of their ranks all the same, as a verifier does.

Differs from Sequoia's released code: depth is counted in edges, so that it is the number of draft calls.

Plain NumPy on the host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from jspec import topology as topology_lib


def expected_tokens(topology: topology_lib.Topology, acceptance: Sequence[Sequence[float]]) -> float:
    """Tokens of a round that proposes this tree: 1 + the sum over nodes of the product of acceptances along their path.

    Medusa, section 2.3.3, but for the token that every round emits.

    Args:
      topology: the tree.
      acceptance: `acceptance[d][r]`: how often the candidate of rank r at depth d + 1 is accepted, once its parent is.

    Raises:
      ValueError: a node has no acceptance.
    """
    value = [1.0]
    for node in range(1, topology.num_nodes):
        depth, rank = topology.depth[node], topology.ranks[node]
        if depth > len(acceptance) or rank >= len(acceptance[depth - 1]):
            raise ValueError(f"no acceptance is given for rank {rank} at depth {depth}")
        value.append(value[topology.parents[node]] * acceptance[depth - 1][rank])
    return float(sum(value))


@dataclasses.dataclass(frozen=True)
class _Level:
    """Best trees of no more than some depth.

    tokens:   `[M + 1]` expected tokens of the best tree of m nodes; -inf where there is none.
    children: `[M + 1]` how many children its root has.
    last:     `[B + 1, M + 1]` nodes below the last of b children in the best tree of m nodes whose root has just those.
    """

    tokens: np.ndarray
    children: np.ndarray
    last: np.ndarray


def _fill(acceptance: np.ndarray, num_nodes: int, below: np.ndarray | None) -> _Level:
    """Sequoia's recursion: a root of b children is a root of b - 1, and a last child with a tree of its own.

    Args:
      acceptance: `[B]` by rank.
      num_nodes: M, of the largest tree.
      below: `[M + 1]` expected tokens of the best trees that may hang from the root; None where depth has no limit:
        then they are the trees that are being found, and only smaller ones are asked for.
    """
    branches = len(acceptance)
    by_children = np.full((branches + 1, num_nodes + 1), -np.inf)
    by_children[0, 1] = 1
    last = np.zeros((branches + 1, num_nodes + 1), int)
    tokens = np.full(num_nodes + 1, -np.inf)
    tokens[1] = 1
    below = tokens if below is None else below
    for size in range(2, num_nodes + 1):
        hanging = below[1:size]  # of 1 .. size - 1 nodes
        possible = np.isfinite(hanging)
        for b in range(1, branches + 1):
            gain = np.where(possible, acceptance[b - 1] * np.where(possible, hanging, 0), -np.inf)
            values = by_children[b - 1, size - 1 : 0 : -1] + gain
            last[b, size] = np.argmax(values) + 1
            by_children[b, size] = values[last[b, size] - 1]
        tokens[size] = by_children[:, size].max()
    return _Level(tokens, by_children.argmax(axis=0), last)


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The best trees of every size up to `num_nodes` and every depth up to `max_depth`.

    acceptance: by rank: how often the child of that rank is the one accepted, once its parent is. Their sum is at most
      1. Trees have no more children per node than this has entries.
    num_nodes:  of the largest tree, the root included.
    max_depth:  of the deepest, in edges; None has no limit.
    """

    acceptance: tuple[float, ...]
    num_nodes: int
    max_depth: int | None = None

    def __post_init__(self):
        if not self.acceptance or not all(0 <= value <= 1 for value in self.acceptance):
            raise ValueError(f"acceptance {list(self.acceptance)} is no list of probabilities")
        if sum(self.acceptance) > 1 + 1e-9:
            raise ValueError(
                f"acceptance {list(self.acceptance)} sums to {sum(self.acceptance):.4g}; at most one child is accepted"
            )
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes {self.num_nodes} is below 1")
        if self.max_depth is not None and self.max_depth < 0:
            raise ValueError(f"max_depth {self.max_depth} is below 0")

    @functools.cached_property
    def _levels(self) -> tuple[_Level, ...]:
        """By depth, from 0; only the one without limit where depth has none."""
        acceptance = np.asarray(self.acceptance)
        if self.max_depth is None:
            return (_fill(acceptance, self.num_nodes, None),)
        nothing = np.full(self.num_nodes + 1, -np.inf)
        levels = [_fill(acceptance, self.num_nodes, nothing)]
        for _ in range(self.max_depth):
            levels.append(_fill(acceptance, self.num_nodes, levels[-1].tokens))
        return tuple(levels)

    def tokens(self, max_depth: int | None = None) -> np.ndarray:
        """Expected tokens by size: `[num_nodes + 1]`, entry m for trees of m nodes, the token that every round emits
        included; -inf where no tree has so many (and at 0).

        Args:
          max_depth: of the trees; None means the deepest.
        """
        return self._levels[self._place(max_depth)].tokens

    def topology(self, num_nodes: int | None = None, max_depth: int | None = None) -> topology_lib.Topology:
        """The best tree of exactly so many nodes.

        Args:
          num_nodes: the root included; None means the largest.
          max_depth: as in `tokens`.

        Raises:
          ValueError: no tree of that depth has so many nodes.
        """
        num_nodes = self.num_nodes if num_nodes is None else num_nodes
        place = self._place(max_depth)
        if not 1 <= num_nodes <= self.num_nodes or not np.isfinite(self._levels[place].tokens[num_nodes]):
            depth = "any depth" if self.max_depth is None else f"depth {place}"
            raise ValueError(
                f"num_nodes {num_nodes}: no tree of {depth} with {len(self.acceptance)} children per node was found; "
                f"the search went up to {self.num_nodes} nodes"
            )
        choices: list[tuple[int, ...]] = []
        waiting = [((), num_nodes, place)]
        while waiting:
            path, size, place = waiting.pop()
            level = self._levels[place]
            for rank in range(int(level.children[size]) - 1, -1, -1):
                hanging = int(level.last[rank + 1, size])
                choices.append((*path, rank))
                waiting.append(((*path, rank), hanging, max(place - 1, 0)))
                size -= hanging
        return topology_lib.from_choices(choices)

    def _place(self, max_depth: int | None) -> int:
        if max_depth is None:
            return len(self._levels) - 1
        if self.max_depth is None or not 0 <= max_depth <= self.max_depth:
            limit = "none was searched by depth" if self.max_depth is None else f"0 to {self.max_depth} were searched"
            raise ValueError(f"max_depth {max_depth}: {limit}")
        return max_depth


@dataclasses.dataclass(frozen=True)
class Best:
    """A tree chosen for given hardware.

    topology: the tree.
    tokens:   expected of a round.
    speedup:  expected, over autoregressive decoding.
    """

    topology: topology_lib.Topology
    tokens: float
    speedup: float


def best(optimum: Optimum, target_times: Mapping[int, float], draft_time: float) -> Best:
    """The tree with the largest speedup: size and depth that minimise `(depth * t_draft + t_target(size)) / tokens`.

    Sequoia, the hardware-aware choice. A chain of no drafts is among the candidates.

    Args:
      optimum: the candidates, searched by depth.
      target_times: time of a target pass by its number of nodes; sizes without one are no candidates. Needs 1.
      draft_time: of one draft call, which drafts one level, in the same unit.

    Raises:
      ValueError: depth has no limit, a time is missing, or a time is not above 0.
    """
    if optimum.max_depth is None:
        raise ValueError("max_depth is not given: without it depth, which costs draft calls, is not known")
    if 1 not in target_times:
        raise ValueError(f"target_times has {sorted(target_times)}: the time of a pass over 1 node is missing")
    if min(target_times.values()) <= 0 or draft_time < 0:
        raise ValueError(f"target_times {dict(target_times)} and draft_time {draft_time}: times are above 0")
    size, depth, tokens, speedup = 1, 0, 1.0, 1.0
    for more in range(optimum.max_depth + 1):
        by_size = optimum.tokens(more)
        for nodes in sorted(nodes for nodes in target_times if 1 <= nodes <= optimum.num_nodes):
            gain = target_times[1] * by_size[nodes] / (more * draft_time + target_times[nodes])
            if gain > speedup:
                size, depth, tokens, speedup = nodes, more, float(by_size[nodes]), float(gain)
    return Best(optimum.topology(size, depth), tokens, speedup)
