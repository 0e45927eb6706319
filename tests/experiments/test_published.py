"""The papers' numbers: every file parses, and picked rows say what the papers print."""

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


def test_what_is_not_there_names_the_nearest():
    with pytest.raises(ValueError, match="no published numbers of 'eagle1_2042'; did you mean 'eagle1_2024'"):
        published.load("eagle1_2042")
    with pytest.raises(ValueError, match="chen2023 has no table 'table2'; did you mean 'table1'"):
        published.load("chen2023").table("table2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tables: [1", "not valid YAML"),
        ("citation: {}", "expected a mapping with citation and tables"),
        ("citation: {}\ntables: {t: {title: a, rows: [{a: 1}]}}", "t: expected title, provenance and rows"),
        ("citation: {}\ntables: {t: {title: a, provenance: heard, rows: [{a: 1}]}}", "provenance 'heard' begins with"),
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
