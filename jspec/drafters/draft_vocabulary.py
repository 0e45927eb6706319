"""Reduced draft vocabularies: the draft proposes frequent tokens only, and its output head shrinks with them.

FR-Spec (Zhao et al., arXiv:2502.14856). The target's law is untouched: a token outside the draft vocabulary has a draft
probability of zero and comes through corrections, so every verifier stays as lossless as it was.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jspec import types
from jspec.drafters import base
from jspec.models import heads, transformer


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A draft vocabulary as a setting.

    file: token ids, the most frequent first: a JSON list, or a one-dimensional `.npy` array. None means the lowest ids:
          of a byte-pair encoding the bytes and the pairs that were merged first, the most frequent of its corpus.
    size: keep the first so many; None keeps all of the file.
    """

    file: str | None = None
    size: int | None = None

    def __post_init__(self):
        if self.size is not None:
            base.check_count("vocabulary size", self.size, 1)
        elif self.file is None:
            raise ValueError("vocabulary needs a file or a size")

    def load(self, target: types.Target) -> np.ndarray:
        """The ids, checked and in order (see `check`).

        Raises:
          ValueError: the file holds no such list, or ids that are none of the target's.
          OSError: the file cannot be read.
        """
        if self.file is None:
            return check(np.arange(self.size), target, where=f"of the first {self.size} ids")
        path = pathlib.Path(self.file)
        try:
            if path.suffix == ".npy":
                ids = np.load(path, allow_pickle=False)
            else:
                ids = np.asarray(json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(f"draft vocabulary {self.file}: {error}") from None
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"draft vocabulary {self.file}: expected a list of token ids")
        if self.size is not None and self.size > len(ids):
            raise ValueError(f"draft vocabulary {self.file}: size {self.size} is more than its {len(ids)} ids")
        return check(ids[: self.size], target, where=self.file)


def check(ids: Sequence[int] | np.ndarray, target: types.Target, where: str = "draft_ids") -> np.ndarray:
    """Ids of a draft vocabulary in ascending order, the target's stop ids among them: `[Vd]` int32.

    Ascending, so that equal logits are resolved as the target resolves them; the stop ids, or no draft could end one.

    Raises:
      ValueError: an id is outside the target's vocabulary or stands twice, or there is none.
    """
    ids = np.asarray(ids)
    if ids.size == 0:
        raise ValueError(f"draft vocabulary {where} is empty")
    heads.check_draft_ids(ids, target.model.config.vocab_size, f"draft vocabulary {where}")
    return np.union1d(ids, np.array(target.stop_ids, ids.dtype)).astype(np.int32)


def head_rows(model: transformer.Model, ids: np.ndarray) -> jnp.ndarray:
    """The output matrix of a model for these ids, `[Vd, E]`."""
    return transformer.output_matrix(model)[jnp.asarray(ids)]


def restrict(model: transformer.Model, ids: np.ndarray) -> transformer.Model:
    """A model whose head knows these ids only; it still reads every token."""
    config = dataclasses.replace(model.config, tied_head=False)
    return transformer.Model({**model.params, "head": head_rows(model, ids)}, config)
