"""torch.save's files without torch: tensors come through bit for bit, nothing else does."""

from __future__ import annotations

import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest

from jspec.weights import torch_files
from tests import checkpoints

BUILD_TENSOR = checkpoints.pickle_tensor("FloatStorage", "0", 2, (2,), (1,))


def write(path, pushes: bytes, **records: bytes):
    return checkpoints.write_torch_archive(path / "weights.pt", pushes, records)


def refused(path, pushes: bytes, match: str):
    file = write(path, pushes, **{"0": bytes(8)})
    with pytest.raises(ValueError, match=match) as error:
        torch_files.load(file)
    assert str(file) in str(error.value)


def test_dev21_dtypes(tmp_path):
    values = np.array([1.0, -2.5, 0.375])
    dtypes = {
        "DoubleStorage": np.float64,
        "FloatStorage": np.float32,
        "HalfStorage": np.float16,
        "BFloat16Storage": ml_dtypes.bfloat16,
        "LongStorage": np.int64,
        "IntStorage": np.int32,
        "BoolStorage": bool,
    }
    tensors = {name: checkpoints.pickle_tensor(name, name, 3, (3,), (1,)) for name in dtypes}
    records = {name: values.astype(dtype).tobytes() for name, dtype in dtypes.items()}
    file = torch_files.TorchFile(write(tmp_path, checkpoints.pickle_dict(tensors), **records))
    assert file.names() == list(dtypes)
    for name, dtype in dtypes.items():
        found = file.read(name)
        assert found.dtype == dtype and found.tobytes() == records[name], name
    assert file.read("BFloat16Storage").view(np.uint16).tolist() == [0x3F80, 0xC020, 0x3EC0]


def test_views_with_strides_and_offsets(tmp_path):
    storage = np.arange(12, dtype=np.float32)
    views = {
        "transposed": ((4, 3), (1, 4), 0),
        "tail": ((2, 2), (4, 1), 6),
        "expanded": ((3, 2), (0, 1), 10),
        "scalar": ((), (), 5),
        "empty": ((0, 3), (3, 1), 12),
    }
    tensors = {
        name: checkpoints.pickle_tensor("FloatStorage", "0", 12, shape, strides, offset)
        for name, (shape, strides, offset) in views.items()
    }
    file = torch_files.TorchFile(write(tmp_path, checkpoints.pickle_dict(tensors), **{"0": storage.tobytes()}))
    np.testing.assert_array_equal(file.read("transposed"), storage.reshape(3, 4).T)
    np.testing.assert_array_equal(file.read("transposed", slice(1, 99)), storage.reshape(3, 4).T[1:])
    np.testing.assert_array_equal(file.read("tail"), [[6, 7], [10, 11]])
    np.testing.assert_array_equal(file.read("expanded"), [[10, 11]] * 3)
    assert file.read("scalar") == 5 and file.shape("empty") == (0, 3)
    assert not file.read("tail").flags.writeable


def test_plain_data_comes_through(tmp_path):
    """What the pickle module itself writes for plain data, in three protocols."""
    data = {"a": [1, -7, 2**40, "x", (True, None, 2.5, ())], "b": {"c": {}, "d": [[]]}, "long": list(range(2000))}
    for protocol in (2, 4, 5):
        pushes = pickle.dumps(data, protocol)[2:-1]  # without its own first and last instruction
        assert torch_files.load(write(tmp_path, pushes)) == data, protocol


def test_what_state_dicts_carry(tmp_path):
    """Ordered dictionaries, their attributes, parameters and repeated references."""
    ordered = checkpoints.pickle_global("collections", "OrderedDict") + b")R"
    parameter = checkpoints.pickle_global("torch._utils", "_rebuild_parameter")
    parameter += checkpoints.pickle_tuple(BUILD_TENSOR, b"\x88", ordered) + b"R"
    items = checkpoints.pickle_text("w") + parameter + b"q\x01" + checkpoints.pickle_text("again") + b"h\x01"
    metadata = checkpoints.pickle_dict({"_metadata": ordered})
    values = np.array([1.5, -2], np.float32)
    found = torch_files.load(
        write(tmp_path, ordered + b"(" + items + b"u" + metadata + b"b", **{"0": values.tobytes()})
    )
    assert list(found) == ["w", "again"]
    np.testing.assert_array_equal(found["w"], values)
    assert found["again"] is found["w"]


class Malicious:
    """Pickled the usual way it would run a command when loaded."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        import os

        return os.system, (f"touch {self.marker}",)


def test_no_code_runs(tmp_path):
    marker = tmp_path / "ran"
    for protocol in (2, 4):
        content = pickle.dumps({"w": Malicious(marker)}, protocol)
        refused(tmp_path, content[2:-1], r"asks for (posix|nt)\.system, which is refused")
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists()  # the same bytes do run elsewhere


@pytest.mark.parametrize(
    ("module", "name"), [("builtins", "eval"), ("torch", "ByteStorage"), ("torch", "load"), ("numpy", "ndarray")]
)
def test_other_globals_are_refused_by_name(tmp_path, module, name):
    refused(tmp_path, checkpoints.pickle_global(module, name), f"asks for {module}.{name}, which is refused")


def test_instructions_and_calls_beyond_tensors_are_refused(tmp_path):
    ordered = checkpoints.pickle_global("collections", "OrderedDict")
    tensor = checkpoints.pickle_global("torch._utils", "_rebuild_tensor_v2")
    refused(tmp_path, b"(iposix\nsystem\n", "instruction INST")
    refused(tmp_path, ordered + b")\x81", "instruction NEWOBJ")
    refused(tmp_path, b"\x82\x01", "instruction EXT1")
    refused(tmp_path, ordered, "holds collections.OrderedDict, which is neither data nor tensor")
    refused(tmp_path, ordered + b"}b", "sets attributes of a _Global")
    refused(tmp_path, ordered + checkpoints.pickle_tuple(b"]") + b"R", "calls collections.OrderedDict with arguments")
    refused(tmp_path, checkpoints.pickle_text("print") + b")R", "calls 'print'")
    refused(tmp_path, BUILD_TENSOR + b"}b", "sets attributes of a ndarray")
    refused(tmp_path, tensor + checkpoints.pickle_tuple(1, 0, b")", b")") + b"R", "without a storage")
    refused(
        tmp_path, checkpoints.pickle_tuple(checkpoints.pickle_text("module"), 1, 2, 3, 4) + b"Q", "refers to 'module'"
    )
    refused(tmp_path, b"h\x05", "corrupt")
    refused(tmp_path, b"a", "corrupt")
    refused(tmp_path, b"X\xff\xff\xff\x7f", "corrupt")


def test_tensors_that_leave_their_storage(tmp_path):
    tensor = lambda *rest, **more: checkpoints.pickle_tensor("FloatStorage", *rest, **more)
    refused(tmp_path, tensor("0", 2, (3,), (1,)), r"shape \(3,\) reads beyond the 2 elements")
    refused(tmp_path, tensor("0", 2, (2,), (1,), offset=1), "reads beyond")
    refused(tmp_path, tensor("0", 2, (2, 2), (2**30, 1)), "reads beyond")
    refused(tmp_path, tensor("0", 2, (2,), (-1,)), "-1 where a count is expected")
    refused(tmp_path, tensor("0", 2, (2,), (1,), offset=-1), "-1 where a count is expected")
    refused(tmp_path, tensor("0", 3, (2,), (1,)), "record data/0 has 8 bytes, which are not 3 of float32")
    refused(tmp_path, tensor("1", 2, (2,), (1,)), "record data/1 is missing")


def test_what_is_no_such_file(tmp_path):
    path = tmp_path / "weights.pt"
    path.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2))  # how files of before torch 1.6 start
    with pytest.raises(ValueError, match="format of before torch 1.6; load it with torch and save it again"):
        torch_files.load(path)
    path.write_bytes(b"hello")
    with pytest.raises(ValueError, match="not a file of torch.save"):
        torch_files.load(path)
    with pytest.raises(ValueError, match="cannot be read"):
        torch_files.load(tmp_path / "none.pt")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", b"")
    with pytest.raises(ValueError, match="without the one data.pkl"):
        torch_files.load(path)
    whole = checkpoints.write_torch(path, {"w": np.ones(300, np.float32)}).read_bytes()
    path.write_bytes(whole[:-200])
    with pytest.raises(ValueError, match="truncated or corrupt"):
        torch_files.load(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    with pytest.raises(ValueError, match="data.pkl is compressed"):
        torch_files.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/byteorder", b"big")
    with pytest.raises(ValueError, match="byte order is 'big'"):
        torch_files.load(path)


def test_a_state_dict_holds_tensors_alone(tmp_path):
    with pytest.raises(ValueError, match="holds a list, expected a dictionary of tensors"):
        torch_files.TorchFile(write(tmp_path, b"]"))
    with pytest.raises(ValueError, match="'epoch' is a int"):
        torch_files.TorchFile(write(tmp_path, checkpoints.pickle_dict({"epoch": b"K\x03"})))


@pytest.mark.peers
def test_files_that_torch_writes(tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2).to(torch.bfloat16))
    base = torch.arange(24).reshape(4, 6)
    others = {
        "view": base.T[1:, 2:], "half": base.half()[::2], "bool": base > 3, "double": torch.tensor(3.5).double(),
        "int": base.int(), "expanded": base[:, :1].expand(4, 3), "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": torch.empty(0),
    }  # fmt: skip
    path = tmp_path / "weights.pt"
    for protocol in (2, 4):
        for saved in (model.state_dict(), others):
            torch.save(saved, path, pickle_protocol=protocol)
            file = torch_files.TorchFile(path)
            assert file.names() == list(saved)
            for name, tensor in saved.items():
                expected = tensor.detach()
                bits = expected.view(torch.int16) if expected.dtype == torch.bfloat16 else expected
                found = file.read(name)
                found = found.view(np.int16) if found.dtype == ml_dtypes.bfloat16 else found
                np.testing.assert_array_equal(found, bits.numpy())
                assert found.dtype == bits.numpy().dtype and file.shape(name) == tuple(expected.shape), name
    torch.save(model, path)
    with pytest.raises(ValueError, match="asks for torch.nn.modules.container.Sequential"):
        torch_files.load(path)
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="before torch 1.6"):
        torch_files.load(path)
