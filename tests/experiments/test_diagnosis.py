"""Findings and verdicts on numbers made up for them."""

import dataclasses
import math

import numpy as np
import pytest

from experiments import diagnosis
from jspec import costs, metrics

CHAIN = diagnosis.Method(by_call=True, chain=True, learned=True, words="the draft (d.gguf)")
LOOKUP = diagnosis.Method(by_call=False, chain=True, learned=False, words="prompt_lookup")
PASSES = {1: 10e-3, 2: 12e-3, 4: 16e-3, 8: 24e-3}
STEP = 10e-3


def summary(matches) -> metrics.Summary:
    """Of one row whose rounds compared drafts like this."""
    acceptance = metrics.from_matches(np.array(matches, bool))
    accepted = int(acceptance.histogram @ np.arange(len(acceptance.histogram)))
    return metrics.summarize(acceptance, np.array(1 + accepted + int(acceptance.rounds)))


# Of ten rounds nine accept the first draft, eight the second, four the third and none the fourth.
FADING = summary([[1, 1, 1, 0]] * 4 + [[1, 1, 0, 0]] * 4 + [[1, 0, 0, 0]] + [[0, 0, 0, 0]])


def forecast(method=CHAIN, found=FADING, verify=18e-3, draft=4e-3, nodes=(1, 2, 3, 4, 5), passes=PASSES):
    return diagnosis.forecast(method, found, STEP, costs.Costs(verify, draft), passes, nodes)


def test_the_best_gamma_by_hand():
    expected = forecast()  # at 5 nodes the bare pass takes 18 ms too: the table of passes serves as it is
    np.testing.assert_allclose(expected.tokens, [1, 1.9, 2.7, 3.1, 3.1])
    np.testing.assert_allclose(expected.verify, [1, 1.2, 1.4, 1.6, 1.8])
    np.testing.assert_allclose(expected.draft, [0, 0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(expected.speedups, [1, 1.9 / 1.3, 2.7 / 1.6, 3.1 / 1.9, 3.1 / 2.2])
    assert (expected.best, expected.depth) == (2, 4) and diagnosis.pays(expected, None)
    text = diagnosis.verdict(CHAIN, expected, None, "cpu", [])
    assert text.startswith("Speculation pays on cpu: at gamma 4 a round emits 3.10 tokens and costs 2.20")
    assert "Best is gamma 2, which promises 1.69." in text
    # What verdict, commit and update cost beside the bare pass is kept in proportion.
    np.testing.assert_allclose(forecast(verify=36e-3).verify, [1, 2.4, 2.8, 3.2, 3.6])
    assert diagnosis.table(CHAIN, expected)[2] == ["1", "2", "0.90", "1.90", "1.20", "0.10", "1.46"]


def test_drafts_of_one_call_cost_the_same_however_deep():
    expected = forecast(LOOKUP)
    np.testing.assert_allclose(expected.draft, [0, 0.4, 0.4, 0.4, 0.4])
    assert (LOOKUP.unit, CHAIN.unit) == ("depth", "gamma")
    assert dataclasses.replace(CHAIN, chain=False).unit == "depth"


def test_rounds_that_found_nothing_to_propose_count():
    # Two rounds in four find nothing; the others accept both drafts.
    acceptance = metrics.from_matches(np.ones((4, 2), bool), offered=np.array([2, 2, 0, 0]))
    found = metrics.summarize(acceptance, np.array(1 + 4 + 4))
    expected = forecast(LOOKUP, found, nodes=(1, 2, 3))
    assert found.acceptance_by_position == (1.0, 1.0)
    np.testing.assert_allclose(expected.acceptance, [0.5, 0.5])
    assert expected.tokens[-1] == found.tau == 2.0


def test_a_draft_that_nothing_accepts_is_taken_for_a_wrong_one():
    rejected = summary([[1, 0, 0, 0]] + [[0, 0, 0, 0]] * 19)
    expected = forecast(found=rejected, verify=10.2e-3, draft=1e-3, passes={1: 10e-3, 5: 10.2e-3})
    finding = diagnosis.acceptance(CHAIN, rejected, expected)
    assert finding.status == "warning" and "trained for another one or an older version" in finding.text
    text = diagnosis.verdict(CHAIN, expected, None, "cpu", [finding])
    assert "does not pay" in text and "Best is gamma 1, which promises 1.02: no more than noise." in text
    assert text.count("about what chance gives") == 1
    assert "little to offer" in diagnosis.acceptance(LOOKUP, rejected, expected).text
    assert diagnosis.acceptance(CHAIN, FADING, forecast()).status == "ok"


def test_chance_is_less_for_heads_that_do_not_see_the_token_before():
    found = summary([[1]] * 3 + [[0]] * 17)  # 15 of 100
    status = lambda method: diagnosis.acceptance(method, found, forecast(method, found, nodes=(1, 2))).status
    heads = dataclasses.replace(CHAIN, by_call=False)
    assert (status(CHAIN), status(heads), status(LOOKUP)) == ("warning", "ok", "warning")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(verify=32e-3), "a pass over 5 nodes takes 3.20 steps and a round emits 3.10 tokens"),
        (dict(draft=40e-3), "one call costs 1.00 steps and its first draft stands in 90% of rounds, so no gamma pays"),
        (dict(draft=20e-3), "2.00 steps of a round that emits 3.10 tokens"),
        (dict(draft=20e-3, method=LOOKUP), "The draft is too slow: 2.00 steps"),
    ],
)
def test_what_is_too_slow_is_named(changes, words):
    method, expected = changes.get("method", CHAIN), forecast(**changes)
    finding = diagnosis.prices(method, expected, STEP, PASSES)
    assert finding.status == "warning" and words in finding.text
    assert words in diagnosis.verdict(method, expected, None, "cpu", [finding])
    assert diagnosis.prices(CHAIN, forecast(), STEP, PASSES).status == "ok"
    # A pass that hardly costs more than a step is not to blame when nothing is accepted.
    nothing = summary([[0, 0, 0, 0]] * 4)
    assert diagnosis.prices(CHAIN, forecast(found=nothing, verify=11e-3, draft=0.0), STEP, PASSES).status == "ok"


def test_coverage_of_a_draft_vocabulary():
    tokens = np.array([0, 1, 2, 3, 0, 1, 2, 3, 4, 9])
    assert diagnosis.coverage(None, tokens, 10).status == "ok"
    assert diagnosis.coverage(np.arange(10), tokens, 10).text == "the draft can propose every token of the target"
    finding = diagnosis.coverage(np.array([0, 1, 2, 3, 4]), tokens, 10)
    assert (finding.status, finding.text[:5]) == ("ok", "90.0%")
    finding = diagnosis.coverage(np.array([0, 1]), tokens, 10)
    assert finding.status == "warning" and "40.0% of the target's own tokens are among the 2 of 10" in finding.text
    assert "40.0%" in diagnosis.verdict(CHAIN, forecast(), None, "cpu", [finding])


def test_a_decay_is_told_from_noise_and_from_the_cut_last_round():
    steady = [[3, 2, 3, 4] * 12 + [0]] * 2
    assert diagnosis.decay(steady).status == "ok"
    falling = [[4] * 24 + [1] * 24 + [0]] * 2
    finding = diagnosis.decay(falling)
    assert finding.status == "warning" and "4.00 drafts accepted a round" in finding.text
    assert "too few rounds" in diagnosis.decay([[4] * 4 + [0] * 4]).text
    assert diagnosis.decay([[1, 0] * 24 + [0, 0, 0, 1] * 12]).status == "ok"


def test_the_clock_is_set_beside_the_prediction():
    measured = lambda ratio: metrics.Speedup(ratio, ratio, ratio, (math.nan, math.nan), 0.95)
    expected = forecast(found=summary([[1, 1, 1, 1]] * 4))  # 5 tokens for 2.2 steps
    assert diagnosis.speed(expected, measured(2.0)).status == "ok"
    assert diagnosis.speed(expected, measured(0.9)).status == "warning"
    assert diagnosis.speed(expected, None).status == "warning"
    assert diagnosis.pays(expected, measured(2.0)) and not diagnosis.pays(expected, measured(0.9))
    assert "trust the clock" in diagnosis.verdict(CHAIN, expected, measured(0.9), "cpu", [])
    assert "(2.00 measured)" in diagnosis.verdict(CHAIN, expected, measured(2.0), "cpu", [])


def test_a_fault_comes_first():
    fault = diagnosis.Finding("target", "fault", "trained for another")
    text = diagnosis.verdict(CHAIN, forecast(), None, "cpu", [fault])
    assert text.startswith("This draft and target do not belong together (see: target). Speculation pays")
