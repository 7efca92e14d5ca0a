"""The end of a run: its processes are stopped group by group, after a last snapshot. Pure.

The groups are the workers, the servers and the scheduler, in this order. If there is a storage, one more process runs
between workers and servers: the ``snapshot``, which saves the training state. Stopping is SIGTERM, then SIGKILL when
the group's time is over. The snapshot has no time limit. It is skipped if no worker ever connected, and if the
scheduler is gone.

After a worker failed, the others have ``FAILURE_STOP_SECONDS``: the error is known, and a job that has failed should
not hold its machine. Half of that time is for the coordinated shutdown, then a second SIGTERM interrupts scripts that
make no call of psdist. Workers that have not connected get only this one: they may have failed in the same way, and
are printing their tracebacks.

Invariants: a stage ends with the last of its processes. The exit status is decided when the shutdown starts, except
that a run that succeeded ends with ``UNSAVED`` if its snapshot fails.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from psdist.launcher.events import (
    Effect,
    Exited,
    Finish,
    Kill,
    ProcessKey,
    ProcessTable,
    Role,
    RunningProcess,
    Say,
    Start,
    describe,
    enumerate_keys,
)
from psdist.settings import exit_codes

GRACE_SECONDS: Final = 5.0
#: Workers need longer: their shutdown is coordinated, after the pushes in progress.
STOP_TIMEOUT_SECONDS: Final = 30.0
#: Time for the other workers to end after one failed.
FAILURE_STOP_SECONDS: Final = 1.0
#: The groups in the order in which they are stopped.
STOP_ORDER: Final[tuple[Role, ...]] = ("worker", "snapshot", "server", "scheduler")
_SNAPSHOT: Final = ProcessKey("snapshot", 0)


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """Reactions of a run to the end of its processes.

    restarts_max: restarts of each worker.
    grace_seconds, stop_timeout_seconds: time for servers and the scheduler, and for workers, to end.
    service_suspended_seconds, worker_suspended_seconds: time for which they may be stopped, as by SIGSTOP.
    elastic: True if the others continue after a worker failed for good.
    durable: True if a server's state may outlive it, so that the run may continue without it.
    copies: True if other servers hold that state, so that the run certainly continues.
    saves: True if a snapshot is taken at the end.
    debugged: the worker that has the terminal.
    """

    restarts_max: int = 3
    grace_seconds: float = GRACE_SECONDS
    stop_timeout_seconds: float = STOP_TIMEOUT_SECONDS
    durable: bool = False
    copies: bool = False
    saves: bool = False
    elastic: bool = False
    service_suspended_seconds: float = 60.0
    worker_suspended_seconds: float = 30.0
    debugged: ProcessKey | None = None


class _Phase(Enum):
    RUNNING = "running"
    #: The group was sent SIGTERM, or the snapshot was started.
    STOPPING = "stopping"
    #: The processes that are awaited were reported, or the workers were sent SIGTERM again.
    REPORTED = "reported"
    #: The group was sent SIGKILL.
    KILLED = "killed"
    OVER = "over"


class Shutdown:
    """The staged end of the processes in ``table``."""

    def __init__(self, table: ProcessTable, policy: RunPolicy) -> None:
        self._table = table
        self._policy = policy
        self._saves = policy.saves
        self._worker_failed = False
        self._phase = _Phase.RUNNING
        self._stage = 0
        self._started_at = 0.0
        self._end = Finish(0)

    @property
    def is_under_way(self) -> bool:
        """True if the run is ending."""
        return self._phase is not _Phase.RUNNING

    @property
    def snapshot_is_ahead(self) -> bool:
        """True if a snapshot is still to be started."""
        return self._saves and self._table.ever_connected and self._stage < STOP_ORDER.index("snapshot")

    def start(self, end: Finish, now: float) -> list[Effect]:
        """Start stopping everything. The run ends with ``end``, whose culprit may be a worker that failed."""
        self._end = end
        self._worker_failed = end.culprit is not None and end.culprit.role == "worker"
        return self._stop_from(0, now)

    def leave_snapshot_out(self) -> None:
        """Skip the snapshot, if it was not started yet."""
        self._saves = False

    def on_exited(self, event: Exited, now: float) -> list[Effect]:
        """Handle the end of a process, which was already removed from the table."""
        effects: list[Effect] = []
        if event.key == _SNAPSHOT and event.returncode != 0:
            self._end = replace(self._end, status=self._end.status or exit_codes.UNSAVED)
            # If the snapshot process failed on its own, its last line says why.
            how = f": the last one was {describe(event.returncode)}" if event.returncode < 0 else ""
            lost = f"progress since the last snapshot is not saved{how}"
            effects.append(Say(f"{lost}; the run ends with exit status {self._end.status}"))
        if not self._table.with_role(STOP_ORDER[self._stage]):
            effects += self._stop_from(self._stage + 1, now)
        return effects

    def on_time(self, now: float) -> list[Effect]:
        """Report processes that take long to end, and kill those that take too long."""
        role = STOP_ORDER[self._stage]
        late, limit = list(self._table.with_role(role)), self._limit_seconds(role)
        if role == "snapshot" or self._phase in (_Phase.KILLED, _Phase.OVER):
            return []
        if now >= self._started_at + limit:
            self._phase = _Phase.KILLED
            said = Say(f"{enumerate_keys(late)} did not end within {limit:g} s of SIGTERM: killed")
            return [said, *(Kill(key, signal.SIGKILL) for key in late)]
        if self._phase is not _Phase.STOPPING:
            return []
        if role == "worker" and self._worker_failed and now >= self._started_at + limit / 2:
            self._phase = _Phase.REPORTED
            return [Kill(key, signal.SIGTERM) for key in late]
        if now >= self._started_at + self._policy.grace_seconds:
            self._phase = _Phase.REPORTED
            left = self._started_at + limit - now
            return [Say(f"waiting for {enumerate_keys(late)} to end; killed in {left:.0f} s")]
        return []

    def _limit_seconds(self, role: Role) -> float:
        if role != "worker":
            return self._policy.grace_seconds
        most = self._policy.stop_timeout_seconds
        return min(most, FAILURE_STOP_SECONDS) if self._worker_failed else most

    def _stop_from(self, stage: int, now: float) -> list[Effect]:
        """Stop the first group from ``stage`` on that has a process."""
        for self._stage in range(stage, len(STOP_ORDER)):
            role = STOP_ORDER[self._stage]
            culprit = self._end.culprit
            has_left = culprit is not None and culprit.role == "worker" and culprit not in self._table
            effects: list[Effect] = [
                Kill(key, signal.SIGTERM)
                for key, process in self._table.with_role(role).items()
                if process.connected or not (role == "worker" and has_left)
            ]
            if role == "snapshot":
                effects = self._start_snapshot(now)
            if self._table.with_role(role):
                self._phase, self._started_at = _Phase.STOPPING, now
                return effects
        self._phase = _Phase.OVER
        return [self._end]

    def _start_snapshot(self, now: float) -> list[Effect]:
        if not self._saves or not self._table.ever_connected or not self._table.with_role("scheduler"):
            return []
        self._table.start(_SNAPSHOT, RunningProcess(now))
        return [Start(_SNAPSHOT, 0)]
