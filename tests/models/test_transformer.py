"""The forward pass through the cache against an uncached float64 pass in plain NumPy."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache as kv
from jspec.models import config as model_config
from jspec.models import layers, transformer
from tests import checkpoints, reference

pytestmark = pytest.mark.usefixtures("small_programs")

# Every switch of the config in one of these (DEV-23 and DEV-24, forward side).
CONFIGS = {
    "llama": checkpoints.RANDOM,
    "qwen2": checkpoints.with_options(qkv_bias=True, tied_head=True, windows=(None, 5)),
    "qwen3": checkpoints.with_options(  # 4 heads of 16: twice the width; positions beyond the original length of 64
        qk_norm=True,
        head_size=16,
        activation="gelu_tanh",
        rope_theta=500.0,
        rope_scaling=model_config.RopeScaling("llama3", 8.0, original_max_position=64),
    ),
    "others": checkpoints.with_options(
        output_bias=True,
        ffn_bias=True,
        activation="gelu",
        embedding_scale=math.sqrt(32),
        windows=(3, 20),
        num_kv_heads=4,
        norm_eps=1e-3,
        rope_scaling=model_config.RopeScaling("linear", 4.0),
    ),
}
TOLERANCE = 1e-4  # float32 against float64: about ten times what is seen
LENGTHS = [115, 40, 1, 16]  # of each row; one is a whole number of chunks
CAPACITY = 121  # attention reads 16 slots at a time: the last step over row 0 starts at slot 105, not 112
FEATURES = (0, 1, "final")


@functools.cache
def model_and_params(name: str):
    config = CONFIGS[name]
    params = checkpoints.random_params(config, seed=4)
    return transformer.Model(jax.tree.map(jnp.asarray, params), config), params


def tokens_of(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, length)


@functools.partial(jax.jit, static_argnames="feature_layers")
def step(model, cache, tokens, positions, mask, path, count, feature_layers=FEATURES):
    """One block: its outputs, and the cache with the path committed."""
    outputs, block = transformer.forward(model, tokens, positions, cache, mask, feature_layers=feature_layers)
    return outputs, kv.commit(cache, block, path, count)


def read(model, rows, chunk: int, capacity: int = CAPACITY):
    """Feed ragged rows in chunks. Returns the logits and features of each row, and the cache."""
    batch, longest = len(rows), max(map(len, rows))
    padded = np.zeros((batch, -(-longest // chunk) * chunk), np.int32)
    for row, tokens in enumerate(rows):
        padded[row, : len(tokens)] = tokens
    lengths = np.array(list(map(len, rows)))
    order = np.arange(chunk)
    cache = kv.init(model.config, batch, capacity)
    logits, features = [], []
    for start in range(0, padded.shape[1], chunk):
        positions = jnp.broadcast_to(jnp.asarray(start + order), (batch, chunk))
        mask = jnp.broadcast_to(jnp.asarray(order[:, None] >= order), (batch, chunk, chunk))
        path = jnp.broadcast_to(jnp.asarray(order), (batch, chunk))
        count = jnp.asarray(np.clip(lengths - start, 0, chunk))
        outputs, cache = step(model, cache, jnp.asarray(padded[:, start : start + chunk]), positions, mask, path, count)
        logits.append(outputs.logits)
        features.append(outputs.features)
    logits, features = np.concatenate(logits, axis=1), np.concatenate(features, axis=1)
    return [(logits[i, :n], features[i, :n]) for i, n in enumerate(lengths)], cache


@functools.cache
def read_rows(name: str, chunk: int = 16):
    rows = [tokens_of(length, seed) for seed, length in enumerate(LENGTHS)]
    return rows, *read(model_and_params(name)[0], rows, chunk)


def close(got, expected) -> bool:
    return np.allclose(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_logits_features_and_keys_equal_an_uncached_pass(name):
    model, params = model_and_params(name)
    rows, outputs, cache = read_rows(name)
    assert cache.length.tolist() == LENGTHS
    for row, (tokens, (logits, features)) in enumerate(zip(rows, outputs)):
        expected = reference.forward(model.config, params, tokens)
        assert close(logits, expected.logits)
        assert close(features, np.stack([expected.states[0], expected.states[1], expected.states[-1]], axis=1))
        for buffers, exact in ((cache.keys, expected.keys), (cache.values, expected.values)):
            for buffer, layer in zip(buffers, exact):
                assert close(buffer[row, :, : len(tokens)], layer)
                assert not buffer[row, :, len(tokens) :].any()  # nothing else is ever written


@pytest.mark.parametrize("chunk", [4, 64])
def test_chunks_of_any_size_read_the_same(chunk):
    """Chunks of 4, 16 and 64, prompts shorter and longer than a chunk."""
    _, outputs, cache = read_rows("llama")
    _, others, other_cache = read_rows("llama", chunk)
    assert all(close(a, b) for pair in zip(outputs, others) for a, b in zip(*pair))
    assert all(close(a, b) for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(other_cache)))


@pytest.mark.parametrize("name", CONFIGS)
def test_each_node_of_a_tree_sees_its_own_past(name):
    """A random tree of 16 nodes in every row, at once, equals one uncached pass for each node's path."""
    model, params = model_and_params(name)
    rows, _, cache = read_rows(name)
    rng = np.random.default_rng(7)
    batch, size = len(rows), 16
    parents = np.array([[-1] + [rng.integers(0, i) for i in range(1, size)] for _ in range(batch)])
    parents[3] = np.arange(size) - 1  # one of them a chain
    tokens = rng.integers(0, 64, (batch, size))
    lines = [[[0] for _ in range(size)] for _ in range(batch)]
    mask = np.zeros((batch, size, size), bool)
    for row in range(batch):
        for node in range(1, size):
            lines[row][node] = [*lines[row][parents[row, node]], node]
        for node in range(size):
            mask[row, node, lines[row][node]] = True
    depth = np.array([[len(line) - 1 for line in row] for row in lines])
    positions = jnp.asarray(np.array(LENGTHS)[:, None] + depth)
    deepest = [max(row, key=len) for row in lines]
    path = np.array([line + [line[-1]] * (size - len(line)) for line in deepest])
    count = jnp.asarray(list(map(len, deepest)))
    outputs, after = step(model, cache, jnp.asarray(tokens), positions, jnp.asarray(mask), jnp.asarray(path), count)
    for row in range(batch):
        for node in (*range(0, size, 3), size - 1, deepest[row][-1]):
            text = [*rows[row], *tokens[row, lines[row][node]]]
            assert close(outputs.logits[row, node], reference.forward(model.config, params, text).logits[-1])
        # What the deepest path left in the cache is what reading its text would have left.
        text = [*rows[row], *tokens[row, deepest[row]]]
        expected = reference.forward(model.config, params, text)
        fits = min(len(text), CAPACITY)
        assert all(close(buffer[row, :, :fits], exact[:, :fits]) for buffer, exact in zip(after.keys, expected.keys))


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "others"])
def test_a_scratch_block_reads_as_if_it_were_committed(name):
    """Drafts that grow in a scratch block, one of whose places is unused, see the same past."""
    model, _ = model_and_params(name)
    rows, _, cache = read_rows(name)
    batch = len(rows)
    tokens = jnp.asarray(np.random.default_rng(8).integers(0, 64, (batch, 5)), jnp.int32)
    positions = jnp.asarray(LENGTHS)[:, None] + jnp.arange(5)
    lower = jnp.broadcast_to(jnp.tril(jnp.ones((5, 5), bool)), (batch, 5, 5))

    @jax.jit
    def both(model, cache):
        whole, _ = transformer.forward(model, tokens, positions, cache, lower)
        scratch = kv.init_block(model.config, batch, 4)
        # Tokens 0, 1 and 2 go to places 0, 1 and 3; place 2 holds token 1 again and is seen by nobody.
        for place, token in ((0, 0), (1, 1), (2, 1), (3, 2)):
            here = slice(token, token + 1)
            seen = jnp.asarray([[place > 0, place > 1, False, False, True]])
            seen = jnp.broadcast_to(seen, (batch, 1, 5))
            _, block = transformer.forward(
                model, tokens[:, here], positions[:, here], cache, seen, scratch=scratch,
                logits_at=jnp.zeros((batch, 0), jnp.int32),
            )  # fmt: skip
            scratch = kv.write_block(scratch, block, place)
        seen = jnp.asarray([[True, True, False, True, True, False], [True, True, False, True, True, True]])
        last, _ = transformer.forward(
            model, tokens[:, 3:], positions[:, 3:], cache, jnp.broadcast_to(seen, (batch, 2, 6)), scratch=scratch,
            logits_at=jnp.asarray([[1], [0], [1], [0]]),
        )  # fmt: skip
        return whole.logits, last.logits

    whole, last = both(model, cache)
    assert last.shape == (batch, 1, 64)
    assert close(last[:, 0], np.stack([whole[row, 3 + place] for row, place in enumerate([1, 0, 1, 0])]))


def test_no_features_and_no_logits_when_none_are_asked_for():
    model, _ = model_and_params("llama")
    cache = kv.init(model.config, 2, 8)
    tokens = jnp.zeros((2, 3), jnp.int32)
    mask = jnp.ones((2, 3, 3), bool)
    outputs, block = jax.eval_shape(
        lambda: transformer.forward(model, tokens, tokens, cache, mask, logits_at=jnp.zeros((2, 0), jnp.int32))
    )
    assert outputs.logits.shape == (2, 0, 64) and outputs.features.shape == (2, 3, 0, 32)
    assert {x.shape for x in (*block.keys, *block.values)} == {(2, 2, 3, 8)}


def test_the_first_layers_of_a_model():
    model, params = model_and_params("others")
    first = transformer.first_layers(model, 1)
    assert first.config.num_layers == 1 and first.config.windows == (3,)
    rows = [tokens_of(9, 1), tokens_of(4, 2), tokens_of(1, 3), tokens_of(16, 4)]
    positions = jnp.broadcast_to(jnp.arange(16), (4, 16))
    mask = jnp.tril(jnp.ones((4, 16, 16), bool))
    padded = jnp.asarray([np.pad(row, (0, 16 - len(row))) for row in rows])
    cache = kv.init(first.config, 4, 16)
    outputs, _ = step(first, cache, padded, positions, mask, positions, jnp.zeros(4, jnp.int32), feature_layers=(0,))
    for row, tokens in enumerate(rows):
        expected = reference.forward(first.config, params | {"layers": params["layers"][:1]}, tokens)
        assert close(outputs.logits[row, : len(tokens)], expected.logits)
    for wrong in (0, -1, 3):
        with pytest.raises(ValueError, match=f"{wrong}.* 2"):
            transformer.first_layers(model, wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "others"])
def test_the_shipped_chunk_over_a_long_prefix(monkeypatch, name):
    """More than two steps of the real loop over the prefix, fully optimised; the capacity is no multiple of a step."""
    monkeypatch.setattr(layers, "PREFIX_CHUNK", SHIPPED_CHUNK)
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        model, params = model_and_params(name)
        model = transformer.Model(model.params, dataclasses.replace(model.config, max_positions=400))
        rows = [tokens_of(length, seed) for seed, length in enumerate((300, 129, 128, 7))]
        outputs, _ = read(model, rows, 32, capacity=333)
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    for tokens, (logits, _) in zip(rows, outputs):
        assert close(logits, reference.forward(model.config, params, tokens).logits)


SHIPPED_CHUNK = layers.PREFIX_CHUNK  # at import, before the fixture changes it
