"""What kernels need of numba, which is imported when the first of them is compiled or loaded.

numba and its target take half a second to import, and some 60 MB. A process whose vectors are small does without:
numpy does the work of its kernels (``compiled.Kernel``).

A function that is to be compiled names what it needs of numba, and other compiled functions, as globals of its module.
These are ``Deferred`` until ``resolve`` puts what they stand for in their place.
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
    """Stands for what ``make`` returns, which is called when it is first needed. Its attributes and the results of
    calls are deferred, too."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: list[Any] = []

    @property
    def value(self) -> Any:
        """What this stands for. Any thread may ask for it."""
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
    """A function that is compiled into the kernels that call it. ``py_func`` is the function itself."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.py_func = function
        super().__init__(lambda: numba.value.njit(error_model="numpy")(resolve(function)))


def evaluate(what: Any) -> Any:
    """What ``what`` stands for; itself where it is not deferred."""
    return what.value if isinstance(what, Deferred) else what


def resolve(function: F) -> F:
    """Returns ``function`` when its module has what its deferred globals stand for. Several threads may do that."""
    assert isinstance(function, FunctionType)
    for name in _names(function.__code__):
        if isinstance(one := function.__globals__.get(name), Deferred):
            function.__globals__[name] = one.value
    return function


def _names(code: CodeType) -> set[str]:
    """The names of globals and attributes in a function, and in those that are defined in it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def when_imported(hook: Callable[[], None]) -> None:
    """Calls ``hook`` once numba is imported, before the first function is compiled."""
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


#: The module, and its types.
numba = Deferred(_import)
types = numba.types
