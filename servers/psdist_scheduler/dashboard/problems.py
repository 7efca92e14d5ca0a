"""Problems of a run as sentences: who is dead, silent, slow or badly connected, and what cannot be saved.

Pure: each function reads the JSON forms of ``psdist.monitoring.run_json``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psdist.monitoring.stragglers import step_times, stragglers

#: A member that has missed this many heartbeats is called silent.
MISSED_HEARTBEATS: Final = 2
#: The others wait for a straggler if their share of waiting exceeds its own by this.
_HELD_UP: Final = 0.2


@dataclass(frozen=True, slots=True)
class Period:
    """A worker's last seconds. shares: of the time, by phase. rates: steps per second, by parameter set."""

    shares: Mapping[str, float]
    rates: Mapping[str, float]
    push_bytes_per_second: float = 0.0

    @property
    def rate(self) -> float:
        """Steps per second of the parameter set with most steps."""
        return max(self.rates.values(), default=0.0)

    def step_seconds(self, *phases: str) -> float | None:
        """Return the time that a step spends in these phases; None if there was no step."""
        return sum(self.shares[phase] for phase in phases) / self.rate if self.rate else None


def period(samples: Iterable[dict[str, Any]]) -> Period:
    """Return the mean of a worker's periods in samples, by their length."""
    found = list(samples)
    seconds = sum(one["seconds"] for one in found) or 1.0

    def mean(values: Iterable[float]) -> float:
        return float(sum(value * one["seconds"] for value, one in zip(values, found, strict=True)) / seconds)

    sets = {name for one in found for name in one["steps_per_second"]}
    return Period(
        {phase: mean(one["phases"][phase] for one in found) for phase in ("compute", "push", "wait", "pull")},
        {name: mean(one["steps_per_second"].get(name, 0.0) for one in found) for name in sets},
        mean(sum(each["push_bytes_per_second"] for each in one["traffic"]) for one in found),
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
