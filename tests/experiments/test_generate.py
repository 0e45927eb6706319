"""`generate` on random weights, and the configs that come with the project."""

import json
import pathlib

import jax
import pytest

from experiments import (
    benchmark,
    card,
    cli,
    doctor,
    generate,
    microbench,
    optimal_tree,
    peers,
    synthesize,
    theory,
    train,
)
from jspec import config

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SCRIPTS = {
    "card": card.Card,
    "doctor": doctor.Doctor,
    "doctor_debug": doctor.Doctor,
    "generate": generate.Generate,
    "microbench": microbench.Microbench,
    "optimal_tree": optimal_tree.OptimalTree,
    "optimal_tree_debug": optimal_tree.OptimalTree,
    "peers": peers.Peers,
    "synthesize": synthesize.Synthesize,
    "synthesize_debug": synthesize.Synthesize,
    "theory": theory.Theory,
    "theory_debug": theory.Theory,
}
# Settings that a config leaves to its user.
GIVEN = {"card": ["training=run", "out=draft"]}
RANDOM = ["target={random: {num_layers: 1, width: 32}}", "drafter={kind: prompt_lookup, gamma: 3}", "max_new_tokens=12"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def run(*overrides):
    return cli.run(generate.main, generate.Generate, "", [str(CONFIGS / "generate.yaml"), *RANDOM, *overrides])


def test_an_answer_streams_with_its_statistics(capsys):
    assert run("prompt=aXaXaXaXaX") == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    statistics = document["statistics"]
    assert document["prompt"] == "aXaXaXaXaX" and statistics["new_tokens"] == 12
    assert statistics["finish_reason"] == "length" and statistics["lossless"] is True
    assert sum(statistics["acceptance_histogram"]) == statistics["target_calls"]
    latency = statistics["inter_token_ms"]
    assert latency is None or 0 < latency["p50"] <= latency["p90"] <= latency["p99"]
    for word in ("tau", "alpha", "accepted", "corrected", "bonus"):
        assert word in out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prompt=", "prompt"),
        ("temperature=-0.5", "temperature -0.5"),
        ("seed=-1", "seed"),
        ("drafter.gamma=-2", "gamma -2"),
        ("filters.min_p=2.0", "min_p 2.0"),
        ("max_new_tokens=0", "max_new_tokens 0"),
    ],
)
def test_bad_input_is_one_line(capsys, override, message):
    assert run(override) == cli.USER_ERROR
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("**/*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_valid_and_says_what_it_is_for(path):
    cls = SCRIPTS.get(path.stem, benchmark.Benchmark)
    if path.parent.name == "train":
        cls = train.Train
    registries = train.registries()
    loaded = config.load(cls, path, GIVEN.get(path.stem, ()), registries=registries)
    assert config.parse(cls, config.as_mapping(loaded, registries), registries) == loaded
    comment = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    assert "python -m experiments." in comment and ("Expected" in comment or "takes" in comment)


def test_scripts_with_a_default_config_take_overrides_alone():
    args = cli._parse_args("", ["rounds=3"], "configs/microbench.yaml")
    assert (args.config, args.overrides) == ("configs/microbench.yaml", ["rounds=3"])
    args = cli._parse_args("", [], "configs/microbench.yaml")
    assert (args.config, args.overrides) == ("configs/microbench.yaml", [])
    args = cli._parse_args("", ["mine.yaml", "rounds=3"], "configs/microbench.yaml")
    assert (args.config, args.overrides) == ("mine.yaml", ["rounds=3"])
