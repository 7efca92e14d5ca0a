"""Kernels: functions on arrays that numba compiles for one signature each, ahead of their use.

For the servers' arithmetic and both sides' codecs. Nothing is compiled at import, and numba is not imported
(``deferred``). A kernel is compiled, or loaded from numba's cache beside its module, at its first call;
or it is interpreted by numpy until somebody has it compiled. The lock of the interpreter is not held while a compiled
kernel runs.

Invariant: no two processes compile the same kernel at once for one cache. One of them compiles it, and the others wait
and load it. The lock is a file beside the cache's, which the system releases when its process ends.
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

# Argument types. What is only read may be read-only memory at an odd address: a payload inside a received message.
FLOAT = types.float32
OUT = types.Array(FLOAT, 1, "C")
IN = types.Array(FLOAT, 1, "C", True, None, False)  # readonly, no name, not aligned
OUT_BITS16 = types.Array(types.uint16, 1, "C")
IN_BITS16 = types.Array(types.uint16, 1, "C", True, None, False)
IN_BITS32 = types.Array(types.uint32, 1, "C", True, None, False)

#: A process that holds a lock for longer is taken to stand still.
LOCK_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05

_compile_lock = Lock()


class Kernel:
    """A function that is compiled for one signature, at its first call or by ``compile``.

    There is one signature for all combinations of writable, aligned and read-only arrays, so that nothing is compiled
    in the middle of training.

    interpreted: does the same to the byte without a compiler, more slowly.
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
        #: The Python function.
        self.function = function
        self._signature = result(*arguments)
        self.interpreted = interpreted
        self._compiled: Callable[..., Any] | None = None
        #: What calls run. The first one compiles it, unless ``interpret`` was called.
        self._current: Callable[..., Any] | None = None

    @property
    def signature(self) -> Any:
        """The types of its result and its arguments, as numba's."""
        return evaluate(self._signature)

    def __call__(self, *arguments: Any) -> Any:
        return (self._current or self.compile())(*arguments)

    def interpret(self, spent: Callable[[float], None] = lambda seconds: None) -> None:
        """From now on calls do not compile. Until ``compile`` was called they are interpreted.

        spent: is told the processor time of each such call, in seconds.
        """
        if self._current is None and self.interpreted is not None:
            self._current = partial(_measured, self.interpreted, spent)

    def compile(self) -> Callable[..., Any]:
        """Compiles the function once, and returns it. Any thread may call this."""
        with _compile_lock:
            if self._compiled is None:
                dispatcher = self._dispatcher()
                with locked(self.file("lock"), wait=True):
                    self._compile(dispatcher)
            assert self._compiled is not None
            return self._compiled

    def try_compile(self) -> bool:
        """Compiles the function unless another process does that now. Returns whether it is compiled."""
        with _compile_lock:
            if self._compiled is None:
                dispatcher = self._dispatcher()
                with locked(self.file("lock"), wait=False) as is_mine:
                    if is_mine:
                        self._compile(dispatcher)
            return self._compiled is not None

    def file(self, suffix: str) -> Path | None:
        """A file of this kernel beside its cache; None where nothing is cached."""
        directory = self._dispatcher().stats.cache_path
        return None if directory is None else Path(directory) / f"{self.function.__module__}.{self.__name__}.{suffix}"

    @property
    def is_compiled(self) -> bool:
        """Whether calls run machine code."""
        return self._compiled is not None

    @property
    def is_cached(self) -> bool:
        """Whether numba's cache has this function, as it is now: then loading it takes a moment."""
        return kernel_cache.holds(self._dispatcher(), self.signature)

    def _dispatcher(self) -> Any:
        """What compiles the function."""
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        function = resolve(self.function)
        try:
            dispatcher = numba.value.njit(cache=True, **options)(function)
        except RuntimeError:  # numba finds no directory that it may write its cache to
            return numba.value.njit(**options)(function)
        kernel_cache.bind_to_sources(dispatcher, function)
        return dispatcher

    def _compile(self, dispatcher: Any) -> None:
        try:
            dispatcher.compile(self.signature)
        except OSError:  # It is compiled, and the cache has no room for it.
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
    """Compiled into the kernels that call it."""
    return PartOfKernel(function)


def compile_all(
    kernels: Iterable[Kernel],
    compiled: Callable[[], None] = lambda: None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Compiles ``kernels``; those that another process compiles now come last, so that processes share the work.

    compiled: called after each of them. is_wanted: whether to go on with the next one.
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
    """Holds the lock that the file ``path`` is; yields False where another process holds it.

    Without a file, on a file system without locks, and where the other process holds it for LOCK_SECONDS, nothing is
    locked: then two processes may compile the same kernel, which is harmless.
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
    """Whether the lock could be taken within so long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)  # flock waits without an end, or not at all.
        else:
            return True


def kernel(
    *arguments: Any, result: Any = types.void, interpreted: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Kernel]:
    """A decorator that makes a function a Kernel of these argument types."""
    return lambda function: Kernel(function, arguments, result, interpreted)
