"""Sweeps on random weights: axes, records, resuming, shared programs, pictures, and every early refusal."""

import json
import pathlib

import pytest

from experiments import benchmark, cli, records, runner, sweep, sweep_results
from jspec import decode

DEBUG = str(pathlib.Path(__file__).parents[2] / "configs" / "debug.yaml")
SMALL = ["prompts.tasks=[chat]", "temperatures=[0.0]", "max_new_tokens=8", "run.folder=out"]

pytestmark = pytest.mark.usefixtures("own_folder")


def run(*args):
    return cli.run(sweep.main, sweep.Sweep, "", [DEBUG, *args], load=sweep.load)


def load(*args, path=DEBUG):
    return sweep.load(sweep.Sweep, path, args)


def one_method(tmp_path):
    path = tmp_path / "one.yaml"
    path.write_text(
        "target: {random: {num_layers: 2, width: 64}}\n"
        "methods: [{name: standard, drafter: {kind: standard, gamma: 3, draft: {layers: 1}}}]\n"
    )
    return str(path)


def test_axes_make_a_grid_and_everything_else_an_override(tmp_path):
    # prompts.tasks and temperatures take a list; the other two do not.
    found = load("methods.0.drafter.gamma=[1,2]", "seed=[0,5]", "prompts.tasks=[chat]", "temperatures=[0.0]", "batch=1")
    assert found.axes == {"methods.0.drafter.gamma": (1, 2), "seed": (0, 5)}
    assert [(point.methods[0].drafter.gamma, point.seed) for point in found.points] == [(1, 0), (1, 5), (2, 0), (2, 5)]
    assert found.values[1] == {"methods.0.drafter.gamma": 1, "seed": 5}
    assert found.base.prompts.tasks == ("chat",) and found.base.temperatures == (0.0,)
    assert all(len(point.methods) == 2 for point in found.points)  # a seed is everybody's
    alone = load("methods.1.drafter.gamma=[1,2]")
    assert [[method.name for method in point.methods] for point in alone.points] == [["prompt lookup"]] * 2
    # A config of one method needs no number; strings and mappings are values too.
    short = load(
        "drafter.draft=[{layers: 1},{layers: 2}]",
        "verifier=[rejection,block]",
        "drafter.gamma=1",
        path=one_method(tmp_path),
    )
    assert list(short.axes) == ["methods.0.drafter.draft", "methods.0.verifier"]
    assert [point.methods[0].verifier.kind for point in short.points] == ["rejection", "block"] * 2
    assert {point.methods[0].drafter.gamma for point in short.points} == {1}


def test_alternatives_can_be_an_axis():
    path = str(pathlib.Path(DEBUG).parent / "eagle1_2024" / "table1.yaml")
    found = load("scale=paper", "model=[vicuna-7b,vicuna-13b]", path=path)
    assert [point.paper.target for point in found.points] == ["Vicuna 7B", "Vicuna 13B"]
    assert found.axes == {"model": ("vicuna-7b", "vicuna-13b")}


@pytest.mark.slow
def test_a_sweep_from_start_to_picture_and_resume(capsys, monkeypatch):
    axis = "methods.0.drafter.gamma=[1,3]"
    decoded = runner.Runner.decode
    seen = []

    def interrupted(self, name, group, temperature, **kwargs):
        if seen == [1] and not kwargs:
            raise KeyboardInterrupt
        return decoded(self, name, group, temperature, **kwargs)

    filled = benchmark.fill

    def fill(point, folder, target):
        filled(point, folder, target)
        seen.append(point.methods[0].drafter.gamma)

    monkeypatch.setattr(benchmark, "fill", fill)
    monkeypatch.setattr(runner.Runner, "decode", interrupted)
    assert run(axis, *SMALL) == cli.INTERRUPTED  # in the second point
    assert "what is finished is kept in out" in capsys.readouterr().err
    kept = pathlib.Path("out/results.jsonl").read_text().splitlines()
    assert [json.loads(line)["sweep"] for line in kept] == [{"methods.0.drafter.gamma": 1}] * 2

    decodes = []
    monkeypatch.setattr(
        runner.Runner,
        "decode",
        lambda self, name, *args, **kwargs: decodes.append(name) or decoded(self, name, *args, **kwargs),
    )
    assert run(axis, *SMALL) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    assert pathlib.Path("out/results.jsonl").read_text().splitlines()[:2] == kept
    assert decodes.count("standard") == 2  # compiled and run in the second point alone
    cells = [(record["sweep"]["methods.0.drafter.gamma"], record["method"]) for record in document["records"]]
    assert cells == [(1, "autoregressive"), (1, "standard"), (3, "autoregressive"), (3, "standard")]
    for record in document["records"]:
        records.Record.from_json({key: value for key, value in record.items() if key != "sweep"})
    assert [len(record["acceptance_histogram"]) for record in document["records"][1::2]] == [2, 4]
    table = pathlib.Path("out/table.md").read_text()
    assert table in out and table.splitlines()[0].startswith("| methods.0.drafter.gamma | task | T | method |")
    assert len(table.splitlines()) == 4 and "| 3 | chat | 0 | standard |" in table
    assert pathlib.Path("out/sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_another_seed_or_temperature_compiles_nothing():
    sizes = lambda: (decode.prefill_jit._cache_size(), decode.run_jit._cache_size())
    assert run("seed=[0]", *SMALL) == 0
    before = sizes()
    settings = ["prompts.tasks=[chat]", "max_new_tokens=8", "run.folder=other"]
    assert run("seed=[1,2]", "temperatures=[0.0,0.7]", *settings) == 0
    assert sizes() == before
    stored = [json.loads(line) for line in pathlib.Path("other/results.jsonl").read_text().splitlines()]
    assert len(stored) == 2 * 2 * 3 and {record["seed"] for record in stored} == {1, 2}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["seed=3"], "debug.yaml: no axis; give a setting several values"),
        (["seed=[]"], "axis seed: [] is empty or holds a value twice"),
        (["seed=[1,1]"], "axis seed: [1, 1] is empty or holds a value twice"),
        (["methods.0.drafter.gamma=[1,-1]"], "methods.0.drafter.gamma: gamma -1 is below 0"),
        (["methods.0.drafter.gama=[1,2]"], "methods.0.drafter.gama: unknown key; did you mean 'gamma'?"),
        (["drafter.gamma=[1,2]"], "of which method? methods.0 is 'standard', methods.1 is 'prompt lookup'"),
        (["seed=[0,1]", "max_new_tokens=x"], "max_new_tokens: expected an integer"),
        (["batch=[1,2]"], "batch 2 does not divide the 1 prompts of task 'chat'"),
    ],
)
def test_bad_axes_are_one_line_before_anything_runs(capsys, monkeypatch, args, message):
    monkeypatch.setattr(benchmark, "fill", lambda *args: pytest.fail("must not start"))
    assert run(*args) == cli.USER_ERROR
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def record(point, make_record, **changes):
    return {**make_record(**changes).to_json(), "sweep": point}


def test_means_over_tasks(make_record):
    own = [
        record({"a": 1}, make_record, task="chat", speedup=1.0),
        record({"a": 1}, make_record, task="code", speedup=2.0),
        record({"a": 2}, make_record, task="chat", speedup=None),
        record({"a": 2}, make_record, task="code", speedup=4.0, temperature=1.0),
    ]
    mean = lambda at, temperature: sweep_results._mean("speedup", own, ("standard", temperature), at)
    assert mean({"a": 1}, 0.0) == 1.5 and mean({"a": 2}, 0.0) is None and mean({"a": 2}, 1.0) == 4.0


@pytest.mark.parametrize(
    "axes",
    [
        {"a": [1, 2, 8]},
        {"a": ["x", "y"]},
        {"a": [1, 2], "b": [[0, 1], [1]]},
        {"a": [1, 2], "b": [1.5, 2.0], "c": [True, False]},
    ],
)
def test_every_number_of_axes_has_a_picture(tmp_path, make_record, axes):
    points = [{}]
    for axis, values in axes.items():
        points = [{**point, axis: value} for point in points for value in values]
    results = [
        record(point, make_record, speedup=1.0 + i) for i, point in enumerate(points[:-1])
    ]  # one is not there yet
    sweep_results.write(tmp_path, list(axes), results)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "table.md").read_text().splitlines()) == 2 + len(results)
    sweep_results.write(tmp_path, list(axes), [])  # nothing yet: no picture, and no error
