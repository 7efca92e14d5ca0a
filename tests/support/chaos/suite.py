"""The promises that chaos runs can show, each with its run and its target figures.

Nothing is started here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from tests.support.chaos import faults
from tests.support.chaos.cluster import Reach
from tests.support.chaos.injections import FAULTS
from tests.support.chaos.report import ChaosReport
from tests.support.chaos.settings import ChaosSettings


@dataclass(frozen=True, slots=True)
class Case:
    """A promise.

    changes: settings of its run that differ from the given ones.
    met: returns True if the figures of a good report reach the target.
    """

    name: str
    target: str
    changes: tuple[tuple[str, Any], ...]
    met: Callable[[ChaosReport], bool]
    kills_max: int = 100

    def settings(self, given: ChaosSettings) -> ChaosSettings:
        """Return the settings of the run that shows the promise."""
        return replace(given, **{"kills": min(given.kills, self.kills_max)} | dict(self.changes))

    def missing(self) -> str:
        """Return what this machine lacks for the run; empty if nothing."""
        needed = FAULTS[dict(self.changes)["fault"]].reach is Reach.NAMESPACE
        return faults.namespaces_missing() if needed else ""


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a case."""

    case: Case
    report: ChaosReport

    @property
    def met(self) -> bool:
        """True if the promise was kept."""
        return self.report.good and self.case.met(self.report)

    def as_json(self) -> dict[str, Any]:
        """Return the report, with the promise."""
        return {"case": self.case.name, "target": self.case.target, "met": self.met} | self.report.as_json()

    @property
    def row(self) -> str:
        """One line of a Markdown table."""
        return f"| {self.case.name} | {self.case.target} | {self._figures()} | {'met' if self.met else 'NOT MET'} |"

    def _figures(self) -> str:
        report, shown = self.report, self.report.as_json()
        parts = [f"{len(report.faults)} faults"]
        if report.verdict is not None:
            parts += [f"{report.verdict.acknowledged:,} pushes, {report.verdict.lost} lost"]
            parts += [f"{report.verdict.repeated} repeated"]
        if report.recoveries:
            times = shown["recovery_seconds"].items()
            parts += ["recovery " + ", ".join(f"{name} {1e3 * value:.0f} ms" for name, value in times)]
        if report.equal is not None:
            parts += ["byte-identical" if report.equal else "NOT byte-identical"]
        return "; ".join([*parts, *report.ended[:1], *report.problems[:1]])


def _within(**limits: float) -> Callable[[ChaosReport], bool]:
    """Return a check that percentiles of the recovery are within limits, in seconds."""

    def met(report: ChaosReport) -> bool:
        times = report.as_json()["recovery_seconds"]
        return all(times[name] is not None and times[name] <= limit for name, limit in limits.items())

    return met


def _pauses(seconds: float) -> Callable[[ChaosReport], bool]:
    return lambda report: report.as_json()["pause_seconds_max"] <= seconds


def _good(report: ChaosReport) -> bool:
    return report.good


def _case(name: str, target: str, met: Callable[[ChaosReport], bool], kills_max: int = 100, **changes: Any) -> Case:
    return Case(name, target, tuple(changes.items()), met, kills_max)


_KILL: Final = "0 lost, 0 repeated; recovery p50 under 400 ms, p99 under 1.5 s"

CASES: Final[tuple[Case, ...]] = (
    _case(
        "servers killed, BSP", f"{_KILL}; byte-identical", _within(p50=0.4, p99=1.5), fault="server-kill", mode="bsp"
    ),
    _case("servers killed, ASP", _KILL, _within(p50=0.4, p99=1.5), fault="server-kill", mode="asp"),
    _case(
        "servers struck, half of them while a copy is being filled", "0 lost, 0 repeated; byte-identical; no refused "
        "update is repeated more than once", _good, 20, fault="server-refill", mode="bsp", servers=5, pace_seconds=0.1,
    ),
    _case(
        "server frozen", "replaced within 3 s p99; the zombie changes nothing", _within(p99=3.0), 20,
        fault="server-freeze", mode="bsp",
    ),
    _case(
        "worker killed", "the others' step resumes within 0.5 s", _within(max=0.5), 20,
        fault="worker-kill", mode="bsp", pace_seconds=0.01,
    ),
    _case(
        "worker frozen", "the others' step resumes within the lease + 0.5 s; it rejoins by itself", _within(max=2.5),
        10, fault="worker-freeze", mode="bsp", pace_seconds=0.01, lease_seconds=2.0,
    ),
    _case(
        "workers busy, BSP", "0 dropped; byte-identical", _good, 10,
        fault="worker-busy", mode="bsp", workers=4, down_seconds=5.0,
    ),
    _case("workers busy, ASP", "0 dropped", _good, 10, fault="worker-busy", mode="asp", workers=4, down_seconds=5.0),
    _case(
        "scheduler killed, 30 s down", "no step fails; the epoch does not go back", _pauses(1.0), 1,
        fault="scheduler-kill", mode="bsp", down_seconds=30.0,
    ),
    _case(
        "replicas=1, server killed", "ends with a typed error that says what was lost", _good, 1,
        fault="server-lost", mode="bsp", replicas=1,
    ),
    _case("server partitioned", "0 lost, 0 repeated", _good, 5, fault="partition", mode="bsp"),
    _case("server partitioned, one way", "0 lost, 0 repeated", _good, 5, fault="partition-out", mode="asp"),
    _case(
        "a worker cannot reach a server", "named in status within 10 s; the others train on, 0 lost, 0 repeated", _good,
        2, fault="path-cut", mode="bsp", pace_seconds=0.01,
    ),
    _case(
        "a worker cannot reach a server, for seconds", "0 lost, 0 repeated; byte-identical", _good, 5,
        fault="path-cut-brief", mode="bsp",
    ),
    _case(
        "a worker reaches a server by gRPC alone", "0 lost, 0 repeated; byte-identical", _good, 2,
        fault="tcp-cut", mode="bsp", transport="tcp",
    ),
    _case("server without its scheduler", "0 lost, 0 repeated", _good, 5, fault="proxy-scheduler", mode="bsp"),
    _case("connections reset", "0 lost, 0 repeated", _good, 20, fault="proxy-reset", mode="asp"),
    _case("server silent", "0 lost, 0 repeated", _good, 5, fault="proxy-blackhole", mode="bsp"),
)  # fmt: skip
