"""Samples of training text: what one is, whose answers it holds, and which are held out.

A sample is a conversation: prompt tokens and answer tokens. Losses look at answer tokens alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jspec import types

PROMPT, ANSWER = 0, 1


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One conversation.

    number: its place in the order of samples.
    tokens: ids, `[n]`.
    roles:  of each token, `PROMPT` or `ANSWER`, `[n]` uint8.
    """

    number: int
    tokens: np.ndarray
    roles: np.ndarray

    @property
    def key(self) -> bytes:
        """Equal for equal prompts: the tokens before the first answer."""
        return hashlib.sha256(np.asarray(self.tokens[: self.prompt_length], np.uint32).tobytes()).digest()

    @property
    def prompt_length(self) -> int:
        """Tokens before the first answer."""
        is_answer = self.roles == ANSWER
        return int(np.argmax(is_answer)) if is_answer.any() else len(self.tokens)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Whose answers a folder holds.

    target:     reference of the target.
    sha256:     of its weights (`fingerprint`).
    vocab_size: of its ids.
    tokenizer:  fingerprint of its vocabulary, or None for bare ids.
    made_by:    settings of the run that made it; a run that resumes must have the same.
    """

    target: str
    sha256: str
    vocab_size: int
    tokenizer: str | None
    made_by: str

    @classmethod
    def of(cls, target: types.Target, made_by: str) -> Origin:
        """The origin of answers by this target."""
        model = target.model
        return cls(
            target.provenance.reference,
            fingerprint(target),
            model.config.vocab_size,
            None if target.tokenizer is None else target.tokenizer.fingerprint(),
            made_by,
        )

    def check(self, target: types.Target, where: Any) -> None:
        """Refuse answers of another target.

        Raises:
          ValueError: naming what differs.
        """
        own = Origin.of(target, self.made_by)
        if self.vocab_size != own.vocab_size:
            raise ValueError(f"{where}: made with {self.vocab_size} token ids; the target has {own.vocab_size}")
        if self.tokenizer != own.tokenizer:
            raise ValueError(f"{where}: made with another tokenizer than {own.target}'s")
        if self.sha256 != own.sha256:
            raise ValueError(
                f"{where}: made by {self.target} (sha256 {self.sha256}), not by {own.target} (sha256 {own.sha256}); "
                "a draft learns to imitate one target"
            )


def fingerprint(target: types.Target) -> str:
    """The sha256 of a target's file, or of its parameters when it never was a file."""
    if target.provenance.sha256 is not None:
        return target.provenance.sha256
    digest = hashlib.sha256()
    for path, leaf in jax.tree.flatten_with_path(target.model.params)[0]:
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def split(samples: Sequence[Sample], held_out: float) -> tuple[list[Sample], list[Sample]]:
    """Training and held-out samples. Which is decided by the prompt alone, so equal prompts are on one side.

    Args:
      samples: all.
      held_out: share to hold out, between 0 and 1.

    Raises:
      ValueError: one side is empty.
    """
    chosen = [int.from_bytes(sample.key[:4], "little") < held_out * 2**32 for sample in samples]
    train = [sample for sample, out in zip(samples, chosen) if not out]
    kept = [sample for sample, out in zip(samples, chosen) if out]
    for name, side in (("training", train), ("held-out", kept)):
        if not side:
            raise ValueError(f"held_out {held_out} leaves no {name} sample of {len(samples)}")
    return train, kept


def check_disjoint(train: Sequence[Sample], held_out: Sequence[Sample]) -> None:
    """Refuse a held-out set that shares a prompt with the training set.

    Raises:
      ValueError: naming the first sample that does.
    """
    known = {sample.key: sample.number for sample in train}
    for sample in held_out:
        if sample.key in known:
            raise ValueError(
                f"the held-out set overlaps the training set: its sample {sample.number} has the prompt of training "
                f"sample {known[sample.key]}"
            )
