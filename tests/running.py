"""Running `decode` and `stream` on lists of prompts, with one program for many tests.

Compiling is nearly all of the time these tests take. So a `Decoder` has one batch, one prompt width and one capacity:
short batches are filled up, and what differs between two tests (temperatures, stop ids, budgets, keys) is data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import decode, sampling, types, verify


@dataclasses.dataclass(frozen=True)
class Generated:
    """One row's share of a `DecodeOutput`, in plain numbers that compare with ==."""

    text: list[int]
    finish: str
    origins: list[str]
    rounds: int
    histogram: list[int]
    offered: list[int]
    tested: list[int]
    drafted: int

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts of each round, read off the origins: a round ends with an undrafted token or the text."""
        rounds, run = [], 0
        for origin in self.origins[1:]:
            run += origin == "accepted"
            if origin != "accepted":
                rounds.append(run)
                run = 0
        return rounds + [run] * (run > 0)


def split(output: types.DecodeOutput, prompt_lengths: Sequence[int]) -> list[Generated]:
    """The rows of an output."""
    output = jax.tree.map(np.asarray, output)
    rows = []
    for row, start in enumerate(prompt_lengths):
        new = slice(int(start), int(output.lengths[row]))
        counts = {field.name: getattr(output.acceptance, field.name)[row].tolist() for field in ACCEPTANCE}
        rows.append(
            Generated(
                text=output.tokens[row, new].tolist(),
                finish=decode.FINISH_REASONS[output.finish_reason[row]],
                origins=[decode.ORIGINS[i] for i in output.origin[row, new]],
                **counts,
            )
        )
    return rows


ACCEPTANCE = dataclasses.fields(types.Acceptance)


def keys(seeds: Sequence[int]) -> jax.Array:
    """One key per row."""
    return jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A target, a drafter and the shapes of one compiled program."""

    target: types.Target
    bound: types.BoundDrafter
    draft: Any
    batch: int = 8
    width: int = 41
    capacity: int = 65  # the longest prompt and `max_new` fill it to the last slot
    max_new: int = 24
    chunk: int = 16
    verifier: types.Verifier = verify.Rejection()

    @property
    def params(self) -> types.Params:
        return types.Params(self.target.model, self.draft)

    def arguments(
        self, prompts: Sequence[Sequence[int]], *, seeds: Sequence[int] | None = None, padding: Any = 0, **settings
    ) -> tuple[tuple, dict]:
        """Arguments of `decode` and `stream`; settings are those of `sampling.make`, for the rows given.

        Rows that fill up the batch repeat the first prompt and stop after one token.
        """
        fill = self.batch - len(prompts)
        settings = {"max_new_tokens": self.max_new} | settings
        for name, value in settings.items():
            neutral = 1 if name == "max_new_tokens" else [] if name == "stop_ids" else 1.0 if name == "top_p" else 0
            per_row = list(value) if isinstance(value, (list, tuple)) else [value] * len(prompts)
            settings[name] = per_row + [neutral] * fill
        prompts = [*prompts] + [prompts[0]] * fill
        padded = np.broadcast_to(np.asarray(padding, np.int32), (self.batch, self.width)).copy()
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        seeds = range(len(prompts) - fill) if seeds is None else seeds
        arrays = keys([*seeds] + [0] * fill), jnp.asarray(padded), jnp.asarray(list(map(len, prompts)), jnp.int32)
        return (self.params, *arrays), {
            "drafter": self.bound,
            "verifier": self.verifier,
            "sampling": sampling.make(self.batch, **settings),
            "max_new_tokens": self.max_new,
            "capacity": self.capacity,
            "prefill_chunk": self.chunk,
        }

    def __call__(self, prompts: Sequence[Sequence[int]], **settings) -> list[Generated]:
        """`decode`; settings as in `arguments`."""
        args, kwargs = self.arguments(prompts, **settings)
        return split(decode.decode(*args, **kwargs), list(map(len, prompts)))

    def states(self, prompts: Sequence[Sequence[int]], **settings) -> Iterator[decode.DecodeState]:
        """The state after prefill and after every round, as NumPy arrays."""
        args, kwargs = self.arguments(prompts, **settings)
        common = {name: kwargs[name] for name in ("drafter", "sampling")}
        state = decode.prefill_jit(*args, **common, capacity=self.capacity, chunk=self.chunk)
        while True:
            yield jax.tree.map(np.array, state)
            if not state.live.any():
                return
            state = decode.step_jit(*args[:2], state, verifier=self.verifier, **common)

    def last_state(self, prompts: Sequence[Sequence[int]], **settings) -> decode.DecodeState:
        """The state that `decode` ends in."""
        args, kwargs = self.arguments(prompts, **settings)
        common = {name: kwargs[name] for name in ("drafter", "sampling")}
        state = decode.prefill_jit(*args, **common, capacity=self.capacity, chunk=self.chunk)
        return jax.tree.map(np.array, decode.run_jit(*args[:2], state, verifier=self.verifier, **common))

    def compiled_loop(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        run: jax.stages.Wrapped = decode.run_jit,
        options: dict[str, Any] | None = None,
    ) -> tuple[jax.stages.Compiled, int]:
        """The loop's program, and the number of elements of one buffer of the target's cache.

        It is the one that `self(prompts)` runs, unless `run` or compiler `options` are others.
        """
        args, kwargs = self.arguments(prompts)
        common = {name: kwargs[name] for name in ("drafter", "sampling")}
        state = decode.prefill_jit.eval_shape(*args, **common, capacity=self.capacity, chunk=self.chunk)
        config = self.target.model.config
        size = self.batch * config.num_kv_heads * self.capacity * config.head_size
        assert state.cache.keys[0].size == size
        return run.lower(*args[:2], state, verifier=self.verifier, **common).compile(options), size

    def stream(self, prompts: Sequence[Sequence[int]], **settings) -> tuple[list[Generated], list[list[list[int]]]]:
        """`stream`: the rows, and for each row the blocks of tokens as they landed."""
        args, kwargs = self.arguments(prompts, **settings)
        *blocks, output = decode.stream(*args, **kwargs)
        rows = split(output, list(map(len, prompts)))
        landed = [[] for _ in rows]
        origins = [[] for _ in rows]
        for emitted in (emitted for step in blocks for emitted in step if emitted.row < len(rows)):
            landed[emitted.row].append(emitted.tokens)
            origins[emitted.row] += emitted.origins
        assert origins == [row.origins for row in rows]
        return rows, landed
