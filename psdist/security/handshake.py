"""The reason that TLS with a peer fails, found by a handshake of our own.

gRPC reports a refused certificate, or plaintext to a TLS port, as "Socket closed". After a failed connection,
``explain`` makes one connection as gRPC does. A gRPC server that refuses a certificate closes the connection without an
alert, so the error lists the possible reasons.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Final

from psdist import addresses
from psdist.errors import TlsHandshakeError
from psdist.security.roles import service_name
from psdist.security.tls import Credentials, TlsFiles, utc

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
