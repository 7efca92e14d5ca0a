"""SIGTERM in a worker's script: the workers agree on a final step, and the script exits with status 143.

``psdist.init()`` installs the handler in the main thread, unless the script has a handler of its own. The handler
raises nothing, because CPython drops an exception that is raised inside a finalizer or a callback of C code. It sets a
flag and wakes psdist's loop, which coordinates the shutdown of the clients (``WorkerShutdown``). When they may leave,
calls under way are cancelled, and that call or the next one raises SystemExit. If the script makes no call for 10 s,
the signal is sent again, and then the handler raises. So does a second signal from outside, unless it comes together
with the first one: an engine such as Slurm signals all processes of a job, and the launcher passes the signal on.

The loop also reads signals from a pipe that C code writes to, so it sees a signal even while the interpreter is busy in
a long call of the script. This module also decides the reason that a leaving worker reports.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, Protocol

from psdist.errors import ClosedError

EXIT_STATUS: Final = 128 + signal.SIGTERM
#: Seconds after which the signal is sent again to a script that should end and makes no call.
AGAIN_SECONDS: Final = 10.0
#: Signals within this time in seconds are one request. A launcher whose worker failed repeats the signal after 0.5 s.
TOGETHER_SECONDS: Final = 0.4
_READ_BYTES: Final = 4096


class StoppableClient(Protocol):
    """The part of an open client that the handler needs."""

    async def request_stop(self) -> None:
        """Return when this worker may leave."""

    def watch_signals(self, is_asked: Callable[[], bool]) -> None:
        """Register a function that the client calls before it reports whether this worker received SIGTERM."""


class SigtermHandler:
    """State of SIGTERM in this process."""

    def __init__(self) -> None:
        #: SIGTERM was received.
        self.asked = False
        #: The script must end: the next call raises SystemExit.
        self.leaving = False
        #: SystemExit was raised.
        self.raised = False
        #: SystemExit was raised by a call, so it reached the script. One that a handler raises may be lost.
        self._raised_by_call = False
        #: psdist's own work at the interpreter's exit is under way.
        self._exiting = False
        self._signals = 0
        self._signalled_at = -math.inf
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: Callable[[], Sequence[StoppableClient]] = tuple
        self._give_up: Callable[[], None] = lambda: None
        self._pipe = -1
        #: Signal mask of each thread before it forked.
        self._masks = threading.local()
        self._task: asyncio.Task[None] | None = None

    def install(
        self,
        loop: asyncio.AbstractEventLoop,
        clients: Callable[[], Sequence[StoppableClient]],
        give_up: Callable[[], None],
    ) -> None:
        """Install the handler, unless the script has one of its own or this is not the main thread.

        loop: runs in another thread.
        clients: returns the open clients.
        give_up: cancels all calls under way; called on the loop.
        """
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self.attach(loop, clients, give_up)
        signal.signal(signal.SIGTERM, self.on_signal)
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._in_fork)
        self._pipe, written = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        others = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        if others != -1:  # Another reader of signals exists: only the handler remains.
            signal.set_wakeup_fd(others, warn_on_full_buffer=False)
            os.close(written)
            os.close(self._pipe)
            self._pipe = -1
        loop.call_soon_threadsafe(self._watch)

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        clients: Callable[[], Sequence[StoppableClient]],
        give_up: Callable[[], None],
    ) -> None:
        """Set the targets of the handler without installing it. Arguments as in ``install``."""
        self._loop, self._clients, self._give_up = loop, clients, give_up

    def _block(self) -> None:
        """Block SIGTERM before a fork. Until ``_in_fork`` runs, the child would write to this process's pipe."""
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _in_fork(self) -> None:
        """Restore the default handling of signals in a forked child."""
        self.restore_default()
        self._unblock()

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignore SIGTERM and Ctrl-C during psdist's own work at the interpreter's exit, which takes seconds.

        Python would only print an exception that is raised there, and the work would be left undone.
        """
        interrupt = signal.getsignal(signal.SIGINT)
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._exiting = True
        if in_main_thread and interrupt is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield
        finally:
            self._exiting = False
            if in_main_thread and interrupt is signal.default_int_handler:
                signal.signal(signal.SIGINT, interrupt)

    def restore_default(self) -> None:
        """Restore the default handling, so that SIGTERM ends a script whose own callbacks at exit take too long."""
        if self._pipe >= 0:
            signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self.on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def check(self, *, reading: bool = False) -> None:
        """Raise SystemExit in the main thread, and ClosedError in others, once the script must end.

        Calls that only read are allowed after SystemExit was raised, so that a script can save its results.
        """
        if not self.leaving or (reading and self.raised):
            return
        if threading.current_thread() is threading.main_thread():
            self._raised_by_call = True
            self._exit()
        raise ClosedError("this worker is being stopped: no more calls are possible")

    def reason(self, error: BaseException | None = None) -> str:
        """Return why a worker leaves: "stopped" (before its work was done), "failed" or "closed"."""
        if self.asked:
            return "stopped"
        # Python stores the exception that ends the interpreter here.
        failed = error if error is not None else getattr(sys, "last_value", None)
        # A script that ends by sys.exit() has not failed: its launcher does not restart it.
        done = failed is None or (isinstance(failed, SystemExit) and not failed.code)
        return "closed" if done else "failed"

    # --- in the main thread -------------------------------------------------------------------------------------------

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self._exiting:
            return
        self.asked = True
        self._count()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin)
        if self._signals > 1 or not self._clients():
            self._exit()

    def _count(self) -> None:
        """Count a request to end. While the interpreter exits each signal counts, since nothing waits for agreement."""
        now = time.monotonic()
        if now - self._signalled_at >= TOGETHER_SECONDS or not threading.main_thread().is_alive():
            self._signals += 1
            self._signalled_at = now

    def _exit(self) -> None:
        """End the script: by SystemExit, or, if it has ended and other code runs at the interpreter's exit, by the
        signal's default. Python would only print an exception there."""
        if not threading.main_thread().is_alive():
            self.restore_default()
            signal.raise_signal(signal.SIGTERM)
        self.raised = True
        raise SystemExit(EXIT_STATUS)

    # --- on the loop --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._pipe >= 0 and self._loop is not None:
            self._loop.add_reader(self._pipe, self.read_signals)

    def read_signals(self) -> bool:
        """Return True if SIGTERM has arrived, even if the interpreter has not handled it yet."""
        with suppress(BlockingIOError):
            came = self._pipe >= 0 and signal.SIGTERM in os.read(self._pipe, _READ_BYTES)
            # The script may have replaced the handler.
            if came and signal.getsignal(signal.SIGTERM) == self.on_signal:
                self._begin()
        return self.asked

    def _begin(self) -> None:
        self.asked = True
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._end(), name="psdist SIGTERM")

    async def _end(self) -> None:
        await asyncio.gather(*(client.request_stop() for client in self._clients()), return_exceptions=True)
        self.leaving = True
        self._give_up()
        while True:
            await asyncio.sleep(AGAIN_SECONDS)
            if self._raised_by_call:  # The script is ending, and may take its time.
                return
            self._signal_again()

    async def close(self) -> None:
        """Stop watching the pipe, and no longer send the signal again. Call it before the loop ends."""
        if self._pipe >= 0 and self._loop is not None:
            self._loop.remove_reader(self._pipe)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _signal_again(self) -> None:
        main = threading.main_thread().ident
        if main is not None:
            signal.pthread_kill(main, signal.SIGTERM)


sigterm: Final = SigtermHandler()
