"""Standard services of a gRPC server: health and reflection.

Reflection lets tools such as grpcurl list and call methods without the proto files. It requires the token, as every
method but the health check does (``auth``). A process that listens beyond loopback does not offer it, to avoid one more
service to defend; tools can use the proto files.

The health service knows four names: ``""`` and the process's own service (it accepts calls), ``LIVE`` (its event loop
answers) and ``READY`` (it does its work). A scheduler that waits for members is live and not ready: restarting it would
not help.

Requests are parsed as those of psdist's own services: gRPC would print a traceback for each that is malformed, and
anybody may check the health. They are not logged, either.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from psdist.wire import frames
from psdist.wire.rpc_handlers import Handler, service_handler

logger = logging.getLogger("psdist.standard_services")
logger.setLevel(logging.WARNING)

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
    _add(server, health_pb2.DESCRIPTOR, {"Check": probe.Check, "Watch": probe.Watch, "List": probe.List})
    for name in ("", service.full_name, LIVE):
        await probe.set(name, health_pb2.HealthCheckResponse.SERVING)
    await set_ready(probe, ready=False)
    if reflects:
        names = (service.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        _add(server, reflection_pb2.DESCRIPTOR, {"ServerReflectionInfo": _Reflection(names).answers})
    return probe


def _add(server: grpc.aio.Server, file: Any, handlers: Mapping[str, Handler]) -> None:
    """Add the service of a proto file to ``server``."""
    (service,) = file.services_by_name.values()
    server.add_generic_rpc_handlers((service_handler(service, handlers, logger, reads_certificates=False),))


class _Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # grpc has no types
    """Reflection whose requests arrive as bytes."""

    async def answers(self, requests: AsyncIterator[bytes], context: object) -> AsyncIterator[Any]:
        """Yield the answers to a stream of requests."""
        parsed = (frames.parse(reflection_pb2.ServerReflectionRequest, one) async for one in requests)
        async for answer in self.ServerReflectionInfo(parsed, context):
            yield answer


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
