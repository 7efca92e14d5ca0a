"""The standard services of a gRPC server: health, and reflection.

Reflection lets tools such as grpcurl list and call methods without the proto files. It answers only a caller with the
token, as every method but the health check (``auth``). A process that listens beyond loopback leaves it out: there it
would be one more service to defend, and tools can be given the proto files.
"""

from __future__ import annotations

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection


async def add_standard_services(
    server: grpc.aio.Server, service: ServiceDescriptor, *, reflects: bool
) -> health.aio.HealthServicer:
    """Adds them to a ``server`` of ``service`` that was not started; reflection only if it ``reflects``. Returns the
    health service, by which both the process and ``service`` are serving."""
    probe = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(probe, server)
    for name in ("", service.full_name):
        await probe.set(name, health_pb2.HealthCheckResponse.SERVING)
    if reflects:
        names = (service.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    return probe
