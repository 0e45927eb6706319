"""Shapes of parameters, and configs that make no model."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jspec.models import config as model_config
from tests import checkpoints

pytestmark = pytest.mark.usefixtures("small_programs")


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"num_heads": 5}, "num_heads 5 .* num_kv_heads 2"),
        ({"head_size": 7}, "head_size 7"),
        ({"windows": (4,)}, "windows has 1 .* num_layers 2"),
    ],
)
def test_configs_that_make_no_model(changes, words):
    with pytest.raises(ValueError, match=words):
        checkpoints.with_options(**changes)


def test_configs_hash_by_value():
    assert (
        hash(checkpoints.with_options()) == hash(checkpoints.RANDOM)
        and checkpoints.with_options() == checkpoints.RANDOM
    )
    assert checkpoints.with_options(norm_eps=1e-6) != checkpoints.RANDOM


def test_random_parameters_have_the_shapes_asked_for():
    config = checkpoints.with_options(qkv_bias=True, output_bias=True, ffn_bias=True, qk_norm=True)
    shapes = model_config.param_shapes(config)
    params = jax.jit(model_config.init_params, static_argnums=1)(jax.random.key(0), config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    layer = params["layers"][1]
    assert layer["qkv"].shape == (4 * 8 + 2 * 2 * 8, 32) and layer["gate_up"].shape == (128, 32)
    assert (layer["attention_norm"] == 1).all() and not layer["qkv_bias"].any()
    assert abs(np.std(layer["down"]) - 1 / 8) < 0.02  # 1 / sqrt(64)
    assert "head" in params and "head" not in model_config.param_shapes(checkpoints.with_options(tied_head=True))
