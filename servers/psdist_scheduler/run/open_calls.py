"""Calls and sessions in progress: their numbers, their queued messages, and the map that they get.

Most sessions have the same earlier map, so a map is serialized once in each form, whole and as changes since earlier
maps, and shared. That is done when the first session is sent it: a map that a newer one replaced in all outboxes costs
nothing.

Invariant: The event of a call's end is posted once the call is over, whatever ended it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import count
from typing import Generic, TypeAlias, TypeVar

from psdist.errors import ClosedError, LimitExceededError, PsdistError
from psdist.map_difference import difference
from psdist.types import ClusterMap
from psdist.v1 import common_pb2
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert
from psdist.wire.limits import UNREAD_MAX
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.run import conversions


class PublishedMap:
    """The map of one epoch."""

    def __init__(self, cluster: ClusterMap) -> None:
        self.cluster = cluster
        self._since: dict[int, bytes] = {}

    @cached_property
    def message(self) -> common_pb2.ClusterMap:
        """The map as a message."""
        return convert.map_to_proto(self.cluster)

    @cached_property
    def whole(self) -> bytes:
        """A serialized ``SessionResponse`` with the whole map."""
        return _pack(pb.SessionResponse(map=self.message))

    def since(self, before: ClusterMap) -> bytes:
        """Return a serialized ``SessionResponse`` with the changes for a session that has the map ``before``."""
        if before.epoch not in self._since:
            change = convert.difference_to_proto(difference(before, self.cluster))
            self._since[before.epoch] = _pack(pb.SessionResponse(map_difference=change))
        return self._since[before.epoch]


def _pack(response: pb.SessionResponse) -> bytes:
    return response.SerializeToString(deterministic=True)


T = TypeVar("T")
#: Message for a session. A map is sent whole or as its changes.
SessionMessage: TypeAlias = pb.SessionResponse | PublishedMap


class Outbox(Generic[T]):
    """Queued messages of one call, in order. Iterate to take them until the outbox is closed.

    One task takes messages; others put them without waiting. A put with a ``kind`` replaces the last message if that
    one has the same kind and was not taken yet: only the newest map, or reason to wait, counts. No message overtakes
    another. So a peer that reads a command has read the map that the command is based on, and no news of a loss comes
    after the map in which the lost member is back. The queue is bounded, belongs to one asyncio loop, and is not
    thread-safe.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[str, T]] = deque()
        self._closed = False
        self._error: PsdistError | None = None
        self._changed = asyncio.Event()

    def put(self, message: T, kind: str = "") -> None:
        """Add a message. If the peer does not read them, the call ends with LimitExceededError."""
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
        """End the call after its queued messages, with ``error`` if there is one. The first close counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._changed.set()

    def end(self) -> None:
        """End the call after the message that was taken last."""
        self._queue.clear()
        self.close()

    async def take(self) -> T:
        """Return the next message. Raises the closing error, or ClosedError if there is none."""
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


class OpenCalls:
    """All calls and sessions of one scheduler, and the map that was published last.

    post: passes an event to the machine.
    """

    def __init__(self, post: Callable[[ev.Event], None]) -> None:
        self._post = post
        #: The map that was published last.
        self.published = PublishedMap(ClusterMap("", 0))
        self._calls: dict[int, Outbox[ef.Value]] = {}
        self._sessions: dict[int, Outbox[SessionMessage]] = {}
        self._attached: set[int] = set()
        self._numbers = count(1)

    def call(self) -> AbstractContextManager[tuple[int, Outbox[ef.Value]]]:
        """Return number and outbox of a new call. Its end is posted when the block is left."""
        return self._open(self._calls, lambda number, refused: ev.CallEnded(number, refused=refused))

    def session(self) -> AbstractContextManager[tuple[int, Outbox[SessionMessage]]]:
        """Return number and outbox of a new session. Its end is posted when the block is left."""
        return self._open(self._sessions, lambda number, _: ev.SessionClosed(number, "its session broke"))

    def is_open(self, number: int) -> bool:
        """True until the block of a call is left."""
        return number in self._calls

    @property
    def map(self) -> common_pb2.ClusterMap:
        """The map that was published last, for answers."""
        return self.published.message

    @contextmanager
    def _open(
        self, opened: dict[int, Outbox[T]], ended: Callable[[int, bool], ev.Event]
    ) -> Iterator[tuple[int, Outbox[T]]]:
        """Open a call. ended: returns the event of its end, by its number and whether it was refused."""
        number, refused = next(self._numbers), False
        outbox = opened[number] = Outbox()
        try:
            yield number, outbox
        except PsdistError:
            refused = True
            raise
        finally:
            del opened[number]
            self._attached.discard(number)
            self._post(ended(number, refused))

    def carry_out(self, effect: ef.Effect) -> None:
        """Send an effect to its calls and sessions. Those that are over get nothing."""
        match effect:
            case ef.Publish(cluster):
                self.published = PublishedMap(cluster)
                self._broadcast(self.published, "map")
            case ef.Attach(number) if number in self._sessions:
                self._attached.add(number)
                self._sessions[number].put(self.published, "map")
            case ef.Broadcast(news):
                self._broadcast(conversions.command(news))
            case ef.Answer(number, value) if number in self._calls:
                self._calls[number].put(value, "waiting" if isinstance(value, ef.Waiting) else "")
            case ef.Answer(number, value) if number in self._sessions:
                self._sessions[number].put(conversions.command(value))
            case ef.Refuse(number, error):
                for outbox in (self._calls.get(number), self._sessions.get(number)):
                    if outbox is not None:
                        outbox.close(error)
            case ef.Close(number) if number in self._sessions:
                self._sessions[number].close()

    def _broadcast(self, message: SessionMessage, kind: str = "") -> None:
        for number in sorted(self._attached):
            self._sessions[number].put(message, kind)
