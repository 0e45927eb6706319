"""What a round costs: each part timed alone, at the same length and batch as a real one.

`metrics.expected_speedup` puts them together. A part is repeated on the device, as rounds are in the decoding loop: the
host's work to start a program, which weighs most on a short step, is no cost of a round. The state is donated from call
to call, so that no cache copy is timed.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec import cache as kv
from jspec import decode, timing, types, verify
from jspec import tree as tree_lib

# Repetitions of a part in one timed call.
TIMES = 6


class Costs(NamedTuple):
    """Median seconds of each part, once.

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

    def __post_init__(self):
        verify.check(self.verifier, self.drafter)


@functools.partial(jax.jit, static_argnames="drafter", donate_argnames="state")
def _propose_jit(params, rng_keys, state, sampling, drafter, times):
    """Propose so often. Returns the last tree, and the state."""
    step = lambda carry: decode.propose(params, rng_keys, carry[1], drafter=drafter, sampling=sampling)
    shapes, _ = jax.eval_shape(step, (None, state))
    return _repeat(step, (jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), state), times)


@functools.partial(jax.jit, static_argnames=("drafter", "verifier"), donate_argnames="state")
def _verify_jit(params, rng_keys, state, tree, drafter, verifier, sampling, times):
    """Verify one tree so often, each time behind what the time before committed."""

    def step(state):
        state = decode.verify_and_commit(
            params, rng_keys, state, tree, drafter=drafter, verifier=verifier, sampling=sampling
        )
        return _running(state)

    return _repeat(step, state, times)


def _running(state):
    """A stop id must not end a measurement."""
    return state.replace(finish_reason=jnp.full_like(state.finish_reason, decode.RUNNING))


def _repeat(step, carry, times):
    # Without the barrier, what is the same every time would be computed once, before the loop.
    return jax.lax.fori_loop(0, times, lambda _, carry: step(jax.lax.optimization_barrier(carry)), carry)


_forward_jit = jax.jit(decode.forward_tree, static_argnames="feature_layers")


@functools.partial(jax.jit, static_argnames="drafter", donate_argnames="draft")
def _update_jit(params, draft, context, tree, outputs, drafter):
    nothing = jnp.zeros((tree.tokens.shape[0], tree.max_depth + 1), jnp.int32)
    verdict = types.Verdict(path=nothing, num_accepted=nothing[:, 0], next_token=nothing[:, 0])
    return drafter.update(params, draft, context, tree, outputs, verdict)


_is_cache = lambda node: isinstance(node, kv.KVCache)


class Part:
    """One method's round, cut in two, behind a real prefill. Each call consumes the state of the one before."""

    def __init__(
        self,
        program: Program,
        rng_keys: jax.Array,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        *,
        sampling: types.Sampling,
        capacity: int,
    ):
        self._program, self._rng_keys, self._sampling = program, rng_keys, sampling
        self._state = decode.prefill_jit(
            program.params,
            rng_keys,
            prompts,
            prompt_lengths,
            drafter=program.drafter,
            sampling=sampling,
            capacity=capacity,
        )
        self._state = _running(self._state)
        self.draft()
        # The large arrays of a cache stay where they are.
        self._start = jax.tree.map(
            lambda node: jnp.copy(node.length if _is_cache(node) else node), self._state, is_leaf=_is_cache
        )
        self._first_tree = self._tree

    def rewind(self) -> None:
        """Go back to where the prefill had ended, its proposal at hand."""
        back = lambda node, then: kv.rewind(node, jnp.copy(then)) if _is_cache(node) else jnp.copy(then)
        self._state = jax.block_until_ready(jax.tree.map(back, self._state, self._start, is_leaf=_is_cache))
        self._tree = self._first_tree

    def draft(self, times: int = 1) -> types.TokenTree:
        """Propose, so often."""
        program = self._program
        self._tree, self._state = _propose_jit(
            program.params, self._rng_keys, self._state, self._sampling, program.drafter, times
        )
        return self._tree

    def verify(self, times: int = 1) -> jax.Array:
        """Verify the last proposal and commit, so often. Returns the lengths."""
        program = self._program
        self._state = _verify_jit(
            program.params,
            self._rng_keys,
            self._state,
            self._tree,
            program.drafter,
            program.verifier,
            self._sampling,
            times,
        )
        return self._state.length

    def forward(self) -> types.Outputs:
        """The bare target pass over the nodes: no verdict, nothing committed."""
        program, state = self._program, self._state
        self._outputs, _ = _forward_jit(
            program.params.target, state, self._tree, feature_layers=program.drafter.feature_layers
        )
        return self._outputs

    def forward_chain(self, num_nodes: int) -> types.Outputs:
        """The bare target pass over a chain of so many nodes, whatever they say: what it costs depends on their number
        alone."""
        batch = self._state.length.shape[0]
        tree = tree_lib.chain(jnp.zeros(batch, jnp.int32), jnp.zeros((batch, num_nodes - 1), jnp.int32))
        outputs, _ = _forward_jit(self._program.params.target, self._state, tree, feature_layers=())
        return outputs

    def update(self):
        """What the drafter learns from the last `forward`, as if no draft had been accepted."""
        program, state = self._program, self._state
        draft = _update_jit(program.params, state.draft, state.context, self._tree, self._outputs, program.drafter)
        self._state = state.replace(draft=draft)
        return draft


class Meter:
    """Times the parts of several methods in turns, all from the same state, whenever it is asked to.

    A shared machine has slow spells, and they do not hit all programs alike. What a run is compared with is therefore
    best timed beside it, a turn now and then.

    Args:
      parts: by method.
    """

    def __init__(self, parts: Mapping[str, Part]):
        self._parts, self._order = dict(parts), list(parts)
        self._seconds = {name: ([], []) for name in parts}
        for part in self._parts.values():
            for call in (part.verify, part.draft):
                timing.timed(call, 1)  # compiles

    def turn(self) -> None:
        """Time each part of each method."""
        for name in self._order:
            part = self._parts[name]
            for call, seconds in zip((part.verify, part.draft), self._seconds[name]):
                part.rewind()
                seconds.append(timing.timed(call, TIMES)[1] / TIMES)
        self._order.reverse()  # or each method would always follow the same one

    def costs(self) -> dict[str, Costs]:
        """By method, the medians of what was timed."""
        return {name: Costs(*map(statistics.median, both)) for name, both in self._seconds.items()}


def measure(parts: Mapping[str, Part], turns: int = 4) -> dict[str, Costs]:
    """Times of the parts of every method, in turns.

    Args:
      parts: by method.
      turns: timed calls of each, after one that compiles.
    """
    meter = Meter(parts)
    for _ in range(turns):
        meter.turn()
    return meter.costs()


def measure_passes(part: Part, sizes: Iterable[int], rounds: int = 10) -> dict[int, float]:
    """Median seconds of the bare target pass by its number of nodes, in turns.

    Args:
      part: of any method, for its state.
      sizes: numbers of nodes.
      rounds: timed passes of each, after one that compiles.
    """
    return timing.median(timing.interleave({n: functools.partial(part.forward_chain, n) for n in sizes}, rounds))
