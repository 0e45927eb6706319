"""What every training recipe shares: the draft as a pytree, the protocol, the registry."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jspec import registry, types
from jspec.drafters import draft_vocabulary
from jspec.models import transformer
from jspec.training import data as data_lib
from jspec.training import losses, views

REGISTRY: dict[str, type] = {}
register = registry.registering(REGISTRY)


@flax.struct.dataclass
class Vocabulary:
    """What the draft may say.

    matrix:   rows of the target's output matrix for these tokens.
    ids:      of the target; None when the draft speaks the target's vocabulary.
    place_of: of each of the target's ids among them, -1 where it is none; None likewise.
    """

    matrix: jax.Array  # [Vd, E]
    ids: jax.Array | None  # [Vd] int32
    place_of: jax.Array | None  # [V] int32

    @classmethod
    def of(cls, target: types.Target, ids: np.ndarray | None) -> Vocabulary:
        """Of some ids of a target, in any order; None means all.

        Raises:
          ValueError: see `draft_vocabulary.check`.
        """
        matrix = transformer.output_matrix(target.model)
        if ids is None:
            return cls(matrix, None, None)
        ids = draft_vocabulary.check(ids, target)
        place_of = np.full(target.model.config.vocab_size, -1, np.int32)
        place_of[ids] = np.arange(len(ids))
        return cls(matrix[jnp.asarray(ids)], jnp.asarray(ids), jnp.asarray(place_of))

    def places(self, tokens: jax.Array) -> jax.Array:
        """Of target ids in the draft vocabulary, -1 where they are not in it."""
        return tokens if self.place_of is None else self.place_of[tokens]

    def law(self, view: views.View) -> jax.Array:
        """The target's log-law of the token behind each place, for these tokens: `[B, T, Vd]`."""
        return view.log_probs(self.matrix)


@flax.struct.dataclass
class Draft:
    """A draft in training. Gradients are taken with respect to `trained` alone.

    trained: parameters.
    vocabulary: what it may say; fixed.
    """

    trained: Any
    vocabulary: Vocabulary


class Bound:
    """Defaults of an objective: no layers beside the last state, the text as it is, one learning rate, a folder."""

    feature_layers: types.FeatureLayers = ()
    reach: int = 2
    file_name: str = "draft"

    def text(self, target, draft, rows, chosen, seed, step):
        """The chosen rows."""
        return rows.take(chosen)

    def warm(self, trained, target, vocabulary, text):
        """As they are."""
        return trained

    def learning_rates(self, trained):
        """One for all."""
        return jax.tree.map(lambda _: "draft", trained)


class Recipe(Protocol):
    """Settings of one kind of training: a frozen dataclass, registered by kind."""

    def build(self, target: types.Target, vocabulary: Vocabulary) -> Objective:
        """Resolve what depends on the target.

        Raises:
          ValueError: the settings, the target and the vocabulary do not fit.
        """
        ...


class Objective(Protocol):
    """A recipe that knows its target: frozen and hashable, a static argument of the training step.

    feature_layers: the target's layers that the loss reads beside `View.final`.
    depths:         S, of the chains it trains.
    reach:          how many tokens ahead the furthest label of the first depth stands.
    file_name:      of the exported draft.
    """

    feature_layers: types.FeatureLayers
    depths: int
    reach: int
    file_name: str

    def init(self, rng_key: jax.Array, target: types.Target, vocabulary: Vocabulary) -> Any:
        """Trained parameters to start from."""
        ...

    def warm(
        self,
        trained: Any,
        target: types.Target,
        vocabulary: Vocabulary,
        text: Callable[[], Iterable[tuple[data_lib.Batch, views.View]]],
    ) -> Any:
        """Trained parameters from those of `init` and a look at the training text, which `text()` goes through."""
        ...

    def loss(
        self,
        params: types.Params,
        batch: data_lib.Batch,
        view: views.View,
        rng_key: jax.Array | None,
    ) -> tuple[jax.Array, losses.Depths]:
        """The loss of a batch.

        Args:
          params: the target's `Model`, and a `Draft`.
          batch: the text.
          view: the target's, of the text.
          rng_key: of noise; None for none, as in evaluation.

        Returns:
          A scalar, 0 where no place has a label, and how good the drafts are.
        """
        ...

    def text(
        self, target: types.Target, draft: Draft, rows: data_lib.Rows, chosen: np.ndarray, seed: int, step: int
    ) -> data_lib.Batch:
        """The batch of a step for which these rows were chosen."""
        ...

    def learning_rates(self, trained: Any) -> Any:
        """`draft` or `target` for each leaf of `trained`, as a prefix tree: whose learning rate it follows."""
        ...

    def bind(self, target: types.Target, draft: Draft, gamma: int) -> tuple[types.Target, types.BoundDrafter, Any]:
        """The draft as a drafter of chains of `gamma`, its parameters, and the target it drafts for."""
        ...

    def save(self, target: types.Target, draft: Draft, path: str | os.PathLike, base_model: str) -> None:
        """Write it in the format of its kind to a new folder or file.

        Raises:
          ValueError, OSError: it cannot be written, or reads back differently.
        """
        ...
