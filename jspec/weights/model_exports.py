"""What exports of whole models have in common: the tensors under a format's names, and the proof that they read back.

An export is written under a temporary name, loaded as any model is, and compared with what was to be written: logits,
token ids of some texts, and what else a target carries. Only then it gets its name.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache as kv
from jspec import types
from jspec.models import transformer
from jspec.weights import assembly, head_files, load, references, vocabulary_files
from jspec.weights import tokenizer as tokenizers

# Of a difference between logits, over the largest of them: a format may round what the config says to float32.
TOLERANCE = 1e-4

_NUM_TOKENS = 16

# Texts on which ways of cutting differ: digits, contractions, cases, line ends, other scripts, emoji.
_TEXTS = (
    "",
    " Hello  world,   it's 12345 o'clock; WE'LL see 3.14 ½ ²",
    "snake_case camelCase SCREAMING\n\n  indented\n\ttabbed\r\nend   ",
    "naïve Straße Привет, мир! 東京は25度。 안녕하세요 مرحبا नमस्ते ४२",
    "😀 👩‍👩‍👧 🇩🇪 ☃️ https://example.org/a/b?c=1&d=2",
)


def prepare(target: types.Target, target_sha256: str | None) -> types.Target:
    """The target as a file can hold it.

    Its answers end where the tokenizer says too, its provenance says what it was trained for (`target_sha256`, else
    what is known already), and a draft vocabulary that holds every token is none.

    Raises:
      ValueError: `target_sha256` is no digest, or `draft_ids` no ids of the model.
    """
    stop_ids = set(target.stop_ids) | set(target.tokenizer.stop_ids if target.tokenizer is not None else ())
    trained_for = target.provenance.trained_for
    if target_sha256 is not None:
        trained_for = references.check_digest(target_sha256, "the model that the draft was trained for")
    provenance = dataclasses.replace(target.provenance, trained_for=trained_for)
    return dataclasses.replace(
        target,
        stop_ids=tuple(sorted(map(int, stop_ids))),
        provenance=provenance,
        draft_ids=vocabulary_files.reduced(target.draft_ids, target.model.config.vocab_size, "draft_ids"),
    )


def cast(model: transformer.Model, dtype: Any) -> transformer.Model:
    """A model with parameters in another dtype."""
    return transformer.Model(jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), model.params), model.config)


def tensors(
    model: transformer.Model,
    names: assembly.Names,
    adjust: Callable[[str, np.ndarray], np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """A model's parameters under a format's names, fused ones split: the inverse of `assembly.assemble`.

    Args:
      model: parameters and config; what is missing among `embed`, `final_norm` and `head` is left out.
      names: how the format names them.
      adjust: called with each tensor's name and values, for formats that order rows differently.
    """
    found = {}
    parts = [stored for path, stored in assembly.model_parts(model.config, names).items() if path[0] in model.params]
    for leaf, stored in zip(jax.tree.leaves(model.params), parts, strict=True):
        found |= head_files.split_leaf(leaf, stored)
    return found if adjust is None else {name: adjust(name, values) for name, values in found.items()}


def checker(written: types.Target, lender: types.Target | None = None) -> Callable[[pathlib.Path], None]:
    """A function that loads a path and compares it with what was to be written, in float32.

    Args:
      written: as `prepare` gives it, its parameters rounded to what the file holds.
      lender: lends what the path does not hold (`borrowing`).

    Returns:
      The function, which raises ValueError when anything reads back differently.
    """
    expected = _sample_logits(written.model)

    def check(path: pathlib.Path) -> None:
        found = load.load_target(str(path), lender=lender)
        head_files.check_logits(_sample_logits(found.model), expected, jnp.float32, path, TOLERANCE)
        facts = {"end tokens": lambda target: target.stop_ids, "target_sha256": lambda t: t.provenance.trained_for}
        _compare(facts, found, written, path)
        vocabulary_files.same(found.draft_ids, written.draft_ids, path)
        if (found.tokenizer is None) != (written.tokenizer is None):
            raise ValueError(f"{path}: the tokenizer does not read back; nothing is kept")
        if written.tokenizer is not None:
            _compare_tokenizers(found.tokenizer, written.tokenizer, path)

    return check


def _sample_logits(model: transformer.Model) -> jax.Array:
    """`[1, T, V]` float32 logits of random tokens, spread over all positions, where windows and rope scalings show."""
    config = model.config
    length = min(_NUM_TOKENS, config.max_positions)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, length), np.int32)
    positions = np.linspace(0, config.max_positions - 1, length).astype(np.int32)[None]
    return _forward(cast(model, jnp.float32), tokens, positions)


@jax.jit
def _forward(model, tokens, positions):
    length = tokens.shape[1]
    cache = kv.init(model.config, 1, 1, model.dtype)
    return transformer.forward(model, tokens, positions, cache, jnp.tril(jnp.ones((1, length, length), bool)))[0].logits


def _compare(facts: Mapping[str, Callable[[Any], Any]], found: Any, expected: Any, where: pathlib.Path) -> None:
    for name, fact in facts.items():
        if fact(found) != fact(expected):
            raise ValueError(f"{where}: {name} read back as {fact(found)!r}, not {fact(expected)!r}; nothing is kept")


def _compare_tokenizers(found: tokenizers.Tokenizer, expected: tokenizers.Tokenizer, where: pathlib.Path) -> None:
    """Raises ValueError for token strings, token ids, beginnings or chat templates that differ."""
    special = " a ".join(expected.special_tokens.values())
    facts = {
        "the sha256 of the token strings": lambda each: each.fingerprint(),
        "bos_id": lambda each: each.bos_id,
        "add_bos": lambda each: each.add_bos,
        "the chat template": lambda each: each.chat_template,
    }
    facts |= {f"the token ids of {text!r}": lambda each, text=text: each.encode(text) for text in (*_TEXTS, special)}
    _compare(facts, found, expected, where)
