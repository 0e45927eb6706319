"""Which target a draft was trained for: written beside its weights, and checked when it is loaded.

A draft for another target, or for an older version of this one, decodes the same text and only loses the speed, so that
nothing else tells. Under a key of its own in config.json, which other engines pass over:

    "jspec": {"target_sha256": "..."}

and in a GGUF file's metadata under `jspec.target_sha256`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jspec import types

KEY, _SHA256 = "jspec", "target_sha256"  # of config.json
GGUF_KEY = f"{KEY}.{_SHA256}"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class WrongTarget(ValueError):
    """A draft that says it was trained for another target."""


def record(sha256: str | None) -> dict[str, Any]:
    """What config.json of a draft says of its target: nothing for weights that never were a file."""
    return {} if sha256 is None else {KEY: {_SHA256: sha256}}


def own_part(content: Mapping[str, Any], where: Any) -> Mapping[str, Any]:
    """What stands in a config.json under jspec's own key; empty if nothing does.

    Args:
      content: the parsed file.
      where: its name, for messages.

    Raises:
      ValueError: it is no object.
    """
    own = content.get(KEY, {})
    if not isinstance(own, Mapping):
        raise ValueError(f"{where}: {KEY} is {own!r}, expected an object")
    return own


def recorded(content: Mapping[str, Any], where: Any) -> str | None:
    """The sha256 of the target in a config.json, or None if it does not say.

    Args:
      content: the parsed file.
      where: its name, for messages.

    Raises:
      ValueError: what stands there is no digest.
    """
    sha256 = own_part(content, where).get(_SHA256)
    if sha256 is not None and not (isinstance(sha256, str) and _DIGEST.fullmatch(sha256)):
        raise ValueError(f"{where}: {KEY}.{_SHA256} is {sha256!r}, expected 64 hexadecimal digits")
    return sha256 and sha256.lower()


def check_trained_for(recorded: str | None, target: types.Target, where: Any, force: bool) -> None:
    """Refuse a draft that was trained for another target.

    A draft that does not say passes, and so does a target that never was a file: there is nothing to compare.

    Args:
      recorded: sha256 of the target that the draft was trained for, or None.
      target: the one it is to draft for.
      where: the draft, for messages.
      force: let it pass.

    Raises:
      WrongTarget: naming both digests.
    """
    own = target.provenance.sha256
    if force or recorded is None or own is None or recorded.lower() == own.lower():
        return
    raise WrongTarget(
        f"{where} was trained for the target with sha256 {recorded}; {target.provenance.reference} has {own}. It would "
        "decode the same text, most likely slower. If it is the same model in another file, set force"
    )
