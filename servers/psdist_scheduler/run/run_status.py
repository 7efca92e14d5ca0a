"""Status of a run: the report of GetStatus, the reports of members in it, and the history of events.

The report is assembled from the state of the machine, which it only reads.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from psdist.consistency import kind_of
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert
from psdist.wire.convert import make_message
from psdist.wire.limits import EVENTS_MAX
from psdist_scheduler.decide.cluster import Cluster
from psdist_scheduler.decide.cluster_state import EventRecord, Member
from psdist_scheduler.decide.effects import LogEvent
from psdist_scheduler.decide.snapshot_attempt import Attempt, AttemptPhase
from psdist_scheduler.run import conversions
from psdist_scheduler.run.samples import SampleHistory
from psdist_scheduler.run.summary_keeper import SummaryKeeper


class Reports:
    """Reports of the run's processes about themselves: those of members are from their last heartbeats, by id."""

    def __init__(self) -> None:
        self.by_member: dict[str, pb.MemberStatus] = {}
        #: ``host:port`` of the scheduler's metrics; empty without.
        self.metrics_address = ""
        #: ``host:port`` of the dashboard; empty without.
        self.dashboard_address = ""
        #: End of the validity of the scheduler's certificate.
        self.certificate_not_after: Callable[[], float] = lambda: 0.0
        self.samples = SampleHistory()
        #: Those of the run, as found within the last seconds.
        self.problems: list[pb.ProblemStatus] = []
        self.summary: SummaryKeeper | None = None

    def keep(self, member_id: str, heartbeat: pb.SessionRequest.Heartbeat, now: float) -> None:
        """Keep the parts of a member's heartbeat that the status report shows."""
        kept = self.by_member.setdefault(member_id, pb.MemberStatus())
        if heartbeat.HasField("statistics"):
            kept.statistics.CopyFrom(heartbeat.statistics)
        if heartbeat.HasField("connections"):
            kept.ClearField("connections")
            kept.connections.extend(conversions.connections(heartbeat.connections))
        self.samples.on_heartbeat(member_id, heartbeat, now)
        kept.metrics_address = conversions.metrics_address(heartbeat.metrics_address)
        kept.certificate_not_after = conversions.moment(heartbeat.certificate_not_after)

    def tick(self, cluster: Cluster, now: float, *, last: bool = False) -> None:
        """Make a sample if one is due, or if it is the last one, and add it to the run's summary."""
        self.certificate_not_after()  # Warns of its end.
        sample = self.samples.on_tick(now, time.time(), last=last)
        if sample is not None and self.summary is not None:
            entries = (one.entry for one in cluster.registry.all if one.record)
            self.summary.add(sample, {entry.spec.name: kind_of(entry.spec.consistency) for entry in entries})

    def forget(self, member_id: str) -> None:
        """Forget the reports of a member that was lost."""
        self.by_member.pop(member_id, None)
        self.samples.forget(member_id)


def status(cluster: Cluster, reports: Reports, now: float) -> pb.GetStatusResponse:
    """Return the status report."""
    by_id, rates = reports.by_member, reports.samples.rates()
    return pb.GetStatusResponse(
        metrics_address=reports.metrics_address,
        dashboard_address=reports.dashboard_address,
        certificate_not_after=reports.certificate_not_after(),
        time=time.time(),
        run_id=cluster.settings.run_id,
        phase=cluster.phase,
        workers_min=cluster.demand.workers_min,
        servers_min=cluster.demand.servers_min,
        servers_wanted=cluster.demand.servers_wanted,
        replicas=cluster.settings.replicas,
        members=[_member(cluster, member, by_id.get(member.member_id), rates, now) for member in cluster.members.all],
        parameters=[
            pb.ParametersStatus(
                entry=convert.entry_to_proto(p.entry) if p.record else {"spec": {"name": p.name}},
                state=p.state,
                tensors=len(p.layout.tensors) if p.layout else 0,
            )
            for p in cluster.registry.all
        ],
        waiting_for=cluster.waits,
        problems=reports.problems,
        datasets=[make_message(pb.DatasetStatus, standing) for standing in cluster.datasets.standings],
        snapshots=_snapshots(cluster, now) if cluster.snapshots.is_enabled else None,
    )


def _snapshots(cluster: Cluster, now: float) -> pb.SnapshotsStatus:
    snapshots, found = cluster.snapshots, cluster.registry.resume.found
    failures, attempt = snapshots.failures, snapshots.attempt
    report = pb.SnapshotsStatus(
        storage=cluster.settings.storage,
        policy=cluster.settings.policy.text,
        committed=[make_message(pb.SnapshotInfo, commit) for commit in snapshots.catalog.commits],
        failed=failures.count,
        last_failure=snapshots.catalog.replaced or failures.text,
        last_failure_time=time.time() - (now - failures.at) if failures.count else 0.0,
        restored=make_message(pb.SnapshotInfo, found.commit) if found is not None else None,
    )
    if attempt is not None:
        report.attempt, report.phase, report.waiting_for = attempt.number, _stage(attempt), attempt.waiting_for
        report.bytes_done, report.bytes = attempt.bytes
    return report


def _stage(attempt: Attempt) -> str:
    if attempt.phase is AttemptPhase.COMMITTING:
        return "committing"
    return "writing" if attempt.written or attempt.bytes[0] else "cutting"


def _member(
    cluster: Cluster,
    member: Member,
    reported: pb.MemberStatus | None,
    rates: Mapping[str, pb.WorkerRates],
    now: float,
) -> pb.MemberStatus:
    report = make_message(pb.MemberStatus, member, draining=member.draining and member.live)
    if reported is not None:
        report.MergeFrom(reported)
    if member.live and member.member_id in rates:
        report.rates.CopyFrom(rates[member.member_id])
    if not member.live:
        report.ClearField("connections")
        report.ClearField("metrics_address")
        report.ClearField("certificate_not_after")
    if (presence := cluster.members.sessions.liveness.get(member.member_id)) is not None:
        report.heartbeat_age_seconds, report.epoch = now - presence.seen, presence.epoch
        report.waiting_for.extend(presence.waiting_for)
        report.waiting_for.extend(cluster.losses.unreachable.sentences(member.member_id, now))
    return report


# --- event history ----------------------------------------------------------------------------------------------------
#
# Joins, losses, promotions, rollbacks, snapshots and scale requests are numbered and bounded. ``scheduler`` adds the
# machine's ``LogEvent`` effects that are not about waits, and the store keeps them over restarts.


class EventHistory:
    """The newest ``EVENTS_MAX`` events. stored: those that a predecessor of this scheduler has stored, oldest first."""

    def __init__(self, stored: Iterable[EventRecord] = ()) -> None:
        self._records: deque[EventRecord] = deque(stored, maxlen=EVENTS_MAX)
        self._next = self._records[-1].number + 1 if self._records else 1
        self._changed = asyncio.Event()
        #: Events since this scheduler started, by kind.
        self.counts: Counter[str] = Counter()

    def add(self, effect: LogEvent, time: float) -> EventRecord:
        """Add an event, and wake those that follow the history."""
        record = EventRecord(self._next, time, effect.kind, effect.level == "warning", effect.text)
        self._next += 1
        self._records.append(record)
        self.counts[effect.kind] += 1
        self._changed.set()
        self._changed = asyncio.Event()
        return record

    def newest(self, count: int) -> list[EventRecord]:
        """Return the newest ``count`` events, oldest first."""
        return list(islice(self._records, max(0, len(self._records) - count), None))

    def after(self, number: int, count: int) -> list[EventRecord]:
        """Return the first ``count`` kept events after event ``number``, oldest first.

        A number that this history has not reached is of a scheduler that kept no store: then all are new.
        """
        if not self._records:
            return []
        start = max(0, number + 1 - self._records[0].number) if number < self._next else 0
        return list(islice(self._records, start, start + count))

    async def changed(self) -> None:
        """Wait for the next event."""
        await self._changed.wait()
