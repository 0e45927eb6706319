"""The papers' theory, exact: printed tables recomputed, figures drawn, and the formula met by the real loop.

    python -m experiments.theory [configs/theory.yaml] [dotted.key=value ...]

Every table of every published paper is gone through: numbers that follow from others printed beside them are recomputed
by the paper's own relation and compared digit by digit; where they differ, it is said whether the rounding of the
inputs explains it; the rest is counted as not recoverable, with the reason. Then tokens per target call are measured
through the decoding loop with drafts that stand by chance, and must come within a set tolerance of the formula. The run
folder holds `theory.json` with every value, `table.md`, and the pictures. The last line is JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import cli, monte_carlo, published, recomputation, relations, run_folder, settings, theory_figures
from jspec import exact_acceptance, optimal_trees, theory

CELL_KEYS = ("alpha", "gamma")
SHOWN_WHOLE = (("leviathan2023", "table1"), ("leviathan2023", "table4"))
MAX_BLOCKS = 1_000_000  # a few seconds
# The costs of a draft call in table 4 of Leviathan et al., and the alphas that its curves span.
ORACLE_COSTS = (0.02, 0.04, 0.11)
ORACLE_ALPHAS = tuple(alpha / 100 for alpha in range(30, 99))


@dataclasses.dataclass(frozen=True)
class Trees:
    """What Sequoia's trees are drawn for.

    acceptance: of a child by rank, as in `optimal_trees.Optimum`.
    num_nodes:  of the largest tree.
    max_depth:  of the deepest.
    draft_time: of a draft call, over that of a target pass.
    knees:      machines: nodes up to which a target pass costs what one node costs.
    """

    acceptance: tuple[float, ...] = (0.6, 0.15, 0.07, 0.04, 0.025, 0.015, 0.01, 0.008, 0.006, 0.005)
    num_nodes: int = 256
    max_depth: int = 12
    draft_time: float = 0.05
    knees: tuple[int, ...] = (16, 64, 256)

    def __post_init__(self):
        optimal_trees.Optimum(self.acceptance, self.num_nodes, self.max_depth)
        if self.max_depth < 1:
            raise ValueError(f"max_depth {self.max_depth} is below 1")
        if self.draft_time < 0:
            raise ValueError(f"draft_time {self.draft_time} is below 0")
        if not self.knees or min(self.knees) < 1:
            raise ValueError(f"knees {list(self.knees)}: each must be at least 1, and there must be one")


@dataclasses.dataclass(frozen=True)
class LawPair:
    """Target and draft whose acceptance is enumerated.

    name:          in the picture.
    target, draft: one law each, the same at every place.
    """

    name: str
    target: tuple[float, ...]
    draft: tuple[float, ...]

    def __post_init__(self):
        exact_acceptance.token_acceptance(self.target, self.draft, 1)


@dataclasses.dataclass(frozen=True)
class Theory:
    """The config.

    target:      of the Monte-Carlo run; its weights do not matter.
    monte_carlo: that run.
    gammas:      curves of Leviathan's figures 2 and 4.
    costs:       c of the curves of figure 3.
    trees:       Sequoia's.
    laws:        of block against token verification.
    max_gamma:   up to which.
    run:         the run folder.
    """

    target: settings.TargetSettings
    monte_carlo: monte_carlo.MonteCarlo = monte_carlo.MonteCarlo()
    gammas: tuple[int, ...] = (1, 3, 5, 7, 10)
    costs: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2)
    trees: Trees = Trees()
    laws: tuple[LawPair, ...] = ()
    max_gamma: int = 8
    run: run_folder.RunSettings = run_folder.RunSettings()

    def __post_init__(self):
        if not self.gammas or min(self.gammas) < 1:
            raise ValueError(f"gammas {list(self.gammas)}: each must be at least 1, and there must be one")
        if not self.costs or min(self.costs) < 0:
            raise ValueError(f"costs {list(self.costs)}: each must be at least 0, and there must be one")
        if self.max_gamma < 1:
            raise ValueError(f"max_gamma {self.max_gamma} is below 1")
        if not self.laws:
            raise ValueError("laws is empty: block verification needs a target and a draft")
        blocks = max(len(pair.target) for pair in self.laws) ** self.max_gamma
        if blocks > MAX_BLOCKS:
            raise ValueError(
                f"max_gamma {self.max_gamma} gives {blocks} blocks to enumerate; the limit is {MAX_BLOCKS}"
            )
        needed = self.monte_carlo.new_tokens + 1
        if self.target.random is not None and self.target.random.max_positions < needed:
            raise ValueError(
                f"target.random.max_positions {self.target.random.max_positions} is below the {needed} that "
                "monte_carlo.new_tokens needs"
            )


def main(config: Theory) -> dict:
    """Recompute, draw, measure."""
    settings.check_references(config.target)
    folder = run_folder.open_folder(config.run.folder, config, cell_keys=CELL_KEYS)
    reports = relations.reports()
    figures, best_trees = _draw(config, folder)
    _measure(config, folder)
    if folder.records:
        theory_figures.monte_carlo(folder.path / "monte_carlo.png", folder.records, config.monte_carlo.tolerance)
        figures.append("monte_carlo.png")
    document = {
        **folder.document(),
        "tables": [report.summary() for report in reports],
        "oracle_gain": _oracle_gain(),
        "block_verification": [_by_gamma(pair, config.max_gamma) for pair in config.laws],
        "best_trees": best_trees,
        "figures": figures,
    }
    values = [
        {"paper": report.paper, "table": report.table, **report.describe(value)}
        for report in reports
        for value in (*report.values, *report.implied)
    ]
    text = json.dumps({**document, "values": values}, indent=2, allow_nan=False) + "\n"
    run_folder.write_text_atomic(folder.path / "theory.json", text)
    tables = _tables(document, reports)
    folder.write_table(tables)
    print(tables)
    off = [record for record in folder.records if abs(record["difference"]) > config.monte_carlo.tolerance]
    if off:
        cells = ", ".join(f"alpha {r['alpha']:g} gamma {r['gamma']}: {100 * r['difference']:+.2f}%" for r in off)
        raise cli.RunFailed(f"tokens per target call are not those of the formula: {cells}", document)
    return document


def _draw(config: Theory, folder: run_folder.RunFolder) -> tuple[list[str], list[dict[str, Any]]]:
    """All pictures but the Monte-Carlo run's. Returns their names, and the best trees."""
    path = lambda name: folder.path / f"{name}.png"
    trees = config.trees
    optimum = optimal_trees.Optimum(trees.acceptance, trees.num_nodes, trees.max_depth)
    printed = published.load("blockverification2024").tables["gamma_scaling"].rows
    theory_figures.expected_tokens(path("leviathan2023_figure2"), config.gammas)
    theory_figures.best_gamma(path("leviathan2023_figure3"), config.costs)
    theory_figures.speedup_and_operations(path("leviathan2023_figure4"), config.gammas)
    theory_figures.tau_against_speedup(path("tau_and_speedup"))
    best = theory_figures.tree_sizes(path("sequoia2024_trees"), optimum, trees.draft_time, trees.knees)
    theory_figures.block_verification(path("blockverification2024_gamma"), config.laws, config.max_gamma, printed)
    names = [f"leviathan2023_figure{number}" for number in (2, 3, 4)]
    names += ["tau_and_speedup", "sequoia2024_trees", "blockverification2024_gamma"]
    return [f"{name}.png" for name in names], best


def _measure(config: Theory, folder: run_folder.RunFolder) -> None:
    cells = [cell for cell in config.monte_carlo.cells if not folder.finished(dataclasses.asdict(cell))]
    if not cells:
        return
    target = settings.load_target(config.target)
    with cli.progress(len(cells), "monte carlo") as advance:
        for cell in cells:
            folder.append(monte_carlo.measure(target, cell, config.monte_carlo))
            advance(f"alpha {cell.alpha:g}, gamma {cell.gamma}")


def _oracle_gain() -> dict[str, float]:
    """The most that an oracle for gamma adds to the best fixed one; the paper says about 60% (section 3.5)."""
    gain = lambda alpha, c: theory.oracle_speedup(alpha, c) / theory.speedup(alpha, theory.best_gamma(alpha, c, 256), c)
    most, alpha, c = max((gain(alpha, c), alpha, c) for alpha in ORACLE_ALPHAS for c in ORACLE_COSTS)
    return {"alpha": alpha, "c": c, "over_best_gamma": most}


def _by_gamma(pair: LawPair, max_gamma: int) -> dict[str, Any]:
    """Tokens per round of gamma 1, 2, ..."""
    rules = {
        "token": exact_acceptance.token_acceptance,
        "block": exact_acceptance.block_acceptance,
        "bound": exact_acceptance.block_bound,
    }
    tokens = lambda rule: theory.tokens_by_depth(rule(pair.target, pair.draft, max_gamma))[1:].tolist()
    return {"laws": pair.name, **{name: tokens(rule) for name, rule in rules.items()}}


# The report in words.


def _tables(document: Mapping[str, Any], reports: Sequence[recomputation.Report]) -> str:
    """Markdown."""
    lines = [_audit(document["tables"])]
    whole = [report for report in reports if (report.paper, report.table) in SHOWN_WHOLE]
    lines += [_values(report) for report in whole]
    differing = [(r, value) for r in reports if r not in whole for value in r.values if not value.equal]
    headers = ["paper", "table", "row", "value", "printed", "recomputed", "from rounded inputs"]
    rows = [[report.paper, report.table, *_cells(report, value)] for report, value in differing]
    lines.append("Recomputed values that do not round to the printed digits:\n\n" + _markdown([*headers, ""], rows))
    if document["records"]:
        lines.append(_measured(document["records"]))
    for laws in document["block_verification"]:
        rows = [
            [str(gamma), *(f"{laws[name][gamma - 1]:.4f}" for name in ("token", "block", "bound"))]
            for gamma in range(1, len(laws["token"]) + 1)
        ]
        title = f"Tokens per target call, token by token and as a block, exact: {laws['laws']}"
        lines.append(f"{title}\n\n" + _markdown(["gamma", "token", "block", "bound"], rows))
    rows = [[str(x) if isinstance(x, int) else f"{x:.3f}" for x in tree.values()] for tree in document["best_trees"]]
    headers = ["free nodes of a pass", "nodes", "depth", "tokens", "speedup"]
    lines.append("Best trees (Sequoia's choice of size and depth)\n\n" + _markdown(headers, rows))
    gain = document["oracle_gain"]
    lines.append(
        f"An oracle for gamma adds at most {100 * (gain['over_best_gamma'] - 1):.0f}% to the best fixed one "
        f"(alpha {gain['alpha']:g}, c {gain['c']:g}); Leviathan et al. say about 60%.\n"
    )
    return "\n".join(lines)


def _audit(tables: Sequence[Mapping[str, Any]]) -> str:
    headers = ["paper", "table", "rows", "recomputed", "equal", "within rounding", "outside", "not recoverable", "how"]
    counts = ("rows", "recomputed", "equal", "within_rounding", "outside", "not_recoverable")
    rows = [
        [
            table["paper"],
            table["table"],
            *(str(table[count]) for count in counts),
            "; ".join(filter(None, (table["relation"], table["reason"]))),
        ]
        for table in tables
    ]
    return (
        "Rows of the published tables: recomputed from what is printed beside them; equal to the printed digits; "
        "within what rounded inputs allow, the equal ones included; outside of it.\n\n" + _markdown(headers, rows)
    )


def _values(report: recomputation.Report) -> str:
    rows = [_cells(report, value) for value in report.values]
    headers = ["row", "value", "printed", "recomputed", "from rounded inputs", ""]
    return f"{report.paper}, {report.table}: {report.title}\n\n" + _markdown(headers, rows)


def _cells(report: recomputation.Report, value: recomputation.Value) -> list[str]:
    verdict = "equal" if value.equal else "within rounding" if value.inside else "outside"
    spread = f"{value.low:.3f} to {value.high:.3f}" if value.high > value.low else "-"
    row = report.labels[value.row]
    return [row, value.column, str(value.printed), f"{value.value:.3f}", spread, verdict]


def _measured(records: Sequence[Mapping[str, Any]]) -> str:
    headers = ["alpha", "gamma", "target calls", "tau", "formula", "difference", "exact", "standard errors from exact"]
    rows = [
        [
            f"{record['alpha']:g}",
            str(record["gamma"]),
            str(record["target_calls"]),
            f"{record['tau']:.4f}",
            f"{record['formula']:.4f}",
            f"{100 * record['difference']:+.2f}%",
            f"{record['exact']:.4f}",
            "-" if record["standard_errors"] is None else f"{record['standard_errors']:+.1f}",
        ]
        for record in records
    ]
    return (
        "Tokens per target call through the decoding loop (verifier `synthetic`), and what is expected of answers of "
        "that length\n\n" + _markdown(headers, rows)
    )


def _markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [headers, ["---"] * len(headers), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in cells)


if __name__ == "__main__":
    sys.exit(cli.run(main, Theory, __doc__, default="configs/theory.yaml"))
