"""Connect stream of a server and its TCP connections, driven by hand: results, refusals, and closed connections."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from psdist import optim
from psdist.consistency import ASP
from psdist.errors import (
    FencedError,
    FutureStepError,
    InvalidArgumentError,
    LimitExceededError,
    NonFiniteGradientError,
    PsdistError,
    StaleEpochError,
    UnknownCodecError,
    WrongRunError,
)
from psdist.link.accepting import TcpListener
from psdist.security.tls import Credentials
from psdist.v1 import common_pb2 as cpb
from psdist.v1 import server_pb2 as pb
from psdist.wire import auth, channels, limits, status
from psdist_server.server import ParameterServer, ServerRegistration
from psdist_server.service import ServerService
from tests.integration.server.test_server_service import GRADIENT, INITIAL, SLICE, TOKEN, TOTAL, Bench, cut, entry
from tests.support.channels import open_channel

COUNT = -(-TOTAL // SLICE)
STEPPED = INITIAL - np.float32(0.5) * GRADIENT


class TcpBench(Bench):
    """Server with a port for TCP connections."""

    def __init__(self, host: ParameterServer, channel: grpc.aio.Channel, listener: TcpListener) -> None:
        super().__init__(host, channel)
        self.listener = listener
        self.stack = AsyncExitStack()


@pytest.fixture
async def bench() -> AsyncIterator[TcpBench]:
    host = ParameterServer(ServerRegistration("run", "server-0"), Credentials(TOKEN), kernel_threads=1)
    server = channels.make_server(Credentials(TOKEN))
    port = channels.bind(server, "127.0.0.1", 0, Credentials())
    listener = TcpListener()
    await listener.open("127.0.0.1")
    service = ServerService(host, listener)
    server.add_generic_rpc_handlers((service.handler(),))
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        bench = TcpBench(host, channel, listener)
        async with bench.stack:
            yield bench
    service.disconnect()
    await server.stop(0)
    await host.close()


class Connection:
    """TCP connection to the server's port, which sends nothing by itself."""

    def __init__(self, bench: TcpBench) -> None:
        self._port = bench.listener.port
        self._socket = socket.socket()
        self._socket.setblocking(False)
        bench.stack.callback(self._socket.close)

    async def open(self) -> None:
        await asyncio.get_running_loop().sock_connect(self._socket, ("127.0.0.1", self._port))

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def frame(self) -> tuple[pb.ShareResponse, bytes]:
        """Return the next frame. Raises ConnectionError at the end."""
        header, payload = struct.unpack("<II", await self._receive(8))
        return pb.ShareResponse.FromString(await self._receive(header)), await self._receive(payload)

    async def _receive(self, size: int) -> bytes:
        data = b""
        async with asyncio.timeout(60):
            while len(data) < size:
                part = await asyncio.get_running_loop().sock_recv(self._socket, size - len(data))
                if not part:
                    raise ConnectionError("the server closed the connection")
                data += part
        return data

    async def until_cut_off(self) -> None:
        """Wait until the server has ended the connection."""
        with pytest.raises(ConnectionError):
            while True:
                await self.frame()

    def close(self) -> None:
        self._socket.close()


def framed(message: pb.ShareRequest | bytes, payload: bytes = b"") -> bytes:
    header = message if isinstance(message, bytes) else message.SerializeToString()
    return struct.pack("<II", len(header), len(payload)) + header + payload


def opening(nonce: bytes) -> bytes:
    return framed(pb.ShareRequest(open=pb.OpenConnection(nonce=nonce)))


class Worker:
    """A Connect stream and its connection."""

    def __init__(self, bench: TcpBench, worker: int = 0) -> None:
        self.bench = bench
        self.worker = worker
        self.call = bench.channel.stream_stream(
            "/psdist.v1.ServerService/Connect",
            request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            response_deserializer=pb.ConnectResponse.FromString,
        )(metadata=auth.metadata(TOKEN))
        bench.stack.callback(self.call.cancel)
        self.connection = Connection(bench)
        self._ids = 0

    async def ask(self, request: pb.ConnectRequest | bytes | None = None) -> pb.ConnectResponse:
        """Send the stream's request and return the answer. Raises the error that ends the stream."""
        default = pb.ConnectRequest(identity=self.bench.identity(self.worker))
        await self.call.write(default if request is None else request)
        return await self.stream()

    async def stream(self) -> Any:
        """Return the stream's next message. Raises the error that ends the stream."""
        try:
            async with asyncio.timeout(60):
                response = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise status.from_call(error, "server") from None
        if response is grpc.aio.EOF:
            raise ConnectionError("the stream ended")
        return response

    async def connect(self) -> None:
        answer = await self.ask()
        assert answer.port == self.bench.listener.port and len(answer.nonce) == 32
        await self.connection.open()
        await self.connection.send(opening(answer.nonce))
        response, _ = await self.connection.frame()
        assert response.WhichOneof("kind") == "opened"

    def push(self, step: int, slices: Sequence[int] = range(COUNT), **changes: Any) -> pb.ShareRequest:
        self._ids += 1
        header = self.bench.header(step, self.worker, **changes)
        push = pb.SharedPush(header=header, wants_weights=True, slices=slices, base_versions=[step])
        return pb.ShareRequest(call_id=self._ids, push=push)

    def pull(self, version: int = 0, slices: Sequence[int] = range(COUNT)) -> pb.ShareRequest:
        self._ids += 1
        pull = pb.SharedPull(identity=self.bench.identity(self.worker), min_version=version, slices=slices)
        pull.dtype = cpb.DTYPE_FLOAT32
        return pb.ShareRequest(call_id=self._ids, pull=pull)

    def slices(self, push: pb.ShareRequest, values: np.ndarray = GRADIENT) -> bytes:
        """Return the frames with the payloads of a push."""
        return b"".join(self.slice(push, index, cut(values)[index].tobytes()) for index in push.push.slices)

    @staticmethod
    def slice(push: pb.ShareRequest, index: int, payload: bytes) -> bytes:
        return framed(pb.ShareRequest(call_id=push.call_id, slice=pb.SliceHeader(slice=index)), payload)

    async def send(self, *requests: pb.ShareRequest, values: np.ndarray = GRADIENT) -> None:
        """Send requests, and the payloads of pushes."""
        for request in requests:
            await self.connection.send(framed(request))
            if request.WhichOneof("kind") == "push" and not request.push.header.abstain:
                await self.connection.send(self.slices(request, values))

    async def answers(self, request: pb.ShareRequest) -> dict[int, tuple[pb.SliceResult, np.ndarray]]:
        """Return all answers of a call, by slice. Raises the error that it or the stream ends with."""
        slices = request.push.slices if request.WhichOneof("kind") == "push" else request.pull.slices
        found: dict[int, tuple[pb.SliceResult, np.ndarray]] = {}
        while len(found) < len(slices):
            try:
                response, payload = await self.connection.frame()
            except ConnectionError:
                await self.stream()
            if response.WhichOneof("kind") == "error":
                assert response.call_id == request.call_id
                raise status.from_detail(response.error)
            if response.WhichOneof("kind") == "slice" and response.call_id == request.call_id:
                found[response.slice.slice] = response.slice, np.frombuffer(payload, np.float32)
        return found

    async def say(self, request: pb.ShareRequest, values: np.ndarray = GRADIENT) -> np.ndarray:
        """Make a call. Returns the weights of its answer."""
        await self.send(request, values=values)
        answers = await self.answers(request)
        return np.concatenate([answers[index][1] for index in sorted(answers)])


async def connected(bench: TcpBench, worker: int = 0) -> Worker:
    peer = Worker(bench, worker)
    await peer.connect()
    return peer


async def still_serves(bench: TcpBench, step: int = 0) -> None:
    """Check that another connection can make a step."""
    before = np.frombuffer(await bench.pull(bench.identity()), np.float32)
    peer = await connected(bench)
    assert np.array_equal(await peer.say(peer.push(step)), before - np.float32(0.5) * GRADIENT)


# --- results ----------------------------------------------------------------------------------------------------------


async def test_a_step_in_frames(bench: TcpBench) -> None:
    await bench.create()
    peer = await connected(bench)
    assert np.array_equal(await peer.say(peer.pull()), INITIAL)
    request = peer.push(0)
    await peer.send(request)
    answers = await peer.answers(request)
    assert {result.version for result, _ in answers.values()} == {1}
    assert np.array_equal(np.concatenate([answers[index][1] for index in range(COUNT)]), STEPPED)
    assert await bench.pull(bench.identity()) == STEPPED.tobytes()
    (counted,) = bench.host.statistics().parameters[0].workers
    assert (counted.pushes, counted.push_bytes, counted.pull_bytes) == (COUNT, TOTAL * 4, TOTAL * 4 * 3)


async def test_a_repeated_push_is_told_and_not_used(bench: TcpBench) -> None:
    await bench.create()
    peer = await connected(bench)
    await peer.say(peer.push(0))
    await peer.send(again := peer.push(0))
    answers = await peer.answers(again)
    assert all(result.ignored and result.version == 1 for result, _ in answers.values())
    assert await bench.pull(bench.identity()) == STEPPED.tobytes()


async def test_a_slice_is_answered_before_the_next_one_comes(bench: TcpBench) -> None:
    await bench.create()
    peer = await connected(bench)
    await peer.connection.send(framed(request := peer.push(0)))
    for index, part in enumerate(cut(GRADIENT)):
        await peer.connection.send(peer.slice(request, index, part.tobytes()))
        while (frame := await peer.connection.frame())[0].WhichOneof("kind") != "slice":
            pass
        response, payload = frame
        assert response.slice.slice == index
        assert payload == cut(STEPPED)[index].tobytes()


async def test_a_push_that_abstains_has_no_payloads(bench: TcpBench) -> None:
    await bench.create()
    peer = await connected(bench)
    assert np.array_equal(await peer.say(peer.push(0, abstain=True)), INITIAL)


async def test_a_push_without_weights(bench: TcpBench) -> None:
    await bench.create()
    peer = await connected(bench)
    request = peer.push(0)
    request.push.wants_weights = False
    assert len(await peer.say(request)) == 0
    assert await bench.pull(bench.identity()) == STEPPED.tobytes()


async def test_asynchronous_pushes_tell_staleness(bench: TcpBench) -> None:
    await bench.create(workers=2, consistency=ASP())
    peers = [await connected(bench, rank) for rank in (0, 1)]
    await peers[0].say(peers[0].push(0))
    await peers[1].send(request := peers[1].push(0))
    answers = await peers[1].answers(request)
    assert {(result.version, result.staleness) for result, _ in answers.values()} == {(2, 1)}


async def test_payloads_are_taken_before_they_are_answered_where_slices_are_clipped_together(
    bench: TcpBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check payloads that exceed the limit on held memory: clipping answers no slice before all of them have
    arrived."""
    monkeypatch.setattr(limits, "TCP_WINDOW_SLICES", 2)
    await bench.create(optimizer=optim.SGD(lr=1.0, max_grad_norm=1e9))
    peer = await connected(bench)
    await peer.connection.send(framed(request := peer.push(0)))
    taken = 0
    for index, part in enumerate(cut(GRADIENT)):
        while index - taken >= 2:
            taken = (await peer.connection.frame())[0].taken
        await peer.connection.send(peer.slice(request, index, part.tobytes()))
    assert len(await peer.answers(request)) == COUNT


async def test_for_whom_a_call_waits_is_told(bench: TcpBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAIT_REASON_SECONDS", 0.01)
    await bench.create(workers=2)
    peer = await connected(bench)
    await peer.send(request := peer.push(0))
    async with asyncio.timeout(60):
        while "worker-1 (rank 1) to push step 0" not in (await peer.connection.frame())[0].waiting_for:
            pass
    other = await connected(bench, 1)
    await other.say(other.push(0))
    assert len(await peer.answers(request)) == COUNT


async def test_calls_after_a_cancelled_one_go_on(bench: TcpBench) -> None:
    await bench.create(workers=2)
    peer = await connected(bench)
    await peer.connection.send(framed(given_up := peer.push(0)))
    await peer.connection.send(peer.slice(given_up, 0, cut(GRADIENT)[0].tobytes()))
    await peer.connection.send(framed(pb.ShareRequest(call_id=given_up.call_id, cancel=pb.SharedCancel())))
    # It was on its way when the call was given up.
    await peer.connection.send(peer.slice(given_up, 1, cut(GRADIENT)[1].tobytes()))
    other = await connected(bench, 1)
    await other.send(theirs := other.push(0))
    assert np.array_equal(await peer.say(peer.push(0)), STEPPED)
    assert len(await other.answers(theirs)) == COUNT


# --- refused calls ----------------------------------------------------------------------------------------------------

Change = Callable[[Worker], pb.ShareRequest]


def renamed(**identity: Any) -> Change:
    return lambda peer: peer.push(0, identity=peer.bench.identity(**identity))


REFUSED: dict[str, tuple[type[PsdistError], Change]] = {
    "unknown slice": (InvalidArgumentError, lambda peer: peer.push(0, [0, 99])),
    "no slice": (InvalidArgumentError, lambda peer: peer.push(0, [])),
    "slice twice": (InvalidArgumentError, lambda peer: peer.push(0, [0, 1, 1])),
    "no wire dtype": (InvalidArgumentError, lambda peer: peer.push(0, dtype=cpb.DTYPE_FLOAT64)),
    "codec": (UnknownCodecError, lambda peer: peer.push(0, codec=7)),
    "another worker": (InvalidArgumentError, renamed(worker_id="worker-1")),
    "wrong run": (WrongRunError, renamed(run_id="other")),
    "old epoch": (StaleEpochError, renamed(epoch=1)),
    "pull of an unknown slice": (InvalidArgumentError, lambda peer: peer.pull(slices=[99])),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_wrong_call_changes_nothing_and_the_connection_goes_on(bench: TcpBench, what: str) -> None:
    await bench.create()
    error, change = REFUSED[what]
    peer = await connected(bench)
    request = change(peer)
    await peer.connection.send(framed(request))
    if request.WhichOneof("kind") == "push":  # payloads that were sent before the refusal arrived
        await peer.connection.send(peer.slice(request, 0, cut(GRADIENT)[0].tobytes()))
    response, _ = await peer.connection.frame()
    with pytest.raises(error):
        raise status.from_detail(response.error)
    assert np.array_equal(await peer.say(peer.push(0)), STEPPED)


async def test_a_slice_that_is_refused_ends_its_call(bench: TcpBench) -> None:
    await bench.create()
    peer = await connected(bench)
    with pytest.raises(FutureStepError):
        await peer.say(peer.push(5))
    assert np.array_equal(await peer.say(peer.push(0)), STEPPED)


async def test_what_is_not_finite_is_left_out_and_told(bench: TcpBench) -> None:
    await bench.create(workers=2)
    good, bad = await connected(bench), await connected(bench, 1)
    await good.send(request := good.push(0))
    with pytest.raises(NonFiniteGradientError):
        await bad.say(bad.push(0), values=np.full(TOTAL, np.inf, np.float32))
    await bad.send(bad.push(0))  # not taken before the error
    answers = await good.answers(request)
    assert np.isfinite(np.concatenate([values for _, values in answers.values()])).all()


@pytest.mark.parametrize("when", ["before its payloads", "after them"])
async def test_a_fenced_workers_calls_end(bench: TcpBench, when: str) -> None:
    await bench.create(workers=2)
    peer = await connected(bench)
    await peer.connection.send(framed(request := peer.push(0)))
    if when == "after them":
        await peer.connection.send(peer.slices(request))
    await peer.say(peer.pull())  # the push has been read by now
    await bench.follow(entry(2, ready=True), live=0)
    if when != "after them":
        await peer.connection.send(peer.slices(request))
    with pytest.raises(FencedError):
        await peer.answers(request)


# --- closed connections -----------------------------------------------------------------------------------------------

Wrong = Callable[[Worker, pb.ShareRequest], bytes]
PART = cut(GRADIENT)[0].tobytes()

CUT_OFF: dict[str, tuple[type[PsdistError], str, Wrong]] = {
    "a longer payload": (
        InvalidArgumentError,
        "slice 0 has 40 bytes",
        lambda p, push: p.slice(push, 0, PART + b"1234"),
    ),
    "a shorter payload": (InvalidArgumentError, "not 36", lambda p, push: p.slice(push, 0, PART[4:])),
    "another slice": (InvalidArgumentError, "slice 0 is next", lambda p, push: p.slice(push, 1, PART)),
    "a slice too many": (
        InvalidArgumentError,
        "all slices arrived",
        lambda p, push: p.slices(push) + p.slice(push, 2, GRADIENT[20:].tobytes()),
    ),
    "a slice of no call": (
        InvalidArgumentError,
        "call 99, which has not started",
        lambda p, push: framed(pb.ShareRequest(call_id=99, slice=pb.SliceHeader(slice=0)), PART),
    ),
    "a payload of no slice": (
        InvalidArgumentError,
        "belongs to no slice",
        lambda p, push: framed(pb.ShareRequest(call_id=1, cancel=pb.SharedCancel()), b"x"),
    ),
    "a header that is none": (InvalidArgumentError, "not a valid", lambda p, push: framed(b"\xff\xff")),
    "a header too long": (
        LimitExceededError,
        "is longer than",
        lambda p, push: struct.pack("<II", limits.SHARED_MESSAGE_BYTES + 1, 0),
    ),
    "a payload too long": (
        LimitExceededError,
        "is longer than",
        lambda p, push: struct.pack("<II", 4, limits.DATA_MESSAGE_BYTES + 1),
    ),
    "nothing asked": (InvalidArgumentError, "must be push, pull or cancel", lambda p, push: framed(pb.ShareRequest())),
    "a number again": (InvalidArgumentError, "does not come after", lambda p, push: framed(push)),
}


@pytest.mark.parametrize("what", CUT_OFF)
async def test_a_wrong_frame_cuts_the_connection_off_and_the_stream_says_why(bench: TcpBench, what: str) -> None:
    await bench.create(workers=2)
    error, match, wrong = CUT_OFF[what]
    peer = await connected(bench)
    await peer.connection.send(framed(request := peer.push(0)))
    await peer.connection.send(wrong(peer, request))
    with pytest.raises(error, match=match):
        await peer.stream()
    await peer.connection.until_cut_off()
    # No complete push is lost, and nothing else was changed.
    mine, other = await connected(bench), await connected(bench, 1)
    await mine.send(request := mine.push(0))
    assert np.array_equal(await other.say(other.push(0)), STEPPED)


async def test_more_payloads_than_may_be_held(bench: TcpBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TCP_WINDOW_SLICES", 2)
    await bench.create(workers=2)
    peer = await connected(bench)
    await peer.send(peer.push(0))
    with pytest.raises(LimitExceededError, match="2 payloads of call 1 are held"):
        await peer.stream()


async def test_a_peer_that_stops_within_a_payload(bench: TcpBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.05)
    await bench.create()
    peer = await connected(bench)
    request = peer.push(0)
    await peer.connection.send(framed(request) + peer.slice(request, 0, PART)[:-1])
    with pytest.raises(LimitExceededError, match="the rest of a frame did not arrive"):
        await peer.stream()
    await still_serves(bench)


async def test_a_peer_that_never_reads(bench: TcpBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a peer that asks for much, again and again."""
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(limits, "STREAM_CALLS_MAX", 1 << 30)
    monkeypatch.setattr(limits, "SHARED_ROUNDS_MAX", 1 << 30)
    await bench.create()
    peer = await connected(bench)

    async def ask() -> None:
        while True:
            await peer.connection.send(b"".join(framed(peer.pull()) for _ in range(500)))

    asking = asyncio.create_task(ask())
    with pytest.raises(LimitExceededError, match="answers were not read"):
        await peer.stream()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await still_serves(bench)


async def test_calls_whose_answers_are_not_read_are_bounded(bench: TcpBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STREAM_CALLS_MAX", 3)
    await bench.create(workers=2)
    peer = await connected(bench)
    for _ in range(4):
        await peer.connection.send(framed(peer.pull(version=1, slices=[0])))
    with pytest.raises(LimitExceededError, match="3 calls of one worker"):
        await peer.stream()


@pytest.mark.parametrize("how", ["stream", "connection"])
async def test_the_end_of_either_ends_the_other_and_what_was_pushed_counts(bench: TcpBench, how: str) -> None:
    await bench.create(workers=2)
    peer, other = await connected(bench), await connected(bench, 1)
    await peer.send(peer.push(0))
    await peer.say(peer.pull())
    if how == "stream":
        peer.call.cancel()
        await peer.connection.until_cut_off()
    else:
        peer.connection.close()
        with pytest.raises(ConnectionError, match="the stream ended"):
            await peer.stream()
    assert np.array_equal(await other.say(other.push(0)), STEPPED)
