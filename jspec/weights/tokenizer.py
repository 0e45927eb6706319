"""Text to token ids and back, whatever the checkpoint's format.

Special tokens written out in a prompt (`<|im_end|>` in a user's message) are read as special tokens, in plain text and
in chats alike. That is the default of transformers and what lets a prompt be given already templated; text from people
one does not trust has to be cleaned by the caller.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jspec import extras
from jspec.weights import chat_templates, gguf_tokenizers, references

Messages = Sequence[Mapping[str, Any]]

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """A tokenizer of the `tokenizers` library with what a language model adds to it.

    bos_id:   id of the beginning-of-sequence token, or None.
    add_bos:  whether the model wants it in front of every prompt.
    stop_ids: ids that end an answer: the union of what the checkpoint's files say.
    """

    def __init__(
        self,
        backend: Any,
        *,
        vocabulary: Sequence[str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        bos_id: int | None = None,
        add_bos: bool = False,
        stop_ids: Iterable[int] = (),
        chat_template: str | None = None,
        where: str = "the checkpoint",
    ):
        """Wrap a backend; `from_folder` and `from_gguf` read the rest from files.

        Args:
          backend: a `tokenizers.Tokenizer`.
          vocabulary: token strings by id; None asks the backend.
          special_tokens: `bos_token`, `eos_token`, ... for the chat template.
          bos_id, add_bos, stop_ids: see the class.
          chat_template: Jinja source, or None.
          where: what the messages call the origin.
        """
        # A tokenizer.json can carry the settings of somebody's training run.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        if vocabulary is None:
            by_string = backend.get_vocab(with_added_tokens=True)
            vocabulary = [""] * (max(by_string.values()) + 1)
            for token, index in by_string.items():
                vocabulary[index] = token
        self._vocabulary = list(vocabulary)
        self._special_tokens = dict(special_tokens or {})
        self.bos_id = bos_id
        self.add_bos = add_bos and bos_id is not None
        self.stop_ids = tuple(sorted(set(stop_ids)))
        self._template_source = chat_template
        self._template: chat_templates.ChatTemplate | None = None
        self._where = where

    @classmethod
    def from_folder(cls, folder: str | pathlib.Path) -> Tokenizer:
        """Read `tokenizer.json` and what lies beside it.

        The chat template is `chat_template.jinja`, else the one in `tokenizer_config.json`. BOS is wanted if
        `add_bos_token` says so, else if the tokenizer's own post-processor writes it.

        Raises:
          ValueError: no tokenizer.json, or a file that cannot be read.
        """
        library = extras.require("tokenizers", "weights")
        folder = pathlib.Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} is missing; tokenizers are read from tokenizer.json or a GGUF file")
        try:
            backend = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare exceptions
            raise ValueError(f"{path} is not a tokenizer: {error}") from error

        def optional(name):
            return references.read_json(folder / name) if (folder / name).is_file() else {}

        settings = optional("special_tokens_map.json") | optional("tokenizer_config.json")
        special = {}
        for key in ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token"):
            value = settings.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                special[key] = value
        bos_id = backend.token_to_id(special["bos_token"]) if "bos_token" in special else None
        stop = {backend.token_to_id(special["eos_token"])} if "eos_token" in special else set()
        for name in ("config.json", "generation_config.json"):
            ids = optional(name).get("eos_token_id")
            stop |= set(ids) if isinstance(ids, list) else {ids}
        add_bos = settings.get("add_bos_token")
        if add_bos is None and bos_id is not None:
            add_bos = backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]
        return cls(
            backend,
            special_tokens=special,
            bos_id=bos_id,
            add_bos=bool(add_bos),
            stop_ids=stop - {None},
            chat_template=_folder_template(folder, settings),
            where=str(folder),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], where: str | pathlib.Path = "GGUF metadata") -> Tokenizer:
        """Build from a GGUF file's metadata (`gguf_files.GgufFile.metadata`).

        Raises:
          ValueError: see `gguf_tokenizers.describe`.
        """
        described = gguf_tokenizers.describe(dict(metadata), where)
        return cls(
            described.backend,
            vocabulary=described.vocabulary,
            special_tokens=described.special_tokens,
            bos_id=described.bos_id,
            add_bos=described.add_bos,
            stop_ids=described.stop_ids,
            chat_template=described.chat_template,
            where=str(where),
        )

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows; the model's embedding may have more rows, as padding."""
        return len(self._vocabulary)

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` behind it, which is not to be changed."""
        return self._backend

    @property
    def special_tokens(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, ... as the chat template knows them."""
        return dict(self._special_tokens)

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template, or None."""
        return self._template_source

    def vocab(self) -> list[str]:
        """Token strings by id, as the vocabulary spells them; "" for ids that are only padding."""
        return list(self._vocabulary)

    def fingerprint(self) -> str:
        """Sha256 over the vocabulary without its padding, equal for two tokenizers whose ids mean the same."""
        return hashlib.sha256("\0".join(_strip(self._vocabulary)).encode()).hexdigest()

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """Token ids of a text.

        Args:
          text: special tokens in it are read as such.
          add_bos: start with BOS, unless the text already does; None does what the model wants.

        Raises:
          ValueError: BOS asked for and the tokenizer has none.
        """
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if add_bos and self.bos_id is None:
            raise ValueError(f"{self._where} names no BOS token")
        if (self.add_bos if add_bos is None else add_bos) and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids; ids beyond the vocabulary have none. Bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode([int(index) for index in ids], skip_special_tokens=skip_special)

    def chat_text(
        self, messages: str | Messages, system: str | None = None, add_generation_prompt: bool = True, **values: Any
    ) -> str:
        """The templated text of a conversation; see `chat`."""
        if self._template_source is None:
            raise ValueError(f"{self._where} has no chat template; use encode for plain text")
        if self._template is None:
            self._template = chat_templates.ChatTemplate(self._template_source, self._special_tokens)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        messages = [dict(message) for message in messages]
        if system is not None:
            if messages and messages[0].get("role") == "system":
                raise ValueError("a system prompt is given and the messages start with another")
            messages = [{"role": "system", "content": system}, *messages]
        return self._template.render(messages, add_generation_prompt, **values)

    def chat(
        self, messages: str | Messages, system: str | None = None, add_generation_prompt: bool = True, **values: Any
    ) -> list[int]:
        """Token ids of a conversation, through the checkpoint's chat template.

        BOS stands in front where the model wants it, once, whether or not the template writes it. (transformers leaves
        it to the template alone; for templates that forget it we follow llama.cpp.)

        Args:
          messages: `{"role": ..., "content": ...}` each, or one user's message as a string.
          system: a system prompt to put first.
          add_generation_prompt: end with the opening of the assistant's answer.
          **values: what else the template reads.

        Raises:
          ValueError: no chat template, or it refuses the messages.
        """
        return self.encode(self.chat_text(messages, system, add_generation_prompt, **values))

    def stream_decoder(self, skip_special: bool = True) -> StreamDecoder:
        """A decoder for ids that arrive a few at a time."""
        return StreamDecoder(self, skip_special)


class StreamDecoder:
    """Gives text out as ids come in; the pieces joined are `decode` of all ids.

    What later ids could still change is held back: an unfinished UTF-8 character, and, in vocabularies that spell bytes
    as tokens, a run of those (the library turns the whole run into U+FFFD if its end is not valid).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._given = 0  # characters

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids; returns the text that is now certain, possibly empty."""
        self._ids.extend(int(index) for index in ids)
        if not self._ids:
            return ""
        vocabulary, last = self._tokenizer._vocabulary, self._ids[-1]
        if last < len(vocabulary) and _BYTE_TOKEN.fullmatch(vocabulary[last]):
            return ""
        text = self._text()
        # A real U+FFFD waits for the next id too; it cannot be told from an unfinished character.
        return "" if text.endswith("\ufffd") else self._give(text)

    def finish(self) -> str:
        """The rest, once no more ids come."""
        return self._give(self._text())

    def _text(self) -> str:
        # All of it each time: a decoder may strip or join at the start of what it is given, so pieces do not add up.
        # Decoding 1000 tokens takes some 0.2 ms.
        return self._tokenizer.decode(self._ids, self._skip_special)

    def _give(self, text: str) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece


def same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Check that a draft's ids mean the target's tokens. Either may have padding, the target also more tokens.

    Raises:
      ValueError: naming the first id that differs.
    """
    expected, found = _strip(target.vocab()), _strip(draft.vocab())
    expected += [""] * (len(found) - len(expected))
    for index, (ours, theirs) in enumerate(zip(expected, found, strict=False)):
        if ours != theirs:
            raise ValueError(
                f"target and draft vocabularies differ at id {index}: {ours!r} in the target, {theirs!r} in the draft"
            )


def _strip(vocabulary: list[str]) -> list[str]:
    end = len(vocabulary)
    while end and not vocabulary[end - 1]:
        end -= 1
    return vocabulary[:end]


def _folder_template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        # Several, by name: one for tools, one for retrieval; `default` is the conversation.
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template
