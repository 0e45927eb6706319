"""What the tests of both exports of whole models use."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import types, weights
from jspec.models import config as model_config
from jspec.models import transformer
from tests import checkpoints
from tests.weights.test_tokenizer import byte_level_metadata

DIGEST = "0123456789abcdef" * 4
GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "tokenizer.json").read_text())
TEXTS = [case["text"] for case in GOLDEN["texts"]] + ["<s>hello w<think>12345<end>", "[PAD266] he'll"]

ALL_BIASES = {"qkv_bias": True, "output_bias": True, "ffn_bias": True}
SCALED = {
    "linear": model_config.RopeScaling("linear", 4.0),
    "llama3": model_config.RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": model_config.RopeScaling("yarn", 4.0, 64),
    "yarn-stated": model_config.RopeScaling(
        "yarn", 4.0, 64, beta_fast=16.0, beta_slow=2.0, attention_factor=0.75, truncate=False
    ),
}


def target(tokenizer: weights.Tokenizer | None = None, dtype: Any = jnp.float32, **changes: Any) -> types.Target:
    """A random model: `changes` to `checkpoints.RANDOM`, its vocabulary at least the tokenizer's."""
    if tokenizer is not None:
        changes = {"vocab_size": tokenizer.vocab_size, "num_layers": 1} | changes
    config = checkpoints.with_options(**changes)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), checkpoints.random_params(config))
    stop_ids = tokenizer.stop_ids if tokenizer is not None else (2,)
    return types.Target(transformer.Model(params, config), tokenizer, stop_ids=stop_ids)


def byte_level(pre: str = "gpt-2", **changes: Any) -> weights.Tokenizer:
    """A byte-level tokenizer as a GGUF file describes it."""
    return weights.Tokenizer.from_gguf(byte_level_metadata(pre, **changes))


def assert_same_model(found: transformer.Model, expected: transformer.Model) -> None:
    """Equal configs, structures and values; only the dtypes may differ."""
    assert found.config == expected.config
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, left), right in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        left, right = np.asarray(left, np.float32), np.asarray(right, np.float32)
        np.testing.assert_array_equal(left, right, err_msg=jax.tree_util.keystr(path))


def assert_same_tokenizer(found: weights.Tokenizer, expected: weights.Tokenizer) -> None:
    """Equal ids of every text, and whatever else a tokenizer carries."""
    assert found.fingerprint() == expected.fingerprint()
    for text in TEXTS:
        ids = found.encode(text)
        assert ids == expected.encode(text), text
        assert found.decode(ids) == expected.decode(ids), text
    for name in ("bos_id", "add_bos", "stop_ids", "chat_template"):
        assert getattr(found, name) == getattr(expected, name), name
