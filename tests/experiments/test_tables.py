import io

import pytest

from experiments import overall, records, tables


def rows(markdown):
    """The table as one dict per row."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def autoregressive(make_record, **changes):
    nothing = dict(alpha=None, acceptance_histogram=(115,), acceptance_by_position=(), greedy_check=None, cost=None)
    nothing |= dict(target_calls=115, offered=(), tested=(), before_repeat=None, draft=None, draft_sha256=None)
    same = dict(method="autoregressive", speedup=1.0, speedup_ci=(1.0, 1.0), tau=1.0, expected_speedup=1.0)
    return make_record(**{**nothing, **same, **changes})


def test_a_row_per_task_temperature_and_method(make_record):
    results = [
        autoregressive(make_record),
        autoregressive(make_record, temperature=1.0),
        autoregressive(make_record, task="code"),
        make_record(),
        make_record(temperature=1.0, greedy_check=None),
        make_record(task="code"),
    ]
    table = rows(tables.results_table(results))
    assert [(row["task"], row["T"], row["method"]) for row in table] == [
        (task, t, method)
        for task, t in [("chat", "0"), ("chat", "1"), ("code", "0")]
        for method in ("autoregressive", "standard")
    ]
    assert table[1] == {
        "task": "chat",
        "T": "0",
        "method": "standard",
        "tau": "2.30",
        "alpha": "0.61",
        "accepted": "10/20/15/5",
        "target calls": "50",
        "tokens/s": "61.5",
        "TTFT ms": "210",
        "TPOT ms": "15.2",
        "speedup": "1.71 [1.60, 1.80]",
        "expected": "1.75",
        "greedy check": "equal to autoregressive: 2 of 2",
    }
    baseline = table[0]
    assert baseline["speedup"] == "1.00"
    assert {baseline[column] for column in ("alpha", "accepted", "greedy check")} == {"-"}
    assert table[3]["greedy check"] == "-"


def test_definitions_stand_under_the_table(make_record):
    markdown = tables.results_table([make_record()])
    below = markdown.split("|\n\n")[1]
    assert "tau: tokens emitted per target call, the corrected or bonus token included" in below
    assert "speedup: tokens/s over those of autoregressive decoding" in below and "ratio of totals" in below


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (records.GreedyCheck(30, 30, 0), "equal to autoregressive: 30 of 30"),
        (records.GreedyCheck(30, 29, 1), "equal to autoregressive: 29 of 30, 1 near-tie"),
        (records.GreedyCheck(30, 28, 2), "equal to autoregressive: 28 of 30, 2 near-ties"),
        (records.GreedyCheck(30, 27, 1), "equal to autoregressive: 27 of 30, 1 near-tie, 2 different"),
        (None, "-"),
    ],
)
def test_greedy_check_in_words(check, text):
    assert tables.greedy_text(check) == text


def test_a_slowdown_is_printed_as_it_is_and_said_in_words(make_record):
    costly = records.Cost(26.0, 30.0, 40.0, 0.4)
    slow = make_record(speedup=0.63, speedup_ci=(0.6, 0.66), alpha=0.02, cost=costly)
    markdown = tables.results_table([autoregressive(make_record), slow])
    assert rows(markdown)[1]["speedup"] == "0.63 [0.60, 0.66]"
    note = "standard (chat, T = 0): 0.63x - drafting costs more than it saves here (alpha 0.02, c 0.40)"
    assert markdown.splitlines()[-1] == note
    assert tables.notes([slow]) == [note]


def test_a_slowdown_within_the_noise_is_called_that(make_record):
    record = make_record(speedup=0.98, speedup_ci=(0.9, 1.05), alpha=None, cost=None)
    assert tables.notes([record]) == ["standard (chat, T = 0): 0.98x - no gain here, within the noise"]
    unknown = make_record(speedup=0.98, speedup_ci=None, alpha=None, cost=None)
    assert tables.notes([unknown]) == ["standard (chat, T = 0): 0.98x - drafting costs more than it saves here"]
    assert rows(tables.results_table([unknown]))[0]["speedup"] == "0.98"


def test_no_note_without_a_slowdown(make_record):
    assert tables.notes([make_record(), autoregressive(make_record, speedup=0.999)]) == []


def test_settings_become_columns_where_they_vary(make_record):
    table = rows(tables.results_table([make_record(), make_record(batch=4), make_record(batch=4, seed=1)]))
    assert [(row["batch"], row["seed"]) for row in table] == [("1", "0"), ("4", "0"), ("4", "1")]
    assert "dtype" not in table[0]


def test_lossy_methods_and_odd_names(make_record):
    table = rows(tables.results_table([make_record(method="typical|0.3", lossless=False)]))
    assert table[0]["method"] == "typical\\|0.3 (lossy)"


def test_a_long_histogram_is_cut_and_its_rest_summed(make_record):
    table = rows(tables.results_table([make_record(acceptance_histogram=tuple(range(1, 12)))]))
    assert table[0]["accepted"] == "1/2/3/4/5/6/7/8/+30"


def test_terminal_table_has_the_same_cells(make_record):
    console = pytest.importorskip("rich.console").Console(width=250, record=True, file=io.StringIO())
    console.print(tables.terminal_table([autoregressive(make_record), make_record()]))
    text = console.export_text()
    assert "1.71 [1.60, 1.80]" in text and "10/20/15/5" in text and "equal to autoregressive: 2 of 2" in text


# All tasks together.


def other_task(make_record):
    """Chains of 3 in the task `code`: 20 calls that accept 0, 0, 10 and 10 times 0, 1, 2 and 3 drafts."""
    before = records.BeforeRepeat(
        new_tokens=32,
        target_calls=10,
        tau=3.0,
        alpha=1.0,
        acceptance_histogram=(0, 0, 10, 0),
        acceptance_by_position=(1.0, 1.0, 0.0),
        offered=(10, 10, 5),
        tested=(10, 10, 0),
    )
    return make_record(
        task="code",
        num_prompts=2,
        new_tokens=72,
        target_calls=20,
        tau=3.5,
        acceptance_histogram=(0, 0, 10, 10),
        offered=(20, 20, 20),
        tested=(20, 20, 20),
        tokens_per_second=35.0,
        before_repeat=before,
    )


def test_all_tasks_together_by_hand(make_record):
    """Counts are added; no rate is an average of rates."""
    baseline = [autoregressive(make_record), autoregressive(make_record, task="code", new_tokens=117)]
    results = [*baseline, make_record(), other_task(make_record), make_record(temperature=1.0, offered=None)]
    _, found = overall.overall(results)  # the record of an earlier version is left out
    assert (found.method, found.tasks, found.num_prompts, found.new_tokens) == ("standard", 2, 4, 117 + 72)
    assert found.target_calls == 70 and found.tau == (115 + 70) / 70
    assert found.acceptance_histogram == (10, 20, 25, 15)
    assert found.alpha == (20 + 2 * 25 + 3 * 15) / (110 + 60)
    assert found.acceptance_by_position == (60 / 70, 40 / 70, 15 / 70)
    assert found.tokens_per_second == pytest.approx((115 + 70) / (115 / 61.5 + 70 / 35))
    assert found.speedup == pytest.approx(found.tokens_per_second / 61.5)
    before = found.before_repeat
    assert (before.new_tokens, before.target_calls) == (62 + 32, 40)
    assert before.tau == (60 + 30) / 40 and before.alpha == (10 + 20 + 20) / (60 + 20)
    assert before.acceptance_by_position == (30 / 40, 20 / 40, 0 / 35)
    assert found.to_json()["before_repeat"]["tested"] == [40, 30, 10]

    table = rows(tables.overall_table(results))
    assert [(row["T"], row["method"]) for row in table] == [("0", "autoregressive"), ("0", "standard")]
    lines = [line for line in tables.overall_table(results).splitlines() if line.startswith("| 0 | standard")]
    assert lines == [
        "| 0 | standard | 4 | 2.64 | 0.68 | 0.86 0.57 0.21 | 47.8 | 0.78 | 50% | 2.25 | 0.62 | 0.75 0.50 0.00 |"
    ]
    assert table[0]["alpha"] == table[0]["accepted at depth"] == table[0]["before repeats: share"] == "-"
    assert "as if the answer had ended there" in tables.overall_table(results)
    assert tables.report(results) == f"{tables.results_table(results)}\n{tables.overall_table(results)}"


def test_terminal_overall_table_has_the_same_cells(make_record):
    console = pytest.importorskip("rich.console").Console(width=200, record=True, file=io.StringIO())
    console.print(tables.overall_terminal_table([make_record(), other_task(make_record)]))
    text = console.export_text()
    assert "0.86 0.57 0.21" in text and "50%" in text


def test_temperatures_come_in_order_and_nothing_is_no_row(make_record):
    results = [make_record(temperature=1.0), make_record(), make_record(before_repeat=None, method="other")]
    table = rows(tables.overall_table(results))
    assert [(row["T"], row["method"]) for row in table] == [("0", "standard"), ("0", "other"), ("1", "standard")]
    assert table[1]["before repeats: share"] == "-" and table[1]["speedup"] == "-"
    assert rows(tables.overall_table([])) == []
