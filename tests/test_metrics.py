import dataclasses
import math

import jax
import numpy as np
import pytest

from jspec import metrics, types

# DEV-26: per-position matches of four rounds.
MATCHES = np.array([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]], bool)
DEV_26 = {
    "acceptance_histogram": (1, 1, 1, 0, 1),
    "accepted_per_drafted": 7 / 16,
    "mean_accepted": 1.75,
    "tau": 2.75,
    "alpha": 7 / 10,  # tested: 2 + 4 + 1 + 3
    "acceptance_by_position": (0.75, 0.5, 0.25, 0.25),
    "conditional_acceptance_by_position": (0.75, 2 / 3, 0.5, 1.0),
    "offered": (4, 4, 4, 4),
    "tested": (4, 3, 2, 1),
}


def count(matches, offered=None, stop_at_mismatch=True):
    """The statistics of each round as a row of its own, by plain loops. Without the stop: the fault of DEV-26."""
    num_rounds, gamma = matches.shape
    offered = [gamma] * num_rounds if offered is None else offered
    rows = []
    for row, length in zip(matches, offered, strict=True):
        tested, accepted = [0] * gamma, 0
        for i in range(length):
            tested[i] = 1
            accepted += bool(row[i])
            if stop_at_mismatch and not row[i]:
                break
        histogram = [int(a == accepted) for a in range(gamma + 1)]
        rows.append((1, histogram, [int(i < length) for i in range(gamma)], tested, length))
    return types.Acceptance(*map(np.array, zip(*rows, strict=True)))


def check_dev_26(summary):
    got = {name: getattr(summary, name) for name in DEV_26}
    for name, expected in DEV_26.items():
        assert got[name] == pytest.approx(expected), name


@pytest.mark.parametrize("to_array", [np.asarray, jax.numpy.asarray])
def test_dev_26_acceptance_numbers(to_array):
    per_row = jax.tree.map(to_array, count(MATCHES))
    summed = jax.tree.map(lambda x: to_array(np.sum(x, axis=0)), count(MATCHES))
    # As four rows, each emits prefill's token, its drafts and one more; as one row, prefill emits once.
    as_rows = metrics.summarize(per_row, to_array([3, 6, 2, 4]))
    as_one = metrics.summarize(summed, to_array(12))
    check_dev_26(as_rows)
    check_dev_26(as_one)
    assert (as_rows.new_tokens, as_one.new_tokens, as_rows.target_calls) == (15, 12, 4)


def test_dev_26_counting_behind_a_mismatch_fails():
    wrong = metrics.summarize(count(MATCHES, stop_at_mismatch=False), np.array([4, 6, 2, 4]))
    assert wrong.accepted_per_drafted == 8 / 16  # 2 + 4 + 0 + 2 matches, wherever they stand
    with pytest.raises(AssertionError):
        check_dev_26(wrong)


def test_dev_26_a_short_last_round_counts_its_real_length():
    offered = [4, 4, 4, 1]
    summary = metrics.summarize(count(MATCHES, offered), np.array([3, 6, 2, 3]))
    assert summary.accepted_per_drafted == 6 / 13
    assert summary.acceptance_by_position == pytest.approx((3 / 4, 1 / 3, 1 / 3, 1 / 3))
    assert summary.conditional_acceptance_by_position == pytest.approx((3 / 4, 1 / 2, 1.0, 1.0))
    assert (summary.offered, summary.tested) == ((4, 3, 3, 3), (4, 2, 1, 1))
    assert summary.alpha == 6 / 8


def test_from_matches_agrees_with_the_loop():
    rng = np.random.default_rng(0)
    matches, offered = rng.random((50, 6)) < 0.7, rng.integers(7, size=50)
    for lengths in (None, offered):
        loop = jax.tree.map(lambda x: x.sum(axis=0), count(matches, lengths))
        jax.tree.map(np.testing.assert_array_equal, metrics.from_matches(matches, lengths), loop)
    check_dev_26(metrics.summarize(metrics.from_matches(MATCHES), 12))


def test_a_stop_token_inside_an_accepted_block_earns_no_extra_token():
    summary = metrics.summarize(metrics.from_matches([[1, 1, 0, 0]]), [3])  # prefill's, and two drafts, the last a stop
    assert (summary.tau, summary.mean_accepted) == (2.0, 2.0)


def test_autoregressive_has_tau_one_and_no_alpha():
    none = np.zeros((2, 0), int)
    acceptance = types.Acceptance(np.array([9, 4]), np.array([[9], [4]]), none, none, np.array([0, 0]))
    summary = metrics.summarize(acceptance, [10, 5])
    assert (summary.tau, summary.target_calls, summary.mean_accepted) == (1.0, 13, 0.0)
    assert math.isnan(summary.alpha) and math.isnan(summary.accepted_per_drafted)
    assert summary.acceptance_histogram == (13,) and summary.acceptance_by_position == ()


def test_rows_that_ended_at_prefill_count_for_nothing():
    acceptance = jax.tree.map(lambda x: np.concatenate([x, 0 * x[:2]]), count(MATCHES))
    check_dev_26(metrics.summarize(acceptance, [3, 6, 2, 4, 1, 0]))
    nothing = metrics.summarize(jax.tree.map(lambda x: 0 * x[:1], count(MATCHES)), [1])
    assert nothing.target_calls == 0 and math.isnan(nothing.tau)


@pytest.mark.parametrize(
    ("changes", "new_tokens", "message"),
    [
        ({"rounds": np.array([2, 1, 1, 1])}, [3, 6, 2, 4], "histogram counts 4 rounds, not 5"),
        ({"tested": 0 * MATCHES}, [3, 6, 2, 4], "each must bound the last"),
        ({"offered": 0 * MATCHES}, [3, 6, 2, 4], "each must bound the last"),
        ({}, [4, 6, 2, 4], "12 tokens after prefill's first do not fit 4 rounds that accepted 7 drafts"),
        ({}, [1, 6, 1, 1], "5 tokens after prefill's first do not fit"),
    ],
)
def test_counts_that_contradict_each_other(changes, new_tokens, message):
    with pytest.raises(ValueError, match=message):
        metrics.summarize(dataclasses.replace(count(MATCHES), **changes), new_tokens)


def test_what_others_call_acceptance_length_follows_from_ours():
    # A round without a draft (prompt lookup found no match) and four of DEV-26: 7 drafts accepted in 5 target calls.
    summary = metrics.summarize(count(np.vstack([MATCHES, MATCHES[2:3]]), [4, 4, 4, 4, 0]), [3, 6, 2, 4, 3 - 1])
    assert summary.tau == 12 / 5  # EAGLE's, Medusa's and Spec-Bench's too
    assert 1 + summary.mean_accepted == summary.tau
    vllm_drafts, vllm_accepted, vllm_drafted = 4, 7, 16  # what its counters would say
    assert summary.offered[0] == vllm_drafts
    mean_acceptance_length = 1 + vllm_accepted / vllm_drafts
    assert mean_acceptance_length == 1 + summary.mean_accepted * summary.target_calls / summary.offered[0]
    assert vllm_accepted / vllm_drafted == summary.accepted_per_drafted
    # A stop id among the drafts: they were accepted, yet nothing came behind them.
    ended = metrics.summarize(metrics.from_matches([[1, 1, 0, 0]]), [3])
    assert (ended.tau, 1 + ended.mean_accepted) == (2.0, 3.0)


def test_intervals_of_tau_and_alpha_are_over_prompts():
    rows = count(MATCHES)
    tau, alpha = metrics.acceptance_intervals(rows, np.array([3, 6, 2, 4]))
    # Each prompt made one call: tau is the mean of 2, 5, 1, 3, alpha of sums over (1, 4, 0, 2) / (2, 4, 1, 3).
    assert tau == metrics.ratio_interval([2, 5, 1, 3], [1, 1, 1, 1])
    assert alpha == metrics.ratio_interval([1, 4, 0, 2], [2, 4, 1, 3])
    assert 1 <= tau[0] < 2.75 < tau[1] <= 5 and 0 <= alpha[0] < 0.7 < alpha[1] <= 1
    same = jax.tree.map(lambda x: np.repeat(x[1:2], 5, axis=0), rows)
    assert metrics.acceptance_intervals(same, np.full(5, 6)) == ((5.0, 5.0), (1.0, 1.0))


def test_autoregressive_decoding_has_no_interval_of_alpha():
    none = np.zeros((2, 0), int)
    acceptance = types.Acceptance(np.array([9, 4]), np.array([[9], [4]]), none, none, np.array([0, 0]))
    tau, alpha = metrics.acceptance_intervals(acceptance, np.array([10, 5]))
    assert tau == (1.0, 1.0) and np.isnan(alpha).all()


def test_inter_token_latency_is_linear_between_samples():
    gaps = np.array([10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110]) / 1e3
    shuffled = np.random.default_rng(0).permutation(gaps)
    # Eleven samples: the quantiles 0, 0.1, .. 1 are the samples, 0.99 is nine tenths of the way from 100 to 110.
    assert metrics.inter_token_latency(shuffled) == pytest.approx((60, 100, 109))
    assert metrics.inter_token_latency([0.025]) == pytest.approx((25, 25, 25))
    assert np.isnan(metrics.inter_token_latency([])).all()


def test_deliveries_of_a_call_are_its_rounds_of_equal_length():
    # Two rows decoded together for 1.2 s: the first took 6 rounds of 0.2 s, the second had ended after 2.
    assert metrics.equal_gaps(np.array([6, 2]), 1.2) == pytest.approx([0.2] * 8)
    assert metrics.equal_gaps(np.array([0]), 0.1).shape == (0,)
    # Its mean is tau times TPOT: 3 tokens a round.
    gaps = metrics.equal_gaps(np.array([6]), 1.2)
    assert gaps.mean() * 1e3 == pytest.approx(3 * metrics.time_per_token(gaps, [18]))


def compare(baseline, method, compiling_calls=0, **settings):
    calls = [metrics.Calls(*map(np.array, x)) for x in (baseline, method)]
    return metrics.speedup(*calls, compiling_calls=compiling_calls, **settings)


def test_dev_27a_the_compiling_call_enters_no_number():
    baseline = [100] * 4, [8.00, 1.02, 1.00, 0.98]
    method = [100] * 4, [12.00, 0.52, 0.50, 0.51]
    assert compare(baseline, method, compiling_calls=1).ratio_of_totals == pytest.approx(1.961, abs=5e-4)
    assert compare(baseline, method, compiling_calls=0).ratio_of_totals == pytest.approx(0.813, abs=5e-4)
    with pytest.raises(TypeError, match="compiling_calls"):  # nobody can forget to say
        metrics.speedup(metrics.Calls(*baseline), metrics.Calls(*method))
    rate = metrics.tokens_per_second(metrics.Calls(*map(np.array, baseline)), compiling_calls=1)
    assert rate == pytest.approx(100.0)


def test_dev_27b_tokens_per_second_are_compared_not_seconds():
    result = compare(([100], [1.0]), ([80], [0.5]))
    assert result.ratio_of_totals == result.mean_of_ratios == result.median_of_ratios == pytest.approx(1.6)


def test_dev_27c_both_averages_are_there_by_name():
    result = compare(([100, 10], [1.0, 1.0]), ([100, 10], [0.5, 1.0]))
    assert result.ratio_of_totals == pytest.approx(4 / 3)
    assert result.mean_of_ratios == pytest.approx(1.5)


def test_time_per_token_is_a_requests_own():
    # Side by side for 1.2 s: 18 tokens in 6 rounds, 2 tokens in 2.
    gaps = metrics.equal_gaps(np.array([6, 2]), 1.2)
    assert metrics.time_per_token(gaps, [18, 2]) == pytest.approx(1000 * (1.2 + 0.4) / 20)
    assert math.isnan(metrics.time_per_token(np.zeros(0), [0]))


def test_median_shrugs_off_a_disturbed_call():
    result = compare(([10] * 5, [1.0] * 5), ([10] * 5, [0.5, 0.5, 0.5, 0.5, 50.0]))
    assert result.median_of_ratios == pytest.approx(2.0) and result.ratio_of_totals < 0.1


def test_interval_keeps_pairs_together():
    seconds = np.random.default_rng(0).uniform(0.1, 10.0, 20)  # prompts differ hundredfold, the ratio not at all
    result = compare(([10] * 20, seconds), ([10] * 20, seconds / 2))
    assert result.interval == pytest.approx((2.0, 2.0))


def test_interval_is_seeded_holds_the_estimate_and_grows_with_confidence():
    rng = np.random.default_rng(1)
    data = ([10] * 12, rng.uniform(1, 2, 12)), ([10] * 12, rng.uniform(0.5, 1.5, 12))
    first = compare(*data, seed=3)
    assert first == compare(*data, seed=3) != compare(*data, seed=4)
    assert first.interval[0] < first.ratio_of_totals < first.interval[1]
    wide = compare(*data, seed=3, confidence=0.99).interval
    assert wide[0] < first.interval[0] and wide[1] > first.interval[1]


def test_one_prompt_has_no_interval():
    assert np.isnan(compare(([10], [1.0]), ([10], [0.5])).interval).all()


def test_ratio_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for i in range(200):
        calls = rng.integers(5, 30, 40)
        low, high = metrics.ratio_interval(rng.poisson(2.5 * calls), calls, confidence=0.9, resamples=400, seed=i)
        hits += low <= 2.5 <= high
    # 200 trials of 0.9 have a standard error of 0.021; the percentile bootstrap falls a little short with 40 prompts.
    assert 0.82 <= hits / 200 <= 0.97


@pytest.mark.parametrize(
    ("baseline", "method", "compiling_calls", "message"),
    [
        (([1, 1], [1, 1]), ([1], [1]), 0, "2 baseline calls cannot be paired with 1"),
        (([1], [1]), ([1], [1]), 1, "0 token counts and 0 times are left after 1 calls"),
        (([1, 2], [1]), ([1], [1]), 0, "2 token counts and 1 times"),
        (([1], [1]), ([0], [1]), 0, "positive"),
        (([1], [1]), ([1], [0.0]), 0, "positive"),
    ],
)
def test_calls_that_cannot_be_compared(baseline, method, compiling_calls, message):
    with pytest.raises(ValueError, match=message):
        compare(baseline, method, compiling_calls)


def test_expected_speedup():
    assert metrics.expected_speedup(3.0, autoregressive_ms=20.0, verify_ms=25.0, draft_ms=15.0) == pytest.approx(1.5)
