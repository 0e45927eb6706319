"""Tokenizers described by GGUF metadata, built with the `tokenizers` library; and the metadata of a byte-level one.

Two kinds. `gpt2` is byte-level BPE with the merges in the file; `tokenizer.ggml.pre` names how text is cut before
merging, and a wrong cut gives wrong ids that still decode to the right text, so an unknown name is an error. `llama` is
SentencePiece's BPE: scores instead of merges, bytes for what the vocabulary lacks.

The cuts are those of llama.cpp (`src/llama-vocab.cpp`) and of the checkpoints' own tokenizer.json, which agree.
transformers 5.24 treats `smollm` as `gpt-2`: it then joins spaces before a number differently from the checkpoint's own
tokenizer, and we do not follow it.
"""

from __future__ import annotations

import enum
import json
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from jspec import extras


class TokenType(enum.IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Pre(NamedTuple):
    """One way of cutting.

    pattern:       pieces as a regular expression, or None for GPT-2's, which the library knows.
    digits:        every digit is a piece of its own, cut before the pattern sees the text.
    ignore_merges: a piece that is a token is taken whole, whatever the merges would make of it.
    add_bos:       whether a prompt starts with BOS if the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


# Contractions, words with one leading character, numbers, punctuation, line ends, spaces: the order matters.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_PATH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _cased(suffix: str) -> str:
    """Words cut where lower case turns into upper case."""
    return f"{_LEAD}{_UPPER}*{_LOWER}+{suffix}|{_LEAD}{_UPPER}+{_LOWER}*{suffix}"


_GPT2 = _Pre()
_DIGITS = _Pre(digits=True)
_LLAMA3 = _Pre("|".join((_CONTRACTION, _WORD, r"\p{N}{1,3}", _PUNCTUATION, _SPACE)), ignore_merges=True, add_bos=True)
_QWEN2 = _Pre("|".join((_CONTRACTION, _WORD, r"\p{N}", _PUNCTUATION, _SPACE)))
_TEKKEN = _Pre("|".join((_cased(""), r"\p{N}", _PATH, _SPACE)), ignore_merges=True, add_bos=True)
_GPT4O = _Pre("|".join((_cased(_CONTRACTION + "?"), r"\p{N}{1,3}", _PATH, _SPACE)))

PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}

# What the chat template calls the special tokens, and what the metadata does.
_SPECIAL_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# `tokenizer.ggml.model` of files without a tokenizer.
NO_VOCABULARY = ("none", "no_vocab")

# Metadata keys of ids that end an answer.
_ENDS = ("eos", "eot", "eom")

# How models spell the end of a turn, for older files that name only the end of the text.
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


class Described(NamedTuple):
    """What a file says of its tokenizer.

    backend:        a `tokenizers.Tokenizer`.
    vocabulary:     token strings by id; "" where the file has only padding.
    special_tokens: `bos_token`, `eos_token`, ... as the chat template knows them.
    bos_id:         None when the file names none.
    stop_ids:       ends of text and of turn.
    add_bos:        whether a prompt starts with BOS.
    chat_template:  None when the file holds none.
    """

    backend: Any
    vocabulary: list[str]
    special_tokens: dict[str, str]
    bos_id: int | None
    stop_ids: tuple[int, ...]
    add_bos: bool
    chat_template: str | None


def describe(metadata: dict[str, Any], where: Any) -> Described:
    """Build the tokenizer of a GGUF file.

    Args:
      metadata: of the file.
      where: its name, for messages.

    Raises:
      ValueError: a tokenizer model or pre-tokenizer that is not known, or lists of different lengths.
    """
    library = extras.require("tokenizers", "weights")
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError(f"{where}: metadata tokenizer.ggml.tokens is missing")
    kinds = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise ValueError(f"{where}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    if model == "gpt2":
        backend, add_bos = _byte_level(library, metadata, tokens, where)
    elif model == "llama":
        backend, add_bos = _sentencepiece(library, metadata, tokens, kinds, where)
    else:
        raise ValueError(f"{where}: tokenizer model {model!r} is not supported; known are gpt2, llama")
    _add_tokens(library, backend, tokens, kinds, model)

    special = {}
    for name, key in _SPECIAL_IDS.items():
        if (index := _special_id(metadata, key, len(tokens))) is not None:
            special[name] = tokens[index]
    bos_id = _special_id(metadata, "bos", len(tokens))
    return Described(
        backend=backend,
        vocabulary=["" if kind == TokenType.UNUSED else token for token, kind in zip(tokens, kinds, strict=True)],
        special_tokens=special,
        bos_id=bos_id,
        stop_ids=_stop_ids(metadata, tokens, kinds),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)) and bos_id is not None,
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _special_id(metadata, key: str, vocab_size: int) -> int | None:
    """A special token's id; None where the file names none, for which some write an id outside the vocabulary."""
    index = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return index if index is not None and 0 <= index < vocab_size else None


def stated_stop_ids(metadata: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The ids that a file says end an answer, in order."""
    return tuple(sorted({_special_id(metadata, key, vocab_size) for key in _ENDS} - {None}))


def _stop_ids(metadata, tokens, kinds) -> tuple[int, ...]:
    found = set(stated_stop_ids(metadata, len(tokens)))
    if "tokenizer.ggml.eot_token_id" not in metadata:
        ids = _ids(tokens)
        found |= {ids[token] for token in _END_OF_TURN if token in ids and kinds[ids[token]] == TokenType.CONTROL}
    return tuple(sorted(found))


def _ids(tokens: list[str]) -> dict[str, int]:
    """Ids by string; of a string that is there twice the first, which is the one llama.cpp's converter meant."""
    return {token: index for index, token in reversed(list(enumerate(tokens)))}


def _byte_level(library, metadata, tokens, where):
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        warnings.warn(f"{where} names no pre-tokenizer (tokenizer.ggml.pre); GPT-2's is used", stacklevel=4)
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"{where}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; known are {', '.join(PRE_TOKENIZERS)}"
        )
    pre = PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    try:
        model = library.models.BPE(vocab=_ids(tokens), merges=merges, fuse_unk=False, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"{where}: the merges do not fit the tokens: {error}") from error
    backend = library.Tokenizer(model)
    backend.pre_tokenizer = _cut(library, pre)
    backend.decoder = library.decoders.ByteLevel()
    return backend, pre.add_bos


def _cut(library, pre: _Pre):
    cuts = library.pre_tokenizers
    steps = [cuts.Digits(individual_digits=True)] if pre.digits else []
    if pre.pattern is not None:
        steps.append(cuts.Split(library.Regex(pre.pattern), behavior="isolated"))
    return cuts.Sequence([*steps, cuts.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None)])


def _sentencepiece(library, metadata, tokens, kinds, where):
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ValueError(
            f"{where}: tokenizer.ggml.scores has {len(scores or [])} entries for {len(tokens)} tokens; "
            "SentencePiece's merges follow from the scores"
        )
    ids = _ids(tokens)
    usable = {token for token, index in ids.items() if kinds[index] in (TokenType.NORMAL, TokenType.USER_DEFINED)}
    merges = []
    for token in usable:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in usable and right in usable:
                # Best score first; SentencePiece merges by the score of what comes out.
                merges.append((-scores[ids[token]], ids[left], ids[right], left, right))
    merges.sort()
    unknown = _special_id(metadata, "unknown", len(tokens))
    model = library.models.BPE(
        vocab=ids,
        merges=[merge[3:] for merge in merges],
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = library.Tokenizer(model)
    # As SentencePiece does it: one space in front whatever the text starts with, and again after a special token.
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps = [library.normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = library.normalizers.Sequence([*steps, library.normalizers.Replace(" ", "▁")])
    decoders = library.decoders
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend, True


def _add_tokens(library, backend, tokens, kinds, model):
    """Tokens that are matched whole in the text, before anything is cut."""
    special, plain = [], []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == TokenType.CONTROL or (kind == TokenType.UNKNOWN and model == "llama"):
            special.append(library.AddedToken(token, normalized=False, special=True))
        elif kind == TokenType.USER_DEFINED:
            plain.append(library.AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def metadata(tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> dict[str, Any]:
    """What a GGUF file says of a byte-level BPE tokenizer: the inverse of `describe`.

    Ids without a token are written as padding up to the model's vocabulary, which llama.cpp takes for the length of the
    list. GGUF has no place for a normaliser; NFC, which Qwen's tokenizers have, is left out with a warning, as
    llama.cpp's converter leaves it out without.

    Args:
      tokenizer: a `weights.tokenizer.Tokenizer`, or None for bare token ids.
      vocab_size: of the model.
      stop_ids: ids that end an answer; three of them have a place.

    Raises:
      ValueError: a tokenizer that is not byte-level BPE, cuts text as none of `PRE_TOKENIZERS` does, or has something
        else that GGUF cannot say; more tokens than `vocab_size`; too many stop ids.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": NO_VOCABULARY[0], **_end_ids([], (), stop_ids, None)}
    library = extras.require("tokenizers", "weights")
    content = json.loads(tokenizer.backend.to_str())
    _check_byte_level(content)
    if content["normalizer"] is not None:
        warnings.warn(
            "GGUF has no place for the tokenizer's NFC normaliser; text that is not composed gets other ids",
            stacklevel=3,
        )
    tokens = tokenizer.vocab()
    if len(tokens) > vocab_size:
        raise ValueError(f"the tokenizer has {len(tokens)} tokens, the model only {vocab_size}; GGUF lists the model's")
    kinds = [TokenType.NORMAL if token else TokenType.UNUSED for token in tokens]
    for added in content["added_tokens"]:
        kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    kinds += [TokenType.UNUSED] * (vocab_size - len(tokens))
    tokens += [""] * (vocab_size - len(tokens))
    written = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_name(library, content),
        "tokenizer.ggml.tokens": [token or f"[PAD{index}]" for index, token in enumerate(tokens)],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": tokenizer.add_bos,
    }
    special = {name: tokenizer.backend.token_to_id(token) for name, token in tokenizer.special_tokens.items()}
    for name, key in _SPECIAL_IDS.items():
        if special.get(name) is not None:
            written[f"tokenizer.ggml.{key}_token_id"] = special[name]
    written |= _end_ids(tokens, kinds, stop_ids, special.get("eos_token"))
    if tokenizer.chat_template is not None:
        written["tokenizer.chat_template"] = tokenizer.chat_template
    return written


def _end_ids(tokens, kinds, stop_ids: Sequence[int], eos: int | None) -> dict[str, int]:
    """Metadata that names the ids that end an answer, `eos` first where it is one of them."""
    ends = {index for index, kind in enumerate(kinds) if kind == TokenType.CONTROL and tokens[index] in _END_OF_TURN}
    ordered = sorted(stop_ids, key=lambda index: (index != eos, index not in ends, index))
    if len(ordered) > len(_ENDS):
        raise ValueError(f"GGUF names at most {len(_ENDS)} tokens that end an answer, the model has {ordered}")
    if len(ordered) == 1 and ends - set(ordered):
        ordered *= 2  # a reader that is told no end of turn looks for one among the tokens
    return {f"tokenizer.ggml.{key}_token_id": index for key, index in zip(_ENDS, ordered)}


def _check_byte_level(content: dict[str, Any]) -> None:
    """Refuse a tokenizer.json with anything that the metadata of byte-level BPE cannot say.

    Raises:
      ValueError: it has; all of it is named.
    """
    model, normalizer, decoder = content["model"], content["normalizer"], content["decoder"]
    found = []
    if model["type"] != "BPE" or (decoder or {}).get("type") != "ByteLevel" or model.get("byte_fallback"):
        found.append(f"a {model['type']} model that is not byte-level")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            found.append(f"{key} {model[key]!r}")
    if normalizer is not None and normalizer["type"] != "NFC":
        found.append(f"the normaliser {normalizer['type']}")
    for token in content["added_tokens"]:
        if flags := [flag for flag in ("lstrip", "rstrip", "single_word") if token[flag]]:
            found.append(f"the added token {token['content']!r} with {', '.join(flags)}")
    if found:
        raise ValueError(f"GGUF metadata is written for byte-level BPE; the tokenizer has {'; '.join(found)}")


def _pre_name(library, content: dict[str, Any]) -> str:
    """The kind of `PRE_TOKENIZERS` that cuts text as a tokenizer.json does."""
    blank = library.Tokenizer(library.models.BPE())
    steps, ignore_merges = _cut_steps(content["pre_tokenizer"]), bool(content["model"].get("ignore_merges"))
    for name, pre in PRE_TOKENIZERS.items():
        blank.pre_tokenizer = _cut(library, pre)
        alike = steps == _cut_steps(json.loads(blank.to_str())["pre_tokenizer"]) and ignore_merges == pre.ignore_merges
        if alike and name != "default":  # by which llama.cpp means something else
            return name
    raise ValueError(
        f"GGUF has no name for how the tokenizer cuts text, {json.dumps(steps)} with ignore_merges {ignore_merges}; "
        f"known are the cuts of {', '.join(PRE_TOKENIZERS)}"
    )


def _cut_steps(content: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a pre-tokenizer, without what changes offsets alone."""
    if content is None:
        return []
    if content["type"] == "Sequence":
        return [step for part in content["pretokenizers"] for step in _cut_steps(part)]
    return [{key: value for key, value in content.items() if key != "trim_offsets"}]
