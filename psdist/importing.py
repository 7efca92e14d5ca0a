"""Quick imports of psdist's modules, which define hundreds of dataclasses.

``dataclass`` writes the methods of each class as text and compiles them one by one, which took a third of the start of
every process, and most of them are never called. While ``quickly`` is active, each is compiled at its first use. That
replaces a private function of ``dataclasses``; a Python without it imports as usual.

For psdist's own programs alone: in the process of a script the standard library stays as it is.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_compile: Final[Callable[..., Any] | None] = getattr(dataclasses, "_create_fn", None)


class _Method:
    """A method that is compiled, and put in the place of this object, when it is looked up.

    name, arguments, keywords: as ``dataclasses`` compiles it.
    """

    def __init__(self, name: str, *arguments: Any, **keywords: Any) -> None:
        self.__name__ = name
        self._given = arguments, keywords
        self._function: Any = None

    def __get__(self, instance: object | None, owner: type) -> Any:
        function = self._resolve()
        for one in owner.__mro__:
            if one.__dict__.get(self.__name__) is self:
                function.__qualname__ = f"{one.__qualname__}.{self.__name__}"
                setattr(one, self.__name__, function)
        return function.__get__(instance, owner)

    def __call__(self, *arguments: Any) -> Any:
        return self._resolve()(*arguments)  # ``dataclasses`` wraps the method ``__repr__``.

    def _resolve(self) -> Any:
        if self._function is None:
            assert _compile is not None
            arguments, keywords = self._given
            self._function = _compile(self.__name__, *arguments, **keywords)
        return self._function


@contextmanager
def quickly() -> Iterator[None]:
    """Import quickly within this block: dataclasses get their methods later, and garbage is not collected.

    Imported objects stay alive, so traversing them again and again would take a tenth of the start.
    """
    collects = gc.isenabled()
    gc.disable()
    if _compile is not None:
        dataclasses._create_fn = _Method  # type: ignore[attr-defined]  # private
    try:
        yield
    finally:
        if _compile is not None:
            dataclasses._create_fn = _compile  # type: ignore[attr-defined]
        if collects:
            gc.enable()
