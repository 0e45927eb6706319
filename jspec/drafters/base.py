"""What every drafter shares: the registry, and the defaults of a bound drafter."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jspec import registry, types
from jspec import tree as tree_lib

REGISTRY: dict[str, type] = {}
register = registry.registering(REGISTRY)


class Bound:
    """Defaults of a bound drafter (`types.BoundDrafter`): no state, no features, extend by the accepted path.

    max_positions: longest sequence the draft can follow, in tokens, or None.
    """

    feature_layers: ClassVar[types.FeatureLayers] = ()
    max_positions: int | None = None

    @property
    def proposes_chains(self) -> bool:
        """Whether every tree is a chain. True by default where depth takes all the nodes; a drafter whose tree changes
        shape from round to round says otherwise."""
        return self.num_nodes == self.max_depth + 1

    def init(self, params: types.Params, batch: int, capacity: int) -> Any:
        """No state."""
        return ()

    def extend(self, params, state, tokens, outputs, valid):
        """Nothing to learn."""
        return state

    def update(
        self,
        params: types.Params,
        state: Any,
        context: types.Context,
        tree: types.TokenTree,
        outputs: types.Outputs,
        verdict: types.Verdict,
    ) -> Any:
        """Gather the accepted path, the root included, and extend by it."""
        path_outputs = types.Outputs(
            logits=tree_lib.along_path(outputs.logits, verdict.path),
            features=tree_lib.along_path(outputs.features, verdict.path),
        )
        valid = jnp.arange(verdict.path.shape[1]) <= verdict.num_accepted[:, None]
        return self.extend(params, state, tree_lib.along_path(tree.tokens, verdict.path), path_outputs, valid)


class StaticTree(Bound):
    """A bound drafter whose trees all have the shape of its field `topology`."""

    @property
    def num_nodes(self) -> int:
        return self.topology.num_nodes

    @property
    def max_depth(self) -> int:
        return self.topology.max_depth


@dataclasses.dataclass(frozen=True)
class HeadSource:
    """Where a draft head comes from: exactly one of `reference` and `random`.

    reference: load it (see `weights.references`).
    sha256:    expected of the referenced file.
    random:    random weights: settings of the head's own kind.
    force:     load it though it was trained for another target.
    """

    reference: str | None = None
    sha256: str | None = None
    random: Any = None
    force: bool = False

    def __post_init__(self):
        check_one_source(reference=self.reference, random=self.random)


def check_one_source(**sources: Any) -> None:
    """Refuse a draft that comes from nowhere, or from several places.

    Raises:
      ValueError: not exactly one is given.
    """
    if sum(source is not None for source in sources.values()) != 1:
        given = ", ".join(f"{name} {source!r}" for name, source in sources.items())
        *names, last = sources
        raise ValueError(f"draft needs exactly one of {', '.join(names)} and {last}; got {given}")


def pending(context: types.Context) -> jax.Array:
    """The last committed token of each row, `[B]`."""
    return jnp.take_along_axis(context.tokens, context.length[:, None] - 1, axis=1)[:, 0]


def check_count(name: str, value: int, smallest: int) -> None:
    """Refuse a setting that is no whole number, or below the smallest that makes sense.

    Raises:
      ValueError: naming the setting, the value and the limit.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} {value!r} is not a whole number")
    if value < smallest:
        raise ValueError(f"{name} {value} is below {smallest}")
