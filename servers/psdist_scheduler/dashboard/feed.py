"""Feed of the dashboard: reads the run while somebody looks, and turns it into server-sent events.

Runs on the dashboard's own event loop. Of the scheduler it needs one short call per reading, and readings take at most
``_LOOP_SHARE`` of the time of the scheduler's loop.

Invariants: A reader holds no memory but its place. One that is too slow for a difference gets the whole state next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import msgspec

from psdist.monitoring.run_json import status_json
from psdist.monitoring.run_state import RunState, Tree, difference
from psdist.monitoring.run_summary import Point, RunCurves
from psdist.v1 import scheduler_pb2 as pb

logger = logging.getLogger("psdist.scheduler")

#: Least time between two readings while somebody looks, and the time otherwise: curves are kept from the start.
_INTERVAL_SECONDS: Final = 0.5
_IDLE_SECONDS: Final = 20.0
_LOOP_SHARE: Final = 0.02
#: Share of the time for which this thread prepares readings, while it takes the interpreter from the scheduler's.
_THREAD_SHARE: Final = 0.1


class Reading(NamedTuple):
    """Part of the run that the scheduler's loop reads for the dashboard.

    samples: those after the asked one.
    heartbeat_seconds: between two heartbeats of a member.
    seconds: how long it took.
    curves: those of the whole run, in the first reading.
    """

    status: pb.GetStatusResponse
    samples: list[pb.RunSample]
    heartbeat_seconds: float
    seconds: float
    curves: RunCurves | None = None


#: Returns a reading with the samples after a number. Raises TimeoutError if the scheduler does not answer.
Read = Callable[[int], Awaitable[Reading]]


class Feed:
    """The newest state of the run, with the difference to the one before it."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._run = RunState()
        self._state: Tree = {}
        self._number = 0
        self._time = 0.0
        self._change = b""
        self._whole = b""
        self._answered = 0.0
        self._has_failed = False
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()
        self.readers = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a reader, for whom the run is read."""
        self.readers += 1
        self._wanted.set()
        try:
            yield
        finally:
            self.readers -= 1
            if not self.readers:
                self._wanted.clear()

    async def run(self) -> None:
        """Read the run forever."""
        self._answered = _now()
        while True:
            pause = await self._refresh()
            if self.readers:
                await asyncio.sleep(pause)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wanted.wait(), _IDLE_SECONDS)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the whole state, and then what changes, as server-sent events. The first is a new reading: while
        nobody looked, the state has become old."""
        seen = -1
        await self._changed.wait()
        while True:
            if self._number and seen == self._number - 1:
                yield self._change
            elif self._number:
                yield self._whole_event()
            seen = self._number
            while seen == self._number:
                await self._changed.wait()

    async def _refresh(self) -> float:
        """Read the run once and publish it. Returns the time until the next reading."""
        try:
            reading = await self._read(self._run.last_sample)
            began = _now()
            status = status_json(reading.status)
            points = self._run.add_samples(reading.samples, status, reading.curves)
            state = self._run.state(status, reading.heartbeat_seconds)
        except Exception as error:  # The page keeps its last state.
            if not isinstance(error, TimeoutError) and not self._has_failed:
                self._has_failed = True
                logger.exception("the dashboard cannot show the run (logged once)")
            self._publish({**self._state, "unanswered": round(_now() - self._answered)}, [], self._time)
            return _INTERVAL_SECONDS
        self._answered = _now()
        self._publish(state, points, reading.status.time)
        return max(_INTERVAL_SECONDS, reading.seconds / _LOOP_SHARE, (_now() - began) / _THREAD_SHARE)

    def _publish(self, state: Tree, points: list[Point], time: float) -> None:
        self._number += 1
        patch = difference(self._state, state)
        self._state, self._time, self._whole = state, time, b""
        self._change = _event({"time": round(time, 1), "change": patch, **({"points": points} if points else {})})
        self._changed.set()
        self._changed = asyncio.Event()

    def _whole_event(self) -> bytes:
        if not self._whole:
            recent, whole = list(self._run.recent), self._run.whole.points
            # A run of less than five minutes has one curve.
            curves = {"recent": recent, "whole": whole if len(whole) != len(recent) else []}
            self._whole = _event({"time": round(self._time, 1), "state": self._state, **curves})
        return self._whole


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _now() -> float:
    return asyncio.get_running_loop().time()
