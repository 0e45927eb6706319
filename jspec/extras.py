"""Packages that jspec can do without: imported where they are used, the missing named with the extra that has them."""

from __future__ import annotations

import importlib
import importlib.util
import types


class MissingExtra(ImportError, ValueError):
    """A package that an extra would have brought is not installed."""


def require(module: str, extra: str) -> types.ModuleType:
    """Import `module`.

    Raises:
      MissingExtra: it is not installed; the message gives the command that installs it.
    """
    check(module, extra)
    return importlib.import_module(module)


def check(module: str, extra: str) -> None:
    """Find out whether `module` can be imported, without importing it.

    Raises:
      MissingExtra: as `require`.
    """
    package = module.partition(".")[0]
    try:
        found = importlib.util.find_spec(package) is not None
    except ValueError:  # a stand-in without a spec
        found = True
    if not found:
        raise MissingExtra(
            f"{package} is not installed; it comes with the extra {extra!r}: pip install -e '.[{extra}]'"
        )
