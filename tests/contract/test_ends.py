"""Ends of channels and bad input on them, the same over each transport and in each role: worker to server, primary to
replica, and worker to worker."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from psdist.errors import (
    InvalidArgumentError,
    LimitExceededError,
    PsdistError,
    TcpUnavailableError,
)
from psdist.v1 import server_pb2 as pb
from psdist.v1 import worker_pb2
from psdist.wire import frames, limits
from tests.support.frame_socket import PATIENCE_SECONDS
from tests.support.peer_channels import PEERS, PeerBench, PeerChannel, opened_peers
from tests.support.primary_channels import (
    ARENA,
    ONES,
    PRIMARIES,
    SIZE,
    PrimaryChannel,
    Request,
    ShmPrimary,
    opened_replica,
    promoted,
    update,
)
from tests.support.server_bench import GRADIENT, STEPPED, ServerBench, cut, opened_bench
from tests.support.worker_channels import WORKERS, ShmWorker, TcpWorker, WorkerChannel


@dataclass(frozen=True)
class Bad:
    """Bytes that end a channel, made for an open one, and the error that tells why."""

    data: Callable[[Any], bytes]
    error: type[PsdistError]
    text: str


class Role(ABC):
    """One role of a channel over one transport: its accepting end, and channels to it."""

    kind: Any
    #: Bad input by its name.
    bad: dict[str, Bad]

    @property
    def is_framed(self) -> bool:
        """True if the channel has a connection of its own."""
        return bool(self.kind.is_framed)

    @abstractmethod
    def opened(self) -> AbstractAsyncContextManager[None]:
        """Open the accepting end."""

    @abstractmethod
    async def connect(self) -> Any:
        """Open a channel on which a call is under way."""

    @abstractmethod
    async def check_unchanged(self) -> None:
        """Check that bad input has changed nothing, and that other channels work."""

    @abstractmethod
    def half_frame(self, channel: Any) -> bytes:
        """Return a frame without its last byte, of the call under way."""


def common(no_payload: Callable[[Any], bytes]) -> dict[str, Bad]:
    """Return bad input that is the same in all roles. no_payload: a frame with a payload that belongs to nothing."""
    return {
        "garbage": Bad(lambda c: c.framed(b"\xff\xff\xff"), InvalidArgumentError, "not a valid"),
        "a header too long": Bad(
            lambda c: c.socket.prefix(limits.SHARED_MESSAGE_BYTES + 1), LimitExceededError, "is longer than"
        ),
        "a payload too long": Bad(
            lambda c: c.socket.prefix(4, limits.DATA_MESSAGE_BYTES + 1), LimitExceededError, "is longer than"
        ),
        "a payload of nothing": Bad(no_payload, InvalidArgumentError, "belongs to no slice|which has none"),
    }


def without(bad: dict[str, Bad], *names: str) -> dict[str, Bad]:
    return {name: one for name, one in bad.items() if name not in names}


# --- worker to server -------------------------------------------------------------------------------------------------

PART = cut(GRADIENT)[0].tobytes()


def _message(index: int, payload: bytes) -> Callable[[Any], bytes]:
    """Return a message of a push over gRPC."""

    def data(channel: WorkerChannel) -> bytes:
        header = channel.bench.header(0)
        return frames.pack(pb.PushPullRequest(header=header, slice=index), payload)

    return data


def _slice(index: int, payload: bytes, call_id: int = 1) -> Callable[[TcpWorker], bytes]:
    return lambda channel: channel.slice_frame(pb.ShareRequest(call_id=call_id), index, payload)


def _request(**kind: Any) -> Callable[[Any], bytes]:
    return lambda channel: channel.framed(pb.ShareRequest(**kind))


#: The worker of these calls has begun a push with number 1.
ON_CONNECTIONS = common(lambda c: c.framed(pb.ShareRequest(call_id=1, cancel=pb.SharedCancel()), b"x")) | {
    "nothing asked": Bad(_request(), InvalidArgumentError, "must be push, pull or cancel"),
    "attached again": Bad(
        _request(call_id=2, attach=pb.Attach()), InvalidArgumentError, "must be push, pull or cancel"
    ),
    "a number again": Bad(_request(call_id=1, pull=pb.SharedPull()), InvalidArgumentError, "does not come after 1"),
    "number zero": Bad(_request(pull=pb.SharedPull()), InvalidArgumentError, "call_id 0 does not come after 1"),
}
WORKER_BAD: dict[str, dict[str, Bad]] = {
    "grpc": {
        "garbage": Bad(lambda c: b"\xff\xff", InvalidArgumentError, "not a valid"),
        "a longer payload": Bad(_message(0, PART + b"1234"), InvalidArgumentError, "40 bytes in float32, not 44"),
        "a shorter payload": Bad(_message(0, PART[1:]), InvalidArgumentError, "40 bytes in float32, not 39"),
        "another slice": Bad(_message(3, PART), InvalidArgumentError, "slice 3 .* is not on this server"),
    },
    "tcp": ON_CONNECTIONS
    | {
        "a longer payload": Bad(_slice(0, PART + b"1234"), InvalidArgumentError, "slice 0 has 40 bytes"),
        "a shorter payload": Bad(_slice(0, PART[4:]), InvalidArgumentError, "not 36"),
        "another slice": Bad(_slice(1, PART), InvalidArgumentError, "slice 0 is next"),
        "a slice too many": Bad(
            lambda c: _slice(0, PART)(c) + _slice(0, PART)(c), InvalidArgumentError, "all slices arrived"
        ),
        "a slice of no call": Bad(_slice(0, PART, call_id=99), InvalidArgumentError, "call 99, which has not started"),
    },
    "shm": without(ON_CONNECTIONS, "a payload too long", "a payload of nothing"),
}


class ServedWorker(Role):
    """A worker with another one, so that no step is complete by itself."""

    def __init__(self, kind: type[WorkerChannel]) -> None:
        self.kind = kind
        self.bad = WORKER_BAD[kind.name]
        self.bench: ServerBench

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with opened_bench() as self.bench:
            await self.bench.create(workers=2)
            yield

    async def connect(self) -> WorkerChannel:
        channel: WorkerChannel = await self.kind.opened(self.bench)
        request = channel.push(0, [0])
        await (channel.begin(request) if channel.sends_slices else channel.send(request))
        return channel

    async def check_unchanged(self) -> None:
        mine, other = await self.kind.opened(self.bench), await self.kind.opened(self.bench, 1)
        await mine.send(mine.push(0))
        assert np.array_equal(await other.say(other.push(0)), STEPPED)

    def half_frame(self, channel: Any) -> bytes:
        if channel.sends_slices:
            return bytes(_slice(0, PART)(channel)[:-1])
        return bytes(channel.framed(channel.pull())[:-1])


# --- primary to replica -----------------------------------------------------------------------------------------------


def _replica(payload: bytes = b"", **fields: Any) -> Callable[[PrimaryChannel], bytes]:
    return lambda channel: channel.message(payload, **fields)


WHOLE = ONES.tobytes()
PRIMARY_BAD = common(_replica(b"1234", end=Request.End())) | {
    "another size": Bad(_replica(WHOLE[4:], update=update(1)), InvalidArgumentError, "has 16384 bytes"),
    "another slice": Bad(_replica(WHOLE, update=update(1, 7)), InvalidArgumentError, "slice 7"),
    "a gap": Bad(_replica(WHOLE, update=update(3)), InvalidArgumentError, "update 3 of shard 0 comes after 0"),
    "another server's hello": Bad(
        lambda c: c.framed(
            Request(hello=Request.Hello(run_id="run", server_id="server-1", incarnation=1, epoch=1, parameters="p"))
        ),
        InvalidArgumentError,
        "for the server and the parameters that opened it",
    ),
}


def _at(offset: int, payload: bytes = b"") -> Callable[[PrimaryChannel], bytes]:
    return _replica(payload, update=update(1), offset=offset)


OUTSIDE = "is not in an arena"
PRIMARY_BAD_BY_TRANSPORT: dict[str, dict[str, Bad]] = {
    "grpc": without(PRIMARY_BAD, "a header too long", "a payload too long", "a payload of nothing"),
    "tcp": PRIMARY_BAD | {"without an arena": Bad(_at(ShmPrimary.offset(0)), InvalidArgumentError, "without an arena")},
    "shm": PRIMARY_BAD
    | {
        "an offset of nothing": Bad(
            _replica(end=Request.End(), offset=ShmPrimary.offset(0)), InvalidArgumentError, "which has none"
        ),
        "behind the arena": Bad(_at(ShmPrimary.offset(ARENA - SIZE + 1)), InvalidArgumentError, OUTSIDE),
        "before the arena": Bad(_at(8), InvalidArgumentError, OUTSIDE),
        "between elements": Bad(_at(ShmPrimary.offset(0) + 2), InvalidArgumentError, OUTSIDE),
        "in both places": Bad(_at(ShmPrimary.offset(0), WHOLE), InvalidArgumentError, "beside one in the arena"),
    },
}


class FilledReplica(Role):
    """A replica whose copy is filled with zeros."""

    def __init__(self, kind: type[PrimaryChannel]) -> None:
        self.kind = kind
        self.bad = PRIMARY_BAD_BY_TRANSPORT[kind.name]
        self.bench: ServerBench

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with opened_replica() as self.bench:
            yield

    async def connect(self) -> PrimaryChannel:
        channel: PrimaryChannel = self.kind(self.bench)
        await channel.open()
        await channel.fill()
        return channel

    async def check_unchanged(self) -> None:
        again: PrimaryChannel = self.kind(self.bench)
        await again.open()
        assert [(held.lsn, held.complete) for held in again.welcome.held] == [(0, True)]
        await again.send(WHOLE, update=update(1))
        assert (await again.receive()).ack.lsn == 1
        assert (await promoted(self.bench) == -1.0).all()

    def half_frame(self, channel: Any) -> bytes:
        return bytes(channel.message(WHOLE, update=update(1))[:-1])


# --- worker to worker -------------------------------------------------------------------------------------------------


def _peer(payload: bytes = b"", **kind: Any) -> Callable[[PeerChannel], bytes]:
    return lambda channel: channel.framed(worker_pb2.PeerFrame(**kind), payload)


def _call(channel: PeerChannel, **changes: Any) -> worker_pb2.PeerFrame:
    call = worker_pb2.CollectiveCall(lane=channel.lane(number=1), kind="send", dtype="float32", root=-1)
    call.MergeFrom(worker_pb2.CollectiveCall(**changes))
    return worker_pb2.PeerFrame(call=call)


def _elsewhere(place: int, size: int) -> Callable[[PeerChannel], bytes]:
    def data(channel: PeerChannel) -> bytes:
        frame = _call(channel, gives=size)
        frame.shared.CopyFrom(worker_pb2.SharedPayload(place=place, size=size))
        return channel.framed(frame)

    return data


PEER_BAD = without(common(lambda c: b""), "a payload of nothing") | {
    "a second hello": Bad(_peer(hello=worker_pb2.PeerHello()), InvalidArgumentError, "a link carries calls, parts"),
    "a large payload with its call": Bad(
        lambda c: c.framed(_call(c), bytes(limits.EAGER_BYTES + 1)), LimitExceededError, "over"
    ),
    "a lane of another rank": Bad(
        lambda c: c.framed(worker_pb2.PeerFrame(call=worker_pb2.CollectiveCall(lane=c.lane(source=5)))),
        InvalidArgumentError,
        "names a lane of rank 5",
    ),
    "many dimensions": Bad(
        lambda c: c.framed(_call(c, shape=[1] * (limits.DIMENSIONS_MAX + 1))), InvalidArgumentError, "dimensions"
    ),
    "a place that is not shared": Bad(_elsewhere(limits.SHARED_PARTS, 8), InvalidArgumentError, "which is not shared"),
    "more than a place has": Bad(_elsewhere(0, limits.PART_BYTES + 1), InvalidArgumentError, "which is not shared"),
}


class GroupOfWorkers(Role):
    """A worker that an array was sent to over a link. Its group learns of the end of the link."""

    bad = PEER_BAD

    def __init__(self, kind: type[PeerChannel]) -> None:
        self.kind = kind
        self.bench: PeerBench

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with opened_peers() as self.bench:
            yield

    async def connect(self) -> PeerChannel:
        channel: PeerChannel = self.kind(self.bench)
        await channel.open()
        await channel.send_array(np.arange(5, dtype=np.float32))
        return channel

    async def check_unchanged(self) -> None:
        await self.bench.reduce()

    def half_frame(self, channel: Any) -> bytes:
        return bytes(channel.framed(_call(channel, gives=4), b"1234")[:-1])


# --- the contract -----------------------------------------------------------------------------------------------------


def _roles() -> dict[str, Callable[[], Role]]:
    made: dict[str, Callable[[], Role]] = {}
    made |= {f"worker-{kind.name}": partial(ServedWorker, kind) for kind in WORKERS}
    made |= {f"primary-{kind.name}": partial(FilledReplica, kind) for kind in PRIMARIES}
    made |= {f"peer-{kind.name}": partial(GroupOfWorkers, kind) for kind in PEERS}
    return made


ROLES = _roles()
#: Roles whose channel has a connection, and those of them that a gRPC stream has authenticated.
FRAMED = [name for name, make in ROLES.items() if make().is_framed]
BESIDE_STREAMS = [name for name in FRAMED if not name.startswith("peer")]
#: Calls of a worker on the server's host have no payloads, and it may be stopped for long.
STALLING = [name for name in BESIDE_STREAMS if name != "worker-shm"]


@pytest.fixture
async def role(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """One role over one transport."""
    made = ROLES[request.param]()
    async with made.opened():
        yield made


def over(names: list[str]) -> pytest.MarkDecorator:
    """Run a test over these roles."""
    return pytest.mark.parametrize("role", names, indirect=True)


@pytest.mark.parametrize(
    ("role", "what"), [(name, what) for name, make in ROLES.items() for what in make().bad], indirect=["role"]
)
async def test_bad_input_ends_the_channel_with_its_reason_and_changes_nothing(role: Role, what: str) -> None:
    bad = role.bad[what]
    channel = await role.connect()
    await channel.send_raw(bad.data(channel))
    error = await channel.end()
    assert isinstance(error, PsdistError) and not isinstance(error, TcpUnavailableError)
    # The group of a peer learns of the loss of its sender, with the reason that ended the link.
    assert isinstance(error, bad.error) or isinstance(role, GroupOfWorkers)
    with pytest.raises(PsdistError, match=bad.text):
        raise error
    if role.is_framed:
        await channel.socket.until_closed()
    await role.check_unchanged()


@over(STALLING)
async def test_a_frame_that_stops_halfway_ends_the_channel(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.05)
    channel = await role.connect()
    await channel.send_raw(role.half_frame(channel))
    error = await channel.end()
    assert isinstance(error, LimitExceededError) and "the rest of a frame did not arrive" in error.message
    await channel.socket.until_closed()
    await role.check_unchanged()


@over(FRAMED)
async def test_a_connection_that_ends_within_a_frame_changes_nothing(role: Role) -> None:
    channel = await role.connect()
    await channel.send_raw(role.half_frame(channel))
    await channel.cut()
    await channel.end() if not isinstance(channel, PeerChannel) else None
    await role.check_unchanged()


@over(FRAMED)
async def test_silence_between_frames_is_no_stall(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.001)
    channel = await role.connect()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):  # Fifty limits.
            await channel.socket.until_closed()
    await channel.cut()
    await role.check_unchanged()


@over(BESIDE_STREAMS)
async def test_a_connection_ends_with_its_stream(role: Role) -> None:
    channel = await role.connect()
    await channel.cancel_stream()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await channel.socket.until_closed()
    await role.check_unchanged()


@over(BESIDE_STREAMS)
async def test_a_stream_ends_with_its_connection(role: Role) -> None:
    channel = await role.connect()
    await channel.cut()
    assert await channel.end() is None
    await role.check_unchanged()


@over(BESIDE_STREAMS)
async def test_the_stream_beside_a_connection_carries_nothing(role: Role) -> None:
    channel = await role.connect()
    await channel.stream.write(pb.ReplicateRequest(shard=0) if isinstance(role, FilledReplica) else b"")
    error = await channel.end()
    assert isinstance(error, InvalidArgumentError)
    assert "over the connection" in error.message or "must use the connection" in error.message
    await channel.socket.until_closed()
    await role.check_unchanged()


@pytest.mark.parametrize("kind", WORKERS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("how", ["leave", "cancel_stream", "cut"])
async def test_what_was_pushed_counts_after_the_end(kind: type[WorkerChannel], how: str) -> None:
    """Over shared memory, also when the worker's memory is gone."""
    async with opened_bench() as bench:
        await bench.create(workers=2)
        gone, other = await kind.opened(bench), await kind.opened(bench, 1)
        await gone.send(gone.push(0, [0, 2]))
        await gone.arrived()
        await getattr(gone, how)()
        if isinstance(gone, ShmWorker):
            gone.forget()
        again = await kind.opened(bench)
        await again.send(again.push(0, [1]))
        assert np.array_equal(await other.say(other.push(0)), STEPPED)


# --- who may open a link ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PEERS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "changes",
    [{"token": "wrong"}, {"token": ""}, {"run_id": "other"}, {"receiver": {"worker_id": "worker-0", "incarnation": 2}}],
    ids=["wrong token", "no token", "another run", "another incarnation"],
)
async def test_a_link_of_a_stranger_is_closed(kind: type[PeerChannel], changes: dict[str, Any]) -> None:
    async with opened_peers() as bench:
        stranger = kind(bench)
        await stranger.dial(**changes)
        await stranger.socket.until_closed()
        await bench.reduce()
