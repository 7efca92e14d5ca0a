"""Port for TCP connections: the addresses it listens on, and errors if it cannot. Sockets are on loopback."""

from __future__ import annotations

import asyncio
import socket

import pytest

from psdist.errors import ConfigurationError
from psdist.link.connecting import TcpListener
from psdist.settings.programs import server_settings

_LOOPBACK = "127.0.0.1"


async def connects(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_the_data_port_is_a_flag_and_a_variable() -> None:
    needed = ["--scheduler", "127.0.0.1:1"]
    assert server_settings(needed, {}).data_port == 0
    assert server_settings([*needed, "--data-port", "29602"], {}).data_port == 29602
    assert server_settings(needed, {"PSDIST_DATA_PORT": "29603"}).data_port == 29603


async def test_a_listener_has_the_port_that_it_is_given() -> None:
    with socket.create_server((_LOOPBACK, 0)) as free:
        port = free.getsockname()[1]
    listener = TcpListener()
    await listener.open(_LOOPBACK, port)
    assert listener.port == port and await connects(_LOOPBACK, port)
    listener.close()


async def test_a_given_port_that_is_in_use_is_named_with_the_remedy() -> None:
    with socket.create_server((_LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"--data-port {port} of 127\.0\.0\.1 .*in use.* or 0 for"):
            await TcpListener().open(_LOOPBACK, port)


async def test_without_a_free_port_workers_use_grpc() -> None:
    listener = TcpListener()
    await listener.open("192.0.2.1")  # no address of this machine
    assert listener.port == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]"])
async def test_a_wildcard_means_both_families_as_for_grpc(host: str) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    listener = TcpListener()
    await listener.open(host)
    assert await connects(_LOOPBACK, listener.port)
    assert await connects("::1", listener.port) == has_ipv6()
    listener.close()


@pytest.mark.parametrize("turns", range(5))
async def test_a_connection_that_arrives_while_it_closes_is_ended(turns: int) -> None:
    listener = TcpListener()
    await listener.open(_LOOPBACK)
    with socket.create_connection((_LOOPBACK, listener.port)) as dialing:
        dialing.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)
        listener.close()
        try:
            async with asyncio.timeout(60):
                assert await asyncio.get_running_loop().sock_recv(dialing, 1) == b""
        except ConnectionResetError:  # If nobody had accepted it.
            pass
