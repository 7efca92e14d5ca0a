"""Simulated event loop: one thread, virtual time, many nodes, and a seed that decides every open choice.

Each handle belongs to the node (a process of the simulated cluster) whose context scheduled it. A node runs its own
handles in the order in which they were scheduled, as a real loop does; the next node to run is drawn. A handle takes a
little virtual time, so events that arrive meanwhile come between two handles. When nothing is ready, the clock jumps to
the next timer.

A node that crashes loses its handles immediately: nothing of it runs again, not even ``finally``. Handles of a paused
node wait. Work for threads and executors runs synchronously.

The loop has no files or sockets. The network is in ``network``, the disk in ``disk``.

Invariants: The same seed gives the same trace. If nothing is ready, no timer is set and the run is not over, that is a
``Deadlock``.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import heapq
import random
import sys
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np

T = TypeVar("T")

_CURRENT: ContextVar[Node | None] = ContextVar("node", default=None)
#: Number of drawn handle durations (virtual seconds), used in turn.
_COSTS = 256
#: Largest number of handles that run after the run is over.
_SETTLING = 10_000
#: Size limit in bytes of messages that may contain maps.
_SMALL_BYTES = 4096


class Deadlock(AssertionError):
    """All nodes are waiting, and no timer will wake them."""


class TooLong(AssertionError):
    """The run exceeded its limit of virtual time."""


class Failed(AssertionError):
    """An error was not caught: the first of ``failures``."""


class Handle:
    """A scheduled callback that can be cancelled."""

    __slots__ = ("args", "callback", "cancelled_", "context", "node", "when_")

    def __init__(
        self, node: Node, callback: Callable[..., Any], args: tuple[Any, ...], context: Context, when: float
    ) -> None:
        self.node = node
        self.callback = callback
        self.args = args
        self.context = context
        self.when_ = when
        self.cancelled_ = False

    def cancel(self) -> None:
        """Cancel the callback."""
        self.cancelled_ = True
        self.args = ()

    def cancelled(self) -> bool:
        """True if it was cancelled."""
        return self.cancelled_

    def when(self) -> float:
        """Return the time at which it is due."""
        return self.when_


class Node:
    """One life of one process. Made by ``SimLoop.node``."""

    def __init__(self, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.dead = False
        self.paused = False
        self.paused_since = 0.0
        #: True if its kernel and its transport answer while it is paused: only the interpreter is held.
        self.answers_pings = False
        #: Virtual seconds without a processor after each handle; ``resting`` is true during these.
        self.starved_seconds = 0.0
        self.resting = False
        self.ready: deque[Handle] = deque()
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.context = copy_context()
        self.context.run(_CURRENT.set, self)

    def __repr__(self) -> str:
        return f"<node {self.name}>"


#: A simulated loop has only the methods that psdist calls.
_AnyLoop: Any = asyncio.AbstractEventLoop


class SimLoop(_AnyLoop):
    """Event loop of one simulated run.

    rng: random stream of the schedule.
    handle_seconds: mean virtual time of a handle.
    """

    def __init__(self, rng: random.Random, handle_seconds: float = 0.0) -> None:
        self._rng = rng
        self._now = 1000.0
        self._costs = [handle_seconds * 2 * rng.random() for _ in range(_COSTS)]
        self._timers: list[tuple[float, int, Handle]] = []
        self._order = 0
        self._runnable: list[Node] = []
        self._nodes: list[Node] = []
        self._closed = False
        self._running = False
        self._stop = False
        #: Pending tasks of crashed nodes: holding a reference keeps their code from running.
        self._graveyard: list[asyncio.Task[Any]] = []
        self._hash = hashlib.blake2b(digest_size=16)
        #: Uncaught errors, with their place.
        self.failures: list[str] = []
        #: Number of handles that ran.
        self.steps = 0
        self.lines: list[str] | None = None
        self.world = self.node("world", "world")

    # --- nodes --------------------------------------------------------------------------------------------------------

    def node(self, name: str, host: str) -> Node:
        """Return a new node; its process starts with ``start``."""
        node = Node(name, host)
        self._nodes.append(node)
        return node

    def current(self) -> Node:
        """Return the running node."""
        return _CURRENT.get() or self.world

    def start(self, node: Node, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` in ``node``. Its error fails the run."""
        task = self.create_task(work, context=node.context)
        task.add_done_callback(self._main_ended, context=node.context)
        return task

    def _main_ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.call_exception_handler({"message": "a process failed", "exception": error})

    def call_on(self, node: Node, callback: Callable[..., Any], *args: Any) -> None:
        """Run ``callback`` in ``node`` as soon as possible."""
        self.call_soon(callback, *args, context=node.context)

    def world_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Run ``callback`` outside all nodes."""
        self.call_on(self.world, callback, *args)

    def crash(self, node: Node) -> None:
        """End ``node`` between two handles, without ``finally``."""
        node.dead = True
        self._graveyard += [task for task in node.tasks if not task.done()]
        node.ready.clear()
        if node in self._runnable:
            self._runnable.remove(node)

    def pause(self, node: Node) -> None:
        """Pause ``node``."""
        node.paused, node.paused_since = True, self._now
        if node in self._runnable:
            self._runnable.remove(node)

    def resume(self, node: Node) -> None:
        """Resume ``node``. It finds everything that arrived meanwhile."""
        node.paused = node.answers_pings = False
        if node.ready and not node.dead and not node.resting:
            self._runnable.append(node)

    def _rest(self, node: Node) -> None:
        """Let a starved node wait for the processor before its next handle."""
        node.resting = True
        if node in self._runnable:
            self._runnable.remove(node)
        self.call_at(self._now + node.starved_seconds, self._wake, node, context=self.world.context)

    def _wake(self, node: Node) -> None:
        node.resting = False
        if node.ready and not node.dead and not node.paused:
            self._runnable.append(node)

    # --- time and trace -----------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    async def after(self, seconds: float) -> None:
        """Wait for ``seconds`` of virtual time."""
        future = self.create_future()
        timer = self.call_later(seconds, set_done, future)
        try:
            await future
        finally:
            timer.cancel()

    def trace(self, text: str, data: bytes = b"") -> None:
        """Add an event, with its time, to the trace that identifies the run."""
        line = f"{self._now:.9f} {text} {len(data)}"
        self._hash.update(line.encode())
        # protobuf serializes maps in any order, and small messages contain maps.
        self._hash.update(_sorted(data) if len(data) <= _SMALL_BYTES else data)
        if self.lines is not None:
            self.lines.append(f"{line} {zlib.crc32(_sorted(data)):08x}" if data else line)

    @property
    def trace_hash(self) -> str:
        """Digest of the trace so far."""
        return self._hash.hexdigest()

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Run until ``work`` is done. Raises Deadlock, Failed, TooLong (after ``seconds`` of virtual time), and the
        errors of ``work``."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._finalize)
        asyncio._set_running_loop(self)
        self._running = True
        collects = gc.isenabled()
        gc.disable()  # Garbage collection at arbitrary times would not follow from the seed.
        deadline = self._now + seconds
        try:
            main = self.create_task(work, context=self.world.context)
            while not main.done() and not self.failures:
                self._turn(deadline)
            if self.failures:
                raise Failed(self.failures[0])
            self._settle()
            return main.result()
        finally:
            self._running = False
            if collects:
                gc.enable()
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _turn(self, deadline: float) -> None:
        """Run one handle."""
        timers, runnable = self._timers, self._runnable
        if not runnable:
            self._jump()
        while timers and timers[0][0] <= self._now:
            self._enqueue(heapq.heappop(timers)[2])
        if self._now > deadline:
            raise TooLong(f"not done at {self._now:.3f}")
        if runnable:
            self._run_next()

    def _settle(self) -> None:
        """Run ready handles, at most ``_SETTLING``: an error may be on its way to the task that awaits it."""
        for _ in range(_SETTLING):
            if not self._runnable:
                return
            self._run_next()

    def _run_next(self) -> None:
        """Run the next handle of a random node that has one ready."""
        runnable = self._runnable
        number = int(self._rng.random() * len(runnable)) if len(runnable) > 1 else 0
        node = runnable[number]
        handle = node.ready.popleft()
        if not node.ready:
            runnable[number] = runnable[-1]
            runnable.pop()
        if handle.cancelled_:
            return
        self.steps += 1
        self._now += self._costs[self.steps % _COSTS]
        try:
            handle.context.run(handle.callback, *handle.args)
        except Exception as error:
            self.call_exception_handler({"message": f"{handle.callback!r:.200}", "exception": error})
        if node.starved_seconds:
            self._rest(node)

    def _jump(self) -> None:
        """Advance the clock to the next timer, as nothing is ready."""
        timers = self._timers
        while timers and (timers[0][2].cancelled_ or timers[0][2].node.dead):
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(f"all nodes wait for ever at {self._now:.3f}")
        self._now = max(self._now, timers[0][0])

    def _enqueue(self, handle: Handle) -> None:
        node = handle.node
        if node.dead or handle.cancelled_:
            return
        if not node.ready and not node.paused and not node.resting:
            self._runnable.append(node)
        node.ready.append(handle)

    # --- interface of asyncio -----------------------------------------------------------------------------------------

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        """See asyncio."""
        if context is None:
            context = copy_context()
        handle = Handle(context.get(_CURRENT) or self.world, callback, args, context, self._now)
        if not self._closed:
            self._enqueue(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        """See asyncio."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        """See asyncio."""
        if context is None:
            context = copy_context()
        handle = Handle(context.get(_CURRENT) or self.world, callback, args, context, when)
        if not self._closed:
            self._order += 1
            heapq.heappush(self._timers, (when, self._order, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        """See asyncio."""
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None, **_: Any
    ) -> asyncio.Task[Any]:
        """See asyncio."""
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        node = _CURRENT.get() if context is None else context.get(_CURRENT)
        (node or self.world).tasks.add(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Run ``func`` now. A result with ``begin`` (a write to a disk) completes the future itself."""
        future = self.create_future()
        try:
            result = func(*args)
        except Exception as error:
            self.call_soon(set_error, future, error)
            return future
        if hasattr(result, "begin"):
            result.begin(self, self.current(), future)
        else:
            self.call_soon(set_done, future, result)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Fail the run with an uncaught error."""
        node = self.current()
        if not self._closed and not node.dead:
            error = context.get("exception")
            self.failures.append(f"{context.get('message')}: {error!r:.400}{where(error)}")

    def get_debug(self) -> bool:
        """Return False: debug mode is never on."""
        return False

    def is_running(self) -> bool:
        """True while ``run`` is running."""
        return self._running

    def is_closed(self) -> bool:
        """True if the loop was closed."""
        return self._closed

    def close(self) -> None:
        """Drop everything. Objects that die later find a loop that accepts no callbacks. Errors of tasks that nobody
        awaited are failures."""
        done = [node for node in self._nodes if not node.dead and not node.ready]
        for task in [task for node in done for task in node.tasks]:
            if task._log_traceback and not task.cancelled():
                error = task.exception()
                self.failures.append(f"nobody asked {task.get_name()}: {error!r:.400}{where(error)}")
        self._nodes.clear()
        self._closed = True
        self._timers.clear()
        self._runnable.clear()
        buried: Any
        for buried in self._graveyard:
            buried._log_destroy_pending = False
        self._graveyard.clear()

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed and not self.current().dead:
            self.call_soon(self._close_generator, generator)

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.create_task(generator.aclose())


def _sorted(data: bytes) -> bytes:
    """Return the bytes in ascending order. (``sorted`` would make an object of each.)"""
    return np.sort(np.frombuffer(data, np.uint8)).tobytes()


def set_done(future: asyncio.Future[Any], result: Any = None) -> None:
    """Set a result, unless the task that waits for it was cancelled."""
    if not future.done():
        future.set_result(result)


def set_error(future: asyncio.Future[Any], error: BaseException) -> None:
    """Set an error, unless the task that waits for it was cancelled."""
    if not future.done():
        future.set_exception(error)


def where(error: BaseException | None) -> str:
    """Return the innermost lines of an error's traceback."""
    trace = error.__traceback__ if error is not None else None
    lines = []
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return f" at {' < '.join(reversed(lines[-4:]))}" if lines else ""
