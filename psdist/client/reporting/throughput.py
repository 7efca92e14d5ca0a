"""Training speed of this worker: its pushes, and the time its script waited, over the last seconds.

Heartbeats carry both, so ``psdist status`` shows steps per second and each worker's share of waiting. The others wait
for the worker with a small share.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from psdist.v1 import scheduler_pb2 as pb

#: Length of the measured window.
_WINDOW_SECONDS: Final = 10.0


class _Sample(NamedTuple):
    """Counters at one time of the clock."""

    time: float
    waited: float
    pushes: Counter[str]


class Throughput:
    """Counter of the pushes and waits of one client. clock: seconds, monotonic; by default the loop's."""

    def __init__(self, clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()) -> None:
        self._clock = clock
        #: Answered pushes by parameter set.
        self.pushes: Counter[str] = Counter()
        #: Of the last push: the largest over its slices, in versions.
        self.staleness = 0
        #: Called with the staleness of each push that ended.
        self.on_push: Callable[[int], None] | None = None
        #: Seconds of finished waits, number of waits under way, and start of the first of these.
        self._waited = 0.0
        self._open = 0
        self._since = 0.0
        self._samples: deque[_Sample] = deque()

    def push_ended(self, parameters: str, staleness: int = 0) -> None:
        """Count an answered push. staleness: the largest over its slices, in versions."""
        self.pushes[parameters] += 1
        self.staleness = staleness
        if self.on_push is not None:
            self.on_push(staleness)

    def wait_began(self) -> None:
        """Start a wait of the script. Concurrent waits of several threads count once."""
        if not self._open:
            self._since = self._clock()
        self._open += 1

    def wait_ended(self) -> None:
        """End a wait."""
        self._open -= 1
        if not self._open:
            self._waited += self._clock() - self._since

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a ``with`` block that counts as a wait."""
        self.wait_began()
        try:
            yield
        finally:
            self.wait_ended()

    def rates(self) -> pb.WorkerRates | None:
        """Return pushes and waits since the oldest call of this method within the window; None at the first call."""
        now = self._clock()
        current = _Sample(now, self._waited + (now - self._since if self._open else 0.0), self.pushes.copy())
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
