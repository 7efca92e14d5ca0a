"""Calls to the scheduler by programs that are no members of its run: commands, and what a launcher starts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from psdist.v1 import scheduler_pb2_grpc
from psdist.wire import auth, limits
from psdist.wire.channels import open_channel


@asynccontextmanager
async def scheduler_at(address: str, token: str) -> AsyncIterator[Callable[..., Any]]:
    """Gives ``call(method, request, timeout=None)``, which begins a call that carries ``token``: an awaitable, or a
    stream of answers. Both raise grpc.aio.AioRpcError."""
    metadata = auth.metadata(token)
    async with open_channel(address, limits.CONTROL_MESSAGE_BYTES) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        yield lambda method, request, timeout=None: getattr(stub, method)(request, metadata=metadata, timeout=timeout)


async def last_answer(stream: AsyncIterator[Any], on_answer: Callable[[Any], None]) -> Any:
    """Passes each answer of a stream to ``on_answer``. Returns the last one, None if there was none."""
    last = None
    async for last in stream:
        on_answer(last)
    return last
