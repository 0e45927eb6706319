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

import jax.numpy as jnp
import numpy as np

from jspec import drafters, types
from tests import reference, running, tiny, toy_drafters

GAMMA = 4

Propose = Callable[[list[int]], tuple[list[int], list[int]]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One drafter.

    build:    see above.
    kind:     its name in `drafters.REGISTRY`; None for drafters of the tests.
    propose:  `(twin, table) ->` its proposals at temperature 0 in plain Python, tokens so far -> drafts and parents;
              None where there is no such reference.
    """

    build: Callable[[types.Target, types.Target, np.ndarray], tuple[types.BoundDrafter, Any]]
    kind: str | None = None
    propose: Callable[[types.Target, np.ndarray], Propose] | None = None


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


def _token_tree(shape: dict) -> Row:
    def params(table):
        best = np.argsort(-table, axis=1, kind="stable")[:, :3]
        return {name: jnp.asarray(value, jnp.int32) for name, value in (shape | {"table": best}).items()}

    def build(target, twin, table):
        features = (target.model.config.num_layers - 1, "final")
        return toy_drafters.TokenTree(len(shape["parents"]), TREE_DEPTH, features), params(table)

    return Row(build, propose=lambda twin, table: functools.partial(toy_drafters.by_hand, params(table)))


# Two children of the root, each with two children of its own.
SAMPLED = (-1, 0, 0, 1, 1, 2, 2)


def _sampled_tree(**on: bool) -> Row:
    def build(target, twin, table):
        params = {"parents": jnp.asarray(SAMPLED), "logits": jnp.asarray(table, jnp.float32)}
        return toy_drafters.SampledTree(len(SAMPLED), 2), params | toy_drafters.switches(**on)

    return Row(build)


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
    "token tree": _token_tree(TREE),
    "tree with auxiliary nodes": _token_tree(AUXILIARY),
    "sampled without replacement": _sampled_tree(),
    "sampled with replacement": _sampled_tree(replace=True),
}


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
