"""The cache's only write against plain loops, always jitted: some compilers have moved slices wrongly."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache as kv
from tests import checkpoints

CONFIG = checkpoints.RANDOM
BATCH, CAPACITY, BLOCK = 8, 12, 16


def random_block(seed: int, dtype=jnp.float32) -> kv.BlockKV:
    draw = np.random.default_rng(seed).standard_normal
    shape = (BATCH, CONFIG.num_kv_heads, BLOCK, CONFIG.head_size)
    layers = lambda: tuple(jnp.asarray(draw(shape), dtype) for _ in range(CONFIG.num_layers))
    return kv.BlockKV(layers(), layers(), jnp.zeros((BATCH, BLOCK), jnp.int32))


# Lengths before, nodes kept, and how many. Of the tree's rows 4 and 5 run over the end and row 6 is full; the chunk has
# more places than the cache has slots.
CASES = {
    "paths of a tree": (
        [0, 3, 5, 0, 10, 11, 12, 7],
        [
            [0, 2, 5, 5],
            [0, 1, 2, 3],
            [0, 4, 5, 5],
            [0, 3, 3, 3],
            [0, 1, 3, 4],
            [0, 2, 4, 5],
            [0, 1, 2, 3],
            [0, 5, 5, 5],
        ],
        [3, 4, 0, 1, 4, 3, 2, 2],
    ),
    "a chunk longer than the cache": ([0, 3, 9, 0, 12, 5, 2, 11], [list(range(BLOCK))] * 8, [12, 4, 5, 0, 3, 16, 1, 1]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [BATCH, 1])
def test_commit_appends_the_path_and_drops_what_does_not_fit(case, batch):
    """Twice in a row. A batch of one may take another way than a larger batch."""
    commit = jax.jit(kv.commit, donate_argnums=0)
    for rows in np.arange(BATCH).reshape(-1, batch):
        lengths, paths, counts = (np.array(values)[rows] for values in CASES[case])
        cache = kv.init(CONFIG, batch, CAPACITY).replace(length=jnp.asarray(lengths))
        expected = [np.array(x) for x in (*cache.keys, *cache.values)]
        for seed in (1, 2):
            block = jax.tree.map(lambda x: x[rows], random_block(seed))
            for buffer, part in zip(expected, (*block.keys, *block.values)):
                for row in range(batch):
                    for place, node in enumerate(paths[row, : counts[row]]):
                        if lengths[row] + place < CAPACITY:
                            buffer[row, :, lengths[row] + place] = part[row, :, node]
            lengths = lengths + counts
            cache = commit(cache, block, jnp.asarray(paths), jnp.asarray(counts))
            assert cache.length.tolist() == lengths.tolist()
            assert all(np.array_equal(a, b) for a, b in zip((*cache.keys, *cache.values), expected))


def test_commit_keeps_the_caches_dtype():
    cache = kv.init(CONFIG, BATCH, CAPACITY, jnp.bfloat16)
    block = random_block(1)
    after = jax.jit(kv.commit)(cache, block, jnp.zeros((BATCH, 1), jnp.int32), jnp.ones(BATCH, jnp.int32))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)
    assert np.array_equal(after.keys[1][:, :, 0], block.keys[1][:, :, 0].astype(jnp.bfloat16))


@pytest.mark.parametrize("start", [0, 2, 4])
def test_a_scratch_block_takes_tokens_at_one_place(start):
    scratch = kv.init_block(CONFIG, BATCH, BLOCK)
    new = jax.tree.map(lambda x: x[:, :2] if x.ndim == 2 else x[:, :, :2], random_block(3))
    new = new.replace(positions=jnp.full((BATCH, 2), 9))
    written = jax.jit(functools.partial(kv.write_block, start=start))(scratch, new)
    inside = slice(start, start + 2)
    for after, part in zip((*written.keys, *written.values), (*new.keys, *new.values)):
        assert np.array_equal(after[:, :, inside], part)
        assert not np.delete(np.asarray(after), inside, axis=2).any()
    assert np.array_equal(written.positions[:, inside], new.positions)


def test_an_empty_cache():
    cache = kv.init(CONFIG, 3, 7)
    assert cache.capacity == 7 and cache.length.tolist() == [0, 0, 0]
    assert {x.shape for x in (*cache.keys, *cache.values)} == {(3, CONFIG.num_kv_heads, 7, CONFIG.head_size)}
    assert len(cache.keys) == len(cache.values) == CONFIG.num_layers
