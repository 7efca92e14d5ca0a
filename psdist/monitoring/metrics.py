"""Training metrics as values: a script's reports, the division of its time, and sums over steps and workers. Pure.

The line has the most important numbers first, so that it can be truncated.

Invariants: Adding an interval to the next one of the same worker gives the interval of both; nothing is lost or
counted twice. Sums are float64.

A worker writes an interval to its launcher as one line of JSON. With its newline it has at most
``METRIC_LINE_BYTES_MAX`` bytes, so that a pipe accepts it completely or not at all. Launcher and workers belong to one
installation, so the format may change with any version.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, field
from enum import IntEnum
from typing import Any, Final, NamedTuple

from psdist.errors import InvalidArgumentError, InvalidNameError, MalformedPayloadError
from psdist.wire.limits import METRIC_LINE_BYTES_MAX, METRIC_NAME_CHARACTERS_MAX, METRIC_NAMES_MAX, WORLD_MAX

_NAME: Final = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._/-]{{0,{METRIC_NAME_CHARACTERS_MAX - 1}}}")
#: Limit for one report, so that sums stay finite.
_MOST_SAMPLES: Final = 1e18
#: Metrics that psdist adds to a script's values, in output order.
MEASURED: Final = (
    *("samples", "samples_per_second", "reports", "workers", "seconds"),
    *("step_ms", "compute_ms", "push_ms", "wait_ms", "pull_ms", "communication_share", "compute_efficiency"),
    *("push_bytes", "pull_bytes", "staleness_mean", "staleness_max"),
)
#: Names that a script cannot use for its own values.
RESERVED: Final = frozenset(MEASURED) | {"step", "time"}


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of one step by a script.

    values: by name; NaN and infinities are allowed.
    samples: number of samples in the step, or None if not reported.
    """

    values: Mapping[str, float]
    samples: float | None = None

    @property
    def weight(self) -> float:
        """Weight of the values in means: the samples, or 1 if not reported."""
        return 1.0 if self.samples is None else self.samples


def check_report(loss: Any, accuracy: Any, samples: Any, numbers: Mapping[str, Any]) -> StepReport:
    """Return the checked report of one step.

    loss, accuracy, samples: None if not reported.
    Raises InvalidArgumentError for values that are not numbers, for too many of them, and for ``samples`` outside 0 to
    1e18; InvalidNameError for a bad name.
    """
    values = {} if loss is None else {"loss": to_number("loss", loss)}
    if accuracy is not None:
        values["accuracy"] = to_number("accuracy", accuracy)
    for name, number in numbers.items():
        check_metric_name(name)
        values[name] = to_number(name, number)
    check_count(len(values))
    return StepReport(values, None if samples is None else _check_samples(samples))


def check_metric_name(name: str) -> None:
    """Raise InvalidNameError unless ``name`` can name a value of the script."""
    if not _NAME.fullmatch(name):
        raise InvalidNameError(
            f"a metric cannot be named {name!r:.80}: use 1 to {METRIC_NAME_CHARACTERS_MAX} of the characters "
            "A-Z a-z 0-9 _ . / - and begin with one of the first 63"
        )
    if name in RESERVED:
        raise InvalidNameError(f"a metric cannot be named {name!r}: psdist measures one of this name")


def check_count(count: int) -> None:
    """Raise InvalidArgumentError for more names than a worker may report."""
    if count > METRIC_NAMES_MAX:
        raise InvalidArgumentError(
            f"{count} metrics are too many: a worker may report {METRIC_NAMES_MAX} names, loss and accuracy included"
        )


def to_number(name: str, value: Any) -> float:
    """Return ``value`` as a float. Raises InvalidArgumentError if that is impossible.

    value: a number of Python or numpy, or an array or tensor without dimensions.
    """
    kind = type(value)
    if kind is float:
        return value  # type: ignore[no-any-return]  # The type was just compared.
    if kind is not int:
        if isinstance(value, str | bytes | bytearray) or _dimensions(value):
            raise _no_number(name, value)
        if hasattr(value, "detach"):  # torch warns about conversions of tensors that require gradients.
            value = value.detach()
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _no_number(name, value) from None


def _dimensions(value: object) -> int:
    return int(getattr(value, "ndim", 0))


def _no_number(name: str, value: Any) -> InvalidArgumentError:
    shape = f" of shape {tuple(value.shape)}" if _dimensions(value) else f" {value!r:.40}"
    return InvalidArgumentError(
        f"metric {name!r} is not a number: it is {type(value).__name__}{shape}. Report a number, or an array or tensor "
        "without dimensions"
    )


def _check_samples(samples: Any) -> float:
    number = to_number("samples", samples)
    if not 0 <= number <= _MOST_SAMPLES:  # False for NaN.
        raise InvalidArgumentError(f"samples={number:g} is not possible: use a number from 0 to {_MOST_SAMPLES:g}")
    return number


#: A number that a script reports to have the time left in the progress line.
TOTAL_STEPS: Final = "total_steps"
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def progress_line(values: Mapping[str, float], step: int) -> str:
    """Format the metrics of ``summarize``.

    ``step 1200  loss 0.01441  accuracy 0.9917  28,721 samples/s  step 4.46 ms (compute 3.1, push 0.2, wait 0.9, pull
    0.26)  communication 30%  2 workers``; staleness is shown if it is not 0. With ``total_steps`` it begins ``step 1200
    of 5000, 0:17 left``.
    """
    parts = [f"step {step}"]
    if (total := values.get(TOTAL_STEPS, 0.0)) >= max(step, 1) and total < math.inf:
        parts = [f"step {step} of {total:.0f}"]
        if values.get("step_ms"):
            minutes, seconds = divmod(round((total - step) * values["step_ms"] / 1e3), 60)
            left = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"
            parts = [f"{parts[0]}, {left} left"]
    shown = (name for name in values if name not in MEASURED and name != TOTAL_STEPS)
    parts += [f"{name} {_short(values[name])}" for name in shown]
    if "samples_per_second" in values:
        parts.append(f"{_rate(values['samples_per_second'])} samples/s")
    if values.get("step_ms"):
        phases = ", ".join(f"{name} {_short(values[f'{name}_ms'], 3)}" for name in ("compute", "push", "wait", "pull"))
        parts.append(f"{_short(values['step_ms'], 3)} ms ({phases})")
        parts.append(f"communication {values['communication_share']:.0%}")
    if values.get("staleness_max"):
        parts.append(f"staleness {values['staleness_mean']:.1f}, at most {values['staleness_max']:.0f}")
    if sent := values.get("push_bytes", 0) + values.get("pull_bytes", 0):
        parts.append(f"{_bytes(sent / max(1, values['reports']))} a step")
    workers = values.get("workers", 1)
    parts.append(f"{workers:.0f} worker{'s' * (workers != 1)}")
    return "  ".join(parts)


def _short(value: float, digits: int = 4) -> str:
    if not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.{digits}g}"
    return f"{value:.{digits}g}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _bytes(count: float) -> str:
    unit = 0
    while count >= 1000 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"


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
    abstained: pushes without their gradient, or without a part of it.
    """

    step: int | None = None
    staleness_mean: float = 0.0
    staleness_max: int = 0
    push_bytes: int = 0
    pull_bytes: int = 0
    dropped: int = 0
    abstained: int = 0


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
