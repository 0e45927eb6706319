"""Write families.npz: logits that transformers computes for tiny random checkpoints of every family.

    python tests/golden/make_families_golden.py

Needs the extras `weights` and `peers`. The checkpoints are made by `tests.checkpoints` from seeds, here and in the
test; stored are what was varied (NAME/checkpoint, JSON: architecture, changes to the config, changes to config.json),
the tokens, and the logits at some positions, most of them beyond 64 because rope scaling shows only there.
"""

from __future__ import annotations

import json
import pathlib
import platform
import tempfile

import numpy as np
import torch
import transformers

from jspec.models import config as model_config
from tests import checkpoints

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# name: architecture, changes to TransformerConfig, changes to config.json
CHECKPOINTS = {
    "llama": ("LlamaForCausalLM", {}, {}),
    "llama-tied": ("LlamaForCausalLM", {"tied_head": True}, {}),
    "llama-biases": ("LlamaForCausalLM", {"qkv_bias": True, "output_bias": True, "ffn_bias": True}, {}),
    "llama-gelu": ("LlamaForCausalLM", {"activation": "gelu_tanh"}, {}),
    "llama-linear": (
        "LlamaForCausalLM",
        {"rope_scaling": {"kind": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "llama-llama3": (
        "LlamaForCausalLM",
        {"head_size": 16, "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_max_position": 64}},
        {"rope_scaling": LLAMA3},
    ),
    "llama-llama3-new-spelling": (
        "LlamaForCausalLM",
        {
            "head_size": 16,
            "rope_theta": 500.0,
            "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_max_position": 64},
        },
        {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}, "rope_theta": None},
    ),
    "llama-yarn": (
        "LlamaForCausalLM",
        {"head_size": 16, "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_position": 64}},
        {"rope_scaling": YARN},
    ),
    "mistral": ("MistralForCausalLM", {}, {}),
    "mistral-window": ("MistralForCausalLM", {"windows": [7, 7]}, {}),
    "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": True, "tied_head": True}, {}),
    "qwen2-window": ("Qwen2ForCausalLM", {"qkv_bias": True, "windows": [None, 7]}, {}),
    "qwen3": ("Qwen3ForCausalLM", {"qk_norm": True, "head_size": 16}, {}),
    "qwen3-biases": ("Qwen3ForCausalLM", {"qk_norm": True, "qkv_bias": True, "output_bias": True}, {}),
}


def transformers_logits(folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """`[T, V]` float32 logits of a Hugging Face folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return model(torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()


def build(folder: pathlib.Path, name: str) -> tuple[model_config.TransformerConfig, pathlib.Path]:
    """One checkpoint of the list."""
    architecture, changes, content = CHECKPOINTS[name]
    changes = dict(changes)
    if "rope_scaling" in changes:
        changes["rope_scaling"] = model_config.RopeScaling(**changes["rope_scaling"])
    if "windows" in changes:
        changes["windows"] = tuple(changes["windows"])
    config = checkpoints.with_options(**changes)
    return config, checkpoints.write_huggingface(folder / name, config, None, architecture, **content)


def main():
    tokens = np.random.default_rng(3).integers(0, checkpoints.RANDOM.vocab_size, 120)
    positions = np.array([*range(0, 60, 6), *range(64, 120, 4), 119])
    found = {"tokens": tokens.astype(np.int32), "positions": positions.astype(np.int32)}
    with tempfile.TemporaryDirectory() as folder:
        for name in CHECKPOINTS:
            _, path = build(pathlib.Path(folder), name)
            found[f"{name}/checkpoint"] = np.array(json.dumps(CHECKPOINTS[name]))
            found[f"{name}/logits"] = transformers_logits(path, tokens)[positions]
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
    }
    found["versions"] = np.array(json.dumps(versions))
    np.savez_compressed(pathlib.Path(__file__).with_name("families.npz"), **found)


if __name__ == "__main__":
    main()
