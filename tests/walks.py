"""Verifiers on trees, laws and uniforms that a test gives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec import sampling, types, verify

REJECTION = verify.Rejection()


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


@functools.cache
def round_of(verifier: types.Verifier):
    """The verifier on a batch, compiled once."""
    return jax.jit(functools.partial(verify.verify, verifier))
