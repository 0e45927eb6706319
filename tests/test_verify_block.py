"""Block verification: exact laws in fractions, the verifier against them, and mistakes that show."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import drafters, sampling, verify
from jspec import tree as tree_lib
from jspec.drafters import eagle
from jspec.models import heads
from tests import laws, reference, tiny, walks

pytestmark = pytest.mark.usefixtures("small_programs")


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
    accepted, paths, next_laws = walks.walk(monkeypatch, tree, target, uniforms, verify.Block())
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
    verdict = walks.round_of(verifier)(
        jax.random.split(jax.random.key(seed), batch),
        tree,
        jnp.asarray(np.log(target[states]), jnp.float32),
        sampling.make(batch, max_new_tokens=9, temperature=1.0),
    )
    return states[:, 1:], np.asarray(verdict.num_accepted), np.asarray(verdict.next_token)


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
