"""Reasons for which TLS connections fail, each with its remedy."""

from __future__ import annotations

import ssl
from typing import Final

from psdist.security.roles import is_service_name, service_host

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
