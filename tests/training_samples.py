"""Training text whose right labels are known."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jspec.training import data


def sample(number: int, prompt: Sequence[int], answer: Sequence[int]) -> data.Sample:
    """A conversation of one turn."""
    roles = [data.PROMPT] * len(prompt) + [data.ANSWER] * len(answer)
    return data.Sample(number, np.array([*prompt, *answer], np.uint16), np.array(roles, np.uint8))


def cycles(count: int, size: int, *, prompt: int = 2, answer: int = 12, seed: int = 0) -> list[data.Sample]:
    """Samples of x, x + 1, ... (mod size), from every start about equally often, in random order."""
    starts = np.random.default_rng(seed).permutation(count) % size
    runs = [[(start + i) % size for i in range(prompt + answer)] for start in starts]
    return [sample(number, run[:prompt], run[prompt:]) for number, run in enumerate(runs)]


def batch(*rows: Sequence[data.Sample], length: int) -> data.Batch:
    """Rows of samples, packed by hand."""
    shape = (len(rows), length)
    tokens, segments, positions = np.zeros(shape, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    answer = np.zeros(shape, bool)
    for row, members in enumerate(rows):
        start = 0
        for segment, member in enumerate(members):
            for position, (token, role) in enumerate(zip(member.tokens, member.roles)):
                at = (row, start + position)
                tokens[at], segments[at], positions[at], answer[at] = token, segment, position, role == data.ANSWER
            start += len(member.tokens)
    places = data.places(segments, answer, length)
    return data.Batch(*map(jnp.asarray, (tokens, segments, positions, answer, places)))
