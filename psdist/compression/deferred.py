"""Deferred access to numba, which is imported when the first kernel is compiled or loaded.

numba and its target take half a second and about 60 MB to import. A process with small vectors does without: numpy
does the work of its kernels (``compiled.Kernel``).

A function to be compiled refers to parts of numba, and to other compiled functions, as globals of its module. These
globals are ``Deferred`` until ``resolve`` replaces them with their values.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from threading import RLock
from types import CodeType, FunctionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_lock = RLock()
_hooks: list[Callable[[], None]] = []
_imported: list[Any] = []


class Deferred:
    """Placeholder for the result of ``make``, which is called at first use.

    Attributes of the placeholder, and results of calling it, are deferred as well.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: list[Any] = []

    @property
    def value(self) -> Any:
        """The value that this stands for. Thread-safe."""
        with _lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Deferred(lambda: getattr(self.value, name))

    def __call__(self, *arguments: Any) -> Any:
        return Deferred(lambda: self.value(*map(evaluate, arguments)))


class PartOfKernel(Deferred):
    """Function that is compiled into the kernels calling it. ``py_func`` is the plain function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.py_func = function
        super().__init__(lambda: numba.value.njit(error_model="numpy")(resolve(function)))


def evaluate(what: Any) -> Any:
    """Return the value of a Deferred; return anything else unchanged."""
    return what.value if isinstance(what, Deferred) else what


def resolve(function: F) -> F:
    """Replace deferred globals of the function's module with their values. Return ``function``. Thread-safe."""
    assert isinstance(function, FunctionType)
    for name in _names(function.__code__):
        if isinstance(one := function.__globals__.get(name), Deferred):
            function.__globals__[name] = one.value
    return function


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes used in a function and in the functions nested in it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def when_imported(hook: Callable[[], None]) -> None:
    """Call ``hook`` once numba is imported, before the first function is compiled."""
    with _lock:
        if _imported:
            hook()
        else:
            _hooks.append(hook)


def _import() -> Any:
    _imported.append(import_module("numba"))
    for hook in _hooks:
        hook()
    return _imported[0]


#: The numba module, and its types.
numba = Deferred(_import)
types = numba.types
