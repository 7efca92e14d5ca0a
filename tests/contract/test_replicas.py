"""Messages of a primary to its replica, the same over each transport, and the choice of the transport."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from psdist.errors import StaleTermError
from psdist.wire import limits
from tests.support.primary_channels import (
    ARENA,
    ONES,
    PRIMARIES,
    SIZE,
    PrimaryChannel,
    Request,
    ShmPrimary,
    TcpPrimary,
    opened_replica,
    promoted,
    update,
)
from tests.support.server_bench import ServerBench


@pytest.fixture
async def replica() -> AsyncIterator[ServerBench]:
    """A server with the copy of the only shard."""
    async with opened_replica() as bench:
        yield bench


@pytest.fixture(params=PRIMARIES, ids=lambda kind: kind.name)
def transport(request: pytest.FixtureRequest) -> type[PrimaryChannel]:
    """Each transport between a primary and a replica."""
    given: type[PrimaryChannel] = request.param
    return given


async def test_updates_are_applied_in_order(replica: ServerBench, transport: type[PrimaryChannel]) -> None:
    primary = transport(replica)
    await primary.open()
    await primary.fill()
    for lsn in (1, 2, 3):
        await primary.send((lsn * ONES).tobytes(), update=update(lsn))
        assert (await primary.receive()).ack.lsn == lsn
    assert (await promoted(replica) == -6.0).all()


async def test_updates_in_the_arena_are_read_in_place_and_those_in_frames_too(replica: ServerBench) -> None:
    primary = ShmPrimary(replica)
    await primary.open()
    await primary.fill()
    primary.arena.flat[SIZE : 2 * SIZE] = 1.0
    await primary.send(update=update(1), offset=primary.offset(SIZE))
    assert (await primary.receive()).ack.lsn == 1
    await primary.send(np.full(SIZE, 2.0, np.float32).tobytes(), update=update(2))
    assert (await primary.receive()).ack.lsn == 2
    assert (await promoted(replica) == -3.0).all()


async def test_messages_of_an_earlier_stream_do_not_count(
    replica: ServerBench, transport: type[PrimaryChannel]
) -> None:
    old, new = transport(replica), transport(replica)
    await old.open()
    await new.open()
    await new.fill()
    await old.send(begin=Request.Begin(lsn=0))
    assert "has opened another stream" in str(await old.end())


async def test_another_nonce_lets_nobody_in_and_ends_the_stream(
    replica: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "NONCE_SECONDS", 0.2)
    primary = TcpPrimary(replica)
    await primary.hello(tcp=True)
    await primary.dial(bytes(32))
    await primary.socket.until_closed()
    assert "no connection arrived" in str(await primary.end())


async def test_memory_that_cannot_be_shared_leaves_tcp_and_the_reason_is_told(replica: ServerBench) -> None:
    primary = TcpPrimary(replica)
    await primary.hello(socket=f"psdist-{os.urandom(16).hex()}", arena_elements=ARENA, tcp=True)
    assert primary.welcome.port and "do not see the same /dev/shm" in primary.welcome.reason


@pytest.mark.parametrize("elements", [0, limits.KEPT_BYTES_MAX // 4 + 1])
async def test_an_arena_that_is_too_large_is_not_mapped(replica: ServerBench, elements: int) -> None:
    primary = ShmPrimary(replica)
    await primary.hello(socket=f"psdist-{os.urandom(16).hex()}", arena_elements=elements)
    assert not primary.welcome.arena_nonce and "at most" in primary.welcome.reason


@pytest.mark.parametrize("offer", [{}, {"tcp": True}], ids=["grpc", "tcp"])
async def test_a_server_that_is_not_in_the_map_is_promised_nothing(replica: ServerBench, offer: Any) -> None:
    primary = TcpPrimary(replica)
    with pytest.raises(StaleTermError, match="is not a live server"):
        await primary.hello(server_id="server-7", **offer)
