"""Prompt lookup: what may match (DEV-11), and what becomes of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import drafters
from jspec.drafters import prompt_lookup
from tests import checkpoints, reference, running, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

SLOTS = 24


@functools.cache
def lookups(settings: drafters.PromptLookup):
    return jax.jit(jax.vmap(lambda tokens, length: prompt_lookup.lookup(tokens, length, settings)))


def look_up(texts, **settings):
    """Drafts of each text. What stands behind a text would match if it were read."""
    padded = np.full((64, SLOTS), 1)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
        padded[row, len(text) :] = text[-1] if text else 0
    lengths = np.array([len(text) for text in texts] + [1] * (64 - len(texts)))
    drafts, valid = lookups(drafters.PromptLookup(**settings))(jnp.asarray(padded), jnp.asarray(lengths))
    drafts, valid = np.asarray(drafts), np.asarray(valid)
    assert (valid[:, 1:] <= valid[:, :-1]).all()  # drafts are left-aligned
    return [row[ok].tolist() for row, ok in zip(drafts, valid)][: len(texts)]


TEXT = [21, 4, 9, 30, 8, 17, 4, 9]
TWICE = [4, 9, 30, 5, 4, 9, 31, 6, 4, 9]


def test_hand_worked_matches():
    # (4, 9) stands earlier; what follows it ends with the text, and nothing is padded.
    assert look_up([TEXT], gamma=3, max_ngram=2) == [[30, 8, 17]]
    # The tail does not match itself, a single token has nothing before it, and an empty text has no tail.
    assert look_up([TEXT, [1, 2, 3, 4], [9], [], [7, 7, 7]], gamma=10, max_ngram=2) == [
        [30, 8, 17, 4, 9],
        [],
        [],
        [],
        [7],
    ]
    # The longest suffix wins over a later, shorter one: (1, 2) before 5, then 2 alone before 6.
    assert look_up([[1, 2, 5, 2, 6, 1, 2]], gamma=1, max_ngram=2) == [[5]]
    assert look_up([[1, 2, 5, 2, 6, 1, 2]], gamma=1, max_ngram=1) == [[6]]
    assert look_up([[3, 5, 2, 3]], gamma=2, min_ngram=2, max_ngram=3) == [[]]


def test_of_several_places_the_most_recent_unless_told_otherwise():
    assert look_up([TWICE], gamma=2) == [[31, 6]] == look_up([TWICE], gamma=2, prefer="recent")
    assert look_up([TWICE], gamma=2, prefer="first") == [[30, 5]]


@pytest.mark.parametrize(
    "settings", [{"gamma": 8}, {"gamma": 3, "prefer": "first", "min_ngram": 2, "max_ngram": 4}], ids=str
)
def test_brute_force_over_all_places(settings):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 3, rng.integers(1, SLOTS + 1)).tolist() for _ in range(64)]
    got = look_up(texts, **settings)
    assert got == [reference.lookup(text, **settings) for text in texts]
    assert len({len(drafts) for drafts in got}) > 3


def test_texts_of_a_known_chain():
    """DEV-10 and DEV-11: a cycle is found, the budget is kept, and a wrong first draft is noticed."""
    target = tiny.bigram(tiny.successor({13: 11}), checkpoints.RANDOM)  # shares fixture R's program
    decode = running.Decoder(target, *drafters.PromptLookup(gamma=4).build(target))
    cycle = [11, 12, 13, 11, 12]
    prompts = [cycle, cycle, [1, 1, 1], [0]]
    rows = decode(prompts, max_new_tokens=[2, 16, 3, 6])
    assert [row.text for row in rows] == [[13, 11], [13, 11, 12] * 5 + [13], [2, 3, 4], [1, 2, 3, 4, 5, 6]]
    for row, prompt, budget in zip(rows, prompts, [2, 16, 3, 6]):
        walked = reference.speculate(
            prompt, row.text, lambda text: reference.chain(reference.lookup(text, 4)), 4, budget
        )
        assert (row.accepted, row.drafted) == (walked.accepted, walked.drafted)
    # The first row had one token of budget left behind prefill's 13, so nothing was offered.
    assert (rows[0].drafted, rows[0].origins) == (0, ["prefill", "undrafted"])
    # Behind 11, 12, 13, 11, 12, 13 the last three tokens stand once more, with 11, 12, 13 behind them: all pass, and
    # the bonus is 11. Now 13, 11 and 12, 13, 11 stand before; most recent are those three places back: 12, 13, 11
    # again, and so on.
    assert rows[1].accepted == [3, 3, 3, 2]
    # [1, 1, 1] proposes 1; prefill says 2, behind which nothing is known.
    assert rows[2].accepted == [0, 0] and rows[2].origins == ["prefill", "undrafted", "undrafted"]


@pytest.mark.slow
def test_a_single_draft():
    """DEV-17: K = 1; prompts of length 1 are among them."""
    target = tiny.random_target()
    rows = running.Decoder(target, *drafters.PromptLookup(gamma=1).build(target))(tiny.PROMPTS)
    assert [row.text for row in rows] == [tiny.greedy(prompt) for prompt in tiny.PROMPTS]


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"gamma": -1}, "gamma -1"),
        ({"min_ngram": 0}, "min_ngram 0"),
        ({"min_ngram": 4}, "max_ngram 3|min_ngram 4"),
        ({"max_ngram": 0}, "max_ngram 0"),
    ],
)
def test_bad_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        drafters.PromptLookup(**settings)


def test_the_longest_suffix_of_any_length():
    """`max_ngram: null` against brute force over texts that repeat themselves."""
    rng = np.random.default_rng(4)
    texts = [rng.integers(0, 3, rng.integers(1, SLOTS)).tolist() for _ in range(60)]
    texts += [[5, 6] * 10, [8] * 20, [1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5], [3]]
    for prefer in ("recent", "first"):
        got = look_up(texts, gamma=4, max_ngram=None, prefer=prefer)
        assert got == [reference.lookup(text, 4, max_ngram=SLOTS, prefer=prefer) for text in texts]
    got = look_up(texts, gamma=4, max_ngram=None, min_ngram=5)
    assert got == [reference.lookup(text, 4, max_ngram=SLOTS, min_ngram=5) for text in texts]
