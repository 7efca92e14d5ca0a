"""The standard services of a gRPC server: health, and reflection.

Reflection lets tools such as grpcurl list and call methods without the proto files. It answers only a caller with the
token, as every method but the health check (``auth``). A process that listens beyond loopback leaves it out: there it
would be one more service to defend, and tools can be given the proto files.

The health service knows four names: ``""`` and the process's own service, which say that it takes calls; ``LIVE``, that
its event loop answers; ``READY``, that it does what it is there for. A scheduler that waits for members is live and not
ready: to end it would not help.
"""

from __future__ import annotations

from typing import Final

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

#: Services of the health check that orchestrators ask for: whether to start a process again, and whether it is in use.
LIVE: Final = "psdist.live"
READY: Final = "psdist.ready"


async def add_standard_services(
    server: grpc.aio.Server, service: ServiceDescriptor, *, reflects: bool
) -> health.aio.HealthServicer:
    """Adds them to a ``server`` of ``service`` that was not started; reflection only if it ``reflects``. Returns the
    health service, by which the process is live, takes calls, and is not ready."""
    probe = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    for name in ("", service.full_name, LIVE):
        await probe.set(name, health_pb2.HealthCheckResponse.SERVING)
    await set_ready(probe, ready=False)
    if reflects:
        names = (service.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    return probe


async def set_ready(probe: health.aio.HealthServicer, *, ready: bool) -> None:
    """Says whether the process is ready."""
    status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
    await probe.set(READY, status)
