"""What the target says about training text: computed by one forward pass, or read back from disk.

The target never learns, so its features are the same in every epoch. A pass over given text costs as much as decoding
it; where the text is used more than once, `Cache` keeps what it said.
"""

from __future__ import annotations

import hashlib
import itertools
import pathlib
from collections.abc import Iterator, Mapping

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

    The last two are known at the batch's `places` alone, and 0 elsewhere: no loss asks for more, and everywhere they
    would be a third of the work of a small target's pass.
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
    length = batch.tokens.shape[1]
    outputs, _ = transformer.forward(
        target,
        batch.tokens,
        batch.positions,
        None,
        batch.causal,
        feature_layers=(*feature_layers, "final"),
        logits_at=jnp.minimum(batch.places, length - 1),
    )
    # There is no place `length`: what stands for none is dropped.
    spread = jax.vmap(lambda values, places: jnp.zeros(length, values.dtype).at[places].set(values, mode="drop"))
    return View(
        features=outputs.features[:, :, :-1],
        final=outputs.features[:, :, -1],
        top=spread(jnp.argmax(outputs.logits, axis=-1).astype(jnp.int32), batch.places),
        log_normalizer=spread(jax.nn.logsumexp(outputs.logits, axis=-1), batch.places),
    )


view_jit = jax.jit(view, static_argnames="feature_layers")


class Cache:
    """What the target says about samples, on disk, made when first asked for.

    A sample's view is its own, whatever is packed beside it, and each layer has a file: so the recipes share what they
    have in common, however they pack their rows. Files are named after the sample's tokens, the target and the layer.
    `known` says where `top` and `log_normalizer` were computed: not where the next token is no answer's. A file of an
    earlier version does not have it, and was computed everywhere.
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
        self._identity = f"{data.fingerprint(target)} {dtype}".encode()

    def view(self, batch: data.Batch) -> View:
        """The view of a batch; zeros where it has no token.

        Raises:
          OSError: the disk does not take it.
        """
        samples, places = list(self._samples(batch)), np.asarray(batch.places)
        there = np.zeros((batch.tokens.shape[0], batch.tokens.shape[1] + 1), bool)
        np.put_along_axis(there, places, True, axis=1)
        found = self._read(samples, there)
        if found is None:
            computed = jax.device_get(view_jit(self._target.model, batch, self._layers))
            for row, place, name in samples:
                self._write(name, jax.tree.map(lambda leaf: leaf[row, place], computed), there[row, place])
            # Read even what was just computed: what a batch is must not depend on what the disk held.
            found = self._read(samples, there)
        return jax.tree.map(jnp.asarray, found)

    def _read(self, samples: list[tuple[int, slice, str]], there: np.ndarray) -> View | None:
        """What the disk holds of a batch; None if it lacks anything at its places, `there` `[B, T + 1]`."""
        rows, length, width = len(there), there.shape[1] - 1, self._target.model.config.width
        whole = View(
            features=np.zeros((rows, length, len(self._layers), width), self._dtype),
            final=np.zeros((rows, length, width), self._dtype),
            top=np.zeros((rows, length), np.int32),
            log_normalizer=np.zeros((rows, length), np.float32),
        )
        for row, place, name in samples:
            last, *features = self._paths(name)
            if not all(path.exists() for path in (last, *features)):
                return None
            with np.load(last, allow_pickle=False) as stored:
                wanted = there[row, place]
                if (wanted & ~_known(stored)).any():
                    return None  # the same tokens, but fewer of them were an answer then
                # NumPy stores a bfloat16 as two bytes without a name.
                whole.final[row, place] = stored["final"].view(self._dtype)
                whole.top[row, place] = np.where(wanted, stored["top"], 0)
                whole.log_normalizer[row, place] = np.where(wanted, stored["log_normalizer"], 0.0)
            for index, path in enumerate(features):
                whole.features[row, place, index] = np.load(path, allow_pickle=False).view(self._dtype)
        return whole

    def _samples(self, batch: data.Batch) -> Iterator[tuple[int, slice, str]]:
        """Row, place in the row, and name of each sample."""
        for row, (tokens, segments) in enumerate(zip(*jax.device_get((batch.tokens, batch.segments)))):
            ends = [0, *(np.flatnonzero(np.diff(segments)) + 1).tolist(), len(segments)]
            for start, end in itertools.pairwise(ends):
                if segments[start] >= 0:
                    digest = hashlib.sha256(self._identity + np.asarray(tokens[start:end], np.int32).tobytes())
                    yield row, slice(start, end), digest.hexdigest()[:32]

    def _paths(self, name: str) -> list[pathlib.Path]:
        """Of what the head reads, then of each layer."""
        return [self._folder / f"{name}.npz", *(self._folder / f"{name}-{layer}.npy" for layer in self._layers)]

    def _write(self, name: str, sample: View, there: np.ndarray) -> None:
        """Keep a sample's view; `there`, `[n]`: where `top` and `log_normalizer` were computed."""
        last, *features = self._paths(name)
        before, known = {"top": np.int32(0), "log_normalizer": np.float32(0)}, np.zeros_like(there)
        if last.exists():
            with np.load(last, allow_pickle=False) as stored:
                before, known = {key: stored[key] for key in before}, _known(stored)
        if not last.exists() or (there & ~known).any():
            arrays = {key: np.where(there, getattr(sample, key), value) for key, value in before.items()}
            arrays |= {"final": sample.final.astype(self._dtype), "known": there | known}
            files.replace(last, lambda file: np.savez(file, **arrays))
        for index, path in enumerate(features):
            if not path.exists():
                layer = sample.features[:, index].astype(self._dtype)
                files.replace(path, lambda file: np.save(file, layer))


def _known(stored: Mapping[str, np.ndarray]) -> np.ndarray:
    """Where a file's `top` and `log_normalizer` were computed, `[n]`."""
    return stored["known"] if "known" in stored else np.ones(len(stored["top"]), bool)
