"""Share stream of a server and the connection for its calls, driven by hand: results, refusals, and survival of
both."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from psdist.consistency import ASP
from psdist.errors import (
    FencedError,
    FutureStepError,
    InvalidArgumentError,
    LimitExceededError,
    NonFiniteGradientError,
    PsdistError,
    SharingUnavailableError,
    StaleEpochError,
    UnknownCodecError,
    WrongRunError,
)
from psdist.link import fd_passing
from psdist.v1 import common_pb2 as cpb
from psdist.v1 import server_pb2 as pb
from psdist.wire import auth, limits, status
from psdist.wire.shm import GradientArena, WeightsArena
from tests.integration.server.test_server_service import GRADIENT, INITIAL, SLICE, TOKEN, TOTAL, Bench, entry
from tests.integration.server.test_server_service import bench as bench  # the fixture

COUNT = -(-TOTAL // SLICE)


class Worker:
    """Share stream with its connection, and the arenas of both sides."""

    def __init__(self, bench: Bench, worker: int = 0) -> None:
        self.bench = bench
        self.worker = worker
        self.call = bench.channel.stream_stream(
            "/psdist.v1.ServerService/Share",
            request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            response_deserializer=pb.ShareResponse.FromString,
        )(metadata=auth.metadata(TOKEN))
        self.arena = GradientArena.create(TOTAL, "float32")
        self.weights: WeightsArena | None = None
        self.connection: socket.socket | None = None
        self._ids = 0

    async def attach(self, fd: int | None = None, **changes: Any) -> pb.Attached:
        """Attach the arena's file, or another file if one is given."""
        with fd_passing.listening() as (name, listener):
            exchange = asyncio.ensure_future(fd_passing.swap_files(listener, self.arena.fd if fd is None else fd))
            try:
                given = {"identity": self.bench.identity(self.worker), "socket": name, "dtype": cpb.DTYPE_FLOAT32}
                attached = await self.ask(pb.ShareRequest(attach=pb.Attach(**(given | changes))))
                taken, self.connection = await exchange
                self.weights = WeightsArena.open(taken, COUNT, TOTAL)
            finally:
                exchange.cancel()
                with suppress(asyncio.CancelledError, SharingUnavailableError):
                    await exchange
        return attached

    async def ask(self, request: pb.ShareRequest | bytes) -> pb.Attached:
        """Send the stream's request and return the answer. Raises the error that ends the stream."""
        await self.call.write(request)
        response = await self.hear_stream()
        return response.attached

    async def hear_stream(self) -> pb.ShareResponse:
        """Return the stream's next message. Raises the error that ends the stream."""
        try:
            response = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise status.from_call(error, "server") from None
        if response is grpc.aio.EOF:
            raise ConnectionError("the stream ended")
        assert isinstance(response, pb.ShareResponse)
        return response

    async def send(self, *requests: pb.ShareRequest | bytes) -> None:
        """Send requests on the connection."""
        assert self.connection is not None
        for request in requests:
            message = request if isinstance(request, bytes) else request.SerializeToString()
            data = struct.pack("<I", len(message)) + message
            await asyncio.get_running_loop().sock_sendall(self.connection, data)

    async def say(self, *requests: pb.ShareRequest | bytes) -> pb.ShareResponse:
        """Send requests on the connection and return the next message. Raises the error that ends the stream or the
        call."""
        await self.send(*requests)
        try:
            (size,) = struct.unpack("<I", await self._receive(4))
            response = pb.ShareResponse.FromString(await self._receive(size))
        except (EOFError, ConnectionResetError):
            return await self.hear_stream()
        if response.WhichOneof("kind") == "error":
            raise status.from_detail(response.error)
        return response

    async def _receive(self, size: int) -> bytes:
        assert self.connection is not None
        data = b""
        while len(data) < size:
            part = await asyncio.get_running_loop().sock_recv(self.connection, size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def __del__(self) -> None:
        if self.connection is not None:
            self.connection.close()

    def push(self, step: int, slices: Sequence[int] = range(COUNT), **changes: Any) -> pb.ShareRequest:
        self._ids += 1
        header = self.bench.header(step, self.worker, **changes)
        push = pb.SharedPush(header=header, wants_weights=True, slices=slices, base_versions=[step])
        return pb.ShareRequest(call_id=self._ids, push=push)

    def pull(self, version: int = 0, slices: Sequence[int] = range(COUNT)) -> pb.ShareRequest:
        self._ids += 1
        identity = self.bench.identity(self.worker)
        return pb.ShareRequest(
            call_id=self._ids, pull=pb.SharedPull(identity=identity, min_version=version, slices=slices)
        )

    def values(self) -> np.ndarray:
        assert self.weights is not None
        return self.weights.weights


async def attached(bench: Bench, worker: int = 0, values: np.ndarray = GRADIENT) -> Worker:
    peer = Worker(bench, worker)
    await peer.attach()
    peer.arena.flat[...] = values
    return peer


async def still_serves(bench: Bench, step: int = 0) -> None:
    """Check that another stream can make a step."""
    before = np.frombuffer(await bench.pull(bench.identity()), np.float32)
    peer = await attached(bench)
    answers = (await peer.say(peer.push(step))).answers
    assert list(answers.versions) == [step + 1]
    assert np.array_equal(peer.values(), before - np.float32(0.5) * GRADIENT)


# --- results ----------------------------------------------------------------------------------------------------------


async def test_a_step_goes_through_the_arenas(bench: Bench) -> None:
    await bench.create()
    peer = Worker(bench)
    proof = await peer.attach()
    assert peer.weights is not None
    assert proof.nonce == peer.arena.nonce and proof.weights_nonce == peer.weights.nonce
    assert np.array_equal(peer.values(), INITIAL)
    peer.arena.flat[...] = GRADIENT
    answers = (await peer.say(peer.push(0))).answers
    assert sorted(answers.slices) == list(range(COUNT))
    assert (list(answers.versions), list(answers.ignored), list(answers.staleness)) == ([1], [], [])
    assert np.array_equal(peer.values(), INITIAL - np.float32(0.5) * GRADIENT)
    assert peer.weights.sequence.tolist() == [2] * COUNT
    assert await bench.pull(bench.identity()) == peer.values().tobytes()
    (counted,) = bench.host.statistics().parameters[0].workers
    assert (counted.pushes, counted.push_bytes, counted.pull_bytes) == (COUNT, TOTAL * 4, TOTAL * 4 + TOTAL * 4)


async def test_a_repeated_push_is_told_and_not_used(bench: Bench) -> None:
    await bench.create()
    peer = await attached(bench)
    await peer.say(peer.push(0))
    answers = (await peer.say(peer.push(0))).answers
    assert sorted(answers.ignored) == list(range(COUNT)) and list(answers.versions) == [1]
    assert np.array_equal(peer.values(), INITIAL - np.float32(0.5) * GRADIENT)


async def test_calls_of_one_step_may_be_several_and_end_in_any_order(bench: Bench) -> None:
    await bench.create(workers=2)
    first, second = await attached(bench), await attached(bench, 1)
    early, late = first.push(0, [0, 2]), first.push(0, [1])
    await first.send(early)
    await first.send(late)
    assert sorted((await second.say(second.push(0, [1]))).answers.slices) == [1]
    response = await first.say()
    assert (response.call_id, list(response.answers.slices)) == (late.call_id, [1])
    await second.say(second.push(0, [0, 2]))
    response = await first.say()
    assert (response.call_id, sorted(response.answers.slices)) == (early.call_id, [0, 2])


async def test_a_pull_waits_for_its_version(bench: Bench) -> None:
    await bench.create(workers=2)
    peers = [await attached(bench, rank) for rank in (0, 1)]
    waiting = peers[0].pull(version=1)
    await peers[0].send(waiting)
    assert list((await peers[1].say(peers[1].pull())).answers.versions) == [0]
    await peers[1].send(peers[1].push(0))
    await peers[0].send(pushed := peers[0].push(0))
    told = {response.call_id: response for response in [await peers[0].say(), await peers[0].say()]}
    assert told.keys() == {waiting.call_id, pushed.call_id}
    assert list(told[waiting.call_id].answers.versions) == [1]


async def test_asynchronous_pushes_tell_staleness(bench: Bench) -> None:
    await bench.create(workers=2, consistency=ASP())
    peers = [await attached(bench, rank) for rank in (0, 1)]
    await peers[0].say(peers[0].push(0))
    answers = (await peers[1].say(peers[1].push(0))).answers
    assert list(answers.staleness) == [1] * COUNT and list(answers.versions) == [2]


async def test_a_push_that_abstains_reads_nothing(bench: Bench) -> None:
    await bench.create()
    peer = await attached(bench, values=np.full(TOTAL, np.nan, np.float32))
    answers = (await peer.say(peer.push(0, abstain=True))).answers
    assert list(answers.versions) == [1] and np.array_equal(peer.values(), INITIAL)


async def test_who_only_reads_needs_no_room_for_gradients(bench: Bench) -> None:
    await bench.create()
    peer = Worker(bench)
    header = GradientArena.create(0, "float32")
    await peer.attach(header.fd, dtype=cpb.DTYPE_UNSPECIFIED)
    assert list((await peer.say(peer.pull())).answers.versions) == [0]
    with pytest.raises(InvalidArgumentError, match="holds nothing"):
        await peer.say(peer.push(0))
    assert np.array_equal(peer.values(), INITIAL)


async def test_for_whom_a_call_waits_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WAIT_REASON_SECONDS", 0.01)
    await bench.create(workers=2)
    peer = await attached(bench)
    assert "worker-1 (rank 1) to push step 0" in (await peer.say(peer.push(0))).waiting_for
    assert "worker-1" in bench.host.statistics().parameters[0].waiting_for[0]
    other = await attached(bench, 1)
    await other.say(other.push(0))
    while (response := await peer.say()).WhichOneof("kind") == "waiting_for":
        pass
    assert list(response.answers.versions) == [1]


# --- refused calls ----------------------------------------------------------------------------------------------------

Change = Callable[[Worker], pb.ShareRequest]


def renamed(**identity: Any) -> Change:
    return lambda peer: peer.push(0, identity=peer.bench.identity(**identity))


REFUSED: dict[str, tuple[type[PsdistError], Change]] = {
    "unknown slice": (InvalidArgumentError, lambda peer: peer.push(0, [0, 99])),
    "no slice": (InvalidArgumentError, lambda peer: peer.push(0, [])),
    "slice twice": (InvalidArgumentError, lambda peer: peer.push(0, [0, 1, 1])),
    "descending": (InvalidArgumentError, lambda peer: peer.push(0, [1, 0])),
    "another dtype": (InvalidArgumentError, lambda peer: peer.push(0, dtype=cpb.DTYPE_FLOAT16)),
    "no wire dtype": (InvalidArgumentError, lambda peer: peer.push(0, dtype=cpb.DTYPE_FLOAT64)),
    "codec": (UnknownCodecError, lambda peer: peer.push(0, codec=7)),
    "future step": (FutureStepError, lambda peer: peer.push(5)),
    "another run": (InvalidArgumentError, renamed(parameters="q")),
    "another worker": (InvalidArgumentError, renamed(worker_id="worker-1")),
    "wrong run": (WrongRunError, renamed(run_id="other")),
    "old epoch": (StaleEpochError, renamed(epoch=1)),
    "pull of an unknown slice": (InvalidArgumentError, lambda peer: peer.pull(slices=[99])),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_wrong_call_changes_nothing_and_the_stream_goes_on(bench: Bench, what: str) -> None:
    await bench.create()
    error, change = REFUSED[what]
    peer = await attached(bench)
    with pytest.raises(error):
        await peer.say(change(peer))
    assert np.array_equal(peer.values(), INITIAL)
    assert list((await peer.say(peer.push(0))).answers.versions) == [1]
    assert np.array_equal(peer.values(), INITIAL - np.float32(0.5) * GRADIENT)


async def test_base_versions_must_be_one_or_as_many_as_slices(bench: Bench) -> None:
    await bench.create()
    peer = await attached(bench)
    request = peer.push(0)
    request.push.base_versions.append(0)
    with pytest.raises(InvalidArgumentError, match="2 base_versions for 3 slices"):
        await peer.say(request)


async def test_what_is_not_finite_is_left_out_and_told(bench: Bench) -> None:
    await bench.create(workers=2)
    good, bad = await attached(bench), await attached(bench, 1, np.full(TOTAL, np.inf, np.float32))
    await good.send(good.push(0))
    with pytest.raises(NonFiniteGradientError):
        await bad.say(bad.push(0))
    assert list((await good.say()).answers.versions) == [1]
    assert np.array_equal(good.values(), INITIAL - np.float32(0.5) * GRADIENT)


async def test_calls_under_way_are_bounded(bench: Bench) -> None:
    await bench.create(workers=2)
    peer = await attached(bench)
    for _ in range(4):
        await peer.send(peer.pull(version=1))
    with pytest.raises(LimitExceededError):
        await peer.say(peer.pull(version=1))
    cancelled = pb.ShareRequest(call_id=2, cancel=pb.SharedCancel())
    await peer.send(cancelled)
    other = await attached(bench, 1)
    await other.send(other.push(0))
    ended = set()
    await peer.send(pushed := peer.push(0))
    while pushed.call_id not in ended:
        ended.add((await peer.say()).call_id)
    assert ended == {1, 3, 4, pushed.call_id}


# --- refused streams --------------------------------------------------------------------------------------------------


async def test_bytes_that_are_no_message(bench: Bench) -> None:
    await bench.create()
    with pytest.raises(InvalidArgumentError, match="not a valid"):
        await Worker(bench).ask(b"\xff\xff")
    with pytest.raises(InvalidArgumentError, match="not a valid"):
        await (await attached(bench)).say(b"\xff\xff")
    await still_serves(bench)


async def test_calls_come_after_attaching_and_it_comes_once(bench: Bench) -> None:
    await bench.create()
    peer = Worker(bench)
    with pytest.raises(InvalidArgumentError, match="must be attach"):
        await peer.ask(peer.push(0))
    for request in (pb.ShareRequest(), pb.ShareRequest(call_id=1, attach=pb.Attach())):
        with pytest.raises(InvalidArgumentError, match="must be push, pull or cancel"):
            await (await attached(bench)).say(request)
    await still_serves(bench)


async def test_the_stream_is_not_for_calls(bench: Bench) -> None:
    await bench.create()
    peer = await attached(bench)
    with pytest.raises(InvalidArgumentError, match="over the connection"):
        await peer.ask(peer.pull())
    with pytest.raises(InvalidArgumentError, match="over the connection"):  # and the connection is closed
        await peer.say()
    await still_serves(bench)


async def test_a_message_that_is_too_long(bench: Bench) -> None:
    await bench.create()
    peer = await attached(bench)
    assert peer.connection is not None
    peer.connection.send(struct.pack("<I", limits.SHARED_MESSAGE_BYTES + 1))
    with pytest.raises(LimitExceededError, match="is longer than"):
        await peer.say()
    await still_serves(bench)


async def test_the_end_of_the_connection_ends_the_stream(bench: Bench) -> None:
    await bench.create(workers=2)
    peer = await attached(bench)
    await peer.send(peer.push(0))
    await peer.say(peer.pull())
    assert peer.connection is not None
    peer.connection.close()
    peer.connection = None
    with pytest.raises(ConnectionError, match="the stream ended"):
        await peer.hear_stream()


async def test_who_was_admitted_is_looked_at_again_by_each_map(bench: Bench) -> None:
    await bench.create()
    peer = await attached(bench)
    await peer.say(peer.push(0))
    early = peer.push(1)
    await bench.follow(entry(1, ready=True))
    with pytest.raises(StaleEpochError):
        await peer.say(early)
    await bench.follow(entry(1, ready=True), live=0)
    with pytest.raises(FencedError):
        await peer.say(peer.push(1))


async def test_a_call_by_a_newer_map_waits_for_it_and_those_after_it_too(bench: Bench) -> None:
    await bench.create()
    peer = await attached(bench)
    bench.epoch += 1
    early = peer.push(0)
    bench.epoch -= 1
    await peer.send(early, late := peer.pull())
    assert await bench.pull(bench.identity()) == INITIAL.tobytes()
    await bench.follow(entry(1, ready=True))
    assert (await peer.say()).call_id == early.call_id
    with pytest.raises(StaleEpochError):  # out of date by then
        await peer.say()
    assert list((await peer.say(peer.pull())).answers.versions) == [1] and late.call_id == 2


@pytest.mark.parametrize("call_id", [0, 1])
async def test_call_ids_ascend(bench: Bench, call_id: int) -> None:
    await bench.create()
    peer = await attached(bench)
    await peer.say(peer.pull())
    request = peer.pull()
    request.call_id = call_id
    with pytest.raises(InvalidArgumentError, match="does not come after 1"):
        await peer.say(request)
    await still_serves(bench)


async def test_a_cancel_of_no_call_means_nothing(bench: Bench) -> None:
    await bench.create()
    peer = await attached(bench)
    await peer.send(pb.ShareRequest(call_id=77, cancel=pb.SharedCancel()))
    assert list((await peer.say(peer.push(0))).answers.versions) == [1]


@pytest.mark.parametrize("name", ["", "psdist-x", "../dev/null", "psdist-" + "0" * 32])
async def test_a_socket_that_is_none(bench: Bench, name: str) -> None:
    await bench.create()
    with pytest.raises(SharingUnavailableError):
        await Worker(bench).attach(socket=name)
    await still_serves(bench)


def memory(size: int, seals: int) -> int:
    fd = os.memfd_create("bad", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, size)
    os.pwrite(fd, b"psdist-gradients" + bytes(16), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize(
    ("size", "seals", "reason"),
    [
        (GradientArena.size(TOTAL, "float32"), 0, "seals"),
        (4096, SEALS, "has 4096 bytes, but needs 8192"),
        (1 << 20, SEALS, "has 1048576 bytes"),
    ],
    ids=["unsealed", "too small", "too large"],
)
async def test_an_arena_that_could_be_truncated_is_refused(bench: Bench, size: int, seals: int, reason: str) -> None:
    await bench.create()
    fd = memory(size, seals)
    try:
        with pytest.raises(SharingUnavailableError, match=reason):
            await Worker(bench).attach(fd)
    finally:
        os.close(fd)
    await still_serves(bench)


async def test_who_attaches_is_checked(bench: Bench) -> None:
    await bench.create()
    for error, identity in (
        (WrongRunError, {"run_id": "other"}),
        (FencedError, {"incarnation": 9}),
        (StaleEpochError, {"epoch": 1}),
    ):
        with pytest.raises(error):
            await Worker(bench).attach(identity=bench.identity(**identity))
    await still_serves(bench)


async def test_a_fenced_workers_calls_end(bench: Bench) -> None:
    await bench.create(workers=2)
    peer = await attached(bench)
    await peer.send(peer.push(0))
    await (other := await attached(bench, 1)).say(other.pull())
    await bench.follow(entry(2, ready=True), live=0)
    with pytest.raises(FencedError):
        await peer.say()


# --- the end of a worker ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["ends", "breaks"])
async def test_what_was_pushed_counts_when_the_stream_and_the_memory_are_gone(bench: Bench, how: str) -> None:
    await bench.create(workers=2)
    gone = await attached(bench)
    other = await attached(bench, 1)
    await gone.send(gone.push(0, [0, 2]))
    # The server has taken it: a later call of the same stream is answered.
    await gone.say(gone.pull())
    if how == "ends":
        await gone.call.done_writing()
        assert await gone.call.read() is grpc.aio.EOF
    else:
        gone.call.cancel()
    gone.arena.detach()
    del gone
    gc.collect()
    again = await attached(bench)
    await again.send(again.push(0, [1]))
    await other.say(other.push(0))
    expected = INITIAL - np.float32(0.5) * ((GRADIENT + GRADIENT) / np.float32(2))
    assert np.array_equal(other.values(), expected)


async def test_arenas_are_given_back(bench: Bench) -> None:
    def mapped() -> list[str]:
        gc.collect()
        with open("/proc/self/maps") as maps:
            return [line.split()[4] for line in maps if "memfd:psdist-gradients" in line]

    others = set(mapped())  # An earlier test's, which may end at any time.

    def held() -> int:
        return sum(inode not in others for inode in mapped())

    await bench.create()
    before = held()
    peer = await attached(bench)
    await peer.say(peer.push(0))
    assert held() == before + 2  # here the worker and the server are one process
    await peer.call.done_writing()
    assert await peer.call.read() is grpc.aio.EOF
    del peer
    assert held() == before
