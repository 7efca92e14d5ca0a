"""SchedulerService over ``grpc.aio``: turns calls into events, and carries the effects out.

``Scheduler`` drives the machine. ``post`` gives it an event at once. A single task, ``run``, carries effects out in
order, and makes what several events changed durable in one commit. A failed write ends the scheduler, so that nothing
is told that is not durable. ``Service`` has one method per RPC.

Invariants: the event of a call's end is posted once the call is over, whatever ended it. No handler awaits between
reading the machine and answering from it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial, wraps
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

import psdist
from psdist.errors import InternalError, InvalidArgumentError, PsdistError, WaitTimeoutError
from psdist.snapshots.storage import Storage
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import server_pb2
from psdist.wire import convert, frames
from psdist.wire import status as wire_status
from psdist_scheduler import messages, report, snapshot_messages, worker_state_io
from psdist_scheduler.cluster import Cluster
from psdist_scheduler.events.cluster_events import (
    Answer,
    Attach,
    Broadcast,
    CallEnded,
    Close,
    CommitParameters,
    Create,
    Describe,
    Drain,
    Effect,
    Event,
    JoinAnswered,
    Leave,
    LogEvent,
    MemberLost,
    News,
    Persist,
    Publish,
    Refuse,
    Scale,
    SessionClosed,
    SessionOpened,
    Tick,
    Value,
    Waiting,
    WatchScale,
)
from psdist_scheduler.events.data_events import EndRanges, GetPosition, LeaseRange, OpenDataset, SetPosition
from psdist_scheduler.events.records import ParametersRecord
from psdist_scheduler.events.snapshot_events import (
    HandedIn,
    Prune,
    ReadHistory,
    RemoveDirectory,
    StatePlace,
    StateSource,
    WriteCommit,
)
from psdist_scheduler.events.worker_events import Caller, Heard
from psdist_scheduler.outbox import Outbox
from psdist_scheduler.snapshot_io import SnapshotIo
from psdist_scheduler.store import Store

if TYPE_CHECKING:
    from psdist_scheduler.snapshot_io import SnapshotIo

log = logging.getLogger("psdist.scheduler")

EVENTS_KEPT = 100
#: A session's first message must come within so long.
HELLO_SECONDS = 10.0
#: Layouts of more tensors are converted in a thread, so that heartbeats go on being read.
_LARGE_LAYOUT = 4096

SERVICE = pb.DESCRIPTOR.services_by_name["SchedulerService"]
#: By whether the client and the server stream.
_HANDLERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}

Handler = TypeVar("Handler", bound=Callable[..., Coroutine[Any, Any, Any]])


class Scheduler:
    """The machine, its store, and the calls that wait for it."""

    def __init__(self, cluster: Cluster, store: Store, storage: Storage | None = None) -> None:
        self.cluster = cluster
        self.storage = storage
        self._storage: SnapshotIo | None = None
        if storage is not None:
            # What reads snapshots takes a while to load.
            from psdist_scheduler.snapshot_io import SnapshotIo

            self._storage = SnapshotIo(storage, cluster.settings.run_id, cluster.settings.salt, self.post)
        self.maps = messages.MapCache()
        self.statistics: dict[str, server_pb2.GetStatisticsResponse] = {}
        self.connections: dict[str, list[pb.Connection]] = {}
        self.events: deque[tuple[float, str]] = deque(maxlen=EVENTS_KEPT)
        self._loop = asyncio.get_running_loop()
        self.started = self._loop.time()
        self._store = store
        # sqlite3 blocks until the disk has answered.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._effects: deque[Effect] = deque()
        self._pending = asyncio.Event()
        self._calls: dict[int, Outbox[Value]] = {}
        self._sessions: dict[int, Outbox[pb.SessionResponse]] = {}
        self._attached: set[int] = set()
        self._numbers = count(1)
        self._stopping = False
        self._enqueue(cluster.start(self.started))

    @contextmanager
    def call(self) -> Any:
        """Number and outbox of a new call; its end is posted when the block is left."""
        number = next(self._numbers)
        outbox = self._calls[number] = Outbox()
        try:
            yield number, outbox
        finally:
            del self._calls[number]
            self.post(CallEnded(number))

    @contextmanager
    def session(self) -> Any:
        """Number and outbox of a new session; its end is posted when the block is left."""
        number = next(self._numbers)
        outbox = self._sessions[number] = Outbox()
        try:
            yield number, outbox
        finally:
            del self._sessions[number]
            self._attached.discard(number)
            self.post(SessionClosed(number, "its session broke"))

    def post(self, event: Event) -> None:
        """Gives the machine an event. Once the scheduler stops, ends of calls are its own doing and mean nothing."""
        if not self._stopping:
            self._enqueue(self.cluster.on(event, self._loop.time()))

    async def run(self) -> None:
        """Carries effects out, for ever. Raises what the store raises."""
        async with _background(self._storage.run() if self._storage else asyncio.sleep(0)):
            await self._carry_out_all()

    async def _carry_out_all(self) -> None:
        while True:
            await self._pending.wait()
            self._pending.clear()
            batch, self._effects = self._effects, deque()
            changes = [effect for effect in batch if isinstance(effect, Persist)]
            if changes:
                await self._loop.run_in_executor(self._writer, self._store.write, _merge(changes))
            for effect in batch:
                self._carry_out(effect)

    async def tick(self) -> None:
        """Tells the machine that time passes, for ever."""
        while True:
            await asyncio.sleep(self.cluster.settings.tick_seconds)
            self.post(Tick())

    def stop(self) -> None:
        """From now on nothing changes: the members live on while the scheduler does not."""
        self._stopping = True

    def close(self) -> None:
        """Frees the store, after a write in progress."""
        self._writer.shutdown(wait=True)
        self._store.close()

    def status(self) -> pb.GetStatusResponse:
        """The status report."""
        now = self._loop.time()
        epoch = self.maps.message.epoch
        uptime = now - self.started
        return report.status(
            self.cluster, epoch, self.statistics, self.connections, self.events, psdist.__version__, uptime, now
        )

    def _enqueue(self, effects: list[Effect]) -> None:
        if effects:
            self._effects.extend(effects)
            self._pending.set()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Publish(cluster):
                self.maps.set(cluster)
                self._broadcast(pb.SessionResponse(map=self.maps.message), "map")
            case Attach(number):
                if number in self._sessions:
                    self._attached.add(number)
                    self._sessions[number].put(pb.SessionResponse(map=self.maps.message), "map")
            case Broadcast(news):
                self._announce(news)
            case Answer(number, value):
                self._answer(number, value)
            case Refuse(number, error):
                for outbox in (self._calls.get(number), self._sessions.get(number)):
                    if outbox is not None:
                        outbox.close(error)
            case Close(number):
                if number in self._sessions:
                    self._sessions[number].close()
            case LogEvent():
                self._note(effect)
            case WriteCommit() | RemoveDirectory() | Prune() | ReadHistory():
                if self._storage is not None:
                    self._storage.put(effect)

    def _answer(self, number: int, value: Value) -> None:
        if number in self._calls:
            self._calls[number].put(value, "waiting" if isinstance(value, Waiting) else "")
        elif number in self._sessions:
            self._sessions[number].put(messages.command(value))

    def _announce(self, news: News) -> None:
        if isinstance(news, MemberLost):
            self.statistics.pop(news.member_id, None)
            self.connections.pop(news.member_id, None)
        self._broadcast(messages.command(news))

    def _broadcast(self, message: pb.SessionResponse, kind: str = "") -> None:
        for number in sorted(self._attached):
            self._sessions[number].put(message, kind)

    def _note(self, note: LogEvent) -> None:
        log.log(logging.INFO if note.level == "info" else logging.WARNING, note.text)
        if note.level != "wait":
            self.events.append((time.time(), note.text))


def _merge(changes: list[Persist]) -> Persist:
    """Several changes as one; of each thing the newest."""
    members = {member.member_id: member for change in changes for member in change.members}
    parameters: dict[str, ParametersRecord] = {}
    for change in changes:
        for name in change.forgotten:
            parameters.pop(name, None)
        parameters |= {record.entry.spec.name: record for record in change.parameters}
    nodes = {node.agent_id: node for change in changes for node in change.nodes}
    datasets = {record.spec.name: record for change in changes for record in change.datasets}
    forgotten = {name: None for change in changes for name in change.forgotten}
    wanted = next((c.servers_wanted for c in reversed(changes) if c.servers_wanted is not None), None)
    base = next((c.base for c in reversed(changes) if c.base is not None), None)
    barriers = {(record.worker_id, record.name): record for change in changes for record in change.barriers}
    return Persist(
        changes[-1].epoch,
        members=tuple(members.values()),
        parameters=tuple(parameters.values()),
        nodes=tuple(nodes.values()),
        servers_wanted=wanted,
        datasets=tuple(datasets.values()),
        forgotten=tuple(forgotten),
        base=base,
        barriers=tuple(barriers.values()),
    )


def _typed(handler: Handler) -> Handler:
    """Parses the request, and ends the call by the typed error that this or the handler raises."""
    request_class = getattr(pb, f"{handler.__name__}Request")

    @wraps(handler)
    async def call(self: Service, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            if isinstance(request, bytes):
                request = frames.parse(request_class, request)
            return await handler(self, request, context)
        except PsdistError as error:
            log.info("%s refused: %s", handler.__name__, error)
            await wire_status.abort(context, error)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            log.exception("%s failed", handler.__name__)
            await wire_status.abort(context, InternalError(f"the scheduler failed in {handler.__name__}: see its log"))

    return call  # type: ignore[return-value]


class Service:
    """One method per RPC; see scheduler.proto for what each means."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def handler(self) -> grpc.GenericRpcHandler:
        """What a grpc server is given. Requests come as bytes: gRPC's own parsing has no typed error for those that are
        no message, and writes a traceback for each."""
        methods = {
            method.name: _HANDLERS[method.client_streaming, method.server_streaming](
                getattr(self, method.name),
                request_deserializer=None,
                response_serializer=getattr(pb, method.output_type.name).SerializeToString,
            )
            for method in SERVICE.methods
        }
        return grpc.method_handlers_generic_handler(SERVICE.full_name, methods)

    @_typed
    async def Register(self, request: pb.RegisterRequest, context: grpc.aio.ServicerContext) -> pb.RegisterResponse:
        """Registers a member under a new incarnation."""
        value = await self._ask(lambda call: messages.register_event(call, request))
        run_id = self._scheduler.cluster.settings.run_id
        storage = self._scheduler.cluster.settings.storage
        return messages.registered(value, self._scheduler.maps, run_id, psdist.__version__, storage)

    @_typed
    async def Session(self, request: object, context: grpc.aio.ServicerContext) -> None:
        """Heartbeats up, maps and commands down, until either side ends."""
        with self._scheduler.session() as (number, outbox):
            hello = await _first_message(context)
            self._scheduler.post(SessionOpened(number, hello.member_id, hello.incarnation))
            async with (
                _background(self._read_session(number, hello.member_id, context)) as reader,
                _background(_write_all(outbox, context)) as writer,
            ):
                done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()

    @_typed
    async def Leave(self, request: pb.LeaveRequest, context: grpc.aio.ServicerContext) -> pb.LeaveResponse:
        """A polite end."""
        who = Caller("", request.member_id, request.incarnation)
        await self._ask(lambda call: Leave(call, who, request.reason))
        return pb.LeaveResponse()

    @_typed
    async def CreateParameters(self, request: pb.CreateParametersRequest, context: grpc.aio.ServicerContext) -> None:
        """Creates, or joins."""
        spec = convert.spec_from_proto(request.spec)
        if len(request.layout.tensors) > _LARGE_LAYOUT:
            layout = await asyncio.to_thread(convert.layout_from_proto, request.layout)
        else:
            layout = convert.layout_from_proto(request.layout)
        who = messages.caller(request)
        more = messages.resume_push(request), messages.activity(request)
        await self._stream(context, lambda call: Create(call, who, spec, layout, *more), messages.created)

    @_typed
    async def CommitParameters(
        self, request: pb.CommitParametersRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitParametersResponse:
        """The values are uploaded."""
        await self._ask(
            lambda call: CommitParameters(call, messages.caller(request), request.parameters, request.epoch)
        )
        return pb.CommitParametersResponse(epoch=self._scheduler.maps.message.epoch)

    @_typed
    async def DescribeParameters(
        self, request: pb.DescribeParametersRequest, context: grpc.aio.ServicerContext
    ) -> None:
        """Settings and layout, once they exist."""
        who = messages.caller(request)
        await self._stream(context, lambda call: Describe(call, who, request.parameters), messages.described)

    @_typed
    async def GetClusterMap(
        self, request: pb.GetClusterMapRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetClusterMapResponse:
        """The map that was published last."""
        self._scheduler.cluster.members.check_run(request.run_id)
        return pb.GetClusterMapResponse(map=self._scheduler.maps.message)

    @_typed
    async def Barrier(self, request: pb.BarrierRequest, context: grpc.aio.ServicerContext) -> None:
        """Waits for the other workers."""
        await self._stream(context, lambda call: messages.barrier_event(call, request), messages.barrier)

    @_typed
    async def Rendezvous(self, request: pb.RendezvousRequest, context: grpc.aio.ServicerContext) -> None:
        """Waits for the other agents."""
        await self._stream(context, lambda call: messages.rendezvous_event(call, request), messages.rendezvous)

    @_typed
    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> None:
        """Waits until a server holds nothing."""
        await self._stream(context, lambda call: Drain(call, request.run_id, request.server_id), messages.drained)

    @_typed
    async def Scale(self, request: pb.ScaleRequest, context: grpc.aio.ServicerContext) -> pb.ScaleResponse:
        """A number of servers is wanted."""
        return messages.scaled(await self._ask(lambda call: Scale(call, request.run_id, request.servers)))

    @_typed
    async def WatchScale(self, request: pb.WatchScaleRequest, context: grpc.aio.ServicerContext) -> None:
        """News of the wanted number until the launcher has heard enough."""
        await self._stream(context, lambda call: WatchScale(call, request.run_id), messages.scale_news)

    @_typed
    async def OpenDataset(
        self, request: pb.OpenDatasetRequest, context: grpc.aio.ServicerContext
    ) -> pb.OpenDatasetResponse:
        """Makes a data set, or checks that all agree."""
        spec = convert.dataset_from_proto(request.spec)
        value = await self._ask(lambda call: OpenDataset(call, messages.caller(request), spec))
        standing = messages.dataset(value)
        return pb.OpenDatasetResponse(spec=standing.spec, position=standing.position)

    @_typed
    async def LeaseRange(self, request: pb.LeaseRangeRequest, context: grpc.aio.ServicerContext) -> None:
        """Ends what is done and gives the next range."""
        who, done, held = messages.caller(request), messages.leases(request.done), messages.leases(request.held)
        numbers = snapshot_messages.next_pushes(request)
        event = partial(LeaseRange, caller=who, dataset=request.dataset, done=done, held=held, **numbers)
        await self._stream(context, event, messages.range_given)

    @_typed
    async def EndRanges(self, request: pb.EndRangesRequest, context: grpc.aio.ServicerContext) -> pb.EndRangesResponse:
        """Ends leases, used or not."""
        who, done = messages.caller(request), messages.leases(request.done)
        returned = messages.leases(request.returned)
        numbers = snapshot_messages.next_pushes(request)
        await self._ask(lambda call: EndRanges(call, who, request.dataset, done, returned, **numbers))
        return pb.EndRangesResponse()

    @_typed
    async def SaveSnapshot(self, request: pb.SaveSnapshotRequest, context: grpc.aio.ServicerContext) -> None:
        """Takes a snapshot."""
        await self._stream(context, lambda call: snapshot_messages.save_event(call, request), snapshot_messages.saved)

    @_typed
    async def HandInState(self, request: object, context: grpc.aio.ServicerContext) -> pb.HandInStateResponse:
        """A worker's own state, in parts."""
        first = frames.parse(pb.HandInStateRequest, await _read(context))
        header, storage = first.header, self._scheduler.storage
        place = await self._ask(lambda call: snapshot_messages.hand_in_event(call, header))
        assert isinstance(place, StatePlace)
        if place.file and storage is not None:
            state = await worker_state_io.write(storage, place, header, self._parts(first, context))
            self._scheduler.post(HandedIn(header.attempt, (header.worker_id, header.incarnation), state))
        return pb.HandInStateResponse()

    async def _parts(self, first: pb.HandInStateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """What the messages of HandInState hold. Who sends them is alive."""
        life = (first.header.worker_id, first.header.incarnation)
        yield first.part
        while data := await _read(context):
            self._scheduler.post(Heard((life,)))
            yield frames.parse(pb.HandInStateRequest, data).part

    @_typed
    async def GetState(self, request: pb.GetStateRequest, context: grpc.aio.ServicerContext) -> None:
        """What a worker handed in, in parts."""
        source = await self._ask(lambda call: snapshot_messages.get_state_event(call, request))
        assert isinstance(source, StateSource)
        async for message in worker_state_io.read(self._scheduler.storage, source):
            await context.write(message)

    @_typed
    async def GetDataPosition(
        self, request: pb.GetDataPositionRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetDataPositionResponse:
        """Where a data set stands, durably."""
        value = await self._ask(lambda call: GetPosition(call, request.run_id, request.dataset))
        standing = messages.dataset(value)
        return pb.GetDataPositionResponse(spec=standing.spec, position=standing.position, leased=standing.leased)

    @_typed
    async def SetDataPosition(
        self, request: pb.SetDataPositionRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetDataPositionResponse:
        """A data set goes on from another place."""
        position = convert.position_from_proto(request.position)
        await self._ask(lambda call: SetPosition(call, messages.caller(request), request.dataset, position))
        return pb.SetDataPositionResponse()

    @_typed
    async def GetStatus(self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.GetStatusResponse:
        """The status report."""
        return self._scheduler.status()

    async def _ask(self, event: Callable[[int], Event]) -> Value:
        """Posts an event and waits for its one answer."""
        with self._scheduler.call() as (number, outbox):
            self._scheduler.post(event(number))
            value: Value = await outbox.take()
            return value

    async def _stream(
        self, context: grpc.aio.ServicerContext, event: Callable[[int], Event], render: messages.Render
    ) -> None:
        """Posts an event and passes its answers on until the last."""
        with self._scheduler.call() as (number, outbox):
            self._scheduler.post(event(number))
            async for value in outbox:
                message, last = render(value, self._scheduler.maps)
                await context.write(message)
                if last:
                    return

    async def _read_session(self, number: int, member_id: str, context: grpc.aio.ServicerContext) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            request = frames.parse(pb.SessionRequest, data)
            match request.WhichOneof("event"):
                case "heartbeat":
                    self._heartbeat(number, member_id, request.heartbeat)
                case "join_answer":
                    answer = request.join_answer
                    self._scheduler.post(JoinAnswered(number, answer.proposal_id, answer.accepted, answer.version_max))
                case "replica_filled":
                    self._scheduler.post(messages.replica_filled(number, request.replica_filled))
                case "replica_unreachable":
                    self._scheduler.post(messages.replica_unreachable(number, request.replica_unreachable))
                case "stop":
                    self._scheduler.post(messages.stop_reported(number, request.stop))
                case "snapshot":
                    self._scheduler.post(snapshot_messages.report_event(number, request.snapshot))
                case other:
                    raise InvalidArgumentError(f"a session's later messages are heartbeats and answers, not {other}")

    def _heartbeat(self, number: int, member_id: str, heartbeat: pb.SessionRequest.Heartbeat) -> None:
        self._scheduler.post(messages.heartbeat_event(number, heartbeat))
        if self._scheduler.cluster.members.sessions.get(number) != member_id:
            return
        if heartbeat.HasField("statistics"):
            self._scheduler.statistics[member_id] = heartbeat.statistics
        if heartbeat.HasField("connections"):
            self._scheduler.connections[member_id] = messages.connections(heartbeat.connections)


async def _first_message(context: grpc.aio.ServicerContext) -> pb.SessionRequest.Hello:
    try:
        data = await asyncio.wait_for(context.read(), HELLO_SECONDS)
    except TimeoutError:
        raise WaitTimeoutError(f"a session must say hello within {HELLO_SECONDS:g} s") from None
    request = frames.parse(pb.SessionRequest, b"" if data is grpc.aio.EOF else data)
    if request.WhichOneof("event") != "hello":
        raise InvalidArgumentError("the first message of a session must be its hello")
    hello: pb.SessionRequest.Hello = request.hello
    return hello


async def _read(context: grpc.aio.ServicerContext) -> bytes:
    data = await context.read()
    return b"" if data is grpc.aio.EOF else bytes(data)


async def _write_all(outbox: Outbox[pb.SessionResponse], context: grpc.aio.ServicerContext) -> None:
    async for message in outbox:
        await context.write(message)


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """A task that does not outlive the block."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
