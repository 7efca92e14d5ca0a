"""Finding the scheduler, or reporting the attempts; and the rules of one loop and one process."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

import psdist
from psdist import errors
from psdist.client.session import loop
from psdist.client.session.waits import Activities
from psdist.security.tls import Credentials
from psdist.wire import limits
from tests.support.client_fakes import FakeScheduler


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_no_address_tells_the_ways_to_give_one() -> None:
    with pytest.raises(errors.ConfigurationError, match=r"psdist run.*PSDIST_SCHEDULER.*psdist.init"):
        await psdist.AsyncClient().connect()


@pytest.mark.parametrize("from_environment", [False, True])
async def test_nobody_there_tells_what_was_tried(monkeypatch: pytest.MonkeyPatch, from_environment: bool) -> None:
    address = f"127.0.0.1:{_free_port()}"
    if from_environment:
        monkeypatch.setenv("PSDIST_SCHEDULER", address)
    client = psdist.AsyncClient(None if from_environment else address, connect_timeout=0.3)
    with pytest.raises(errors.SchedulerUnreachableError) as raised:
        await client.connect()
    source = "PSDIST_SCHEDULER" if from_environment else "the argument"
    for words in (address, f"from {source}", "0.3 s", "attempts", "refused", "psdist run"):
        assert words in str(raised.value), str(raised.value)
    assert int(raised.value.details["attempts"]) > 1


async def test_a_file_that_does_not_appear_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PSDIST_SCHEDULER_FILE", str(tmp_path / "address"))
    with pytest.raises(errors.SchedulerUnreachableError, match="address"):
        await psdist.AsyncClient(connect_timeout=0.1).connect()


async def test_the_file_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, connected = tmp_path / "address", tmp_path / "connected"
    monkeypatch.setenv("PSDIST_SCHEDULER_FILE", str(file))
    monkeypatch.setenv("PSDIST_CONNECTED_FILE", str(connected))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    scheduler = await FakeScheduler([]).start()
    client = psdist.AsyncClient()
    connecting = asyncio.create_task(client.connect())
    await asyncio.sleep(0)
    assert not connected.exists()
    file.write_text(scheduler.address + "\n")
    await connecting
    assert connected.exists()
    request = scheduler.registrations[0]
    assert (request.rank, request.world_size, request.protocol_version) == (3, 8, limits.PROTOCOL_VERSION)
    assert repr(client) == "<AsyncClient worker-0 (rank 3) of run 'fake-run'>"
    await client.close()
    await scheduler.stop()


async def test_something_else_answers() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = "{}:{}".format(*server.sockets[0].getsockname())
    with pytest.raises(errors.SchedulerUnreachableError, match=address):
        await psdist.AsyncClient(address, connect_timeout=0.5).connect()
    server.close()
    await server.wait_closed()


async def test_another_grpc_server_answers() -> None:
    from psdist.wire import channels

    server = channels.make_server(Credentials())
    port = channels.bind(server, "127.0.0.1", 0, Credentials())
    await server.start()
    with pytest.raises(errors.SchedulerUnreachableError, match="is not a psdist scheduler"):
        await psdist.AsyncClient(f"127.0.0.1:{port}").connect()
    await server.stop(None)


async def test_bad_arguments() -> None:
    arguments: Any
    for arguments, words in [
        ({"scheduler": "nonsense"}, "HOST:PORT"),
        ({"rank": -1}, "rank=-1"),
        ({"worker_id": "a b"}, "worker_id"),
        ({"run_id": "a/b"}, "run id"),
    ]:
        with pytest.raises(errors.InvalidArgumentError, match=words):
            await psdist.AsyncClient(**({"scheduler": "127.0.0.1:1"} | arguments)).connect()


async def test_bad_timeouts() -> None:
    for value in [0, -1.0, "10", True]:
        with pytest.raises(errors.InvalidArgumentError, match="connect_timeout"):
            psdist.AsyncClient("127.0.0.1:1", connect_timeout=value)


async def test_use_before_connect() -> None:
    client = psdist.AsyncClient("127.0.0.1:1")
    for use in (lambda: client.rank, lambda: client.worker_id):
        with pytest.raises(errors.ClosedError, match="not connected"):
            use()


async def test_clients_on_two_loops_are_refused() -> None:
    scheduler = await FakeScheduler([]).start()
    client = await psdist.AsyncClient(scheduler.address).connect()

    def other_loop() -> None:
        with pytest.raises(errors.ConfigurationError, match="another event loop"):
            asyncio.run(psdist.AsyncClient(scheduler.address).connect())

    await asyncio.to_thread(other_loop)
    await client.close()
    await scheduler.stop()


async def test_a_loop_thread_of_another_process_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    loop.shared()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        with pytest.raises(errors.ClosedError, match="spawn"):
            loop.shared()


async def test_a_difference_to_another_map_breaks_the_session_and_the_next_begins_with_a_whole_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "psdist")
    scheduler = await FakeScheduler([]).start()
    async with psdist.AsyncClient(scheduler.address) as client:
        assert client.session is not None
        view, epoch = client.session.membership.view, scheduler.epoch
        scheduler.publish_difference(base=epoch, epoch=epoch + 1)
        await view.newer_than(epoch, 60)
        assert view.cluster.epoch == epoch + 1 and scheduler.sessions == 1
        scheduler.epoch = epoch + 7
        scheduler.publish_difference(base=epoch + 5, epoch=epoch + 6)
        await view.newer_than(epoch + 1, 60)
        assert view.cluster.epoch == epoch + 7 and scheduler.sessions == 2
    assert f"map {epoch + 5} to {epoch + 6} does not apply to map {epoch + 1}" in caplog.text
    await scheduler.stop()


async def test_a_heartbeat_that_cannot_be_made_breaks_the_session_and_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Check a broken session: gRPC cancels the stream then, which looks like the end of the task that reads it."""
    caplog.set_level("INFO", "psdist")
    report, failed = Activities.report, list[None]()

    def fails_once(self: Activities) -> object:
        if not failed:
            failed.append(None)
            raise ValueError("on purpose")
        return report(self)

    monkeypatch.setattr(Activities, "report", fails_once)
    scheduler = await FakeScheduler([]).start()
    client = await psdist.AsyncClient(scheduler.address).connect()
    try:
        async with asyncio.timeout(60):
            await scheduler.hello.wait()
            while not any("is back" in record.getMessage() for record in caplog.records):
                await client.session.membership.view.changed(0.01)
        assert failed and client.session.is_heard
        assert any("a heartbeat could not be made" in record.getMessage() for record in caplog.records)
    finally:
        await client.close()
        await scheduler.stop()
