"""Draft heads whose proposals are known beforehand, and EAGLE's head in plain NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jspec import types
from jspec.models import config as model_config
from jspec.models import heads
from tests import reference


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


# The same in float64: no cache, one row, from sections 3.1 of the EAGLE and EAGLE-3 papers.


def _norm(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def _float64(params: dict) -> dict:
    return {
        name: _float64(leaf) if isinstance(leaf, dict) else np.asarray(leaf, np.float64)
        for name, leaf in params.items()
        if name != "layers"
    }


def _rotate(x, angles):  # [T, heads, D], [T, 1, D / 2]
    half = x.shape[-1] // 2
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def fused(head: heads.EagleHead, features: np.ndarray) -> np.ndarray:
    """Features of the target `[T, F, Et]` as the head reads them, `[T, E]`."""
    params, c = _float64(head.params), head.config
    if c.version == 1:
        return features[:, 0]
    if c.fc_norm:
        features = np.stack(
            [_norm(features[:, i], params["fc_norm"][i], c.layer.norm_eps) for i in range(c.num_features)], axis=1
        )
    joined = np.concatenate([features[:, i] for i in range(c.num_features)], axis=1)
    if c.norm_before_fc:
        joined = _norm(joined, params["input_norm"], c.layer.norm_eps)
    return joined @ params["fc"].T


def eagle_pass(
    head: heads.EagleHead, target: types.Target, tokens: Sequence[int], states: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of a token and the state `[T, E]` before it -> the head's states `[T, E]` and logits `[T, Vd]`."""
    params, lent = _float64(head.params), _float64(target.model.params)
    c, layer, shape = head.config, params["layer"], head.config.layer
    tokens = np.asarray(tokens)
    if "embed" in params:
        embedded = params["embed"][tokens]
    else:
        embedded = lent["embed"][tokens] * target.model.config.embedding_scale
    if c.version == 1:
        residual = np.concatenate([embedded, states], axis=1) @ params["fc"].T + params.get("fc_bias", 0)
        read = _norm(residual, layer["attention_norm"], shape.norm_eps) if c.input_norm else residual
    else:
        normed = _norm(states, layer["hidden_norm"], shape.norm_eps)
        residual = normed if c.norm_before_residual else states
        read = np.concatenate([_norm(embedded, layer["embed_norm"], shape.norm_eps), normed], axis=1)

    sizes = np.cumsum([shape.num_heads, shape.num_kv_heads])
    projected = (read @ layer["qkv"].T + layer.get("qkv_bias", 0)).reshape(len(tokens), -1, shape.head_size)
    query, key, value = np.split(projected, sizes, axis=1)
    angles = (np.arange(len(tokens))[:, None] * reference.frequencies(shape))[:, None]
    query, key = _rotate(query, angles), _rotate(key, angles)
    mixed = np.zeros((len(tokens), shape.num_heads, shape.head_size))
    for place in range(len(tokens)):
        for index in range(shape.num_heads):
            shared = index * shape.num_kv_heads // shape.num_heads
            scores = key[: place + 1, shared] @ query[place, index] / math.sqrt(shape.head_size)
            weights = np.exp(scores - scores.max())
            mixed[place, index] = weights / weights.sum() @ value[: place + 1, shared]
    x = residual + mixed.reshape(len(tokens), -1) @ layer["output"].T
    gate, up = np.split(_norm(x, layer["ffn_norm"], shape.norm_eps) @ layer["gate_up"].T, 2, axis=1)
    x = x + reference.ACTIVATIONS[shape.activation](gate) * up @ layer["down"].T

    normed = x if c.version == 1 else _norm(x, params["norm"], shape.norm_eps)
    out = normed if c.norm_output else x
    matrix = params["head"] if "head" in params else lent["embed" if target.model.config.tied_head else "head"]
    return out, normed @ matrix.T


def eagle_behind(
    head: heads.EagleHead, target: types.Target, tokens: Sequence[int], features: np.ndarray, drafts: Sequence[int]
) -> np.ndarray:
    """Logits `[Vd]` behind a text and a path of drafts. `features` `[T, F, Et]` are the target's, of every token of the
    text but the last; behind that the head reads its own states."""
    tokens, states = list(tokens[1:]), fused(head, features)
    for draft in drafts:
        out, _ = eagle_pass(head, target, tokens, states)
        tokens, states = [*tokens, draft], np.concatenate([states, out[-1:]])
    return eagle_pass(head, target, tokens, states)[1][-1]
