"""Calls and sessions in progress: their numbers and outboxes, and the map that they get.

Invariant: the event of a call's end is posted once the call is over, whatever ended it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from itertools import count
from typing import Any

from psdist.v1 import scheduler_pb2 as pb
from psdist_scheduler import messages
from psdist_scheduler.events import cluster_events as ev
from psdist_scheduler.outbox import Outbox


class OpenCalls:
    """All calls and sessions of one scheduler. ``post`` gives its machine an event."""

    def __init__(self, post: Callable[[ev.Event], None]) -> None:
        self._post = post
        self.maps = messages.MapCache()
        self._calls: dict[int, Outbox[ev.Value]] = {}
        self._sessions: dict[int, Outbox[pb.SessionResponse]] = {}
        self._attached: set[int] = set()
        self._numbers = count(1)

    @contextmanager
    def call(self) -> Any:
        """Number and outbox of a new call; its end is posted when the block is left."""
        number = next(self._numbers)
        outbox = self._calls[number] = Outbox()
        try:
            yield number, outbox
        finally:
            del self._calls[number]
            self._post(ev.CallEnded(number))

    @contextmanager
    def session(self) -> Any:
        """Number and outbox of a new session; its end is posted when the block is left."""
        number = next(self._numbers)
        outbox = self._sessions[number] = Outbox()
        try:
            yield number, outbox
        finally:
            del self._sessions[number]
            self._attached.discard(number)
            self._post(ev.SessionClosed(number, "its session broke"))

    def carry_out(self, effect: ev.Effect) -> None:
        """Sends what an effect has for calls and sessions. One that is over gets nothing."""
        match effect:
            case ev.Publish(cluster):
                self.maps.set(cluster)
                self._broadcast(pb.SessionResponse(map=self.maps.message), "map")
            case ev.Attach(number):
                if number in self._sessions:
                    self._attached.add(number)
                    self._sessions[number].put(pb.SessionResponse(map=self.maps.message), "map")
            case ev.Broadcast(news):
                self._broadcast(messages.command(news))
            case ev.Answer(number, value):
                if number in self._calls:
                    self._calls[number].put(value, "waiting" if isinstance(value, ev.Waiting) else "")
                elif number in self._sessions:
                    self._sessions[number].put(messages.command(value))
            case ev.Refuse(number, error):
                for outbox in (self._calls.get(number), self._sessions.get(number)):
                    if outbox is not None:
                        outbox.close(error)
            case ev.Close(number):
                if number in self._sessions:
                    self._sessions[number].close()

    def _broadcast(self, message: pb.SessionResponse, kind: str = "") -> None:
        for number in sorted(self._attached):
            self._sessions[number].put(message, kind)
