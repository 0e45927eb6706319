"""Our figures beside the papers', on run folders made by hand: every number is worked out here."""

import dataclasses

import pytest

from experiments import (
    beside_paper,
    grids,
    means,
    paper_tables,
    papers,
    records,
    report_facts,
    reported,
)
from jspec import config as config_lib
from tests.experiments import run_folders

PUBLISHED = run_folders.PUBLISHED


def test_a_papers_table_has_ours_theirs_and_the_difference(cells, make_record):
    changes = dict(speedup=1.25, speedup_ci=(1.1, 1.4), alpha=0.61)
    found = cells(
        run_folders.pair(make_record, published=PUBLISHED, **changes),
        run_folders.pair(make_record, published=PUBLISHED, task="code", temperature=1.0, speedup=None, speedup_ci=None),
    )
    assert beside_paper.sources(found) == [("leviathan2023", "table2")]
    cold, warm = beside_paper.compared(found, ("leviathan2023", "table2"))
    assert cold.title == "leviathan2023, table2, T = 0" and warm.title == "leviathan2023, table2, T = 1"
    # tau is no column: the paper's row has none.
    assert cold.headers == ("method", "row of the paper", "", "chat: speedup", "chat: alpha")
    assert cold.rows == (
        ("standard", "T5-base", "ours", "1.25 [1.10, 1.40]", "0.61"),
        ("", "", "theirs", "2.80", "0.80"),
        ("", "", "difference", "-1.55", "-0.19"),
    )
    assert [row[3] for row in warm.rows] == ["-", "2.80", "-"]
    assert grids.TAU in cold.notes


def test_a_row_is_what_its_cells_published_rows_share(cells, make_record):
    def row(task):
        return records.Published("eagle2_2024", "table1", f"method=SpS, target=Vicuna 13B, task={task}", 1.9, 2.3)

    found = cells(
        run_folders.pair(make_record, published=row("MT-bench")),
        run_folders.pair(make_record, task="code", published=row("HumanEval")),
    )
    (grid,) = beside_paper.compared(found, ("eagle2_2024", "table1"))
    assert [line[:3] for line in grid.rows] == [
        ("standard", "method=SpS, target=Vicuna 13B", "ours"),
        ("", "", "theirs"),
        ("", "", "difference"),
    ]
    assert grid.headers[3:] == tuple(
        f"{t}: {q}" for t in ("chat (MT-bench)", "code (HumanEval)") for q in ("speedup", "tau")
    )


def test_a_task_that_one_method_lacks_is_a_dash(cells, make_record):
    both = run_folders.pair(make_record, published=PUBLISHED) + run_folders.pair(
        make_record, published=PUBLISHED, task="code"
    )
    one = [run_folders.pair(make_record, published=PUBLISHED, method="other")[1]]
    (grid,) = beside_paper.compared(cells(both, one), ("leviathan2023", "table2"))
    assert grid.headers[3:] == ("chat: speedup", "chat: alpha", "code: speedup", "code: alpha")
    assert grid.rows[3] == ("other", "T5-base", "ours", "1.37 [1.60, 1.80]", "0.61", "-", "-")


def test_without_published_numbers_the_table_is_ours(cells, make_record):
    found = cells(run_folders.pair(make_record), run_folders.pair(make_record, task="code"))
    assert beside_paper.sources(found) == []
    (grid,) = beside_paper.alone(found)
    assert grid.headers == ("method", "chat: speedup", "chat: tau", "code: speedup", "code: tau")
    assert grid.rows == (("standard", "1.37 [1.60, 1.80]", "2.00", "1.37 [1.60, 1.80]", "2.00"),)


def eagle_run(folder, make_record, tasks=("chat", "code"), **settings):
    """EAGLE-2's cells of some tasks beside the paper's; chat is twice as fast as code, and has twice its tau."""
    paper = config_lib.parse(papers.PaperSettings, run_folders.PAPER)
    results = []
    for task in tasks:
        found = papers.find(paper, "eagle 2", task=task, temperature=0.0, batch=1)
        speed = dict(speedup=2.0, tau=3.0) if task == "chat" else dict(speedup=1.0, tau=1.5)
        results += run_folders.pair(
            make_record, method="eagle 2", task=task, published=found, alpha=0.5, speedup_ci=None, tau_ci=None, **speed
        )
    config = {
        **run_folders.CONFIG,
        "paper": run_folders.PAPER,
        "run": {"command": "python -m experiments.benchmark a.yaml x=1"},
    }
    return reported.load(run_folders.write(folder, results, config={**config, **settings}))


def test_a_papers_mean_stands_beside_ours_made_by_its_rule(tmp_path, make_record):
    run = eagle_run(tmp_path / "run", make_record)
    (grid,) = beside_paper.compared(reported.cells([run]), ("eagle2_2024", "table1"))
    assert grid.headers[3:] == (
        *(f"{task}: {quantity}" for task in ("chat (MT-bench)", "code (HumanEval)") for quantity in ("speedup", "tau")),
        "overall: speedup",
        "overall: tau",
    )
    # The means of 2 and 1, and of 3 and 1.5; the paper prints 3.39 and 4.68 as means of six tasks.
    assert [line[-2:] for line in grid.rows] == [("1.50", "2.25"), ("3.39", "4.68"), ("-1.89", "-2.43")]
    (note,) = [note for note in grid.notes if note.startswith("overall: ")]
    assert note.startswith(
        "overall: speedup: the mean of the tasks' figures; tau: the mean of the tasks' figures. Ours "
    )
    assert "over chat, code; theirs over all tasks of the paper" in note and "62 of 64" in note


def test_a_mean_needs_every_task_and_more_than_one(tmp_path, make_record):
    one = eagle_run(tmp_path / "one", make_record, tasks=("code",))
    (grid,) = beside_paper.compared(reported.cells([one]), ("eagle2_2024", "table1"))
    assert grid.headers[3:] == ("code (HumanEval): speedup", "code (HumanEval): tau")
    # Another method's third task, which this one has not finished.
    both = eagle_run(tmp_path / "both", make_record)
    extra = make_record(method="eagle 3", task="maths", published=both.records[1].published)
    cells = reported.cells([dataclasses.replace(both, records=(*both.records, extra), points=("",) * 5)])
    (grid,) = beside_paper.compared(cells, ("eagle2_2024", "table1"))
    assert grid.headers[-1] == "maths (MT-bench): tau" and "overall" not in "".join(grid.headers)


def test_a_task_that_the_paper_lacks_is_in_none_of_its_means(tmp_path, make_record):
    run = eagle_run(tmp_path / "run", make_record)
    alien = run_folders.pair(make_record, method="eagle 2", task="translation", tau=9.0, speedup=9.0)
    more = dataclasses.replace(run, records=(*run.records, *alien), points=("",) * 6)
    (grid,) = beside_paper.compared(reported.cells([more]), ("eagle2_2024", "table1"))
    assert grid.rows[0][-2:] == ("1.50", "2.25") and "translation" not in "".join(grid.headers)
    assert any(cell.record.task == "translation" for cell in reported.cells([more]))


def test_what_the_paper_says_is_looked_up_anew_and_only_of_what_was_run(tmp_path, make_record):
    config = {**run_folders.CONFIG, "paper": run_folders.PAPER}
    stale = records.Published("eagle2_2024", "table1", "method=EAGLE-2", speedup=1.0)
    results = run_folders.pair(make_record, method="eagle 2", published=stale)
    run = reported.load(run_folders.write(tmp_path / "run", results, config=config))
    assert (run.records[1].published.speedup, run.records[1].published.tau) == (3.62, 4.98)
    differs = report_facts.differences(("eagle2_2024", "table1"), reported.cells([run]), [run])
    theirs = {row[0]: row[1] for row in differs.rows}
    assert (theirs["target"], theirs["data"]) == ("Vicuna 7B", "MT-bench")


def test_a_number_is_credited_to_the_table_that_prints_it(tmp_path, make_record):
    paper = {
        "name": "eagle1_2024", "table": "table2", "target": "Vicuna 7B", "tasks": {"chat": "MT-bench"},
        "rows": {"eagle": [{"row": {"method": "EAGLE"}}, {"table": "fig1_fig2", "row": {"method": "EAGLE"}}]},
    }  # fmt: skip
    results = run_folders.pair(make_record, method="eagle")
    folder = run_folders.write(tmp_path / "run", results, config={**run_folders.CONFIG, "paper": paper})
    text = paper_tables.text([reported.load(folder)])
    named = {row[3]: row[0] for row in run_folders.markdown_rows(text)[2:]}
    assert named == {"speedup": "fig1_fig2, Vicuna 7B", "tau": "table2, Vicuna 7B"}
    assert "\n* fig1_fig2, table2: `" in text


def test_the_rules_of_means(make_record):
    record = lambda task, **kw: make_record(task=task, num_prompts=1, new_tokens=101, before_repeat=None, **kw)
    # 100 tokens in 50 calls that accepted 50 drafts, and in 20 that accepted 80; in 5 s and in 2.5 s.
    one = dict(offered=(50, 0, 0, 0), tested=(50, 0, 0, 0), acceptance_histogram=(0, 50, 0, 0, 0), target_calls=50)
    four = dict(offered=(20,) * 4, tested=(20,) * 4, acceptance_histogram=(0, 0, 0, 0, 20), target_calls=20)
    own = [
        record("chat", tokens_per_second=20.0, speedup=2.0, tau=2.0, **one),
        record("code", tokens_per_second=40.0, speedup=4.0, tau=5.0, **four),
    ]
    none = dict(offered=(), tested=(), acceptance_histogram=(100,), target_calls=100)
    base = [record(task, method="autoregressive", tokens_per_second=10.0, **none) for task in ("chat", "code")]
    over = lambda rule, quantity: means.over_tasks(rule, quantity, own, base)
    assert over("tasks", "speedup") == 3.0 and over("tasks", "tau") == 3.5
    assert over("pooled", "speedup") == pytest.approx((200 / 7.5) / 10)
    slower = [dataclasses.replace(base[0], tokens_per_second=30.0), base[1]]
    assert means.over_tasks("rates", "speedup", own, slower) == pytest.approx(30 / 20)  # not the mean of 2/3 and 4
    assert over("pooled", "tau") == pytest.approx(200 / 70)
    assert means.over_tasks("tasks", "speedup", [dataclasses.replace(own[0], speedup=None), own[1]], base) is None
    assert means.over_tasks("pooled", "tau", [dataclasses.replace(own[0], offered=None), own[1]], base) is None


def test_a_papers_short_table_says_what_made_it(tmp_path, make_record):
    text = paper_tables.text([eagle_run(tmp_path / "first", make_record)])
    assert text.splitlines() == [
        "**Yuhui Li, Fangyun Wei, Chao Zhang, Hongyang Zhang: EAGLE-2: Faster Inference of Language Models with "
        "Dynamic Draft Trees (EMNLP 2024, arXiv:2406.16858 (v2))**",
        "",
        "| table | method | T |  | chat | code | overall |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| table1, Vicuna 7B | eagle 2 | 0 | speedup | 2.00 / 3.62 | 1.00 / 3.95 | 1.50 / 3.39 |",
        "| table1, Vicuna 7B | eagle 2 | 0 | tau | 3.00 / 4.98 | 1.50 / 5.33 | 2.25 / 4.68 |",
        "",
        "Each cell: ours / theirs. overall: ours over the tasks shown, theirs over all of the paper's.",
        "",
        "* table1: `python -m experiments.benchmark a.yaml x=1` at commit 0123456789ab; t.gguf for Vicuna 7B; cpu, "
        "float32, batch 1; question.jsonl, 2 a task, 64 new tokens each",
    ]


def test_the_tables_of_a_paper_share_one(tmp_path, make_record):
    first = eagle_run(tmp_path / "first", make_record)
    other = records.Published("eagle2_2024", "table2", "method=EAGLE-2", speedup=3.1)
    second = [run_folders.pair(make_record, method="eagle 2", task="code", batch=2, published=other, speedup=0.5)[1]]
    alien = run_folders.pair(make_record, published=PUBLISHED, speedup=1.25)
    runs = [
        first,
        *(
            reported.load(run_folders.joined(tmp_path / name, own))
            for name, own in (("second", second), ("third", alien))
        ),
    ]
    text = paper_tables.text(runs)
    rows = run_folders.markdown_rows(text)
    assert [row[:4] for row in rows] == [
        ["table", "method", "T", ""], ["---"] * 4, ["table1, Vicuna 7B", "eagle 2", "0", "speedup"],
        ["table1, Vicuna 7B", "eagle 2", "0", "tau"], ["table2", "eagle 2", "0", "speedup"],
        ["table", "method", "T", ""], ["---"] * 4, ["table2", "standard", "0", "speedup"],
        ["table2", "standard", "0", "alpha"],
    ]  # fmt: skip
    assert rows[4][4:] == ["-", "0.50 / 3.10", "-"]
    again = f"python -m experiments.benchmark {tmp_path / 'second' / 'config.yaml'}"
    assert f"* table2: `{again}` at commit 0123456789ab; " in text and "batch 2" in text
    assert paper_tables.text([]) == ""
