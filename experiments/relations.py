"""What of the published tables follows from what: the papers' own relations, applied to their printed numbers.

Each relation yields `recomputation.Value`s for one table. A table without one is measured, or says in `REASONS` what is
missing; no number of a paper stands in this file, unless the table's file leaves it out of its rows.
"""

from __future__ import annotations

import collections
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from experiments import published
from experiments.recomputation import Printed, Report, Sheet, Value
from jspec import exact_acceptance, theory, topology

PAPERS = (
    "leviathan2023",
    "chen2023",
    "medusa2024",
    "eagle1_2024",
    "eagle2_2024",
    "eagle3_2025",
    "lookahead2024",
    "sequoia2024",
    "blockverification2024",
    "frspec2025",
    "specbench2024",
    "distillspec2023",
)

_load = functools.cache(published.load)

Sheets = Mapping[str, Sheet]
Relation = Callable[[Sheets, Sheet], Iterator[Value]]

_RELATIONS: dict[tuple[str, str], tuple[str, Relation]] = {}

MEASURED = "measured: nothing printed determines it"
BOTH_MEASURED = "measured on both sides: only what the relation implies follows"
REASONS = {
    ("leviathan2023", "lenience_speedup"): "gamma is not printed for standard sampling",
    ("chen2023", "table1"): "the other rows are the baseline",
    ("medusa2024", "fig4"): "ranges read off a figure",
    ("eagle1_2024", "table2"): "tau is a tree's, and what a tree accepts by rank is not printed",
    ("eagle1_2024", "fig7_text"): "ranges in words",
    ("eagle2_2024", "table1"): "measured; what rows imply is listed, and means follow from their tasks",
    ("eagle3_2025", "table1"): "measured; what rows imply is listed, and means follow from their tasks",
    ("sequoia2024", "abstract_versions"): "acceptance by rank, tree sizes and times behind them are not printed",
    ("specbench2024", "leaderboard"): "measured; `overall` is a ratio of mean tokens/s, no mean of the tasks' speedups",
    ("distillspec2023", "headline"): "ranges in words",
}


def relation(paper: str, table: str, words: str) -> Callable[[Relation], Relation]:
    """Register a relation for a table; `words` say what it is."""

    def add(function: Relation) -> Relation:
        _RELATIONS[paper, table] = words, function
        return function

    return add


def _nothing(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    return iter(())


def reports() -> list[Report]:
    """A report on every table of every paper."""
    found = []
    for paper in PAPERS:
        sheets = {name: Sheet(table) for name, table in _load(paper).tables.items()}
        for name, sheet in sheets.items():
            words, function = _RELATIONS.get((paper, name), (None, _nothing))
            values = list(function(sheets, sheet))
            found.append(
                Report(
                    paper=paper,
                    table=name,
                    title=sheet.title,
                    relation=words,
                    reason=REASONS.get((paper, name), MEASURED if function is _nothing else BOTH_MEASURED),
                    labels=tuple(sheet.label(row) for row in range(len(sheet.rows))),
                    values=tuple(value for value in values if value.printed is not None),
                    implied=tuple(value for value in values if value.printed is None),
                )
            )
    return found


# Leviathan et al. 2023.


@relation("leviathan2023", "table1", "operations and speedup at c = c_hat = 0 (sections 3.3 and 3.4)")
def _leviathan1(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    free = Printed(0.0)
    for row, entries in enumerate(sheet.rows):
        alpha = Printed(entries["alpha"])  # chosen, not measured
        yield sheet.follows(row, "ops_increase", theory.operations_increase, alpha, "gamma", free)
        yield sheet.follows(row, "speedup", theory.speedup, alpha, "gamma", free)


@relation("leviathan2023", "table2", "c that explains the measured speedup (theorem 3.8 solved for c)")
def _leviathan2(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    for row in range(len(sheet.rows)):
        yield sheet.implies(row, "c", theory.implied_c, "speedup", "alpha", "gamma")


@relation("leviathan2023", "table4", "EXP = speedup of alpha, gamma and c (theorem 3.8)")
def _leviathan4(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    for row in range(len(sheet.rows)):
        yield sheet.follows(row, "exp", theory.speedup, "alpha", "gamma", "c")


@relation("leviathan2023", "lenience_speedup", "speedup of the lenient alpha, gamma and c = 0.015 (theorem 3.8)")
def _lenience(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    cost = Printed(0.015, 3)  # of the table's caption
    alphas = sheets["lenience_alpha_argmax"]
    for row in range(len(sheet.rows)):
        if sheet.has(row, "gamma"):
            for column in ("l_1", "l_0_5", "l_0_3", "l_0_1"):
                yield sheet.follows(row, column, theory.speedup, alphas.number(0, column), "gamma", cost)


@relation("leviathan2023", "ngram_draft", "speedup of alpha and gamma at c = 0 (theorem 3.8)")
def _ngram(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    yield sheet.follows(0, "speedup", theory.speedup, "alpha", "gamma", Printed(0.0))


# Chen et al. 2023.


@relation("chen2023", "table1", "speedup = time per token of autoregressive sampling / of speculative sampling")
def _chen(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    for row in sheet.where(method="SpS"):
        same = {key: sheet.rows[row][key] for key in ("task", "sampling")}
        baseline = next(sheet.where(method="ArS", **same))
        # The baseline is printed to one digit behind the point.
        inputs = sheet.number(baseline, "ms_per_token", decimals=1), "ms_per_token"
        yield sheet.follows(row, "speedup", lambda slow, fast: slow / fast, *inputs)


# Medusa.


@relation("medusa2024", "table1", "speedup = acceleration rate / overhead")
def _medusa1(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    for row in range(len(sheet.rows)):
        yield sheet.follows(row, "speedup", theory.speedup_of_rounds, "acceleration_rate", "overhead")


@relation("medusa2024", "table4", "speedup = ratio of tokens per second; overhead = acceleration rate / speedup")
def _medusa4(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    for row in range(len(sheet.rows)):
        yield sheet.follows(row, "speedup", lambda fast, slow: fast / slow, "medusa_tok_s", "base_tok_s")
        yield sheet.implies(row, "overhead", theory.implied_overhead, "acceleration_rate", "speedup")


@relation("medusa2024", "tree_shapes", "nodes counted in the released trees")
def _medusa_trees(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    for row, entries in enumerate(sheet.rows):
        shape = topology.published(entries["tree"])
        levels = [len(shape.level(depth)) for depth in range(1, shape.max_depth + 1)]
        counted = {"nodes_without_root": shape.num_nodes - 1, "nodes_with_root": shape.num_nodes}
        counted |= {"depth": shape.max_depth}
        printed = {column: entries[column] for column in counted}
        for depth in range(max(len(levels), len(entries["per_depth"]))):
            name = f"per_depth {depth + 1}"
            counted[name] = levels[depth] if depth < len(levels) else 0
            printed[name] = entries["per_depth"][depth] if depth < len(entries["per_depth"]) else 0
        for column, count in counted.items():
            yield Value(row, column, count, count, count, Printed(printed[column]))


# EAGLE 1 to 3, Lookahead, Spec-Bench: tau and speedup are printed, the overhead is not.

_OVERHEAD = "overhead = tau / speedup"


def _overhead(sheet: Sheet, tau: str = "tau", speedup: str = "speedup") -> Iterator[Value]:
    for row in range(len(sheet.rows)):
        if sheet.has(row, tau, speedup):
            yield sheet.implies(row, "overhead", theory.implied_overhead, tau, speedup)


def _overheads(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    yield from _overhead(sheet)


for _table in ("table1", "table3", "table6", "table8"):
    relation("eagle1_2024", _table, _OVERHEAD)(_overheads)


@relation("eagle1_2024", "fig1_fig2", f"{_OVERHEAD}, tau from table 2")
def _eagle_figures(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    taus = sheets["table2"]
    for row in sheet.where(method="EAGLE"):
        same = {key: sheet.rows[row][key] for key in ("target", "temperature")}
        tau = taus.number(next(taus.where(**same)), "tau")
        yield sheet.implies(row, "overhead", theory.implied_overhead, tau, "speedup")


@relation("eagle1_2024", "table5", "tau of a chain of 5 = 1 + products of the n-alpha of table 2 (our reading)")
def _eagle_chains(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    alphas = sheets["table2"]

    def tau(*rates):
        reached = total = 1.0
        for rate in rates:
            reached *= rate
            total += reached
        return total

    for row, entries in enumerate(sheet.rows):
        measured = next(alphas.where(target=entries["target"], temperature=0))
        yield sheet.follows(row, "tau_chain", tau, *(alphas.number(measured, f"alpha{n}") for n in range(5)))


def _means(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    """Rows of task `Mean`, from the tasks of the same method, target and temperature."""
    yield from _overhead(sheet)
    for row in sheet.where(task="Mean"):
        same = {key: sheet.rows[row][key] for key in ("method", "target", "temperature")}
        tasks = [other for other in sheet.where(**same) if other != row]
        for column in ("speedup", "tau"):
            yield sheet.follows(row, column, _mean, *(sheet.number(task, column) for task in tasks))


def _mean(*numbers: float) -> float:
    return sum(numbers) / len(numbers)


for _paper in ("eagle2_2024", "eagle3_2025"):
    relation(_paper, "table1", f"{_OVERHEAD}; means of the tasks")(_means)


@relation("eagle3_2025", "table2", _OVERHEAD)
def _eagle3_ablation(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    for task in ("mtbench", "gsm8k"):
        yield from _overhead(sheet, f"{task}_tau", f"{task}_speedup")


@relation("lookahead2024", "table4", "extra operations = tokens of a step, (W + G)(N - 1) with G = W")
def _lookahead4(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    for row in range(len(sheet.rows)):
        nodes = lambda window, ngram: theory.lookahead_nodes(window, ngram, window)
        yield sheet.follows(row, "extra_flops_x", nodes, "W", "N")


for _table in ("table2", "table3"):
    relation("lookahead2024", _table, "overhead = S / speedup")(lambda sheets, sheet: _overhead(sheet, tau="S"))

relation("specbench2024", "leaderboard", "overhead = mean accepted tokens / overall speedup")(
    lambda sheets, sheet: _overhead(sheet, "mean_accepted_tokens", "overall")
)


# Sequoia.


def _ratios(unit: str) -> Relation:
    def function(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
        for row in range(len(sheet.rows)):
            yield sheet.follows(row, "speedup", lambda slow, fast: slow / fast, f"baseline_{unit}", f"sequoia_{unit}")

    return function


for _table, _unit in (("blog_on_chip", "ms"), ("blog_offloading", "s")):
    relation("sequoia2024", _table, "speedup = time per token of the baseline / of Sequoia")(_ratios(_unit))


# Block verification.


def _percent(block: float, token: float) -> float:
    return 100 * (block / token - 1)


@relation("blockverification2024", "table1", "gains in percent; the last row from those above")
def _block1(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    for row in range(len(sheet.rows)):
        for kind in ("block_eff", "walltime"):
            average = sheet.rows[row]["dataset"] == "average"
            columns = [f"{kind}_token", f"{kind}_block", f"{kind}_gain_pct"] if average else []
            for column in columns:
                yield sheet.follows(row, column, _mean, *(sheet.number(above, column) for above in range(row)))
            if not average:
                yield sheet.follows(row, f"{kind}_gain_pct", _percent, f"{kind}_block", f"{kind}_token")


@relation("blockverification2024", "gamma_scaling", "gains in percent")
def _block_gammas(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    for row in range(len(sheet.rows)):
        yield sheet.follows(row, "gain_pct", _percent, "block", "token")


@relation("blockverification2024", "open_model_replication", "gains in percent")
def _block_open(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    for row in range(len(sheet.rows)):
        yield sheet.implies(row, "gain_pct", _percent, "block", "token")


@relation("blockverification2024", "toy_example", "exact enumeration (algorithm 2)")
def _block_toy(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
    # The pair and gamma of the table's title.
    target, draft = [Fraction(1, 3), Fraction(2, 3)], [Fraction(2, 3), Fraction(1, 3)]
    rules = (exact_acceptance.token_acceptance, exact_acceptance.block_acceptance, exact_acceptance.block_bound)
    for row, rule in enumerate(rules):
        value = float(sum(rule(target, draft, 2)))
        yield Value(row, "expected", value, value, value, Printed(float(Fraction(sheet.rows[row]["expected"]))))


# FR-Spec.

_TASKS = ("mt", "conv", "rag", "math", "qa", "summ", "code")


def _frspec(ratio: str, scale: float) -> Relation:
    """Averages of the tasks, and each average over that of the first row."""

    def function(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
        for row in range(len(sheet.rows)):
            yield sheet.follows(row, "average", _mean, *_TASKS)
            if row:  # the first row is the baseline
                formula = lambda own, full: scale * own / full
                yield sheet.follows(row, ratio, formula, "average", sheet.number(0, "average"))

    return function


for _table in ("table1", "table6", "table7"):
    relation("frspec2025", _table, "average of the tasks; percent of the first row")(_frspec("pct_of_full", 100.0))
for _table in ("table2", "table8"):
    relation("frspec2025", _table, "average of the tasks; speedup over the first row")(_frspec("speedup", 1.0))


def _frspec_tasks(method: str) -> Relation:
    def function(sheets: Sheets, sheet: Sheet) -> Iterator[Value]:
        for row in range(len(sheet.rows)):
            for name in (method, "fr32k"):
                yield sheet.follows(row, f"{name}_speedup", lambda fast, slow: fast / slow, name, "vanilla")

    return function


relation("frspec2025", "table3", "speedup = ratio of tokens per second")(_frspec_tasks("eagle2"))
relation("frspec2025", "table5", "speedup = ratio of tokens per second")(_frspec_tasks("medusa"))


# Tau and speedup side by side, for the figure.


def tau_and_speedup() -> dict[str, list[tuple[float, float]]]:
    """Printed pairs of tau and speedup at batch 1, by method; means over tasks and reprints left out."""
    pairs: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    medusa = _load("medusa2024").tables["table1"].rows
    pairs["Medusa-2"] += [(row["acceleration_rate"], row["speedup"]) for row in medusa]
    for paper in ("eagle1_2024", "eagle2_2024", "eagle3_2025"):
        own = {"eagle1_2024": "EAGLE", "eagle2_2024": "EAGLE-2", "eagle3_2025": "EAGLE-3"}[paper]
        for row in _load(paper).tables["table1"].rows:
            if row.get("method", own) == own and row.get("task") != "Mean":
                pairs[own].append((row["tau"], row["speedup"]))
    for row in _load("lookahead2024").tables["table3"].rows:
        if row.get("S") and row.get("speedup") and row["setting"] != "autoregressive":
            pairs["Lookahead"].append((row["S"], row["speedup"]))
    return dict(pairs)


def median_overhead(pairs: list[tuple[float, float]]) -> float:
    """Of one method's pairs."""
    return statistics.median(theory.implied_overhead(tau, speedup) for tau, speedup in pairs)
