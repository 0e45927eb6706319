"""Chat templates: messages to the text a model was trained on.

A template is a Jinja program that comes with the checkpoint, so it runs in jinja2's immutable sandbox. The names and
filters it may use are those transformers offers (`apply_chat_template`, 5.24): `raise_exception`, `strftime_now`,
`tojson` without HTML escapes, `break` and `continue`, and the `generation` tag, which is transparent here.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jspec import extras


class ChatTemplate:
    """A compiled template with the special tokens it may name (`bos_token`, `eos_token`, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """Compile.

        Raises:
          ValueError: jinja2 is missing, or the template does not parse.
        """
        jinja2 = extras.require("jinja2", "weights")
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._failure = jinja2.TemplateError
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not parse: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **values: Any) -> str:
        """The text for `messages`.

        Args:
          messages: `{"role": ..., "content": ...}` each.
          add_generation_prompt: end with the opening of the assistant's answer.
          **values: what else the template reads (`tools`, `enable_thinking`, ...).

        Raises:
          ValueError: the template refuses the messages.
        """
        known = {"tools": None, "documents": None} | self._special_tokens | values
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **known)
        except (self._failure, TypeError, KeyError) as error:
            raise ValueError(f"the chat template does not take these messages: {error}") from error


def _environment():
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %} ... {% endgeneration %}`, which marks the assistant's words for training."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
