"""Rotary frequencies and products against numbers worked out elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models import config as model_config
from jspec.models import layers
from tests import checkpoints, reference


def frequencies(theta: float, head_size: int, scaling: model_config.RopeScaling | None):
    config = checkpoints.with_options(head_size=head_size, rope_theta=theta, rope_scaling=scaling)
    return layers.rope_frequencies(config), config


def test_llama3_scaling_has_the_published_values():
    """DEV-23: Llama 3.2 (head size 64, factor 32) and Llama 3.1 (head size 128, factor 8)."""
    scaling = lambda factor: model_config.RopeScaling("llama3", factor, original_max_position=8192)
    base, _ = frequencies(500000.0, 64, None)[0]
    (got, scale), config = frequencies(500000.0, 64, scaling(32.0))
    assert scale == 1
    assert np.allclose(base[:15] / got[:15], 1, rtol=1e-6)
    assert np.allclose(base[15:18] / got[15:18], [1.651329, 3.292262, 9.666729], rtol=1e-5)
    assert np.allclose(got[15:18], [0.00129055, 0.00042956, 0.00009708], rtol=1e-4)
    assert np.allclose(base[18:] / got[18:], 32, rtol=1e-6)
    assert np.allclose(got, reference.frequencies(config), rtol=1e-6)

    base, _ = frequencies(500000.0, 128, None)[0]
    (got, _), config = frequencies(500000.0, 128, scaling(8.0))
    assert np.allclose(base[:29] / got[:29], 1, rtol=1e-6)
    middle = [1.207484, 1.553415, 2.026313, 2.694530, 3.684253, 5.257327]
    assert np.allclose(base[29:35] / got[29:35], middle, rtol=1e-5)
    assert np.allclose(base[35:] / got[35:], 8, rtol=1e-6)
    assert np.allclose(got, reference.frequencies(config), rtol=1e-6)


def test_other_scalings_worked_by_hand():
    base = np.array([1, 0.1, 0.01, 0.001])  # theta 10000, head size 8
    for scaling, expected, scale in (
        (None, base, 1),
        (model_config.RopeScaling("linear", 4.0), base / 4, 1),
        (model_config.RopeScaling("factors", 2.0, factors=(1.0, 1.0, 3.0, 4.0)), base / [2, 2, 6, 8], 1),
        # The pairs that turn 32 times and once over 64 positions are number 8 ln(64 / (32 2 pi)) / (2 ln 10000) = -0.50
        # and 8 ln(64 / 2 pi) / (2 ln 10000) = 1.01: a ramp from 0 to 2, so pair 1 is half and half. 0.1 ln 4 + 1 =
        # 1.138629.
        (
            model_config.RopeScaling("yarn", 4.0, original_max_position=64),
            base * [1, 0.5 + 0.5 / 4, 1 / 4, 1 / 4],
            1.138629,
        ),
        # Without rounding the ramp ends at 1.00800, so pair 1 is 0.99206 on its way.
        (
            model_config.RopeScaling("yarn", 4.0, original_max_position=64, truncate=False, attention_factor=1.5),
            base * [1, 1 - 0.75 / 1.008, 1 / 4, 1 / 4],
            1.5,
        ),
    ):
        (got, got_scale), _ = frequencies(10000.0, 8, scaling)
        assert np.allclose(got, expected, rtol=1e-4), scaling
        assert np.isclose(got_scale, scale, rtol=1e-6)


def test_pairs_half_a_head_apart_are_turned_together():
    config = checkpoints.with_options(head_size=4)
    cos, sin = layers.rope_tables(config, jnp.array([[3]]))
    x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    # Pairs (1, 3) and (2, 4), turned by 3 and by 0.03 radians.
    c, s, d, t = np.cos(3), np.sin(3), np.cos(0.03), np.sin(0.03)
    assert np.allclose(
        layers.rotate(x, (cos, sin)).ravel(), [c - 3 * s, 2 * d - 4 * t, 3 * c + s, 4 * d + 2 * t], atol=1e-6
    )


@pytest.mark.parametrize("tokens", [(1,), (2, 1), (3, 5), (64,)])
def test_products_of_any_number_of_tokens(tokens):
    rng = np.random.default_rng(0)
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((*tokens, 24), (40, 24), (40,)))
    run = jax.jit(layers.linear)
    assert np.allclose(run(x, weight), x @ weight.T, atol=1e-5)
    assert np.allclose(run(x, weight, bias), x @ weight.T + bias, atol=1e-5)
    assert run(x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)).shape == (*tokens, 40)
