"""Training text by the target itself: prompts it writes, or given ones, and its answers.

A draft imitates its target, so the best text to learn from is the target's own (Medusa section 2.3.2, EAGLE-3 section
3.2). A chat model that is given nothing but the opening of a user's turn writes a plausible user's message; asked that,
it answers. Both go through one batch (`batching.serve`): a prompt that is finished becomes a request for its answer.

Sample i is a function of the settings, the seed and i: of which samples are made first, and of what was made before a
kill, it knows nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jspec import batching, types
from jspec.drafters import base
from jspec.training import data

_MARK = "\u241ejspec\u241e"  # stands for the user's message while its place in the template is looked for


@dataclasses.dataclass(frozen=True)
class OwnPrompts:
    """Prompts that the target writes itself.

    header:      what stands before a user's message; None takes it from the chat template.
    openings:    first words of the message, one drawn for each sample: they decide what kinds of question come.
    temperature, top_p: of the message. (A top-p below 1 sorts the vocabulary at every token, of every row.)
    max_tokens:  its budget; a message cut off there is asked as it is.
    """

    header: str | None = None
    openings: tuple[str, ...] = ("",)
    temperature: float = 0.8
    top_p: float = 1.0
    max_tokens: int = 64

    def __post_init__(self):
        if not self.openings:
            raise ValueError("openings is empty")
        base.check_count("max_tokens", self.max_tokens, 1)
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature} is below 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is not in (0, 1]")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the samples.

    own:            prompts by the target, or None.
    own_share:      of the samples, where prompts are given too.
    temperatures:   of answers, one drawn for each sample.
    top_p:          of answers at temperatures above 0.
    max_new_tokens: of an answer.
    max_prompt:     longest prompt, in tokens; longer ones are left out.
    rows:           of the batch.
    seed:           of everything drawn.
    """

    own: OwnPrompts | None = OwnPrompts()
    own_share: float = 0.5
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    top_p: float = 1.0
    max_new_tokens: int = 128
    max_prompt: int = 256
    rows: int = 32
    seed: int = 0

    def __post_init__(self):
        for name, smallest in (("max_new_tokens", 1), ("max_prompt", 1), ("rows", 1), ("seed", 0)):
            base.check_count(name, getattr(self, name), smallest)
        if not self.temperatures:
            raise ValueError("temperatures is empty")
        for temperature in self.temperatures:
            if not temperature >= 0:
                raise ValueError(f"temperatures {temperature} is below 0")
        if not 0 <= self.own_share <= 1:
            raise ValueError(f"own_share {self.own_share} is not between 0 and 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is not in (0, 1]")


def user_header(target: types.Target) -> str:
    """What the chat template writes before the first user's message.

    Raises:
      ValueError: the target has no chat template, or it does not show the message as it is.
    """
    where = target.provenance.reference
    template = getattr(target.tokenizer, "chat_text", None)
    if template is None or target.tokenizer.chat_template is None:
        raise ValueError(f"{where} has no chat template: give own.header")
    text = template(_MARK)
    if text.count(_MARK) != 1:
        raise ValueError(f"{where}: its chat template does not show the user's message once: give own.header")
    return text.partition(_MARK)[0]


class Synthesis:
    """Makes samples of one target."""

    def __init__(self, target: types.Target, settings: Settings, prompts: Sequence[Sequence[int]] = ()):
        """Check that everything fits; nothing is computed yet.

        Args:
          target: who answers.
          settings: of the samples.
          prompts: given ones, as token ids ready for an answer; those longer than `max_prompt` are left out.

        Raises:
          ValueError: there is nowhere to take prompts from, or they do not fit the target.
        """
        self._target, self._settings = target, settings
        self.left_out = sum(len(prompt) > settings.max_prompt for prompt in prompts)
        self._prompts = [tuple(map(int, prompt)) for prompt in prompts if len(prompt) <= settings.max_prompt]
        if settings.own is None and not self._prompts:
            raise ValueError(f"no prompts: own is null, and of {len(prompts)} given none is short enough")
        self._header: tuple[int, ...] = ()
        self.capacity = settings.max_prompt + settings.max_new_tokens
        if settings.own is not None:
            if target.tokenizer is None:
                raise ValueError("own: the target has no tokenizer; give prompts as token ids and set own to null")
            header = user_header(target) if settings.own.header is None else settings.own.header
            self._openings = [tuple(target.tokenizer.encode(header + opening)) for opening in settings.own.openings]
            longest = max(map(len, self._openings))
            if not min(map(len, self._openings)):
                raise ValueError("own.header and an opening are both empty: the target needs a token to start from")
            if longest > settings.max_prompt:
                raise ValueError(f"own: header and opening are {longest} tokens; max_prompt is {settings.max_prompt}")
            self.capacity = max(self.capacity, longest + settings.own.max_tokens)
        if self.capacity > target.model.config.max_positions:
            raise ValueError(
                f"prompt and answer may take {self.capacity} tokens; the target follows at most "
                f"{target.model.config.max_positions}"
            )

    def samples(self, numbers: Sequence[int], drafter: types.Drafter, verifier: Any) -> Iterator[list[data.Sample]]:
        """Make these samples, in the order in which they finish.

        A sample whose prompt came out empty or too long holds no tokens.

        Args:
          numbers: which.
          drafter: what proposes; the answers do not depend on it if the verifier is lossless.
          verifier: what decides.

        Yields:
          Samples finished since the last time.
        """
        bound, draft = drafter.build(self._target)
        requests = collections.deque(self._first(number) for number in numbers)
        answers = batching.serve(
            types.Params(self._target.model, draft),
            requests,
            drafter=bound,
            verifier=verifier,
            rows=self._settings.rows,
            width=self._settings.max_prompt,
            capacity=self.capacity,
            stop_ids=self._target.stop_ids,
        )
        for block in answers:
            finished = []
            for answer in block:
                stage, number = answer.request.name.split()
                if stage == "prompt":
                    prompt = self._asked(answer)
                    if prompt is not None:
                        # In front of prompts that wait: what is begun gets finished.
                        requests.appendleft(self._request("answer", int(number), prompt))
                        continue
                finished.append(_sample(int(number), answer if stage == "answer" else None))
            if finished:
                yield finished

    def _first(self, number: int) -> batching.Request:
        """The request that begins a sample."""
        if self._own(number):
            return self._request("prompt", number, self._drawn(number, "opening", self._openings))
        return self._request("answer", number, self._prompts[self._place(number) % len(self._prompts)])

    def _share(self) -> float:
        if self._settings.own is None:
            return 0.0
        return self._settings.own_share if self._prompts else 1.0

    def _own(self, number: int) -> bool:
        share = self._share()
        return int((number + 1) * share) > int(number * share)

    def _place(self, number: int) -> int:
        """Samples with given prompts before this one."""
        return number - int(number * self._share())

    def _seed(self, number: int, what: str) -> int:
        return zlib.crc32(f"{self._settings.seed}/{number}/{what}".encode())

    def _drawn(self, number: int, what: str, choices: Sequence[Any]) -> Any:
        return choices[int(np.random.default_rng(self._seed(number, what)).integers(len(choices)))]

    def _request(self, stage: str, number: int, tokens: Sequence[int]) -> batching.Request:
        settings = self._settings
        seed = self._seed(number, stage)
        name = f"{stage} {number}"
        if stage == "prompt":
            own = settings.own
            return batching.Request(
                name, tuple(tokens), seed, own.max_tokens, temperature=own.temperature, top_p=own.top_p
            )
        temperature = self._drawn(number, "temperature", settings.temperatures)
        return batching.Request(
            name, tuple(tokens), seed, settings.max_new_tokens, temperature=temperature, top_p=settings.top_p
        )

    def _asked(self, answer: batching.Answer) -> list[int] | None:
        """The prompt that a message of the target's makes; None if it is no use."""
        opening = self._settings.own.openings[self._openings.index(answer.request.tokens)]
        tokens = [token for token in answer.tokens if token not in self._target.stop_ids]
        text = (opening + self._target.tokenizer.decode(tokens)).strip()
        if not text:
            return None
        prompt = self._target.tokenizer.chat(text)
        return prompt if len(prompt) <= self._settings.max_prompt else None


def _sample(number: int, answer: batching.Answer | None) -> data.Sample:
    if answer is None:
        return data.Sample(number, np.zeros(0, np.int64), np.zeros(0, np.uint8))
    prompt = answer.request.tokens
    tokens = np.array([*prompt, *answer.tokens], np.int64)
    roles = np.repeat(np.array([data.PROMPT, data.ANSWER], np.uint8), [len(prompt), len(answer.tokens)])
    return data.Sample(number, tokens, roles)
