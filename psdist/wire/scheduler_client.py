"""Calls to the scheduler by programs outside its run: commands, and processes started by a launcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from psdist.addresses import split_addresses
from psdist.security.tls import Credentials
from psdist.v1 import scheduler_pb2_grpc
from psdist.wire import auth, limits
from psdist.wire.channels import open_channel

#: Time for one of several places to answer.
_ANSWER_SECONDS: Final = 1.0


@asynccontextmanager
async def scheduler_at(address: str, credentials: Credentials) -> AsyncIterator[Callable[..., Any]]:
    """Connect to the scheduler at ``address`` (HOST:PORT; of several the first that answers).

    Yield ``call(method, request, timeout=None, wait_for_ready=False)``, which starts a call with the token and
    returns an awaitable or a stream of answers. Both raise grpc.aio.AioRpcError. A call that waits connects until its
    timeout; otherwise the first failed attempt ends it."""
    metadata = auth.metadata(credentials.token)
    async with open_channel(
        await _answering(address, credentials), credentials, limits.CONTROL_MESSAGE_BYTES
    ) as channel:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(channel)

        def call(method: str, request: Any, timeout: float | None = None, wait_for_ready: bool = False) -> Any:
            start = getattr(stub, method)
            return start(request, metadata=metadata, timeout=timeout, wait_for_ready=wait_for_ready)

        yield call


async def _answering(address: str, credentials: Credentials) -> str:
    """Return the first of several places where a scheduler listens: a standby listens only once it leads. Without one,
    the last."""
    *others, last = split_addresses(address)
    for place in others:
        async with open_channel(place, credentials, limits.CONTROL_MESSAGE_BYTES) as channel:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await channel.channel_ready()
                    return place
    return last


async def last_answer(stream: AsyncIterator[Any], on_answer: Callable[[Any], None]) -> Any:
    """Pass each answer of a stream to ``on_answer``. Return the last one, or None without any."""
    last = None
    async for last in stream:
        on_answer(last)
    return last
