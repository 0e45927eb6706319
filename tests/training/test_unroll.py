"""The training-time test says, at every place and step, what drafting a chain there would say."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import decode, drafters, types
from jspec.models import heads
from jspec.training import unroll, views
from tests import checkpoints, running, tiny
from tests import training_samples as make

pytestmark = pytest.mark.usefixtures("small_programs")

GAMMA = 3
PROMPTS = tiny.PROMPTS[2:6]
CONFIG = checkpoints.with_options(num_layers=3)


@functools.cache
def target() -> types.Target:
    return tiny.target(CONFIG, checkpoints.random_params(CONFIG, seed=4))


@functools.cache
def drafted(version: int):
    """The head, and behind each prompt its pending token, a chain drawn at temperature 1, and the laws of the draws."""
    random = drafters.eagle.RandomEagle(version=version, vocab_size=48 if version == 3 else None)
    settings = drafters.Eagle(
        gamma=GAMMA,
        draft=drafters.eagle.EagleDraft(random=random),
        feature_layers=(0, 1, 2) if version == 3 else None,
    )
    bound, head = settings.build(target())
    decoder = running.Decoder(target(), bound, head, batch=len(PROMPTS))
    args, kwargs = decoder.arguments(PROMPTS, temperature=1.0)
    common = {name: kwargs[name] for name in ("drafter", "sampling")}
    state = decode.prefill_jit(*args, **common, capacity=decoder.capacity, chunk=decoder.chunk)
    tree, state = jax.jit(functools.partial(decode.propose, **common))(args[0], args[1], state)
    return bound, head, np.asarray(tree.tokens), np.asarray(tree.draft_probs)[:, 1:]


@pytest.mark.parametrize("version", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_laws_of_every_step_equal_those_of_a_drafted_chain(version):
    bound, head, tokens, laws = drafted(version)
    texts = [[*prompt, *chain] for prompt, chain in zip(PROMPTS, tokens)]
    # All in one row each, and once packed: neighbours change nothing.
    length = max(map(len, texts))
    batch = jax.tree.map(
        lambda *rows: jnp.stack(rows),
        *(_row(text, length) for text in texts),
    )
    found = _laws(bound, head, batch)
    for row, prompt in enumerate(PROMPTS):
        place = len(prompt) - 1  # of the feature that the chain starts from
        for step in range(GAMMA):
            np.testing.assert_allclose(found[step][row, place], laws[row, step], atol=2e-5)


def test_packed_samples_do_not_see_each_other():
    bound, head, tokens, _ = drafted(1)
    texts = [[*prompt, *chain] for prompt, chain in zip(PROMPTS[:2], tokens)]
    first, second = texts
    together = make.batch([make.sample(i, text[:1], text[1:]) for i, text in enumerate(texts)], length=40)
    alone = [_row(text, 40) for text in texts]
    batch = jax.tree.map(lambda whole, *rows: jnp.stack([whole[0], *rows]), together, *alone)
    packed, *single = np.asarray(jnp.stack(_laws(bound, head, batch))).transpose(1, 0, 2, 3)
    # A sample's last token has no place.
    for laws, start, text in zip(single, (0, len(first) - 1), texts):
        inside = len(text) - GAMMA - 1
        np.testing.assert_allclose(packed[:, start : start + inside], laws[:, :inside], atol=2e-5)


def test_later_steps_see_themselves_alone():
    """A wrong mask must show: with causal attention in every step, laws are no longer those of the chain."""
    bound, head, tokens, laws = drafted(1)
    batch = jax.tree.map(lambda *rows: jnp.stack(rows), *(_row([*p, *c], 40) for p, c in zip(PROMPTS, tokens)))
    with pytest.MonkeyPatch.context() as patch:

        def causal_everywhere(query, keys, values, causal):
            size = query.shape[-1]
            key, value = (jnp.repeat(x[-1], query.shape[2] // x[-1].shape[1], axis=1) for x in (keys, values))
            scores = jnp.einsum("bthd,bhsd->bhts", query, key) / size**0.5
            weights = jax.nn.softmax(jnp.where(causal[:, None], scores, -1e30))
            return jnp.einsum("bhts,bhsd->bthd", weights, value).reshape(*query.shape[:2], -1)

        patch.setattr(unroll, "attend", causal_everywhere)
        found = _laws(bound, head, batch)
    places = [len(prompt) - 1 for prompt in PROMPTS]
    first, second = (
        max(np.abs(found[step][row, place] - laws[row, step]).max() for row, place in enumerate(places))
        for step in (0, 1)
    )
    assert first < 2e-5 < 1e-3 < second


def _row(text, length):
    return jax.tree.map(lambda leaf: leaf[0], make.batch([make.sample(0, text[:1], text[1:])], length=length))


def _laws(bound, head, batch):
    @jax.jit
    def laws(head, model, batch):
        view = views.view(model, batch, bound.feature_layers)
        states = heads.fuse(head, view.features)
        steps = unroll.chains(head, model, batch, states, GAMMA)
        return [jax.nn.softmax(heads.eagle_logits(head, model, step.state)) for step in steps]

    return laws(head, target().model, batch)
