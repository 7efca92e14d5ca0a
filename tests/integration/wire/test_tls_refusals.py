"""Refused connections with TLS: the time until each is refused, the log line, and the remedy in the client's error.

``python -m pytest -s tests/integration/wire/test_tls_refusals.py`` prints the table.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
import structlog

from psdist.errors import ConfigurationError, PermissionDeniedError, PsdistError
from psdist.link.connecting import TcpListener
from psdist.link.frame_connection import FrameConnection
from psdist.link.tls_layer import TlsLayer
from psdist.security import tls
from psdist.security.roles import SCHEDULER_SERVICE, service_name
from psdist.security.tls import Credentials, TlsFiles
from psdist.settings.config import make_tls
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import channels, status
from psdist.wire.limits import LogPacer
from psdist.wire.services import service_handler
from tests.support.certificates import NOW, make_ca, write_tls

CA, OTHER_CA = make_ca(), make_ca("other CA")
BOTH = CA.cert + OTHER_CA.cert
HOST, ATTEMPTS = "127.0.0.1", 5
#: Longer than any takes on a busy machine, and shorter than silent peers are given. The table has the times.
SOON_SECONDS = 4.0
#: The bytes of a caller without TLS: HTTP/2's greeting.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
#: In each error of a dialing end over TCP.
REMEDY = re.compile("--tls-cert|--tls-ca|psdist certs issue|correct the clock")
CHECK_TIME = tls._check_time
DAY = datetime.timedelta(days=1)
Make = Callable[[Path], TlsFiles | None]


@dataclass(frozen=True)
class Case:
    """One pair of identities. remedy: in the error of the client. said: in the log of the TCP port."""

    name: str
    server: Make
    client: Make
    remedy: str
    said: str
    has_certificate: bool = True


def right(place: Path) -> TlsFiles:
    return write_tls(place, CA, "server")


def worker(place: Path) -> TlsFiles:
    return write_tls(place, CA)


def nothing(place: Path) -> None:
    return None


CASES = (
    Case("other CA", right, lambda at: write_tls(at, OTHER_CA, trusted=BOTH), "same CA on both sides", "not trust"),
    Case("expired", right, lambda at: write_tls(at, CA, days=1, now=NOW - 2 * DAY), "issue another", "has expired"),
    Case("not yet valid", right, lambda at: write_tls(at, CA, days=2, now=NOW + DAY), "clock, or issue", "valid yet"),
    Case("no certificate", right, worker, "or none of them", "showed no certificate", has_certificate=False),
    Case("plaintext to TLS", right, nothing, "set --tls-ca", "does not use TLS"),
    Case("TLS to plaintext", nothing, worker, "start it with --tls-ca", "the peer uses TLS"),
    Case(
        "server: other CA", lambda at: write_tls(at, OTHER_CA, "server", trusted=BOTH), worker,
        "give both sides the same CA", "does not trust",
    ),
    Case(
        "server: expired", lambda at: write_tls(at, CA, "server", days=1, now=NOW - 2 * DAY), worker,
        "renew it there", "refused this process's certificate",
    ),
    Case("server: other host", lambda at: write_tls(at, CA, "reader"), worker, f"--host {HOST}", "refused this"),
    Case("server: a worker", worker, worker, "--role ROLE", "refused this"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes use certificates that their own checks refuse, as an attacker does. A busy machine may take longer
    than an explanation has."""
    monkeypatch.setattr(tls, "_check_time", lambda *_: None)
    monkeypatch.setattr(tls, "_SECONDS", 60.0)


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Lines of the table, which is printed at the end."""
    lines: list[str] = []
    yield lines
    print("", "| refused | port | median, longest of 5 | log line |", "|---|---|---|---|", *lines, sep="\n")


def dialing(case: Case, files: TlsFiles | None) -> ssl.SSLContext | None:
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.ca)
    context.set_alpn_protocols(["h2"])
    if case.has_certificate:
        context.load_cert_chain(files.cert, files.key)
    return context


async def refused_after(port: int, context: ssl.SSLContext | None) -> float:
    """Connect, and return the seconds until either end refuses."""
    began = time.perf_counter()
    name = None if context is None else service_name(HOST)
    async with asyncio.timeout(60):
        try:
            reader, writer = await asyncio.open_connection(HOST, port, ssl=context, server_hostname=name)
        except OSError:  # Includes a refusal by this end.
            return time.perf_counter() - began
        try:
            writer.write(GREETING)
            while await reader.read(1 << 10):
                pass  # An alert.
        except OSError:
            pass
        finally:
            writer.transport.abort()
    return time.perf_counter() - began


class Dialer:
    """The dialing end of a TCP connection."""

    def __init__(self) -> None:
        self.connection = FrameConnection(self)
        self.end: asyncio.Future[PsdistError | None] = asyncio.get_running_loop().create_future()

    def begin_frame(self, header: bytes, size: int) -> memoryview:
        raise AssertionError("a stranger received a frame")

    def end_frame(self) -> None:
        raise AssertionError("a stranger received a frame")

    def connection_ended(self, error: PsdistError | None) -> None:
        self.end.set_result(error)


async def refused_over_tcp(port: int, context: ssl.SSLContext | None) -> tuple[float, str]:
    """Connect as psdist does. Return the seconds until either end refuses, and the dialing end's error."""
    began, dialer = time.perf_counter(), Dialer()
    layer = dialer.connection if context is None else TlsLayer(dialer.connection, context, service_name(HOST))
    await asyncio.get_running_loop().create_connection(lambda: layer, HOST, port)
    if isinstance(layer, TlsLayer):
        await layer.secured()
    dialer.connection.send(b"the first frame")
    async with asyncio.timeout(60):
        error = await dialer.end
    assert error is not None
    return time.perf_counter() - began, error.message


def row(case: str, port: str, seconds: list[float], line: str) -> str:
    ordered = sorted(1e3 * one for one in seconds)
    return f"| {case} | {port} | {ordered[len(ordered) // 2]:.0f}, {ordered[-1]:.0f} ms | {line} |"


@asynccontextmanager
async def grpc_port(credentials: Credentials, reached: list[str] | None = None) -> AsyncIterator[int]:
    """Yield the port of a scheduler whose handlers only note that they were reached."""
    server = channels.make_server(credentials)
    port = channels.bind(server, HOST, 0, credentials)

    async def answer(request: object, context: object) -> None:
        assert reached is not None
        reached.append("a handler")

    service = pb.DESCRIPTOR.services_by_name["SchedulerService"]
    handlers = dict.fromkeys(service.methods_by_name, answer)
    server.add_generic_rpc_handlers((service_handler(service, handlers, logging.getLogger("psdist.test")),))
    await server.start()
    yield port
    await server.stop(0)


async def error_of(case: Case, address: str, files: TlsFiles | None) -> str:
    """Return the error of a client with these files."""
    try:
        if files is not None and not case.has_certificate:
            make_tls(str(files.ca), None, None)
        found = await tls.explain(address, Credentials("token", tls=files))
    except ConfigurationError as error:
        return error.message
    assert found is not None, "no reason was found"
    return found.message


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_grpc_port(tmp_path: Path, table: list[str], case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = case.server(tmp_path / "s"), case.client(tmp_path / "c")
    async with grpc_port(Credentials("token", tls=server)) as port:
        seconds = [await refused_after(port, dialing(case, client)) for _ in range(ATTEMPTS)]
        monkeypatch.setattr(tls, "_check_time", CHECK_TIME)  # The client checks its own certificate.
        assert case.remedy in await error_of(case, f"{HOST}:{port}", client)
    assert min(seconds) < SOON_SECONDS
    table.append(row(case.name, "gRPC", seconds, "none"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_tcp_port(tmp_path: Path, table: list[str], case: Case) -> None:
    listener, context = TcpListener(case.server(tmp_path / "s")), dialing(case, case.client(tmp_path / "c"))
    await listener.open(HOST)
    seconds, lines = [], []
    for _ in range(ATTEMPTS):
        with structlog.testing.capture_logs() as logs:
            listener._log = LogPacer(60.0)
            after, error = await refused_over_tcp(listener.port, context)
            seconds.append(after)
            assert REMEDY.search(error), error
            async with asyncio.timeout(60):
                while listener._unidentified:  # noqa: ASYNC110 - nothing announces it
                    await asyncio.sleep(0)
        lines += [one["reason_of_the_last"] for one in logs]
    listener.close()
    assert len(lines) == ATTEMPTS, "one line for each, were it not for the pace"
    assert all(re.match(rf"{HOST}:\d+: ", line) and case.said in line for line in lines), lines
    assert min(seconds) < SOON_SECONDS
    table.append(row(case.name, "TCP", seconds, "peer and reason"))


async def test_worker_makes_an_admins_call(tmp_path: Path, table: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "psdist.test")
    reached: list[str] = []
    client = Credentials(tls=worker(tmp_path / "c"))
    async with (
        grpc_port(Credentials(tls=right(tmp_path / "s")), reached) as port,
        channels.open_channel(f"{HOST}:{port}", client) as channel,
    ):
        call = channel.unary_unary(f"/{SCHEDULER_SERVICE}/Drain")
        seconds = []
        for _ in range(ATTEMPTS):
            began = time.perf_counter()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"", timeout=60)
            seconds.append(time.perf_counter() - began)
            error = status.from_call(caught.value, "the scheduler")
            assert isinstance(error, PermissionDeniedError) and "psdist certs issue" in error.message, error
    assert not reached and min(seconds) < SOON_SECONDS
    lines = [record.getMessage() for record in caplog.records if record.name == "psdist.test"]
    said = rf"Drain refused: .*this caller is worker: .* \(a call from ipv4:{HOST}:\d+\)"
    assert len(lines) == ATTEMPTS and all(re.fullmatch(said, line) for line in lines), lines
    table.append(row("worker on an admin call", "gRPC", seconds, "peer and reason"))
