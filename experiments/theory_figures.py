"""The papers' theory as pictures: light background, one file each."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from experiments import relations
from jspec import exact_acceptance, files, optimal_trees, theory, topology

_ALPHAS = np.linspace(0, 1, 201)
_LEVIATHAN = "Leviathan et al. 2023"


def expected_tokens(path: pathlib.Path, gammas: Sequence[int]) -> None:
    """Leviathan et al., figure 2: tokens per round against alpha, a curve per gamma and the bound of all."""
    figure, axes = _new()
    for gamma, color in _shades(gammas):
        tokens = [theory.expected_tokens(alpha, gamma) for alpha in _ALPHAS]
        axes.plot(_ALPHAS, tokens, color=color, label=f"gamma = {gamma}")
    bound = [theory.oracle_tokens(alpha) for alpha in _ALPHAS]
    axes.plot(_ALPHAS, bound, color="0.3", linestyle="--", label="1 / (1 - alpha), any gamma")
    axes.set(xlabel="acceptance rate alpha", ylabel="tokens per target call", xlim=(0, 1), ylim=(1, max(gammas) + 1))
    axes.set_title(f"{_LEVIATHAN}, figure 2: expected tokens of a round")
    _save(figure, path)


def best_gamma(path: pathlib.Path, costs: Sequence[float], max_gamma: int = 20) -> None:
    """Leviathan et al., figure 3: the integer gamma of the largest speedup against alpha, a curve per c."""
    figure, axes = _new()
    alphas = np.linspace(0.2, 0.95, 301)
    for c, color in _shades(costs):
        # One further than is shown, so that a curve that leaves the picture is seen to leave it.
        best = [theory.best_gamma(alpha, c, max_gamma + 1) for alpha in alphas]
        axes.plot(alphas, best, color=color, drawstyle="steps-mid", label=f"c = {c:g}")
    axes.set(xlabel="acceptance rate alpha", ylabel="best draft length gamma (integer)", ylim=(0, max_gamma))
    axes.yaxis.set_major_locator(matplotlib.ticker.MultipleLocator(2))
    axes.set_title(f"{_LEVIATHAN}, figure 3: best gamma")
    _save(figure, path)


def speedup_and_operations(path: pathlib.Path, gammas: Sequence[int]) -> None:
    """Leviathan et al., figure 4: speedup and operations against alpha, a colour per gamma; c = c_hat = 0."""
    figure, axes = _new()
    for gamma, color in _shades(gammas):
        speedups = [theory.speedup(alpha, gamma, 0.0) for alpha in _ALPHAS]
        operations = [theory.operations_increase(alpha, gamma, 0.0) for alpha in _ALPHAS]
        axes.plot(_ALPHAS, speedups, color=color, label=f"speedup, gamma = {gamma}")
        axes.plot(_ALPHAS, operations, color=color, linestyle="--", label=f"operations, gamma = {gamma}")
    limit = max(gammas) + 1
    axes.set(xlabel="acceptance rate alpha", ylabel="factor over autoregressive decoding", xlim=(0, 1), ylim=(0, limit))
    axes.set_title(f"{_LEVIATHAN}, figure 4: speedup and operations at c = c_hat = 0")
    _save(figure, path, columns=2)


def tau_against_speedup(path: pathlib.Path) -> None:
    """Printed pairs of tau and speedup, over lines of equal overhead: Medusa's and EAGLE's relation."""
    figure, axes = _new(width=8.5)
    pairs = relations.tau_and_speedup()
    longest = max(tau for points in pairs.values() for tau, _ in points) + 0.5
    for overhead in (1.0, 1.25, 1.5, 2.0):
        axes.plot([0, longest], [0, theory.speedup_of_rounds(longest, overhead)], color="0.8", zorder=0)
        place = longest, theory.speedup_of_rounds(longest, overhead)
        axes.annotate(f"{overhead:g}", place, xytext=(4, 0), textcoords="offset points", va="center", color="0.4")
    for index, (method, points) in enumerate(sorted(pairs.items())):
        label = f"{method}: median overhead {relations.median_overhead(points):.2f}"
        axes.scatter(*zip(*points), s=22, alpha=0.75, color=f"C{index}", marker="osD^v"[index % 5], label=label)
    axes.set(xlabel="tau, tokens per target call", ylabel="speedup over autoregressive decoding")
    axes.set(xlim=(0.8, longest), ylim=(0.8, longest))
    axes.set_title("Medusa, EAGLE 1-3, Lookahead as printed: speedup = tau / overhead\n(grey: lines of equal overhead)")
    _save(figure, path)


def tree_sizes(
    path: pathlib.Path, optimum: optimal_trees.Optimum, draft_time: float, knees: Sequence[int]
) -> list[dict[str, Any]]:
    """Sequoia: tokens by tree size, of optimal trees and plainer ones, and speedup by size on a few machines.

    Args:
      path: of the picture.
      optimum: the trees, searched by depth.
      draft_time: of a draft call, over a target pass of one node.
      knees: of each machine, the nodes up to which a target pass costs what one node costs; it then grows in
        proportion.

    Returns:
      The best tree of each machine: knee, nodes, depth, tokens, speedup.
    """
    figure = matplotlib.figure.Figure(figsize=(12, 4.6), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    sizes = np.unique(np.geomspace(1, optimum.num_nodes, 60).astype(int))
    levels = [optimum.acceptance] * optimum.max_depth
    left.plot(sizes, optimum.tokens()[sizes], color="C0", label="optimal tree (dynamic programme)")
    binary = [topology.cartesian([2] * depth) for depth in range(1, min(optimum.max_depth, 12) + 1)]
    binary = [shape for shape in binary if shape.num_nodes <= optimum.num_nodes and len(optimum.acceptance) > 1]
    tokens = [optimal_trees.expected_tokens(shape, levels) for shape in binary]
    left.plot([shape.num_nodes for shape in binary], tokens, "s-", color="C1", markersize=4, label="full binary trees")
    chain = [theory.expected_tokens(optimum.acceptance[0], size - 1) for size in sizes]
    left.plot(sizes, chain, color="C2", linestyle="--", label="chain")
    left.set(xlabel="nodes of the tree, root included", ylabel="expected tokens per target call")
    given = ", ".join(f"{value:g}" for value in optimum.acceptance[:3])
    left.set_title(f"Sequoia (Chen et al. 2024): optimal trees by size\nfor acceptance by rank {given}, ...")
    best = []
    for knee, color in _shades(knees):
        times = {int(size): max(1.0, size / knee) for size in range(1, optimum.num_nodes + 1)}
        speedups = [
            max(
                optimum.tokens(depth)[size] / (depth * draft_time + times[int(size)])
                for depth in range(optimum.max_depth + 1)
            )
            for size in sizes
        ]
        right.plot(sizes, speedups, color=color, label=f"a pass costs one node's time up to {knee} nodes")
        found = optimal_trees.best(optimum, times, draft_time)
        nodes, depth = found.topology.num_nodes, found.topology.max_depth
        right.plot(nodes, found.speedup, "o", color=color)
        words, place = f"{nodes} nodes, depth {depth}", (nodes, found.speedup)
        right.annotate(words, place, xytext=(-4, 6), textcoords="offset points", ha="right", fontsize="small")
        best.append({"knee": knee, "nodes": nodes, "depth": depth, "tokens": found.tokens, "speedup": found.speedup})
    right.set(xlabel="nodes of the tree, root included", ylabel="speedup over autoregressive decoding")
    right.set_title(f"Sequoia: what they gain where a draft call\ncosts {draft_time:g} target passes, by machine")
    right.margins(y=0.12)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:.0f}"))
    _save(figure, path)
    return best


def block_verification(
    path: pathlib.Path, laws: Sequence[Any], max_gamma: int, measured: Sequence[Mapping[str, Any]]
) -> None:
    """Sun et al.: tokens per round by gamma, token by token and as a block; exact for given laws, and as printed.

    Args:
      path: of the picture.
      laws: with name, target and draft (see `exact_acceptance`).
      max_gamma: longest draft.
      measured: printed rows with gamma, token and block.
    """
    figure = matplotlib.figure.Figure(figsize=(12, 4.6), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    rules = {
        "block": (exact_acceptance.block_acceptance, "o-"),
        "token": (exact_acceptance.token_acceptance, "s--"),
        "bound": (exact_acceptance.block_bound, ":"),
    }
    for index, pair in enumerate(laws):
        for name, (rule, style) in rules.items():
            tokens = theory.tokens_by_depth(list(map(float, rule(pair.target, pair.draft, max_gamma))))
            gammas = range(1, max_gamma + 1)
            left.plot(gammas, tokens[1:], style, color=f"C{index}", markersize=4, label=f"{pair.name}: {name}")
    left.set_title("Block verification (Sun et al. 2024): exact, for given laws")
    for column, style in (("block", "o-"), ("token", "s--")):
        gammas = [row["gamma"] for row in measured]
        right.plot(gammas, [row[column] for row in measured], style, color="C3", label=f"{column} (measured)")
    right.set_title("Sun et al. 2024, as printed: PaLM-2-S, drafts by PaLM-2-XXS")
    for axes in (left, right):
        axes.set(xlabel="draft length gamma", ylabel="tokens per target call")
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    _save(figure, path)


def monte_carlo(path: pathlib.Path, records: Sequence[Mapping[str, Any]], tolerance: float) -> None:
    """Measured tokens per target call over the formula, with what short answers lead one to expect."""
    figure, axes = _new(width=8)
    places = np.arange(len(records))
    ratios = [100 * record["difference"] for record in records]
    exact = [100 * (record["exact"] / record["formula"] - 1) for record in records]
    axes.axhspan(-100 * tolerance, 100 * tolerance, color="0.93", zorder=0, label=f"within {100 * tolerance:g}%")
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.plot(places, ratios, "o", color="C0", label="measured in the decoding loop")
    axes.plot(places, exact, "_", color="C3", markersize=16, markeredgewidth=2, label="exact for answers this short")
    names = [f"{record['alpha']:g}\n{record['gamma']}\n{record['tau']:.3f}" for record in records]
    axes.set_xticks(places, names)
    axes.set(xlabel="alpha / gamma / measured tokens per call", ylabel="difference from the formula, %")
    axes.set_title(f"{_LEVIATHAN}, equation 1, through the real loop (synthetic verifier)")
    _save(figure, path)


def _new(width: float = 7.2) -> tuple[matplotlib.figure.Figure, Any]:
    figure = matplotlib.figure.Figure(figsize=(width, 4.8), layout="constrained", facecolor="white")
    return figure, figure.subplots()


def _shades(values: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each value with a colour; neighbours look alike."""
    scale = matplotlib.colormaps["viridis"]
    return [(value, scale(0.82 * index / max(1, len(values) - 1))) for index, value in enumerate(values)]


def _save(figure: matplotlib.figure.Figure, path: pathlib.Path, columns: int = 1) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize="small", ncols=columns)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=130)
    files.replace(path, lambda file: file.write(content.getvalue()))
