"""From logits to laws, and the draw."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import sampling
from tests import laws

pytestmark = pytest.mark.usefixtures("small_programs")


@jax.jit
def all_laws(logits, settings):
    """`[B, V]` laws of `[B, V]` logits, under a filter anywhere in the batch or none."""
    filtered = sampling.any_filter(settings)
    return jax.vmap(lambda row, setting: sampling.law(row, setting, filtered))(logits, settings)


def laws_of(cases):
    """Laws of a list of (probabilities, settings), padded with tokens of probability zero to one shape."""
    width, batch = max(len(probs) for probs, _ in cases), 64
    probs = np.zeros((batch, width))
    probs[:, 0] = 1
    for row, (law, _) in enumerate(cases):
        probs[row, : len(law)] = law
    names = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    settings = {
        name: [settings.get(name, neutral) for _, settings in cases] + [neutral] * (batch - len(cases))
        for name, neutral in names.items()
    }
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log(probs), jnp.float32)
    result = np.asarray(all_laws(logits, sampling.make(batch, max_new_tokens=1, **settings)))
    assert np.isfinite(result).all() and np.allclose(result.sum(axis=1), 1, atol=1e-6)
    assert (result[probs == 0] == 0).all()
    return [result[row, : len(law)] for row, (law, _) in enumerate(cases)]


# DEV-07, and DEV-06 (a), (b). Each is worked out in the comment.
EDGES = [
    # 0.5 is below 0.6, so the token that crosses it stays: 0.5 and 0.3 of 0.8.
    ([0.5, 0.3, 0.15, 0.05], {"top_p": 0.6}, [0.625, 0.375, 0, 0]),
    # The mass before the third token is 0.75 exactly, which is not below 0.75.
    ([0.5, 0.25, 0.125, 0.125], {"top_p": 0.75}, [2 / 3, 1 / 3, 0, 0]),
    ([0.5, 0.25, 0.125, 0.125], {"top_p": 1.0}, [0.5, 0.25, 0.125, 0.125]),
    # Two equal best tokens and room for one: the lower index.
    ([0.4, 0.4, 0.2], {"top_k": 1}, [1, 0, 0]),
    ([0.2, 0.4, 0.4], {"top_k": 1}, [0, 1, 0]),
    ([0.25, 0.25, 0.25, 0.25], {"top_k": 3}, [1 / 3, 1 / 3, 1 / 3, 0]),
    ([0.25, 0.25, 0.25, 0.25], {"top_p": 0.6}, [1 / 3, 1 / 3, 1 / 3, 0]),
    # Top-k first: 4, 3 and 2 of 9 are left, of which 7/9 reaches 0.75. (Cut on the full law, 0.7 would not, and 3 would
    # stay.)
    ([0.4, 0.3, 0.2, 0.1], {"top_k": 3, "top_p": 0.75}, [4 / 7, 3 / 7, 0, 0]),
    # Top-p before min-p: 0.8 is below 0.85, so three stay, and 0.12 is at least 0.2 of 0.5. (The other way round the
    # first two would weigh 0.8 / 0.92, above 0.85.)
    ([0.5, 0.3, 0.12, 0.08], {"top_p": 0.85, "min_p": 0.2}, [50 / 92, 30 / 92, 12 / 92, 0]),
    ([0.5, 0.3, 0.12, 0.08], {"min_p": 0.2}, [50 / 92, 30 / 92, 12 / 92, 0]),
    ([0.5, 0.25, 0.125, 0.125], {"min_p": 0.25}, [0.5, 0.25, 0.125, 0.125]),  # equal to the bound stays
    ([0.5, 0.3, 0.2], {"min_p": 1.0}, [1, 0, 0]),
    ([0.5, 0.3, 0.2], {"top_k": 99}, [0.5, 0.3, 0.2]),
    ([0.5, 0.3, 0.2], {"top_p": 1e-6}, [1, 0, 0]),
    ([0.5, 0.25, 0.15, 0.1], {"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
    ([0.4, 0.3, 0.2, 0.1], {"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
    # Squares of 5, 2.5, 1.5 and 1: 25, 6.25, 2.25 and 1 of 34.5.
    ([0.5, 0.25, 0.15, 0.1], {"temperature": 0.5}, [25 / 34.5, 6.25 / 34.5, 2.25 / 34.5, 1 / 34.5]),
    # Temperature comes before top-p: 25 / 34.5 alone is above 0.7.
    ([0.5, 0.25, 0.15, 0.1], {"temperature": 0.5, "top_p": 0.7}, [1, 0, 0, 0]),
    # DEV-14: greedy is one-hot, the lowest index on ties, whatever the filters say.
    ([0.4, 0.4, 0.2], {"temperature": 0}, [1, 0, 0]),
    ([0.2, 0.4, 0.4], {"temperature": 0, "top_p": 0.9, "top_k": 2, "min_p": 0.1}, [0, 1, 0]),
    # A temperature too small to divide by: finite, and all mass on the best tokens.
    ([0.5, 0.3, 0.2], {"temperature": 1e-30}, [1, 0, 0]),
    ([0.4, 0.4, 0.2], {"temperature": 1e-30}, [0.5, 0.5, 0]),
    ([0.4, 0.4, 0.2], {"temperature": 1e-30, "top_p": 0.5}, [1, 0, 0]),
]


def test_hand_worked_laws_in_one_mixed_batch():
    got = laws_of([(probs, settings) for probs, settings, _ in EDGES])
    for (probs, settings, expected), law in zip(EDGES, got):
        assert np.allclose(law, expected, atol=1e-6), (probs, settings, law)
        if settings.get("temperature") != 1e-30:
            assert np.allclose(laws.filtered(probs, **settings), expected, atol=1e-9)  # the reference of the next test


def test_laws_follow_the_plain_reference():
    rng = np.random.default_rng(0)
    cases = []
    for _ in range(64):
        probs = rng.dirichlet(np.ones(8)).round(3) + rng.integers(0, 2, 8) * 0.1  # some equal ones
        settings = {
            "temperature": rng.choice([0.3, 0.7, 1.0, 1.9]),
            "top_k": int(rng.integers(0, 9)),
            "top_p": rng.choice([1.0, rng.uniform(0.05, 1)]),
            "min_p": rng.choice([0.0, rng.uniform(0, 0.6)]),
        }
        cases.append((probs / probs.sum(), settings))
    for (probs, settings), law in zip(cases, laws_of(cases)):
        assert np.allclose(law, laws.filtered(probs, **settings), atol=1e-5), (probs, settings)


def test_a_filter_in_one_row_leaves_the_others_alone():
    logits = jax.random.normal(jax.random.key(0), (64, 8))
    plain = all_laws(logits, sampling.make(64, max_new_tokens=1, temperature=0.8))
    one = all_laws(logits, sampling.make(64, max_new_tokens=1, temperature=0.8, top_k=[2] + [0] * 63))
    # The cut renormalises, which may move the last bit.
    assert np.allclose(plain[1:], one[1:], rtol=3e-7, atol=0)
    assert np.allclose(plain[1:], jax.nn.softmax(logits[1:] / 0.8), rtol=1e-6)
    assert (np.asarray(one[0]) > 0).sum() == 2


def test_draws_follow_the_law_and_never_leave_it():
    """DEV-14: greedy and sampled rows in one batch; 1,000 greedy draws over a tie give token 0 each time."""
    law = np.array([0.0, 0.5, 0.2, 0.3, 0.0])
    settings = sampling.make(20_000, max_new_tokens=1, temperature=[0.0] * 1000 + [1.0] * 19_000)
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(law)), (20_000, 5)).at[:1000].set(jnp.array([1.0, 1, 0, 0, 0]))
    keys = jax.random.split(jax.random.key(3), 20_000)
    tokens, carried = jax.jit(sampling.draw)(keys, logits, settings)
    assert (tokens[:1000] == 0).all()
    assert laws.follows(np.bincount(tokens[1000:], minlength=5), law)
    assert np.allclose(carried[:1000], [1, 0, 0, 0, 0]) and np.allclose(carried[1000:], law, atol=1e-6)
    assert not laws.follows(np.bincount(tokens[1000:], minlength=5), [0, 0.46, 0.2, 0.34, 0])  # the test can fail

    greedy, one_hot = jax.jit(sampling.draw)(keys, logits, sampling.make(20_000, max_new_tokens=1))
    assert (greedy[:1000] == 0).all() and (greedy[1000:] == 1).all()
    assert (jnp.argmax(one_hot, axis=1) == greedy).all() and (jnp.sum(one_hot, axis=1) == 1).all()


def test_settings_are_arrays_with_one_entry_per_row():
    single = sampling.make(3, max_new_tokens=5, temperature=1, top_k=2, top_p=0.5, min_p=0.1, stop_ids=[4, 9])
    arrays = sampling.make(
        3, max_new_tokens=np.full(3, 5), temperature=np.ones(3), top_k=[2] * 3, top_p=(0.5,) * 3,
        min_p=jnp.full(3, 0.1), stop_ids=[[4, 9]] * 3,
    )  # fmt: skip
    # A number and its array form are one trace.
    assert jax.tree.map(lambda x: (type(x), x.shape, x.dtype), single) == jax.tree.map(
        lambda x: (type(x), x.shape, x.dtype), arrays
    )
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(single), jax.tree.leaves(arrays)))
    ragged = sampling.make(2, max_new_tokens=[3, 4], stop_ids=[[], [7, 8, 9]])
    none = sampling.make(2, max_new_tokens=1)
    assert ragged.stop_ids.shape == none.stop_ids.shape
    assert (none.stop_ids == -1).all() and (ragged.stop_ids[0] == -1).all()
    assert sorted(set(ragged.stop_ids[1].tolist())) == [-1, 7, 8, 9]


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"temperature": -0.1}, ["temperature", "-0.1"]),
        ({"temperature": float("nan")}, ["temperature", "nan"]),
        ({"temperature": float("inf")}, ["temperature", "inf"]),
        ({"temperature": [1.0, -2.0]}, ["temperature", "-2"]),
        ({"temperature": "warm"}, ["temperature", "warm"]),
        ({"temperature": True}, ["temperature", "True"]),
        ({"temperature": [1.0, 1.0, 1.0]}, ["temperature", "(3,)", "2"]),
        ({"top_k": -1}, ["top_k", "-1"]),
        ({"top_k": 2.5}, ["top_k", "2.5"]),
        ({"top_p": 0}, ["top_p", "0", "(0, 1]"]),
        ({"top_p": 1.01}, ["top_p", "1.01", "(0, 1]"]),
        ({"top_p": float("nan")}, ["top_p", "nan"]),
        ({"min_p": -0.5}, ["min_p", "-0.5"]),
        ({"min_p": 1.5}, ["min_p", "1.5"]),
        ({"max_new_tokens": 0}, ["max_new_tokens", "0"]),
        ({"max_new_tokens": [4, -1]}, ["max_new_tokens", "-1"]),
        ({"stop_ids": [3, -7]}, ["stop", "-7"]),
        ({"stop_ids": [[1], [2], [3]]}, ["stop_ids", "3", "2"]),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError) as error:
        sampling.make(2, **{"max_new_tokens": 1} | settings)
    assert all(word in str(error.value) for word in words), error.value
