"""Text in, text out: the whole of jspec behind one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import decode as decode_lib
from jspec import drafters, metrics, types
from jspec import sampling as sampling_lib

MIN_WIDTH = 64  # prompt widths grow in powers of two from here, so that lengths rarely compile anything
MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns; lists have one entry per prompt.

    texts:          new text, or None for a target without a tokenizer.
    tokens:         new token ids, the stop id included.
    origins:        how each came, an entry of `decode.ORIGINS`.
    finish_reasons: `stop` or `length`.
    statistics:     alpha, tau and the rest, over all prompts.
    """

    texts: list[str] | None
    tokens: list[list[int]]
    origins: list[list[str]]
    finish_reasons: list[str]
    statistics: metrics.Summary


def check_seed(seed: int | Sequence[int]) -> np.ndarray:
    """One seed or several, as uint32.

    Raises:
      ValueError: one is no whole number in [0, 2^32).
    """
    seeds = np.asarray(seed)
    if not np.issubdtype(seeds.dtype, np.integer) or seeds.min(initial=0) < 0 or seeds.max(initial=0) > MAX_SEED:
        raise ValueError(f"seed {seed} is not a whole number in [0, {MAX_SEED}]")
    return seeds.astype(np.uint32)


def row_keys(seed: int | Sequence[int], batch: int) -> jax.Array:
    """One key per row, `[B]`.

    Args:
      seed: one seed per row, or one for all, from which each row gets its own key.
      batch: B.

    Raises:
      ValueError: a seed outside [0, 2^32), or not one per row.
    """
    seeds = check_seed(seed)
    if seeds.ndim == 0:
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seeds), jnp.arange(batch))
    if seeds.shape != (batch,):
        raise ValueError(f"seed has shape {seeds.shape} for {batch} prompts")
    return jax.vmap(jax.random.key)(jnp.asarray(seeds))


def encode(
    target: types.Target, prompts: Sequence[str | Sequence[int]], *, chat: bool = False, system: str | None = None
) -> list[list[int]]:
    """Token ids of prompts; lists of ids pass through.

    Args:
      target: its tokenizer is used.
      prompts: texts or token ids.
      chat: put each text into the target's chat template, as the user's turn.
      system: the system turn, with `chat`.

    Raises:
      ValueError: a text for a target without a tokenizer, or a prompt without tokens.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts is one string; give a list of prompts")
    if system is not None and not chat:
        raise ValueError("system needs chat=True; without the chat template there is no place for it")
    encoded = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if target.tokenizer is None:
                raise ValueError(f"prompt {index} is text, but {target.provenance.reference} has no tokenizer")
            if not prompt:
                raise ValueError(f"prompt {index} is empty; it needs at least one character")
            prompt = target.tokenizer.chat(prompt, system=system) if chat else target.tokenizer.encode(prompt)
        ids = sampling_lib.token_ids(f"prompt {index}", prompt)
        if not ids:
            raise ValueError(f"prompt {index} is empty; it needs at least one token")
        encoded.append(ids)
    return encoded


def pad(prompts: Sequence[Sequence[int]], width: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Left-align ragged prompts in one array.

    Args:
      prompts: token ids.
      width: W; None takes the power of two that fits the longest.

    Returns:
      `[B, W]` ids and `[B]` lengths, int32.
    """
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    longest = int(lengths.max(initial=1))
    width = max(MIN_WIDTH, 1 << (longest - 1).bit_length()) if width is None else width
    padded = np.zeros((len(prompts), width), np.int32)
    for row, ids in zip(padded, prompts):
        row[: len(ids)] = ids
    return padded, lengths


def generate(
    target: types.Target,
    prompts: Sequence[str | Sequence[int]],
    *,
    drafter: types.Drafter | tuple[types.BoundDrafter, Any] | None = None,
    verifier: types.Verifier = decode_lib.REJECTION,
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
    seed: int | Sequence[int] = 0,
    chat: bool = False,
    system: str | None = None,
) -> Generation:
    """Generate for a batch of prompts. Where an argument takes a sequence, it has one entry per prompt.

    Args:
      target: the model.
      prompts: texts or token ids.
      drafter: settings, or what their `build(target)` returned (which spares loading the draft again); None decodes
        plainly.
      verifier: which drafts stand.
      max_new_tokens: token budget.
      temperature, top_k, top_p, min_p: see `sampling.make`.
      stop_ids: in addition to the target's own.
      seed: see `row_keys`.
      chat, system: see `encode`.

    Raises:
      ValueError: any setting or prompt that cannot be decoded, before anything is compiled.
    """
    arguments, keywords = _prepare(
        target,
        prompts,
        drafter,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop_ids=stop_ids,
        seed=seed,
        chat=chat,
        system=system,
    )
    return collect(target, decode_lib.decode(*arguments, verifier=verifier, **keywords))


def _prepare(
    target,
    prompts,
    drafter,
    *,
    max_new_tokens=128,
    stop_ids=(),
    seed=0,
    chat=False,
    system=None,
    **filters,
) -> tuple[tuple, dict[str, Any]]:
    """What `decode.decode` and `decode.stream` take, without the verifier."""
    encoded = encode(target, prompts, chat=chat, system=system)
    batch = len(encoded)
    own, stop_ids = list(target.stop_ids), list(stop_ids)
    per_row = any(isinstance(ids, Iterable) for ids in stop_ids)
    sampling = sampling_lib.make(
        batch,
        max_new_tokens=max_new_tokens,
        stop_ids=[own + list(ids) for ids in stop_ids] if per_row else own + stop_ids,
        **filters,
    )
    if drafter is None:
        drafter = drafters.Autoregressive()
    bound, draft = drafter if isinstance(drafter, tuple) else drafter.build(target)
    padded, lengths = pad(encoded)
    arguments = types.Params(target.model, draft), row_keys(seed, batch), jnp.asarray(padded), jnp.asarray(lengths)
    return arguments, dict(drafter=bound, sampling=sampling, max_new_tokens=int(np.max(max_new_tokens)))


@dataclasses.dataclass(frozen=True)
class Piece:
    """What `stream` yields: one token of one row.

    row:    index of the prompt.
    token:  its id; None for what is left of an answer that ends within a character.
    text:   characters that are complete with it, perhaps none; None for a target without a tokenizer.
    origin: how it came, an entry of `decode.ORIGINS`.
    """

    row: int
    token: int | None
    text: str | None
    origin: str


def stream(
    target: types.Target,
    prompts: Sequence[str | Sequence[int]],
    *,
    drafter: types.Drafter | tuple[types.BoundDrafter, Any] | None = None,
    verifier: types.Verifier = decode_lib.REJECTION,
    **settings: Any,
) -> Iterator[list[Piece] | Generation]:
    """Like `generate`, but yields the pieces of each block as it lands; the last item is the `Generation`.

    Args:
      target: the model.
      prompts: texts or token ids.
      drafter: see `generate`.
      verifier: which drafts stand.
      **settings: the others of `generate`.

    Raises:
      ValueError: see `generate`; raised by the call, not by the first item.
    """
    arguments, keywords = _prepare(target, prompts, drafter, **settings)
    return _pieces(target, decode_lib.stream(*arguments, verifier=verifier, **keywords), len(prompts))


def _pieces(target, blocks, num_rows: int) -> Iterator[list[Piece] | Generation]:
    decoders = [target.tokenizer.stream_decoder() if target.tokenizer else None for _ in range(num_rows)]
    last_origin = [decode_lib.ORIGINS[decode_lib.PREFILL]] * num_rows
    for block in blocks:
        if isinstance(block, types.DecodeOutput):
            left = [decoder.finish() if decoder else "" for decoder in decoders]
            yield [Piece(row, None, text, last_origin[row]) for row, text in enumerate(left) if text]
            yield collect(target, block)
            return
        pieces = []
        for emitted in block:
            for token, origin in zip(emitted.tokens, emitted.origins):
                decoder = decoders[emitted.row]
                pieces.append(Piece(emitted.row, token, decoder.push([token]) if decoder else None, origin))
                last_origin[emitted.row] = origin
        yield pieces


def collect(target: types.Target, output: types.DecodeOutput) -> Generation:
    """What `decode` returned, as Python lists and text."""
    output = jax.device_get(output)
    prompt_lengths = np.argmax(output.origin != decode_lib.PROMPT, axis=1)  # prefill always emits a token
    spans = list(zip(prompt_lengths, output.lengths))
    tokens = [row[a:b].tolist() for row, (a, b) in zip(output.tokens, spans)]
    return Generation(
        texts=None if target.tokenizer is None else [target.tokenizer.decode(ids) for ids in tokens],
        tokens=tokens,
        origins=[[decode_lib.ORIGINS[i] for i in row[a:b]] for row, (a, b) in zip(output.origin, spans)],
        finish_reasons=[decode_lib.FINISH_REASONS[i] for i in output.finish_reason],
        statistics=metrics.summarize(output.acceptance, output.lengths - prompt_lengths),
    )
