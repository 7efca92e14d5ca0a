"""The rule for stragglers: the same for the dashboard, ``psdist top``, ``psdist explain`` and an alert.

A worker's own time in a step is that of computing and sending; other workers may have to wait for it. If it receives
slowly, its own time is all but waiting. (Receiving is no part of the first one, because the others receive slowly, too,
while a worker sends slowly.) A straggler's own time exceeds ``FACTOR`` times the lower quartile of all workers' own
times, by at least ``STEP_SHARE`` of its step. Pure.

The alert is PsdistStraggler in ``deploy/monitoring/alerts.yml``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

#: Smallest own time of a straggler, divided by the lower quartile.
FACTOR: Final = 1.5
#: Least part of its step by which a straggler exceeds the lower quartile: less is not worth a word.
STEP_SHARE: Final = 0.1
#: With fewer steps of the fastest worker one more or less is a large error, so all workers count as equally fast.
_STEPS_MIN: Final = 10.0


class StepTimes(NamedTuple):
    """A worker's mean step: seconds by phase."""

    compute: float
    push: float
    wait: float
    pull: float

    @property
    def own(self) -> float:
        """Seconds of computing and sending."""
        return self.compute + self.push

    @property
    def busy(self) -> float:
        """Seconds of all but waiting."""
        return self.own + self.pull


def stragglers(workers: Mapping[str, StepTimes]) -> dict[str, float]:
    """Return the stragglers among workers by id, each with its own time divided by the lower quartile."""
    found: dict[str, float] = {}
    for own in ({who: one.own for who, one in workers.items()}, {who: one.busy for who, one in workers.items()}):
        typical = lower_quartile(own.values())
        for who, seconds in own.items():
            if seconds > FACTOR * typical and seconds - typical > STEP_SHARE * sum(workers[who]):
                found.setdefault(who, seconds / typical if typical else float("inf"))
    return found


def step_times(periods: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, StepTimes]:
    """Return the mean step of each worker from its periods, in the form of ``sample_json``.

    A step counts for the parameter set with most steps. A worker without a finished step has its time so far. In a
    window with few steps the times are those of a second.
    """
    seconds = {who: sum(one["seconds"] for one in found) for who, found in periods.items()}
    steps = {who: max(1.0, _steps(found)) for who, found in periods.items()}
    if max(steps.values(), default=0.0) < _STEPS_MIN:
        steps = {who: one or 1.0 for who, one in seconds.items()}
    return {who: _mean_step(found, steps[who]) for who, found in periods.items()}


def _steps(periods: Iterable[Mapping[str, Any]]) -> float:
    steps: dict[str, float] = {}
    for one in periods:
        for name, rate in one["steps_per_second"].items():
            steps[name] = steps.get(name, 0.0) + rate * one["seconds"]
    return max(steps.values(), default=0.0)


def _mean_step(periods: Iterable[Mapping[str, Any]], steps: float) -> StepTimes:
    sums = dict.fromkeys(StepTimes._fields, 0.0)
    for one in periods:
        for phase in sums:
            sums[phase] += one["phases"][phase] * one["seconds"]
    return StepTimes(**{phase: total / steps for phase, total in sums.items()})


def lower_quartile(values: Iterable[float]) -> float:
    """Return the quartile between two neighbours, as Prometheus' ``quantile(0.25, ...)`` does; 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    below, part = divmod((len(ordered) - 1) / 4, 1)
    left, right = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
    return left + part * (right - left)
