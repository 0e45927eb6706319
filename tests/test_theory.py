"""Formulas against published and hand-worked numbers."""

import numpy as np
import pytest

from jspec import theory


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "expected"),
    [
        # Leviathan et al. 2023, table 1: operations left out, speedup at c = 0.
        (0.6, 2, 0.0, 1.96),
        (0.7, 3, 0.0, 2.53),
        (0.8, 2, 0.0, 2.44),
        (0.8, 5, 0.0, 3.69),
        (0.9, 2, 0.0, 2.71),
        (0.9, 10, 0.0, 6.86),
        (1.0, 4, 0.0, 5.0),
        (0.0, 4, 0.25, 0.5),
        (0.5, 1, 0.5, 1.0),  # alpha = c: neither gain nor loss
    ],
)
def test_wall_time_improvement(alpha, gamma, c, expected):
    assert theory.speedup(alpha, gamma, c) == pytest.approx(expected, abs=0.005)


def test_expected_tokens_is_the_mean_of_simulated_rounds():
    alpha, gamma = 0.7, 4
    matches = np.random.default_rng(0).random((20_000, gamma)) < alpha
    accepted = np.logical_and.accumulate(matches, axis=1)
    assert 1 + accepted.sum() / len(matches) == pytest.approx(theory.expected_tokens(alpha, gamma), rel=0.01)
    np.testing.assert_allclose(theory.tokens_by_depth(accepted.mean(axis=0))[-1], 1 + accepted.sum(axis=1).mean())


def test_acceptance_is_the_inverse_of_expected_tokens():
    for alpha in (0.0, 0.31, 0.75, 1.0):
        assert theory.acceptance(theory.expected_tokens(alpha, 5), 5) == pytest.approx(alpha, abs=1e-9)
    for tokens in (0.5, 6.5, float("nan")):
        with pytest.raises(ValueError, match=r"tokens a round are outside \[1, 6\]"):
            theory.acceptance(tokens, 5)


def test_best_gamma_pays_exactly_when_alpha_is_above_c():
    for alpha in (0.2, 0.5, 0.8):
        assert theory.best_gamma(alpha, alpha + 0.01) == 0
        best = theory.best_gamma(alpha, alpha - 0.05)
        assert best > 0
        # Corollary 3.9: the gain is at least that of one draft.
        c = alpha - 0.05
        assert theory.speedup(alpha, best, c) >= (1 + alpha) / (1 + c) - 1e-12
    assert theory.best_gamma(1.0, 0.1, max_gamma=7) == 7


def test_by_depth_agrees_with_equal_acceptance_and_free_nodes():
    alpha, c, depth = 0.8, 0.1, 12
    acceptance = alpha ** np.arange(1, depth + 1)
    found = theory.speedup_by_depth(acceptance, 2.0, [2.0] * depth, 2.0 * c * np.arange(1, depth + 1))
    np.testing.assert_allclose(found, [theory.speedup(alpha, gamma, c) for gamma in range(depth + 1)])
    assert theory.best_depth(found) == theory.best_gamma(alpha, c, max_gamma=depth)


def test_by_depth_by_hand():
    # 1.5, 1.75 and again 1.75 tokens; rounds of 1.5, 2.5 and 3.5 steps.
    found = theory.speedup_by_depth([0.5, 0.25, float("nan")], 10.0, [12.0, 18.0, 24.0], [3.0, 7.0, 11.0])
    np.testing.assert_allclose(found, [1, 1.0, 0.7, 0.5])
    assert theory.best_depth(found) == 0  # a tie goes to the shallower
    with pytest.raises(ValueError, match="2 acceptances, 1 verify and 2 draft times"):
        theory.speedup_by_depth([0.5, 0.2], 1.0, [1.0], [1.0, 1.0])
