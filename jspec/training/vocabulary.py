"""Reduced draft vocabularies from data: the most frequent tokens of the target's answers (FR-Spec, EAGLE-3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jspec import types
from jspec.training import data


def frequent(samples: Sequence[data.Sample], size: int, target: types.Target) -> np.ndarray:
    """The ids that stand most often in answers, the most frequent first; ties go to the smaller id. `[size]`.

    The target's stop ids come first whatever their count: without them no draft could end an answer.

    Raises:
      ValueError: `size` is not between the number of stop ids and the target's vocabulary.
    """
    vocab_size, stops = target.model.config.vocab_size, np.unique(np.array(target.stop_ids, np.int64))
    if not max(1, len(stops)) <= size <= vocab_size:
        raise ValueError(f"vocabulary size {size} is not between {max(1, len(stops))} and {vocab_size}")
    counts = np.bincount(_answers(samples), minlength=vocab_size)
    order = np.argsort(-counts, kind="stable")
    return np.concatenate([stops, order[~np.isin(order, stops)]])[:size].astype(np.int32)


def coverage(ids: np.ndarray, samples: Sequence[data.Sample]) -> float:
    """Share of the answer tokens that a draft of this vocabulary can propose."""
    answers = _answers(samples)
    return float(np.isin(answers, ids).mean()) if len(answers) else float("nan")


def _answers(samples: Sequence[data.Sample]) -> np.ndarray:
    return np.concatenate([sample.tokens[sample.roles == data.ANSWER] for sample in samples]).astype(np.int64)
