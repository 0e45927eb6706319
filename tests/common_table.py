"""The common table: one row per drafter. `test_common.py` runs every check on every row.

A row is a function `build(target, twin, table) -> (bound drafter, its parameters)`: `twin` is a weaker target with the
same vocabulary, `table` [V, V] logits of the next token after each token, for drafters without a model. It is called
with fixture R, and with fixture B in its chain form. To add a method, add a row; where its proposals at temperature 0
can be computed in plain Python, give them too, and its statistics are checked.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import drafters, topology, types
from jspec.drafters import eagle
from jspec.models import heads
from tests import hand_heads, reference, running, tiny, toy_drafters

GAMMA = 4

Propose = Callable[[list[int]], tuple[list[int], list[int]]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One drafter.

    build:    see above.
    kind:     its name in `drafters.REGISTRY`; None for drafters of the tests.
    propose:  `(twin, table) ->` its proposals at temperature 0 in plain Python, tokens so far -> drafts and parents;
              None where there is no such reference.
    quick:    whether the quick suite runs it; every row compiles its own programs.
    """

    build: Callable[[types.Target, types.Target, np.ndarray], tuple[types.BoundDrafter, Any]]
    kind: str | None = None
    propose: Callable[[types.Target, np.ndarray], Propose] | None = None
    quick: bool = True


@functools.cache
def twin_chain(twin: types.Target, gamma: int) -> Propose:
    """A chain of gamma greedy tokens from a draft without a cache; refuses near-ties (see `reference.greedy`)."""
    model = twin.model

    @functools.cache
    def drafts(tokens: tuple[int, ...]) -> list[int]:
        return reference.greedy(model.config, model.params, tokens, gamma, 1e-3)

    return lambda tokens: reference.chain(drafts(tuple(tokens)))


# A node's rank says which candidate of its parent's token it takes. Here the likeliest child of the root comes second,
# so that a later sibling is often the right one; two nodes are auxiliary.
TREE = {
    "parents": (-1, 0, 0, -2, 0, 1, 2, 2, 6, -2),
    "rank": (0, 1, 0, 0, 2, 0, 1, 0, 0, 1),
}
# Auxiliary nodes before and between, siblings far apart, and two that propose the same token (5 and 7).
AUXILIARY = {
    "parents": (-1, -2, 0, -2, -2, 2, 0, 2, 5, 6),
    "rank": (0, 0, 0, 1, 2, 0, 1, 0, 0, 0),
}
TREE_DEPTH = 3


def _token_tree(shape: dict, quick: bool = True) -> Row:
    def params(table):
        best = np.argsort(-table, axis=1, kind="stable")[:, :3]
        return {name: jnp.asarray(value, jnp.int32) for name, value in (shape | {"table": best}).items()}

    def build(target, twin, table):
        features = (target.model.config.num_layers - 1, "final")
        return toy_drafters.TokenTree(len(shape["parents"]), TREE_DEPTH, features), params(table)

    return Row(build, propose=lambda twin, table: functools.partial(toy_drafters.by_hand, params(table)), quick=quick)


# Two children of the root, each with two children of its own.
SAMPLED = (-1, 0, 0, 1, 1, 2, 2)


def _sampled_tree(quick: bool = True, **on: bool) -> Row:
    def build(target, twin, table):
        params = {"parents": jnp.asarray(SAMPLED), "logits": jnp.asarray(table, jnp.float32)}
        return toy_drafters.SampledTree(len(SAMPLED), 2), params | toy_drafters.switches(**on)

    return Row(build, quick=quick)


# Static tree of EAGLE and standard: the later child of the root is often the right one (see `random_table`).
CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


def _by_rank(best: Callable[[int], list[int]], shape: topology.Topology) -> Callable[[list[int]], tuple[list, list]]:
    """Proposals of a static tree; `best(token)`: candidates behind a token, the likeliest first."""

    def propose(tokens):
        filled = [tokens[-1]]
        for parent, rank in zip(shape.parents[1:], shape.ranks[1:]):
            filled.append(best(filled[parent])[rank])
        return filled[1:], list(shape.parents[1:])

    return propose


def twin_tree(twin: types.Target, shape: topology.Topology) -> Propose:
    """A static tree of a draft's best candidates behind every line, without a cache; refuses near-ties."""
    model = twin.model

    @functools.cache
    def best(tokens: tuple[int, ...]) -> list[int]:
        logits = reference.forward(model.config, model.params, tokens).logits[-1]
        order = np.argsort(-logits)
        assert (-np.diff(logits[order[:4]]) > 1e-4).all(), tokens  # float noise could flip closer ones
        return order.tolist()

    @functools.cache
    def drafts(tokens: tuple[int, ...]) -> list[int]:
        lines = [tokens]
        for parent, rank in zip(shape.parents[1:], shape.ranks[1:]):
            lines.append((*lines[parent], best(lines[parent])[rank]))
        return [line[-1] for line in lines[1:]]

    return lambda tokens: (drafts(tuple(tokens)), list(shape.parents[1:]))


def _table_best(table: np.ndarray) -> Callable[[int], list[int]]:
    return lambda token: np.argsort(-table[token], kind="stable").tolist()


def _expand_and_rerank(table: np.ndarray, depth: int, top_k: int, num_nodes: int) -> Propose:
    """EAGLE-2's tree in plain Python."""
    log_probs = table - np.log(np.exp(table).sum(axis=1, keepdims=True))

    def propose(tokens):
        pool = []  # (value, token, place of the parent)

        def expand(token, value, place):
            children = [(value + log_probs[token, child], child, place) for child in _table_best(table)(token)[:top_k]]
            pool.extend(children)
            return range(len(pool) - top_k, len(pool))

        frontier = list(expand(tokens[-1], 0.0, -1))
        for _ in range(depth - 1):
            grown = [place for parent in frontier for place in expand(pool[parent][1], pool[parent][0], parent)]
            frontier = sorted(grown, key=lambda place: -pool[place][0])[:top_k]
        kept = sorted(sorted(range(len(pool)), key=lambda place: -pool[place][0])[: num_nodes - 1])
        return [pool[place][1] for place in kept], [kept.index(pool[p][2]) + 1 if pool[p][2] >= 0 else 0 for p in kept]

    return propose


def _corpus(table: np.ndarray) -> list[list[int]]:
    """Texts in which every token is followed by its likely ones."""
    best = np.argsort(-table, axis=1)[:, :3].tolist()
    return [
        [token, after]
        for token, ranked in enumerate(best)
        for place, after in enumerate(ranked)
        for _ in range(3 - place)
    ]


def _eagle3(settings: drafters.Eagle, reduced: bool = False, **row) -> Row:
    def build(target, twin, table):
        ids = np.arange(0, len(table), 1 + (len(table) > 8)) if reduced else None
        layers = tuple(range(target.model.config.num_layers))
        return settings.build(target, head=hand_heads.eagle3(target, table, layers, ids))

    return Row(build, "eagle", **row)


def _eagle1(settings: drafters.Eagle, **row) -> Row:
    def build(target, twin, table):
        return settings.build(target, head=heads.init_eagle(jax.random.key(0), eagle.like_target(target, 1)))

    return Row(build, "eagle", **row)


def _medusa(**row) -> Row:
    def build(target, twin, table):
        widths = (3, 2, 1)
        config = target.model.config
        shape = heads.MedusaConfig(len(widths) + 1, 2, config.width, config.vocab_size)
        settings = drafters.Medusa(tree=topology.Tree(widths=widths))
        return settings.build(target, heads=heads.init_medusa(jax.random.key(0), shape))

    return Row(build, "medusa", **row)


ROWS = {
    "autoregressive": Row(
        lambda target, twin, table: drafters.Autoregressive().build(target),
        "autoregressive",
        lambda twin, table: lambda tokens: ([], []),
    ),
    "standard": Row(
        lambda target, twin, table: drafters.Standard(gamma=GAMMA).build(target, draft=twin),
        "standard",
        lambda twin, table: twin_chain(twin, GAMMA),
    ),
    "prompt_lookup": Row(
        lambda target, twin, table: drafters.PromptLookup(gamma=GAMMA).build(target),
        "prompt_lookup",
        lambda twin, table: lambda tokens: reference.chain(reference.lookup(tokens, GAMMA)),
    ),
    "lookahead": Row(
        lambda target, twin, table: drafters.Lookahead(window=3, ngram=3, guesses=3).build(target), "lookahead"
    ),
    "lookahead, longer": Row(
        lambda target, twin, table: drafters.Lookahead(window=2, ngram=4, guesses=2, from_text=False).build(target),
        "lookahead",
        quick=False,
    ),
    "medusa": _medusa(quick=False),
    "eagle chain": _eagle3(
        drafters.Eagle(gamma=3),
        propose=lambda twin, table: _by_rank(_table_best(table), topology.chain(3)),
        quick=False,
    ),
    "eagle tree": _eagle3(drafters.Eagle(tree=topology.Tree(choices=CHOICES)), reduced=True),
    "eagle tree, one-hot": _eagle3(
        drafters.Eagle(tree=topology.Tree(choices=CHOICES), law="one_hot"),
        propose=lambda twin, table: _by_rank(_table_best(table), topology.from_choices(CHOICES)),
        quick=False,
    ),
    "eagle dynamic": _eagle3(
        drafters.Eagle(dynamic=drafters.Dynamic(depth=3, top_k=3, num_nodes=8)),
        propose=lambda twin, table: _expand_and_rerank(table, 3, 3, 8),
        quick=False,
    ),
    "eagle 1": _eagle1(drafters.Eagle(tree=topology.Tree(choices=CHOICES)), quick=False),
    "eagle 1 dynamic": _eagle1(drafters.Eagle(dynamic=drafters.Dynamic(depth=2, top_k=2, num_nodes=5)), quick=False),
    "standard tree": Row(
        lambda target, twin, table: drafters.Standard(tree=topology.Tree(choices=CHOICES)).build(target, draft=twin),
        "standard",
        lambda twin, table: twin_tree(twin, topology.from_choices(CHOICES)),
        quick=False,
    ),
    "unigram": Row(
        lambda target, twin, table: drafters.Unigram(gamma=2).build(target, sequences=_corpus(table)),
        "unigram",
        quick=False,
    ),
    "bigram": Row(
        lambda target, twin, table: drafters.Bigram(gamma=3, continuations=3).build(target, sequences=_corpus(table)),
        "bigram",
        quick=False,
    ),
    "early exit": Row(
        lambda target, twin, table: drafters.EarlyExit(gamma=2, layers=1).build(target), "early_exit", quick=False
    ),
    "token tree": _token_tree(TREE),
    "tree with auxiliary nodes": _token_tree(AUXILIARY, quick=False),
    "sampled without replacement": _sampled_tree(quick=False),
    "sampled with replacement": _sampled_tree(quick=False, replace=True),
}


def row_named_in(text: str) -> str | None:
    """The row that a test's id names; the longest name, since some begin with others."""
    return next((name for name in sorted(ROWS, key=len, reverse=True) if name in text), None)


def random_table() -> np.ndarray:
    """Logits for fixture R: noise, and what followed each token in the greedy texts, so that drafts are often right."""
    table = np.random.default_rng(2).standard_normal((tiny.VOCAB, tiny.VOCAB))
    for prompt in tiny.PROMPTS:
        text = [prompt[-1], *tiny.greedy(prompt)]
        np.add.at(table, (text[:-1], text[1:]), 2.5)
    return table


@functools.cache
def decoder(name: str) -> running.Decoder:
    """The row's decoder on fixture R."""
    target = tiny.random_target()
    return running.Decoder(target, *ROWS[name].build(target, tiny.noisy_twin(), random_table()))
