"""Calls to a scheduler that cannot be reached."""

from __future__ import annotations

import socket

import grpc
import pytest

from psdist.security.tls import Credentials
from psdist.v1 import scheduler_pb2
from psdist.wire.scheduler_client import scheduler_at


@pytest.mark.parametrize(
    ("wait_for_ready", "timeout", "code"),
    [(False, 60.0, grpc.StatusCode.UNAVAILABLE), (True, 0.3, grpc.StatusCode.DEADLINE_EXCEEDED)],
)
async def test_failed_attempts_to_connect_end_only_calls_that_do_not_wait(
    wait_for_ready: bool, timeout: float, code: grpc.StatusCode
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with scheduler_at(f"127.0.0.1:{unused.getsockname()[1]}", Credentials("token")) as call:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call("GetStatus", scheduler_pb2.GetStatusRequest(), timeout, wait_for_ready=wait_for_ready)
    assert raised.value.code() is code
