"""The tests' own models and references are what they say."""

from __future__ import annotations

import numpy as np

from tests import checkpoints, common_table, laws, reference, tiny


def test_the_bigram_checkpoint_says_what_it_is_told():
    for logits, config in (
        (tiny.successor(), None),
        (tiny.successor({3: 9}), checkpoints.RANDOM),
        (np.log([[0.2, 0.8], [0.5, 0.5]]), None),
    ):
        model = tiny.bigram(logits, config).model
        size = len(logits)
        tokens = np.random.default_rng(0).integers(0, size, 12)
        got = reference.forward(model.config, model.params, tokens).logits
        # The norm's epsilon and float32 parameters leave a few parts in a million.
        assert np.allclose(got[:, :size], logits[tokens], atol=1e-5)
        assert np.allclose(got[:, size:], -30, atol=1e-4)


def test_the_random_models_texts_are_decisive_and_varied():
    for prompt in tiny.PROMPTS:
        text = tiny.greedy(prompt)  # refuses near-ties
        assert len(set(text)) >= 6
        assert not any(text[-3 * period :] == text[-period:] * 3 for period in range(1, 8))
    twin = tiny.noisy_twin().model
    agree = []
    for prompt in tiny.PROMPTS:
        logits = reference.forward(twin.config, twin.params, [*prompt, *tiny.greedy(prompt)]).logits
        agree += (logits[len(prompt) - 1 : -1].argmax(axis=1) == tiny.greedy(prompt)).tolist()
    assert 0.4 < np.mean(agree) < 0.9


def test_counts_are_told_from_a_wrong_law():
    rng = np.random.default_rng(0)
    law = np.array([0.5, 0.3, 0.2, 0.0])
    counts = np.bincount(rng.choice(4, 5000, p=law), minlength=4)
    assert laws.follows(counts, law)
    assert not laws.follows(counts, [0.45, 0.35, 0.2, 0.0])
    assert not laws.follows(counts + [0, 0, 0, 1], law)  # what cannot happen, once
    assert laws.joint(np.array([[0.2, 0.8], [0.5, 0.5]]), 0, 2).tolist() == [[0.2 * 0.2, 0.2 * 0.8], [0.8 * 0.5] * 2]
    assert laws.count([[0, 1], [1, 1], [0, 1]], 2).tolist() == [[0, 2], [0, 1]]


def test_rounds_walked_by_hand():
    """Text 1 2 3 4 5 6 behind prompt 0: prefill says 1; each round proposes the next number and then a wrong one."""
    walked = reference.speculate([0], [1, 2, 3, 4, 5, 6], lambda text: reference.chain([text[-1] + 1, 99]), 2)
    # 1 | 2, 99 falls: 3 | 4, 99 falls: 5 | one token left, no draft: 6.
    assert walked.accepted == [1, 1, 0] and walked.histogram.tolist() == [1, 2, 0]
    assert walked.offered.tolist() == [2, 2] and walked.tested.tolist() == [2, 2] and walked.drafted == 4
    # A stop token behind 2: the round is cut at an accepted draft, and nothing else was tested.
    cut = reference.speculate([0], [1, 2], lambda text: reference.chain([text[-1] + 1, 99]), 2, budget=6)
    assert cut.accepted == [1] and cut.tested.tolist() == [1, 0] and cut.offered.tolist() == [1, 1]


def test_a_test_of_the_common_table_tells_its_row():
    for name in common_table.ROWS:
        for id in (f"[{name}]", f"[{name}-8]", f"[mixed mates-{name}]", f"[{name}-lenient]"):
            assert common_table.row_named_in(id) == name
    assert common_table.row_named_in("test_every_registered_drafter_has_a_row") is None
