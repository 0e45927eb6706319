"""The loop: draft, verify, commit. Prompt to last token without a word to the host.

Every method runs through `decode_step`; `decode` loops it inside one `lax.while_loop`, `stream` calls it from the host
and yields tokens as blocks land. Rows of a batch advance by different amounts.

Invariants, each with a test in `tests/test_decode.py`:

1. `cache.length == length - 1`: the pending (last committed) token is not in the cache; it is node 0 of the next tree.
2. The cache holds committed tokens only. `forward` reads it, `cache.commit` is the only write, so rejecting is free.
3. Capacity >= prompt + max_new_tokens, checked before compiling; a write beyond it is dropped, never clamped.
4. Nodes stand in topological order; auxiliary and padding nodes carry parent -2 and are never verified.
5. Each row owns its key, folded with its own length: a row's text does not depend on its batch mates.
6. Structure, shapes and dtypes of the carry never change. What changes a shape is static, what does not is an array
   per row.
7. A finished row emits nothing, keeps its state and is left out of the statistics. Output ends at the first stop id or
   at the budget, whichever comes first, also inside an accepted block. With r tokens of budget left at most r - 1
   drafts are offered, and only those count as drafted.
8. Prefill emits the first token; it belongs to no round.
9. The jitted loop and the streaming loop call the same `decode_step`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jspec import cache as kv
from jspec import sampling as sampling_lib
from jspec import tree as tree_lib
from jspec import types
from jspec import verify as verify_lib
from jspec.decode_inputs import capacity_for, check
from jspec.decode_state import (
    ACCEPTED,
    BONUS,
    CORRECTED,
    FINISH_REASONS,
    LENGTH,
    ORIGINS,
    PREFILL,
    PROMPT,
    RUNNING,
    STOP,
    UNDRAFTED,
    DecodeState,
)
from jspec.models import transformer

__all__ = [
    "ACCEPTED",
    "BONUS",
    "CORRECTED",
    "FINISH_REASONS",
    "LENGTH",
    "ORIGINS",
    "PREFILL",
    "PREFILL_CHUNK",
    "PROMPT",
    "REJECTION",
    "RUNNING",
    "STOP",
    "UNDRAFTED",
    "DecodeState",
    "Emitted",
    "capacity_for",
    "check",
    "decode",
    "decode_step",
    "forward_tree",
    "output",
    "prefill",
    "prefill_jit",
    "propose",
    "run",
    "run_jit",
    "step_jit",
    "stream",
    "verify_and_commit",
]

REJECTION = verify_lib.Rejection()
PREFILL_CHUNK = 64  # tokens per prefill pass


def _round_keys(rng_keys: jax.Array, length: jax.Array) -> jax.Array:
    """Fresh keys per row: the length only grows, so no key is ever used twice. Returns `[2, B]`."""
    folded = jax.vmap(jax.random.fold_in)(rng_keys, length)
    return jax.vmap(jax.random.split, out_axes=1)(folded)


def _finish(block: jax.Array, count: jax.Array, emitted: jax.Array, sampling: types.Sampling):
    """Cut each row's block at its first stop id, and say whether the row ends.

    Args:
      block: `[B, P]` tokens about to be emitted.
      count: `[B]` how many of them are real.
      emitted: `[B]` tokens emitted before.
      sampling: stop ids and budgets.

    Returns:
      `[B]` tokens to emit and `[B]` finish reasons. A stop id at the last token of the budget counts as a stop.
    """
    order = jnp.arange(block.shape[1])
    stops = jnp.any(block[:, :, None] == sampling.stop_ids[:, None, :], axis=-1) & (order < count[:, None])
    stopped = jnp.any(stops, axis=1)
    count = jnp.where(stopped, jnp.argmax(stops, axis=1) + 1, count)
    full = emitted + count >= sampling.max_new_tokens
    return count, jnp.where(stopped, STOP, jnp.where(full, LENGTH, RUNNING))


def prefill(
    params: types.Params,
    rng_keys: jax.Array,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    *,
    drafter: types.BoundDrafter,
    sampling: types.Sampling,
    capacity: int,
    chunk: int = PREFILL_CHUNK,
) -> DecodeState:
    """Read the prompts in chunks of a fixed size and emit each row's first token.

    The number of chunks is data, so prompts of other lengths compile nothing and short ones do not pay for the padding.

    Args:
      params: target and draft.
      rng_keys: `[B]`, one key per row.
      prompts: `[B, W]`, left-aligned; what stands behind a prompt is ignored.
      prompt_lengths: `[B]`, each between 1 and W.
      drafter: bound.
      sampling: settings per row.
      capacity: S, slots per row for prompt and new tokens.
      chunk: tokens per pass.
    """
    model = params.target
    batch, width = prompts.shape
    padded = jnp.pad(prompts, ((0, 0), (0, -width % chunk)))
    order = jnp.arange(chunk)
    causal = jnp.broadcast_to(order[:, None] >= order, (batch, chunk, chunk))
    num_features = len(drafter.feature_layers)

    def read_chunk(index, carry):
        cache, draft, logits, features = carry
        start = index * chunk
        tokens = jax.lax.dynamic_slice_in_dim(padded, start, chunk, axis=1)
        positions = jnp.broadcast_to(start + order, (batch, chunk))
        valid = positions < prompt_lengths[:, None]
        last = prompt_lengths - 1 - start  # of the prompt, within this chunk
        place = jnp.clip(last, 0, chunk - 1)[:, None]
        outputs, block = transformer.forward(
            model, tokens, positions, cache, causal, feature_layers=drafter.feature_layers, logits_at=place
        )
        cache = kv.commit(cache, block, jnp.broadcast_to(order, (batch, chunk)), jnp.sum(valid, axis=1))
        draft = drafter.extend(params, draft, tokens, outputs, valid)
        here = ((last >= 0) & (last < chunk))[:, None]
        logits = jnp.where(here, outputs.logits[:, 0], logits)
        features = jnp.where(here[..., None], tree_lib.along_path(outputs.features, place)[:, 0], features)
        return cache, draft, logits, features

    start = (
        kv.init(model.config, batch, capacity, model.dtype),
        drafter.init(params, batch, capacity),
        jnp.zeros((batch, model.config.vocab_size), jnp.float32),
        jnp.zeros((batch, num_features, model.config.width), model.dtype),
    )
    num_chunks = (jnp.max(prompt_lengths) + chunk - 1) // chunk
    cache, draft, logits, features = jax.lax.fori_loop(0, num_chunks, read_chunk, start)

    first, _ = sampling_lib.draw(_round_keys(rng_keys, prompt_lengths)[0], logits, sampling)
    _, finish_reason = _finish(first[:, None], jnp.ones_like(first), jnp.zeros_like(first), sampling)
    tokens = jnp.zeros((batch, capacity), jnp.int32).at[:, :width].set(prompts[:, :capacity])
    write = jax.vmap(lambda row, place, value: row.at[place].set(value, mode="drop"))
    positions = drafter.max_depth + 1
    zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)
    return DecodeState(
        tokens=write(tokens, prompt_lengths, first),
        length=prompt_lengths + 1,
        prompt_length=prompt_lengths,
        origin=write(jnp.full((batch, capacity), PROMPT, jnp.int8), prompt_lengths, jnp.full(batch, PREFILL, jnp.int8)),
        features=features,
        cache=cache,
        draft=draft,
        finish_reason=finish_reason,
        acceptance=types.Acceptance(
            rounds=zeros(),
            histogram=zeros(positions),
            offered=zeros(positions - 1),
            tested=zeros(positions - 1),
            drafted=zeros(),
        ),
    )


def decode_step(
    params: types.Params,
    rng_keys: jax.Array,
    state: DecodeState,
    *,
    drafter: types.BoundDrafter,
    verifier: types.Verifier,
    sampling: types.Sampling,
) -> DecodeState:
    """One round: draft a tree, verify it in one target pass, commit the accepted path."""
    tree, state = propose(params, rng_keys, state, drafter=drafter, sampling=sampling)
    return verify_and_commit(params, rng_keys, state, tree, drafter=drafter, verifier=verifier, sampling=sampling)


def propose(
    params: types.Params,
    rng_keys: jax.Array,
    state: DecodeState,
    *,
    drafter: types.BoundDrafter,
    sampling: types.Sampling,
) -> tuple[types.TokenTree, DecodeState]:
    """The first half of a round: a tree per row, no deeper than its budget allows."""
    keys, _ = _round_keys(rng_keys, state.length)
    tree, draft = drafter.propose(params, keys, state.draft, state.context, sampling)
    chex.assert_shape([tree.tokens, tree.parents, tree.depth], (state.length.shape[0], drafter.num_nodes))
    chex.assert_equal(tree.max_depth, drafter.max_depth)
    budget = sampling.max_new_tokens - (state.length - state.prompt_length)
    return tree_lib.limit_depth(tree, budget - 1), state.replace(draft=draft)


def forward_tree(
    target: transformer.Model, state: DecodeState, tree: types.TokenTree, *, feature_layers: types.FeatureLayers
) -> tuple[types.Outputs, kv.BlockKV]:
    """The target pass over all nodes, each at the pending token's position plus its depth."""
    return transformer.forward(
        target,
        tree.tokens,
        (state.length - 1)[:, None] + tree.depth,
        state.cache,
        tree.mask,
        feature_layers=feature_layers,
    )


def verify_and_commit(
    params: types.Params,
    rng_keys: jax.Array,
    state: DecodeState,
    tree: types.TokenTree,
    *,
    drafter: types.BoundDrafter,
    verifier: types.Verifier,
    sampling: types.Sampling,
) -> DecodeState:
    """The second half: one target pass over the tree, the verdict, and what follows from it."""
    live = state.live
    _, verify_keys = _round_keys(rng_keys, state.length)
    emitted = state.length - state.prompt_length

    # Verify.
    outputs, block_kv = forward_tree(params.target, state, tree, feature_layers=drafter.feature_layers)
    verdict = verify_lib.verify(verifier, verify_keys, tree, outputs.logits, sampling)

    # Emit: the accepted drafts and the next token, cut at a stop id.
    order = jnp.arange(tree.max_depth + 1)
    accepted = verdict.num_accepted[:, None]
    drafts = jnp.roll(tree_lib.along_path(tree.tokens, verdict.path), -1, axis=1)
    block = jnp.where(order < accepted, drafts, verdict.next_token[:, None])
    count, finish_reason = _finish(block, verdict.num_accepted + 1, emitted, sampling)
    count = jnp.where(live, count, 0)
    last_node = jnp.take_along_axis(verdict.path, accepted, axis=1)[:, 0]
    rejected = tree_lib.has_children(tree, last_node)
    offered = tree_lib.offered_depth(tree)
    ending = jnp.where(rejected, CORRECTED, jnp.where(offered > 0, BONUS, UNDRAFTED))
    origin = jnp.where(order < accepted, ACCEPTED, ending[:, None]).astype(jnp.int8)

    # Commit. The first `count` nodes of the path stay: all that was emitted but the last token, which is pending next.
    # A round tested one draft more than it accepted if it rejected one, and no stop id ended the row before that one.
    tested = jnp.where(rejected & (count > verdict.num_accepted), count, jnp.minimum(accepted[:, 0], count))
    verdict = verdict.replace(num_accepted=count - 1)
    cache = kv.commit(state.cache, block_kv, verdict.path, count)
    draft = drafter.update(params, state.draft, state.context, tree, outputs, verdict)
    produced_by = jnp.take_along_axis(verdict.path, jnp.maximum(count - 1, 0)[:, None], axis=1)
    features = tree_lib.along_path(outputs.features, produced_by)[:, 0]

    return DecodeState(
        tokens=_append(state.tokens, block, state.length, count),
        length=state.length + count,
        prompt_length=state.prompt_length,
        origin=_append(state.origin, origin, state.length, count),
        features=jnp.where(live[:, None, None], features, state.features),
        cache=cache,
        draft=draft,
        finish_reason=jnp.where(live, finish_reason, state.finish_reason),
        acceptance=_count(state.acceptance, jnp.minimum(accepted[:, 0], count), tested, offered, tree, live),
    )


@jax.vmap
def _append(row: jax.Array, block: jax.Array, length: jax.Array, count: jax.Array) -> jax.Array:
    """Write the first `count` of a block at `length`; a vmapped scatter that drops what is beyond the row."""
    order = jnp.arange(block.shape[0])
    return row.at[jnp.where(order < count, length + order, row.shape[0])].set(block, mode="drop")


def _count(
    acceptance: types.Acceptance,
    accepted: jax.Array,
    tested: jax.Array,
    offered: jax.Array,
    tree: types.TokenTree,
    live: jax.Array,
) -> types.Acceptance:
    """Add one round. `accepted`, `tested` and `offered` are depths, `[B]`."""
    depth = jnp.arange(1, tree.max_depth + 1)
    one = live.astype(jnp.int32)
    is_offered = (depth <= offered[:, None]) & live[:, None]
    return types.Acceptance(
        rounds=acceptance.rounds + one,
        histogram=acceptance.histogram + (jnp.arange(tree.max_depth + 1) == accepted[:, None]) * one[:, None],
        offered=acceptance.offered + is_offered,
        tested=acceptance.tested + (is_offered & (depth <= tested[:, None])),
        drafted=acceptance.drafted + jnp.sum(tree.parents >= 0, axis=1) * one,
    )


def run(
    params: types.Params,
    rng_keys: jax.Array,
    state: DecodeState,
    *,
    drafter: types.BoundDrafter,
    verifier: types.Verifier,
    sampling: types.Sampling,
    enough: jax.Array | None = None,
) -> DecodeState:
    """Rounds until every row has ended, or `enough` of them (a scalar): one `lax.while_loop`."""
    step = functools.partial(decode_step, params, rng_keys, drafter=drafter, verifier=verifier, sampling=sampling)

    def goes_on(state):
        live = jnp.any(state.live)
        return live if enough is None else live & (jnp.sum(~state.live) < enough)

    return jax.lax.while_loop(goes_on, step, state)


# The compiled pieces. The state is donated, so that the cache is updated in place and never copied between them.
prefill_jit = jax.jit(prefill, static_argnames=("drafter", "capacity", "chunk"))
step_jit = jax.jit(decode_step, static_argnames=("drafter", "verifier"), donate_argnames="state")
run_jit = jax.jit(run, static_argnames=("drafter", "verifier"), donate_argnames="state")


def _checked_prefill(
    params, rng_keys, prompts, prompt_lengths, drafter, verifier, sampling, max_new_tokens, capacity, chunk
) -> Callable[[], DecodeState]:
    """The prefill of what was asked for, if `check` has nothing against it; it waits to be called."""
    capacity = check(
        params,
        prompts,
        prompt_lengths,
        drafter=drafter,
        verifier=verifier,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        capacity=capacity,
    )
    settings = dict(drafter=drafter, sampling=sampling, capacity=capacity, chunk=chunk)
    return functools.partial(prefill_jit, params, rng_keys, prompts, prompt_lengths, **settings)


def decode(
    params: types.Params,
    rng_keys: jax.Array,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    *,
    drafter: types.BoundDrafter,
    verifier: types.Verifier = REJECTION,
    sampling: types.Sampling,
    max_new_tokens: int,
    capacity: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> types.DecodeOutput:
    """Generate: two compiled programs (prefill, and the loop), no host synchronisation. May be called inside `jit`.

    Args:
      params: target and draft.
      rng_keys: `[B]`, one key per row.
      prompts: `[B, W]`, left-aligned.
      prompt_lengths: `[B]`.
      drafter: bound; static.
      verifier: static.
      sampling: settings per row (`sampling.make`), stop ids and budgets among them.
      max_new_tokens: largest budget of any row; decides the capacity.
      capacity: slots per row; None chooses a power of two.
      prefill_chunk: prompt tokens per pass.

    Raises:
      ValueError: see `check`.
    """
    read_prompts = _checked_prefill(
        params, rng_keys, prompts, prompt_lengths, drafter, verifier, sampling, max_new_tokens, capacity, prefill_chunk
    )
    state = read_prompts()
    return output(run_jit(params, rng_keys, state, drafter=drafter, verifier=verifier, sampling=sampling))


def output(state: DecodeState) -> types.DecodeOutput:
    """What a finished state has to say."""
    return types.DecodeOutput(state.tokens, state.length, state.finish_reason, state.origin, state.acceptance)


class Emitted(NamedTuple):
    """Tokens one row emitted in one step of `stream`.

    row:     index in the batch.
    tokens:  new token ids.
    origins: of each, an entry of `ORIGINS`.
    """

    row: int
    tokens: list[int]
    origins: list[str]


def stream(
    params: types.Params,
    rng_keys: jax.Array,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    *,
    drafter: types.BoundDrafter,
    verifier: types.Verifier = REJECTION,
    sampling: types.Sampling,
    max_new_tokens: int,
    capacity: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> Iterator[list[Emitted] | types.DecodeOutput]:
    """Like `decode`, but yields what each row emitted as its blocks land; the last item is the `DecodeOutput`.

    Raises:
      ValueError: see `check`; raised by the call, not by the first item.
    """
    read_prompts = _checked_prefill(
        params, rng_keys, prompts, prompt_lengths, drafter, verifier, sampling, max_new_tokens, capacity, prefill_chunk
    )

    def blocks():
        state = read_prompts()
        done = np.asarray(state.prompt_length)
        while True:
            length, tokens, origin = map(np.asarray, (state.length, state.tokens, state.origin))
            yield [
                Emitted(row, tokens[row, a:b].tolist(), [ORIGINS[i] for i in origin[row, a:b]])
                for row, (a, b) in enumerate(zip(done, length))
                if b > a
            ]
            if not np.asarray(state.live).any():
                break
            done = length
            state = step_jit(params, rng_keys, state, drafter=drafter, verifier=verifier, sampling=sampling)
        yield output(state)

    return blocks()
