"""Training EAGLE heads (EAGLE-1, arXiv:2401.15077, section 3.2; EAGLE-3, arXiv:2503.01840, sections 3.1 and 3.2).

    EAGLE-1   smooth L1 between the predicted and the target's next feature + 0.1 cross entropy of the laws; uniform
              noise on the features; one step
    EAGLE-3   cross entropy of the laws alone, over a reduced vocabulary; three fused features; the training-time test
              of `unroll`, step s weighted by 0.8^s

They are one recipe: either version may be trained for any number of steps. The released code starts both at random;
here the layer starts as the target's last, what is linear in the next feature by regression (`linear_start`), and
EAGLE-3's attention by correlation (`matching`).

Differs from the released code: EAGLE-1's noise there shrinks with the row's length, here its width is a setting. Labels
outside a reduced vocabulary carry no loss (as in EAGLE-3's code), but count as misses when acceptance is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jspec import types
from jspec.drafters import base
from jspec.drafters import eagle as eagle_drafter
from jspec.models import heads as heads_lib
from jspec.models import layers, transformer
from jspec.training import data, linear_start, losses, matching, objectives, unroll
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
    start:          `linear`: the layer starts as the target's last, each matrix that the next feature is linear in by
                    regression (`linear_start`), and EAGLE-3's attention by correlation (`matching`); `target`: the
                    layer starts as the target's last, the input product as the identity; `random`.
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
        last = target.model.params["layers"][-1]
        layer, width = dict(params["layer"]), self.config.layer.width
        for name in set(layer) & set(last) - {"qkv", "attention_norm"}:
            layer[name] = last[name]
        eye = jnp.eye(width)
        if self.config.version == 1:
            layer["qkv"] = last["qkv"]
            if "attention_norm" in layer:
                layer["attention_norm"] = last["attention_norm"]
            embed = target.model.params["embed"].astype(jnp.float32) * target.model.config.embedding_scale
            scale = jnp.sqrt(jnp.mean(embed**2))  # embeddings are small beside a normed state
            params["fc"] = jnp.concatenate([eye / scale, eye], axis=1)
        else:
            layer["qkv"] = jnp.concatenate([last["qkv"], last["qkv"]], axis=1)
            layer["embed_norm"] = layer["hidden_norm"] = last["attention_norm"]
            params["fc"] = jnp.concatenate([jnp.zeros((width, width * (self.config.num_features - 1))), eye], axis=1)
            params["norm"] = target.model.params["final_norm"]
            if "head" in params:
                params["head"] = vocabulary.matrix
        return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), {**params, "layer": layer})

    def warm(self, trained, target, vocabulary, text):
        """Attention's and the feed-forward product by regression (`linear_start`) on the next feature, for EAGLE-3 on
        what its last norm makes that of; the input product before them on the same, for EAGLE-3 on the feature that it
        fuses. Where attention looks: `matching`."""
        if self.start != "linear":
            return trained
        model = target.model
        scale = 1.0 if self.config.version == 1 else 1.0 / model.params["final_norm"].astype(jnp.float32)

        def features(view):
            return view.features if self.feature_layers else view.final[:, :, None]

        def goal(batch, view, ahead):
            return data.shift(batch.at_places(view.final.astype(jnp.float32)), ahead) * scale

        def fused(batch, view):
            inputs = batch.at_places(features(view).reshape(*batch.tokens.shape, -1))
            if self.config.version == 1:
                inputs = jnp.concatenate([transformer.embed(model, batch.next_tokens), inputs], axis=-1)
                return inputs, goal(batch, view, 1), batch.labelled(2)
            # The state that the features belong to: what the first step reads is then like what later ones read.
            return inputs, goal(batch, view, 0), batch.labelled(1)

        trained = {**trained, "fc": jnp.asarray(linear_start.solve(fused(*each) for each in text()))}

        def states(batch, view):
            return heads_lib.fuse(heads_lib.EagleHead(trained, self.config), features(view).astype(jnp.float32))

        @jax.jit
        def neighbours(batch, view):
            head, next_tokens = heads_lib.EagleHead(trained, self.config), data.shift(batch.tokens, 1)
            _, normed = heads_lib.eagle_inputs(head, model, next_tokens, states(batch, view))
            here, there = batch.at_places((normed, data.shift(normed, 1)))
            token = transformer.embed(model, batch.at_places(data.shift(batch.tokens, 2))).astype(jnp.float32)
            # Of one size, so that both are worth the same.
            both = [layers.rms_norm(x, jnp.ones(x.shape[-1]), 1e-6) for x in (goal(batch, view, 1) / scale, token)]
            return matching.Neighbours(here, there, jnp.concatenate(both, axis=-1), batch.labelled(2))

        @functools.partial(jax.jit, static_argnames="steps")
        def readings(layer, batch, view, steps):
            head = heads_lib.EagleHead({**trained, "layer": layer}, self.config)
            return [
                linear_start.Reading(
                    step.residual, step.gathered, goal(batch, view, s + 1), self.decay**s * batch.labelled(s + 2)
                )
                for s, step in enumerate(unroll.chains(head, model, batch, states(batch, view), steps))
            ]

        layer, shape = trained["layer"], self.config.layer
        # EAGLE-1's attention reads token and feature mixed by the input product; there it gains nothing.
        if self.config.version == 3 and matching.possible(shape):
            inputs = layer["qkv"].shape[1]
            of_state = np.arange(inputs - shape.width, inputs)
            found = matching.projections(shape, of_state, lambda: (neighbours(*each) for each in text()))
            layer = {**layer, "qkv": jnp.asarray(found)}
        # The first step alone; then all steps together, in chains of what that found.
        for steps in sorted({1, self.depths}):
            chains = lambda layer: (one for each in text() for one in readings(layer, *each, steps=steps))
            layer = linear_start.fit_layer(layer, shape, chains)
        trained = {**trained, "layer": layer}
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
