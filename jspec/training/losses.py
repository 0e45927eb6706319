"""Losses and the acceptance they stand for. Everything is over masked places; a place outside adds nothing.

Divergences as in DistillSpec (Zhou et al., arXiv:2310.08461). Laws are log-probabilities over a draft vocabulary of Vd
tokens; the target's may sum to less than one there, since it can say what the draft cannot.
"""

from __future__ import annotations

import math
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import optax

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "tv"]


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over the places of a mask, 0 if it is empty."""
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def cross_entropy(log_probs: jax.Array, labels: jax.Array) -> jax.Array:
    """-log q(label): `[..., Vd]` and `[...]` indices -> `[...]`."""
    return -jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]


def smooth_l1(predicted: jax.Array, wanted: jax.Array) -> jax.Array:
    """Mean over the last axis of d^2 / 2 where |d| < 1, else |d| - 1/2 (EAGLE section 3.2: the feature regression)."""
    return jnp.mean(optax.huber_loss(predicted.astype(jnp.float32), wanted.astype(jnp.float32), delta=1.0), axis=-1)


def renormalize(log_probs: jax.Array) -> jax.Array:
    """A law restricted to a reduced vocabulary, summing to one again."""
    return jax.nn.log_softmax(log_probs, axis=-1)


def overlap(target: jax.Array, draft: jax.Array) -> jax.Array:
    """sum min(p, q): the probability that a draft drawn from q is accepted (Leviathan et al., theorem 3.5)."""
    return jnp.sum(jnp.exp(jnp.minimum(target, draft)), axis=-1)


def divergence(kind: Divergence, target: jax.Array, draft: jax.Array) -> jax.Array:
    """How far a draft's law is from the target's: two `[..., Vd]` log-laws -> `[...]`.

    `tv` is 1 - sum min(p, q) with the target's law as it is, exactly the rate of rejection. The others compare with the
    target's law restricted to the draft's vocabulary.

    forward_kl: sum p log(p / q).
    reverse_kl: sum q log(q / p).
    jsd:        (KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2.

    Raises:
      ValueError: an unknown kind.
    """
    if kind == "tv":
        return 1.0 - overlap(target, draft)
    p = renormalize(target)
    kl = lambda a, b: jnp.sum(jnp.exp(a) * (a - b), axis=-1)
    if kind == "forward_kl":
        return kl(p, draft)
    if kind == "reverse_kl":
        return kl(draft, p)
    if kind == "jsd":
        middle = jnp.logaddexp(p, draft) - math.log(2)
        return (kl(p, middle) + kl(draft, middle)) / 2
    raise ValueError(f"unknown divergence {kind!r}; known: forward_kl, reverse_kl, jsd, tv")


# R, candidates of a draft whose ranks are told apart.
RANKS = 8


def rank(log_probs: jax.Array, label: jax.Array) -> jax.Array:
    """How many tokens of a draft's law come before the label: `[..., Vd]` and `[...]` -> `[...]` int32.

    Those that are more likely, and of those as likely the earlier ones, as an argmax has it. A label that the draft
    cannot say, below 0, has rank Vd.
    """
    likelihood = jnp.take_along_axis(log_probs, jnp.maximum(label, 0)[..., None], axis=-1)
    earlier = jnp.arange(log_probs.shape[-1]) < label[..., None]
    before = (log_probs > likelihood) | ((log_probs == likelihood) & earlier)
    return jnp.where(label < 0, log_probs.shape[-1], jnp.sum(before, axis=-1, dtype=jnp.int32))


@flax.struct.dataclass
class Depths:
    """How well drafts of each depth would have done, as sums over places. S depths.

    places:  where a chain of that depth has a label.
    ranked:  the draft's candidate of rank r is the target's token, given that the text's tokens stand before it.
    chain:   that of this depth and of all before it: how often a greedy chain is accepted at least so far.
    overlap: sum of min(p, q): how often a sampled draft is accepted.
    """

    places: jax.Array  # [S]
    ranked: jax.Array  # [S, R]
    chain: jax.Array  # [S]
    overlap: jax.Array  # [S]

    @classmethod
    def zeros(cls, depths: int) -> Depths:
        """Nothing seen."""
        none = jnp.zeros(depths, jnp.float32)
        return cls(none, jnp.zeros((depths, RANKS), jnp.float32), none, none)

    def __add__(self, other: Depths) -> Depths:
        return jax.tree.map(jnp.add, self, other)

    @classmethod
    def of(cls, ranks: list[jax.Array], overlaps: list[jax.Array], masks: list[jax.Array]) -> Depths:
        """Sums from one `[B, T]` array per depth: rank of the target's token, sum min(p, q), has the place a label."""
        so_far = jnp.ones_like(masks[0], bool)
        chain = []
        for found in ranks:
            so_far = so_far & (found == 0)
            chain.append(so_far)
        each_rank = [found[..., None] == jnp.arange(RANKS) for found in ranks]
        total = lambda arrays: jnp.stack([jnp.sum(jnp.where(m, x, 0.0)) for x, m in zip(arrays, masks)])
        ranked = jnp.stack([jnp.sum(x & m[..., None], axis=(0, 1)) for x, m in zip(each_rank, masks)])
        ones = [jnp.ones_like(mask, jnp.float32) for mask in masks]
        return cls(total(ones), ranked.astype(jnp.float32), total(chain), total(overlaps))

    def rates(self) -> dict[str, list]:
        """By depth: `accuracy`, `chain` and `acceptance`, the draft's best token, chain and overlap per place; and
        `accuracy_by_rank`, one row of R a depth: what `topology.grow` makes a tree of."""
        places = jnp.maximum(self.places, 1)
        rates = {"accuracy": self.ranked[:, 0], "chain": self.chain, "acceptance": self.overlap}
        rounded = lambda sums: [round(float(x), 6) for x in sums]
        found = {name: rounded(sums / places) for name, sums in rates.items()}
        return found | {"accuracy_by_rank": [rounded(row) for row in self.ranked / places[:, None]]}
