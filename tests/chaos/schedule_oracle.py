"""Checks of one schedule that real processes have carried out: each call's result, end, and error.

- No result is wrong.
- A call ends: within 2 s after the last rank has begun it, or after the limit within which its fault is noticed.
- Once the first rank has an error, each call at the others that is under way, or begins later, ends within 2 s, unless
  it has its result. Time in which a rank's process was stopped does not count for it. If the first rank is stopped
  before it could tell the others, they have to notice that first. A rank that closes its group, or gives up a call,
  leaves the others their calls among themselves.
- An error names its cause: a fault that has struck, by its kind and its rank.
- A schedule without faults has results only.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tests.chaos.schedule_draw import Fault, Operation, Schedule

#: Seconds within which all ranks learn of the first rank's error.
SPREAD_SECONDS: Final = 2.0
#: Lease of a worker, after which a stopped one is expelled.
LEASE_SECONDS: Final = 3.0
#: Longest time in which the scheduler detects ranks that wait for each other: reports come every half a second, and it
#: asks the ranks before it believes them.
DEADLOCK_SECONDS: Final = 5.0
_OTHER_CALLS: Final = ("other kind", "other size", "other dtype")


@dataclass
class Call:
    """A call at one rank. since: when it began, or when an asynchronous one was waited for."""

    rank: int
    operation: Operation
    began: float
    since: float = math.inf
    ended: float = math.inf
    #: "right", "error", "gave up", or why the result is wrong; empty if it has not ended.
    result: str = ""
    error: str = ""
    text: str = ""
    lost: int = -1

    @property
    def failed(self) -> bool:
        """True if it ended with an error."""
        return self.result in ("error", "gave up")

    def __str__(self) -> str:
        end = self.result or "no end"
        return f"rank {self.rank} in {self.operation}: {end} {self.error} {self.text}".rstrip()


@dataclass
class Stop:
    """Time in which a rank's process was stopped. until: infinite if it was killed in this state."""

    rank: int
    at: float
    until: float = math.inf


@dataclass
class Record:
    """Course of a schedule."""

    schedule: Schedule
    calls: dict[tuple[int, int], Call] = field(default_factory=dict)
    #: Times at which faults have struck, by their index in the schedule.
    strikes: dict[int, float] = field(default_factory=dict)
    stops: list[Stop] = field(default_factory=list)
    #: Times at which processes ended, by rank.
    deaths: dict[int, float] = field(default_factory=dict)
    #: Reports and strikes, with their times since the schedule began.
    lines: list[tuple[float, str]] = field(default_factory=list)

    @property
    def course(self) -> str:
        """All reports and strikes, in their order."""
        return "\n".join(f"{at:8.4f} {text}" for at, text in sorted(self.lines))

    def struck(self) -> Iterator[tuple[Fault, float]]:
        """Return the faults that have struck, with their times."""
        for number, at in sorted(self.strikes.items()):
            yield self.schedule.faults[number], at

    def is_stopped(self, rank: int, at: float) -> bool:
        """Return True if a rank's process was stopped, or had ended, at a time."""
        stopped = any(stop.rank == rank and stop.at <= at < stop.until for stop in self.stops)
        return stopped or self.deaths.get(rank, math.inf) <= at


def first_error(record: Record) -> Call | None:
    """Return the call that was the first to end with an error at a rank, other than that of a closed group."""
    failed = [call for call in record.calls.values() if call.failed and not _is_own_end(record, call)]
    return min(failed, key=lambda call: call.ended, default=None)


def spread(record: Record) -> float:
    """Return the seconds between the first rank's error and the last one's, without time that does not count."""
    first = first_error(record)
    if first is None:
        return 0.0
    base = _notified(record)
    late = [
        call.ended - max(base, _counted_from(record, call))
        for call in record.calls.values()
        if call.failed and call.rank != first.rank
    ]
    return max(0.0, *late) if late else 0.0


def violations(record: Record, seconds: float = SPREAD_SECONDS) -> list[str]:
    """Return all breaches of the promises. seconds: within which a rank learns of an error, or gets a result."""
    found = []
    for call in record.calls.values():
        if call.result.startswith("wrong"):
            found.append(str(call))
        elif call.failed:
            found += _check_cause(record, call)
        if call.since < math.inf and (late := _check_end(record, call, seconds)):
            found.append(late)
    if not record.schedule.faults:
        found += [f"{call}, without a fault" for call in record.calls.values() if call.result != "right"]
    return found


def outcomes(record: Record) -> Counter[str]:
    """Return how the calls ended: the number of results, and of each error."""
    return Counter(call.error or call.result or "end of its process" for call in record.calls.values())


# --- ends -------------------------------------------------------------------------------------------------------------


def _is_own_end(record: Record, call: Call) -> bool:
    """True if a rank has closed its own group before, or gave the call up: others may continue among themselves."""
    return call.error == "ClosedError" or call.result == "gave up"


def _notified(record: Record) -> float:
    """Return the time from which all ranks can know of the first error; infinite if there is none.

    A rank whose process is stopped right after its error may not have told the others.
    """
    times = []
    for call in record.calls.values():
        if not call.failed or _is_own_end(record, call):
            continue
        at = call.ended
        for stop in record.stops:
            if stop.rank == call.rank and at <= stop.at < at + SPREAD_SECONDS:
                at = max(at, min(stop.until, stop.at + _silence_seconds(record)))
        times.append(at)
    return min(times, default=math.inf)


def _silence_seconds(record: Record) -> float:
    """Return the documented limit within which a stopped process is noticed."""
    silence = record.schedule.silence
    # A second more passes until the map of the workers lacks it, and as much until that is believed.
    return LEASE_SECONDS + 2.0 if silence is None else silence


def _counted_from(record: Record, call: Call) -> float:
    """Return the time from which a call's own time counts: its begin, and the end of a stop of its process."""
    ends = [stop.until for stop in record.stops if stop.rank == call.rank and stop.at < call.ended]
    return max(call.since, *(end for end in ends if end < math.inf), -math.inf)


def _check_end(record: Record, call: Call, seconds: float) -> str:
    """Return why a call has ended too late, or not at all; empty if it is in order."""
    since = _counted_from(record, call)
    if call.result == "right" and not record.schedule.faults:
        return ""  # A slow machine fails no test.
    latest = max(since, _needed_seconds(record, call))
    limit, cause = latest, "its ranks have made it and faults could be noticed"
    if (told := _notified(record)) < math.inf and max(told, since) < latest and call.result != "right":
        limit, cause = max(told, since), f"the first error, {first_error(record)}"
    limit += seconds
    if call.ended <= limit or (call.ended == math.inf and record.is_stopped(call.rank, limit)):
        return ""
    ended = "has not ended" if call.ended == math.inf else f"ended {call.ended - limit + seconds:.2f} s after"
    return f"{call}: {ended}: {cause}"


def _needed_seconds(record: Record, call: Call) -> float:
    """Return the time at which a call's ranks have all begun it, and the faults before its end could be noticed."""
    begins = [
        other.began
        for other in record.calls.values()
        if other.operation.number == call.operation.number and other.began < call.ended
    ]
    noticed = [at + _noticed_seconds(record, fault) for fault, at in record.struck() if at <= call.ended]
    thaws = [stop.until for stop in record.stops if stop.at <= call.ended and stop.until < math.inf]
    return max([-math.inf, *begins, *noticed, *thaws])


def _noticed_seconds(record: Record, fault: Fault) -> float:
    match fault.kind:
        case "freeze" | "freeze briefly":
            return _silence_seconds(record)
        case "late" | "time limit":
            return fault.seconds
        case "omitted call" | "other kind":
            return DEADLOCK_SECONDS
    return 0.0


# --- causes -----------------------------------------------------------------------------------------------------------


def _check_cause(record: Record, call: Call) -> list[str]:
    if call.result == "gave up":
        asked = [fault for fault, _ in record.struck() if (fault.kind, fault.rank) == ("give up", call.rank)]
        return [] if asked else [f"{call}, and nothing has interrupted it"]
    if any(at <= call.ended and _explains(fault, call) for fault, at in record.struck()):
        return []
    return [f"{call}: the error names no fault that has struck"]


def _explains(fault: Fault, call: Call) -> bool:
    """True if an error has a fault for its cause."""
    rank, error, text = fault.rank, call.error, call.text

    def says(pattern: str) -> bool:
        return re.search(pattern, text) is not None

    is_lost = error == "WorkerLostError" and call.lost == rank and says(rf"rank {rank} is gone")
    match fault.kind:
        case "kill" | "end of script":
            return is_lost
        case "freeze" | "freeze briefly":
            return is_lost or (call.rank == rank and error == "FencedError")
        case "other kind" | "other size" | "other dtype":
            if error == "CollectiveMismatchError" and says(rf"rank {rank} calls"):
                return True
            return fault.kind == "other kind" and _explains_omission(fault, call)
        case "omitted call":
            return _explains_omission(fault, call)
        case "time limit":
            return error == "WaitTimeoutError" and says(rf"rank {rank} reached the timeout of {fault.seconds:g} s")
        case "close":
            return error == "ClosedError" and says(rf"rank {rank} closed the group")
        case "give up":
            return error == "ClosedError" and says(rf"rank {rank} (gave up|closed the group)")
    return False


def _explains_omission(fault: Fault, call: Call) -> bool:
    """True if an error comes from a rank that makes other calls than the others.

    It may be ahead of them, wait for them, or make a call that it alone has left. A rank that waits then for one that
    has made all of its calls learns that this one has closed the group.
    """
    if call.error == "CollectiveMismatchError":
        return re.search(rf"rank {fault.rank} calls", call.text) is not None
    return call.error == "MutualWaitError" or (call.error == "ClosedError" and "closed the group" in call.text)
