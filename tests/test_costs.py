"""Parts of a round timed alone: repeated on the device, they do every time what they do in the loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import costs, decode, drafters, generation, topology, types
from jspec import sampling as sampling_lib
from tests import programs, tiny

CAPACITY = 64
PROMPTS = [[3, 1, 4, 1, 5], [2, 7]]


def part() -> costs.Part:
    """Of a draft that often agrees, behind two prompts."""
    target, tree = tiny.random_target(), topology.Tree(widths=(2, 1))
    bound, draft = drafters.Standard(tree=tree).build(target, draft=tiny.noisy_twin())
    program = costs.Program(types.Params(target.model, draft), bound, decode.REJECTION)
    padded, lengths = map(jnp.asarray, generation.pad(PROMPTS, CAPACITY))
    sampling = sampling_lib.make(2, max_new_tokens=CAPACITY)
    return costs.Part(program, generation.row_keys(0, 2), padded, lengths, sampling=sampling, capacity=CAPACITY)


@pytest.mark.usefixtures("small_programs")
def test_repeated_parts_are_parts_called_repeatedly():
    once, often = part(), part()
    for _ in range(3):
        tree = once.draft()
    np.testing.assert_array_equal(often.draft(3).tokens, tree.tokens)
    for _ in range(3):
        lengths = np.asarray(once.verify())
    np.testing.assert_array_equal(often.verify(3), lengths)
    assert (lengths >= np.array([len(prompt) for prompt in PROMPTS]) + 1 + 3).all()
    np.testing.assert_array_equal(often.draft().tokens, once.draft().tokens)


@pytest.mark.parametrize("barrier", [True, False])
def test_what_is_the_same_every_time_is_done_every_time(barrier, monkeypatch):
    if not barrier:  # the compiler then moves drafting, with its loops over the cache, before the loop that repeats it
        monkeypatch.setattr(jax.lax, "optimization_barrier", lambda carry: carry)
    one = part()
    program, propose = one._program, costs._propose_jit.__wrapped__
    # A function of its own, so that nothing traced before is used again.
    repeated = jax.jit(
        lambda params, state, times: propose(params, one._rng_keys, state, one._sampling, program.drafter, times)
    )
    lowered = repeated.lower(program.params, one._state, jnp.int32(3))
    loops = programs.loop_bodies(lowered.compile().as_text())
    assert (len(loops) == 1) == barrier


@pytest.mark.usefixtures("small_programs")
def test_a_part_goes_back_to_where_it_was():
    one = part()
    first, lengths = one.draft(), np.asarray(one.verify())
    one.draft(), one.verify(2)
    one.rewind()
    np.testing.assert_array_equal(one.verify(), lengths)
    one.rewind()
    np.testing.assert_array_equal(one.draft().tokens, first.tokens)


class Clocked:
    """A part that only says what was done with it."""

    def __init__(self, name: str, done: list[str]):
        self.rewind = lambda: done.append("rewind")
        self.verify = lambda times: done.append(f"{name} verify {times}")
        self.draft = lambda times: done.append(f"{name} draft {times}")


def test_a_meter_times_all_parts_from_one_state_and_in_turns(monkeypatch):
    done, clock = [], iter(range(100))
    monkeypatch.setattr(costs.timing, "timed", lambda call, times: (call(times), next(clock) * times))
    meter = costs.Meter({name: Clocked(name, done) for name in "ab"})  # each once, 0 to 3, which compiles
    assert done == [f"{name} {call} 1" for name in "ab" for call in ("verify", "draft")]
    names = [f"{name} {call} {costs.TIMES}" for name in "ab" for call in ("verify", "draft")]
    meter.turn()
    assert done[4:] == [step for name in names for step in ("rewind", name)]
    meter.turn()
    assert [step for step in done[12:] if step != "rewind"] == [*names[2:], *names[:2]]
    # The medians of 4 and 10, 5 and 11, and of 6 and 8, 7 and 9.
    assert meter.costs() == {"a": costs.Costs(7, 8), "b": costs.Costs(7, 8)}
    meter.turn()
    assert meter.costs() == {"a": costs.Costs(10, 11), "b": costs.Costs(8, 9)}
