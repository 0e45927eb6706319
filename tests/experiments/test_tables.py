import io

import pytest

from experiments import records, tables


def rows(markdown):
    """The table as one dict per row."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def autoregressive(make_record, **changes):
    nothing = dict(alpha=None, acceptance_histogram=(126,), acceptance_by_position=(), greedy_check=None, cost=None)
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
        "tau": "2.52",
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
