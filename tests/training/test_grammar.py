"""From nothing to sped-up decoding: a target learns a small grammar, and four drafts learn from its answers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jspec import decode, drafters, generation, types
from jspec.models import config as model_config
from jspec.models import transformer
from jspec.training import Distill, Eagle, Medusa, data, distill, synthesis, train

pytestmark = pytest.mark.slow

VOCAB, LENGTH = 32, 32
CONFIG = model_config.TransformerConfig(
    vocab_size=VOCAB, num_layers=3, width=48, num_heads=4, num_kv_heads=2, head_size=12, ffn_size=96,
    max_positions=128, tied_head=True,
)  # fmt: skip
RECIPES = {
    "eagle 3": Eagle(version=3, steps=3, feature_layers=(0, 1, 2)),
    "eagle 1": Eagle(version=1, steps=2),
    "medusa": Medusa(num_heads=3),
    "distill": Distill(random=distill.RandomDraft(num_layers=1, width=24, num_heads=2, num_kv_heads=1, ffn_size=48)),
}
# Of a draft that knows which tokens are frequent and nothing else; the grammar has no token above a tenth.
CHANCE = 0.1


def sentences(count: int, seed: int) -> np.ndarray:
    """`[count, T]` text: the last two tokens leave two choices for the next, one of them four times as likely."""
    grammar = np.random.default_rng(0).integers(0, VOCAB, (VOCAB, 4, 2))
    rng = np.random.default_rng(seed)
    text = rng.integers(0, VOCAB, (count, LENGTH))
    for place in range(2, LENGTH):
        choice = (rng.random(count) < 0.2).astype(int)
        text[:, place] = grammar[text[:, place - 1], text[:, place - 2] % 4, choice]
    return text


@functools.cache
def target() -> types.Target:
    """Trained here, by plain cross entropy."""
    model = transformer.Model(model_config.init_params(jax.random.key(0), CONFIG), CONFIG)
    optimizer = optax.adam(optax.cosine_decay_schedule(5e-3, 300))
    text = sentences(2048, seed=1)

    @jax.jit
    def step(params, state, tokens):
        def loss(params):
            rows, length = tokens.shape
            order = jnp.broadcast_to(jnp.arange(length), tokens.shape)
            mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
            outputs, _ = transformer.forward(transformer.Model(params, CONFIG), tokens, order, None, mask)
            return optax.softmax_cross_entropy_with_integer_labels(outputs.logits[:, 1:-1], tokens[:, 2:]).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    params, state = model.params, optimizer.init(model.params)
    for index in range(300):
        rows = np.random.default_rng(index).integers(0, len(text), 64)
        params, state, value = step(params, state, jnp.asarray(text[rows]))
    assert value < 1.2  # the grammar's own entropy is 0.5 nats; a uniform guess costs 3.5
    return types.Target(transformer.Model(params, CONFIG))


@functools.cache
def answers() -> list[data.Sample]:
    prompts = [sentence[:4].tolist() for sentence in sentences(192, seed=2)]
    settings = synthesis.Settings(own=None, max_prompt=4, max_new_tokens=LENGTH - 4, rows=32)
    source = synthesis.Synthesis(target(), settings, prompts)
    made = [s for block in source.samples(range(192), drafters.Autoregressive(), decode.REJECTION) for s in block]
    return sorted(made, key=lambda sample: sample.number)


@pytest.mark.parametrize("name", RECIPES)
def test_drafts_learn_the_targets_answers(name):
    settings = train.Settings(steps=250, rows=8, length=64, learning_rate=5e-3, clip=1.0, evaluate_every=250)
    trainer = train.Trainer(target(), RECIPES[name], settings, *data.split(answers(), 0.15))
    state = trainer.start()
    losses = []
    for _ in range(settings.steps):
        state, loss = trainer.step(state)
        losses.append(float(loss))
    assert np.mean(losses[-20:]) < 0.8 * np.mean(losses[:5])
    rates = trainer.evaluate(state).depths.rates()
    assert rates["accuracy"][0] > 4 * CHANCE

    prompts = [sentence[:5].tolist() for sentence in sentences(8, seed=3)]
    drafter = trainer.objective.bind(target(), trainer.draft(state), gamma=3)[1:]
    plain = generation.generate(target(), prompts, max_new_tokens=40)
    drafted = generation.generate(target(), prompts, drafter=drafter, max_new_tokens=40)
    assert drafted.tokens == plain.tokens
    assert drafted.statistics.acceptance_by_position[0] > 4 * CHANCE
    assert drafted.statistics.tau > 1.4
