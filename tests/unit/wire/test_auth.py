"""The token is checked before anything of the call is read, for every kind of call. The health service is open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from psdist import errors
from psdist.security.tls import Credentials
from psdist.v1 import scheduler_pb2, scheduler_pb2_grpc
from psdist.wire import auth, channels, limits, status
from tests.support.channels import serving
from tests.support.client_fakes import FakeScheduler

TOKEN = "token-of-the-test"


@pytest.fixture
async def address() -> AsyncIterator[str]:
    adds = (
        lambda server: scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(FakeScheduler([]), server),
        lambda server: health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server),
    )
    async with serving(Credentials(TOKEN), *adds) as address:
        yield address


async def _register(address: str, metadata: tuple[tuple[str, str], ...]) -> scheduler_pb2.RegisterResponse:
    async with channels.open_channel(address, Credentials()) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return await stub.Register(scheduler_pb2.RegisterRequest(), metadata=metadata)


async def test_the_right_token_passes(address: str) -> None:
    assert (await _register(address, auth.metadata(TOKEN))).member_id == "worker-0"


async def test_others_do_not(address: str) -> None:
    for metadata in [
        (),
        auth.metadata("wrong"),
        auth.metadata(TOKEN + "x"),
        (("authorization", TOKEN),),
        (("authorization", "Bearer "),),
    ]:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await _register(address, metadata)
        error = status.from_call(failure.value, "the scheduler")
        assert type(error) is errors.UnauthenticatedError and "PSDIST_TOKEN" in error.message


async def test_a_body_that_is_no_message_is_not_looked_at(address: str) -> None:
    async with channels.open_channel(address, Credentials()) as channel:
        call = channel.unary_unary("/psdist.v1.SchedulerService/Register")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call(b"\xff" * 1000, metadata=auth.metadata("wrong"))
    assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_needs_no_token(address: str) -> None:
    from grpc_health.v1 import health_pb2

    async with channels.open_channel(address, Credentials()) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert response.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
async def test_no_bind_beyond_loopback_without_insecure(host: str) -> None:
    with pytest.raises(errors.InsecureBindError, match="--insecure"):
        channels.bind(channels.make_server(Credentials(TOKEN)), host, 0, Credentials())


async def test_a_taken_port_is_named(address: str) -> None:
    port = int(address.rpartition(":")[2])
    with pytest.raises(errors.ConfigurationError, match=f"127.0.0.1:{port} cannot be bound"):
        channels.bind(channels.make_server(Credentials(TOKEN)), "127.0.0.1", port, Credentials())


async def test_a_flood_without_the_token_is_held_to_a_rate_and_others_are_not(address: str) -> None:
    """Check strangers in a closed loop: they are answered at the rate of refusals, while members call as often as they
    like."""
    begun = asyncio.get_running_loop().time()
    refused = 0

    async def flood() -> None:
        nonlocal refused
        async with channels.open_channel(address, Credentials()) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            while asyncio.get_running_loop().time() < begun + 1.0:
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.Register(scheduler_pb2.RegisterRequest(), metadata=())
                refused += 1

    floods = [asyncio.create_task(flood()) for _ in range(8)]
    let_in = 0
    while asyncio.get_running_loop().time() < begun + 1.0:
        await _register(address, auth.metadata(TOKEN))
        let_in += 1
    await asyncio.gather(*floods)
    seconds = asyncio.get_running_loop().time() - begun
    assert refused <= limits.REFUSALS_BURST + limits.REFUSALS_PER_SECOND * seconds + len(floods)
    assert let_in > 0


async def test_health_checks_are_paced_and_never_wait_long(address: str) -> None:
    async with channels.open_channel(address, Credentials()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Check(health_pb2.HealthCheckRequest()) for _ in range(400)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        answered = [one for one in outcomes if isinstance(one, health_pb2.HealthCheckResponse)]
        refused = [one for one in outcomes if isinstance(one, grpc.aio.AioRpcError)]
        assert len(answered) >= limits.PROBES_PER_SECOND and len(answered) + len(refused) == len(calls)
        assert all(isinstance(status.from_call(one, "it"), errors.LimitExceededError) for one in refused) and refused
        await stub.Check(health_pb2.HealthCheckRequest(), metadata=auth.metadata(TOKEN))
