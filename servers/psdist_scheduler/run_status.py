"""Status of a run: the report of GetStatus, the reports of members in it, the history of events, and the summary.

The report is assembled from the state of the machine, which it only reads.

Samples are the activity of the members, second by second: differences between the totals of their heartbeats. A sample
has each member that has sent a heartbeat since the sample before it. A member that sends them less often is in fewer
samples, and each of its periods lasts from heartbeat to heartbeat.

``SummaryWriter`` writes the summary of a run into its storage every minute and at the end. Nothing waits for the
writes: a storage that fails or hangs is only warned about.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec

from psdist import __version__
from psdist.consistency import kind_of
from psdist.errors import PsdistError, StorageError
from psdist.machine import usable_cores
from psdist.monitoring import run_summary as form
from psdist.monitoring.run_summary import Summary, WorkerPart
from psdist.snapshots.storage import Storage
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import server_pb2
from psdist.wire import convert
from psdist.wire.convert import make_message
from psdist.wire.limits import EVENTS_MAX, PARAMETERS_MAX, TEXT_CHARACTERS_MAX, WORKER_TOTAL_MAX
from psdist_scheduler import conversions
from psdist_scheduler.decide.cluster import Cluster
from psdist_scheduler.decide.cluster_state import EventRecord, Member
from psdist_scheduler.decide.effects import LogEvent
from psdist_scheduler.decide.snapshot_attempt import Attempt, AttemptPhase

logger = logging.getLogger("psdist.scheduler")

#: Time between two samples.
SAMPLE_SECONDS: Final = 1.0
#: Samples that are kept: five minutes.
SAMPLES_KEPT: Final = 300
#: Limit on the bytes of all kept samples, which are sent in one message. A member's period has some 200 bytes, and more
#: with many parameter sets or reported numbers. In a large run fewer samples are kept.
BYTES_KEPT: Final = 16 << 20
#: Length of the period of rates, and number of samples in which it is looked for.
RATE_SECONDS: Final = 10.0
_RATE_SAMPLES: Final = 60
#: A worker's period names the parameter sets that it pushed this recently. The others' rate is 0.
NAMED_SECONDS: Final = 60.0


class _ServerTotals(NamedTuple):
    """A server's counters at one heartbeat."""

    time: float
    slices_applied: int
    apply_seconds: float


@dataclass(slots=True)
class _WorkerTotals:
    """A worker's totals, from which its next period is made."""

    #: In its newest heartbeat, and in the last one before the period began. Without pushes.
    newest: pb.WorkerTotals | None = None
    before: pb.WorkerTotals | None = None
    #: All of its pushes by parameter set, and their growth in the period.
    pushes: dict[str, int] = field(default_factory=dict)
    grown: dict[str, int] = field(default_factory=dict)
    #: When the named sets were last pushed.
    pushed: dict[str, float] = field(default_factory=dict)

    def on_totals(self, totals: pb.WorkerTotals, changed_only: bool, now: float) -> None:
        """Take the totals of a heartbeat. changed_only: True if they lack the pushes that have not changed."""
        if self.newest is None and changed_only:  # The first ones were not plausible: the growth is unknown.
            return
        if self.newest is not None and _seconds(totals) < _seconds(self.newest):  # A new client.
            self.before, self.pushes, self.grown = pb.WorkerTotals(), {}, {}
        for name, count in totals.pushes.items():
            if name not in self.pushes and len(self.pushes) >= PARAMETERS_MAX:
                continue
            grown = count - self.pushes.get(name, 0)
            if self.newest is not None and grown:
                self.grown[name] = self.grown.get(name, 0) + (grown if grown > 0 else count)
                self.pushed[name] = now
            self.pushes[name] = count
        totals.ClearField("pushes")
        self.newest = totals

    def take_pushes(self, now: float) -> dict[str, int]:
        """Return the pushes of the period, which ends."""
        self.pushed = {name: at for name, at in self.pushed.items() if at > now - NAMED_SECONDS}
        grown, self.grown = self.grown, {}
        return {name: grown.get(name, 0) for name in self.pushed}


class SampleHistory:
    """The newest samples of a run."""

    def __init__(self) -> None:
        self._samples: deque[pb.RunSample] = deque()
        #: Bytes of each kept sample, and their sum.
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._number = 0
        self._due = 0.0
        self._workers: dict[str, _WorkerTotals] = {}
        #: By server: totals in its last heartbeat before the sample that is being made, and its newest ones.
        self._servers: dict[str, _ServerTotals] = {}
        self._newest_servers: dict[str, tuple[float, server_pb2.GetStatisticsResponse]] = {}

    def on_heartbeat(self, member_id: str, heartbeat: pb.SessionRequest.Heartbeat, now: float) -> None:
        """Keep the totals of a member's heartbeat for the next sample."""
        if heartbeat.HasField("totals") and (totals := _checked(heartbeat.totals)) is not None:
            worker = self._workers.setdefault(member_id, _WorkerTotals())
            worker.on_totals(totals, heartbeat.changed_only, now)
        if heartbeat.HasField("statistics"):
            self._newest_servers[member_id] = now, heartbeat.statistics

    def on_tick(self, now: float, time: float, *, last: bool = False) -> pb.RunSample | None:
        """Make a sample and return it, if one is due or it is the last one. time: seconds since 1970."""
        if now < self._due and not last:
            return None
        self._due = now + SAMPLE_SECONDS
        workers = [_period(member_id, worker, now) for member_id, worker in sorted(self._workers.items())]
        servers = [
            self._server(member_id, at, counted) for member_id, (at, counted) in sorted(self._newest_servers.items())
        ]
        self._newest_servers.clear()
        self._number += 1
        sample = pb.RunSample(
            number=self._number,
            time=time,
            workers=[one for one in workers if one is not None],
            servers=[one for one in servers if one is not None],
        )
        self._keep(sample)
        return sample

    def forget(self, member_id: str) -> None:
        """Forget the totals of a member that is gone: its successor starts from 0."""
        for table in (self._workers, self._servers, self._newest_servers):
            table.pop(member_id, None)

    def after(self, number: int) -> list[pb.RunSample]:
        """Return the kept samples after this one, oldest first. A number that was not reached is of an earlier
        scheduler: then all are new."""
        return [sample for sample in self._samples if sample.number > number or number > self._number]

    def rates(self) -> dict[str, pb.WorkerRates]:
        """Return the rates of each worker over its last ``RATE_SECONDS``, or longer if its heartbeats are rarer."""
        found: dict[str, pb.WorkerRates] = {}
        for sample in islice(reversed(self._samples), _RATE_SAMPLES):
            for one in sample.workers:
                rates = found.setdefault(one.worker_id, pb.WorkerRates())
                if rates.seconds < RATE_SECONDS:
                    rates.seconds += one.seconds
                    rates.waiting_seconds += one.wait_seconds + one.pull_seconds
                    for name, count in one.pushes.items():
                        rates.pushes[name] += count
        return found

    def _keep(self, sample: pb.RunSample) -> None:
        self._samples.append(sample)
        self._sizes.append(sample.ByteSize())
        self._bytes += self._sizes[-1]
        while len(self._samples) > SAMPLES_KEPT or (self._bytes > BYTES_KEPT and len(self._samples) > 1):
            self._samples.popleft()
            self._bytes -= self._sizes.popleft()

    def _server(self, member_id: str, now: float, counted: server_pb2.GetStatisticsResponse) -> pb.ServerSample | None:
        """Return a server's period that ends with these counters; None for its first ones."""
        totals = _ServerTotals(
            now,
            sum(one.applied_slices for one in counted.parameters),
            sum(one.apply_seconds for one in counted.parameters),
        )
        before = self._servers.get(member_id)
        self._servers[member_id] = totals
        if before is None:
            return None
        if totals.slices_applied < before.slices_applied:  # A parameter set was made again.
            before = _ServerTotals(before.time, 0, 0.0)
        sample = pb.ServerSample(
            server_id=member_id,
            seconds=totals.time - before.time,
            slices_applied=totals.slices_applied - before.slices_applied,
            apply_seconds=max(0.0, totals.apply_seconds - before.apply_seconds),
            waiting_bytes=sum(one.bytes_held for one in counted.parameters),
            resident_bytes=counted.resident_bytes,
            lag_updates=sum(copy.lag_updates for one in counted.parameters for copy in one.replicas),
        )
        if counted.HasField("idle_cores") and counted.idle_cores >= 0:  # NaN is not.
            sample.idle_cores = min(counted.idle_cores, counted.cores)
        return sample


def _period(member_id: str, worker: _WorkerTotals, now: float) -> pb.WorkerSample | None:
    """Return the period that ends with a worker's newest totals, and begin the next one; None without new totals, and
    for the first ones."""
    before, totals = worker.before, worker.newest
    worker.before = totals
    if before is None or totals is None or totals is before:
        return None
    sample = pb.WorkerSample(
        worker_id=member_id,
        seconds=_seconds(totals) - _seconds(before),
        pushes=worker.take_pushes(now),
        traffic=_traffic(totals.traffic, before.traffic),
        dropped=max(0, totals.dropped - before.dropped),
        abstained=max(0, totals.abstained - before.abstained),
        staleness=totals.staleness,
        reported=totals.reported,
        reported_step=totals.reported_step,
        samples_per_second=totals.samples_per_second,
    )
    for phase in ("compute_seconds", "push_seconds", "wait_seconds", "pull_seconds"):
        setattr(sample, phase, max(0.0, getattr(totals, phase) - getattr(before, phase)))
    return sample


def _seconds(totals: pb.WorkerTotals) -> float:
    return totals.compute_seconds + totals.push_seconds + totals.wait_seconds + totals.pull_seconds


def _traffic(
    now: Iterable[pb.WorkerTotals.Traffic], before: Iterable[pb.WorkerTotals.Traffic]
) -> list[pb.WorkerTotals.Traffic]:
    """Return the traffic of a period. A handle that changed its transport counts all of its bytes under the new one:
    those by which another transport has shrunk are not of this period."""
    old, new = _bytes_by_transport(before), _bytes_by_transport(now)
    moved = [sum(max(0, size[way] - new.get(key, (0, 0))[way]) for key, size in old.items()) for way in (0, 1)]
    found = []
    for key, size in new.items():
        grown = [max(0, size[way] - old.get(key, (0, 0))[way]) for way in (0, 1)]
        for way in (0, 1):
            kept = min(moved[way], grown[way])
            moved[way] -= kept
            grown[way] -= kept
        found.append(
            pb.WorkerTotals.Traffic(
                transport=key[0], push_codec=key[1], pull_codec=key[2], push_bytes=grown[0], pull_bytes=grown[1]
            )
        )
    return found


def _bytes_by_transport(traffic: Iterable[pb.WorkerTotals.Traffic]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Return pushed and pulled bytes by transport, codec of pushes, and codec of pulls."""
    return {(one.transport, one.push_codec, one.pull_codec): (one.push_bytes, one.pull_bytes) for one in traffic}


def _checked(message: pb.WorkerTotals) -> pb.WorkerTotals | None:
    """Return a copy of a worker's totals, limited to what is kept; None if they are not plausible."""
    seconds = (message.compute_seconds, message.push_seconds, message.wait_seconds, message.pull_seconds)
    if not all(0 <= one <= WORKER_TOTAL_MAX for one in (*seconds, message.samples_per_second)):
        return None
    if max(len(message.pushes), len(message.reported), len(message.traffic)) > PARAMETERS_MAX:
        return None
    if any(len(name) > TEXT_CHARACTERS_MAX for names in (message.pushes, message.reported) for name in names):
        return None
    if any(len(f"{one.transport}{one.push_codec}{one.pull_codec}") > TEXT_CHARACTERS_MAX for one in message.traffic):
        return None
    kept = pb.WorkerTotals()
    kept.CopyFrom(message)
    kept.DiscardUnknownFields()
    return kept


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


# --- the summary of the run -------------------------------------------------------------------------------------------


#: Time between two writes.
WRITE_SECONDS: Final = 60.0
#: Time for the last write, and for reading the predecessor's summary.
STORAGE_SECONDS: Final = 2.0

_PACKAGES: Final = ("numpy", "numba", "grpcio", "protobuf", "torch", "jax")


class SummaryKeeper:
    """Adds samples to the summary. previous: the summary that a predecessor of this scheduler has kept."""

    def __init__(self, run_id: str, now: float, previous: Summary | None = None) -> None:
        self._summary = previous or Summary(run_id=run_id, started=now, written=now)
        self._summary.state, self._summary.reason = "running", ""
        if previous is not None:
            self._summary.schedulers += 1

    @property
    def is_empty(self) -> bool:
        """True if no worker has trained yet."""
        return not self._summary.curves.points

    def add(self, sample: pb.RunSample, modes: Mapping[str, str]) -> None:
        """Add a sample. modes: kind of consistency by parameter set."""
        if not sample.workers or (self.is_empty and not any(worker.pushes for worker in sample.workers)):
            return
        self._summary.curves.add(form.point_of(sample, modes))
        for worker in sample.workers:
            self._add_worker(worker)

    def _add_worker(self, worker: pb.WorkerSample) -> None:
        parts = self._summary.workers
        if worker.worker_id not in parts and len(parts) >= form.MEMBERS_KEPT:
            return
        part = parts.setdefault(worker.worker_id, WorkerPart())
        for phase in ("compute", "push", "wait", "pull"):
            setattr(part.phases, phase, getattr(part.phases, phase) + getattr(worker, f"{phase}_seconds"))
        part.pushes += sum(worker.pushes.values())
        part.dropped += worker.dropped
        part.push_bytes += sum(each.push_bytes for each in worker.traffic)
        part.pull_bytes += sum(each.pull_bytes for each in worker.traffic)

    def curves(self) -> form.RunCurves:
        """Return a copy of the curves."""
        return msgspec.convert(msgspec.to_builtins(self._summary.curves), form.RunCurves)

    def document(
        self, status: Mapping[str, Any], events: Iterable[EventRecord], now: float, state: str = "", reason: str = ""
    ) -> bytes:
        """Return the summary as it is now. status: ``status_json``. events: all that are kept, oldest first."""
        summary = self._summary
        summary.written = now
        summary.state, summary.reason = state or "running", reason
        summary.configuration = _configuration(status)
        summary.environment = environment()
        summary.members = msgspec.convert(_newest_members(status["members"]), list[form.MemberPart])
        snapshots = status["snapshots"]["committed"] if status["snapshots"] else []
        # Servers report versions, and are gone at the end of a run.
        newest = max(snapshots, key=lambda one: float(one["time"]), default=None)
        versions = dict[str, int](newest["steps"] if newest is not None else {})
        for old in summary.parameters:
            versions[old.name] = max(versions.get(old.name, 0), old.version_max or 0)
        summary.parameters = msgspec.convert(status["parameters"][: form.MEMBERS_KEPT], list[form.ParametersPart])
        for part in summary.parameters:
            if part.version_max is None:
                part.version_max = versions.get(part.name)
        summary.snapshots = msgspec.convert(snapshots[: form.MEMBERS_KEPT], list[form.SnapshotPart])
        summary.history = _history(list(events))
        return form.to_bytes(summary)


def _history(records: list[EventRecord]) -> form.HistoryPart:
    newest = records[-form.EVENTS_KEPT :]
    parts = [form.EventPart(one.number, one.time, one.kind, one.warning, one.text) for one in newest]
    return form.HistoryPart(records[-1].number - len(newest) if records else 0, parts)


def _configuration(status: Mapping[str, Any]) -> dict[str, str | int]:
    names = ("workers_min", "servers_min", "servers_wanted", "replicas")
    snapshots = status["snapshots"]
    storage = {"storage": snapshots["storage"], "snapshots": snapshots["policy"]} if snapshots else {}
    return {name: status[name] for name in names} | storage


def _newest_members(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the live members first, then those that have gone, at most ``MEMBERS_KEPT``."""
    return sorted(members, key=lambda member: member["state"] != "live")[: form.MEMBERS_KEPT]


@cache
def environment() -> dict[str, str]:
    """Return texts about this host and its packages. The first call takes 30 ms, which would delay a run's start."""
    from importlib import metadata

    found = {
        "psdist": __version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "processor": _processor(),
        "cores": f"{usable_cores()} of {os.cpu_count()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
    }
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _processor() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


# --- the storage ------------------------------------------------------------------------------------------------------


async def load(storage: Storage, run_id: str) -> Summary | None:
    """Return the newest readable summary of a run; None without one. A storage that fails is only warned about."""
    try:
        async with asyncio.timeout(STORAGE_SECONDS):
            for _, path in await form.paths(storage, run_id):
                try:
                    return await form.read(storage, path)
                except PsdistError as error:
                    logger.warning("skipped a summary of this run: %s", error)
    except (StorageError, TimeoutError) as error:
        logger.warning("the run's summary is a new one, since the storage cannot be read: %s", error or "no answer")
    return None


class SummaryWriter:
    """Writes summaries, each before its predecessor is removed.

    document: returns the bytes to write, or None if there is nothing to write. True asks for the last ones.
    """

    def __init__(self, storage: Storage, run_id: str, document: Callable[[bool], bytes | None]) -> None:
        self._storage = storage
        self._run_id = run_id
        self._document = document
        self._failing = False
        self._busy = asyncio.Lock()

    async def run(self) -> None:
        """Write once a minute, forever."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await self.write()

    async def write(self, *, last: bool = False) -> None:
        """Write the summary now. A failing storage raises nothing: the first of several failures is logged."""
        if (data := self._document(last)) is None:
            return
        try:
            async with self._busy, asyncio.timeout(WRITE_SECONDS):
                old = await form.paths(self._storage, self._run_id)
                await self._storage.create(form.path_of(self._run_id, old[0][0] + 1 if old else 1, data), data)
                await self._storage.delete(path for _, path in old)
            self._failing = False
        except (PsdistError, OSError, TimeoutError) as error:
            if not self._failing:
                logger.warning("the run's summary was not written, and psdist report lacks the newest part: %s", error)
            self._failing = True

    async def write_last(self) -> None:
        """Write the summary for the last time, unless that takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STORAGE_SECONDS):
                await self.write(last=True)
