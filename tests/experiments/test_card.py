"""Drafts made ready to ship, from tiny training runs: files in bfloat16, cards, and what a benchmark adds to them."""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest

import jspec
from experiments import benchmark, card, card_text, cli, settings, synthesize, train
from jspec import config as config_lib
from jspec.weights import references, safetensors_files
from tests.experiments.test_training_scripts import SYNTHESIZE, TRAIN

ROOT = pathlib.Path(__file__).parents[2]
RECIPES = {
    "eagle3": "{kind: eagle, version: 3, steps: 2, feature_layers: [1, 2, 3]}",
    "eagle1": "{kind: eagle, version: 1, steps: 1}",
    "medusa": "{kind: medusa, num_heads: 2}",
    "standard": "{kind: distill, layers: 1, depths: 2}",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with samples and a finished run of every recipe."""
    folder = tmp_path_factory.mktemp("runs")
    names = ("jax_compilation_cache_dir", "jax_disable_most_optimizations")
    before = {name: jax.config.values[name] for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("JSPEC_CACHE", str(folder / "cache"))
        jax.config.update("jax_disable_most_optimizations", True)
        argv = [str(SYNTHESIZE), "data=samples", "num_samples=16"]
        assert cli.run(synthesize.main, synthesize.Synthesize, "", argv) == 0
        for name, recipe in RECIPES.items():
            argv = [str(TRAIN), f"recipe={recipe}", "data.folder=samples", f"run.folder={name}"]
            argv += ["training.steps=8", "training.evaluate_every=4", "training.warmup_steps=1"]
            assert cli.run(train.main, train.Train, "", argv, registries=train.registries()) == 0
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)


def make(*overrides) -> int:
    return cli.run(card.main, card.Card, "", [*overrides], default=str(ROOT / "configs" / "card.yaml"))


def last_line(capsys):
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), out, err


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_kind_of_draft_gets_files_and_a_card(runs, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(runs)
    out = tmp_path / "tiny" / name
    assert make(f"training={name}", f"out={out}", "data=bytes, of no meaning") == 0
    document, printed, _ = last_line(capsys)
    found = json.loads((out / "card.json").read_text())
    assert document == {"folder": str(out), "card": found} and (out / "card.md").read_text() in printed
    assert sorted(path.name for path in out.parent.iterdir()) == [name]
    (file,) = out.glob("*.safetensors")
    assert found["file"] == {
        "name": file.name,
        "sha256": references.digest(file),
        "bytes": file.stat().st_size,
        "dtype": "bfloat16",
    }
    stored = safetensors_files.load(file)
    assert {tensor.dtype.name for tensor in stored.values()} - {"int64", "bool"} == {"bfloat16"}
    assert (out / "draft_vocabulary.npy").exists() == (name != "eagle3") and found["vocabulary"] == 64
    assert found["reference"] == f"pretrained:tiny/{name}" and found["benchmark"] is None
    assert found["data"]["recipe"] == "bytes, of no meaning"
    (samples,) = found["data"]["folders"]
    assert samples["name"] == "samples" and samples["samples"] == 16 and samples["answer_tokens"] > 16

    # What the run recorded.
    results = [json.loads(line) for line in pathlib.Path(name, "results.jsonl").read_text().splitlines()]
    step = found["training"]["best"]["step"]
    (best,) = (record for record in results if record["step"] == step)
    assert best["tau"] == max(record["tau"] for record in results) and found["training"]["last"]["step"] == 8
    assert pathlib.Path(name, "checkpoints", str(step)).is_dir()
    assert found["held_out"]["chain"] == best["chain"] and found["held_out"]["tau"] == best["tau"]
    assert found["training"]["seed"] == 0 and found["config"]["recipe"]["kind"] == RECIPES[name][7:].split(",")[0]
    # Nothing of the machine it was made on.
    assert str(runs) not in json.dumps(found) and "run" not in found["config"]

    # The draft drafts: half the precision, the same vocabulary.
    config = config_lib.load(train.Train, pathlib.Path(name, "config.yaml"), registries=train.registries())
    target = settings.load_target(config.target)
    whole, small = (jspec.load_draft(str(place), target) for place in (pathlib.Path(name, "draft"), out))
    assert type(small) is type(whole)
    one, other = (np.asarray(vocabulary(draft)) for draft in (whole, small))
    np.testing.assert_array_equal(one, other)


def vocabulary(draft):
    return draft.draft_ids if isinstance(draft, jspec.Target) else draft.params["draft_ids"]


@pytest.mark.slow
def test_a_benchmark_adds_its_figures_and_only_the_card_changes(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    shelf = tmp_path / "pretrained"
    monkeypatch.setattr(references, "pretrained_folder", lambda: shelf)
    for name in ("standard", "eagle1"):
        assert make(f"training={name}", f"out={shelf / 'tiny' / name}") == 0
    config = tmp_path / "bench.yaml"
    config.write_text(
        "target: {random: {num_layers: 4, width: 64}}\n"
        "methods:\n"
        "  - {name: eagle, drafter: {kind: eagle, gamma: 2, draft: {reference: 'pretrained:tiny/eagle1'}}}\n"
        "  - {name: standard, drafter: {kind: standard, gamma: 2, draft: {reference: 'pretrained:tiny/standard'}}}\n"
        "prompts: {tasks: [chat], per_task: 2, choose: hashed, max_tokens: 400}\nmax_new_tokens: 24\n"
    )
    measured = tmp_path / "measured"
    assert cli.run(benchmark.main, benchmark.Benchmark, "", [str(config), f"run.folder={measured}"]) == 0
    document, *_ = last_line(capsys)
    digest = references.digest(shelf / "tiny" / "eagle1")
    assert {record["draft_sha256"] for record in document["records"] if record["method"] == "eagle"} == {digest}
    weights = {path: path.stat().st_mtime_ns for path in shelf.rglob("*.*") if "card" not in path.name}

    assert make("training=eagle1", f"out={shelf / 'tiny' / 'eagle1'}", f"benchmark=[{measured}]") == 0
    document, *_ = last_line(capsys)
    found = document["card"]["benchmark"]
    assert [(each["method"], each["temperature"]) for each in found["methods"]] == [("eagle", 0.0), ("eagle", 1.0)]
    assert len(found["methods"][0]["acceptance_by_position"]) == 2 and found["max_new_tokens"] == 24
    assert found["prompts"]["tasks"] == {"chat": 2} and found["prompts"]["file"] == "the project's own"
    text = (shelf / "tiny" / "eagle1" / "card.md").read_text()
    assert "| 1 | eagle | " in text and "for each of 2 prompts of the project's own (chat 2)" in text
    assert {path: path.stat().st_mtime_ns for path in weights} == weights
    assert sorted(path.name for path in (shelf / "tiny").iterdir()) == ["eagle1", "standard"]

    # One run a temperature; runs on other prompts do not belong together.
    second = tmp_path / "second"
    shutil.copytree(measured, second)
    both = ("training=eagle1", f"out={shelf / 'tiny' / 'eagle1'}", f"benchmark=[{measured},{second}]")
    assert make(*both) == 0
    document, *_ = last_line(capsys)
    assert len(document["card"]["benchmark"]["methods"]) == 4
    prompts = second / "prompts.json"
    prompts.write_text(prompts.read_text().replace('"skipped": {}', '"skipped": {"chat": 1}'))
    assert make(*both) == cli.USER_ERROR
    assert "differ in prompts" in capsys.readouterr().err

    # A benchmark of other files, or of none under this name.
    assert make("training=medusa", f"out={tmp_path / 'medusa'}", f"benchmark=[{measured}]") == cli.USER_ERROR
    assert "has no method with draft pretrained:" in capsys.readouterr().err
    assert not (tmp_path / "medusa").exists()
    arguments = ("training=eagle1", f"out={tmp_path / 'wide'}", "dtype=float32", "reference=pretrained:tiny/eagle1")
    assert make(*arguments, f"benchmark=[{measured}]") == cli.USER_ERROR
    assert f"measured another pretrained:tiny/eagle1, with sha256 {digest}" in capsys.readouterr().err
    # Another draft in its place.
    place = f"out={shelf / 'tiny' / 'standard'}"
    assert make("training=medusa", place) == cli.USER_ERROR
    assert "holds something else than this draft (config.json, medusa_lm_head.s" in capsys.readouterr().err
    assert make("training=medusa", f"out={shelf / 'tiny'}", "replace=true") == cli.USER_ERROR
    assert "holds the folder eagle1, so it is no draft's" in capsys.readouterr().err
    assert make("training=medusa", place, "replace=true") == 0
    assert json.loads((shelf / "tiny" / "standard" / "card.json").read_text())["kind"] == "medusa"
    assert sorted(path.name for path in (shelf / "tiny").iterdir()) == ["eagle1", "standard"]


@pytest.mark.slow
def test_runs_of_version_0_3_kept_the_vocabulary_beside_the_draft(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("eagle1", "medusa", "standard"):
        shutil.copytree(runs / name, name)
        os.replace(f"{name}/draft/draft_vocabulary.npy", f"{name}/draft_vocabulary.npy")
        assert make(f"training={name}", f"out=out/{name}") == 0
        np.testing.assert_array_equal(
            np.load(f"out/{name}/draft_vocabulary.npy"), np.sort(np.load(f"{name}/draft_vocabulary.npy"))
        )
    assert json.loads(pathlib.Path("out/eagle1/card.json").read_text())["data"]["folders"] == [
        {"name": "samples", "samples": None, "answer_tokens": None}  # not here
    ]


@pytest.mark.slow
def test_what_is_no_finished_training(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for overrides, message in (
        (["out=out"], "training: missing"),
        (["training=none", "out=out"], "none is no run folder"),
        (["training=unfinished", "out=out"], "unfinished holds no draft: the training has not ended"),
        (["training=joint", "out=out"], "ship both by hand"),
        (["training=empty", "out=out"], "empty holds no finished cell"),
        (["training=unfinished", "out="], "out: expected a string"),
        (["training=unfinished", "out=out", "dtype=int8"], "dtype"),
    ):
        for name in ("unfinished", "joint", "empty"):
            if not pathlib.Path(name).exists():
                shutil.copytree(runs / "eagle1", name)
        shutil.rmtree("unfinished/draft", ignore_errors=True)
        pathlib.Path("joint/target").mkdir(exist_ok=True)
        pathlib.Path("empty/results.jsonl").write_text("")
        assert make(*overrides) == cli.USER_ERROR, overrides
        out, err = capsys.readouterr()
        assert out == "" and message in err and "Traceback" not in err
    assert not pathlib.Path("out").exists()


def test_a_name_follows_from_the_place():
    assert card.Card("run", "some/where/tiny-1m/eagle1").name == "pretrained:tiny-1m/eagle1"
    assert card.Card("run", "tiny-1m/eagle1", reference="mine").name == "mine"
    for arguments in (("", "out"), ("run", "")):
        with pytest.raises(ValueError, match="(training|out) is empty"):
            card.Card(*arguments)


# The words.


def facts(**changes):
    record = {"step": 1500, "answer_tokens_seen": 2_000_000, "seconds": 9_000.0}
    content = {
        "reference": "pretrained:tiny/eagle3",
        "kind": "eagle 3",
        "file": {"name": "model.safetensors", "sha256": "a" * 64, "bytes": 13_400_000, "dtype": "bfloat16"},
        "target": {"reference": "target.gguf", "sha256": "b" * 64},
        "vocabulary": 8192,
        "data": {"recipe": "chat", "folders": [{"name": "own", "samples": 4096, "answer_tokens": 400_000}]},
        "training": {"best": record, "last": record | {"seconds": 10_000.0}, "steps": 2000, "seed": 3, "device": "cpu"},
        "held_out": {"loss": 2.5, "tau": 1.9, "chain": [0.5, 0.3]},
        "benchmark": None,
    }
    return content | changes


def test_a_card_in_words():
    text = card_text.text(facts())
    for line in (
        "# pretrained:tiny/eagle3",
        "| file | model.safetensors, 13.4 MB, bfloat16 |",
        "| proposes | 8,192 tokens |",
        "|  | own: 4,096 samples, 400,000 answer tokens |",
        "| steps | 1,500 of 2,000 (the best on held-out text) |",
        "| answer tokens seen | 2,000,000 |",
        "| wall time of the run | 2 h 47 min |",
        "| seed | 3 |",
        "| loss | tau | accepted to depth 1 | accepted to depth 2 |",
        "| 2.50 | 1.90 | 0.50 | 0.30 |",
    ):
        assert line in text.splitlines(), line
    unknown = {"step": 1500, "answer_tokens_seen": None, "seconds": None}
    text = card_text.text(facts(training=facts()["training"] | {"best": unknown, "last": unknown}, vocabulary=None))
    assert text.count("not recorded") == 2 and "| proposes | all tokens |" in text
