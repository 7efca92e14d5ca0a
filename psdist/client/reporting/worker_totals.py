"""Counts of one client for its heartbeats: its totals, and which of them have changed.

Some counts are left out of a heartbeat: a client with 1,024 parameter sets has 2,048, and rarely trains all of
its sets between two heartbeats. A stream loses no message while it lasts, so the scheduler can add the changes to the
counts that it holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, Protocol

from psdist.client.reporting.phase_timer import PhaseTimer, PushCounter
from psdist.monitoring.metrics import MEASURED, Measurements
from psdist.types import ParametersSpec
from psdist.v1 import scheduler_pb2 as pb


class CountedHandle(Protocol):
    """The part of a handle that the totals need."""

    @property
    def spec(self) -> ParametersSpec:
        """Settings of the parameter set."""

    @property
    def participation(self) -> Any:
        """Its ``Participation``. Only transports and options are read."""

    def measure(self) -> Measurements:
        """Return its counters."""


class ReportedNumbers:
    """Tracker that keeps the script's numbers of the last interval; psdist's own are counted elsewhere."""

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}
        self.step = 0
        #: 0 if the script reports no samples.
        self.samples_per_second = 0.0

    def start(self, run_id: str) -> None: ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.newest = {name: value for name, value in values.items() if name not in MEASURED}
        self.step, self.samples_per_second = step, values.get("samples_per_second", 0.0)

    def close(self) -> None: ...


def worker_totals(
    phases: PhaseTimer, pushes: PushCounter, reported: ReportedNumbers, handles: Iterable[CountedHandle]
) -> pb.WorkerTotals:
    """Return the totals of a client so far. Bytes of a handle count for the transport and codecs that it has now."""
    compute, push, wait, pull = phases.seconds()
    pushed, pulled = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    dropped = abstained = 0
    for handle in handles:
        key = (transport_of(handle.participation.transports()), *codecs_of(handle.spec, handle.participation.options))
        counted = handle.measure()
        pushed[key] += counted.push_bytes
        pulled[key] += counted.pull_bytes
        dropped += counted.dropped
        abstained += counted.abstained
    return pb.WorkerTotals(
        compute_seconds=compute,
        push_seconds=push,
        wait_seconds=wait,
        pull_seconds=pull,
        pushes=pushes.counts,
        traffic=[
            pb.WorkerTotals.Traffic(
                transport=key[0], push_codec=key[1], pull_codec=key[2], push_bytes=count, pull_bytes=pulled[key]
            )
            for key, count in sorted(pushed.items())
        ],
        dropped=dropped,
        staleness=pushes.staleness,
        reported=reported.newest,
        reported_step=reported.step,
        samples_per_second=reported.samples_per_second,
        abstained=abstained,
    )


def transport_of(transports: Mapping[str, str]) -> str:
    """Return the one transport to all servers, of ``Participation.transports``, or "mixed"."""
    kinds = {how.partition(":")[0] for how in transports.values()} or {"grpc"}
    return kinds.pop() if len(kinds) == 1 else "mixed"


def codecs_of(spec: ParametersSpec, options: Any) -> tuple[str, str]:
    """Return the names of the codecs of pushes and pulls. options: of a ``Participation``."""
    pull = spec.pull_compression.partition("(")[0] or options.pull_dtype
    return type(options.codec).__name__.lower(), pull.lower()


class ChangedCounts:
    """Counts that one stream of the session has sent. The first heartbeat on a new one is complete, for the same
    scheduler or a restarted one.

    enabled: False for a scheduler that takes whole heartbeats only.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._next: dict[str, int] | None = None
        self._pushes: dict[str, int] = {}

    def drop_unchanged(self, heartbeat: pb.SessionRequest.Heartbeat) -> None:
        """Remove the counts that are as in the last heartbeat. This one must be sent next on the session."""
        if not self._enabled:
            return
        counts, partial = heartbeat.activity.next, heartbeat.activity.partial
        pushes = heartbeat.totals.pushes
        before, self._next = self._next, dict(counts)
        pushes_before, self._pushes = self._pushes, dict(pushes)
        if before is not None:
            heartbeat.changed_only = True
            # Those that are sent in part are named, because the scheduler expects their number in the same message.
            _remove(counts, {name: count for name, count in before.items() if name not in partial})
            _remove(pushes, pushes_before)


def _remove(counts: MutableMapping[str, int], known: dict[str, int]) -> None:
    """Remove the counts that are ``known``."""
    for name in [name for name, count in counts.items() if known.get(name) == count]:
        del counts[name]
