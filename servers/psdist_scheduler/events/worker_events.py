"""Events, answers and commands about single workers: calls, waits, resumed pushes, shutdown, and ranges of data sets.

Frozen dataclasses, as in ``cluster_events``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from psdist.errors import PsdistError
from psdist.types import DataPosition, DatasetSpec, Replica, WorkerEntry
from psdist_scheduler.events.cluster_state import DataLease
from psdist_scheduler.events.snapshot_events import Numbers


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender that a request names. An empty ``run_id`` means the scheduler's only run."""

    run_id: str
    member_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class GroupCall:
    """Call of a group that a worker waits for: see Activity.GroupCall of scheduler.proto.

    awaited: ids and incarnations.
    text: the call, to follow the word "waits".
    next: see Activity.GroupCall of scheduler.proto.
    sources: ``number`` and ``next`` by awaited worker, for a message of any of them; empty if all must make the call.
    """

    group: bytes
    message: bool
    number: int
    awaited: tuple[tuple[str, int], ...]
    text: str
    next: int = 0
    sources: tuple[tuple[int, int], ...] = ()

    def counts_of(self, worker_id: str) -> tuple[int, int]:
        """Return ``number`` and ``next`` for an awaited worker."""
        if not self.sources:
            return self.number, self.next
        return next(counts for counts, (name, _) in zip(self.sources, self.awaited, strict=True) if name == worker_id)


@dataclass(frozen=True, slots=True)
class Activity:
    """A worker's report on the wait of its script, if other workers can end that wait.

    sequence: higher than that of any earlier wait.
    next: number of its next push, by parameter set.
    partial: parameter sets of whose next push a part is made.
    kind: "step" or "clock" if it waits for all members of ``parameters`` to push step ``number``, or to reach that
        clock. "call" if it waits in a call to this scheduler, "group" if for others to make ``group_call``. "" if it is
        not known to wait, or may continue by itself.
    """

    sequence: int
    next: Numbers
    kind: Literal["", "step", "clock", "call", "group"] = ""
    parameters: str = ""
    number: int = 0
    partial: tuple[str, ...] = ()
    group_call: GroupCall | None = None

    @property
    def age(self) -> tuple[int, int, int, bool]:
        """Sort key that grows within an incarnation: during a wait first the pushes advance, and then it waits for
        others."""
        return self.sequence, sum(number for _, number in self.next), len(self.partial), self.kind != ""


@dataclass(frozen=True, slots=True)
class ResumePush:
    """Push ``number`` of a worker's sequence that began in incarnation ``origin``, made in this generation of the
    parameters."""

    origin: int
    number: int
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """Workers, by id and incarnation, that sent this scheduler something besides heartbeats."""

    heard: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class UnreachableServer:
    """Part of a worker's heartbeat: a server that it cannot reach, and for how many seconds."""

    server: Replica
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class CheckServer:
    """To a worker, on its session: ask whether it can reach this server. The answer is a ServerChecked."""

    server: Replica


@dataclass(frozen=True, slots=True)
class ServerChecked:
    """A worker's report, on its session ``call``, whether it reached the server that it was asked about."""

    call: int
    server: Replica
    reached: bool


@dataclass(frozen=True, slots=True)
class EqualContributions:
    """A server's report, on its session ``call``: these workers pushed equal gradients in steps up to ``step``."""

    call: int
    parameters: str
    worker_ids: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Notice:
    """To a worker, on its session: a warning about its script."""

    text: str


@dataclass(frozen=True, slots=True)
class StopReported:
    """A worker's shutdown report, on its session ``call``.

    number: number of the command that it answers; 0 for none.
    next: its next push by parameter set, once it has stopped pushing.
    """

    call: int
    number: int
    stopping: bool
    next: Numbers | None = None


@dataclass(frozen=True, slots=True)
class DeadlockFound:
    """To a worker, on its session: the wait of its report ``sequence`` is part of a deadlock."""

    sequence: int
    error: PsdistError


@dataclass(frozen=True, slots=True)
class CheckCall:
    """To a worker, on its session: see CheckCall of scheduler.proto. The answer is a CallChecked."""

    sequence: int
    worker_id: str
    incarnation: int
    waiting: int
    group: bytes
    message: bool
    number: int
    next: int = 0


@dataclass(frozen=True, slots=True)
class CallChecked:
    """A worker's report, on its session ``call``: it confirms the CheckCall with these fields."""

    call: int
    sequence: int
    worker_id: str
    incarnation: int
    waiting: int


StopKind = Literal["ask", "hold", "leave"]


@dataclass(frozen=True, slots=True)
class StopCommand:
    """To a worker, on its session: see StopCommand of scheduler.proto. next: with "leave"."""

    number: int
    kind: StopKind
    next: Numbers = ()


@dataclass(frozen=True, slots=True)
class AlignReported:
    """Progress of a held worker, on its session ``call``: see AlignReport of scheduler.proto."""

    call: int
    number: int
    position: int
    start: int | None = None
    period: int = 0
    declared: bool = False
    next: Numbers = ()


@dataclass(frozen=True, slots=True)
class AlignCommand:
    """To a worker, on its session: see AlignCommand of scheduler.proto."""

    number: int
    until: int | None = None
    release: bool = False


WorkerCommand = DeadlockFound | CheckCall | StopCommand | AlignCommand | CheckServer | Notice


# --- data sets --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenDataset:
    call: int
    caller: Caller
    spec: DatasetSpec


@dataclass(frozen=True, slots=True)
class LeaseRange:
    """A worker's request for another range.

    done: leases that it has used.
    held: leases that it still holds.
    done_at: its next pushes when it had used each lease of ``done``.
    now: its next pushes now.
    """

    call: int
    caller: Caller
    dataset: str
    done: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    done_at: tuple[Numbers, ...] = ()
    now: Numbers = ()


@dataclass(frozen=True, slots=True)
class EndRanges:
    """A worker's report of used leases (``done``) and of leases that it gives back (``returned``).

    used: those of ``returned`` with samples that may be in the weights.
    The other fields are as in LeaseRange.
    """

    call: int
    caller: Caller
    dataset: str
    done: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    done_at: tuple[Numbers, ...] = ()
    now: Numbers = ()
    used: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FormGroup:
    """A worker's request for the next group of a name; see ``formations``.

    ticket: recognizes a repeated request; 0 only asks about waiting workers.
    epoch, members: the caller's group; 0 and none if it is in no group of this name.
    unreachable, closed: ranks in that group that the caller cannot reach, and that have closed it.
    admits: True at a step boundary, where workers may be added.
    size, size_min: workers that the first group needs, and that every group needs.
    finishes: True if the group's work is complete: the caller leaves it, and nobody is added any more.
    """

    call: int
    caller: Caller
    name: str
    ticket: int
    epoch: int = 0
    members: tuple[WorkerEntry, ...] = ()
    unreachable: tuple[int, ...] = ()
    closed: tuple[int, ...] = ()
    admits: bool = False
    size: int = 1
    size_min: int = 1
    finishes: bool = False


@dataclass(frozen=True, slots=True)
class GroupStanding:
    """The newest group of a name.

    formed: True if it is the one that the caller asked for.
    waiting_for: why there is no next group yet.
    newcomers: workers outside that wait to be added.
    """

    epoch: int
    members: tuple[WorkerEntry, ...]
    formed: bool
    waiting_for: str = ""
    newcomers: int = 0


@dataclass(frozen=True, slots=True)
class GetPosition:
    call: int
    run_id: str
    dataset: str


@dataclass(frozen=True, slots=True)
class SetPosition:
    call: int
    caller: Caller
    dataset: str
    position: DataPosition


DataEvent = OpenDataset | LeaseRange | EndRanges | GetPosition | SetPosition


@dataclass(frozen=True, slots=True)
class DatasetStanding:
    spec: DatasetSpec
    position: DataPosition
    leased: int


@dataclass(frozen=True, slots=True)
class RangeGiven:
    """The range of this lease. lease: None if no range is left."""

    lease: DataLease | None
    data_epoch: int
    range: int
    repeated: int
    failed: int
