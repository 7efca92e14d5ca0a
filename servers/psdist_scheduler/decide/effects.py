"""Answers, commands and effects of the scheduler's machine: frozen dataclasses.

Effects are carried out in the order of the list. A ``Persist`` comes before everything that depends on it, so no peer
sees a change that a crash could undo. Commands are sent on sessions, as an ``Answer`` or a ``Broadcast``. No protobuf
message appears here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from psdist.errors import ClosedError, PsdistError
from psdist.types import (
    ClusterMap,
    DataPosition,
    DatasetSpec,
    Layout,
    ParametersMember,
    ParametersSpec,
    Replica,
    WorkerEntry,
)
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.cluster_events import Numbers
from psdist_scheduler.decide.cluster_state import (
    BarrierRecord,
    DataLease,
    DatasetRecord,
    EndStep,
    Member,
    Node,
    ParametersRecord,
    RestorePoint,
    Role,
    SchedulerProcess,
)

# --- answers to calls, and commands on sessions -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """Reason for a wait, as text that begins with "for". Other answers follow."""

    waiting_for: str


@dataclass(frozen=True, slots=True)
class Registered:
    """The member is registered, durably.

    protocol_version: the newest common one.
    time_limits_suspended: the member waits for others however long.
    """

    member: Member
    protocol_version: int
    world_size: int
    lease_seconds: float
    heartbeat_seconds: float
    time_limits_suspended: bool = False


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

    waiting_for: str
    shards_left: int
    shards_total: int


@dataclass(frozen=True, slots=True)
class Drained:
    """The server holds nothing that anybody needs."""

    shards_total: int


@dataclass(frozen=True, slots=True)
class Scaled:
    """The wanted number is recorded. missing: members that launchers are to start; launchers: how many watch."""

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
class DatasetStanding:
    """Settings and position of a data set, and the number of its leases that are out."""

    spec: DatasetSpec
    position: DataPosition
    leased: int


@dataclass(frozen=True, slots=True)
class RangeGiven:
    """The range of this lease. lease: None if no range is left."""

    lease: DataLease | None
    data_epoch: int
    range: int
    repeated_ranges: int
    failed_ranges: int


# --- commands to workers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckServer:
    """To a worker, on its session: ask whether it can reach this server. The answer is a ServerChecked."""

    server: Replica


@dataclass(frozen=True, slots=True)
class Notice:
    """To a worker, on its session: a warning about its script."""

    text: str


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


StopKind = Literal["ask", "hold", "leave"]


@dataclass(frozen=True, slots=True)
class StopCommand:
    """To a worker, on its session: see StopCommand of scheduler.proto. next: with "leave"."""

    number: int
    kind: StopKind
    next: Numbers = ()


@dataclass(frozen=True, slots=True)
class AlignCommand:
    """To a worker, on its session: see AlignCommand of scheduler.proto."""

    number: int
    until: int | None = None
    release: bool = False


WorkerCommand = DeadlockFound | CheckCall | StopCommand | AlignCommand | CheckServer | Notice

# --- stacks (psdist stacks) -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StacksCommand:
    """To a member, on its session: report your stacks."""

    number: int


@dataclass(frozen=True, slots=True)
class MemberStacks:
    """Stacks of one member, or before that the news that it was asked. member: None for the scheduler, whose stacks
    the service adds. missing: why they do not come."""

    member: Member | None
    stacks: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class StacksEnded:
    """Nothing more comes."""


# --- recordings of spans (psdist trace) -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceCommand:
    """To a member, on its session: see TraceCommand of scheduler.proto."""

    number: int
    kind: Literal["start", "end", "clock"]
    steps: int = 0


@dataclass(frozen=True, slots=True)
class MemberSpans:
    """Spans of one member, as a message."""

    member_id: str
    data: bytes


@dataclass(frozen=True, slots=True)
class TracedMember:
    """State of a member in a recording; see TraceMember of scheduler.proto. missing: why nothing more of it comes."""

    member: Member
    offset_ns: int | None = None
    uncertainty_ns: int = 0
    clock_id: str = ""
    recorded: int = 0
    steps: int = 0
    done: bool = False
    missing: str = ""


@dataclass(frozen=True, slots=True)
class TraceEnded:
    """End of a recording. reason: why it ended early; empty if all steps were recorded."""

    reason: str


TraceAnswer = MemberSpans | TracedMember

# --- all answers and commands -----------------------------------------------------------------------------------------

News = MemberLost | ShardsLost | sn.RolledBack | RunEnded
#: Answers that are followed by others, and last answers.
Interim = Waiting | Upload | Draining | ScaleNews | sn.Saving | TraceAnswer | MemberStacks
Last = (
    Registered | ParametersReady | Described | Done | Withdrawn | Formed | Drained | Scaled | sn.Saved | TraceEnded
    | StacksEnded
)  # fmt: skip
DataAnswer = DatasetStanding | RangeGiven | GroupStanding | sn.StatePlace | sn.StateSource
Command = (
    JoinProposal | WithdrawJoin | CheckValues | RunEnded | WorkerCommand | sn.SnapshotCommand | TraceCommand
    | StacksCommand
)  # fmt: skip
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
    #: Where all workers ended together; None for no change. Stores of earlier releases have no such field.
    ends: tuple[EndStep, ...] | None = None


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
    """End the call or session with an error."""

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
    "scale", "parameters", "data", "problem", "shutdown", "note",
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
