"""Events, answers and effects of the scheduler's machine: frozen dataclasses.

Used as ``Cluster.on(event, now) -> list[Effect]``. An RPC in progress, a session stream included, is known by its
``call``, a number that the service chooses and never reuses. Effects are carried out in the order of the list. A
``Persist`` comes before everything that depends on it, so no peer sees a change that a crash could undo. No protobuf
message appears here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from psdist.errors import ClosedError, PsdistError
from psdist.types import ClusterMap, Layout, ParametersMember, ParametersSpec, Replica
from psdist_scheduler.events import snapshot_events as sn
from psdist_scheduler.events import worker_events as we
from psdist_scheduler.events.cluster_state import (
    BarrierRecord,
    DatasetRecord,
    Member,
    Node,
    ParametersRecord,
    ProbeResult,
    RestorePoint,
    Role,
    SchedulerProcess,
)
from psdist_scheduler.events.trace_events import TraceAnswer, TraceCommand, TraceEnded, TraceEvent

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """A server's or worker's request to take part. With an empty id or a rank of None the scheduler chooses.

    oldest_protocol: that the member speaks; 0 if it speaks protocol_version alone.
    """

    call: int
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
class SessionOpened:
    """Hello of a member.

    epoch, scheduler_id: of the newest map that it holds.
    """

    call: int
    member_id: str
    incarnation: int
    epoch: int = 0
    scheduler_id: str = ""


@dataclass(frozen=True, slots=True)
class SessionClosed:
    call: int
    reason: str


@dataclass(frozen=True, slots=True)
class Probed:
    """Result of a connection to the port of a silent server (see ``Probe``)."""

    member_id: str
    incarnation: int
    result: ProbeResult


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat on session ``call``.

    versions: highest version by parameter set (servers).
    """

    call: int
    epoch: int = 0
    versions: tuple[tuple[str, int], ...] = ()
    waiting_for: tuple[str, ...] = ()
    #: Only from servers that write or load.
    progress: sn.AttemptProgress | None = None
    #: Only from servers: workers that sent something since the last heartbeat, by id and incarnation, and the seconds
    #: since.
    heard: tuple[tuple[str, int, float], ...] = ()
    #: Only from workers.
    activity: we.Activity | None = None
    unreachable: tuple[we.UnreachableServer, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinAnswered:
    call: int
    proposal_id: int
    accepted: bool
    version_max: int


@dataclass(frozen=True, slots=True)
class ValuesAnswered:
    """A server's answer to ``CheckValues``, on its session ``call``.

    installed: number of slices with initial values, among those whose primary it is.
    """

    call: int
    number: int
    installed: int


@dataclass(frozen=True, slots=True)
class ReplicaFilled:
    """A primary's report, on its session ``call``, that ``replica`` has the whole shard and gets every further update.

    fill: number of the filling that the report is about (``Shard.fills``).
    """

    call: int
    parameters: str
    shard: int
    term: int
    replica: Replica
    fill: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaUnreachable:
    """A primary's report, on its session ``call``, that ``replica`` does not answer, or cannot use its messages.

    fill: number of the filling that made the replica's copy (``Shard.fills``).
    """

    call: int
    parameters: str
    shard: int
    term: int
    replica: Replica
    reason: str
    fill: int = 0


@dataclass(frozen=True, slots=True)
class Leave:
    call: int
    caller: we.Caller
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Create:
    """A worker's request to create parameters, if necessary, and to take part in their training."""

    call: int
    caller: we.Caller
    spec: ParametersSpec
    layout: Layout
    #: Push that a worker that was expelled wants to make in this incarnation.
    resume: we.ResumePush | None = None
    activity: we.Activity | None = None


@dataclass(frozen=True, slots=True)
class Describe:
    call: int
    caller: we.Caller
    parameters: str


@dataclass(frozen=True, slots=True)
class CommitParameters:
    """The uploader's report that all initial values are on the servers of the map of ``epoch``."""

    call: int
    caller: we.Caller
    parameters: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class EnterBarrier:
    """A worker's arrival at a barrier.

    origin, passed: number of the round (see ``barriers``).
    withdraw: True if the worker no longer waits, and asks whether it had opened the barrier.
    attempt: number of the request in this round or an earlier one; 0 if it has none.
    """

    call: int
    caller: we.Caller
    name: str
    origin: int = 0
    passed: int = 0
    withdraw: bool = False
    activity: we.Activity | None = None
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class EnterRendezvous:
    """A worker agent's request for the ranks of its processes."""

    call: int
    run_id: str
    agent_id: str
    host: str
    processes: int
    nodes_min: int
    nodes_max: int
    #: host:port where the node's first script may listen, for torch.distributed.
    master_address: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End of a worker agent whose script fails.

    elastic: True if the run may have fewer nodes than have joined.
    """

    call: int
    run_id: str
    host: str
    reason: str
    elastic: bool


@dataclass(frozen=True, slots=True)
class Drain:
    call: int
    run_id: str
    server_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Request to end this scheduler as soon as the training progress is saved.

    servers: True to end its servers before it.
    """

    call: int
    servers: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """Wanted number of servers or workers; the other number is 0."""

    call: int
    run_id: str
    servers: int
    workers: int = 0


@dataclass(frozen=True, slots=True)
class WatchScale:
    """A launcher's subscription to the wanted numbers of servers and workers, and to the servers to stop.

    workers_wanted: the last number that this launcher received.
    """

    call: int
    run_id: str
    workers_wanted: int = 0


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is over: it was answered, or its peer is gone. Sessions end by SessionClosed instead.

    refused: True if it ended with an error.
    """

    call: int
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Passage of time. Expected every ``ClusterSettings.tick_seconds``."""


WorkerReport = we.StopReported | we.AlignReported | we.ServerChecked | we.CallChecked | we.Heard | we.EqualContributions
SessionEvent = SessionOpened | SessionClosed | Probed | Heartbeat | JoinAnswered | ValuesAnswered
MemberEvent = Register | Leave | WorkerReport | SessionEvent
ReplicaEvent = ReplicaFilled | ReplicaUnreachable
#: Calls that may wait.
WaitingCall = Create | Describe | EnterBarrier | EnterRendezvous
CallEvent = WaitingCall | CommitParameters | GiveUp | Drain | Stop | Scale | WatchScale
OtherEvent = we.DataEvent | we.FormGroup | sn.SnapshotEvent | TraceEvent
Event = MemberEvent | ReplicaEvent | CallEvent | OtherEvent | CallEnded | Tick

# --- answers to calls, and commands on sessions -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """Reason for a wait, as text that begins with "for". Other answers follow."""

    text: str


@dataclass(frozen=True, slots=True)
class Registered:
    """The member is registered, durably.

    protocol_version: the newest common one.
    """

    member: Member
    protocol_version: int
    world_size: int
    lease_seconds: float
    heartbeat_seconds: float


@dataclass(frozen=True, slots=True)
class Upload:
    """This worker's values are to be uploaded. Other answers follow."""


@dataclass(frozen=True, slots=True)
class ParametersReady:
    """The parameters can be used from ``first_step`` on (BSP).

    resumed: True if the push that the worker asked for continues.
    notice: information for users about the parameters.
    """

    first_step: int
    resumed: bool = False
    notice: str = ""


@dataclass(frozen=True)
class Described:
    """Settings of existing parameters, with the actual slice_elements, and their tensors."""

    spec: ParametersSpec
    layout: Layout


@dataclass(frozen=True, slots=True)
class Done:
    """The request was carried out, durably."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An arrival at a barrier does not count."""


@dataclass(frozen=True, slots=True)
class Formed:
    """The agent's node has its ranks."""

    node: Node
    nodes: int
    world_size: int
    #: Address of the node with the lowest ranks.
    master_address: str = ""


@dataclass(frozen=True, slots=True)
class JoinProposal:
    """To a server, on its session: ask whether this member may join at its first step."""

    proposal_id: int
    parameters: str
    member: ParametersMember


@dataclass(frozen=True, slots=True)
class CheckValues:
    """To a server, on its session: ask how many slices of these parameters have initial values."""

    number: int
    parameters: str


@dataclass(frozen=True, slots=True)
class WithdrawJoin:
    """To a server, on its session: withdraw that proposal."""

    proposal_id: int
    parameters: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class Draining:
    """Progress of a drain: the number of shards that are still to move, and the reason for the wait. Other answers
    follow."""

    text: str
    shards_left: int
    shards_total: int


@dataclass(frozen=True, slots=True)
class Drained:
    """The server holds nothing that anybody needs."""

    shards_total: int


@dataclass(frozen=True, slots=True)
class Scaled:
    servers_before: int
    drained: tuple[str, ...]
    missing: int
    launchers: int
    workers_before: int = 0


@dataclass(frozen=True, slots=True)
class ScaleNews:
    """Numbers for launchers. Other answers follow.

    servers_wanted: wanted number of servers besides those that are drained; 0 if not set.
    stop: those of the drained servers that are to be stopped.
    lost: what is lost, so that the run cannot continue; empty for nothing.
    workers_wanted: wanted number of workers of each launcher; 0 if not set.
    next_rank: the first rank that no worker has had.
    """

    servers_wanted: int
    draining: tuple[str, ...]
    stop: tuple[str, ...]
    lost: str
    workers_wanted: int = 0
    next_rank: int = 0


@dataclass(frozen=True, slots=True)
class MemberLost:
    """To everyone: a member is lost, and did not leave."""

    member_id: str
    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class ShardsLost:
    """To everyone: these shards had no backup when their server was lost.

    text: what was lost, and the remedy.
    """

    parameters: str
    shards: tuple[int, ...]
    server_id: str
    version: int
    text: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """To everyone, and to later sessions: no worker is left and the training progress is saved. Servers exit."""


News = MemberLost | ShardsLost | sn.RolledBack | RunEnded
#: Answers that are followed by others, and last answers.
Interim = Waiting | Upload | Draining | ScaleNews | sn.Saving | TraceAnswer
Last = Registered | ParametersReady | Described | Done | Withdrawn | Formed | Drained | Scaled | sn.Saved | TraceEnded
DataAnswer = we.DatasetStanding | we.RangeGiven | we.GroupStanding | sn.StatePlace | sn.StateSource
Command = JoinProposal | WithdrawJoin | CheckValues | RunEnded | we.WorkerCommand | sn.SnapshotCommand | TraceCommand
Value = Interim | Last | DataAnswer | Command

# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Persist:
    """Make these changes durable, all or none, before the effects that follow.

    The epoch is an earlier one if only data sets changed, which the map does not show.
    """

    epoch: int
    members: tuple[Member, ...] = ()
    parameters: tuple[ParametersRecord, ...] = ()
    nodes: tuple[Node, ...] = ()
    #: None for no change.
    servers_wanted: int | None = None
    datasets: tuple[DatasetRecord, ...] = ()
    #: Names of parameter sets that are no longer placed. Applied before ``parameters``: a name may be in both.
    forgotten: tuple[str, ...] = ()
    #: None for no change.
    base: RestorePoint | None = None
    barriers: tuple[BarrierRecord, ...] = ()
    #: All scheduler processes so far; empty for no change.
    schedulers: tuple[SchedulerProcess, ...] = ()
    #: Why the run can never continue from this store; empty for no change.
    run_lost: str = ""


@dataclass(frozen=True)
class Publish:
    """Send this new cluster map on every attached session."""

    map: ClusterMap


@dataclass(frozen=True, slots=True)
class Attach:
    """Accept the session: send it the current map and all later news."""

    call: int


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send this on every attached session."""

    news: News


@dataclass(frozen=True)
class Answer:
    """Answer the call. Answers with a map carry the one that was published last."""

    call: int
    value: Value


@dataclass(frozen=True)
class Refuse:
    call: int
    error: PsdistError


def refuse_older(call: int, who: object) -> Refuse:
    """Refuse the call of a peer that repeated its request because that call broke."""
    return Refuse(call, ClosedError(f"{who} asked again on a newer call, which replaces this one"))


@dataclass(frozen=True, slots=True)
class Close:
    """End the session without an error."""

    call: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Connect to the port of a silent server, and report the result as ``Probed``."""

    member_id: str
    incarnation: int
    address: str


#: Subject of an entry of the run's history.
EventKind = Literal[
    "join", "leave", "loss", "shard_loss", "promotion", "replication", "rollback", "snapshot", "snapshot_failed",
    "scale", "parameters", "data", "shutdown", "note",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An entry for the log and, unless it is only about a wait, for the list of recent events.

    level: "wait" and "call" are about waits. "wait" is a warning, because nobody else reports it.
    peer: id of the one member that the entry is about; empty if there are several or none.
    """

    text: str
    level: Literal["info", "warning", "wait", "call"] = "info"
    kind: EventKind = "note"
    peer: str = ""


#: A wait: its name, the waiting calls, and the reason as text that begins with "for".
Wait = tuple[str, list[int], str]
Effect = Persist | Publish | Attach | Broadcast | Answer | Refuse | Close | Probe | LogEvent | sn.StorageEffect
