"""EAGLE heads in every published layout: tensors spelled out here, logits against NumPy."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tests import tiny
from tests.weights.eagle_tensors import (
    EAGLE3,
    FFN,
    IDS,
    LLAMA,
    SPECULATORS,
    D,
    E,
    H,
    K,
    V,
    check,
    draw,
    eagle1,
    eagle1_logits,
    eagle3,
    eagle3_logits,
    load,
    write,
)

pytestmark = pytest.mark.usefixtures("small_programs")


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
