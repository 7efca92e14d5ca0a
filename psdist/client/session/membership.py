"""The membership of this client in the run, over all of its incarnations. It does no I/O.

``worker_session`` reports registrations, expulsions, maps and news. Calls under way wait in ``ClusterView`` for a newer
map, or for the end of the server that they use. Every unit of work that an incarnation may not survive runs by
``run_in_incarnation``: the only place, with ``unless_dropped`` for blocking callers, that catches FencedError. Work
that does not survive is dropped (``DropCounter``).

Invariants: at most one incarnation of this client counts. Between the end of one and the start of the next,
``view.fenced`` holds the reason. ``view.fatal`` is set once, and no incarnation follows it. The epoch never decreases
within one incarnation. News that a server is gone ends attempts on it, and nothing else: only the scheduler decides
that something is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, cast, get_args

from psdist.client.core import routing
from psdist.client.core.routing import ServerNews
from psdist.client.session.waits import WaitTracker
from psdist.errors import (
    ClosedError,
    FencedError,
    InvalidArgumentError,
    PsdistError,
    PushDroppedError,
    ServerUnreachableError,
    copy_error,
)
from psdist.types import ClusterMap, Replica
from psdist.v1 import scheduler_pb2
from psdist.wire import convert


@dataclass(frozen=True, slots=True)
class Registration:
    """Identity of this client in the run."""

    run_id: str
    worker_id: str
    incarnation: int
    rank: int
    world_size: int
    lease_seconds: float
    heartbeat_seconds: float
    #: True if the scheduler takes heartbeats that lack unchanged counts.
    takes_changes: bool = False

    @classmethod
    def from_response(cls, response: scheduler_pb2.RegisterResponse) -> Registration:
        """Return the registration in the scheduler's answer."""
        return cls(
            response.run_id,
            response.member_id,
            response.incarnation,
            response.rank,
            response.world_size,
            response.lease_seconds,
            response.heartbeat_seconds or response.lease_seconds / 4,
            response.takes_changes,
        )

    def caller(self) -> dict[str, Any]:
        """Return the fields of a request that identify the caller."""
        return {"run_id": self.run_id, "worker_id": self.worker_id, "incarnation": self.incarnation}


class ClusterView:
    """The newest map and the news, with futures for waiting calls. Empty until this client is registered."""

    def __init__(self) -> None:
        self.cluster = ClusterMap("", 0)
        #: Replaced, never changed, so that a caller can compare it with its own copy.
        self.news = ServerNews()
        #: Set once, when the membership ends for good.
        self.fatal: PsdistError | None = None
        #: Set while the incarnation has ended, and the next has not begun.
        self.fenced: FencedError | None = None
        self._changed: asyncio.Future[None] | None = None
        self._watched: dict[Replica, asyncio.Future[PsdistError]] = {}

    # --- maps and news ------------------------------------------------------------------------------------------------

    def on_map(self, cluster: ClusterMap) -> None:
        """Replace the map, unless the new one is older."""
        if cluster.epoch < self.cluster.epoch:
            return
        self.cluster = cluster
        self.news = ServerNews(
            lost={name: text for name, text in self.news.lost.items() if cluster.entry(name) is not None}
        )
        self._wake()

    def on_server_lost(self, server_id: str, reason: str) -> None:
        """Record that a server is gone, before or after the map without it."""
        server = self.cluster.server(server_id)
        if server is not None:
            gone = {**self.news.gone, Replica(server_id, server.incarnation): reason}
            self.news = ServerNews(gone, self.news.lost)
            self._wake()

    def on_shards_lost(self, parameters: str, text: str) -> None:
        """Record that a part of some parameters is lost for good."""
        self.news = ServerNews(self.news.gone, {**self.news.lost, parameters: text})
        self._wake()

    def on_fatal(self, error: PsdistError) -> None:
        """End the membership: current and later calls fail with ``error``."""
        self.fatal = self.fatal or error
        self._wake()

    def on_fenced(self, error: FencedError) -> None:
        """End this incarnation: calls fail with ``error`` until the next one begins."""
        self.fenced = error
        self._wake()

    def start_incarnation(self, cluster: ClusterMap) -> None:
        """Start a new incarnation with the map of its registration."""
        self.fenced = None
        self.cluster, self.news = cluster, ServerNews()
        self._wake()

    # --- waiting calls ------------------------------------------------------------------------------------------------

    def loss_of(self, server_id: str, incarnation: int) -> asyncio.Future[PsdistError]:
        """Return a future for the error that ends attempts on this server: ServerUnreachableError once it is gone,
        another error once this client is out. Never cancel it."""
        server = Replica(server_id, incarnation)
        future = self._watched.get(server)
        if future is None:
            future = self._watched[server] = asyncio.get_running_loop().create_future()
            if error := self._end_of(server):
                future.set_result(error)
        return future

    async def changed(self, timeout: float | None = None) -> None:
        """Return when a map or news has arrived, or after ``timeout`` seconds."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._changed}, timeout=timeout)

    async def newer_than(self, epoch: int, timeout: float) -> None:
        """Return when the map is newer than ``epoch``, when this client is out, or after ``timeout`` seconds."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self.cluster.epoch <= epoch and self._out is None:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return
            await self.changed(left)

    # --- inner --------------------------------------------------------------------------------------------------------

    @property
    def _out(self) -> PsdistError | None:
        return self.fatal or self.fenced

    def _end_of(self, server: Replica) -> PsdistError | None:
        """Return the error that ends attempts on a server; None if it is alive."""
        if self._out is not None:
            return self._out
        if reason := routing.why_gone(self.cluster, self.news, server):
            return ServerUnreachableError(f"{server} is gone: {reason}", server=server)
        return None

    def _wake(self) -> None:
        """Wake the waiting calls. A server that is gone is no longer watched, because a newer map may list it again."""
        for server, future in list(self._watched.items()):
            error = self._end_of(server)
            if error is not None and not future.done():
                future.set_result(error)
            if future.done():
                del self._watched[server]
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None


logger = logging.getLogger("psdist")

# --- incarnations -----------------------------------------------------------------------------------------------------


async def run_in_incarnation(
    work: Callable[[], Awaitable[T]],
    on_fenced: Callable[[FencedError, int], Awaitable[bool]],
    incarnation: Callable[[], int] = lambda: 0,
) -> T | None:
    """Run a unit of work, again if its incarnation ends meanwhile. Returns None if the work was dropped.

    on_fenced: called with the error that ended the incarnation, and its number. Returns True to run the work again,
        in the next incarnation that it has waited for; False to drop the work. Raises why neither can be done.
    incarnation: the number of the incarnation that takes part now.
    """
    while True:
        number = incarnation()
        try:
            return await work()
        except FencedError as error:
            if not await on_fenced(error, number):
                return None


async def drop_when_fenced(_: FencedError, __: int) -> bool:
    """Drop the work: nobody needs its result once its incarnation has ended."""
    return False


def unless_dropped(call: Callable[[], T]) -> T | None:
    """Return the result of a blocking call on a step in buckets; None if the step was dropped."""
    try:
        return call()
    except FencedError:
        return None


@dataclass(frozen=True, slots=True)
class Expulsion:
    """Why an incarnation of this client ended. rolled_back: because the run rolled back to a snapshot."""

    reason: str
    rolled_back: bool


class WorkerMembership:
    """Membership of one client.

    peer: the scheduler's name for messages.
    rejoins: True if it registers again after it was expelled; else that is the end.
    """

    def __init__(self, peer: str, waits: WaitTracker, *, rejoins: bool) -> None:
        self.peer = peer
        self.rejoins = rejoins
        self.view = ClusterView()
        #: How the previous incarnation ended.
        self.expulsion = Expulsion("", rolled_back=False)
        #: Parameter sets that were ready when this incarnation began. A worker that takes part in one joins a training
        #: under way.
        self.ready_before: frozenset[str] = frozenset()
        self._waits = waits
        self._registration: Registration | None = None

    @property
    def registration(self) -> Registration:
        """Identity of this client in the run. Raises ClosedError before it was registered."""
        if self._registration is None:
            raise ClosedError("the client is not connected: use it in a with block, or call connect() first")
        return self._registration

    def start_incarnation(self, response: scheduler_pb2.RegisterResponse) -> None:
        """Start the incarnation that was just registered."""
        self._registration = Registration.from_response(response)
        cluster = convert.map_from_proto(response.map) if response.HasField("map") else ClusterMap("", 0)
        self.ready_before = frozenset(entry.spec.name for entry in cluster.parameters if entry.ready)
        self.view.start_incarnation(cluster)

    def on_expelled(self, fenced: FencedError, silence: str) -> None:
        """End the incarnation. silence: how long this process gave no sign of life, for a message."""
        rolled_back = "rolled_back" in fenced.details
        # The errors advise to register again, which this client does.
        text = fenced.message.removesuffix("; register again").removesuffix(": register again")
        self.expulsion = Expulsion(text if rolled_back else f"{text} ({silence})", rolled_back)
        self.view.on_fenced(fenced)

    def raise_if_expelled(self, incarnation: int | None = None) -> None:
        """Raise the reason if this client is no member; FencedError if ``incarnation`` has ended."""
        if self.view.fatal is not None:
            raise copy_error(self.view.fatal)
        if incarnation is None:
            return
        if self.view.fenced is not None:
            raise copy_error(self.view.fenced)
        if incarnation != self.registration.incarnation:
            raise FencedError(f"incarnation {incarnation} of {self.registration.worker_id} was fenced")

    async def wait_until_rejoined(self, fenced: FencedError, incarnation: int) -> bool:
        """Wait for the next incarnation after ``fenced`` ended work of ``incarnation``. Returns True.

        Raises what ends the membership for good.
        """
        if not self.rejoins:
            raise copy_error(fenced)
        with self._waits.open(f"for {self.peer} to take {self.registration.worker_id} back"):
            while self.view.fenced is not None or self.registration.incarnation == incarnation:
                self.raise_if_expelled()
                await self.view.changed()
        return True

    async def retry_across_incarnations(self, work: Callable[[Registration], Awaitable[T]]) -> T:
        """Run ``work``, and run it again as the next incarnation if this one ended meanwhile."""

        def attempt() -> Awaitable[T]:
            self.raise_if_expelled()
            if self.view.fenced is not None:
                raise self.view.fenced
            return work(self.registration)

        result = await run_in_incarnation(attempt, self.wait_until_rejoined, lambda: self.registration.incarnation)
        return cast(T, result)


# --- dropped pushes ---------------------------------------------------------------------------------------------------

#: "warn": a warning, and PushDroppedError for the third in a row. "raise": PushDroppedError for the first. "ignore": a
#: log entry of level INFO. A drop by a rollback is always a warning.
OnDrop = Literal["warn", "raise", "ignore"]
IN_A_ROW_MAX: Final = 3


def check_on_drop(value: object) -> None:
    """Raise InvalidArgumentError if ``value`` is no OnDrop."""
    if value not in get_args(OnDrop):
        raise InvalidArgumentError(f"on_drop={value!r:.60} is unknown: use one of {', '.join(get_args(OnDrop))}")


class DropCounter:
    """Dropped pushes of one handle.

    count: all of them.
    writes: times that weights which the script wrote were dropped before their push.
    """

    def __init__(self, on_drop: OnDrop) -> None:
        self._on_drop = on_drop
        self.count = self.writes = 0
        self._in_a_row = 0

    def not_dropped(self) -> None:
        """End a row of drops, because a push was answered."""
        self._in_a_row = 0

    def add(self, text: str, expulsion: Expulsion) -> None:
        """Count a dropped push, and report it according to ``on_drop``. Raises PushDroppedError.

        text: the push, the cause, and how the worker continues.
        """
        self.count += 1
        if expulsion.rolled_back:
            logger.warning("%s", text)
            return
        self._in_a_row += 1
        if self._on_drop == "raise" or (self._on_drop == "warn" and self._in_a_row >= IN_A_ROW_MAX):
            before, self._in_a_row = self._in_a_row - 1, 0
            row = f" So were the {before} before it." if before else ""
            raise PushDroppedError(
                f"{text}.{row} Its gradients are being discarded: find out what keeps this worker from answering, "
                "raise --worker-timeout, or set on_drop='ignore'"
            )
        self._log(text)

    def add_write(self, text: str, expulsion: Expulsion) -> None:
        """Count weights that were dropped before their push, and report them. Raises PushDroppedError for ``on_drop``
        "raise". text: see ``add``."""
        self.writes += 1
        if self._on_drop == "raise" and not expulsion.rolled_back:
            raise PushDroppedError(f"{text}. Write them again if they are still wanted, or set on_drop='ignore'")
        self._log(text)

    def _log(self, text: str) -> None:
        logger.log(logging.INFO if self._on_drop == "ignore" else logging.WARNING, "%s", text)


T = TypeVar("T")
