"""The theory run: what it says of the papers' tables, its pictures, and the loop against the formula."""

import dataclasses
import json
import math
import pathlib

import matplotlib.image
import numpy as np
import pytest

from experiments import cli, monte_carlo, published, recomputation, relations, settings, theory
from experiments.recomputation import Printed, Sheet
from jspec import theory as formulas

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
DEBUG = str(CONFIGS / "theory_debug.yaml")

pytestmark = pytest.mark.usefixtures("own_folder")


class Table:
    def __init__(self, *rows):
        self.title, self.provenance, self.rows = "a table", "here", list(rows)


@pytest.fixture(scope="module")
def reports():
    return {(report.paper, report.table): report for report in relations.reports()}


def run(capsys, *overrides):
    code = cli.run(theory.main, theory.Theory, "", [DEBUG, "run.folder=out", *overrides])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]) if out else None, out, err


# Rounding.


def test_a_column_knows_its_digits():
    sheet = Sheet(Table({"x": 1.6, "n": 3, "mixed": 2, "text": "1.70-1.89"}, {"x": 1.53, "n": 5, "mixed": 0.5}))
    assert sheet.number(0, "x") == Printed(1.6, 2) and str(sheet.number(0, "x")) == "1.60"
    assert sheet.number(0, "n") == Printed(3, None) and sheet.number(0, "n").ends == (3,)
    assert sheet.number(0, "mixed") == Printed(2, 1) and sheet.number(0, "x", decimals=1) == Printed(1.6, 1)
    assert sheet.number(0, "x").ends == pytest.approx((1.595, 1.605))
    assert sheet.has(0, "x", "n") and not sheet.has(0, "text") and not sheet.has(1, "text")


def test_equal_inside_and_outside():
    def ratio(slow, fast, printed):
        sheet = Sheet(Table({"slow": slow, "fast": fast, "speedup": printed}))
        return sheet.follows(0, "speedup", lambda slow, fast: slow / fast, "slow", "fast")

    # 2.0 / 1.1 = 1.818; from 1.95 / 1.15 = 1.696 to 2.05 / 1.05 = 1.952.
    value = ratio(2.0, 1.1, 1.8)
    assert value.equal and value.inside
    assert (value.low, value.high) == pytest.approx((1.95 / 1.15, 2.05 / 1.05))
    value = ratio(2.0, 1.1, 1.7)
    assert not value.equal and value.inside
    assert ratio(2.0, 1.1, 2.0).inside  # 1.952 prints as 2.0
    assert not ratio(2.0, 1.1, 2.1).inside and not ratio(2.0, 1.1, 1.6).inside
    assert ratio(2.0, 1.0, 2.0).equal and not ratio(2.0, 1.0, 2.1).equal
    assert ratio(3.0, 2.0, 1.5).equal


def test_the_ends_of_the_interval_are_those_of_a_fine_grid():
    value = recomputation.follow(0, "", formulas.speedup, Printed(0.68, 2), Printed(5), Printed(0.04, 2))
    grid = [formulas.speedup(a, 5, c) for a in np.linspace(0.675, 0.685, 21) for c in np.linspace(0.035, 0.045, 21)]
    assert (value.low, value.high) == pytest.approx((min(grid), max(grid)))


def test_a_report_counts_rows_by_their_worst_value():
    one = lambda row, value, low, high: recomputation.Value(row, "x", value, low, high, Printed(1.0, 1))
    values = (
        one(0, 1.0, 1.0, 1.0),
        one(0, 1.2, 1.0, 1.3),  # the row is no better than this
        one(1, 1.04, 1.0, 1.1),
        one(2, 1.0, 1.0, 1.0),
        one(2, 2.0, 1.9, 2.1),
    )
    implied = (recomputation.Value(3, "c", 0.5, 0.4, 0.6),)
    report = recomputation.Report("p", "t", "title", "how", "why", ("a", "b", "c", "d"), values, implied)
    summary = report.summary()
    counts = [summary[key] for key in ("rows", "recomputed", "equal", "within_rounding", "outside", "not_recoverable")]
    assert counts == [4, 3, 1, 2, 1, 1] and summary["reason"] == "why"
    assert [(value["row"], value["inside"]) for value in summary["not_equal"]] == [("a", True), ("c", False)]
    assert summary["implied"] == {"c": {"rows": 1, "least": 0.5, "median": 0.5, "most": 0.5}}


# The papers.


def test_leviathan_table_1_to_every_digit(reports):
    summary = reports["leviathan2023", "table1"].summary()
    assert summary["rows"] == summary["recomputed"] == summary["equal"] == 6
    assert len(reports["leviathan2023", "table1"].values) == 12
    # Exact settings leave no room: the digits are the formula's own.
    assert all(value.low == value.high for value in reports["leviathan2023", "table1"].values)


def test_leviathan_table_4(reports):
    report = reports["leviathan2023", "table4"]
    summary = report.summary()
    rows = published.load("leviathan2023").tables["table4"].rows
    assert (summary["rows"], summary["equal"], summary["within_rounding"]) == (12, 9, 12)
    found = {
        tuple(rows[value.row][key] for key in ("draft", "task", "temperature")): (
            round(value.value, 2),
            value.printed.value,
        )
        for value in report.values
        if not value.equal
    }
    assert found == {
        ("T5-base", "EnDe", 1): (2.35, 2.4),
        ("T5-large", "EnDe", 1): (1.93, 2.0),
        ("T5-large", "CNNDM", 1): (1.54, 1.6),
    }
    for value in report.values:  # inputs that print as printed, and a value that does: found by search
        row = rows[value.row]
        near = [
            formulas.speedup(row["alpha"] + a, row["gamma"], row["c"] + c)
            for a in np.linspace(-0.00499, 0.00499, 9)
            for c in np.linspace(-0.00499, 0.00499, 9)
        ]
        assert any(round(speedup, 1) == row["exp"] for speedup in near), row


def test_lenient_speedups_of_standard_sampling_follow_from_no_gamma(reports):
    """What the reason says: alpha 0.62, c 0.015 and any gamma give less than the printed 2.5, however rounded."""
    summary = reports["leviathan2023", "lenience_speedup"].summary()
    assert (summary["recomputed"], summary["equal"], summary["not_recoverable"]) == (1, 1, 1)
    assert max(formulas.speedup(0.625, gamma, 0.0145) for gamma in range(1, 60)) < 2.45


@pytest.mark.parametrize(
    ("paper", "table", "counts"),
    [  # rows, recomputed, equal, within rounding
        ("medusa2024", "table1", (4, 4, 1, 2)),
        ("medusa2024", "table4", (4, 4, 4, 4)),
        ("medusa2024", "tree_shapes", (9, 9, 9, 9)),
        ("eagle1_2024", "table1", (36, 0, 0, 0)),
        ("eagle1_2024", "table5", (6, 6, 1, 2)),
        ("eagle2_2024", "table1", (224, 32, 30, 31)),
        ("lookahead2024", "table4", (3, 3, 3, 3)),
        ("sequoia2024", "blog_on_chip", (6, 6, 3, 6)),
        ("sequoia2024", "blog_offloading", (7, 7, 7, 7)),
        ("blockverification2024", "toy_example", (3, 3, 3, 3)),
        ("blockverification2024", "gamma_scaling", (3, 3, 3, 3)),
        ("blockverification2024", "table1", (9, 9, 1, 9)),
    ],
)
def test_what_else_is_recovered(reports, paper, table, counts):
    summary = reports[paper, table].summary()
    assert tuple(summary[key] for key in ("rows", "recomputed", "equal", "within_rounding")) == counts


def test_every_row_is_accounted_for(reports):
    for report in reports.values():
        summary = report.summary()
        assert summary["recomputed"] + summary["not_recoverable"] == summary["rows"] > 0
        assert summary["equal"] <= summary["within_rounding"] <= summary["recomputed"]
        assert bool(summary["reason"]) == (summary["not_recoverable"] > 0)
        assert all(value.low <= value.value <= value.high for value in (*report.values, *report.implied))
    assert {key[0] for key in reports} == set(relations.PAPERS)
    for key in relations.REASONS:
        assert key in reports, key


def test_implied_overheads(reports):
    implied = reports["eagle1_2024", "table1"].implied
    assert len(implied) == 36 and implied[0].value == pytest.approx(4.29 / 3.33)
    costs = [value.value for value in reports["leviathan2023", "table2"].implied]
    assert formulas.speedup(0.75, 7, costs[0]) == pytest.approx(3.4)


# The run.


def test_without_the_loop(capsys):
    code, document, out, err = run(capsys, "monte_carlo.cells=[]")
    assert code == 0 and err == "" and document["records"] == []
    tables = {(table["paper"], table["table"]): table for table in document["tables"]}
    assert tables["leviathan2023", "table1"]["equal"] == 6
    assert [value["inside"] for value in tables["leviathan2023", "table4"]["not_equal"]] == [True] * 3
    assert document["oracle_gain"]["over_best_gamma"] == pytest.approx(1.57, abs=0.01)
    toy = document["block_verification"][0]
    assert (toy["token"][1], toy["block"][1]) == pytest.approx((1 + 10 / 9, 1 + 11 / 9))
    assert [tree["nodes"] <= 64 for tree in document["best_trees"]] == [True, True]
    for name in document["figures"]:
        pixels = matplotlib.image.imread(pathlib.Path("out") / name)
        assert pixels.shape[0] > 500 and pixels.shape[1] > 900
        assert pixels[:5, :5].min() == 1 and pixels[..., :3].min() < 0.3  # light background, something on it
    stored = json.loads(pathlib.Path("out/theory.json").read_text())
    assert {key: stored[key] for key in document} == document
    assert len(stored["values"]) == sum(len(r.values) + len(r.implied) for r in relations.reports())
    text = pathlib.Path("out/table.md").read_text()
    assert (
        text in out and "| T5-XXL 11B, T5-base, EnDe, temperature 1, gamma 5, alpha 0.68 | exp | 2.4 | 2.347 |" in text
    )


CELL = monte_carlo.Cell(0.7, 3)
SMALL = monte_carlo.MonteCarlo(rows=32, new_tokens=257)


def target():
    config = cli.config_lib.load(theory.Theory, DEBUG).target
    return settings.load_target(config)


@pytest.mark.slow
def test_the_loop_meets_the_formula(monkeypatch):
    """The mean calls of 32 independent answers: within five of its own standard errors of what is exact for answers of
    this length (a right loop is further off once in 50 000 seeds; the seed is fixed). And a loop that accepts drafts at
    0.77 is told from one at 0.7."""
    model = target()
    found = monte_carlo.measure(model, CELL, SMALL)
    assert abs(found["standard_errors"]) < 5
    assert found["tau"] == pytest.approx(32 * 256 / found["target_calls"])
    assert found["formula"] == pytest.approx((1 - 0.7**4) / 0.3) and found["exact"] < found["formula"]
    right = formulas.expected_calls
    monkeypatch.setattr(formulas, "expected_calls", lambda alpha, *others: right(0.77, *others))
    assert abs(monte_carlo.measure(model, CELL, SMALL)["standard_errors"]) > 5


@pytest.mark.slow
def test_debug_config_resumes_and_a_missed_formula_fails(capsys):
    code, document, out, err = run(capsys)
    assert code == 0 and [record["gamma"] for record in document["records"]] == [3]
    assert "monte_carlo.png" in document["figures"] and pathlib.Path("out/monte_carlo.png").exists()
    code, again, _, err = run(capsys)
    assert code == 0 and again["records"] == document["records"] and "monte carlo" not in err  # nothing ran
    cell = document["records"][0]
    code, failed, _, err = run(capsys, f"monte_carlo.tolerance={abs(cell['difference']) / 2}", "run.folder=other")
    assert code == cli.FAILED and failed["records"] == document["records"]
    assert f"alpha 0.7 gamma 3: {100 * cell['difference']:+.2f}%" in err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("monte_carlo.cells=[{alpha: 1.5, gamma: 2}]", "monte_carlo.cells.0.alpha: alpha 1.5 is outside [0, 1]"),
        ("monte_carlo.cells=[{alpha: 0.5, gamma: 0}]", "gamma 0 is below 1"),
        ("monte_carlo.cells=[{alpha: 0.5, gamma: 1}, {alpha: 0.5, gamma: 1}]", "one is named twice"),
        ("monte_carlo.rows=1", "rows 1 is below 2"),
        ("monte_carlo.new_tokens=1", "new_tokens 1 is below 2"),
        ("monte_carlo.new_tokens=512", "max_positions 512 is below the 513"),
        ("monte_carlo.tolerance=0", "tolerance 0.0 is not above 0"),
        ("trees.acceptance=[0.9, 0.2]", "sums to 1.1"),
        ("trees.knees=[0]", "knees [0]"),
        ("trees.max_depth=0", "max_depth 0 is below 1"),
        ("gammas=[0]", "gammas [0]"),
        ("costs=[]", "costs []"),
        ("max_gamma=0", "max_gamma 0 is below 1"),
        ("max_gamma=20", "max_gamma 20 gives 1048576 blocks to enumerate; the limit is 1000000"),
        ("laws=[]", "laws is empty"),
        ("laws=[{name: x, target: [0.5, 0.4], draft: [0.5, 0.5]}]", "is no law over 2 tokens"),
    ],
)
def test_bad_settings_are_named(capsys, override, words):
    code, _, out, err = run(capsys, override)
    assert code == cli.USER_ERROR and out == "" and words in err and "Traceback" not in err
    assert not pathlib.Path("out").exists()


def test_the_config_reads_and_its_cells_are_those_of_table_1():
    config = cli.config_lib.load(theory.Theory, CONFIGS / "theory.yaml")
    rows = published.load("leviathan2023").tables["table1"].rows
    assert [(cell.alpha, cell.gamma) for cell in config.monte_carlo.cells] == [(r["alpha"], r["gamma"]) for r in rows]
    assert config.monte_carlo.tolerance == 0.01 and math.isclose(sum(config.laws[0].target), 1)


def test_a_target_with_stop_ids_is_refused():
    model = dataclasses.replace(target(), stop_ids=(3,))
    with pytest.raises(ValueError, match=r"stop ids \[3\]"):
        monte_carlo.measure(model, CELL, SMALL)
