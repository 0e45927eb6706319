"""Continuous batching: an answer depends on its request alone."""

from __future__ import annotations

import collections
import dataclasses

import pytest

from jspec import batching, drafters, generation, types
from tests import tiny

pytestmark = pytest.mark.usefixtures("small_programs")

REQUESTS = [
    batching.Request(index, tiny.PROMPTS[index % 6], seed=index, max_new_tokens=3 + 5 * index % 17, temperature=t)
    for index, t in enumerate([0.0, 1.0, 0.0, 0.7, 1.0, 0.0, 0.0, 1.0, 0.3, 0.0, 1.0])
]


def _serve(requests, drafter=None, **sizes):
    target = tiny.random_target()
    bound, draft = (drafter or drafters.Autoregressive()).build(target)
    sizes = {"rows": 4, "refill": 2, "width": 20, "capacity": 64, "stop_ids": (7,)} | sizes
    blocks = list(batching.serve(types.Params(target.model, draft), requests, drafter=bound, **sizes))
    assert all(blocks)
    return {answer.request.name: answer for block in blocks for answer in block}


def test_answers_are_those_of_the_requests_alone():
    found = _serve(collections.deque(REQUESTS))
    assert sorted(found) == list(range(len(REQUESTS)))
    expected = generation.generate(
        tiny.random_target(),
        [request.tokens for request in REQUESTS],
        max_new_tokens=[request.max_new_tokens for request in REQUESTS],
        temperature=[request.temperature for request in REQUESTS],
        seed=[request.seed for request in REQUESTS],
        stop_ids=(7,),
    )
    assert [list(found[i].tokens) for i in range(len(REQUESTS))] == expected.tokens
    assert [found[i].finish_reason for i in range(len(REQUESTS))] == expected.finish_reasons
    # Another order and other neighbours.
    again = _serve(collections.deque(REQUESTS[::-1]))
    assert again == found


def test_a_speculating_batch_answers_the_same_at_temperature_zero():
    greedy = [dataclasses.replace(request, temperature=0.0) for request in REQUESTS]
    plain = _serve(collections.deque(greedy))
    assert _serve(collections.deque(greedy), drafters.PromptLookup(gamma=3)) == plain


def test_requests_may_come_while_answers_do():
    target = tiny.random_target()
    bound, draft = drafters.Autoregressive().build(target)
    requests, order = collections.deque(REQUESTS[:1]), []
    sizes = {"rows": 4, "refill": 2, "width": 20, "capacity": 64}
    for block in batching.serve(types.Params(target.model, draft), requests, drafter=bound, **sizes):
        order += [answer.request.name for answer in block]
        if len(order) < 4:
            requests.append(REQUESTS[len(order)])
    assert order == [0, 1, 2, 3]


def test_no_request():
    assert _serve(collections.deque()) == {}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rows": 0}, "rows 0 is below 1"),
        ({"width": 1}, "request 1 has 2 tokens and a budget of 8; between 1 and 1 fit"),
        ({"capacity": 8}, "request 1 has 2 tokens and a budget of 8; .*8 with the budget"),
    ],
)
def test_requests_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        _serve(collections.deque(REQUESTS[1:2]), **changes)
