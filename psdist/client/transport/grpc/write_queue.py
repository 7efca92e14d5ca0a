"""Write order of concurrent calls to one server: the call with the lowest next slice writes first.

Concurrent calls are the buckets of one step, and the forward pass needs low slices first. Without an order their
streams would share the connection evenly, and the first slices would arrive last.

The order is a preference, not a lock. A server stops reading a stream whose slices wait for other workers, and those
may wait for data queued behind it here. A turn longer than ``PATIENCE_SECONDS`` therefore lets the next one start.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Final

#: Writing a slice that the server reads takes less, unless the network is slow; then two are written concurrently.
PATIENCE_SECONDS: Final = 0.02
_BEING_CHOSEN: Final = -1


class WriteQueue:
    """Turns of the writers to one server. For one event loop."""

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
