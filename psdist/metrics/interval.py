"""Sums of workers' reports over the steps of an interval, and over workers.

Invariants: Adding an interval to the next one of the same worker gives the interval of both; nothing is lost or
counted twice. Sums are float64.

A worker writes an interval to its launcher as one line of JSON. With its newline it has at most
``METRIC_LINE_BYTES_MAX`` bytes, so that a pipe accepts it completely or not at all. Launcher and workers belong to one
installation, so the format may change with any version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

from psdist.errors import InvalidArgumentError, MalformedPayloadError
from psdist.metrics.report import StepReport, check_count, check_metric_name
from psdist.wire.limits import METRIC_LINE_BYTES_MAX, WORLD_MAX


class Phase(IntEnum):
    """Activity of a script, as an index into ``PhaseTimes``."""

    COMPUTE = 0
    PUSH = 1
    WAIT = 2
    PULL = 3


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds spent in each phase."""

    compute: float = 0.0
    push: float = 0.0
    wait: float = 0.0
    pull: float = 0.0

    @property
    def total(self) -> float:
        """Time that was divided."""
        return self.compute + self.communication

    @property
    def communication(self) -> float:
        """Time that the script spent waiting in psdist."""
        return self.push + self.wait + self.pull

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: PhaseTimes) -> PhaseTimes:
        """Return the times since ``other``, an earlier reading of the same clock."""
        return PhaseTimes(*(max(0.0, a - b) for a, b in zip(astuple(self), astuple(other), strict=True)))


class WeightedSum(NamedTuple):
    """Sum of weight * value, and sum of the weights."""

    total: float = 0.0
    weight: float = 0.0

    def plus(self, other: WeightedSum) -> WeightedSum:
        """Return the sum of both."""
        return WeightedSum(self.total + other.total, self.weight + other.weight)


class Measurements(NamedTuple):
    """Measurements of a client so far.

    step: step of the parameter set that was opened first: in BSP the completed steps, in SSP and ASP the updates that
        the worker has seen. None without a parameter set.
    staleness_mean, staleness_max: staleness of the last push, in versions.
    push_bytes, pull_bytes: bytes of payloads since the start.
    dropped: pushes that were dropped.
    """

    step: int | None = None
    staleness_mean: float = 0.0
    staleness_max: int = 0
    push_bytes: int = 0
    pull_bytes: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInterval:
    """Reports of one worker over a stretch of its time.

    step: step of the last report.
    reports: number of reports.
    values: by name, weighted by samples.
    times: division of the stretch into phases; its length is their total.
    staleness_sum: sum of the reports' means, in versions.
    """

    rank: int
    step: int
    reports: int
    samples: float = 0.0
    values: Mapping[str, WeightedSum] = field(default_factory=dict)
    times: PhaseTimes = PhaseTimes()
    push_bytes: int = 0
    pull_bytes: int = 0
    staleness_sum: float = 0.0
    staleness_max: int = 0

    def followed_by(self, later: WorkerInterval) -> WorkerInterval:
        """Return this interval and the next one combined."""
        return WorkerInterval(
            later.rank,
            later.step,
            self.reports + later.reports,
            self.samples + later.samples,
            add_values(self.values, later.values),
            self.times + later.times,
            self.push_bytes + later.push_bytes,
            self.pull_bytes + later.pull_bytes,
            self.staleness_sum + later.staleness_sum,
            max(self.staleness_max, later.staleness_max),
        )


def add_values(first: Mapping[str, WeightedSum], second: Mapping[str, WeightedSum]) -> dict[str, WeightedSum]:
    """Return the sums by name, in the order in which names first appeared."""
    added = dict(first)
    for name, value in second.items():
        added[name] = added.get(name, WeightedSum()).plus(value)
    return added


class IntervalAccumulator:
    """Accumulator of one worker's reports.

    rank: the worker's rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._names: set[str] = set()
        self._before = PhaseTimes(), Measurements()
        self._clear()

    def _clear(self) -> None:
        self.reports = 0
        self._step = 0
        self._samples = 0.0
        self._values: dict[str, tuple[float, float]] = {}
        self._staleness_sum, self._staleness_max = 0.0, 0

    def add(self, report: StepReport, step: int, measured: Measurements) -> None:
        """Add the report of one step.

        Raises InvalidArgumentError, and changes nothing, if the worker reported too many names.
        """
        if not report.values.keys() <= self._names:
            names = self._names | report.values.keys()
            check_count(len(names))
            self._names = names
        weight = report.weight
        for name, value in report.values.items():
            total, weights = self._values.get(name, (0.0, 0.0))
            self._values[name] = (total + weight * value if weight else total, weights + weight)
        self.reports += 1
        self._step = step
        self._samples += report.samples or 0.0
        self._staleness_sum += measured.staleness_mean
        self._staleness_max = max(self._staleness_max, measured.staleness_max)

    def take(self, times: PhaseTimes, measured: Measurements) -> WorkerInterval:
        """Return the interval since the last call, and start the next one.

        times, measured: current totals since the start.
        """
        times_before, before = self._before
        interval = WorkerInterval(
            self._rank,
            self._step,
            self.reports,
            self._samples,
            {name: WeightedSum(*value) for name, value in self._values.items()},
            times - times_before,
            max(0, measured.push_bytes - before.push_bytes),
            max(0, measured.pull_bytes - before.pull_bytes),
            self._staleness_sum,
            self._staleness_max,
        )
        self._before = times, measured
        self._clear()
        return interval


def summarize(intervals: Collection[WorkerInterval]) -> dict[str, float]:
    """Return the metrics of one interval by name, from one ``WorkerInterval`` per worker.

    The script's values come first; their means are weighted by samples, and a value whose weights are all 0 is
    omitted. Then follow the metrics of ``report.MEASURED``:

    - samples, reports and bytes are sums; samples per second is the sum of the workers' rates;
    - milliseconds are means over all reports; ``seconds`` is the mean length of the interval;
    - shares refer to the time of all workers together.

    Samples are omitted if no worker reports them, and shares if no time has passed.
    """
    values: dict[str, WeightedSum] = {}
    times = PhaseTimes()
    for interval in intervals:
        values = add_values(values, interval.values)
        times += interval.times
    numbers = {name: value.total / value.weight for name, value in values.items() if value.weight}
    reports = sum(interval.reports for interval in intervals)
    if any(interval.samples for interval in intervals):
        numbers["samples"] = sum(interval.samples for interval in intervals)
        rates = [interval.samples / interval.times.total for interval in intervals if interval.times.total]
        numbers["samples_per_second"] = sum(rates)
    numbers |= {"reports": reports, "workers": len(intervals), "seconds": times.total / max(1, len(intervals))}
    each = {"step": times.total, "compute": times.compute}
    each |= {"push": times.push, "wait": times.wait, "pull": times.pull}
    numbers |= {f"{name}_ms": 1000 * seconds / max(1, reports) for name, seconds in each.items()}
    if times.total:
        numbers["communication_share"] = times.communication / times.total
        numbers["compute_efficiency"] = times.compute / times.total
    return numbers | {
        "push_bytes": sum(interval.push_bytes for interval in intervals),
        "pull_bytes": sum(interval.pull_bytes for interval in intervals),
        "staleness_mean": sum(interval.staleness_sum for interval in intervals) / max(1, reports),
        "staleness_max": max((interval.staleness_max for interval in intervals), default=0),
    }


def last_step(intervals: Collection[WorkerInterval]) -> int:
    """Return the highest step of any worker; 0 without workers."""
    return max((interval.step for interval in intervals), default=0)


_KEYS: Final = frozenset({"rank", "step", "reports", "samples", "values", "seconds", "bytes", "staleness"})
_COUNT_BITS: Final = 63


def to_line(interval: WorkerInterval) -> bytes:
    """Return the line, with its newline."""
    times = interval.times
    message = {
        "rank": interval.rank,
        "step": interval.step,
        "reports": interval.reports,
        "samples": interval.samples,
        "values": interval.values,
        "seconds": (times.compute, times.push, times.wait, times.pull),
        "bytes": (interval.push_bytes, interval.pull_bytes),
        "staleness": (interval.staleness_sum, interval.staleness_max),
    }
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def from_line(line: bytes) -> WorkerInterval:
    """Return the interval of a line, with or without newline. Raises MalformedPayloadError for anything else."""
    if len(line) > METRIC_LINE_BYTES_MAX:
        raise MalformedPayloadError(f"a line of metrics has {len(line)} bytes, over {METRIC_LINE_BYTES_MAX}")
    try:
        message = json.loads(line)
        if not isinstance(message, dict) or message.keys() != _KEYS:
            raise ValueError("its fields are not exactly those of a report")
        return _interval(message)
    except (ValueError, RecursionError) as error:  # InvalidArgumentError is a ValueError.
        what = error.message if isinstance(error, InvalidArgumentError) else str(error) or type(error).__name__
        raise MalformedPayloadError(f"a line of metrics cannot be read: {what:.200}") from None


def _interval(message: Mapping[str, Any]) -> WorkerInterval:
    sums = message["values"]
    if not isinstance(sums, dict):
        raise ValueError("values are not an object")
    check_count(len(sums))
    values: dict[str, WeightedSum] = {}
    for name, pair in sums.items():
        check_metric_name(name)
        total, weight = _list(pair, 2)
        values[name] = WeightedSum(_float(total), _positive(weight))
    push_bytes, pull_bytes = _list(message["bytes"], 2)
    staleness_sum, staleness_max = _list(message["staleness"], 2)
    return WorkerInterval(
        _count(message["rank"], WORLD_MAX - 1),
        _count(message["step"]),
        _count(message["reports"]),
        _positive(message["samples"]),
        values,
        PhaseTimes(*(_positive(seconds) for seconds in _list(message["seconds"], 4))),
        _count(push_bytes),
        _count(pull_bytes),
        _positive(staleness_sum),
        _count(staleness_max),
    )


def _list(value: Any, length: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{value!r:.40} is not a list of {length}")
    return value


def _count(value: Any, most: int = (1 << _COUNT_BITS) - 1) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is not a whole number from 0 to {most}")
    return value


def _float(value: Any) -> float:
    if type(value) is int and abs(value) < 1 << _COUNT_BITS:
        return float(value)
    if type(value) is not float:
        raise ValueError(f"{value!r:.40} is not a number")
    return value


def _positive(value: Any) -> float:
    number = _float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{value!r:.40} is not a finite number of at least 0")
    return number
