"""What a round costs: each part timed alone, at the same length and batch as a real one.

`metrics.expected_speedup` puts them together. The state is donated from call to call as in the loop, so that no cache
copy is timed.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec import decode, timing, types


class Costs(NamedTuple):
    """Best seconds of each part.

    verify: the target pass over all nodes, the verdict and the commit.
    draft:  all of a round's drafting.
    """

    verify: float
    draft: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A method ready to run: everything that `decode` takes and that does not change from prompt to prompt."""

    params: types.Params
    drafter: types.BoundDrafter
    verifier: types.Verifier


_propose_jit = jax.jit(
    lambda params, rng_keys, state, sampling, drafter: decode.propose(
        params, rng_keys, state, drafter=drafter, sampling=sampling
    ),
    static_argnames="drafter",
    donate_argnames="state",
)
_verify_jit = jax.jit(decode.verify_and_commit, static_argnames=("drafter", "verifier"), donate_argnames="state")


def measure(
    programs: dict[str, Program],
    rng_keys: jax.Array,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    *,
    sampling: types.Sampling,
    capacity: int,
    rounds: int = 10,
) -> dict[str, Costs]:
    """Time the parts of every method in turns.

    Args:
      programs: by name.
      rng_keys: `[B]`.
      prompts: `[B, W]`; as long as prompt and half an answer, since the parts are timed at their length.
      prompt_lengths: `[B]`.
      sampling: settings per row; its budgets must leave room for a few tokens a round.
      capacity: S.
      rounds: timed calls of each part.
    """

    class Part:  # keeps the state between calls, since each call consumes the one before
        def __init__(self, program: Program):
            self.program = program
            self.state = decode.prefill_jit(
                program.params,
                rng_keys,
                prompts,
                prompt_lengths,
                drafter=program.drafter,
                sampling=sampling,
                capacity=capacity,
            )
            self.tree, self.state = self._propose()

        def _propose(self):
            return _propose_jit(self.program.params, rng_keys, self.state, sampling, self.program.drafter)

        def draft(self):
            self.tree, self.state = self._propose()
            return self.tree

        def verify(self):
            program = self.program
            self.state = _verify_jit(
                program.params,
                rng_keys,
                self.state,
                self.tree,
                drafter=program.drafter,
                verifier=program.verifier,
                sampling=sampling,
            )
            # A stop id must not end the measurement.
            self.state = self.state.replace(finish_reason=jnp.full_like(self.state.finish_reason, decode.RUNNING))
            return self.state.length

    parts = {name: Part(program) for name, program in programs.items()}
    calls = {}
    for name, part in parts.items():
        calls[name, "draft"] = part.draft
        calls[name, "verify"] = part.verify
    best = timing.best(timing.interleave(calls, rounds))
    return {name: Costs(best[name, "verify"], best[name, "draft"]) for name in parts}
