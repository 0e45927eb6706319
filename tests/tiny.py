"""Two small models whose right answers are known.

Fixture B, the bigram checkpoint: a Llama-shaped model whose attention and feed-forward outputs are zero, so that the
logits after token x are row x of a chosen matrix. With a successor matrix every accepted length can be walked by hand;
with the logarithm of a transition matrix the law of the text is a product of matrices.

Fixture R, the random tiny model: attention matters, so faults in cache and positions change tokens. Its reference is
the uncached float64 loop of `reference.py`. The prompts were searched: along each greedy path the two best logits stay
more than 1e-2 apart, so that float noise cannot flip a token, and no path falls into a short loop for good (some repeat
themselves for a while, which is what prompt lookup lives on).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jspec import types
from jspec.models import config as model_config
from jspec.models import transformer
from tests import checkpoints, reference


def target(config: model_config.TransformerConfig, params: dict) -> types.Target:
    """A target in memory, without a tokenizer."""
    return types.Target(transformer.Model(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), config))


# Fixture B.


def bigram(logits: np.ndarray, config: model_config.TransformerConfig | None = None) -> types.Target:
    """Fixture B: the logits after token x are `logits[x]`, up to float32 rounding.

    Args:
      logits: `[N, N]`.
      config: a larger model to put it in, so that both share compiled programs. It needs N <= width; its other tokens
        get logits of -30.
    """
    size = len(logits)
    if config is None:
        config = model_config.TransformerConfig(
            vocab_size=size, num_layers=1, width=size, num_heads=1, num_kv_heads=1, head_size=2, ffn_size=2,
            max_positions=256,
        )  # fmt: skip
    params = checkpoints.random_params(config)
    for layer in params["layers"]:
        layer |= {name: np.zeros_like(layer[name]) for name in ("output", "down")}
        layer |= {name: np.ones_like(layer[name]) for name in ("attention_norm", "ffn_norm")}
    # The last norm turns 10 e_x into sqrt(E) e_x.
    head = np.full((config.vocab_size, config.width), -30.0)
    head[:size, :size] = logits.T
    params |= {
        "embed": 10 * np.eye(config.vocab_size, config.width),
        "final_norm": np.ones(config.width),
        "head": head / math.sqrt(config.width),
    }
    return target(config, params)


def successor(changes: dict[int, int] | None = None, size: int = 16) -> np.ndarray:
    """Logits of the chain x -> x + 1 (mod size), but for `changes`."""
    after = {x: (x + 1) % size for x in range(size)} | (changes or {})
    logits = np.zeros((size, size))
    logits[list(after), list(after.values())] = 20
    return logits


# Fixture R.

SEED = 0
VOCAB = checkpoints.RANDOM.vocab_size
NUM_NEW = 24  # tokens behind each prompt


def _drawn(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


# Lengths 1 to 41. Token 7 serves as a padding and end id in some tests and is an ordinary token of two prompts.
PROMPTS = (
    (3,),
    (7, 7),
    _drawn(5, 5039),
    (11, 5, 2, 9, 40, 7, 7, 1, 30),
    _drawn(16, 16004),
    _drawn(17, 17000),
    _drawn(33, 33000),
    _drawn(41, 41055),
)


@functools.cache
def random_target() -> types.Target:
    """Fixture R."""
    return target(checkpoints.RANDOM, checkpoints.random_params(seed=SEED))


@functools.cache
def noisy_twin(noise: float = 0.02) -> types.Target:
    """Fixture R with noise * normal on every parameter: a draft that often agrees."""
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda x: x + noise * rng.standard_normal(x.shape), random_target().model.params)
    return target(checkpoints.RANDOM, params)


@functools.cache
def greedy(prompt: tuple[int, ...], num_new: int = NUM_NEW) -> list[int]:
    """Fixture R's greedy continuation, by the uncached float64 loop."""
    model = random_target().model
    return reference.greedy(model.config, model.params, prompt, num_new)
