"""What given target and draft laws accept, exactly: token by token, and as a block.

Token verification: Leviathan et al., arXiv:2211.17192. Block verification: Sun et al., "Block verification accelerates
speculative decoding", arXiv:2403.10444, algorithm 2. Laws are those of a Markov chain, so that everything can be
enumerated; fractions in, fractions out. `theory.tokens_by_depth` turns what is returned into tokens per round by gamma.

On the host, without arrays: paths that meet in the same token with the same probabilities are counted together.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence


def token_acceptance(target: Sequence, draft: Sequence, gamma: int, start: int = 0) -> list:
    """Probability that token verification accepts at least i drafts, i = 1 .. gamma.

    A draft is proposed and accepted with probability q min(1, p / q) = min(p, q), so these overlaps multiply along a
    path. For a law without memory the result is alpha^i with alpha = sum of min(p, q).

    Args:
      target, draft: one law `[V]` for every place, or the transitions `[V, V]` of a Markov chain, a law per token.
      gamma: draft length.
      start: the token behind which drafting starts.

    Raises:
      ValueError: a law does not sum to 1 or has another vocabulary, or gamma is below 1.
    """
    target, draft = _chains(target, draft, gamma)
    reached, found = {start: 1}, []
    for _ in range(gamma):
        following: dict = collections.defaultdict(int)
        for state, weight in reached.items():
            for token, (p, q) in enumerate(zip(target[state], draft[state])):
                following[token] += weight * min(p, q)
        reached = following
        found.append(sum(reached.values()))
    return found


def block_acceptance(target: Sequence, draft: Sequence, gamma: int, start: int = 0) -> list:
    """Probability that block verification accepts at least i drafts, i = 1 .. gamma: the mean over drawn blocks of P_i.

    P_i = min(1, P_{i-1} p(x_i) / q(x_i)), P_0 = 1. It does not depend on how many drafts follow, so one call serves
    every shorter block. Arguments and errors as in `token_acceptance`. Blocks that agree in their last token and in P
    are counted together; without such luck there are V^gamma.
    """
    target, draft = _chains(target, draft, gamma)
    reached, found = {(start, 1): 1}, []
    for _ in range(gamma):
        following: dict = collections.defaultdict(int)
        for (state, share), weight in reached.items():
            for token, (p, q) in enumerate(zip(target[state], draft[state])):
                if q > 0:
                    following[token, min(1, share * p / q)] += weight * q
        reached = following
        found.append(sum(share * weight for (_, share), weight in reached.items()))
    return found


def block_bound(target: Sequence, draft: Sequence, gamma: int, start: int = 0) -> list:
    """What no verifier of a drawn block can exceed at any i: the sum over texts of min(p(x_1..x_i), q(x_1..x_i)).

    Block verification stays below it in general. Arguments, errors and growth as in `block_acceptance`.
    """
    target, draft = _chains(target, draft, gamma)
    reached, found = {(start, 1, 1): 1}, []
    for _ in range(gamma):
        following: dict = collections.defaultdict(int)
        for (state, joint_p, joint_q), count in reached.items():
            for token, (p, q) in enumerate(zip(target[state], draft[state])):
                if p > 0 and q > 0:
                    following[token, joint_p * p, joint_q * q] += count
        reached = following
        found.append(sum(min(p, q) * count for (_, p, q), count in reached.items()))
    return found


def _chains(target: Sequence, draft: Sequence, gamma: int) -> tuple[list[Sequence], list[Sequence]]:
    """Both as transitions."""
    if gamma < 1:
        raise ValueError(f"gamma {gamma} is below 1")
    chains = []
    for name, law in (("target", target), ("draft", draft)):
        transitions = list(law) if hasattr(law[0], "__len__") else [law] * len(law)
        for row in transitions:
            if len(row) != len(transitions) or min(row) < 0 or abs(float(sum(row)) - 1) > 1e-9:
                raise ValueError(f"{name}: {list(map(str, row))} is no law over {len(transitions)} tokens")
        chains.append(transitions)
    if len(chains[0]) != len(chains[1]):
        raise ValueError(f"target has {len(chains[0])} tokens, draft {len(chains[1])}")
    return chains[0], chains[1]
