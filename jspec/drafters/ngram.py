"""Unigram and bigram drafts: laws from counts, which cost nothing to ask (Leviathan et al., arXiv:2211.17192, table 3:
alpha of 0.03 to 0.2, which still saves calls).

Counts come from a corpus of token ids or of texts. A bigram keeps the most frequent continuations of every token, since
a full table would hold V^2 numbers; the law that remains is the one drawn from and the one the verifier is told. A
token that was never followed by anything is continued by the unigram.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import sampling as sampling_lib
from jspec import tree as tree_lib
from jspec import types
from jspec.drafters import base


def read_corpus(path: str, target: types.Target) -> list[list[int]]:
    """Token ids of a file. A `.txt` file is one text, which the target's tokenizer encodes; of any other, a JSONL file,
    each line has `ids`, a `text`, or a `prompt`.

    Raises:
      ValueError: naming the line that is not so; a text for a target without a tokenizer; a file that is no UTF-8.
      OSError: the file cannot be read.
    """

    def encode(text, where):
        if target.tokenizer is None:
            raise ValueError(f"{where} is a text, and the target has no tokenizer")
        return target.tokenizer.encode(text)

    try:
        whole = pathlib.Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"corpus {path}: not a UTF-8 text file") from None
    if pathlib.Path(path).suffix == ".txt":
        return [encode(whole, f"corpus {path}")]
    sequences = []
    # Not `splitlines`: JSON strings may hold line separators other than a newline.
    for number, line in enumerate(whole.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
        if isinstance(content, dict) and isinstance(content.get("ids"), list):
            sequences.append(sampling_lib.token_ids(f"{path}: line {number}", content["ids"]))
            continue
        texts = [content.get(key) for key in ("text", "prompt")] if isinstance(content, dict) else []
        text = next((text for text in texts if isinstance(text, str)), None)
        if text is None:
            raise ValueError(f"{path}: line {number}: expected a mapping with ids, text or prompt")
        sequences.append(encode(text, f"{path}: line {number}"))
    return sequences


def count_unigrams(sequences: Iterable[Sequence[int]], vocab_size: int) -> np.ndarray:
    """`[V]` counts.

    Raises:
      ValueError: there is no token, or one outside the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    for sequence in sequences:
        ids = np.asarray(sequence, np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
            bad = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise ValueError(f"corpus: token id {bad} is outside the vocabulary of {vocab_size}")
        counts += np.bincount(ids, minlength=vocab_size)
    if not counts.any():
        raise ValueError("corpus holds no token")
    return counts


def count_bigrams(
    sequences: Iterable[Sequence[int]], vocab_size: int, continuations: int
) -> tuple[np.ndarray, np.ndarray]:
    """The most frequent continuations of each token: `[V, k]` ids and counts, 0 where there are fewer. Of equally
    frequent ones the lower id comes first."""
    after: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
    for sequence in sequences:
        for first, second in zip(sequence, sequence[1:]):
            after[first][second] += 1
    ids, counts = np.zeros((2, vocab_size, continuations), np.int64)
    for first, followers in after.items():
        best = sorted(followers.items(), key=lambda item: (-item[1], item[0]))[:continuations]
        ids[first, : len(best)], counts[first, : len(best)] = zip(*best)
    return ids, counts


def _sequences(corpus: str | None, given: Iterable[Sequence[int]] | None, target: types.Target):
    if given is None:
        if corpus is None:
            raise ValueError("corpus is not given: set corpus to a JSONL or .txt file")
        return read_corpus(corpus, target)
    return list(given)


def _check_smoothing(smoothing: float) -> None:
    if not 0 <= smoothing < float("inf"):
        raise ValueError(f"smoothing {smoothing} is outside [0, inf)")


@base.register("unigram")
@dataclasses.dataclass(frozen=True)
class Unigram:
    """Settings.

    gamma:     draft length.
    corpus:    a JSONL or text file (see `read_corpus`); None when sequences are handed to `build`.
    smoothing: added to every token's count.
    """

    gamma: int = 4
    corpus: str | None = None
    smoothing: float = 0.0

    def __post_init__(self):
        base.check_count("gamma", self.gamma, 1)
        _check_smoothing(self.smoothing)

    def build(
        self, target: types.Target, *, sequences: Iterable[Sequence[int]] | None = None
    ) -> tuple[BoundNgram, dict[str, Any]]:
        """See `types.Drafter`.

        Args:
          target: the model to speed up.
          sequences: token ids to count, used instead of `corpus`.

        Raises:
          ValueError, OSError: there is no corpus, or a bad one.
        """
        vocab_size = target.model.config.vocab_size
        counts = count_unigrams(_sequences(self.corpus, sequences, target), vocab_size)
        return BoundNgram(self.gamma, vocab_size), {"unigram": _log(counts + self.smoothing)}


@base.register("bigram")
@dataclasses.dataclass(frozen=True)
class Bigram:
    """Settings.

    gamma:         draft length.
    corpus:        a JSONL or text file (see `read_corpus`); None when sequences are handed to `build`.
    continuations: kept for each token.
    smoothing:     added to every token's count in the unigram that stands in where nothing followed.
    """

    gamma: int = 4
    corpus: str | None = None
    continuations: int = 16
    smoothing: float = 0.0

    def __post_init__(self):
        base.check_count("gamma", self.gamma, 1)
        _check_smoothing(self.smoothing)
        base.check_count("continuations", self.continuations, 1)

    def build(
        self, target: types.Target, *, sequences: Iterable[Sequence[int]] | None = None
    ) -> tuple[BoundNgram, dict[str, Any]]:
        """See `Unigram.build`."""
        vocab_size = target.model.config.vocab_size
        sequences = _sequences(self.corpus, sequences, target)
        unigram = _log(count_unigrams(sequences, vocab_size) + self.smoothing)
        ids, counts = count_bigrams(sequences, vocab_size, self.continuations)
        params = {"unigram": unigram, "ids": jnp.asarray(ids, jnp.int32), "logits": _log(counts)}
        return BoundNgram(self.gamma, vocab_size), params


def _log(counts: np.ndarray) -> jax.Array:
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(counts), jnp.float32)


@dataclasses.dataclass(frozen=True)
class BoundNgram(base.Bound):
    """See `types.BoundDrafter`. Its parameters: `unigram` `[V]` log counts and, of a bigram, `ids` and `logits`
    `[V, k]` of each token's continuations."""

    gamma: int
    vocab_size: int

    @property
    def num_nodes(self) -> int:
        return self.gamma + 1

    @property
    def max_depth(self) -> int:
        return self.gamma

    def _logits(self, draft, tokens):
        """`[B]` tokens -> `[B, V]` logits of what follows."""
        unigram = jnp.broadcast_to(draft["unigram"], (tokens.shape[0], self.vocab_size))
        if "ids" not in draft:
            return unigram
        ids, logits = draft["ids"][tokens], draft["logits"][tokens]
        empty = jnp.full(unigram.shape, -jnp.inf, unigram.dtype)
        bigram = jax.vmap(lambda row, ids, logits: row.at[ids].max(logits))(empty, ids, logits)
        known = jnp.isfinite(logits[:, :1])  # the most frequent continuation comes first
        return jnp.where(known, bigram, unigram)

    def propose(self, params, rng_keys, state, context, sampling):
        """Draw a chain."""
        batch = context.length.shape[0]
        keys = jax.vmap(lambda key: jax.random.split(key, self.gamma), out_axes=1)(rng_keys)
        root = base.pending(context)

        def draft_next(step, carry):
            last, drafts, laws = carry
            token, law = sampling_lib.draw(keys[step], self._logits(params.draft, last), sampling)
            return token, drafts.at[:, step].set(token), laws.at[:, step].set(law)

        drafts = jnp.zeros((batch, self.gamma), jnp.int32)
        laws = jnp.zeros((batch, self.gamma, self.vocab_size), jnp.float32)
        _, drafts, laws = jax.lax.fori_loop(0, self.gamma, draft_next, (root, drafts, laws))
        return tree_lib.chain(root, drafts, draft_probs=laws), state
