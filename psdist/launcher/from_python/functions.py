"""Functions by import name, as ``module:qualname``: how a process finds the function of another.

Only names pass between the processes. So the function must be found by its name in a new process, which imports its
module again.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from types import ModuleType
from typing import Any, Final

from psdist.errors import ConfigurationError

_TO_FILE: Final = (
    "define it with def at the top level of a file, import it from there, and pass that function (in a notebook, a "
    "cell that begins with %%writefile work.py makes the file)"
)


def import_name(function: Callable[..., Any]) -> str:
    """Return ``module:qualname`` of a function. Raises ConfigurationError if no other process could import it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        raise ConfigurationError(
            f"an object of type {type(function).__name__} has no name to import it by: pass a function, and its "
            "arguments as args= and kwargs="
        )
    if "<" in name:  # <lambda>, <locals>
        raise ConfigurationError(f"{name} cannot be imported by name, since it is made by running code: {_TO_FILE}")
    if _find(sys.modules.get(module), name) != function:
        raise ConfigurationError(f"{module}.{name} is not the function that was passed, but another: {_TO_FILE}")
    return f"{_main_name(name) if module == '__main__' else module}:{name}"


def load(name: str) -> Callable[..., Any]:
    """Import the function of ``import_name``. Raises ConfigurationError if its module lacks it."""
    module, _, qualname = name.partition(":")
    function: Callable[..., Any] | None = _find(importlib.import_module(module), qualname)
    if function is None or not callable(function):
        raise ConfigurationError(
            f"there is no function {qualname} in module {module}, as a worker imports it: define it whenever the "
            "module is imported"
        )
    return function


def _find(module: ModuleType | None, name: str) -> Any:
    """Return an object of a module by its qualified name; None if there is none."""
    with suppress(AttributeError):
        return reduce(getattr, name.split("."), module)
    return None


def _main_name(name: str) -> str:
    """Return the name by which the program's main module can be imported. Raises ConfigurationError."""
    main = sys.modules["__main__"]
    if spec := getattr(main, "__spec__", None):  # python -m
        return str(spec.name)
    file = getattr(main, "__file__", None)
    if file is not None:
        stem: str = os.path.splitext(os.path.basename(file))[0]
        spec = importlib.machinery.PathFinder.find_spec(stem)
        if spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file):
            return stem
    raise ConfigurationError(f"{name} is defined in __main__, which other processes cannot import: {_TO_FILE}")
