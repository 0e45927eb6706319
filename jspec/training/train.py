"""One loop for every recipe: batches by a permutation, the target's view, a gradient of the draft alone, checkpoints.

A run is a function of its settings and its data: the batch, the noise and the learning rate of a step follow from the
seed and the step's number. So a run that is killed and goes on from its last checkpoint ends where it would have ended.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec import checkpoint, types
from jspec.drafters import base
from jspec.training import data, losses, objectives, views

# Rows of training text that a start in closed form looks at, at most: it goes through them several times.
WARM_ROWS = 2048
# Steps that are under way on the device while the host waits for the loss of an earlier one.
AHEAD = 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a draft is trained, whatever the recipe.

    steps:          batches.
    rows:           B, packed rows in a batch.
    length:         T, tokens in a row.
    answers:        N, answer tokens in a row at most, None for as many as there are: places that carry a loss cost
                    much more than the others, so N is best near the share of answers in the text.
    learning_rate:  at its peak.
    schedule:       after the warm-up: `cosine` or `linear` down to `final` times the peak, or `constant`.
    warmup_steps:   of a linear rise from 0.
    final:          fraction of the peak at the end.
    target_rate:    Medusa-2: the target's learning rate, as a fraction of the heads'.
    target_starts:  Medusa-2: steps before the target learns (the heads are warmed up alone).
    beta1, beta2, weight_decay: of AdamW.
    clip:           of the gradient's global norm.
    accumulate:     batches whose gradients make one update.
    precision:      of the draft's forward and backward pass: `float32`, `bfloat16`, or `auto`, which is bfloat16 where
                    the device multiplies it fast. Parameters and optimiser are float32.
    seed:           of everything drawn.
    evaluate_every: steps between evaluations; each saves a checkpoint.
    evaluate_rows:  held-out rows looked at each time.
    """

    steps: int = 1000
    rows: int = 8
    length: int = 256
    answers: int | None = None
    learning_rate: float = 1e-3
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 50
    final: float = 0.1
    target_rate: float = 0.25
    target_starts: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 0.5
    accumulate: int = 1
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    seed: int = 0
    evaluate_every: int = 200
    evaluate_rows: int = 64

    def __post_init__(self):
        for name, smallest in (
            ("steps", 1),
            ("rows", 1),
            ("length", 2),
            ("warmup_steps", 0),
            ("target_starts", 0),
            ("accumulate", 1),
            ("seed", 0),
            ("evaluate_every", 1),
            ("evaluate_rows", 1),
        ):
            base.check_count(name, getattr(self, name), smallest)
        if self.answers is not None:
            base.check_count("answers", self.answers, 1)
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} {getattr(self, name)} is not above 0")
        for name in ("final", "target_rate", "beta1", "beta2"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)} is not between 0 and 1")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay {self.weight_decay} is below 0")
        if self.evaluate_every % self.accumulate or self.steps % self.accumulate:
            raise ValueError(
                f"accumulate {self.accumulate} does not divide steps {self.steps} and evaluate_every "
                f"{self.evaluate_every}"
            )

    @property
    def dtype(self) -> Any:
        """Of the draft's passes."""
        if self.precision == "auto":
            return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        return jnp.dtype(self.precision)


@flax.struct.dataclass
class State:
    """What a checkpoint holds.

    step:      batches seen.
    trained:   parameters.
    optimizer: its state.
    """

    step: jax.Array  # [] int32
    trained: Any
    optimizer: Any


class Evaluation(NamedTuple):
    """On held-out answers.

    loss:   mean over batches.
    depths: sums by depth.
    """

    loss: float
    depths: losses.Depths

    @property
    def tau(self) -> float:
        """What a greedy chain of all trained depths would emit per target call, if the text were its own: 1 + the
        sum of `chain`."""
        return 1.0 + float(jnp.sum(self.depths.chain / jnp.maximum(self.depths.places, 1)))


class Progress(NamedTuple):
    """One step of `fit`.

    step:       its number, from 1.
    loss:       of its batch.
    seconds:    since the loss of the step before was there, the target's view included, evaluation not.
    evaluation: where one was made.
    """

    step: int
    loss: float
    seconds: float
    evaluation: Evaluation | None


def schedule(settings: Settings, *, fraction: float = 1.0, starts: int = 0) -> optax.Schedule:
    """The learning rate of an update; `starts` updates later the target's begins."""
    updates = settings.steps // settings.accumulate
    warmup = min(settings.warmup_steps // settings.accumulate, updates)
    peak, rest = settings.learning_rate * fraction, max(1, updates - warmup)
    falls = {
        "cosine": optax.cosine_decay_schedule(peak, rest, settings.final),
        "linear": optax.linear_schedule(peak, peak * settings.final, rest),
        "constant": optax.constant_schedule(peak),
    }[settings.schedule]
    joined = optax.join_schedules([optax.linear_schedule(0.0, peak, max(1, warmup)), falls], [warmup])
    return lambda count: jnp.where(count < starts, 0.0, joined(count))


@functools.cache
def optimizer(settings: Settings, objective: objectives.Objective) -> optax.GradientTransformation:
    """AdamW behind a clip of the global norm; the target of Medusa-2 at a rate of its own."""

    def adam(rate):
        return optax.adamw(rate, settings.beta1, settings.beta2, weight_decay=settings.weight_decay)

    rates = {
        "draft": adam(schedule(settings)),
        "target": adam(
            schedule(settings, fraction=settings.target_rate, starts=settings.target_starts // settings.accumulate)
        ),
    }
    steps = optax.chain(optax.clip_by_global_norm(settings.clip), optax.partition(rates, objective.learning_rates))
    return optax.MultiSteps(steps, settings.accumulate).gradient_transformation()


def _in_precision(trained: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), trained)


@functools.partial(jax.jit, static_argnames=("objective", "settings"), donate_argnames="state")
def train_step(
    target: Any,
    vocabulary: objectives.Vocabulary,
    state: State,
    batch: data.Batch,
    view: views.View,
    *,
    objective: objectives.Objective,
    settings: Settings,
) -> tuple[State, jax.Array]:
    """One batch: the new state and the loss. The gradient is with respect to the trained parameters alone."""
    rng_key = jax.random.fold_in(jax.random.key(settings.seed), state.step)

    def loss(trained):
        draft = objectives.Draft(_in_precision(trained, settings.dtype), vocabulary)
        return objective.loss(types.Params(target, draft), batch, view, rng_key)

    (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(state.trained)
    updates, optimizer_state = optimizer(settings, objective).update(gradient, state.optimizer, state.trained)
    return State(state.step + 1, optax.apply_updates(state.trained, updates), optimizer_state), value


@functools.partial(jax.jit, static_argnames=("objective", "settings"))
def _evaluate_step(target, vocabulary, trained, batch, view, *, objective, settings):
    draft = objectives.Draft(_in_precision(trained, settings.dtype), vocabulary)
    return objective.loss(types.Params(target, draft), batch, view, None)


def fetched_late(values: Iterable[Any], ahead: int = AHEAD) -> Iterator[Any]:
    """What a device computes, on the host: each item when `ahead` more have been sent off, so that it never idles."""
    waiting = collections.deque()
    for value in values:
        waiting.append(value)
        if len(waiting) > ahead:
            yield jax.device_get(waiting.popleft())
    yield from map(jax.device_get, waiting)


class Trainer:
    """A run: target, objective, data and settings put together. `fit` goes through it."""

    def __init__(
        self,
        target: types.Target,
        recipe: Any,
        settings: Settings,
        train: list[data.Sample],
        held_out: list[data.Sample],
        *,
        draft_ids: np.ndarray | None = None,
        cache: str | None = None,
        cache_dtype: str = "float32",
    ):
        """Check that everything fits; nothing is computed yet.

        Args:
          target: the frozen model.
          recipe: of `objectives.REGISTRY`.
          settings: of the run.
          train, held_out: samples; no prompt may be in both.
          draft_ids: `[Vd]` a reduced draft vocabulary, in any order; None means all tokens.
          cache: folder that keeps the target's views; None computes them each time.
          cache_dtype: of its features.

        Raises:
          ValueError: data, recipe and target do not fit together.
        """
        data.check_disjoint(train, held_out)
        limit = target.model.config.max_positions
        if settings.length > limit:
            raise ValueError(f"length {settings.length} is more than the {limit} tokens the target follows")
        self.target, self.settings = target, settings
        self.vocabulary = objectives.Vocabulary.of(target, draft_ids)
        self.objective: objectives.Objective = recipe.build(target, self.vocabulary)
        shortest = self.objective.reach
        pack = lambda samples: data.Rows(samples, settings.length, shortest=shortest, answers=settings.answers)
        self.train, self.held_out = pack(train), pack(held_out)
        self._cache = None
        if cache is not None:
            self._cache = views.Cache(cache, target, self.objective.feature_layers, cache_dtype)

    def about(self) -> dict[str, Any]:
        """What a checkpoint belongs to."""
        shapes = jax.eval_shape(self.cold)
        return {
            "target": data.fingerprint(self.target),
            "objective": repr(self.objective),
            "architecture": checkpoint.describe(shapes.trained),
            "settings": repr(self.settings),
            "rows": len(self.train),
        }

    def start(self) -> State:
        """The state before the first step."""
        state = self.cold()
        warm = self.objective.warm(state.trained, self.target, self.vocabulary, self._warm_batches)
        return state.replace(trained=warm)

    def cold(self) -> State:
        """The state before the training text was looked at; what a checkpoint's arrays look like."""
        key = jax.random.key(self.settings.seed)
        trained = self.objective.init(key, self.target, self.vocabulary)
        optimizer_state = optimizer(self.settings, self.objective).init(trained)
        return State(jnp.int32(0), trained, optimizer_state)

    def _warm_batches(self) -> Iterator[tuple[data.Batch, views.View]]:
        for number, rows in enumerate(self.train.in_turn(self.settings.rows)):
            if number * self.settings.rows >= WARM_ROWS:
                return
            batch = self.train.take(rows)
            yield batch, self.view(batch)

    def draft(self, state: State) -> objectives.Draft:
        """What a state has learned."""
        return objectives.Draft(state.trained, self.vocabulary)

    def view(self, batch: data.Batch) -> views.View:
        """What the target says about a batch."""
        if self._cache is not None:
            return self._cache.view(batch)
        return views.view_jit(self.target.model, batch, self.objective.feature_layers)

    def step(self, state: State, number: int | None = None) -> tuple[State, jax.Array]:
        """The next batch; nothing waits for the device.

        Args:
          state: is donated.
          number: batches seen, from 0, if it is known: None asks the state, and so waits for it.
        """
        settings = self.settings
        number = int(state.step) if number is None else number
        rows = self.train.at_step(number, settings.rows, settings.seed)
        batch = self.objective.text(self.target, self.draft(state), self.train, rows, settings.seed, number)
        return train_step(
            self.target.model,
            self.vocabulary,
            state,
            batch,
            self.view(batch),
            objective=self.objective,
            settings=settings,
        )

    def answer_tokens_seen(self, steps: int) -> int:
        """Answer tokens in the batches of the first so many steps, repeated ones counted again."""
        settings = self.settings
        each = self.train.answer_tokens
        return sum(int(each[self.train.at_step(i, settings.rows, settings.seed)].sum()) for i in range(steps))

    def evaluate(self, state: State) -> Evaluation:
        """Loss and acceptance by depth on held-out answers."""
        settings, depths = self.settings, losses.Depths.zeros(self.objective.depths)

        def each_loss():
            nonlocal depths
            count = -(-settings.evaluate_rows // settings.rows)
            for rows in itertools.islice(self.held_out.in_turn(settings.rows), count):
                batch = self.held_out.take(rows)
                loss, found = _evaluate_step(
                    self.target.model,
                    self.vocabulary,
                    state.trained,
                    batch,
                    self.view(batch),
                    objective=self.objective,
                    settings=settings,
                )
                depths = depths + found
                yield loss

        found = [float(loss) for loss in fetched_late(each_loss())]
        return Evaluation(sum(found) / len(found), jax.device_get(depths))

    def fit(self, checkpoints: checkpoint.Checkpoints) -> Iterator[Progress]:
        """Train from the last checkpoint to the end, saving as it goes.

        A step is sent off before the loss of the one before it is asked for. All losses up to a checkpoint, and its
        evaluation, are given out before it is saved: what is kept of them is never behind the checkpoint.

        Yields:
          One `Progress` a step.

        Raises:
          FloatingPointError: the loss is not finite. No checkpoint of such a state is saved.
        """
        settings = self.settings
        state = self.start() if checkpoints.latest is None else checkpoints.restore(self.cold())
        done = int(state.step)

        def each_loss(last):
            nonlocal state
            for number in range(done, last):
                state, loss = self.step(state, number)
                yield number + 1, loss

        while done < settings.steps:
            last = min(done - done % settings.evaluate_every + settings.evaluate_every, settings.steps)
            clock = time.perf_counter()
            for step, loss in fetched_late(each_loss(last)):
                seconds = time.perf_counter() - clock
                clock += seconds
                if not np.isfinite(loss):
                    raise FloatingPointError(f"the loss of step {step} is {loss}: lower learning_rate or clip")
                evaluation = self.evaluate(state) if step == last else None
                yield Progress(step, float(loss), seconds, evaluation)
            checkpoints.save(last, state, evaluation.tau)
            done = last
