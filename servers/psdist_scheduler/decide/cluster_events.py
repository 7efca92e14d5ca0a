"""Events of the scheduler's machine: frozen dataclasses.

Used as ``Cluster.on(event, now) -> list[Effect]``. An RPC in progress, a session stream included, is known by its
``call``, a number that the service chooses and never reuses. ``effects`` has the answers, commands and effects,
``snapshot_events`` everything about snapshots. No protobuf message appears here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from psdist.types import DataPosition, DatasetSpec, Layout, ParametersSpec, Replica, WorkerEntry
from psdist_scheduler.decide.cluster_state import ProbeResult, Role

#: Step, or number of a worker's next push, by parameter set.
Numbers = tuple[tuple[str, int], ...]

# --- parts of events --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender that a request names. An empty ``run_id`` means the scheduler's only run."""

    run_id: str
    member_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True)
class Call(Event):
    """A request, or a report of a member on its session ``call``."""

    call: int


@dataclass(frozen=True, slots=True)
class RunCall(Call):
    """A request to a run. An empty ``run_id`` means the scheduler's only run."""

    run_id: str


@dataclass(frozen=True, slots=True)
class WorkerCall(Call):
    """A request of a live worker."""

    caller: Caller


@dataclass(frozen=True, slots=True)
class AttemptProgress:
    """A server's progress with a snapshot, in its heartbeats."""

    attempt: int
    done: int
    total: int
    waiting_for: str = ""
    loading: bool = False


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
class UnreachableServer:
    """Part of a worker's heartbeat: a server that it cannot reach, and for how many seconds."""

    server: Replica
    seconds: float
    reason: str


# --- members and calls ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register(Call):
    """A server's or worker's request to take part. With an empty id or a rank of None the scheduler chooses.

    oldest_protocol: that the member speaks; 0 if it speaks protocol_version alone.
    """

    protocol_version: int
    run_id: str
    role: Role
    member_id: str = ""
    rank: int | None = None
    world_size: int = 0
    address: str = ""
    host: str = ""
    pid: int = 0
    oldest_protocol: int = 0


@dataclass(frozen=True, slots=True)
class SessionOpened(Call):
    """Hello of a member.

    epoch, scheduler_id: of the newest map that it holds.
    """

    member_id: str
    incarnation: int
    epoch: int = 0
    scheduler_id: str = ""


@dataclass(frozen=True, slots=True)
class SessionClosed(Call):
    reason: str


@dataclass(frozen=True, slots=True)
class Probed(Event):
    """Result of a connection to the port of a silent server (see ``Probe``)."""

    member_id: str
    incarnation: int
    result: ProbeResult


@dataclass(frozen=True, slots=True)
class Heartbeat(Call):
    """A heartbeat on session ``call``.

    versions: highest version by parameter set (servers).
    """

    epoch: int = 0
    versions: tuple[tuple[str, int], ...] = ()
    waiting_for: tuple[str, ...] = ()
    #: Only from servers that write or load.
    progress: AttemptProgress | None = None
    #: Only from servers: workers that sent something since the last heartbeat, by id and incarnation, and the seconds
    #: since.
    heard: tuple[tuple[str, int, float], ...] = ()
    #: Only from workers.
    activity: Activity | None = None
    unreachable: tuple[UnreachableServer, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinAnswered(Call):
    proposal_id: int
    accepted: bool
    version_max: int


@dataclass(frozen=True, slots=True)
class ValuesAnswered(Call):
    """A server's answer to ``CheckValues``, on its session ``call``.

    installed: number of slices with initial values, among those whose primary it is.
    """

    number: int
    installed: int


@dataclass(frozen=True, slots=True)
class ReplicaReport(Call):
    """A primary's report, on its session ``call``, about a replica of its shard.

    fill: number of the filling that made the replica's copy (``Shard.fills``).
    """

    parameters: str
    shard: int
    term: int
    replica: Replica
    fill: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaFilled(ReplicaReport):
    """``replica`` has the whole shard and gets every further update."""


@dataclass(frozen=True, slots=True)
class ReplicaUnreachable(ReplicaReport):
    """``replica`` does not answer, or cannot use its primary's messages."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Leave(Call):
    caller: Caller
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Create(WorkerCall):
    """A worker's request to create parameters, if necessary, and to take part in their training."""

    spec: ParametersSpec
    layout: Layout
    #: Push that a worker that was expelled wants to make in this incarnation.
    resume: ResumePush | None = None
    activity: Activity | None = None


@dataclass(frozen=True, slots=True)
class Describe(WorkerCall):
    parameters: str


@dataclass(frozen=True, slots=True)
class CommitParameters(WorkerCall):
    """The uploader's report that all initial values are on the servers of the map of ``epoch``."""

    parameters: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class EnterBarrier(WorkerCall):
    """A worker's arrival at a barrier.

    origin, passed: number of the round (see ``waits``).
    withdraw: True if the worker no longer waits, and asks whether it had opened the barrier.
    attempt: number of the request in this round or an earlier one; 0 if it has none.
    """

    name: str
    origin: int = 0
    passed: int = 0
    withdraw: bool = False
    activity: Activity | None = None
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class EnterRendezvous(RunCall):
    """A worker agent's request for the ranks of its processes."""

    agent_id: str
    host: str
    processes: int
    nodes_min: int
    nodes_max: int
    #: host:port where the node's first script may listen, for torch.distributed.
    master_address: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp(RunCall):
    """End of a worker agent whose script fails.

    elastic: True if the run may have fewer nodes than have joined.
    """

    host: str
    reason: str
    elastic: bool


@dataclass(frozen=True, slots=True)
class Drain(RunCall):
    server_id: str


@dataclass(frozen=True, slots=True)
class Stop(Call):
    """Request to end this scheduler as soon as the training progress is saved.

    servers: True to end its servers before it.
    """

    servers: bool = False


@dataclass(frozen=True, slots=True)
class Scale(RunCall):
    """Wanted number of servers or workers; the other number is 0."""

    servers: int
    workers: int = 0


@dataclass(frozen=True, slots=True)
class WatchScale(RunCall):
    """A launcher's subscription to the wanted numbers of servers and workers, and to the servers to stop.

    workers_wanted: the last number that this launcher received.
    """

    workers_wanted: int = 0


@dataclass(frozen=True, slots=True)
class CallEnded(Call):
    """A call is over: it was answered, or its peer is gone. Sessions end by SessionClosed instead.

    refused: True if it ended with an error.
    """

    refused: bool = False


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Passage of time. Expected every ``ClusterSettings.tick_seconds``."""


# --- reports of workers, and of servers about them --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heard(Event):
    """Workers, by id and incarnation, that sent this scheduler something besides heartbeats."""

    heard: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ServerChecked(Call):
    """A worker's report, on its session ``call``, whether it reached the server that it was asked about."""

    server: Replica
    reached: bool


@dataclass(frozen=True, slots=True)
class EqualContributions(Call):
    """A server's report, on its session ``call``: these workers pushed equal gradients in steps up to ``step``."""

    parameters: str
    worker_ids: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class StopReported(Call):
    """A worker's shutdown report, on its session ``call``.

    number: number of the command that it answers; 0 for none.
    next: its next push by parameter set, once it has stopped pushing.
    """

    number: int
    stopping: bool
    next: Numbers | None = None


@dataclass(frozen=True, slots=True)
class CallChecked(Call):
    """A worker's report, on its session ``call``: it confirms the CheckCall with these fields."""

    sequence: int
    worker_id: str
    incarnation: int
    waiting: int


@dataclass(frozen=True, slots=True)
class AlignReported(Call):
    """Progress of a held worker, on its session ``call``: see AlignReport of scheduler.proto."""

    number: int
    position: int
    start: int | None = None
    period: int = 0
    declared: bool = False
    next: Numbers = ()


# --- groups of workers, and data sets ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenDataset(WorkerCall):
    spec: DatasetSpec


@dataclass(frozen=True, slots=True)
class RangeReport(WorkerCall):
    """A worker's report of used leases.

    done: leases that it has used.
    done_at: its next pushes when it had used each lease of ``done``.
    now: its next pushes now.
    """

    dataset: str
    done: tuple[int, ...] = ()
    done_at: tuple[Numbers, ...] = ()
    now: Numbers = ()


@dataclass(frozen=True, slots=True)
class LeaseRange(RangeReport):
    """A worker's request for another range. held: leases that it still holds."""

    held: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EndRanges(RangeReport):
    """A worker gives back leases (``returned``). used: those of them with samples that may be in the weights."""

    returned: tuple[int, ...] = ()
    used: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FormGroup(WorkerCall):
    """A worker's request for the next group of a name; see ``formations``.

    ticket: recognizes a repeated request; 0 only asks about waiting workers.
    epoch, members: the caller's group; 0 and none if it is in no group of this name.
    unreachable, closed: ranks in that group that the caller cannot reach, and that have closed it.
    admits: True at a step boundary, where workers may be added.
    size, size_min: workers that the first group needs, and that every group needs.
    finishes: True if the group's work is complete: the caller leaves it, and nobody is added any more.
    """

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
class GetPosition(RunCall):
    dataset: str


@dataclass(frozen=True, slots=True)
class SetPosition(WorkerCall):
    dataset: str
    position: DataPosition


# --- stacks (psdist stacks) -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StacksRequested(RunCall):
    """Request for the stacks of all members."""


@dataclass(frozen=True, slots=True)
class StacksReported(Call):
    """A member's stacks, as text, on its session ``call``."""

    number: int
    stacks: str


# --- recordings of spans (psdist trace) -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceRequested(RunCall):
    """Request to record this number of steps."""

    steps: int


@dataclass(frozen=True, slots=True)
class SpansReported(Call):
    """A member's report on its session ``call``.

    data: its spans, as a message.
    recorded, steps: numbers of spans and of complete steps so far.
    done: True if nothing more comes.
    """

    number: int
    data: bytes
    recorded: int
    steps: int
    done: bool


@dataclass(frozen=True, slots=True)
class ClockReported(Call):
    """A member's answer on its session ``call`` to a question about its clock. Times in nanoseconds.

    sent, received: time of this scheduler when it asked, and when the answer came.
    member: time of the member in between.
    """

    number: int
    sent: int
    member: int
    received: int
    clock_id: str
