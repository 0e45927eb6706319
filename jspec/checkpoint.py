"""Checkpoints of a run: a pytree and what it belongs to. The only file that imports orbax."""

from __future__ import annotations

import hashlib
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from jspec import files

SCORE = "score"


class Checkpoints:
    """The last and the best checkpoint of a run, saved while the run goes on. A context manager: leaving it waits.

    A checkpoint appears under its step when it is whole; what a kill leaves behind is swept away at the next opening.
    """

    def __init__(self, folder: str | pathlib.Path, about: Mapping[str, Any]):
        """Open or make a folder of checkpoints.

        Args:
          folder: parents are made.
          about: JSON data that tells what the pytree belongs to; stored with every checkpoint.

        Raises:
          ValueError: the folder holds checkpoints of something else; what differs is named.
          OSError: it cannot be used.
        """
        self._folder, self._about = pathlib.Path(folder).absolute(), dict(about)
        logging.getLogger("absl").setLevel(logging.ERROR)  # orbax tells every step of its work
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(
                    [
                        policies.LatestN(n=1),
                        policies.BestN(
                            get_metric_fn=lambda metrics: metrics[SCORE], n=1, keep_checkpoints_without_metrics=False
                        ),
                    ]
                ),
                best_fn=lambda metrics: metrics[SCORE],
                cleanup_tmp_directories=True,
                enable_async_checkpointing=True,
            ),
            item_names=("state", "about"),
        )
        if self.latest is not None:
            stored = self._manager.restore(self.latest, args=ocp.args.Composite(about=ocp.args.JsonRestore()))
            _same(stored["about"], self._about, self._folder)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: Any) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """Step of the last whole checkpoint, or None."""
        return self._manager.latest_step()

    @property
    def best(self) -> int | None:
        """Step of the one with the highest score, or None."""
        return self._manager.best_step()

    def save(self, step: int, state: Any, score: float) -> None:
        """Save in the background.

        Args:
          step: larger than all before.
          state: a pytree of arrays; it may be donated as soon as this returns.
          score: decides which is the best.

        Raises:
          OSError: this or the last save could not be written.
        """
        # On a CPU the copy that orbax takes may be the buffer itself, which the next step overwrites.
        state = jax.block_until_ready(jax.tree.map(jnp.copy, state))
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(self._about))
        with files.naming(self._folder):
            self._manager.save(step, args=arguments, metrics={SCORE: float(score)})

    def restore(self, like: Any, step: int | None = None) -> Any:
        """Read a checkpoint back.

        Args:
          like: a pytree of the same structure, shapes and dtypes.
          step: which; None means the last.

        Raises:
          ValueError: there is none, or it has another structure.
        """
        step = self.latest if step is None else step
        if step is None:
            raise ValueError(f"{self._folder} holds no checkpoint")
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        stored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes)))
        return stored["state"]


def _same(stored: Mapping[str, Any], own: Mapping[str, Any], folder: pathlib.Path) -> None:
    for name in sorted({*stored, *own}):
        if stored.get(name) != own.get(name):
            raise ValueError(
                f"{folder} holds checkpoints of another run: {name} is {stored.get(name)!r} there and "
                f"{own.get(name)!r} here"
            )


def describe(tree: Any) -> str:
    """A digest of a pytree's structure, shapes and dtypes: equal for equal architectures."""
    lines = [
        f"{jax.tree_util.keystr(path)} {np.shape(leaf)} {jnp.result_type(leaf)}"
        for path, leaf in jax.tree.flatten_with_path(tree)[0]
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
