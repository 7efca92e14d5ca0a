"""An outbox: the messages that one call is still to send. It is bounded, and replaces what is out of date.

One task takes messages; others put them without waiting. A put with a ``kind`` replaces the last message if that is of
the same kind and not taken yet: of maps, and of reasons to wait, only the newest counts. No message overtakes another.
So a peer that reads a command has read the map by which it was made, and no news of a loss comes after the map in which
the lost member is back. It is for one asyncio loop and not thread-safe.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from psdist.errors import ClosedError, LimitExceededError, PsdistError
from psdist.wire.limits import UNREAD_MAX

T = TypeVar("T")


class Outbox(Generic[T]):
    """Messages for one call, in order. Iterate to take them; the iteration ends when the outbox was closed."""

    def __init__(self) -> None:
        self._queue: deque[tuple[str, T]] = deque()
        self._closed = False
        self._error: PsdistError | None = None
        self._changed = asyncio.Event()

    def put(self, message: T, kind: str = "") -> None:
        """Adds a message. One that nobody reads ends the call with LimitExceededError."""
        if self._closed:
            return
        if kind and self._queue and self._queue[-1][0] == kind:
            self._queue.pop()
        if len(self._queue) >= UNREAD_MAX:
            self.close(LimitExceededError(f"{UNREAD_MAX} messages of this call were not read, which is the limit"))
            return
        self._queue.append((kind, message))
        self._changed.set()

    def close(self, error: PsdistError | None = None) -> None:
        """Ends the call after what was put, with ``error`` if there is one. The first close counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._changed.set()

    async def take(self) -> T:
        """The next message, or the closing error. Raises ClosedError if there was none."""
        async for message in self:
            return message
        raise ClosedError("the call was ended")

    def __aiter__(self) -> Outbox[T]:
        return self

    async def __anext__(self) -> T:
        while not self._queue:
            if self._error is not None:
                raise self._error
            if self._closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._queue.popleft()[1]
