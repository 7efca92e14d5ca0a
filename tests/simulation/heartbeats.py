"""Heartbeats of simulated workers: the scheduler must know every count that a worker had when it made its heartbeat.

Later heartbeats of a session lack the counts that have not changed. These hooks compare the scheduler's
counts with those of the whole heartbeat, after any fault of the stream or the scheduler.
"""

from __future__ import annotations

from typing import Any

from psdist.monitoring.worker_reports import ChangedCounts
from psdist.v1 import scheduler_pb2 as pb
from psdist_scheduler.scheduler import Scheduler

#: Whole counts of heartbeats by their bytes on the wire: numbers of the next pushes, and answered pushes.
Sent = dict[bytes, tuple[dict[str, int], dict[str, int]]]


def _key(heartbeat: pb.SessionRequest.Heartbeat) -> bytes:
    return heartbeat.SerializeToString(deterministic=True)


def watch_sent(running: Any) -> None:
    """Note the whole counts of each heartbeat. running: returns the loop of the run."""
    drop_unchanged = ChangedCounts.drop_unchanged

    def watched(self: ChangedCounts, heartbeat: pb.SessionRequest.Heartbeat) -> None:
        whole = dict(heartbeat.activity.next), dict(heartbeat.totals.pushes)
        drop_unchanged(self, heartbeat)
        running().sent_counts[_key(heartbeat)] = whole
        counts = running().network.counts
        counts["heartbeats: changes" if heartbeat.changed_only else "heartbeats: whole"] += 1

    setattr(ChangedCounts, "drop_unchanged", watched)  # noqa: B010 - mypy refuses an assignment to a method.


def watch_kept(running: Any) -> None:
    """Compare the scheduler's counts after each heartbeat with the worker's."""
    keep_report = Scheduler.keep_report

    def watched(self: Scheduler, call: int, member_id: str, heartbeat: pb.SessionRequest.Heartbeat) -> None:
        keep_report(self, call, member_id, heartbeat)
        whole = running().sent_counts.get(_key(heartbeat))
        if whole is not None and self.cluster.members.sessions.member_of(call) == member_id:
            for lacking in _lacking(self, member_id, *whole):
                running().oracle.violation(f"the scheduler's {lacking} of {member_id} is not that of its heartbeat")

    setattr(Scheduler, "keep_report", watched)  # noqa: B010 - mypy refuses an assignment to a method.


def _lacking(scheduler: Scheduler, member_id: str, numbers: dict[str, int], pushes: dict[str, int]) -> list[str]:
    _, activity = scheduler.cluster.deadlocks._activities.get(member_id, (0, None))
    worker = scheduler.reports.samples._workers.get(member_id)
    known = dict(activity.next) if activity is not None else {}
    counted = worker.pushes if worker is not None else {}
    # A call that came meanwhile may have reported a later push.
    late = [f"next push of {name!r}" for name, number in numbers.items() if known.get(name, -1) < number]
    return late + [f"count of pushes of {name!r}" for name, count in pushes.items() if counted.get(name) != count]
