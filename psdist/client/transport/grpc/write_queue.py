"""The order in which calls write to one server: the one whose next slice is needed first writes first.

Several calls at once are the buckets of one step, and the forward pass needs low slices first. Without an order their
streams would share the connection evenly, and the first slices would arrive last.

The order is a preference, not a lock. A server stops reading a stream whose slices wait for other workers, and these
may wait for what is queued behind it here. So a turn that lasts longer than ``PATIENCE_SECONDS`` lets the next begin.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Final

#: A slice that the server reads is written in less, unless the network is slow; then two are written at once.
PATIENCE_SECONDS: Final = 0.02
_BEING_CHOSEN: Final = -1


class WriteQueue:
    """The turns of one server. For one event loop."""

    def __init__(self) -> None:
        self._order = itertools.count(1)
        #: Number of the turn that others wait for; 0 while there is none.
        self._current = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, slice_index: int) -> int:
        """Waits until nobody with a lower slice wants to write. Returns what ``release`` wants."""
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
            if not ready.cancelled():  # its turn had come just then
                self.release(number)
            raise
        return number

    def release(self, number: int) -> None:
        """The turn is over."""
        if number != self._current:
            return
        if self._waiting:
            # Not at once: whoever releases wants its next turn right away, and that may be of a lower slice.
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
