"""Medusa: rounds worked out by hand, candidates, what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import drafters, sampling, topology, types
from jspec.drafters import draft_vocabulary, medusa
from jspec.models import heads
from tests import hand_heads, running, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

CHAIN = topology.Tree(widths=(1, 1, 1))


def after(steps: int, changes: dict[int, int] | None = None) -> np.ndarray:
    """Logits of the token `steps` places behind x on the cycle, but for `changes`."""
    logits = np.zeros((16, 16))
    for x in range(16):
        logits[x, (changes or {}).get(x, (x + steps) % 16)] = 20
    return logits


def decoded(changes: dict[int, int] | None = None):
    """Head k predicts k + 2 steps on from the token before the pending one; `changes` are head 1's."""
    target = tiny.bigram(tiny.successor())
    perfect = hand_heads.medusa(target, [after(2), after(3, changes), after(4)])
    bound, params = drafters.Medusa(tree=CHAIN).build(target, heads=perfect)
    return running.Decoder(target, bound, params, batch=3, width=5, capacity=32, max_new=16)


PROMPTS = [(0,), (3, 4, 5), (9, 2)]


def rounds(start: int, wrong: int | None = None) -> list[int]:
    """Accepted drafts of each round: all three, but one where head 1 reads the state in which it is wrong."""
    emitted, accepted = 1, []
    while emitted < 16:
        before_pending = (start + emitted - 1) % 16
        accepted.append(min(1 if before_pending == wrong else 3, 16 - emitted - 1))
        emitted += accepted[-1] + 1
    return accepted


def test_perfect_heads_are_accepted_in_full():
    """DEV-25."""
    for row, start in zip(decoded()(PROMPTS), (0, 5, 2)):
        assert row.text == [(start + 1 + i) % 16 for i in range(16)]
        assert row.accepted == rounds(start)


def test_heads_that_are_wrong_in_one_state():
    """Alone and in a batch."""
    decoder = decoded({4: 1})
    rows = decoder(PROMPTS)
    for index, (row, start) in enumerate(zip(rows, (0, 5, 2))):
        assert row.text == [(start + 1 + i) % 16 for i in range(16)]
        assert row.accepted == rounds(start, wrong=4)
        assert decoder([PROMPTS[index]])[0] == row
    assert any(1 in row.accepted[:-1] for row in rows)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("ids", [None, [3, 60, 1, 17, 30, 5]])
def test_candidates(own, ids):
    """Node (r1, r2) proposes candidate r2 of head 2, whatever r1; a reduced vocabulary has candidates of its own."""
    target = tiny.random_target()
    width = target.model.config.width
    config = heads.MedusaConfig(3, 2, width, 64 if own else None)
    params = heads.init_medusa(jax.random.key(2), config)
    tree = topology.Tree(choices=((0,), (2,), (0, 1), (2, 0)))
    draft_ids = None if ids is None else draft_vocabulary.check(ids, target)
    bound, draft = medusa.bind(tree.topology, target, params, draft_ids)
    feature = np.random.default_rng(0).normal(size=(2, 1, width))
    context = types.Context(jnp.array([[5, 8], [9, 2]]), jnp.array([2, 1]), jnp.asarray(feature, jnp.float32))
    got, _ = bound.propose(types.Params(target.model, draft), None, (), context, sampling.make(2, max_new_tokens=4))
    candidates = []
    for head in range(2):
        state = feature[:, 0]
        for layer in range(2):
            hidden = state @ np.asarray(params.params["blocks"])[head, layer].T
            state = state + hidden / (1 + np.exp(-hidden))
        matrix = np.asarray(params.params["heads"][head] if own else target.model.params["head"])
        logits = state @ matrix.T
        if ids is not None:
            logits = np.where(np.isin(np.arange(64), ids), logits, -np.inf)
        candidates.append(np.argsort(-logits, axis=1))
    first, second = candidates
    expected = np.stack([[8, 9], first[:, 0], first[:, 2], second[:, 1], second[:, 0]], axis=1)
    assert got.tokens.tolist() == expected.tolist()
    assert got.parents.tolist() == [[-1, 0, 0, 1, 2]] * 2 and got.draft_probs is None


@pytest.mark.parametrize(
    "build,words",
    [
        (lambda target: drafters.Medusa().build(target), "draft is not given"),
        (
            lambda target: drafters.Medusa(draft=drafters.MedusaDraft(random=drafters.RandomMedusa(num_heads=3))).build(
                target
            ),
            "tree is 4 deep and needs as many heads; there are 3",
        ),
        (
            lambda target: drafters.Medusa(tree=CHAIN).build(
                target, heads=heads.init_medusa(jax.random.key(0), heads.MedusaConfig(3, 1, 8))
            ),
            "the heads read features of width 8; the target's have 32",
        ),
        (
            lambda target: drafters.Medusa(tree=CHAIN).build(
                target, heads=heads.init_medusa(jax.random.key(0), heads.MedusaConfig(3, 1, 32, 65))
            ),
            "the heads know 65 tokens; the target has 64",
        ),
        (
            lambda target: medusa.bind(
                topology.from_choices([(0,), (2,)]),
                target,
                heads.init_medusa(jax.random.key(0), heads.MedusaConfig(3, 1, 32)),
                np.array([4, 9]),
            ),
            "tree asks for 3 candidates of 2 tokens",
        ),
        (
            lambda target: medusa.bind(
                CHAIN.topology,
                target,
                heads.init_medusa(jax.random.key(0), heads.MedusaConfig(3, 1, 32, 20, reduced=True)),
                np.array([4, 9]),
            ),
            "vocabulary: the heads have a reduced vocabulary of their own",
        ),
        (
            lambda target: drafters.MedusaDraft(),
            "draft needs exactly one of reference and random; got reference None, random None",
        ),
    ],
)
def test_bad_settings(build, words):
    with pytest.raises(ValueError, match=words):
        build(tiny.random_target())
