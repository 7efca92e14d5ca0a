"""Readings of one scrape, and their exposition in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from psdist.monitoring.catalog import BY_NAME, Metric

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
