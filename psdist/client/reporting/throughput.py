"""How fast this worker trains: its pushes, and the time in which its script waited, over the last seconds.

Heartbeats carry both, so that ``psdist status`` shows steps per second and each worker's share of waiting. A worker
with a small share is one that the others wait for.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from psdist.v1 import scheduler_pb2 as pb

#: The time that the rates are of, in seconds.
_WINDOW_SECONDS: Final = 10.0


class _Sample(NamedTuple):
    """What had been counted at a time of the clock."""

    time: float
    waited: float
    pushes: Counter[str]


class Throughput:
    """Counts the pushes and waits of one client. clock: seconds, monotonic; the loop's where none is given."""

    def __init__(self, clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()) -> None:
        self._clock = clock
        self._pushes: Counter[str] = Counter()
        #: Seconds of the waits that are over, the number of those under way, and when the first of these began.
        self._waited = 0.0
        self._open = 0
        self._since = 0.0
        self._samples: deque[_Sample] = deque()

    def push_ended(self, parameters: str) -> None:
        """A push was answered."""
        self._pushes[parameters] += 1

    def wait_began(self) -> None:
        """The script waits for an answer. Time in which several threads wait counts once."""
        if not self._open:
            self._since = self._clock()
        self._open += 1

    def wait_ended(self) -> None:
        """The wait is over."""
        self._open -= 1
        if not self._open:
            self._waited += self._clock() - self._since

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait, as a ``with`` block."""
        self.wait_began()
        try:
            yield
        finally:
            self.wait_ended()

    def rates(self) -> pb.WorkerRates | None:
        """The pushes and waits since the oldest of the last calls that were made within the window; None for the first
        call."""
        now = self._clock()
        current = _Sample(now, self._waited + (now - self._since if self._open else 0.0), self._pushes.copy())
        while len(self._samples) > 1 and self._samples[0].time < now - _WINDOW_SECONDS:
            self._samples.popleft()
        self._samples.append(current)
        before = self._samples[0]
        if before is current:
            return None
        return pb.WorkerRates(
            seconds=now - before.time,
            waiting_seconds=current.waited - before.waited,
            pushes=current.pushes - before.pushes,
        )
