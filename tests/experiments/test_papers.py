"""Which published row stands beside a cell."""

import pytest

from experiments import papers
from jspec import config


def settings(**content):
    return config.parse(papers.PaperSettings, content)


def find(paper, method="m", task="chat", temperature=0.0, batch=1):
    return papers.find(paper, method, task=task, temperature=temperature, batch=batch)


EAGLE2 = dict(
    name="eagle2_2024",
    table="table1",
    target="Vicuna 7B",
    tasks={"chat": "MT-bench", "code": "HumanEval"},
    rows={"m": [{"row": {"method": "EAGLE-2"}}]},
)


def test_target_task_and_temperature_choose_the_row():
    paper = settings(**EAGLE2)
    found = find(paper)
    assert (found.paper, found.table) == ("eagle2_2024", "table1")
    assert found.row == "method=EAGLE-2, target=Vicuna 7B, task=MT-bench, temperature=0"
    assert (found.speedup, found.tau, found.alpha) == (3.62, 4.98, None)
    assert find(paper, task="code", temperature=1.0).tau == 4.65
    # None where the paper has none: another temperature, task or method, or no paper at all.
    assert find(paper, temperature=0.5) is None
    assert find(paper, task="maths") is None
    assert find(paper, method="other") is None
    assert find(None) is None


def test_columns_by_task_and_ratios_of_tokens_per_second():
    paper = settings(
        name="frspec2025",
        table="table2",
        tasks={"chat": "conv", "code": "code"},
        rows={
            "m": [
                {"row": {"config": "EAGLE-2 + FR 32k"}, "speedup": "{task}", "over": {"config": "vanilla"}},
                {"table": "table1", "row": {"config": "FR 32k SlimPajama"}, "tau": "{task}", "speedup": ""},
            ]
        },
    )
    found = find(paper)
    assert found.speedup == pytest.approx(227.68 / 90.43) and found.tau == 3.89
    assert found.row == "config=EAGLE-2 + FR 32k; table1: config=FR 32k SlimPajama"
    assert find(paper, task="code").speedup == pytest.approx(183.19 / 90.1)


def test_batch_and_temperature_of_a_row():
    by_column = settings(
        name="eagle1_2024", table="table7", target="Vicuna 7B", tasks={"chat": "MT-bench"},
        rows={"m": [{"speedup": "bs{batch}"}]},
    )  # fmt: skip
    assert [find(by_column, batch=batch).speedup for batch in (1, 3)] == [2.9, 2.65]
    assert find(by_column, batch=5) is None
    by_row = settings(
        name="eagle3_2025", table="table3", tasks={"chat": "MT-bench"}, rows={"m": [{"speedup": "eagle3"}]}
    )
    assert find(by_row, batch=16).speedup == 1.48 and find(by_row) is None
    greedy = settings(
        name="chen2023", table="table1", tasks={"summarisation": "XSum"},
        rows={"m": [
            {"row": {"method": "SpS", "sampling": "greedy"}, "temperature": 0.0},
            {"row": {"method": "SpS", "sampling": "nucleus"}, "temperature": 1.0},
        ]},
    )  # fmt: skip
    assert [find(greedy, task="summarisation", temperature=t).speedup for t in (0.0, 1.0)] == [2.01, 1.92]


def test_a_row_for_all_tasks_together():
    paper = settings(
        name="specbench2024", table="leaderboard", target="Vicuna-13B-v1.3",
        tasks={"chat": "multi_turn", "overall": "overall"},
        rows={"m": [
            {"row": {"device": "A100 80GB", "method": "EAGLE2"}, "speedup": "{task}"},
            {"row": {"device": "A100 80GB", "method": "EAGLE2"}, "task": "overall", "tau": "mean_accepted_tokens"},
        ]},
    )  # fmt: skip
    assert (find(paper).speedup, find(paper).tau) == (2.95, None)
    found = find(paper, task=papers.OVERALL)
    assert (found.speedup, found.tau) == (2.46, 4.43) and found.row.count("method=EAGLE2") == 1


def test_what_is_no_number_is_none():
    paper = settings(
        name="medusa2024", table="table1", target="Zephyr-7B", tasks={"chat": "MT-Bench"},
        rows={"m": [{"speedup": "speedup_spec_decoding"}], "n": [{"speedup": "method", "tau": "acceleration_rate"}]},
    )  # fmt: skip
    assert find(paper) is None  # null in the table
    assert find(paper, "n").speedup is None and find(paper, "n").tau == 3.14


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(name="eagle2_204"), "no published numbers of 'eagle2_204'; did you mean 'eagle2_2024'"),
        (dict(table="table9"), "eagle2_2024 has no table 'table9'; did you mean 'table"),
        (dict(target="Vicuna 7b"), "eagle2_2024, table1: no target 'Vicuna 7b'; did you mean 'Vicuna 7B'"),
        (dict(tasks={"chat": "MT-Bench"}), "eagle2_2024, table1: no task 'MT-Bench'; did you mean 'MT-bench'"),
        (dict(rows={"m": [{"row": {"metod": "EAGLE"}}]}), "no column 'metod'; did you mean 'method'"),
        (dict(rows={"m": [{"row": {"method": "EAGLE"}, "tau": "taus"}]}), "no column 'taus'; did you mean 'tau'"),
        (dict(rows={"m": [{"row": {"method": "EAGLE"}, "tau": "{tsk}"}]}), "'{tsk}': only {task} and {batch} can"),
        (dict(rows={"m": [{"row": {"method": "{}"}}]}), "'{}': only {task} and {batch} can be filled in"),
        (dict(rows={"m": [{"row": {"method": "EAGLE-9"}}]}), "no row has {'method': 'EAGLE-9'}"),
        (dict(rows={"m": [{}]}), "several rows of task 'MT-bench' fit {}; name more columns"),
        (
            dict(table="table2", target="LLaMA3-Instruct 8B", tasks={"overall": "MT-bench"}),
            "it does not say how figures",
        ),
        (dict(rows={"m": [{"row": {"method": "EAGLE"}, "task": "cod"}]}), "no task 'cod'; did you mean 'code'"),
        (dict(rows={"m": [{"rows": {}}]}), "paper.rows.m.0.rows: unknown key; did you mean 'row'"),
    ],
)
def test_rows_that_no_cell_can_find_are_refused(changes, words):
    with pytest.raises(config.ConfigError) as caught:
        config.parse(papers.PaperSettings, {**EAGLE2, **changes}, source="paper")
    assert words in str(caught.value).replace("paper: rows", "paper.rows")
