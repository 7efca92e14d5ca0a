"""TLS between a frame connection and its TCP connection.

The layer is a protocol for the event loop's transport, and a transport for the frame connection, which does not notice
it. Received data is decrypted straight into the buffer that the frame connection names. Data to send is encrypted
before ``writelines`` returns, so its memory is free from then on; encrypted data that the peer does not read yet counts
in the write queue, like plaintext.

The event loops have a TLS of their own, which costs the same. It completes the handshake before a protocol learns of
its connection, though, and keeps the reason of a failure to itself. Here a connection counts against the limits on
strangers from its first moment, and both ends name the reason. CPU time of one end to send and to receive 100 MB in
payloads of 4 MiB, on loopback: plaintext 30 ms, this layer 175, uvloop's TLS 165 to 195, blocking sockets in a thread
150 to 195. OpenSSL's records take 105 ms of it: 2.4 GB/s are encrypted and 1.9 GB/s decrypted. Kernel TLS would save
copies, but needs a socket that no event loop reads, and a kernel module that many machines lack.

Invariants: Nothing is sent but TLS. Nothing is delivered before the handshake has verified the peer's certificate, and,
if this end dialed, that it is valid for the dialed host. Of a connection that is paused, at most one read of encrypted
data is held.

Python cannot ask OpenSSL for a new key, so one key encrypts a connection for its whole life. RFC 8446 (5.5) advises a
new one after 2^24.5 records, 400 GB, where an attacker's advantage against AES-GCM is 2^-57. It grows with the square
of the data: 2^-44 after 40 TB.

An end without TLS's own farewell (close_notify) is an end like any other. Frames state their lengths, so a frame that
is cut short is never delivered.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Any, Final, cast

from psdist.errors import ClosedError, TcpUnavailableError
from psdist.security.roles import is_service_name, service_host
from psdist.wire import limits

#: Encrypted bytes per read, and plaintext bytes encrypted at a time. What stays in the processor's cache is copied four
#: times as fast: OpenSSL's buffers cost two copies in each direction.
_PIECE_BYTES: Final = 64 << 10
#: Fatal alert "unexpected message": OpenSSL tells nothing to a peer that does not use TLS, which would learn no reason.
_ALERT: Final = bytes((0x15, 3, 3, 0, 2, 2, 10))


CLOSED: Final = (
    "the peer closed the connection during the TLS handshake: it may have no TLS files. Give all processes of the run "
    "--tls-ca, --tls-cert and --tls-key"
)
#: For the end without TLS files.
UNEXPECTED: Final = (
    "the peer uses TLS, and this process does not: give all processes of the run --tls-ca, --tls-cert and --tls-key"
)
_NOT_TLS: Final = "the peer does not use TLS: give all processes of the run --tls-ca, --tls-cert and --tls-key"
_NOT_TRUSTED: Final = "give all processes of the run the same CA (--tls-ca) and certificates that it issued"
_ISSUE: Final = "issue another ('psdist certs issue')"

#: OpenSSL's reasons why a certificate is refused (X509_V_ERR).
_REFUSED: Final = {
    9: "the peer's certificate is not valid yet: correct the clock of either machine",
    10: f"the peer's certificate has expired: {_ISSUE}",
    18: f"the peer's certificate is self-signed: {_NOT_TRUSTED}",
    19: f"the peer's certificate is of a CA that this process does not trust: {_NOT_TRUSTED}",
    20: f"the peer's certificate is of a CA that this process does not trust: {_NOT_TRUSTED}",
    62: "the peer's certificate is not valid for {host}: issue it with --host {host} ('psdist certs issue')",
    64: "the peer's certificate is not valid for {host}: issue it with --host {host} ('psdist certs issue')",
}
_NO_SERVICE: Final = (
    "the peer's certificate is not one of a scheduler or server at {host}: issue it with --role server --host {host} "
    "('psdist certs issue'), and give workers certificates of their own role"
)
_WRONG_NAME: Final = 62
#: OpenSSL's reasons if the peer does not speak TLS.
_FOREIGN: Final = frozenset(
    (
        "WRONG_VERSION_NUMBER",
        "PACKET_LENGTH_TOO_LONG",
        "UNKNOWN_PROTOCOL",
        "HTTP_REQUEST",
        "HTTPS_PROXY_REQUEST",
        "BAD_RECORD_TYPE",
    )
)
#: Other reasons of handshakes, by OpenSSL's name. An alert is the peer's word on this end.
_FAILED: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer showed no certificate: give it --tls-cert and --tls-key",
    "UNSUPPORTED_PROTOCOL": "the peer does not support TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the peer does not support TLS 1.3",
    "TLSV1_ALERT_UNKNOWN_CA": f"the peer does not trust the CA of this process's certificate: {_NOT_TRUSTED}",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": f"the peer refused this process's certificate as expired: {_ISSUE}",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the peer refused this process's certificate: it may not be valid now, or not for "
    f"the dialed host: {_ISSUE}",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the peer demands a certificate: set --tls-cert and --tls-key",
}


class TlsLayer(asyncio.BufferedProtocol, asyncio.Transport):
    """TLS of one connection.

    inner: receives the decrypted bytes. Its ``connection_made`` is called once TCP is connected. It must not send
        before ``secured``. A PsdistError that ended the connection is the argument of its ``connection_lost``.
    host: the dialed host, or the service name of it, for which the peer's certificate must be valid; None if this end
        accepts.
    """

    def __init__(self, inner: asyncio.BufferedProtocol, context: ssl.SSLContext, host: str | None) -> None:
        self._inner = inner
        self._host = host
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=host is None, server_hostname=host)
        self._encrypted = memoryview(bytearray(_PIECE_BYTES))
        self._transport: asyncio.Transport | None = None
        self._is_secure = self._has_received = self._is_paused = self._is_closed = False
        self._over = asyncio.Event()

    async def secured(self) -> None:
        """Wait until the handshake is complete, or the connection has ended."""
        await self._over.wait()

    # --- callbacks of the event loop's transport ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._inner.connection_made(self)
        self._advance()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._encrypted

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(self._encrypted[:nbytes])
        self._advance()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._host is not None and not self._is_secure:
            exc = TcpUnavailableError(CLOSED)
        self._lose(exc)

    # --- transport of the inner protocol ------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        *heads, last = list_of_data
        try:
            if heads:
                self._tls.write(b"".join(heads))  # One record for all of them.
            rest = memoryview(last).cast("B")
            while rest.nbytes:
                rest = rest[self._tls.write(rest[:_PIECE_BYTES]) :]
                self._flush()
        except ssl.SSLError as error:
            self._fail(error)

    def get_write_buffer_size(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        self._is_paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if self._transport is not None:
            self._transport.resume_reading()
            asyncio.get_running_loop().call_soon(self._advance)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peercert":
            return self._tls.getpeercert()
        return default if self._transport is None else self._transport.get_extra_info(name, default)

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self._is_closed:
            self._lose(None)
            assert self._transport is not None
            self._transport.abort()

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Process the bytes received: continue the handshake, then deliver what can be decrypted."""
        try:
            if not self._is_secure and not self._is_closed:
                self._tls.do_handshake()
                self._is_secure = True
                self._over.set()
            while not self._is_paused and not self._is_closed:
                buffer = memoryview(self._inner.get_buffer(-1))
                if not (count := self._read(buffer)):  # The farewell.
                    self.abort()
                    return
                self._has_received = True
                self._inner.buffer_updated(count)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._fail(error)
        self._flush()

    def _read(self, buffer: memoryview) -> int:
        """Decrypt into ``buffer``. Return the number of bytes, or 0 at the peer's farewell."""
        return cast(int, self._tls.read(buffer.nbytes, buffer))  # ``bytes`` only without a buffer

    def _flush(self) -> None:
        if self._outgoing.pending and not self._is_closed and self._transport is not None:
            self._transport.write(self._outgoing.read())

    def _fail(self, error: ssl.SSLError) -> None:
        """End the connection. An alert that names the reason goes to the peer, if it reads that soon."""
        if self._is_closed:
            return
        assert self._transport is not None
        if self._has_received:
            self._transport.abort()  # The queue may be long.
            self._lose(ClosedError(f"TLS failed on the connection: {error.reason or error}"))
            return
        self._flush()
        if is_foreign(error):
            self._transport.write(_ALERT)
        self._transport.close()
        asyncio.get_running_loop().call_later(limits.ALERT_SECONDS, self._transport.abort)
        self._lose(TcpUnavailableError(explain(error, self._host)))

    def _lose(self, error: Exception | None) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._over.set()
            self._inner.connection_lost(error)


# --- reasons ----------------------------------------------------------------------------------------------------------


def explain(error: ssl.SSLError, host: str | None) -> str:
    """Return the reason for a failed handshake.

    host: the dialed host or the service name of it; None if this end accepted.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _WRONG_NAME and is_service_name(host or ""):
            return _NO_SERVICE.format(host=service_host(host or ""))
        reason = _REFUSED.get(error.verify_code, f"the peer's certificate was refused: {error.verify_message}")
        return reason.format(host=host)
    if is_foreign(error):
        return _NOT_TLS
    return _FAILED.get(error.reason, f"the TLS handshake failed: {error.reason or error}")


def is_foreign(error: ssl.SSLError) -> bool:
    """True if the peer sent something that is not TLS."""
    return error.reason in _FOREIGN


def is_tls(opening: bytes) -> bool:
    """True if a connection that begins with these bytes uses TLS: a record with a handshake or an alert."""
    return opening[:1] in (b"\x15", b"\x16") and opening[1:2] == b"\x03" and b"\x01" <= opening[2:3] <= b"\x04"
