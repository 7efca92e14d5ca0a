"""SchedulerService over ``grpc.aio``: turns each call into an event, and the event's answers into responses.

Invariant: No handler awaits between reading the machine and answering from it.

``scheduler`` drives the machine and carries out its effects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import grpc
import grpc.aio

import psdist
from psdist.errors import InvalidArgumentError, LimitExceededError, WaitTimeoutError
from psdist.security import roles
from psdist.security.roles import Role
from psdist.security.tokens import Audience, audience_key
from psdist.types import ClusterMap, Layout
from psdist.v1 import common_pb2 as common
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import auth, convert, frames
from psdist.wire.limits import EVENTS_PER_MESSAGE, PARAMETERS_MAX
from psdist.wire.services import service_handler
from psdist_scheduler import conversions, snapshot_io
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_events import Heard, Heartbeat, Numbers
from psdist_scheduler.decide.snapshot_events import GetState, StateOffered, StatePlace, StateSource, StateWritten
from psdist_scheduler.scheduler import Outbox, PublishedMap, Scheduler, SessionMessage, background

logger = logging.getLogger("psdist.scheduler")

#: Time limit in seconds for a session's first message.
HELLO_SECONDS = 10.0
#: Layouts with more tensors are converted in a thread, so that heartbeats are still read meanwhile.
_LARGE_LAYOUT = 4096
#: Longest time for the last message of a session, which its member may not read.
_LAST_WRITE_SECONDS = 1.0

SERVICE = pb.DESCRIPTOR.services_by_name["SchedulerService"]

Context: TypeAlias = grpc.aio.ServicerContext


class Service:
    """Methods for each RPC that is more than an event and its answers; ``conversions.REQUESTS`` lists the others.

    See scheduler.proto for their meaning.

    token: the run's own, from which the keys of members follow; empty without one.
    """

    def __init__(self, scheduler: Scheduler, token: str = "") -> None:
        self._scheduler = scheduler
        self._token = token
        #: Locks of the states that are being received, by worker, attempt and parameter set. A call whose answer was
        #: lost may still be carried out when it is repeated.
        self._uploads: WeakValueDictionary[tuple[object, ...], asyncio.Lock] = WeakValueDictionary()

    def handler(self, on_caller: Callable[[str], None] = lambda _: None) -> grpc.GenericRpcHandler:
        """Return the handler for a grpc server. on_caller: see ``service_handler``."""
        handlers = {
            method.name: getattr(self, method.name, None) or partial(self._by_table, method)
            for method in SERVICE.methods
        }
        return service_handler(SERVICE, handlers, logger, on_caller, self._scheduler.cluster.settings.run_id)

    async def _by_table(self, method: Any, request: Any, context: Context) -> Any:
        """Handle a method that is only an event and its answers."""
        make, cls = conversions.REQUESTS[method.name], getattr(pb, method.output_type.name)
        if method.server_streaming:
            return await self._stream(context, lambda call: make(call, request), cls)
        return conversions.response(cls, await self._ask(lambda call: make(call, request)), self._scheduler.calls.map)

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        """Register a member, whose role is the caller's."""
        if name := conversions.ROLE_NAMES.get(request.role):
            roles.claim(auth.caller(), Role(name), f"Register as a {name}")
        value = await self._ask(lambda call: conversions.register_event(call, request))
        assert isinstance(value, ef.Registered)
        settings = self._scheduler.cluster.settings
        return convert.make_message(
            pb.RegisterResponse,
            value,
            member_id=value.member.member_id,
            incarnation=value.member.incarnation,
            rank=value.member.rank,
            run_id=settings.run_id,
            silence_seconds=settings.lease_seconds,
            takes_changes=True,
            map=self._scheduler.calls.map,
            psdist_version=psdist.__version__,
            storage=settings.storage if value.member.role == "server" else "",
            peer_key=audience_key(self._token, Audience(value.member.role)) if self._token else b"",
        )

    async def Session(self, request: object, context: Context) -> None:
        """Receive heartbeats and send maps and commands, until either side ends."""
        with self._scheduler.calls.session() as (number, outbox):
            hello = await _first_message(context)
            member_role = self._claim_member(hello.member_id, "a session")
            self._scheduler.post(
                ev.SessionOpened(number, hello.member_id, hello.incarnation, hello.epoch, hello.scheduler_id)
            )
            async with (
                background(self._read_session(number, hello.member_id, member_role, context)) as reader,
                background(_write_all(outbox, context, hello.takes_differences)) as writer,
            ):
                done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
                # gRPC loses the status of a call that ends while a message is written.
                outbox.end()
                await asyncio.wait({writer}, timeout=_LAST_WRITE_SECONDS)
                for task in done:
                    task.result()

    def _claim_member(self, member_id: str, what: str) -> str:
        """Return the role of a member; empty for an unknown one, which the machine refuses. Raises
        PermissionDeniedError if the caller has another role."""
        member = self._scheduler.cluster.members.get(member_id)
        if member is None:
            return ""
        roles.claim(auth.caller(), Role(member.role), f"{what} of {member_id}, a {member.role},")
        return member.role

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        """End a membership, of a member with the caller's role."""
        self._claim_member(request.member_id, "the end")
        if request.HasField("totals"):
            self._scheduler.keep_totals(request)
        response: pb.LeaveResponse = await self._by_table(SERVICE.methods_by_name["Leave"], request, context)
        return response

    async def SaveSnapshot(self, request: pb.SaveSnapshotRequest, context: Context) -> None:
        """Take a snapshot, for a worker that names itself, or for an admin."""
        if not request.worker_id:
            roles.claim(auth.caller(), Role.ADMIN, "SaveSnapshot without a worker_id")
        await self._by_table(SERVICE.methods_by_name["SaveSnapshot"], request, context)

    async def CreateParameters(self, request: pb.CreateParametersRequest, context: Context) -> None:
        """Create parameters, or join them."""
        if len(request.layout.tensors) > _LARGE_LAYOUT:
            layout = await asyncio.to_thread(_read_layout, request.layout)
        else:
            layout = convert.layout_from_proto(request.layout)

        def event(call: int) -> ev.Create:
            return conversions.make_event(ev.Create, call, request, layout=layout)

        await self._stream(context, event, pb.CreateParametersResponse)

    async def GetClusterMap(self, request: pb.GetClusterMapRequest, context: Context) -> pb.GetClusterMapResponse:
        """Return the map that was published last."""
        self._scheduler.cluster.members.check_run(request.run_id)
        return pb.GetClusterMapResponse(map=self._scheduler.calls.map)

    async def HandInState(self, request: object, context: Context) -> pb.HandInStateResponse:
        """Receive a worker's own state, in parts. A call that repeats one in progress waits for its end, so that no
        file is written twice."""
        first = frames.parse(pb.HandInStateRequest, await _read(context))
        header, storage = first.header, self._scheduler.storage
        worker = header.worker_id, header.incarnation
        async with self._uploads.setdefault((worker, header.attempt, header.parameters), asyncio.Lock()):
            place = await self._ask(lambda call: conversions.make_event(StateOffered, call, header))
            assert isinstance(place, StatePlace)
            if place.file and storage is not None:
                state = await snapshot_io.write_state(storage, place, header, self._parts(first, context))
                self._scheduler.post(StateWritten(header.attempt, worker, state))
        return pb.HandInStateResponse()

    async def _parts(self, first: pb.HandInStateRequest, context: Context) -> AsyncIterator[bytes]:
        """Yield the parts of HandInState messages. Their sender is alive."""
        worker = (first.header.worker_id, first.header.incarnation)
        yield first.part
        while data := await _read(context):
            self._scheduler.post(Heard((worker,)))
            yield frames.parse(pb.HandInStateRequest, data).part

    async def GetState(self, request: pb.GetStateRequest, context: Context) -> None:
        """Send a state that a worker handed in, in parts."""
        source = await self._ask(lambda call: conversions.make_event(GetState, call, request))
        assert isinstance(source, StateSource)
        async for message in snapshot_io.read_state(self._scheduler.storage, source):
            await context.write(message)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return self._scheduler.status()

    async def GetSamples(self, request: pb.GetSamplesRequest, context: Context) -> pb.GetSamplesResponse:
        return pb.GetSamplesResponse(samples=self._scheduler.reports.samples.after(request.after))

    async def GetSummary(self, request: pb.GetSummaryRequest, context: Context) -> pb.GetSummaryResponse:
        return pb.GetSummaryResponse(summary=self._scheduler.summary())

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Context) -> None:
        """Send the run's history after an event, and with ``follow`` all later events."""
        history, number = self._scheduler.history, request.after
        while True:
            if records := await self._scheduler.events_after(number, EVENTS_PER_MESSAGE):
                number = records[-1].number
                await context.write(
                    pb.WatchEventsResponse(events=[convert.make_message(pb.EventStatus, record) for record in records])
                )
            elif request.follow:
                await history.changed()
            else:
                return

    async def _ask(self, event: Callable[[int], ev.Event]) -> ef.Value:
        """Post an event and wait for its only answer."""
        with self._scheduler.calls.call() as (number, outbox):
            self._scheduler.post(event(number))
            return await outbox.take()

    async def _stream(self, context: Context, event: Callable[[int], ev.Event], cls: Any) -> None:
        """Post an event and send its answers, as messages of type ``cls``, until the last one."""
        with self._scheduler.calls.call() as (number, outbox):
            self._scheduler.post(event(number))
            async for value in outbox:
                make = partial(conversions.response, cls, value, self._scheduler.calls.map)
                is_large = isinstance(value, ef.Described) and len(value.layout.tensors) > _LARGE_LAYOUT
                await context.write(await asyncio.to_thread(make) if is_large else make())
                if not isinstance(value, ef.Interim):
                    return

    async def _read_session(self, number: int, member_id: str, role: str, context: Context) -> None:
        followed = FollowedPushes()
        while (data := await context.read()) is not grpc.aio.EOF:
            request = frames.parse(pb.SessionRequest, data)
            if request.WhichOneof("event") == "heartbeat":  # From members of both roles.
                heartbeat = request.heartbeat
                event = conversions.heartbeat_event(number, heartbeat)
                self._scheduler.post(followed.complete(event, changed_only=heartbeat.changed_only))
                self._scheduler.keep_report(number, member_id, heartbeat)
                continue
            conversions.check_report(request, role)
            self._scheduler.post(conversions.session_event(number, request))


def _read_layout(message: common.Layout) -> Layout:
    """Convert a layout, with the cached values that the machine needs. Takes 0.1 s for 20,000 tensors, so it runs in a
    thread."""
    layout = convert.layout_from_proto(message)
    assert layout.digest and layout.offsets  # Both are cached.
    return layout


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


async def _write_all(outbox: Outbox[SessionMessage], context: Context, takes_differences: bool) -> None:
    """Write the messages of a session.

    A member that takes differences gets its first map whole, and then the changes since the previous one on this
    stream: a stream loses no message while it lasts.
    """
    before: ClusterMap | None = None
    async for message in outbox:
        if not isinstance(message, PublishedMap):
            await context.write(message)
            continue
        await context.write(message.whole if before is None else message.since(before))
        before = message.cluster if takes_differences else None


# --- followed pushes --------------------------------------------------------------------------------------------------


class FollowedPushes:
    """The numbers in the last heartbeat of one session, sorted by parameter set."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._next: Numbers = ()

    def complete(self, event: Heartbeat, *, changed_only: bool) -> Heartbeat:
        """Return the heartbeat with all numbers. Raises LimitExceededError if there are too many."""
        if event.activity is None:
            return event
        self._merge(event.activity.next, changed_only)
        if (count := len(self._next)) > PARAMETERS_MAX:
            raise LimitExceededError(
                f"the heartbeats of one session name {count} parameters, over the limit of {PARAMETERS_MAX}"
            )
        if event.activity.next == self._next:
            return event
        return replace(event, activity=replace(event.activity, next=self._next))

    def _merge(self, reported: Numbers, changed_only: bool) -> None:
        before = self._numbers if changed_only else {}
        numbers = before | dict(reported)
        # Updated numbers keep their places, so that only new names need sorting.
        self._numbers = dict(sorted(numbers.items())) if len(numbers) > len(before) else numbers
        if reported or not changed_only:
            self._next = tuple(self._numbers.items())
