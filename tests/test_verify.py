"""Rejection: the walk against a plain reference, that against exact laws, the sampled law, and mistakes that show."""

from __future__ import annotations

import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import sampling, verify
from jspec import tree as tree_lib
from tests import laws, reference, walks

pytestmark = pytest.mark.usefixtures("small_programs")

BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


def random_trees(rng, batch: int, num_nodes: int, vocab_size: int):
    """Tokens, parents and `[B, N, V]` laws: a fifth of the nodes auxiliary, laws with zeros, equal siblings."""
    parents = np.stack([[rng.integers(0, max(i, 1)) for i in range(num_nodes)] for _ in range(batch)])
    parents = np.where(rng.random(parents.shape) < 0.2, -2, parents)
    parents[:, 0] = -1
    tokens = rng.integers(0, vocab_size, parents.shape)
    probs = rng.random((batch, num_nodes, vocab_size)) * (rng.random((batch, num_nodes, vocab_size)) < 0.7)
    probs[..., 0] += 0.01
    return tokens, parents, (probs / probs.sum(-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("kind", ["drawn", "deterministic", "reduced vocabulary"])
def test_the_walk_is_that_of_the_reference(monkeypatch, kind):
    """Random trees and uniforms, some of them exactly 0: a token of target probability 0 never passes."""
    rng = np.random.default_rng(0)
    batch, num_nodes, size = 2000, 7, 5
    tokens, parents, target = random_trees(rng, batch, num_nodes, size)
    uniforms = rng.random((batch, num_nodes), np.float32) * (rng.random((batch, num_nodes)) < 0.9)
    draft_ids, draft_probs = None, None
    full = np.eye(size)[tokens]
    if kind == "drawn":
        draft_probs = full = random_trees(rng, batch, num_nodes, size)[2]
    if kind == "reduced vocabulary":  # the draft knows tokens 4, 0 and 2, in that order
        draft_ids = np.array([4, 0, 2])
        tokens = draft_ids[rng.integers(0, 3, tokens.shape)]
        draft_probs = random_trees(rng, batch, num_nodes, 3)[2]
        full = np.zeros((batch, num_nodes, size))
        full[..., draft_ids] = draft_probs
    tree = tree_lib.from_parents(
        jnp.asarray(tokens), jnp.asarray(parents), max_depth=num_nodes - 1,
        draft_probs=None if draft_probs is None else jnp.asarray(draft_probs),
        draft_ids=None if draft_ids is None else jnp.asarray(draft_ids),
    )  # fmt: skip
    accepted, paths, next_laws = walks.walk(monkeypatch, tree, target, uniforms)
    seen = set()
    for row in range(batch):
        path, law = reference.walk(tokens[row], parents[row], full[row], target[row], uniforms[row])
        assert accepted[row] == path
        assert np.allclose(next_laws[row], law, atol=2e-5)
        # Places beyond the path hold its last node again.
        assert paths[row].tolist() == path + [path[-1]] * (num_nodes - len(path))
        seen.add(len(path))
    assert seen >= {1, 2, 3, 4}


# `p` target law, `q` draft law, drafted token, uniform -> accepted, law of the next token (the bonus law is uniform).
# Numbers are exact in binary.
HALF, QUARTER = [0.5, 0.5, 0, 0], [0.25] * 4
STEPS = [
    # Strict: r q equals p, so the draft falls. What p has beyond q is token 1's alone.
    ([0.25, 0.75, 0, 0], HALF, 0, 0.5, False, [0, 1, 0, 0]),
    ([0.25, 0.75, 0, 0], HALF, 0, np.float32(0.49999997), True, QUARTER),
    # r is exactly 0: a token the target excludes must not pass, one it allows does.
    ([0, 1, 0, 0], HALF, 0, 0.0, False, [0, 1, 0, 0]),
    ([2**-20, 1 - 2**-20, 0, 0], HALF, 0, 0.0, True, QUARTER),
    # DEV-04 (a), (b), (c), (d). In (b) rounding alone can reject; p itself is the law then.
    (QUARTER, QUARTER, 3, BELOW_ONE, True, QUARTER),
    (QUARTER, [0.25 * (1 + 1e-7), 0.25, 0.25, 0.25], 0, BELOW_ONE, None, QUARTER),
    ([0, 0, 1, 0], [0, 0, 1, 0], 2, BELOW_ONE, True, QUARTER),
    ([0, 0, 1, 0], [0, 1, 0, 0], 1, 0.0, False, [0, 0, 1, 0]),
    # DEV-03: [.4, .1, .3, .2] against [.1, .5, .2, .2]. Token 1 passes below 0.2; the residual is [.3, 0, .1, 0] of .4.
    ([0.4, 0.1, 0.3, 0.2], [0.1, 0.5, 0.2, 0.2], 1, 0.19, True, QUARTER),
    ([0.4, 0.1, 0.3, 0.2], [0.1, 0.5, 0.2, 0.2], 1, 0.21, False, [0.75, 0, 0.25, 0]),
    ([0.4, 0.1, 0.3, 0.2], [0.1, 0.5, 0.2, 0.2], 0, BELOW_ONE, True, QUARTER),
    # DEV-05: an argmax proposal carries the one-hot law. It passes below p, and its token is left out of the rest.
    ([0.5, 0.3, 0.2, 0], [1, 0, 0, 0], 0, 0.49, True, QUARTER),
    ([0.5, 0.3, 0.2, 0], [1, 0, 0, 0], 0, 0.51, False, [0, 0.6, 0.4, 0]),
]


def test_single_steps_worked_by_hand(monkeypatch):
    target, draft, token, uniform, expected, law = map(list, zip(*STEPS))
    tree = tree_lib.chain(
        jnp.zeros(len(STEPS), jnp.int32),
        jnp.asarray(token)[:, None],
        draft_probs=jnp.asarray(draft, jnp.float32)[:, None],
    )
    laws_ = np.stack([np.float32(target), np.full((len(STEPS), 4), 0.25, np.float32)], axis=1)
    accepted, _, got = walks.walk(monkeypatch, tree, laws_, np.float32(uniform)[:, None].repeat(2, axis=1))
    for row, (want, want_law) in enumerate(zip(expected, law)):
        assert want is None or len(accepted[row]) == 1 + want, STEPS[row]
        assert np.isfinite(got[row]).all() and np.allclose(got[row], want_law, atol=1e-6), STEPS[row]


@pytest.mark.parametrize("kind", ["without replacement", "with replacement", "deterministic"])
@pytest.mark.parametrize("parents", [(-1, 0, 1), (-1, 0, 0, 0), (-1, 0, 0, 1, 1), (-1, 0, 0, 2, -2, 2)])
def test_the_reference_gives_the_targets_law_exactly(kind, parents):
    """Exact fractions over every draw of the tree and every outcome of its walk; the target writes what follows."""
    size = 3
    chain = lambda rows: [[Fraction(x, sum(row)) for x in row] for row in rows]
    target, draft = chain([[1, 6, 2], [3, 1, 3], [2, 2, 5]]), chain([[4, 2, 1], [1, 4, 4], [7, 1, 3]])

    def draws(node, tokens, draft_laws, weight):
        """Every tree there is: tokens, the law each node carries, probability."""
        if node == len(parents):
            yield tokens, draft_laws, weight
            return
        elder = [tokens[i] for i in range(node) if parents[i] == parents[node]]
        law = draft[tokens[max(parents[node], 0)]]
        if kind == "deterministic":  # an arbitrary rule with distinct siblings
            token = (tokens[max(parents[node], 0)] + 1 + len(elder)) % size
            law = [Fraction(int(i == token)) for i in range(size)]
        elif kind == "without replacement":
            law = [Fraction(0) if i in elder else q for i, q in enumerate(law)]
            law = [q / sum(law) for q in law]
        for token, q in enumerate(law):
            if q:
                yield from draws(node + 1, (*tokens, token), (*draft_laws, law), weight * q)

    joint = {path: Fraction(0) for path in itertools.product(range(size), repeat=3)}
    for tokens, draft_laws, weight in draws(1, (0,), (None,), Fraction(1)):
        for path, p in reference.walk_law(tokens, parents, draft_laws, [target[token] for token in tokens]).items():
            for rest in itertools.product(range(size), repeat=3 - len(path)):
                text = path + rest
                follow = [target[a][b] for a, b in zip(text[len(path) - 1 :], rest)]
                joint[text] += weight * p * np.prod([Fraction(1), *follow])
    assert all(p == target[0][a] * target[a][b] * target[b][c] for (a, b, c), p in joint.items())


# The sampled law. Every part of a batch is one case; the next token after the draft comes from token 0's bonus law.

SAMPLES = 10_000
UNIT = {
    # name: target law, draft law, settings, exact acceptance
    "DEV-03": ([0.4, 0.1, 0.3, 0.2], [0.1, 0.5, 0.2, 0.2], {}, 0.6),
    "DEV-04 equal": ([0.25] * 4, [0.25] * 4, {}, 1.0),
    "DEV-04 disjoint": ([0, 0, 1, 0], [0, 1, 0, 0], {}, 0.0),
    "DEV-05": ([0.5, 0.3, 0.2], [1, 0, 0], {}, 0.5),
    "DEV-06 top-k": ([0.5, 0.25, 0.15, 0.1], [0.4, 0.3, 0.2, 0.1], {"top_k": 2}, 0.9047619),
    "DEV-06 temperature": ([0.5, 0.25, 0.15, 0.1], [0.4, 0.3, 0.2, 0.1], {"temperature": 0.5}, 0.8086957),
    "DEV-15": ([0.1, 0.2, 0.3, 0.2, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1], {}, 0.6),
    "greedy": ([0.3, 0.4, 0.3], [0.2, 0.5, 0.3], {"temperature": 0}, 1.0),
}


@functools.cache
def compiled(residual):
    """`verify.verify` on a batch; `residual` only tells programs apart that were traced under another one."""
    return jax.jit(functools.partial(verify.verify, verify.Rejection()))


def emitted(judge=None):
    """Run one round of one draft per row.

    Args:
      judge: name -> the law the draft carries instead of the one it was drawn from.

    Returns:
      For each case of `UNIT` the share of accepted drafts and the `[V]` counts of the first token.
    """
    rng = np.random.default_rng(0)
    size, batch = 6, SAMPLES * len(UNIT)
    pad = lambda law: np.pad(np.asarray(law, float), (0, size - len(law)))
    tokens, carried, target, settings = [], [], [], []
    for name, (p, q, setting, _) in UNIT.items():
        drawn = laws.filtered(q, **setting)
        tokens.append(rng.choice(size, SAMPLES, p=pad(drawn)))
        carried.append(np.broadcast_to(pad((judge or {}).get(name, drawn)), (SAMPLES, 1, size)))
        target.append(np.broadcast_to([pad(p), np.eye(size)[0]], (SAMPLES, 2, size)))
        settings += [setting] * SAMPLES
    tokens, carried, target = map(np.concatenate, (tokens, carried, target))
    make = lambda name, neutral: [setting.get(name, neutral) for setting in settings]
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log(target), jnp.float32)
    tree = tree_lib.chain(jnp.zeros(batch, jnp.int32), tokens[:, None], draft_probs=jnp.asarray(carried, jnp.float32))
    row_settings = sampling.make(batch, max_new_tokens=1, temperature=make("temperature", 1.0), top_k=make("top_k", 0))
    keys = jax.random.split(jax.random.key(0), batch)
    verdict = compiled(verify.residual)(keys, tree, logits, row_settings)
    accepted, next_token = np.asarray(verdict.num_accepted), np.asarray(verdict.next_token)
    assert (next_token[accepted == 1] == 0).all()  # the bonus comes from behind the accepted draft
    first = np.where(accepted == 1, tokens, next_token)
    parts = [slice(i * SAMPLES, (i + 1) * SAMPLES) for i in range(len(UNIT))]
    return {name: (accepted[part].mean(), np.bincount(first[part], minlength=size)) for name, part in zip(UNIT, parts)}


def exact_law(name):
    p, _, setting, _ = UNIT[name]
    return np.pad(laws.filtered(p, **setting), (0, 6 - len(p)))


def test_the_first_token_follows_the_targets_law():
    for name, (rate, counts) in emitted().items():
        expected = UNIT[name][3]
        # Five standard errors.
        assert abs(rate - expected) <= 5 * np.sqrt(expected * (1 - expected) / SAMPLES) + 1e-12, name
        assert laws.follows(counts, exact_law(name)), (name, counts / SAMPLES)


SOFTMAX = np.exp([0.3, 0, 0.1, 0])


def softmax_residual(target, draft):
    """DEV-03's mistake."""
    return jax.nn.softmax(jnp.where(target > 0, jnp.maximum(target - draft, 0), -jnp.inf))


@pytest.mark.parametrize(
    "name,patch,judge,wrong",
    [
        # min(p, q) = [.1, .1, .2, .2], and 0.4 of the softmax of [.3, 0, .1, 0].
        ("DEV-03", softmax_residual, None, np.array([0.1, 0.1, 0.2, 0.2]) + 0.4 * SOFTMAX / SOFTMAX.sum()),
        # Raw q: everything passes, so the text follows the filtered draft.
        ("DEV-06 top-k", None, [0.4, 0.3, 0.2, 0.1], [0.4 / 0.7, 0.3 / 0.7, 0, 0]),
        # Token 0 proposed for certain, judged by its softmax 0.6: .5 / .6 passes, and token 1 never comes.
        ("DEV-05", None, [0.6, 0.3, 0.1], [5 / 6, 0, 1 / 6]),
    ],
    ids=["softmax residual", "raw draft law", "softmax of an argmax draft"],
)
def test_mistakes_show(monkeypatch, name, patch, judge, wrong):
    """Each gives the law it is known for, which the test above refuses."""
    if patch is not None:
        monkeypatch.setattr(verify, "residual", patch)
    _, counts = emitted(judge and {name: judge})[name]
    assert laws.follows(counts, np.pad(wrong, (0, 6 - len(wrong)))), counts / SAMPLES
    assert not laws.follows(counts, exact_law(name))


# At temperature 0.


def test_the_closed_form_is_the_general_walk_on_one_hot_laws():
    """Random trees with equal siblings and auxiliary nodes."""
    rng = np.random.default_rng(1)
    batch, num_nodes, size = 2000, 7, 3
    tokens, parents, probs = random_trees(rng, batch, num_nodes, size)
    logits = jnp.asarray(rng.integers(0, 3, (batch, num_nodes, size)), jnp.float32)  # many exact ties
    keys = jax.random.split(jax.random.key(0), batch)
    run = jax.jit(lambda settings: verify.verify(verify.Rejection(), keys, tree, logits, settings))
    tree = tree_lib.from_parents(
        jnp.asarray(tokens), jnp.asarray(parents), max_depth=6, draft_probs=jnp.asarray(probs)
    )  # whatever the drafts were drawn from
    closed = run(sampling.make(batch, max_new_tokens=1))
    # One row that samples sends all rows down the general walk.
    general = run(sampling.make(batch, max_new_tokens=1, temperature=[0.0] * (batch - 1) + [1.0]))
    assert all(np.array_equal(a[:-1], b[:-1]) for a, b in zip(jax.tree.leaves(closed), jax.tree.leaves(general)))
    assert len(np.unique(closed.num_accepted)) > 3
    argmax = np.asarray(jnp.argmax(logits, axis=-1))
    for row in range(200):
        node, path = 0, [0]
        while children := [
            i for i in range(num_nodes) if parents[row, i] == node and tokens[row, i] == argmax[row, node]
        ]:
            node = children[0]
            path.append(node)
        assert closed.path[row, : closed.num_accepted[row] + 1].tolist() == path
        assert closed.next_token[row] == argmax[row, node]
