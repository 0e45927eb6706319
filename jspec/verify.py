"""Verifiers: which drafts stand, and the token that follows.

`Rejection` is speculative sampling (Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318)
carried down a token tree by multi-round rejection (SpecInfer, arXiv:2305.09781, algorithm 2; EAGLE, arXiv:2401.15077,
appendix A; Sequoia, arXiv:2402.12374). At a node with target law p, its children are tried in order: child t, drawn
from q, is accepted with probability min(1, p(t) / q(t)); after a rejection p becomes norm((p - q)+). What is left when
no child is accepted gives the corrected token; at a leaf it is p itself, which gives the bonus token. The output law is
p whatever q is, as long as q is the law the child was really drawn from: siblings drawn with replacement share q,
siblings drawn without carry their conditional law, deterministic proposals the one-hot law.

Comparisons are strict (r q < p with r in [0, 1)): `jax.random.uniform` does return 0, and a token of target probability
0 must never pass.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from jspec import registry, theory, types
from jspec import sampling as sampling_lib

REGISTRY: dict[str, type] = {}
register = registry.registering(REGISTRY)


def residual(target: jax.Array, draft: jax.Array) -> jax.Array:
    """norm((p - q)+), Leviathan et al. section 2.3.

    Where nothing is left (p equals q up to rounding) a rejection can only be rounding too; p itself is then the law.
    """
    left = jnp.maximum(target - draft, 0)
    total = jnp.sum(left)
    return jnp.where(total > 0, left / jnp.where(total > 0, total, 1), target)


def draft_law(tree: types.TokenTree, node: jax.Array, vocab_size: int) -> jax.Array:
    """The law one row's node was drawn from, over the target's vocabulary: `[V]`, zero where the draft has no token."""
    if tree.draft_probs is None:
        return jax.nn.one_hot(tree.tokens[node], vocab_size)
    probs = tree.draft_probs[node]
    if tree.draft_ids is not None:
        return jnp.zeros(vocab_size, probs.dtype).at[tree.draft_ids].set(probs)
    return jnp.pad(probs, (0, vocab_size - probs.shape[0]))


def next_child(tree: types.TokenTree, node: jax.Array, after: jax.Array) -> jax.Array:
    """The first child of `node` behind index `after`, or N if there is none. One row."""
    num_nodes = tree.parents.shape[0]
    order = jnp.arange(num_nodes)
    return jnp.min(jnp.where((tree.parents == node) & (order > after), order, num_nodes))


def _pad_path(path: jax.Array, num_accepted: jax.Array) -> jax.Array:
    """Let places beyond the path hold its last node."""
    return path[jnp.minimum(jnp.arange(path.shape[0]), num_accepted)]


@register("rejection")
@dataclasses.dataclass(frozen=True)
class Rejection:
    """Multi-round rejection down a token tree. Lossless, unless it is lenient.

    lenience: l in (0, 1]; below 1 drafts are judged as if q were l q, so that more of them pass and no token comes with
      more than p / l (Leviathan et al., appendix A.5). At temperature 0 a draft x then passes if p(x) >= l max p, with
      p at temperature 1 and no filter (the paper prints <=, which its own numbers contradict). Lossy.
    """

    lenience: float = 1.0
    chains_only: ClassVar[bool] = False

    def __post_init__(self):
        if not 0 < self.lenience <= 1:
            raise ValueError(f"lenience {self.lenience} is outside (0, 1]")

    @property
    def lossless(self) -> bool:
        """Whether the output law is the target's."""
        return self.lenience == 1

    @property
    def follows_argmax(self) -> bool:
        """Whether it is `greedy_walk` at temperature 0."""
        return self.lenience == 1

    def verify(self, rng_key: jax.Array, tree: types.TokenTree, target_law: types.TargetLaw) -> types.Verdict:
        """Walk one row's tree; see `types.Verifier`."""
        num_nodes = tree.tokens.shape[0]
        accept_key, token_key = jax.random.split(rng_key)
        uniforms = jax.random.uniform(accept_key, (num_nodes,))

        def try_children(node, law):
            if self.lenience < 1:
                near_argmax = target_law.log_ratio(node) >= math.log(self.lenience)

            def undecided(carry):
                child, accepted, _ = carry
                return ~accepted & (child < num_nodes)

            def try_child(carry):
                child, _, law = carry
                token, proposal = tree.tokens[child], self.lenience * draft_law(tree, child, law.shape[0])
                accepted = uniforms[child] * proposal[token] < law[token]
                if self.lenience < 1:
                    accepted = jnp.where(target_law.greedy, near_argmax[token], accepted)
                law = jnp.where(accepted, law, residual(law, proposal))
                return jnp.where(accepted, child, next_child(tree, node, child)), accepted, law

            return jax.lax.while_loop(undecided, try_child, (next_child(tree, node, node), jnp.bool_(False), law))

        def descend(carry):  # the law is filtered once for each node that is reached
            node, _, path, num_accepted, _ = carry
            child, accepted, law = try_children(node, target_law(node))
            num_accepted = num_accepted + accepted
            path = jnp.where(accepted, path.at[num_accepted].set(child), path)
            return jnp.where(accepted, child, node), accepted, path, num_accepted, law

        root = jnp.int32(0), jnp.bool_(True), jnp.zeros(tree.max_depth + 1, jnp.int32), jnp.int32(0)
        law = jnp.zeros_like(target_law(root[0]))
        _, _, path, num_accepted, law = jax.lax.while_loop(lambda carry: carry[1], descend, (*root, law))
        return types.Verdict(_pad_path(path, num_accepted), num_accepted, sampling_lib.sample(token_key, law))


@register("block")
@dataclasses.dataclass(frozen=True)
class Block:
    """Block verification (Sun et al., arXiv:2403.10444, algorithm 2): judges a chain as a whole. Lossless.

    With p_i and q_i the laws of draft x_i, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)), P_0 = 1. The longest prefix whose
    own test passes is kept; a failed test does not end the walk, which is why a block accepts at least as many drafts
    on average as token by token. Its length is the number of drafts really offered: the last of them is tested against
    P itself, whether or not the budget cut the chain short.
    """

    lossless: ClassVar[bool] = True
    follows_argmax: ClassVar[bool] = True
    chains_only: ClassVar[bool] = True

    def verify(self, rng_key: jax.Array, tree: types.TokenTree, target_law: types.TargetLaw) -> types.Verdict:
        """Judge one row's chain; see `types.Verifier`."""
        accept_key, token_key = jax.random.split(rng_key)
        uniforms = jax.random.uniform(accept_key, (tree.max_depth + 1,))
        offered = jnp.sum(tree.parents >= 0)
        first_law = target_law(jnp.int32(0))
        size = first_law.shape[0]

        def leftover(share, law, node):
            """(P p - q)+ behind draft `node`, or p where nothing is left: then a rejection can only be rounding."""
            following = jnp.minimum(node + 1, tree.max_depth)
            left = jnp.maximum(share * law - draft_law(tree, following, size), 0)
            mass = jnp.sum(left)
            return jnp.where((mass > 0) & (node < offered), left, law), mass

        def step(carry):
            node, share, law, kept, final = carry
            token = tree.tokens[node]
            proposal = draft_law(tree, node, size)[token]
            share = jnp.minimum(share * law[token] / jnp.where(proposal > 0, proposal, 1), 1)
            law = target_law(node)
            left, mass = leftover(share, law, node)
            rest = mass + 1 - share
            chance = jnp.where(rest > 0, mass / jnp.where(rest > 0, rest, 1), 1)
            accepted = uniforms[node] < jnp.where(node == offered, share, chance)
            return node + 1, share, law, jnp.where(accepted, node, kept), jnp.where(accepted, left, final)

        start = jnp.int32(1), jnp.float32(1), first_law, jnp.int32(0), leftover(1.0, first_law, 0)[0]
        _, _, _, kept, final = jax.lax.while_loop(lambda carry: carry[0] <= offered, step, start)
        path = jnp.minimum(jnp.arange(tree.max_depth + 1), kept)
        return types.Verdict(path, kept, sampling_lib.sample(token_key, final / jnp.sum(final)))


@register("typical")
@dataclasses.dataclass(frozen=True)
class Typical:
    """Typical acceptance (Medusa, arXiv:2401.10774, section 2.3.1). Lossy at temperatures above 0.

    A draft x stands if p(x) > min(epsilon, delta exp(-H(p))) and so did all before it; the longest path wins, of
    equally long ones the likelier. Differs from the paper, which goes on with the argmax: the next token is drawn from
    the target's law behind that path.

    epsilon: probability that is always enough.
    delta:   share of exp(-entropy) that is enough; the paper's rule of thumb is sqrt(epsilon).
    """

    epsilon: float = 0.09
    delta: float = 0.3
    lossless: ClassVar[bool] = False
    # A one-hot law has no entropy: only its token passes. (Of two siblings with that token the walk takes the one that
    # leads further, the closed form the first; the text is the same.)
    follows_argmax: ClassVar[bool] = True
    chains_only: ClassVar[bool] = False

    def __post_init__(self):
        for name in ("epsilon", "delta"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)} is outside (0, 1]")

    def verify(self, rng_key: jax.Array, tree: types.TokenTree, target_law: types.TargetLaw) -> types.Verdict:
        """Judge one row's tree; see `types.Verifier`."""
        num_nodes = tree.tokens.shape[0]
        order = jnp.arange(num_nodes)
        standing = order == 0

        def visit(carry):  # nodes that stand, in topological order; each judges its children
            node, standing, depth, likelihood, _ = carry
            law = target_law(node)
            entropy = -jnp.sum(jnp.where(law > 0, law * jnp.log(jnp.where(law > 0, law, 1)), 0))
            enough = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
            passed = (tree.parents == node) & (law[tree.tokens] > enough)
            depth = jnp.where(passed, depth[node] + 1, depth)
            likelihood = jnp.where(passed, likelihood[node] + jnp.log(law[tree.tokens]), likelihood)
            standing |= passed
            following = jnp.min(jnp.where(standing & (order > node), order, num_nodes))
            return following, standing, depth, likelihood, law

        empty = jnp.zeros(num_nodes, jnp.int32), jnp.zeros(num_nodes, jnp.float32)
        start = jnp.int32(0), standing, *empty, jnp.zeros_like(target_law(jnp.int32(0)))
        _, standing, depth, likelihood, _ = jax.lax.while_loop(lambda carry: carry[0] < num_nodes, visit, start)
        num_accepted = jnp.max(jnp.where(standing, depth, 0))
        best = jnp.argmax(jnp.where(standing & (depth == num_accepted), likelihood, -jnp.inf))

        def climb(index, carry):
            node, path = carry
            place = num_accepted - index
            path = jnp.where(place >= 0, path.at[place].set(node), path)
            return jnp.where(place > 0, tree.parents[node], node), path

        _, path = jax.lax.fori_loop(0, tree.max_depth + 1, climb, (best, jnp.zeros(tree.max_depth + 1, jnp.int32)))
        token = sampling_lib.sample(rng_key, target_law(best))
        return types.Verdict(_pad_path(path, num_accepted), num_accepted, token)


@register("synthetic")
@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Accepts drafts at a set rate whatever the target says, to time a method whose draft is not at hand.

    The text is not the target's. Each first child is accepted with probability `rate`, independently, so that a chain
    of gamma drafts emits (1 - rate^(gamma + 1)) / (1 - rate) tokens a round on average (Leviathan et al., equation 1).
    Instead of the rate that average can be given, such as a paper's tau: the rate then follows from the tree's depth.

    rate: acceptance probability of a tested draft, in [0, 1].
    tau:  tokens a round; None means that the rate is given.
    """

    rate: float = 0.8
    tau: float | None = None
    lossless: ClassVar[bool] = False
    follows_argmax: ClassVar[bool] = False
    chains_only: ClassVar[bool] = False

    def __post_init__(self):
        if not 0 <= self.rate <= 1:
            raise ValueError(f"rate {self.rate} is outside [0, 1]")
        if self.tau is not None and not 1 <= self.tau < math.inf:
            raise ValueError(f"tau {self.tau} is below the 1 token that every round emits")

    def rate_at(self, max_depth: int) -> float:
        """The rate at which a tree of this depth is accepted.

        Raises:
          ValueError: no rate emits `tau` tokens a round.
        """
        return self.rate if self.tau is None else theory.acceptance(self.tau, max_depth)

    def verify(self, rng_key: jax.Array, tree: types.TokenTree, target_law: types.TargetLaw) -> types.Verdict:
        """Walk one row's tree; see `types.Verifier`."""
        accept_key, token_key = jax.random.split(rng_key)
        uniforms = jax.random.uniform(accept_key, (tree.max_depth + 1,))
        num_nodes = tree.tokens.shape[0]
        rate = self.rate_at(tree.max_depth)

        def descend(place, carry):
            path, num_accepted, walking = carry
            child = next_child(tree, path[num_accepted], path[num_accepted])
            walking &= (child < num_nodes) & (uniforms[place] < rate)
            path = jnp.where(walking, path.at[num_accepted + 1].set(child), path)
            return path, num_accepted + walking, walking

        start = (jnp.zeros(tree.max_depth + 1, jnp.int32), jnp.int32(0), jnp.bool_(True))
        path, num_accepted, _ = jax.lax.fori_loop(0, tree.max_depth, descend, start)
        token = sampling_lib.sample(token_key, target_law(path[num_accepted]))
        return types.Verdict(_pad_path(path, num_accepted), num_accepted, token)


def greedy_walk(tree: types.TokenTree, argmax: jax.Array) -> types.Verdict:
    """What a lossless verifier decides at temperature 0, in closed form: follow the child that is the argmax.

    Args:
      tree: one row.
      argmax: `[N]` the target's most likely token after each node.
    """

    def visit(child, carry):  # topological order: one pass meets every child after its parent was entered
        node, path, num_accepted = carry
        accepted = (tree.parents[child] == node) & (tree.tokens[child] == argmax[node])
        num_accepted = num_accepted + accepted
        path = jnp.where(accepted, path.at[num_accepted].set(child), path)
        return jnp.where(accepted, child, node), path, num_accepted

    start = (jnp.int32(0), jnp.zeros(tree.max_depth + 1, jnp.int32), jnp.int32(0))
    node, path, num_accepted = jax.lax.fori_loop(1, tree.tokens.shape[0], visit, start)
    return types.Verdict(_pad_path(path, num_accepted), num_accepted, argmax[node])


def check(verifier: types.Verifier, drafter: types.BoundDrafter) -> None:
    """Refuse a verifier that cannot judge a drafter's trees.

    Raises:
      ValueError: naming both.
    """
    if verifier.chains_only and not drafter.proposes_chains:
        raise ValueError(
            f"verifier {verifier.kind!r} judges chains; {type(drafter).__name__} proposes {drafter.num_nodes} nodes of "
            f"depth {drafter.max_depth}"
        )
    if isinstance(verifier, Synthetic):
        verifier.rate_at(drafter.max_depth)


@dataclasses.dataclass(frozen=True)
class RowLaw:
    """One row's `types.TargetLaw`.

    logits:   `[N, V]` the target's, after every node.
    row:      the row's settings.
    filtered: scalar `sampling.any_filter` of the whole batch.
    """

    logits: jax.Array
    row: types.Sampling
    filtered: jax.Array

    @property
    def greedy(self) -> jax.Array:
        """See `types.TargetLaw`."""
        return self.row.temperature == 0

    def __call__(self, node: jax.Array) -> jax.Array:
        """See `types.TargetLaw`."""
        return sampling_lib.law(self.logits[node], self.row, self.filtered)

    def log_ratio(self, node: jax.Array) -> jax.Array:
        """See `types.TargetLaw`."""
        logits = self.logits[node].astype(jnp.float32)
        return logits - jnp.max(logits)


def verify(
    verifier: types.Verifier,
    rng_keys: jax.Array,
    tree: types.TokenTree,
    logits: jax.Array,
    sampling: types.Sampling,
) -> types.Verdict:
    """Verify a batch: the vmapped walk, or its closed form when no row samples.

    Args:
      verifier: static.
      rng_keys: `[B]`.
      tree: of B rows.
      logits: `[B, N, V]` the target's, after every node.
      sampling: settings per row.
    """
    rows = tree.replace(draft_ids=None)  # shared by all rows, so it stays out of the row axis
    filtered = sampling_lib.any_filter(sampling)

    def walk():
        def one(rng_key, row_tree, row_logits, row):
            target_law = RowLaw(row_logits, row, filtered)
            return verifier.verify(rng_key, row_tree.replace(draft_ids=tree.draft_ids), target_law)

        return jax.vmap(one)(rng_keys, rows, logits, sampling)

    if not verifier.follows_argmax:
        return walk()

    def closed_form():
        return jax.vmap(greedy_walk)(rows, jnp.argmax(logits, axis=-1).astype(jnp.int32))

    return jax.lax.cond(sampling_lib.all_greedy(sampling), closed_form, walk)
