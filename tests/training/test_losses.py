"""Losses beside plain NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.training import losses

rng = np.random.default_rng(0)
FULL = np.log(rng.dirichlet(np.ones(6), 5))  # the target's laws over six tokens
DRAFT = np.log(rng.dirichlet(np.ones(4), 5))  # the draft's over the first four


def _by_hand(kind, target, draft):
    p, q = np.exp(target), np.exp(draft)
    if kind == "tv":
        return 1 - np.minimum(p, q).sum(-1)
    p = p / p.sum(-1, keepdims=True)
    kl = lambda a, b: (a * np.log(a / b)).sum(-1)
    middle = (p + q) / 2
    return {"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": (kl(p, middle) + kl(q, middle)) / 2}[kind]


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd", "tv"])
def test_divergences(kind):
    found = losses.divergence(kind, jnp.asarray(FULL[:, :4], jnp.float32), jnp.asarray(DRAFT, jnp.float32))
    np.testing.assert_allclose(found, _by_hand(kind, FULL[:, :4], DRAFT), rtol=1e-5)
    same = losses.divergence(kind, jnp.asarray(DRAFT), jnp.asarray(DRAFT))
    np.testing.assert_allclose(same, 0, atol=1e-6)


def test_an_unknown_divergence_is_refused():
    with pytest.raises(ValueError, match="unknown divergence 'kl'"):
        losses.divergence("kl", FULL[:, :4], DRAFT)


def test_smooth_l1():
    found = losses.smooth_l1(jnp.array([[0.0, 2.0, -3.0]]), jnp.array([[0.5, 2.0, 1.0]]))
    np.testing.assert_allclose(found, [(0.125 + 0 + 3.5) / 3])


def test_an_empty_mask_gives_zero_and_a_finite_gradient():
    def loss(x):
        return losses.masked_mean(-jax.nn.log_softmax(x)[..., 0], jnp.zeros(3, bool))

    value, gradient = jax.value_and_grad(loss)(jnp.ones((3, 4)))
    assert value == 0 and (gradient == 0).all()


def test_depths_count_chains():
    ranks = [jnp.array([[0, 0, 2, 0]]), jnp.array([[0, 7, 0, 0]])]
    overlaps = [jnp.full((1, 4), 0.5), jnp.full((1, 4), 0.25)]
    masks = [jnp.array([[True, True, True, False]]), jnp.array([[True, True, False, False]])]
    depths = losses.Depths.of(ranks, overlaps, masks)
    assert depths.places.tolist() == [3, 2]
    assert depths.ranked.tolist() == [[2, 0, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 1]]
    assert depths.chain.tolist() == [2, 1]
    assert depths.overlap.tolist() == [1.5, 0.5]
    assert (depths + depths).rates() == depths.rates()
    assert depths.rates()["accuracy"] == [0.666667, 0.5]
    assert depths.rates()["accuracy_by_rank"][1] == [0.5, 0, 0, 0, 0, 0, 0, 0.5]
    assert (depths + losses.Depths.zeros(2)).rates() == depths.rates()


def test_ranks_of_what_the_target_says():
    law = jnp.log(jnp.array([[0.1, 0.6, 0.3], [0.1, 0.6, 0.3], [0.1, 0.6, 0.3], [0.1, 0.6, 0.3]]))
    assert losses.rank(law, jnp.array([1, 2, 0, -1])).tolist() == [0, 1, 2, 3]
    # A draft that knows nothing has an order all the same: it is not right about everything.
    assert losses.rank(jnp.zeros((3, 3)), jnp.array([0, 1, 2])).tolist() == [0, 1, 2]
