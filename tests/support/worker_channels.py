"""A worker's end of a channel to a server, driven by hand over each transport, with one interface.

Requests are those of Share, which the gRPC end translates to PushPull, Push and Pull.
"""

from __future__ import annotations

import asyncio
import gc
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import grpc
import grpc.aio
import numpy as np

from psdist.link.arenas import GradientArena, WeightsArena
from psdist.v1 import common_pb2 as cpb
from psdist.v1 import server_pb2 as pb
from psdist.wire import auth, status
from tests.support.channels import open_channel
from tests.support.frame_socket import PATIENCE_SECONDS, FrameSocket, offered, received_file
from tests.support.server_bench import COUNT, GRADIENT, TOKEN, TOTAL, ServerBench, cut

_SERVICE = "/psdist.v1.ServerService/"


def _serialized(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


@dataclass(frozen=True)
class Answered:
    """Answer for one slice. weights: None if none were asked for."""

    slice: int
    version: int
    ignored: bool = False
    staleness: int = 0
    weights: np.ndarray | None = None


class WorkerChannel(ABC):
    """Worker ``worker`` of the bench's run, and its channel."""

    name: ClassVar[str]
    #: True if calls share a connection, which a gRPC stream has authenticated.
    is_framed: ClassVar[bool] = True
    #: True if the slices of a push are sent one by one.
    sends_slices: ClassVar[bool] = True

    def __init__(self, bench: ServerBench, worker: int = 0, token: str = TOKEN) -> None:
        self.bench = bench
        self.worker = worker
        self.metadata = auth.metadata(token)
        self._last_id = 0

    @classmethod
    async def opened(cls, bench: ServerBench, worker: int = 0) -> Self:
        """Return an open channel."""
        channel = cls(bench, worker)
        await channel.open()
        return channel

    @abstractmethod
    async def open(self, identity: pb.Identity | None = None) -> None:
        """Open the channel. Raises the server's refusal."""

    # --- requests -----------------------------------------------------------------------------------------------------

    def push(self, step: int, slices: Sequence[int] = range(COUNT), **header: Any) -> pb.ShareRequest:
        """Return a push that asks for weights."""
        self._last_id += 1
        made = self.bench.header(step, self.worker, **header)
        push = pb.SharedPush(header=made, wants_weights=True, slices=slices, base_versions=[step])
        return pb.ShareRequest(call_id=self._last_id, push=push)

    def pull(self, version: int = 0, slices: Sequence[int] = range(COUNT), **identity: Any) -> pb.ShareRequest:
        """Return a pull of slices in this version or newer."""
        self._last_id += 1
        sender = self.bench.identity(self.worker, **identity)
        pull = pb.SharedPull(identity=sender, min_version=version, slices=slices, dtype=cpb.DTYPE_FLOAT32)
        return pb.ShareRequest(call_id=self._last_id, pull=pull)

    # --- calls --------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def begin(self, request: pb.ShareRequest) -> None:
        """Send a request without its payloads."""

    @abstractmethod
    async def send_slice(self, request: pb.ShareRequest, index: int, payload: bytes) -> None:
        """Send the payload of one slice of a push that has begun."""

    async def send(self, request: pb.ShareRequest, values: np.ndarray = GRADIENT) -> None:
        """Send a request with its payloads."""
        await self.begin(request)
        if request.HasField("push"):
            for index in request.push.slices:
                part = cut(values)[index] if index < COUNT and not request.push.header.abstain else values[:0]
                await self.send_slice(request, index, part.tobytes())

    @abstractmethod
    async def _progress(self, request: pb.ShareRequest) -> list[Answered] | str:
        """Return the next answers of a call, or the reason for its wait. Raises the error that ended it."""

    async def next_answers(self, request: pb.ShareRequest) -> list[Answered]:
        """Return the next answers of a call, which may be one or all. Raises the error that ended it."""
        while isinstance(progress := await self._progress(request), str):
            pass
        return progress

    async def answers(self, request: pb.ShareRequest) -> list[Answered]:
        """Return all answers of a call, by slice. Raises the error that ended it."""
        slices = request.push.slices if request.HasField("push") else request.pull.slices
        found: list[Answered] = []
        while len(found) < max(1, len(slices)):
            found += await self.next_answers(request)
        return sorted(found, key=lambda answer: answer.slice)

    async def reason(self, request: pb.ShareRequest) -> str:
        """Return the next reason for the wait of a call."""
        while not isinstance(progress := await self._progress(request), str):
            pass
        return progress

    async def say(self, request: pb.ShareRequest, values: np.ndarray = GRADIENT) -> np.ndarray:
        """Make a call. Returns the weights of its answers. Raises the error that ended it."""
        await self.send(request, values)
        answers = [answer.weights for answer in await self.answers(request)]
        return np.concatenate([weights for weights in answers if weights is not None] or [GRADIENT[:0]])

    @abstractmethod
    async def cancel(self, request: pb.ShareRequest) -> None:
        """Give a call up."""

    @abstractmethod
    async def arrived(self) -> None:
        """Wait until the server has processed what was sent, which is a push that waits for another worker."""

    # --- ends ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def send_raw(self, data: bytes) -> None:
        """Send bytes: on the connection, or as a message of the latest call."""

    @abstractmethod
    async def end(self) -> Exception | None:
        """Wait for the end of the channel, or of the latest call. Returns the error that the server gives for it."""

    @abstractmethod
    async def leave(self) -> None:
        """End the channel as a worker does that has no more calls."""

    @abstractmethod
    async def cancel_stream(self) -> None:
        """Cancel the gRPC streams."""

    @abstractmethod
    async def cut(self) -> None:
        """Close the connection under the channel."""


@dataclass
class _Rpc:
    """One call over gRPC. rest: slices that were not sent yet."""

    stream: Any
    requests: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    header: pb.PushHeader | None = None
    rest: int = 0
    is_sent: asyncio.Event = field(default_factory=asyncio.Event)


class GrpcWorker(WorkerChannel):
    """Each call is a stream of its own."""

    name = "grpc"
    is_framed = False

    def __init__(self, bench: ServerBench, worker: int = 0, token: str = TOKEN) -> None:
        super().__init__(bench, worker, token)
        self._channel = open_channel(bench.address)
        self._rpcs: dict[int, _Rpc] = {}

    async def open(self, identity: pb.Identity | None = None) -> None:
        if identity is not None or self.metadata != auth.metadata(TOKEN):
            given = identity or self.bench.identity(self.worker)
            request = self.pull()
            request.pull.identity.CopyFrom(given)
            await self.say(request)

    async def begin(self, request: pb.ShareRequest) -> None:
        if request.HasField("pull"):
            pull = request.pull
            message = pb.PullRequest(
                identity=pull.identity, min_version=pull.min_version, slices=pull.slices, dtype=pull.dtype
            )
            method = self._channel.unary_stream(
                f"{_SERVICE}Pull", request_serializer=_serialized, response_deserializer=pb.PullResponse.FromString
            )
            self._rpcs[request.call_id] = _Rpc(method(message, metadata=self.metadata))
            return
        wants_weights = request.push.wants_weights
        response = pb.PushPullResponse if wants_weights else pb.PushResponse
        method = self._channel.stream_stream(
            f"{_SERVICE}{'PushPull' if wants_weights else 'Push'}",
            request_serializer=_serialized,
            response_deserializer=response.FromString,
        )
        rpc = self._rpcs[request.call_id] = _Rpc(None, header=request.push.header, rest=len(request.push.slices))
        rpc.stream = method(self._requests(rpc), metadata=self.metadata)

    async def _requests(self, rpc: _Rpc) -> AsyncIterator[bytes]:
        statistics = self._channel.unary_unary(f"{_SERVICE}GetStatistics")
        while (request := await rpc.requests.get()) is not None:
            yield request
            # A write after the end of the stream hides the status (grpc issue 36066): a refusal may be on its way.
            with suppress(grpc.aio.AioRpcError):
                for _ in range(2):
                    await statistics(b"", metadata=self.metadata)
            if rpc.stream.done():
                break
        rpc.is_sent.set()

    async def send_slice(self, request: pb.ShareRequest, index: int, payload: bytes) -> None:
        rpc = self._rpcs[request.call_id]
        bases = request.push.base_versions
        base = bases[len(bases) - rpc.rest] if len(bases) > 1 else bases[0]
        message = pb.PushPullRequest if request.push.wants_weights else pb.PushRequest
        rpc.requests.put_nowait(
            message(header=rpc.header, slice=index, base_version=base, payload=payload).SerializeToString()
        )
        rpc.header, rpc.rest = None, rpc.rest - 1
        if not rpc.rest:
            rpc.requests.put_nowait(None)

    async def _progress(self, request: pb.ShareRequest) -> list[Answered] | str:
        stream = self._rpcs[request.call_id].stream
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                answer = await stream.read()
        except grpc.aio.AioRpcError as error:
            raise status.from_call(error, "server") from None
        if answer is grpc.aio.EOF:
            raise ConnectionError("the call ended")
        if answer.waiting_for:
            return str(answer.waiting_for)
        if isinstance(answer, pb.PullResponse):
            return [Answered(answer.slice, answer.version, weights=np.frombuffer(answer.payload, np.float32))]
        wants_weights = isinstance(answer, pb.PushPullResponse)
        weights = np.frombuffer(answer.payload, np.float32) if wants_weights else None
        return [Answered(answer.slice, answer.version, answer.ignored, answer.staleness, weights)]

    async def cancel(self, request: pb.ShareRequest) -> None:
        self._rpcs[request.call_id].stream.cancel()

    async def arrived(self) -> None:
        await self._rpcs[self._last_id].is_sent.wait()
        await self.bench.holds_payloads()

    async def send_raw(self, data: bytes) -> None:
        self._rpcs[self._last_id].requests.put_nowait(data)

    async def end(self) -> Exception | None:
        stream = self._rpcs[self._last_id].stream
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await stream.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as error:
            return status.from_call(error, "server")
        return None

    async def leave(self) -> None:
        for rpc in self._rpcs.values():
            rpc.stream.cancel()

    async def cancel_stream(self) -> None:
        await self.leave()

    async def cut(self) -> None:
        await self._channel.close()


class FramedWorker(WorkerChannel):
    """Calls are frames on a connection, which a stream of the method ``name`` has authenticated."""

    def __init__(self, bench: ServerBench, worker: int, token: str, method: str, response: Any) -> None:
        super().__init__(bench, worker, token)
        self.stream = bench.channel.stream_stream(
            f"{_SERVICE}{method}", request_serializer=_serialized, response_deserializer=response.FromString
        )(metadata=self.metadata)
        bench.closers.append(self.stream.cancel)
        self.connection: FrameSocket | None = None
        self._early: defaultdict[int, deque[tuple[pb.ShareResponse, bytes]]] = defaultdict(deque)

    @property
    def socket(self) -> FrameSocket:
        """The connection, once it is open."""
        assert self.connection is not None
        return self.connection

    async def ask(self, request: Any) -> Any:
        """Send the stream's request and return the answer. Raises the error that ends the stream."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # Refused already: the answer tells why.
            await self.stream.write(request)
        return await self.stream_answer()

    async def stream_answer(self) -> Any:
        """Return the stream's next message. Raises the error that ends the stream, or ConnectionError."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                response = await self.stream.read()
        except grpc.aio.AioRpcError as error:
            raise status.from_call(error, "server") from None
        if response is grpc.aio.EOF:
            raise ConnectionError("the stream ended")
        return response

    def framed(self, message: pb.ShareRequest | bytes, payload: bytes = b"") -> bytes:
        """Return the bytes of a frame."""
        return self.socket.framed(message, payload)

    async def begin(self, request: pb.ShareRequest) -> None:
        await self.send_raw(self.framed(request))

    async def send_raw(self, data: bytes) -> None:
        await self.socket.send(data)

    async def _response(self, call_id: int) -> tuple[pb.ShareResponse, bytes]:
        """Return the next message about a call. Raises the error that ended the stream."""
        while not self._early[call_id]:
            try:
                header, payload = await self.socket.frame()
            except (ConnectionError, OSError):
                await self.stream_answer()
                raise
            response = pb.ShareResponse.FromString(header)
            self._early[response.call_id].append((response, payload))
        return self._early[call_id].popleft()

    async def _progress(self, request: pb.ShareRequest) -> list[Answered] | str:
        while True:
            response, payload = await self._response(request.call_id)
            match response.WhichOneof("kind"):
                case "waiting_for":
                    return response.waiting_for
                case "error":
                    raise status.from_detail(response.error)
                case "slice" | "answers":
                    return self._answered(request, response, payload)

    @abstractmethod
    def _answered(self, request: pb.ShareRequest, response: pb.ShareResponse, payload: bytes) -> list[Answered]:
        """Return the answers in a message."""

    async def cancel(self, request: pb.ShareRequest) -> None:
        await self.begin(pb.ShareRequest(call_id=request.call_id, cancel=pb.SharedCancel()))

    async def arrived(self) -> None:
        await self.say(self.pull())  # Calls are processed in order.

    async def end(self) -> Exception | None:
        try:
            await self.stream_answer()
        except ConnectionError:
            return None
        except Exception as error:
            return error
        raise AssertionError("the stream has a second answer")

    async def leave(self) -> None:
        await self.stream.done_writing()
        assert await self.end() is None

    async def cancel_stream(self) -> None:
        self.stream.cancel()

    async def cut(self) -> None:
        self.socket.close()


class TcpWorker(FramedWorker):
    """Payloads follow in frames of their own."""

    name = "tcp"
    #: Size of the connection's receive buffer; 0 for the system's choice.
    receive_bytes = 0

    def __init__(self, bench: ServerBench, worker: int = 0, token: str = TOKEN) -> None:
        super().__init__(bench, worker, token, "Connect", pb.ConnectResponse)

    async def promise(self, request: pb.ConnectRequest | bytes | None = None) -> pb.ConnectResponse:
        """Ask for a connection. Returns the server's answer. Raises its refusal."""
        default = pb.ConnectRequest(identity=self.bench.identity(self.worker))
        answer = await self.ask(default if request is None else request)
        assert isinstance(answer, pb.ConnectResponse)
        return answer

    async def dial(self, nonce: bytes) -> None:
        """Connect and show a nonce."""
        self.connection = await FrameSocket.dial(self.bench.listener.port, self.receive_bytes)
        self.bench.closers.append(self.connection.close)
        await self.send_raw(self.framed(opening(nonce)))

    async def open(self, identity: pb.Identity | None = None) -> None:
        answer = await self.promise(None if identity is None else pb.ConnectRequest(identity=identity))
        assert answer.port == self.bench.listener.port and len(answer.nonce) == 32
        await self.dial(answer.nonce)
        response, _ = await self._response(0)
        assert response.WhichOneof("kind") == "opened"

    def slice_frame(self, request: pb.ShareRequest, index: int, payload: bytes) -> bytes:
        """Return the frame with the payload of a slice."""
        header = pb.ShareRequest(call_id=request.call_id, slice=pb.SliceHeader(slice=index))
        return self.framed(header, payload)

    async def send_slice(self, request: pb.ShareRequest, index: int, payload: bytes) -> None:
        if not request.push.header.abstain:
            await self.send_raw(self.slice_frame(request, index, payload))

    async def taken(self, request: pb.ShareRequest) -> int:
        """Return how many payloads of a push the server has released, by its next message about that."""
        while (response := (await self._response(request.call_id))[0]).WhichOneof("kind") != "taken":
            pass
        return response.taken

    def _answered(self, request: pb.ShareRequest, response: pb.ShareResponse, payload: bytes) -> list[Answered]:
        result = response.slice
        wants_weights = request.HasField("pull") or request.push.wants_weights
        weights = np.frombuffer(payload, np.float32) if wants_weights else None
        return [Answered(result.slice, result.version, result.ignored, result.staleness, weights)]


def opening(nonce: bytes) -> pb.ShareRequest:
    """Return the first message of a TCP connection."""
    return pb.ShareRequest(open=pb.OpenConnection(nonce=nonce))


class ShmWorker(FramedWorker):
    """Payloads are in the arenas of both sides."""

    name = "shm"
    sends_slices = False

    def __init__(self, bench: ServerBench, worker: int = 0, token: str = TOKEN) -> None:
        super().__init__(bench, worker, token, "Share", pb.ShareResponse)
        self.arena = GradientArena.create(TOTAL, "float32")
        self.weights: WeightsArena | None = None

    async def open(self, identity: pb.Identity | None = None) -> None:
        attached = await self.attach(identity=identity or self.bench.identity(self.worker))
        assert self.weights is not None
        assert attached.nonce == self.arena.nonce and attached.weights_nonce == self.weights.nonce

    async def attach(self, fd: int | None = None, **changes: Any) -> pb.Attached:
        """Attach the arena, or another file if one is given."""
        with offered(self.arena.fd if fd is None else fd) as offer:
            given = {"identity": self.bench.identity(self.worker), "socket": offer.name, "dtype": cpb.DTYPE_FLOAT32}
            answer = await self.ask(pb.ShareRequest(attach=pb.Attach(**(given | changes))))
            connected = await offer.taken()
            self.weights = WeightsArena.open(await received_file(connected), COUNT, TOTAL)
        self.connection = FrameSocket(connected, has_payloads=False)
        self.bench.closers.append(self.connection.close)
        attached = answer.attached
        assert isinstance(attached, pb.Attached)
        return attached

    def values(self) -> np.ndarray:
        """Return the weights in the server's arena."""
        assert self.weights is not None
        return self.weights.weights

    async def send(self, request: pb.ShareRequest, values: np.ndarray = GRADIENT) -> None:
        self.arena.flat[...] = values
        await self.begin(request)

    async def send_slice(self, request: pb.ShareRequest, index: int, payload: bytes) -> None:
        raise AssertionError("payloads are in the arena")

    def _answered(self, request: pb.ShareRequest, response: pb.ShareResponse, payload: bytes) -> list[Answered]:
        answers = response.answers
        count = len(answers.slices)
        versions = list(answers.versions) if len(answers.versions) == count else list(answers.versions) * count
        staleness = list(answers.staleness) or [0] * count
        wants_weights = request.HasField("pull") or request.push.wants_weights
        weights = cut(self.values().copy())
        return [
            Answered(index, version, index in answers.ignored, stale, weights[index] if wants_weights else None)
            for index, version, stale in zip(answers.slices, versions, staleness, strict=True)
        ]

    def forget(self) -> None:
        """Give up all memory, as the end of the process does."""
        self.arena.detach()
        self.arena = GradientArena.create(0, "float32")
        self.weights = None
        with suppress(AssertionError):
            self.socket.close()
        gc.collect()


WORKERS: tuple[type[WorkerChannel], ...] = (GrpcWorker, TcpWorker, ShmWorker)
