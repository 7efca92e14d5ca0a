"""Kernel compilation in the background: a low-priority process compiles while a server or a worker runs.

Until a kernel is compiled, numpy interprets it with the same bytes, so nothing waits. The first time on a machine,
compiling all kernels takes half a minute. The compiler holds the interpreter lock for long stretches, which would
delay the event loop and its heartbeats; a separate process does not, and can be killed at any time. It leaves its
results in numba's cache, and this process loads them from there.

Importing numba and loading kernels takes half a second and about 60 MB, more than numpy needs in total for
small vectors. So this starts only after a process has spent some time in interpreted kernels, or when a caller asks
for it.
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
from psdist.errors import ConfigurationError
from psdist.interpreter import python

#: Interpreting for longer than this costs more than loading the compiled kernels.
_WORTH_SECONDS: Final = 0.2
#: Vectors of this many elements justify compiling immediately.
LARGE_ELEMENTS: Final = 1 << 18
#: Program that compiles the kernels named on its command line.
_PROGRAM: Final = "psdist_server.kernels"
#: Interval at which a process that waits for its compiler checks whether it is about to exit.
_POLL_SECONDS: Final = 0.1
_MADV_DONTNEED: Final = getattr(mmap, "MADV_DONTNEED", 4)
#: Delay before compilation is logged: another process may be about to finish, and a busy machine starts processes
#: slowly.
_REPORT_SECONDS: Final = 0.5
#: Exit codes after a signal that is sent to a whole process group.
_ASKED_TO_END: Final = (-signal.SIGTERM, -signal.SIGINT)
#: Length of a failed process's output in the log.
_PROBLEM_CHARACTERS: Final = 2000


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
        """Start to compile or load all added kernels. Those added later start immediately."""
        with self._lock:
            self._started = True
            added, self._added = self._added, []
        for kernels, purpose in added:
            loading: Future[None] = Future()
            self._loading.add(loading)
            threading.Thread(target=self._compile, args=(kernels, purpose, loading), name="psdist-compile").start()

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
            self._log.warning("kernels for %s cannot be compiled and stay slow: %r", purpose, error)
        finally:
            self._end_loading(loading)

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

    def _fill_cache(self, kernels: Sequence[Kernel], purpose: str, is_reporter: bool) -> bool:
        """Compile ``kernels`` in another process. Return once it has ended, or failed.

        Returns False if that process was asked to end; this process is then ending as well.

        is_reporter: True if this process writes to the log, on behalf of all that compile for the same cache.
        """
        begin = monotonic()
        with TemporaryFile() as output, ExitStack() as started:
            try:
                process = self._start(sorted({kernel.__name__ for kernel in kernels}), output)
            except (OSError, ConfigurationError) as error:
                # They are compiled in this process instead, which blocks everything else.
                self._log.warning("could not start a process to compile kernels: %s", error)
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
                self._log.info("compiler of kernels for %s was asked to end; numpy keeps doing their work", purpose)
                return False
            if process.returncode == 0:
                self._log.info("compiled kernels for %s in %.1f s", purpose, monotonic() - begin)
            elif not self._is_over():  # They are compiled in this process instead.
                output.seek(0)
                problem = output.read().decode(errors="replace")[-_PROBLEM_CHARACTERS:]
                self._log.warning("compiler of kernels ended with %d: %s", process.returncode, problem)
            return True

    def _report(self, progress: Path | None, purpose: str) -> None:
        """Log that kernels are being compiled.

        progress: file that records the log line, so that runs which end before their compiler do not each claim to be
        the first.
        """
        is_again = False
        with suppress(OSError):
            if progress is not None:
                is_again = progress.stat().st_size > 0
                progress.write_text("begun\n")
        begins = "still compiling" if is_again else "compiling"
        why = "earlier runs ended too early; psdist warmup finishes it" if is_again else (
            "once on this machine; psdist warmup does it ahead")  # fmt: skip
        self._log.warning("%s kernels for %s (%s): numpy does their work until then, more slowly", begins, purpose, why)

    def _wait(self, process: subprocess.Popen[bytes], seconds: float = math.inf) -> bool:
        """Wait up to ``seconds`` for ``process`` to end, or for this process to end.

        Returns True if ``process`` has ended.
        """
        until = monotonic() + seconds
        while process.poll() is None and monotonic() < until:
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

    They are read-only pages of a file: the kernel reads them again if they are needed.
    """
    with suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None, use_errno=True)
        for start, stop in clean_mappings(Path("/proc/self/smaps").read_text(), "libllvmlite"):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_DONTNEED)


def clean_mappings(smaps: str, library: str) -> list[tuple[int, int]]:
    """Return the address ranges [start, stop) of read-only mappings of ``library`` whose pages are all as in the file.

    The linker has relocated some mappings that are read-only now; dropping their pages would lose the addresses.

    smaps: content of /proc/self/smaps.
    """
    found: list[tuple[int, int]] = []
    # Pages that were written and then swapped out are not counted as anonymous.
    is_clean = re.compile(r"^Anonymous: +0 kB$.*^Swap: +0 kB$", re.M | re.S)
    for text in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.M):
        header = text.partition("\n")[0].split()
        if len(header) > 5 and library in header[5] and "w" not in header[1] and is_clean.search(text):
            start, stop = header[0].split("-")
            found.append((int(start, 16), int(stop, 16)))
    return found
