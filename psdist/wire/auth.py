"""The join token: metadata of every call, compared in constant time before the body is read.

A stream-shaped handler answers a refused call, because gRPC reads and parses the request of a unary handler before the
handler runs. The health check is open: probes have no token, and it answers only "serving". The other methods of the
health service are not open, because they keep what the caller sent.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

from psdist.errors import UnauthenticatedError
from psdist.wire import status

KEY: Final = "authorization"
_OPEN_METHOD: Final = "/grpc.health.v1.Health/Check"


def make_token() -> str:
    """A new random token (256 bits)."""
    return secrets.token_urlsafe(32)


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Call metadata that carries ``token``; none where it is empty."""
    return ((KEY, f"Bearer {token}"),) if token else ()


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call whose token is not ``token``. An empty ``token`` lets all calls pass (loopback only)."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode() if token else b""
        self._refusal = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Passes the call on, or answers it with the refusal."""
        if not self._expected or handler_call_details.method == _OPEN_METHOD:
            return await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata or ()).get(KEY, "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        if hmac.compare_digest(given_bytes, self._expected):
            return await continuation(handler_call_details)
        return self._refusal


async def _refuse(request_iterator: object, context: grpc.aio.ServicerContext) -> None:
    await status.abort(
        context,
        UnauthenticatedError(
            "the token is missing or wrong: set PSDIST_TOKEN (or PSDIST_TOKEN_FILE) to the token of this run"
        ),
    )
