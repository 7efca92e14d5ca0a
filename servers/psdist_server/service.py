"""ServerService over grpc.aio: reads frames, checks the sender, and passes slices to the parameter stores.

A request is checked in this order before a payload is read: run, token (by the interceptor), epoch known, worker and
incarnation, epoch current, parameter set. Slices travel as raw frames (``psdist.wire.frames``), so their methods
are registered without protobuf's serializers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Final

import grpc
import grpc.aio

from psdist.errors import InvalidArgumentError
from psdist.link import fd_passing
from psdist.link.listening import TcpListener
from psdist.types import Identity
from psdist.v1 import server_pb2
from psdist.wire import convert, frames
from psdist.wire.services import Handler, as_psdist_error, service_handler
from psdist_server.replica_service import ReplicaService
from psdist_server.server import ParameterServer
from psdist_server.shm_service import serve_share
from psdist_server.store.parameter_store import ParameterStore
from psdist_server.store.rpc_call import Call, SliceAnswer
from psdist_server.tcp_service import serve_connect

logger = logging.getLogger("psdist.server")

SERVICE: Final = server_pb2.DESCRIPTOR.services_by_name["ServerService"]
_NORMS_PER_MESSAGE: Final = 1 << 17
#: Sender of a call whose first message has not been read.
_NOBODY: Final = Identity(run_id="", worker_id="", incarnation=0, epoch=0, parameters="")

#: Messages with payloads are already serialized, since protobuf would copy the payload once more.
Message = server_pb2.PushPullResponse | server_pb2.PushResponse | server_pb2.PullResponse | bytes
PushMessage = type[server_pb2.PushPullRequest] | type[server_pb2.PushRequest]


class ServerService:
    """Dispatches the calls of workers and other servers to ``server``. listener: accepts TCP connections; they are
    refused if it is not open."""

    def __init__(self, server: ParameterServer, listener: TcpListener | None = None) -> None:
        self._server = server
        self._listener = listener or TcpListener()
        self._admission = server.admission
        self._replicas = ReplicaService(server, self._listener)

    def handler(self, on_caller: Callable[[str], None] = lambda _: None) -> grpc.GenericRpcHandler:
        """Return the handler to register with a grpc server. on_caller: see ``service_handler``."""
        fd_passing.sweep()
        handlers: dict[str, Handler] = {
            "GetStatistics": self._get_statistics,
            "Install": self._install,
            "PushPull": partial(self._push, server_pb2.PushPullRequest),
            "Push": partial(self._push, server_pb2.PushRequest),
            "Pull": self._pull,
            "Share": partial(serve_share, self._server),
            "Connect": partial(serve_connect, self._server, self._listener),
            "Replicate": self._replicas.serve,
            "FetchNorms": self._fetch_norms,
        }
        return service_handler(SERVICE, handlers, logger, on_caller, self._admission.map.run_id)

    async def _push(
        self, message_type: PushMessage, requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext
    ) -> AsyncIterator[Message]:
        """Serve PushPull or Push, by the type of its requests. A separate task reads slices while answers are written,
        so both directions are busy at the same time."""
        call = Call(_NOBODY, is_push=True, wants_weights=message_type is server_pb2.PushPullRequest)
        reader = asyncio.create_task(self._read_pushes(call, message_type, requests))
        store: ParameterStore | None = None
        try:
            async for answer in self._answers(call):
                if isinstance(answer, str):
                    yield server_pb2.PushPullResponse(waiting_for=answer)
                elif not isinstance(answer, SliceAnswer):
                    response = server_pb2.PushPullResponse if call.wants_weights else server_pb2.PushResponse
                    yield response(reading=answer)
                elif call.wants_weights:
                    store = store or self._admission.store(call.identity.parameters)
                    yield await store.reads.encode(answer, call)
                else:
                    yield server_pb2.PushResponse(
                        slice=answer.index, version=answer.version, ignored=answer.ignored, staleness=answer.staleness
                    )
        finally:
            reader.cancel()
            self._server.cancel_call(call)

    async def _read_pushes(self, call: Call, message_type: PushMessage, requests: AsyncIterator[bytes]) -> None:
        try:
            store: ParameterStore | None = None
            last = -1
            await call.slots.acquire()
            async for data in requests:
                frame = frames.unpack(message_type, data)
                if store is None:
                    store = await self._open_push(call, frame.header)
                elif frame.header.HasField("header"):
                    raise _second("header")
                sender = call.identity
                self._admission.heard[sender.worker_id, sender.incarnation] = asyncio.get_running_loop().time()
                call.slots.received_bytes += len(data)
                last = _check_ascending(frame.header.slice, last)
                written = frame.header.written if frame.header.HasField("written") else None
                store.router.push(call, frame.header.slice, frame.header.base_version, frame.payload, written)
                await call.slots.acquire()
            call.slots.end()
            call.asked_all()
        except Exception as error:  # The stream raises it; otherwise it would wait for a reader that has ended.
            call.fail(as_psdist_error(error, "reading a push", logger))

    async def _open_push(
        self, call: Call, message: server_pb2.PushPullRequest | server_pb2.PushRequest
    ) -> ParameterStore:
        if not message.HasField("header"):
            raise InvalidArgumentError(
                f"{message.DESCRIPTOR.name} without a header: the first message of a stream must name the sender and "
                "the step"
            )
        identity = convert.sender_from_proto(message.header)
        call.identity = identity
        store = await self._admission.admit(identity)
        store.check_installed()
        call.read_header(message.header)
        call.slots.is_reported = message.header.reports_reading
        call.wanted.read_held(message.header.held, store.entry.generation)
        store.gradients.begin_push(call)
        return store

    async def _pull(self, request: server_pb2.PullRequest, _: grpc.aio.ServicerContext) -> AsyncIterator[Message]:
        identity = convert.sender_from_proto(request)
        store = await self._admission.admit(identity)
        store.check_installed()
        call = Call(identity, is_push=False, wants_weights=True)
        call.wanted.dtype = convert.payload_dtype_from_proto(request.dtype)
        call.wanted.read_held(request.held, store.entry.generation)
        last = -1
        try:
            slices = request.slices or store.router.indices
            if store.replicator.needs_confirm(slices):
                await store.replicator.confirm(slices)
                self._admission.check_live(call.identity)
            for index in slices:
                last = _check_ascending(index, last)
                store.router.pull(call, index, request.min_version)
            call.asked_all()
            async for answer in self._answers(call):
                if isinstance(answer, str):
                    yield server_pb2.PullResponse(waiting_for=answer)
                    continue
                assert isinstance(answer, SliceAnswer), "only pushes have reports of reading"
                weights = await store.reads.read(answer.index, call)
                store.counters.workers[call.identity.worker_id].pull_bytes += len(weights.payload)
                header = server_pb2.PullResponse(
                    slice=answer.index, version=weights.version, differences=weights.differences
                )
                yield frames.pack(header, weights.payload)
        finally:
            self._server.cancel_call(call)

    async def _answers(self, call: Call) -> AsyncIterator[SliceAnswer | server_pb2.Reading | str]:
        """Yield the answers of a call and reports of its reading, and between them the reasons why it is waiting."""
        while True:
            try:
                answer = await call.next_answer()
            except TimeoutError:
                yield call.note_wait(self._server.waiting_for(call)) or "for the rest of the request"
                continue
            if answer is None:
                return
            yield answer

    async def _install(self, requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext) -> server_pb2.InstallResponse:
        store: ParameterStore | None = None
        identity = None
        count = 0
        async for data in requests:
            frame = frames.unpack(server_pb2.InstallRequest, data)
            if store is None or identity is None:
                identity = convert.sender_from_proto(frame.header)
                store = await self._admission.admit(identity)
            elif frame.header.HasField("identity"):
                raise _second("identity")
            # The sender may have been fenced meanwhile, and another worker may be uploading values.
            self._admission.check_live(identity)
            store.install(frame.header.slice, frame.payload, identity.epoch)
            count += 1
        return server_pb2.InstallResponse(slices=count)

    async def _fetch_norms(
        self, request: server_pb2.FetchNormsRequest, _: grpc.aio.ServicerContext
    ) -> AsyncIterator[server_pb2.FetchNormsResponse]:
        store = await self._admission.admit_server(request.run_id, request.epoch, request.parameters)
        while not store.aggregation.is_complete(request.step):
            await store.norms.wait()
        squares = sorted(store.norms.known(request.step).items())
        for start in range(0, len(squares), _NORMS_PER_MESSAGE):
            part = squares[start : start + _NORMS_PER_MESSAGE]
            yield server_pb2.FetchNormsResponse(slices=[i for i, _ in part], squares=[value for _, value in part])

    def disconnect(self) -> None:
        """End the streams of other servers, which would delay the server's exit, and refuse further TCP connections."""
        self._listener.close()
        self._replicas.disconnect()

    async def _get_statistics(self, *_: object) -> server_pb2.GetStatisticsResponse:
        return self._server.statistics()


def _second(what: str) -> InvalidArgumentError:
    """Return the error for a message that would change a stream's sender or push midway."""
    return InvalidArgumentError(f"a later message of the stream has a second {what}: only the first may have one")


def _check_ascending(index: int, last: int) -> int:
    if index <= last:
        raise InvalidArgumentError(f"slice {index} came after slice {last}: name each slice once, in ascending order")
    return index
