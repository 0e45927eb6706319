"""The key/value cache: committed tokens only, one length per row.

A forward pass reads the cache and hands back the block's keys and values; `commit` is the only write, so rejecting a
draft costs nothing, an exactly full cache works and nothing is ever compacted. Nothing else in jspec knows slot
arithmetic.

Slot i of a row holds position i. The arrays are one per layer: stacking them over layers would make the compiler copy
the stack around every update.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jspec.models import config as model_config


@flax.struct.dataclass
class KVCache:
    """Keys and values of committed tokens.

    keys, values: per layer; slots at `length` and beyond hold nothing.
    length:       filled slots of each row.
    """

    keys: tuple[jax.Array, ...]  # L x [B, K, S, D]
    values: tuple[jax.Array, ...]  # L x [B, K, S, D]
    length: jax.Array  # [B] int32

    @property
    def capacity(self) -> int:
        """S, slots per row."""
        return self.keys[0].shape[2]


@flax.struct.dataclass
class BlockKV:
    """Keys and values of one block of tokens that are not committed (yet).

    keys, values: per layer.
    positions:    of the block's tokens.
    """

    keys: tuple[jax.Array, ...]  # L x [B, K, T, D]
    values: tuple[jax.Array, ...]  # L x [B, K, T, D]
    positions: jax.Array  # [B, T] int32


def init(config: model_config.TransformerConfig, batch: int, capacity: int, dtype: Any = jnp.float32) -> KVCache:
    """An empty cache for `batch` rows of at most `capacity` tokens."""
    zeros = lambda: tuple(
        jnp.zeros((batch, config.num_kv_heads, capacity, config.head_size), dtype) for _ in range(config.num_layers)
    )
    return KVCache(keys=zeros(), values=zeros(), length=jnp.zeros(batch, jnp.int32))


def init_block(config: model_config.TransformerConfig, batch: int, size: int, dtype: Any = jnp.float32) -> BlockKV:
    """An empty scratch block of `size` tokens, for drafts that grow level by level."""
    empty = init(config, batch, size, dtype)
    return BlockKV(keys=empty.keys, values=empty.values, positions=jnp.zeros((batch, size), jnp.int32))


def write_block(block: BlockKV, new: BlockKV, start: int | jax.Array) -> BlockKV:
    """Write the tokens of `new` into a scratch block at `start` (the same place in every row)."""
    at = lambda buffer, part: jax.lax.dynamic_update_slice_in_dim(buffer, part, start, axis=2)
    return BlockKV(
        keys=tuple(map(at, block.keys, new.keys)),
        values=tuple(map(at, block.values, new.values)),
        positions=jax.lax.dynamic_update_slice_in_dim(block.positions, new.positions, start, axis=1),
    )


def append_block(block: BlockKV, new: BlockKV) -> BlockKV:
    """The tokens of two blocks, one behind the other."""
    join = lambda one, other: jnp.concatenate([one, other], axis=2)
    return BlockKV(
        keys=tuple(map(join, block.keys, new.keys)),
        values=tuple(map(join, block.values, new.values)),
        positions=jnp.concatenate([block.positions, new.positions], axis=1),
    )


def rewind(cache: KVCache, length: jax.Array) -> KVCache:
    """The cache as it was at an earlier length: what stands behind it is never read."""
    return cache.replace(length=length)


def commit(cache: KVCache, block: BlockKV, path: jax.Array, count: jax.Array) -> KVCache:
    """Append the first `count` tokens of `path` to each row.

    A write beyond the last slot is dropped: `dynamic_update_slice` alone would clamp its start and overwrite history.
    The scatter is vmapped over rows, since one indexed by `arange(B)` gathers a sharded batch on every device. A single
    row is written by a slice, blended with what stood there: a scatter on a CPU costs 60 microseconds, 60 of them more
    than a tenth of a step.

    Args:
      cache: what is committed.
      block: keys and values of T tokens.
      path: `[B, P]` indices into the block.
      count: `[B]` how many of them to keep; 0 leaves a row as it is.
    """
    capacity, batch = cache.capacity, path.shape[0]

    def write_slice(buffer, part):  # [1, K, S, D], [1, K, T, D]
        size = min(path.shape[1], capacity)
        start = jnp.minimum(cache.length[0], capacity - size)
        place = start + jnp.arange(size) - cache.length[0]  # in the path, of each slot of the slice
        old = jax.lax.dynamic_slice_in_dim(buffer, start, size, axis=2)
        new = part[:, :, path[0, jnp.clip(place, 0, path.shape[1] - 1)]].astype(buffer.dtype)
        kept = (place >= 0) & (place < count[0])
        return jax.lax.dynamic_update_slice_in_dim(buffer, jnp.where(kept[:, None], new, old), start, axis=2)

    def write(buffer, part, path, length, count):  # [K, S, D], [K, T, D], [P], [], []
        place = jnp.arange(path.shape[0])
        slots = jnp.where(place < count, length + place, capacity)
        return buffer.at[:, slots].set(part[:, path].astype(buffer.dtype), mode="drop")

    if batch == 1:
        each = lambda buffers, parts: tuple(map(write_slice, buffers, parts))
    else:
        write = jax.vmap(write)
        each = lambda buffers, parts: tuple(
            write(buffer, part, path, cache.length, count) for buffer, part in zip(buffers, parts)
        )
    return KVCache(each(cache.keys, block.keys), each(cache.values, block.values), cache.length + count)
