"""Credentials of a process, for its connections in both directions. Nothing here needs gRPC."""

from __future__ import annotations

from dataclasses import dataclass, field

from psdist import addresses
from psdist.errors import InsecureBindError, InsecureConnectError
from psdist.security.tls import TlsFiles


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
