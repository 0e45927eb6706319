"""A run is a function of its settings and data: stopped anywhere, it goes on to the same end."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import checkpoint, types
from jspec.models import transformer
from jspec.training import Medusa, train, views
from tests import checkpoints, tiny
from tests import training_samples as make

pytestmark = pytest.mark.usefixtures("small_programs")

SIZE = 16
CONFIG = checkpoints.with_options(num_layers=3, vocab_size=72)
SETTINGS = train.Settings(
    steps=8, rows=4, length=28, learning_rate=0.01, warmup_steps=2, evaluate_every=2, evaluate_rows=4, accumulate=2
)


@functools.cache
def target() -> types.Target:
    return tiny.bigram(tiny.successor(size=SIZE), CONFIG)


@functools.cache
def trainer(settings: train.Settings = SETTINGS, num_heads: int = 2) -> train.Trainer:
    return train.Trainer(
        target(), Medusa(num_heads), settings, make.cycles(24, SIZE), make.cycles(8, SIZE, prompt=3, seed=1)
    )


def run(folder, *, stop_after: int | None = None) -> list[train.Progress]:
    seen = []
    with checkpoint.Checkpoints(folder, trainer().about()) as checkpoints_:
        for progress in trainer().fit(checkpoints_):
            seen.append(progress)
            if progress.step == stop_after:
                break
    return seen


def test_a_stopped_run_ends_where_it_would_have_ended(tmp_path):
    expected = run(tmp_path / "whole")
    # Stopped behind step 5, so that step 5 runs twice: its checkpoint is that of step 4.
    first, second = run(tmp_path / "parts", stop_after=5), run(tmp_path / "parts")
    assert [p.step for p in first] == [1, 2, 3, 4, 5] and [p.step for p in second] == [5, 6, 7, 8]
    joined = {p.step: p.loss for p in [*first, *second]}
    assert joined == {p.step: p.loss for p in expected}
    assert second[0].loss == first[4].loss
    assert expected[-1].loss < expected[0].loss
    for one, other in zip(expected[-1].evaluation.depths.chain, second[-1].evaluation.depths.chain):
        assert one == other
    states = []
    for name in ("whole", "parts"):
        with checkpoint.Checkpoints(tmp_path / name, trainer().about()) as kept:
            assert kept.latest == 8
            states.append(kept.restore(trainer().cold()))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_the_next_step_is_sent_off_before_a_loss_is_waited_for(monkeypatch):
    events = []
    monkeypatch.setattr(jax, "device_get", lambda value: events.append(f"fetch {value}") or value)

    def send():
        for number in range(3):
            events.append(f"send {number}")
            yield number

    assert list(train.fetched_late(send())) == [0, 1, 2]
    assert events == ["send 0", "send 1", "fetch 0", "send 2", "fetch 1", "fetch 2"]


def test_losses_and_evaluation_are_out_before_their_checkpoint_is_saved(tmp_path, monkeypatch):
    """A run that is killed at any moment has written at least what its last checkpoint has learned from."""
    events, step, save = [], train.Trainer.step, checkpoint.Checkpoints.save

    def sent(self, state, number):
        events.append(f"step {number + 1}")
        return step(self, state, number)

    def saved(self, number, *state_and_score):
        events.append(f"save {number}")
        save(self, number, *state_and_score)

    monkeypatch.setattr(train.Trainer, "step", sent)
    monkeypatch.setattr(checkpoint.Checkpoints, "save", saved)
    with checkpoint.Checkpoints(tmp_path / "run", trainer().about()) as kept:
        for progress in trainer().fit(kept):
            events.append(f"{'evaluation' if progress.evaluation else 'loss'} {progress.step}")
    stretches = [
        [f"step {i}", f"step {i + 1}", f"loss {i}", f"evaluation {i + 1}", f"save {i + 1}"] for i in (1, 3, 5, 7)
    ]
    assert events == sum(stretches, [])


def test_the_best_and_the_last_are_kept(tmp_path):
    state = trainer().start()
    with checkpoint.Checkpoints(tmp_path / "kept", trainer().about()) as kept:
        for step, score in ((1, 1.5), (2, 3.0), (3, 2.0), (4, 1.0)):
            kept.save(step, state.replace(step=state.step + step), score)
    with checkpoint.Checkpoints(tmp_path / "kept", trainer().about()) as kept:
        assert (kept.best, kept.latest) == (2, 4)
        assert kept.restore(state, kept.best).step == 2 and kept.restore(state).step == 4
    assert sorted(path.name for path in (tmp_path / "kept").iterdir() if path.is_dir()) == ["2", "4"]


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    with checkpoint.Checkpoints(tmp_path / "kept", trainer().about()) as kept:
        kept.save(1, trainer().start(), 1.0)
    other = trainer(SETTINGS, 3)
    with pytest.raises(ValueError, match="holds checkpoints of another run: architecture is"):
        checkpoint.Checkpoints(tmp_path / "kept", other.about())
    with pytest.raises(ValueError, match="another run: settings is .*seed=0.* there and .*seed=1"):
        checkpoint.Checkpoints(tmp_path / "kept", trainer(dataclasses.replace(SETTINGS, seed=1)).about())


def test_no_checkpoint_to_restore(tmp_path):
    with checkpoint.Checkpoints(tmp_path / "none", {}) as kept:
        assert kept.latest is None
        with pytest.raises(ValueError, match="holds no checkpoint"):
            kept.restore(trainer().cold())


def test_accumulated_batches_make_one_update():
    state = trainer().start()
    before = jax.tree.map(np.array, state.trained)
    state, _ = trainer().step(state)
    jax.tree.map(np.testing.assert_array_equal, before, state.trained)
    for _ in range(3):  # the first update's learning rate is still 0
        state, _ = trainer().step(state)
    assert any((one != other).any() for one, other in zip(*map(jax.tree.leaves, (before, state.trained))))


def test_bfloat16_passes_leave_float32_weights():
    """The same curve but for rounding, and weights finer than bfloat16 can tell."""
    curves = {}
    for precision in ("float32", "bfloat16"):
        run = trainer(dataclasses.replace(SETTINGS, precision=precision))
        state, losses = run.start(), []
        for _ in range(SETTINGS.steps):
            state, loss = run.step(state)
            losses.append(float(loss))
        curves[precision] = losses
    assert curves["bfloat16"] != curves["float32"] and losses[-1] < losses[0]
    np.testing.assert_allclose(curves["bfloat16"], curves["float32"], rtol=0.02)
    trained = jax.tree.leaves(state.trained)
    weights = [
        *trained,
        *(leaf for leaf in jax.tree.leaves(state.optimizer) if jnp.issubdtype(leaf.dtype, jnp.floating)),
    ]
    assert {leaf.dtype.name for leaf in weights} == {"float32"}
    assert any((leaf.astype(jnp.bfloat16).astype(jnp.float32) != leaf).any() for leaf in trained)


def test_the_learning_rate_rises_and_falls():
    settings = train.Settings(steps=100, warmup_steps=10, learning_rate=2.0, final=0.1, evaluate_every=100)
    rate = train.schedule(settings)
    np.testing.assert_allclose([rate(0), rate(5), rate(10), rate(100)], [0, 1, 2, 0.2], rtol=1e-5)
    flat = train.schedule(dataclasses.replace(settings, schedule="constant"), fraction=0.5, starts=20)
    np.testing.assert_allclose([flat(19), flat(20), flat(99)], [0, 1, 1])
    linear = train.schedule(dataclasses.replace(settings, schedule="linear"))
    np.testing.assert_allclose(linear(55), 1.1, rtol=1e-5)


def test_cached_views_are_those_that_were_computed(tmp_path, monkeypatch):
    """For layers and rows other than those that filled the cache, too."""
    batch = trainer().train.take(np.array([0, 3, -1]))
    real = np.asarray(batch.segments) >= 0
    expected = jax.tree.map(lambda leaf: np.asarray(leaf)[real], views.view_jit(target().model, batch, (0, 1)))
    computed = views.Cache(tmp_path, target(), (0, 1)).view(batch)
    monkeypatch.setattr(views, "view_jit", None)  # from here on they are read
    again = views.Cache(tmp_path, target(), (0, 1)).view(batch)
    for found in (computed, again):
        jax.tree.map(lambda found, wanted: np.testing.assert_array_equal(found[real], wanted), found, expected)
    one = views.Cache(tmp_path, target(), (1,)).view(jax.tree.map(lambda leaf: leaf[1:2], batch))
    np.testing.assert_array_equal(one.features[0, real[1], 0], np.asarray(again.features)[1, real[1], 1])
    monkeypatch.undo()
    files = len(list(tmp_path.iterdir()))
    half = views.Cache(tmp_path, target(), (0, 1), "bfloat16")
    half.view(batch)
    stored = half.view(batch)
    assert stored.features.dtype == "bfloat16"
    np.testing.assert_allclose(np.asarray(stored.final, np.float32)[real], np.asarray(again.final)[real], rtol=0.01)
    assert len(list(tmp_path.iterdir())) == 2 * files


def test_a_view_is_that_of_a_whole_pass_where_a_loss_looks():
    """To the last bit; elsewhere nothing is computed."""
    batch = trainer().train.take(np.array([0, 3, -1]))
    batch = batch.replace(places=batch.places[:, :13])

    @jax.jit
    def whole(batch):
        causal = batch.causal
        outputs, _ = transformer.forward(target().model, batch.tokens, batch.positions, None, causal)
        return jnp.argmax(outputs.logits, axis=-1), jax.nn.logsumexp(outputs.logits, axis=-1)

    there = np.zeros((3, batch.tokens.shape[1] + 1), bool)
    np.put_along_axis(there, np.asarray(batch.places), True, axis=1)
    there = there[:, :-1]
    assert there.sum() == 2 * 13
    view = views.view_jit(target().model, batch, ())
    for found, expected in zip((view.top, view.log_normalizer), whole(batch)):
        np.testing.assert_array_equal(found, np.where(there, expected, 0))
        assert np.asarray(found)[there].any()


def test_a_cache_grows_where_more_of_a_text_is_an_answer(tmp_path, monkeypatch):
    batch = trainer().train.take(np.array([0]))
    length = batch.tokens.shape[1]
    fewer = batch.replace(places=jnp.where(jnp.arange(length) < 3, batch.places, length))
    cache = views.Cache(tmp_path, target(), (1,))
    few = cache.view(fewer)
    stored = [dict(np.load(path)) for path in tmp_path.glob("*.npz")]  # one a sample
    assert sum(each["known"].sum() for each in stored) == 3
    assert sum((each["log_normalizer"] != 0).sum() for each in stored) == 3
    all_ = cache.view(batch)
    jax.tree.map(np.testing.assert_array_equal, all_, views.view_jit(target().model, batch, (1,)))
    monkeypatch.setattr(views, "view_jit", None)  # nothing that was known is lost
    jax.tree.map(np.testing.assert_array_equal, cache.view(fewer), few)
    jax.tree.map(np.testing.assert_array_equal, cache.view(batch), all_)


def test_a_cache_of_before_is_read_and_left_alone(tmp_path, monkeypatch):
    """Earlier versions kept the law at every token."""
    batch = trainer().train.take(np.array([0]))
    expected = views.Cache(tmp_path, target(), (1,)).view(batch)
    written = {}
    for path in tmp_path.glob("*.npz"):
        stored = dict(np.load(path))
        stored["log_normalizer"] = np.where(stored.pop("known"), stored["log_normalizer"], 7.5)
        np.savez(path, **stored)
        written[path] = path.read_bytes()
    monkeypatch.setattr(views, "view_jit", None)
    found = views.Cache(tmp_path, target(), (1,)).view(batch)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert written and all(path.read_bytes() == content for path, content in written.items())


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(train.Trainer, "step", lambda self, state, number: (state, np.float32("nan")))
    with checkpoint.Checkpoints(tmp_path / "run", trainer().about()) as kept:
        with pytest.raises(FloatingPointError, match="the loss of step 1 is nan: lower learning_rate"):
            list(trainer().fit(kept))
        assert kept.latest is None


def test_data_that_does_not_fit():
    samples, held_out = make.cycles(16, SIZE), make.cycles(8, SIZE, prompt=3, seed=1)
    with pytest.raises(ValueError, match="overlaps the training set"):
        train.Trainer(target(), Medusa(), SETTINGS, samples, samples[:2])
    with pytest.raises(ValueError, match="length 300 is more than the 256 tokens"):
        train.Trainer(target(), Medusa(), dataclasses.replace(SETTINGS, length=300), samples, held_out)
    with pytest.raises(ValueError, match="id 72 is outside"):
        train.Trainer(target(), Medusa(), SETTINGS, samples, held_out, draft_ids=np.array([1, 72]))
