"""References in plain NumPy, from the formulas and independent of `jspec`: float64, no cache, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

# The transformer.


class Pass(NamedTuple):
    """What an uncached pass over one sequence gives."""

    logits: np.ndarray  # [T, V]
    states: list[np.ndarray]  # entering each layer, then after the last norm; [T, E] each
    keys: list[np.ndarray]  # per layer, rotated: [K, T, D]
    values: list[np.ndarray]  # [K, T, D]


def _norm(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
}


def frequencies(config: Any) -> np.ndarray:
    """Radians per position of each rotated pair: plain, `linear` and `llama3` (the rule published with Llama 3.1)."""
    scaling, result = config.rope_scaling, []
    for i in range(config.head_size // 2):
        frequency = 1 / config.rope_theta ** (2 * i / config.head_size)
        if scaling is not None and scaling.kind == "linear":
            frequency /= scaling.factor
        elif scaling is not None and scaling.kind == "llama3":
            turns = scaling.original_max_position * frequency / (2 * math.pi)
            if turns < scaling.low_freq_factor:
                frequency /= scaling.factor
            elif turns < scaling.high_freq_factor:
                share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
                frequency = (1 - share) * frequency / scaling.factor + share * frequency
        result.append(frequency)
    return np.array(result)


def _rotate(x, angles):  # [heads, T, D], [T, D / 2]
    half = x.shape[-1] // 2
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def forward(config: Any, params: dict, tokens: Sequence[int], positions: Sequence[int] | None = None) -> Pass:
    """One pass over a whole sequence. `config` and `params` as `jspec.models.config` describes them."""
    c, tokens = config, np.asarray(tokens)
    params = _float64(params)
    positions = np.arange(len(tokens)) if positions is None else np.asarray(positions)
    angles = positions[:, None] * frequencies(c)
    cuts = np.cumsum([c.num_heads * c.head_size, c.num_kv_heads * c.head_size])
    heads = lambda x: x.reshape(len(tokens), -1, c.head_size).swapaxes(0, 1)

    x = params["embed"][tokens] * c.embedding_scale
    states, all_keys, all_values = [], [], []
    for index, layer in enumerate(params["layers"]):
        states.append(x)
        h = _norm(x, layer["attention_norm"], c.norm_eps)
        query, key, value = map(heads, np.split(h @ layer["qkv"].T + layer.get("qkv_bias", 0), cuts, axis=1))
        if c.qk_norm:
            query, key = _norm(query, layer["query_norm"], c.norm_eps), _norm(key, layer["key_norm"], c.norm_eps)
        query, key = _rotate(query, angles), _rotate(key, angles)
        all_keys.append(key)
        all_values.append(value)
        back = positions[:, None] - positions
        seen = back >= 0
        if c.windows and c.windows[index] is not None:
            seen &= back < c.windows[index]
        mixed = []
        for head in range(c.num_heads):
            shared = head // (c.num_heads // c.num_kv_heads)
            scores = np.where(seen, query[head] @ key[shared].T / math.sqrt(c.head_size), -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed.append(weights / weights.sum(axis=1, keepdims=True) @ value[shared])
        x = x + np.concatenate(mixed, axis=1) @ layer["output"].T + layer.get("output_bias", 0)
        h = _norm(x, layer["ffn_norm"], c.norm_eps)
        gate, up = np.split(h @ layer["gate_up"].T + layer.get("gate_up_bias", 0), 2, axis=1)
        x = x + ACTIVATIONS[c.activation](gate) * up @ layer["down"].T + layer.get("down_bias", 0)
    final = _norm(x, params["final_norm"], c.norm_eps)
    logits = final @ params["embed" if c.tied_head else "head"].T
    return Pass(logits, [*states, final], all_keys, all_values)


def _float64(tree):
    if isinstance(tree, dict):
        return {name: _float64(leaf) for name, leaf in tree.items()}
    if isinstance(tree, list):
        return [_float64(leaf) for leaf in tree]
    return np.asarray(tree, np.float64)


def greedy(config: Any, params: dict, prompt: Sequence[int], num_new: int, smallest_gap: float = 1e-2) -> list[int]:
    """Greedy decoding that runs the whole sequence again for every token.

    Refuses a path on which the two best logits come closer than `smallest_gap`: float noise could flip such a token.
    """
    params, tokens = _float64(params), list(prompt)
    for _ in range(num_new):
        logits = forward(config, params, tokens).logits[-1]
        second, first = np.sort(logits)[-2:]
        assert first - second > smallest_gap, (len(tokens), first - second)
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


# Speculative decoding at temperature 0.


class Rounds(NamedTuple):
    """Expected statistics of one row, as `types.Acceptance` names them, and the accepted drafts of each round."""

    accepted: list[int]
    rounds: int
    histogram: np.ndarray  # [P]
    offered: np.ndarray  # [P - 1]
    tested: np.ndarray  # [P - 1]
    drafted: int


def chain(drafts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Drafts and parents of a chain; node 0 is the pending token, so draft i hangs on node i."""
    return list(drafts), list(range(len(drafts)))


def speculate(
    prompt: Sequence[int],
    text: Sequence[int],
    propose: Callable[[list[int]], tuple[list[int], list[int]]],
    max_depth: int,
    budget: int | None = None,
) -> Rounds:
    """Walk the rounds by hand.

    Args:
      prompt: its first new token comes from prefill and belongs to no round.
      text: the greedy continuation, cut behind its stop token if it has one.
      propose: tokens so far -> drafts and the node each hangs on (-2: never verified); node 0 is the pending token.
      max_depth: of the trees.
      budget: tokens the row may emit; the length of `text` by default.
    """
    budget = len(text) if budget is None else budget
    emitted, accepted_per_round, drafted = 1, [], 0
    offered, tested = np.zeros(max_depth, int), np.zeros(max_depth, int)
    while emitted < len(text):
        drafts, parents = propose([*prompt, *text[:emitted]])
        depth, children = {0: 0}, {}
        for node, (token, parent) in enumerate(zip(drafts, parents), start=1):
            if parent in depth and depth[parent] < budget - emitted - 1:
                depth[node] = depth[parent] + 1
                children.setdefault(parent, []).append((token, node))
        drafted += len(depth) - 1
        offered[: max(depth.values())] += 1
        node, accepted, tries = 0, 0, 0
        while emitted + accepted < len(text) and node in children:
            tries += 1
            follow = [child for token, child in children[node] if token == text[emitted + accepted]]
            if not follow:
                break
            node, accepted = follow[0], accepted + 1
        tested[:tries] += 1
        accepted_per_round.append(accepted)
        emitted += min(accepted + 1, len(text) - emitted)
    return Rounds(
        accepted=accepted_per_round,
        rounds=len(accepted_per_round),
        histogram=np.bincount(np.array(accepted_per_round, int), minlength=max_depth + 1),
        offered=offered,
        tested=tested,
        drafted=drafted,
    )


def lookup(
    tokens: Sequence[int], gamma: int, max_ngram: int = 3, min_ngram: int = 1, prefer: str = "recent"
) -> list[int]:
    """Prompt lookup by brute force over all start positions."""
    tokens = list(tokens)
    for n in range(max_ngram, min_ngram - 1, -1):
        ends = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[-n:]]
        if ends:
            end = ends[-1] if prefer == "recent" else ends[0]
            return tokens[end : end + gamma]
    return []


# Multi-round rejection down a tree (SpecInfer, EAGLE, Sequoia).


def residual(target, draft):
    """norm((p - q)+), or p where nothing is left. Exact for fractions."""
    left = [max(p - q, 0) for p, q in zip(target, draft)]
    total = sum(left)
    return [x / total for x in left] if total > 0 else list(target)


def walk(tokens, parents, draft_laws, target_laws, uniforms):
    """One walk with given uniforms, one per node.

    Returns:
      The accepted nodes, the root first, and the law of the token that follows.
    """
    path, law = [0], target_laws[0]
    while True:
        for child in (i for i in range(len(tokens)) if parents[i] == path[-1]):
            token, draft = tokens[child], draft_laws[child]
            if uniforms[child] * draft[token] < law[token]:
                path.append(child)
                law = target_laws[child]
                break
            law = residual(law, draft)
        else:
            return path, law


def walk_law(tokens, parents, draft_laws, target_laws):
    """Every outcome of the walk and its probability: {(accepted tokens..., next token): probability}."""
    outcomes = {}

    def visit(node, law, siblings, prefix, weight):
        if not weight:
            return
        if not siblings:
            for token, p in enumerate(law):
                if p:
                    outcomes[(*prefix, token)] = outcomes.get((*prefix, token), 0) + weight * p
            return
        child, *rest = siblings
        token, draft = tokens[child], draft_laws[child]
        accept = min(1, law[token] / draft[token]) if draft[token] else int(law[token] > 0)
        visit(child, target_laws[child], children(child), (*prefix, token), weight * accept)
        visit(node, residual(law, draft), rest, prefix, weight * (1 - accept))

    children = lambda node: [i for i in range(len(tokens)) if parents[i] == node]
    visit(0, target_laws[0], children(0), (), 1)
    return outcomes
