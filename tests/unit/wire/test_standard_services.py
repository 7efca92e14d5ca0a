"""The health service answers all of its methods."""

from __future__ import annotations

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from psdist.security.credentials import Credentials
from psdist.v1 import scheduler_pb2
from psdist.wire import channels
from psdist.wire.standard_services import LIVE, READY, add_standard_services

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_list_names_every_status() -> None:
    service = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
    server = channels.make_server(Credentials())
    await add_standard_services(server, service, reflects=False)
    port = channels.bind(server, "127.0.0.1", 0, Credentials())
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            found = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest(), timeout=60)
        serving, idle = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        statuses = {name: one.status for name, one in found.statuses.items()}
        assert statuses == {"": serving, service.full_name: serving, LIVE: serving, READY: idle}
    finally:
        await server.stop(None)
