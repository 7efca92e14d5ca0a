"""The one event loop of a process: a background thread that runs it for the synchronous API.

Invariants: there is at most one background thread per process. It is started on first use, and all clients share it.
All open clients of a process are on one loop. At interpreter exit the open clients of the thread leave the run.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, Protocol, TypeVar

from psdist import loop_monitor
from psdist.client.process.sigterm import StoppableClient, sigterm
from psdist.errors import ClosedError, ConfigurationError

T = TypeVar("T")

_UNWIND_SECONDS: Final = 2.0
#: A wait is left and begun again this often. An interrupt that comes just before a thread waits for a lock, or in
#: another thread, does not end that wait, and would be noticed at its end only.
_SIGNAL_SECONDS: Final = 0.5
_EXIT_SECONDS: Final = 3.0
#: For snapshots that have what their workers keep, which a busy machine takes longer for.
_SAVING_SECONDS: Final = 15.0


class LastSnapshot(Protocol):
    """What is needed of a client's snapshots."""

    @property
    def needs_last(self) -> bool:
        """Whether ``close`` takes one first, and waits as long as that takes."""


class Closable(StoppableClient, Protocol):
    """What is needed of a client."""

    @property
    def snapshots(self) -> LastSnapshot | None:
        """Those of a client that is connected; else None."""

    async def close(self, reason: str = "closed") -> None:
        """Leaves the run."""


#: Open clients of this process and the loop they are on.
open_clients: dict[int, tuple[Closable, asyncio.AbstractEventLoop]] = {}


def claim(client: Closable) -> None:
    """Registers ``client`` as open on the running loop. Raises ConfigurationError if others are on another loop."""
    running = asyncio.get_running_loop()
    for key, (_, other) in list(open_clients.items()):
        if other.is_closed():
            del open_clients[key]
        elif other is not running:
            raise ConfigurationError(
                "this process has a psdist client on another event loop: use AsyncClient in one loop, or Client, but "
                "not both at once (grpc.aio polls for one loop per process)"
            )
    open_clients[id(client)] = (client, running)


def release(client: Closable) -> None:
    """Removes a client that was closed."""
    open_clients.pop(id(client), None)


class _Call(Generic[T]):
    """A coroutine on the loop, for which another thread waits. It costs less than half of a future of
    ``run_coroutine_threadsafe``, which matters for small steps."""

    def __init__(
        self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, under_way: set[_Call[Any]] | None
    ) -> None:
        self._coroutine = coroutine
        self._loop = loop
        #: Calls that are given up when the worker leaves; None for one that is not. Touched on the loop alone.
        self._under_way = under_way
        self._task: asyncio.Task[T] | None = None
        #: Released when it has ended.
        self.ended = threading.Lock()
        self.ended.acquire()

    def begin(self) -> None:
        """Starts the coroutine. Runs on the loop."""
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._end)
        if self._under_way is not None:
            self._under_way.add(self)

    def cancel(self) -> None:
        """Cancels the coroutine. Runs on the loop."""
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if self._under_way is not None:
            self._under_way.discard(self)
        if not task.cancelled():
            task.exception()  # Who waits may have been told to end the script meanwhile: then nobody asks for it.
        self.ended.release()

    def result(self) -> T:
        """The result of the coroutine, or the error that it raised, once it has ended."""
        task, self._task = self._task, None  # An error must not keep the call's arrays alive by a cycle through here.
        assert task is not None
        try:
            return task.result()
        except asyncio.CancelledError:  # The loop has ended. Scripts catch Exception, which this is not.
            raise concurrent.futures.CancelledError from None
        finally:
            del task, self


class StartedCall(Generic[T]):
    """A coroutine that runs on the loop while the caller goes on. Made by ``LoopThread.start``."""

    def __init__(self, wait: Callable[[], T]) -> None:
        self._wait = wait

    def result(self) -> T:
        """Waits for the coroutine; its result, or the error that it raised. Interrupts end it, as in
        ``LoopThread.call``. To be called once."""
        return self._wait()


class LoopThread:
    """A daemon thread that runs an event loop (uvloop's where there is one)."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = _new_loop()
        self._stopped = False
        self._under_way: set[_Call[Any]] = set()
        #: Threads that have made calls.
        self._callers: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="psdist", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(loop_monitor.watch, "worker")
        self.loop.run_forever()

    @property
    def has_one_caller(self) -> bool:
        """Whether one thread alone has made calls."""
        return len(self._callers) <= 1

    def end_on_sigterm(self) -> None:
        """See ``sigterm``."""
        sigterm.install(self.loop, self._clients, self._give_up)

    def call(self, coroutine: Coroutine[Any, Any, T], *, reading: bool = False, ending: bool = False) -> T:
        """Runs ``coroutine`` on the loop and waits for its result.

        An interrupt (Ctrl-C) cancels the coroutine, waits until it no longer uses the caller's arrays, and is raised.
        When this worker leaves because of SIGTERM, the call is given up and SystemExit is raised (see ``sigterm``).

        reading: the coroutine changes nothing. ending: it is part of the shutdown and is not given up.
        """
        call = self._made(coroutine, reading=reading, ending=ending)
        return self._wait(call, reading=reading, ending=ending, begins=True)

    def start(self, coroutine: Coroutine[Any, Any, T], *, reading: bool = False) -> StartedCall[T]:
        """Runs ``coroutine`` on the loop, and returns at once. Arguments as for ``call``."""
        call = self._made(coroutine, reading=reading, ending=False)
        self.loop.call_soon_threadsafe(self._begin, call, reading)
        return StartedCall(lambda: self._wait(call, reading=reading))

    def _made(self, coroutine: Coroutine[Any, Any, T], *, reading: bool, ending: bool) -> _Call[T]:
        """A call that may be begun. Raises why it may not."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ClosedError("a synchronous psdist call was made on psdist's own loop thread: use AsyncClient there")
        if self._stopped:
            coroutine.close()
            raise ClosedError("psdist has ended in this process, which is about to exit: make calls before")
        if not ending:
            self._check_end(coroutine, reading)
        self._callers.add(threading.get_ident())
        return _Call(coroutine, self.loop, None if ending else self._under_way)

    def _wait(self, call: _Call[T], *, reading: bool, ending: bool = False, begins: bool = False) -> T:
        """The result of a call, which ``begins`` only now."""
        try:
            if begins:
                self.loop.call_soon_threadsafe(self._begin, call, reading)
            while not call.ended.acquire(timeout=_SIGNAL_SECONDS):
                pass  # The interpreter looks for signals between two waits.
        except BaseException:
            self.loop.call_soon_threadsafe(call.cancel)
            call.ended.acquire(timeout=_UNWIND_SECONDS)
            raise
        if not ending:
            sigterm.check(reading=reading)
        return call.result()

    def _begin(self, call: _Call[Any], reading: bool) -> None:
        """Starts a call on the loop. If this worker began to leave after the call was made, the call is given up."""
        call.begin()
        if call in self._under_way and sigterm.leaving and not (reading and sigterm.raised):
            call.cancel()

    @staticmethod
    def _check_end(coroutine: Coroutine[Any, Any, Any], reading: bool) -> None:
        try:
            sigterm.check(reading=reading)
        except BaseException:  # Also SystemExit: a coroutine that nobody awaits would be warned of.
            coroutine.close()
            raise

    def _clients(self) -> list[Closable]:
        """The clients that are open on this loop."""
        return [client for client, owner in list(open_clients.values()) if owner is self.loop]

    def _give_up(self) -> None:
        """Cancels all calls under way, because this worker leaves. Runs on the loop."""
        for call in list(self._under_way):
            call.cancel()

    def stop(self) -> None:
        """Closes the clients on the loop and ends the loop. Waits for snapshots that have their state."""
        self._stopped = True
        mine = self._clients()
        closing = asyncio.run_coroutine_threadsafe(_close_all(mine), self.loop)
        late = time.monotonic() + _SAVING_SECONDS
        while not concurrent.futures.wait([closing], _EXIT_SECONDS).done:
            if time.monotonic() > late or not any(_is_saving(client) for client in mine):
                break
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_EXIT_SECONDS)


def _is_saving(client: Closable) -> bool:
    return (snapshots := client.snapshots) is not None and snapshots.needs_last


async def _close_all(clients: list[Closable]) -> None:
    reason = sigterm.reason()
    await asyncio.gather(*(client.close(reason) for client in clients), return_exceptions=True)
    await sigterm.close()


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
