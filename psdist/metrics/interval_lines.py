"""Encoding of an interval as one line of JSON, which a worker writes to its launcher.

A line with its newline has at most ``METRIC_LINE_BYTES_MAX`` bytes, so that a pipe accepts it completely or not at
all. Launcher and workers belong to one installation, so the format may change with any version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from psdist.errors import InvalidArgumentError, MalformedPayloadError
from psdist.metrics.interval import WeightedSum, WorkerInterval
from psdist.metrics.phases import PhaseTimes
from psdist.metrics.report import check_count, check_metric_name
from psdist.wire.limits import METRIC_LINE_BYTES_MAX, WORLD_MAX

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
