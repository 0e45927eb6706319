"""Running several methods on the same prompts, in turns: what scripts that compare them share."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments import prompt_sets, settings
from jspec import costs, decode, generation, metrics, rounds, timing, types
from jspec import sampling as sampling_lib

BASELINE = "autoregressive"


@dataclasses.dataclass(frozen=True)
class Group:
    """Prompts decoded together.

    prompts:    which.
    padded:     `[B, W]` ids.
    lengths:    `[B]`.
    keys:       `[B]` row keys; a prompt's key depends on its id alone.
    """

    prompts: tuple[prompt_sets.Prompt, ...]
    padded: jax.Array
    lengths: jax.Array
    keys: jax.Array


def in_batches(prompts: Sequence[prompt_sets.Prompt], batch: int, whose: str) -> list[tuple[prompt_sets.Prompt, ...]]:
    """Prompts, so many at a time.

    Raises:
      ValueError: one batch would be smaller than the others; `whose` prompts they are.
    """
    if len(prompts) % batch:
        raise ValueError(f"batch {batch} does not divide the {len(prompts)} prompts of {whose}")
    return [tuple(prompts[i : i + batch]) for i in range(0, len(prompts), batch)]


def group(
    prompts: tuple[prompt_sets.Prompt, ...],
    encoded: Mapping[prompt_sets.Prompt, Sequence[int]],
    width: int,
    seed: int,
) -> Group:
    """One batch as arrays of W = `width`."""
    padded, lengths = generation.pad([encoded[prompt] for prompt in prompts], width)
    seeds = [zlib.crc32(f"{seed}/{prompt.id}".encode()) for prompt in prompts]
    return Group(prompts, jnp.asarray(padded), jnp.asarray(lengths), generation.row_keys(seeds, len(prompts)))


def capacity(target: types.Target, bounds: Sequence[types.BoundDrafter], needed: int) -> int:
    """Slots for rows of `needed` tokens, prompt and answer.

    Raises:
      ValueError: more than the target or a draft can follow.
    """
    limits = [getattr(bound, "max_positions", None) for bound in bounds]
    return decode.capacity_for(needed, min(filter(None, [target.model.config.max_positions, *limits])))


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One group decoded by one method: result on the host, and seconds of prefill and of decoding."""

    output: types.DecodeOutput
    prefill_seconds: float
    decode_seconds: float

    def new_tokens(self, group: Group) -> np.ndarray:
        """`[B]` tokens generated."""
        return self.output.lengths - np.asarray(group.lengths)


def summarize(decoded: Sequence[Decoded], groups: Sequence[Group]) -> metrics.Summary:
    """Acceptance over all groups of one method."""
    return metrics.summarize(*_rows(decoded, groups))


def acceptance_intervals(decoded: Sequence[Decoded], groups: Sequence[Group]) -> metrics.AcceptanceIntervals:
    """Intervals of tau and alpha over all prompts of one method."""
    return metrics.acceptance_intervals(*_rows(decoded, groups))


def _rows(decoded: Sequence[Decoded], groups: Sequence[Group]) -> tuple[types.Acceptance, np.ndarray]:
    """Statistics and new tokens of every prompt, `[N, ...]` and `[N]`."""
    acceptance = jax.tree.map(lambda *rows: np.concatenate(rows), *(run.output.acceptance for run in decoded))
    return acceptance, np.concatenate([run.new_tokens(group) for run, group in zip(decoded, groups)])


def before_repeat(
    decoded: Sequence[Decoded], groups: Sequence[Group], max_depth: int, max_new_tokens: int
) -> metrics.Summary:
    """The same over the tokens before each answer's first repeated 8-gram; see `rounds.before_repeat`."""
    found = [
        rounds.before_repeat(run.output, group.lengths, max_depth=max_depth, max_new_tokens=max_new_tokens)
        for run, group in zip(decoded, groups)
    ]
    acceptance = jax.tree.map(lambda *rows: np.concatenate(rows), *(acceptance for acceptance, _ in found))
    return metrics.summarize(acceptance, np.concatenate([tokens for _, tokens in found]))


def decoding_calls(decoded: Sequence[Decoded], groups: Sequence[Group]) -> metrics.Calls:
    """Decoding alone: prefill emitted each row's first token."""
    tokens = [int((run.new_tokens(group) - 1).sum()) for run, group in zip(decoded, groups)]
    return metrics.Calls(np.array(tokens), np.array([run.decode_seconds for run in decoded]))


def landing_gaps(decoded: Sequence[Decoded]) -> np.ndarray:
    """Seconds between deliveries, each call's rounds taken to be equally long."""
    return np.concatenate(
        [metrics.equal_gaps(run.output.acceptance.rounds, run.decode_seconds) for run in decoded] or [np.zeros(0)]
    )


def speedup(own: metrics.Calls, baseline: metrics.Calls) -> metrics.Speedup | None:
    """Of decoding; None when every answer ended with its first token."""
    keep = (own.tokens > 0) & (baseline.tokens > 0)
    kept = lambda calls: metrics.Calls(calls.tokens[keep], calls.seconds[keep])
    return metrics.speedup(kept(baseline), kept(own), compiling_calls=0) if keep.any() else None


class Runner:
    """Runs and times methods; one capacity and width for all prompts, so that each method compiles once.

    Args:
      target: the model to speed up.
      programs: by method; `BASELINE` among them.
      capacity: slots per row.
      batch: rows.
      filters: cuts of the law.
      max_new_tokens: per prompt.
    """

    def __init__(
        self,
        target: types.Target,
        programs: Mapping[str, costs.Program],
        capacity: int,
        *,
        batch: int,
        filters: settings.Filters,
        max_new_tokens: int,
    ):
        self._target, self._programs, self._capacity = target, programs, capacity
        self._batch, self._filters, self._max_new_tokens = batch, filters, max_new_tokens

    def _sampling(self, temperature: float, max_new_tokens: int) -> types.Sampling:
        return sampling_lib.make(
            self._batch,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            stop_ids=self._target.stop_ids,
            **vars(self._filters),
        )

    def prefill(
        self, name: str, group: Group, temperature: float, max_new_tokens: int | None = None
    ) -> tuple[decode.DecodeState, types.Sampling, float]:
        """A group behind its prompts, ready to be decoded by one method with the sampling beside it, and seconds."""
        program = self._programs[name]
        sampling = self._sampling(temperature, max_new_tokens or self._max_new_tokens)
        state, seconds = timing.timed(
            decode.prefill_jit,
            program.params,
            group.keys,
            group.padded,
            group.lengths,
            drafter=program.drafter,
            sampling=sampling,
            capacity=self._capacity,
        )
        return state, sampling, seconds

    def decode(self, name: str, group: Group, temperature: float, max_new_tokens: int | None = None) -> Decoded:
        """One group by one method."""
        program = self._programs[name]
        state, sampling, prefill_seconds = self.prefill(name, group, temperature, max_new_tokens)
        state, decode_seconds = timing.timed(
            decode.run_jit,
            program.params,
            group.keys,
            state,
            drafter=program.drafter,
            verifier=program.verifier,
            sampling=sampling,
        )
        return Decoded(jax.device_get(decode.output(state)), prefill_seconds, decode_seconds)

    def in_turn(self, index: int) -> list[str]:
        """The methods; every other time backwards, so that no method always follows the same one."""
        return list(self._programs)[:: -1 if index % 2 else 1]

    def compile(self, group: Group) -> Iterator[str]:
        """Compile all that `decode` and the parts call. Yields each method's name when it is done.

        Two at a time: much of compiling keeps one core busy.
        """

        def one(name: str) -> str:
            self.decode(name, group, 0.0, max_new_tokens=2)
            self._part(name, group.keys, group.padded, group.lengths, 0.0).verify()
            return name

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            yield from pool.map(one, self._programs)

    def _part(self, name: str, keys, padded, lengths, temperature: float) -> costs.Part:
        # A budget that cannot run out: it would leave nothing to draft.
        sampling = self._sampling(temperature, self._capacity)
        return costs.Part(self._programs[name], keys, padded, lengths, sampling=sampling, capacity=self._capacity)

    def middle(self, groups: Sequence[Group]) -> Callable[[float], dict[str, costs.Part]]:
        """Parts of every method in the middle of a typical run: a prompt of median length, and half its answer.

        Returns:
          A function of the temperature.
        """
        typical = sorted(groups, key=lambda group: int(group.lengths.sum()))[len(groups) // 2]
        half = self.decode(BASELINE, typical, 0.0, max_new_tokens=max(1, self._max_new_tokens // 2)).output
        rows = [row[:length] for row, length in zip(half.tokens, half.lengths)]
        padded, lengths = generation.pad(rows, self._capacity)
        arrays = typical.keys, jnp.asarray(padded), jnp.asarray(lengths)
        return lambda temperature: {name: self._part(name, *arrays, temperature) for name in self._programs}
