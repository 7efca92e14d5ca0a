"""Driver of the machine: passes events to it, and carries out its effects.

``post`` passes an event to the machine immediately. A single task, ``run``, carries out effects in order, and makes the
changes of several events durable in one commit. Workers' registrations wait for that task, and those that arrived
meanwhile share an epoch, because each epoch is sent to everybody; in a large run they wait a little longer, so that its
members spend a bounded share of their time on learning of each other. A failed write ends the scheduler, so that
nothing is sent that is not durable.

``service`` handles RPCs. Here are the calls and sessions in progress, which effects answer: their numbers, their queued
messages, and the map that they get. Most sessions have the same earlier map, so a map is serialized once in each form,
whole and as changes since earlier maps, and shared. That is done when the first session is sent it: a map that a newer
one replaced in all outboxes costs nothing.

Invariant: The event of a call's end is posted once the call is over, whatever ended it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from functools import cached_property
from itertools import count
from typing import Any, Final, Generic, TypeAlias, TypeVar

from psdist import __version__
from psdist.addresses import parse_address
from psdist.errors import ClosedError, ConfigurationError, LimitExceededError, NoStorageError, PsdistError
from psdist.map_difference import difference
from psdist.monitoring import run_json
from psdist.monitoring.problems import Announcer, Watch
from psdist.snapshots.storage import Storage
from psdist.types import ClusterMap
from psdist.v1 import common_pb2
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert
from psdist.wire.convert import make_message
from psdist.wire.limits import EVENTS_MAX, UNREAD_MAX
from psdist_scheduler import conversions, run_status
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster import Cluster
from psdist_scheduler.decide.cluster_events import Event, Probed, Register, Tick
from psdist_scheduler.decide.cluster_state import EventRecord, ParametersRecord, ProbeResult
from psdist_scheduler.decide.effects import Broadcast, Effect, LogEvent, MemberLost, Persist, Probe
from psdist_scheduler.decide.snapshot_events import Prune, ReadHistory, RemoveDirectory, WriteCommit
from psdist_scheduler.run_status import EventHistory
from psdist_scheduler.run_store import Store
from psdist_scheduler.snapshot_io import SnapshotIo

logger = logging.getLogger("psdist.scheduler")


class PublishedMap:
    """The map of one epoch."""

    def __init__(self, cluster: ClusterMap) -> None:
        self.cluster = cluster
        self._since: dict[int, bytes] = {}

    @cached_property
    def message(self) -> common_pb2.ClusterMap:
        """The map as a message."""
        return convert.map_to_proto(self.cluster)

    @cached_property
    def whole(self) -> bytes:
        """A serialized ``SessionResponse`` with the whole map."""
        return _pack(pb.SessionResponse(map=self.message))

    def since(self, before: ClusterMap) -> bytes:
        """Return a serialized ``SessionResponse`` with the changes for a session that has the map ``before``."""
        if before.epoch not in self._since:
            change = convert.difference_to_proto(difference(before, self.cluster))
            self._since[before.epoch] = _pack(pb.SessionResponse(map_difference=change))
        return self._since[before.epoch]


def _pack(response: pb.SessionResponse) -> bytes:
    return response.SerializeToString(deterministic=True)


T = TypeVar("T")
#: Message for a session. A map is sent whole or as its changes.
SessionMessage: TypeAlias = pb.SessionResponse | PublishedMap


class Outbox(Generic[T]):
    """Queued messages of one call, in order. Iterate to take them until the outbox is closed.

    One task takes messages; others put them without waiting. A put with a ``kind`` replaces the last message if that
    one has the same kind and was not taken yet: only the newest map, or reason to wait, counts. No message overtakes
    another. So a peer that reads a command has read the map that the command is based on, and no news of a loss comes
    after the map in which the lost member is back. The queue is bounded, belongs to one asyncio loop, and is not
    thread-safe.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[str, T]] = deque()
        self._closed = False
        self._error: PsdistError | None = None
        self._changed = asyncio.Event()

    def put(self, message: T, kind: str = "") -> None:
        """Add a message. If the peer does not read them, the call ends with LimitExceededError."""
        if self._closed:
            return
        if kind and self._queue and self._queue[-1][0] == kind:
            self._queue.pop()
        if len(self._queue) >= UNREAD_MAX:
            self.close(LimitExceededError(f"{UNREAD_MAX} messages of this call were not read, which is the limit"))
            return
        self._queue.append((kind, message))
        self._changed.set()

    def close(self, error: PsdistError | None = None) -> None:
        """End the call after its queued messages, with ``error`` if there is one. The first close counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._changed.set()

    def end(self) -> None:
        """End the call after the message that was taken last."""
        self._queue.clear()
        self.close()

    async def take(self) -> T:
        """Return the next message. Raises the closing error, or ClosedError if there is none."""
        async for message in self:
            return message
        raise ClosedError("the call was ended")

    def __aiter__(self) -> Outbox[T]:
        return self

    async def __anext__(self) -> T:
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._queue.popleft()[1]


class OpenCalls:
    """All calls and sessions of one scheduler, and the map that was published last.

    post: passes an event to the machine.
    """

    def __init__(self, post: Callable[[ev.Event], None]) -> None:
        self._post = post
        #: The map that was published last.
        self.published = PublishedMap(ClusterMap("", 0))
        self._calls: dict[int, Outbox[ef.Value]] = {}
        self._sessions: dict[int, Outbox[SessionMessage]] = {}
        self._attached: set[int] = set()
        self._numbers = count(1)

    def call(self) -> AbstractContextManager[tuple[int, Outbox[ef.Value]]]:
        """Return number and outbox of a new call. Its end is posted when the block is left."""
        return self._open(self._calls, lambda number, refused: ev.CallEnded(number, refused=refused))

    def session(self) -> AbstractContextManager[tuple[int, Outbox[SessionMessage]]]:
        """Return number and outbox of a new session. Its end is posted when the block is left."""
        return self._open(self._sessions, lambda number, _: ev.SessionClosed(number, "its session broke"))

    def is_open(self, number: int) -> bool:
        """True until the block of a call is left."""
        return number in self._calls

    @property
    def map(self) -> common_pb2.ClusterMap:
        """The map that was published last, for answers."""
        return self.published.message

    @contextmanager
    def _open(
        self, opened: dict[int, Outbox[T]], ended: Callable[[int, bool], ev.Event]
    ) -> Iterator[tuple[int, Outbox[T]]]:
        """Open a call. ended: returns the event of its end, by its number and whether it was refused."""
        number, refused = next(self._numbers), False
        outbox = opened[number] = Outbox()
        try:
            yield number, outbox
        except PsdistError:
            refused = True
            raise
        finally:
            del opened[number]
            self._attached.discard(number)
            self._post(ended(number, refused))

    def carry_out(self, effect: ef.Effect) -> None:
        """Send an effect to its calls and sessions. Those that are over get nothing."""
        match effect:
            case ef.Publish(cluster):
                self.published = PublishedMap(cluster)
                self._broadcast(self.published, "map")
            case ef.Attach(number) if number in self._sessions:
                self._attached.add(number)
                self._sessions[number].put(self.published, "map")
            case ef.Broadcast(news):
                self._broadcast(conversions.command(news))
            case ef.Answer(number, value) if number in self._calls:
                self._calls[number].put(value, "waiting" if isinstance(value, ef.Waiting) else "")
            case ef.Answer(number, value) if number in self._sessions:
                self._sessions[number].put(conversions.command(value))
            case ef.Refuse(number, error):
                for outbox in (self._calls.get(number), self._sessions.get(number)):
                    if outbox is not None:
                        outbox.close(error)
            case ef.Close(number) if number in self._sessions:
                self._sessions[number].close()

    def _broadcast(self, message: SessionMessage, kind: str = "") -> None:
        for number in sorted(self._attached):
            self._sessions[number].put(message, kind)


#: Number of events that the status report shows.
EVENTS_SHOWN = 100

#: Least time between epochs of registrations, for each member. A member needs 0.1 ms to read the change of a map of 100
#: workers, and 0.4 ms for one of 1,000. The longest pause is well below the time limit of a registration.
_EPOCH_SECONDS_PER_MEMBER: Final = 0.001
_LONGEST_PAUSE_SECONDS: Final = 2.0
#: Least time between two looks for problems, and the shares of this loop's time and of a thread's that they take at
#: most. A look at 1,000 workers takes 0.3 s of the thread, so there is one in 10 s.
_WATCH_SECONDS: Final = 1.0
_WATCH_SHARE: Final = 0.01
_LOOK_SHARE: Final = 0.03


class Scheduler:
    """The machine, its store, and its storage."""

    def __init__(self, cluster: Cluster, store: Store, storage: Storage | None = None) -> None:
        self.cluster = cluster
        self._storage: SnapshotIo | None = None
        if storage is not None:
            self._storage = SnapshotIo(storage, cluster.settings.run_id, cluster.settings.salt, self.post)
        self.calls = OpenCalls(self.post)
        self.reports = run_status.Reports()
        #: Set when the run is over (``run_end``), until that is withdrawn.
        self.is_over = asyncio.Event()
        #: True if the run has ended in an orderly way, so that nothing of it is needed any more.
        self.has_ended = False
        self.history = EventHistory(store.load_events())
        self.started = self.time()
        self._store = store
        # sqlite3 blocks until the disk has answered.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        #: Effects to carry out, and registrations of workers to pass to the machine.
        self._queue: deque[Effect | Register] = deque()
        self._pending = asyncio.Event()
        #: True until the members had time to learn of the last workers: further registrations wait.
        self._holds_workers = False
        self._stopping = False
        self._probes = Probes(cluster.settings.lease_seconds / 2, self.post)
        self._enqueue(cluster.start(self.started))

    def post(self, event: Event) -> None:
        """Pass an event to the machine. Ignored once the scheduler stops, when it ends calls itself."""
        if self._stopping:
            return
        if isinstance(event, Register) and event.role == "worker":
            self._enqueue([event])
        else:
            self._enqueue(self.cluster.on(event, self.time()))

    async def run(self) -> None:
        """Carry out effects, forever. Raises the errors of the store."""
        async with background(self._storage.run() if self._storage else asyncio.sleep(0)):
            await self._carry_out_all()

    async def _carry_out_all(self) -> None:
        while True:
            await self._pending.wait()
            self._pending.clear()
            batch = self._take()
            self._store.check()
            changes = [effect for effect in batch if isinstance(effect, Persist)]
            if changes:
                await asyncio.get_running_loop().run_in_executor(self._writer, self._store.write, merge(changes))
            news = [record for effect in batch if (record := self._carry_out(effect)) is not None]
            if news and self._store.keeps_events:
                # The run does not depend on the history.
                self._writer.submit(self._store.write_events, news)

    def _take(self) -> list[Effect]:
        """Return the effects to carry out, in order. Waiting registrations whose callers are not gone are passed to the
        machine first."""
        queued, self._queue = self._queue, deque()
        joining = [event for event in queued if isinstance(event, Register) and self.calls.is_open(event.call)]
        effects = [effect for effect in queued if not isinstance(effect, Register)]
        if self._holds_workers:
            self._queue.extend(joining)
        elif joining:
            effects += self.cluster.on_all(joining, self.time())
            self._holds_workers = True
            members = len(self.cluster.members.sessions.by_call)
            pause = min(members * _EPOCH_SECONDS_PER_MEMBER, _LONGEST_PAUSE_SECONDS)
            asyncio.get_running_loop().call_later(pause, self._admit_workers)
        return effects

    def _admit_workers(self) -> None:
        self._holds_workers = False
        self._pending.set()

    async def tick(self) -> None:
        """Notify the machine of the passage of time, forever."""
        while True:
            await asyncio.sleep(self.cluster.settings.tick_seconds)
            self._store.check()
            self.post(Tick())
            self.reports.tick(self.cluster, self.time())
            if self.cluster.exit_requests.is_over(self.time()):
                self.is_over.set()

    async def watch(self) -> None:
        """Look for problems of the run about once a second, forever. Those that last become events."""
        watch, announcer, last, has_failed = Watch(), Announcer(), 0, False
        while True:
            began = time.perf_counter()
            status, samples = self.status(), self.reports.samples.after(last)
            last = samples[-1].number if samples else last
            pause = max(_WATCH_SECONDS, (time.perf_counter() - began) / _WATCH_SHARE)
            try:
                found, seconds = await asyncio.to_thread(_look, watch, status, samples, self.heartbeat_seconds)
                pause = max(pause, seconds / _LOOK_SHARE)
            except Exception:  # The run continues without its list of problems.
                if not has_failed:
                    has_failed = True
                    logger.exception("the problems of the run are not known (logged once)")
                found = []
            self.reports.problems = [pb.ProblemStatus(**one) for one in found]
            self._enqueue(
                LogEvent(one.text, "warning" if one.warning else "info", kind="problem", peer=one.peer)
                for one in announcer.changes(found, self.time())
            )
            await asyncio.sleep(pause)

    @property
    def heartbeat_seconds(self) -> float:
        """Longest time between two heartbeats of a member."""
        settings = self.cluster.settings
        workers = sum(member.role == "worker" and member.live for member in self.cluster.members.all)
        return max(settings.heartbeat_of("server", workers), settings.heartbeat_of("worker", workers))

    def stop(self) -> None:
        """Ignore all further events: the members live on without the scheduler."""
        self._stopping = True
        self._probes.stop()

    def close(self) -> None:
        """Close the store, after a write in progress. If the run has ended, delete it, since a later run would
        otherwise restore stale members."""
        self._writer.shutdown(wait=True)
        if self.has_ended:
            self._store.discard()
        else:
            self._store.close()

    @property
    def storage(self) -> Storage | None:
        """The run's storage; None if it has none."""
        return self._storage.storage if self._storage is not None else None

    @property
    def all_have_left(self) -> bool:
        """True if there were members, and all have left in an orderly way."""
        members = self.cluster.members.all
        return bool(members) and all(member.state == "left" for member in members)

    def time(self) -> float:
        """Return the time of the machine's clock."""
        return asyncio.get_running_loop().time()

    def status(self) -> pb.GetStatusResponse:
        now = self.time()
        status = run_status.status(self.cluster, self.reports, now)
        status.psdist_version, status.epoch = __version__, self.calls.published.cluster.epoch
        status.uptime_seconds = now - self.started
        status.events.extend(make_message(pb.EventStatus, one) for one in self.history.newest(EVENTS_SHOWN))
        return status

    def summary(self, state: str = "running", reason: str = "") -> bytes:
        """Return the summary of the whole run, as its JSON form. Raises NoStorageError if none is kept."""
        if self.reports.summary is None:
            raise NoStorageError("this scheduler keeps no summary of its run")
        status = run_json.status_json(self.status())
        return self.reports.summary.document(status, self.history.after(0, EVENTS_MAX), time.time(), state, reason)

    async def events_after(self, number: int, count: int) -> list[EventRecord]:
        """Return events of the history as ``EventHistory.after``, once they are stored: the next scheduler would give
        the numbers of others to its own."""
        records = self.history.after(number, count)
        if records and self._store.keeps_events:
            await asyncio.get_running_loop().run_in_executor(self._writer, lambda: None)  # It makes writes in order.
        return records

    def keep_report(self, call: int, member_id: str, heartbeat: pb.SessionRequest.Heartbeat) -> None:
        """Keep the report in a member's heartbeat on its session ``call``."""
        if self.cluster.members.sessions.member_of(call) == member_id:
            self.reports.keep(member_id, heartbeat, self.time())

    def keep_totals(self, request: pb.LeaveRequest) -> None:
        """Keep the counts of a worker that leaves."""
        member = self.cluster.members.get(request.member_id)
        if member is not None and member.live and member.incarnation == request.incarnation:
            last = pb.SessionRequest.Heartbeat(totals=request.totals)
            self.reports.samples.on_heartbeat(request.member_id, last, self.time())

    def _enqueue(self, items: Iterable[Effect | Register]) -> None:
        self._queue.extend(items)
        if self._queue:
            self._pending.set()

    def _carry_out(self, effect: Effect) -> EventRecord | None:
        """Carry out an effect. Returns the new event of the run's history, if it is one."""
        match effect:
            case LogEvent():
                level = logging.WARNING if effect.level in ("warning", "wait") else logging.INFO
                logger.log(level, effect.text, extra={"peer": effect.peer})
                if effect.level in ("info", "warning"):
                    return self.history.add(effect, time.time())
            case WriteCommit() | RemoveDirectory() | Prune() | ReadHistory():
                if self._storage is not None:
                    self._storage.put(effect)
            case Probe():
                self._probes.start(effect)
            case _:
                if isinstance(effect, Broadcast) and isinstance(effect.news, MemberLost):
                    self.reports.forget(effect.news.member_id)
                self.calls.carry_out(effect)
        return None


def _look(
    watch: Watch, status: pb.GetStatusResponse, samples: list[pb.RunSample], heartbeat_seconds: float
) -> tuple[list[dict[str, Any]], float]:
    """Return the problems of the run, and the processor time that this took. Called in a thread: the JSON forms of a
    large run take long."""
    began, forms = time.thread_time(), [run_json.sample_json(one) for one in samples]
    found = watch.look(run_json.status_json(status), forms, heartbeat_seconds, status.time)
    return found, time.thread_time() - began


def merge(changes: list[Persist]) -> Persist:
    """Return several changes as one, with the newest of each item."""

    def newest(name: str, key: Callable[[Any], Any]) -> tuple[Any, ...]:
        return tuple({key(item): item for change in changes for item in getattr(change, name)}.values())

    parameters: dict[str, ParametersRecord] = {}
    for change in changes:
        for name in change.forgotten:
            parameters.pop(name, None)
        parameters |= {record.entry.spec.name: record for record in change.parameters}
    return Persist(
        changes[-1].epoch,
        members=newest("members", lambda member: member.member_id),
        parameters=tuple(parameters.values()),
        nodes=newest("nodes", lambda node: node.agent_id),
        servers_wanted=next((c.servers_wanted for c in reversed(changes) if c.servers_wanted is not None), None),
        datasets=newest("datasets", lambda record: record.spec.name),
        forgotten=newest("forgotten", lambda name: name),
        base=next((c.base for c in reversed(changes) if c.base is not None), None),
        barriers=newest("barriers", lambda record: (record.worker_id, record.name)),
        schedulers=next((c.schedulers for c in reversed(changes) if c.schedulers), ()),
        run_lost=next((c.run_lost for c in reversed(changes) if c.run_lost), ""),
        ends=next((c.ends for c in reversed(changes) if c.ends is not None), None),
    )


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run a task that does not outlive the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


# --- probe ------------------------------------------------------------------------------------------------------------


class Probes:
    """Probes in progress.

    timeout: time limit of each, in seconds.
    post: receives the results.
    """

    def __init__(self, timeout: float, post: Callable[[Event], None]) -> None:
        self._timeout = timeout
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, effect: Probe) -> None:
        """Start a probe."""
        task = asyncio.get_running_loop().create_task(self._carry_out(effect))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """Cancel all probes in progress."""
        for task in self._tasks:
            task.cancel()

    async def _carry_out(self, effect: Probe) -> None:
        result = await probe(effect.address, self._timeout)
        self._post(Probed(effect.member_id, effect.incarnation, result))


async def probe(address: str, timeout: float) -> ProbeResult:
    """Connect to ``address``, to each address that its name stands for, within ``timeout`` seconds."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            host, port = parse_address(address)
            places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            results = [await _connect(str(place[4][0]), port) for place in places]
    except (OSError, ConfigurationError):  # TimeoutError is an OSError.
        return "silent"
    if "accepted" in results:
        return "accepted"
    return "refused" if results and "silent" not in results else "silent"


async def _connect(host: str, port: int) -> ProbeResult:
    """Make one connection, and close it again."""
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        raise
    except OSError:
        return "silent"
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return "accepted"
