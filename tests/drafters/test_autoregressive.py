"""Plain decoding, and drafters told to draft nothing: a tree of one node."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import drafters, sampling, types
from tests import running, tiny

pytestmark = pytest.mark.usefixtures("small_programs")


@pytest.mark.parametrize(
    "drafter",
    [
        drafters.Autoregressive(),
        drafters.PromptLookup(gamma=0),
        drafters.Standard(gamma=0, draft=drafters.Draft(layers=1)),
    ],
)
def test_the_tree_is_the_pending_token(drafter):
    """DEV-17: K = 0 is plain decoding."""
    target = tiny.random_target()
    bound, draft = drafter.build(target)
    params = types.Params(target.model, draft)
    state = bound.init(params, 2, 8)
    context = types.Context(jnp.array([[5, 6, 0, 0], [7, 8, 9, 0]]), jnp.array([2, 3]), jnp.zeros((2, 0, 32)))
    propose = jax.jit(bound.propose)
    tree, after = propose(params, running.keys([0, 1]), state, context, sampling.make(2, max_new_tokens=4))
    assert (bound.num_nodes, bound.max_depth) == (1, 0) and tree.max_depth == 0
    assert tree.tokens.tolist() == [[6], [9]] and tree.parents.tolist() == [[-1], [-1]]
    assert np.asarray(tree.mask).all() and after == state == ()
