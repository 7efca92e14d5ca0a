"""Join token: sent in the metadata of every call, and compared in constant time before the server reads the body.

Refused calls are answered by a stream-shaped handler, because gRPC reads and parses the request of a unary handler
before the handler runs. The health check is open to probes without a token; its only answer is "serving". Other methods
of the health service need the token, because they store data for the caller.

Calls that need no token are paced (``backoff``). A stranger who repeats them in a tight loop waits for answers, and
members keep the event loop. Calls with the token are never paced.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

from psdist.errors import LimitExceededError, PsdistError, UnauthenticatedError
from psdist.wire import limits, status
from psdist.wire.backoff import LogPacer, Pacer

KEY: Final = "authorization"
_OPEN_METHOD: Final = "/grpc.health.v1.Health/Check"

logger = logging.getLogger("psdist.auth")


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Return call metadata that carries ``token``, or no metadata if the token is empty."""
    return ((KEY, f"Bearer {token}"),) if token else ()


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Server interceptor that refuses calls without ``token``. An empty ``token`` accepts all calls (loopback only)."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode() if token else b""
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._busy = grpc.stream_stream_rpc_method_handler(_refuse_probe)
        self._refused = Pacer(limits.REFUSALS_PER_SECOND, limits.REFUSALS_BURST, limits.REFUSALS_HELD_MAX)
        self._probes = Pacer(limits.PROBES_PER_SECOND, limits.PROBES_PER_SECOND, limits.PROBES_HELD_MAX)
        self._log = LogPacer(limits.STRANGERS_LOG_SECONDS)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Pass the call to its handler, or answer it with the refusal."""
        if not self._expected:
            return await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata or ()).get(KEY, "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        if hmac.compare_digest(given_bytes, self._expected):
            return await continuation(handler_call_details)
        if handler_call_details.method == _OPEN_METHOD:
            return await continuation(handler_call_details) if await self._may_probe() else self._busy
        return self._refusal

    async def _may_probe(self) -> bool:
        """Wait for the turn of a health check. False if too many are waiting."""
        wait = self._probes.wait_seconds(asyncio.get_running_loop().time())
        if wait:
            await asyncio.sleep(wait)
        return wait is not None

    async def _refuse(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        now = asyncio.get_running_loop().time()
        if count := self._log.note(now):
            logger.warning("refused %d calls without the token of this run, the last from %s", count, context.peer())
        # If the queue is full, refusing immediately is the cheapest answer.
        if wait := self._refused.wait_seconds(now):
            await asyncio.sleep(wait)
        await status.abort(context, _REFUSAL)


async def _refuse_probe(request_iterator: object, context: grpc.aio.ServicerContext) -> None:
    await status.abort(
        context,
        LimitExceededError(
            f"{limits.PROBES_HELD_MAX} health checks without the token of this run are waiting, which is the limit: "
            "probe less often"
        ),
    )


_REFUSAL: Final[PsdistError] = UnauthenticatedError(
    "the token is missing or wrong: set PSDIST_TOKEN (or PSDIST_TOKEN_FILE) to the token of this run"
)
