"""Ports of processes: where they are bound, and that connections never take all open files."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator

import pytest

from psdist.security.tls import Credentials
from psdist.wire import channels, limits


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def allow(soft: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_the_soft_limit_is_raised_as_far_as_needed() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    allow(1024)
    channels.raise_open_files_limit()
    needed = 2 * limits.CONNECTIONS_MAX + limits.FILES_RESERVED
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == (min(hard, needed) if hard > 0 else needed)


@pytest.mark.parametrize(("soft", "connections"), [(1024, 512), (600, 300), (2000, 1488)])
def test_files_are_left_where_few_may_be_open(soft: int, connections: int) -> None:
    allow(soft)
    assert channels._connections_max() == connections


async def test_an_ipv6_address_is_bound_with_and_without_brackets() -> None:
    for host in ("::1", "[::1]"):
        server = channels.make_server(Credentials())
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback address")
        assert channels.bind(server, host, 0, Credentials()) > 0
        await server.stop(None)


def test_a_higher_limit_is_left_alone() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if before < 2 * limits.CONNECTIONS_MAX:
        pytest.skip("this system allows fewer open files")
    allow(before)
    channels.raise_open_files_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before
