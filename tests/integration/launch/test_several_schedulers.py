"""An agent that knows several places of the scheduler: it finds the one that leads, also when that changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from psdist.addresses import free_port
from psdist.launcher import agent, scheduler_calls
from psdist.launcher.events import Place, RankRequest
from psdist.security.tls import Credentials
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import scheduler_pb2_grpc

HOST = "127.0.0.1"


class Leader(scheduler_pb2_grpc.SchedulerServiceServicer):
    """A scheduler that lets agents wait, unless it ``forms`` the rendezvous."""

    def __init__(self, forms: bool, on_call: Callable[[], None] = lambda: None) -> None:
        self._forms = forms
        self._on_call = on_call
        self.asked = asyncio.Event()
        self._server = grpc.aio.server()

    async def start(self, place: str) -> None:
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(place)
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    async def Rendezvous(self, request: Any, context: Any) -> AsyncIterator[pb.RendezvousResponse]:
        self._on_call()
        self.asked.set()
        yield pb.RendezvousResponse(formed=self._forms, nodes=1, world_size=1, run_id="run", waiting_for="others")
        await asyncio.Event().wait()

    async def WatchScale(self, request: Any, context: Any) -> AsyncIterator[pb.WatchScaleResponse]:
        self.asked.set()
        yield pb.WatchScaleResponse(servers_wanted=5 if self._forms else 3)
        await asyncio.Event().wait()


def places() -> list[str]:
    return [f"{HOST}:{free_port(HOST)}" for _ in range(2)]


@pytest.mark.parametrize("first", [0, 1])
async def test_the_rendezvous_goes_on_at_the_scheduler_that_leads_next(first: int) -> None:
    found = places()
    request = RankRequest(",".join(found), "run", "agent", 1, 1, 1, "host", timeout_seconds=60.0)
    before, after = Leader(False), Leader(True)
    await before.start(found[first])
    asking = asyncio.create_task(scheduler_calls._ask(request, Credentials()))
    await before.asked.wait()
    await before.stop()
    await after.start(found[1 - first])
    try:
        assert await asyncio.wait_for(asking, 60) == Place(0, 1, 0, 1, run_id="run")
    finally:
        await after.stop()


async def test_the_time_for_the_search_begins_when_the_scheduler_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other nodes may have been waited for much longer."""
    found, clock = places(), [0.0]
    monkeypatch.setattr(scheduler_calls, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    heard = asyncio.Event()
    monkeypatch.setattr(scheduler_calls, "_print", lambda values: heard.set())
    request = RankRequest(",".join(found), "run", "agent", 1, 1, 1, "host", timeout_seconds=1500.0)
    before, after = Leader(False, lambda: clock.__setitem__(0, 1000.0)), Leader(True)
    await before.start(found[0])
    asking = asyncio.create_task(scheduler_calls._ask(request, Credentials()))
    await heard.wait()
    clock[0] = 2000.0
    await before.stop()
    await after.start(found[1])
    try:
        assert (await asyncio.wait_for(asking, 60)).run_id == "run"
    finally:
        await after.stop()


async def test_the_scale_is_watched_at_the_scheduler_that_leads_next(monkeypatch: pytest.MonkeyPatch) -> None:
    found, lines = places(), asyncio.Queue[dict[str, Any]]()
    monkeypatch.setattr(scheduler_calls, "_print", lines.put_nowait)
    before, after = Leader(False), Leader(True)
    await before.start(found[0])
    watching = asyncio.create_task(scheduler_calls._watch(",".join(found), "run", Credentials()))
    assert (await asyncio.wait_for(lines.get(), 60))["servers"] == 3
    await before.stop()
    await after.start(found[1])
    try:
        assert (await asyncio.wait_for(lines.get(), 60))["servers"] == 5
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await after.stop()


def test_without_a_rendezvous_the_first_place_is_the_master() -> None:
    assert agent._master(Place(0, 2, 0, 2), "a:1,b:2", {}) == "a:1"
