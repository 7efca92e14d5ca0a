"""Credentials of a process, for its connections in both directions: the run's token, and a TLS identity.

The identity is the files of a CA, a certificate and its key, with what gRPC and TCP connections need of them.

Both sides of every connection show a certificate. The dialing side also compares the host that it dialed with the names
and addresses (SANs) in the certificate of the other. If it dials a scheduler or server it looks for the host's service
name (``roles.service_name``), which workers' certificates lack. An issuer other than psdist may write no service names.
Its own certificate tells a process whether they exist: one without ``roles.DOMAIN`` leaves them out of account.

The files are read again once they change, so that certificates are replaced without a restart. New connections use the
new identity, and open connections stay open. An operator replaces three files one after the other; until they fit
together, the identity that was read before stays in use. "Fit together" means that a handshake of the process with
itself, in memory, succeeds. So a process never begins to use an identity that all its peers would refuse.

gRPC is imported only by processes that use it.

gRPC reports a refused certificate, or plaintext to a TLS port, as "Socket closed". After a failed connection,
``explain`` finds the reason: it makes one connection as gRPC does. A gRPC server that refuses a certificate closes the
connection without an alert, so the error lists the possible reasons.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

from psdist import addresses
from psdist.errors import ConfigurationError, InsecureBindError, InsecureConnectError, TlsHandshakeError
from psdist.security.roles import DOMAIN, service_name

if TYPE_CHECKING:
    import grpc

FilePath = str | os.PathLike[str]
_Stamp = tuple[tuple[int, int, int] | None, ...]

logger = logging.getLogger("psdist.tls")

#: X509_V_FLAG_NO_CHECK_TIME, which ``ssl`` does not name.
_IGNORE_TIME: Final = 0x200000
#: Messages that pass in each direction until a handshake is over, with room to spare.
_TURNS: Final = 6
#: A certificate that expires within this time is reported.
WARN_SECONDS: Final = 7 * 86400.0
_WARN_AGAIN_SECONDS: Final = 86400.0
_NEW_FILES: Final = "make new ones with 'psdist certs', or see docs/secure.md"


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """Checked content of the files.

    ca, cert, key: PEM texts.
    not_before, not_after: validity of the certificate, in seconds since 1970.
    names: the certificate's SANs, each as (kind, name): ("DNS", "a.example"), ("IP Address", "10.0.0.1"),
        ("URI", "psdist://run/worker").
    server_context, client_context: for the accepting and for the dialing side of a TCP connection.
    web_context: for a port of HTTP, whose readers show a token and no certificate.
    """

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    not_before: float
    not_after: float
    names: tuple[tuple[str, str], ...]
    server_context: ssl.SSLContext = field(repr=False)
    client_context: ssl.SSLContext = field(repr=False)
    web_context: ssl.SSLContext = field(repr=False)

    @property
    def knows_services(self) -> bool:
        """True if peers must show service names."""
        return ("DNS", DOMAIN) in self.names

    def service_name(self, host: str) -> str:
        """Return the name that the certificate of a scheduler or server at ``host`` must have."""
        return service_name(host) if self.knows_services else host

    def has_host(self, host: str) -> bool:
        """True if a process that dials the holder, a scheduler or server, at ``host`` accepts the certificate."""
        wanted = self.service_name(host).lower().removesuffix(".")
        address = addresses.literal(wanted) if wanted != "localhost" else None
        if address is not None:
            return any(kind == "IP Address" and addresses.literal(name) == address for kind, name in self.names)
        matches = (wanted, f"*.{wanted.partition('.')[2]}")
        return any(kind == "DNS" and name.lower() in matches for kind, name in self.names)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials for a gRPC channel."""
        import grpc

        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def channel_options(self, host: str) -> list[tuple[str, str]]:
        """Return the options of a gRPC channel to a scheduler or server at ``host``."""
        return [("grpc.ssl_target_name_override", self.service_name(host))] if self.knows_services else []

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Return the configuration of a gRPC port."""
        import grpc

        return grpc.ssl_server_certificate_configuration([(self.key, self.cert)], self.ca)


@dataclass(slots=True)
class _Cache:
    """The identity that was read last, and the state of the files at that time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    stamp: _Stamp = ()
    identity: TlsIdentity | None = None
    #: Time of the last warning about the certificate's end.
    warned: float = 0.0


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a TLS identity.

    ca: certificates of the CAs that this process trusts: several while a CA is being replaced.
    cert: this process's certificate, followed by intermediate certificates if there are some.
    key: its private key, not encrypted.

    A relative path is made absolute immediately: a script that changes its directory must still find renewed files.
    """

    ca: FilePath
    cert: FilePath
    key: FilePath
    _cache: _Cache = field(default_factory=_Cache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("ca", "cert", "key"):
            object.__setattr__(self, name, os.path.abspath(getattr(self, name)))

    def identity(self) -> TlsIdentity:
        """Return the identity in the files as they are now, or the last valid one while they do not fit together.

        Raises ConfigurationError if they never did: a file is missing or unreadable, the key is not the certificate's,
        the certificate is not of this CA, has expired or is not valid yet.
        """
        cache, stamp = self._cache, self._stamp()
        with cache.lock:
            if cache.identity is None:
                cache.identity, cache.stamp = _load(self), stamp
            elif stamp != cache.stamp:
                cache.stamp = stamp
                try:
                    cache.identity = _load(self)
                    logger.info("read new TLS files (%s): new connections use them", self.cert)
                except ConfigurationError as error:
                    logger.warning("kept the TLS identity in use: %s", error.message)
            return cache.identity

    def not_after(self) -> float:
        """Return the end of the certificate's validity, in seconds since 1970. From a week before it a warning is
        logged, once a day."""
        identity, now = self.identity(), time.time()
        if identity.not_after - now < WARN_SECONDS and now - self._cache.warned >= _WARN_AGAIN_SECONDS:
            self._cache.warned = now
            logger.warning(
                "the TLS certificate %s expires at %s: renew it (psdist certs issue --overwrite), without a restart",
                self.cert, utc(identity.not_after),
            )  # fmt: skip
        return identity.not_after

    def server_context(self) -> ssl.SSLContext:
        """Return the context to accept a TCP connection with. Ask for it again for each connection."""
        return self.identity().server_context

    def client_context(self) -> ssl.SSLContext:
        """Return the context to dial with. ``server_hostname`` must be the dialed host, or the service name of it. Ask
        again for each connection."""
        return self.identity().client_context

    def web_context(self) -> ssl.SSLContext:
        """Return the context of a port of HTTP. Ask for it again for each connection."""
        return self.identity().web_context

    def service_name(self, host: str) -> str:
        """Return the name that the certificate of a scheduler or server at ``host`` must have."""
        return self.identity().service_name(host)

    def require_host(self, host: str) -> None:
        """Raise ConfigurationError if all that dial this process at ``host`` would refuse its certificate."""
        if not self.identity().has_host(host):
            raise ConfigurationError(
                f"the certificate {self.cert} does not name {host}, where others dial this process: pass --advertise "
                f"with a host that it names, or issue another ('psdist certs issue --host {host}')",
                host=host,
            )

    def grpc_context(self) -> ssl.SSLContext:
        """Return a context that dials a gRPC port, for diagnosis."""
        context = _context(self, ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(["h2"])
        return context

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a gRPC port. They follow the files. Raises as ``identity``."""
        import grpc

        last = self.identity()

        def fetch() -> grpc.ServerCertificateConfiguration | None:  # for each connection, on a thread of gRPC
            nonlocal last
            found = self.identity()
            if found is last:
                return None
            last = found
            return found.server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            last.server_configuration(), fetch, require_client_authentication=True
        )

    def _stamp(self) -> _Stamp:
        """Return a value that differs once a file has changed."""
        return tuple(map(_file_stamp, (self.ca, self.cert, self.key)))


def _file_stamp(path: FilePath) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@dataclass(frozen=True, slots=True)
class Credentials:
    """Proof of membership in a run, for both directions.

    token: the run's; empty without one.
    tls: identity for mutual TLS; None for plaintext.
    insecure: True permits plaintext beyond loopback, in both directions.
    """

    token: str = field(default="", repr=False)
    tls: TlsFiles | None = None
    insecure: bool = False

    def certificate_not_after(self) -> float:
        """Return the end of the certificate's validity, in seconds since 1970; 0 without TLS. See ``TlsFiles``."""
        return 0.0 if self.tls is None else self.tls.not_after()

    def require_private(self, host: str, use: str) -> None:
        """Raise InsecureBindError for a host beyond loopback, unless TLS protects it or ``insecure`` permits it.

        use: the beginning of the error: "--host 0.0.0.0 listens".
        """
        if self.tls is None and not self.insecure and not addresses.is_loopback(host):
            raise InsecureBindError(
                f"{use} beyond this machine without encryption: set --tls-ca, --tls-cert and --tls-key (see "
                "docs/secure.md), or bind 127.0.0.1, or pass --insecure on a private network",
                host=host,
            )

    def web_context(self, host: str, use: str) -> Callable[[], ssl.SSLContext] | None:
        """Return the TLS context, for each connection, of a port of HTTP at ``host``: its readers send tokens. None on
        loopback, and where ``insecure`` permits plaintext. Raises InsecureBindError, as ``require_private``."""
        self.require_private(host, use)
        return None if self.tls is None or addresses.is_loopback(host) else self.tls.web_context

    def require_private_route(self, places: str) -> None:
        """Raise InsecureConnectError if the token would be sent to another machine without encryption, unless
        ``insecure`` permits it.

        places: HOST:PORT to dial, several divided by commas; empty if it is not known yet.
        """
        if not places or not self.token or self.tls is not None or self.insecure:
            return
        for place in addresses.split_addresses(places):
            if not addresses.is_loopback(addresses.parse_address(place)[0]):
                raise InsecureConnectError(
                    f"the token would be sent to {place} without encryption: set --tls-ca, --tls-cert and --tls-key "
                    "(see docs/secure.md), or pass --insecure (PSDIST_INSECURE=1) on a private network",
                    address=place,
                )


# --- loading ----------------------------------------------------------------------------------------------------------


def _load(files: TlsFiles) -> TlsIdentity:
    """Read and check the files. Raises ConfigurationError."""
    ca, cert, key = (_read(getattr(files, what), what) for what in ("ca", "cert", "key"))
    shown = _certificate(files)
    not_before, not_after = (ssl.cert_time_to_seconds(shown[end]) for end in ("notBefore", "notAfter"))
    _check_time(files, not_before, not_after)
    server, client = _context(files, ssl.PROTOCOL_TLS_SERVER), _context(files, ssl.PROTOCOL_TLS_CLIENT)
    web = _context(files, ssl.PROTOCOL_TLS_SERVER)
    web.minimum_version, web.verify_mode = ssl.TLSVersion.TLSv1_2, ssl.CERT_NONE
    names = tuple((kind, name) for kind, name in shown.get("subjectAltName", ()))
    return TlsIdentity(ca, cert, key, not_before, not_after, names, server, client, web)


def _read(path: FilePath, what: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigurationError(
            f"the TLS file {path} (--tls-{what}) cannot be read: {error.strerror}. Correct the path or its "
            f"permissions, or {_NEW_FILES}",
            path=path,
        ) from None


def _context(files: TlsFiles, protocol: int) -> ssl.SSLContext:
    """Return a context of one side, which demands a certificate of the other. Raises ConfigurationError."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # Both sides are psdist.
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # No session is ever resumed.
    try:
        context.load_cert_chain(files.cert, files.key, lambda: _refuse_encrypted(files))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            text = f"the TLS key {files.key} is not the key of the certificate {files.cert}: use files made together"
        else:
            text = f"{files.cert} and {files.key} are not a certificate and its key in PEM ({error.reason})"
        raise ConfigurationError(f"{text}, or {_NEW_FILES}") from None
    try:
        context.load_verify_locations(files.ca)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"the TLS file {files.ca} (--tls-ca) is no certificate in PEM ({error.reason}): use the CA's, or "
            f"{_NEW_FILES}"
        ) from None
    return context


def _refuse_encrypted(files: TlsFiles) -> NoReturn:
    raise ConfigurationError(
        f"the TLS key {files.key} is encrypted: store it decrypted, readable by this user alone (mode 0600)"
    )


def _certificate(files: TlsFiles) -> Any:
    """Return the certificate as ``ssl.SSLSocket.getpeercert`` does, after a handshake with itself.

    Raises ConfigurationError if that fails for another reason than time.
    """
    server, client = _context(files, ssl.PROTOCOL_TLS_SERVER), _context(files, ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    for context in (server, client):
        context.verify_flags |= _IGNORE_TIME
    try:
        return _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(
            f"peers would refuse the certificate {files.cert}, which was checked by the CA in {files.ca}: "
            f"{error.verify_message}. The CA must have issued it, for servers and clients alike (extended key usage): "
            f"{_NEW_FILES}"
        ) from None
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"TLS with the certificate {files.cert} fails ({error.reason}): {_NEW_FILES}"
        ) from None


def _shake_hands(server_context: ssl.SSLContext, client_context: ssl.SSLContext) -> Any:
    """Return the server's certificate after a handshake in memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    client = client_context.wrap_bio(to_client, to_server)
    for _ in range(_TURNS):
        for side in (client, server):
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return client.getpeercert()


def _check_time(files: TlsFiles, not_before: float, not_after: float) -> None:
    """Raise ConfigurationError unless the certificate is valid now."""
    now = time.time()
    if now > not_after:
        raise ConfigurationError(
            f"the certificate {files.cert} expired at {utc(not_after)}: issue another ('psdist certs issue')"
        )
    if now < not_before:
        raise ConfigurationError(
            f"the certificate {files.cert} is not valid before {utc(not_before)}, and it is {utc(now)} here: correct "
            "this machine's clock, or issue another"
        )


def utc(seconds: float) -> str:
    """Return seconds since 1970 as text."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


# --- the reason that a handshake fails --------------------------------------------------------------------------------


#: Time for the connection and the handshake.
_SECONDS: Final = 1.0
_FLAGS: Final = "--tls-ca, --tls-cert and --tls-key (PSDIST_TLS_CA, PSDIST_TLS_CERT, PSDIST_TLS_KEY)"
#: X509_V_ERR codes.
_NOT_YET_VALID, _EXPIRED, _WRONG_HOST, _WRONG_IP = 9, 10, 62, 64
#: Reasons of OpenSSL for bytes that are not TLS.
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE")


async def explain(address: str, credentials: Credentials) -> TlsHandshakeError | None:
    """Return the error of TLS with the peer at ``address`` (host:port): of our certificate, of the peer's, or that only
    one side uses TLS. None if the handshake succeeds, nobody answers, or both use plaintext."""
    try:
        async with asyncio.timeout(_SECONDS):
            if credentials.tls is None:
                return await _explain_plaintext(address)
            return await _explain_tls(address, credentials.tls)
    except OSError:  # Nobody listens there, or they do not answer. TimeoutError is an OSError.
        return None


async def raise_cause(places: str, credentials: Credentials) -> None:
    """Raise the TlsHandshakeError of the first of several places (``host:port,host:port``) that has one."""
    for place in addresses.split_addresses(places):
        if (error := await explain(place, credentials)) is not None:
            raise error


async def _explain_plaintext(address: str) -> TlsHandshakeError | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        await _connect(address, context, addresses.parse_address(address)[0])
    except ssl.SSLError:
        return None
    return TlsHandshakeError(f"{address} demands TLS, and this process uses none: set {_FLAGS}", address=address)


async def _explain_tls(address: str, files: TlsFiles) -> TlsHandshakeError | None:
    try:
        name = files.service_name(host := addresses.parse_address(address)[0])
        if await _connect(address, files.grpc_context(), name):
            return None
        reason = _of_refusal(files)
    except ssl.SSLCertVerificationError as error:
        reason = _of_verification(error, host, files)
        if error.verify_code == _WRONG_HOST and name != host and await _is_for(address, host, files):
            reason = _no_service(host)
    except ssl.SSLError as error:
        reason = _of_failure(error)
    return TlsHandshakeError(f"TLS with {address} failed: {reason}", address=address)


async def _is_for(address: str, host: str, files: TlsFiles) -> bool:
    """True if the peer's certificate is valid for its host."""
    try:
        await _connect(address, files.grpc_context(), host)
    except ssl.SSLCertVerificationError:
        return False
    return True


async def _connect(address: str, context: ssl.SSLContext, name: str) -> bool:
    """Connect, and wait for the first bytes of the peer. Returns False if it ends the connection instead. Raises
    OSError, which ssl.SSLError is.

    name: that the peer's certificate must have."""
    host, port = addresses.parse_address(address)
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    try:
        # With TLS 1.3 a client's handshake is over before the peer has checked its certificate.
        return await reader.read(1) != b""
    except ConnectionResetError:
        return False
    finally:
        writer.transport.abort()


def _no_service(host: str) -> str:
    """Return the reason that we refuse a certificate which is valid for its host."""
    return (
        f"its certificate is not one of a scheduler or server at {host}: either a worker listens there, or the "
        f"certificate is of an earlier release and lacks the name {service_name(host)}. Renew it there (psdist certs "
        f"issue --role ROLE --host {host} --overwrite)"
    )


def _of_verification(error: ssl.SSLCertVerificationError, host: str, files: TlsFiles) -> str:
    """Return the reason that we refuse the peer's certificate."""
    if error.verify_code in (_WRONG_HOST, _WRONG_IP):
        return (
            f"its certificate is not for {host}: issue it with --host {host} (psdist certs issue), or dial it under a "
            "name in its certificate"
        )
    if error.verify_code == _EXPIRED:
        return "its certificate, or its CA's, has expired: renew it there (psdist certs issue --overwrite)"
    if error.verify_code == _NOT_YET_VALID:
        return "its certificate is not valid yet: compare the clocks of both machines"
    return (
        f"its certificate is not of a CA in {files.ca} ({error.verify_message}): give both sides the same CA as "
        "--tls-ca"
    )


def _of_refusal(files: TlsFiles) -> str:
    """Return the possible reasons that the peer refuses our certificate."""
    identity = files.identity()
    if time.time() > identity.not_after:
        return f"it refuses {files.cert}, which has expired: renew it (psdist certs issue --overwrite)"
    return (
        f"it refuses {files.cert}. Either the CA of that is not in its --tls-ca: use the same CA on both sides; or its "
        f"clock is wrong: the certificate is valid from {utc(identity.not_before)} to {utc(identity.not_after)}"
    )


def _of_failure(error: ssl.SSLError) -> str:
    """Return the reason that a handshake fails, other than our refusal."""
    reason = error.reason or str(error)
    if reason in _NOT_TLS:
        return f"it uses plaintext: start it with {_FLAGS}, or unset them here"
    return f"the handshake fails ({reason}): compare the certificates of both sides by 'psdist certs show'"
