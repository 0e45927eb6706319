"""Kinds: the names by which configs choose among classes."""

from __future__ import annotations

from collections.abc import Callable


def registering(registry: dict[str, type]) -> Callable[[str], Callable[[type], type]]:
    """A decorator `register(kind)` that enters a class under its kind, and gives it the attribute `kind`."""

    def register(kind: str) -> Callable[[type], type]:
        def add(cls: type) -> type:
            cls.kind = kind
            registry[kind] = cls
            return cls

        return add

    return register
