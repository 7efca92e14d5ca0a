"""TLS of frame connections, over real sockets on either event loop: payloads in place, ends, refusals, reasons."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import uvloop

from psdist.errors import ClosedError, PsdistError, TcpUnavailableError
from psdist.link.connecting import connect
from psdist.link.tls_layer import TlsLayer
from psdist.security.certificates import KeyPair
from psdist.security.tls import TlsFiles
from psdist.wire import limits
from tests.support.certificates import NOW, make_ca, write_tls
from tests.support.frame_ends import HOST, FrameEnd, TlsFrameSocket, frame_pair

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture(scope="module")
def authority() -> KeyPair:
    return make_ca()


@pytest.fixture(scope="module")
def files(authority: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return write_tls(tmp_path_factory.mktemp("identity"), authority)


@asynccontextmanager
async def tls_pair(end: FrameEnd, files: TlsFiles) -> AsyncIterator[TlsFrameSocket]:
    """Connect ``end``, which accepts, to a peer."""
    async with frame_pair(end, files) as peer:
        assert isinstance(peer, TlsFrameSocket)
        yield peer


# --- cases, on either event loop --------------------------------------------------------------------------------------


async def large_frames_come_to_their_place_in_both_directions(files: TlsFiles) -> None:
    memory = np.zeros(limits.DATA_MESSAGE_BYTES, np.uint8)
    accepting, dialing = FrameEnd(memory), FrameEnd()
    server, port = await accepting.listen(files.server_context())
    await connect(dialing.connection, HOST, port, files)
    payload = np.random.default_rng(1).integers(0, 255, memory.size, np.uint8)
    expected = payload.tobytes()
    dialing.connection.send_soon(b"first")
    dialing.connection.send(b"a", payload.data)
    payload[:] = 0  # Encrypted already: the memory is the caller's again.
    await accepting.until(lambda: len(accepting.payloads) == 2)
    assert accepting.headers == [b"first", b"a"] and accepting.payloads == [b"", expected]
    accepting.connection.send(b"c", memory.data)
    await dialing.until(lambda: dialing.payloads)
    assert dialing.payloads == [expected]
    dialing.connection.abort()
    assert await accepting.ended() is None
    server.close()


async def records_that_arrive_in_parts_are_whole_frames(files: TlsFiles) -> None:
    end, payload = FrameEnd(), bytes(range(256)) * 80  # Over one record.
    async with tls_pair(end, files) as peer:
        data = peer.encrypted(peer.framed(b"a", payload) + peer.framed(b"b"))
        data += peer.encrypted(peer.framed(b"c", b"12")[:-1])
        for start in range(0, len(data), 97):
            await peer.send_raw(data[start : start + 97])
        await end.until(lambda: len(end.payloads) == 2)
        assert end.headers[:2] == [b"a", b"b"] and end.payloads == [payload, b""]
        await peer.send(b"2")
        await end.until(lambda: len(end.payloads) == 3)
        assert end.payloads[2] == b"12"


async def a_frame_that_is_cut_short_is_not_delivered(files: TlsFiles) -> None:
    for ending in (b"", b"half of a record"):
        end = FrameEnd()
        async with tls_pair(end, files) as peer:
            sent = peer.encrypted(peer.framed(b"a") + peer.framed(b"b", b"payload")[:-1])
            await peer.send_raw(sent + (peer.encrypted(ending)[:-3] if ending else b""))
            peer.close()
            assert await end.ended() is None and end.payloads == [b""]


async def the_farewell_of_tls_ends_the_connection(files: TlsFiles) -> None:
    end = FrameEnd()
    async with tls_pair(end, files) as peer:
        data = peer.encrypted(peer.framed(b"a"))
        with pytest.raises(ssl.SSLWantReadError):
            peer.tls.unwrap()
        await peer.send_raw(data + peer.outgoing.read())
        assert await end.ended() is None and end.payloads == [b""]


async def a_record_that_was_changed_on_its_way_ends_the_connection(files: TlsFiles) -> None:
    end = FrameEnd()
    async with tls_pair(end, files) as peer:
        data = peer.encrypted(peer.framed(b"a")) + bytes(peer.encrypted(peer.framed(b"b"))[:-1]) + b"?"
        await peer.send_raw(data + peer.encrypted(peer.framed(b"c")))
        error = await end.ended()
        assert isinstance(error, ClosedError) and "TLS failed on the connection" in error.message
        assert end.headers == [b"a"]


async def nothing_but_tls_is_sent(files: TlsFiles) -> None:
    """An end that has not shaken hands sends no frame, and the wire shows none of one that has."""
    taps: list[bytes] = []

    async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, onward = await asyncio.open_connection(HOST, port)
        back, _ = _, onward

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while part := await source.read(1 << 16):
                taps.append(part)
                target.write(part)
            target.close()

        await asyncio.gather(copy(reader, onward), copy(back, writer))

    accepting, dialing = FrameEnd(), FrameEnd()
    server, port = await accepting.listen(files.server_context())
    async with await asyncio.start_server(tap, HOST, 0) as proxy:
        await connect(dialing.connection, HOST, proxy.sockets[0].getsockname()[1], files)
        dialing.connection.send(b"a secret header", memoryview(b"a secret payload " * 1000))
        await accepting.until(lambda: accepting.payloads)
        accepting.connection.send(b"a secret answer")
        await dialing.until(lambda: dialing.payloads)
        dialing.connection.abort()
        await accepting.ended()
    assert sum(map(len, taps)) > 17_000 and b"secret" not in b"".join(taps)
    server.close()


async def an_abort_ends_a_handshake(files: TlsFiles) -> None:
    end = FrameEnd()
    server, port = await end.listen(files.server_context())
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(b"\x16\x03\x01")  # The beginning of a record.
    await writer.drain()
    while end.connection._transport is None:  # noqa: ASYNC110 - a connection has no event for it
        await asyncio.sleep(0)
    end.connection.abort()
    with suppress(ConnectionResetError):  # What was not read resets the connection.
        assert await asyncio.wait_for(reader.read(), 60) == b""
    assert end.ends == []
    writer.close()
    server.close()


CASES: list[Callable[[TlsFiles], Awaitable[None]]] = [
    large_frames_come_to_their_place_in_both_directions,
    records_that_arrive_in_parts_are_whole_frames,
    a_frame_that_is_cut_short_is_not_delivered,
    the_farewell_of_tls_ends_the_connection,
    a_record_that_was_changed_on_its_way_ends_the_connection,
    nothing_but_tls_is_sent,
    an_abort_ends_a_handshake,
]


def test_connection(files: TlsFiles) -> None:
    for new_loop in LOOPS:
        for case in CASES:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(case(files))


# --- refusals ---------------------------------------------------------------------------------------------------------


def contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return contexts of the accepting and the dialing side, for files that ``TlsFiles`` would not load."""
    made = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
        made.append(context)
    return made[0], made[1]


async def refused(
    server: ssl.SSLContext | None, client: ssl.SSLContext | None, host: str = HOST
) -> tuple[PsdistError | None, PsdistError | None]:
    """Connect, and return the errors of both ends: accepting, dialing. None as a context is plaintext."""
    accepting, dialing = FrameEnd(), FrameEnd()
    listener, port = await accepting.listen(server)
    layer = dialing.connection if client is None else TlsLayer(dialing.connection, client, host)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await loop.create_connection(lambda: layer, HOST, port)
    if isinstance(layer, TlsLayer):
        await layer.secured()
    dialing.connection.send(b"the first frame")
    errors = await accepting.ended(), await dialing.ended()
    listener.close()
    assert accepting.payloads == dialing.payloads == []
    assert loop.time() - began < 30
    return errors


def text_of(error: PsdistError | None) -> str:
    assert isinstance(error, TcpUnavailableError)
    return error.message


async def test_another_ca_is_named_at_both_ends(files: TlsFiles, authority: KeyPair, tmp_path: Path) -> None:
    other = write_tls(tmp_path / "other", make_ca())
    accepting, dialing = await refused(files.server_context(), other.client_context())
    assert "the peer does not trust the CA of this process's certificate" in text_of(accepting)
    assert "of a CA that this process does not trust: give all processes of the run the same CA" in text_of(dialing)
    trusting = write_tls(tmp_path / "trusting", make_ca(), trusted=authority.cert)
    accepting, dialing = await refused(files.server_context(), contexts(trusting)[1])
    assert "of a CA that this process does not trust" in text_of(accepting)
    assert "the peer does not trust the CA of this process's certificate" in text_of(dialing)


@pytest.mark.parametrize(("age", "reason"), [(3, "the peer's certificate has expired"), (-1, "is not valid yet")])
async def test_a_certificate_out_of_its_time_is_refused_at_either_end(
    files: TlsFiles, authority: KeyPair, tmp_path: Path, age: float, reason: str
) -> None:
    old_server, old_client = contexts(write_tls(tmp_path / "old", authority, days=2, now=NOW - datetime.timedelta(age)))
    accepting, dialing = await refused(old_server, files.client_context())
    assert reason in text_of(dialing) and "the peer refused this process's certificate" in text_of(accepting)
    accepting, dialing = await refused(files.server_context(), old_client)
    assert reason in text_of(accepting) and "the peer refused this process's certificate" in text_of(dialing)


async def test_a_certificate_for_another_host_is_refused(files: TlsFiles) -> None:
    accepting, dialing = await refused(files.server_context(), files.client_context(), "192.0.2.1")
    assert "is not valid for 192.0.2.1: issue it with --host 192.0.2.1" in text_of(dialing)
    assert "not for the dialed host" in text_of(accepting)
    _, dialing = await refused(files.server_context(), files.client_context(), "other.example")
    assert "is not valid for other.example" in text_of(dialing)


async def test_a_peer_without_a_certificate_is_refused(files: TlsFiles) -> None:
    bare = ssl.create_default_context(cafile=str(files.ca))
    accepting, dialing = await refused(files.server_context(), bare)
    assert "the peer showed no certificate: give it --tls-cert and --tls-key" in text_of(accepting)
    assert "the peer demands a certificate" in text_of(dialing)


async def test_older_versions_with_their_renegotiation_are_not_offered(files: TlsFiles) -> None:
    old = contexts(files)
    for context in old:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    accepting, dialing = await refused(files.server_context(), old[1])
    assert "does not support TLS 1.3" in text_of(accepting) and "does not support TLS 1.3" in text_of(dialing)
    _, dialing = await refused(old[0], files.client_context())
    assert "does not support TLS 1.3" in text_of(dialing)


async def test_plaintext_at_a_tls_port_is_refused_with_a_reason_at_both_ends(files: TlsFiles) -> None:
    accepting, dialing = await refused(files.server_context(), None)
    assert "the peer does not use TLS: give all processes of the run --tls-ca" in text_of(accepting)
    assert "the peer uses TLS, and this process does not" in text_of(dialing)


async def test_tls_at_a_plaintext_port_is_refused_with_a_reason_at_both_ends(files: TlsFiles) -> None:
    accepting, dialing = await refused(None, files.client_context())
    assert "the peer uses TLS, and this process does not" in text_of(accepting)
    assert "the peer closed the connection during the TLS handshake" in text_of(dialing)
