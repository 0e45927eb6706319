"""Config files as plain data: YAML, overrides, alternatives and interpolations, before anything is checked.

A file can offer alternatives, each a set of values that is merged over the rest when a top-level key says its name:

    scale: small
    choices:
      scale:
        small: {target: {layers: 2}}
        large: {target: {layers: 40}, batch: 8}

Mappings merge key by key, anything else is replaced; several keys are merged in the order of `choices`. `scale=large`
on the command line chooses, and all other overrides change what was chosen.
"""

from __future__ import annotations

import difflib
import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jspec import extras

_CHOICES = "choices"
_OVERRIDE = re.compile(r"(?P<key>[A-Za-z_][\w-]*(\.[\w-]+)*)=(?P<value>.*)", re.DOTALL)


class ConfigError(ValueError):
    """A config that cannot be used. One line per fault: file, dotted path, what was expected, what came."""


def nearest(name: str, known: Iterable[str]) -> str:
    """How an error ends: the nearest valid name, or all of them when none is near."""
    known = sorted(known)
    matches = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {matches[0]!r}?" if matches else f"known: {', '.join(known) or 'none'}"


def show(value: Any) -> str:
    """A value as messages quote it, cut when it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def read(path: str | pathlib.Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """Read a file, choose its alternatives, apply dotted overrides in order and resolve interpolations.

    Args:
      path: the YAML file.
      overrides: `dotted.key=value`.

    Returns:
      The content, and each override by its path.

    Raises:
      ConfigError: the file or an override is at fault.
      ImportError: the `experiments` extra is missing.
    """
    content = _read_yaml(path)
    offered = content.get(_CHOICES)
    choosing = lambda override: re.split("[.=]", override)[0] in {_CHOICES, *(offered or ())}
    keys = {}
    for override in sorted(overrides, key=lambda override: not choosing(override)):  # choosing ones first
        if _CHOICES in content and not choosing(override):
            content = _choose(content, path)
        keys[_override(content, override)] = override
    return _resolve(_choose(content, path), path), keys


def _read_yaml(path: str | pathlib.Path) -> dict:
    omegaconf, yaml = extras.require("omegaconf", "experiments"), extras.require("yaml", "experiments")
    try:
        content = omegaconf.OmegaConf.create(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a UTF-8 text file") from error
    except (yaml.YAMLError, omegaconf.errors.OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {_yaml_problem(error)}") from error
    if not isinstance(content, omegaconf.DictConfig):
        raise ConfigError(f"{path}: expected a mapping at the top, got a list")
    return omegaconf.OmegaConf.to_container(content, resolve=False)


def alternatives(path: str | pathlib.Path) -> dict[str, tuple[str, ...]]:
    """Names of the alternatives that a file offers, by key; see the module's docstring.

    Raises:
      ConfigError: the file is at fault.
    """
    return {key: tuple(offered) for key, offered in _offered(_read_yaml(path), path).items()}


def _offered(content: dict, path: str | pathlib.Path) -> dict[str, dict[str, Any]]:
    choices = content.get(_CHOICES) or {}
    if not isinstance(choices, dict) or not all(isinstance(offered, dict) and offered for offered in choices.values()):
        raise ConfigError(f"{path}: {_CHOICES}: expected a mapping of keys to named alternatives")
    for key, offered in choices.items():
        for name, values in offered.items():
            if not isinstance(values, dict | None):
                raise ConfigError(f"{path}: {_CHOICES}.{key}.{name}: expected a mapping, got {show(values)}")
    return choices


def _choose(content: dict, path: str | pathlib.Path) -> dict:
    """The content with the alternatives merged in that its keys name."""
    choices = _offered(content, path)
    content = {key: value for key, value in content.items() if key != _CHOICES}
    for key, offered in choices.items():
        name = content.get(key)
        if not isinstance(name, str) or name not in offered:
            raise ConfigError(f"{path}: {key}: {show(name)} is not offered; {nearest(str(name), offered)}")
        content = _merge(content, offered[name] or {})
    return content


def _merge(below: Any, above: Any) -> Any:
    """`above` over `below`: mappings key by key, anything else replaced."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: _merge(below.get(key), value) for key, value in above.items()}


def _resolve(content: dict, path: str | pathlib.Path) -> dict:
    omegaconf = extras.require("omegaconf", "experiments")
    try:
        return omegaconf.OmegaConf.to_container(
            omegaconf.OmegaConf.create(content), resolve=True, throw_on_missing=True
        )
    except omegaconf.errors.OmegaConfBaseException as error:
        where = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        raise ConfigError(f"{path}: {where}{_yaml_problem(error)}") from error


def _yaml_problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    text = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return f"line {mark.line + 1}: not valid YAML: {text}" if mark else text


def _override(content: dict, override: str) -> tuple[str, ...]:
    """Write one override into plain data. Returns its path."""
    omegaconf, yaml = extras.require("omegaconf", "experiments"), extras.require("yaml", "experiments")
    match = _OVERRIDE.fullmatch(override)
    if match is None:
        raise ConfigError(f"override {override!r}: expected dotted.key=value")
    try:
        parsed = omegaconf.OmegaConf.from_dotlist([f"value={match['value']}"])
        value = omegaconf.OmegaConf.to_container(parsed, resolve=False)["value"]
    except (yaml.YAMLError, omegaconf.errors.OmegaConfBaseException) as error:
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {problem}") from error
    path = tuple(match["key"].split("."))
    node: Any = content
    for depth, key in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                place = ".".join(path[:depth])
                raise ConfigError(f"override {override!r}: {place} has items 0 to {len(node) - 1}, no {key!r}")
            key = int(key)
        elif not isinstance(node, dict):
            place = ".".join(path[:depth])
            raise ConfigError(f"override {override!r}: {place} holds {show(node)}, which has no keys")
        if last:
            node[key] = value
        elif isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[key]
    return path
