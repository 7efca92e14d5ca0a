"""Conversion between events and answers of the scheduler's machine and messages of ``SchedulerService``.

Fields with the same name on both sides are converted as in ``wire.convert`` (``make_event``, ``make_message``). Only
differences are written out. Values from peers are checked here if the pure machines do not check them: roles,
addresses, lengths of texts, and names, lengths and digests of files, which are copied into manifests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from psdist.addresses import parse_address
from psdist.errors import ConfigurationError, InvalidArgumentError, LimitExceededError, StorageError
from psdist.monitoring.stacks import own_stacks
from psdist.monitoring.tracing import check_spans
from psdist.snapshots.format import ShardFile
from psdist.types import check_name
from psdist.v1 import common_pb2 as common
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import server_pb2
from psdist.wire import convert, status
from psdist.wire.convert import make_message
from psdist.wire.limits import (
    AWAITED_REPORTED_MAX,
    CLOCK_CHARACTERS_MAX,
    GROUP_CALL_CHARACTERS_MAX,
    GROUP_KEY_BYTES_MAX,
    LEASES_MAX,
    MEMBERS_MAX,
    NAMES_MAX,
    PARAMETERS_MAX,
    STACKS_BYTES_MAX,
    TEXT_CHARACTERS_MAX,
    UNREACHABLE_CHARACTERS_MAX,
    UNREACHABLE_REPORTED_MAX,
    UNREACHABLE_SECONDS_MAX,
)
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.cluster_state import Role

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

#: Number of connections kept per worker.
CONNECTIONS_KEPT = 256
ROLES: dict[str, pb.Role] = {"server": pb.ROLE_SERVER, "worker": pb.ROLE_WORKER}
ROLE_NAMES: dict[int, Role] = {pb.ROLE_SERVER: "server", pb.ROLE_WORKER: "worker"}
_DIGEST_BYTES = 16


# --- fields of the same name ------------------------------------------------------------------------------------------


#: Longest texts and lists in requests and reports. Longer ones are refused.
_LIMITS: Final[dict[type[Message], dict[str, int]]] = {
    pb.RegisterRequest: dict.fromkeys(("run_id", "host", "address"), TEXT_CHARACTERS_MAX),
    pb.RendezvousRequest: dict.fromkeys(("host", "gave_up", "master_address"), TEXT_CHARACTERS_MAX),
    pb.LeaseRangeRequest: dict.fromkeys(("done", "held", "done_at"), LEASES_MAX),
    pb.EndRangesRequest: dict.fromkeys(("done", "returned", "done_at", "used"), LEASES_MAX),
    pb.SessionRequest.EqualContributions: {"worker_ids": MEMBERS_MAX},
    pb.TraceReport: {"stacks": STACKS_BYTES_MAX},
    pb.TraceReport.Clock: {"clock_id": CLOCK_CHARACTERS_MAX},
}


def _check(message: Message) -> None:
    """Raise LimitExceededError if the message has a text or a list that is too long."""
    for name, limit in _LIMITS.get(type(message), {}).items():
        if (length := len(getattr(message, name))) > limit:
            raise LimitExceededError(f"{name} of length {length} is over the limit of {limit}")


@cache
def _readers(cls: type[DataclassInstance], message: type[Message]) -> dict[str, Callable[[Any], Any]]:
    found = convert.field_readers(cls, message, _DIFFERENT.get(message, {}))
    if any(field.name == "caller" for field in fields(cls)):
        found["caller"] = lambda request: ev.Caller(request.run_id, request.worker_id, request.incarnation)
    return found


def make_event(cls: type[T], call: int, message: Message, **others: Any) -> T:
    """Return the event of type ``cls`` of this call, with the fields of ``message`` that have the same name, and
    ``others``.

    Unset fields keep the event's default. Raises the errors of the conversions of the fields' types:
    InvalidArgumentError, InvalidNameError and LimitExceededError.
    """
    _check(message)
    readers = _readers(cls, cast(Any, type(message)))
    values = {name: read(message) for name, read in readers.items() if name not in others}
    return cls(**{"call": call} | values | others)


def _cut(text: str) -> str:
    return text[:TEXT_CHARACTERS_MAX]


def _next_pushes(numbers: Mapping[str, int]) -> ev.Numbers:
    if len(numbers) > PARAMETERS_MAX:
        raise LimitExceededError(f"next pushes of {len(numbers)} parameters are over the limit of {PARAMETERS_MAX}")
    return tuple(sorted((check_name(name, "parameters name"), number) for name, number in numbers.items()))


def _activity(report: pb.Activity) -> ev.Activity:
    """Convert a worker's report of its wait. Raises LimitExceededError, InvalidNameError and InvalidArgumentError."""
    numbers = _next_pushes(report.next) if report.next else ()
    partial = tuple(sorted(report.partial)) if report.partial else ()
    if partial and (not set(partial) <= report.next.keys() or len(partial) > len(numbers)):
        raise InvalidArgumentError(f"parameters {partial!s:.200} are pushed in part, and have no number in `next`")
    match kind := report.WhichOneof("waits_for"):
        case "step" | "clock":
            waited = getattr(report, kind)
            name = check_name(waited.parameters, "parameters name")
            return ev.Activity(report.sequence, numbers, kind, name, waited.step, partial)
        case "call":
            return ev.Activity(report.sequence, numbers, "call", partial=partial)
        case "group":
            return ev.Activity(report.sequence, numbers, "group", partial=partial, group_call=_group_call(report.group))
    return ev.Activity(report.sequence, numbers, partial=partial)


def _group_call(call: pb.Activity.GroupCall) -> ev.GroupCall:
    named = max(len(call.awaited), len(call.sources))
    if named > AWAITED_REPORTED_MAX or len(call.group) > GROUP_KEY_BYTES_MAX:
        raise LimitExceededError(
            f"a call of a group names {named} workers and a key of {len(call.group)} bytes; the limits are "
            f"{AWAITED_REPORTED_MAX} and {GROUP_KEY_BYTES_MAX}"
        )
    workers = [source.worker for source in call.sources] or call.awaited
    awaited = tuple((worker.worker_id, worker.incarnation) for worker in workers)
    text, sources = call.text[:GROUP_CALL_CHARACTERS_MAX], tuple((one.number, one.next) for one in call.sources)
    return ev.GroupCall(call.group, call.message, call.number, awaited, text, call.next, sources)


def _role(number: int) -> Role:
    if number not in ROLE_NAMES:
        raise InvalidArgumentError(f"role {number} is unknown: use ROLE_SERVER or ROLE_WORKER")
    return ROLE_NAMES[number]


convert.register(common.ErrorDetail, status.to_detail, status.from_detail)
convert.register(pb.Role, ROLES.__getitem__, _role)
convert.register(pb.SnapshotInfo, partial(make_message, pb.SnapshotInfo), None)
convert.register(pb.Activity, None, _activity)
convert.register(pb.NextPushes, None, lambda message: convert.numbers_from_proto(message.next))
convert.pair(ev.ResumePush, pb.ResumePush)
#: Conversions of fields that differ from those of their types.
_DIFFERENT: Final[dict[type[Message], dict[str, tuple[Any, Callable[[Any], Any]]]]] = {
    pb.AlignReport: {"next": (None, _next_pushes)},
    pb.ReplicaUnreachable: {"reason": (None, _cut)},
    pb.SaveSnapshotRequest: {"reason": (None, _cut)},
}


# --- requests ---------------------------------------------------------------------------------------------------------


def register_event(call: int, request: pb.RegisterRequest) -> ev.Register:
    """Convert a registration. Raises InvalidArgumentError and LimitExceededError."""
    event = make_event(ev.Register, call, request)
    if event.role == "server" or event.address:
        parse_address(event.address)
    return event


def _rendezvous_event(call: int, request: pb.RendezvousRequest) -> ev.EnterRendezvous | ev.GiveUp:
    if not request.gave_up:
        return make_event(ev.EnterRendezvous, call, request)
    elastic = request.nodes_min < request.nodes_max
    return make_event(ev.GiveUp, call, request, reason=request.gave_up, elastic=elastic)


def _leave_event(call: int, request: pb.LeaveRequest) -> ev.Leave:
    return make_event(ev.Leave, call, request, caller=ev.Caller("", request.member_id, request.incarnation))


def _save_event(call: int, request: pb.SaveSnapshotRequest) -> sn.Save:
    return make_event(sn.Save, call, request, **({} if request.worker_id else {"caller": None}))


#: Conversion of each method's request to an event. Methods that do more are implemented in ``service``.
REQUESTS: dict[str, Callable[[int, Any], ev.Event]] = {
    "Leave": _leave_event,
    "CommitParameters": partial(make_event, ev.CommitParameters),
    "DescribeParameters": partial(make_event, ev.Describe),
    "Barrier": partial(make_event, ev.EnterBarrier),
    "FormGroup": partial(make_event, ev.FormGroup),
    "Rendezvous": _rendezvous_event,
    "Drain": partial(make_event, ev.Drain),
    "Scale": partial(make_event, ev.Scale),
    "WatchScale": partial(make_event, ev.WatchScale),
    "OpenDataset": partial(make_event, ev.OpenDataset),
    "LeaseRange": partial(make_event, ev.LeaseRange),
    "EndRanges": partial(make_event, ev.EndRanges),
    "GetDataPosition": partial(make_event, ev.GetPosition),
    "SetDataPosition": partial(make_event, ev.SetPosition),
    "SaveSnapshot": _save_event,
    "Trace": partial(make_event, ev.TraceRequested),
    "GetStacks": partial(make_event, ev.StacksRequested),
}


# --- what members send on their sessions ------------------------------------------------------------------------------


def _stop(call: int, report: pb.StopReport) -> ev.StopReported:
    return make_event(ev.StopReported, call, report, next=_next_pushes(report.next) if report.holding else None)


def heartbeat_event(call: int, heartbeat: pb.SessionRequest.Heartbeat) -> ev.Heartbeat:
    """Convert a heartbeat, with those statistics that the machine uses. Raises the errors of ``session_event``.

    Written out, and parts that are absent are not looked at: a large run sends hundreds a second, and of a worker's
    most parts are empty.
    """
    progress, activity = None, None
    versions: tuple[tuple[str, int], ...] = ()
    heard: tuple[tuple[str, int, float], ...] = ()
    unreachable: tuple[ev.UnreachableServer, ...] = ()
    if heartbeat.HasField("activity"):
        activity = _activity(heartbeat.activity)
    if heartbeat.HasField("snapshot"):
        report = heartbeat.snapshot
        waiting_for = _cut(report.waiting_for)
        progress = ev.AttemptProgress(report.attempt, report.bytes_done, report.bytes, waiting_for, report.loading)
    if heartbeat.HasField("statistics"):
        versions = tuple((p.parameters, p.version_max) for p in heartbeat.statistics.parameters)
    if heartbeat.heard:
        # max returns the 0 if the other argument is NaN.
        heard = tuple((w.worker_id, w.incarnation, max(0.0, w.age_seconds)) for w in heartbeat.heard[:MEMBERS_MAX])
    if heartbeat.unreachable:
        unreachable = tuple(_unreachable(one) for one in heartbeat.unreachable[:UNREACHABLE_REPORTED_MAX])
    waits = tuple(heartbeat.waiting_for)
    return ev.Heartbeat(call, heartbeat.epoch, versions, waits, progress, heard, activity, unreachable)


def _unreachable(report: pb.UnreachableServer) -> ev.UnreachableServer:
    # min and max return the number if the other argument is NaN.
    seconds = min(UNREACHABLE_SECONDS_MAX, max(0.0, report.seconds))
    return ev.UnreachableServer(
        convert.replica_from_proto(report.server), seconds, report.reason[:UNREACHABLE_CHARACTERS_MAX]
    )


def _trace_report(call: int, report: pb.TraceReport) -> ev.SpansReported | ev.ClockReported | ev.StacksReported:
    if report.WhichOneof("kind") == "stacks":
        _check(report)
        return make_event(ev.StacksReported, call, report)
    if report.WhichOneof("kind") == "clock":
        _check(report.clock)
        sent, member, clock_id = report.clock.clock_ns, report.clock.member_ns, report.clock.clock_id
        return ev.ClockReported(call, report.number, sent, member, time.monotonic_ns(), clock_id)
    spans = check_spans(report.spans)
    data = spans.SerializeToString()
    return ev.SpansReported(call, report.number, data, spans.recorded, spans.steps_done, spans.done)


def _of_attempt(cls: type[T], call: int, report: pb.SnapshotReport, **others: Any) -> T:
    return make_event(cls, call, getattr(report, report.WhichOneof("kind") or ""), attempt=report.attempt, **others)


def _written(call: int, report: pb.SnapshotReport) -> sn.Written:
    return _of_attempt(sn.Written, call, report, file=_file(report.written))


def _failed(call: int, report: pb.SnapshotReport) -> sn.PartFailed:
    return sn.PartFailed(call, report.attempt, _cut(report.failed.error.message))


def _load_failed(call: int, report: pb.SnapshotReport) -> sn.LoadFailed:
    error = report.load_failed.error
    is_silent = error.code == StorageError.code
    return make_event(sn.LoadFailed, call, report.load_failed, text=_cut(error.message), unreachable=is_silent)


def _file(written: pb.SnapshotReport.Written) -> ShardFile:
    data = bytes(written.digests)
    if len(data) != _DIGEST_BYTES * len(written.versions):
        raise InvalidArgumentError(
            f"{len(data)} bytes of digests for {len(written.versions)} slices of {written.file!r:.80}: give "
            f"{_DIGEST_BYTES} for each"
        )
    digests = tuple(data[at : at + _DIGEST_BYTES].hex() for at in range(0, len(data), _DIGEST_BYTES))
    lags = convert.lags_from_proto(written.lags)
    return ShardFile(written.file, written.length, written.digest.hex(), tuple(written.versions), digests, lags)


def _no_content(call: int, report: pb.SnapshotReport) -> NoReturn:
    raise InvalidArgumentError("a report about a snapshot has no content")


#: Reports on sessions: the role of the members that send them, empty for both, and the conversion to an event. Those
#: about snapshots are converted from the whole ``SnapshotReport``.
_REPORTS: Final[dict[str, tuple[str, Callable[[int, Any], ev.Event]]]] = {
    "heartbeat": ("", heartbeat_event),
    "trace": ("", _trace_report),
    "join_answer": ("server", partial(make_event, ev.JoinAnswered)),
    "values_answer": ("server", partial(make_event, ev.ValuesAnswered)),
    "replica_filled": ("server", partial(make_event, ev.ReplicaFilled)),
    "replica_unreachable": ("server", partial(make_event, ev.ReplicaUnreachable)),
    "equal_contributions": ("server", partial(make_event, ev.EqualContributions)),
    "stop": ("worker", _stop),
    "server_checked": ("worker", partial(make_event, ev.ServerChecked)),
    "call_checked": ("worker", partial(make_event, ev.CallChecked)),
    "align": ("worker", partial(make_event, ev.AlignReported)),
    "snapshot": ("", _no_content),
    "failed": ("", _failed),
    "prepared": ("server", partial(_of_attempt, sn.Prepared)),
    "written": ("server", _written),
    "loaded": ("server", lambda call, report: make_event(sn.Loaded, call, report.loaded)),
    "load_failed": ("server", _load_failed),
    "marked": ("worker", partial(_of_attempt, sn.Marked)),
    "keeps": ("worker", lambda call, report: sn.StatesAnnounced(call, tuple(report.keeps.parameters[:NAMES_MAX]))),
}


def _kind(request: pb.SessionRequest) -> str:
    kind = request.WhichOneof("event") or ""
    return request.snapshot.WhichOneof("kind") or kind if kind == "snapshot" else kind


def check_report(request: pb.SessionRequest, role: str) -> None:
    """Raise InvalidArgumentError if a member of ``role`` cannot send this on its session. An empty role may be any."""
    kind = _kind(request)
    if role and kind in _REPORTS and (reporter := _REPORTS[kind][0]) not in ("", role):
        raise InvalidArgumentError(f"the report {kind} comes from a {reporter}, and this is the session of a {role}")


def session_event(call: int, request: pb.SessionRequest) -> ev.Event:
    """Convert a message on a member's session, other than its hello. Raises InvalidArgumentError, InvalidNameError and
    LimitExceededError."""
    kind = _kind(request)
    if kind not in _REPORTS:
        raise InvalidArgumentError(f"a session's later messages are heartbeats and answers, not {kind or None}")
    report = request.snapshot if request.HasField("snapshot") else getattr(request, kind)
    return _REPORTS[kind][1](call, report)


# --- reports that the status shows ------------------------------------------------------------------------------------


def connections(message: pb.Connections) -> list[pb.Connection]:
    """Return a worker's report of its connections to servers, limited to what is kept."""
    names = ("server_id", "parameters", "transport", "reason", "compression")
    return [
        pb.Connection(**{name: _cut(getattr(one, name)) for name in names})
        for one in message.connections[:CONNECTIONS_KEPT]
    ]


#: In seconds since 1970: beyond it no time can be printed.
_YEAR_10000: Final = 253_402_300_800.0


def moment(value: float) -> float:
    """Return a time that a member reports, in seconds since 1970; 0 unless it is one."""
    return value if 0.0 < value < _YEAR_10000 else 0.0  # False for NaN.


def metrics_address(value: str) -> str:
    """Return where a member says that it shows its metrics; empty unless that is an address."""
    if not value or len(value) > TEXT_CHARACTERS_MAX:
        return ""
    with suppress(ConfigurationError):
        parse_address(value)
        return value
    return ""


# --- answers ----------------------------------------------------------------------------------------------------------


def response(cls: Any, value: ef.Value, cluster_map: common.ClusterMap) -> Any:
    """Return the answer ``value`` as a response of type ``cls``."""
    match value:
        case ef.Waiting() if cls is pb.CreateParametersResponse:
            return make_message(cls, value, state=cls.STATE_WAITING)
        case ef.Upload():
            return cls(state=cls.STATE_UPLOAD, map=cluster_map)
        case ef.ParametersReady():
            return make_message(cls, value, state=cls.STATE_READY, map=cluster_map)
        case ef.Described():
            return make_message(cls, value, map=cluster_map)
        case ef.Done() if cls is pb.BarrierResponse:
            return cls(released=True)
        case ef.Done() if cls is pb.CommitParametersResponse:
            return cls(epoch=cluster_map.epoch)
        case ef.Withdrawn():
            return cls(withdrawn=True)
        case ef.Formed(node):
            ranks = {"node_rank": node.node_rank, "first_rank": node.first_rank}
            return make_message(cls, value, formed=True, run_id=cluster_map.run_id, **ranks)
        case ef.RangeGiven(lease):
            given = {"lease_id": lease.lease_id, "attempt": lease.attempt} if lease else {"finished": True}
            return make_message(cls, value, **given)
        case ef.Drained():
            return make_message(cls, value, drained=True)
        case ef.MemberSpans(data=data):
            return make_message(cls, value, spans=pb.TraceSpans.FromString(data))
        case ef.TracedMember(member):
            own = make_message(pb.TraceMember, value)
            own.MergeFrom(make_message(pb.TraceMember, member))
            return cls(member=own)
        case ef.MemberStacks(None):
            return cls(stacks=own_stacks(), run_id=cluster_map.run_id)
        case ef.MemberStacks(member):
            return cls(member=make_message(pb.TraceMember, member, missing=value.missing), stacks=value.stacks)
        case ef.TraceEnded() | ef.StacksEnded():
            return make_message(cls, value, ended=True)
    return make_message(cls, value)


#: Commands and news with the fields of their messages: the name in SessionResponse.
_COMMANDS: Final[dict[type, str]] = {
    ef.JoinProposal: "join_proposal",
    ef.WithdrawJoin: "join_withdrawn",
    ef.CheckValues: "check_values",
    ef.MemberLost: "member_lost",
    ef.RunEnded: "run_ended",
    ef.ShardsLost: "shards_lost",
    ef.Notice: "notice",
    ef.CheckCall: "check_call",
    ef.DeadlockFound: "mutual_wait",
}


def command(value: ef.Value | ef.News) -> pb.SessionResponse:
    """Return a command or news for a session, other than a map."""
    message = pb.SessionResponse
    if name := _COMMANDS.get(type(value)):
        kind: Any = message.DESCRIPTOR.fields_by_name[name].message_type
        content: Any = {name: make_message(GetMessageClass(kind), value)}
        return message(**content)
    match value:
        case sn.RolledBack(directory, lost, text):
            rolled_back = message.RolledBack(directory=directory, text=text)
            for name, first, until in lost:
                # "from" is a Python keyword.
                rolled_back.lost.add(**{"parameters": name, "from": first, "until": until})
            return message(rolled_back=rolled_back)
        case ef.StopCommand(number, kind, numbers):
            asked: Any = {kind: pb.StopCommand.Leave(next=dict(numbers)) if kind == "leave" else True}
            return message(stop=pb.StopCommand(number=number, **asked))
        case ef.TraceCommand(number, kind, steps):
            told: Any = {
                "start": {"start_steps": steps},
                "clock": {"clock_ns": time.monotonic_ns()},
                "end": {"end": True},
            }
            return message(trace=pb.TraceCommand(number=number, **told[kind]))
        case ef.StacksCommand(number):
            return message(trace=pb.TraceCommand(number=number, stacks=True))
        case ef.CheckServer(server):
            return message(check_server=convert.replica_to_proto(server))
        case ef.AlignCommand(number, until, release):
            hold = None if release else True
            return message(align=pb.AlignCommand(number=number, until=until, hold=hold, release=release or None))
        case sn.Prepare() | sn.Mark() | sn.TakeCut() | sn.End():
            return message(snapshot=_snapshot_command(value))
    raise AssertionError(f"{value} is not a session command")


def _snapshot_command(value: sn.SnapshotCommand) -> pb.SnapshotCommand:
    commands = pb.SnapshotCommand
    match value:
        case sn.Prepare(attempt, directory, steps):
            parameters = [commands.Prepare.Parameters(parameters=name, step=step) for name, step in steps]
            return commands(attempt=attempt, prepare=commands.Prepare(parameters=parameters, directory=directory))
        case sn.Mark():
            return commands(attempt=value.attempt, mark=make_message(commands.Mark, value))
        case sn.TakeCut(attempt, next_pushes, final):
            cut = commands.Cut()
            for name, step in final:
                cut.parameters.add(parameters=name, final_step=step)
            for name, producers in next_pushes:
                entry = cut.parameters.add(parameters=name)
                for worker_id, incarnation, number in producers:
                    life = server_pb2.Life(worker_id=worker_id, incarnation=incarnation)
                    entry.producers.add(life=life, next=number)
            return commands(attempt=attempt, cut=cut)
        case sn.End(attempt):
            return commands(attempt=attempt, end=make_message(commands.End, value))
