"""The report's figures, as SVG.

Text and lines are drawn in two stand-in colours, which become the page's own where a figure stands in a page (so that
it is legible in light and in dark), and fixed ones in a file of its own. The methods' colours are of middle lightness.
"""

from __future__ import annotations

import dataclasses
import io
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import matplotlib.axes
import matplotlib.figure
import numpy as np

from experiments import expectation, records, reported
from jspec import theory

# Stand-ins, and what they become in a file of its own.
_INK, _RULE = "#010203", "#040506"
_INK_ON_PAPER, _RULE_ON_PAPER = "#1f2328", "#d0d7de"

_COLORS = ("#3b82c4", "#d9722e", "#2f9e6e", "#b35cc0", "#b08900", "#d1495b", "#1a9aa8", "#92715f", "#7a869a")
_MARKERS = "osD^vPX*"
_WIDTH = 9.4  # inches
# Of text at the size below, in inches: pages have other fonts than the one that matplotlib measures.
_CHARACTER_WIDTH, _KEY_WIDTH, _LINE_HEIGHT = 0.076, 0.55, 0.21
_MAX_COLUMNS = 5

MEASURED_AND_EXPECTED = "measured_and_expected"

_STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be read, searched and takes the page's font
    "font.size": 9.5,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor", "xtick.color", "ytick.color"), _INK
    ),
    "legend.labelcolor": _INK,
    "grid.color": _RULE,
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
}


@dataclasses.dataclass(frozen=True)
class Picture:
    """One figure.

    name:    of its file, without the ending.
    title:   what it shows.
    caption: how to read it.
    drawing: SVG with stand-in colours.
    """

    name: str
    title: str
    caption: str
    drawing: str

    def inline(self) -> str:
        """For a page that sets `color` and `--rule`."""
        svg = self.drawing.replace(_INK, "currentColor").replace(_RULE, "var(--rule)")
        # Several drawings share a page: what they refer to within themselves must be theirs.
        svg = re.sub(r'\bid="([^"]+)"', rf'id="{self.name}-\1"', svg)
        svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{self.name}-\1)", svg)
        svg = re.sub(r'href="#([^"]+)"', rf'href="#{self.name}-\1"', svg)
        return svg.replace("<svg ", f'<svg role="img" aria-label="{self.title}" ', 1)

    def file(self) -> str:
        """For a file of its own, on white."""
        svg = self.drawing.replace(_INK, _INK_ON_PAPER).replace(_RULE, _RULE_ON_PAPER)
        start = svg.index(">", svg.index("<svg ")) + 1
        return svg[:start] + '<rect width="100%" height="100%" fill="#ffffff"/>' + svg[start:]


def draw(cells: Sequence[reported.Cell], prefix: str = "") -> list[Picture]:
    """All figures that the cells have something to show in, but for `measured_and_expected`.

    Args:
      cells: of one table, or of runs that are to be seen side by side.
      prefix: of the pictures' names; a page with several such groups has one for each.
    """
    methods = [cell for cell in cells if not cell.is_baseline]
    drafting = [cell for cell in methods if cell.depth > 0]
    colors = _Colors([cell.label for cell in methods])
    candidates = (
        (
            "speedup",
            "Speedup by task",
            "Tokens per second over autoregressive decoding's on the same prompts; bars are bootstrap intervals over "
            "prompts, missing where there was one prompt. Below the line decoding got slower.",
            _speedup([cell for cell in methods if cell.record.speedup is not None], colors),
        ),
        (
            "acceptance_by_position",
            "Acceptance by position",
            "Share of target calls that accepted the draft at each depth: of those that offered one there (full "
            "lines), and of those that tested one there, every shallower draft having been accepted (dashed). All "
            "tasks together.",
            _by_position(drafting, colors),
        ),
        (
            "accepted_lengths",
            "Accepted lengths",
            "Share of target calls that accepted exactly so many drafts. All tasks together; each call emits one "
            "token more.",
            _histograms(drafting, colors),
        ),
        (
            "tau_and_speedup",
            "Tau and speedup",
            "Every cell, and the line on which its timed parts put each method: tau * t_autoregressive / (t_verify + "
            "t_draft), the median over its cells. The dashed line is speculation for free, speedup = tau.",
            _tau_and_speedup(methods, colors),
        ),
        (
            "alpha_and_gamma",
            "Alpha, tau and gamma",
            "Chains of the same draft at several lengths. Dashed: (1 - alpha^(gamma + 1)) / (1 - alpha) with the "
            "alpha measured there, which equally likely and independent acceptances would give.",
            _alpha_and_gamma([cell for cell in drafting if cell.is_chain]),
        ),
    )
    drawn = [(f"{prefix}{name}", title, text, plot) for name, title, text, plot in candidates if plot is not None]
    return [Picture(name, title, text, _svg(name, plot)) for name, title, text, plot in drawn]


def measured_and_expected(
    comparisons: Sequence[expectation.Comparison], name: Callable[[reported.Cell], str]
) -> list[Picture]:
    """One figure of all cells; none without any.

    Args:
      comparisons: of the cells.
      name: of a cell in the legend: its method's, or what else tells cells apart where those are too many.
    """
    if not comparisons:
        return []
    caption = (
        "Each cell's measured speedup over the one its parts promise, each timed alone. Within the band they "
        f"agree to {expectation.LOWEST:g} - {expectation.HIGHEST:g}; rings mark cells outside it."
    )
    drawing = _svg(MEASURED_AND_EXPECTED, _measured_and_expected(comparisons, name))
    return [Picture(MEASURED_AND_EXPECTED, "Measured and expected speedup", caption, drawing)]


# A plot is drawn within `_STYLE`, so it comes as a function.
Plot = Callable[[], matplotlib.figure.Figure]


class _Colors:
    """A colour and a marker per method, the same in every figure."""

    def __init__(self, labels: Sequence[str]):
        self.labels = list(dict.fromkeys(labels))

    def color(self, label: str) -> str:
        return _COLORS[self.labels.index(label) % len(_COLORS)]

    def marker(self, label: str) -> str:
        return _MARKERS[self.labels.index(label) // len(_COLORS) % len(_MARKERS)]


def _svg(name: str, plot: Plot) -> str:
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        content = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        plot().savefig(content, format="svg", metadata=nothing, transparent=True)
    svg = content.getvalue()
    return svg[svg.index("<svg ") :]


def _panels(
    cells: Sequence[reported.Cell], height: float, *, stacked: bool = False
) -> tuple[matplotlib.figure.Figure, list[tuple[matplotlib.axes.Axes, list[reported.Cell]]]]:
    """A panel per group of cells, with its title and its cells."""
    groups = list(dict.fromkeys(cell.group for cell in cells))
    columns = 1 if stacked else min(len(groups), 3)
    rows = -(-len(groups) // columns)
    figure = matplotlib.figure.Figure(figsize=(_WIDTH, height * rows))
    axes = figure.subplots(rows, columns, squeeze=False, sharex=stacked, sharey=True).flat
    panels = []
    for panel, group in zip(axes, groups):
        panel.set_title(reported.group_name(group, groups), loc="left")
        panels.append((panel, [cell for cell in cells if cell.group == group]))
    for panel in list(axes)[len(groups) :]:
        panel.set_visible(False)
    return figure, panels


def _legend(figure: matplotlib.figure.Figure, panels: Sequence[matplotlib.axes.Axes]) -> None:
    """One for all panels, above them; the figure grows by its lines, so that they keep their size."""
    entries = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles))
    columns = legend_columns(list(entries), figure.get_figwidth())
    lines = -(-len(entries) // columns)
    figure.set_figheight(figure.get_figheight() + _LINE_HEIGHT * (lines - 1))
    figure.legend(entries.values(), entries.keys(), loc="outside upper left", ncols=columns)


def legend_columns(labels: Sequence[str], width: float) -> int:
    """How many columns of a legend fit beside one another; at least one.

    Args:
      labels: which fill it column by column, the first columns with one more where they do not come out even.
      width: of the figure, in inches.
    """
    for columns in range(min(len(labels), _MAX_COLUMNS), 1, -1):
        longest = [max(map(len, column)) for column in np.array_split(np.array(labels, object), columns)]
        if sum(_KEY_WIDTH + _CHARACTER_WIDTH * characters for characters in longest) <= width:
            return columns
    return 1


def _speedup(cells: Sequence[reported.Cell], colors: _Colors) -> Plot | None:
    def plot():
        tasks = list(dict.fromkeys(cell.record.task for cell in cells))
        figure, panels = _panels(cells, 2.9, stacked=True)
        points = [cell.record.speedup for cell in cells]
        ends = [cell.record.speedup_ci[1] for cell in cells if cell.record.speedup_ci]
        highest = max(1, min(max([*points, *ends]), 2 * max(points)))  # one bar without end must not flatten the rest
        step = min(0.8 / max(len(colors.labels), 1), 0.16)
        for panel, members in panels:
            panel.axhline(1, color=_INK, linewidth=0.8)
            for label in dict.fromkeys(cell.label for cell in members):
                own = [cell for cell in members if cell.label == label]
                offset = (colors.labels.index(label) - (len(colors.labels) - 1) / 2) * step
                x = np.array([tasks.index(cell.record.task) for cell in own]) + offset
                y = np.array([cell.record.speedup for cell in own])
                ends = np.array([cell.record.speedup_ci or (cell.record.speedup,) * 2 for cell in own]).T
                color = colors.color(label)
                panel.errorbar(
                    x,
                    y,
                    np.maximum([y - ends[0], ends[1] - y], 0),
                    fmt=colors.marker(label),
                    color=color,
                    markersize=5.5,
                    elinewidth=1.6,
                    capsize=2.5,
                    label=label,
                )
            panel.set(ylabel="speedup", xlim=(-0.6, len(tasks) - 0.4), ylim=(0, 1.05 * highest))
            names = [task.replace("_", " ") for task in tasks]
            panel.set_xticks(range(len(tasks)), names, **_slanted(names))
            panel.grid(axis="x", visible=False)
        _legend(figure, [panel for panel, _ in panels])
        return figure

    return plot if cells else None


def _slanted(names: Sequence[str]) -> dict[str, Any]:
    """How labels below an axis are turned: not at all where they have room side by side."""
    if max(map(len, names)) * _CHARACTER_WIDTH < 0.9 * _WIDTH / len(names):
        return {}
    return {"rotation": 20, "rotation_mode": "anchor", "horizontalalignment": "right"}


def _by_position(cells: Sequence[reported.Cell], colors: _Colors) -> Plot | None:
    def plot():
        figure, panels = _panels(cells, 3.4)
        for panel, members in panels:
            for label in dict.fromkeys(cell.label for cell in members):
                own = [cell for cell in members if cell.label == label]
                look = dict(color=colors.color(label), marker=colors.marker(label), markersize=4.5)
                for rates, style in zip(pooled_by_position(own), ("-", "--")):
                    depth = np.arange(1, len(rates) + 1)
                    panel.plot(depth, rates, style, label=label if style == "-" else None, linewidth=1.6, **look)
            panel.set(xlabel="depth of the draft", ylim=(-0.02, 1.02))
            panel.xaxis.get_major_locator().set_params(integer=True)
        panels[0][0].set_ylabel("accepted")
        _legend(figure, [panel for panel, _ in panels])
        return figure

    return plot if cells else None


def pooled_by_position(cells: Sequence[reported.Cell]) -> tuple[np.ndarray, np.ndarray]:
    """Unconditional and conditional acceptance by depth of several cells together; NaN where nothing was offered.

    Older records lack the denominators: their target calls stand in for both offers and, behind accepted drafts, tests.
    """
    depth = max(cell.depth for cell in cells)
    accepted, offered, tested = np.zeros((3, depth))
    for cell in cells:
        histogram = np.array(cell.record.acceptance_histogram)
        own = histogram[::-1].cumsum()[::-1]  # target calls that accepted at least so many
        accepted[: cell.depth] += own[1:]
        offered[: cell.depth] += cell.record.offered or np.full(cell.depth, own[0])
        tested[: cell.depth] += _tested(cell.record)
    with np.errstate(invalid="ignore"):
        return accepted / offered, accepted / tested


def _tested(record: records.Record) -> Sequence[int]:
    """Target calls that tested a draft at each depth."""
    accepted = np.array(record.acceptance_histogram)[::-1].cumsum()[::-1]
    return record.tested or accepted[:-1]


def _histograms(cells: Sequence[reported.Cell], colors: _Colors) -> Plot | None:
    def plot():
        labels = list(dict.fromkeys(cell.label for cell in cells))
        groups = list(dict.fromkeys(cell.group for cell in cells))
        columns = min(len(labels), 4)
        rows = -(-len(labels) // columns)
        figure = matplotlib.figure.Figure(figsize=(_WIDTH, 2.3 * rows + 0.4))
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
        width = 0.8 / len(groups)
        for panel, label in zip(axes.flat, labels):
            for i, group in enumerate(groups):
                own = [cell for cell in cells if (cell.label, cell.group) == (label, group)]
                counts = np.zeros(max((cell.depth for cell in own), default=0) + 1)
                for cell in own:
                    counts[: cell.depth + 1] += cell.record.acceptance_histogram
                panel.bar(
                    np.arange(len(counts)) + (i - (len(groups) - 1) / 2) * width,
                    counts / max(counts.sum(), 1),
                    width,
                    color=colors.color(label),
                    alpha=1 - 0.6 * i / max(len(groups) - 1, 1),
                    label=reported.group_name(group, groups),
                )
            room = (_WIDTH / columns - 0.3) / _CHARACTER_WIDTH
            panel.set_title(textwrap.fill(label, int(room)), loc="left")
            panel.xaxis.get_major_locator().set_params(integer=True)
            panel.grid(axis="x", visible=False)
            if len(groups) > 1:
                panel.legend(fontsize="small", handlelength=1)
        for panel in list(axes.flat)[len(labels) :]:
            panel.set_visible(False)
        for row in axes:
            row[0].set_ylabel("share of target calls")
        figure.supxlabel("accepted drafts", fontsize="medium", color=_INK)
        return figure

    return plot if cells else None


def _tau_and_speedup(cells: Sequence[reported.Cell], colors: _Colors) -> Plot | None:
    cells = [cell for cell in cells if cell.record.speedup is not None and cell.record.tau is not None]

    def plot():
        figure, panels = _panels(cells, 4.2)
        longest = max(cell.record.tau for cell in cells) * 1.06
        for panel, members in panels:
            panel.plot([1, longest], [1, longest], "--", color=_INK, linewidth=0.8, label="speedup = tau")
            panel.axhline(1, color=_INK, linewidth=0.8)
            for label in dict.fromkeys(cell.label for cell in members):
                own = [cell.record for cell in members if cell.label == label]
                color = colors.color(label)
                panel.plot(
                    [record.tau for record in own],
                    [record.speedup for record in own],
                    colors.marker(label),
                    color=color,
                    label=label,
                    markersize=6,
                )
                slopes = [record.expected_speedup / record.tau for record in own if record.expected_speedup]
                if slopes:
                    panel.plot([1, longest], np.median(slopes) * np.array([1, longest]), color=color, linewidth=1)
            panel.set(xlabel="tau (tokens per target call)", xlim=(1 - 0.04 * (longest - 1), longest))
            highest = max(cell.record.speedup for cell in cells)
            panel.set_ylim(0, 1.15 * max(highest, 1))
        panels[0][0].set_ylabel("speedup")
        _legend(figure, [panel for panel, _ in panels])
        return figure

    return plot if cells else None


def _alpha_and_gamma(cells: Sequence[reported.Cell]) -> Plot | None:
    series = {}
    for cell in cells:
        if cell.record.alpha is not None:
            record = cell.record  # answers to more prompts are another measurement
            key = cell.group, record.drafter, record.draft, record.verifier, record.num_prompts
            series.setdefault(key, []).append(cell)
    series = {key: own for key, own in series.items() if len({cell.depth for cell in own}) > 1}

    def plot():
        figure = matplotlib.figure.Figure(figsize=(_WIDTH, 3.6))
        left, right = figure.subplots(1, 2)
        groups = list(dict.fromkeys(group for group, *_ in series))
        drafts = {draft for _, _, draft, *_ in series}
        for i, ((group, drafter, draft, verifier, _), own) in enumerate(series.items()):
            depths = sorted({cell.depth for cell in own})
            alphas, taus = np.array([_pooled([c for c in own if c.depth == depth]) for depth in depths]).T
            parts = [
                drafter,
                draft if len(drafts) > 1 else None,
                verifier if verifier != "rejection" else None,
                reported.group_name(group, groups),
            ]
            look = dict(color=_COLORS[i % len(_COLORS)], marker=_MARKERS[i // len(_COLORS) % len(_MARKERS)])
            left.plot(depths, alphas, label=", ".join(filter(None, parts)), **look)
            right.plot(depths, taus, **look)
            right.plot(
                depths, [theory.expected_tokens(*pair) for pair in zip(alphas, depths)], "--", color=look["color"]
            )
        left.set(xlabel="gamma", ylabel="alpha", ylim=(0, 1))
        right.set(xlabel="gamma", ylabel="tau", ylim=(1, None))
        for panel in (left, right):
            panel.xaxis.get_major_locator().set_params(integer=True)
        _legend(figure, [left])
        return figure

    return plot if series else None


def _pooled(cells: Sequence[reported.Cell]) -> tuple[float, float]:
    """Alpha and tau of several cells together."""
    histograms = [np.array(cell.record.acceptance_histogram) for cell in cells]
    accepted = [(histogram * np.arange(len(histogram))).sum() for histogram in histograms]
    tested = sum(sum(_tested(cell.record)) for cell in cells)
    calls = [cell.record.target_calls for cell in cells]
    tau = sum(cell.record.tau * count for cell, count in zip(cells, calls)) / sum(calls)
    return (sum(accepted) / tested if tested else 0.0), tau


def _measured_and_expected(comparisons: Sequence[expectation.Comparison], name: Callable[[reported.Cell], str]) -> Plot:
    colors = _Colors([name(c.cell) for c in comparisons])

    def plot():
        figure = matplotlib.figure.Figure(figsize=(_WIDTH * 0.66, _WIDTH * 0.66))
        panel = figure.subplots()
        pairs = [(c.cell.record.expected_speedup, c.cell.record.speedup) for c in comparisons]
        longest = 1.1 * max(max(pair) for pair in pairs)
        line = np.array([0, longest])
        panel.plot(line, line, color=_INK, linewidth=0.8)
        panel.fill_between(
            line, expectation.LOWEST * line, expectation.HIGHEST * line, color="#7a869a", alpha=0.18, linewidth=0
        )
        for label in colors.labels:
            own = [c for c in comparisons if name(c.cell) == label]
            x, y = np.array([(c.cell.record.expected_speedup, c.cell.record.speedup) for c in own]).T
            ends = np.array([c.cell.record.speedup_ci or (c.cell.record.speedup,) * 2 for c in own]).T
            panel.errorbar(
                x,
                y,
                np.maximum([y - ends[0], ends[1] - y], 0),
                fmt=colors.marker(label),
                color=colors.color(label),
                label=label,
                markersize=5.5,
                elinewidth=0.8,
            )
        outside = np.array(
            [(c.cell.record.expected_speedup, c.cell.record.speedup) for c in comparisons if c.is_outside]
        ).reshape(-1, 2)
        panel.plot(*outside.T, "o", markersize=11, fillstyle="none", color=_INK, markeredgewidth=0.9)
        panel.set(xlabel="expected speedup", ylabel="measured speedup", xlim=(0, longest), ylim=(0, longest))
        _legend(figure, [panel])
        return figure

    return plot
