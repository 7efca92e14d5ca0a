"""One TCP connection without a network: bytes are fed by hand, and sent frames are recorded."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import numpy as np
import pytest

from psdist.client.core.push_sequence import PendingRequest
from psdist.client.core.routing import Route
from psdist.client.session.waits import WaitTracker
from psdist.client.transport.buffers import PullTarget
from psdist.client.transport.tcp import TcpConnection
from psdist.client.transport.transport import ByteCounters, PullRequest, PushRequest, RequestIdentity
from psdist.compression import resolve
from psdist.errors import InternalError, LimitExceededError, ServerLostError, ServerUnreachableError
from psdist.monitoring.metrics import Phase
from psdist.types import Slicing
from psdist.v1 import server_pb2 as pb
from psdist.wire import limits, status
from psdist.wire.limits import DELIVERED_BYTES

SLICING = Slicing(100, 10)
ROUTE = Route("server-0", 1, "host:1", 1, tuple(range(10)))
SENDER = RequestIdentity("run", "worker-0", 1, "p")


class Stream:
    """gRPC stream that sends nothing until it is cancelled."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def read(self) -> Any:
        await self._ended.wait()
        return grpc.aio.EOF

    def cancel(self) -> None:
        self._ended.set()


class Wire:
    """Transport of a connection that keeps sent data, and pretends to have ``queued`` bytes of it left."""

    def __init__(self) -> None:
        self.sent: list[tuple[pb.ShareRequest, bytes]] = []
        self.queued = 0
        self.is_aborted = False

    def writelines(self, parts: list[Any]) -> None:
        self.write(b"".join(bytes(part) for part in parts))

    def write(self, data: bytes) -> None:
        while data:
            header, payload = struct.unpack_from("<II", data)
            frame, data = data[8 : 8 + header + payload], data[8 + header + payload :]
            assert len(frame) == header + payload
            self.sent.append((pb.ShareRequest.FromString(frame[:header]), frame[header:]))

    def get_write_buffer_size(self) -> int:
        return self.queued

    def get_extra_info(self, _: str) -> Any:
        return self

    def fileno(self) -> int:
        return -1

    def abort(self) -> None:
        self.is_aborted = True

    def slices(self) -> list[int]:
        return [request.slice.slice for request, _ in self.sent if request.WhichOneof("kind") == "slice"]


class Setup:
    def __init__(self) -> None:
        self.loss: Any = asyncio.get_running_loop().create_future()
        self.stream = TcpConnection(Stream(), ROUTE, SLICING, self.loss)
        self.wire = Wire()
        self.stream.connection._transport = self.wire  # type: ignore[assignment]  # a part of one
        self.tracker = WaitTracker()
        self.flat = np.arange(100, dtype=np.float32)
        self.out = np.zeros(100, np.float32)

    def pull(self) -> asyncio.Task[None]:
        target = PullTarget(SLICING, self.out)
        progress = PendingRequest(0, set(range(10)))
        return self._start(PullRequest(SENDER, progress, SLICING, "a pull", target, ByteCounters()))

    def push(self) -> asyncio.Task[None]:
        progress = PendingRequest(0, set(range(10)))
        return self._start(
            PushRequest(
                SENDER, progress, SLICING, "a push", [0] * 10, self.flat, resolve(None), 0.0, ByteCounters(), None
            )
        )

    def _start(self, request: Any) -> asyncio.Task[None]:
        async def exchange() -> None:
            sends = isinstance(request, PushRequest)
            with self.tracker.phases.call(Phase.PUSH), self.tracker.open_request("for a test", sends=sends) as wait:
                await self.stream.exchange(request, ROUTE, wait, self.loss)

        return asyncio.create_task(exchange())

    def receive(self, data: bytes) -> None:
        """Receive bytes from the server."""
        while data:
            buffer = self.stream.connection.get_buffer(-1)
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            self.stream.connection.buffer_updated(count)
            data = data[count:]

    def answer(self, index: int, payload: bytes = b"", call_id: int = 1) -> bytes:
        return framed(pb.ShareResponse(call_id=call_id, slice=pb.SliceResult(slice=index, version=1)), payload)

    async def run(self) -> None:
        """Let tasks run until they wait."""
        for _ in range(100):
            await asyncio.sleep(0)


def framed(response: pb.ShareResponse, payload: bytes = b"") -> bytes:
    header = response.SerializeToString()
    return struct.pack("<II", len(header), len(payload)) + header + payload


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    setup = Setup()
    yield setup
    setup.stream.close()
    await setup.stream.ended()


async def test_weights_come_to_their_place(setup: Setup) -> None:
    pulling = setup.pull()
    await setup.run()
    assert [request.pull.slices for request, _ in setup.wire.sent] == [list(range(10))]
    for index in reversed(range(10)):
        setup.receive(setup.answer(index, setup.flat[10 * index : 10 * index + 10].tobytes()))
    await pulling
    assert setup.out.tolist() == setup.flat.tolist() and not setup.stream.calls


async def test_weights_that_come_after_a_given_up_pull_are_not_written(setup: Setup) -> None:
    pulling = setup.pull()
    await setup.run()
    frame = setup.answer(0, np.ones(10, np.float32).tobytes())
    setup.receive(frame[:-20])
    assert setup.out[:5].tolist() == [1] * 5
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    before = setup.out.tolist()
    setup.receive(frame[-20:] + setup.answer(1, np.ones(10, np.float32).tobytes()))
    assert setup.out.tolist() == before
    assert setup.wire.sent[-1][0].WhichOneof("kind") == "cancel" and setup.stream.broken is None


async def test_no_more_payloads_than_the_window_are_sent_before_they_are_taken(setup: Setup) -> None:
    pushing = setup.push()
    await setup.run()
    window = limits.TCP_WINDOW_SLICES
    assert setup.wire.slices() == list(range(window))
    setup.receive(framed(pb.ShareResponse(call_id=1, taken=2)))
    await setup.run()
    assert setup.wire.slices() == list(range(window + 2))
    setup.receive(framed(pb.ShareResponse(call_id=1, taken=8)))
    await setup.run()
    assert setup.wire.slices() == list(range(10))
    payloads = [payload for request, payload in setup.wire.sent if request.WhichOneof("kind") == "slice"]
    assert b"".join(payloads) == setup.flat.tobytes()
    for index in range(10):
        setup.receive(setup.answer(index))
    await pushing


@pytest.mark.parametrize(("queued", "phase"), [(DELIVERED_BYTES + 1, Phase.PUSH), (DELIVERED_BYTES, Phase.WAIT)])
async def test_a_push_at_the_window_sends_until_its_slices_are_delivered(
    setup: Setup, queued: int, phase: Phase
) -> None:
    setup.wire.queued = queued
    pushing = setup.push()
    await setup.run()
    clock = setup.tracker.phases
    assert setup.wire.slices() == list(range(limits.TCP_WINDOW_SLICES)) and clock.phase is phase
    setup.receive(framed(pb.ShareResponse(call_id=1, taken=9)))
    await setup.run()
    assert setup.wire.slices() == list(range(10)) and clock.phase is phase
    for index in range(10):
        setup.receive(setup.answer(index))
    await pushing
    assert clock.phase is Phase.COMPUTE and not clock.calls


async def test_a_push_that_may_send_again_is_no_longer_held_up(setup: Setup) -> None:
    pushing = setup.push()
    await setup.run()
    setup.wire.queued = DELIVERED_BYTES + 1
    assert setup.tracker.phases.phase is Phase.WAIT
    setup.receive(framed(pb.ShareResponse(call_id=1, taken=1)))
    await setup.run()
    assert setup.tracker.phases.phase is Phase.PUSH
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing


@pytest.mark.parametrize("is_slow", [True, False])
async def test_a_push_that_is_given_up_ends_the_connection_if_its_gradient_may_be_queued(
    setup: Setup, is_slow: bool
) -> None:
    pushing = setup.push()
    await setup.run()
    setup.wire.queued = int(is_slow)
    pushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pushing
    assert setup.wire.is_aborted == is_slow and (setup.stream.broken is not None) == is_slow


async def test_a_refused_push_sends_no_more(setup: Setup) -> None:
    pushing = setup.push()
    await setup.run()
    sent = setup.wire.slices()
    refusal = pb.ShareResponse(call_id=1, error=status.to_detail(LimitExceededError("too much")))
    setup.receive(framed(refusal) + framed(pb.ShareResponse(call_id=1, taken=4)))
    with pytest.raises(LimitExceededError, match="too much"):
        await pushing
    assert setup.wire.slices() == sent and setup.stream.broken is None


async def test_a_loss_ends_all_calls(setup: Setup) -> None:
    calls = [setup.push(), setup.pull()]
    await setup.run()
    setup.loss.set_result(ServerLostError("gone"))
    for call in calls:
        with pytest.raises(ServerLostError, match="gone"):
            await call
    assert setup.wire.is_aborted


@pytest.mark.parametrize(
    ("index", "payload", "words"),
    [
        (11, b"", "slice 11, which was not requested"),
        (0, bytes(44), "sent 44 bytes for slice 0, which has 40"),
        (0, b"", "sent 0 bytes for slice 0, which has 40"),
    ],
)
async def test_a_server_that_answers_something_else(setup: Setup, index: int, payload: bytes, words: str) -> None:
    pulling = setup.pull()
    await setup.run()
    setup.receive(setup.answer(index, payload))
    with pytest.raises(InternalError, match=words):
        await pulling
    assert setup.wire.is_aborted and not setup.out.any()


async def test_a_second_answer_for_a_slice_ends_the_connection(setup: Setup) -> None:
    pushing = setup.push()
    await setup.run()
    setup.receive(setup.answer(0) + setup.answer(0))
    with pytest.raises(InternalError, match="slice 0, which was not requested or was answered before"):
        await pushing


async def test_no_call_on_a_broken_connection(setup: Setup) -> None:
    setup.stream.close()
    with pytest.raises(ServerUnreachableError):
        await setup.pull()
