"""State of the scheduler, as frozen dataclasses: settings, members, parameter sets, nodes, and their sum.

The pure machines hold these values, the store writes them, and the service reports them. No protobuf message appears
here, and nothing that may be lost with the scheduler's process (heartbeat times, open streams, waits).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from psdist.snapshots.policy import SavePolicy
from psdist.types import DatasetSpec, Layout, ParametersEntry, Replica, Restore

T = TypeVar("T")
Role = Literal["server", "worker"]
MemberState = Literal["live", "left", "lost"]
#: A member's id and incarnation.
Identity = tuple[str, int]
#: Result of a connection to a server's port. "accepted": its kernel answers, so the process exists, but may be stopped
#: or starved. "silent": no answer. "": not tried, or not known yet.
ProbeResult = Literal["", "refused", "accepted", "silent"]
HEARTBEATS_PER_LEASE: Final = 4
TICKS_PER_LEASE: Final = 8
LONGEST_TICK_SECONDS: Final = 0.25
#: Limit for all workers together.
WORKER_HEARTBEATS_PER_SECOND: Final = 150
#: Pauses between two heartbeats of a worker after which this process pings it: one heartbeat may be late.
_PAUSES_PER_PING: Final = 1.5


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings of one run's scheduler.

    run_id: name of the run.
    workers_min, servers_min: numbers that must be live before parameters are placed or a barrier opens.
    replicas: copies of each shard, the primary's included.
    lease_seconds: a server that is silent for longer is lost.
    worker_lease_seconds: the same for a worker, whose script may keep it from answering for a while.
    join_grace_seconds: time to wait for more of them once enough workers (or nodes) are present.
    storage: where servers write snapshots: an absolute path or a URL; empty for nowhere.
    unwritable: why nothing can be saved there although the run continues; empty if it can.
    policy: when snapshots are taken, and which are kept.
    idle_timeout_seconds: the run is over when no worker has been present for this long, after some were; 0 for never.
    start_timeout_seconds: the run ends if its required members have not arrived within this time; 0 for never.
    salt: unique name of this scheduler process, in the names of directories, so that none is used twice.
    store: the store's file, if nobody chose it; empty otherwise.
    time_limits_suspended: True while a worker may stand in a debugger: everybody waits for it, however long.
    """

    run_id: str
    workers_min: int = 1
    servers_min: int = 1
    lease_seconds: float = 2.0
    join_grace_seconds: float = 0.0
    replicas: int = 1
    storage: str = ""
    unwritable: str = ""
    policy: SavePolicy = field(default_factory=SavePolicy)
    salt: str = "0"
    worker_lease_seconds: float = 30.0
    idle_timeout_seconds: float = 0.0
    start_timeout_seconds: float = 0.0
    store: str = ""
    time_limits_suspended: bool = False

    def heartbeat_of(self, role: Role, workers: int) -> float:
        """Return a member's heartbeat interval in seconds: a fraction of the shorter lease.

        In a large run workers send theirs less often, as far as their own lease allows: each heartbeat costs this
        process a fifth of a millisecond.

        workers: number of workers in the run.
        """
        least = min(self.lease_seconds, self.worker_lease_seconds) / HEARTBEATS_PER_LEASE
        if role == "server":
            return least
        return max(least, min(workers / WORKER_HEARTBEATS_PER_SECOND, self.worker_lease_seconds / HEARTBEATS_PER_LEASE))

    @property
    def silence_seconds(self) -> float:
        """Time in seconds without a byte from a member after which this process pings it: a lease, and in a large run
        longer than a worker's pause between heartbeats. Pings of a thousand idle workers would cost more than their
        heartbeats. A ping that is not answered for as long again breaks the session: a stopped worker must lose it
        within its lease."""
        patient = max(self.lease_seconds, _PAUSES_PER_PING * self.heartbeat_of("worker", self.workers_min))
        return min(patient, self.worker_lease_seconds / 2)

    @property
    def tick_seconds(self) -> float:
        """Interval between the machine's ticks. It is short compared to a lease, so that a suspension of this process
        shows."""
        return min(self.lease_seconds / TICKS_PER_LEASE, LONGEST_TICK_SECONDS)

    def lease_of(self, role: Role) -> float:
        """Return the time in seconds for which a member of this role may be silent."""
        return self.worker_lease_seconds if role == "worker" else self.lease_seconds


@dataclass(frozen=True, slots=True)
class Member:
    """One id and its newest incarnation. Servers have rank and world_size 0. A worker without an
    address accepts no connections."""

    member_id: str
    role: Role
    incarnation: int
    rank: int = 0
    world_size: int = 0
    address: str = ""
    host: str = ""
    pid: int = 0
    state: MemberState = "live"
    #: Why it left or was lost; empty while it is live.
    reason: str = ""
    #: True for a server from which everything is moved away, or was before it left.
    draining: bool = False

    @property
    def identity(self) -> Identity:
        """The member's id and incarnation."""
        return self.member_id, self.incarnation

    @property
    def replica(self) -> Replica:
        """The server as a holder of shard copies."""
        return Replica(self.member_id, self.incarnation)

    @property
    def live(self) -> bool:
        """True while the member takes part."""
        return self.state == "live"

    @property
    def state_text(self) -> str:
        """The member's state in words, such as "left (done)"."""
        return {"live": "is live", "left": f"left ({self.reason})", "lost": f"was expelled ({self.reason})"}[self.state]

    def __str__(self) -> str:
        return f"{self.member_id} (rank {self.rank})" if self.role == "worker" else self.member_id


@dataclass(frozen=True)
class ParametersRecord:
    """Parameters that were placed."""

    entry: ParametersEntry
    layout: Layout
    #: Worker that was last asked for the initial values; empty if all creators left before.
    uploader: str
    #: True if all initial values are on the primaries.
    committed: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A worker agent with ranks ``first_rank`` to ``first_rank + processes - 1``."""

    agent_id: str
    host: str
    processes: int
    node_rank: int
    first_rank: int
    nodes_min: int
    nodes_max: int
    master_address: str = ""


@dataclass(frozen=True, slots=True)
class BarrierRecord:
    """Number of barriers of this name that a worker has passed since the incarnation ``origin``."""

    worker_id: str
    name: str
    origin: int
    passed: int


@dataclass(frozen=True, slots=True)
class DataLease:
    """A lease of the range at ``place`` to one incarnation of a worker.

    attempt: number of workers that had the range before and were lost.
    """

    lease_id: int
    place: int
    worker_id: str
    incarnation: int
    attempt: int = 0

    @property
    def identity(self) -> Identity:
        """The worker's id and incarnation."""
        return self.worker_id, self.incarnation


@dataclass(frozen=True)
class DatasetRecord:
    """A data set, whose ranges are free, leased, or over.

    free: disjoint intervals [start, stop) of places, ascending and not adjacent.
    attempts: for free places, the number of workers that had it and were lost, if not 0, as (place, number).
    given: the highest lease id given so far.
    """

    spec: DatasetSpec
    free: tuple[tuple[int, int], ...]
    leases: tuple[DataLease, ...] = ()
    attempts: tuple[tuple[int, int], ...] = ()
    repeated: int = 0
    failed: int = 0
    given: int = 0


@dataclass(frozen=True, slots=True)
class EndStep:
    """Step at which all workers of a parameter set ended together."""

    parameters: str
    step: int


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """Starting point of parameters that are not placed yet.

    restore: the snapshot that the run resumed from; None if it started from nothing.
    generation: number of rollbacks of this run.
    term: term of the shards placed from now on, above all terms that shards of these names had.
    epoch: epoch in which the run resumed from it. Newer snapshots that were committed before belong to a history that
        was given up.
    began: first epoch of a run that resumed from a snapshot; that snapshot and earlier ones have lower epochs. 0 if all
        snapshots are of this run.
    """

    restore: Restore | None = None
    generation: int = 0
    term: int = 1
    epoch: int = 0
    began: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerProcess:
    """A process of this run's scheduler. last_epoch: the last one that it published; 0 while it runs."""

    scheduler_id: str
    last_epoch: int = 0


@dataclass(frozen=True)
class StoredState:
    """Everything that a restarted scheduler begins with."""

    run_id: str
    epoch: int
    members: tuple[Member, ...] = ()
    parameters: tuple[ParametersRecord, ...] = ()
    nodes: tuple[Node, ...] = ()
    datasets: tuple[DatasetRecord, ...] = ()
    #: Wanted number of servers; 0 if none was set.
    servers_wanted: int = 0
    base: RestorePoint = RestorePoint()
    barriers: tuple[BarrierRecord, ...] = ()
    #: Oldest first. The last one is the predecessor of this process.
    schedulers: tuple[SchedulerProcess, ...] = ()
    #: Why the run can never continue from this store; empty if it can.
    run_lost: str = ""
    #: Where all workers ended together, if nobody trained since.
    ends: tuple[EndStep, ...] = ()


def group(pairs: Iterable[tuple[T, int]]) -> dict[T, list[int]]:
    """Return the numbers of each key, with keys in order of first appearance."""
    groups: dict[T, list[int]] = {}
    for key, number in pairs:
        groups.setdefault(key, []).append(number)
    return groups


def name_some(items: Sequence[Member] | Sequence[str]) -> str:
    """Name the first three of ``items``, and the number of others."""
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(str(item) for item in items[:3]) + more


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event of the run's history. number: from 1 on, without gaps. time: seconds since 1970."""

    number: int
    time: float
    kind: str
    warning: bool
    text: str
