"""How often a draft's candidate of each rank is the one accepted: what Sequoia's dynamic programme starts from.

Sequoia (Chen et al., arXiv:2402.12374, acceptance vector): candidates of one node are drawn without replacement and
tried in the order they were drawn; entry r is the share of nodes at which candidate r is the one accepted. Measured
through the decoding loop itself: every round proposes a star, the root and its candidates, so that what is counted is
what the loop's verifier did, at the contexts that speculation really meets.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec import decode, topology, types
from jspec import tree as tree_lib


class Counts(NamedTuple):
    """Over rows and rounds.

    accepted: `[R]` rounds in which the candidate of each rank was accepted.
    rounds:   `[]` that offered candidates.
    """

    accepted: jax.Array
    rounds: jax.Array


def star(drafter: types.Drafter, num_ranks: int) -> types.Drafter:
    """The same drafter proposing one node's candidates and nothing behind them.

    Raises:
      ValueError: it fills no static trees, or `num_ranks` is below 1.
    """
    if "tree" not in {field.name for field in dataclasses.fields(drafter)}:
        raise ValueError(f"drafter {drafter.kind} fills no static trees, so no tree can be found for it")
    if num_ranks < 1:
        raise ValueError(f"ranks {num_ranks} is below 1")
    dynamic = {"dynamic": None} if "dynamic" in {field.name for field in dataclasses.fields(drafter)} else {}
    return dataclasses.replace(drafter, tree=topology.Tree(widths=(num_ranks,)), **dynamic)


def count(
    params: types.Params,
    rng_keys: jax.Array,
    state: decode.DecodeState,
    *,
    drafter: types.BoundDrafter,
    verifier: types.Verifier,
    sampling: types.Sampling,
) -> Counts:
    """Decode to the end and count.

    Args:
      params, rng_keys, state: as for `decode.run`; the state is prefill's.
      drafter: bound, of a star: R candidates behind the root. Siblings are different tokens, so that the one that was
        emitted tells which was accepted.
      verifier, sampling: as for `decode.run`.
    """
    rows = jnp.arange(state.length.shape[0])

    def step(carry):
        state, counts = carry
        tree, drafted = decode.propose(params, rng_keys, state, drafter=drafter, sampling=sampling)
        after = decode.verify_and_commit(
            params, rng_keys, drafted, tree, drafter=drafter, verifier=verifier, sampling=sampling
        )
        offered = state.live & (tree_lib.offered_depth(tree) > 0)
        stands = offered & (after.origin[rows, state.length] == decode.ACCEPTED)
        candidates = tree.tokens[:, 1:] == after.tokens[rows, state.length][:, None]
        accepted = counts.accepted + jnp.sum(candidates & stands[:, None], axis=0)
        return after, Counts(accepted, counts.rounds + jnp.sum(offered))

    nothing = Counts(jnp.zeros(drafter.num_nodes - 1, jnp.int32), jnp.int32(0))
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0].live), step, (state, nothing))[1]


count_jit = jax.jit(count, static_argnames=("drafter", "verifier"))
