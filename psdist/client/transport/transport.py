"""The interface of a transport, and the choice of the transport that carries a request to a server.

A handle has its transports in the order of preference. Before each call the missing ones are prepared, which may take a
negotiation with servers. A request then uses the first transport that is open to its server. gRPC is last, and always
open. It alone carries weights that the script wrote, beside the gradients of their slices.

Not here: retries and routes (``delivery``).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from psdist.client.core.routing import Route
from psdist.client.session.wait_tracker import Wait
from psdist.client.transport.requests import PushRequest, Request
from psdist.errors import ClosedError, PsdistError, ServerUnreachableError

#: Receives the error that ends attempts on a server.
ServerLoss = asyncio.Future[PsdistError]


def attempt_error(error: PsdistError) -> PsdistError:
    """Return a peer's error as ``Transport.exchange`` raises it: a closing peer counts as unreachable."""
    return ServerUnreachableError(error.message) if isinstance(error, ClosedError) else error


class Transport(ABC):
    """Carries requests of one handle to servers. It is always open, unless a transport overrides that."""

    #: As ``Statistics.transports`` and ``psdist status`` show it.
    name: str

    def is_open(self, route: Route) -> bool:
        """Return True if it can carry a request to the route's server now."""
        return True

    def is_missing(self, route: Route) -> bool:
        """Return True if ``prepare`` would try to open it to the route's server."""
        return False

    async def prepare(self, routes: Sequence[Route]) -> None:  # noqa: B027 - most need no preparation
        """Open it to the servers of ``routes`` if it is missing. Raises SharingUnavailableError or TcpUnavailableError
        if the user requires it and it cannot be opened."""

    def why_closed(self, server_id: str) -> str:
        """Return why it is not used to a server; empty if it is open."""
        return ""

    @abstractmethod
    async def exchange(self, request: Request, route: Route, wait: Wait, loss: ServerLoss) -> None:
        """Make one attempt to get the unanswered slices of ``route`` answered.

        wait: receives the server's reasons for not answering yet.
        loss: loss of the server, which ends the attempt.

        Raises StaleEpochError, StaleEstimateError and ServerUnreachableError if another attempt may succeed, and the
        server's refusal; then some slices may be answered.
        """


class Transports:
    """Transports of one handle, the preferred one first. The last is always open."""

    def __init__(self, *transports: Transport) -> None:
        self._transports = transports

    def choose(self, route: Route, request: Request) -> Transport:
        """Return the transport that carries ``request`` to the route's server now."""
        if isinstance(request, PushRequest) and request.needs_messages(route.slices):
            return self._transports[-1]
        return next(transport for transport in self._transports if transport.is_open(route))

    def is_missing(self, routes: Sequence[Route]) -> bool:
        """Return True if ``prepare`` has anything to do. Call it before each call."""
        return any(self._is_missing(route) for route in routes)

    def _is_missing(self, route: Route) -> bool:
        for transport in self._transports:
            if transport.is_open(route):
                return False
            if transport.is_missing(route):
                return True
        return False

    async def prepare(self, routes: Sequence[Route]) -> None:
        """Open the transports to the servers of ``routes`` that were not tried yet, or broke, unless a preferred one is
        open."""
        for transport in self._transports:
            if not routes:
                return
            await transport.prepare(routes)
            routes = [route for route in routes if not transport.is_open(route)]

    def statuses(self, servers: Iterable[str]) -> dict[str, str]:
        """Return, by server, the transport in use, and why those before it are not: "shm", "grpc: too old a kernel"."""
        return {server_id: self._status(server_id) for server_id in servers}

    def _status(self, server_id: str) -> str:
        reasons: list[tuple[str, str]] = []
        for transport in self._transports:
            if not (reason := transport.why_closed(server_id)):
                break
            reasons.append((transport.name, reason))
        if len(reasons) > 1:
            return f"{transport.name}: {'; '.join(f'no {name}: {reason}' for name, reason in reasons)}"
        return f"{transport.name}: {reasons[0][1]}" if reasons else transport.name
