"""When a snapshot is due, and at which cut. Pure.

The last snapshot of a run comes first, then what callers wait for, then the policy's interval. A snapshot every so many
steps is begun long before its step, where all parameter sets are in step. It gives way to a request for one now.

Invariant: a multiple of the interval is due once.

Not here: what is missing for a snapshot (``snapshots``), the attempts at it (``attempt_runner``), who waits
(``waiters``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psdist.snapshots.policy import SavePolicy
from psdist_scheduler.events.snapshot_events import AT_THE_END
from psdist_scheduler.placement.parameters import ParameterSet
from psdist_scheduler.snapshots.attempt import Attempt
from psdist_scheduler.snapshots.cut import is_stepped
from psdist_scheduler.snapshots.end_snapshot import EndSnapshot, EndState
from psdist_scheduler.snapshots.tries import Tries
from psdist_scheduler.snapshots.waiters import SnapshotWaiters


@dataclass(frozen=True, slots=True)
class DueSnapshot:
    """A snapshot that is to be taken. steps: of its cut, by BSP parameter set. ahead: its step is far, and nobody
    waits."""

    steps: dict[str, int]
    reason: str
    ahead: bool = False


class SnapshotSchedule:
    """When snapshots of one run are due."""

    def __init__(self, policy: SavePolicy, now: float) -> None:
        self._policy = policy
        self.tries = Tries()
        #: When the last attempt ended, and the highest version then, whose multiple of the interval is over.
        self._ended_at = now
        self._ended_version = 0

    def due(
        self,
        ready: Sequence[ParameterSet],
        waiters: SnapshotWaiters,
        end: EndSnapshot,
        saved: Mapping[str, int],
        now: float,
    ) -> DueSnapshot | None:
        """What is due by now; None for nothing. saved: steps of the newest snapshot, by parameter set; empty where
        there is none."""
        soonest = self.tries.soonest(ready, [waiter.next for waiter in waiters.workers])
        if end.state is EndState.WANTED:
            steps = {name: max(step, self.tries.known.get(name, 0)) for name, step in end.steps.items()}
            return DueSnapshot(soonest | steps, AT_THE_END)
        if waiters:
            return DueSnapshot(soonest, next(iter(waiters)).reason)
        if self._policy.steps:
            return self._due_by_steps(ready, soonest)
        if self._policy.seconds and now - self._ended_at >= self._policy.seconds and self.has_trained(ready, saved):
            return DueSnapshot(soonest, self._policy.every)
        return None

    def has_trained(
        self, ready: Sequence[ParameterSet], saved: Mapping[str, int], least: Mapping[str, int] | None = None
    ) -> bool:
        """Whether anything was trained since a snapshot that has the steps ``saved``. least: steps that are reached,
        whether servers have reported that or not."""
        return any(max(self.tries.version(p), (least or {}).get(p.name, 0)) > saved.get(p.name, 0) for p in ready)

    def attempt_ended(self, attempt: Attempt, now: float) -> None:
        """An attempt has ended for good, one way or the other."""
        versions = [self.tries.version(p) for p in attempt.cut.parameters if p.record]
        self._ended_at, self._ended_version = now, max(self._ended_version, attempt.cut.step, *versions)
        self.tries = Tries(known=self.tries.known)

    def rolled_back(self) -> None:
        """The run went back: what was known of steps is not so any more."""
        self.tries, self._ended_version = Tries(), 0

    def _due_by_steps(self, ready: Sequence[ParameterSet], soonest: dict[str, int]) -> DueSnapshot | None:
        versions = {p.name: self.tries.version(p) for p in ready}
        high, interval = max(versions.values()), self._policy.steps
        if all(is_stepped(p) for p in ready) and high - min(versions.values()) <= 1:
            step = _next_multiple(max(high, self._ended_version), interval)
            return DueSnapshot(dict.fromkeys(versions, step), self._policy.every, ahead=True)
        if high < _next_multiple(self._ended_version, interval):
            return None
        return DueSnapshot(soonest, self._policy.every)


def _next_multiple(step: int, interval: int) -> int:
    """The first multiple of ``interval`` after ``step``."""
    return (step // interval + 1) * interval
