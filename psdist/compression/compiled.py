"""Kernels: functions on arrays that numba compiles ahead of time, for one signature each.

They serve the servers' arithmetic and the codecs of both sides. Nothing is compiled at import, and numba is not
imported (``deferred``). The first call of a kernel compiles it, or loads it from numba's cache beside its module;
alternatively numpy interprets it until a caller compiles it. A compiled kernel runs without the interpreter lock.

Invariant: For one cache, no two processes compile the same kernel at the same time. One compiles it; the others wait
and load it. The lock is a file beside the cache, which the system releases when its owner ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Final

from psdist.compression import kernel_cache
from psdist.compression.deferred import PartOfKernel, evaluate, numba, resolve, types

# Argument types. Read-only arguments may be unaligned read-only memory: a payload inside a received message.
FLOAT = types.float32
OUT = types.Array(FLOAT, 1, "C")
IN = types.Array(FLOAT, 1, "C", True, None, False)  # readonly, no name, not aligned
OUT_BITS16 = types.Array(types.uint16, 1, "C")
IN_BITS16 = types.Array(types.uint16, 1, "C", True, None, False)
IN_BITS32 = types.Array(types.uint32, 1, "C", True, None, False)

#: A process that holds a lock for longer than this is assumed to be stuck.
LOCK_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05

_compile_lock = Lock()


class Kernel:
    """A function that is compiled for one signature, at its first call or by ``compile``.

    The signature covers all combinations of writable, aligned and read-only arrays, so that nothing is compiled in the
    middle of training.

    interpreted: slower equivalent without a compiler, equal to the byte.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        result: Any = types.void,
        interpreted: Callable[..., Any] | None = None,
    ) -> None:
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        #: The plain Python function.
        self.function = function
        self._signature = result(*arguments)
        self.interpreted = interpreted
        self._compiled: Callable[..., Any] | None = None
        #: Implementation behind ``__call__``. The first call compiles it, unless ``interpret`` was called.
        self._current: Callable[..., Any] | None = None

    @property
    def signature(self) -> Any:
        """Result and argument types, as a numba signature."""
        return evaluate(self._signature)

    def __call__(self, *arguments: Any) -> Any:
        return (self._current or self.compile())(*arguments)

    def interpret(self, spent: Callable[[float], None] = lambda seconds: None) -> None:
        """Interpret calls until ``compile`` is called.

        spent: called with the processor time of each interpreted call, in seconds.
        """
        if self._current is None and self.interpreted is not None:
            self._current = partial(_measured, self.interpreted, spent)

    def compile(self) -> Callable[..., Any]:
        """Compile the function once, and return it. Thread-safe."""
        with _compile_lock:
            if self._compiled is None:
                dispatcher = self._dispatcher()
                with locked(self.file("lock"), wait=True):
                    self._compile(dispatcher)
            assert self._compiled is not None
            return self._compiled

    def try_compile(self) -> bool:
        """Compile the function unless another process is compiling it. Return True if it is compiled."""
        with _compile_lock:
            if self._compiled is None:
                dispatcher = self._dispatcher()
                with locked(self.file("lock"), wait=False) as is_mine:
                    if is_mine:
                        self._compile(dispatcher)
            return self._compiled is not None

    def file(self, suffix: str) -> Path | None:
        """Return a file of this kernel beside its cache, or None if nothing is cached."""
        directory = self._dispatcher().stats.cache_path
        return None if directory is None else Path(directory) / f"{self.function.__module__}.{self.__name__}.{suffix}"

    @property
    def is_compiled(self) -> bool:
        """True if calls run machine code."""
        return self._compiled is not None

    @property
    def is_cached(self) -> bool:
        """True if numba's cache holds this function in its current form. Loading it then takes a moment."""
        return kernel_cache.holds(self._dispatcher(), self.signature)

    def _dispatcher(self) -> Any:
        """Return numba's dispatcher for the function."""
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        function = resolve(self.function)
        try:
            dispatcher = numba.value.njit(cache=True, **options)(function)
        except RuntimeError:  # numba finds no writable directory for its cache.
            return numba.value.njit(**options)(function)
        kernel_cache.bind_to_sources(dispatcher, function)
        return dispatcher

    def _compile(self, dispatcher: Any) -> None:
        try:
            dispatcher.compile(self.signature)
        except OSError:  # The function is compiled, but the cache has no room for it.
            if not dispatcher.overloads:
                raise
        dispatcher.disable_compile()
        self._compiled = self._current = dispatcher


def _measured(interpreted: Callable[..., Any], spent: Callable[[float], None], *arguments: Any) -> Any:
    begin = time.thread_time()
    result = interpreted(*arguments)
    spent(time.thread_time() - begin)
    return result


def part_of_kernel(function: Callable[..., Any]) -> Any:
    """Decorate a function that is compiled into the kernels calling it."""
    return PartOfKernel(function)


def compile_all(
    kernels: Iterable[Kernel],
    compiled: Callable[[], None] = lambda: None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Compile ``kernels``. Those that another process is compiling come last, so that processes share the work.

    compiled: called after each kernel.
    is_wanted: returns False to stop before the next kernel.
    """
    left, refused = deque(kernels), 0
    while left and is_wanted():
        one = left.popleft()
        if refused > len(left):
            one.compile()
        elif not one.try_compile():
            left.append(one)
            refused += 1
            continue
        refused = 0
        compiled()


@contextmanager
def locked(path: Path | None, wait: bool) -> Iterator[bool]:
    """Hold the file lock ``path`` for a ``with`` block.

    wait: True to wait up to LOCK_SECONDS for another process that holds the lock. False yields False if it holds it.

    Nothing is locked without a path, on a file system without locks, or after a wait in vain, and True is yielded. Two
    processes may then compile the same kernel, which is harmless.
    """
    fd, is_free = None, True
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            is_free = _acquire(fd, LOCK_SECONDS if wait else 0.0)
    except OSError:
        pass
    try:
        yield is_free or wait
    finally:
        if fd is not None:
            os.close(fd)


def _acquire(fd: int, seconds: float) -> bool:
    """Try to take the lock for ``seconds``. Return True on success."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)  # flock itself waits forever or not at all.
        else:
            return True


def kernel(
    *arguments: Any, result: Any = types.void, interpreted: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Kernel]:
    """Return a decorator that makes a function a Kernel with these argument types."""
    return lambda function: Kernel(function, arguments, result, interpreted)
