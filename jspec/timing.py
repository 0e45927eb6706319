"""Clocks. JAX returns before the device is done: every clock here waits for the result.

Machines are noisy, so quantities that are compared are timed in turns in one process, after a call of each that
compiles and is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def timed(function: Callable, *args: Any, **kwargs: Any) -> tuple[Any, float]:
    """Call once. Returns the result, ready, and the seconds until it was."""
    jax.block_until_ready((args, kwargs))  # work still owed on the inputs is not this call's
    start = time.perf_counter()
    result = jax.block_until_ready(function(*args, **kwargs))
    return result, time.perf_counter() - start


def interleave(candidates: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Time several calls in turns, so that a slow spell of the machine hits all of them.

    Args:
      candidates: name -> what to call.
      rounds: timed calls of each, at least 1.
      warmup: calls of each before the first timed one; they compile.

    Returns:
      name -> seconds of each round. Entries of one round belong together: compare them pairwise.
    """
    if rounds < 1:
        raise ValueError(f"rounds {rounds} is below 1")
    for function in candidates.values():
        for _ in range(warmup):
            timed(function)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(rounds):
        # Every other round runs backwards, or the first one would always follow the last one's mess.
        for name in list(candidates)[:: -1 if i % 2 else 1]:
            seconds[name].append(timed(candidates[name])[1])
    return seconds


def best(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The shortest time of each: what the code can do when nothing disturbs it."""
    return {name: min(times) for name, times in seconds.items()}


def median(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median time of each: what to expect."""
    return {name: statistics.median(times) for name, times in seconds.items()}
