"""Events, answers and effects of the scheduler's machine: frozen dataclasses.

``Cluster.on(event, now) -> list[Effect]``. An RPC in progress, a session stream included, is known by its ``call``, a
number that the service chooses and never uses twice. Effects are carried out in the order of the list. A ``Persist``
comes before everything that depends on it, so no peer sees what a crash could undo. No protobuf message appears here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from psdist.errors import ClosedError, PsdistError
from psdist.types import ClusterMap, Layout, ParametersMember, ParametersSpec, Replica
from psdist_scheduler.events import snapshot_events as sn
from psdist_scheduler.events import worker_events as we
from psdist_scheduler.events.records import (
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

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """A server or a worker wants to take part. An empty id and a rank of None leave the choice to the scheduler."""

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


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A member said hello. epoch, scheduler_id: of the newest map that it holds."""

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
    """What a connection to the port of a silent server met (see ``Probe``)."""

    member_id: str
    incarnation: int
    result: ProbeResult


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat on session ``call``. ``versions`` has the highest version by parameters (servers)."""

    call: int
    epoch: int = 0
    versions: tuple[tuple[str, int], ...] = ()
    waiting_for: tuple[str, ...] = ()
    #: Servers, while they write or load.
    progress: sn.AttemptProgress | None = None
    #: Servers: workers, by id and incarnation, that have sent something since the last heartbeat, and seconds since.
    heard: tuple[tuple[str, int, float], ...] = ()
    #: Workers.
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
    """A server answers ``CheckValues`` on its session ``call``: of the slices that it is the primary of, so many have
    their initial values."""

    call: int
    number: int
    installed: int


@dataclass(frozen=True, slots=True)
class ReplicaFilled:
    """A primary reports, on its session ``call``, that ``replica`` has the whole shard and every update from now on.

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
    """A primary reports, on its session ``call``, that ``replica`` does not answer it, or cannot use what it is sent.

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
    """A worker wants parameters to exist, and to take part in their training."""

    call: int
    caller: we.Caller
    spec: ParametersSpec
    layout: Layout
    #: Where the worker took part before it was expelled: the push that it wants to make in this incarnation.
    resume: we.ResumePush | None = None
    activity: we.Activity | None = None


@dataclass(frozen=True, slots=True)
class Describe:
    call: int
    caller: we.Caller
    parameters: str


@dataclass(frozen=True, slots=True)
class CommitParameters:
    """The uploader reports that all initial values are on the servers, which are those of the map of ``epoch``."""

    call: int
    caller: we.Caller
    parameters: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class EnterBarrier:
    """A worker waits for the others at a barrier. origin, passed: the number of the round (see ``barriers``).
    withdraw: it does not wait any more, and wants to know whether it had opened the barrier. attempt: number of the
    arrival, of any round; 0 where it has none."""

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
    """A worker agent asks for the ranks of its processes."""

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
    """A worker agent ends because its script fails. elastic: the run may have fewer nodes than have joined."""

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
    """This scheduler is to end, as soon as what was trained is saved. ``servers``: they are to end before it."""

    call: int
    servers: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """One of the two numbers is not 0."""

    call: int
    run_id: str
    servers: int
    workers: int = 0


@dataclass(frozen=True, slots=True)
class WatchScale:
    """A launcher wants to know how many servers and workers to run, and which servers to stop. workers_wanted: the
    last number that this launcher received."""

    call: int
    run_id: str
    workers_wanted: int = 0


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The peer of a call that still waited is gone. Sessions end by SessionClosed instead."""

    call: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Expected every ``ClusterSettings.tick_seconds``."""


WorkerReport = we.StopReported | we.AlignReported | we.ServerChecked | we.Heard
SessionEvent = SessionOpened | SessionClosed | Probed | Heartbeat | JoinAnswered | ValuesAnswered
MemberEvent = Register | Leave | WorkerReport | SessionEvent
ReplicaEvent = ReplicaFilled | ReplicaUnreachable
#: Calls that may wait.
WaitingCall = Create | Describe | EnterBarrier | EnterRendezvous
CallEvent = WaitingCall | CommitParameters | GiveUp | Drain | Stop | Scale | WatchScale
Event = MemberEvent | ReplicaEvent | CallEvent | we.DataEvent | sn.SnapshotEvent | CallEnded | Tick

# --- answers to calls, and commands on sessions -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waiting:
    """Not the last answer. ``text`` is a sentence that begins with "for"."""

    text: str


@dataclass(frozen=True, slots=True)
class Registered:
    """The member is known, durably."""

    member: Member
    world_size: int
    lease_seconds: float
    heartbeat_seconds: float


@dataclass(frozen=True, slots=True)
class Upload:
    """Not the last answer. This worker's values count."""


@dataclass(frozen=True, slots=True)
class ParametersReady:
    """The parameters can be used from ``first_step`` on (BSP).

    resumed: the push that the worker asked for goes on. notice: what people should know about the parameters.
    """

    first_step: int
    resumed: bool = False
    notice: str = ""


@dataclass(frozen=True)
class Described:
    """Settings, with the real slice_elements, and tensors of existing parameters."""

    spec: ParametersSpec
    layout: Layout


@dataclass(frozen=True, slots=True)
class Done:
    """Carried out, and durable."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An arrival at a barrier does not count."""


@dataclass(frozen=True, slots=True)
class Formed:
    """The agent's node has its ranks."""

    node: Node
    nodes: int
    world_size: int
    #: That of the node with the lowest ranks.
    master_address: str = ""


@dataclass(frozen=True, slots=True)
class JoinProposal:
    """To a server, on its session: may this member join at its first step?"""

    proposal_id: int
    parameters: str
    member: ParametersMember


@dataclass(frozen=True, slots=True)
class CheckValues:
    """To a server, on its session: how many slices of these parameters have their initial values there?"""

    number: int
    parameters: str


@dataclass(frozen=True, slots=True)
class WithdrawJoin:
    """To a server, on its session: forget that proposal."""

    proposal_id: int
    parameters: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class Draining:
    """Not the last answer. So much of a server is not moved yet, and what that waits for."""

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
    """Not the last answer. How many servers a run shall have (0: not set) besides those that are drained, which of
    these are to be stopped, and what is lost, so that the run cannot go on. How many workers each launcher shall have
    (0: not set), and the first rank that none has had."""

    servers_wanted: int
    draining: tuple[str, ...]
    stop: tuple[str, ...]
    lost: str
    workers_wanted: int = 0
    next_rank: int = 0


@dataclass(frozen=True, slots=True)
class MemberLost:
    """To everyone: a member is lost, which did not leave."""

    member_id: str
    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class ShardsLost:
    """To everyone: these shards had no backup when their server went. ``text``: what was lost, and how to go on."""

    parameters: str
    shards: tuple[int, ...]
    server_id: str
    version: int
    text: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """To everyone, and to sessions that open later: no worker is left, and what was trained is saved. Servers end."""


News = MemberLost | ShardsLost | sn.RolledBack | RunEnded
#: Answers that others follow upon, and last answers.
Interim = Waiting | Upload | Draining | ScaleNews | sn.Saving
Last = Registered | ParametersReady | Described | Done | Withdrawn | Formed | Drained | Scaled | sn.Saved
DataAnswer = we.DatasetStanding | we.RangeGiven | sn.StatePlace | sn.StateSource
Command = JoinProposal | WithdrawJoin | CheckValues | RunEnded | we.WorkerCommand | sn.SnapshotCommand
Value = Interim | Last | DataAnswer | Command

# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Persist:
    """Make these changes durable, all or none, before the effects that follow. The epoch is an earlier one where only
    data sets changed, which the map does not show."""

    epoch: int
    members: tuple[Member, ...] = ()
    parameters: tuple[ParametersRecord, ...] = ()
    nodes: tuple[Node, ...] = ()
    #: None leaves it as it was.
    servers_wanted: int | None = None
    datasets: tuple[DatasetRecord, ...] = ()
    #: Names of parameter sets that are not placed any more. Before ``parameters``: a name may be in both.
    forgotten: tuple[str, ...] = ()
    #: None leaves it as it was.
    base: RestorePoint | None = None
    barriers: tuple[BarrierRecord, ...] = ()
    #: All processes of the scheduler so far; empty leaves them as they were.
    schedulers: tuple[SchedulerProcess, ...] = ()
    #: Why the run can never continue from this store; empty leaves it as it was.
    run_lost: str = ""


@dataclass(frozen=True)
class Publish:
    """The cluster map is now this one: send it on every attached session."""

    map: ClusterMap


@dataclass(frozen=True, slots=True)
class Attach:
    """The session is accepted: send it the map that holds, and whatever is announced from now on."""

    call: int


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send this on every attached session."""

    news: News


@dataclass(frozen=True)
class Answer:
    """Tell the call. Answers that carry the map carry the one published last."""

    call: int
    value: Value


@dataclass(frozen=True)
class Refuse:
    call: int
    error: PsdistError


def refuse_older(call: int, who: object) -> Refuse:
    """Ends the call of one who asks for the same thing again, because that call broke."""
    return Refuse(call, ClosedError(f"{who} asked again on a newer call, which replaces this one"))


@dataclass(frozen=True, slots=True)
class Close:
    """End the session without an error."""

    call: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Connect to the port of a silent server, and say as ``Probed`` what that met."""

    member_id: str
    incarnation: int
    address: str


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Something that belongs in the log, and (unless it is only about a wait) in the list of recent events.

    level: "wait" and "call" are about waits. "wait" is a warning, because nobody else reports it.
    """

    text: str
    level: Literal["info", "warning", "wait", "call"] = "info"


#: What calls wait for: its name, the calls, and the reason, a sentence that begins with "for".
Wait = tuple[str, list[int], str]
Effect = Persist | Publish | Attach | Broadcast | Answer | Refuse | Close | Probe | LogEvent | sn.StorageEffect
