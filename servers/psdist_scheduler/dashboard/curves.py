"""Curves of a run since the dashboard was opened by the scheduler: the last minutes second by second, and the whole
run with as many points.

Pure. Invariant: Both curves have at most ``POINTS`` points, however long the run is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final

#: Points of each curve. One a second in the recent curve: five minutes.
POINTS: Final = 300

Point = dict[str, Any]


def point(sample: dict[str, Any]) -> Point:
    """Return the point of one sample, as ``sample_json`` returns it: means of the numbers that workers report, and the
    rates of the run. Numbers that are not finite count as missing."""
    workers = list(sample["workers"].values())
    names = sorted({name for worker in workers for name in worker["reported"]})
    sets = sorted({name for worker in workers for name in worker["steps_per_second"]})
    reported = {name: _mean(worker["reported"].get(name) for worker in workers) for name in names}
    steps = {name: _mean(worker["steps_per_second"].get(name) for worker in workers) for name in sets}
    return {
        "time": sample["time"],
        "step": max((worker["reported_step"] for worker in workers), default=0),
        "reported": {name: value for name, value in reported.items() if value is not None},
        "steps": {name: value for name, value in steps.items() if value is not None},
        "samples": round(sum(worker["samples_per_second"] for worker in workers), 1),
    }


class Curves:
    """The points of a run: the recent ones, and those of the whole run.

    A point of the whole run is the mean of ``stride`` points. When there are too many, neighbours are joined and the
    stride doubles.
    """

    def __init__(self) -> None:
        self.recent: deque[Point] = deque(maxlen=POINTS)
        self.whole: list[Point] = []
        self.stride = 1
        self._pending: list[Point] = []

    def add(self, new: Point) -> None:
        """Add the newest point."""
        self.recent.append(new)
        self._pending.append(new)
        if len(self._pending) == self.stride:
            self.whole.append(_joined(self._pending))
            self._pending = []
        if len(self.whole) > POINTS:
            self.whole = [_joined(self.whole[at : at + 2]) for at in range(0, len(self.whole), 2)]
            self.stride *= 2
            self._pending = []


def _joined(points: list[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    last = points[-1]
    return {
        "time": last["time"],
        "step": last["step"],
        "reported": _means(points, "reported"),
        "steps": _means(points, "steps"),
        "samples": _mean(one["samples"] for one in points),
    }


def _means(points: list[Point], key: str) -> dict[str, float]:
    names = dict.fromkeys(name for one in points for name in one[key])
    return {name: mean for name in names if (mean := _mean(one[key].get(name) for one in points)) is not None}


def _mean(values: Iterable[float | str | None]) -> float | None:
    """Return the mean of the numbers among ``values``, with six digits; None without any."""
    numbers = [value for value in values if isinstance(value, int | float)]
    return float(f"{sum(numbers) / len(numbers):.6g}") if numbers else None
