"""Calls to the scheduler by programs outside its run: commands, and processes started by a launcher."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from psdist.v1 import scheduler_pb2_grpc
from psdist.wire import auth, limits
from psdist.wire.channels import open_channel


@asynccontextmanager
async def scheduler_at(address: str, token: str) -> AsyncIterator[Callable[..., Any]]:
    """Yield ``call(method, request, timeout=None, wait_for_ready=False)``, which starts a call with ``token`` and
    returns an awaitable or a stream of answers. Both raise grpc.aio.AioRpcError. A call that waits connects until its
    timeout; otherwise the first failed attempt ends it."""
    metadata = auth.metadata(token)
    async with open_channel(address, limits.CONTROL_MESSAGE_BYTES) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)

        def call(method: str, request: Any, timeout: float | None = None, wait_for_ready: bool = False) -> Any:
            start = getattr(stub, method)
            return start(request, metadata=metadata, timeout=timeout, wait_for_ready=wait_for_ready)

        yield call


async def last_answer(stream: AsyncIterator[Any], on_answer: Callable[[Any], None]) -> Any:
    """Pass each answer of a stream to ``on_answer``. Return the last one, or None without any."""
    last = None
    async for last in stream:
        on_answer(last)
    return last
