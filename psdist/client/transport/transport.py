"""The interface of a transport, and the order of its writes.

Not here: the choice of the one that carries a request, retries and routes (``delivery``).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Protocol

from psdist.client.core.routing import Route
from psdist.client.session.waits import Wait
from psdist.client.transport.requests import Request
from psdist.errors import ClosedError, PsdistError, ServerUnreachableError

#: Writing a slice that the server reads takes less, unless the network is slow; then two are written concurrently.
PATIENCE_SECONDS: Final = 0.02
_BEING_CHOSEN: Final = -1

#: Receives the error that ends attempts on a server.
ServerLoss = asyncio.Future[PsdistError]


def attempt_error(error: PsdistError) -> PsdistError:
    """Return a peer's error as ``Connection.exchange`` raises it: a closing peer counts as unreachable."""
    return ServerUnreachableError(error.message) if isinstance(error, ClosedError) else error


class Connection(Protocol):
    """Way of requests to one server."""

    async def exchange(self, request: Request, route: Route, wait: Wait, loss: ServerLoss) -> None:
        """Make one attempt to get the unanswered slices of ``route`` answered.

        wait: receives the server's reasons for not answering yet.
        loss: loss of the server, which ends the attempt.

        Raises StaleEpochError, StaleEstimateError and ServerUnreachableError if another attempt may succeed, and the
        server's refusal; then some slices may be answered.
        """


class Transport(ABC):
    """Carries requests of one handle to servers."""

    #: As ``Statistics.transports`` and ``psdist status`` show it.
    name: str

    @abstractmethod
    def connection(self, server: Route, /) -> Connection | None:
        """Return the connection to the server of a route, or None if there is none now."""

    def is_missing(self, route: Route) -> bool:
        """Return True if ``prepare`` would try to connect to the route's server, to which there is no connection."""
        return False

    async def prepare(self, routes: Sequence[Route]) -> None:  # noqa: B027 - gRPC needs no preparation
        """Open missing connections to the servers of ``routes``. Raises SharingUnavailableError or TcpUnavailableError
        if the user requires this transport and that is impossible."""

    def why_closed(self, server_id: str) -> str:
        """Return why it is not used to a server; empty if it is open."""
        return ""


class WriteQueue:
    """Turns of the writers to one server: the call with the lowest next slice writes first. For one event loop.

    Concurrent calls are the buckets of one step, and the forward pass needs low slices first. Without an order their
    streams would share the connection evenly, and the first slices would arrive last.

    The order is a preference, not a lock. A server stops reading a stream whose slices wait for other workers, and
    those may wait for data queued behind it here. A turn longer than ``PATIENCE_SECONDS`` therefore lets the next one
    start.
    """

    def __init__(self) -> None:
        self._order = itertools.count(1)
        #: Number of the turn that others wait for; 0 for none.
        self._current = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, slice_index: int) -> int:
        """Wait until no caller with a lower slice wants to write. Return the number to pass to ``release``."""
        number = next(self._order)
        if not self._current:
            self._current = number
            return number
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (slice_index, number, ready))
        if self._timer is None:
            self._timer = loop.call_later(PATIENCE_SECONDS, self._next)
        try:
            await ready
        except asyncio.CancelledError:
            if not ready.cancelled():  # its turn had just come
                self.release(number)
            raise
        return number

    def release(self, number: int) -> None:
        """End the turn."""
        if number != self._current:
            return
        if self._waiting:
            # Deferred: the releasing caller usually requests its next turn right away, possibly for a lower slice.
            self._current = _BEING_CHOSEN
            asyncio.get_running_loop().call_soon(self._next)
        else:
            self._current = 0

    def _next(self) -> None:
        self._current = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            _, number, ready = heapq.heappop(self._waiting)
            if not ready.done():
                self._current = number
                ready.set_result(None)
                break
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._next)
