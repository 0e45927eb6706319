"""Exact acceptance against hand-worked pairs and against brute force over texts."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from jspec import exact_acceptance, theory
from tests import laws

TARGET, DRAFT = [Fraction(1, 3), Fraction(2, 3)], [Fraction(2, 3), Fraction(1, 3)]


def fractions(rng, size):
    rows = rng.integers(1, 9, (size, size))
    return [[Fraction(int(x), int(row.sum())) for x in row] for row in rows]


def test_the_toy_pair():
    """Sun et al. 2024: 10/9 drafts token by token, 11/9 as a block, at most 12/9."""
    assert sum(exact_acceptance.token_acceptance(TARGET, DRAFT, 2)) == Fraction(10, 9)
    assert sum(exact_acceptance.block_acceptance(TARGET, DRAFT, 2)) == Fraction(11, 9)
    assert sum(exact_acceptance.block_bound(TARGET, DRAFT, 2)) == Fraction(12, 9)


def test_against_every_text():
    rng = np.random.default_rng(1)
    for start in range(3):
        target, draft = fractions(rng, 3), fractions(rng, 3)
        gamma = 4
        token, block, bound = ([Fraction(0)] * gamma for _ in range(3))
        for text in itertools.product(range(3), repeat=gamma):
            pairs = [(target[a][b], draft[a][b]) for a, b in zip((start, *text), text)]
            drawn, share, stands = math.prod(q for _, q in pairs), Fraction(1), Fraction(1)
            for i, (p, q) in enumerate(pairs):
                share, stands = min(1, share * p / q), stands * min(1, p / q)
                token[i] += drawn * stands
                block[i] += drawn * share
                before = pairs[: i + 1]
                rest = 3 ** (gamma - i - 1)  # texts that share this beginning
                bound[i] += min(math.prod(p for p, _ in before), math.prod(q for _, q in before)) / rest
        assert exact_acceptance.token_acceptance(target, draft, gamma, start) == token
        assert exact_acceptance.block_acceptance(target, draft, gamma, start) == block
        assert exact_acceptance.block_bound(target, draft, gamma, start) == bound
        assert token[0] == block[0] == bound[0]  # one draft: nothing to gain
        assert all(a <= b <= c for a, b, c in zip(token, block, bound))
        accepted = laws.accepted_law(*(np.array(x, float) for x in (target, draft)), start, gamma)
        np.testing.assert_allclose([float(x) for x in token], accepted[::-1].cumsum()[::-1][1:], atol=1e-12)


def test_without_memory_it_is_alpha_to_the_depth():
    target, draft = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    alpha = sum(map(min, zip(target, draft)))
    acceptance = exact_acceptance.token_acceptance(target, draft, 6)
    tokens = theory.tokens_by_depth(acceptance)
    np.testing.assert_allclose(tokens, [theory.expected_tokens(alpha, gamma) for gamma in range(7)])
    assert exact_acceptance.block_acceptance(target, target, 3) == pytest.approx([1, 1, 1])
    assert exact_acceptance.token_acceptance([1, 0], [0, 1], 2) == [0, 0]  # nothing in common
    assert exact_acceptance.block_acceptance([1, 0], [0, 1], 2) == [0, 0]


def test_bad_laws():
    for target, draft, gamma, words in (
        (TARGET, DRAFT, 0, "gamma 0 is below 1"),
        (TARGET, [0.5, 0.4], 1, "draft: .* is no law over 2 tokens"),
        ([1.5, -0.5], DRAFT, 1, "target: .* is no law over 2 tokens"),
        ([[1.0], [0.5, 0.5]], DRAFT, 1, "target: .* is no law over 2 tokens"),
        (TARGET, [1.0], 1, "target has 2 tokens, draft 1"),
    ):
        with pytest.raises(ValueError, match=words):
            exact_acceptance.block_acceptance(target, draft, gamma)
