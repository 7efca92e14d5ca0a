"""The result of a chaos run: faults with their recoveries, the verdict, and their presentation. Pure.

It also counts the pauses of training that faults cause, and updates that replicas refused, from the logs of the
servers. A refused update may be sent again once, after the copy was filled or the stream was reopened. A second refusal
of the same update means that the primary repeats it endlessly.

The keys of ``as_json`` are stable.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tests.support.chaos.fills import Role
from tests.support.chaos.oracle import Verdict


@dataclass(frozen=True, slots=True)
class Injected:
    """An injected fault.

    at: monotonic seconds.
    recovery_seconds: see ``ChaosReport``; None if no worker had to recover.
    pause_seconds: the longest time between two acknowledgements of one worker while the fault lasted and after it.
    fill_role: role of the target in a filling under way, None if it took part in none.
    """

    kind: str
    target: str
    at: float
    recovery_seconds: float | None = None
    pause_seconds: float = 0.0
    fill_role: Role | None = None


@dataclass(slots=True)
class ChaosReport:
    """The report of one run.

    Recovery is the time from a fault to the first acknowledged push that started after it, of the worker for which it
    took longest. A worker that is the target of the fault is left out. Each push needs every server.

    equal: True if the weights are byte for byte those of an undisturbed run; None if that cannot be expected.
    expelled: servers that were expelled without a fault of their own, because the machine was too slow.
    runs_ended: 1 if the run ended although it had to continue.
    refusals: number of times that replicas refused each update (``refusals``).
    named: seconds from a cut path until ``psdist status`` named its two ends.
    problems: other broken promises, one sentence each.
    ended: the last words of the processes of a run that had to end.
    """

    what: str
    settings: dict[str, Any]
    faults: list[Injected] = field(default_factory=list)
    verdict: Verdict | None = None
    equal: bool | None = None
    steps_per_second: float = 0.0
    seconds: float = 0.0
    expelled: int = 0
    runs_ended: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    named: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    @property
    def recoveries(self) -> list[float]:
        """Recovery times in seconds, the shortest first."""
        return sorted(fault.recovery_seconds for fault in self.faults if fault.recovery_seconds is not None)

    @property
    def during_fill(self) -> list[Injected]:
        """Faults that struck while a copy was being filled."""
        return [fault for fault in self.faults if fault.fill_role]

    @property
    def refused_again(self) -> int:
        """Updates that replicas refused more than once."""
        return sum(count > 1 for count in self.refusals.values())

    def pauses(self, kind: str = "") -> dict[str, float | None]:
        """Return percentiles of the pauses in seconds, of all faults or of one kind."""
        found = sorted(fault.pause_seconds for fault in self.faults if kind in ("", fault.kind))
        return {name: percentile(found, part) for name, part in _PERCENTILES.items()}

    @property
    def good(self) -> bool:
        """True if nothing was lost or repeated, weights are equal if they should be, no refused update was repeated
        endlessly, and no other promise was broken."""
        counted = self.verdict is None or not (self.verdict.lost or self.verdict.repeated)
        return counted and self.equal is not False and not self.problems and not self.refused_again

    def as_json(self) -> dict[str, Any]:
        """Return the report with stable keys; times in seconds."""
        return {
            "what": self.what,
            "good": self.good,
            "settings": self.settings,
            "faults": len(self.faults),
            "faults_by_kind": dict(Counter(fault.kind for fault in self.faults)),
            "during_fill": len(self.during_fill),
            "during_fill_by_role": dict(Counter(fault.fill_role for fault in self.during_fill)),
            "runs_ended": self.runs_ended,
            "refused_updates": len(self.refusals),
            "refused_again": self.refused_again,
            **(asdict(self.verdict) if self.verdict else {}),
            "recovery_seconds": {name: percentile(self.recoveries, part) for name, part in _PERCENTILES.items()},
            "pause_seconds": self.pauses(),
            "pause_seconds_by_kind": {kind: self.pauses(kind) for kind in sorted({one.kind for one in self.faults})},
            "pause_seconds_max": round(max((fault.pause_seconds for fault in self.faults), default=0.0), 4),
            "equal": self.equal,
            "steps_per_second": round(self.steps_per_second, 1),
            "seconds": round(self.seconds, 1),
            "expelled": self.expelled,
            "named_seconds_max": _rounded(max(self.named, default=None)),
            "problems": self.problems,
            "ended": self.ended,
            "injected": [
                {
                    "kind": fault.kind,
                    "target": fault.target,
                    "fill_role": fault.fill_role,
                    "recovery_seconds": _rounded(fault.recovery_seconds),
                    "pause_seconds": round(fault.pause_seconds, 4),
                }
                for fault in self.faults
            ],
        }


_PERCENTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def percentile(ordered: Sequence[float], part: float) -> float | None:
    """Return the nearest-rank percentile of ascending values; None if there are none."""
    if not ordered:
        return None
    rank = -(-len(ordered) * round(part * 1000) // 1000)
    return round(ordered[max(0, rank - 1)], 4)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _times(percentiles: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {1e3 * (value or 0):.0f} ms" for name, value in percentiles.items())


def table(report: ChaosReport) -> str:
    """Format the report as text."""
    shown = report.as_json()
    rows = [("case", report.what), ("faults", f"{len(report.faults)} in {report.seconds:.0f} s")]
    if report.during_fill:
        roles = ", ".join(f"{count} x {role}" for role, count in shown["during_fill_by_role"].items())
        kinds = ", ".join(f"{count} x {kind}" for kind, count in shown["faults_by_kind"].items())
        rows += [("kinds", kinds), ("during a fill", f"{len(report.during_fill)}: {roles} of the copy")]
    if report.verdict is not None:
        found = report.verdict
        pushes = f"{found.acknowledged:,} acknowledged, {found.dropped} dropped, {found.unknown} unanswered"
        rows += [("pushes", f"{pushes}; {report.steps_per_second:.0f} a second")]
        rows += [("lost", str(found.lost)), ("repeated", str(found.repeated))]
    if report.recoveries:
        rows += [("recovery", _times(shown["recovery_seconds"])), ("pause", _times(shown["pause_seconds"]))]
        by_kind = shown["pause_seconds_by_kind"].items()
        rows += [("", f"{_times(times)}: {kind}") for kind, times in by_kind if len(by_kind) > 1]
    if report.refusals:
        rows += [("refused", f"{len(report.refusals)} updates, {report.refused_again} of them more than once")]
    if report.runs_ended:
        rows += [("runs ended", str(report.runs_ended))]
    if report.expelled:
        rows += [("expelled", f"{report.expelled} servers, silent for a lease without a fault of their own")]
    if report.named:
        rows += [("named", f"in psdist status after at most {max(report.named):.1f} s")]
    if report.equal is not None:
        rows += [("weights", "equal to the undisturbed run" if report.equal else "NOT those of the undisturbed run")]
    rows += [("ended", line) for line in report.ended]
    rows += [("PROBLEM", problem) for problem in report.problems]
    rows += [("result", "as promised" if report.good else "NOT AS PROMISED")]
    return "\n".join(f"{name:15}{value}" for name, value in rows)


def longest_pauses(moments: Sequence[float], faults: Sequence[Injected], until: float) -> list[float]:
    """Return the longest pause of one worker that each fault caused, in seconds.

    A pause counts for the faults that struck during it, or else for the last one before it. One that a frozen server
    shares with a killed one counts only for the frozen one: it lasts as long as the lease.

    moments: of the worker's acknowledgements.
    faults: in their order.
    until: when the last fault's effects were over.
    """
    longest = [0.0] * len(faults)
    for before, after in itertools.pairwise(moments):
        if after > faults[0].at and before < until:
            for number in _causes(before, after, faults):
                longest[number] = max(longest[number], after - before)
    return longest


def _causes(before: float, after: float, faults: Sequence[Injected]) -> list[int]:
    during = [number for number, fault in enumerate(faults) if before < fault.at < after]
    if not during:
        return [sum(fault.at <= before for fault in faults) - 1]
    return [number for number in during if faults[number].kind.endswith("freeze")] or during


#: How servers log a refused update: it does not fit the copy (``replicator``), or updates before it are missing
#: (``wire.services``, with the text of ``core.replication``).
STALE: Final = "a copy is stale"
GAP: Final = "Replicate refused: update "
#: The primary's end of the connection, which differs once it has dialed again (``wire.services``).
_CALLER: Final = re.compile(r" \(a call from [^)]*\)")


def count_refusals(logs: Iterable[str]) -> Counter[str]:
    """Count refusals by log line without its time and caller. It names the shard, and the version or the lsn.

    logs: the whole log of each server.
    """
    lines = (line.partition(" ")[2] for text in logs for line in text.splitlines())
    return Counter(_CALLER.sub("", line) for line in lines if STALE in line or GAP in line)
