"""A probe for container engines: asks the standard gRPC health service of a scheduler or a server whether it serves.

``python -m psdist.cli.health HOST:PORT [SECONDS] [SERVICE]`` exits with 0 if it does, with 69 if it does not or nobody
answers in time (3 s). SERVICE is psdist.live (restart the process if not), psdist.ready (it is in use), or omitted (it
accepts calls). It needs no token and prints one line. The synchronous grpc is enough for one call and starts faster
than a loop.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from psdist.errors import ConfigurationError
from psdist.settings import exit_codes
from psdist.settings.config import parse_address

TIMEOUT_SECONDS: Final = 3.0
_USAGE: Final = "usage: python -m psdist.cli.health HOST:PORT [SECONDS] [SERVICE]"


def probe(address: str, timeout_seconds: float = TIMEOUT_SECONDS, service: str = "") -> str:
    """Return ``SERVING``, another state's name, or why ``address`` (host:port) did not answer.

    service: the name that the health service is asked for; empty for the process.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    # Probe the process that listens here, never a proxy that a variable names.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_seconds, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return f"no health service is named {service!r}: use psdist.live or psdist.ready"
            return f"no answer within {timeout_seconds:g} s: {error.code().name}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main(argv: Sequence[str]) -> int:
    """Probe, print, and return the exit status."""
    try:
        address, service = argv[0], argv[2] if argv[2:] else ""
        timeout_seconds = float(argv[1]) if argv[1:] else TIMEOUT_SECONDS
        parse_address(address)
    except (IndexError, ValueError, ConfigurationError) as error:
        print(f"{error}; {_USAGE}", file=sys.stderr)
        return exit_codes.USAGE
    state = probe(address, timeout_seconds, service)
    print(f"{address}: {state}")
    return exit_codes.OK if state == "SERVING" else exit_codes.UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
