"""TCP connections of workers, with real servers: fallbacks and their reports, broken connections, given-up pushes, and
strangers at the port."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np
import pytest

import psdist
from psdist import AsyncClient, AsyncParameters
from psdist.client.transport.tcp import TcpConnection
from psdist.consistency import ASP, BSP
from psdist.errors import TcpUnavailableError, WaitTimeoutError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.link import connecting
from tests.support.clients import connected, until

SIZE = 1_000_000
SLICE = 1 << 15
SGD = psdist.optim.SGD(lr=1.0)


async def opened(clients: list[AsyncClient], name: str, **settings: Any) -> list[AsyncParameters]:
    given = {"init": {"w": np.zeros(SIZE, np.float32)}, "optimizer": SGD, "slice_elements": SLICE} | settings
    return list(await asyncio.gather(*(client.parameters(name, **given) for client in clients)))


def gradient(value: float = -1.0) -> dict[str, np.ndarray]:
    """Return a gradient that adds 1 to every weight if ``value`` is -1, with the learning rate of 1."""
    return {"w": np.full(SIZE, value, np.float32)}


def streams(handle: AsyncParameters) -> list[TcpConnection]:
    return list(handle.participation.tcp.connections.values())


async def steps(handles: list[AsyncParameters], goal: float) -> None:
    """Make one step of all workers, after which every weight is ``goal``."""
    results = await asyncio.gather(*(handle.push_pull(gradient()) for handle in handles))
    assert all(set(values["w"].tolist()) == {goal} for values in results)


# --- statistics -------------------------------------------------------------------------------------------------------


async def test_auto_prefers_tcp_to_grpc_and_says_why_not_shm(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psdist.client.transport.shm._ORDERED_MACHINES", ())
    async with connected(cluster, "auto") as clients:
        (handle,) = await opened(clients, "auto", consistency=ASP())
        await steps([handle], 1.0)
        told = handle.statistics()
        assert told.transport == "tcp"
        assert all(how.startswith("tcp: weights that change") for how in told.transports.values())


@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_a_firewall_that_lets_only_grpc_through(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("psdist.client.transport.shm._ORDERED_MACHINES", ())
    monkeypatch.setattr(connecting, "CONNECT_SECONDS", 0.2)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        if how == "silent":  # The kernel accepts, and nobody answers.
            closed.listen()
        port = closed.getsockname()[1]
        plain = TcpConnection.dial
        monkeypatch.setattr(
            TcpConnection, "dial", lambda self, host, _, nonce, **said: plain(self, host, port, nonce, **said)
        )
        async with connected(cluster, "auto", "tcp") as clients:
            handles = await opened(clients, f"firewall-{how}", consistency=ASP())
            assert set((await handles[0].push_pull(gradient()))["w"].tolist()) == {1.0}
            reasons = handles[0].statistics().transports.values()
            text = "no connection to 127.0.0.1" if how == "refused" else "did not answer within 0.2 s"
            assert all(one.startswith("grpc: no shm: weights that change") for one in reasons), reasons
            assert all("; no tcp: " in one and text in one for one in reasons), reasons
            with pytest.raises(TcpUnavailableError, match=r"transport 'tcp'.*transport='auto'"):
                await handles[1].pull()


# --- what goes wrong --------------------------------------------------------------------------------------------------


async def test_connections_that_break_in_the_middle_of_a_push_lose_nothing(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, "tcp", "tcp") as clients:
        handles = await opened(clients, "broken")
        await steps(handles, 1.0)
        for goal in (2.0, 3.0, 4.0):
            pushing = asyncio.create_task(handles[0].push_pull(gradient()))
            await until(lambda: all(one.calls for one in streams(handles[0])))
            for one in streams(handles[0]):
                one.connection._transport.abort()
            other = (await handles[1].push_pull(gradient()))["w"]
            assert set(other.tolist()) == set((await pushing)["w"].tolist()) == {goal}
        await steps(handles, 5.0)
        assert handles[0].statistics().transport == "tcp"


async def test_a_given_up_push_leaves_its_gradient_to_the_user(cluster: EmbeddedCluster) -> None:
    """Check that the servers take no slice of it that was not complete when it was given up."""
    async with connected(cluster, {"request_timeout": 0.5}, {}, transport="tcp") as clients:
        handles = await opened(clients, "given-up")
        await steps(handles, 1.0)
        mine = gradient(-3.0)
        with pytest.raises(WaitTimeoutError):
            await handles[0].push_pull(mine)
        assert not any(one.connection.is_sending for one in streams(handles[0]))
        mine["w"][...] = 1e6
        other = asyncio.create_task(handles[1].push_pull(gradient()))
        values = (await handles[0].push_pull(gradient(-3.0)))["w"]
        assert set(values.tolist()) == set((await other)["w"].tolist()) == {3.0}
        assert handles[0].statistics().ignored > 0


async def test_calls_in_opposite_orders_do_not_wait_for_each_other(cluster: EmbeddedCluster) -> None:
    """Check that each worker can give the other's last bucket first, while slices are held until both have arrived."""
    names = [f"t{number}" for number in range(6)]
    part = {name: np.zeros(8 * SLICE, np.float32) for name in names}
    async with connected(cluster, "tcp", "tcp") as clients:
        handles = await opened(clients, "opposite", init=part, consistency=BSP())
        for goal in (1.0, 2.0, 3.0):
            buckets = []
            for handle, order in zip(handles, (names, names[::-1]), strict=True):
                for name in order:
                    buckets.append(await handle.push_pull_async({name: np.full(8 * SLICE, -1.0, np.float32)}))
            async with asyncio.timeout(60):
                for bucket in buckets:
                    (values,) = (await bucket).values()
                    assert set(values.tolist()) == {goal}
