"""Draft heads whose proposals are known beforehand."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from jspec import types
from jspec.models import config as model_config
from jspec.models import heads


def float32(tree: dict) -> dict:
    """Parameters as they are used."""
    return {
        name: float32(leaf)
        if isinstance(leaf, dict)
        else jnp.asarray(leaf, None if name == "draft_ids" else jnp.float32)
        for name, leaf in tree.items()
    }


def medusa(target: types.Target, after: list[np.ndarray]) -> heads.MedusaHeads:
    """On a bigram checkpoint: head k says the logits `after[k][x]` `[N, N]`, x the token before the pending one.

    The last norm leaves sqrt(E) e_x, the blocks add nothing.
    """
    config = target.model.config
    matrices = np.full((len(after), config.vocab_size, config.width), -30.0)
    for head, logits in zip(matrices, after):
        head[: len(logits), : len(logits)] = logits.T
    shape = heads.MedusaConfig(len(after), 1, config.width, config.vocab_size)
    params = {
        "blocks": np.zeros((len(after), 1, config.width, config.width)),
        "biases": np.zeros((len(after), 1, config.width)),
        "heads": matrices / math.sqrt(config.width),
    }
    return heads.MedusaHeads(float32(params), shape)


def eagle1(target: types.Target) -> heads.EagleHead:
    """On a bigram checkpoint: the feature of every token is guessed right, so that drafts are the target's own."""
    config = target.model.config
    head = heads.EagleConfig(1, _one_layer(config, config.width, config.num_heads), config.width, config.vocab_size)
    params = _zeros(heads.eagle_shapes(head))
    # Embedded tokens are 10 e_x, features sqrt(E) e_x.
    params["fc"] = np.concatenate(
        [np.eye(config.width) * math.sqrt(config.width) / 10, np.zeros((config.width,) * 2)], 1
    )
    return heads.EagleHead(float32(params), head)


def eagle3(
    target: types.Target, table: np.ndarray, feature_layers: tuple[int, ...], draft_ids: np.ndarray | None = None
) -> heads.EagleHead:
    """On any target: logits after token x are `table[x]`, whatever the features say.

    Attention carries the token: query and key are its one-hot embedding, so that it sees itself and its like alone, the
    value is the embedding too. Nothing rotates, and the residual stream starts at zero.
    """
    config, size = target.model.config, len(table)
    vocab_size = config.vocab_size if draft_ids is None else len(draft_ids)
    head = heads.EagleConfig(
        version=3,
        layer=_one_layer(config, size, 1, rope_scaling=model_config.RopeScaling("linear", factor=1e9)),
        target_width=config.width,
        vocab_size=vocab_size,
        num_features=len(feature_layers),
        feature_layers=feature_layers,
        own_embedding=True,
        own_head=True,
        norm_before_residual=True,
    )
    params = _zeros(heads.eagle_shapes(head))
    one = np.eye(size)
    nothing = np.zeros_like(one)
    rows = np.full((config.vocab_size, size), -30.0)
    rows[:size] = np.asarray(table).T
    params["layer"] |= {
        "qkv": np.block([[10 * one, nothing], [10 * one, nothing], [one, nothing]]),
        "output": one,
        "embed_norm": np.ones(size),
        "ffn_norm": np.ones(size),
    }
    params |= {
        "embed": np.eye(config.vocab_size, size),
        "norm": np.ones(size),
        "head": (rows if draft_ids is None else rows[draft_ids]) / math.sqrt(size),
    }
    if draft_ids is not None:
        params["draft_ids"] = np.asarray(draft_ids, np.int32)
    return heads.EagleHead(float32(params), head)


def _one_layer(config, width, num_heads, **changes):
    return model_config.TransformerConfig(
        vocab_size=config.vocab_size, num_layers=1, width=width, num_heads=num_heads, num_kv_heads=num_heads,
        head_size=width // num_heads, ffn_size=2, max_positions=config.max_positions, **changes,
    )  # fmt: skip


def _zeros(shapes: dict) -> dict:
    return {
        name: _zeros(leaf) if isinstance(leaf, dict) else np.zeros(leaf.shape, leaf.dtype)
        for name, leaf in shapes.items()
    }
