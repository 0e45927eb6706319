"""Draft heads against float64 NumPy, and what their configs refuse."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache as kv
from jspec import types
from jspec.models import config as model_config
from jspec.models import heads
from tests import checkpoints, hand_heads, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

LAYER = dataclasses.replace(checkpoints.RANDOM, num_layers=1)
WIDTH, VOCAB = LAYER.width, LAYER.vocab_size
TIED = types.Target(
    dataclasses.replace(
        tiny.random_target().model,
        config=dataclasses.replace(checkpoints.RANDOM, tied_head=True, embedding_scale=1.5),
    )
)


def eagle(version: int, **changes) -> heads.EagleConfig:
    shape = {"layer": LAYER, "target_width": WIDTH, "vocab_size": VOCAB, "num_features": 1 if version == 1 else 3}
    return heads.EagleConfig(version, **(shape | changes))


def random_head(config: heads.EagleConfig) -> heads.EagleHead:
    """Matrices 0.3 * normal, norms 1 + 0.3 * normal, biases normal; by name, whatever else there is."""

    def draw(path, leaf):
        name = path[-1].key
        rng = np.random.default_rng(list(jax.tree_util.keystr(path).encode()))
        if name == "draft_ids":
            return jnp.asarray(np.sort(rng.permutation(VOCAB)[: leaf.shape[0]]), jnp.int32)
        scale, shift = (0.3, 1) if name.endswith("norm") else (1, 0) if name.endswith("bias") else (0.3, 0)
        return jnp.asarray(shift + scale * rng.standard_normal(leaf.shape), jnp.float32)

    return heads.EagleHead(jax.tree.map_with_path(draw, heads.eagle_shapes(config)), config)


OTHER_WIDTH = dataclasses.replace(LAYER, width=24, num_heads=2, num_kv_heads=1, qkv_bias=True, activation="gelu_tanh")


@pytest.mark.parametrize(
    "config,target",
    [
        (eagle(1), tiny.random_target()),
        (eagle(1, fc_bias=True, input_norm=True, own_head=True), tiny.random_target()),
        (eagle(1, own_embedding=True), TIED),
        (eagle(3), TIED),
        (eagle(3, own_head=True, vocab_size=20, norm_before_residual=True), tiny.random_target()),
        (eagle(3, own_head=True, norm_before_fc=True, norm_output=True), tiny.random_target()),
        (eagle(3, fc_norm=True, norm_before_residual=True, norm_output=True), tiny.random_target()),
        (eagle(3, layer=OTHER_WIDTH, own_embedding=True, own_head=True, num_features=2), tiny.random_target()),
    ],
    ids=[
        "1", "1, bias and norm", "1, own embedding", "3, all borrowed", "3, reduced", "3, norm before fc",
        "3, norm of each", "3, of another width",
    ],
)  # fmt: skip
def test_an_eagle_head_against_numpy(config, target):
    """A text read in two passes, the second behind the cache of the first: states and logits of every pair."""
    head, rng = random_head(config), np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, (2, 9))
    features = rng.normal(size=(2, 9, config.num_features, WIDTH))

    @jax.jit
    def read(head, tokens, features):
        cache, found = kv.init(config.layer, 2, 12), []
        states = heads.fuse(head, jnp.asarray(features, jnp.float32))
        for start, stop in ((0, 5), (5, 9)):
            size = stop - start
            out, block = heads.eagle_forward(
                head,
                target.model,
                tokens[:, start:stop],
                states[:, start:stop],
                jnp.broadcast_to(jnp.arange(start, stop), (2, size)),
                cache,
                jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), (2, size, size)),
            )
            order = jnp.broadcast_to(jnp.arange(size), (2, size))
            cache = kv.commit(cache, block, order, jnp.full(2, size))
            found.append((out, heads.eagle_logits(head, target.model, out)))
        return [jnp.concatenate(parts, axis=1) for parts in zip(*found)]

    got_states, got_logits = read(head, jnp.asarray(tokens), features)
    assert got_logits.shape == (2, 9, config.vocab_size) and got_logits.dtype == jnp.float32
    for row in range(2):
        states, logits = hand_heads.eagle_pass(head, target, tokens[row], hand_heads.fused(head, features[row]))
        assert np.allclose(got_states[row], states, atol=1e-4 * np.abs(states).max())
        assert np.allclose(got_logits[row], logits, atol=1e-4 * np.abs(logits).max())


def test_every_switch_changes_what_an_eagle_head_says():
    """The comparison above would not notice a switch that both sides ignore."""
    rng = np.random.default_rng(2)
    tokens, features = rng.integers(0, VOCAB, 4), rng.normal(size=(4, 3, WIDTH))

    def said(version, **on):
        head = random_head(eagle(version, **on))
        out, logits = hand_heads.eagle_pass(head, TIED, tokens, hand_heads.fused(head, features))
        return np.concatenate([out, logits], axis=1)

    for version, names in (
        (1, ("fc_bias", "input_norm", "own_embedding", "own_head")),
        (3, ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "own_embedding", "own_head")),
    ):
        for name in names:
            assert np.abs(said(version, **{name: True}) - said(version)).max() > 0.1, name


@pytest.mark.parametrize("own", [True, False])
def test_medusa_heads_against_numpy(own):
    config = heads.MedusaConfig(3, 2, WIDTH, VOCAB if own else None)
    params = dict(heads.init_medusa(jax.random.key(0), config).params)
    params["biases"] = jax.random.normal(jax.random.key(1), params["biases"].shape)
    feature = np.random.default_rng(0).normal(size=(2, WIDTH))
    target = tiny.random_target().model
    got = jax.jit(heads.medusa_logits)(heads.MedusaHeads(params, config), target, jnp.asarray(feature, jnp.float32))
    assert got.shape == (2, 3, VOCAB) and got.dtype == jnp.float32
    for head in range(3):
        state = feature
        for weight, bias in zip(np.asarray(params["blocks"])[head], np.asarray(params["biases"])[head]):
            inner = state @ weight.T + bias
            state = state + inner / (1 + np.exp(-inner))
        matrix = params["heads"][head] if own else target.params["head"]
        assert np.allclose(got[:, head], state @ np.asarray(matrix).T, atol=1e-4)


def test_random_heads_have_the_shapes_they_state():
    for config in (eagle(1, fc_bias=True), eagle(3, own_head=True, vocab_size=20, norm_before_fc=True)):
        head = jax.eval_shape(lambda key, config=config: heads.init_eagle(key, config), jax.random.key(0))
        assert jax.tree.map(jnp.shape, head.params) == jax.tree.map(jnp.shape, heads.eagle_shapes(config))
    config = heads.MedusaConfig(2, 1, WIDTH, 20, reduced=True)
    params = jax.jit(lambda key: heads.init_medusa(key, config))(jax.random.key(0)).params
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, heads.medusa_shapes(config))
    assert params["draft_ids"].tolist() == list(range(20)) and not params["biases"].any()
    assert abs(np.std(params["heads"]) * np.sqrt(WIDTH) - 1) < 0.1


def test_default_feature_layers():
    """Section 3.1's low, middle and high, as the released code taps them."""
    assert heads.default_feature_layers(32) == (2, 16, 29)
    assert heads.default_feature_layers(7) == (2, 3, 4)
    for num_layers, middle in ((6, 3), (4, 2), (1, 0)):
        with pytest.raises(ValueError, match=f"2, {middle}, {num_layers - 3} of a target of {num_layers} layers"):
            heads.default_feature_layers(num_layers)


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: eagle(1, layer=checkpoints.RANDOM), "an EAGLE head has one layer, not 2"),
        (
            lambda: eagle(3, layer=dataclasses.replace(checkpoints.RANDOM, num_layers=1, windows=(9,))),
            r"windows \(9,\): an EAGLE head attends to everything",
        ),
        (lambda: eagle(1, target_width=8), "target_width 8 differs from the head's width 32"),
        (lambda: eagle(1, num_features=3), "num_features 3: an EAGLE-1 head reads one"),
        (lambda: eagle(1, fc_norm=True), "fc_norm belongs to version 3"),
        (lambda: eagle(3, fc_bias=True), "fc_bias and input_norm belong to version 1"),
        (lambda: eagle(3, fc_norm=True, norm_before_fc=True), "norm_before_fc and fc_norm exclude each other"),
        (lambda: eagle(3, feature_layers=(1, 2)), r"feature_layers \(1, 2\) are not num_features 3"),
        (lambda: eagle(3, target_width=8), "width 32 differs from target_width 8: the head needs own_embedding"),
        (lambda: heads.MedusaConfig(0, 1, 8), "every size must be at least 1"),
        (lambda: heads.MedusaConfig(1, 1, 8, reduced=True), "a reduced vocabulary needs output matrices of its own"),
    ],
)
def test_configs_that_make_no_head(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_layer_keeps_its_own_embedding_size():
    """The head reads every token of the target, whatever it may propose."""
    config = eagle(3, own_embedding=True, own_head=True, vocab_size=20)
    shapes = heads.eagle_shapes(config)
    assert shapes["embed"].shape == (VOCAB, WIDTH) and shapes["head"].shape == (20, WIDTH)
    layer = model_config.param_shapes(LAYER)["layers"][0]
    assert shapes["layer"]["qkv"].shape == (layer["qkv"].shape[0], 2 * WIDTH)
