"""What the target says about training text: computed by one forward pass, or read back from disk.

The target never learns, so its features are the same in every epoch. A pass over given text costs as much as decoding
it; where the text is used more than once, `Cache` keeps what it said.
"""

from __future__ import annotations

import hashlib
import pathlib

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jspec import files, types
from jspec.models import transformer
from jspec.training import data


@flax.struct.dataclass
class View:
    """The target's view of a batch.

    features:       of the layers asked for.
    final:          states after the last norm, what the output head reads.
    top:            id of the most likely next token.
    log_normalizer: logsumexp of the logits of all tokens: with it any part of the law can be had from `final` exactly.
    """

    features: jax.Array  # [B, T, F, E]
    final: jax.Array  # [B, T, E]
    top: jax.Array  # [B, T] int32
    log_normalizer: jax.Array  # [B, T] float32

    def log_probs(self, matrix: jax.Array) -> jax.Array:
        """Log-probabilities of the next token at temperature 1, for the tokens behind these rows of the output matrix.

        Args:
          matrix: `[Vd, E]`.

        Returns:
          `[B, T, Vd]` float32. They sum to one over the whole vocabulary, to less over a reduced one.
        """
        logits = jnp.einsum("bte,ve->btv", self.final, matrix.astype(self.final.dtype))
        return logits.astype(jnp.float32) - self.log_normalizer[..., None]


def view(target: transformer.Model, batch: data.Batch, feature_layers: types.FeatureLayers) -> View:
    """One pass over a batch; differentiable with respect to the target."""
    outputs, _ = transformer.forward(
        target, batch.tokens, batch.positions, None, batch.causal, feature_layers=(*feature_layers, "final")
    )
    return View(
        features=outputs.features[:, :, :-1],
        final=outputs.features[:, :, -1],
        top=jnp.argmax(outputs.logits, axis=-1).astype(jnp.int32),
        log_normalizer=jax.nn.logsumexp(outputs.logits, axis=-1),
    )


view_jit = jax.jit(view, static_argnames="feature_layers")


class Cache:
    """Views of packed rows on disk, one file a row, made when first asked for.

    A file is the row's own: named after its tokens, the layers and the target, so that rows packed another way, or
    another target's, are never taken for it.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        target: types.Target,
        feature_layers: types.FeatureLayers,
        dtype: str = "float32",
    ):
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._target, self._layers, self._dtype = target, feature_layers, jnp.dtype(dtype)
        self._identity = f"{data.fingerprint(target)} {feature_layers} {dtype}".encode()

    def view(self, batch: data.Batch) -> View:
        """The view of a batch.

        Raises:
          OSError: the disk does not take it.
        """
        paths = [self._path(batch, row) for row in range(batch.tokens.shape[0])]
        if all(path.exists() for path in paths):
            return jax.tree.map(lambda *rows: jnp.asarray(np.stack(rows)), *map(self._read, paths))
        computed = view_jit(self._target.model, batch, self._layers)
        computed = computed.replace(
            features=computed.features.astype(self._dtype), final=computed.final.astype(self._dtype)
        )
        for row, path in enumerate(paths):
            if not path.exists():
                self._write(path, jax.tree.map(lambda leaf: np.asarray(leaf[row]), computed))
        return computed

    def _path(self, batch: data.Batch, row: int) -> pathlib.Path:
        digest = hashlib.sha256(self._identity)
        for array in (batch.tokens, batch.segments):
            digest.update(np.asarray(array[row], np.int32).tobytes())
        return self._folder / f"{digest.hexdigest()[:32]}.npz"

    def _write(self, path: pathlib.Path, row: View) -> None:
        files.replace(path, lambda file: np.savez(file, **vars(row)))

    def _read(self, path: pathlib.Path) -> View:
        with np.load(path, allow_pickle=False) as stored:
            row = View(**{name: stored[name] for name in stored})
        # NumPy stores a bfloat16 as two bytes without a name.
        return row.replace(features=row.features.view(self._dtype), final=row.final.view(self._dtype))
