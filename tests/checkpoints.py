"""Small checkpoints for tests: random parameters, written as Hugging Face folders and as GGUF files.

The tensor names are spelled out here, or come from the `gguf` package, and not from `jspec.weights`, whose tables are
under test.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import struct
import zipfile
from typing import Any

import jax
import numpy as np

from jspec.models import config as model_config

# Fixture R of the shared cases.
RANDOM = model_config.TransformerConfig(
    vocab_size=64, num_layers=2, width=32, num_heads=4, num_kv_heads=2, head_size=8, ffn_size=64, max_positions=256
)


def random_params(config: model_config.TransformerConfig = RANDOM, seed: int = 0) -> dict:
    """Seeded NumPy parameters: matrices 0.3 * normal, embedding 1.0 * normal, norms 1 + 0.1 * normal, biases normal."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        values = rng.standard_normal(leaf.shape)
        name = path[-1].key
        if name.endswith("norm"):
            values = 1 + 0.1 * values
        elif not name.endswith("bias") and name != "embed":
            values = 0.3 * values
        return values.astype(np.float32)

    return jax.tree.map_with_path(draw, model_config.param_shapes(config))


def huggingface_tensors(config: model_config.TransformerConfig, params: dict) -> dict[str, np.ndarray]:
    """Parameters under Hugging Face's names, unfused."""
    query, key_value = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    cuts = [query, query + key_value]
    tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["final_norm"]}
    if "head" in params:
        tensors["lm_head.weight"] = params["head"]
    for index, layer in enumerate(params["layers"]):
        prefix = f"model.layers.{index}."
        tensors[prefix + "input_layernorm.weight"] = layer["attention_norm"]
        tensors[prefix + "post_attention_layernorm.weight"] = layer["ffn_norm"]
        tensors[prefix + "self_attn.o_proj.weight"] = layer["output"]
        tensors[prefix + "mlp.down_proj.weight"] = layer["down"]
        for kind in ("weight", "bias"):
            suffix = "" if kind == "weight" else "_bias"
            if "qkv" + suffix in layer:
                for name, part in zip("qkv", np.split(layer["qkv" + suffix], cuts), strict=True):
                    tensors[f"{prefix}self_attn.{name}_proj.{kind}"] = part
            if "gate_up" + suffix in layer:
                for name, part in zip(("gate", "up"), np.split(layer["gate_up" + suffix], 2), strict=True):
                    tensors[f"{prefix}mlp.{name}_proj.{kind}"] = part
        if "output_bias" in layer:
            tensors[prefix + "self_attn.o_proj.bias"] = layer["output_bias"]
        if "down_bias" in layer:
            tensors[prefix + "mlp.down_proj.bias"] = layer["down_bias"]
        if "query_norm" in layer:
            tensors[prefix + "self_attn.q_norm.weight"] = layer["query_norm"]
            tensors[prefix + "self_attn.k_norm.weight"] = layer["key_norm"]
    return tensors


def huggingface_config(config: model_config.TransformerConfig, architecture: str = "LlamaForCausalLM") -> dict:
    """A config.json in the older spelling, which most checkpoints have."""
    content = {
        "architectures": [architecture],
        "model_type": architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}[config.activation],
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        content["attention_bias"] = config.output_bias
    if architecture == "LlamaForCausalLM":
        content["mlp_bias"] = config.ffn_bias
    windows = [window for window in config.windows if window is not None]
    content["sliding_window"] = windows[0] if windows else None
    if architecture.startswith("Qwen"):
        content["use_sliding_window"] = bool(windows)
        content["max_window_layers"] = config.num_layers - len(windows)
    return content


def write_huggingface(
    folder: pathlib.Path,
    config: model_config.TransformerConfig = RANDOM,
    params: dict | None = None,
    architecture: str = "LlamaForCausalLM",
    **changes: Any,
) -> pathlib.Path:
    """Write config.json and model.safetensors; `changes` are keys of config.json, None values included."""
    from safetensors import numpy as safetensors_numpy

    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = huggingface_config(config, architecture) | changes
    (folder / "config.json").write_text(json.dumps(content))
    tensors = huggingface_tensors(config, random_params(config) if params is None else params)
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    safetensors_numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection in the order llama.cpp's converter writes for `llama`."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: pathlib.Path,
    config: model_config.TransformerConfig = RANDOM,
    params: dict | None = None,
    architecture: str = "llama",
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    quantization: str | None = None,
    drop: tuple[str, ...] = (),
) -> pathlib.Path:
    """Write a GGUF file.

    Args:
      path: of the file.
      config, params: of the model.
      architecture: GGUF's name of it.
      metadata: further keys, by full name.
      tensors: further tensors, by GGUF's names.
      quantization: a `gguf.GGMLQuantizationType` for the matrices; None keeps float32.
      drop: GGUF names of tensors to leave out.
    """
    import gguf

    params = random_params(config) if params is None else params
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.ffn_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_size)
    writer.add_value_length(config.head_size)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_size)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (metadata or {}).items():
        (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    kinds = {model: kind for kind, model in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_layers)
    written = dict(tensors or {})
    for name, tensor in huggingface_tensors(config, params).items():
        if architecture == "llama" and ".q_proj." in name:
            tensor = interleave(tensor, config.num_heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = interleave(tensor, config.num_kv_heads)
        written[names.get_name(name, try_suffixes=(".weight", ".bias"))] = tensor
    for name, tensor in written.items():
        tensor = np.ascontiguousarray(tensor)
        if name in drop:
            continue
        if quantization is not None and tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantization]
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_options(**changes: Any) -> model_config.TransformerConfig:
    """`RANDOM` with some values changed."""
    return dataclasses.replace(RANDOM, **changes)


# Files of torch.save, without torch: instructions of pickle protocol 2, and an archive around them.


def pickle_text(value: str) -> bytes:
    """Pushes a string."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def pickle_tuple(*items: bytes | int) -> bytes:
    """Pushes a tuple of what the items push, whole numbers as such."""
    return b"(" + b"".join(b"J" + struct.pack("<i", item) if isinstance(item, int) else item for item in items) + b"t"


def pickle_global(module: str, name: str) -> bytes:
    """Pushes whatever a module holds under a name."""
    return f"c{module}\n{name}\n".encode()


def pickle_tensor(
    storage: str, record: str, size: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> bytes:
    """Pushes a tensor as torch describes it: a view of a storage of `size` elements, in elements."""
    reference = pickle_tuple(
        pickle_text("storage"), pickle_global("torch", storage), pickle_text(record), pickle_text("cpu"), size
    )
    hooks = pickle_global("collections", "OrderedDict") + b")R"
    arguments = pickle_tuple(reference + b"Q", offset, pickle_tuple(*shape), pickle_tuple(*strides), b"\x89", hooks)
    return pickle_global("torch._utils", "_rebuild_tensor_v2") + arguments + b"R"


def pickle_dict(items: dict[str, bytes]) -> bytes:
    """Pushes a dictionary."""
    return b"}(" + b"".join(pickle_text(name) + value for name, value in items.items()) + b"u"


def write_torch_archive(path: pathlib.Path, pushes: bytes, records: dict[str, bytes]) -> pathlib.Path:
    """The archive around a pickle that pushes one object; `records` hold the storages."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pushes + b".")
        archive.writestr("archive/byteorder", b"little")
        for name, content in records.items():
            archive.writestr(f"archive/data/{name}", content)
        archive.writestr("archive/version", b"3\n")
    return path


def write_torch(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> pathlib.Path:
    """A state dict of float32 and int64 tensors, each in a storage of its own."""
    items, records = {}, {}
    for index, (name, tensor) in enumerate(tensors.items()):
        tensor = np.ascontiguousarray(tensor)
        storage = {"float32": "FloatStorage", "int64": "LongStorage"}[tensor.dtype.name]
        strides = tuple(step // tensor.itemsize for step in tensor.strides)
        items[name] = pickle_tensor(storage, str(index), tensor.size, tensor.shape, strides)
        records[str(index)] = tensor.tobytes()
    return write_torch_archive(path, pickle_dict(items), records)
