"""Heads in closed form look where the text was as it will be next, and at their own place."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models import layers, transformer
from jspec.training import matching
from tests import checkpoints

pytestmark = pytest.mark.usefixtures("small_programs", "few_programs")

TOKENS, WIDTH = 12, 24
SHAPE = dataclasses.replace(
    checkpoints.with_options(num_layers=1, num_heads=6, num_kv_heads=3, head_size=64, rope_theta=1e5), windows=()
)
RNG = np.random.default_rng(0)
EMBEDDING, STATE = RNG.normal(size=(2, TOKENS, WIDTH))


def read(tokens: np.ndarray, noise: float = 0.1) -> np.ndarray:
    """What an EAGLE-3 head's attention reads: [embedding of the next token; state, which knows its own token]."""
    inputs = np.concatenate([EMBEDDING[tokens[..., 1:]], STATE[tokens[..., :-1]]], axis=-1)
    return inputs + 0.7 + noise * np.random.default_rng(1).normal(size=inputs.shape)


def neighbours(shuffle: bool = False):
    for seed in range(4):
        tokens = np.random.default_rng(seed).integers(TOKENS, size=(8, 130))
        inputs = read(tokens)
        there = inputs[:, 1:]
        if shuffle:
            there = np.random.default_rng(7).permutation(there.reshape(-1, 2 * WIDTH)).reshape(there.shape)
        wanted = EMBEDDING[tokens[:, 2:]]
        arrays = (jnp.asarray(x, jnp.float32) for x in (inputs[:, :-1], there, wanted))
        yield matching.Neighbours(*arrays, jnp.ones((8, 128), bool))


def weights(qkv: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the last place gives to each place, `[H, T]`, and the values there, `[K, T, D]`."""
    inputs = jnp.asarray(read(tokens)[None], jnp.float32)
    tables = layers.rope_tables(SHAPE, jnp.arange(inputs.shape[1])[None])
    query, key, value = transformer.project({"qkv": jnp.asarray(qkv)}, inputs, SHAPE, tables)
    scores = jnp.einsum("hd,hsd->hs", query[0, -1], jnp.repeat(key[0], 2, axis=0)) / 8.0
    return np.asarray(jax.nn.softmax(scores)), np.asarray(value[0])


OF_STATE = np.arange(WIDTH, 2 * WIDTH)
TEXT = np.array([3, 5, 1, 8, 9, 2, 7, 0, 6, 4, 8])  # the last place reads token 4 and has 8 next: 8 was at place 3


def test_they_find_the_place_that_had_the_token_which_comes_next():
    qkv = matching.projections(SHAPE, OF_STATE, neighbours)
    assert qkv.shape == ((6 + 2 * 3) * 64, 2 * WIDTH) and qkv.dtype == np.float32
    found, values = weights(qkv, TEXT)
    for group in range(3):
        match, own = found[2 * group : 2 * group + 2]
        assert match.argmax() == 3 and match[3] > 0.9
        assert own.argmax() == 9 and own[9] > 0.9
    # The three groups' values tell what came behind it, token 9.
    told = np.array([weights(qkv, np.array([8, token, 0]))[1][:, 0].ravel() for token in range(TOKENS)])
    assert np.argmin(((told - values[:, 3].ravel()) ** 2).sum(-1)) == 9


def test_without_neighbours_in_common_they_find_nothing():
    """The mutant: pairs of places that do not belong together."""
    found, _ = weights(matching.projections(SHAPE, OF_STATE, lambda: neighbours(shuffle=True)), TEXT)
    assert found[0, 3] < 0.5


def test_which_layers_have_the_heads_for_it():
    assert matching.possible(SHAPE)
    assert not matching.possible(dataclasses.replace(SHAPE, num_kv_heads=6))  # none to spare for the own place
    assert not matching.possible(dataclasses.replace(SHAPE, rope_theta=100.0))  # every pair turns


def test_without_a_place_there_is_nothing_to_find():
    with pytest.raises(ValueError, match="no pair of neighbouring answer tokens"):
        blank = next(neighbours())
        matching.projections(SHAPE, OF_STATE, lambda: [blank._replace(counts=blank.counts & False)])
