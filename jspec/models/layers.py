"""The pieces of a decoder layer: products, norms, rotary positions, attention over cache and block.

Everything that is written for speed rather than for reading sits in `linear` and `attention`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models import config as model_config

# Tokens per step of the loop over the cached prefix. Small enough that a short prefix in a large cache stays cheap,
# large enough for a product to fill the core.
PREFIX_CHUNK = {"cpu": 128}
DEFAULT_PREFIX_CHUNK = 1024

# A matrix-vector product on a CPU: jax 0.10 is faster with the vector as a row if the matrix is not wide (a quarter of
# the step), later versions are 4 times slower.
ONE_TOKEN_AS_ROW = jax.__version_info__ < (0, 11)

# Token counts whose products are fast on a CPU; one in between costs more than the next of these (9 more than 16).
FAST_COUNTS = (1, 2, 4, 8, 16)

MASKED = -1e30  # finite: -inf would give NaN where a whole chunk is masked


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight.T + bias`.

    On a CPU a product of a few tokens is fastest as `[out, in] @ [in, tokens]`; the compiler would fold the transposes
    back into the slow orientation, so barriers hold them in place. One token is a matrix-vector product either way.

    Args:
      x: `[..., in]`.
      weight: `[out, in]`.
      bias: `[out]` or None.
    """
    flat = x.reshape(-1, x.shape[-1])
    if jax.default_backend() != "cpu":
        y = flat @ weight.T
    elif flat.shape[0] == 1:
        row = jax.lax.optimization_barrier(flat)
        as_row = ONE_TOKEN_AS_ROW and weight.shape[0] >= weight.shape[1]
        y = jax.lax.optimization_barrier(row @ weight.T if as_row else (weight @ row[0])[None])
    else:
        count = flat.shape[0]
        fast = next((size for size in FAST_COUNTS if size >= count), count)
        columns = jax.lax.optimization_barrier(jnp.pad(flat, ((0, fast - count), (0, 0))).T)
        y = jax.lax.optimization_barrier(weight @ columns).T[:count]
    y = y.reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32.

    It divides, and last: a compiler takes divisions for expensive and computes them once, where it would repeat a
    product for every row of the matrix that follows.
    """
    x32 = x.astype(jnp.float32)
    root = jnp.sqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale.astype(jnp.float32) / root).astype(x.dtype)


# Of the gated unit: gate and linear half -> what enters the last product. Divides last, as the norm does.
GATED = {
    "silu": lambda gate, up: gate * up / (1 + jnp.exp(-gate)),
    "gelu": lambda gate, up: jax.nn.gelu(gate, approximate=False) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
}


def rope_frequencies(config: model_config.TransformerConfig) -> tuple[np.ndarray, float]:
    """Angular frequency of each rotated pair, and the factor on cosines and sines.

    `llama3` follows Llama 3.1's published rule, `yarn` Peng et al., arXiv:2309.00071, section 3.2 and equation 23.

    Returns:
      `[D / 2]` float32 radians per position, and the scale (1 except for `yarn`).
    """
    size, theta, scaling = config.head_size, config.rope_theta, config.rope_scaling
    base = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if scaling is None:
        return base.astype(np.float32), 1.0
    if scaling.kind == "linear":
        return (base / scaling.factor).astype(np.float32), 1.0
    if scaling.kind == "factors":
        return (base / (scaling.factor * np.array(scaling.factors))).astype(np.float32), 1.0
    if scaling.kind == "llama3":
        # Rotations over the original length: many are kept, few are divided, those between are blended.
        rotations = scaling.original_max_position * base / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
        return (keep * base + (1 - keep) * base / scaling.factor).astype(np.float32), 1.0
    if scaling.kind == "yarn":

        def dimension(rotations):  # the pair that turns this often over the original length
            return size * math.log(scaling.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        ramp = np.clip((np.arange(size // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
        scale = scaling.attention_factor
        if scale is None:
            scale = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
        return (base * (1 - ramp) + base / scaling.factor * ramp).astype(np.float32), scale
    raise ValueError(f"unknown rope scaling {scaling.kind!r}")


def rope_tables(config: model_config.TransformerConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines at `[B, T]` positions, each `[B, T, 1, D / 2]`."""
    frequencies, scale = rope_frequencies(config)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    tables = lambda: (jnp.cos(angles) * scale, jnp.sin(angles) * scale)
    if jax.default_backend() != "cpu":
        return tables()
    # The CPU compiler would compute them again in every layer, for every head; the result of a loop it has to keep.
    once = jnp.minimum(jnp.max(positions) + 1, 1)
    return jax.lax.fori_loop(0, once, lambda *_: tables(), (jnp.zeros_like(angles), jnp.zeros_like(angles)))


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the pairs (i, i + D / 2) of `[B, T, heads, D]` vectors."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _attend(carry, query, keys, values, visible):
    """One step of an online softmax (Milakov and Gimelshein, arXiv:1805.02867): take in some more keys.

    Args:
      carry: numerator `[B, K, T * G, D]`, maximum and denominator `[B, K, T * G, 1]` so far, float32.
      query: `[B, K, T * G, D]`, already scaled; the G heads of a group stand together.
      keys, values: `[B, K, S, D]`.
      visible: `[B, T, S]` bool.
    """
    mixed, top, total = carry
    visible = jnp.repeat(visible, query.shape[2] // visible.shape[1], axis=1)[:, None]
    scores = jnp.einsum("bkmd,bksd->bkms", query, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, scores, MASKED)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
    weights, shrink = jnp.exp(scores - new_top), jnp.exp(top - new_top)
    added = jnp.einsum("bkms,bksd->bkmd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return mixed * shrink + added, new_top, total * shrink + jnp.sum(weights, axis=-1, keepdims=True)


def attention(
    query: jax.Array,
    positions: jax.Array,
    prefix: tuple[jax.Array, jax.Array] | None,
    prefix_length: jax.Array | None,
    block: tuple[jax.Array, jax.Array],
    block_visible: jax.Array,
    window: int | None,
) -> jax.Array:
    """Attention of a block of queries over the cached prefix and over the block itself.

    The prefix is read in chunks up to the longest row, by an online softmax: the cost follows the tokens present, not
    the size of the buffer, and no score matrix is larger than one chunk.

    Args:
      query: `[B, T, H, D]`.
      positions: `[B, T]` of the queries.
      prefix: cached keys and values, `[B, K, S, D]`; None without a cache, and only then are gradients defined.
      prefix_length: `[B]` filled slots, or None.
      block: keys and values of scratch and block, `[B, K, M, D]`.
      block_visible: `[B, T, M]` bool. Every query sees at least itself.
      window: how many positions back a query may look, or None.

    Returns:
      `[B, T, H, D]`.
    """
    batch, length, heads, size = query.shape
    kv_heads = block[0].shape[1]
    query = (query * (1.0 / math.sqrt(size))).astype(query.dtype)
    query = query.reshape(batch, length, kv_heads, heads // kv_heads, size).transpose(0, 2, 1, 3, 4)
    query = query.reshape(batch, kv_heads, -1, size)

    capacity = 0 if prefix is None else prefix[0].shape[2]
    chunk = min(PREFIX_CHUNK.get(jax.default_backend(), DEFAULT_PREFIX_CHUNK), capacity)

    def add_chunk(index, carry):
        # The last chunk of a capacity that is no multiple of the chunk is read from further left; the slots that it
        # shares with the one before are masked.
        start = jnp.minimum(index * chunk, capacity - chunk)
        slots = start + jnp.arange(chunk)
        part = [jax.lax.dynamic_slice_in_dim(x, start, chunk, axis=2) for x in prefix]
        visible = (slots >= index * chunk) & (slots < prefix_length[:, None])
        visible = jnp.broadcast_to(visible[:, None], (batch, length, chunk))
        if window is not None:
            visible &= slots > positions[..., None] - window
        return _attend(carry, query, *part, visible)

    if block[0].shape[2] == 1:  # a token alone sees itself: no softmax, and none of its small operations
        top = jnp.sum(query * block[0], axis=-1, keepdims=True, dtype=jnp.float32)
        carry = jnp.broadcast_to(block[1].astype(jnp.float32), query.shape), top, jnp.ones_like(top)
    else:
        zeros = jnp.zeros(query.shape, jnp.float32)
        start = zeros, jnp.full_like(zeros[..., :1], MASKED), zeros[..., :1]
        carry = _attend(start, query, *block, block_visible)
    if prefix is not None:
        last = jnp.max(prefix_length)
        first = 0 if window is None else jnp.maximum(0, jnp.min(positions) - window + 1) // chunk
        carry = jax.lax.fori_loop(first, (last + chunk - 1) // chunk, add_chunk, carry)
    mixed, _, total = carry
    out = (mixed / total).astype(query.dtype)
    out = out.reshape(batch, kv_heads, length, heads // kv_heads, size).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, length, heads, size)
