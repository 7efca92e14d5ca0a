"""Metrics of one process for Prometheus: reads them on its event loop when a scraper asks, and measures the loop's lag.

``catalog`` lists the metrics, ``http_server`` answers the requests. Nothing is counted for scrapers alone, except the
lag of the loop and histograms.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from psdist.monitoring.catalog import BY_NAME, SECONDS_BOUNDS, Metric, Role
from psdist.monitoring.http_server import MetricsServer, Page
from psdist.off_loop import on_loop
from psdist.security.tokens import Audience, Verifier
from psdist.settings.config import MetricsEndpoint
from psdist.version import __version__
from psdist.wire import limits

T = TypeVar("T")

_TICK_SECONDS: Final = 0.1
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class Exporter:
    """Metrics of one process. Made and closed on its event loop.

    identity: returns the run, and the id of this member.
    read: adds the process's own readings. Runs on the loop.
    targets: returns the run's metrics ports in the form of Prometheus' ``http_sd_configs``, for the page ``/targets``;
        None without that page. Runs on the loop.

    Raises ConfigurationError and InsecureBindError, as ``MetricsServer``.
    """

    def __init__(
        self,
        endpoint: MetricsEndpoint,
        role: Role,
        identity: Callable[[], tuple[str, str]],
        read: Callable[[Readings], None],
        targets: Callable[[], list[dict[str, Any]]] | None = None,
    ) -> None:
        self._role: Role = role
        self._identity = identity
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._lag = Histogram(SECONDS_BOUNDS)
        pages: dict[str, Page] = {"/metrics": lambda: (_TEXT, self._on_loop(self.readings).exposition())}
        if targets is not None:
            pages["/targets"] = lambda: ("application/json", json.dumps(self._on_loop(targets)).encode())
        verifier = Verifier(endpoint.token, Audience(role), endpoint.key)
        self._server = MetricsServer(endpoint.host, endpoint.port, verifier, pages)
        self._server.start()
        self._due = self._loop.time() + _TICK_SECONDS
        self._timer = self._loop.call_at(self._due, self._tick)

    @property
    def address(self) -> str:
        """``host:port`` of the metrics."""
        return self._server.address

    def readings(self) -> Readings:
        """Return all readings of this process. Runs on the loop."""
        readings = Readings()
        run_id, member_id = self._identity()
        readings.add("psdist_process_info", 1, run_id=run_id, role=self._role, member_id=member_id, version=__version__)
        readings.add_histogram("psdist_event_loop_lag_seconds", self._lag)
        self._read(readings)
        return readings

    def close(self) -> None:
        """Stop serving."""
        self._timer.cancel()
        self._server.close()

    def _tick(self) -> None:
        now = self._loop.time()
        self._lag.observe(max(0.0, now - self._due))
        self._due = now + _TICK_SECONDS
        self._timer = self._loop.call_at(self._due, self._tick)

    def _on_loop(self, function: Callable[[], T]) -> T:
        """Return the result of a function that runs on the loop. Raises TimeoutError if the loop does not answer."""
        answer = on_loop(self._loop, function)
        try:
            return answer.result(limits.SCRAPE_SECONDS)
        except TimeoutError:
            answer.cancel()
            raise


def target(address: str, run_id: str, role: Role, member_id: str) -> dict[str, Any]:
    """Return one entry of ``http_sd_configs``. Its labels do not collide with those of the catalog."""
    return {"targets": [address], "labels": {"run": run_id, "member": member_id, "member_role": role}}


# --- readings of one scrape, and their exposition in Prometheus' text format ------------------------------------------

_FAMILIES: Final = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


class Histogram:
    """Counts of observed values by bucket. Observing costs a fraction of a microsecond, and only one thread does it.

    bounds: upper bounds of the buckets, without infinity.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as text."""
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))

    @property
    def total(self) -> float:
        """Sum of all values."""
        return self._total


class Readings(Collector):
    """Values of one process's metrics at one moment. Only metrics of the catalog, with its labels, are accepted."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        """Add the value of a gauge or counter."""
        metric = BY_NAME[name]
        self._family(metric).add_metric(_values(metric, labels), value)

    def add_histogram(self, name: str, histogram: Histogram, **labels: str) -> None:
        """Add a histogram."""
        metric = BY_NAME[name]
        self._family(metric).add_metric(_values(metric, labels), buckets=histogram.buckets, sum_value=histogram.total)

    def _family(self, metric: Metric) -> Any:
        if metric.name not in self._families:
            self._families[metric.name] = _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
        return self._families[metric.name]

    def collect(self) -> Iterator[Family]:
        """Yield the families, for prometheus_client."""
        yield from self._families.values()

    def exposition(self) -> bytes:
        """Return all readings and those of the process (memory, processor time, open files) as text."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        ProcessCollector(registry=registry)
        return generate_latest(registry)


def _values(metric: Metric, labels: dict[str, str]) -> list[str]:
    if labels.keys() != set(metric.labels):
        raise ValueError(f"{metric.name} has the labels {metric.labels}, not {tuple(labels)}")
    return [labels[name] for name in metric.labels]
