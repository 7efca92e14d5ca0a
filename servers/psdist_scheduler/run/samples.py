"""Activity of the members, second by second: differences between the totals of their heartbeats.

A sample has each member that has sent a heartbeat since the sample before it. A member that sends them less often is in
fewer samples, and each of its periods lasts from heartbeat to heartbeat.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, NamedTuple

from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import server_pb2
from psdist.wire.limits import PARAMETERS_MAX, TEXT_CHARACTERS_MAX, WORKER_TOTAL_MAX

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
