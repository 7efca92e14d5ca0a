"""Standard services of a gRPC server: health and reflection.

Reflection lets tools such as grpcurl list and call methods without the proto files. It requires the token, as every
method but the health check does (``auth``). A process that listens beyond loopback does not offer it, to avoid one more
service to defend; tools can use the proto files.

The health service knows four names: ``""`` and the process's own service (it accepts calls), ``LIVE`` (its event loop
answers) and ``READY`` (it does its work). A scheduler that waits for members is live and not ready: restarting it would
not help.
"""

from __future__ import annotations

from typing import Final

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

#: Names of the health check for orchestrators: restart the process unless live, send it work if ready.
LIVE: Final = "psdist.live"
READY: Final = "psdist.ready"


async def add_standard_services(
    server: grpc.aio.Server, service: ServiceDescriptor, *, reflects: bool
) -> health.aio.HealthServicer:
    """Add health and reflection to a ``server`` of ``service`` before it starts. Return the health service, initially
    live, accepting calls, and not ready.

    reflects: offer reflection.
    """
    probe = _Health()
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    for name in ("", service.full_name, LIVE):
        await probe.set(name, health_pb2.HealthCheckResponse.SERVING)
    await set_ready(probe, ready=False)
    if reflects:
        names = (service.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    return probe


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # grpc has no types
    """Health service with all of its methods. grpcio's raises NotImplementedError in ``List``, and logs a traceback."""

    async def List(self, request: health_pb2.HealthListRequest, _: object) -> health_pb2.HealthListResponse:
        """Return the status of every name."""
        statuses = {name: health_pb2.HealthCheckResponse(status=one) for name, one in self._server_status.items()}
        return health_pb2.HealthListResponse(statuses=statuses)


async def set_ready(probe: health.aio.HealthServicer, *, ready: bool) -> None:
    """Publish whether the process is ready."""
    status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
    await probe.set(READY, status)
