"""Metrics of a worker for Prometheus.

Counters are read from the handles when a scraper asks. Only the end of a push counts for metrics alone: its phases and
its staleness go into histograms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from psdist.monitoring.exporter import SECONDS_BOUNDS, VERSIONS_BOUNDS, Exporter, Histogram, Readings
from psdist.monitoring.metrics import Phase
from psdist.monitoring.phase_timer import PhaseTimer, PushCounter
from psdist.monitoring.worker_reports import ReportedNumbers, codecs_of
from psdist.settings.config import MetricsEndpoint
from psdist.types import ParametersSpec


class MeasuredHandle(Protocol):
    """The part of a handle that metrics need."""

    @property
    def name(self) -> str:
        """Name of the parameter set."""

    @property
    def spec(self) -> ParametersSpec:
        """Its settings."""

    @property
    def participation(self) -> Any:
        """Its ``Participation``. Only the options are read."""

    def statistics(self) -> Any:
        """Return its ``Statistics``."""


@dataclass(frozen=True)
class MeasuredClient:
    """The parts of a client that metrics read.

    identity: returns the run, the worker's id and its incarnation.
    waits: returns the reasons of waits that have lasted.
    handles: returns the open handles.
    """

    identity: Callable[[], tuple[str, str, int]]
    waits: Callable[[], list[str]]
    handles: Callable[[], Iterable[MeasuredHandle]]
    phases: PhaseTimer
    pushes: PushCounter
    reported: ReportedNumbers


class WorkerMetrics:
    """Metrics of one client. Made and closed on its loop. Raises ConfigurationError if the port cannot be bound,
    InsecureBindError."""

    def __init__(self, endpoint: MetricsEndpoint, client: MeasuredClient) -> None:
        self._client = client
        self._phases = client.phases
        #: Seconds of the phases when the last push ended.
        self._before: list[float] | None = None
        self._steps = {phase: Histogram(SECONDS_BOUNDS) for phase in Phase}
        self._observers = [histogram.observe for histogram in self._steps.values()]
        self._staleness = Histogram(VERSIONS_BOUNDS)
        #: Bytes by labels, and the counters of each parameter set at the last scrape.
        self._bytes: Counter[tuple[str, str, str, str]] = Counter()
        self._counted: Counter[tuple[str, str]] = Counter()
        self._exporter = Exporter(endpoint, "worker", lambda: client.identity()[:2], self._read)
        client.pushes.on_push = self._push_ended

    @property
    def address(self) -> str:
        """``host:port`` of the metrics."""
        return self._exporter.address

    def close(self) -> None:
        """Stop serving."""
        self._client.pushes.on_push = None
        self._exporter.close()

    def _push_ended(self, staleness: int) -> None:
        """Count the time since the previous push, by phase. Costs a few microseconds of each step."""
        self._staleness.observe(staleness)
        seconds, before = self._phases.seconds(), self._before
        self._before = seconds
        if before is not None:
            for observe, now, then in zip(self._observers, seconds, before, strict=True):
                observe(now - then)

    def _read(self, readings: Readings) -> None:
        readings.add("psdist_incarnation", self._client.identity()[2])
        readings.add("psdist_waits", len(self._client.waits()))
        for phase, histogram in self._steps.items():
            readings.add_histogram("psdist_step_seconds", histogram, phase=phase.name.lower())
        readings.add_histogram("psdist_staleness_versions", self._staleness)
        for name, count in sorted(self._client.pushes.counts.items()):
            readings.add("psdist_steps_total", count, parameters=name)
        for name, value in self._client.reported.newest.items():
            readings.add("psdist_reported", value, metric=name)
        for handle in {handle.name: handle for handle in self._client.handles()}.values():
            self._read_handle(handle, readings)
        for (name, transport, codec, direction), size in sorted(self._bytes.items()):
            readings.add(
                "psdist_bytes_total", size, parameters=name, transport=transport, codec=codec, direction=direction
            )

    def _read_handle(self, handle: MeasuredHandle, readings: Readings) -> None:
        name, counted = handle.name, handle.statistics()
        readings.add("psdist_pushes_dropped_total", counted.dropped, parameters=name)
        readings.add("psdist_pushes_abstained_total", counted.abstained, parameters=name)
        readings.add("psdist_slices_ignored_total", counted.ignored, parameters=name)
        readings.add("psdist_slices_resent_total", counted.resent, parameters=name)
        directions = ("push", "pull")
        for direction, codec, size in zip(
            directions,
            codecs_of(handle.spec, handle.participation.options),
            (counted.push_bytes, counted.pull_bytes),
            strict=True,
        ):
            before = self._counted[name, direction]
            # A handle that was opened again starts from 0.
            self._bytes[name, counted.transport, codec, direction] += size - before if size >= before else size
            self._counted[name, direction] = size
