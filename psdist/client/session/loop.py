"""The event loop of a process: a background thread that runs it for the synchronous API, and for which processes.

**Siblings**, as torch, JAX, Ray Train and ``multiprocessing`` know them. Without a scheduler each of them would train
alone, on all data. The ranks of torch can train together, because they share a store. Others are refused. The variables
of launchers are in ``settings.other_launchers``.

**Spawned processes**: the script's training must not run in them. A process started by "spawn" or "forkserver" imports
the script's main module again. Without the guard ``if __name__ == "__main__":`` it would train as well: alone, or as a
second worker of the same rank. Forked processes are refused by ``ProcessBound``.

Invariants: There is at most one background thread per process. It starts on first use, and all clients share it. All
open clients of a process use one loop. At interpreter exit, the thread's open clients leave the run.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar

from psdist import machine
from psdist.client.session.script import StoppableClient, sigterm
from psdist.errors import ClosedError, ConfigurationError, DuplicateMemberError, InvalidArgumentError
from psdist.monitoring.phase_timer import PhaseTimer
from psdist.settings.grpc_settings import grpc_came_first
from psdist.settings.other_launchers import check_alone

#: Variables by which torch's ``env://`` finds its store.
_RENDEZVOUS: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torch_group_size() -> int:
    """Return the size of torch's default process group; 0 if this process has none."""
    dist: Any = sys.modules.get("torch.distributed")
    has_group = dist is not None and dist.is_available() and dist.is_initialized()
    return int(dist.get_world_size()) if has_group else 0


def names_torch_store(environ: Mapping[str, str]) -> bool:
    """True if the environment names torch's store for several ranks, as torchrun sets it, and this is one of them.

    A process of ``multiprocessing`` has inherited these variables: they describe its parent.
    """
    several = environ.get("WORLD_SIZE", "") not in ("", "0", "1") and all(environ.get(name) for name in _RENDEZVOUS)
    return several and multiprocessing.parent_process() is None


def check_no_siblings(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError if this process is one of several that would each train alone."""
    remedy = "call torch.distributed.init_process_group in each process first, or set PSDIST_SCHEDULER=HOST:PORT"
    check_alone(environ, remedy)
    if sign := _sign():
        raise ConfigurationError(
            f"{sign}, and no scheduler is named: each of such processes would train alone. To train together, start "
            "the script with 'psdist run' or torchrun instead, or call torch.distributed.init_process_group in each "
            "process first. If each process is to train a model of its own, as in a search for hyperparameters, call "
            "psdist.init(alone=True) in each before anything else of psdist"
        )


def _sign() -> str:
    """Return how this process is known to be one of several; empty if it is not."""
    if (count := _jax_processes()) > 1:
        return f"jax.distributed has {count} processes"
    if (count := _ray_train_workers()) > 1:
        return f"Ray Train started {count} workers"
    parent = multiprocessing.parent_process()
    if parent is not None and torch_group_size() != 1:  # A group of one says that there are no others.
        return f"this process was started by multiprocessing (its parent is process {parent.pid})"
    return ""


def _jax_processes() -> int:
    # jax.process_count() would start the devices.
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return int(getattr(state, "num_processes", None) or 0)


def _ray_train_workers() -> int:
    train: Any = sys.modules.get("ray.train")
    with suppress(Exception):  # Outside of a training it has no context. Its errors differ by version.
        return int(train.get_context().get_world_size()) if train is not None else 0
    return 0


@contextmanager
def placed(rank: int, size: int, local_rank: int | None, local_size: int) -> Iterator[None]:
    """Let the environment state this process's place: the given one may be that of a parent, or of another launcher.

    local_rank: None keeps the given one.
    """
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local_size}
    place |= {} if local_rank is None else {"LOCAL_RANK": local_rank}
    before = {name: os.environ.get(name) for name in place}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_GUARD: Final = 'if __name__ == "__main__":'


def check_guarded() -> None:
    """Raise ConfigurationError if ``multiprocessing`` is importing the script's main module in a new process."""
    # Set until the main module is imported. Only afterwards does the process know its parent.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "psdist.init() is called in a process that multiprocessing started (a data loader's, for example), because "
            f"it imports the script's main module: put the script's statements into a function, and call it under "
            f"'{_GUARD}'"
        )


def explained(error: DuplicateMemberError) -> DuplicateMemberError:
    """Return the error of a registration, with the remedy if this process is not the worker itself."""
    if multiprocessing.parent_process() is None:
        return error
    return DuplicateMemberError(
        f"{error.message}. This process was started by multiprocessing and inherited the rank of the worker that "
        f"started it: call psdist.init() in one of them, under '{_GUARD}', and let the launcher start the workers "
        "(--nproc-per-node)",
        **error.details,
    )


class ProcessBound:
    """Base of classes whose objects are neither copied nor pickled."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise InvalidArgumentError(
            f"a {name} cannot be pickled or copied: it holds connections of this process. In another process call "
            "psdist.init() or make a client, and send arrays between processes instead"
        )


T = TypeVar("T")

logger = logging.getLogger("psdist")

_UNWIND_SECONDS: Final = 2.0
#: Length of one wait for a lock. A signal that arrives just before the wait, or in another thread, does not end it, and
#: is noticed between two waits.
_SIGNAL_SECONDS: Final = 0.5
_EXIT_SECONDS: Final = 3.0
#: Time for snapshots of workers that keep state. A busy machine needs longer.
_SAVING_SECONDS: Final = 15.0


class LastSnapshot(Protocol):
    """The part of a client's snapshots that the loop needs."""

    @property
    def needs_last(self) -> bool:
        """True if ``close`` takes a last snapshot first, and waits for it."""


class Closable(StoppableClient, Protocol):
    """The part of a client that the loop needs."""

    @property
    def snapshots(self) -> LastSnapshot | None:
        """Snapshots of a connected client, else None."""

    async def close(self, reason: str = "closed") -> None:
        """Leave the run."""


#: Open clients of this process and their loops.
open_clients: dict[int, tuple[Closable, asyncio.AbstractEventLoop]] = {}


def claim(client: Closable) -> None:
    """Register ``client`` as open on the running loop. Raises ConfigurationError if others are on another loop."""
    running = asyncio.get_running_loop()
    for key, (_, other) in list(open_clients.items()):
        if other.is_closed():
            del open_clients[key]
        elif other is not running:
            raise ConfigurationError(
                "this process has a psdist client on another event loop: use AsyncClient in one loop, or Client, but "
                "not both (grpc.aio polls for one loop per process)"
            )
    open_clients[id(client)] = (client, running)


def release(client: Closable) -> None:
    """Remove a closed client."""
    open_clients.pop(id(client), None)


class _Call(Generic[T]):
    """Coroutine on the loop, and the thread that waits for it.

    It costs less than half of a future of ``run_coroutine_threadsafe``, which matters for small steps.
    """

    def __init__(
        self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, under_way: set[_Call[Any]] | None
    ) -> None:
        self._coroutine = coroutine
        self._loop = loop
        #: Calls to cancel when the worker leaves; None if this one is not. Used on the loop only.
        self._under_way = under_way
        self._task: asyncio.Task[T] | None = None
        #: True once a thread has waited for it for a while.
        self.is_awaited = False
        #: Released when the coroutine has ended, and set before that.
        self.ended = threading.Lock()
        self.has_ended = False
        self.ended.acquire()

    def begin(self) -> None:
        """Start the coroutine. Runs on the loop."""
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._end)
        if self._under_way is not None:
            self._under_way.add(self)

    def cancel(self) -> None:
        """Cancel the coroutine after its first step. Runs on the loop.

        Before that, Python would warn of the coroutines that it has not awaited yet.
        """
        if self._task is not None:
            self._loop.call_soon(self._task.cancel)

    def runs(self, task: asyncio.Task[Any]) -> bool:
        """Return True if the task is that of the coroutine."""
        return self._task is task

    def _end(self, task: asyncio.Task[T]) -> None:
        if self._under_way is not None:
            self._under_way.discard(self)
        if not task.cancelled():
            task.exception()  # Marks it as retrieved: the waiting thread may have left because the script ends.
        self.has_ended = True
        self.ended.release()

    def result(self) -> T:
        """Return the result of the finished coroutine, or raise its error."""
        task, self._task = self._task, None  # An error must not keep the call's arrays alive by a cycle through here.
        assert task is not None
        try:
            return task.result()
        except asyncio.CancelledError:  # The loop has ended. Scripts catch Exception, which this is not.
            raise concurrent.futures.CancelledError from None
        finally:
            del task, self


class StartedCall(Generic[T]):
    """Coroutine that runs on the loop while the caller continues. Made by ``LoopThread.start``."""

    def __init__(self, wait: Callable[[], T], call: _Call[T]) -> None:
        self._wait = wait
        self._call = call

    def result(self) -> T:
        """Wait for the coroutine, and return its result or raise its error. Call it once.

        Interrupts cancel the coroutine, as in ``LoopThread.call``.
        """
        return self._wait()

    def mark_awaited(self, is_awaited: bool) -> None:
        """Record whether a thread of the script waits for the coroutine by other means than ``result``."""
        self._call.is_awaited = is_awaited


class Handle(Generic[T]):
    """Call under way, of ``async_op=True``. Its arrays belong to psdist until ``wait`` returns."""

    def __init__(self, started: StartedCall[T]) -> None:
        self._started: StartedCall[T] | None = started
        self._result: T | None = None

    def wait(self) -> T:
        """Wait for the call, and return its result or raise its error."""
        if self._started is not None:
            started, self._started = self._started, None
            self._result = started.result()
        return self._result  # type: ignore[return-value]  # set once the call has ended


class LoopThread:
    """Daemon thread that runs an event loop (uvloop's if it is installed)."""

    def __init__(self) -> None:
        machine.keep_buffers()  # Before this thread starts, which would have a heap of its own.
        self.pid = os.getpid()
        self.loop = _new_loop()
        self._stopped = False
        self._under_way: set[_Call[Any]] = set()
        #: Identities of the threads that have made calls.
        self._callers: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="psdist", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def has_one_caller(self) -> bool:
        """True if at most one thread has made calls."""
        return len(self._callers) <= 1

    def is_awaited(self, task: asyncio.Task[Any]) -> bool:
        """Return True if a thread waits for a call whose task this is. Runs on the loop."""
        return any(call.is_awaited and call.runs(task) for call in self._under_way)

    def end_on_sigterm(self) -> None:
        """End this process's script by SIGTERM as ``sigterm`` describes."""
        sigterm.install(self.loop, self._clients, self._give_up)

    def call(self, coroutine: Coroutine[Any, Any, T], *, reading: bool = False, ending: bool = False) -> T:
        """Run ``coroutine`` on the loop and wait for its result.

        An interrupt (Ctrl-C) cancels the coroutine, waits until it no longer uses the caller's arrays, and is raised.
        When this worker leaves because of SIGTERM, the call is cancelled and SystemExit is raised (see ``sigterm``).

        reading: the coroutine changes nothing.
        ending: it is part of the shutdown and is not cancelled.
        """
        call = self._made(coroutine, reading=reading, ending=ending)
        return self._wait(call, reading=reading, ending=ending, begins=True)

    def start(self, coroutine: Coroutine[Any, Any, T], *, reading: bool = False) -> StartedCall[T]:
        """Run ``coroutine`` on the loop, and return immediately. Arguments as for ``call``."""
        call = self._made(coroutine, reading=reading, ending=False)
        self.loop.call_soon_threadsafe(self._begin, call, reading)
        return StartedCall(lambda: self._wait(call, reading=reading), call)

    def call_or_start(self, coroutine: Coroutine[Any, Any, T], async_op: bool) -> T | Handle[T]:
        """Run ``coroutine`` as ``call`` does; as ``start`` does, and return a handle, if ``async_op`` is true."""
        return Handle(self.start(coroutine)) if async_op else self.call(coroutine)

    def _made(self, coroutine: Coroutine[Any, Any, T], *, reading: bool, ending: bool) -> _Call[T]:
        """Return a call that may be started. Raises the error that forbids it."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise ClosedError("a synchronous psdist call was made on psdist's own loop thread: use AsyncClient there")
        if self._stopped:
            coroutine.close()
            raise ClosedError("psdist has shut down in this process, which is about to exit: make calls earlier")
        if not ending and sigterm.leaving:
            try:
                sigterm.check(reading=reading)
            except BaseException:  # Also for SystemExit: an unawaited coroutine would cause a warning.
                coroutine.close()
                raise
        self._callers.add(threading.get_ident())
        return _Call(coroutine, self.loop, None if ending else self._under_way)

    def _wait(self, call: _Call[T], *, reading: bool, ending: bool = False, begins: bool = False) -> T:
        """Return the result of a call. begins: the call is still to be started."""
        try:
            if begins:
                self.loop.call_soon_threadsafe(self._begin, call, reading)
            while not call.ended.acquire(timeout=_SIGNAL_SECONDS):
                call.is_awaited = True  # The interpreter handles signals between two waits.
        except BaseException:
            self.loop.call_soon_threadsafe(call.cancel)
            if not call.has_ended:  # Otherwise the interrupted wait may have taken the lock already.
                call.ended.acquire(timeout=_UNWIND_SECONDS)
            raise
        if not ending and sigterm.leaving:
            sigterm.check(reading=reading)
        return call.result()

    def _begin(self, call: _Call[Any], reading: bool) -> None:
        """Start a call on the loop. Cancel it if this worker has begun to leave since the call was made."""
        call.begin()
        if call in self._under_way and sigterm.leaving and not (reading and sigterm.raised):
            call.cancel()

    def _clients(self) -> list[Closable]:
        """Return the open clients on this loop."""
        return [client for client, owner in list(open_clients.values()) if owner is self.loop]

    def _give_up(self) -> None:
        """Cancel all calls under way, because this worker leaves. Runs on the loop."""
        for call in list(self._under_way):
            call.cancel()

    def stop(self) -> None:
        """Close the clients on the loop and end the loop. Waits for snapshots that include the clients' state."""
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
    """Return the process's loop thread. Raises ClosedError in a fork of a process that has one."""
    global _thread
    with _lock:
        if _thread is not None and _thread.pid != os.getpid():
            raise ClosedError(
                f"psdist was in use in process {_thread.pid} when it forked: its network library does not survive a "
                "fork. Start processes by spawn (multiprocessing.set_start_method('spawn')), and make a client in each"
            )
        if _thread is None:
            _thread = LoopThread()
            _warn_of_forks()
            atexit.register(_stop_at_exit)
        return _thread


def _stop_at_exit() -> None:
    if _thread is not None and _thread.pid == os.getpid():
        with sigterm.ignored():
            _thread.stop()
        sigterm.restore_default()


def _warn_of_forks() -> None:
    """Warn at the first fork of this process, if gRPC's fork handlers are active.

    They restart gRPC's threads in the forked process, which crashes occasionally (grpcio 1.85: 8 of 50 forks during
    training). ``import psdist`` turns them off, but gRPC reads the setting once, when it is imported, and handlers of
    the system cannot be removed. So a script that imported gRPC first is warned.
    """
    has_warned = False

    def warn() -> None:
        nonlocal has_warned
        if not has_warned:
            has_warned = True
            logger.warning(
                "this process forks, for a data loader perhaps, and imported grpc before psdist: gRPC's fork handlers "
                "are active, and may crash or block the forked process. Import psdist before grpc, set "
                "GRPC_ENABLE_FORK_SUPPORT=0 in the environment, or start processes by spawn"
            )

    if grpc_came_first:
        os.register_at_fork(before=warn)


# --- the synchronous API ----------------------------------------------------------------------------------------------


class Blocking(ProcessBound, Generic[T]):
    """Base of the synchronous API, whose methods run those of ``wrapped`` on the loop thread and wait for them.

    The classes of ``sync_client`` derive from it. Their methods are generated from the asyncio API.

    phases: clock of the calls of the script's threads.
    """

    def __init__(self, wrapped: T, phases: PhaseTimer) -> None:
        self._async = wrapped
        self._phases = phases

    def __repr__(self) -> str:
        return repr(self._async).replace("<Async", "<", 1)


async def on_loop(call: Callable[[], T]) -> T:
    """Make an ordinary call on the loop, for objects that only the loop's thread may use."""
    return call()
