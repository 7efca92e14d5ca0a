"""Frames between servers that are damaged, out of order, or made up.

Each is accepted, or rejected with a typed error. A rejected frame changes nothing, and nothing is accepted after the
end.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psdist import optim
from psdist.consistency import BSP
from psdist.errors import InternalError, PsdistError
from psdist.link.arenas import PAGE, GradientArena
from psdist.link.connecting import TcpListener
from psdist.link.frame_connection import PREFIX, FrameConnection
from psdist.security.tls import Credentials
from psdist.types import ClusterMap, ParametersEntry, ParametersSpec, Replica, ServerEntry, Shard, Slicing
from psdist.v1 import server_pb2 as pb
from psdist.wire import limits
from psdist_server import server as parameter_server
from psdist_server.server import ParameterServer, ServerRegistration
from psdist_server.service import StreamFromPrimary
from psdist_server.store.replica_carriers import FrameCarrier, UpdateMemory

SIZE = 4096
A, B = Replica("server-0", 1), Replica("server-1", 1)
SPEC = ParametersSpec("p", optim.SGD(lr=1.0, momentum=0.5), BSP(), slice_elements=SIZE)
#: A sends shard 0, with slices 0 and 2, to B; shard 1 is B's own.
SHARDS = (Shard(A, 2, (B,)), Shard(B, 1))
MAP = ClusterMap(
    "run",
    1,
    (ServerEntry("server-0", 1, "host:1"), ServerEntry("server-1", 1, "host:2")),
    (),
    (ParametersEntry(SPEC, 4 * SIZE, SHARDS, (), ready=True),),
)
Request, Response = pb.ReplicateRequest, pb.ReplicateResponse


class Wire:
    """Transport of a connection from which nothing is read."""

    family = socket.AF_UNIX

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.reads.set()

    def pause_reading(self) -> None:
        self.reads.clear()

    def resume_reading(self) -> None:
        self.reads.set()

    def abort(self) -> None:
        self.reads.set()

    def get_extra_info(self, _: str) -> Wire:
        return self

    def get_write_buffer_size(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def connected(connection: FrameConnection) -> Wire:
    """Connect a connection to its transport."""
    wire = Wire()
    connection.connection_made(cast(asyncio.Transport, wire))
    return wire


async def receive(connection: FrameConnection, wire: Wire, data: bytes) -> None:
    """Receive as many bytes as fit each time, while they are wanted."""
    async with asyncio.timeout(60):
        while data and connection._transport is not None:
            buffer = connection.get_buffer(-1)
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            connection.buffer_updated(count)
            data = data[count:]
            await wire.reads.wait()


# --- what is sent -----------------------------------------------------------------------------------------------------

#: Mostly valid ones.
SLICES = st.sampled_from([0, 0, 2, 2, 1, 3, 4, 1 << 31])
COUNTS = st.sampled_from([0, 1, 2, 3, 4, 1 << 62, (1 << 64) - 1])
LIVES = st.lists(st.builds(pb.Life, worker_id=st.text(max_size=3), incarnation=COUNTS), max_size=2)
SETTINGS = st.builds(
    pb.GroupSetting,
    group=st.sampled_from([0, 0, 1, 1 << 31]),
    name=st.sampled_from(["lr", "weight_decay", "momentum", "x"]),
    value=st.sampled_from([0.5, 0.25, -1.0, float("nan")]),
)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "begin": st.builds(Request.Begin, lsn=COUNTS),
    "end": st.just(Request.End()),
    "state": st.builds(
        Request.SliceState,
        slice=SLICES,
        array=st.sampled_from([0, 0, 1, 2]),
        arrays=st.sampled_from([2, 2, 2, 1]),
        version=COUNTS,
        contributors=LIVES,
    ),
    "update": st.builds(
        Request.Update,
        lsn=COUNTS,
        slice=SLICES,
        version=COUNTS,
        dtype=st.sampled_from([1, 1, 1, 0, 2, 3, 9]),
        has_gradient=st.booleans(),
        lr_scale=st.sampled_from([1.0, 0.5]),
        contributors=LIVES,
        sequence=COUNTS,
        settings=st.lists(SETTINGS, max_size=2),
    ),
    "digest": st.builds(Request.Digest, slice=SLICES, version=COUNTS, digest=st.binary(max_size=17)),
    "confirm": st.builds(Request.Confirm, number=COUNTS, shards=st.lists(SLICES, max_size=2), terms=st.just([2])),
    "hello": st.builds(
        Request.Hello,
        run_id=st.sampled_from(["run", "other"]),
        server_id=st.sampled_from(["server-0", "server-1", "server-9"]),
        incarnation=st.just(1),
        epoch=st.sampled_from([1, 2]),
        parameters=st.sampled_from(["p", "q"]),
    ),
}
PAYLOADS = st.sampled_from([4 * SIZE, 4 * SIZE, 4 * SIZE, 0, 2 * SIZE, 4 * SIZE - 4, 4, 3])
OFFSETS = st.sampled_from([0, 0, 0, PAGE, PAGE + 4, PAGE + 2, PAGE + 4 * SIZE, 8, (1 << 64) - 4])


def framed(message: pb.ReplicateRequest | pb.ReplicateResponse, payload: bytes = b"") -> bytes:
    header = message.SerializeToString()
    return PREFIX.pack(len(header), len(payload)) + header + payload


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(["update", "update", "update", "state", "state", *KINDS]))
    shard, term = draw(st.sampled_from([(0, 2)] * 6 + [(0, 1), (1, 1), (1, 2), (7, 2)]))
    message = Request(shard=shard, term=term, offset=draw(OFFSETS), **{kind: draw(KINDS[kind])})
    has_payload = (kind in ("update", "state") and not message.offset) or draw(st.sampled_from([False] * 9 + [True]))
    return framed(message, np.full(draw(PAYLOADS) // 4, 1.0, np.float32).tobytes() if has_payload else b"")


class Sent(list[bytes]):
    """Frames, shown by their first bytes."""

    def __repr__(self) -> str:
        return str([f"{len(frame)} bytes: {frame[:80].hex()}" for frame in self])


@st.composite
def damaged(draw: st.DrawFn, frames: st.SearchStrategy[bytes]) -> Sent:
    """Return frames, some with changed, missing or additional bytes."""
    sent = Sent(draw(st.lists(frames, min_size=1, max_size=8)))
    if draw(st.booleans()):
        which = draw(st.integers(0, len(sent) - 1))
        data = sent[which]
        where = draw(st.integers(0, min(len(data), 120)))
        cut = draw(st.sampled_from([0, 1, 4]))
        sent[which] = data[:where] + draw(st.binary(max_size=8)) + data[where + cut :]
    return sent


# --- the replica's end ------------------------------------------------------------------------------------------------


class Watched:
    """Replica's end of a stream that compares its state before and after each frame."""

    def __init__(self, host: ParameterServer, stream: StreamFromPrimary) -> None:
        self._store = host.stores["p"]
        self._stream = stream
        self.ended: list[PsdistError | None] = []
        self.refused = 0
        self._answer = stream.answer
        stream.answer = self._count

    def _count(self, response: pb.ReplicateResponse) -> None:
        self.refused += response.WhichOneof("kind") == "refused"
        self._answer(response)

    def state(self) -> Any:
        machine = self._store.backups.machines[0]
        records = {index: (one.version, one.contributors) for index, one in machine.records.items()}
        digests = [self._store.dense.digest(index) for index in (0, 1, 2, 3)]
        return machine.term, machine.lsn, records, set(machine.awaited), digests

    def begin_frame(self, header: bytes, size: int) -> memoryview:
        assert not self.ended
        before = self.state()
        memory = self._stream.begin_frame(header, size)
        assert self.state() == before
        return memory

    def end_frame(self) -> None:
        assert not self.ended
        before, refused = self.state(), self.refused
        try:
            self._stream.end_frame()
        except PsdistError:
            assert self.state() == before
            raise
        if self.refused > refused:
            assert self.state() == before

    def connection_ended(self, error: PsdistError | None) -> None:
        self.ended.append(error)
        self._stream.connection_ended(error)


@dataclass
class Outcome:
    """Result of a stream: its end, and the numbers of accepted updates and rejected messages."""

    error: PsdistError | None
    lsn: int
    refused: int = 0


async def give_to_replica(frames: Sequence[bytes]) -> Outcome:
    """Give frames to a replica that holds the shard."""
    host = ParameterServer(ServerRegistration("run", "server-1"), Credentials(), kernel_threads=1)
    arena = GradientArena.create(2 * SIZE, "float32")
    try:
        await host.adopt_map(MAP)
        stream = StreamFromPrimary(host, TcpListener())
        hello = Request.Hello(run_id="run", server_id="server-0", incarnation=1, epoch=1, parameters="p")
        await stream._admit(hello)
        stream._arena = arena
        serving = asyncio.create_task(serve(stream))
        watched = Watched(host, stream)
        stream._welcome(Response.Welcome())
        connection = FrameConnection(watched)
        wire = connected(connection)
        stream.connected(connection)
        await receive(connection, wire, b"".join(copied()))
        machine = host.stores["p"].backups.machines[0]
        assert machine.complete and not watched.ended and not watched.refused
        for frame in frames:
            await receive(connection, wire, frame)
        lsn = machine.lsn
        stream.answers.put_nowait(None)  # The primary ends the stream, unless it has ended already.
        return Outcome(await serving, lsn, watched.refused)
    finally:
        await host.close()
        arena.detach()


async def serve(stream: StreamFromPrimary) -> PsdistError | None:
    """Stand in for the gRPC stream, which ends with the first error."""
    while isinstance(answer := await stream.answers.get(), Response):
        pass
    stream.close()
    return answer


def copied() -> list[bytes]:
    """Return a copy of shard 0 filled with zeros."""
    zeros = np.zeros(SIZE, np.float32).tobytes()
    states = [(index, array) for index in (0, 2) for array in (0, 1)]
    parts = [Request.SliceState(slice=index, array=array, arrays=2) for index, array in states]
    begin, end = Request(shard=0, term=2, begin=Request.Begin(lsn=1)), Request(shard=0, term=2, end=Request.End())
    return [framed(begin), *(framed(Request(shard=0, term=2, state=part), zeros) for part in parts), framed(end)]


@pytest.fixture(autouse=True)
def no_newer_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do nothing: no caller waits for a newer map."""
    monkeypatch.setattr(parameter_server, "MAP_WAIT_SECONDS", 0.0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(damaged(requests()))
def test_a_replica_takes_or_refuses_what_comes(frames: Sent) -> None:
    outcome = asyncio.run(give_to_replica(frames))
    assert not isinstance(outcome.error, InternalError), outcome


def test_an_update_of_another_version_is_refused_once_and_does_not_count_as_taken() -> None:
    """Otherwise the next stream would resume after it, and the copy would lack it."""
    updates = [Request.Update(lsn=2 + n, slice=0, version=3 + n, dtype=1, lr_scale=1.0) for n in range(3)]
    outcome = asyncio.run(give_to_replica([framed(Request(shard=0, term=2, update=one)) for one in updates]))
    assert outcome == Outcome(None, 1, refused=1)


def test_updates_that_are_right_are_taken() -> None:
    ones = np.ones(SIZE, np.float32).tobytes()
    updates = [Request.Update(lsn=2 + n, slice=0, version=n, dtype=1, has_gradient=True, lr_scale=1.0) for n in (0, 1)]
    outcome = asyncio.run(give_to_replica([framed(Request(shard=0, term=2, update=one), ones) for one in updates]))
    assert outcome == Outcome(None, 3)


# --- the primary's end ------------------------------------------------------------------------------------------------


class Silent:
    """gRPC stream on which nothing arrives."""

    async def read(self) -> Any:
        await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        pass


RESPONSES = st.one_of(
    st.builds(
        Response, ack=st.builds(Response.Ack, shard=COUNTS.filter(lambda n: n < 1 << 32), term=COUNTS, lsn=COUNTS)
    ),
    st.builds(Response, filled=st.builds(Response.Filled, shard=st.integers(0, 9), term=COUNTS)),
    st.builds(Response, confirmed=st.builds(Response.Confirmed, number=COUNTS)),
    st.builds(Response, opened=st.just(pb.Opened())),
    st.just(Response()),
)


async def give_to_primary(frames: Sequence[bytes]) -> PsdistError | None:
    """Feed frames to a primary that has sent updates 1 to 3 of shard 0. Return the error that ended the connection."""
    memory = UpdateMemory(Slicing(4 * SIZE, SIZE), shared=True)
    carrier = FrameCarrier("shm", Silent(), "server-1", memory, memory.arena())
    wire = connected(carrier.connection)
    for lsn in (1, 2, 3):
        carrier.send(Request(shard=0, term=2, update=Request.Update(lsn=lsn)), memory.take(SIZE))
    handled: list[pb.ReplicateResponse] = []

    def handle(response: pb.ReplicateResponse) -> None:
        handled.append(response)
        if response.WhichOneof("kind") == "ack":
            carrier.acknowledged(response.ack)

    running = asyncio.create_task(carrier.run(handle))
    await asyncio.sleep(0)
    for frame in frames:
        await receive(carrier.connection, wire, frame)
    ended = carrier.broken
    if ended is not None:
        assert "invalid message" in ended.message and "failed" not in ended.message, ended
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    acked = max((r.ack.lsn for r in handled if (r.ack.shard, r.ack.term) == (0, 2)), default=0)
    carrier.close()
    assert len(carrier.unacknowledged()) == max(0, 3 - acked)
    memory.close()
    return ended


@settings(deadline=None)
@given(damaged(RESPONSES.map(framed)))
def test_a_primary_takes_or_refuses_what_is_answered(frames: Sent) -> None:
    asyncio.run(give_to_primary(frames))


@given(st.binary(max_size=200))
def test_garbage_ends_either_end(garbage: bytes) -> None:
    """Among others, the length of a header that is too long."""
    too_long = PREFIX.pack(limits.SHARED_MESSAGE_BYTES + 1, 0)
    ended = asyncio.run(give_to_primary([too_long, garbage]))
    assert ended is not None and "is longer than" in ended.message
