"""Every recipe learns what can be learned, its gradient is that of its loss, and what it learned decodes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import drafters, generation, topology, types, weights
from jspec.training import Distill, Eagle, Medusa, distill, medusa, objectives, train, views, vocabulary
from jspec.weights import vocabulary_files
from tests import checkpoints, tiny
from tests import training_samples as make

pytestmark = pytest.mark.usefixtures("small_programs", "few_programs")

SIZE = 16  # of the cycle
CONFIG = checkpoints.with_options(num_layers=3, vocab_size=72)  # 64 is the size of other things too
SETTINGS = train.Settings(
    steps=120, rows=8, length=28, learning_rate=0.02, warmup_steps=5, clip=1.0, evaluate_every=120
)
LAYERS = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe, and how many tokens its draft vocabulary has (None: all)."""

    recipe: object
    vocabulary: int | None = None
    steps: int = 200
    learning_rate: float = 0.02
    answers: int | None = None


SMALL = distill.RandomDraft(num_layers=1, width=16, num_heads=2, num_kv_heads=1, ffn_size=32)
CASES = {
    "eagle 3": Case(Eagle(version=3, steps=3, feature_layers=LAYERS), 20, answers=13),
    "eagle 3, random start": Case(
        Eagle(version=3, steps=2, feature_layers=LAYERS, start="random"), steps=400, learning_rate=0.006
    ),
    "eagle 1": Case(Eagle(version=1, steps=2)),
    "eagle 1, reduced": Case(Eagle(version=1, noise=0.0, distillation=1.0, input_norm=False), 20),
    "medusa": Case(Medusa(num_heads=2), 20, answers=12),
    "medusa, own matrices": Case(Medusa(num_heads=2, own_heads=True, labels="target")),
    "medusa 2": Case(Medusa(num_heads=2, joint=medusa.Joint(heads=1.0))),
    "distill": Case(Distill(random=SMALL), 20),
    "distill, layers": Case(Distill(layers=2), 20, steps=20, learning_rate=0.001),
    "distill, reverse": Case(Distill(random=SMALL, divergence="reverse_kl"), steps=500, learning_rate=0.005),
    "distill, jsd": Case(Distill(random=SMALL, divergence="jsd")),
    "distill, tv, on policy": Case(Distill(random=SMALL, divergence="tv", on_policy=0.3)),
}
QUICK = ("medusa",)
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
)


@functools.cache
def target() -> types.Target:
    """Says the cycle 0, 1, ..., 15, 0, ... whatever came before."""
    return tiny.bigram(tiny.successor(size=SIZE), CONFIG)


@functools.cache
def trainer(name: str) -> train.Trainer:
    case = CASES[name]
    samples = make.cycles(64, SIZE)
    held_out = make.cycles(8, SIZE, prompt=3, seed=1)
    ids = None if case.vocabulary is None else vocabulary.frequent(samples, case.vocabulary, target())
    settings = dataclasses.replace(
        SETTINGS,
        steps=case.steps,
        evaluate_every=case.steps,
        learning_rate=case.learning_rate,
        answers=case.answers,
    )
    return train.Trainer(target(), case.recipe, settings, samples, held_out, draft_ids=ids)


@functools.cache
def trained(name: str) -> train.State:
    state = trainer(name).start()
    for _ in range(trainer(name).settings.steps):
        state, _ = trainer(name).step(state)
    return state


@functools.cache
def loss_of(name: str):
    """`trained, batch -> loss`, without noise."""
    run = trainer(name)

    @jax.jit
    def loss(trained, batch, view):
        draft = objectives.Draft(trained, run.vocabulary)
        return run.objective.loss(types.Params(target().model, draft), batch, view, None)[0]

    return loss


@EACH
def test_a_repeating_sequence_is_learned_and_every_draft_accepted(name):
    run, state = trainer(name), trained(name)
    depths = run.evaluate(state).depths
    np.testing.assert_array_equal(depths.ranked[:, 0], depths.places)
    assert (depths.places > 0).all()
    gamma = min(3, run.objective.depths)  # what was trained: a head may lose its way further on
    sped_up, bound, params = run.objective.bind(target(), run.draft(state), gamma)
    prompts = [[3, 4], [9, 10, 11], [15, 0]]
    # No longer than what was learned from: a head need not know positions that it never saw.
    generated = generation.generate(sped_up, prompts, drafter=(bound, params), max_new_tokens=11)
    assert generated.tokens == [[(prompt[-1] + 1 + i) % SIZE for i in range(11)] for prompt in prompts]
    assert generated.statistics.alpha == 1.0
    # 10 tokens behind prefill's, gamma + 1 a round, the last cut short by the budget.
    rounds = -(-10 // (gamma + 1))
    assert generated.statistics.target_calls == 3 * rounds


@EACH
def test_gradients_are_those_of_the_loss(name):
    """Central differences at the weight that matters most, of two widths, extrapolated to none (Richardson)."""
    run, loss = trainer(name), loss_of(name)
    batch = run.train.take(np.arange(4))
    view = run.view(batch)
    # Near the start of training: a trained draft's gradient is nothing but rounding.
    start = jax.tree.map(
        lambda leaf: leaf + 0.02 * jax.random.normal(jax.random.key(1), leaf.shape), run.start().trained
    )
    gradient = jax.grad(loss)(start, batch, view)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))
    leaves, treedef = jax.tree.flatten(gradient)
    largest = max(range(len(leaves)), key=lambda i: float(jnp.abs(leaves[i]).max()))
    place = np.unravel_index(int(jnp.abs(leaves[largest]).argmax()), leaves[largest].shape)
    step = 3e-3

    def moved(by):
        flat = jax.tree.leaves(start)
        flat[largest] = flat[largest].at[place].add(by)
        return float(loss(jax.tree.unflatten(treedef, flat), batch, view))

    wide, narrow = ((moved(width) - moved(-width)) / (2 * width) for width in (2 * step, step))
    difference = (4 * narrow - wide) / 3
    np.testing.assert_allclose(float(leaves[largest][place]), difference, rtol=0.03)


@EACH
def test_a_row_without_labels_adds_nothing(name):
    run, loss = trainer(name), loss_of(name)
    start = run.start().trained
    with_empty, empty = run.train.take(np.array([0, 1, -1, 2])), run.train.take(np.full(4, -1))
    twice = run.train.take(np.array([0, 1, 1, 2]))
    # The same rows, the third marked as no answer.
    silent = twice.replace(places=twice.places.at[2].set(run.train.length))
    values = [loss(start, batch, run.view(batch)) for batch in (with_empty, silent)]
    np.testing.assert_allclose(*values, rtol=1e-5)
    nothing, gradient = jax.value_and_grad(loss)(start, empty, run.view(empty))
    if "medusa 2" not in name:
        assert nothing == 0
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))


@EACH
def test_the_target_is_frozen(name):
    before = jax.tree.map(np.array, target().model.params)
    trained(name)
    jax.tree.map(np.testing.assert_array_equal, before, target().model.params)


@pytest.mark.parametrize("name", CASES)
def test_every_recipe_has_a_bfloat16_pass_over_float32_weights(name):
    """Traced, not run: products of bfloat16, and a state whose dtypes are those it had."""
    run = trainer(name)
    state, batch = jax.eval_shape(run.cold), run.train.take(np.arange(4))
    settings = dataclasses.replace(run.settings, precision="bfloat16")
    view = functools.partial(views.view, feature_layers=run.objective.feature_layers)
    step = functools.partial(train.train_step.__wrapped__, objective=run.objective, settings=settings)
    program, (after, loss) = jax.make_jaxpr(step, return_shape=True)(
        target().model, run.vocabulary, state, batch, jax.eval_shape(view, target().model, batch)
    )
    dtypes = lambda tree: jax.tree.map(lambda leaf: leaf.dtype.name, tree)
    assert dtypes(after) == dtypes(state) and loss.dtype == "float32"
    assert set(jax.tree.leaves(dtypes(after.trained))) == {"float32"}
    assert "bf16[" in str(program)


@pytest.mark.parametrize("name", [pytest.param("eagle 3", marks=pytest.mark.slow), "medusa", "distill"])
def test_a_reduced_vocabulary_never_forms_full_logits(name):
    """No array of the loss and its gradient has the full vocabulary beside batch and length."""
    run = trainer(name)
    batch = run.train.take(np.arange(4))
    view = run.view(batch)
    draft = run.start().trained
    text = jax.jit(jax.grad(loss_of(name).__wrapped__)).lower(draft, batch, view).as_text()
    vocab_size, reduced = CONFIG.vocab_size, CASES[name].vocabulary
    rows, length = batch.tokens.shape
    count = batch.places.shape[1]
    assert f"{rows}x{count}x{reduced}xf32" in text or f"{rows * count}x{reduced}xf32" in text
    assert f"{length}x{vocab_size}xf32" not in text
    assert f"{rows * length}x{vocab_size}xf32" not in text


def test_labels_outside_the_vocabulary_carry_no_loss():
    """A text of tokens that the draft cannot say teaches nothing, and counts as missed."""
    samples = make.cycles(16, SIZE)
    recipe, few = Medusa(num_heads=1), np.arange(20, 40)
    run = train.Trainer(target(), recipe, SETTINGS, samples, make.cycles(8, SIZE, prompt=3, seed=1), draft_ids=few)
    evaluation = run.evaluate(run.start())
    assert evaluation.loss == 0
    assert evaluation.depths.ranked[:, 0] == 0 and evaluation.depths.places > 0


# Settings that do not fit.


@pytest.mark.parametrize(
    "recipe, message",
    [
        (lambda: Eagle(version=3), "feature layers 2, 1, 0 of a target of 3 layers collide"),
        (lambda: Eagle(version=3, feature_layers=(0, 1, 7)), "7 is not between 0 and 2"),
        (lambda: Eagle(version=3, feature_layers=(0, 1)), "the head fuses 3"),
        (lambda: Distill(layers=9), "layers 9 is not between 1 and the target's 3"),
        (lambda: Distill(random=distill.RandomDraft(width=30)), "width 30 is not a multiple of num_heads 4"),
    ],
)
def test_recipes_that_do_not_fit_the_target(recipe, message):
    samples, held_out = make.cycles(16, SIZE), make.cycles(8, SIZE, prompt=3, seed=1)
    with pytest.raises(ValueError, match=message):
        train.Trainer(target(), recipe(), SETTINGS, samples, held_out)


@pytest.mark.parametrize(
    "make_recipe, message",
    [
        (lambda: Eagle(steps=0), "steps 0 is below 1"),
        (lambda: Eagle(regression=0.0, distillation=0.0), "nothing is learned"),
        (lambda: Eagle(noise=-1.0), "noise -1.0 is below 0"),
        (lambda: Medusa(num_heads=0), "num_heads 0 is below 1"),
        (lambda: medusa.Joint(heads=0.0), "joint.heads 0.0 is not above 0"),
        (lambda: Distill(), "exactly one"),
        (lambda: Distill(random=SMALL, export="shared"), "only a draft of the target's layers has something to share"),
        (lambda: Distill(layers=1, on_policy=2.0), "on_policy 2.0 is not between 0 and 1"),
        (lambda: train.Settings(steps=10, accumulate=4), "accumulate 4 does not divide steps 10"),
        (lambda: train.Settings(learning_rate=0.0), "learning_rate 0.0 is not above 0"),
        (lambda: train.Settings(clip=-1.0), "clip -1.0 is not above 0"),
    ],
)
def test_bad_settings(make_recipe, message):
    with pytest.raises(ValueError, match=message):
        make_recipe()


@pytest.mark.parametrize("recipe", [Medusa(joint=medusa.Joint()), Medusa(own_heads=True)])
def test_medusa_2_and_own_matrices_need_the_whole_vocabulary(recipe):
    samples, held_out = make.cycles(16, SIZE), make.cycles(8, SIZE, prompt=3, seed=1)
    with pytest.raises(ValueError, match="leave"):
        train.Trainer(target(), recipe, SETTINGS, samples, held_out, draft_ids=np.arange(20))


def test_frequent_tokens_come_first_and_stop_ids_always():
    samples = [make.sample(0, [9, 9, 9], [5, 5, 7, 3, 3, 3])]
    stops = dataclasses.replace(target(), stop_ids=(60,))
    assert vocabulary.frequent(samples, 4, stops).tolist() == [60, 3, 5, 7]
    assert vocabulary.coverage(np.array([3, 5]), samples) == 5 / 6
    with pytest.raises(ValueError, match="vocabulary size 73 is not between 1 and 72"):
        vocabulary.frequent(samples, 73, target())


@pytest.mark.parametrize(
    "name, kind",
    [
        pytest.param("eagle 3", "eagle", marks=pytest.mark.slow),
        pytest.param("eagle 1", "eagle", marks=pytest.mark.slow),
        pytest.param("eagle 1, reduced", "eagle", marks=pytest.mark.slow),
        ("medusa", "medusa"),
        pytest.param("medusa, own matrices", "medusa", marks=pytest.mark.slow),
        pytest.param("medusa 2", "medusa", marks=pytest.mark.slow),
        ("distill", "standard"),
        pytest.param("distill, layers", "standard", marks=pytest.mark.slow),
    ],
)
def test_exports_draft_like_what_was_trained(name, kind, tmp_path):
    """Through files and back: the same target calls, whatever the format leaves out."""
    run = trainer(name)
    # Noise on what was learned, so that acceptance is neither full nor none.
    draft = objectives.Draft(
        jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(2), x.shape), trained(name).trained),
        run.vocabulary,
    )
    gamma = min(3, run.objective.depths)
    sped_up, *bound = run.objective.bind(target(), draft, gamma)
    place = tmp_path / run.objective.file_name
    run.objective.save(target(), draft, place, base_model="tiny")
    has_file = run.vocabulary.ids is not None and name != "eagle 3"
    assert (place / vocabulary_files.NAME).exists() == has_file
    if kind == "eagle":
        settings = drafters.Eagle(gamma=gamma, draft=drafters.eagle.EagleDraft(reference=str(place)))
    elif kind == "medusa":
        tree = topology.Tree(widths=(1,) * gamma)
        settings = drafters.Medusa(tree=tree, draft=drafters.medusa.MedusaDraft(reference=str(place)))
    else:
        settings = drafters.Standard(gamma=gamma, draft=drafters.standard.Draft(reference=str(place)))
    prompts = [[3, 4], [9, 10, 11], [15, 0]]
    kept, loaded = (
        generation.generate(sped_up, prompts, drafter=drafter, max_new_tokens=21)
        for drafter in (tuple(bound), settings)
    )
    assert loaded.tokens == kept.tokens
    assert loaded.statistics == kept.statistics


@pytest.mark.slow
def test_a_standard_draft_goes_to_gguf_too(tmp_path):
    recipe = dataclasses.replace(CASES["distill"].recipe, export="gguf")
    run = train.Trainer(target(), recipe, SETTINGS, make.cycles(16, SIZE), make.cycles(8, SIZE, prompt=3, seed=1))
    state = run.start()
    assert run.objective.file_name == "draft.gguf"
    run.objective.save(target(), run.draft(state), tmp_path / "draft.gguf", base_model="tiny")
    again = weights.load_target(str(tmp_path / "draft.gguf"))
    expected = run.objective.model(target().model, state.trained)
    jax.tree.map(np.testing.assert_array_equal, again.model.params, expected.params)
