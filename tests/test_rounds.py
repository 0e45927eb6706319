"""Rounds read off the origins, repeats found by hand, and the figures before them."""

from __future__ import annotations

import types as python_types

import numpy as np
import pytest

from jspec import decode, drafters, metrics, rounds, types
from tests import running, tiny

LETTERS = dict(zip("pfacbu", range(6)))  # prompt, prefill, accepted, corrected, bonus, undrafted


def origins(text: str) -> np.ndarray:
    return np.array([LETTERS[letter] for letter in text], np.int8)


@pytest.mark.parametrize(
    ("text", "starts", "emitted", "accepted", "rejected"),
    [
        ("f", [], [], [], []),
        ("fc", [1], [1], [0], [True]),
        ("faac", [1], [3], [2], [True]),
        ("faacbu", [1, 4, 5], [3, 1, 1], [2, 0, 0], [True, False, False]),
        ("faabca", [1, 4, 5], [3, 1, 1], [2, 0, 1], [False, True, False]),  # a stop id among the drafts
        ("faa", [1], [2], [2], [False]),
        ("uc", [1], [1], [0], [True]),  # whatever the first token is called
    ],
)
def test_rounds_of_an_answer(text, starts, emitted, accepted, rejected):
    found = rounds.of_answer(origins(text))
    assert [field.tolist() for field in found] == [starts, emitted, accepted, rejected]


@pytest.mark.parametrize(
    ("tokens", "ngram", "expected"),
    [
        ([], 2, 0),
        ([1], 2, 1),
        ([1, 2, 3, 4], 2, 4),
        ([1, 2, 3, 1, 2], 2, 3),
        ([1, 2, 3, 1, 2], 3, 5),
        ([5, 5], 1, 1),
        ([7] * 8, 8, 8),
        ([7] * 9, 8, 1),  # the two may overlap
        ([0, *range(1, 9), 9, *range(1, 9)], 8, 10),
        ([0, *range(1, 9), 9, *range(1, 8)], 8, 17),
    ],
)
def test_the_first_repeat(tokens, ngram, expected):
    assert rounds.first_repeat(tokens, ngram) == expected
    assert rounds.first_repeat(np.array(tokens, np.int32), ngram) == expected


def test_no_ngram():
    with pytest.raises(ValueError, match="ngram 0 is below 1"):
        rounds.first_repeat([1, 2], 0)


def output(rows: list[tuple[int, str, list[int]]]):
    """Rows of a prompt's length, the origins of the answer, its tokens."""
    width = max(length + len(text) for length, text, _ in rows)
    tokens, origin = np.full((len(rows), width), -1), np.zeros((len(rows), width), np.int8)
    for row, (length, text, answer) in enumerate(rows):
        tokens[row, length : length + len(text)] = answer
        origin[row, length : length + len(text)] = origins(text)
    lengths = np.array([length + len(text) for length, text, _ in rows])
    return python_types.SimpleNamespace(tokens=tokens, origin=origin, lengths=lengths), np.array([r[0] for r in rows])


def test_figures_before_the_repeat_by_hand():
    """Chains of 3, bigrams.

    The first answer repeats 1 2 behind its token 4, in its third round: that one keeps one of two accepted drafts, and
    its bonus is not reached. The second never repeats. Of the third only prefill's token stands before the repeat.
    """
    #               f  a  c | a  a  b ...
    first = ("faccaab", [1, 2, 3, 4, 5, 1, 2])
    second = ("faaabc", [1, 2, 3, 4, 5, 6])
    third = ("fac", [9, 9, 9])
    found, prompts = output([(2, *first), (5, *second), (1, *third)])
    acceptance, tokens = rounds.before_repeat(found, prompts, max_depth=3, max_new_tokens=8, ngram=2)
    assert tokens.tolist() == [5, 6, 1]
    assert acceptance.rounds.tolist() == [3, 2, 0]
    # Rounds "a c", "c", "a(a b)" and "a a a b", "c".
    assert acceptance.histogram.tolist() == [[1, 2, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]]
    # Budget left at the starts 1, 3, 4: 7, 5, 4; at 1, 5: 7, 3, so the last may offer two.
    assert acceptance.offered.tolist() == [[3, 3, 3], [2, 2, 1], [0, 0, 0]]
    # Tested: "a c" two, "c" one, the cut one its one; "a a a b" all three, "c" one.
    assert acceptance.tested.tolist() == [[3, 1, 0], [2, 1, 1], [0, 0, 0]]
    summary = metrics.summarize(acceptance, tokens)
    assert summary.tau == (4 + 5) / 5 and summary.new_tokens == 12
    assert summary.alpha == (1 + 1 + 3) / (4 + 4)
    assert summary.acceptance_by_position == (3 / 5, 1 / 5, 1 / 4)


@pytest.mark.slow
@pytest.mark.usefixtures("small_programs")
def test_without_a_repeat_it_is_what_the_loop_counted():
    """For chains, budgets and stop ids included."""
    bound, params = drafters.Standard(gamma=3).build(tiny.random_target(), draft=tiny.noisy_twin())
    decoder = running.Decoder(tiny.random_target(), bound, params)
    for settings in ({}, {"stop_ids": [[7]] * len(tiny.PROMPTS)}, {"temperature": 1.0}):
        args, kwargs = decoder.arguments(tiny.PROMPTS, **settings)
        found = decode.decode(*args, **kwargs)
        expected = types.Acceptance(**{name: np.asarray(value) for name, value in vars(found.acceptance).items()})
        prompts = np.array(list(map(len, tiny.PROMPTS)))
        host = python_types.SimpleNamespace(
            tokens=np.asarray(found.tokens), origin=np.asarray(found.origin), lengths=np.asarray(found.lengths)
        )
        acceptance, tokens = rounds.before_repeat(
            host, prompts, max_depth=3, max_new_tokens=decoder.max_new, ngram=decoder.max_new
        )
        np.testing.assert_array_equal(tokens, host.lengths - prompts)
        for name, value in vars(expected).items():
            np.testing.assert_array_equal(getattr(acceptance, name), value, err_msg=name)
        assert expected.histogram[:, 1:].any() and expected.rounds.all()
