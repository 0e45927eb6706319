"""Synthesis and training from the command line: the whole way, kills at any moment, and every early refusal."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
import time

import pytest

from experiments import benchmark, cli, synthesize, train
from jspec import config as config_lib
from jspec.weights import references

ROOT = pathlib.Path(__file__).parents[2]
SYNTHESIZE, TRAIN = ROOT / "configs" / "synthesize_debug.yaml", ROOT / "configs" / "train" / "debug.yaml"


pytestmark = pytest.mark.usefixtures("own_folder")


def make(*overrides):
    return cli.run(synthesize.main, synthesize.Synthesize, "", [str(SYNTHESIZE), *overrides])


def learn(*overrides):
    argv = [str(TRAIN), "data.folder=data", *overrides]
    return cli.run(train.main, train.Train, "", argv, registries=train.registries())


def killed(module: str, *arguments: str, watched: pathlib.Path, seed: int) -> int:
    """Run a script, kill it at a random moment after `watched` has grown, and start it again, until it ends by itself.

    Returns how often it was killed.
    """
    chance, kills = random.Random(seed), 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    while True:
        size = watched.stat().st_size if watched.exists() else -1
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        while process.poll() is None and (not watched.exists() or watched.stat().st_size <= size):
            time.sleep(0.01)
        if kills < 2:
            time.sleep(chance.uniform(0.0, 0.3))
            if process.poll() is None:
                process.kill()
                kills += 1
        error = process.communicate()[1].decode()
        if process.returncode == 0:
            return kills
        assert process.returncode == -9, error


@pytest.mark.slow
def test_a_killed_synthesis_makes_the_same_shards(tmp_path):
    assert make("data=whole", "num_samples=24", "synthesis.rows=4") == 0
    kills = killed(
        "experiments.synthesize", str(SYNTHESIZE), "data=killed", "num_samples=24", "synthesis.rows=4",
        watched=tmp_path / "killed" / "journal.jsonl", seed=1,
    )  # fmt: skip
    assert kills == 2
    names = sorted(path.name for path in pathlib.Path("whole").iterdir())
    assert names == sorted(path.name for path in pathlib.Path("killed").iterdir())
    for name in names:
        assert pathlib.Path("whole", name).read_bytes() == pathlib.Path("killed", name).read_bytes(), name


@pytest.mark.slow
def test_a_killed_training_ends_in_the_same_curve_and_draft(tmp_path, capsys):
    assert make("data=data") == 0
    settings = ("training.steps=24", "training.evaluate_every=4")
    assert learn("run.folder=whole", *settings) == 0
    kills = killed(
        "experiments.train", str(TRAIN), "data.folder=data", "run.folder=killed", *settings,
        watched=tmp_path / "killed" / "loss.jsonl", seed=2,
    )  # fmt: skip
    assert kills == 2
    for name in ("loss.jsonl", "results.jsonl", "draft/model.safetensors"):
        assert pathlib.Path("whole", name).read_bytes() == pathlib.Path("killed", name).read_bytes(), name

    # What was trained drafts: the exported head in a benchmark.
    target = "{random: {num_layers: 4, width: 64}}"
    methods = "[{name: eagle, drafter: {kind: eagle, gamma: 3, draft: {reference: whole/draft}}}]"
    config = tmp_path / "bench.yaml"
    config.write_text(
        f"target: {target}\nmethods: {methods}\nprompts: {{tasks: [chat], per_task: 1}}\n"
        "temperatures: [0.0]\nmax_new_tokens: 16\n"
    )
    capsys.readouterr()
    assert cli.run(benchmark.main, benchmark.Benchmark, "", [str(config)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["records"][-1]["greedy_check"] == {"prompts": 1, "equal": 1, "near_ties": 0}
    assert json.loads(pathlib.Path("whole/draft/config.json").read_text())["draft_vocab_size"] == 64
    assert pathlib.Path("whole/curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "script, overrides, message",
    [
        (make, ["data="], "data: expected a string"),
        (make, ["verifier=typical"], "'typical' is not lossless"),
        (make, ["prompts=null", "synthesis.own=null"], "nothing to answer"),
        (make, ["num_samples=0"], "num_samples 0 is below 1"),
        (make, ["prompts.file=nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (learn, [], "data holds no samples"),
        (learn, ["recipe.kind=eagel"], "unknown kind \"eagel\"; did you mean 'eagle'"),
        (learn, ["recipe.stesp=3"], "unknown key; did you mean 'steps'"),
        (learn, ["data.held_out=0.0"], "held_out 0.0 is not between 0 and 1"),
        (learn, ["vocabulary.size=0"], "size 0 is below 1"),
        (learn, ["vocabulary.file=ids.json"], "data holds no samples"),
        (learn, ["training.length=1"], "length 1 is below 2"),
    ],
)
def test_users_mistakes_are_one_line(script, overrides, message, capsys):
    assert script(*overrides) == cli.USER_ERROR
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err


def test_the_configs_on_the_shipped_drafts_cards_are_still_understood():
    cards = [references.pretrained_folder() / name / "card.json" for name in references.pretrained()]
    configs = [json.loads(path.read_text())["config"] for path in cards]
    assert len(configs) >= 4
    for config in configs:
        again = config_lib.as_mapping(
            config_lib.parse(train.Train, config, train.registries(), "card"), train.registries()
        )
        assert {key: again[key] for key in config} == config
