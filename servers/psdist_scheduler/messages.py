"""Between events and answers of the scheduler's machine and messages of ``SchedulerService``.

Values from peers are checked here where the pure machines do not check them: roles, addresses, lengths of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psdist.errors import InvalidArgumentError, LimitExceededError
from psdist.settings.config import parse_address
from psdist.types import ClusterMap, check_name
from psdist.v1 import common_pb2 as common
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert, status
from psdist.wire.limits import LEASES_MAX, MEMBERS_MAX, PARAMETERS_MAX, TEXT_CHARACTERS_MAX
from psdist_scheduler import snapshot_messages
from psdist_scheduler.events import cluster_events as ev
from psdist_scheduler.events.data_events import DatasetStanding, RangeGiven
from psdist_scheduler.events.records import Role
from psdist_scheduler.events.snapshot_events import End, Mark, Prepare, RolledBack, TakeCut
from psdist_scheduler.events.worker_events import Activity, Caller, MutualWait, ResumePush, StopCommand, StopReported

#: Of each worker.
CONNECTIONS_KEPT = 256
ROLES: dict[str, pb.Role] = {"server": pb.ROLE_SERVER, "worker": pb.ROLE_WORKER}
_ROLE_NAMES: dict[int, Role] = {pb.ROLE_SERVER: "server", pb.ROLE_WORKER: "worker"}


class MapCache:
    """The published map as a message, converted once."""

    def __init__(self) -> None:
        self.map: ClusterMap | None = None
        self.message = common.ClusterMap()

    def set(self, cluster: ClusterMap) -> None:
        """A newer map is published."""
        self.map, self.message = cluster, convert.map_to_proto(cluster)


# --- requests ---------------------------------------------------------------------------------------------------------


def caller(request: Any) -> Caller:
    """Who sends a worker's request."""
    return Caller(request.run_id, request.worker_id, request.incarnation)


def register_event(call: int, request: pb.RegisterRequest) -> ev.Register:
    """Raises InvalidArgumentError, LimitExceededError."""
    role = _ROLE_NAMES.get(request.role)
    if role is None:
        raise InvalidArgumentError(f"role {request.role} is unknown: use ROLE_SERVER or ROLE_WORKER")
    for name in ("run_id", "host", "address"):
        if len(getattr(request, name)) > TEXT_CHARACTERS_MAX:
            raise LimitExceededError(f"{name} is longer than {TEXT_CHARACTERS_MAX} characters")
    if role == "server":
        parse_address(request.address)
    return ev.Register(
        call=call,
        protocol_version=request.protocol_version,
        run_id=request.run_id,
        role=role,
        member_id=request.member_id,
        rank=request.rank if request.HasField("rank") else None,
        world_size=request.world_size,
        address=request.address,
        host=request.host,
        pid=request.pid,
    )


def resume_push(request: pb.CreateParametersRequest) -> ResumePush | None:
    """The push that a worker wants to make again."""
    wanted = request.resume
    return ResumePush(wanted.origin, wanted.number, wanted.generation) if request.HasField("resume") else None


def stop_reported(call: int, report: pb.StopReport) -> StopReported:
    """A worker's report on its end. Raises LimitExceededError and InvalidNameError."""
    numbers = _next_pushes(report.next) if report.holding else None
    return StopReported(call, report.number, report.stopping, numbers)


def barrier_event(call: int, request: pb.BarrierRequest) -> ev.EnterBarrier:
    """A worker at a barrier."""
    return ev.EnterBarrier(
        call=call,
        caller=caller(request),
        name=request.name,
        origin=request.origin,
        passed=request.passed,
        withdraw=request.withdraw,
        activity=activity(request),
        attempt=request.attempt,
    )


def activity(message: Any) -> Activity | None:
    """What a worker reports that it waits for; None where it reports nothing. Raises LimitExceededError,
    InvalidNameError and InvalidArgumentError."""
    if not message.HasField("activity"):
        return None
    told = message.activity
    numbers = _next_pushes(told.next)
    partial = tuple(sorted(told.partial))
    if not set(partial) <= told.next.keys() or len(partial) > len(numbers):
        raise InvalidArgumentError(f"parameters {partial!s:.200} are pushed in part, and have no number in `next`")
    match kind := told.WhichOneof("waits_for"):
        case "step" | "clock":
            waited = getattr(told, kind)
            name = check_name(waited.parameters, "parameters name")
            return Activity(told.sequence, numbers, kind, name, waited.step, partial)
        case "call":
            return Activity(told.sequence, numbers, "call", partial=partial)
    return Activity(told.sequence, numbers, partial=partial)


def _next_pushes(numbers: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    if len(numbers) > PARAMETERS_MAX:
        raise LimitExceededError(f"next pushes of {len(numbers)} parameters are over the limit of {PARAMETERS_MAX}")
    return tuple(sorted((check_name(name, "parameters name"), number) for name, number in numbers.items()))


def rendezvous_event(call: int, request: pb.RendezvousRequest) -> ev.EnterRendezvous:
    """Raises LimitExceededError."""
    if len(request.host) > TEXT_CHARACTERS_MAX:
        raise LimitExceededError(f"host is longer than {TEXT_CHARACTERS_MAX} characters")
    return ev.EnterRendezvous(
        call=call,
        run_id=request.run_id,
        agent_id=request.agent_id,
        host=request.host,
        processes=request.processes,
        nodes_min=request.nodes_min,
        nodes_max=request.nodes_max,
    )


def leases(ids: Sequence[int]) -> tuple[int, ...]:
    """Lease ids of a request. Raises LimitExceededError."""
    if len(ids) > LEASES_MAX:
        raise LimitExceededError(f"{len(ids)} lease ids in one request are over the limit of {LEASES_MAX}")
    return tuple(ids)


def heartbeat_event(call: int, heartbeat: pb.SessionRequest.Heartbeat) -> ev.Heartbeat:
    """A heartbeat, with those statistics by which the machine decides."""
    versions = tuple((p.parameters, p.version_max) for p in heartbeat.statistics.parameters)
    progress = snapshot_messages.progress(heartbeat.snapshot) if heartbeat.HasField("snapshot") else None
    heard = tuple((one.worker_id, one.incarnation) for one in heartbeat.heard[:MEMBERS_MAX])
    waits = tuple(heartbeat.waiting_for)
    return ev.Heartbeat(call, heartbeat.epoch, versions, waits, progress, heard, activity(heartbeat))


def join_answered(call: int, message: pb.SessionRequest.JoinAnswer) -> ev.JoinAnswered:
    """A server's answer to a proposal."""
    return ev.JoinAnswered(call, message.proposal_id, message.accepted, message.version_max)


def replica_filled(call: int, message: pb.ReplicaFilled) -> ev.ReplicaFilled:
    """A copy that is complete."""
    replica = convert.replica_from_proto(message.replica)
    return ev.ReplicaFilled(call, message.parameters, message.shard, message.term, replica)


def replica_unreachable(call: int, message: pb.ReplicaUnreachable) -> ev.ReplicaUnreachable:
    """A copy that does not answer."""
    replica = convert.replica_from_proto(message.replica)
    reason = message.reason[:TEXT_CHARACTERS_MAX]
    return ev.ReplicaUnreachable(call, message.parameters, message.shard, message.term, replica, reason)


def connections(message: pb.Connections) -> list[pb.Connection]:
    """How a worker reports that it reaches servers, limited to what is kept."""
    return [
        pb.Connection(
            server_id=one.server_id[:TEXT_CHARACTERS_MAX],
            parameters=one.parameters[:TEXT_CHARACTERS_MAX],
            transport=one.transport[:TEXT_CHARACTERS_MAX],
            reason=one.reason[:TEXT_CHARACTERS_MAX],
        )
        for one in message.connections[:CONNECTIONS_KEPT]
    ]


# --- answers ----------------------------------------------------------------------------------------------------------


def registered(value: ev.Value, maps: MapCache, run_id: str, version: str, storage: str = "") -> pb.RegisterResponse:
    """The answer to Register."""
    assert isinstance(value, ev.Registered)
    return pb.RegisterResponse(
        run_id=run_id,
        member_id=value.member.member_id,
        incarnation=value.member.incarnation,
        rank=value.member.rank,
        world_size=value.world_size,
        lease_seconds=value.lease_seconds,
        heartbeat_seconds=value.heartbeat_seconds,
        map=maps.message,
        psdist_version=version,
        storage=storage if value.member.role == "server" else "",
    )


def created(value: ev.Value, maps: MapCache) -> tuple[pb.CreateParametersResponse, bool]:
    """The answer to CreateParameters, and whether it is the last."""
    states = pb.CreateParametersResponse
    match value:
        case ev.Waiting(text):
            return states(state=states.STATE_WAITING, waiting_for=text), False
        case ev.Upload():
            return states(state=states.STATE_UPLOAD, map=maps.message), False
        case ev.ParametersReady(first_step, resumed, notice):
            ready = states(state=states.STATE_READY, map=maps.message, first_step=first_step, resumed=resumed)
            ready.notice = notice
            return ready, True
    raise AssertionError(f"{value} is no answer to CreateParameters")


def described(value: ev.Value, maps: MapCache) -> tuple[pb.DescribeParametersResponse, bool]:
    """The answer to DescribeParameters, and whether it is the last."""
    match value:
        case ev.Waiting(text):
            return pb.DescribeParametersResponse(waiting_for=text), False
        case ev.Described(spec, layout):
            answer = pb.DescribeParametersResponse(
                spec=convert.spec_to_proto(spec), layout=convert.layout_to_proto(layout), map=maps.message
            )
            return answer, True
    raise AssertionError(f"{value} is no answer to DescribeParameters")


def barrier(value: ev.Value, maps: MapCache) -> tuple[pb.BarrierResponse, bool]:
    """The answer to Barrier, and whether it is the last."""
    match value:
        case ev.Waiting(text):
            return pb.BarrierResponse(waiting_for=text), False
        case ev.Done():
            return pb.BarrierResponse(released=True), True
        case ev.Withdrawn():
            return pb.BarrierResponse(withdrawn=True), True
    raise AssertionError(f"{value} is no answer to Barrier")


def rendezvous(value: ev.Value, maps: MapCache) -> tuple[pb.RendezvousResponse, bool]:
    """The answer to Rendezvous, and whether it is the last."""
    match value:
        case ev.Waiting(text):
            return pb.RendezvousResponse(waiting_for=text), False
        case ev.Formed(node, nodes, world_size):
            answer = pb.RendezvousResponse(
                formed=True, node_rank=node.node_rank, nodes=nodes, first_rank=node.first_rank, world_size=world_size
            )
            return answer, True
    raise AssertionError(f"{value} is no answer to Rendezvous")


def dataset(value: ev.Value) -> pb.DatasetStatus:
    """Where a data set stands."""
    assert isinstance(value, DatasetStanding)
    return pb.DatasetStatus(
        spec=convert.dataset_to_proto(value.spec),
        position=convert.position_to_proto(value.position),
        leased=value.leased,
    )


def range_given(value: ev.Value, maps: MapCache) -> tuple[pb.LeaseRangeResponse, bool]:
    """The answer to LeaseRange, which is the last."""
    assert isinstance(value, RangeGiven)
    answer = pb.LeaseRangeResponse(repeated_ranges=value.repeated, failed_ranges=value.failed)
    if value.lease is None:
        answer.finished = True
    else:
        answer.lease_id, answer.attempt = value.lease.lease_id, value.lease.attempt
        answer.data_epoch, answer.range = value.data_epoch, value.range
    return answer, True


def drained(value: ev.Value, maps: MapCache) -> tuple[pb.DrainResponse, bool]:
    """The answer to Drain, and whether it is the last."""
    match value:
        case ev.Draining(text, left, total):
            return pb.DrainResponse(waiting_for=text, shards_left=left, shards_total=total), False
        case ev.Drained(total):
            return pb.DrainResponse(shards_total=total, drained=True), True
    raise AssertionError(f"{value} is no answer to Drain")


def scaled(value: ev.Value) -> pb.ScaleResponse:
    """The answer to Scale."""
    assert isinstance(value, ev.Scaled)
    return pb.ScaleResponse(
        servers_before=value.servers_before, drained=value.drained, missing=value.missing, launchers=value.launchers
    )


def scale_news(value: ev.Value, maps: MapCache) -> tuple[pb.WatchScaleResponse, bool]:
    """An answer to WatchScale, which has no last."""
    assert isinstance(value, ev.ScaleNews)
    message = pb.WatchScaleResponse(
        servers_wanted=value.servers_wanted, draining=value.draining, stop=value.stop, lost=value.lost
    )
    return message, False


def command(value: ev.Value | ev.News) -> pb.SessionResponse:
    """What a session is sent, apart from maps."""
    match value:
        case ev.JoinProposal(proposal_id, parameters, member):
            proposal = pb.SessionResponse.JoinProposal(
                proposal_id=proposal_id, parameters=parameters, member=convert.member_to_proto(member)
            )
            return pb.SessionResponse(join_proposal=proposal)
        case ev.WithdrawJoin(proposal_id, parameters, worker_id):
            withdrawn = pb.SessionResponse.JoinWithdrawn(
                proposal_id=proposal_id, parameters=parameters, worker_id=worker_id
            )
            return pb.SessionResponse(join_withdrawn=withdrawn)
        case ev.MemberLost(member_id, role, reason):
            lost = pb.SessionResponse.MemberLost(member_id=member_id, role=ROLES[role], reason=reason)
            return pb.SessionResponse(member_lost=lost)
        case ev.ShardsLost(parameters, shards, server_id, version, text):
            shards_lost = pb.SessionResponse.ShardsLost(
                parameters=parameters, shards=shards, server_id=server_id, version=version, text=text
            )
            return pb.SessionResponse(shards_lost=shards_lost)
        case RolledBack():
            return pb.SessionResponse(rolled_back=snapshot_messages.rolled_back(value))
        case StopCommand(number, "leave", numbers):
            leave = pb.StopCommand.Leave(next=dict(numbers))
            return pb.SessionResponse(stop=pb.StopCommand(number=number, leave=leave))
        case StopCommand(number, "ask"):
            return pb.SessionResponse(stop=pb.StopCommand(number=number, ask=True))
        case StopCommand(number):
            return pb.SessionResponse(stop=pb.StopCommand(number=number, hold=True))
        case MutualWait(sequence, error):
            mutual_wait = pb.MutualWait(sequence=sequence, error=status.to_detail(error))
            return pb.SessionResponse(mutual_wait=mutual_wait)
        case Prepare() | Mark() | TakeCut() | End():
            return pb.SessionResponse(snapshot=snapshot_messages.command(value))
    raise AssertionError(f"{value} is no command of a session")


#: Makes an answer of a stream out of a value: the message, and whether it is the last.
Render = Callable[[ev.Value, MapCache], tuple[Any, bool]]
