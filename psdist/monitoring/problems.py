"""Problems of a run as sentences: who is dead, silent, slow or badly connected, and what cannot be saved.

**The rule for stragglers**, which ``psdist explain`` and the alert PsdistStraggler share: a worker's own time in a step
is that of computing and sending; other workers may have to wait for it. If it receives slowly, its own time is all but
waiting. (Receiving is no part of the first one, because the others receive slowly, too, while a worker sends slowly.) A
straggler's own time exceeds ``FACTOR`` times the lower quartile of all workers' own times, by at least ``STEP_SHARE``
of its step. The alert is in ``deploy/monitoring/alerts.yml``.

Pure: each function reads the JSON forms of ``run_json``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

#: A member that has missed this many heartbeats is called silent.
MISSED_HEARTBEATS: Final = 2
#: The others wait for a straggler if their share of waiting exceeds its own by this.
_HELD_UP: Final = 0.2


@dataclass(frozen=True, slots=True)
class Period:
    """A worker's mean over some of its periods.

    shares: of the time, by phase.
    rates: steps per second, by parameter set.
    traffic: pushed and pulled bytes per second.
    """

    seconds: float
    shares: Mapping[str, float]
    rates: Mapping[str, float]
    traffic: tuple[float, float]

    @property
    def rate(self) -> float:
        """Steps per second of the parameter set with most steps."""
        return max(self.rates.values(), default=0.0)

    def step_seconds(self, *phases: str) -> float | None:
        """Return the time that a step spends in these phases; None if there was no step."""
        return sum(self.shares[phase] for phase in phases) / self.rate if self.rate else None

    def step_times(self, steps: float) -> StepTimes:
        """Return the time of a step by phase, if there were this many."""
        return StepTimes(**{phase: self.shares[phase] * self.seconds / steps for phase in StepTimes._fields})


def period(periods: Sequence[Mapping[str, Any]]) -> Period:
    """Return the mean of a worker's periods, in the form of ``sample_json``, by their length."""
    seconds = sum(one["seconds"] for one in periods)

    def mean(values: Iterable[float]) -> float:
        weighted = (value * one["seconds"] for value, one in zip(values, periods, strict=True))
        return float(sum(weighted) / (seconds or 1.0))

    sets = {name for one in periods for name in one["steps_per_second"]}
    push, pull = (
        mean(sum(each[f"{way}_bytes_per_second"] for each in one["traffic"]) for one in periods)
        for way in ("push", "pull")
    )
    return Period(
        seconds,
        {phase: mean(one["phases"][phase] for one in periods) for phase in StepTimes._fields},
        {name: mean(one["steps_per_second"].get(name, 0.0) for one in periods) for name in sets},
        (push, pull),
    )


def problem(who: str, text: str, *, kind: str) -> dict[str, Any]:
    """Return one problem. who: id of a member; empty if it is the run's."""
    return {"who": who, "kind": kind, "text": text}


def of_members(status: dict[str, Any], heartbeat_seconds: float) -> list[dict[str, Any]]:
    """Return the members that were lost, are silent, or leave."""
    found = []
    for member in status["members"]:
        who, role, age = member["id"], member["role"], member["heartbeat_age_seconds"]
        if member["state"] == "lost":
            found.append(problem(who, f"{role} {who} was lost: {member['reason'] or 'no reason known'}", kind="lost"))
        elif member["state"] == "live" and age > MISSED_HEARTBEATS * heartbeat_seconds:
            text = f"{role} {who} is silent for {age:.1f} s: its process is frozen or starved, or its link is cut"
            found.append(problem(who, text, kind="silent"))
        elif member["draining"]:
            found.append(problem(who, f"server {who} is draining: its shards are being moved away", kind="draining"))
    return found


def of_snapshots(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return why the newest attempt to save a snapshot failed."""
    snapshots = status["snapshots"]
    if snapshots is None or not snapshots["last_failure"]:
        return []
    newest = max((one["time"] for one in snapshots["committed"]), default=0.0)
    if newest > snapshots["last_failure_time"] > 0:
        return []
    count = snapshots["failed"]
    times = f" ({count} attempts failed)" if count > 1 else ""
    return [problem("", f"the last snapshot failed{times}: {snapshots['last_failure']}", kind="snapshot")]


def of_shards(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter sets that have lost shards, or have fewer copies than the run asks for."""
    found = []
    for one in status["parameters"]:
        lost = [shard["number"] for shard in one["shards"] if shard["lost"]]
        short = [s for s in one["shards"] if not s["lost"] and len(s["backups"]) + 1 < status["replicas"]]
        if lost:
            found.append(problem("", f"{one['name']}: {len(lost)} shards are lost", kind="shards"))
        if short:
            text = f"{one['name']}: {len(short)} of {len(one['shards'])} shards lack one of {status['replicas']} copies"
            found.append(problem("", text, kind="copies"))
    return found


def of_workers(samples: Mapping[str, Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the stragglers. samples: each worker's newest periods."""
    periods = {who: period(found) for who, found in samples.items()}
    return [
        _slowness(who, periods[who], [one for other, one in periods.items() if other != who])
        for who in stragglers(step_times(samples))
    ]


def _slowness(who: str, mine: Period, others: list[Period]) -> dict[str, Any]:
    """Return a straggler with the reason for its slowness."""

    def median(*phases: str) -> float:
        return statistics.median(sum(one.shares[phase] for phase in phases) for one in others)

    def exceeds(*phases: str) -> float:
        return sum(mine.shares[phase] for phase in phases) - median(*phases)

    # While it sends slowly, the others receive its results as slowly, instead of waiting for them.
    holds_up = min(exceeds("wait"), exceeds("wait", "pull")) < -_HELD_UP
    rate = statistics.median(one.rate for one in others)
    excess = {
        "straggler": exceeds("compute"),
        "link": max(exceeds("push"), exceeds("push", "pull")),
    }
    kind = max(excess, key=lambda name: excess[name])
    phases = ("compute",) if kind == "straggler" else ("push", "pull")
    verb = "computes" if kind == "straggler" else "sends and receives"
    share = sum(mine.shares[phase] for phase in phases)
    effect = "the others wait for it" if holds_up else f"it makes {mine.rate:.2g} steps/s, the others {rate:.2g}"
    seconds = mine.step_seconds(*phases)
    each = f", {1e3 * seconds:.0f} ms a step" if seconds is not None else ""
    name = "is slow" if kind == "straggler" else "has a slow link"
    return problem(who, f"worker {who} {name}: it {verb} for {share:.0%} of its time{each}, and {effect}", kind=kind)


# --- stragglers -------------------------------------------------------------------------------------------------------

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


def step_times(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, StepTimes]:
    """Return the mean step of each worker from its periods, in the form of ``sample_json``.

    A step counts for the parameter set with most steps. A worker without a finished step has its time so far. In a
    window with few steps the times are those of a second.
    """
    periods = {who: period(found) for who, found in samples.items()}
    steps = {who: max(1.0, one.rate * one.seconds) for who, one in periods.items()}
    if max(steps.values(), default=0.0) < _STEPS_MIN:
        steps = {who: one.seconds or 1.0 for who, one in periods.items()}
    return {who: one.step_times(steps[who]) for who, one in periods.items()}


def lower_quartile(values: Iterable[float]) -> float:
    """Return the quartile between two neighbours, as Prometheus' ``quantile(0.25, ...)`` does; 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    below, part = divmod((len(ordered) - 1) / 4, 1)
    left, right = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
    return left + part * (right - left)
