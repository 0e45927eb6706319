"""Config files: YAML and dotted overrides in, frozen dataclasses out.

    config = load(Benchmark, "configs/quickstart.yaml", ["drafter.gamma=7"])

A config class is a plain frozen dataclass; its fields are the schema, its `__post_init__` the range checks. Nothing of
pydantic touches it, so a drafter stays a core class that hashes by value. A field annotated `types.Drafter` or
`types.Verifier` is chosen by `kind` from a registry:

    drafter: {kind: standard, gamma: 4, draft: {layers: 8}}

and `drafter: prompt_lookup` is short for a kind with its defaults. Keys left out keep the field's default, also inside
a nested dataclass. OmegaConf reads the YAML and its `${interpolations}`; this file walks the dataclasses, so that
unknown keys and kinds can name their nearest neighbour; pydantic checks the values, strictly and through JSON (`true`
is no integer, a list becomes a tuple). All faults of a file are reported together, one line each.

A file can offer alternatives, chosen by a top-level key such as `scale`: see `config_files`.

Both libraries are imported where they are used: the `experiments` extra.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import types as python_types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jspec import config_files, extras
from jspec.config_files import ConfigError, nearest, show

T = TypeVar("T")

# Annotation of a field -> the classes it may hold, by kind.
Registries = Mapping[Any, Mapping[str, type]]

_FAULT = object()  # stands for a value that could not be read


def default_registries() -> Registries:
    """The registered drafters and verifiers."""
    from jspec import drafters, types, verify

    return {types.Drafter: drafters.REGISTRY, types.Verifier: verify.REGISTRY}


def load(
    cls: type[T], path: str | pathlib.Path, overrides: Sequence[str] = (), registries: Registries | None = None
) -> T:
    """Read a YAML file, apply dotted overrides in order, resolve interpolations, and build `cls`.

    Args:
      cls: a frozen dataclass.
      path: the YAML file.
      overrides: `dotted.key=value`; the value is YAML and replaces what stood there. Numbers index lists.
      registries: annotation -> kind -> class; None means the registered drafters and verifiers.

    Raises:
      ConfigError: the file, an override or a value is at fault.
      ImportError: the `experiments` extra is missing.
    """
    content, keys = config_files.read(path, overrides)
    texts = {key: override.partition("=")[2] for key, override in keys.items()}
    reader = _Reader(default_registries() if registries is None else registries, texts)
    config = reader.read(cls, content, ())
    _raise_faults(reader.faults, str(path), keys)
    return config


def parse(cls: type[T], mapping: Mapping[str, Any], registries: Registries | None = None, source: str = "config") -> T:
    """Build `cls` from plain data, as `load` does from a file.

    Args:
      cls: a frozen dataclass.
      mapping: nested mappings, lists and scalars.
      registries: as for `load`.
      source: what errors call the mapping.

    Raises:
      ConfigError: a value is at fault.
      ImportError: the `experiments` extra is missing.
    """
    reader = _Reader(default_registries() if registries is None else registries)
    config = reader.read(cls, mapping, ())
    _raise_faults(reader.faults, source, {})
    return config


def as_mapping(config: Any, registries: Registries | None = None) -> dict[str, Any]:
    """The config as plain data with every default written out, and a `kind` for every registered class."""
    return _plain(config, _kinds(default_registries() if registries is None else registries))


def dump(config: Any, registries: Registries | None = None) -> str:
    """The fully resolved config as YAML; `load` gives an equal config back."""
    omegaconf = extras.require("omegaconf", "experiments")

    def escape(value):
        if isinstance(value, str):
            return value.replace("${", "\\${")
        if isinstance(value, dict):
            return {key: escape(item) for key, item in value.items()}
        return [escape(item) for item in value] if isinstance(value, list) else value

    content = omegaconf.OmegaConf.create(escape(as_mapping(config, registries)))
    return omegaconf.OmegaConf.to_yaml(content)


def config_hash(config: Any, registries: Registries | None = None, ignore: Sequence[str] = ()) -> str:
    """Ten hex digits over the canonical JSON of the resolved config.

    Args:
      config: any config.
      registries: as for `load`.
      ignore: top-level keys that do not change what is computed, such as the run folder.
    """
    content = {key: value for key, value in as_mapping(config, registries).items() if key not in ignore}
    text = json.dumps(_canonical(content), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


# Reading values by annotation.


@dataclasses.dataclass(frozen=True)
class _Fault:
    path: tuple
    text: str


class _Reader:
    """Walks plain data along a dataclass's annotations and collects every fault on the way."""

    def __init__(self, registries: Registries, texts: Mapping[tuple, str] | None = None):
        self.registries = registries
        self.texts = texts or {}  # path -> the value of an override as it was typed
        self.kinds = _kinds(registries)
        self.faults: list[_Fault] = []

    def fault(self, path: tuple, text: str) -> Any:
        self.faults.append(_Fault(path, text))
        return _FAULT

    def read(self, annotation: Any, value: Any, path: tuple, default: Any = None) -> Any:
        """The value as the annotation wants it, or `_FAULT`. `default` fills the gaps of a mapping of its class."""
        bare = _bare(annotation)
        if not self._structured(bare):
            return self._read_leaf(annotation, value, path)
        if _is_registry(bare, self.registries):
            return self._read_kind(bare, value, path, default)
        if dataclasses.is_dataclass(bare):
            return self._read_dataclass(bare, value, path, default)
        origin, args = typing.get_origin(bare), typing.get_args(bare)
        if origin in (typing.Union, python_types.UnionType):
            return self._read_union(args, value, path, default)
        if origin is list or (origin is tuple and args[1:] == (...,)):
            if not isinstance(value, list | tuple):
                return self.fault(path, f"expected a list, got {show(value)}")
            items = [self.read(args[0], item, (*path, i)) for i, item in enumerate(value)]
            return _FAULT if any(item is _FAULT for item in items) else origin(items)
        if origin is dict:
            if not isinstance(value, Mapping):
                return self.fault(path, f"expected a mapping, got {show(value)}")
            items = {str(key): self.read(args[1], item, (*path, key)) for key, item in value.items()}
            return _FAULT if any(item is _FAULT for item in items.values()) else items
        raise TypeError(f"{'.'.join(map(str, path))}: config fields cannot be annotated {annotation}")

    def _structured(self, annotation: Any) -> bool:
        """Whether a dataclass is somewhere inside; everything else is pydantic's."""
        bare = _bare(annotation)
        if _is_registry(bare, self.registries) or dataclasses.is_dataclass(bare):
            return True
        return typing.get_origin(bare) is not typing.Literal and any(map(self._structured, typing.get_args(bare)))

    def _read_kind(self, annotation: Any, value: Any, path: tuple, default: Any) -> Any:
        registry = self.registries[annotation]
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, Mapping):
            return self.fault(path, f"expected {self._describe(annotation)}, got {show(value)}")
        kind = value.get("kind", self.kinds.get(type(default)))
        if kind is None:
            return self.fault((*path, "kind"), f"missing; {nearest('', registry)}")
        if not isinstance(kind, str) or kind not in registry:
            return self.fault((*path, "kind"), f"unknown kind {show(kind)}; {nearest(str(kind), registry)}")
        return self._read_dataclass(registry[kind], value, path, default)

    def _read_dataclass(self, cls: type, value: Any, path: tuple, default: Any) -> Any:
        if not isinstance(value, Mapping):
            return self.fault(path, f"expected {self._describe(cls)}, got {show(value)}")
        fields = _fields(cls)
        if "kind" not in fields and cls in self.kinds and value.get("kind") == self.kinds[cls]:
            value = {key: item for key, item in value.items() if key != "kind"}
        unknown = [key for key in value if key not in fields]
        for key in unknown:
            self.fault((*path, key), f"unknown key; {nearest(str(key), fields)}")
        settings = {}
        for name, (field, annotation) in fields.items():
            field_default = getattr(default, name) if type(default) is cls else _default(field)
            if name in value:
                settings[name] = self.read(annotation, value[name], (*path, name), field_default)
            elif type(default) is cls:
                settings[name] = field_default
            elif field_default is dataclasses.MISSING:
                settings[name] = self.fault((*path, name), f"missing; expected {self._describe(annotation)}")
        if unknown or any(item is _FAULT for item in settings.values()):
            return _FAULT
        try:
            return cls(**settings)
        except ValueError as error:
            text = " ".join(str(error).split())
            subject = re.match(r"\W*(\w*)", text).group(1)  # "gamma -1 is negative" is about gamma
            return self.fault((*path, subject) if subject in fields else path, text)

    def _read_union(self, members: tuple, value: Any, path: tuple, default: Any) -> Any:
        structured = [member for member in members if self._structured(member)]
        leaves = [member for member in members if not self._structured(member)]
        if isinstance(value, Mapping):
            able = [member for member in structured if self._takes_mapping(member)]
            # Several classes: the one that knows most of the keys gives the most useful faults.
            able.sort(key=lambda member: -sum(key in self._keys(member) for key in value))
        elif isinstance(value, list | tuple):
            able = [member for member in structured if not self._takes_mapping(member)]
        else:
            able = [m for m in structured if isinstance(value, str) and _is_registry(_bare(m), self.registries)]
            able = [] if str in leaves else able
        if able:
            return self.read(able[0], value, path, default)
        if not leaves:
            return self.fault(path, f"expected {self._describe(typing.Union[members])}, got {show(value)}")  # noqa: UP007
        others = tuple(self._describe(member) for member in structured)
        return self._read_leaf(typing.Union[tuple(leaves)], value, path, others)  # noqa: UP007

    def _takes_mapping(self, annotation: Any) -> bool:
        bare = _bare(annotation)
        is_class = _is_registry(bare, self.registries) or dataclasses.is_dataclass(bare)
        return is_class or typing.get_origin(bare) is dict

    def _keys(self, annotation: Any) -> Iterable[str]:
        bare = _bare(annotation)
        if _is_registry(bare, self.registries):
            return ("kind",)
        return _fields(bare) if dataclasses.is_dataclass(bare) else ()

    def _read_leaf(self, annotation: Any, value: Any, path: tuple, others: tuple[str, ...] = ()) -> Any:
        """Let pydantic check a value. `others` describes what else would have been welcome at this place."""
        typed = self.texts.get(tuple(map(str, path)))
        if typed is not None and value is not None and _takes_text(annotation):
            value = typed  # a sentence with a colon reads as a YAML mapping, a number as a number
        try:
            text = json.dumps(value)
        except TypeError:
            return self.fault(path, f"expected plain data, got a {type(value).__name__}")
        try:
            return _adapter(annotation).validate_json(text, strict=True)
        except extras.require("pydantic", "experiments").ValidationError as errors:
            expected: dict[tuple, list[str]] = {}
            for error in errors.errors():
                # The location of a union's error ends with the member's name, which is no place in the value.
                expected.setdefault(_follow(value, error["loc"]), []).append(_expectation(error))
        for place, wanted in expected.items():
            got = functools.reduce(lambda item, key: item[key], place, value)
            wanted = [*wanted, *(others if not place else ())]
            hint = f"; {nearest(got, _choices(annotation))}" if isinstance(got, str) and _choices(annotation) else ""
            self.fault((*path, *place), f"expected {' or '.join(dict.fromkeys(wanted))}, got {show(got)}{hint}")
        return _FAULT

    def _describe(self, annotation: Any) -> str:
        bare = _bare(annotation)
        if _is_registry(bare, self.registries):
            return f"a mapping with a kind ({', '.join(sorted(self.registries[bare]))})"
        if dataclasses.is_dataclass(bare):
            return f"a mapping ({', '.join(_fields(bare))})"
        if typing.get_origin(bare) in (typing.Union, python_types.UnionType):
            return " or ".join(map(self._describe, typing.get_args(bare)))
        if typing.get_origin(bare) is typing.Literal:
            return " or ".join(map(repr, typing.get_args(bare)))
        plain = {int: "an integer", float: "a number", bool: "a boolean", str: "a string", type(None): "null"}
        origin = typing.get_origin(bare) or bare
        return plain.get(bare) or {tuple: "a list", list: "a list", dict: "a mapping"}.get(origin) or str(bare)


def _bare(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _takes_text(annotation: Any) -> bool:
    bare = _bare(annotation)
    union = typing.get_origin(bare) in (typing.Union, python_types.UnionType)
    return bare is str or (union and str in typing.get_args(bare))


def _is_registry(annotation: Any, registries: Registries) -> bool:
    return isinstance(annotation, type) and annotation in registries


def _kinds(registries: Registries) -> dict[type, str]:
    return {cls: kind for registry in registries.values() for kind, cls in registry.items()}


@functools.cache
def _fields(cls: type) -> Mapping[str, tuple[dataclasses.Field, Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: (field, hints[field.name]) for field in dataclasses.fields(cls) if field.init}


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@functools.cache
def _adapter(annotation: Any) -> Any:
    pydantic = extras.require("pydantic", "experiments")
    return pydantic.TypeAdapter(annotation, config=pydantic.ConfigDict(allow_inf_nan=False))


def _follow(value: Any, location: tuple) -> tuple:
    """The part of a pydantic location that leads to a place in the value."""
    place = []
    for key in location:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            break
        place.append(key)
    return tuple(place)


def _expectation(error: Mapping[str, Any]) -> str:
    """What pydantic wanted, in the words of a YAML file."""
    plain = {
        "int_type": "an integer",
        "int_from_float": "an integer",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "a boolean",
        "string_type": "a string",
        "tuple_type": "a list",
        "list_type": "a list",
        "dict_type": "a mapping",
        "none_required": "null",
    }
    if error["type"] in ("too_long", "too_short", "missing"):  # of a list whose length is fixed
        bound = error.get("ctx", {}).get("max_length", error.get("ctx", {}).get("min_length"))
        return "more items" if bound is None else f"{bound} items"
    return plain.get(error["type"]) or error["msg"].removeprefix("Input should be ")


def _choices(annotation: Any) -> list[str]:
    """The strings a `Literal` anywhere in the annotation allows."""
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return [arg for arg in args if isinstance(arg, str)]
    return [choice for arg in args for choice in _choices(arg)]


# Plain data.


def _plain(value: Any, kinds: Mapping[type, str]) -> Any:
    if dataclasses.is_dataclass(value):
        fields = {name: _plain(getattr(value, name), kinds) for name in _fields(type(value))}
        kind = kinds.get(type(value))
        return fields if kind is None or "kind" in fields else {"kind": kind, **fields}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, kinds) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, kinds) for item in value]
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a config holds plain data; {value!r} is a {type(value).__name__}")


def _canonical(value: Any) -> Any:
    """Equal configs, one text: 1.0 and 1 are equal."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _raise_faults(faults: Sequence[_Fault], source: str, overrides: Mapping[tuple, str]) -> None:
    lines = []
    for fault in faults:
        path = tuple(map(str, fault.path))
        culprit = next((text for key, text in reversed(overrides.items()) if path[: len(key)] == key), None)
        where = f"{'.'.join(path)}: " if path else ""
        lines.append(f"{source}: {where}{fault.text}" + (f" (from the override {culprit})" if culprit else ""))
    if lines:
        raise ConfigError("\n".join(lines))
