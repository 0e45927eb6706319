"""Exact laws by enumeration, and the test that a sample follows one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import scipy.stats

# Probability that a sample from the right law is refused. Seeds are fixed, so a test that passes once keeps passing;
# the number says how unlikely it was that a right program failed when the seed was chosen.
FALSE_ALARM = 1e-6


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Pearson's chi-square test of counts against a law; cells that expect fewer than 5 are taken together.

    A count where the law is zero gives 0.
    """
    counts, law = np.ravel(counts).astype(float), np.ravel(law).astype(float)
    assert abs(law.sum() - 1) < 1e-9, law.sum()
    if counts[law == 0].any():
        return 0.0
    expected = law * counts.sum()
    rare = expected < 5
    fold = lambda x: np.append(x[~rare], x[rare].sum())
    counts, expected = fold(counts), fold(expected)
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(counts) == 1:
        return 1.0
    return float(scipy.stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1))


def follows(counts: np.ndarray, law: np.ndarray) -> bool:
    """Whether the counts may come from the law."""
    return p_value(counts, law) > FALSE_ALARM


def joint(transitions: np.ndarray, start: int, length: int) -> np.ndarray:
    """`[V] * length` law of the next tokens of a Markov chain after token `start`."""
    size = len(transitions)
    law = np.zeros((size,) * length)
    for path in itertools.product(range(size), repeat=length):
        law[path] = np.prod([transitions[a, b] for a, b in zip((start, *path), path)])
    return law


def count(texts: Sequence[Sequence[int]], size: int) -> np.ndarray:
    """`[V] * length` occurrences of each text."""
    texts = np.asarray(texts)
    length = texts.shape[1]
    flat = np.ravel_multi_index(tuple(texts.T), (size,) * length)
    return np.bincount(flat, minlength=size**length).reshape((size,) * length)


def accepted_law(target: np.ndarray, draft: np.ndarray, start: int, gamma: int) -> np.ndarray:
    """`[gamma + 1]` law of the accepted drafts of a chain that starts behind `start`.

    A draft is proposed and accepted with probability q min(1, p / q) = min(p, q), so the overlaps multiply along a
    path.
    """
    overlap = np.minimum(target, draft)
    at_least = [(np.linalg.matrix_power(overlap, a)[start]).sum() for a in range(gamma + 1)] + [0.0]
    return -np.diff(at_least)


def filtered(
    law: Sequence[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Temperature, then top-k, then top-p on what is left, then min-p; equal probabilities rank by index."""
    law = np.asarray(law, float)
    order = sorted(range(len(law)), key=lambda i: (-law[i], i))
    if temperature == 0:
        return np.eye(len(law))[order[0]]
    law = law ** (1 / temperature)
    keep = order[:top_k] if top_k else order
    total = law[keep].sum()
    kept, before = [], 0.0
    for i in keep:
        if (top_p == 1 or before < top_p) and law[i] >= min_p * law[order[0]]:
            kept.append(i)
        before += law[i] / total
    result = np.zeros(len(law))
    result[kept] = law[kept]
    return result / result.sum()
