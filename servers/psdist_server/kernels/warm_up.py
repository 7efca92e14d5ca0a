"""Compiling kernels while a server is at work: in another process, of low priority, with a line in the log.

The first time on a machine this takes seconds. Until a kernel is there it is interpreted (``interpreted``), which gives
the same bytes, so nothing waits. The compiler keeps the interpreter's lock for long; a process of its own does not take
it from the event loop, whose heartbeats others wait for. It leaves what it compiled in numba's cache, from which the
server then loads it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from tempfile import TemporaryFile
from time import monotonic
from typing import IO, Final

from psdist.compression.compiled import Kernel, compile_all, locked
from psdist_server.kernels.memory import release_compiler

log = logging.getLogger("psdist.server")

#: Others that compile the same may be about to end, and a machine that does much else takes a while to start a process.
_REPORT_SECONDS: Final = 0.5
#: By signals that go to a whole group of processes.
_ASKED_TO_END: Final = (-signal.SIGTERM, -signal.SIGINT)
#: Of the output of a process that failed.
_PROBLEM_CHARACTERS: Final = 2000


class BackgroundCompiler:
    """Compiles kernels for this process. Any thread may call its methods.

    Invariant: once it is closed, no process that it started is left, and it starts none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._closed = False
        #: Done when kernels that are in the cache are loaded.
        self._loading: set[Future[None]] = set()

    async def loaded(self) -> None:
        """Waits for kernels that are in the cache. It takes a moment, and memory, which the first requests want too."""
        for loading in tuple(self._loading):
            # One request that is cancelled meanwhile must not cancel what others wait for, and so these requests.
            await asyncio.shield(asyncio.wrap_future(loading))

    def begin(self, kernels: Sequence[Kernel], purpose: str) -> None:
        """Has ``kernels`` compiled, or loaded from the cache, and interpreted until then.

        purpose: what they are for, in a log line.
        """
        for kernel in kernels:
            kernel.interpret()
        loading: Future[None] = Future()
        self._loading.add(loading)
        threading.Thread(target=self._compile, args=(kernels, purpose, loading), name="compile").start()

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
                            return
            if not self._closed:
                compile_all(kernels)
                release_compiler()
        finally:
            self._end_loading(loading)

    def _end_loading(self, loading: Future[None]) -> None:
        """Nothing waits for these kernels any more."""
        self._loading.discard(loading)
        if not loading.done():
            loading.set_result(None)

    def _fill_cache(self, kernels: Sequence[Kernel], purpose: str, is_reporter: bool) -> bool:
        """Returns when another process has compiled ``kernels``, or has failed to; False where it was asked to end, as
        this one is then. is_reporter: of several servers that compile for one cache, one writes to the log."""
        begin = monotonic()
        with TemporaryFile() as output, ExitStack() as started:
            try:
                process = self._start(sorted({kernel.__name__ for kernel in kernels}), output)
            except OSError as error:  # Then they are compiled here, though that holds up everything else.
                log.warning("no process could be started to compile kernels: %s", error)
                return True
            if process is None:
                return False
            started.enter_context(process)
            started.callback(self._processes.discard, process)
            try:
                process.wait(_REPORT_SECONDS)
            except subprocess.TimeoutExpired:
                if is_reporter:
                    log.warning(
                        "compiling kernels for %s (once on this machine; psdist warmup does it ahead): updates are "
                        "slower until then",
                        purpose,
                    )
                process.wait()
            if process.returncode in _ASKED_TO_END:
                log.info("the process that compiles kernels for %s was asked to end: they stay interpreted", purpose)
                return False
            if process.returncode == 0:
                log.info("kernels for %s are compiled, after %.1f s", purpose, monotonic() - begin)
            elif not self._closed:  # Then they are compiled here, too.
                output.seek(0)
                problem = output.read().decode(errors="replace")[-_PROBLEM_CHARACTERS:]
                log.warning("the process that compiles kernels ended with %d: %s", process.returncode, problem)
            return True

    def _start(self, names: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes] | None:
        """A process that compiles the kernels of these names; None once this is closed."""
        command = [sys.executable, "-m", "psdist_server.kernels", *names]
        with self._lock:
            if self._closed:
                return None
            # It ends when its standard input does, so that it does not outlive a server that is killed.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
            self._processes.add(process)
        return process
