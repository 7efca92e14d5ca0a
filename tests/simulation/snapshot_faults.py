"""Storage faults at any point of a save: each storage operation of a small run, with every fault that it can have.

A run without faults determines the operations. Then the same run is repeated for each operation and each fault; up to
the fault it is identical to the last handle. The oracle of ``snapshots`` checks the outcome: training has continued,
and the run restarted at the end has the previous or the new snapshot, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psdist import ASP, BSP
from psdist.optim import SGD
from tests.simulation import scenario, snapshots
from tests.simulation.snapshots import SnapshotOptions, SnapshotWorld
from tests.simulation.storage import FAULTS, WRITING, Operation

#: Options of the runs, by name: one that agrees on a step, one that uses marks.
RUNS: dict[str, SnapshotOptions] = {
    name: SnapshotOptions(
        seed=seed, servers=2, workers=2, consistency=consistency, optimizer=SGD(lr=1.0, momentum=momentum), steps=6,
        slices=2, lives=6, think_seconds=0.1, pulls=0.0, saves=0.0, save_steps=steps, save_seconds=seconds,
        keep_last=1, lease_seconds=1.0, ends=1, data=True,
    )
    for name, seed, consistency, momentum, steps, seconds in (
        ("bsp", 1, BSP(), 0.5, 2, 0.0),
        ("asp", 2, ASP(), 0.0, 0, 0.25),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A fault at one operation of a run of RUNS."""

    run: str
    number: int
    kind: str
    path: str
    node: str
    fault: str

    @property
    def text(self) -> str:
        """Description for people."""
        return f"{self.run}: {self.fault} at operation {self.number}, {self.kind} {self.path} by {self.node}"


class FaultyWorld(SnapshotWorld):
    """World in which one operation fails."""

    case: Case | None = None

    def _fault(self, operation: Operation) -> str:
        case = self.case
        if case is None or operation.number != case.number:
            return ""
        if (operation.kind, operation.path.count("/")) != (case.kind, case.path.count("/")):
            self.oracle.violation(f"operation {case.number} is {operation}, not {case}")
        self.counts[f"{operation.kind}: {case.fault}"] += 1
        return case.fault


def cases(run: str, faults: Sequence[str] = FAULTS) -> list[Case]:
    """Return all cases of a run, from its first commit on. Before that, a lost server is lost for good."""
    result, operations = _play(run, None)
    if result.violations:
        raise AssertionError(result.text)
    first = next(op.number for op in operations if op.kind == "create" and op.path.startswith("commits/"))
    return [
        Case(run, op.number, op.kind, op.path, op.node, fault)
        for op in operations[first:]
        for fault in faults
        if _can_have(op, fault)
    ]


def _can_have(operation: Operation, fault: str) -> bool:
    return operation.kind in WRITING or "," not in fault


def run_cases(given: Sequence[Case]) -> list[tuple[Case, list[str]]]:
    """Run cases in a prepared process. Returns those that broke a promise, with the violations."""
    failed = []
    for case in given:
        result = run_case(case)
        if result.violations:
            failed.append((case, result.violations))
    return failed


def run_case(case: Case, *, trace: bool = False) -> scenario.Result:
    """Run one case in a prepared process."""
    return _play(case.run, case, trace=trace)[0]


def _play(run: str, case: Case | None, *, trace: bool = False) -> tuple[scenario.Result, list[Operation]]:
    return snapshots.play(RUNS[run], _world(case), trace=trace)


def _world(case: Case | None) -> type[SnapshotWorld]:
    return type("CaseWorld", (FaultyWorld,), {"case": case})
