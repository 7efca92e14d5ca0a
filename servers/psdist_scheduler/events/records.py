"""What the scheduler remembers, as frozen dataclasses: members, parameter sets, formed nodes, and their sum.

The pure machines hold these values, the store writes them, and the service reports them. No protobuf message appears
here, and nothing that may be lost with the scheduler's process without harm (heartbeat times, open streams, waits).
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
#: What a connection to a server's port met. "accepted": its kernel answers, so that the process is there, but may be
#: stopped or starved. "silent": nothing came back. "": not tried, or not known yet.
ProbeResult = Literal["", "refused", "accepted", "silent"]
HEARTBEATS_PER_LEASE: Final = 4
TICKS_PER_LEASE: Final = 8
LONGEST_TICK_SECONDS: Final = 0.25
#: Of all workers together.
WORKER_HEARTBEATS_PER_SECOND: Final = 250


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings of one run's scheduler.

    run_id: name of the run.
    workers_min, servers_min: so many must be live before parameters are placed or a barrier opens.
    replicas: copies of each shard, the primary's included.
    lease_seconds: a server that is silent for longer is lost.
    worker_lease_seconds: the same for a worker, whose script may keep it from answering for a while.
    join_grace_seconds: time to wait for more of them once enough workers (or nodes) are there.
    storage: where servers write snapshots to: an absolute path or a URL; empty for nowhere.
    unwritable: why nothing can be saved there, where the run goes on nevertheless; empty where it can.
    policy: when snapshots are taken, and which are kept.
    idle_timeout_seconds: the run is over when no worker has been there for so long, after some were; 0 for never.
    start_timeout_seconds: the run ends if the members that it needs have not come within this time; 0 for never.
    salt: name of this process of the scheduler alone; in the names of directories, so that none is used twice.
    store: the file of the store, if nobody chose it; empty otherwise.
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

    def heartbeat_of(self, role: Role, workers: int) -> float:
        """The period of a member's heartbeats, in seconds, in a run of so many workers: a part of the shorter lease.
        Many workers send theirs less often, as far as their own lease allows: each costs this process a fifth of a
        millisecond."""
        least = min(self.lease_seconds, self.worker_lease_seconds) / HEARTBEATS_PER_LEASE
        if role == "server":
            return least
        return max(least, min(workers / WORKER_HEARTBEATS_PER_SECOND, self.worker_lease_seconds / HEARTBEATS_PER_LEASE))

    @property
    def tick_seconds(self) -> float:
        """The period of the machine's ticks: short beside a lease, which is how a standstill of this process shows."""
        return min(self.lease_seconds / TICKS_PER_LEASE, LONGEST_TICK_SECONDS)

    def lease_of(self, role: Role) -> float:
        """For how long, in seconds, a member of this role may be silent."""
        return self.worker_lease_seconds if role == "worker" else self.lease_seconds


@dataclass(frozen=True, slots=True)
class Member:
    """One id and its newest incarnation. Servers have rank and world_size 0, workers an empty address."""

    member_id: str
    role: Role
    incarnation: int
    rank: int = 0
    world_size: int = 0
    address: str = ""
    host: str = ""
    pid: int = 0
    state: MemberState = "live"
    #: Why it left or was lost; empty while it lives.
    reason: str = ""
    #: A server from which everything is moved away, or was before it went.
    draining: bool = False

    @property
    def identity(self) -> Identity:
        """Its id and incarnation."""
        return self.member_id, self.incarnation

    @property
    def replica(self) -> Replica:
        """A server as one that can hold copies of shards."""
        return Replica(self.member_id, self.incarnation)

    @property
    def live(self) -> bool:
        """Whether it takes part."""
        return self.state == "live"

    @property
    def state_text(self) -> str:
        """What became of it: "left (done)"."""
        return {"live": "lives", "left": f"left ({self.reason})", "lost": f"was taken for lost ({self.reason})"}[
            self.state
        ]

    def __str__(self) -> str:
        return f"{self.member_id} (rank {self.rank})" if self.role == "worker" else self.member_id


@dataclass(frozen=True)
class ParametersRecord:
    """Parameters that were placed."""

    entry: ParametersEntry
    layout: Layout
    #: The worker that was last asked for the initial values; empty if all creators went away before.
    uploader: str
    #: All initial values are on the primaries.
    committed: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A worker agent that was given its ranks: ``first_rank`` to ``first_rank + processes - 1``."""

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
    """A worker has passed ``passed`` barriers of this name since the incarnation ``origin``."""

    worker_id: str
    name: str
    origin: int
    passed: int


@dataclass(frozen=True, slots=True)
class DataLease:
    """One incarnation of a worker has the range at ``place``; ``attempt`` workers had it before and were lost."""

    lease_id: int
    place: int
    worker_id: str
    incarnation: int
    attempt: int = 0


@dataclass(frozen=True)
class DatasetRecord:
    """A data set: its ranges are free, leased, or over.

    free: stretches [start, stop) of places, ascending, apart from each other.
    attempts: (place, workers that had it and were lost), where that is not 0; of free places.
    given: the highest lease id that was ever given.
    """

    spec: DatasetSpec
    free: tuple[tuple[int, int], ...]
    leases: tuple[DataLease, ...] = ()
    attempts: tuple[tuple[int, int], ...] = ()
    repeated: int = 0
    failed: int = 0
    given: int = 0


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """What parameters begin from that are not placed yet.

    restore: the snapshot that the run went on from; None where it began from nothing.
    generation: how often this run went back to a snapshot.
    term: of the shards of what is placed from now on, above all terms that shards of these names had.
    epoch: when the run went on from it; what is newer and was committed before is of a course that was given up.
    began: the first epoch of a run that went on from a snapshot; that one and those before it have lower epochs. 0
        where all snapshots are of this run.
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
    """All that a restarted scheduler begins with."""

    run_id: str
    epoch: int
    members: tuple[Member, ...] = ()
    parameters: tuple[ParametersRecord, ...] = ()
    nodes: tuple[Node, ...] = ()
    datasets: tuple[DatasetRecord, ...] = ()
    #: Servers that the run shall have; 0 if none was set.
    servers_wanted: int = 0
    base: RestorePoint = RestorePoint()
    barriers: tuple[BarrierRecord, ...] = ()
    #: Oldest first. The last one is the process before this one.
    schedulers: tuple[SchedulerProcess, ...] = ()
    #: Why the run can never continue from this store; empty if it can.
    run_lost: str = ""


def group(pairs: Iterable[tuple[T, int]]) -> dict[T, list[int]]:
    """The numbers that each key has, in the order of their first ones."""
    groups: dict[T, list[int]] = {}
    for key, number in pairs:
        groups.setdefault(key, []).append(number)
    return groups


def name_some(items: Sequence[Member] | Sequence[str]) -> str:
    """The first three of ``items``, and how many more there are."""
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(str(item) for item in items[:3]) + more
