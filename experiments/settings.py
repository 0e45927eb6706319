"""Settings that several kinds of run share: the target, the prompts, the methods, the sampling."""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import os
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from experiments import prompt_sets
from jspec import decode, drafters, generation, types
from jspec import sampling as sampling_lib
from jspec.drafters import base
from jspec.models import config as model_config
from jspec.models import transformer
from jspec.weights import load, references, shapes


@dataclasses.dataclass(frozen=True)
class RandomModel:
    """A model of random weights whose tokens are bytes: for trying a config out, not for results.

    Sizes as in `models.config.TransformerConfig`.

    seed:     of the weights.
    optimize: let the compiler optimise. Without, everything starts several times faster, and timings say even less.
    """

    num_layers: int = 2
    width: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_size: int = 128
    max_positions: int = 2048
    seed: int = 0
    optimize: bool = False

    def __post_init__(self):
        generation.check_seed(self.seed)
        self.config()

    def config(self) -> model_config.TransformerConfig:
        """The model's config.

        Raises:
          ValueError: sizes that do not fit together.
        """
        sizes = {key: value for key, value in vars(self).items() if key not in ("seed", "optimize")}
        if self.num_heads < 1 or self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        return model_config.TransformerConfig(
            vocab_size=ByteTokenizer.vocab_size, head_size=self.width // self.num_heads, tied_head=True, **sizes
        )


@dataclasses.dataclass(frozen=True)
class TargetSettings:
    """The model to speed up: exactly one of `reference`, `random` and `shape`.

    reference: see `jspec.weights.references`.
    sha256:    expected of the file.
    random:    random weights, to try things out.
    shape:     random weights in the shape of a known model, to time a device.
    dtype:     of parameters and cache.
    """

    reference: str | None = None
    sha256: str | None = None
    random: RandomModel | None = None
    shape: shapes.Shape | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self):
        if sum(source is not None for source in (self.reference, self.random, self.shape)) != 1:
            raise ValueError("target needs exactly one of reference, random and shape")
        if self.shape is not None and self.shape.config().vocab_size < ByteTokenizer.vocab_size:
            raise ValueError(
                f"shape.vocab_size {self.shape.vocab_size} is below the 256 bytes that prompts are made of"
            )


@dataclasses.dataclass(frozen=True)
class PromptSettings:
    """The prompts.

    file:     a JSONL file or a set that comes with the project (see `prompt_sets`); None means `package:builtin`.
    tasks:    keep these; None keeps all.
    per_task: keep the first so many of each; None keeps all.
    chat:     put each into the target's chat template.
    """

    file: str | None = None
    tasks: tuple[str, ...] | None = None
    per_task: int | None = None
    chat: bool = True


@dataclasses.dataclass(frozen=True)
class PromptSubset(PromptSettings):
    """Prompts, and which of a large set.

    choose:     which are the first of a task: `file`, in its order; `hashed`, by the sha256 of their ids.
    max_tokens: skip longer prompts, the template included. The next ones take their place in `per_task`, so that every
                task keeps its weight while it has enough. None skips none.
    """

    choose: prompt_sets.Order = "file"
    max_tokens: int | None = None

    def __post_init__(self):
        if self.max_tokens is not None:
            base.check_count("max_tokens", self.max_tokens, 1)


@dataclasses.dataclass(frozen=True)
class Method:
    """One line of a results table.

    name:     what it is called there.
    drafter:  what proposes.
    verifier: what decides.
    """

    name: str
    drafter: types.Drafter
    verifier: types.Verifier = decode.REJECTION


@dataclasses.dataclass(frozen=True)
class Filters:
    """Cuts of the law, the same for target and draft; see `jspec.sampling`."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        sampling_lib.make(1, max_new_tokens=1, **vars(self))


class ByteTokenizer:
    """Text as its UTF-8 bytes, for random models."""

    vocab_size = 256
    stop_ids = ()

    def encode(self, text: str) -> list[int]:
        """Bytes of a text."""
        return list(text.encode())

    def chat(self, text: str, system: str | None = None) -> list[int]:
        """No template: the turns one after the other."""
        return self.encode("\n".join(filter(None, (system, text, ""))))

    def decode(self, ids) -> str:
        """Text of bytes; what is no UTF-8 shows as a replacement mark."""
        return bytes(i % 256 for i in ids).decode(errors="replace")  # a model in a real one's shape has more ids

    def vocab(self) -> list[str]:
        """One character a byte."""
        return [chr(byte) for byte in range(256)]

    def fingerprint(self) -> str:
        """All of its kind mean the same."""
        return "bytes"

    def stream_decoder(self) -> ByteStreamDecoder:
        """Text of bytes as they come."""
        return ByteStreamDecoder()


class ByteStreamDecoder:
    """What `weights.tokenizer.StreamDecoder` is for real tokens: never half a character."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids) -> str:
        """Text that is complete with these bytes."""
        return self._decoder.decode(bytes(i % 256 for i in ids))

    def finish(self) -> str:
        """What is left."""
        return self._decoder.decode(b"", final=True)


def check_references(target: TargetSettings, *drafters: types.Drafter) -> None:
    """Refuse references that cannot work, of the target or of a draft, before anything is loaded or downloaded.

    Raises:
      ValueError, OSError, ImportError: what is wrong with one.
    """
    for settings in (target, *(getattr(drafter, "draft", None) for drafter in drafters)):
        reference = getattr(settings, "reference", None)
        if reference is not None:
            references.check(reference, settings.sha256)


def draft_digest(draft: Any) -> str | None:
    """Sha256 of the weights that a draft's settings refer to; None without a reference, or for files of torch's."""
    reference = getattr(draft, "reference", None)
    if reference is None:
        return None
    path = references.resolve(reference)
    return references.digest(path) if path.is_file() or references.weight_files(path) else None


def describe_draft(draft: Any) -> str:
    """Where a draft comes from; drafters have their own settings for that."""
    if getattr(draft, "layers", None) is not None:
        return f"first {draft.layers} layers of the target"
    if getattr(draft, "shape", None) is not None:
        return f"random weights like {draft.shape.like}"
    return draft.reference if draft.reference is not None else "random weights"


def compile_as_wanted(target: TargetSettings) -> None:
    """Tell jax whether this process's programs are worth optimising: those of a random model are not, by default."""
    if target.random is not None and not target.random.optimize:
        jax.config.update("jax_disable_most_optimizations", True)
        # Half of what is left is spent on emitting fusions; later versions have no such flag, and end the process when
        # given it. XLA reads its flags when the first device is asked for.
        if jax.__version_info__ < (0, 11):
            os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")


def load_target(settings: TargetSettings) -> types.Target:
    """The target.

    Raises:
      ValueError: the weights are not as expected.
    """
    dtype = jnp.dtype(settings.dtype)
    if settings.reference is not None:
        return load.load_target(settings.reference, sha256=settings.sha256, dtype=dtype)
    if settings.shape is not None:
        model = settings.shape.build(dtype)
        return types.Target(model, ByteTokenizer(), types.Provenance(_random_name("shape", settings.shape)))
    random = settings.random
    config = random.config()
    params = model_config.init_params(jax.random.key(random.seed), config, dtype)
    name = _random_name("random", random)
    return types.Target(transformer.Model(params, config), ByteTokenizer(), types.Provenance(name))


def _random_name(scheme: str, settings: Any) -> str:
    """What records call random weights: the same for the same settings."""
    return f"{scheme}:{hashlib.sha256(repr(settings).encode()).hexdigest()[:8]}"


def load_prompts(settings: PromptSettings) -> tuple[prompt_sets.Prompt, ...]:
    """The prompts.

    Raises:
      ValueError, OSError: the file or a setting is bad.
    """
    return prompt_sets.load_prompts(settings.file, settings.tasks, settings.per_task)


def drafts_by_depth(drafter: types.Drafter) -> bool:
    """Whether its draft runs once for each depth of a round. Medusa's heads read one feature; others have none."""
    return isinstance(drafter, drafters.Standard | drafters.EarlyExit | drafters.Eagle)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Prompts to decode.

    encoded: token ids of each, in order.
    skipped: by task, how many were too long, of those that were looked at before the task had enough.
    """

    encoded: dict[prompt_sets.Prompt, list[int]]
    skipped: dict[str, int]

    @property
    def prompts(self) -> tuple[prompt_sets.Prompt, ...]:
        """In order."""
        return tuple(self.encoded)

    def to_json(self) -> dict[str, Any]:
        """Ids by task, and how many of each were skipped."""
        ids: dict[str, list[str]] = {}
        for prompt in self.prompts:
            ids.setdefault(prompt.task, []).append(prompt.id)
        return {"ids": ids, "skipped": self.skipped}

    def describe(self) -> str:
        """One line: how many of each task, and how many were skipped."""
        listed = lambda numbers: ", ".join(f"{task} {number}" for task, number in numbers.items())
        counts = {task: len(ids) for task, ids in self.to_json()["ids"].items()}
        text = f"{len(self.encoded)} prompts ({listed(counts)})"
        if self.skipped:
            text += f"; longer ones skipped: {sum(self.skipped.values())} ({listed(self.skipped)})"
        return text


def choose_prompts(target: types.Target, prompts: Sequence[prompt_sets.Prompt], settings: PromptSubset) -> Chosen:
    """The first so many prompts of each task that are short enough.

    Args:
      target: whose tokens count.
      prompts: of the set, in order (`prompt_sets.load_prompts`).
      settings: how many, and how long they may be.

    Raises:
      ValueError: see `encode`; or a task has no prompt that is short enough.
    """
    encoded, skipped, taken = {}, {}, dict.fromkeys((prompt.task for prompt in prompts), 0)
    for prompt in prompts:
        if settings.per_task is not None and taken[prompt.task] >= settings.per_task:
            continue
        (ids,) = encode(target, (prompt,), settings)
        if settings.max_tokens is not None and len(ids) > settings.max_tokens:
            skipped[prompt.task] = skipped.get(prompt.task, 0) + 1
        else:
            taken[prompt.task] += 1
            encoded[prompt] = ids
    for task, count in taken.items():
        if not count:
            raise ValueError(f"prompts: all of task {task!r} have more than max_tokens {settings.max_tokens} tokens")
    return Chosen(encoded, skipped)


def encode(target: types.Target, prompts: tuple[prompt_sets.Prompt, ...], settings: PromptSettings) -> list[list[int]]:
    """Token ids of prompts.

    Raises:
      ValueError: one of them is empty, or the target has no chat template.
    """
    return [
        generation.encode(target, [prompt.prompt], chat=settings.chat, system=prompt.system)[0] for prompt in prompts
    ]
