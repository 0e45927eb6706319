"""Packages that jspec can do without: imported where they are used, the missing named with the extra that has them."""

from __future__ import annotations

import importlib
import types


def require(module: str, extra: str = "weights") -> types.ModuleType:
    """Import `module`.

    Raises:
      ValueError: it is not installed; the message gives the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise  # the package is there and itself lacks something: that is another fault
        raise ValueError(f"{package} is not installed; it comes with: pip install 'jspec[{extra}]'") from error
