"""A server that ends while its schedulers change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest

from psdist.addresses import free_port
from psdist.security.tls import Credentials
from psdist.v1 import scheduler_pb2 as pb
from psdist_server.server_session import ServerSession


class Drains(grpc.GenericRpcHandler):
    """A scheduler that lets every server go."""

    def service(self, details: Any) -> Any:
        async def drain(request: pb.DrainRequest, context: object) -> AsyncIterator[pb.DrainResponse]:
            yield pb.DrainResponse(drained=True)

        return grpc.unary_stream_rpc_method_handler(
            drain, pb.DrainRequest.FromString, pb.DrainResponse.SerializeToString
        )


async def drained(places: list[str], port: int) -> bool:
    """Let a server drain whose current scheduler is gone. The next one starts at ``port`` after the first attempt.
    Returns True if it was let go."""
    session: Any = ServerSession(",".join(places), Credentials(), "127.0.0.1:1", "server-0", "run", Random(0))
    connection = session.connection
    scheduler = grpc.aio.server()
    scheduler.add_generic_rpc_handlers((Drains(),))
    failed, tried = asyncio.Event(), connection.error

    def error(failure: grpc.aio.AioRpcError) -> Any:
        failed.set()
        return tried(failure)

    # The only place that learns of a failed attempt.
    connection.error = error
    results: list[Any] = []
    once = session._drain_once

    async def drain_once(seconds: float) -> Any:
        results.append(await once(seconds))
        return results[-1]

    session._drain_once = drain_once
    draining = asyncio.create_task(session.drain(60.0))
    await failed.wait()
    scheduler.add_insecure_port(f"127.0.0.1:{port}")
    await scheduler.start()
    await draining
    await connection.close()
    await scheduler.stop(None)
    return results[-1] is None


@pytest.mark.parametrize("standby", [True, False])
async def test_a_server_drains_at_the_scheduler_that_leads_next(standby: bool) -> None:
    ports = [free_port("127.0.0.1") for _ in range(2)]
    places = [f"127.0.0.1:{port}" for port in (ports if standby else ports[:1])]
    assert await drained(places, ports[1]) == standby
