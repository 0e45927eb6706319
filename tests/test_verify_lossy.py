"""Verifiers that change the law, and how far: synthetic, lenient and typical acceptance."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import drafters, sampling, verify
from jspec import tree as tree_lib
from tests import laws, tiny, walks

pytestmark = pytest.mark.usefixtures("small_programs")


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
    accepted, _, next_laws = walks.walk(monkeypatch, tree, target, uniforms, verifier)
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
        verdict = walks.round_of(verify.Rejection(lenience))(keys, rows, many, settings)
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
        accepted, _, next_law = walks.walk(monkeypatch, tree, target, np.zeros((1, 7)), verify.Typical())
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
