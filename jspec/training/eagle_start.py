"""Where an EAGLE head starts: what can be taken from the target, and then what can be found in closed form.

Taken are the target's last layer and final norm. Found on the training text are the input product, EAGLE-3's
projections (`matching`), and attention's and the feed-forward unit's last products (`linear_start`), in this order.

Differs from the papers, whose heads start at random.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import types
from jspec.models import heads as heads_lib
from jspec.models import layers, transformer
from jspec.training import data, linear_start, matching, objectives, unroll, views

# Goes through the training text anew each time it is called.
Text = Callable[[], Iterable[tuple[data.Batch, views.View]]]


def from_target(
    params: Mapping[str, Any],
    config: heads_lib.EagleConfig,
    target: types.Target,
    vocabulary: objectives.Vocabulary,
) -> dict[str, Any]:
    """A random head with the target's last layer for its own; its input product hands the last feature on.

    Args:
      params: of the random head, float32.
      config: its shape.
      target: the model it drafts for.
      vocabulary: whose rows an own output matrix starts as.
    """
    params, last = dict(params), target.model.params["layers"][-1]
    layer, width = dict(params["layer"]), config.layer.width
    for name in set(layer) & set(last) - {"qkv", "attention_norm"}:
        layer[name] = last[name]
    eye = jnp.eye(width)
    if config.version == 1:
        layer["qkv"] = last["qkv"]
        if "attention_norm" in layer:
            layer["attention_norm"] = last["attention_norm"]
        embed = target.model.params["embed"].astype(jnp.float32) * target.model.config.embedding_scale
        scale = jnp.sqrt(jnp.mean(embed**2))  # embeddings are small beside a normed state
        params["fc"] = jnp.concatenate([eye / scale, eye], axis=1)
    else:
        layer["qkv"] = jnp.concatenate([last["qkv"], last["qkv"]], axis=1)
        layer["embed_norm"] = layer["hidden_norm"] = last["attention_norm"]
        params["fc"] = jnp.concatenate([jnp.zeros((width, width * (config.num_features - 1))), eye], axis=1)
        params["norm"] = target.model.params["final_norm"]
        if "head" in params:
            params["head"] = vocabulary.matrix
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), {**params, "layer": layer})


@dataclasses.dataclass(frozen=True, eq=False)
class ClosedForm:
    """Finds each product of a head as the one that comes nearest to the target's next feature.

    What should come out is that feature, for EAGLE-3 what its last norm makes the feature from.

    model:  the target's.
    config: the head's shape.
    steps:  of the chains that the layer is fitted on.
    decay:  step s counts decay^s.
    """

    model: transformer.Model
    config: heads_lib.EagleConfig
    steps: int
    decay: float

    def fit(self, trained: Mapping[str, Any], text: Text) -> dict[str, Any]:
        """The head's parameters with all of it found."""
        trained = {**trained, "fc": jnp.asarray(linear_start.solve(self._fused(*each) for each in text()))}
        # EAGLE-1's attention reads token and feature mixed by the input product; there `matching` gains nothing.
        if self.config.version == 3 and matching.possible(self.config.layer):
            trained["layer"] = {**trained["layer"], "qkv": self._projections(trained, text)}

        readings = jax.jit(self._readings, static_argnames="steps")
        # The first step alone; then all steps together, in chains of what that found.
        for steps in sorted({1, self.steps}):
            chains = lambda layer: (
                reading
                for each in text()
                for reading in readings({**trained, "layer": layer}, *each, steps=steps)
            )  # fmt: skip
            trained["layer"] = linear_start.fit_layer(trained["layer"], self.config.layer, chains)
        return trained

    def _features(self, view: views.View) -> jax.Array:
        return view.features if self.config.version == 3 else view.final[:, :, None]

    def _goal(self, batch: data.Batch, view: views.View, ahead: int) -> jax.Array:
        """What a state should be whose place lies so many tokens behind, `[B, N, E]`."""
        goal = data.shift(batch.at_places(view.final.astype(jnp.float32)), ahead)
        return goal if self.config.version == 1 else goal / self.model.params["final_norm"].astype(jnp.float32)

    def _fused(self, batch: data.Batch, view: views.View) -> tuple[jax.Array, jax.Array, jax.Array]:
        """For the input product: what it reads, what that should become, and which places count."""
        inputs = batch.at_places(self._features(view).reshape(*batch.tokens.shape, -1))
        if self.config.version == 1:
            inputs = jnp.concatenate([transformer.embed(self.model, batch.next_tokens), inputs], axis=-1)
            return inputs, self._goal(batch, view, 1), batch.labelled(2)
        # The state that the features belong to: what the first step reads is then like what later ones read.
        return inputs, self._goal(batch, view, 0), batch.labelled(1)

    def _states(self, trained: Mapping[str, Any], view: views.View) -> jax.Array:
        return heads_lib.fuse(heads_lib.EagleHead(trained, self.config), self._features(view).astype(jnp.float32))

    def _projections(self, trained: Mapping[str, Any], text: Text) -> jax.Array:
        """EAGLE-3's query, key and value: its heads look for the place that is most like the next one."""
        width, inputs = self.config.layer.width, trained["layer"]["qkv"].shape[1]
        neighbours = jax.jit(self._neighbours)
        pairs = lambda: (neighbours(trained, *each) for each in text())
        return jnp.asarray(matching.projections(self.config.layer, np.arange(inputs - width, inputs), pairs))

    def _neighbours(self, trained: Mapping[str, Any], batch: data.Batch, view: views.View) -> matching.Neighbours:
        head, next_tokens = heads_lib.EagleHead(trained, self.config), data.shift(batch.tokens, 1)
        _, normed = heads_lib.eagle_inputs(head, self.model, next_tokens, self._states(trained, view))
        here, there = batch.at_places((normed, data.shift(normed, 1)))
        token = transformer.embed(self.model, batch.at_places(data.shift(batch.tokens, 2))).astype(jnp.float32)
        # Of one size, so that both are worth the same.
        state = data.shift(batch.at_places(view.final.astype(jnp.float32)), 1)
        both = [layers.rms_norm(x, jnp.ones(x.shape[-1]), 1e-6) for x in (state, token)]
        return matching.Neighbours(here, there, jnp.concatenate(both, axis=-1), batch.labelled(2))

    def _readings(
        self, trained: Mapping[str, Any], batch: data.Batch, view: views.View, steps: int
    ) -> list[linear_start.Reading]:
        """What the layer reads at each step of the chains that start at the places of a batch."""
        head = heads_lib.EagleHead(trained, self.config)
        chains = unroll.chains(head, self.model, batch, self._states(trained, view), steps)
        return [
            linear_start.Reading(
                step.residual, step.gathered, self._goal(batch, view, s + 1), self.decay**s * batch.labelled(s + 2)
            )
            for s, step in enumerate(chains)
        ]
