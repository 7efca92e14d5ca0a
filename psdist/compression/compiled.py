"""Kernels: functions on arrays that numba compiles for one signature each, ahead of their use.

For the servers' arithmetic and both sides' casts. Importing this module imports numba, which takes half a second: the
client does it in a thread, and only where a payload has 16 bits (``psdist.compression.payloads``).

Nothing is compiled at import. A kernel is compiled, or loaded from numba's cache beside its module, at its first call.
The lock of the interpreter is not held while a kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import numba
from numba import types

# Argument types. What is only read may be read-only memory at an odd address: a payload inside a received message.
FLOAT = types.float32
OUT = types.Array(FLOAT, 1, "C")
IN = types.Array(FLOAT, 1, "C", readonly=True, aligned=False)
OUT_BITS16 = types.Array(types.uint16, 1, "C")
IN_BITS16 = types.Array(types.uint16, 1, "C", readonly=True, aligned=False)
IN_BITS32 = types.Array(types.uint32, 1, "C", readonly=True, aligned=False)

_compile_lock = Lock()


class Kernel:
    """A function that is compiled for one signature, at its first call or by ``compile``.

    There is one signature for all combinations of writable, aligned and read-only arrays, so that nothing is compiled
    in the middle of training.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], result: Any = types.void) -> None:
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        #: The Python function.
        self.function = function
        self.signature = result(*arguments)
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        return (self._compiled or self.compile())(*arguments)

    def compile(self) -> Callable[..., Any]:
        """Compiles the function once, and returns it. Any thread may call this."""
        with _compile_lock:
            if self._compiled is None:
                self._compiled = self._compile()
            return self._compiled

    def _compile(self) -> Callable[..., Any]:
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        try:
            compiled = numba.njit([self.signature], cache=True, **options)(self.function)
        except RuntimeError:  # numba finds no directory that it may write its cache to
            compiled = numba.njit([self.signature], **options)(self.function)
        return compiled  # type: ignore[no-any-return]


def kernel(*arguments: Any, result: Any = types.void) -> Callable[[Callable[..., Any]], Kernel]:
    """A decorator that makes a function a Kernel of these argument types."""
    return lambda function: Kernel(function, arguments, result)
