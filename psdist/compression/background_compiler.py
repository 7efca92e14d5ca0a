"""Compiling kernels while a server or a worker is at work: in another process, of low priority, with a line in the log.

Until a kernel is there it is interpreted, which gives the same bytes, so nothing waits. The first time on a machine it
is compiled, which takes half a minute for all of them. The compiler keeps the interpreter's lock for long; a process of
its own does not take it from the event loop, whose heartbeats others wait for, and can be ended at any time. It leaves
what it compiled in numba's cache, from which this process then loads it.

To import numba and to load kernels takes half a second and some 60 MB, which is more than numpy needs for small vectors
altogether. So this begins once a process has spent some time in interpreted kernels, or is told that it is worth it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import mmap
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic
from typing import IO, Final

from psdist.compression.compiled import Kernel, compile_all, locked

#: To interpret for longer would cost more than to load what is compiled.
_WORTH_SECONDS: Final = 0.2
#: Vectors of so many elements are worth it at once.
LARGE_ELEMENTS: Final = 1 << 18
#: The program that compiles the kernels whose names it is given.
_PROGRAM: Final = "psdist_server.kernels"
#: A process that waits for its compiler looks this often whether it is about to exit.
_POLL_SECONDS: Final = 0.1
_MADV_DONTNEED: Final = getattr(mmap, "MADV_DONTNEED", 4)
#: Others that compile the same may be about to end, and a machine that does much else takes a while to start a process.
_REPORT_SECONDS: Final = 0.5
#: By signals that go to a whole group of processes.
_ASKED_TO_END: Final = (-signal.SIGTERM, -signal.SIGINT)
#: Of the output of a process that failed.
_PROBLEM_CHARACTERS: Final = 2000


class BackgroundCompiler:
    """Compiles kernels for this process. Any thread may call its methods. ``log`` is told what takes long.

    Its threads are no daemons, as the interpreter would crash if it ended while one of them loads a kernel. They end
    within a second after the main thread does: ``close`` is not needed for that.

    Invariant: once it is closed, no process that it started is left, and it starts none.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        self._begun = False
        self._seconds = 0.0
        #: All that were added: one that is being compiled, or is there, is not compiled again for somebody else.
        self._known: set[Kernel] = set()
        #: Kernels for which it was not yet begun, and their purpose.
        self._added: list[tuple[Sequence[Kernel], str]] = []
        #: Done when kernels that are in the cache are loaded.
        self._loading: set[Future[None]] = set()

    async def loaded(self) -> None:
        """Waits for kernels that are in the cache. It takes a moment, and memory, which the first requests want too."""
        for loading in tuple(self._loading):
            # One request that is cancelled meanwhile must not cancel what others wait for, and so these requests.
            await asyncio.shield(asyncio.wrap_future(loading))

    def add(self, kernels: Sequence[Kernel], purpose: str) -> None:
        """Has ``kernels`` interpreted, and compiled, or loaded from the cache, once that is worth it; those that were
        added before are left out.

        purpose: what they are for, in a log line.
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
        if self._begun:
            self.begin()

    def begin(self) -> None:
        """Begins to compile, or to load, what was added. From now on it is worth it."""
        with self._lock:
            self._begun = True
            added, self._added = self._added, []
        for kernels, purpose in added:
            loading: Future[None] = Future()
            self._loading.add(loading)
            threading.Thread(target=self._compile, args=(kernels, purpose, loading), name="psdist-compile").start()

    def _spend(self, seconds: float) -> None:
        """Counts the processor time of a call that was interpreted."""
        self._seconds += seconds
        if self._seconds >= _WORTH_SECONDS and not self._begun:
            self.begin()

    def close(self) -> None:
        """Ends what is being compiled."""
        with self._lock:
            self._closed = True
            for process in list(self._processes):
                process.kill()

    def _compile(self, kernels: Sequence[Kernel], purpose: str, loading: Future[None]) -> None:
        try:
            missing = [kernel for kernel in kernels if not kernel.is_cached]
            if missing:
                self._end_loading(loading)
                if missing[0].file("progress") is not None:
                    with locked(missing[0].file("progress"), wait=False) as is_reporter:
                        if not self._fill_cache(missing, purpose, is_reporter):
                            self._forget(kernels)
                            return
            compile_all(kernels, is_wanted=lambda: not self._is_over())
            release_compiler()
        except ImportError as error:  # numba is broken here; numpy works.
            self._log.warning("kernels for %s cannot be compiled, and are slower: %r", purpose, error)
        finally:
            self._end_loading(loading)

    def _forget(self, kernels: Sequence[Kernel]) -> None:
        """Has whoever adds these again try again: a signal that ended their compiler need not have ended this."""
        with self._lock:
            self._known.difference_update(kernels)

    def _end_loading(self, loading: Future[None]) -> None:
        """Nothing waits for these kernels any more."""
        self._loading.discard(loading)
        if not loading.done():
            loading.set_result(None)

    def _is_over(self) -> bool:
        """Whether this was closed. The end of the main thread closes it, after which the interpreter waits for the
        other threads."""
        if not threading.main_thread().is_alive():
            self.close()
        return self._closed

    def _fill_cache(self, kernels: Sequence[Kernel], purpose: str, is_reporter: bool) -> bool:
        """Returns when another process has compiled ``kernels``, or has failed to; False where it was asked to end, as
        this one is then. is_reporter: of several processes that compile for one cache, one writes to the log."""
        begin = monotonic()
        with TemporaryFile() as output, ExitStack() as started:
            try:
                process = self._start(sorted({kernel.__name__ for kernel in kernels}), output)
            except OSError as error:  # Then they are compiled here, though that holds up everything else.
                self._log.warning("no process could be started to compile kernels: %s", error)
                return True
            if process is None:
                return False
            started.enter_context(process)
            started.callback(self._processes.discard, process)
            if not self._wait(process, _REPORT_SECONDS):
                if is_reporter and not self._closed:
                    self._report(kernels[0].file("progress"), purpose)
                self._wait(process)
            if process.returncode in _ASKED_TO_END:
                self._log.info("what compiles kernels for %s was asked to end: numpy goes on with their work", purpose)
                return False
            if process.returncode == 0:
                self._log.info("kernels for %s are compiled, after %.1f s", purpose, monotonic() - begin)
            elif not self._is_over():  # Then they are compiled here, too.
                output.seek(0)
                problem = output.read().decode(errors="replace")[-_PROBLEM_CHARACTERS:]
                self._log.warning("the process that compiles kernels ended with %d: %s", process.returncode, problem)
            return True

    def _report(self, progress: Path | None, purpose: str) -> None:
        """Says that kernels are compiled. ``progress`` remembers that it was said: runs that end before their compiler
        do not each claim to be the first."""
        is_again = False
        with suppress(OSError):
            if progress is not None:
                is_again = progress.stat().st_size > 0
                progress.write_text("begun\n")
        begins = "still compiling" if is_again else "compiling"
        why = "earlier runs ended before it was done; psdist warmup does it now" if is_again else (
            "once on this machine; psdist warmup does it ahead")  # fmt: skip
        self._log.warning(
            "%s kernels for %s (%s): numpy does their work, more slowly, until then", begins, purpose, why
        )

    def _wait(self, process: subprocess.Popen[bytes], seconds: float = math.inf) -> bool:
        """Returns whether ``process`` has ended, of itself or because this process is about to, within so long."""
        until = monotonic() + seconds
        while process.poll() is None and monotonic() < until:
            self._is_over()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
        return process.returncode is not None

    def _start(self, names: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes] | None:
        """A process that compiles the kernels of these names; None once this is closed."""
        command = [sys.executable, "-P", "-m", _PROGRAM, *names]
        with self._lock:
            if self._closed:
                return None
            # It ends when its standard input does, so that it does not outlive a process that is killed.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
            self._processes.add(process)
        return process


@cache
def of_workers() -> BackgroundCompiler:
    """The one that all workers of this process use."""
    return BackgroundCompiler(logging.getLogger("psdist"))


def release_compiler() -> None:
    """Gives back the pages of LLVM's code and constants (some 65 MB) once the kernels are compiled.

    They are read-only pages of a file: if they are needed again, the kernel reads them again.
    """
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None, use_errno=True)
        for start, stop in clean_mappings(Path("/proc/self/smaps").read_text(), "libllvmlite"):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)


def clean_mappings(smaps: str, library: str) -> list[tuple[int, int]]:
    """The first address of each read-only mapping of ``library``, and that behind its end, where all pages are as in
    the file. smaps: of /proc.

    The linker has written addresses into some that are read-only now. Their pages would be lost.
    """
    found: list[tuple[int, int]] = []
    # What was written and swapped out is not counted as anonymous.
    is_clean = re.compile(r"^Anonymous: +0 kB$.*^Swap: +0 kB$", re.M | re.S)
    for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.M):
        header = text.partition("\n")[0].split()
        if len(header) > 5 and library in header[5] and "w" not in header[1] and is_clean.search(text):
            start, stop = header[0].split("-")
            found.append((int(start, 16), int(stop, 16)))
    return found
