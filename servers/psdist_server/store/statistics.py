"""Measurements of a server: counters of a parameter set, and spans of its updates while a trace is recorded.

Counters are plain numbers, written on the event loop and readable from anywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from psdist.tracing.spans import Span, SpanKind, SpanRecorder
from psdist.types import Replica
from psdist.v1 import server_pb2
from psdist_server.core.replication import PrimaryReplication


@dataclass(slots=True)
class WorkerCounters:
    """Activity of one worker, in slices and bytes."""

    pushes: int = 0
    pulls: int = 0
    push_bytes: int = 0
    pull_bytes: int = 0
    late: int = 0
    duplicates: int = 0
    non_finite: int = 0
    rejected: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    saved_bytes: int = 0

    def answered(self, ignored: bool, late: bool, staleness: int) -> None:
        """Count one acknowledged contribution."""
        self.late += ignored and late
        self.duplicates += ignored and not late
        self.staleness_sum += staleness
        self.staleness_max = max(self.staleness_max, staleness)


@dataclass(slots=True)
class Counters:
    """Counters of one parameter set on one server. workers: those of each worker, by its id."""

    applied_slices: int = 0
    apply_seconds: float = 0.0
    bytes_held: int = 0
    workers: defaultdict[str, WorkerCounters] = field(default_factory=lambda: defaultdict(WorkerCounters))

    def by_worker(self) -> list[server_pb2.WorkerStatistics]:
        """Return the workers' counters as messages."""
        return [
            server_pb2.WorkerStatistics(
                worker_id=worker_id, **{name: getattr(counters, name) for name in WorkerCounters.__dataclass_fields__}
            )
            for worker_id, counters in sorted(self.workers.items())
        ]


def replica_statistics(
    machines: Mapping[int, PrimaryReplication[Any]],
    carrier: Callable[[Replica], str],
    now: float,
    lease_seconds: float,
) -> list[server_pb2.ReplicaStatistics]:
    """Return how far each replica of these shards is behind. carrier: describes the carrier of updates to a replica."""
    found = []
    for number, machine in sorted(machines.items()):
        unreachable = machine.unreachable(now, lease_seconds)
        for replica, peer in machine.peers.items():
            updates, size = machine.lag(replica)
            state = "filling" if peer.is_copying or not peer.required else "in sync"
            found.append(
                server_pb2.ReplicaStatistics(
                    shard=number,
                    server_id=replica.server_id,
                    state="unreachable" if replica in unreachable else state,
                    lag_updates=updates,
                    lag_bytes=size,
                    slices_filled=len(machine.slices) - len(peer.missing) if peer.is_copying or peer.required else 0,
                    slices=len(machine.slices),
                    digests=peer.digests,
                    carrier=carrier(replica),
                )
            )
    return found


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
