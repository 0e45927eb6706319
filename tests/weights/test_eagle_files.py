"""EAGLE heads in every published layout: tensors spelled out here, logits against NumPy."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import cache as kv
from jspec import types
from jspec.models import config as model_config
from jspec.models import heads as heads_lib
from jspec.models import transformer
from jspec.weights import eagle_files, safetensors_files
from tests import checkpoints, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

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


# EAGLE-1.


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_eagle1(tmp_path, name):
    """Without the key `bias` fc has one, and the target's embedding serves."""
    tensors = eagle1()
    head = load(write(tmp_path / "head", tensors, name=name))
    assert head.config.version == 1 and head.config.fc_bias and not head.config.own_embedding
    check(head, eagle1_logits(tensors))
    # A wrong order of embedding and feature does not pass.
    swapped = np.roll(tensors["fc.weight"], E, axis=1)
    with pytest.raises(AssertionError):
        check(head, eagle1_logits(tensors | {"fc.weight": swapped}))


def test_eagle1_bias_by_key_and_by_engine(tmp_path):
    with_bias, without = eagle1(), eagle1()
    del without["fc.bias"]
    vllm, sglang = ["EagleLlamaForCausalLM"], ["LlamaForCausalLMEagle"]
    for index, (tensors, changes) in enumerate(
        [
            (without, {"bias": False}),
            (without, {"architectures": vllm}),
            (without, {"architectures": sglang, "bias": False}),
            (with_bias, {"bias": True}),
            (with_bias, {"architectures": vllm, "bias": True}),
            (with_bias, {"architectures": sglang, "bias": False}),
        ]
    ):
        head = load(write(tmp_path / str(index), tensors, **changes))
        assert head.config.fc_bias == (tensors is with_bias)
        check(head, eagle1_logits(tensors))
    with pytest.raises(ValueError, match="missing: fc.bias"):
        load(write(tmp_path / "a", without))
    with pytest.raises(ValueError, match=r"unknown: fc.bias \(in model.safetensors\)"):
        load(write(tmp_path / "b", with_bias, bias=False))
    with pytest.raises(ValueError, match="bias is 'no', expected true or false"):
        load(write(tmp_path / "b", with_bias, bias="no"))


def test_eagle1_embedding_of_its_own(tmp_path):
    target, rng = np.asarray(tiny.random_target().model.params["embed"]), np.random.default_rng(5)
    same = load(write(tmp_path / "same", eagle1() | {"embed_tokens.weight": target}))
    assert not same.config.own_embedding and "embed" not in same.params
    other = (target + 0.1 * rng.standard_normal(target.shape)).astype(np.float32)
    own = load(write(tmp_path / "own", eagle1() | {"embed_tokens.weight": other}))
    assert own.config.own_embedding
    check(own, eagle1_logits(eagle1(), embed=other))
    with pytest.raises(ValueError, match=r"embed_tokens.weight .* has shape \(63, 32\), expected \(64, 32\)"):
        load(write(tmp_path / "short", eagle1() | {"embed_tokens.weight": target[1:]}))


def test_eagle1_borrows_its_output_matrix(tmp_path):
    target = np.asarray(tiny.random_target().model.params["head"])
    head = load(write(tmp_path / "same", eagle1() | {"lm_head.weight": target}))
    assert not head.config.own_head and "head" not in head.params
    with pytest.raises(ValueError, match="lm_head.weight differs from the target's output matrix"):
        load(write(tmp_path / "other", eagle1() | {"lm_head.weight": 2 * target}))


def test_eagle1_norm_prefix_biases_and_what_old_checkpoints_store(tmp_path):
    rng = np.random.default_rng(6)
    more = {"layers.0.input_layernorm.weight": draw(rng, E, norm=True)}
    more |= {
        f"layers.0.self_attn.{n}_proj.bias": draw(rng, rows) for n, rows in (("q", H * D), ("k", K * D), ("v", K * D))
    }
    tensors = eagle1() | more
    stored = {f"model.{name}": tensor for name, tensor in tensors.items()}
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(D // 2, np.float32)
    head = load(write(tmp_path / "head", stored, qkv_bias=True))
    assert head.config.input_norm and head.config.layer.qkv_bias and not head.config.layer.output_bias
    check(head, eagle1_logits(tensors))


# EAGLE-3.


def test_eagle3(tmp_path):
    """Both spellings and vLLM's prefix; offsets become the target's ids."""
    tensors = eagle3()
    expected = eagle3_logits(tensors)
    for index, variant in enumerate((tensors, eagle3("layers.0."), eagle3(prefix="model."))):
        head = load(write(tmp_path / str(index), variant, EAGLE3))
        config = head.config
        assert config.version == 3 and config.vocab_size == len(IDS) and config.own_head and config.num_features == 3
        assert not (config.norm_before_residual or config.norm_before_fc or config.fc_norm or config.norm_output)
        assert config.feature_layers is None
        np.testing.assert_array_equal(head.params["draft_ids"], IDS)
        check(head, expected)
    # The released uploads name no architecture of their own.
    check(load(write(tmp_path / "0", tensors, EAGLE3, architectures=["LlamaForCausalLM"])), expected)
    # Embedding and state in the wrong order do not pass.
    swapped = {
        f"midlayer.self_attn.{n}_proj.weight": np.roll(tensors[f"midlayer.self_attn.{n}_proj.weight"], E, 1)
        for n in "qkv"
    }
    with pytest.raises(AssertionError):
        check(head, eagle3_logits(tensors | swapped))


def test_eagle3_whole_vocabulary(tmp_path):
    tensors = eagle3(ids=None)
    for index, changes in enumerate(({"draft_vocab_size": V}, {"draft_vocab_size": None})):
        head = load(write(tmp_path / str(index), tensors, EAGLE3, **changes))
        assert head.config.vocab_size == V and "draft_ids" not in head.params
        check(head, eagle3_logits(tensors))
    same = tensors | {"d2t": np.zeros(V, np.int64), "t2d": np.ones(V, bool)}
    assert "draft_ids" not in load(write(tmp_path / "same", same, EAGLE3, draft_vocab_size=V)).params
    same["d2t"][3] = 1
    with pytest.raises(ValueError, match="d2t moves tokens although the draft vocabulary is the target's"):
        load(write(tmp_path / "same", same, EAGLE3, draft_vocab_size=V))
    # The target's matrix serves where none is stored, and where the stored one is the same.
    target = np.asarray(tiny.random_target().model.params["head"])
    for index, more in enumerate(({}, {"lm_head.weight": target})):
        stored = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"} | more
        head = load(write(tmp_path / f"borrowed{index}", stored, EAGLE3, draft_vocab_size=V))
        assert not head.config.own_head
        check(head, eagle3_logits(stored))
    with pytest.raises(ValueError, match="tie_word_embeddings is true and no lm_head.weight"):
        load(write(tmp_path / "borrowed0", {"norm.weight": target}, EAGLE3, tie_word_embeddings=True))


def test_eagle3_switches(tmp_path):
    rng = np.random.default_rng(7)
    input_norm = {"input_norm.weight": draw(rng, 3 * E, norm=True)}
    fc_norm = {f"fc_norm.{i}.weight": draw(rng, E, norm=True) for i in range(3)}
    legacy = dict(zip([f"aux_norm_{n}.weight" for n in ("low", "mid", "high")], fc_norm.values()))
    embed = {"embed_tokens.weight": draw(rng, V, E)}
    nested = {"eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    cases = [
        (input_norm, {}, {"norm_before_fc": True}, {"norm_before_fc"}),
        (input_norm, {}, nested, {"norm_before_fc"}),
        (fc_norm, fc_norm, {"fc_norm": True}, {"fc_norm"}),
        (legacy, fc_norm, {"use_aux_norm": True}, {"fc_norm"}),
        (embed, {}, {}, {"own_embedding"}),
        ({}, {}, {"norm_output": True}, {"norm_output"}),
        ({}, {}, {"norm_before_residual": True}, {"norm_before_residual"}),
    ]
    switches = {"norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "own_embedding"}
    for index, (stored, named, changes, on) in enumerate(cases):
        head = load(write(tmp_path / str(index), eagle3() | stored, EAGLE3, **changes))
        assert {name for name in switches if getattr(head.config, name)} == on
        expected = eagle3_logits(eagle3() | stored | named, residual_normed="norm_before_residual" in on)
        check(head, expected)
        if stored and stored is not embed:  # the switch is off: the tensors are unknown
            with pytest.raises(ValueError, match=f"unknown: .*{next(iter(stored))}"):
                load(write(tmp_path / str(index), eagle3() | stored, EAGLE3))
            with pytest.raises(ValueError, match=f"missing: .*{next(iter(named or stored))}"):
                load(write(tmp_path / str(index), eagle3(), EAGLE3, **changes))
    assert load(
        write(
            tmp_path / "ids", eagle3(), EAGLE3, **{"eagle_config": nested["eagle_config"] | {"norm_before_fc": False}}
        )
    ).config.feature_layers == (0, 1, 2)
    ids = load(write(tmp_path / "ids", eagle3(), EAGLE3, eagle_aux_hidden_state_layer_ids=[1, 2, 5]))
    assert ids.config.feature_layers == (1, 2, 5)


def test_eagle3_other_numbers_of_features_and_other_widths(tmp_path):
    """Two features; and a head half as wide, which brings its own embedding."""
    tensors = eagle3()
    two = tensors | {"fc.weight": tensors["fc.weight"][:, : 2 * E]}
    head = load(write(tmp_path / "two", two, EAGLE3, num_aux_hidden_states=2))
    assert head.config.num_features == 2
    rng, half = np.random.default_rng(8), E // 2
    narrow = {
        "midlayer.self_attn.q_proj.weight": draw(rng, H * D, 2 * half),
        "midlayer.self_attn.k_proj.weight": draw(rng, K * D, 2 * half),
        "midlayer.self_attn.v_proj.weight": draw(rng, K * D, 2 * half),
        "midlayer.self_attn.o_proj.weight": draw(rng, half, H * D),
        "midlayer.mlp.gate_proj.weight": draw(rng, FFN, half),
        "midlayer.mlp.up_proj.weight": draw(rng, FFN, half),
        "midlayer.mlp.down_proj.weight": draw(rng, half, FFN),
        "midlayer.post_attention_layernorm.weight": draw(rng, half, norm=True),
        "midlayer.hidden_norm.weight": draw(rng, half, norm=True),
        "midlayer.input_layernorm.weight": draw(rng, half, norm=True),
        "embed_tokens.weight": draw(rng, V, half),
        "fc.weight": draw(rng, half, 3 * E),
        "norm.weight": draw(rng, half, norm=True),
        "lm_head.weight": draw(rng, len(IDS), half),
        "d2t": IDS - np.arange(len(IDS)),
    }
    config = EAGLE3 | {"hidden_size": half, "target_hidden_size": E}
    head = load(write(tmp_path / "narrow", narrow, config))
    assert head.config.layer.width == half and head.config.target_width == E
    check(head, eagle3_logits(narrow))
    del narrow["embed_tokens.weight"]
    with pytest.raises(ValueError, match="width 16 differs from target_width 32: the head needs own_embedding"):
        load(write(tmp_path / "narrow", narrow, config))


def test_speculators(tmp_path):
    """The layer's own config inside; an absent norm_before_residual is true, an explicit one wins."""
    tensors = eagle3("layers.0.")
    for index, (changes, normed) in enumerate(
        (({}, True), ({"norm_before_residual": False}, False), ({"norm_before_residual": True}, True))
    ):
        head = load(write(tmp_path / str(index), tensors, SPECULATORS, **changes))
        assert head.config.norm_before_residual == normed
        check(head, eagle3_logits(tensors, "layers.0.", residual_normed=normed))
    assert not np.allclose(
        eagle3_logits(tensors, "layers.0.", residual_normed=True), eagle3_logits(tensors, "layers.0."), atol=0.1
    )
    rng = np.random.default_rng(9)
    qwen = {f"layers.0.self_attn.{n}_norm.weight": draw(rng, D, norm=True) for n in "qk"}
    inner = {"transformer_layer_config": LLAMA | {"model_type": "qwen3"}, "norm_before_residual": False}
    head = load(write(tmp_path / "qwen3", tensors | qwen, SPECULATORS, **inner))
    assert head.config.layer.qk_norm
    check(head, eagle3_logits(tensors | qwen, "layers.0."))
    for changes, match in (
        ({"speculators_model_type": "peagle"}, "speculators_model_type 'peagle' is not supported"),
        ({"transformer_layer_config": None}, "transformer_layer_config is None, expected an object"),
        ({"transformer_layer_config": LLAMA | {"model_type": "gemma"}}, "model_type 'gemma' is not supported"),
        ({"transformer_layer_config": LLAMA | {"num_hidden_layers": 2}}, "num_hidden_layers is 2"),
    ):
        with pytest.raises(ValueError, match=match):
            load(write(tmp_path / "wrong", tensors, SPECULATORS, **changes))


def test_eagle3_draft_vocabularies_that_make_no_sense(tmp_path):
    tensors = eagle3()
    order = np.arange(len(IDS))

    def wrong(match, **changes):
        with pytest.raises(ValueError, match=match):
            load(write(tmp_path / "head", tensors | changes, EAGLE3))

    negative, twice, missing = IDS.copy(), IDS.copy(), IDS.copy()
    negative[2], twice[4], missing[1] = -1, 60, 5
    wrong(r"d2t\[6\] = 63 makes token 69, which is not in 0 .. 63", d2t=IDS)  # absolute ids
    wrong(r"d2t\[2\] = -3 makes token -1", d2t=negative - order)
    wrong("d2t: id 60 stands twice", d2t=twice - order)
    wrong("t2d does not mark token 5, which d2t makes|t2d marks token 3, which d2t does not make", d2t=missing - order)
    wrong("t2d marks token 1, which d2t does not make", t2d=np.isin(np.arange(V), [*IDS, 1]))
    wrong("d2t holds float32, expected whole numbers", d2t=(IDS - order).astype(np.float32))
    wrong(r"d2t .* has shape \(7,\), expected \(8,\)", d2t=(IDS - order)[:-1])
    wrong(r"t2d .* has shape \(63,\), expected \(64,\)", t2d=tensors["t2d"][1:])
    for name in ("d2t", "lm_head.weight"):
        with pytest.raises(ValueError, match=f"missing: {name}"):
            load(write(tmp_path / "head", {n: tensor for n, tensor in tensors.items() if n != name}, EAGLE3))
    np.testing.assert_array_equal(
        load(write(tmp_path / "int32", tensors | {"d2t": (IDS - order).astype(np.int32)}, EAGLE3)).params["draft_ids"],
        IDS,
    )


def test_tensors_that_do_not_fit_are_all_named(tmp_path):
    tensors = eagle3()
    del tensors["norm.weight"], tensors["midlayer.self_attn.k_proj.weight"]
    tensors |= {
        "mask_hidden": np.zeros(3 * E, np.float32),
        "layers.0.mlp.up_proj.weight": np.zeros((FFN, E), np.float32),
    }
    tensors["midlayer.self_attn.q_proj.weight"] = tensors["midlayer.self_attn.q_proj.weight"][:, :E]
    with pytest.raises(ValueError) as error:
        load(write(tmp_path / "head", tensors, EAGLE3))
    message = str(error.value)
    assert "missing: midlayer.self_attn.k_proj.weight, norm.weight" in message
    assert "unknown: layers.0.mlp.up_proj.weight (in model.safetensors), mask_hidden (in model.safetensors)" in message
    assert "midlayer.self_attn.q_proj.weight in model.safetensors has shape (32, 32), expected (32, 64)" in message


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_size": 16, "target_hidden_size": 16, "head_dim": 8}, "features of width 16; the target's have 32"),
        ({"vocab_size": 65}, "vocab_size is 65; the target's is 64"),
        ({"draft_vocab_size": 65}, "draft_vocab_size 65 is more than the target's 64"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; an EAGLE head has one layer"),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is not supported"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm exclude each other"),
        ({"eagle_aux_hidden_state_layer_ids": [1, "2"]}, "expected layers of the target"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2], "num_aux_hidden_states": 3}, "are not num_features 3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"norm_output": 1}, "norm_output is 1, expected true or false"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
)
def test_configs_that_describe_no_head_of_this_target(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match) as error:
        load(write(tmp_path / "head", eagle3(), EAGLE3, **changes))
    assert "config.json" in str(error.value)


def test_files_that_are_missing(tmp_path):
    reference = write(tmp_path / "head", eagle1())
    digest = hashlib.sha256((tmp_path / "head" / "model.safetensors").read_bytes()).hexdigest()
    load(reference, sha256=digest)
    check(load(f"{reference}/model.safetensors"), eagle1_logits(eagle1()))
    with pytest.raises(ValueError, match=f"is {digest}, expected"):
        load(reference, sha256="0" * 64)
    (tmp_path / "head" / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json is missing"):
        load(reference)
    (tmp_path / "head" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no .safetensors file"):
        load(reference)


# Writing.


def one_layer(**changes) -> model_config.TransformerConfig:
    return checkpoints.with_options(num_layers=1, **changes)


def made(version: int, reduced: bool = False, dtype=jnp.float32, layer=None, **changes) -> heads_lib.EagleHead:
    """A random head; a reduced vocabulary in no order."""
    layer = layer or one_layer()
    config = dict(version=version, layer=layer, target_width=E, vocab_size=len(IDS) if reduced else V)
    if version == 3:
        config |= {"num_features": 3, "own_head": True}
    head = heads_lib.init_eagle(jax.random.key(3), heads_lib.EagleConfig(**(config | changes)), dtype)
    params = {**head.params, "draft_ids": jnp.asarray(IDS, jnp.int32)} if reduced else head.params
    return heads_lib.EagleHead(params, head.config)


def save(head, folder, **rest):
    eagle_files.save(head, tiny.random_target(), folder, base_model="org/base", **rest)


LLAMA3 = model_config.RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = model_config.RopeScaling("yarn", 4.0, 64, beta_fast=16.0, attention_factor=1.25, truncate=False)
ROUND_TRIPS = [
    (dict(version=1), {}),
    (dict(version=1, fc_bias=True, own_embedding=True, input_norm=True), {}),
    (dict(version=1), {"engine": "vllm"}),
    (dict(version=1, fc_bias=True), {"engine": "sglang"}),
    (dict(version=3), {}),
    (dict(version=3, reduced=True, norm_before_fc=True, norm_output=True, feature_layers=(0, 1, 2)), {}),
    (dict(version=3, reduced=True, fc_norm=True, own_embedding=True), {"engine": "sglang"}),
    (dict(version=3, own_head=False), {}),
    (dict(version=3, reduced=True, norm_before_residual=True, feature_layers=(0, 1, 2)), {"layout": "speculators"}),
    (dict(version=3, layer=one_layer(qk_norm=True)), {"layout": "speculators"}),
    (dict(version=3, layer=one_layer(qkv_bias=True, rope_scaling=LLAMA3)), {}),
    (dict(version=1, layer=one_layer(rope_scaling=YARN, activation="gelu_tanh")), {}),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(ROUND_TRIPS)))
def test_round_trip(tmp_path, index):
    changes, settings = ROUND_TRIPS[index]
    head = made(**changes)
    save(head, tmp_path / "out", **settings)
    assert os.listdir(tmp_path) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    found = load(str(tmp_path / "out"))
    assert found.config == head.config
    jax.tree.map(np.testing.assert_array_equal, found.params, head.params)


def stored(folder) -> tuple[dict, dict[str, np.ndarray]]:
    return json.loads((folder / "config.json").read_text()), safetensors_files.load(folder / "model.safetensors")


def test_what_is_written(tmp_path):
    """Names, offsets and switches, by layout."""
    head = made(3, reduced=True)
    rows = {"qkv": np.split(np.asarray(head.params["layer"]["qkv"]), [H * D, H * D + K * D])}
    for layout, inner in (("native", "midlayer."), ("speculators", "layers.0.")):
        save(head, tmp_path / layout, layout=layout)
        content, tensors = stored(tmp_path / layout)
        assert set(tensors) == set(eagle3(inner))
        assert {name: tensor.shape for name, tensor in tensors.items()} == {
            n: t.shape for n, t in eagle3(inner).items()
        }
        for name, part in zip("qkv", rows["qkv"]):
            np.testing.assert_array_equal(tensors[f"{inner}self_attn.{name}_proj.weight"], part)
        np.testing.assert_array_equal(tensors["d2t"], IDS - np.arange(len(IDS)))
        np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), np.sort(IDS))
        assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
        off = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
        said = off | {"tie_word_embeddings": False, "draft_vocab_size": len(IDS), "target_hidden_size": E}
        assert content.items() >= said.items()
    native, speculators = stored(tmp_path / "native")[0], content
    assert native.items() >= (LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}).items()
    assert native["eagle_config"] == {"use_aux_hidden_state": True, "norm_before_fc": False}
    assert speculators["transformer_layer_config"].items() >= LLAMA.items()
    assert speculators["speculators_model_type"] == "eagle3"
    assert speculators["speculators_config"]["verifier"]["name_or_path"] == "org/base"
    assert speculators["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0


def test_eagle1_for_each_engine(tmp_path):
    """vLLM gets no bias, SGLang one of zeros; neither is told of it, since they would give it to the attention."""
    for engine, stored_bias, architecture in (
        ("eagle", False, "LlamaForCausalLM"),
        ("vllm", False, "LlamaForCausalLM"),
        ("sglang", True, "LlamaForCausalLMEagle"),
    ):
        save(made(1), tmp_path / engine, engine=engine)
        content, tensors = stored(tmp_path / engine)
        assert set(tensors) == {name for name in eagle1() if name != "fc.bias" or stored_bias}
        assert content["bias"] is False and content["architectures"] == [architecture]
    assert not tensors["fc.bias"].any()
    biased = made(1, fc_bias=True)
    save(biased, tmp_path / "zero", engine="vllm")  # a bias of zeros is none
    assert "fc.bias" not in stored(tmp_path / "zero")[1]
    biased = heads_lib.EagleHead({**biased.params, "fc_bias": jnp.ones(E)}, biased.config)
    save(biased, tmp_path / "biased")
    assert stored(tmp_path / "biased")[0]["bias"] is True
    with pytest.raises(ValueError, match="fc_bias is not zero, and vLLM's EAGLE-1 heads have none"):
        save(biased, tmp_path / "no", engine="vllm")


def test_a_borrowed_output_matrix_is_written_out(tmp_path):
    target = np.asarray(tiny.random_target().model.params["head"])
    save(made(3, own_head=False), tmp_path / "whole")
    np.testing.assert_array_equal(stored(tmp_path / "whole")[1]["lm_head.weight"], target)
    save(made(3, reduced=True, own_head=False), tmp_path / "reduced")
    np.testing.assert_array_equal(stored(tmp_path / "reduced")[1]["lm_head.weight"], target[IDS])


def test_dtypes_follow_heads_and_target(tmp_path):
    head = made(3, reduced=True, dtype=jnp.bfloat16)
    save(head, tmp_path / "out")
    content, tensors = stored(tmp_path / "out")
    assert content["torch_dtype"] == "bfloat16" and tensors["fc.weight"].dtype.name == "bfloat16"
    assert load(str(tmp_path / "out")).dtype == jnp.float32
    model = tiny.random_target().model
    half = types.Target(transformer.Model(jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params), model.config))
    jax.tree.map(np.testing.assert_array_equal, eagle_files.load(str(tmp_path / "out"), half).params, head.params)


FACTORS = model_config.RopeScaling("factors", 1.0, factors=(1.0,) * 4)


@pytest.mark.parametrize(
    ("changes", "settings", "match"),
    [
        (dict(version=1), {"layout": "speculators"}, "this one is EAGLE-1"),
        (dict(version=1, own_head=True), {}, "no place for an output matrix"),
        (dict(version=1, input_norm=True), {"engine": "sglang"}, "sglang applies no norm"),
        (dict(version=3), {"layout": "gguf"}, "layout 'gguf' is not one of native, speculators"),
        (dict(version=3), {"engine": "trt"}, "engine 'trt' is not one of eagle, vllm, sglang"),
        (dict(version=3, norm_before_residual=True), {"engine": "sglang"}, "norm_before_residual: SGLang ignores it"),
        (dict(version=3, feature_layers=(0, 1, 2)), {"engine": "sglang"}, "would read the layers after these"),
        (dict(version=3), {"engine": "sglang", "layout": "speculators"}, "is vLLM's"),
        (dict(version=3, layer=one_layer(qkv_bias=True)), {"engine": "sglang"}, "attention biases"),
        (dict(version=3, layer=one_layer(qk_norm=True)), {}, "write layout speculators"),
        (
            dict(version=3, layer=one_layer(qk_norm=True, ffn_bias=True)),
            {"layout": "speculators"},
            "no feed-forward bias",
        ),
        (dict(version=3, layer=one_layer(vocab_size=65)), {}, "vocab_size is 65"),
        (dict(version=3, layer=one_layer(rope_scaling=FACTORS)), {}, "no place in config.json"),
    ],
)
def test_heads_that_cannot_be_written(tmp_path, changes, settings, match):
    with pytest.raises(ValueError, match=match):
        save(made(**changes), tmp_path / "out", **settings)
    assert not os.listdir(tmp_path)


def test_draft_ids_that_cannot_be_written(tmp_path):
    head = made(3, reduced=True)
    for ids, match in ((IDS + 10, "is outside the target's 64 tokens"), (0 * IDS, "id 0 stands twice")):
        wrong = heads_lib.EagleHead({**head.params, "draft_ids": jnp.asarray(ids)}, head.config)
        with pytest.raises(ValueError, match=match):
            save(wrong, tmp_path / "out")


def test_default_layers_are_left_unsaid_for_sglang(tmp_path):
    config = checkpoints.with_options(num_layers=8)
    target = tiny.target(config, checkpoints.random_params(config))
    head = made(3, feature_layers=(2, 4, 5))
    eagle_files.save(head, target, tmp_path / "sglang", engine="sglang", base_model="base")
    assert eagle_files.load(str(tmp_path / "sglang"), target).config == dataclasses.replace(
        head.config, feature_layers=None
    )
    eagle_files.save(head, target, tmp_path / "eagle", base_model="base")
    assert eagle_files.load(str(tmp_path / "eagle"), target).config == head.config


def test_nothing_is_left_of_a_failed_write(tmp_path, monkeypatch):
    head = made(3, reduced=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(ValueError, match="full is not empty"):
        save(head, tmp_path / "full")
    real = safetensors_files.save

    def full_disk(tensors, path, **rest):
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    def wrong_values(tensors, path, **rest):
        real(tensors | {"norm.weight": 1.01 * tensors["norm.weight"]}, path, **rest)

    def wrong_ids(tensors, path, **rest):
        marks = np.roll(tensors["t2d"], -1)
        real(tensors | {"d2t": np.flatnonzero(marks) - np.arange(len(IDS)), "t2d": marks}, path, **rest)

    for fault, match in ((full_disk, "No space"), (wrong_values, "same logits"), (wrong_ids, "vocabulary reads back")):
        monkeypatch.setattr(safetensors_files, "save", fault)
        with pytest.raises((OSError, ValueError), match=match):
            save(head, tmp_path / "out")
        assert os.listdir(tmp_path) == ["full"]
