"""Behaviour of TCP connections alone: nonces, strangers, and the window of payloads that a server holds."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from psdist import optim
from psdist.errors import InvalidArgumentError, LimitExceededError, TcpUnavailableError, UnauthenticatedError
from psdist.v1 import server_pb2 as pb
from psdist.wire import limits
from tests.support.frame_socket import FrameSocket
from tests.support.server_bench import COUNT, GRADIENT, STEPPED, ServerBench, cut, refusal
from tests.support.worker_channels import TcpWorker, opening


async def still_serves(bench: ServerBench) -> None:
    channel = await TcpWorker.opened(bench)
    assert np.array_equal(await channel.say(channel.push(0)), STEPPED)


async def stranger(bench: ServerBench) -> FrameSocket:
    """Return a connection that nobody was promised."""
    connection = await FrameSocket.dial(bench.listener.port)
    bench.closers.append(connection.close)
    return connection


# --- payloads ---------------------------------------------------------------------------------------------------------


async def test_payloads_are_taken_before_they_are_answered_where_slices_are_clipped_together(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check payloads that exceed the limit on held memory: clipping answers no slice before all of them have
    arrived."""
    monkeypatch.setattr(limits, "TCP_WINDOW_SLICES", 2)
    await bench.create(optimizer=optim.SGD(lr=1.0, max_grad_norm=1e9))
    channel = await TcpWorker.opened(bench)
    await channel.begin(request := channel.push(0))
    taken = 0
    for index, part in enumerate(cut(GRADIENT)):
        while index - taken >= 2:
            taken = await channel.taken(request)
        await channel.send_slice(request, index, part.tobytes())
    assert len(await channel.answers(request)) == COUNT


async def test_more_payloads_than_may_be_held(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TCP_WINDOW_SLICES", 2)
    await bench.create(workers=2)
    channel = await TcpWorker.opened(bench)
    await channel.send(channel.push(0))
    error = await channel.end()
    assert isinstance(error, LimitExceededError) and "2 payloads of call 1 are held" in error.message


async def test_answers_that_are_never_read_end_the_connection(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check a worker that asks for much, again and again."""
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(limits, "STREAM_CALLS_MAX", 1 << 30)
    monkeypatch.setattr(limits, "SHARED_ROUNDS_MAX", 1 << 30)
    await bench.create()
    channel = TcpWorker(bench)
    channel.receive_bytes = 4096
    await channel.open()

    async def ask() -> None:
        while True:
            await channel.send_raw(b"".join(channel.framed(channel.pull()) for _ in range(500)))

    asking = asyncio.create_task(ask())
    error = await channel.end()
    assert isinstance(error, LimitExceededError) and "answers were not read" in error.message
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await still_serves(bench)


# --- who may connect --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [pb.ConnectRequest(), b"\xff\xff"], ids=["nobody", "garbage"])
async def test_a_stream_names_its_worker(bench: ServerBench, request_: pb.ConnectRequest | bytes) -> None:
    await bench.create()
    with pytest.raises(InvalidArgumentError):
        await TcpWorker(bench).promise(request_)
    await still_serves(bench)


async def test_a_stream_without_a_token_is_refused(bench: ServerBench) -> None:
    await bench.create()
    call = bench.channel.stream_stream("/psdist.v1.ServerService/Connect")(metadata=())
    assert isinstance(await refusal(call), UnauthenticatedError)


async def test_a_server_without_a_port_says_so(bench: ServerBench) -> None:
    await bench.create()
    bench.listener.port = 0
    with pytest.raises(TcpUnavailableError, match="accepts no TCP connections"):
        await TcpWorker(bench).promise()


FIRST: dict[str, tuple[pb.ShareRequest | bytes, bytes]] = {
    "wrong": (opening(b"x" * 32), b""),
    "empty": (opening(b""), b""),
    "numbered": (pb.ShareRequest(call_id=1, open=pb.OpenConnection(nonce=b"x" * 32)), b""),
    "no opening": (pb.ShareRequest(call_id=1, cancel=pb.SharedCancel()), b""),
    "garbage": (b"\xff\xff", b""),
    "payload": (b"", b"payload"),
    "long": (b"x" * (limits.OPENING_BYTES + 1), b""),
    "nothing": (b"", b""),
}


@pytest.mark.parametrize("what", FIRST)
async def test_a_connection_that_was_not_promised_is_cut_off(bench: ServerBench, what: str) -> None:
    await bench.create()
    connection = await stranger(bench)
    await connection.send(connection.framed(*FIRST[what]))
    await connection.until_closed()
    await still_serves(bench)


async def test_another_protocol_is_cut_off(bench: ServerBench) -> None:
    connection = await stranger(bench)
    await connection.send(b"GET / HTTP/1.1\r\n\r\n")
    await connection.until_closed()


async def test_a_nonce_is_good_once(bench: ServerBench) -> None:
    await bench.create()
    channel = TcpWorker(bench)
    nonce = (await channel.promise()).nonce
    await channel.dial(nonce)
    second = await stranger(bench)
    await second.send(second.framed(opening(nonce)))
    await second.until_closed()
    assert np.array_equal(await channel.say(channel.push(0)), STEPPED)


async def test_a_nonce_that_comes_late_is_none(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.create()
    monkeypatch.setattr(limits, "NONCE_SECONDS", 0.01)
    channel = TcpWorker(bench)
    nonce = (await channel.promise()).nonce
    with pytest.raises(TcpUnavailableError, match="no connection arrived"):
        await channel.stream_answer()
    monkeypatch.setattr(limits, "NONCE_SECONDS", 5.0)
    await channel.dial(nonce)
    await channel.socket.until_closed()
    await still_serves(bench)


async def test_promises_are_bounded(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NONCES_MAX", 2)
    await bench.create()
    for _ in range(2):
        await TcpWorker(bench).promise()
    with pytest.raises(TcpUnavailableError, match="2 connections are already expected"):
        await TcpWorker(bench).promise()


async def test_a_thousand_connections_that_say_nothing(bench: ServerBench) -> None:
    await bench.create()
    silent = [await stranger(bench) for _ in range(1000)]
    await still_serves(bench)
    for connection in silent[: -limits.UNIDENTIFIED_MAX]:
        await connection.until_closed()


async def test_a_connection_that_says_nothing_is_cut_off(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NONCE_SECONDS", 0.05)
    await (await stranger(bench)).until_closed()
