"""The papers' numbers: every file parses, and picked rows say what the papers print."""

import statistics

import pytest

from experiments import published


def test_every_paper_is_there_with_its_tables():
    assert published.names() == (
        "blockverification2024",
        "chen2023",
        "distillspec2023",
        "eagle1_2024",
        "eagle2_2024",
        "eagle3_2025",
        "frspec2025",
        "leviathan2023",
        "lookahead2024",
        "medusa2024",
        "sequoia2024",
        "specbench2024",
    )
    sizes = {name: sum(len(table.rows) for table in published.load(name).tables.values()) for name in published.names()}
    assert sizes == {
        "blockverification2024": 27,
        "chen2023": 9,
        "distillspec2023": 6,
        "eagle1_2024": 110,
        "eagle2_2024": 234,
        "eagle3_2025": 169,
        "frspec2025": 59,
        "leviathan2023": 70,
        "lookahead2024": 37,
        "medusa2024": 43,
        "sequoia2024": 16,
        "specbench2024": 41,
    }


@pytest.mark.parametrize("name", published.names())
def test_a_paper_is_cited_and_its_tables_are_told_apart(name):
    paper = published.load(name)
    assert paper.name == name and {"title", "authors", "year", "venue", "arxiv"} <= set(paper.citation)
    assert isinstance(paper.citation["arxiv"], str) and "hardware" in paper.facts
    for id, table in paper.tables.items():
        assert table.id == id and table.title and table.level in published.LEVELS
        for row in table.rows:
            assert tuple(row) == table.columns
            # Every number is one, but for ranges and fractions that are printed as such.
            assert all(value is None or isinstance(value, str | int | float | list) for value in row.values())
        texts = [str(row) for row in table.rows]
        assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("paper", "table", "row"),
    [
        ("leviathan2023", "table1", dict(alpha=0.9, gamma=10, ops_increase=1.6, speedup=6.86)),
        (
            "leviathan2023",
            "table4",
            dict(
                target="T5-XXL 11B",
                draft="T5-base",
                task="EnDe",
                temperature=1,
                gamma=5,
                alpha=0.68,
                c=0.04,
                exp=2.4,
                emp=2.4,
            ),  # fmt: skip
        ),
        (
            "eagle2_2024",
            "table1",
            dict(method="EAGLE-2", target="Vicuna 13B", task="HumanEval", temperature=0, speedup=4.96, tau=5.41),
        ),  # fmt: skip
        ("eagle3_2025", "table3", dict(batch=64, eagle=0.99, eagle3=1.38)),
        (
            "frspec2025",
            "table2",
            dict(
                config="EAGLE-2 + FR 32k",
                mt=195.6,
                conv=227.68,
                rag=184.85,
                math=243.36,
                qa=190.27,
                summ=188.14,
                code=183.19,
                average=201.87,
                speedup=2.27,
            ),
        ),  # fmt: skip
        ("medusa2024", "table3", dict(step="+ optimised tree", speedup=2.2)),
        (
            "sequoia2024",
            "blog_on_chip",
            dict(
                gpu="A100",
                target="Llama2-7B",
                draft="JackFram-68M",
                temperature=0,
                sequoia_ms=6.0,
                baseline_ms=24.2,
                speedup=4.04,
            ),
        ),  # fmt: skip
        ("blockverification2024", "gamma_scaling", dict(gamma=8, token=3.41, block=3.7, gain_pct=8.5)),
        (
            "lookahead2024",
            "table3",
            dict(row=8, setting="balanced", N=5, W=15, G=15, prompt_ref=False, S=1.96, speedup=1.78),
        ),  # fmt: skip
    ],
)
def test_picked_rows_are_as_printed(paper, table, row):
    assert row in published.load(paper).table(table).rows


def test_provenance_is_kept():
    assert published.load("chen2023").table("table1").level == "secondary"
    assert published.load("specbench2024").table("leaderboard").level == "verified"
    assert published.load("blockverification2024").table("toy_example").level == "recalled"


def mean_column(paper):
    """Per row of Mean and quantity: the mean of the tasks' printed figures, and what is printed."""
    rows = published.load(paper).table("table1").rows
    groups = {}
    for row in rows:
        groups.setdefault((row["method"], row["target"], row["temperature"]), {})[row["task"]] = row
    for tasks in groups.values():
        printed = tasks.pop("Mean")
        for quantity in ("speedup", "tau"):
            if printed[quantity] is not None:
                yield statistics.fmean(row[quantity] for row in tasks.values()), printed[quantity]


@pytest.mark.parametrize(
    ("paper", "equal", "number", "furthest"), [("eagle2_2024", 62, 64, 0.02), ("eagle3_2025", 45, 48, 0.05)]
)
def test_what_is_said_of_mean_columns_can_be_recomputed(paper, equal, number, furthest):
    off = [abs(mean - printed) for mean, printed in mean_column(paper)]
    assert (sum(value <= 0.0051 for value in off), len(off)) == (equal, number) and max(off) < furthest
    overall = published.load(paper).table("table1").overall
    assert overall.rules == {"speedup": "tasks", "tau": "tasks"} and f"{equal} of {number}" in overall.source


def test_what_is_said_of_other_averages_can_be_recomputed():
    tasks = ("mt", "conv", "rag", "math", "qa", "summ", "code")
    for id in ("table1", "table2"):
        for row in published.load("frspec2025").table(id).rows:
            assert statistics.fmean(row[task] for task in tasks) == pytest.approx(row["average"], abs=0.0051)
    vanilla, *methods = published.load("frspec2025").table("table2").rows
    assert all(row["average"] / vanilla["average"] == pytest.approx(row["speedup"], abs=0.0051) for row in methods)
    *sets, average = published.load("blockverification2024").table("table1").rows
    for column in ("block_eff_token", "block_eff_block", "walltime_token", "walltime_block"):
        assert statistics.fmean(row[column] for row in sets) == pytest.approx(average[column], abs=0.0051)
    subtasks = ("multi_turn", "translation", "summarization", "qa", "math", "rag")
    leaderboard = published.load("specbench2024").table("leaderboard")
    off = [abs(statistics.fmean(row[task] for task in subtasks) - row["overall"]) for row in leaderboard.rows]
    assert 0.0051 < max(off) <= 0.0201 and leaderboard.overall.rules == {"speedup": "rates", "tau": "pooled"}


def test_what_is_not_there_names_the_nearest():
    with pytest.raises(ValueError, match="no published numbers of 'eagle1_2042'; did you mean 'eagle1_2024'"):
        published.load("eagle1_2042")
    with pytest.raises(ValueError, match="chen2023 has no table 'table2'; did you mean 'table1'"):
        published.load("chen2023").table("table2")


TABLE = "citation: {{}}\ntables: {{t: {{title: a, provenance: 'recalled: x', rows: [{{a: 1}}]{}}}}}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tables: [1", "not valid YAML"),
        ("citation: {}", "expected a mapping with citation and tables"),
        ("citation: {}\ntables: {t: {title: a, rows: [{a: 1}]}}", "t: expected title, provenance and rows"),
        ("citation: {}\ntables: {t: {title: a, provenance: heard, rows: [{a: 1}]}}", "provenance 'heard' begins with"),
        (
            TABLE.format(", overall: {tau: tasks}"),
            "t: overall: expected a source, and a rule for speedup, tau or alpha",
        ),
        (TABLE.format(", overall: {taus: tasks, source: a}"), "t: overall: expected a source, and a rule"),
        (TABLE.format(", overall: {tau: task, source: a}"), "tau has the rule 'task'; did you mean 'tasks'"),
        (TABLE.format(", overall: {tau: rates, source: a}"), "t: overall: tau has the rule 'rates'"),
        (TABLE.format(", means: {}"), "t: expected title, provenance and rows, and perhaps overall"),
        (
            "citation: {}\ntables: {t: {title: a, provenance: 'recalled: x', rows: [{a: 1}, {b: 1}]}}",
            r"t: row 2 has the columns \['b'\]; the first has \['a'\]",
        ),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, text, words):
    path = tmp_path / "paper.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        published.read(path)
