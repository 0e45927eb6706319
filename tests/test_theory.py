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


@pytest.mark.parametrize(
    ("alpha", "gamma", "expected"),
    # Leviathan et al. 2023, table 1, c_hat = 0.
    [(0.6, 2, 1.53), (0.7, 3, 1.58), (0.8, 2, 1.23), (0.8, 5, 1.63), (0.9, 2, 1.11), (0.9, 10, 1.60)],
)
def test_operations_increase(alpha, gamma, expected):
    assert theory.operations_increase(alpha, gamma, 0.0) == pytest.approx(expected, abs=0.005)


def test_operations_by_hand():
    # Two drafts by a draft of a tenth of the size: 3 + 0.2 operations for 1 + 0.5 + 0.25 tokens.
    assert theory.operations_increase(0.5, 2, 0.1) == pytest.approx(3.2 / 1.75)
    assert theory.operations_increase(1.0, 3, 0.0) == 1  # every draft stands: no operation is wasted


def test_the_least_gain_is_reached_by_one_draft_and_passed_by_the_best():
    for alpha, c in ((0.3, 0.1), (0.6, 0.05), (0.9, 0.5)):
        floor = theory.least_gain(alpha, c)
        assert floor == pytest.approx((1 + alpha) / (1 + c))
        assert theory.speedup(alpha, theory.best_gamma(alpha, c), c) >= floor > 1


def test_an_oracle_bounds_every_gamma():
    for alpha in (0.2, 0.6, 0.9):
        tokens = [theory.expected_tokens(alpha, gamma) for gamma in (1, 5, 200)]
        assert tokens[0] < tokens[1] < theory.oracle_tokens(alpha) == pytest.approx(tokens[2], rel=1e-6)
        assert theory.oracle_speedup(alpha, 0.0) == pytest.approx(theory.oracle_tokens(alpha))
        for c in (0.02, 0.1):
            assert theory.oracle_speedup(alpha, c) > theory.speedup(alpha, theory.best_gamma(alpha, c), c)
    assert theory.oracle_tokens(1.0) == theory.oracle_speedup(1.0, 0.0) == np.inf
    # The mean of drawn rounds: each drafts just what stands, at c a draft.
    stands = np.random.default_rng(0).geometric(0.3, 200_000) - 1  # alpha 0.7
    drawn = (stands + 1).sum() / (1 + 0.1 * stands).sum()
    assert drawn == pytest.approx(theory.oracle_speedup(0.7, 0.1), rel=0.01)


def test_oracle_gain_is_about_60_percent():
    """Leviathan et al. 2023, section 3.5: up to about 60% over the best fixed gamma, for the c of their table 4."""
    gains = [
        theory.oracle_speedup(alpha, c) / theory.speedup(alpha, theory.best_gamma(alpha, c, 256), c)
        for alpha in np.arange(0.3, 0.99, 0.01)
        for c in (0.02, 0.04, 0.11)
    ]
    assert 1.5 < max(gains) < 1.6


def test_implied_c_inverts_the_speedup():
    for alpha, gamma, c in ((0.75, 7, 0.02), (0.5, 1, 0.3), (0.9, 3, 0.0)):
        assert theory.implied_c(theory.speedup(alpha, gamma, c), alpha, gamma) == pytest.approx(c, abs=1e-12)
    assert theory.implied_c(3.0, 0.5, 2) < 0  # 1.75 tokens cannot be 3 times as fast
    with pytest.raises(ValueError, match="gamma 0 is below 1"):
        theory.implied_c(1.0, 0.5, 0)
    with pytest.raises(ValueError, match="speedup 0.0 is not above 0"):
        theory.implied_c(0.0, 0.5, 1)


def test_expected_calls_of_a_short_answer():
    # Three tokens, gamma 2. Two drafts, then at most one: with a = 1/2 the first call emits 1, 2 or 3 tokens with
    # probability 1/2, 1/4, 1/4; two tokens left take one call or two with equal chance, one token takes one.
    assert theory.expected_calls(0.5, 2, 1) == 1
    assert theory.expected_calls(0.5, 2, 2) == pytest.approx(1 + 0.5)
    assert theory.expected_calls(0.5, 2, 3) == pytest.approx(1 + 0.5 * 1.5 + 0.25 * 1)
    assert theory.expected_calls(0.3, 0, 7) == theory.expected_calls(0.0, 4, 7) == 7
    assert theory.expected_calls(1.0, 3, 8) == 2
    assert theory.expected_calls(0.5, 2, 0) == 0
    for alpha, gamma in ((0.6, 2), (0.9, 8)):
        many = 20_000
        assert many / theory.expected_calls(alpha, gamma, many) == pytest.approx(
            theory.expected_tokens(alpha, gamma), rel=5e-4
        )


def test_tau_overhead_and_speedup():
    # Medusa, table 1, Zephyr-7B: 3.14 / 1.18 = 2.66.
    assert theory.speedup_of_rounds(3.14, 1.18) == pytest.approx(2.66, abs=0.005)
    assert theory.implied_overhead(3.14, theory.speedup_of_rounds(3.14, 1.18)) == pytest.approx(1.18)
    tau = theory.expected_tokens(0.7, 4)
    assert theory.implied_overhead(tau, theory.speedup(0.7, 4, 0.1)) == pytest.approx(4 * 0.1 + 1)


def test_lookahead():
    for length in (1, 3, 6):
        assert theory.lookahead_tokens(0.6, length, 1) == pytest.approx(theory.expected_tokens(0.6, length))
    # Two guesses of two tokens: 1 + (1 - 1/4) + (1 - 9/16).
    assert theory.lookahead_tokens(0.5, 2, 2) == pytest.approx(1 + 3 / 4 + 7 / 16)
    assert theory.lookahead_compression(3.0, 1) == 3 and theory.lookahead_compression(3.0, 4) == 1.5
    # Fu et al. 2024, table 4: 120, 80 and 56 times the tokens with G = W and N = 5.
    assert [theory.lookahead_nodes(w, 5, w) for w in (15, 10, 7)] == [120, 80, 56]
