"""Measurements of a server: counters of a parameter set, and spans of its updates while a trace is recorded.

Counters are plain numbers, written on the event loop and readable from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from psdist.monitoring.spans import Span, SpanKind, SpanRecorder
from psdist.v1 import server_pb2


class WorkerTable(dict[str, server_pb2.WorkerStatistics]):
    """Activity of each worker, by its id: in slices and bytes, as it is reported."""

    def __missing__(self, worker_id: str) -> server_pb2.WorkerStatistics:
        """Start counting for a worker."""
        counters = self[worker_id] = server_pb2.WorkerStatistics(worker_id=worker_id)
        return counters


@dataclass(slots=True)
class Counters:
    """Counters of one parameter set on one server."""

    applied_slices: int = 0
    apply_seconds: float = 0.0
    bytes_held: int = 0
    workers: WorkerTable = field(default_factory=WorkerTable)

    def answered(self, worker_id: str, ignored: bool, late: bool, staleness: int) -> None:
        """Count an acknowledged contribution that was ignored or stale."""
        counters = self.workers[worker_id]
        counters.late += ignored and late
        counters.duplicates += ignored and not late
        counters.staleness_sum += staleness
        counters.staleness_max = max(counters.staleness_max, staleness)


class SliceSpans:
    """Spans of all slices of one server: the waits of each update, and its duration. Called on the event loop.

    clock: seconds, the one that kernels are timed by.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        #: None unless a trace is recorded.
        self.recorder: SpanRecorder | None = None

    def start(self, recorder: SpanRecorder) -> None:
        """Record spans from now on."""
        self.recorder = recorder

    def stop(self, recorder: SpanRecorder) -> None:
        """Record no more spans."""
        self.recorder = None

    def now(self) -> float:
        """Return the time if it may be needed for a span; otherwise 0, for which no span is recorded."""
        return self.clock() if self.recorder is not None else 0.0

    def end_queue(self, parameters: str, index: int, step: int, arrived: Iterable[tuple[str, float]]) -> float:
        """Record that contributions do not wait for others any more, because an update starts. Returns the time.

        arrived: the worker of each, and the time of its arrival.
        """
        now = self.now()
        if now:
            for worker_id, since in arrived:
                self._add(SpanKind.QUEUE, since, now, parameters, index, step, worker_id)
        return now

    def end_kernel(
        self, kind: SpanKind, parameters: str, index: int, step: int, submitted: float, seconds: float, ended: float
    ) -> None:
        """Record that a kernel took this many seconds and ended at ``ended``, after a wait since ``submitted``."""
        if self.recorder is not None and submitted:
            started = max(submitted, ended - seconds)
            self._add(SpanKind.THREAD, submitted, started, parameters, index, step)
            self._add(kind, started, ended, parameters, index, step)

    def end_replication(self, parameters: str, index: int, step: int, sent: float) -> None:
        """Record that the replicas have acknowledged an update."""
        if self.recorder is not None:
            self._add(SpanKind.REPLICATE, sent, self.clock(), parameters, index, step)

    def _add(
        self, kind: SpanKind, start: float, end: float, parameters: str, index: int, step: int, peer: str = ""
    ) -> None:
        if self.recorder is not None and 0 < start < end:
            self.recorder.add(Span(kind, start, end, parameters, step, index, peer))
