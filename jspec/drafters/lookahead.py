"""Lookahead decoding (Fu et al., arXiv:2402.02057): n-grams from Jacobi iteration, no draft model.

Every target pass carries two branches behind the pending token. The lookahead branch is a window of W columns and
N - 1 levels: trajectories of W parallel guesses of the future, each level one Jacobi step newer. Where a trajectory
ends, the target's argmax makes it an n-gram: N tokens that the model finds plausible in a row. The verification branch
holds up to G n-grams from the pool that start with the pending token, merged into a trie, and is judged like any other
tree of deterministic proposals: lossless at any temperature.

What window and guesses see (section 3.2), besides the committed text:

    level 0, column j    the pending token and the columns of level 0 up to j
    level l, column j    the same, and column j of levels 1 .. l
    guess                the pending token and the earlier tokens of the same guess

Differs from the released code: the window is filled at once with tokens of the text at random places, there its levels
are filled in N - 2 warm-up passes; guesses that share a beginning share its nodes, where the walk would see the first
of them alone.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jspec import tree as tree_lib
from jspec import types
from jspec.drafters import base

EMPTY = -1  # in the pool


@base.register("lookahead")
@dataclasses.dataclass(frozen=True)
class Lookahead:
    """Settings. A pass has (W + G) (N - 1) nodes.

    window:    W, columns of the lookahead branch.
    ngram:     N, tokens of an n-gram, its key included.
    guesses:   G, n-grams kept for each token, and tried at once.
    from_text: also keep the n-grams of the prompt and of what is generated.

    Raises:
      ValueError: `window` or `guesses` below 1, `ngram` below 2, or no whole numbers.
    """

    window: int = 4
    ngram: int = 3
    guesses: int = 4
    from_text: bool = True

    def __post_init__(self):
        base.check_count("window", self.window, 1)
        base.check_count("ngram", self.ngram, 2)
        base.check_count("guesses", self.guesses, 1)

    def build(self, target: types.Target) -> tuple[BoundLookahead, tuple]:
        """See `types.Drafter`."""
        return BoundLookahead(self, target.model.config.vocab_size), ()


@flax.struct.dataclass
class State:
    """Of one call: pool and window start empty and die with it.

    The pool is a table over the vocabulary, so that looking up and inserting touch the G entries of one token, whatever
    V is; the price is 4 V G (N - 1) bytes a row: 1.6 MB for the default settings and V = 49152.

    window:  level l, column j stands l + j places behind the pending token; column 0 of level 0 is that token itself
             and not kept here.
    started: whether the window is filled.
    pool:    for each token, the n-grams that start with it, without it; the last used first, `EMPTY` behind them.
    tail:    the last N - 1 tokens of the committed text.
    seen:    tokens of the committed text.
    """

    window: jax.Array  # [B, N - 1, W] int32
    started: jax.Array  # [B] bool
    pool: jax.Array  # [B, V, G, N - 1] int32
    tail: jax.Array  # [B, N - 1] int32
    seen: jax.Array  # [B] int32


def insert(pool: jax.Array, keys: jax.Array, values: jax.Array, real: jax.Array) -> jax.Array:
    """Put n-grams into one row's pool, one after the other: each comes first among those of its key, and the least
    recently used falls out. One that is there already only moves.

    Args:
      pool: `[V, G, N - 1]`.
      keys: `[M]` first tokens.
      values: `[M, N - 1]` the others.
      real: `[M]` bool; others are left out.
    """
    size, guesses, _ = pool.shape
    order = jnp.arange(guesses)

    def put(index, pool):
        entries, value = pool[keys[index]], values[index]
        same = jnp.all(entries == value, axis=1)
        place = jnp.where(jnp.any(same), jnp.argmax(same), guesses - 1)  # what stands here makes room
        moved = jnp.where((order <= place)[:, None], jnp.roll(entries, 1, axis=0), entries).at[0].set(value)
        return pool.at[jnp.where(real[index], keys[index], size)].set(moved, mode="drop")

    return jax.lax.fori_loop(0, keys.shape[0], put, pool)


@dataclasses.dataclass(frozen=True)
class BoundLookahead(base.Bound):
    """See `types.BoundDrafter`. Nodes: the pending token, the window level by level, the guesses one by one."""

    settings: Lookahead
    vocab_size: int

    @property
    def num_nodes(self) -> int:
        return (self.settings.window + self.settings.guesses) * (self.settings.ngram - 1)

    @property
    def max_depth(self) -> int:
        return self.settings.ngram - 1

    @property
    def _places(self) -> np.ndarray:
        """Level and column of the pending token and of each window node, `[W (N - 1), 2]`."""
        levels, columns = self.settings.ngram - 1, self.settings.window
        return np.array([(level, column) for level in range(levels) for column in range(columns)])

    @property
    def _window_mask(self) -> np.ndarray:
        """Who sees whom among those nodes."""
        (level, column), (other_level, other_column) = self._places.T[:, :, None], self._places.T[:, None, :]
        trunk = (other_level == 0) & (other_column <= column)
        return trunk | ((other_level >= 1) & (other_level <= level) & (other_column == column))

    def init(self, params: types.Params, batch: int, capacity: int) -> State:
        """An empty pool."""
        levels, columns, guesses = self.settings.ngram - 1, self.settings.window, self.settings.guesses
        return State(
            window=jnp.zeros((batch, levels, columns), jnp.int32),
            started=jnp.zeros(batch, bool),
            pool=jnp.full((batch, self.vocab_size, guesses, levels), EMPTY, jnp.int32),
            tail=jnp.zeros((batch, levels), jnp.int32),
            seen=jnp.zeros(batch, jnp.int32),
        )

    def extend(self, params, state, tokens, outputs, valid):
        """Keep the n-grams that end with each of the new tokens."""
        if not self.settings.from_text:
            return state
        size = self.settings.ngram
        count = jnp.sum(valid, axis=1)

        def one_row(pool, tail, seen, tokens, valid, count):
            text = jnp.concatenate([tail, tokens])
            grams = jnp.stack([text[start : start + tokens.shape[0]] for start in range(size)], axis=1)
            real = valid & (seen + jnp.arange(tokens.shape[0]) >= size - 1)
            pool = insert(pool, grams[:, 0], grams[:, 1:], real)
            return pool, jax.lax.dynamic_slice_in_dim(text, count, size - 1)

        pool, tail = jax.vmap(one_row)(state.pool, state.tail, state.seen, tokens, valid, count)
        return state.replace(pool=pool, tail=tail, seen=state.seen + count)

    def propose(self, params, rng_keys, state, context, sampling):
        """The window, and the pool's n-grams behind the pending token."""
        levels = self.settings.ngram - 1
        root, batch = base.pending(context), context.length.shape[0]

        def start(key, tokens, length):
            return tokens[jax.random.randint(key, state.window.shape[1:], 0, length)]

        filled = jax.vmap(start)(rng_keys, context.tokens, context.length)
        window = jnp.where(state.started[:, None, None], state.window, filled)
        guesses = jax.vmap(lambda pool, key: pool[key])(state.pool, root)  # [B, G, N - 1]
        valid = guesses[:, :, 0] != EMPTY

        places = self._places
        num_window = len(places)
        in_window = window.reshape(batch, -1).at[:, 0].set(root)
        tokens = jnp.concatenate([in_window, jnp.maximum(guesses, 0).reshape(batch, -1)], axis=1)
        parents = jnp.full((batch, num_window), tree_lib.PADDING).at[:, 0].set(-1)
        parents = jnp.concatenate([parents, tree_lib.trie(guesses, valid, first=num_window)], axis=1)
        tree = tree_lib.from_parents(tokens, parents, max_depth=levels)
        tree = tree.replace(
            mask=tree.mask.at[:, :num_window, :num_window].set(self._window_mask),
            depth=tree.depth.at[:, :num_window].set(places.sum(axis=1)),
        )
        return tree, state.replace(window=window, started=jnp.ones_like(state.started))

    def update(self, params, state, context, tree, outputs, verdict):
        """Finish the trajectories, keep them as n-grams, and move the window one token on.

        Windows follow the argmax at any temperature, as in the released code.
        """
        levels, columns = self.settings.ngram - 1, self.settings.window
        live = verdict.num_accepted >= 0
        last = (levels - 1) * columns
        new = jnp.argmax(outputs.logits[:, last : last + columns], axis=-1).astype(jnp.int32)
        window = state.window.at[:, 0, 0].set(tree.tokens[:, 0])
        grams = jnp.concatenate([window, new[:, None]], axis=1).swapaxes(1, 2)  # [B, W, N]
        real = jnp.broadcast_to(live[:, None], new.shape)
        pool = jax.vmap(insert)(state.pool, grams[:, :, 0], grams[:, :, 1:], real)
        moved = jnp.concatenate([window[:, 1:], new[:, None]], axis=1)
        state = state.replace(pool=pool, window=jnp.where(live[:, None, None], moved, state.window))
        return super().update(params, state, context, tree, outputs, verdict)
