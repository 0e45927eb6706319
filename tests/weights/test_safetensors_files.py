"""Safetensors in and out."""

from __future__ import annotations

import json
import struct

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec import weights
from jspec.weights import safetensors_files
from tests import checkpoints


def write_raw(path, header: dict, data: bytes):
    """A file from its parts, without the library."""
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_dev21_bfloat16_without_torch(tmp_path):
    header = {"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    path = write_raw(tmp_path / "model.safetensors", header, bytes.fromhex("803f20c0"))
    (values,) = safetensors_files.load(path).values()
    assert values.dtype == ml_dtypes.bfloat16
    assert values.astype(np.float32).tolist() == [1.0, -2.5]
    assert values.view(np.uint16).tolist() == [0x3F80, 0xC020]


def test_dev21_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((4, 6)).astype(np.float32)
    tensors = {
        "transposed": kernel.T,
        "strided": kernel[::2, 1::2],
        "bfloat16": jnp.asarray(kernel, jnp.bfloat16).T,
        "int64": np.array([1, -(2**40)]),
        "bool": np.array([[True], [False]]),
        "scalar": np.float32(3.5),
        "empty": np.zeros((0, 3), np.float32),
    }
    path = tmp_path / "heads.safetensors"
    safetensors_files.save(tensors, path, metadata={"made": "here"})
    found = safetensors_files.load(path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        expected = np.asarray(tensor)
        assert found[name].dtype == expected.dtype and found[name].shape == expected.shape, name
        assert found[name].tobytes() == np.ascontiguousarray(expected).tobytes(), name
    assert [file.name for file in tmp_path.iterdir()] == ["heads.safetensors"]
    # Saved over an existing file, and read as rows.
    safetensors_files.save({"w": kernel}, path)
    np.testing.assert_array_equal(safetensors_files.SafetensorsFiles(path).read("w", slice(1, 99)), kernel[1:])


def test_a_saved_file_has_the_permissions_of_any_other(tmp_path):
    plain, saved = tmp_path / "plain", tmp_path / "saved.safetensors"
    plain.touch()
    safetensors_files.save({"a": np.zeros(2, np.float32)}, saved)
    assert saved.stat().st_mode == plain.stat().st_mode


def test_saving_what_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="tensor 'c' has dtype complex64"):
        safetensors_files.save({"c": np.zeros(2, np.complex64)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        safetensors_files.save({"c": np.zeros(2)}, tmp_path / "nowhere" / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def sharded(tmp_path):
    """Two shards and an index; a stray file of zeros; in shard 2 another copy of a tensor of shard 1."""
    folder = checkpoints.write_huggingface(tmp_path)
    tensors = safetensors_files.load(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {name: f"model-0000{1 + (i >= len(names) // 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(shards.values()):
        content = {name: tensors[name] for name in names if shards[name] == shard}
        if shard.startswith("model-00002"):
            content[names[0]] = np.zeros_like(tensors[names[0]])
        safetensors_files.save(content, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    zeros = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    safetensors_files.save(zeros, folder / "model.safetensors")
    return folder, tensors


def test_dev20_values_as_the_index_assigns(sharded):
    folder, tensors = sharded
    found = safetensors_files.load(folder)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    params = weights.load_target(str(folder)).model.params
    np.testing.assert_array_equal(params["embed"], checkpoints.random_params()["embed"])


def test_dev20_missing_shard(sharded):
    folder, _ = sharded
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002.safetensors is missing"):
        weights.load_target(str(folder))


def test_dev20_truncated_shard(sharded):
    folder, _ = sharded
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-16])
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors is not a complete safetensors file"):
        weights.load_target(str(folder))


def test_dev20_index_that_lies(sharded):
    folder, tensors = sharded
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.nothing"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"model.nothing \(in model-00001-of-00002.safetensors\)"):
        safetensors_files.load(folder)
    index.write_text("{}")
    with pytest.raises(ValueError, match="index.json has no weight_map"):
        safetensors_files.load(folder)
    index.write_text("{")
    with pytest.raises(ValueError, match="index.json cannot be read as JSON"):
        safetensors_files.load(folder)


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 10**12) + b"{}", struct.pack("<Q", 2) + b"{]"])
def test_corrupt_headers(content, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors is not a complete safetensors file"):
        safetensors_files.load(path)


def test_unknown_dtype(tmp_path):
    header = {"w": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}
    path = write_raw(tmp_path / "model.safetensors", header, b"ab")
    with pytest.raises(ValueError, match="tensor 'w' has dtype F8_E4M3"):
        safetensors_files.load(path)


def test_several_files_and_no_index(tmp_path):
    for name in ("a", "b"):
        safetensors_files.save({"w": np.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match="holds several .*a.safetensors, b.safetensors"):
        safetensors_files.load(tmp_path)
