"""The health service answers all of its methods, and malformed requests leave no traceback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from psdist.errors import InvalidArgumentError
from psdist.security.tls import Credentials
from psdist.v1 import scheduler_pb2
from psdist.wire import status
from psdist.wire.services import LIVE, READY, add_standard_services
from tests.support.channels import serving

SERVICE = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]


@asynccontextmanager
async def served(*, reflects: bool = False) -> AsyncIterator[grpc.aio.Channel]:
    """Serve the standard services. Yields a channel to them."""
    async with (
        serving(Credentials(), lambda server: add_standard_services(server, SERVICE, reflects=reflects)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield channel


async def test_list_names_every_status() -> None:
    async with served() as channel:
        found = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest(), timeout=60)
    serving_now, idle = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    statuses = {name: one.status for name, one in found.statuses.items()}
    assert statuses == {"": serving_now, SERVICE.full_name: serving_now, LIVE: serving_now, READY: idle}


@pytest.mark.parametrize(
    "path",
    [
        *(f"/grpc.health.v1.Health/{method}" for method in ("Check", "Watch", "List")),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_a_malformed_request_is_refused_without_a_log_line(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async with served(reflects=True) as channel:
        call = channel.unary_stream(path)(b"\xff\xff\xff", timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert isinstance(status.from_call(caught.value, "the server"), InvalidArgumentError)
    assert not caplog.records
