"""Transports in the order of preference: which one carries a request, which are prepared, and why others are not
used."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from psdist.client.core.push_sequence import PendingRequest
from psdist.client.core.routing import Route
from psdist.client.session.waits import Wait
from psdist.client.transport.delivery import Transports
from psdist.client.transport.transport import Request, RequestIdentity, ServerLoss, Transport
from psdist.types import Slicing

REQUEST = Request(RequestIdentity("run", "worker-0", 1, "p"), PendingRequest(0, {0}), Slicing(8, 8), "step 0")
ROUTES = [Route(f"server-{number}", 1, f"host-{number}:1", 1, (number,)) for number in range(3)]


class Fake(Transport):
    """Transport that can be opened to some servers. reason: given for the other servers."""

    def __init__(self, name: str, reason: str, *can: int) -> None:
        self.name = name
        self.open: set[str] = set()
        self.asked: list[str] = []
        self._reason = reason
        self._can = {f"server-{number}" for number in can}

    def connection(self, server: Route, /) -> Fake | None:
        return self if server.server_id in self.open else None

    def is_missing(self, route: Route) -> bool:
        return route.server_id not in self.open and route.server_id not in self.asked

    async def prepare(self, routes: Sequence[Route]) -> None:
        self.asked += [route.server_id for route in routes]
        self.open |= self._can.intersection(self.asked)

    def why_closed(self, server_id: str) -> str:
        return "" if server_id in self.open else self._reason

    async def exchange(self, request: Request, route: Route, wait: Wait, loss: ServerLoss) -> None:
        raise AssertionError


class Always(Fake):
    def connection(self, server: Route, /) -> Fake:
        return self

    def is_missing(self, route: Route) -> bool:
        return False

    def why_closed(self, server_id: str) -> str:
        return ""


@pytest.fixture
def fakes() -> list[Fake]:
    return [Fake("shm", "another host", 0), Fake("tcp", "no way", 0, 1), Always("grpc", "")]


async def test_one_is_opened_only_where_none_before_it_is(fakes: list[Fake]) -> None:
    transports = Transports(*fakes)
    assert transports.is_missing(ROUTES)
    await transports.prepare(ROUTES)
    assert [fake.asked for fake in fakes] == [
        ["server-0", "server-1", "server-2"],
        ["server-1", "server-2"],
        ["server-2"],
    ]
    assert not transports.is_missing(ROUTES)
    assert [transports.connection(route, REQUEST) for route in ROUTES] == fakes


async def test_one_that_broke_is_missing_and_the_next_one_is_not_before(fakes: list[Fake]) -> None:
    transports = Transports(*fakes)
    await transports.prepare(ROUTES[:1])
    assert not transports.is_missing(ROUTES[:1])
    fakes[0].open.clear()
    assert transports.is_missing(ROUTES[:1])  # tcp was never tried


async def test_why_preferred_ones_are_not_used(fakes: list[Fake]) -> None:
    transports = Transports(*fakes)
    await transports.prepare(ROUTES)
    assert transports.statuses([route.server_id for route in ROUTES]) == {
        "server-0": "shm",
        "server-1": "tcp: another host",
        "server-2": "grpc: no shm: another host; no tcp: no way",
    }
