"""Kernel runtime: functions on arrays that numba compiles ahead of time, for one signature each.

It serves the servers' arithmetic and the codecs of both sides. numba and its target take half a second and about 60 MB
to import. So nothing is compiled at import, and numba is imported when the first kernel is compiled or loaded. A
function to be compiled refers to parts of numba, and to other compiled functions, as globals of its module. These
globals are ``Deferred`` until ``resolve`` replaces them with their values.

The first call of a kernel compiles it, or loads it from numba's cache beside its module. Alternatively numpy interprets
it, with the same bytes, while a ``BackgroundCompiler`` has a low-priority process compile it, so nothing waits. The
first time on a machine, compiling all kernels takes half a minute. The compiler holds the interpreter lock for long
stretches, which would delay the event loop and its heartbeats; a separate process does not, and can be killed at any
time. It leaves its results in numba's cache, and this process loads them from there. A process with small vectors does
without: the compiler starts only after some time was spent in interpreted kernels, or when a caller asks for it. A
compiled kernel runs without the interpreter lock.

numba checks only the file that defines a cached function. Code that a kernel calls in other files is compiled into it
as well, so the cache's key includes a digest of all files beside it, and of the codecs' files. Otherwise a machine with
an old cache would compute differently from its peers.

Invariant: For one cache, no two processes compile the same kernel at the same time. One compiles it; the others wait
and load it. The lock is a file beside the cache, which the system releases when its owner ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import logging
import math
import mmap
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from types import CodeType, FunctionType
from typing import IO, Any, Final, TypeVar

import numpy as np

from psdist.errors import ConfigurationError
from psdist.machine import python

F = TypeVar("F", bound=Callable[..., Any])

#: Vectors of this many elements justify compiling immediately.
LARGE_ELEMENTS: Final = 1 << 18
#: Interpreting for longer than this costs more than loading the compiled kernels.
_WORTH_SECONDS: Final = 0.2
#: A process that holds a lock for longer than this is assumed to be stuck.
LOCK_SECONDS: Final = 60.0
_LOCK_POLL_SECONDS: Final = 0.05
#: Program that compiles the kernels named on its command line.
_PROGRAM: Final = "psdist_server.kernels"
#: Interval at which a process that waits for its compiler checks whether it is about to exit.
_POLL_SECONDS: Final = 0.1
#: Delay before compilation is logged: another process may be about to finish, and a busy machine starts processes
#: slowly.
_REPORT_SECONDS: Final = 0.5
#: Level of the one line about it: shown like a warning, but nothing is wrong.
NOTICE: Final = logging.WARNING + 1
logging.addLevelName(NOTICE, "NOTICE")
#: Exit codes after a signal that is sent to a whole process group.
_ASKED_TO_END: Final = (-signal.SIGTERM, -signal.SIGINT)
#: Length of a failed process's output in the log.
_PROBLEM_CHARACTERS: Final = 2000
_MADV_DONTNEED: Final = getattr(mmap, "MADV_DONTNEED", 4)
_CODECS: Final = Path(__file__).parent

_import_lock = threading.RLock()
_compile_lock = threading.Lock()


# --- numba, imported at first use -------------------------------------------------------------------------------------


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
        with _import_lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Deferred(lambda: getattr(self.value, name))

    def __call__(self, *arguments: Any) -> Any:
        return Deferred(lambda: self.value(*map(evaluate, arguments)))


class PartOfKernel:
    """Function that is compiled into the kernels calling it. Other callers get its interpreted form.

    py_func: the plain function.
    interpreted: equivalent by numpy, equal to the byte; None if the plain function is fast enough.
    """

    def __init__(self, function: Callable[..., Any], interpreted: Callable[..., Any] | None = None) -> None:
        self.py_func = function
        self._interpreted = interpreted or function
        self._compiled = Deferred(lambda: numba.value.njit(error_model="numpy")(resolve(function)))

    def __call__(self, *arguments: Any) -> Any:
        return self._interpreted(*arguments)

    @property
    def _numba_type_(self) -> Any:
        """numba's type of the compiled function, which numba asks the globals of a function for."""
        return self.value._numba_type_

    @property
    def value(self) -> Any:
        """numba's dispatcher for the function."""
        return self._compiled.value


def evaluate(what: Any) -> Any:
    """Return the value of a Deferred; return anything else unchanged."""
    return what.value if isinstance(what, Deferred) else what


def resolve(function: F) -> F:
    """Replace parts of numba among the globals of the function's module with their values. Return ``function``.
    Thread-safe."""
    assert isinstance(function, FunctionType)
    for name in _names(function.__code__):
        if isinstance(one := function.__globals__.get(name), Deferred):
            function.__globals__[name] = one.value
    return function


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes used in a function and in the functions nested in it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


#: The numba module, and its types.
numba = Deferred(lambda: import_module("numba"))
types = numba.types


# Argument types. Read-only arguments may be unaligned read-only memory: a payload inside a received message.
FLOAT = types.float32
OUT = types.Array(FLOAT, 1, "C")
IN = types.Array(FLOAT, 1, "C", True, None, False)  # readonly, no name, not aligned
OUT_BITS16 = types.Array(types.uint16, 1, "C")
IN_BITS16 = types.Array(types.uint16, 1, "C", True, None, False)
IN_BITS32 = types.Array(types.uint32, 1, "C", True, None, False)


# --- kernels ----------------------------------------------------------------------------------------------------------


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
        self.interpreted = None if interpreted is None else np.errstate(all="ignore")(interpreted)
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
        return _holds(self._dispatcher(), self.signature)

    def _dispatcher(self) -> Any:
        """Return numba's dispatcher for the function."""
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        function = resolve(self.function)
        try:
            dispatcher = numba.value.njit(cache=True, **options)(function)
        except RuntimeError:  # numba finds no writable directory for its cache.
            return numba.value.njit(**options)(function)
        _bind_to_sources(dispatcher, function)
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


def interpreted_by(interpreted: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like ``part_of_kernel``, for a function whose interpreted form is another one."""
    return lambda function: PartOfKernel(function, interpreted)


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
            time.sleep(_LOCK_POLL_SECONDS)  # flock itself waits forever or not at all.
        else:
            return True


def kernel(
    *arguments: Any, result: Any = types.void, interpreted: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Kernel]:
    """Return a decorator that makes a function a Kernel with these argument types."""
    return lambda function: Kernel(function, arguments, result, interpreted)


# --- numba's cache: private names of numba. With a version that lacks them, numba's own rule stays in force -----------


def _bind_to_sources(dispatcher: Any, function: Callable[..., Any]) -> None:
    """Restrict ``dispatcher``, which compiles ``function``, to cache entries compiled from the current files."""
    file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(file, "_source_stamp"):
        folder = Path(function.__code__.co_filename).parent
        file._source_stamp = (file._source_stamp, _digest(folder), _digest(_CODECS))


def _holds(dispatcher: Any, signature: Any) -> bool:
    """True if the cache holds machine code of this signature for this processor and the current files."""
    cached = getattr(dispatcher, "_cache", None)
    file = getattr(cached, "_cache_file", None)
    if cached is None or file is None:
        return False
    key = cached._index_key(signature, dispatcher.targetctx.codegen())
    try:
        name = file._load_index().get(key)
    except (OSError, EOFError):  # Another process is removing it, or the disk was full.
        return False
    return name is not None and os.path.exists(file._data_path(name))


@cache
def _digest(folder: Path) -> bytes:
    """Return the digest of all Python files in a folder and its subfolders. Unreadable files are skipped."""
    found = blake2b(digest_size=16)
    for path in sorted(folder.rglob("*.py")):
        try:
            found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
        except OSError:
            continue
    return found.digest()


# --- compilation in the background ------------------------------------------------------------------------------------


class BackgroundCompiler:
    """Compiler of kernels for this process. Thread-safe.

    Its threads are not daemons: the interpreter would crash if it exited while one of them loads a kernel. They end
    within a second after the main thread, even without ``close``.

    Invariant: Once it is closed, all its processes are dead, and it starts no others.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        self._started = False
        #: True once this process has logged that it compiles.
        self._reported = False
        self._seconds = 0.0
        #: All kernels added so far. A kernel that is being compiled, or is loaded, is not compiled again for another
        #: caller.
        self._known: set[Kernel] = set()
        #: Kernels that are not being compiled yet, and their purpose.
        self._added: list[tuple[Sequence[Kernel], str]] = []
        #: Pending loads of kernels that are in the cache.
        self._loading: set[Future[None]] = set()

    async def loaded(self) -> None:
        """Wait until the added kernels that are in the cache are loaded.

        A server waits before its first request, which would otherwise be slow and need memory at the same time.
        """
        for loading in tuple(self._loading):
            # Shield: cancelling one request must not cancel the load that others wait for.
            await asyncio.shield(asyncio.wrap_future(loading))

    def add(self, kernels: Sequence[Kernel], purpose: str) -> None:
        """Interpret ``kernels`` for now. Compile them, or load them from the cache, once interpreted calls have taken
        ``_WORTH_SECONDS`` of processor time, or after ``start_compiling``.

        Kernels that were added before are skipped.

        purpose: name of the kernels in log lines.
        """
        with self._lock:
            new = [kernel for kernel in kernels if kernel not in self._known]
            self._known.update(new)
        if not new:
            return
        for kernel in new:
            kernel.interpret(self._spend)
        with self._lock:
            self._added.append((new, purpose))
        if self._started:
            self.start_compiling()

    def start_compiling(self) -> None:
        """Start to compile or load all added kernels, the newest first: those of an optimizer come after those that
        only some runs call. Kernels that are added later start immediately."""
        with self._lock:
            self._started = True
            groups = [(kernels, purpose, Future[None]()) for kernels, purpose in reversed(self._added)]
            self._added = []
        self._loading.update(loading for _, _, loading in groups)
        if groups:
            threading.Thread(target=self._compile, args=(groups,), name="psdist-compile").start()

    def _spend(self, seconds: float) -> None:
        """Add the processor time of an interpreted call."""
        self._seconds += seconds
        if self._seconds >= _WORTH_SECONDS and not self._started:
            self.start_compiling()

    def close(self) -> None:
        """Kill the compiler processes."""
        with self._lock:
            self._closed = True
            for process in list(self._processes):
                process.kill()

    def _compile(self, groups: Sequence[tuple[Sequence[Kernel], str, Future[None]]]) -> None:
        """Load the groups that are in the cache; then compile the others, one after another."""
        missing: list[tuple[Sequence[Kernel], str]] = []
        try:
            for kernels, purpose, loading in groups:
                if all(kernel.is_cached for kernel in kernels):
                    self._load(kernels)
                else:
                    missing.append((kernels, purpose))
                self._end_loading(loading)
            for kernels, purpose in missing:
                if not self._fill_cache(kernels, purpose):
                    self._forget(kernels)
                    continue
                self._load(kernels)
            if not self._is_over():
                release_compiler()
        except ImportError as error:  # numba is broken here; numpy works.
            self._log.warning("kernels for %s cannot be compiled and stay slow: %r", groups[0][1], error)
        finally:
            for _, _, loading in groups:
                self._end_loading(loading)

    def _load(self, kernels: Sequence[Kernel]) -> None:
        compile_all(kernels, is_wanted=lambda: not self._is_over())

    def _forget(self, kernels: Sequence[Kernel]) -> None:
        """Allow these kernels to be added again: a signal that ended their compiler need not end this process."""
        with self._lock:
            self._known.difference_update(kernels)

    def _end_loading(self, loading: Future[None]) -> None:
        """Release the callers of ``loaded``."""
        self._loading.discard(loading)
        if not loading.done():
            loading.set_result(None)

    def _is_over(self) -> bool:
        """True once this was closed.

        The end of the main thread closes it; the interpreter then waits for the other threads.
        """
        if not threading.main_thread().is_alive():
            self.close()
        return self._closed

    def _fill_cache(self, kernels: Sequence[Kernel], purpose: str) -> bool:
        """Compile the missing ones of ``kernels`` in another process. Return once it has ended, or failed.

        Returns False if that process was asked to end; this process is then ending as well.
        """
        missing = [kernel for kernel in kernels if not kernel.is_cached]
        progress = missing[0].file("progress") if missing else None
        if progress is None:
            return True  # Another process has compiled them meanwhile, or there is no cache.
        begin = time.monotonic()
        with locked(progress, wait=False) as is_reporter, TemporaryFile() as output, ExitStack() as started:
            try:
                process = self._start(list(dict.fromkeys(kernel.__name__ for kernel in missing)), output)
            except (OSError, ConfigurationError) as error:
                # They are compiled in this process instead, which blocks everything else.
                self._log.warning("could not start a process to compile kernels: %s", error)
                return True
            if process is None:
                return False
            started.enter_context(process)
            started.callback(self._processes.discard, process)
            if not self._wait(process, _REPORT_SECONDS):
                if is_reporter and not self._closed and not self._reported:
                    self._report(progress, purpose)
                self._reported = True  # Otherwise by the process that holds the lock.
                self._wait(process)
            if process.returncode in _ASKED_TO_END:
                self._log.info("compiler of kernels for %s was asked to end; numpy keeps doing their work", purpose)
                return False
            if process.returncode == 0:
                self._log.info("compiled kernels for %s in %.1f s", purpose, time.monotonic() - begin)
            elif not self._is_over():  # They are compiled in this process instead.
                output.seek(0)
                problem = output.read().decode(errors="replace")[-_PROBLEM_CHARACTERS:]
                self._log.warning("compiler of kernels ended with %d: %s", process.returncode, problem)
            return True

    def _report(self, progress: Path, purpose: str) -> None:
        """Log once that kernels are being compiled, on behalf of all processes that compile for the same cache.

        progress: file that records the log line, so that runs which end before their compiler do not each claim to be
        the first.
        """
        is_again = False
        with suppress(OSError):
            is_again = progress.stat().st_size > 0
            progress.write_text("begun\n")
        begins = "still compiling" if is_again else "compiling"
        why = "earlier runs ended too early; psdist warmup finishes it" if is_again else (
            "once on this machine; psdist warmup does it ahead")  # fmt: skip
        self._log.log(NOTICE, "%s kernels for %s (%s); numpy does their work meanwhile", begins, purpose, why)

    def _wait(self, process: subprocess.Popen[bytes], seconds: float = math.inf) -> bool:
        """Wait up to ``seconds`` for ``process`` to end, or for this process to end.

        Returns True if ``process`` has ended.
        """
        until = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < until:
            self._is_over()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
        return process.returncode is not None

    def _start(self, names: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes] | None:
        """Start a process that compiles the kernels with these names. Return None once this is closed."""
        command = [python(), "-P", "-m", _PROGRAM, *names]
        with self._lock:
            if self._closed:
                return None
            # The child ends when its standard input does, so that it does not outlive a process that is killed.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
            self._processes.add(process)
        return process


@cache
def shared_compiler() -> BackgroundCompiler:
    """Return the compiler that all workers of this process share."""
    return BackgroundCompiler(logging.getLogger("psdist"))


def release_compiler() -> None:
    """Give back the pages of LLVM's code and constants (about 65 MB) once the kernels are compiled.

    They are read-only pages of a file: the kernel reads them again if they are needed. The linker has relocated some
    mappings that are read-only now; dropping their pages, or those in the swap, would lose the addresses.
    """
    import psutil  # Workers that compile nothing start without it.

    with suppress(AttributeError, OSError, psutil.Error):
        libc = ctypes.CDLL(None, use_errno=True)
        for mapping in psutil.Process().memory_maps(grouped=False):
            if "libllvmlite" in mapping.path and "w" not in mapping.perms and not mapping.anonymous + mapping.swap:
                start, stop = (int(address, 16) for address in mapping.addr.split("-"))
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)
