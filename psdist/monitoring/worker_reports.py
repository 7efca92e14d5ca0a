"""Reports of a worker: counts for its heartbeats, and delivery of a script's metrics to trackers and launcher.

Some counts are left out of a heartbeat: a client with 1,024 parameter sets has 2,048, and rarely trains all of
its sets between two heartbeats. A stream loses no message while it lasts, so the scheduler can add the changes to the
counts that it holds.

Reports are collected in intervals, which go to trackers and through a pipe to the launcher.

Invariants: A report costs microseconds, unless it ends an interval. An interval that the launcher's pipe has no room
for is merged into the next one. No failing tracker ends training.
"""

from __future__ import annotations

import atexit
import os
import stat
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from psdist.errors import ClosedError, ConfigurationError, check_integer
from psdist.monitoring.metrics import (
    MEASURED,
    IntervalAccumulator,
    Measurements,
    WorkerInterval,
    check_report,
    last_step,
    summarize,
    to_line,
)
from psdist.monitoring.phase_timer import PhaseTimer
from psdist.monitoring.trackers import Tracker, Trackers
from psdist.v1 import scheduler_pb2 as pb


class ReportedNumbers:
    """Tracker that keeps the script's numbers of the last interval; psdist's own are counted elsewhere."""

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}
        self.step = 0
        #: 0 if the script reports no samples.
        self.samples_per_second = 0.0

    def start(self, run_id: str) -> None: ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.newest = {name: value for name, value in values.items() if name not in MEASURED}
        self.step, self.samples_per_second = step, values.get("samples_per_second", 0.0)

    def close(self) -> None: ...


class ChangedCounts:
    """Counts that one stream of the session has sent. The first heartbeat on a new one is complete, for the same
    scheduler or a restarted one.

    enabled: False for a scheduler that takes whole heartbeats only.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._next: dict[str, int] | None = None
        self._pushes: dict[str, int] = {}

    def drop_unchanged(self, heartbeat: pb.SessionRequest.Heartbeat) -> None:
        """Remove the counts that are as in the last heartbeat. This one must be sent next on the session."""
        if not self._enabled:
            return
        counts, partial = heartbeat.activity.next, heartbeat.activity.partial
        pushes = heartbeat.totals.pushes
        before, self._next = self._next, dict(counts)
        pushes_before, self._pushes = self._pushes, dict(pushes)
        if before is not None:
            heartbeat.changed_only = True
            # Those that are sent in part are named, because the scheduler expects their number in the same message.
            _remove(counts, {name: count for name, count in before.items() if name not in partial})
            _remove(pushes, pushes_before)


def _remove(counts: MutableMapping[str, int], known: dict[str, int]) -> None:
    """Remove the counts that are ``known``."""
    for name in [name for name, count in counts.items() if known.get(name) == count]:
        del counts[name]


_MOST_STEPS = (1 << 62) - 1


@dataclass(frozen=True)
class RunInfo:
    """A worker's place in its run, and the run's members at the moment of the call.

    run_id: name of the run.
    worker_id: this worker's name in the run.
    incarnation: number of registrations under this name, including the current one.
    rank: this worker's number, from 0.
    world_size: workers of the run, as its launcher set it.
    local_rank: this worker's number on its machine, from 0.
    workers: names of the current workers.
    servers: names of the current servers.
    transports: for each open parameter set, how each of its servers is reached: "shm", "tcp" or "grpc".
    backend: "psdist".
    """

    run_id: str
    worker_id: str
    incarnation: int
    rank: int
    world_size: int
    local_rank: int
    workers: tuple[str, ...]
    servers: tuple[str, ...]
    transports: Mapping[str, Mapping[str, str]]
    backend: Literal["psdist"] = "psdist"


class MetricsPipe:
    """Inherited pipe. text: ``DESCRIPTOR:INODE``, as the launcher names it.

    ``is_open`` is False if this process lacks the pipe, for example because a program between launcher and script
    closed it. Raises ConfigurationError for a text of another form.
    """

    def __init__(self, text: str) -> None:
        descriptor, _, inode = text.partition(":")
        if not all(part.isascii() and part.isdigit() for part in (descriptor, inode)):
            raise ConfigurationError(f"PSDIST_METRICS_PIPE={text!r:.80} is not DESCRIPTOR:INODE: leave it unset")
        self._descriptor = int(descriptor)
        self.is_open = self._is_inherited(int(inode))
        if self.is_open:
            os.set_blocking(self._descriptor, False)
            os.set_inheritable(self._descriptor, False)

    def _is_inherited(self, inode: int) -> bool:
        try:
            found = os.fstat(self._descriptor)
        except (OSError, OverflowError):
            return False
        return stat.S_ISFIFO(found.st_mode) and found.st_ino == inode

    def send(self, line: bytes) -> bool:
        """Write a line of at most ``METRIC_LINE_BYTES_MAX`` bytes.

        Returns False if nothing was written because the pipe is full, or if it has no reader any more.
        """
        if not self.is_open:
            return False
        try:
            return os.write(self._descriptor, line) == len(line)
        except BlockingIOError:
            return False
        except OSError:
            self.is_open = False
            return False


class Reporter:
    """Reports of one worker.

    measure: returns the counters of its client.
    phases: clock of the client's calls.
    interval_seconds: length of an interval; 0 makes each report an interval.
    pipe: pipe to the launcher; None without one.
    """

    def __init__(
        self,
        rank: int,
        run_id: str,
        measure: Callable[[], Measurements],
        phases: PhaseTimer,
        *,
        interval_seconds: float,
        pipe: MetricsPipe | None = None,
    ) -> None:
        self._run_id = run_id
        self._measure = measure
        self._phases = phases
        self._interval_seconds = interval_seconds
        self._pipe = pipe
        self._accumulator = IntervalAccumulator(rank)
        self._trackers = Trackers()
        self._measured = Measurements()
        self._count = 0
        self._due: float | None = None
        self._unsent: WorkerInterval | None = None
        self._is_closed = False
        self._pid = os.getpid()

    def add_tracker(self, tracker: Tracker) -> None:
        """See ``Context.add_tracker``."""
        self._check_open()
        tracker.start(self._run_id)
        atexit.register(self.close)
        self._trackers.add(tracker)

    def report(self, loss: Any, accuracy: Any, samples: Any, step: int | None, numbers: dict[str, Any]) -> None:
        """See ``Context.report``."""
        report = check_report(loss, accuracy, samples, numbers)
        if step is not None:
            check_integer("step", step, 0, _MOST_STEPS)
        if self._due is None:
            self._begin()
        measured = self._measured = self._measure()
        if step is None:
            step = self._count + 1 if measured.step is None else measured.step
        self._accumulator.add(report, step, measured)
        self._count += 1
        if (now := self._phases.clock()) >= (self._due or 0.0):
            self._due = now + self._interval_seconds
            self._flush()

    def close(self) -> None:
        """Send the reports since the last interval, and close the trackers. Closing again does nothing.

        Does nothing in a process that the script forked: pipe and trackers belong to the script.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self._accumulator.reports:
            self._flush()
        elif self._unsent is not None:
            self._send(None)
        self._trackers.close()

    def _begin(self) -> None:
        """Start at the first report.

        The remaining reports are sent even if the script exits without closing anything.
        """
        self._check_open()
        self._phases.start()
        self._due = self._phases.clock() + self._interval_seconds
        atexit.register(self.close)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the context is closed: report before closing it")

    def _flush(self) -> None:
        interval = self._accumulator.take(self._phases.times(), self._measured)
        if self._trackers:
            self._trackers.log(summarize([interval]), last_step([interval]))
        self._send(interval)

    def _send(self, interval: WorkerInterval | None) -> None:
        """Send an interval, merged with an unsent earlier one."""
        if self._pipe is None or not self._pipe.is_open:
            return
        if self._unsent is not None:
            interval = self._unsent if interval is None else self._unsent.followed_by(interval)
        self._unsent = None
        if interval is not None and not self._pipe.send(to_line(interval)):
            self._unsent = interval
