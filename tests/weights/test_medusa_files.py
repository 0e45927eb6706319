"""Medusa heads in every published layout: tensors spelled out here, logits against NumPy."""

from __future__ import annotations

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec import topology, types
from jspec.drafters import draft_vocabulary, medusa
from jspec.models import heads as heads_lib
from jspec.models import transformer
from jspec.weights import medusa_files, references, safetensors_files
from tests import checkpoints, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

WIDTH, VOCAB = checkpoints.RANDOM.width, checkpoints.RANDOM.vocab_size
K, N = 3, 2  # heads and blocks in each
FEATURES = np.random.default_rng(1).standard_normal((2, WIDTH)).astype(np.float32)


def draw(seed: int = 0):
    """Blocks `[K, N, E, E]`, biases `[K, N, E]`, output matrices `[K, V, E]`."""
    rng = np.random.default_rng(seed)
    shapes = (K, N, WIDTH, WIDTH), (K, N, WIDTH), (K, VOCAB, WIDTH)
    return [(0.3 * rng.standard_normal(shape)).astype(np.float32) for shape in shapes]


def released(blocks, biases, matrices=None) -> dict[str, np.ndarray]:
    tensors = {}
    for head in range(K):
        for layer in range(N):
            tensors[f"{head}.{layer}.linear.weight"] = blocks[head, layer]
            tensors[f"{head}.{layer}.linear.bias"] = biases[head, layer]
        if matrices is not None:
            tensors[f"{head}.{N}.weight"] = matrices[head]
    return tensors


def vllm(blocks, biases=None, matrices=None) -> dict[str, np.ndarray]:
    tensors = {}
    for head in range(K):
        for layer in range(N):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = blocks[head, layer]
            if biases is not None:
                tensors[f"blocks.{head}.layers.{layer}.bias"] = biases[head, layer]
        if matrices is not None:
            tensors[f"lm_heads.{head}.weight"] = matrices[head]
    return tensors


def write(folder, tensors: dict[str, np.ndarray], name: str = "medusa_lm_head.safetensors", **config):
    folder.mkdir(exist_ok=True)
    if name.endswith(".safetensors"):
        safetensors_files.save(tensors, folder / name)
    else:
        checkpoints.write_torch(folder / name, tensors)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def expected_logits(blocks, biases, matrices) -> np.ndarray:
    """`[B, K, rows]`: x + silu(W x + b) per block, then the matrix."""
    out = []
    for head in range(K):
        x = FEATURES.astype(np.float64)
        for layer in range(N):
            z = x @ blocks[head, layer].T + biases[head, layer]
            x = x + z / (1 + np.exp(-z))
        out.append(x @ matrices[head].T)
    return np.stack(out, axis=1)


def check(heads: heads_lib.MedusaHeads, expected: np.ndarray):
    shapes = heads_lib.medusa_shapes(heads.config)
    assert jax.tree.map(jnp.shape, heads.params) == jax.tree.map(jnp.shape, shapes)
    found = heads_lib.medusa_logits(heads, tiny.random_target().model, jnp.asarray(FEATURES))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt", "pytorch_model.bin"])
def test_dev25_released_layout(tmp_path, name):
    """config.json says 2 heads, as uploads do, and the file holds 3."""
    blocks, biases, matrices = draw()
    reference = write(
        tmp_path / "heads", released(blocks, biases, matrices), name, medusa_num_heads=2, medusa_num_layers=N
    )
    expected = expected_logits(blocks, biases, matrices)
    for place in (reference, f"{reference}/{name}"):
        heads = medusa_files.load(place, tiny.random_target())
        assert heads.config == heads_lib.MedusaConfig(K, N, WIDTH, VOCAB)
        check(heads, expected)
    # Heads that are swapped do not pass.
    with pytest.raises(AssertionError):
        check(heads, expected[:, ::-1])
    (tmp_path / "heads" / "config.json").unlink()
    check(medusa_files.load(reference, tiny.random_target()), expected)


def test_dev25_heads_that_share_the_targets_matrix(tmp_path):
    blocks, biases, _ = draw()
    reference = write(tmp_path / "heads", released(blocks, biases), version="2", medusa_num_heads=K)
    heads = medusa_files.load(reference, tiny.random_target())
    assert heads.config == heads_lib.MedusaConfig(K, N, WIDTH)
    target_head = np.asarray(tiny.random_target().model.params["head"])
    check(heads, expected_logits(blocks, biases, [target_head] * K))


def test_dev25_inside_a_whole_model(tmp_path):
    blocks, biases, matrices = draw()
    folder = checkpoints.write_huggingface(tmp_path / "model")
    tensors = safetensors_files.load(folder)
    tensors |= {f"medusa_head.{name}": tensor for name, tensor in released(blocks, biases, matrices).items()}
    safetensors_files.save(tensors, folder / "model.safetensors")
    check(medusa_files.load(str(folder), tiny.random_target()), expected_logits(blocks, biases, matrices))
    safetensors_files.save(tensors | {"visual.weight": FEATURES}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"unknown tensors beside medusa_head\.\*: visual.weight"):
        medusa_files.load(str(folder), tiny.random_target())


def test_dev25_blocks_by_hand(tmp_path):
    """x = [1, -1, 0, ...]: W = 0, b = 0 leaves it; W = I gives 1 + 1/(1 + e^-1), -1 - 1/(1 + e)."""
    eye = np.eye(WIDTH, dtype=np.float32)
    tensors = {"0.0.linear.weight": 0 * eye, "0.0.linear.bias": eye[0] * 0}
    tensors |= {"1.0.linear.weight": eye, "1.0.linear.bias": eye[0] * 0}
    heads = medusa_files.load(write(tmp_path / "heads", tensors), tiny.random_target())
    states = heads_lib.medusa_states(heads, jnp.asarray(eye[:1] - eye[1:2]))[0]
    np.testing.assert_array_equal(states[0, :3], [1, -1, 0])
    np.testing.assert_allclose(states[1, :3], [1.731059, -1.268941, 0], atol=1e-6)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_dev25_vllm_layout(tmp_path, prefix):
    blocks, biases, matrices = draw()
    with_prefix = lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}
    config = dict(model_type="medusa", num_heads=K, num_hidden_layers=N, vocab_size=VOCAB, truncated_vocab_size=VOCAB)
    target = tiny.random_target()
    reference = write(tmp_path / "a", with_prefix(vllm(blocks, biases, matrices)), "model.safetensors", **config)
    check(medusa_files.load(reference, target), expected_logits(blocks, biases, matrices))
    # No biases unless the config has them.
    reference = write(tmp_path / "b", with_prefix(vllm(blocks, None, matrices)), "model.safetensors", **config)
    check(medusa_files.load(reference, target), expected_logits(blocks, 0 * biases, matrices))
    with pytest.raises(ValueError, match=r"unknown: .*blocks\.0\.layers\.0\.bias"):
        medusa_files.load(write(tmp_path / "a", {}, "unused.bin", medusa_fc_bias=False, **config), target)
    with pytest.raises(ValueError, match=r"missing: .*blocks\.0\.layers\.0\.bias"):
        medusa_files.load(write(tmp_path / "b", {}, "unused.bin", medusa_fc_bias=True, **config), target)


def test_dev25_vllm_one_matrix_for_all_heads(tmp_path):
    blocks, biases, matrices = draw()
    target_head = np.asarray(tiny.random_target().model.params["head"])
    for index, name in enumerate(("lm_head.weight", "lm_heads.0.weight")):
        tensors = vllm(blocks, biases) | {name: target_head}
        reference = write(tmp_path / f"same{index}", tensors, "model.safetensors", original_lm_head=True)
        heads = medusa_files.load(reference, tiny.random_target())
        assert heads.config.vocab_size is None
        check(heads, expected_logits(blocks, biases, [target_head] * K))
        tensors[name] = matrices[0]
        reference = write(tmp_path / f"other{index}", tensors, "model.safetensors", original_lm_head=True)
        check(medusa_files.load(reference, tiny.random_target()), expected_logits(blocks, biases, [matrices[0]] * K))


def test_dev25_vllm_token_map(tmp_path):
    """Matrices that are stored cut, and whole; a map that the config does not call for is not used."""
    blocks, biases, matrices = draw()
    ids = np.array([7, 60, 3, 11, 0])
    expected = expected_logits(blocks, biases, matrices)
    cut = vllm(blocks, biases, matrices[:, ids]) | {"token_map": ids}
    whole = vllm(blocks, biases, matrices) | {"token_map": ids}
    for index, tensors in enumerate((cut, whole)):
        reference = write(tmp_path / str(index), tensors, "model.safetensors", truncated_vocab_size=5)
        heads = medusa_files.load(reference, tiny.random_target())
        assert heads.config == heads_lib.MedusaConfig(K, N, WIDTH, 5, reduced=True)
        np.testing.assert_array_equal(heads.params["draft_ids"], ids)
        check(heads, expected[..., ids])
    check(medusa_files.load(write(tmp_path / "all", whole, "model.safetensors"), tiny.random_target()), expected)
    for wrong, match in (
        (np.array([7, 7, 3, 11, 0]), "id 7 stands twice"),
        (np.array([7, 64, 3, 1, 0]), "id 64 is outside the target's 64 tokens"),
    ):
        write(tmp_path / "0", cut | {"token_map": wrong}, "model.safetensors")
        with pytest.raises(ValueError, match=match):
            medusa_files.load(str(tmp_path / "0"), tiny.random_target())
    del cut["token_map"]
    with pytest.raises(ValueError, match="missing: token_map"):
        medusa_files.load(write(tmp_path / "0", cut, "model.safetensors"), tiny.random_target())


def test_dev25_a_token_map_is_drafted_with(tmp_path):
    """Candidates of a tree are the map's tokens, by rank, and another vocabulary on top of it is refused."""
    blocks, biases, matrices = draw()
    ids = np.array([7, 60, 3, 11, 0])
    tensors = vllm(blocks, biases, matrices[:, ids]) | {"token_map": ids}
    target = tiny.random_target()
    reference = write(tmp_path / "heads", tensors, "model.safetensors", truncated_vocab_size=5)
    shape = topology.Tree(widths=(2, 2))
    drafter = medusa.Medusa(shape, medusa.MedusaDraft(reference))
    bound, params = drafter.build(target)
    context = types.Context(
        tokens=jnp.zeros((2, 1), jnp.int32), length=jnp.ones(2, jnp.int32), features=jnp.asarray(FEATURES)[:, None]
    )
    tree, _ = bound.propose(types.Params(target.model, params), None, None, context, None)
    best = ids[np.argsort(-expected_logits(blocks, biases, matrices)[..., ids], axis=-1)]
    for row in range(2):
        for node in range(1, bound.num_nodes):
            depth, rank = bound.topology.depth[node], bound.topology.ranks[node]
            assert tree.tokens[row, node] == best[row, depth - 1, rank]
    (tmp_path / "ids.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match="the heads have a reduced vocabulary of their own"):
        dataclasses.replace(drafter, vocabulary=draft_vocabulary.Vocabulary(str(tmp_path / "ids.json"))).build(target)
    with pytest.raises(ValueError, match="asks for 6 candidates of 5"):
        dataclasses.replace(drafter, tree=topology.Tree(widths=(6,))).build(target)


def test_dev25_number_of_heads(tmp_path):
    blocks, biases, matrices = draw()
    reference = write(tmp_path / "heads", released(blocks, biases, matrices))
    heads = medusa_files.load(reference, tiny.random_target(), num_heads=2)
    assert heads.config.num_heads == 2
    for name, stored in zip(("blocks", "biases", "heads"), (blocks, biases, matrices)):
        np.testing.assert_array_equal(heads.params[name], stored[:2])
    with pytest.raises(ValueError, match=r"num_heads 4 asked for, 3 stored: 0\.0\.linear\.bias, .*2\.2\.weight"):
        medusa_files.load(reference, tiny.random_target(), num_heads=4)
    with pytest.raises(ValueError, match="num_heads 0 is below 1"):
        medusa_files.load(reference, tiny.random_target(), num_heads=0)


def test_dev25_tensors_that_do_not_fit_are_all_named(tmp_path):
    tensors = released(*draw())
    del tensors["1.0.linear.bias"], tensors["2.2.weight"]
    tensors |= {"0.1.linear.weight": FEATURES, "0.2.bias": FEATURES, "3.norm.weight": FEATURES}
    reference = write(tmp_path / "heads", tensors)
    with pytest.raises(ValueError) as error:
        medusa_files.load(reference, tiny.random_target())
    message = str(error.value)
    assert "missing: 1.0.linear.bias, 2.2.weight" in message
    assert "unknown: 0.2.bias (in medusa_lm_head.safetensors), 3.norm.weight" in message
    assert "0.1.linear.weight in medusa_lm_head.safetensors has shape (2, 32), expected (32, 32)" in message
    with pytest.raises(ValueError, match="no Medusa heads; unknown tensors: fc.weight, norm.weight"):
        write(tmp_path / "none", {"fc.weight": FEATURES, "norm.weight": FEATURES})
        medusa_files.load(str(tmp_path / "none"), tiny.random_target())
    with pytest.raises(ValueError, match="medusa_num_layers is 1; .* holds 2 in a head: 0.0.linear.bias"):
        medusa_files.load(write(tmp_path / "n", released(*draw()), medusa_num_layers=1), tiny.random_target())


def test_heads_of_another_target(tmp_path):
    reference = write(tmp_path / "heads", released(*draw()))
    config = checkpoints.with_options(width=16, num_heads=2)
    narrow = tiny.target(config, checkpoints.random_params(config))
    with pytest.raises(ValueError, match=r"0\.0\.linear\.weight .* has shape \(32, 32\), expected \(16, 16\)"):
        medusa_files.load(reference, narrow)
    config = checkpoints.with_options(vocab_size=32)
    with pytest.raises(ValueError, match=r"0\.2\.weight .* has shape \(64, 32\), expected \(32, 32\)"):
        medusa_files.load(reference, tiny.target(config, checkpoints.random_params(config)))


def test_expected_digest(tmp_path):
    import hashlib

    reference = write(tmp_path / "heads", released(*draw()), "medusa_lm_head.pt")
    digest = hashlib.sha256((tmp_path / "heads" / "medusa_lm_head.pt").read_bytes()).hexdigest()
    medusa_files.load(reference, tiny.random_target(), sha256=digest)
    with pytest.raises(ValueError, match=f"is {digest}, expected {'0' * 64}"):
        medusa_files.load(reference, tiny.random_target(), sha256="0" * 64)


def test_torch_files_are_asked_for_of_a_hub(tmp_path, monkeypatch):
    asked = []
    reference = write(tmp_path / "heads", released(*draw()), "medusa_lm_head.pt")

    def fetch(name, also):
        asked.append((name, also))
        return tmp_path / "heads"

    monkeypatch.setattr(references, "_fetch_from_hub", fetch)
    monkeypatch.setattr(references.extras, "check", lambda *rest: None)
    found = medusa_files.load("hf:org/heads", tiny.random_target())
    wanted = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "pytorch_model.bin", "draft_vocabulary.npy")
    assert asked == [("hf:org/heads", wanted)]
    expected = medusa_files.load(reference, tiny.random_target())
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


def heads_of(*, own: bool = True, dtype=jnp.float32) -> heads_lib.MedusaHeads:
    config = heads_lib.MedusaConfig(K, N, WIDTH, VOCAB if own else None)
    return heads_lib.init_medusa(jax.random.key(4), config, dtype)


@pytest.mark.parametrize("own", [True, False])
def test_dev25_round_trip(tmp_path, own):
    heads = heads_of(own=own)
    medusa_files.save(heads, tiny.random_target(), tmp_path / "out", base_model="org/base")
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "medusa_lm_head.safetensors"]
    found = medusa_files.load(str(tmp_path / "out"), tiny.random_target())
    assert found.config == heads.config
    jax.tree.map(np.testing.assert_array_equal, found.params, heads.params)
    # The file is in the released layout.
    matrices = np.asarray(heads.params["heads"]) if own else None
    expected = released(np.asarray(heads.params["blocks"]), np.asarray(heads.params["biases"]), matrices)
    stored = safetensors_files.load(tmp_path / "out" / "medusa_lm_head.safetensors")
    assert set(stored) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(stored[name], tensor)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    said = {"medusa_num_heads": K, "medusa_num_layers": N, "base_model_name_or_path": "org/base"}
    assert content.items() >= (said | {"version": "1" if own else "2", "torch_dtype": "float32"}).items()


def test_dtypes_follow_heads_and_target(tmp_path):
    """bfloat16 heads are written as such and read in the target's dtype."""
    medusa_files.save(heads_of(dtype=jnp.bfloat16), tiny.random_target(), tmp_path / "out", base_model="base")
    stored = safetensors_files.load(tmp_path / "out" / "medusa_lm_head.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert medusa_files.load(str(tmp_path / "out"), tiny.random_target()).params["blocks"].dtype == jnp.float32
    model = tiny.random_target().model
    half = transformer.Model(jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params), model.config)
    found = medusa_files.load(str(tmp_path / "out"), types.Target(half))
    jax.tree.map(np.testing.assert_array_equal, found.params, heads_of(dtype=jnp.bfloat16).params)
    medusa_files.save(heads_of(), types.Target(half), tmp_path / "wide", base_model="base")


def test_nothing_is_left_of_a_failed_write(tmp_path, monkeypatch):
    target = tiny.random_target()
    save = lambda folder, heads=None: medusa_files.save(heads or heads_of(), target, folder, base_model="base")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(ValueError, match="full is not empty"):
        save(tmp_path / "full")
    with pytest.raises(ValueError, match="precious is a file"):
        save(tmp_path / "full" / "precious")
    with pytest.raises(ValueError, match="none is not a folder"):
        save(tmp_path / "none" / "out")
    reduced = dataclasses.replace(heads_of().config, vocab_size=5, reduced=True)
    with pytest.raises(ValueError, match=r"reduced vocabulary \(5 tokens\)"):
        save(tmp_path / "out", heads_lib.init_medusa(jax.random.key(0), reduced))
    real = safetensors_files.save

    def full_disk(tensors, path, **rest):
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    def wrong_bytes(tensors, path, **rest):
        real(tensors | {"1.0.linear.weight": 2 * tensors["1.0.linear.weight"]}, path, **rest)

    def lost_tensor(tensors, path, **rest):
        real({name: tensor for name, tensor in tensors.items() if name != "1.0.linear.bias"}, path, **rest)

    for fault, error in ((full_disk, "No space"), (wrong_bytes, "same logits"), (lost_tensor, "missing: 1.0.linear")):
        monkeypatch.setattr(safetensors_files, "save", fault)
        with pytest.raises((OSError, ValueError), match=error):
            save(tmp_path / "out")
        assert os.listdir(tmp_path) == ["full"]
    monkeypatch.undo()
    (tmp_path / "out").mkdir()  # an empty folder is taken
    save(tmp_path / "out")
    assert len(os.listdir(tmp_path / "out")) == 2


@pytest.mark.peers
def test_a_file_that_torch_writes(tmp_path):
    """The modules of the released code, saved as it saves them."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return x + torch.nn.functional.silu(self.linear(x))

    head = lambda: torch.nn.Sequential(Block(), Block(), torch.nn.Linear(WIDTH, VOCAB, bias=False))
    heads = torch.nn.ModuleList([head() for _ in range(K)])
    torch.save(heads.state_dict(), tmp_path / "medusa_lm_head.pt")
    expected = torch.stack([each(torch.from_numpy(FEATURES)) for each in heads], dim=1).detach().numpy()
    check(medusa_files.load(str(tmp_path), tiny.random_target()), expected)
