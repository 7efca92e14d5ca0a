"""Access to a server's TCP port: nonces, strangers, and silent connections."""

from __future__ import annotations

import grpc
import grpc.aio
import numpy as np
import pytest

from psdist.errors import (
    FencedError,
    InvalidArgumentError,
    StaleEpochError,
    TcpUnavailableError,
    UnauthenticatedError,
    WrongRunError,
)
from psdist.v1 import server_pb2 as pb
from psdist.wire import limits, status
from tests.integration.link.test_connect_stream import (
    STEPPED,
    Connection,
    TcpBench,
    Worker,
    framed,
    opening,
    still_serves,
)
from tests.integration.link.test_connect_stream import bench as bench  # the fixture


async def test_who_asks_is_checked(bench: TcpBench) -> None:
    await bench.create()
    for error, request in (
        (WrongRunError, pb.ConnectRequest(identity=bench.identity(run_id="other"))),
        (FencedError, pb.ConnectRequest(identity=bench.identity(incarnation=9))),
        (StaleEpochError, pb.ConnectRequest(identity=bench.identity(epoch=1))),
        (InvalidArgumentError, pb.ConnectRequest()),
        (InvalidArgumentError, b"\xff\xff"),
    ):
        with pytest.raises(error):
            await Worker(bench).ask(request)
    with pytest.raises(UnauthenticatedError):
        try:
            await bench.channel.stream_stream("/psdist.v1.ServerService/Connect")(metadata=()).read()
        except grpc.aio.AioRpcError as error:
            raise status.from_call(error, "server") from None
    await still_serves(bench)


async def test_a_server_without_a_port_says_so(bench: TcpBench) -> None:
    await bench.create()
    bench.listener.port = 0
    with pytest.raises(TcpUnavailableError, match="accepts no TCP connections"):
        await Worker(bench).ask()


@pytest.mark.parametrize(
    "first",
    [
        opening(b"x" * 32),
        opening(b""),
        framed(pb.ShareRequest(call_id=1, open=pb.OpenConnection(nonce=b"x" * 32))),
        framed(pb.ShareRequest(call_id=1, cancel=pb.SharedCancel())),
        framed(b"\xff\xff"),
        framed(b"", b"payload"),
        framed(b"x" * (limits.OPENING_BYTES + 1)),
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(8),
    ],
    ids=["wrong", "empty", "numbered", "no opening", "garbage", "payload", "long", "http", "zeros"],
)
async def test_a_connection_that_was_not_promised_is_cut_off(bench: TcpBench, first: bytes) -> None:
    await bench.create()
    connection = Connection(bench)
    await connection.open()
    await connection.send(first)
    await connection.until_cut_off()
    await still_serves(bench)


async def test_a_nonce_is_good_once(bench: TcpBench) -> None:
    await bench.create()
    peer = Worker(bench)
    nonce = (await peer.ask()).nonce
    await peer.connection.open()
    await peer.connection.send(opening(nonce))
    await peer.connection.frame()
    second = Connection(bench)
    await second.open()
    await second.send(opening(nonce))
    await second.until_cut_off()
    assert np.array_equal(await peer.say(peer.push(0)), STEPPED)


async def test_a_nonce_that_comes_late_is_none(bench: TcpBench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.create()
    monkeypatch.setattr(limits, "NONCE_SECONDS", 0.01)
    peer = Worker(bench)
    nonce = (await peer.ask()).nonce
    with pytest.raises(TcpUnavailableError, match="no connection arrived"):
        await peer.stream()
    monkeypatch.setattr(limits, "NONCE_SECONDS", 5.0)
    await peer.connection.open()
    await peer.connection.send(opening(nonce))
    await peer.connection.until_cut_off()
    await still_serves(bench)


async def test_promises_are_bounded(bench: TcpBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NONCES_MAX", 2)
    await bench.create()
    waiting = [Worker(bench) for _ in range(2)]
    for one in waiting:
        await one.ask()
    with pytest.raises(TcpUnavailableError, match="2 connections are already expected"):
        await Worker(bench).ask()


async def test_a_thousand_connections_that_say_nothing(bench: TcpBench) -> None:
    await bench.create()
    silent = [Connection(bench) for _ in range(1000)]
    for connection in silent:
        await connection.open()
    await still_serves(bench)
    for connection in silent[: -limits.UNIDENTIFIED_MAX]:
        await connection.until_cut_off()


async def test_a_connection_that_says_nothing_is_cut_off(bench: TcpBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NONCE_SECONDS", 0.05)
    connection = Connection(bench)
    await connection.open()
    await connection.until_cut_off()
