"""What `jspec.decode` is asked for: how long its rows must be, and what is refused before anything is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import types
from jspec import verify as verify_lib

MIN_CAPACITY = 512  # capacities grow in powers of two from here, so that lengths rarely compile anything


def capacity_for(needed: int, max_positions: int) -> int:
    """Slots for rows of `needed` tokens: the next power of two from 512 up, at most what the models can follow.

    Raises:
      ValueError: `needed` is more than `max_positions`.
    """
    if needed > max_positions:
        raise ValueError(f"prompt + max_new_tokens is {needed} tokens; the model follows at most {max_positions}")
    return min(max(MIN_CAPACITY, 1 << (needed - 1).bit_length()), max_positions)


def check(
    params: types.Params,
    prompts: Any,
    prompt_lengths: Any,
    *,
    drafter: types.BoundDrafter,
    verifier: types.Verifier,
    sampling: types.Sampling,
    max_new_tokens: int,
    capacity: int | None,
) -> int:
    """Refuse what cannot be decoded before anything is compiled, and choose the capacity.

    Values that are traced (a call inside `jit`) are not looked at; shapes always are.

    Returns:
      S, slots per row.

    Raises:
      ValueError: an empty prompt, a prompt longer than its row, the model or the cache, a budget beyond
        `max_new_tokens`, token ids outside the vocabulary, arrays that do not fit together, a verifier that cannot
        judge the drafter's trees.
    """
    verify_lib.check(verifier, drafter)
    if jnp.ndim(prompts) != 2 or jnp.shape(prompt_lengths) != jnp.shape(prompts)[:1]:
        raise ValueError(
            f"prompts must be [B, W] and prompt_lengths [B]; got {jnp.shape(prompts)} and {jnp.shape(prompt_lengths)}"
        )
    batch, width = jnp.shape(prompts)
    if sampling.temperature.shape != (batch,):
        raise ValueError(f"sampling is for {sampling.temperature.shape[0]} rows; there are {batch} prompts")
    longest = width
    if not any(isinstance(x, jax.core.Tracer) for x in (prompts, prompt_lengths, sampling.max_new_tokens)):
        lengths, ids = np.asarray(prompt_lengths), np.asarray(prompts)
        if batch == 0 or lengths.min() < 1:
            raise ValueError(f"prompt {int(lengths.argmin()) if batch else 0} is empty; it needs at least one token")
        if lengths.max() > width:
            raise ValueError(f"prompt_lengths holds {lengths.max()}; rows are {width} wide")
        real = ids[np.arange(width) < lengths[:, None]]
        vocab_size = params.target.config.vocab_size
        if real.min() < 0 or real.max() >= vocab_size:
            bad = real[(real < 0) | (real >= vocab_size)][0]
            raise ValueError(f"token id {bad} in a prompt is outside the vocabulary of {vocab_size}")
        budget = np.asarray(sampling.max_new_tokens).max()
        if budget > max_new_tokens:
            raise ValueError(f"a row's max_new_tokens {budget} is more than the call's {max_new_tokens}")
        longest = int(lengths.max())
    needed = longest + max_new_tokens
    limits = [params.target.config.max_positions, getattr(drafter, "max_positions", None)]
    chosen = capacity_for(needed, min(limit for limit in limits if limit is not None))
    if capacity is not None and capacity < needed:
        raise ValueError(f"prompt + max_new_tokens is {needed} tokens; the cache has {capacity} slots")
    return chosen if capacity is None else capacity
