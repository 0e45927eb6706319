"""Attention heads in closed form: they look for the earlier place where the text was as it will be next.

A draft guesses the state behind the next token. Where the text has been in much the same state before, what followed
there is a good guess of what follows now: what prompt lookup does with equal tokens, attention can do with similar
states. Random or borrowed heads do not, and gradient descent takes long to find it.

In each group of query heads that share keys and values:

    matching  the query is what can be known of the next place's input, the key what that input would be: the directions
              that both have in common are those of a canonical correlation analysis (Hotelling 1936) between the inputs
              of neighbouring places. With correlation rho, rho / (1 - rho^2) times the product of the two variates is
              the log-odds that they belong together, if they are Gaussian: so the heads' sharpness follows too. Further
              matching heads are half as sharp as the one before
    own       the last head of the group looks at its own place: what the token says reaches the guess

Rotary positions turn the pairs of a head at different speeds. The matching takes those which hardly turn within a text,
the own place those which turn fastest. The groups look at the same places, and each brings a part of what is there:
the directions of the input that tell most of the state and the token there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models import config as model_config
from jspec.models import layers

# Pairs that turn less than this, in radians a token, match: half a radian within 500 tokens.
SLOW = 1e-3
# Fastest pairs of a head, which know their own place, and the score that they give to it.
_FAST_PAIRS = 6
_OWN_SCORE = 48.0
# Of the variance of each input.
_RIDGE = 1e-2


def possible(shape: model_config.TransformerConfig) -> bool:
    """Whether a layer has the heads for it: two or more to each group, and pairs of both kinds."""
    return shape.num_heads > shape.num_kv_heads and len(_slow_pairs(shape)) > 0


def _slow_pairs(shape: model_config.TransformerConfig) -> list[int]:
    speeds, _ = layers.rope_frequencies(shape)
    return [i for i in range(_FAST_PAIRS, shape.head_size // 2) if speeds[i] < SLOW]


class Neighbours(NamedTuple):
    """What attention reads at a place and at the next one.

    here:   `[B, N, in]`.
    there:  `[B, N, in]`.
    wanted: `[B, N, O]` what should be known of the next place.
    counts: `[B, N]` which of them count.
    """

    here: jax.Array
    there: jax.Array
    wanted: jax.Array
    counts: jax.Array


def projections(
    shape: model_config.TransformerConfig, of_state: np.ndarray, text: Callable[[], Iterable[Neighbours]]
) -> np.ndarray:
    """Queries, keys and values of such heads.

    Args:
      shape: of the layer.
      of_state: indices of the inputs that a match may look at in an earlier place: not those of the token behind it,
        which would find the places that say what is guessed already.
      text: goes through the training text.

    Returns:
      `[(H + 2 K) D, in]` float32, in the order of `qkv`.
    """
    heads, groups, size = shape.num_heads, shape.num_kv_heads, shape.head_size
    half, shared = size // 2, heads // groups
    m = _moments(text())
    found = np.zeros((heads + 2 * groups, size, m.here_mean.shape[0]))

    # Where a constant would be read: inputs have no bias.
    constant_here = np.linalg.solve(_ridged(m.here), m.here_mean)
    constant_there = np.linalg.solve(_ridged(m.there), m.there_mean)
    centre = lambda second, mean, other: second - np.outer(mean, other)
    white_here = _inverse_root(centre(m.here, m.here_mean, m.here_mean))
    seen = m.there_mean[of_state]
    white_there = _inverse_root(centre(m.there[np.ix_(of_state, of_state)], seen, seen))
    cross = centre(m.cross[:, of_state], m.here_mean, seen)
    left, rho, right = np.linalg.svd(white_here @ cross @ white_there)
    rho = np.clip(rho, 0.0, 0.99)

    slow = _slow_pairs(shape)
    for j, place in enumerate([*slow, *(i + half for i in slow)][: len(rho)]):
        weight = math.sqrt(rho[j] / (1 - rho[j] ** 2))
        query = white_here @ left[:, j] * weight
        query = query - constant_here * (query @ m.here_mean)
        key = np.zeros_like(query)
        key[of_state] = white_there @ right[j] * weight
        key = key - constant_there * (key @ m.there_mean)
        for group in range(groups):
            found[heads + group, place] = key
            for index in range(shared - 1):
                found[group * shared + index, place] = query * math.sqrt(size) * 0.5**index
    for place in range(_FAST_PAIRS):
        each = math.sqrt(_OWN_SCORE / _FAST_PAIRS)
        for group in range(groups):
            found[heads + group, place] = each * constant_there
            found[group * shared + shared - 1, place] = each * math.sqrt(size) * constant_here

    told_by = np.linalg.solve(_ridged(m.there), m.wanted.T).T
    told = told_by @ m.there @ told_by.T
    _, directions = np.linalg.eigh(told)
    best = directions[:, ::-1][:, : groups * size].T @ told_by
    spread = np.sqrt(np.maximum(np.einsum("ij,jk,ik->i", best, m.there, best), 1e-12))
    found[heads + groups :].reshape(groups * size, -1)[: len(best)] = best / spread[:, None]
    return found.reshape(-1, found.shape[-1]).astype(np.float32)


class _Moments(NamedTuple):
    here: np.ndarray
    there: np.ndarray
    cross: np.ndarray
    wanted: np.ndarray
    here_mean: np.ndarray
    there_mean: np.ndarray


def _moments(text: Iterable[Neighbours]) -> _Moments:
    """Second moments and means over all places that count."""
    total, count = None, 0.0
    for each in text:
        sums = [np.asarray(leaf, np.float64) for leaf in jax.device_get(_sums(each))]
        total = sums if total is None else [a + b for a, b in zip(total, sums)]
        count += float(jnp.sum(each.counts))
    if not count:
        raise ValueError("the training text has no pair of neighbouring answer tokens to start from")
    return _Moments(*(leaf / count for leaf in total))


@jax.jit
def _sums(each: Neighbours):
    keep = each.counts[..., None]
    flat = lambda x: jnp.where(keep, x.astype(jnp.float32), 0.0).reshape(-1, x.shape[-1])
    here, there, wanted = flat(each.here), flat(each.there), flat(each.wanted)
    return here.T @ here, there.T @ there, here.T @ there, wanted.T @ there, here.sum(0), there.sum(0)


def _ridged(second: np.ndarray) -> np.ndarray:
    """A matrix of second moments with each variance a little larger; inputs that are always zero get one."""
    spread = np.diag(second)
    return second + np.diag(np.where(spread > 0, _RIDGE * spread, 1.0))


def _inverse_root(second: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(_ridged(second))
    return (vectors / np.sqrt(np.maximum(values, 1e-12))) @ vectors.T
