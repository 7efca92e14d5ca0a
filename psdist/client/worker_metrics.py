"""Metrics of a worker for Prometheus.

Counters are read from the handles when a scraper asks. Only the end of a push counts for metrics alone: its phases and
its staleness go into histograms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from psdist.client.parameters import AsyncParameters
from psdist.client.session.worker_session import WorkerSession
from psdist.monitoring.exporter import SECONDS_BOUNDS, VERSIONS_BOUNDS, Exporter, Histogram, Readings
from psdist.monitoring.metrics import Phase
from psdist.monitoring.worker_reports import ReportedNumbers
from psdist.settings.config import MetricsEndpoint


class WorkerMetrics:
    """Metrics of one client. Made and closed on its loop.

    handles: the open ones; the list changes.

    Raises ConfigurationError if the port cannot be bound, InsecureBindError.
    """

    def __init__(
        self,
        endpoint: MetricsEndpoint,
        session: WorkerSession,
        handles: Sequence[AsyncParameters],
        reported: ReportedNumbers,
    ) -> None:
        self._session = session
        self._handles = handles
        self._reported = reported
        self._phases, self._pushes = session.waits.phases, session.activities.pushes
        #: Seconds of the phases when the last push ended.
        self._before: list[float] | None = None
        self._steps = {phase: Histogram(SECONDS_BOUNDS) for phase in Phase}
        self._observers = [histogram.observe for histogram in self._steps.values()]
        self._staleness = Histogram(VERSIONS_BOUNDS)
        #: Bytes by labels, and the counters of each parameter set at the last scrape.
        self._bytes: Counter[tuple[str, str, str, str]] = Counter()
        self._counted: Counter[tuple[str, str]] = Counter()
        self._exporter = Exporter(endpoint, "worker", self._identity, self._read)
        self._pushes.on_push = self._push_ended

    def _identity(self) -> tuple[str, str]:
        mine = self._session.membership.registration
        return mine.run_id, mine.worker_id

    @property
    def address(self) -> str:
        """``host:port`` of the metrics."""
        return self._exporter.address

    def close(self) -> None:
        """Stop serving."""
        self._pushes.on_push = None
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
        readings.add("psdist_incarnation", self._session.membership.registration.incarnation)
        readings.add("psdist_waits", len(self._session.waits.sentences()))
        for phase, histogram in self._steps.items():
            readings.add_histogram("psdist_step_seconds", histogram, phase=phase.name.lower())
        readings.add_histogram("psdist_staleness_versions", self._staleness)
        for name, count in sorted(self._pushes.counts.items()):
            readings.add("psdist_steps_total", count, parameters=name)
        for name, value in self._reported.newest.items():
            readings.add("psdist_reported", value, metric=name)
        for handle in {handle.name: handle for handle in self._handles}.values():
            self._read_handle(handle, readings)
        for (name, transport, codec, direction), size in sorted(self._bytes.items()):
            readings.add(
                "psdist_bytes_total", size, parameters=name, transport=transport, codec=codec, direction=direction
            )

    def _read_handle(self, handle: AsyncParameters, readings: Readings) -> None:
        name, counted = handle.name, handle.statistics()
        readings.add("psdist_pushes_dropped_total", counted.dropped, parameters=name)
        readings.add("psdist_pushes_abstained_total", counted.abstained, parameters=name)
        readings.add("psdist_slices_ignored_total", counted.ignored, parameters=name)
        readings.add("psdist_slices_resent_total", counted.resent, parameters=name)
        for direction, codec, size in zip(
            ("push", "pull"),
            handle.participation.codecs(),
            (counted.push_bytes, counted.pull_bytes),
            strict=True,
        ):
            before = self._counted[name, direction]
            # A handle that was opened again starts from 0.
            self._bytes[name, counted.transport, codec, direction] += size - before if size >= before else size
            self._counted[name, direction] = size
