"""The invariants of `decode`'s docstring, one by one. What holds for every drafter is in `test_common.py`."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode, drafters, sampling
from tests import checkpoints, common_table, programs, reference, running, tiny

pytestmark = pytest.mark.usefixtures("small_programs", "few_programs")

PROMPTS = list(tiny.PROMPTS)
TEXTS = [tiny.greedy(prompt) for prompt in PROMPTS]
decoder = common_table.decoder

# Rows that end at different times, by the budget or by a stop token, greedy and sampled.
ENDINGS = {
    "temperature": [0, 0, 1.0, 0, 0, 0.8, 0, 0],
    "max_new_tokens": [24, 3, 24, 9, 24, 12, 1, 24],
    "stop_ids": [[], [], [], [TEXTS[3][6]], [TEXTS[4][3]], [], [], []],
}


@functools.cache
def rounds(name: str = "standard") -> list[decode.DecodeState]:
    """The state after prefill and after each round."""
    return list(decoder(name).states(PROMPTS, **ENDINGS))


@functools.cache
def uncached(tokens: tuple[int, ...]) -> reference.Pass:
    model = tiny.random_target().model
    return reference.forward(model.config, model.params, tokens)


# 1 and 2. What the cache holds.


def test_the_cache_holds_the_committed_tokens_without_the_pending_one():
    for state in rounds():
        assert (state.cache.length == state.length - 1).all()
        for row in range(8):
            length = state.length[row] - 1
            expected = uncached(tuple(state.tokens[row, :length].tolist()))
            for buffers, exact in ((state.cache.keys, expected.keys), (state.cache.values, expected.values)):
                for buffer, layer in zip(buffers, exact):
                    assert np.abs(buffer[row, :, :length] - layer).max() < 1e-4
                    assert not buffer[row, :, length:].any()  # rejected drafts never reach it


def test_the_drafter_sees_every_committed_token_once_with_its_features():
    """Prompt chunks and accepted paths alike; the context's features belong to the pending token's parent."""
    decode_tree = decoder("token tree")
    state = decode_tree.last_state(PROMPTS, **ENDINGS)
    assert not state.draft["wrong_features"].any()
    for row in range(8):
        length = state.length[row] - 1
        tokens = state.tokens[row, :length]
        assert state.draft["length"][row] == length
        assert state.draft["tokens"][row, :length].tolist() == tokens.tolist()
        states = uncached(tuple(tokens.tolist())).states
        assert np.allclose(state.draft["features"][row, :length], np.stack([states[1], states[-1]], axis=1), atol=1e-4)
        assert np.allclose(state.features[row], [states[1][-1], states[-1][-1]], atol=1e-4)


# 3. Capacity, checked before anything is compiled.


def call(name: str = "autoregressive", prompts=PROMPTS, function=decode.decode, **changes):
    """`decode` with some arguments exchanged; those named `arrays_i` replace positional ones."""
    changed = dataclasses.replace(decoder(name), **changes.pop("decoder", {}))
    settings = changes.pop("settings", {})
    args, kwargs = changed.arguments(prompts, **settings)
    args = list(args)
    for place in range(len(args)):
        if f"argument_{place}" in changes:
            args[place] = changes.pop(f"argument_{place}")
    return function(*args, **kwargs | changes)


LENGTHS = jnp.asarray(list(map(len, PROMPTS)))
BAD_CALLS = {
    "empty prompt": ({"argument_3": LENGTHS.at[4].set(0)}, ["prompt 4", "empty"]),
    "negative length": ({"argument_3": LENGTHS.at[2].set(-1)}, ["prompt 2", "empty"]),
    "longer than its row": ({"argument_3": LENGTHS.at[0].set(42)}, ["42", "41"]),
    "longer than the cache": ({"capacity": 64}, ["65 tokens", "64 slots"]),
    "longer than the model": ({"max_new_tokens": 216, "capacity": None}, ["257", "256"]),
    "longer than the model, in a cache that would hold it": ({"max_new_tokens": 216, "capacity": 512}, ["257", "256"]),
    "budget beyond the call's": ({"max_new_tokens": 20}, ["24", "20"]),
    "id beyond the vocabulary": ({"prompts": [*PROMPTS[:7], (1, 64)]}, ["token id 64", "64"]),
    "negative id": ({"prompts": [*PROMPTS[:7], (-3, 1)]}, ["token id -3"]),
    "prompts without rows": ({"argument_2": jnp.ones(41, jnp.int32)}, ["[B, W]", "(41,)"]),
    "lengths of another batch": ({"argument_3": LENGTHS[:7]}, ["(8, 41)", "(7,)"]),
    "lengths with two axes": ({"argument_3": LENGTHS[:, None]}, ["(8, 1)"]),
    "settings of another batch": ({"sampling": sampling.make(5, max_new_tokens=3)}, ["5 rows", "8 prompts"]),
}


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.parametrize("function", [decode.decode, decode.stream])
def test_bad_calls_are_refused_before_compiling(name, function):
    """DEV-16, DEV-17. `stream` refuses when it is called, not when its first item is asked for."""
    changes, words = BAD_CALLS[name]
    before = decode.prefill_jit._cache_size(), decode.run_jit._cache_size(), decode.step_jit._cache_size()
    with pytest.raises(ValueError) as error:
        call(function=function, **changes)
    assert all(word in str(error.value) for word in words), error.value
    assert (decode.prefill_jit._cache_size(), decode.run_jit._cache_size(), decode.step_jit._cache_size()) == before


def test_the_drafts_reach_bounds_the_text_too():
    target = tiny.random_target()
    short = tiny.target(checkpoints.with_options(max_positions=50), checkpoints.random_params())
    bound, draft = drafters.Standard(gamma=2).build(target, draft=short)
    with pytest.raises(ValueError, match=r"65.*50"):
        running.Decoder(target, bound, draft)(PROMPTS)


def test_capacities_grow_in_powers_of_two():
    assert [decode.capacity_for(n, 4096) for n in (1, 512, 513, 1024, 1025, 4096)] == [512, 512, 1024, 1024, 2048, 4096]
    assert decode.capacity_for(100, 256) == decode.capacity_for(256, 256) == 256
    with pytest.raises(ValueError, match="257.*256"):
        decode.capacity_for(257, 256)


# 4 holds for trees (`test_tree.py`, `test_verify.py`) and is checked for each drafter by its texts.

# 5. Keys.


def test_equal_keys_give_equal_texts_and_other_keys_others():
    settings = {"temperature": 1.5, "max_new_tokens": 16}
    texts = lambda seeds: [row.text for row in decoder("autoregressive")([PROMPTS[2]] * 8, seeds=seeds, **settings)]
    twice = texts([0, 1, 2, 3, 0, 1, 2, 3])
    assert twice[:4] == twice[4:] and len(set(map(tuple, twice))) == 4


# 6. The carry: `test_common.py`, for each drafter.

# 7. Finished rows.


def test_a_finished_row_keeps_its_state():
    states = rounds()
    assert len(states) > 5
    finished_early = 0
    for before, after in zip(states, states[1:]):
        for row in np.flatnonzero(~before.live):
            finished_early += 1
            keep = lambda state: [
                *jax.tree.leaves((state.tokens, state.origin, state.length, state.features, state.cache)),
                *jax.tree.leaves((state.draft.cache, state.finish_reason, state.acceptance)),
            ]
            assert all(np.array_equal(a[row], b[row]) for a, b in zip(keep(before), keep(after)))
        for row in np.flatnonzero(before.live):
            assert after.length[row] > before.length[row]
            assert after.acceptance.rounds[row] == before.acceptance.rounds[row] + 1
    assert finished_early > 20


def test_drafts_behind_the_end_are_not_held_against_the_draft():
    """A stop token ends an accepted block: what stood behind was neither accepted nor tested, so alpha stays 1."""
    target = tiny.random_target()
    always_right = running.Decoder(target, *drafters.Standard(gamma=common_table.GAMMA).build(target, draft=target))
    rows = always_right(PROMPTS, stop_ids=[[text[2]] for text in TEXTS])
    for row, text in zip(rows, TEXTS):
        assert row.text == text[: text.index(text[2]) + 1]
        assert sum(row.tested) == sum(row.accepted)


# 8. Prefill.


def test_prefill_emits_the_first_token_in_no_round():
    first = rounds()[0]
    lengths = np.array(list(map(len, PROMPTS)))
    assert (first.length == lengths + 1).all() and (first.prompt_length == lengths).all()
    assert not any(x.any() for x in jax.tree.leaves(first.acceptance))
    for row, prompt in enumerate(PROMPTS):
        assert first.tokens[row, : len(prompt)].tolist() == list(prompt)
        if ENDINGS["temperature"][row] == 0:
            assert first.tokens[row, len(prompt)] == TEXTS[row][0]
    assert first.live.tolist() == [budget > 1 for budget in ENDINGS["max_new_tokens"]]
    assert decode.FINISH_REASONS[first.finish_reason[6]] == "length"
    (stopped,) = decoder("standard")([PROMPTS[0]], stop_ids=[[TEXTS[0][0]]])
    assert (stopped.text, stopped.finish, stopped.rounds) == (TEXTS[0][:1], "stop", 0)


# 9. One step.


def test_loop_and_stream_call_the_same_step(monkeypatch):
    assert decode.step_jit.__wrapped__ is decode.decode_step and decode.run_jit.__wrapped__ is decode.run
    args, kwargs = decoder("autoregressive").arguments(PROMPTS)
    common = {key: kwargs[key] for key in ("drafter", "sampling")}
    state = jax.eval_shape(functools.partial(decode.prefill, **common, capacity=65, chunk=16), *args)

    def stop(*args, **kwargs):
        raise InterruptedError

    monkeypatch.setattr(decode, "decode_step", stop)
    with pytest.raises(InterruptedError):
        jax.eval_shape(functools.partial(decode.run, **common, verifier=kwargs["verifier"]), *args[:2], state)


def test_streaming_gives_what_decoding_gives():
    """Tokens, origins, counts, in a batch whose rows end at different times; blocks land once and in order."""
    rows, landed = decoder("standard").stream(PROMPTS, **ENDINGS)
    assert rows == decoder("standard")(PROMPTS, **ENDINGS)
    for row, blocks in zip(rows, landed):
        assert sum(blocks, []) == row.text
        # Prefill's token, then one block a round.
        assert len(blocks) == 1 + row.rounds
        assert all(1 <= len(block) <= common_table.GAMMA + 1 for block in blocks)
    (other,), _ = decoder("standard").stream([PROMPTS[2]], temperature=1.0, seeds=[2])
    assert other == decoder("standard")([PROMPTS[2]], temperature=1.0, seeds=[2])[0]


# The compiled loop: two buffers per layer for the whole generation. `test_common.py` reads each drafter's.


def test_freezing_finished_rows_by_selection_would_copy(monkeypatch):
    """The mistake that `copies` is for."""
    step = decode.decode_step

    def freezing(params, rng_keys, state, **kwargs):
        after = step(params, rng_keys, state, **kwargs)
        keep = lambda new, old: jnp.where(state.live[:, None, None, None], new, old)
        frozen = jax.tree.map(keep, (after.cache.keys, after.cache.values), (state.cache.keys, state.cache.values))
        return after.replace(cache=after.cache.replace(keys=frozen[0], values=frozen[1]))

    monkeypatch.setattr(decode, "decode_step", freezing)
    fresh = jax.jit(
        lambda *args, **kwargs: decode.run(*args, **kwargs), static_argnames=("drafter", "verifier"), donate_argnums=2
    )
    inside, _ = programs.copies(*decoder("autoregressive").compiled_loop(PROMPTS, run=fresh))
    assert any(" copy(" in line for line in inside)


def test_a_row_alone_copies_no_cache_either():
    alone = dataclasses.replace(decoder("autoregressive"), batch=1)
    compiled, size = alone.compiled_loop(PROMPTS[:1])
    assert programs.copies(compiled, size) == ([], [])
    assert compiled.memory_analysis().alias_size_in_bytes >= programs.cache_bytes(size)


def test_the_state_is_used_up_so_that_its_cache_is_written_in_place():
    args, kwargs = decoder("standard").arguments(PROMPTS)
    common = {key: kwargs[key] for key in ("drafter", "sampling")}
    for run in (decode.run_jit, decode.step_jit):
        state = decode.prefill_jit(*args, **common, capacity=65, chunk=16)
        buffers = jax.tree.leaves((state.cache, state.draft.cache))
        run(*args[:2], state, verifier=kwargs["verifier"], **common)
        assert all(buffer.is_deleted() for buffer in buffers)


# Other ways to call.


@pytest.mark.slow
def test_defaults_and_a_call_inside_jit():
    """The shipped chunk sizes and capacity; and `decode` as a part of a larger jitted function."""
    args, kwargs = decoder("standard").arguments(PROMPTS, **ENDINGS)
    expected = decoder("standard")(PROMPTS, **ENDINGS)
    settings = {key: kwargs[key] for key in ("drafter", "sampling", "max_new_tokens")}
    lengths = list(map(len, PROMPTS))
    output = decode.decode(*args, **settings)
    assert output.tokens.shape == (8, 256)  # the model follows 256 tokens
    assert running.split(output, lengths) == expected
    inside = jax.jit(lambda *args: decode.decode(*args, **settings))(*args)
    assert running.split(inside, lengths) == expected


@pytest.mark.slow
def test_long_texts_and_lengths_of_one_program():
    """DEV-18: 10, 50 and 200 tokens; prompts of 5, 6 and 7."""
    twin = tiny.noisy_twin()
    bound, draft = drafters.Standard(gamma=common_table.GAMMA).build(tiny.random_target(), draft=twin)
    long = running.Decoder(tiny.random_target(), bound, draft, batch=3, width=8, capacity=256, max_new=200)
    prompts = [(1, 2, 3, 4, 5), (1,) * 6, (2, 3, 4, 5, 6, 7, 8)]
    (row,) = long(prompts[:1], max_new_tokens=200)
    before = decode.prefill_jit._cache_size(), decode.run_jit._cache_size()
    for budget in (10, 50, 200):
        got = long(prompts, max_new_tokens=budget)
        assert got[0].text == row.text[:budget]
    assert (decode.prefill_jit._cache_size(), decode.run_jit._cache_size()) == before
