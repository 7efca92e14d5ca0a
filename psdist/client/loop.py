"""The one loop: a background thread that runs it for the synchronous face, and the rule that a process has only one.

Invariants: at most one background thread per process, started on first use and shared by all clients; the clients
that are open in a process are all on one loop. At interpreter exit open clients of the thread leave politely.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final, Generic, Protocol, TypeVar

from psdist.client.farewell import farewell
from psdist.errors import ClosedError, ConfigurationError

T = TypeVar("T")

_UNWIND_SECONDS: Final = 2.0
_EXIT_SECONDS: Final = 3.0


class Closable(Protocol):
    """What is needed of a client."""

    async def close(self, reason: str = "closed") -> None:
        """Leaves the run."""


#: Open clients of this process and the loop they are on.
_claims: dict[int, tuple[Closable, asyncio.AbstractEventLoop]] = {}


def claim(client: Closable) -> None:
    """Notes that ``client`` is open on the running loop. Raises ConfigurationError if others are on another loop."""
    running = asyncio.get_running_loop()
    for key, (_, other) in list(_claims.items()):
        if other.is_closed():
            del _claims[key]
        elif other is not running:
            raise ConfigurationError(
                "this process has a psdist client on another event loop: use AsyncClient in one loop, or Client, but "
                "not both at once (grpc.aio polls for one loop per process)"
            )
    _claims[id(client)] = (client, running)


def release(client: Closable) -> None:
    """``client`` is closed."""
    _claims.pop(id(client), None)


class _Call(Generic[T]):
    """A coroutine on the loop, for which another thread waits. It takes less than half of what a future of
    ``run_coroutine_threadsafe`` does, which matters for small steps."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._coroutine = coroutine
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        #: Released when it has ended.
        self.ended = threading.Lock()
        self.ended.acquire()

    def begin(self) -> None:
        """On the loop."""
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """On the loop."""
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # Who waits may have been told to end the script meanwhile: then nobody asks for it.
        self.ended.release()

    def result(self) -> T:
        """What it returned or raised, once it has ended."""
        task, self._task = self._task, None  # An error must not keep the call's arrays alive by a cycle through here.
        assert task is not None
        try:
            return task.result()
        except asyncio.CancelledError:  # by the end of the loop alone; to be caught by ``except Exception``
            raise concurrent.futures.CancelledError from None
        finally:
            del task, self


class LoopThread:
    """A daemon thread that runs an event loop (uvloop's where there is one)."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = _new_loop()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="psdist", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs ``coroutine`` on the loop and waits for its result.

        An interrupt (Ctrl-C) cancels it, waits until it has let go of the caller's arrays, and is raised. SIGTERM lets
        it end, and then ends the script (see ``farewell``).
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ClosedError("a synchronous psdist call was made on psdist's own loop thread: use AsyncClient there")
        if self._stopped:
            coroutine.close()
            raise ClosedError("psdist has ended in this process, which is about to exit: make calls before")
        call = _Call(coroutine, self.loop)
        counted = farewell.begin()
        try:
            self.loop.call_soon_threadsafe(call.begin)
            call.ended.acquire()
        except BaseException:
            self.loop.call_soon_threadsafe(call.cancel)
            call.ended.acquire(timeout=_UNWIND_SECONDS)
            raise
        finally:
            if counted:
                farewell.end()
        return call.result()

    def stop(self) -> None:
        """Closes the clients on the loop and ends it."""
        self._stopped = True
        mine = [client for client, owner in list(_claims.values()) if owner is self.loop]
        with suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            asyncio.run_coroutine_threadsafe(_close_all(mine), self.loop).result(_EXIT_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_EXIT_SECONDS)


async def _close_all(clients: list[Closable]) -> None:
    reason = farewell.reason()
    await asyncio.gather(*(client.close(reason) for client in clients), return_exceptions=True)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


_lock = threading.Lock()
_thread: LoopThread | None = None


def shared() -> LoopThread:
    """The process's loop thread. Raises ClosedError in a process that was forked from one that has it."""
    global _thread
    with _lock:
        if _thread is not None and _thread.pid != os.getpid():
            raise ClosedError(
                f"psdist was in use in process {_thread.pid} when it forked: its network library does not survive a "
                "fork. Start processes by spawn (multiprocessing.set_start_method('spawn')), and make a client in each"
            )
        if _thread is None:
            _thread = LoopThread()
            atexit.register(_stop_at_exit)
        return _thread


def _stop_at_exit() -> None:
    if _thread is not None and _thread.pid == os.getpid():
        _thread.stop()
