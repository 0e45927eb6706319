"""Lookahead: the two branches, the pool, and rounds walked by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import drafters, sampling, types
from jspec import tree as tree_lib
from jspec.drafters import lookahead
from tests import running, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

SIZE = 16


@functools.cache
def bound(**settings):
    return drafters.Lookahead(**settings).build(tiny.bigram(tiny.successor()))[0]


def proposed(bound, guesses: list[list[int]], window: np.ndarray, pending: int = 5) -> types.TokenTree:
    """The tree of one row whose pool holds these n-grams behind the pending token."""
    params = types.Params(tiny.bigram(tiny.successor()).model)
    state = bound.init(params, 1, 8)
    pool = np.array(state.pool)
    for place, guess in enumerate(guesses):
        pool[0, pending, place] = guess
    state = state.replace(pool=jnp.asarray(pool), window=jnp.asarray(window)[None], started=jnp.array([True]))
    context = types.Context(jnp.array([[1, 2, pending, 0]]), jnp.array([3]), jnp.zeros((1, 0, 1)))
    keys = jax.vmap(jax.random.key)(jnp.arange(1))
    return bound.propose(params, keys, state, context, sampling.make(1, max_new_tokens=8))[0]


def test_the_picture_of_two_branches():
    """W = 3, N = 3, G = 2: the pending token, 2 + 3 window nodes, two guesses of two tokens that share the first."""
    got = proposed(bound(window=3, ngram=3, guesses=2), [[6, 7], [6, 8]], np.array([[0, 10, 11], [12, 13, 14]]))
    assert got.tokens.tolist() == [[5, 10, 11, 12, 13, 14, 6, 7, 6, 8]]
    assert got.parents.tolist() == [[-1, -2, -2, -2, -2, -2, 0, 6, -2, 6]]
    assert got.depth[0, [0, 1, 2, 3, 4, 5, 6, 7, 9]].tolist() == [0, 1, 2, 1, 2, 3, 1, 2, 2]
    picture = """
        x . . . . . . . . .
        x x . . . . . . . .
        x x x . . . . . . .
        x . . x . . . . . .
        x x . . x . . . . .
        x x x . . x . . . .
        x . . . . . x . . .
        x . . . . . x x . .
        . . . . . . . . x .
        x . . . . . x . . x
    """
    assert got.mask[0].tolist() == [[mark == "x" for mark in line.split()] for line in picture.split("\n")[1:-1]]


def test_the_picture_of_three_levels():
    """W = 2, N = 4, G = 1 and an empty pool: level 2 sees its column of level 1, and level 0 up to its column."""
    got = proposed(bound(window=2, ngram=4, guesses=1), [], np.array([[0, 1], [2, 3], [4, 6]]))
    assert got.parents.tolist() == [[-1] + [-2] * 8]
    assert got.depth[0, :6].tolist() == [0, 1, 1, 2, 2, 3]
    picture = """
        x . . . . .
        x x . . . .
        x . x . . .
        x x . x . .
        x . x . x .
        x x . x . x
    """
    got = got.mask[0, :6]
    assert got[:, :6].tolist() == [[mark == "x" for mark in line.split()] for line in picture.split("\n")[1:-1]]
    assert not got[:, 6:].any()


def test_the_pool_against_a_plain_one():
    rng = np.random.default_rng(0)
    guesses, size = 3, 6
    keys, values = rng.integers(0, size, 200), rng.integers(0, 3, (200, 2))
    real = rng.random(200) < 0.8
    pool = jnp.full((size, guesses, 2), lookahead.EMPTY, jnp.int32)
    insert = jax.jit(lookahead.insert)
    plain = {key: [] for key in range(size)}
    for start in range(0, 200, 10):
        part = slice(start, start + 10)
        pool = insert(pool, jnp.asarray(keys[part]), jnp.asarray(values[part]), jnp.asarray(real[part]))
        for key, value, kept in zip(keys[part], values[part].tolist(), real[part]):
            if kept:
                plain[key] = [value, *(other for other in plain[key] if other != value)][:guesses]
        for key, entries in plain.items():
            assert pool[key].tolist() == entries + [[lookahead.EMPTY] * 2] * (guesses - len(entries))


def test_the_text_fills_the_pool_across_chunks():
    bound_ = bound(window=2, ngram=3, guesses=2)
    params = types.Params(tiny.bigram(tiny.successor()).model)
    text = np.array([[1, 2, 3, 1, 2, 4, 9, 9], [5, 6, 0, 0, 0, 0, 0, 0]])
    lengths = np.array([7, 2])
    outputs = types.Outputs(jnp.zeros((2, 0, SIZE)), jnp.zeros((2, 4, 0, SIZE)))
    for sizes in ((4, 4), (1, 3, 3, 1), (2, 6)):
        state, start = bound_.init(params, 2, 8), 0
        for size in sizes:
            part = slice(start, start + size)
            valid = np.arange(start, start + size) < lengths[:, None]
            state = bound_.extend(params, state, jnp.asarray(text[:, part]), outputs, jnp.asarray(valid))
            start += size
        filled = {
            (row, key): [entry.tolist() for entry in np.array(state.pool)[row, key] if entry[0] != lookahead.EMPTY]
            for row in range(2)
            for key in range(SIZE)
        }
        assert {place: entries for place, entries in filled.items() if entries} == {
            (0, 1): [[2, 4], [2, 3]],
            (0, 2): [[4, 9], [3, 1]],
            (0, 3): [[1, 2]],
        }


class Plain:
    """One row of Lookahead with lists and a dictionary."""

    def __init__(self, settings: drafters.Lookahead, prompt: list[int], pending: int, window: list[list[int]]):
        self.settings, self.text, self.pending, self.window = settings, [], pending, window
        self.pool: dict[int, list[list[int]]] = {}
        self.read(prompt)

    def keep(self, gram: list[int]):
        key, *value = gram
        others = [other for other in self.pool.get(key, []) if other != value]
        self.pool[key] = [value, *others][: self.settings.guesses]

    def read(self, tokens: list[int]):
        for token in tokens:
            self.text.append(token)
            if self.settings.from_text and len(self.text) >= self.settings.ngram:
                self.keep(self.text[-self.settings.ngram :])

    def round(self, argmax: list[int], accepted: list[int], next_token: int):
        """`argmax`: of the columns of the last level."""
        levels = [[self.pending, *self.window[0][1:]], *self.window[1:], argmax]
        for gram in zip(*levels):
            self.keep([*gram])
        self.window = levels[1:]
        self.read([self.pending, *accepted])
        self.pending = next_token


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 3, "ngram": 3, "guesses": 2},
        {"window": 2, "ngram": 4, "guesses": 2, "from_text": False},
        {"window": 1, "ngram": 2, "guesses": 1},
    ],
    ids=str,
)
def test_rounds_against_a_plain_row(settings):
    """Any logits, any accepted path; after ten rounds the second row has ended and keeps its state."""
    rng = np.random.default_rng(0)
    size, rounds, ended, prompt = 5, 20, 10, [[1, 2, 3, 1, 2], [4, 0, 4, 0, 4]]
    settings = drafters.Lookahead(**settings)
    levels, columns, num_window = settings.ngram - 1, settings.window, settings.window * (settings.ngram - 1)
    bound = lookahead.BoundLookahead(settings, size)
    params, sampled = types.Params(None), sampling.make(2, max_new_tokens=8)
    propose = jax.jit(lambda keys, state, context: bound.propose(params, keys, state, context, sampled))
    update = jax.jit(lambda *args: bound.update(params, *args))

    # Tokens that stand in the context, pending ones included.
    text = np.zeros((2, 6 + rounds * settings.ngram), np.int32)
    text[:, :5], text[:, 5], length = prompt, [3, 1], np.array([6, 6])
    nothing = types.Outputs(jnp.zeros((2, 0, size)), jnp.zeros((2, 5, 0, 1)))
    state = bound.extend(params, bound.init(params, 2, 64), jnp.array(prompt), nothing, jnp.ones((2, 5), bool))
    rows = None
    for index in range(rounds):
        context = types.Context(jnp.asarray(text), jnp.asarray(length), jnp.zeros((2, 0, 1)))
        tree, state = propose(running.keys([7, 8]), state, context)
        if rows is None:  # what the window starts with is drawn from the text
            start = np.array(state.window)
            assert all(set(start[row].flat) <= set(text[row, :6].tolist()) for row in range(2))
            rows = [Plain(settings, prompt[row], int(text[row, 5]), start[row].tolist()) for row in range(2)]
        tokens, parents = np.array(tree.tokens), np.array(tree.parents)
        logits = rng.standard_normal((2, bound.num_nodes, size)).astype(np.float32)
        paths, num_accepted = np.zeros((2, levels + 1), np.int32), np.zeros(2, np.int32)
        for number, row in enumerate(rows):
            window, guesses = tokens[number, :num_window], tokens[number, num_window:].reshape(-1, levels)
            assert window.tolist() == [row.pending, *sum(row.window, [])[1:]]
            offered = row.pool.get(row.pending, [])
            assert guesses[: len(offered)].tolist() == offered
            assert (parents[number, num_window:].reshape(-1, levels)[len(offered) :] == tree_lib.PADDING).all()
            if number == 1 and index >= ended:
                num_accepted[number] = -1
                continue
            path = [0]
            while (children := np.flatnonzero(parents[number] == path[-1])).size and rng.random() < 0.7:
                path.append(int(rng.choice(children)))
            accepted, next_token = tokens[number, path[1:]].tolist(), int(rng.integers(size))
            paths[number], num_accepted[number] = path + [path[-1]] * (levels + 1 - len(path)), len(path) - 1
            row.round(logits[number, num_window - columns : num_window].argmax(axis=1).tolist(), accepted, next_token)
            text[number, length[number] :][: len(path)] = [*accepted, next_token]
            length[number] += len(path)
        verdict = types.Verdict(jnp.asarray(paths), jnp.asarray(num_accepted), jnp.asarray(text[[0, 1], length - 1]))
        outputs = types.Outputs(jnp.asarray(logits), jnp.zeros((2, bound.num_nodes, 0, 1)))
        old, state = jax.tree.map(np.array, state), update(state, context, tree, outputs, verdict)
        for number, row in enumerate(rows):
            assert state.window[number].tolist() == row.window
            for key, entries in enumerate(np.array(state.pool[number]).tolist()):
                assert [entry for entry in entries if entry[0] != lookahead.EMPTY] == row.pool.get(key, [])
        if index >= ended:
            assert all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a[1], b[1]), old, state)))
    assert length[0] > 6 + rounds  # some guesses were taken


@pytest.mark.slow
def test_rounds_on_a_cycle():
    """Once around the cycle, every n-gram of the text is known and every guess is right to its end."""
    target = tiny.bigram(tiny.successor())
    decoder = running.Decoder(
        target, bound(window=3, ngram=3, guesses=2), (), batch=2, width=8, capacity=64, max_new=48
    )
    rows = decoder([(0,), (3, 4, 5)])
    for row, start in zip(rows, (0, 5)):
        assert row.text == [(start + 1 + i) % SIZE for i in range(48)]
        around = [i for i, token in enumerate(row.text) if token == start][0]
        emitted, after = 1, []
        for accepted in row.accepted:
            if emitted > around + 3 and emitted + 3 <= 48:
                after.append(accepted)
            emitted += accepted + 1
        assert len(after) >= 8 and set(after) == {2}
    # Pool and window die with the call.
    assert decoder([(0,), (3, 4, 5)]) == rows


@pytest.mark.slow
def test_without_the_text_the_window_alone_finds_the_ngrams():
    target = tiny.bigram(tiny.successor())
    drafter = bound(window=3, ngram=3, guesses=2, from_text=False)
    decoder = running.Decoder(target, drafter, (), batch=2, width=8, capacity=64, max_new=48)
    for row in decoder([(0,), (3, 4, 5)]):
        assert sum(row.accepted) >= 10 and set(row.accepted[-6:-1]) <= {1, 2}


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"window": 0}, "window 0 is below 1"),
        ({"ngram": 1}, "ngram 1 is below 2"),
        ({"guesses": 0}, "guesses 0 is below 1"),
        ({"window": 2.5}, "window 2.5 is not a whole number"),
    ],
)
def test_bad_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        drafters.Lookahead(**settings)
