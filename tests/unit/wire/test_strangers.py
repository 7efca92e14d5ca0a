"""Connections of callers without the token: which are closed, and that gRPC sees their end."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from psdist.security.tls import Credentials
from psdist.v1 import server_pb2
from psdist.wire import auth, channels, limits
from psdist.wire.auth import ConnectionGuard, RemoteEnd, Strangers, parse_peer
from psdist.wire.services import service_handler
from tests.support.channels import serving

SERVICE = server_pb2.DESCRIPTOR.services_by_name["ServerService"]
STATISTICS = f"/{SERVICE.full_name}/GetStatistics"
MEMBER, STRANGER = RemoteEnd("10.0.0.1", 5000), RemoteEnd("10.0.0.2", 5000)


def test_names_of_peers() -> None:
    for text, peer in [
        ("ipv4:10.0.0.1:5000", RemoteEnd("10.0.0.1", 5000)),
        ("ipv6:%5B::1%5D:443", RemoteEnd("::1", 443)),
        ("ipv6:[fe80::1%25eth0]:443", RemoteEnd("fe80::1%eth0", 443)),
        ("ipv6:[::ffff:10.0.0.1]:5000", RemoteEnd("10.0.0.1", 5000)),
        ("unix:/run/socket", None),
        ("unknown", None),
    ]:
        assert parse_peer(text) == peer


def test_the_oldest_connections_of_an_address_with_too_many_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STRANGERS_PER_ADDRESS_MAX", 3)
    machine = Strangers()
    machine.admit(MEMBER)
    others = [RemoteEnd(MEMBER.host, port) for port in range(3)]
    assert machine.surplus([MEMBER, *others, STRANGER]) == []
    newest = RemoteEnd(MEMBER.host, 3)
    assert machine.surplus([newest, MEMBER, STRANGER, *reversed(others)]) == [others[0]]


def test_what_has_ended_is_forgotten_but_a_connection_that_was_just_admitted_is_not() -> None:
    machine = Strangers()
    machine.surplus([MEMBER, STRANGER])
    machine.admit(MEMBER)
    assert machine.surplus([]) == [] and MEMBER in machine._members and not machine._others
    assert machine.surplus([]) == [] and not machine._members


def test_a_connection_is_a_members_from_its_first_call_with_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STRANGERS_PER_ADDRESS_MAX", 1)
    machine = Strangers()
    first, second = RemoteEnd("10.0.0.1", 1), RemoteEnd("10.0.0.1", 2)
    assert machine.surplus([first]) == []
    machine.admit(first)
    assert machine.surplus([first, second]) == []
    assert machine.surplus([first, second, RemoteEnd("10.0.0.1", 3)]) == [second]


@pytest.mark.parametrize(("count", "is_looked_at"), [(2000 + 1024, False), (2000 + 1025, True)])
async def test_many_members_alone_are_not_looked_at_each_second(
    count: int, is_looked_at: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, counts, looks = asyncio.Event(), [], []

    def count_descriptors() -> int:
        counts.append(count)
        if len(counts) == 10:
            counted.set()
        return count

    def peers(port: int) -> list[RemoteEnd]:
        looks.append(port)
        return []

    monkeypatch.setattr(auth, "_SWEEP_SECONDS", 0)
    monkeypatch.setattr(auth, "_count_descriptors", count_descriptors)
    monkeypatch.setattr(auth, "peers", peers)
    guard = ConnectionGuard()
    for number in range(2000):
        guard.admit(f"ipv4:10.0.0.1:{number + 1}")
    guard.watch(7)
    async with asyncio.timeout(60):
        await counted.wait()
    guard.stop()
    assert looks == [7] * len(looks) and bool(looks) == is_looked_at


# --- a real server ----------------------------------------------------------------------------------------------------


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async def answer(*_: object) -> Any:
        return server_pb2.GetStatisticsResponse(epoch=7)

    guard = ConnectionGuard()
    handlers = dict.fromkeys((method.name for method in SERVICE.methods), answer)
    handler = service_handler(SERVICE, handlers, logging.getLogger("psdist.test"), guard.admit)
    async with serving(Credentials("secret"), lambda server: server.add_generic_rpc_handlers((handler,))) as address:
        guard.watch(int(address.rpartition(":")[2]))
        yield address
        guard.stop()


async def _ask(channel: grpc.aio.Channel, token: str) -> bytes:
    answer: bytes = await channel.unary_unary(STATISTICS)(b"", metadata=auth.metadata(token))
    return answer


async def test_silent_connections_of_one_address_are_limited(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "STRANGERS_PER_ADDRESS_MAX", 3)
    host, port = address.split(":")
    async with channels.open_channel(address, Credentials("secret")) as member:
        await _ask(member, "secret")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
        ends = [asyncio.create_task(_until_closed(reader)) for reader, _ in silent]
        async with asyncio.timeout(60):
            for end in itertools.islice(asyncio.as_completed(ends), 3):
                await end
        assert server_pb2.GetStatisticsResponse.FromString(await _ask(member, "secret")).epoch == 7
        assert len(auth.peers(int(port))) == 4 and sum(end.done() for end in ends) == 3
        async with asyncio.timeout(60):
            while "closed 1 connections without a call with the token" not in caplog.text:  # noqa: ASYNC110 - a log
                await asyncio.sleep(0)  # The line follows the end of the connections.
        for _, writer in silent:
            writer.close()
        await asyncio.gather(*ends, return_exceptions=True)


async def _until_closed(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 10):
        pass
