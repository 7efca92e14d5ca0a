"""A probe for container engines: asks the standard gRPC health service of a scheduler or a server whether it serves.

``python -m psdist.cli.health HOST:PORT [SECONDS] [SERVICE]`` exits with 0 if it does, with 69 if it does not or nobody
answers in time (3 s). SERVICE is psdist.live (restart the process if not), psdist.ready (it is in use), or omitted (it
accepts calls). It needs no token and prints one line. With TLS it shows a certificate: ``--tls-ca``, ``--tls-cert`` and
``--tls-key``, or their variables. The synchronous grpc is enough for one call and starts faster than a loop.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from psdist.addresses import parse_address
from psdist.errors import ConfigurationError
from psdist.security.tls import Credentials, TlsFiles, explain
from psdist.settings import exit_codes
from psdist.settings.config import TLS_VARIABLES, make_tls

if TYPE_CHECKING:
    import grpc

TIMEOUT_SECONDS: Final = 3.0


def probe(
    address: str, timeout_seconds: float = TIMEOUT_SECONDS, service: str = "", tls: TlsFiles | None = None
) -> str:
    """Return ``SERVING``, another state's name, or why ``address`` (host:port) did not answer.

    service: the name that the health service is asked for; empty for the process.
    tls: identity to show; None for plaintext.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with _open_channel(address, tls) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_seconds, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return f"no health service is named {service!r}: use psdist.live or psdist.ready"
            cause = asyncio.run(explain(address, Credentials(tls=tls)))
            reason = error.code().name if cause is None else cause.message
            return f"no answer within {timeout_seconds:g} s: {reason}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def _open_channel(address: str, tls: TlsFiles | None) -> grpc.Channel:
    import grpc

    # Probe the process that listens here, never a proxy that a variable names.
    options = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    identity = tls.identity()
    checked = [*options, *identity.channel_options(parse_address(address)[0])]
    return grpc.secure_channel(address, identity.channel_credentials(), options=checked)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m psdist.cli.health",
        "python -m psdist.cli.health HOST:PORT [SECONDS] [SERVICE] [--tls-ca FILE --tls-cert FILE --tls-key FILE]",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("seconds", metavar="SECONDS", type=float, nargs="?", default=TIMEOUT_SECONDS)
    parser.add_argument("service", metavar="SERVICE", nargs="?", default="")
    for name, variable in zip(("--tls-ca", "--tls-cert", "--tls-key"), TLS_VARIABLES, strict=True):
        parser.add_argument(name, metavar="FILE", default=os.environ.get(variable), help=f"or {variable}")
    return parser


def main(argv: Sequence[str]) -> int:
    """Probe, print, and return the exit status."""
    parser = _parser()
    given = parser.parse_args(argv)  # Ends the program with status 2 if they are wrong.
    try:
        parse_address(given.address)
        tls = make_tls(given.tls_ca, given.tls_cert, given.tls_key)
    except ConfigurationError as error:
        parser.error(str(error))
    state = probe(given.address, given.seconds, given.service, tls)
    print(f"{given.address}: {state}")
    return exit_codes.OK if state == "SERVING" else exit_codes.UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
