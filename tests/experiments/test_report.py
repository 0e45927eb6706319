"""The report on run folders made by hand: every number in it is worked out here."""

import dataclasses
import html.parser
import json
import re
import xml.etree.ElementTree

import pytest

from experiments import (
    beside_paper,
    expectation,
    figures,
    grids,
    records,
    report,
    report_facts,
    report_page,
    reported,
    sweep_results,
    traces,
)
from tests.experiments import run_folders

PUBLISHED = run_folders.PUBLISHED
PICTURES = ["speedup", "acceptance_by_position", "accepted_lengths", "tau_and_speedup", "measured_and_expected"]


def run(capsys, *arguments):
    code = report.run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def no_figures(monkeypatch):
    """For reports whose figures others look at: drawing them takes most of the time."""
    monkeypatch.setattr(figures, "draw", lambda cells, prefix="": [])
    monkeypatch.setattr(figures, "measured_and_expected", lambda comparisons, name: [])


def test_measured_over_expected_is_the_steps_factor_over_the_rounds(cells, make_record):
    # Expected 2 * 25 / 38; in the run a step took 26 ms and a round 2 * 19.
    (comparison,) = expectation.compare(cells(run_folders.pair(make_record)))
    assert (comparison.step, comparison.step_alone) == (26, 25)
    assert (comparison.round, comparison.round_alone) == (38, 38)
    assert comparison.ratio == pytest.approx((26 / 25) / (38 / 38))
    assert not comparison.is_outside and comparison.mark == ""


def test_a_batch_waits_side_by_side(cells, make_record):
    (comparison,) = expectation.compare(cells(run_folders.pair(make_record, batch=4)))
    assert (comparison.step, comparison.round) == (26, 38)  # a request's own times: they are no shorter in company


@pytest.mark.parametrize(
    ("tpot", "ratio", "mark"), [(24.8, 0.797, "▼"), (24.5, 0.806, ""), (15.9, 1.243, ""), (15.5, 1.275, "▲")]
)
def test_cells_outside_the_band_are_marked(cells, make_record, tpot, ratio, mark):
    found = cells(run_folders.pair(make_record, tpot_ms=tpot, speedup=26 / tpot))
    (comparison,) = expectation.compare(found)
    assert comparison.ratio == pytest.approx(ratio, abs=1e-3) and comparison.mark == mark
    grid = grids.expected([comparison])
    assert grid.rows[0][6] == f"{ratio:.2f} {mark}".strip()
    assert any(note.startswith(f"{mark} standard (chat, T = 0), {ratio:.2f}: ") for note in grid.notes) == bool(mark)


def test_the_explanation_names_the_part_that_did_it(cells, make_record):
    slow = run_folders.pair(make_record, tpot_ms=38.0, speedup=26 / 38)
    (comparison,) = expectation.compare(cells(slow))
    # A round of 2 tokens took 76 ms, 38 beyond its parts of 30 and 8; a step 26, one beyond 25.
    assert comparison.explain() == (
        "rounds slower than alone: a round took 76.0 ms in the run, 30.0 verify + 8.0 draft alone, so the loop adds "
        "+38.0 (x2.00); an autoregressive step took 26.0, 25.0 alone, the loop adds +1.0 (x1.04)"
    )
    grid = grids.expected([comparison])
    assert grid.headers[-4:] == ("step ms", "round ms", "verify + draft ms", "loop adds ms")
    assert grid.rows[0][-4:] == ("26.0 / 25.0", "76.0 / 38.0", "30.0 + 8.0", "+1.0, +38.0")
    assert f"▼ standard (chat, T = 0), 0.52: {comparison.explain()}." in grid.notes
    baseline, method = run_folders.pair(make_record, speedup=20 / 19, speedup_ci=(0.9, 1.4))
    (comparison,) = expectation.compare(cells([dataclasses.replace(baseline, tpot_ms=20.0), method]))
    assert comparison.explain() == (
        "autoregressive steps faster than alone: a round took 38.0 ms in the run, 30.0 verify + 8.0 draft alone, so "
        "the loop adds +0.0 (x1.00); an autoregressive step took 20.0, 25.0 alone, the loop adds -5.0 (x0.80); the "
        "measured interval holds the expected speedup"
    )


def test_the_median_counts_every_cell_once_and_no_baseline(cells, make_record):
    results = [run_folders.pair(make_record, task=f"t{i}", speedup=s) for i, s in enumerate((0.5, 1.0, 1.5))]
    unknown = run_folders.pair(make_record, task="unknown", speedup=None, speedup_ci=None)
    comparisons = expectation.compare(cells(*results, unknown))
    assert len(comparisons) == 3
    assert expectation.median_ratio(comparisons) == pytest.approx(1.0 / (50 / 38))
    assert expectation.median_ratio([]) is None


def test_runs_that_share_a_methods_name_are_told_apart(tmp_path, make_record):
    folders = [run_folders.joined(tmp_path / name, run_folders.pair(make_record)) for name in ("first", "second")]
    third = run_folders.joined(tmp_path / "third", run_folders.pair(make_record, method="other", task="code"))
    found = reported.cells([reported.load(folder) for folder in (*folders, third)])
    labels = [cell.label for cell in found]
    assert labels == [
        "autoregressive",
        "standard (first)",
        "autoregressive",
        "standard (second)",
        "autoregressive",
        "other",
    ]
    assert found[1].baseline is found[0].record and found[0].is_baseline


def test_the_same_method_of_two_runs_can_be_compared_token_by_token(tmp_path, make_record):
    record = run_folders.pair(make_record)[1]
    origins = {"first": ["prefill", "corrected", "corrected"], "second": ["prefill", "accepted", "bonus"]}
    runs = [
        reported.load(
            run_folders.write(tmp_path / name, [record], [run_folders.trace(record, ["a", "b", "c"], origins[name])])
        )
        for name in origins
    ]
    (example,) = report_page.examples(runs, reported.cells(runs))
    assert example.title == "chat, prompt chat/1, T = 0" and example.prompt == "Why?"
    # The larger tau comes first: two tokens in one round, against two rounds.
    assert [(answer.label, answer.tau) for answer in example.answers] == [
        ("standard (second)", 2.0),
        ("standard (first)", 1.0),
    ]


def test_the_points_of_a_sweep_are_told_apart(tmp_path, make_record):
    folder = run_folders.joined(tmp_path / "run", run_folders.pair(make_record), run_folders.pair(make_record))
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        line["sweep"] = {"methods.0.drafter.gamma": 1 + i // 2, "seed": 0}
        line["tpot_ms"] += i
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = reported.cells([reported.load(folder)])
    assert [cell.label for cell in found] == [
        "autoregressive", "standard (gamma 1, seed 0)", "autoregressive", "standard (gamma 2, seed 0)",
    ]  # fmt: skip
    assert [cell.baseline.tpot_ms for cell in found] == [26, 26, 28, 28]
    grid = grids.overall([reported.load(folder)])
    assert [(row[0], row[2], row[3]) for row in grid.rows] == [
        (f"{folder}, gamma {gamma}, seed 0", method, "2")
        for gamma in (1, 2)
        for method in ("autoregressive", "standard")
    ]


def sweep_run(folder, make_record, axis="methods.0.drafter.gamma", values=(1, 2), **config):
    """Two points of a sweep, an answer kept at each."""
    run_folders.joined(
        folder, *[run_folders.pair(make_record) for _ in values], config={**run_folders.CONFIG, **config}
    )
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        line["sweep"] = {axis: values[i // 2]}
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for i, value in enumerate(values):
        point = sweep_results.point_folder(folder, {axis: value})
        point.mkdir(parents=True)
        for record in run_folders.pair(make_record):
            end = "accepted" if record.method == "standard" and i else "corrected"
            traces.append(point, [run_folders.trace(record, ["a", "b", "c"], ["prefill", end, "bonus"])])
    return reported.load(folder)


def test_the_points_of_a_sweep_show_their_traces(tmp_path, make_record):
    run = sweep_run(tmp_path / "run", make_record)
    (example,) = report_page.examples([run], reported.cells([run]))
    assert [(answer.label, answer.tau) for answer in example.answers] == [
        ("standard (gamma 2)", 2.0), ("autoregressive", 1.0), ("standard (gamma 1)", 1.0),
    ]  # fmt: skip
    twin = sweep_run(tmp_path / "twin", make_record)
    (example,) = report_page.examples([run, twin], reported.cells([run, twin]))
    assert {answer.label for answer in example.answers} == {
        "autoregressive", *(f"standard ({name}, gamma {gamma})" for name in ("run", "twin") for gamma in (1, 2)),
    }  # fmt: skip


def test_a_sweeps_paper_is_its_bases_unless_an_axis_changes_it(tmp_path, make_record):
    base = {"base": {"paper": run_folders.PAPER, "prompts": {"file": "a/b.jsonl"}, "max_new_tokens": 8}}
    run = sweep_run(tmp_path / "run", make_record, axes={"methods.0.drafter.gamma": [1, 2]}, **base)
    assert run.paper.target == "Vicuna 7B"
    assert report_facts.data(run) == "b.jsonl, 2 a task, 8 new tokens each"
    models = sweep_run(tmp_path / "models", make_record, "model", ("a", "b"), axes={"model": ["a", "b"]}, **base)
    assert models.paper is None


def test_a_long_point_has_a_folder_of_its_own(tmp_path):
    points = [{"tree": [[0]] * 100 + [[i]]} for i in range(2)]
    names = [sweep_results.point_folder(tmp_path, point).name for point in points]
    assert max(map(len, names)) < 255 and names[0] != names[1]
    assert sweep_results.point_folder(tmp_path, {"a.b": 1.5, "c": "x y"}).name == "a.b=1.5,c=x_y"


def test_cells_that_differ_in_a_setting_do_not_share_a_table(cells, make_record):
    found = cells(run_folders.pair(make_record), run_folders.pair(make_record, batch=4))
    titles = [grid.title for grid in beside_paper.alone(found)]
    assert titles == ["Speedup and tau by task, T = 0, batch 1", "Speedup and tau by task, T = 0, batch 4"]


class Page(html.parser.HTMLParser):
    """What the page has, and whether its tags close."""

    VOID = {"meta", "link", "input", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.texts = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag, css=None):
        return [a for t, a in self.found if t == tag and (css is None or css in (a.get("class") or "").split())]


@pytest.fixture
def full_run(tmp_path, make_record):
    return run_folders.full(tmp_path / "run", make_record)


def test_the_page_needs_nothing_else_and_has_it_all(capsys, full_run):
    code, out, err = run(capsys, full_run)
    assert code == 0 and err == ""
    document = json.loads(out.splitlines()[-1])
    assert document["files"] == ["report.html", "table.md", "papers.md", *(f"{name}.svg" for name in PICTURES)]
    assert document["cells"] == 12 and len(document["outside"]) == 4
    # Half of the cells measured 26/38, the others 26/19, over 50/38.
    assert document["median_measured_over_expected"] == pytest.approx((26 / 50 + 26 * 38 / 19 / 50) / 2)
    assert "Median of measured / expected over 8 cells: 0.78" in out

    text = (full_run / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    for tag, attributes in page.found:
        for name in ("src", "href", "xlink:href", "data", "action"):
            assert re.match(r"#|data:,", attributes.get(name) or "#"), (tag, attributes)
    assert "url(" not in re.sub(r"url\(#", "", text) and "@import" not in text
    assert len(page.all("svg")) == len(page.all("figure")) == len(PICTURES)
    assert "#010203" not in text and "#040506" not in text
    names = [attributes["id"] for _, attributes in page.found if "id" in attributes]
    assert len(names) == len(set(names))
    targets = re.findall(r'(?:url\(|href=")#([^")]+)', text)
    assert set(targets) <= set(names)
    assert "prefers-color-scheme: dark" in text

    # Per temperature and paper, what differs, expected, all tasks, all cells, details, runs.
    assert len(page.all("table")) == 2 + 1 + 1 + 1 + 1 + 1 + 1
    shown = "".join(page.texts)
    assert (
        "Yaniv Leviathan" in shown and "single TPU-v4" in shown and "question.jsonl, 2 a task, 64 new tokens" in shown
    )
    for words in ("config 0123456789", "commit 0123456789ab", "jax 0.10.2", grids.TAU):
        assert words in shown


def test_traces_show_rounds_origins_and_odd_characters(capsys, no_figures, full_run):
    run(capsys, full_run)
    text = (full_run / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert len(page.all("section", "answer")) == 2 and len(page.all("article", "example")) == 1
    assert "Why <i>?" in page.texts and "Be" in page.texts and "</script>" in page.texts
    assert "↵\n" in page.texts and "\u2400" in page.texts and "·" in page.texts and "\x00" not in text
    tokens = [a for a in page.all("span", "t") if "title" in a]
    assert [a["class"].split()[1] for a in tokens[:4]] == ["prefill", "accepted", "corrected", "bonus"]
    assert [a["title"] for a in tokens[:4]] == [
        "from prefill, no round; token 1, id 0",
        "round 1, draft 1 accepted; token 2, id 1",
        "round 1, draft 2 rejected, this is its correction; token 3, id 2",
        "round 2, bonus behind 0 accepted; token 4, id 3",
    ]
    assert len(page.all("span", "round")) == 2 * 3
    assert "4 tokens in 2 rounds, 1 of them accepted drafts; tau 1.50" in "".join(page.texts)


def test_a_run_without_traces_has_no_such_section(capsys, no_figures, tmp_path, make_record):
    folder = run_folders.joined(tmp_path / "run", run_folders.pair(make_record))
    assert run(capsys, folder)[0] == 0
    assert 'id="traces"' not in (folder / "report.html").read_text()


def test_table_md_is_the_same_in_markdown(capsys, full_run, tmp_path):
    assert run(capsys, full_run, "--out", tmp_path / "deep" / "out")[0] == 0
    assert not (full_run / "report.html").exists()
    text = (tmp_path / "deep" / "out" / "table.md").read_text(encoding="utf-8")
    rows = run_folders.markdown_rows(text)
    assert ["", "", "theirs", "2.80", "0.80", "2.80", "0.80"] in rows
    theirs = "single TPU-v4, batch size 1 (T5-XXL wall-clock); alpha measured on 10K target-generated tokens"
    assert ["hardware", theirs, "cpu, float32, batch 1"] in rows
    for name in PICTURES:
        assert f"({name}.svg)" in text
        drawing = (tmp_path / "deep" / "out" / f"{name}.svg").read_text()
        assert xml.etree.ElementTree.fromstring(drawing)[0].get("fill") == "#ffffff"  # a page of its own
        assert "#010203" not in drawing and "currentColor" not in drawing
    assert grids.TAU in text and "▼ standard (chat, T = 0), 0.52: rounds slower than alone" in text


def test_a_paper_that_is_not_on_file_is_only_named(capsys, no_figures, tmp_path, make_record):
    source = records.Published("someone2031", "5", "row", speedup=9.0)
    folder = run_folders.joined(tmp_path / "run", run_folders.pair(make_record, published=source))
    assert run(capsys, folder)[0] == 0
    assert "not stated" in (folder / "table.md").read_text()


def test_alpha_by_gamma_is_drawn_where_gamma_differs(capsys, tmp_path, make_record):
    counts = dict(acceptance_histogram=(10, 10), offered=(20,), tested=(20,), target_calls=20, new_tokens=32)
    short = run_folders.pair(make_record, alpha=0.5, tau=1.5, **counts, before_repeat=None)
    one = run_folders.joined(tmp_path / "one", short)
    two = run_folders.joined(tmp_path / "two", run_folders.pair(make_record))
    code, out, _ = run(capsys, one, two, "--out", tmp_path)
    assert code == 0 and "alpha_and_gamma.svg" in json.loads(out.splitlines()[-1])["files"]


def test_alpha_by_gamma_joins_chains_alone(tmp_path, make_record):
    deep, shallow = (run_folders.pair(make_record, method=name) for name in ("deep", "shallow"))
    methods = [
        {"name": "deep", "drafter": {"kind": "eagle", "tree": {"name": "eagle_25"}}},
        {"name": "shallow", "drafter": {"kind": "eagle", "gamma": 1, "tree": None}},
    ]
    config = {**run_folders.CONFIG, "methods": methods}
    run = reported.load(run_folders.write(tmp_path / "run", [*deep, *shallow[1:]], config=config))
    assert [cell.is_chain for cell in reported.cells([run])] == [True, False, True]


def test_pooled_alpha_counts_tests_that_all_failed(make_record, cells):
    none = dict(acceptance_histogram=(10, 0), offered=(10,), tested=(10,), alpha=0.0, tau=1.0, target_calls=10)
    half = dict(acceptance_histogram=(5, 5), offered=(10,), tested=(10,), alpha=0.5, tau=1.5, target_calls=10)
    pairs = (run_folders.pair(make_record, task=task, **counts) for task, counts in (("chat", none), ("code", half)))
    found = [cell for cell in cells(*pairs) if not cell.is_baseline]
    assert figures._pooled(found) == pytest.approx((0.25, 1.25))


def test_every_papers_table_has_figures_of_its_own(capsys, tmp_path, make_record):
    def folder(name, table):
        paper = {"name": "leviathan2023", "table": table} if table else None
        return run_folders.joined(
            tmp_path / name, run_folders.pair(make_record), config={**run_folders.CONFIG, "paper": paper}
        )

    runs = [folder("first", "table2"), folder("again", "table2"), folder("other", "table3"), folder("free", None)]
    code, out, _ = run(capsys, *runs, "--out", tmp_path / "out")
    assert code == 0
    written = [name for name in json.loads(out.splitlines()[-1])["files"] if name.endswith(".svg")]
    prefixes = ["leviathan2023-table2-", "leviathan2023-table3-", ""]
    assert written == [*(f"{prefix}{name}.svg" for prefix in prefixes for name in PICTURES[:-1]), f"{PICTURES[-1]}.svg"]

    # A method is told from its namesake in the same table alone; the last figure tells tables apart.
    shown = lambda name: (tmp_path / "out" / f"{name}.svg").read_text(encoding="utf-8")
    assert "standard (again)" in shown("leviathan2023-table2-speedup")
    assert ">standard<" in shown("leviathan2023-table3-speedup") and ">standard<" in shown("speedup")
    for words in ("leviathan2023, table2", "leviathan2023, table3", "no paper's"):
        assert words in shown("measured_and_expected").replace("&#x27;", "'")
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    names = [attributes["id"] for _, attributes in Page(text).found if "id" in attributes]
    assert len(names) == len(set(names)) and len(Page(text).all("figure")) == len(written)


def test_records_from_before_the_new_fields_are_read(capsys, no_figures, tmp_path, make_record):
    folder = run_folders.joined(tmp_path / "run", run_folders.pair(make_record))
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for line in lines:
        for key in [
            field.name for field in dataclasses.fields(records.Record) if field.default is not dataclasses.MISSING
        ]:
            del line[key]
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(capsys, folder)[0] == 0


def test_a_run_that_goes_on_is_reported_and_left_alone(capsys, no_figures, tmp_path, make_record):
    folder = run_folders.joined(tmp_path / "run", run_folders.pair(make_record))
    with open(folder / "results.jsonl", "a") as file:
        file.write('{"method": "stan')
    before = (folder / "results.jsonl").read_bytes()
    code, out, _ = run(capsys, folder)
    assert code == 0 and json.loads(out.splitlines()[-1])["cells"] == 2
    assert (folder / "results.jsonl").read_bytes() == before


def spoil(folder, name, content):
    (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda folder: [], "the following arguments are required: RUN"),
        (lambda folder: [folder.parent], "is no run folder: it has no environment.json"),
        (lambda folder: [folder, folder / ".." / folder.name], "is given twice"),
        (lambda folder: [spoil(folder, "results.jsonl", "")], "holds no finished cell"),
        (lambda folder: [spoil(folder, "results.jsonl", "{}\n")], "results.jsonl, line 1: not a record"),
        (lambda folder: [spoil(folder, "environment.json", "[]")], "environment.json is damaged"),
        (lambda folder: [spoil(folder, "config.yaml", "a: [")], "config.yaml is damaged"),
        (lambda folder: [spoil(folder, "traces.jsonl", "{}\n")], "traces.jsonl, line 1: not a trace"),
        (lambda folder: [folder, "--out", "/proc/none"], "cannot write /proc/none"),
    ],
)
def test_mistakes_are_one_line(capsys, no_figures, tmp_path, make_record, arguments, message):
    folder = run_folders.joined(tmp_path / "run", run_folders.pair(make_record))
    code, out, err = run(capsys, *arguments(folder))
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_pooled_acceptance_counts_offers_and_tests(cells, make_record):
    # Two cells: 4 + 6 calls; the second offered a second draft in 3 of its calls only.
    first = make_record(acceptance_histogram=(1, 1, 2), offered=(4, 4), tested=(4, 3))
    second = make_record(task="code", acceptance_histogram=(3, 2, 1), offered=(6, 3), tested=(6, 2))
    found = cells([first, second])
    unconditional, conditional = figures.pooled_by_position(found)
    assert unconditional == pytest.approx([(3 + 3) / 10, (2 + 1) / 7])
    assert conditional == pytest.approx([(3 + 3) / 10, (2 + 1) / (3 + 2)])
    older = cells([make_record(acceptance_histogram=(1, 1, 2), offered=None, tested=None)])
    unconditional, conditional = figures.pooled_by_position(older)
    assert unconditional == pytest.approx([3 / 4, 2 / 4]) and conditional == pytest.approx([3 / 4, 2 / 3])


def test_a_legend_has_as_many_columns_as_fit():
    # An entry takes 0.55 inches and 0.076 for each character.
    assert figures.legend_columns(["abcd"] * 9, 9.4) == 5
    assert figures.legend_columns(["x" * 23] * 4, 9.4) == 4  # 4 * 2.298 = 9.192
    assert figures.legend_columns(["x" * 24] * 4, 9.4) == 3  # 4 * 2.374 > 9.4
    # Three columns of two, 2.83 + 0.626 + 0.626: the long one widens its own alone.
    assert figures.legend_columns(["x" * 30, "y", "y", "y", "y", "y"], 4.1) == 3
    assert figures.legend_columns(["x" * 200, "y"], 9.4) == 1 == figures.legend_columns(["x"], 9.4)


def test_all_tasks_together_are_told_by_run(cells, make_record, tmp_path):
    cells(
        run_folders.pair(make_record), run_folders.pair(make_record, task="code", speedup=1.0, tokens_per_second=50.0)
    )
    run = reported.load(tmp_path / "run0")
    grid = grids.overall([run])
    assert [row[:4] for row in grid.rows] == [
        (str(run.path), "0", "autoregressive", "4"),
        (str(run.path), "0", "standard", "4"),
    ]
    # 2 * 115 tokens in 115 / 52.6 + 115 / 50 seconds.
    assert grid.rows[1][grid.headers.index("tokens/s")] == f"{2 / (19 / 1000 + 1 / 50):.1f}"
    assert grids.TAU in grid.notes


def test_details_are_in_the_words_of_other_tools(cells, make_record):
    record = make_record(
        mean_accepted=1.52, tau_ci=(2.4, 2.6), alpha_ci=(0.5, 0.7), conditional_acceptance_by_position=(0.8, 0.5, None),
        inter_token_ms=records.Latency(38.0, 40.04, 55.5),
    )  # fmt: skip
    grid = grids.details(cells([record]))
    assert dict(zip(grid.headers, grid.rows[0])) == {
        "task": "chat", "T": "0", "method": "standard", "tau": "2.30 [2.40, 2.60]", "mean accepted": "1.52",
        "alpha": "0.61 [0.50, 0.70]", "acceptance by position": "0.80/0.40/0.10", "conditional": "0.80/0.50/-",
        "TTFT ms": "210", "TPOT ms": "15.2", "ITL ms p50": "38.0", "p90": "40.0", "p99": "55.5",
    }  # fmt: skip
