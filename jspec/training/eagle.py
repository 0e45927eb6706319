"""Training EAGLE heads (EAGLE-1, arXiv:2401.15077, section 3.2; EAGLE-3, arXiv:2503.01840, sections 3.1 and 3.2).

    EAGLE-1   smooth L1 between the predicted and the target's next feature + 0.1 cross entropy of the laws; uniform
              noise on the features; one step
    EAGLE-3   cross entropy of the laws alone, over a reduced vocabulary; three fused features; the training-time test
              of `unroll`, step s weighted by 0.8^s

They are one recipe: either version may be trained for any number of steps. The released code starts both at random;
here they start near the target's next feature (`eagle_start`).

Differs from the released code: EAGLE-1's noise there shrinks with the row's length, here its width is a setting. Labels
outside a reduced vocabulary carry no loss (as in EAGLE-3's code), but count as misses when acceptance is measured.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

import jax
import jax.numpy as jnp

from jspec import types
from jspec.drafters import base
from jspec.drafters import eagle as eagle_drafter
from jspec.models import heads as heads_lib
from jspec.training import data, eagle_start, linear_start, losses, objectives, unroll
from jspec.weights import eagle_files


@objectives.register("eagle")
@dataclasses.dataclass(frozen=True)
class Eagle:
    """Settings; None takes the paper's value for the version.

    version:        1 or 3.
    steps:          S, of the training-time test: 1 for EAGLE-1, 7 for EAGLE-3.
    decay:          weight of step s is decay^s.
    regression:     weight of the feature regression: 1 for EAGLE-1, 0 for EAGLE-3.
    distillation:   weight of the cross entropy of the laws: 0.1 for EAGLE-1, 1 for EAGLE-3.
    noise:          the features get uniform noise in [-noise, noise]: 0.1 for EAGLE-1, 0 for EAGLE-3.
    start:          `target`: the layer starts as the target's last, the input product as the identity; `linear`: from
                    there in closed form (`eagle_start.ClosedForm`); `random`.
    train_head:     EAGLE-3: train its output matrix too, as the paper does; else it stays the target's rows.
    input_norm:     EAGLE-1: a norm before the layer's attention, as the target's layers have (the released heads have
                    none).
    feature_layers: EAGLE-3: layers of the target whose inputs are fused; None means the default.
    """

    version: Literal[1, 3] = 3
    steps: int | None = None
    decay: float = 0.8
    regression: float | None = None
    distillation: float | None = None
    noise: float | None = None
    start: Literal["linear", "target", "random"] = "linear"
    train_head: bool = True
    input_norm: bool = True
    feature_layers: tuple[int, ...] | None = None

    def __post_init__(self):
        if self.steps is not None:
            base.check_count("steps", self.steps, 1)
        for name in ("decay", "regression", "distillation", "noise"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} {value} is below 0")
        if self.regression == 0 and self.distillation == 0:
            raise ValueError("regression and distillation are both 0: nothing is learned")

    def build(self, target: types.Target, vocabulary: objectives.Vocabulary) -> BoundEagle:
        """See `objectives.Objective`.

        Raises:
          ValueError: the target does not have the feature layers.
        """
        size = len(vocabulary.matrix)
        config = eagle_drafter.like_target(target, self.version, size)
        if self.version == 1:
            config = dataclasses.replace(config, own_head=False, input_norm=self.input_norm)
        layers = eagle_drafter.resolve_feature_layers(config, self.feature_layers, target.model.config.num_layers)
        if self.version == 3:
            config = dataclasses.replace(config, feature_layers=layers)
        first = self.version == 1
        choose = lambda value, one, three: value if value is not None else one if first else three
        return BoundEagle(
            config=config,
            feature_layers=() if first else layers,
            depths=choose(self.steps, 1, 7),
            decay=self.decay,
            regression=choose(self.regression, 1.0, 0.0),
            distillation=choose(self.distillation, 0.1, 1.0),
            noise=choose(self.noise, 0.1, 0.0),
            start=self.start,
            train_head=self.train_head,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundEagle(objectives.Bound):
    """See `objectives.Objective` and `Eagle`."""

    config: heads_lib.EagleConfig
    feature_layers: types.FeatureLayers
    depths: int
    decay: float
    regression: float
    distillation: float
    noise: float
    start: str
    train_head: bool

    def init(self, rng_key, target, vocabulary):
        """Random, then what can be taken from the target."""
        # The vocabulary is kept apart: its ids are fixed.
        params = dict(heads_lib.init_eagle(rng_key, self.config, jnp.float32).params)
        params.pop("draft_ids", None)
        if not self.train_head:
            params.pop("head", None)
        if self.start == "random":
            return params
        return eagle_start.from_target(params, self.config, target, vocabulary)

    def warm(self, trained, target, vocabulary, text):
        """What is linear in the next feature in closed form; for EAGLE-3 its last norm's size by trial."""
        if self.start != "linear":
            return trained
        trained = eagle_start.ClosedForm(target.model, self.config, self.depths, self.decay).fit(trained, text)
        if self.config.version == 1:
            return trained
        return linear_start.temper(trained, "norm", self, target, vocabulary, text)

    def head(self, draft: objectives.Draft) -> heads_lib.EagleHead:
        """A head that speaks the draft vocabulary."""
        params, config = dict(draft.trained), self.config
        if draft.vocabulary.ids is not None:
            params["draft_ids"] = draft.vocabulary.ids
        if "head" not in params and (config.version == 3 or draft.vocabulary.ids is not None):
            params["head"] = draft.vocabulary.matrix.astype(params["fc"].dtype)
            config = dataclasses.replace(config, own_head=True)
        return heads_lib.EagleHead(params, config)

    def loss(self, params, batch, view, rng_key):
        """Sum over the steps of decay^s (regression + distillation)."""
        draft: objectives.Draft = params.draft
        head, vocabulary = self.head(draft), draft.vocabulary
        features = view.features if self.feature_layers else view.final[:, :, None]
        states = heads_lib.fuse(head, features.astype(head.dtype))
        if rng_key is not None and self.noise > 0:
            states += jax.random.uniform(rng_key, states.shape, states.dtype, -self.noise, self.noise)
        seen = batch.at_places(view.replace(features=None))
        law = vocabulary.law(seen)
        says = vocabulary.places(seen.top)  # -1 where the draft cannot say what the target would

        total, ranks, overlaps, masks = 0.0, [], [], []
        for step, (_, _, state) in enumerate(unroll.chains(head, params.target, batch, states, self.depths)):
            # From place t this guesses the feature of token t + 1 + step, which the target continues with the next.
            there, wanted = batch.labelled(step + 2), data.shift(law, step + 1)
            best = data.shift(says + 1, step + 1) - 1
            own = jax.nn.log_softmax(heads_lib.eagle_logits(head, params.target, state), axis=-1)
            entropy = -jnp.sum(jnp.exp(losses.renormalize(wanted)) * own, axis=-1)
            term = self.distillation * losses.masked_mean(entropy, there & (best >= 0))
            if self.regression > 0:
                distance = losses.smooth_l1(state, data.shift(seen.final, step + 1))
                term += self.regression * losses.masked_mean(distance, there)
            total += self.decay**step * term
            ranks.append(losses.rank(own, best))
            overlaps.append(losses.overlap(wanted, own))
            masks.append(there)
        return total, losses.Depths.of(ranks, overlaps, masks)

    def bind(self, target, draft, gamma):
        """A chain of the head's drafts."""
        return target, *eagle_drafter.Eagle(gamma=gamma).build(target, head=self.head(draft))

    def save(self, target: types.Target, draft: objectives.Draft, path: str | os.PathLike, base_model: str) -> None:
        """The native layout of `eagle_files`, the draft vocabulary with it."""
        params = dict(self.head(draft).params)
        if self.config.version == 1:
            params.pop("head", None)  # its file borrows the target's rows
        if self.config.vocab_size == self.config.layer.vocab_size:
            params.pop("draft_ids", None)
        eagle_files.save(heads_lib.EagleHead(params, self.config), target, path, base_model=base_model)
