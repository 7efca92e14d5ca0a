"""An outbox: what one call is still to be told. Bounded, and able to replace what is out of date.

One task takes, others put without waiting. A put with a ``kind`` replaces what was put with the same kind and is not
taken yet: of maps, and of reasons to wait, only the newest counts. Not thread-safe; made for one asyncio loop.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from psdist.errors import ClosedError, LimitExceededError, PsdistError

#: Messages that a peer may leave unread. Room for news of every member's loss.
UNREAD_MAX = 8192

T = TypeVar("T")


class Outbox(Generic[T]):
    """Messages for one call, in order. Iterate to take them; the iteration ends when the outbox was closed."""

    def __init__(self) -> None:
        self._queue: dict[object, T] = {}
        self._next = 0
        self._closed = False
        self._error: PsdistError | None = None
        self._changed = asyncio.Event()

    def put(self, message: T, kind: str = "") -> None:
        """Adds a message. One that nobody reads ends the call with LimitExceededError."""
        if self._closed:
            return
        if kind:
            self._queue.pop(kind, None)
        if len(self._queue) >= UNREAD_MAX:
            self.close(LimitExceededError(f"{UNREAD_MAX} messages of this call were not read, which is the limit"))
            return
        self._next += 1
        self._queue[kind or self._next] = message
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
        return self._queue.pop(next(iter(self._queue)))
