"""Pictures of a training run."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib
import matplotlib.figure

from jspec import files


def draw(path: pathlib.Path, losses: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]) -> None:
    """Loss by step, and acceptance by depth on held-out answers, as a PNG.

    Args:
      path: of the picture.
      losses: `step` and `loss` of each step.
      evaluations: `step`, `loss` and `chain` (by depth) of each evaluation.
    """
    figure = matplotlib.figure.Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [line["step"] for line in losses]
    left.plot(steps, [line["loss"] for line in losses], color="0.8", linewidth=0.8, label="batch")
    left.plot(steps, _smooth([line["loss"] for line in losses]), color="C0", label="batch, smoothed")
    at = [record["step"] for record in evaluations]
    left.plot(at, [record["loss"] for record in evaluations], "o-", color="C3", markersize=4, label="held out")
    left.set(xlabel="step", ylabel="loss", title="Loss")
    left.legend(frameon=False)
    depths = len(evaluations[0]["chain"]) if evaluations else 0
    for depth in range(depths):
        color = matplotlib.colormaps["viridis"](depth / max(1, depths - 1) * 0.85)
        chain = [record["chain"][depth] for record in evaluations]
        right.plot(at, chain, "o-", color=color, markersize=4, label=f"draft {depth + 1}")
    right.set(
        xlabel="step", ylabel="share of held-out places", title="Greedy chain accepted to this depth", ylim=(0, None)
    )
    right.legend(frameon=False, fontsize="small")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=130)
    files.replace(path, lambda file: file.write(content.getvalue()))


def _smooth(values: Sequence[float], weight: float = 0.95) -> list[float]:
    """Exponential mean without the bias of its start."""
    smoothed, mean, total = [], 0.0, 0.0
    for value in values:
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        smoothed.append(mean / total)
    return smoothed
