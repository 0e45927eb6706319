"""Sequoia's tree for a draft: acceptance by rank against a loop written out, the choice by hand, the script."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import cli, optimal_tree, rank_acceptance, settings
from jspec import cache as kv
from jspec import config as config_lib
from jspec import decode, drafters, generation, topology, types
from jspec import sampling as sampling_lib
from jspec.drafters import standard
from jspec.models import transformer

DEBUG = str(pathlib.Path(__file__).parents[2] / "configs" / "optimal_tree_debug.yaml")
RANKS, NEW, CAPACITY = 3, 20, 64

pytestmark = pytest.mark.usefixtures("small_programs")


@pytest.fixture(scope="module")
def target():
    random = settings.RandomModel(num_layers=2, width=32, num_heads=2, num_kv_heads=2, ffn_size=64, max_positions=64)
    return settings.load_target(settings.TargetSettings(random=random))


def count(target, layers, temperature, prompts):
    """What the loop counts, and the texts it decodes: with a star, each round emits a token or two."""
    drafter = rank_acceptance.star(drafters.Standard(draft=standard.Draft(layers=layers)), RANKS)
    bound, draft = drafter.build(target)
    params = types.Params(target.model, draft)
    padded, lengths = generation.pad(prompts, CAPACITY)
    keys = generation.row_keys([5, 7], 2)
    sampling = sampling_lib.make(2, max_new_tokens=NEW, temperature=temperature)
    arguments = dict(drafter=bound, sampling=sampling)
    start = lambda: decode.prefill_jit(
        params, keys, jnp.asarray(padded), jnp.asarray(lengths), capacity=CAPACITY, **arguments
    )
    counts = rank_acceptance.count_jit(params, keys, start(), verifier=decode.REJECTION, **arguments)
    state = decode.run_jit(params, keys, start(), verifier=decode.REJECTION, **arguments)
    return counts, jax.device_get(decode.output(state))


def argmax_order(model, text):
    """`[T, V]` tokens by falling logit at every place, without a cache."""
    tokens = jnp.asarray(text)[None]
    positions, mask = jnp.arange(len(text))[None], jnp.tril(jnp.ones((1, len(text), len(text)), bool))
    empty = kv.init(model.config, 1, CAPACITY, model.dtype)
    outputs, _ = transformer.forward(model, tokens, positions, empty, mask, feature_layers=())
    return np.argsort(-np.asarray(outputs.logits[0]), axis=-1, kind="stable")


def test_ranks_are_counted_as_a_loop_over_the_text_counts_them(target):
    prompts = [list(b"hello there"), list(b"once")]
    counts, output = count(target, 1, 0.0, prompts)
    first = transformer.first_layers(target.model, 1)
    expected, rounds = np.zeros(RANKS, int), 0
    for row, prompt in enumerate(prompts):
        text = output.tokens[row, : output.lengths[row]]
        candidates = argmax_order(first, text)[:, :RANKS]
        place, end = len(prompt) + 1, len(prompt) + NEW  # prefill emitted the first token
        while place < end:
            if place < end - 1:  # the last token of the budget is never drafted
                rounds += 1
                hit = np.flatnonzero(candidates[place - 1] == text[place])
                expected[hit] += 1
                place += len(hit)
            place += 1
    assert rounds == int(counts.rounds) and np.array_equal(expected, np.asarray(counts.accepted))
    assert 0 < expected.sum() < rounds and expected[1:].sum() > 0, "the draft is too good, or too bad, to tell"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_has_every_first_candidate_accepted(target, temperature):
    counts, _ = count(target, 2, temperature, [list(b"hello there"), list(b"once")])
    assert np.asarray(counts.accepted).tolist() == [int(counts.rounds), 0, 0] and int(counts.rounds) > 0


def config(**changes):
    content = {"target": {"random": {}}, "drafter": {"kind": "standard", "draft": {"layers": 1}}, **changes}
    return config_lib.parse(optimal_tree.OptimalTree, content)


def test_the_tree_that_pays_most_is_chosen_by_hand():
    measured = optimal_tree.Measured((0.6, 0.3), 50, passes={1: 1.0, 2: 1.0, 3: 1.5, 9: 2.0}, draft=0.2)
    found = optimal_tree.report(config(sizes=[2, 3, 9], max_depth=2), measured)
    assert found["sizes"] == [
        {"num_nodes": 1, "max_depth": 0, "tokens": 1.0, "speedup": 1.0},
        {"num_nodes": 2, "max_depth": 1, "tokens": 1.6, "speedup": round(1.6 / 1.2, 4)},
        # 1.9 tokens from two siblings, 1.96 from a chain that takes another call.
        {"num_nodes": 3, "max_depth": 1, "tokens": 1.9, "speedup": round(1.9 / 1.7, 4)},
    ]  # no tree of two children and depth two has nine nodes
    assert found["best"] == found["sizes"][1] and "2 nodes, depth 1, expected speedup 1.33" in found["verdict"]
    assert found["setting"] == "tree: {acceptance: [0.6, 0.3], num_nodes: 2, max_depth: 1}"
    slow = optimal_tree.Measured((0.1, 0.0), 50, passes={1: 1.0, 2: 1.5}, draft=0.5)
    nothing = optimal_tree.report(config(sizes=[2], max_depth=1), slow)
    assert nothing["best"]["num_nodes"] == 1 and "No tree of these sizes pays here" in nothing["verdict"]
    assert nothing["sizes"][1] == {"num_nodes": 2, "max_depth": 1, "tokens": 1.1, "speedup": 0.55}


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
def test_debug_config(capsys):
    assert cli.run(optimal_tree.main, optimal_tree.OptimalTree, "", [DEBUG, "run.folder=out"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["rounds"] > 20 and len(document["acceptance"]) == 3 and sum(document["acceptance"]) <= 1
    assert [size["num_nodes"] for size in document["sizes"]] == [1, 2, 4]
    assert set(document["target_ms"]) == {"1", "2", "4"} and document["draft_ms"] > 0
    kept = json.loads(pathlib.Path("out/tree.json").read_text())
    assert kept == {key: value for key, value in document.items() if key != "run"}
    assert document["setting"] in pathlib.Path("out/table.md").read_text()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drafter": {"kind": "lookahead"}}, "drafter lookahead fills no static trees"),
        ({"ranks": 0}, "ranks 0 is below 1"),
        ({"sizes": []}, "sizes []: at least one"),
        ({"max_depth": 0}, "max_depth 0 is below 1"),
        ({"batch": 0}, "batch 0 is below 1"),
    ],
)
def test_bad_settings(changes, words):
    with pytest.raises(config_lib.ConfigError) as caught:
        config(**changes)
    assert words in str(caught.value)


def test_a_star_replaces_whatever_tree_there_was():
    eagle = drafters.Eagle(dynamic=drafters.eagle.Dynamic(depth=2, top_k=2, num_nodes=4))
    star = rank_acceptance.star(eagle, 3)
    assert star.dynamic is None and star.topology == topology.cartesian([3])
