"""Tensors of EAGLE heads by the names of the published layouts, and the forward passes of the papers on them."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache as kv
from jspec.models import heads as heads_lib
from jspec.weights import eagle_files, safetensors_files
from tests import checkpoints, tiny

BASE = checkpoints.RANDOM
V, E, H, K, D, FFN = BASE.vocab_size, BASE.width, BASE.num_heads, BASE.num_kv_heads, BASE.head_size, BASE.ffn_size
T = 4
EPS = 1e-5
TOKENS = np.random.default_rng(1).integers(0, V, T)
FEATURES = np.random.default_rng(2).standard_normal((T, 3, E))
IDS = np.array([60, 3, 11, 40, 7, 0, 63, 22])  # of a reduced vocabulary, in no order


def draw(rng, *shape: int, norm: bool = False) -> np.ndarray:
    return (1 + 0.1 * rng.standard_normal(shape) if norm else 0.3 * rng.standard_normal(shape)).astype(np.float32)


def layer(rng, entering: int) -> dict[str, np.ndarray]:
    """What all layouts share, without the layer's prefix."""
    return {
        "self_attn.q_proj.weight": draw(rng, H * D, entering),
        "self_attn.k_proj.weight": draw(rng, K * D, entering),
        "self_attn.v_proj.weight": draw(rng, K * D, entering),
        "self_attn.o_proj.weight": draw(rng, E, H * D),
        "mlp.gate_proj.weight": draw(rng, FFN, E),
        "mlp.up_proj.weight": draw(rng, FFN, E),
        "mlp.down_proj.weight": draw(rng, E, FFN),
        "post_attention_layernorm.weight": draw(rng, E, norm=True),
    }


def eagle1(prefix: str = "") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    tensors = {f"layers.0.{name}": tensor for name, tensor in layer(rng, E).items()}
    tensors |= {"fc.weight": draw(rng, E, 2 * E), "fc.bias": draw(rng, E)}
    return {prefix + name: tensor for name, tensor in tensors.items()}


def eagle3(inner: str = "midlayer.", ids: np.ndarray | None = IDS, prefix: str = "") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    tensors = layer(rng, 2 * E)
    tensors |= {"hidden_norm.weight": draw(rng, E, norm=True), "input_layernorm.weight": draw(rng, E, norm=True)}
    tensors = {inner + name: tensor for name, tensor in tensors.items()}
    tensors |= {"fc.weight": draw(rng, E, 3 * E), "norm.weight": draw(rng, E, norm=True)}
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    tensors["lm_head.weight"] = draw(rng, V if ids is None else len(ids), E)
    if ids is not None:
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(V), ids)
    return tensors


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": E, "intermediate_size": FFN, "num_attention_heads": H,
    "num_key_value_heads": K, "head_dim": D, "rms_norm_eps": EPS, "rope_theta": 10000.0, "vocab_size": V,
    "max_position_embeddings": 256, "hidden_act": "silu",
}  # fmt: skip
EAGLE1 = LLAMA | {"architectures": ["LlamaForCausalLM"]}
EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(IDS)}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": LLAMA,
    "draft_vocab_size": len(IDS),
}


def write(
    folder, tensors: dict[str, np.ndarray], config: dict | None = None, name: str = "model.safetensors", **changes
):
    folder.mkdir(exist_ok=True)
    if name.endswith(".safetensors"):
        safetensors_files.save(tensors, folder / name)
    else:
        checkpoints.write_torch(folder / name, tensors)
    (folder / "config.json").write_text(json.dumps((config or EAGLE1) | changes))
    return str(folder)


# The forward passes of the papers, by the files' names, in float64.


def norm(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + EPS) * scale


def decoder_layer(t, inner, residual, entering):
    """Causal attention over a whole block, then the gated unit."""

    def heads(name, count):
        x = entering @ t[f"{inner}self_attn.{name}_proj.weight"].T + t.get(f"{inner}self_attn.{name}_proj.bias", 0)
        x = x.reshape(T, count, D)
        scale = t.get(f"{inner}self_attn.{name}_norm.weight")
        return x if scale is None else norm(x, scale)

    def rotate(x):
        angles = np.arange(T)[:, None, None] * 10000.0 ** (-np.arange(0, D, 2) / D)
        pairs = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    query, key, value = rotate(heads("q", H)), rotate(heads("k", K)), heads("v", K)
    mixed = np.zeros((T, H, D))
    for head in range(H):
        for i in range(T):
            scores = key[: i + 1, head * K // H] @ query[i, head] / math.sqrt(D)
            weights = np.exp(scores - scores.max())
            mixed[i, head] = weights / weights.sum() @ value[: i + 1, head * K // H]
    x = residual + mixed.reshape(T, -1) @ t[f"{inner}self_attn.o_proj.weight"].T
    h = norm(x, t[f"{inner}post_attention_layernorm.weight"])
    gate = h @ t[f"{inner}mlp.gate_proj.weight"].T
    return (
        x + gate / (1 + np.exp(-gate)) * (h @ t[f"{inner}mlp.up_proj.weight"].T) @ t[f"{inner}mlp.down_proj.weight"].T
    )


def eagle1_logits(t, embed=None, head=None) -> np.ndarray:
    params = tiny.random_target().model.params
    embed = np.asarray(params["embed"]) if embed is None else embed
    x = np.concatenate([embed[TOKENS], FEATURES[:, -1]], axis=1) @ t["fc.weight"].T + t.get("fc.bias", 0)
    scale = t.get("layers.0.input_layernorm.weight")
    x = decoder_layer(t, "layers.0.", x, x if scale is None else norm(x, scale))
    return x @ np.asarray(params["head"]).T


def eagle3_logits(t, inner="midlayer.", residual_normed=False) -> np.ndarray:
    params = tiny.random_target().model.params
    embed = t.get("embed_tokens.weight", np.asarray(params["embed"]))
    features = FEATURES
    if "fc_norm.0.weight" in t:
        features = np.stack([norm(FEATURES[:, i], t[f"fc_norm.{i}.weight"]) for i in range(3)], axis=1)
    joined = features.reshape(T, -1)
    if "input_norm.weight" in t:
        joined = norm(joined, t["input_norm.weight"])
    hidden = joined @ t["fc.weight"].T
    normed = norm(hidden, t[f"{inner}hidden_norm.weight"])
    entering = np.concatenate([norm(embed[TOKENS], t[f"{inner}input_layernorm.weight"]), normed], axis=1)
    x = decoder_layer(t, inner, normed if residual_normed else hidden, entering)
    x = norm(x, t["norm.weight"])
    return x @ t.get("lm_head.weight", np.asarray(params["head"])).T


def check(head: heads_lib.EagleHead, expected: np.ndarray):
    shapes = heads_lib.eagle_shapes(head.config)
    assert jax.tree.map(jnp.shape, head.params) == jax.tree.map(jnp.shape, shapes)
    model = tiny.random_target().model
    features = jnp.asarray(FEATURES[None, :, -head.config.num_features :], jnp.float32)
    states, _ = heads_lib.eagle_forward(
        head,
        model,
        jnp.asarray(TOKENS, jnp.int32)[None],
        heads_lib.fuse(head, features),
        jnp.arange(T)[None],
        kv.init(head.config.layer, 1, 1),
        jnp.tril(jnp.ones((1, T, T), bool)),
    )
    found = np.asarray(heads_lib.eagle_logits(head, model, states))[0]
    # Float32 against float64: logits of some tens.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-4)


def load(reference, **rest) -> heads_lib.EagleHead:
    return eagle_files.load(reference, tiny.random_target(), **rest)
