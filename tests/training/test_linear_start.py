"""A start in closed form is the least-squares answer, and every matrix of it brings the draft nearer to its target."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models import config as model_config
from jspec.models import layers, transformer
from jspec.training import Distill, Eagle, linear_start, train
from tests import checkpoints, tiny
from tests import training_samples as make

pytestmark = pytest.mark.usefixtures("small_programs", "few_programs")


def test_the_solution_is_that_of_the_normal_equations():
    rng = np.random.default_rng(0)
    x, y, counts = rng.normal(size=(3, 40, 5)), rng.normal(size=(3, 40, 2)), rng.random((3, 40)) < 0.7
    x[..., 4] = 0  # never seen: its weight stays zero
    found = linear_start.solve(zip(x, y, counts), ridge=0.1)
    kept, wanted = x[counts], y[counts]
    gram = kept.T @ kept
    penalty = np.diag(0.1 * np.diag(gram) + np.array([0, 0, 0, 0, 1.0]))
    np.testing.assert_allclose(found, np.linalg.solve(gram + penalty, kept.T @ wanted).T, rtol=1e-4, atol=1e-6)
    # In other units, the same map.
    scaled = linear_start.solve(zip(x * 1000, y, counts), ridge=0.1)
    np.testing.assert_allclose(scaled * 1000, found, rtol=1e-4, atol=1e-6)


def test_without_a_pair_there_is_nothing_to_solve():
    with pytest.raises(ValueError, match="no pair of neighbouring answer tokens"):
        linear_start.solve([(jnp.ones((2, 3)), jnp.ones((2, 1)), jnp.zeros(2, bool))])


def test_a_layer_that_can_say_what_is_wanted_is_found():
    """What a known layer adds is wanted; the fit starts from its projections with other output matrices."""
    shape = dataclasses.replace(checkpoints.with_options(num_layers=1), windows=())
    layer = model_config.init_params(jax.random.key(0), shape)["layers"][0]
    rng = np.random.default_rng(1)
    batch = make.batch(*([make.sample(i, [1, 2], range(3, 40))] for i in range(64)), length=40)
    readings = []
    for _ in range(4):
        residual = jnp.asarray(rng.normal(size=(64, 40, shape.width)), jnp.float32)
        normed = layers.rms_norm(residual, layer["attention_norm"], shape.norm_eps)
        gathered, here = linear_start.gather(layer, shape, batch, normed), batch.at_places(residual)
        wanted = here + gathered @ layer["output"].T
        readings.append(linear_start.Reading(here, gathered, wanted, batch.labelled(1)))
    spoiled = {**layer, "output": layer["output"] * 0, "down": layer["down"] * 0}
    found = linear_start.fit_layer(spoiled, shape, lambda layer: readings)
    asked = [np.asarray(reading.wanted - reading.residual) for reading in readings]
    missing = np.concatenate([rest - reading.gathered @ found["output"].T for reading, rest in zip(readings, asked)])
    assert np.abs(missing[:, :37]).max() < 0.05 * np.abs(asked[0]).max()
    assert float(jnp.abs(found["down"]).max()) < 0.2  # nothing is left for the units to add


def test_places_count_by_their_weight():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(1, 60, 5)), rng.normal(size=(1, 60, 2))
    twice = linear_start.solve(
        [(np.concatenate([x, x[:, :20]], 1), np.concatenate([y, y[:, :20]], 1), np.ones((1, 80)))]
    )
    weighted = linear_start.solve([(x, y, np.where(np.arange(60) < 20, 2.0, 1.0)[None])])
    np.testing.assert_allclose(weighted, twice, rtol=1e-4, atol=1e-6)


def test_a_window_hides_what_the_draft_will_not_see():
    """What attention gathers, by a loop over the tokens that a window of three positions leaves."""
    shape = dataclasses.replace(checkpoints.with_options(num_layers=2), windows=(None, 3))
    layer = model_config.init_params(jax.random.key(0), shape)["layers"][1]
    batch = make.batch([make.sample(0, [1, 2], [3, 4, 5, 6]), make.sample(1, [7], [8, 9, 10, 11])], length=12)
    normed = jax.random.normal(jax.random.key(1), (1, 12, shape.width))
    found = linear_start.gather(layer, shape, batch, normed)

    tables = layers.rope_tables(shape, batch.positions)
    query, key, value = map(np.asarray, transformer.project(layer, normed, shape, tables))
    segments, positions = np.asarray(batch.segments[0]), np.asarray(batch.positions[0])
    group = shape.num_heads // shape.num_kv_heads
    count = int((batch.places < 12).sum())
    assert count == 8
    for place, t in enumerate(np.asarray(batch.places[0, :count])):
        seen = [s for s in range(12) if segments[s] == segments[t] and 0 <= positions[t] - positions[s] < 3]
        assert len(seen) == min(3, positions[t] + 1)
        for head in range(shape.num_heads):
            scores = np.array([query[0, t, head] @ key[0, head // group, s] for s in seen]) / np.sqrt(shape.head_size)
            weights = np.exp(scores) / np.exp(scores).sum()
            expected = sum(w * value[0, head // group, s] for w, s in zip(weights, seen))
            here = np.asarray(found[0, place]).reshape(shape.num_heads, -1)[head]
            np.testing.assert_allclose(here, expected, rtol=1e-4, atol=1e-6)


def test_biases_are_no_part_of_what_the_matrices_add():
    shape = checkpoints.with_options(num_layers=1, output_bias=True, ffn_bias=True)
    layer = model_config.init_params(jax.random.key(0), shape)["layers"][0]
    layer |= {"output_bias": layer["output_bias"] + 3.0, "down_bias": layer["down_bias"] + 5.0}
    batch = make.batch([make.sample(0, [1, 2], range(3, 40))], length=40)
    residual = jax.random.normal(jax.random.key(1), (1, 40, shape.width))
    normed = layers.rms_norm(residual, layer["attention_norm"], shape.norm_eps)
    here = batch.at_places(residual)
    outputs, *_ = transformer.attend(
        layer, normed, shape, None, None, 0, layers.rope_tables(shape, batch.positions), batch.positions, batch.causal
    )
    outputs = batch.at_places(outputs)
    wanted = here + outputs
    wanted += transformer.feed_forward(layer, wanted, shape)
    gathered = linear_start.gather(layer, shape, batch, normed)
    reading = linear_start.Reading(here, gathered, wanted, batch.labelled(1))
    units, rest = linear_start._hidden(layer, shape, reading)
    # What is left to the units is what the layer's own matrix makes of them.
    np.testing.assert_allclose(units @ layer["down"].T, rest, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [Eagle(version=1, steps=1), Eagle(version=3, steps=1, feature_layers=(0, 1, 2)), Distill(layers=2, depths=1)],
    ids=["eagle 1", "eagle 3", "distill"],
)
def test_what_is_linear_in_the_features_is_known_before_the_first_step(recipe):
    """The target says the successor, which is linear in the token read."""
    target = tiny.bigram(tiny.successor(size=16), checkpoints.with_options(num_layers=3, vocab_size=72))
    settings = train.Settings(steps=1, rows=8, length=28)
    samples, held_out = make.cycles(64, 16), make.cycles(8, 16, prompt=3, seed=1)
    run = train.Trainer(target, recipe, settings, samples, held_out)
    depths = run.evaluate(run.start()).depths
    assert depths.chain[0] > 0.95 * depths.places[0]


@pytest.mark.slow
def test_without_the_regression_it_is_not_known(monkeypatch):
    """The mutant of the test above: products of zeros."""
    zeros = lambda pairs: (lambda x, y, _: np.zeros((y.shape[-1], x.shape[-1]), np.float32))(*next(iter(pairs)))
    monkeypatch.setattr(linear_start, "solve", zeros)
    target = tiny.bigram(tiny.successor(size=16), checkpoints.with_options(num_layers=3, vocab_size=72))
    samples, held_out = make.cycles(64, 16), make.cycles(8, 16, prompt=3, seed=1)
    run = train.Trainer(
        target, Eagle(version=1, steps=1), train.Settings(steps=1, rows=8, length=28), samples, held_out
    )
    depths = run.evaluate(run.start()).depths
    assert depths.chain[0] < 0.5 * depths.places[0]
