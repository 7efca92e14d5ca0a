"""Probes of a silent server's port: refused only if its kernel says so, and silent if nothing can be known."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from psdist.addresses import free_port
from psdist_scheduler.decide.cluster_events import Event, Probed
from psdist_scheduler.decide.effects import Probe
from psdist_scheduler.scheduler import Probes, probe

#: No test waits for it.
_LONG = 60.0
_LOOPBACK = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A port whose process accepts nothing, like a stopped one: the kernel answers."""
    with closing(socket.create_server((_LOOPBACK, 0))) as made:
        yield made


def _address(listener: socket.socket) -> str:
    return f"{_LOOPBACK}:{listener.getsockname()[1]}"


def _resolve_to(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    """The name of every address stands for these hosts."""

    async def getaddrinfo(_: str, port: int, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


async def test_the_kernel_of_a_stopped_process_accepts(listener: socket.socket) -> None:
    assert await probe(_address(listener), _LONG) == "accepted"


async def test_the_port_of_a_process_that_is_gone_is_refused() -> None:
    assert await probe(f"{_LOOPBACK}:{free_port(_LOOPBACK)}", _LONG) == "refused"


async def test_a_connection_that_is_not_answered_in_time_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", connect)
    assert await probe(f"{_LOOPBACK}:1", 0.01) == "silent"


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (OSError("no route to host"), "silent"),
        (TimeoutError("of the kernel"), "silent"),
        (ConnectionResetError(), "silent"),
        (ConnectionRefusedError(), "refused"),
    ],
)
async def test_only_a_refusal_is_a_refusal(monkeypatch: pytest.MonkeyPatch, error: OSError, result: str) -> None:
    async def connect(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(asyncio, "open_connection", connect)
    assert await probe(f"{_LOOPBACK}:1", _LONG) == result


async def test_an_address_that_cannot_be_used_is_silent() -> None:
    for address in ["", "no-port", "host:port", "host:99999"]:
        assert await probe(address, _LONG) == "silent"


async def test_a_name_that_cannot_be_resolved_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def getaddrinfo(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await probe("no-such-host:1", _LONG) == "silent"


@pytest.mark.parametrize(
    ("answers", "result"),
    [
        (("refused", "refused"), "refused"),
        (("refused", "accepted"), "accepted"),
        (("silent", "accepted"), "accepted"),
        (("refused", "silent"), "silent"),
        ((), "silent"),
    ],
)
async def test_a_name_with_several_places_is_refused_only_if_all_refuse(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[str, ...], result: str
) -> None:
    async def connect(host: str, _: int) -> str:
        return answers[int(host)]

    _resolve_to(monkeypatch, *map(str, range(len(answers))))
    monkeypatch.setattr("psdist_scheduler.scheduler._connect", connect)
    assert await probe("server:1", _LONG) == result


# --- the probes of a scheduler ----------------------------------------------------------------------------------------


async def test_a_result_is_posted_for_the_incarnation_that_was_probed(listener: socket.socket) -> None:
    posted: asyncio.Queue[Event] = asyncio.Queue()
    probes = Probes(_LONG, posted.put_nowait)
    probes.start(Probe("server-0", 3, _address(listener)))
    assert await posted.get() == Probed("server-0", 3, "accepted")


async def test_a_probe_that_was_given_up_posts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def connect(*_: Any) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(asyncio, "open_connection", connect)
    posted: list[Event] = []
    probes = Probes(_LONG, posted.append)
    probes.start(Probe("server-0", 3, f"{_LOOPBACK}:1"))
    await begun.wait()
    probes.stop()
    await ended.wait()
    assert posted == []
