"""SchedulerService over ``grpc.aio``: one method per RPC, each of which turns a call into an event.

Invariant: no handler awaits between reading the machine and answering from it.

Not here: the machine and what carries its effects out (``scheduler``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial, wraps
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio

import psdist
from psdist.errors import InternalError, InvalidArgumentError, PsdistError, WaitTimeoutError
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert, frames
from psdist.wire import status as wire_status
from psdist_scheduler import messages, snapshot_messages, worker_state_io
from psdist_scheduler.events import cluster_events as ev
from psdist_scheduler.events.data_events import EndRanges, GetPosition, LeaseRange, OpenDataset, SetPosition
from psdist_scheduler.events.snapshot_events import HandedIn, StatePlace, StateSource
from psdist_scheduler.events.worker_events import Caller, Heard
from psdist_scheduler.outbox import Outbox
from psdist_scheduler.scheduler import Scheduler, background

log = logging.getLogger("psdist.scheduler")

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

Context: TypeAlias = grpc.aio.ServicerContext
Handler = TypeVar("Handler", bound=Callable[..., Coroutine[Any, Any, Any]])


def _typed(handler: Handler) -> Handler:
    """Parses the request, and ends the call by the typed error that this or the handler raises."""
    request_class = getattr(pb, f"{handler.__name__}Request")

    @wraps(handler)
    async def call(self: Service, request: Any, context: Context) -> Any:
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
    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        """Registers a member under a new incarnation."""
        value = await self._ask(lambda call: messages.register_event(call, request))
        run_id = self._scheduler.cluster.settings.run_id
        storage = self._scheduler.cluster.settings.storage
        return messages.registered(value, self._scheduler.calls.maps, run_id, psdist.__version__, storage)

    @_typed
    async def Session(self, request: object, context: Context) -> None:
        """Heartbeats up, maps and commands down, until either side ends."""
        with self._scheduler.calls.session() as (number, outbox):
            hello = await _first_message(context)
            self._scheduler.post(ev.SessionOpened(number, hello.member_id, hello.incarnation))
            async with (
                background(self._read_session(number, hello.member_id, context)) as reader,
                background(_write_all(outbox, context)) as writer,
            ):
                done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()

    @_typed
    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        """A polite end."""
        who = Caller("", request.member_id, request.incarnation)
        await self._ask(lambda call: ev.Leave(call, who, request.reason))
        return pb.LeaveResponse()

    @_typed
    async def CreateParameters(self, request: pb.CreateParametersRequest, context: Context) -> None:
        """Creates, or joins."""
        spec = convert.spec_from_proto(request.spec)
        if len(request.layout.tensors) > _LARGE_LAYOUT:
            layout = await asyncio.to_thread(convert.layout_from_proto, request.layout)
        else:
            layout = convert.layout_from_proto(request.layout)
        who = messages.caller(request)
        more = messages.resume_push(request), messages.activity(request)
        await self._stream(context, lambda call: ev.Create(call, who, spec, layout, *more), messages.created)

    @_typed
    async def CommitParameters(
        self, request: pb.CommitParametersRequest, context: Context
    ) -> pb.CommitParametersResponse:
        """The values are uploaded."""
        await self._ask(
            lambda call: ev.CommitParameters(call, messages.caller(request), request.parameters, request.epoch)
        )
        return pb.CommitParametersResponse(epoch=self._scheduler.calls.maps.message.epoch)

    @_typed
    async def DescribeParameters(self, request: pb.DescribeParametersRequest, context: Context) -> None:
        """Settings and layout, once they exist."""
        who = messages.caller(request)
        await self._stream(context, lambda call: ev.Describe(call, who, request.parameters), messages.described)

    @_typed
    async def GetClusterMap(self, request: pb.GetClusterMapRequest, context: Context) -> pb.GetClusterMapResponse:
        """The map that was published last."""
        self._scheduler.cluster.members.check_run(request.run_id)
        return pb.GetClusterMapResponse(map=self._scheduler.calls.maps.message)

    @_typed
    async def Barrier(self, request: pb.BarrierRequest, context: Context) -> None:
        """Waits for the other workers."""
        await self._stream(context, lambda call: messages.barrier_event(call, request), messages.barrier)

    @_typed
    async def Rendezvous(self, request: pb.RendezvousRequest, context: Context) -> None:
        """Waits for the other agents."""
        await self._stream(context, lambda call: messages.rendezvous_event(call, request), messages.rendezvous)

    @_typed
    async def Drain(self, request: pb.DrainRequest, context: Context) -> None:
        """Waits until a server holds nothing."""
        await self._stream(context, lambda call: ev.Drain(call, request.run_id, request.server_id), messages.drained)

    @_typed
    async def Scale(self, request: pb.ScaleRequest, context: Context) -> pb.ScaleResponse:
        """A number of servers is wanted."""
        return messages.scaled(await self._ask(lambda call: ev.Scale(call, request.run_id, request.servers)))

    @_typed
    async def WatchScale(self, request: pb.WatchScaleRequest, context: Context) -> None:
        """News of the wanted number of servers until the launcher hangs up."""
        await self._stream(context, lambda call: ev.WatchScale(call, request.run_id), messages.scale_news)

    @_typed
    async def OpenDataset(self, request: pb.OpenDatasetRequest, context: Context) -> pb.OpenDatasetResponse:
        """Makes a data set, or checks that all agree."""
        spec = convert.dataset_from_proto(request.spec)
        value = await self._ask(lambda call: OpenDataset(call, messages.caller(request), spec))
        standing = messages.dataset(value)
        return pb.OpenDatasetResponse(spec=standing.spec, position=standing.position)

    @_typed
    async def LeaseRange(self, request: pb.LeaseRangeRequest, context: Context) -> None:
        """Ends what is done and gives the next range."""
        who, done, held = messages.caller(request), messages.leases(request.done), messages.leases(request.held)
        numbers = snapshot_messages.next_pushes(request)
        event = partial(LeaseRange, caller=who, dataset=request.dataset, done=done, held=held, **numbers)
        await self._stream(context, event, messages.range_given)

    @_typed
    async def EndRanges(self, request: pb.EndRangesRequest, context: Context) -> pb.EndRangesResponse:
        """Ends leases, used or not."""
        who, done = messages.caller(request), messages.leases(request.done)
        returned = messages.leases(request.returned)
        numbers = snapshot_messages.next_pushes(request)
        await self._ask(lambda call: EndRanges(call, who, request.dataset, done, returned, **numbers))
        return pb.EndRangesResponse()

    @_typed
    async def SaveSnapshot(self, request: pb.SaveSnapshotRequest, context: Context) -> None:
        """Takes a snapshot."""
        await self._stream(context, lambda call: snapshot_messages.save_event(call, request), snapshot_messages.saved)

    @_typed
    async def HandInState(self, request: object, context: Context) -> pb.HandInStateResponse:
        """A worker's own state, in parts."""
        first = frames.parse(pb.HandInStateRequest, await _read(context))
        header, storage = first.header, self._scheduler.storage
        place = await self._ask(lambda call: snapshot_messages.hand_in_event(call, header))
        assert isinstance(place, StatePlace)
        if place.file and storage is not None:
            state = await worker_state_io.write(storage, place, header, self._parts(first, context))
            self._scheduler.post(HandedIn(header.attempt, (header.worker_id, header.incarnation), state))
        return pb.HandInStateResponse()

    async def _parts(self, first: pb.HandInStateRequest, context: Context) -> AsyncIterator[bytes]:
        """What the messages of HandInState hold. Who sends them is alive."""
        worker = (first.header.worker_id, first.header.incarnation)
        yield first.part
        while data := await _read(context):
            self._scheduler.post(Heard((worker,)))
            yield frames.parse(pb.HandInStateRequest, data).part

    @_typed
    async def GetState(self, request: pb.GetStateRequest, context: Context) -> None:
        """What a worker handed in, in parts."""
        source = await self._ask(lambda call: snapshot_messages.get_state_event(call, request))
        assert isinstance(source, StateSource)
        async for message in worker_state_io.read(self._scheduler.storage, source):
            await context.write(message)

    @_typed
    async def GetDataPosition(self, request: pb.GetDataPositionRequest, context: Context) -> pb.GetDataPositionResponse:
        """Where a data set stands, durably."""
        value = await self._ask(lambda call: GetPosition(call, request.run_id, request.dataset))
        standing = messages.dataset(value)
        return pb.GetDataPositionResponse(spec=standing.spec, position=standing.position, leased=standing.leased)

    @_typed
    async def SetDataPosition(self, request: pb.SetDataPositionRequest, context: Context) -> pb.SetDataPositionResponse:
        """A data set goes on from another place."""
        position = convert.position_from_proto(request.position)
        await self._ask(lambda call: SetPosition(call, messages.caller(request), request.dataset, position))
        return pb.SetDataPositionResponse()

    @_typed
    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """The status report."""
        return self._scheduler.status()

    async def _ask(self, event: Callable[[int], ev.Event]) -> ev.Value:
        """Posts an event and waits for its one answer."""
        with self._scheduler.calls.call() as (number, outbox):
            self._scheduler.post(event(number))
            value: ev.Value = await outbox.take()
            return value

    async def _stream(self, context: Context, event: Callable[[int], ev.Event], render: messages.Render) -> None:
        """Posts an event and passes its answers on until the last."""
        with self._scheduler.calls.call() as (number, outbox):
            self._scheduler.post(event(number))
            async for value in outbox:
                message, last = render(value, self._scheduler.calls.maps)
                await context.write(message)
                if last:
                    return

    async def _read_session(self, number: int, member_id: str, context: Context) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            request = frames.parse(pb.SessionRequest, data)
            match request.WhichOneof("event"):
                case "heartbeat":
                    self._scheduler.on_heartbeat(number, member_id, request.heartbeat)
                case "join_answer":
                    self._scheduler.post(messages.join_answered(number, request.join_answer))
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


async def _first_message(context: Context) -> pb.SessionRequest.Hello:
    try:
        data = await asyncio.wait_for(context.read(), HELLO_SECONDS)
    except TimeoutError:
        raise WaitTimeoutError(f"a session must say hello within {HELLO_SECONDS:g} s") from None
    request = frames.parse(pb.SessionRequest, b"" if data is grpc.aio.EOF else data)
    if request.WhichOneof("event") != "hello":
        raise InvalidArgumentError("the first message of a session must be its hello")
    hello: pb.SessionRequest.Hello = request.hello
    return hello


async def _read(context: Context) -> bytes:
    data = await context.read()
    return b"" if data is grpc.aio.EOF else bytes(data)


async def _write_all(outbox: Outbox[pb.SessionResponse], context: Context) -> None:
    async for message in outbox:
        await context.write(message)
