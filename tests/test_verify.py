"""Verifiers: the walk against a plain reference, that against exact laws, the sampled law, and mistakes that show."""

from __future__ import annotations

import functools
import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import drafters, sampling, types, verify
from jspec import tree as tree_lib
from jspec.drafters import eagle
from jspec.models import heads
from tests import laws, reference, tiny

pytestmark = pytest.mark.usefixtures("small_programs")

REJECTION = verify.Rejection()
BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


class Given:
    """Laws of one row that samples, as a `types.TargetLaw`."""

    greedy = False

    def __init__(self, laws):
        self.laws = laws

    def __call__(self, node):
        return self.laws[node]

    def log_ratio(self, node):
        return jnp.log(self.laws[node] / jnp.max(self.laws[node]))


def walk(monkeypatch, tree: types.TokenTree, target_laws, uniforms, verifier=REJECTION):
    """A verifier on a batch of rows with given uniforms, one per node.

    Returns:
      Accepted nodes of each row, paths as handed out, and `[B, V]` laws from which the next token would be drawn.
    """
    monkeypatch.setattr(sampling, "sample", lambda rng_key, law: law)
    rows = tree.replace(draft_ids=None)

    @jax.jit
    def run(rows, target_laws, uniforms):
        def one(row, laws, uniforms):
            with monkeypatch.context() as patch:
                patch.setattr(jax.random, "uniform", lambda rng_key, shape: uniforms[: shape[0]])
                row = row.replace(draft_ids=tree.draft_ids)
                return verifier.verify(jax.random.key(0), row, Given(laws))

        return jax.vmap(one)(rows, target_laws, uniforms)

    verdict = jax.tree.map(np.asarray, run(rows, jnp.asarray(target_laws), jnp.asarray(uniforms)))
    accepted = [path[: count + 1].tolist() for path, count in zip(verdict.path, verdict.num_accepted)]
    return accepted, verdict.path, verdict.next_token


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
    accepted, paths, next_laws = walk(monkeypatch, tree, target, uniforms)
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
    accepted, _, got = walk(monkeypatch, tree, laws_, np.float32(uniform)[:, None].repeat(2, axis=1))
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


def test_synthetic_accepts_at_its_rate_and_says_that_it_is_not_lossless():
    assert verify.Rejection.lossless and not verify.Synthetic.lossless
    batch, gamma, rate = 20_000, 3, 0.7
    valid = jnp.arange(gamma) < jnp.where(jnp.arange(batch) < batch // 2, gamma, 1)[:, None]
    tree = tree_lib.chain(jnp.zeros(batch, jnp.int32), jnp.ones((batch, gamma), jnp.int32), valid=valid)
    logits = jnp.log(jnp.full((batch, gamma + 1, 4), 0.25)).at[:, :, 1].set(-jnp.inf)  # the target never says 1
    run = jax.jit(lambda *args: verify.verify(verify.Synthetic(rate), *args))
    verdict = run(
        jax.random.split(jax.random.key(0), batch),
        tree,
        logits,
        sampling.make(batch, max_new_tokens=1, temperature=1.0),
    )
    full, short = np.asarray(verdict.num_accepted).reshape(2, -1)
    assert laws.follows(np.bincount(full, minlength=4), [0.3, 0.7 * 0.3, 0.49 * 0.3, 0.343])
    assert laws.follows(np.bincount(short, minlength=2), [0.3, 0.7])  # padding is not accepted
    assert laws.follows(np.bincount(verdict.next_token, minlength=4), [1 / 3, 0, 1 / 3, 1 / 3])


def test_synthetic_finds_the_rate_that_gives_so_many_tokens_a_round():
    # 1 + r + r^2 + r^3 = 2.533 at r = 0.7.
    assert verify.Synthetic(tau=2.533).rate_at(3) == pytest.approx(0.7, abs=1e-6)
    batch, gamma = 20_000, 3
    tree = tree_lib.chain(jnp.zeros(batch, jnp.int32), jnp.ones((batch, gamma), jnp.int32))
    keys, greedy = jax.random.split(jax.random.key(1), batch), sampling.make(batch, max_new_tokens=1)
    verdict = verify.verify(verify.Synthetic(tau=2.533), keys, tree, jnp.zeros((batch, gamma + 1, 4)), greedy)
    assert laws.follows(np.bincount(verdict.num_accepted, minlength=4), [0.3, 0.7 * 0.3, 0.49 * 0.3, 0.343])
    with pytest.raises(ValueError, match=r"tau 0.5 is below the 1 token"):
        verify.Synthetic(tau=0.5)
    chain, _ = drafters.PromptLookup(gamma=3).build(tiny.random_target())
    with pytest.raises(ValueError, match=r"4.5 tokens a round are outside \[1, 4\], what 3 drafts can give"):
        verify.check(verify.Synthetic(tau=4.5), chain)


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_synthetic_refuses_a_rate_that_is_none(rate):
    with pytest.raises(ValueError, match=r"rate .* outside \[0, 1\]"):
        verify.Synthetic(rate)


# Block verification.


def block_chances(tokens, draft_laws, target_laws):
    """Sun et al., algorithm 2, exact for fractions: P_i of every prefix, the chance h_i of each test, the laws of the
    token behind each prefix. `target_laws` has one law more than `draft_laws`."""
    gamma, shares, chances, ends = len(tokens), [Fraction(1)], [], []
    for i, token in enumerate(tokens):
        shares.append(min(1, shares[-1] * target_laws[i][token] / draft_laws[i][token]))
    for i in range(gamma + 1):
        if i == gamma:
            chances.append(shares[i])
            ends.append(list(target_laws[i]))
            continue
        left = [max(shares[i] * p - q, 0) for p, q in zip(target_laws[i], draft_laws[i])]
        mass = sum(left)
        rest = mass + 1 - shares[i]
        chances.append(mass / rest if rest else 1)
        ends.append([x / mass for x in left] if mass else list(target_laws[i]))
    return shares, chances, ends


def outcomes(target, draft, gamma, kind, offered=None):
    """Law of accepted drafts and next token, and the expected number of accepted drafts; Markov chains from state 0.

    Args:
      target, draft: `[V, V]` transitions.
      gamma: draft length.
      kind: `token` or `block`, or one of two mistakes: `stops` at the first failed test, or takes `gamma` for the
        number of drafts where the budget left fewer.
      offered: drafts the budget left; None means gamma.
    """
    size, law, expected = len(target), {}, 0
    offered = gamma if offered is None else offered
    for tokens in itertools.product(range(size), repeat=gamma):
        states = [0, *tokens]
        qs, ps = [draft[x] for x in states[:-1]], [target[x] for x in states]
        drawn = math.prod(q[x] for q, x in zip(qs, tokens))
        if kind == "token":
            stand = [min(1, p[x] / q[x]) for p, q, x in zip(ps, qs, tokens)]
            kept = [math.prod(stand[:i]) * (1 - stand[i]) for i in range(gamma)] + [math.prod(stand)]
            ends = [reference.residual(p, q) for p, q in zip(ps, qs)] + [ps[-1]]
        elif kind == "stops":
            _, chances, ends = block_chances(tokens, qs, ps)
            kept = [math.prod(chances[1 : i + 1]) * (1 - chances[i + 1]) for i in range(gamma)]
            kept.append(math.prod(chances[1:]))
        else:
            _, chances, ends = block_chances(tokens, qs, ps)
            if kind == "block":  # a budget cuts the chain before the verifier sees it
                _, chances[: offered + 1], ends[: offered + 1] = block_chances(
                    tokens[:offered], qs[:offered], ps[: offered + 1]
                )
            chances, ends = chances[: offered + 1], ends[: offered + 1]
            none_later = [math.prod(1 - h for h in chances[i + 1 :]) for i in range(offered + 1)]
            kept = [(chances[i] if i else 1) * none_later[i] for i in range(offered + 1)]
        for i, weight in enumerate(kept):
            expected += drawn * weight * i
            for token, p in enumerate(ends[i]):
                text = (*tokens[:i], token)
                law[text] = law.get(text, 0) + drawn * weight * p
    return law, expected


def fractions(rng, size):
    rows = rng.integers(1, 9, (size, size))
    return [[Fraction(int(x), int(row.sum())) for x in row] for row in rows]


def texts(law, target, length):
    """The law of the first `length` tokens, those behind a block drawn from the target."""
    full = {}
    for text, weight in law.items():
        for rest in itertools.product(range(len(target)), repeat=max(0, length - len(text))):
            states = [0, *text, *rest]
            chain = [target[a][b] for a, b in zip(states[len(text) :], rest)]
            key = (*text, *rest)[:length]
            full[key] = full.get(key, 0) + weight * math.prod(chain)
    return full


def test_the_toy_pair():
    target, draft = [[Fraction(1, 3), Fraction(2, 3)]] * 2, [[Fraction(2, 3), Fraction(1, 3)]] * 2
    assert outcomes(target, draft, 2, "token")[1] == Fraction(10, 9)
    assert outcomes(target, draft, 2, "block")[1] == Fraction(11, 9)


def test_block_keeps_the_law_and_never_accepts_less():
    rng = np.random.default_rng(5)
    for gamma in (1, 2, 3):
        for _ in range(5):
            target, draft = fractions(rng, 3), fractions(rng, 3)
            law, block = outcomes(target, draft, gamma, "block")
            _, token = outcomes(target, draft, gamma, "token")
            assert block >= token and (block == token or gamma > 1)
            expected = texts({(): Fraction(1)}, target, gamma + 1)
            assert texts(law, target, gamma + 1) == expected


@pytest.mark.parametrize("real", [3, 1, 0])
def test_block_is_that_of_the_reference(monkeypatch, real):
    """A budget may leave fewer drafts than gamma; the last real one is the block's last."""
    rng = np.random.default_rng(6)
    batch, gamma, size = 2000, 3, 4
    draft_laws = rng.dirichlet(np.ones(size), (batch, gamma)).astype(np.float32)
    target = rng.dirichlet(np.ones(size), (batch, gamma + 1)).astype(np.float32)
    target[rng.random(target.shape) < 0.2] = 0
    target[..., 0] += 0.01
    target /= target.sum(-1, keepdims=True)
    drafts = rng.integers(0, size, (batch, gamma))
    uniforms = rng.random((batch, gamma + 1)).astype(np.float32) * (rng.random((batch, gamma + 1)) < 0.9)
    tree = tree_lib.chain(jnp.zeros(batch, int), jnp.asarray(drafts), draft_probs=jnp.asarray(draft_laws))
    tree = tree_lib.limit_depth(tree, jnp.full(batch, real))
    accepted, paths, next_laws = walk(monkeypatch, tree, target, uniforms, verify.Block())
    counts = set()
    for row in range(batch):
        laws_ = draft_laws[row, :real].astype(float), target[row, : real + 1].astype(float)
        _, chances, ends = block_chances(drafts[row, :real].tolist(), *laws_)
        kept = max([0, *(i for i in range(1, real + 1) if uniforms[row, i] < chances[i])])
        if any(abs(uniforms[row, i] - chances[i]) < 1e-5 for i in range(1, real + 1)):
            continue
        assert accepted[row] == list(range(kept + 1)), row
        assert np.allclose(next_laws[row], ends[kept], atol=1e-3)
        counts.add(kept)
    assert counts == set(range(real + 1))


@pytest.mark.parametrize("kind,offered", [("stops", 2), ("gamma", 1)])
def test_mistakes_of_a_block_show(kind, offered):
    """Neither a walk that ends at the first failed test nor one that takes gamma for the block's length is lossless."""
    target, draft = fractions(np.random.default_rng(5), 3), fractions(np.random.default_rng(7), 3)
    expected = texts({(): Fraction(1)}, target, 3)
    assert texts(outcomes(target, draft, 2, "block", offered)[0], target, 3) == expected
    assert texts(outcomes(target, draft, 2, kind, offered)[0], target, 3) != expected


def judged(verifier, target, draft, gamma, offered, batch, seed=0):
    """One round of `verify.verify` on a batch whose rows differ by their keys: drafts, how many stood, the token behind
    them. Chains of a Markov chain from state 0, cut to `offered` drafts as a budget does."""
    rng = np.random.default_rng(seed)
    target, draft = np.array(target, float), np.array(draft, float)
    states = np.zeros((batch, gamma + 1), int)
    for place in range(gamma):
        below = rng.random((batch, 1)) > np.cumsum(draft, axis=1)[states[:, place]]
        states[:, place + 1] = np.minimum(below.sum(axis=1), len(draft) - 1)
    tree = tree_lib.chain(states[:, 0], states[:, 1:], draft_probs=jnp.asarray(draft[states[:, :-1]], jnp.float32))
    tree = tree_lib.limit_depth(tree, jnp.full(batch, offered))
    verdict = round_of(verifier)(
        jax.random.split(jax.random.key(seed), batch),
        tree,
        jnp.asarray(np.log(target[states]), jnp.float32),
        sampling.make(batch, max_new_tokens=9, temperature=1.0),
    )
    return states[:, 1:], np.asarray(verdict.num_accepted), np.asarray(verdict.next_token)


@functools.cache
def round_of(verifier):
    return jax.jit(functools.partial(verify.verify, verifier))


BATCH = 40_000


def test_the_toy_pair_in_the_real_verifiers():
    """Expected accepted drafts of 10/9 and 11/9, within five standard errors."""
    target, draft = [[1 / 3, 2 / 3]] * 2, [[2 / 3, 1 / 3]] * 2
    for verifier, expected in ((verify.Rejection(), 10 / 9), (verify.Block(), 11 / 9)):
        _, accepted, _ = judged(verifier, target, draft, 2, 2, BATCH)
        assert abs(accepted.mean() - expected) < 5 * accepted.std() / np.sqrt(BATCH)


@pytest.mark.parametrize("offered", [3, 2, 1])
def test_the_text_of_a_block_follows_the_targets_law(offered):
    """Every outcome of `verify.verify`, the number of accepted drafts among them, against the exact fractions."""
    target, draft = fractions(np.random.default_rng(5), 3), fractions(np.random.default_rng(7), 3)
    exact, expected = outcomes(target, draft, 3, "block", offered)
    drafts, accepted, next_token = judged(verify.Block(), target, draft, 3, offered, BATCH, seed=offered)
    keys, size = list(exact), 0
    index = {text: place for place, text in enumerate(keys)}
    counts = np.zeros(len(keys))
    for row in range(BATCH):
        counts[index[(*drafts[row, : accepted[row]].tolist(), int(next_token[row]))]] += 1
        size += accepted[row]
    assert laws.follows(counts, np.array([float(exact[text]) for text in keys]))
    assert abs(size / BATCH - float(expected)) < 5 * accepted.std() / np.sqrt(BATCH)
    if offered > 1:  # the same counts are not those of a wrong walk
        wrong = outcomes(target, draft, 3, "stops" if offered == 3 else "gamma", offered)[0]
        assert not laws.follows(counts, np.array([float(wrong.get(text, 0)) for text in keys]))


def test_block_refuses_what_is_no_chain():
    target = tiny.random_target()
    bound, _ = drafters.Lookahead(window=2, ngram=3, guesses=2).build(target)
    with pytest.raises(ValueError, match="verifier 'block' judges chains; BoundLookahead proposes 8 nodes of depth 2"):
        verify.check(verify.Block(), bound)
    verify.check(verify.Rejection(), bound)
    verify.check(verify.Block(), drafters.PromptLookup(gamma=3).build(target)[0])
    # As many nodes as a chain of its depth, but they may branch.
    head = heads.init_eagle(jax.random.key(0), eagle.like_target(target, 1))
    dynamic, _ = drafters.Eagle(dynamic=drafters.Dynamic(depth=3, top_k=2, num_nodes=4)).build(target, head=head)
    with pytest.raises(ValueError, match="BoundEagle proposes 4 nodes of depth 3"):
        verify.check(verify.Block(), dynamic)
    verify.check(verify.Block(), drafters.Eagle(gamma=3).build(target, head=head)[0])
    # Refused before anything is compiled.
    with pytest.raises(ValueError, match="verifier 'block' judges chains"):
        jspec.generate(target, [[1]], drafter=(bound, ()), verifier=verify.Block(), max_new_tokens=2)


# Lossy verifiers.


@pytest.mark.parametrize("lenience", [1.0, 0.6, 0.2])
def test_lenience(monkeypatch, lenience):
    """A draft passes with min(1, p / (l q)), alpha = sum min(p / l, q), and no token comes with more than p / l."""
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    verifier = verify.Rejection(lenience=lenience)
    assert verifier.lossless == (lenience == 1)
    count = 2000
    uniforms = np.broadcast_to((np.arange(count) + 0.5) / count, (4, count)).reshape(-1, 1).astype(np.float32)
    uniforms = np.repeat(uniforms, 2, axis=1)
    drafts = np.repeat(np.arange(4), count)[:, None]
    tree = tree_lib.chain(
        jnp.zeros(4 * count, int), jnp.asarray(drafts), draft_probs=jnp.broadcast_to(jnp.asarray(q), (4 * count, 1, 4))
    )
    target = np.broadcast_to(np.stack([p, np.ones(4) / 4]).astype(np.float32), (4 * count, 2, 4))
    accepted, _, next_laws = walk(monkeypatch, tree, target, uniforms, verifier)
    passed = np.array([len(path) == 2 for path in accepted]).reshape(4, count).mean(axis=1)
    assert np.allclose(passed, np.minimum(1, p / (lenience * q)), atol=1e-3)
    assert np.isclose(passed @ q, np.minimum(p / lenience, q).sum(), atol=1e-3)
    ends = next_laws.reshape(4, count, 4)[:, -1]  # a rejected row's, where there is one
    emitted = q * passed + sum(q[x] * (1 - passed[x]) * ends[x] for x in range(4))
    assert (emitted <= p / lenience + 1e-3).all()
    if lenience == 1:
        assert np.allclose(emitted, p, atol=1e-3)


def test_argmax_lenience_by_hand():
    """At temperature 0 a draft passes if p(x) >= l max p, and the argmax follows the last one that does."""
    best, near, far = 0, 1, 2  # of [.5, .3, .2]: ratios 1, .6, .4
    logits = jnp.log(jnp.array([0.5, 0.3, 0.2]))
    # Chains of two, then a root with two children, the second of which has a child.
    tokens = jnp.array([[0, near, best], [0, near, far], [0, far, best], [0, best, near], [0, far, near]])
    chain, tree = jnp.array([-1, 0, 1]), jnp.array([-1, 0, 0])
    rows = tree_lib.from_parents(tokens, jnp.stack([chain] * 4 + [tree]), max_depth=2)
    rows = rows.replace(draft_probs=jax.nn.one_hot(tokens, 3))
    many = jnp.broadcast_to(logits, (5, 3, 3))
    keys = jax.random.split(jax.random.key(0), 5)

    def accepted(lenience, temperature=0.0):
        # Filters say nothing about what is near.
        settings = sampling.make(5, max_new_tokens=9, temperature=temperature, top_k=1)
        verdict = round_of(verify.Rejection(lenience))(keys, rows, many, settings)
        greedy = np.asarray(settings.temperature) == 0
        assert (np.asarray(verdict.next_token)[greedy] == best).all()
        return [path[: n + 1].tolist() for path, n in zip(np.asarray(verdict.path), verdict.num_accepted)]

    assert accepted(1.0) == [[0], [0], [0], [0, 1], [0]]
    assert accepted(0.61) == [[0], [0], [0], [0, 1], [0]]
    assert accepted(0.59) == [[0, 1, 2], [0, 1], [0], [0, 1, 2], [0, 2]]
    assert accepted(0.39) == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1]]
    # Mates that sample change nothing.
    assert accepted(0.59, [0.0, 1.0, 0.0, 0.0, 0.0])[2:] == [[0], [0, 1, 2], [0, 2]]
    assert verify.Rejection().follows_argmax and not verify.Rejection(0.5).follows_argmax


def test_typical_acceptance_by_hand(monkeypatch):
    """Entropy of [.5, .5] is ln 2, so 0.3 exp(-H) = 0.15 and epsilon 0.09 decides; of a one-hot law it is 0."""
    flat, sharp, tail = [0.25] * 4, [0.0, 1.0, 0.0, 0.0], [0.6, 0.3, 0.08, 0.02]
    # Root with children 1 (token 2), 2 (token 1), 3 (token 0); 4 and 5 behind 2 and 3; 6 behind 3.
    parents = np.array([[-1, 0, 0, 0, 2, 3, 3]])
    tokens = np.array([[0, 2, 1, 0, 0, 1, 2]])
    tree = tree_lib.from_parents(jnp.asarray(tokens), jnp.asarray(parents), max_depth=2)

    def best(*laws):
        target = np.array([laws], np.float32)
        accepted, _, next_law = walk(monkeypatch, tree, target, np.zeros((1, 7)), verify.Typical())
        return accepted[0], next_law[0].tolist()

    rest = [flat] * 3
    # tail: H = 0.9993, 0.3 exp(-H) = 0.1104 > 0.09: tokens 0 and 1 pass. Behind 1 token 0 (0.25), behind 0 tokens 1, 2.
    path, law = best(tail, flat, flat, flat, *rest)
    assert path == [0, 3, 5]  # as long as [0, 2, 4], but 0.6 beats 0.3; 5 and 6 tie, the first wins
    assert law == flat
    # Behind 3 the target wants token 1 alone: 6 falls. Behind 2 nothing passes.
    assert best(tail, flat, [0, 0, 1, 0], sharp, *rest)[0] == [0, 3, 5]
    # Only token 1 passes at the root.
    assert best(sharp, flat, flat, flat, *rest)[0] == [0, 2, 4]
    # Nothing passes: 0.08 and below.
    assert best([0.0, 0.0, 0.05, 0.95], flat, flat, flat, *rest)[0] == [0]
    assert not verify.Typical().lossless


@pytest.mark.parametrize(
    "build,words",
    [
        (lambda: verify.Rejection(lenience=0.0), r"lenience 0.0 is outside \(0, 1\]"),
        (lambda: verify.Rejection(lenience=1.5), r"lenience 1.5 is outside \(0, 1\]"),
        (lambda: verify.Typical(epsilon=0), r"epsilon 0 is outside \(0, 1\]"),
        (lambda: verify.Typical(delta=2.0), r"delta 2.0 is outside \(0, 1\]"),
    ],
)
def test_bad_settings_of_verifiers(build, words):
    with pytest.raises(ValueError, match=words):
        build()
