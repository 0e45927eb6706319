"""Training text: a sample depends on the settings, the seed and its number alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from experiments import settings as experiment_settings
from jspec import decode, drafters, types
from jspec.models import transformer
from jspec.training import data, synthesis
from tests import checkpoints, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

SETTINGS = synthesis.Settings(
    own=synthesis.OwnPrompts(header="<", openings=("a", "bc"), max_tokens=5),
    own_share=0.5,
    temperatures=(0.0, 1.0),
    max_new_tokens=9,
    max_prompt=20,
    rows=4,
)
PROMPTS = [[65, 66, 67], [68] * 30, [70, 71]]


@pytest.fixture(scope="module")
def target():
    """Speaks bytes; ends its turns at byte 10."""
    config = dataclasses.replace(checkpoints.RANDOM, vocab_size=256)
    model = tiny.target(config, checkpoints.random_params(config, seed=5)).model
    return types.Target(model, experiment_settings.ByteTokenizer(), stop_ids=(10,))


def _make(target, numbers, settings=SETTINGS, drafter=None, prompts=PROMPTS):
    source = synthesis.Synthesis(target, settings, prompts)
    blocks = source.samples(numbers, drafter or drafters.Autoregressive(), decode.REJECTION)
    return {sample.number: sample for block in blocks for sample in block}


def _same(one, other):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.roles, other.roles)


def test_a_sample_does_not_depend_on_what_is_made_beside_it(target):
    whole = _make(target, range(10))
    assert sorted(whole) == list(range(10))
    for part in ([7, 2, 9], [4]):
        for number, sample in _make(target, part).items():
            _same(sample, whole[number])


def test_own_and_given_prompts_take_turns(target):
    made = _make(target, range(8))
    given = [list(sample.tokens[sample.roles == data.PROMPT]) for sample in made.values()]
    # The prompt of 30 tokens is left out; the others come in turn, in every other sample.
    by_number = dict(zip(made, given))
    assert [by_number[number] for number in (0, 2, 4, 6)] == [[65, 66, 67], [70, 71]] * 2
    for number in (1, 3, 5, 7):
        text = bytes(by_number[number]).decode(errors="replace")
        # The header was for writing the message; this tokenizer has no template around it.
        assert text[0] in "ab"
    for sample in made.values():
        answer = sample.tokens[sample.roles == data.ANSWER]
        assert 1 <= len(answer) <= 9 and 10 not in answer[:-1]


def test_prompts_that_are_left_out_are_counted(target):
    assert synthesis.Synthesis(target, SETTINGS, PROMPTS).left_out == 1


@pytest.mark.parametrize(
    "changes, prompts, message",
    [
        ({"own": None}, [], "no prompts: own is null"),
        ({"own": None}, [[1] * 30], "of 1 given none is short enough"),
        ({"own": synthesis.OwnPrompts()}, [], "has no chat template: give own.header"),
        ({"own": synthesis.OwnPrompts(header="")}, [], "both empty"),
        ({"own": synthesis.OwnPrompts(header="x" * 21)}, [], "21 tokens; max_prompt is 20"),
        ({"max_new_tokens": 300}, [[1]], "may take 320 tokens; the target follows at most 256"),
    ],
)
def test_settings_that_do_not_fit_the_target(target, changes, prompts, message):
    with pytest.raises(ValueError, match=message):
        synthesis.Synthesis(target, dataclasses.replace(SETTINGS, **changes), prompts)


def test_a_target_without_a_tokenizer_needs_given_prompts(target):
    bare = types.Target(transformer.Model(target.model.params, target.model.config))
    with pytest.raises(ValueError, match="the target has no tokenizer"):
        synthesis.Synthesis(bare, SETTINGS, PROMPTS)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"temperatures": ()}, "temperatures is empty"),
        ({"temperatures": (0.5, -1.0)}, "temperatures -1.0 is below 0"),
        ({"own_share": 1.5}, "own_share 1.5 is not between 0 and 1"),
        ({"top_p": 0.0}, "top_p 0.0 is not in"),
        ({"rows": 0}, "rows 0 is below 1"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SETTINGS, **changes)
