"""Links over TLS: fallbacks and reasons of the dialing ends, limits and logs of the ports, replaced certificates."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog

from psdist.errors import PeerUnreachableError, PsdistError, TcpUnavailableError
from psdist.link import connecting
from psdist.link.connecting import TcpListener
from psdist.link.frame_connection import FrameConnection, MessageReceiver
from psdist.link.peer_links import PeerLink, PeerListener
from psdist.security.certificates import KeyPair
from psdist.security.roles import Role
from psdist.security.tls import Credentials, TlsFiles
from psdist.v1 import server_pb2, worker_pb2
from psdist.wire.limits import FailureLimit, LogPacer
from tests.support.certificates import make_ca, write_tls
from tests.support.link_ends import PeerConsumer, ServerLink, SilentStream, peer_hello

HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def ca() -> KeyPair:
    return make_ca()


@pytest.fixture(scope="module")
def files(ca: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return write_tls(tmp_path_factory.mktemp("tls"), ca)


@pytest.fixture(scope="module")
def server_files(ca: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return write_tls(tmp_path_factory.mktemp("server"), ca, "server")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)


# --- workers and servers ----------------------------------------------------------------------------------------------


class Served(MessageReceiver[server_pb2.ShareRequest]):
    """A promised connection at the server."""

    message_type = server_pb2.ShareRequest

    def connected(self, connection: FrameConnection) -> None:
        self.connection = connection
        opened = server_pb2.ShareResponse(opened=server_pb2.Opened())
        connection.send(opened.SerializeToString())

    def on_message(self, message: server_pb2.ShareRequest) -> None:
        pass

    def connection_ended(self, error: PsdistError | None) -> None:
        pass


@pytest.fixture
async def listener(server_files: TlsFiles) -> AsyncIterator[TcpListener]:
    listener = TcpListener(server_files)
    await listener.open(HOST)
    yield listener
    listener.close()


async def dialed(listener: TcpListener, tls: TlsFiles | None, host: str = HOST) -> None:
    """Dial a port with a valid nonce, and hang up. Raises what ``Link.dial`` raises."""
    link, served = ServerLink(SilentStream()), Served()
    try:
        with listener.promise(served) as promise:
            await link.dial(host, listener.port, promise.nonce, tls=tls, dialers="tests connect")
        served.connection.abort()
    finally:
        link.close()
        await link.ended()


async def test_the_nonce_is_shown_over_tls(listener: TcpListener, files: TlsFiles) -> None:
    await dialed(listener, files)
    await until(lambda: not listener._unidentified)


async def test_tls_that_fails_makes_tcp_unavailable_immediately_so_that_grpc_is_used(
    listener: TcpListener, files: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "_REASON_SECONDS", 3600.0)  # Neither end waits for another reason.
    monkeypatch.setattr(connecting, "CONNECT_SECONDS", 3600.0)
    stranger = write_tls(tmp_path, make_ca())
    plain = TcpListener()
    await plain.open(HOST)
    for port, tls, reason in (
        (listener, stranger, "server-0: the peer's certificate is of a CA that this process does not trust"),
        (listener, None, "server-0: the peer uses TLS, and this process does not"),
        (plain, files, "server-0: the peer closed the connection during the TLS handshake"),
    ):
        with structlog.testing.capture_logs() as logs, pytest.raises(TcpUnavailableError, match=reason):
            async with asyncio.timeout(60):
                await dialed(port, tls)
        await until(lambda port=port: not port._unidentified)
    plain.close()
    reason_of_the_last = logs[0].pop("reason_of_the_last")
    assert re.match(rf"{HOST}:\d+: the peer uses TLS, and this process does not: give all", reason_of_the_last)
    assert logs == [{"connections": 1, "event": "closed unidentified connections", "log_level": "info"}]


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02"], ids=["silence", "half of a handshake"])
async def test_handshakes_that_do_not_finish_are_bounded_in_number_and_time(
    listener: TcpListener, files: TlsFiles, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(connecting.limits, "UNIDENTIFIED_MAX", 2)
    opened = [await asyncio.open_connection(HOST, listener.port) for _ in range(4)]
    for _, writer in opened:
        writer.write(said)
    for reader, _ in opened[:2]:
        await asyncio.wait_for(_ended(reader), 60)
    assert len(listener._unidentified) == 2
    await dialed(listener, files)
    monkeypatch.setattr(connecting.limits, "NONCE_SECONDS", 0.01)
    late, writer = await asyncio.open_connection(HOST, listener.port)
    writer.write(said)
    await asyncio.wait_for(_ended(late), 60)
    for _, one in [*opened, (late, writer)]:
        one.close()


async def test_an_address_whose_handshakes_fail_is_refused_before_the_next_one(
    listener: TcpListener, files: TlsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener._failures = FailureLimit(0.0, 2, 8)
    await dialed(listener, files)
    for text in ("of a CA", "of a CA", "closed the connection during the TLS handshake"):
        with structlog.testing.capture_logs() as logs, pytest.raises(TcpUnavailableError, match=text):
            listener._log = LogPacer(60.0)
            await dialed(listener, write_tls(tmp_path, make_ca()))
        await until(lambda: not listener._unidentified)
    (line,) = logs
    assert re.match(rf"{HOST}:\d+: over .* of this address ended unidentified", line["reason_of_the_last"])
    listener._failures.succeed(HOST)
    await dialed(listener, files)


async def _ended(reader: asyncio.StreamReader) -> None:
    """Wait for the end of a connection."""
    with suppress(ConnectionResetError):  # The port did not read everything.
        assert await reader.read() == b""


async def test_replaced_certificates_serve_new_connections_and_old_ones_go_on(ca: KeyPair, tmp_path: Path) -> None:
    """Over a change of the CA in three steps: both are trusted, new certificates, only the new one is trusted."""
    new = make_ca("new CA")
    both = ca.cert + new.cert
    places: tuple[tuple[Path, Role], ...] = ((tmp_path / "server", "server"), (tmp_path / "client", "worker"))
    server, client = (write_tls(place, ca, role) for place, role in places)
    listener = TcpListener(server)
    await listener.open(HOST)
    await dialed(listener, client)
    first, served = ServerLink(SilentStream()), Served()
    with listener.promise(served) as promise:
        await first.dial(HOST, listener.port, promise.nonce, tls=client, dialers="tests connect")
    for issuer, trusted in ((ca, both), (new, both), (new, new.cert)):
        for (place, role), tls in zip(places, (server, client), strict=True):
            write_tls(place, issuer, role, trusted=trusted)
            if trusted is both:
                await dialed(listener, tls)
                await dialed(listener, client)
    await dialed(listener, client)
    with pytest.raises(TcpUnavailableError, match="does not trust"):
        await dialed(listener, write_tls(tmp_path / "old", ca))
    assert first.broken is None
    first.close()
    await first.ended()
    served.connection.abort()
    listener.close()


async def test_a_worker_that_listens_in_the_place_of_a_server_is_refused(files: TlsFiles) -> None:
    """Its certificate is of the same CA and names the dialed host."""
    listener = TcpListener(files)
    await listener.open(HOST)
    said = rf"not one of a scheduler or server at {HOST}.*give workers certificates of their own role"
    with pytest.raises(TcpUnavailableError, match=said):
        await dialed(listener, files)
    listener.close()


# --- workers ----------------------------------------------------------------------------------------------------------


async def workers_port(credentials: Credentials, name: str = "") -> tuple[PeerListener, worker_pb2.PeerHello]:
    listener = PeerListener(credentials)
    await listener.open_towards(f"{HOST}:1", spans_hosts=False, name=name)
    return listener, peer_hello(listener, credentials.token)


async def test_a_worker_without_the_ca_is_told_why(
    files: TlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener, hello = await workers_port(Credentials("secret", files))
    ended: asyncio.Future[PsdistError] = asyncio.get_running_loop().create_future()
    with caplog.at_level(logging.INFO, "psdist"):
        PeerLink(hello, write_tls(tmp_path, make_ca()), ended.set_result, shares=False)
        error = await asyncio.wait_for(ended, 60)
        await until(lambda: caplog.messages)
    assert isinstance(error, PeerUnreachableError)
    assert error.message.startswith("worker-0 closed its link: the peer's certificate is of a CA that this process")
    assert "the peer does not trust the CA" in caplog.text
    listener.close()


@pytest.mark.parametrize(
    ("role", "run_id", "reason"),
    [
        ("reader", "", "this caller is reader"),
        ("server", "", "this caller is server"),
        ("worker", "other", "is for run 'other'"),
    ],
)
@pytest.mark.parametrize("token", ["", "secret"])
async def test_only_certificates_of_workers_of_the_run_open_links(
    ca: KeyPair, files: TlsFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    role: Role, run_id: str, reason: str, token: str,
) -> None:  # fmt: skip
    listener, hello = await workers_port(Credentials(token, files))
    consumer = PeerConsumer()
    listener.serve(consumer)
    ended: asyncio.Future[PsdistError] = asyncio.get_running_loop().create_future()
    with caplog.at_level(logging.INFO, "psdist"):
        PeerLink(hello, write_tls(tmp_path, ca, role, run_id=run_id), ended.set_result, shares=False)
        await asyncio.wait_for(ended, 60)
    assert reason in caplog.text and not consumer.hellos
    listener.close()


@pytest.mark.parametrize(("name", "reason"), [("node-3", ""), ("", "certificate is not valid for 127.0.0.3")])
async def test_a_worker_is_dialed_by_the_name_in_its_certificate(
    ca: KeyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    resolve = socket.getaddrinfo

    def getaddrinfo(host: str, *rest: Any, **options: Any) -> Any:
        return resolve("127.0.0.3" if host == "node-3" else host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("psdist.addresses.route_source", lambda peer: "127.0.0.3")
    files = write_tls(tmp_path, ca, "worker", hosts=("node-3",))
    listener, hello = await workers_port(Credentials("secret", files), name)
    consumer = PeerConsumer()
    listener.serve(consumer)
    ended: asyncio.Future[PsdistError] = asyncio.get_running_loop().create_future()
    link = PeerLink(hello, files, ended.set_result, shares=False)
    link.send(
        worker_pb2.PeerFrame(call=worker_pb2.CollectiveCall(kind="barrier")).SerializeToString(), memoryview(b""), None
    )
    await until(lambda: consumer.has_arrived.is_set() or ended.done())
    assert consumer.has_arrived.is_set() is not bool(reason)
    assert not reason or reason in ended.result().message
    link.close()
    listener.close()


async def test_tls_opens_a_port_beyond_loopback_without_a_token(
    files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psdist.addresses.own_address", lambda: "127.0.0.3")
    monkeypatch.setattr("psdist.addresses.is_loopback", lambda host: host != "127.0.0.3")
    scheduler = await asyncio.start_server(lambda reader, writer: writer.close(), "0.0.0.0")
    for tls, address in ((None, ""), (files, "127.0.0.3:")):
        listener = PeerListener(Credentials(tls=tls))
        await listener.open_towards(f"127.0.0.1:{scheduler.sockets[0].getsockname()[1]}", spans_hosts=True)
        assert listener.address.startswith(address) and bool(listener.port) is bool(tls)
        listener.close()
    scheduler.close()
