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
BATCH, CAPACITY, BLOCK = 8, 12, 6


def random_block(seed: int, dtype=jnp.float32) -> kv.BlockKV:
    draw = np.random.default_rng(seed).standard_normal
    shape = (BATCH, CONFIG.num_kv_heads, BLOCK, CONFIG.head_size)
    layers = lambda: tuple(jnp.asarray(draw(shape), dtype) for _ in range(CONFIG.num_layers))
    return kv.BlockKV(layers(), layers(), jnp.zeros((BATCH, BLOCK), jnp.int32))


# Lengths before, nodes kept (a tree path: not the first ones), and how many. Rows 4 and 5 run over the end, row 6 is
# full.
LENGTHS = [0, 3, 5, 0, 10, 11, 12, 7]
PATHS = [[0, 2, 5, 5], [0, 1, 2, 3], [0, 4, 5, 5], [0, 3, 3, 3], [0, 1, 3, 4], [0, 2, 4, 5], [0, 1, 2, 3], [0, 5, 5, 5]]
COUNTS = [3, 4, 0, 1, 4, 3, 2, 2]


@pytest.mark.parametrize("donate", [False, True])
def test_commit_appends_the_path_and_drops_what_does_not_fit(donate):
    first, second = random_block(1), random_block(2)
    cache = kv.init(CONFIG, BATCH, CAPACITY).replace(length=jnp.asarray(LENGTHS))
    expected = [np.array(x) for x in (*cache.keys, *cache.values)]
    lengths = list(LENGTHS)
    commit = jax.jit(kv.commit, donate_argnums=(0,) if donate else ())
    for block in (first, second):
        for buffer, part in zip(expected, (*block.keys, *block.values)):
            for row, (path, count) in enumerate(zip(PATHS, COUNTS)):
                for place, node in enumerate(path[:count]):
                    if lengths[row] + place < CAPACITY:
                        buffer[row, :, lengths[row] + place] = part[row, :, node]
        lengths = [length + count for length, count in zip(lengths, COUNTS)]
        cache = commit(cache, block, jnp.asarray(PATHS), jnp.asarray(COUNTS))
        assert cache.length.tolist() == lengths
        assert all(np.array_equal(a, b) for a, b in zip((*cache.keys, *cache.values), expected))


def test_a_row_alone_is_written_as_in_the_batch():
    # A single row takes another path: a slice, whose start is clamped at the end, blended with what stood there.
    block, later = random_block(1), random_block(2)
    cache = kv.init(CONFIG, BATCH, CAPACITY).replace(length=jnp.asarray(LENGTHS))
    paths, counts = jnp.asarray(PATHS), jnp.asarray(COUNTS)
    commit = jax.jit(kv.commit)
    together = commit(commit(cache, block, paths, counts), later, paths, counts)
    for row in range(BATCH):
        only = lambda tree, row=row: jax.tree.map(lambda x: x[row : row + 1], tree)
        alone = commit(only(cache), only(block), paths[row][None], counts[row][None])
        alone = commit(alone, only(later), paths[row][None], counts[row][None])
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), alone, only(together))), row
    # A path longer than the cache itself.
    tiny = kv.init(CONFIG, 1, 2)
    alone = commit(tiny, jax.tree.map(lambda x: x[:1], block), jnp.asarray([[0, 1, 2, 3]]), jnp.asarray([4]))
    assert np.array_equal(alone.keys[0][0], block.keys[0][0, :, :2])


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
