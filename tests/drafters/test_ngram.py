"""Unigram and bigram drafts: counts, laws, and what is refused. Texts and laws run in `tests/test_common.py`."""

from __future__ import annotations

import dataclasses
import json
import types as python_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import drafters, sampling, types
from jspec.drafters import ngram
from tests import tiny

pytestmark = pytest.mark.usefixtures("small_programs")

SEQUENCES = [[1, 2, 1, 3, 1, 2], [2, 1, 5]]


def test_counts_by_hand():
    assert ngram.count_unigrams(SEQUENCES, 6).tolist() == [0, 4, 3, 1, 0, 1]
    ids, counts = ngram.count_bigrams(SEQUENCES, 6, 2)
    # 1 is followed by 2, 2, 3, 5 (3 and 5 once each: the lower id stays), 2 by 1 twice, 3 by 1.
    assert ids.tolist() == [[0, 0], [2, 3], [1, 0], [1, 0], [0, 0], [0, 0]]
    assert counts.tolist() == [[0, 0], [2, 1], [2, 0], [1, 0], [0, 0], [0, 0]]


def propose(settings, pending, temperature, rows=4000):
    target = tiny.bigram(tiny.successor(size=6))
    bound, draft = settings.build(target, sequences=SEQUENCES)
    context = types.Context(jnp.full((rows, 1), pending), jnp.ones(rows, jnp.int32), jnp.zeros((rows, 0, 6)))
    settings_ = sampling.make(rows, max_new_tokens=9, temperature=temperature)
    keys = jax.vmap(jax.random.key)(jnp.arange(rows))
    params = types.Params(target.model, draft)
    tree, _ = jax.jit(lambda: bound.propose(params, keys, (), context, settings_))()
    return jax.tree.map(np.asarray, tree)


def test_drafts_follow_the_law_that_is_stated():
    for settings, laws in (
        (drafters.Unigram(gamma=2), lambda token: np.array([0, 4, 3, 1, 0, 1]) / 9),
        (
            drafters.Bigram(gamma=2, continuations=2),
            lambda token: {
                1: np.array([0, 0, 2, 1, 0, 0]) / 3,
                2: np.eye(6)[1],
                3: np.eye(6)[1],
            }.get(token, np.array([0, 4, 3, 1, 0, 1]) / 9),
        ),
    ):
        tree = propose(settings, 1, 1.0)
        for row in range(len(tree.tokens)):
            for place in (1, 2):
                assert np.allclose(tree.draft_probs[row, place], laws(tree.tokens[row, place - 1]), atol=1e-6)
        share = np.bincount(tree.tokens[:, 1], minlength=6) / len(tree.tokens)
        assert np.allclose(share, laws(1), atol=0.03)
        # Nothing followed 5, so the unigram goes on.
        assert np.allclose(propose(settings, 5, 1.0, rows=4).draft_probs[0, 1], np.array([0, 4, 3, 1, 0, 1]) / 9)
        greedy = propose(settings, 1, 0.0, rows=4)
        assert greedy.tokens[0].tolist() == ([1, 1, 1] if isinstance(settings, drafters.Unigram) else [1, 2, 1])


def test_a_corpus_file(tmp_path):
    target = tiny.bigram(tiny.successor(size=6))
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"ids": sequence}) for sequence in SEQUENCES) + "\n\n")
    _, from_file = drafters.Bigram(corpus=str(path)).build(target)
    _, in_memory = drafters.Bigram().build(target, sequences=SEQUENCES)
    assert jax.tree.all(jax.tree.map(np.array_equal, from_file, in_memory))
    tokenizer = python_types.SimpleNamespace(encode=lambda text: [len(word) for word in text.split()])
    spoken = dataclasses.replace(target, tokenizer=tokenizer)
    path.write_text('{"text": "a bb"}\n{"id": "chat/1", "prompt": "ccc a"}')
    assert ngram.read_corpus(str(path), spoken) == [[1, 2], [3, 1]]
    for content, words in (
        ('{"ids": [1]}\n{"id": 2}', "line 2: expected a mapping with ids, text or prompt"),
        ('{"ids": [1', "line 1: "),
        ('{"text": "a"}', "line 1 is a text, and the target has no tokenizer"),
        ('{"ids": [1, 6]}', "token id 6 is outside the vocabulary of 6"),
        ('{"ids": [-1]}', "line 1: -1 is no token id"),
        ("", "corpus holds no token"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=words):
            drafters.Unigram(corpus=str(path)).build(target)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not a UTF-8 text file"):
        drafters.Unigram(corpus=str(path)).build(target)
    with pytest.raises(ValueError, match="corpus is not given"):
        drafters.Bigram().build(target)
    with pytest.raises(ValueError, match="continuations 0 is below 1"):
        drafters.Bigram(continuations=0)
    for smoothing in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="smoothing .* is outside"):
            drafters.Unigram(smoothing=smoothing)
    with pytest.raises(ValueError, match="gamma 0 is below 1"):
        drafters.Unigram(gamma=0)


class Letters:
    """A tokenizer: a is 0, b is 1, all else is 2."""

    @staticmethod
    def encode(text):
        return ["ab".find(letter) % 3 for letter in text]


def test_a_corpus_of_texts(tmp_path):
    """A JSON string may hold a line separator; a .txt file is one text, its line ends included."""
    target = dataclasses.replace(tiny.bigram(tiny.successor(size=6)), tokenizer=Letters())
    jsonl, plain = tmp_path / "corpus.jsonl", tmp_path / "corpus.txt"
    jsonl.write_text('{"text": "ab\u2028a"}\n{"ids": [5, 5]}\n', encoding="utf-8")
    plain.write_text("ab\nba", encoding="utf-8")
    assert ngram.read_corpus(str(jsonl), target) == [[0, 1, 2, 0], [5, 5]]
    assert ngram.read_corpus(str(plain), target) == [[0, 1, 2, 1, 0]]
    with pytest.raises(ValueError, match=r"corpus\.txt is a text, and the target has no tokenizer"):
        ngram.read_corpus(str(plain), tiny.bigram(tiny.successor(size=6)))


def test_smoothing_adds_to_every_count():
    target = tiny.bigram(tiny.successor(size=6))
    for settings in (drafters.Unigram(smoothing=0.5), drafters.Bigram(smoothing=0.5)):
        _, draft = settings.build(target, sequences=SEQUENCES)
        assert np.allclose(np.exp(draft["unigram"]), [0.5, 4.5, 3.5, 1.5, 0.5, 1.5])
