"""What a transport is, and which of them carries a request to a server.

A handle has its transports in the order of preference. Before each call the missing ones are prepared, which may take a
negotiation with servers. A request then goes by the first transport that is open to its server. gRPC is last, and is
always open.

Not here: retries and routes (``delivery``).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from psdist.client.core.routing import Route
from psdist.client.session.wait_tracker import Wait
from psdist.client.transport.requests import Request
from psdist.errors import ClosedError, PsdistError, ServerUnreachableError

#: Gets the error with which attempts on a server end.
Loss = asyncio.Future[PsdistError]


def attempt_error(error: PsdistError) -> PsdistError:
    """The error of a peer, as ``Transport.exchange`` raises it: one that closes is one that cannot be reached."""
    return ServerUnreachableError(error.message) if isinstance(error, ClosedError) else error


class Transport(ABC):
    """A way to carry requests of one handle to servers. It is always open, unless a transport says otherwise."""

    #: As ``Statistics.transports`` and ``psdist status`` show it.
    name: str

    def is_open(self, route: Route) -> bool:
        """Whether a request can be carried to the route's server now."""
        return True

    def is_missing(self, route: Route) -> bool:
        """Whether ``prepare`` would try to open it to the route's server."""
        return False

    async def prepare(self, routes: Sequence[Route]) -> None:  # noqa: B027 - most need no preparation
        """Opens it to the servers of ``routes`` where it is missing. Raises SharingUnavailableError or
        TcpUnavailableError where the user insists on it and it cannot be opened."""

    def why_closed(self, server_id: str) -> str:
        """Why it is not used to a server; empty where it is open."""
        return ""

    @abstractmethod
    async def exchange(self, request: Request, route: Route, wait: Wait, loss: Loss) -> None:
        """One attempt to get the slices of ``route`` answered that are not.

        wait: is given the server's reasons. loss: ends the attempt.
        Raises StaleEpochError, StaleEstimateError and ServerUnreachableError where another attempt may go well, and
        what the server refuses with; then some slices may be answered.
        """


class Transports:
    """The transports of one handle, the preferred one first. The last is always open."""

    def __init__(self, *transports: Transport) -> None:
        self._transports = transports

    def choose(self, route: Route) -> Transport:
        """The one that carries requests to the route's server now."""
        return next(transport for transport in self._transports if transport.is_open(route))

    def is_missing(self, routes: Sequence[Route]) -> bool:
        """Whether ``prepare`` would do anything. Call it before each call."""
        return any(self._is_missing(route) for route in routes)

    def _is_missing(self, route: Route) -> bool:
        for transport in self._transports:
            if transport.is_open(route):
                return False
            if transport.is_missing(route):
                return True
        return False

    async def prepare(self, routes: Sequence[Route]) -> None:
        """Opens the transports to the servers of ``routes`` where that was not tried yet, or they broke, and no
        preferred one is open."""
        for transport in self._transports:
            if not routes:
                return
            await transport.prepare(routes)
            routes = [route for route in routes if not transport.is_open(route)]

    def statuses(self, servers: Iterable[str]) -> dict[str, str]:
        """By server, the transport that is used, and why those before it are not: "shm", "grpc: too old a kernel"."""
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
