"""Conversion between events and answers of the scheduler's machine and messages of ``SchedulerService``.

Fields with the same name on both sides are copied by name (``make_event``, ``make_message``). Only differences are
written out. Values from peers are checked here if the pure machines do not check them: roles, addresses, lengths of
texts, and names, lengths and digests of files, which are copied into manifests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from psdist.errors import ConfigurationError, InvalidArgumentError, LimitExceededError, StorageError
from psdist.settings.config import parse_address
from psdist.snapshots.format import CommitRecord, ShardFile
from psdist.tracing.member import check_spans
from psdist.types import check_name
from psdist.v1 import common_pb2 as common
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import server_pb2
from psdist.wire import convert, status
from psdist.wire.limits import (
    AWAITED_REPORTED_MAX,
    CLOCK_CHARACTERS_MAX,
    GROUP_CALL_CHARACTERS_MAX,
    GROUP_KEY_BYTES_MAX,
    LEASES_MAX,
    MEMBERS_MAX,
    NAMES_MAX,
    PARAMETERS_MAX,
    TEXT_CHARACTERS_MAX,
    UNREACHABLE_CHARACTERS_MAX,
    UNREACHABLE_REPORTED_MAX,
    UNREACHABLE_SECONDS_MAX,
)
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.cluster_state import EventRecord, Role

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

#: Number of connections kept per worker.
CONNECTIONS_KEPT = 256
ROLES: dict[str, pb.Role] = {"server": pb.ROLE_SERVER, "worker": pb.ROLE_WORKER}
ROLE_NAMES: dict[int, Role] = {pb.ROLE_SERVER: "server", pb.ROLE_WORKER: "worker"}
_DIGEST_BYTES = 16


# --- fields of the same name ------------------------------------------------------------------------------------------


def make_message(cls: Any, value: object, **others: Any) -> Any:
    """Return a message of type ``cls`` with the fields of ``value`` that have the same name, and ``others``."""
    names = cls.DESCRIPTOR.fields_by_name.keys() - others.keys()
    return cls(**{name: getattr(value, name) for name in names if hasattr(value, name)}, **others)


def make_event(cls: type[T], call: int, message: Any, **others: Any) -> T:
    """Return the event of type ``cls`` of this call, with the fields of ``message`` that have the same name, and
    ``others``.

    Unset fields keep the event's default. Raises the errors of the conversions of the fields' types:
    InvalidArgumentError, InvalidNameError and LimitExceededError.
    """
    values: dict[str, Any] = {"call": call}
    for field in fields(cls):
        wired = message.DESCRIPTOR.fields_by_name.get(field.name)
        if field.name == "caller" and "caller" not in others:
            values["caller"] = ev.Caller(message.run_id, message.worker_id, message.incarnation)
        elif wired is not None and field.name not in others:
            absent = wired.has_presence and not message.HasField(field.name)
            if not absent or field.default is MISSING:
                values[field.name] = _from_field(wired, getattr(message, field.name))
    return cls(**values, **others)


def _from_field(wired: Any, value: Any) -> Any:
    """Convert the value of a field: repeated fields to tuples, maps to ``Numbers``, messages to the type they
    represent."""
    if isinstance(value, Mapping):
        return _numbers(value)
    convert_one = _TYPES[wired.message_type.name] if wired.message_type is not None else None
    if not wired.is_repeated:
        return convert_one(value) if convert_one else value
    return tuple(map(convert_one, value) if convert_one else value)


def _numbers(numbers: Mapping[str, int]) -> sn.Numbers:
    if len(numbers) > NAMES_MAX:
        raise LimitExceededError(f"{len(numbers)} parameters in one message are over the limit of {NAMES_MAX}")
    return tuple(sorted(numbers.items()))


def _next_pushes(numbers: Mapping[str, int]) -> sn.Numbers:
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


#: Conversion of nested messages, by their type.
_TYPES: dict[str, Callable[[Any], Any]] = {
    "Activity": _activity,
    "DataPosition": convert.position_from_proto,
    "DatasetSpec": convert.dataset_from_proto,
    "Layout": convert.layout_from_proto,
    "NextPushes": lambda message: _numbers(message.next),
    "ParametersSpec": convert.spec_from_proto,
    "Replica": convert.replica_from_proto,
    "Restore": convert.restore_from_proto,
    "ResumePush": lambda message: ev.ResumePush(message.origin, message.number, message.generation),
    "WorkerEntry": convert.worker_from_proto,
}


# --- requests ---------------------------------------------------------------------------------------------------------


def register_event(call: int, request: pb.RegisterRequest) -> ev.Register:
    """Convert a registration. Raises InvalidArgumentError and LimitExceededError."""
    role = ROLE_NAMES.get(request.role)
    if role is None:
        raise InvalidArgumentError(f"role {request.role} is unknown: use ROLE_SERVER or ROLE_WORKER")
    _check_texts(request, "run_id", "host", "address")
    if role == "server" or request.address:
        parse_address(request.address)
    return make_event(ev.Register, call, request, role=role)


def _rendezvous_event(call: int, request: pb.RendezvousRequest) -> ev.EnterRendezvous | ev.GiveUp:
    _check_texts(request, "host", "gave_up", "master_address")
    if request.gave_up:
        elastic = request.nodes_min < request.nodes_max
        return ev.GiveUp(call, request.run_id, request.host, request.gave_up, elastic)
    return make_event(ev.EnterRendezvous, call, request)


def _check_texts(request: Any, *names: str) -> None:
    for name in names:
        if len(getattr(request, name)) > TEXT_CHARACTERS_MAX:
            raise LimitExceededError(f"{name} is longer than {TEXT_CHARACTERS_MAX} characters")


def _leave_event(call: int, request: pb.LeaveRequest) -> ev.Leave:
    return make_event(ev.Leave, call, request, caller=ev.Caller("", request.member_id, request.incarnation))


def _leases_event(cls: type[T], call: int, request: pb.LeaseRangeRequest | pb.EndRangesRequest) -> T:
    for name in ("done", "held", "returned", "done_at", "used"):
        if (count := len(getattr(request, name, ()))) > LEASES_MAX:
            raise LimitExceededError(f"{count} leases in one request are over the limit of {LEASES_MAX}")
    return make_event(cls, call, request)


def _save_event(call: int, request: pb.SaveSnapshotRequest) -> sn.Save:
    incarnation = request.incarnation if request.worker_id else 0
    return make_event(sn.Save, call, request, reason=request.reason[:TEXT_CHARACTERS_MAX], incarnation=incarnation)


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
    "LeaseRange": partial(_leases_event, ev.LeaseRange),
    "EndRanges": partial(_leases_event, ev.EndRanges),
    "GetDataPosition": partial(make_event, ev.GetPosition),
    "SetDataPosition": partial(make_event, ev.SetPosition),
    "SaveSnapshot": _save_event,
    "Trace": partial(make_event, ev.TraceRequested),
}


# --- what members send on their sessions ------------------------------------------------------------------------------


#: Reports of a session, by the role of the members that send them. Those that are missing come from both.
_REPORTERS: Final[dict[str, Role]] = {
    **dict.fromkeys(("join_answer", "values_answer", "equal_contributions"), "server"),
    **dict.fromkeys(("replica_filled", "replica_unreachable"), "server"),
    **dict.fromkeys(("prepared", "written", "loaded", "load_failed"), "server"),
    **dict.fromkeys(("stop", "server_checked", "call_checked", "align", "marked", "keeps"), "worker"),
}


def check_report(request: pb.SessionRequest, role: str) -> None:
    """Raise InvalidArgumentError if a member of ``role`` cannot send this on its session. An empty role may be any."""
    kind = request.WhichOneof("event") or ""
    kind = request.snapshot.WhichOneof("kind") or kind if kind == "snapshot" else kind
    if role and (reporter := _REPORTERS.get(kind, role)) != role:
        raise InvalidArgumentError(f"the report {kind} comes from a {reporter}, and this is the session of a {role}")


def session_event(call: int, request: pb.SessionRequest) -> ev.Event:
    """Convert a message on a member's session, other than its hello. Raises InvalidArgumentError, InvalidNameError and
    LimitExceededError."""
    match kind := request.WhichOneof("event"):
        case "heartbeat":
            return heartbeat_event(call, request.heartbeat)
        case "join_answer":
            return make_event(ev.JoinAnswered, call, request.join_answer)
        case "values_answer":
            return make_event(ev.ValuesAnswered, call, request.values_answer)
        case "replica_filled":
            return make_event(ev.ReplicaFilled, call, request.replica_filled)
        case "replica_unreachable":
            reason = request.replica_unreachable.reason[:TEXT_CHARACTERS_MAX]
            return make_event(ev.ReplicaUnreachable, call, request.replica_unreachable, reason=reason)
        case "stop":
            numbers = _next_pushes(request.stop.next) if request.stop.holding else None
            return make_event(ev.StopReported, call, request.stop, next=numbers)
        case "equal_contributions":
            if (count := len(request.equal_contributions.worker_ids)) > MEMBERS_MAX:
                raise LimitExceededError(f"{count} workers in one report are over the limit of {MEMBERS_MAX}")
            return make_event(ev.EqualContributions, call, request.equal_contributions)
        case "server_checked":
            return make_event(ev.ServerChecked, call, request.server_checked)
        case "call_checked":
            return make_event(ev.CallChecked, call, request.call_checked)
        case "align":
            return make_event(ev.AlignReported, call, request.align, next=_next_pushes(request.align.next))
        case "trace":
            return _trace_report(call, request.trace)
        case "snapshot":
            return _snapshot_report(call, request.snapshot)
    raise InvalidArgumentError(f"a session's later messages are heartbeats and answers, not {kind}")


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
        waiting_for = report.waiting_for[:TEXT_CHARACTERS_MAX]
        progress = sn.AttemptProgress(report.attempt, report.bytes_done, report.bytes, waiting_for, report.loading)
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


def _trace_report(call: int, report: pb.TraceReport) -> ev.SpansReported | ev.ClockReported:
    if report.WhichOneof("kind") == "clock":
        if len(report.clock.clock_id) > CLOCK_CHARACTERS_MAX:
            raise LimitExceededError(f"the name of a clock is longer than {CLOCK_CHARACTERS_MAX} characters")
        sent, member, clock_id = report.clock.clock_ns, report.clock.member_ns, report.clock.clock_id
        return ev.ClockReported(call, report.number, sent, member, time.monotonic_ns(), clock_id)
    spans = check_spans(report.spans)
    data = spans.SerializeToString()
    return ev.SpansReported(call, report.number, data, spans.recorded, spans.steps_done, spans.done)


def _snapshot_report(call: int, report: pb.SnapshotReport) -> sn.SnapshotReport:
    kind = report.WhichOneof("kind")
    if kind is None:
        raise InvalidArgumentError("a report about a snapshot has no content")
    said = getattr(report, kind)
    match kind:
        case "prepared":
            return make_event(sn.Prepared, call, said, attempt=report.attempt)
        case "marked":
            return make_event(sn.Marked, call, said, attempt=report.attempt)
        case "keeps":
            return sn.StatesAnnounced(call, tuple(said.parameters[:NAMES_MAX]))
        case "written":
            return make_event(sn.Written, call, said, attempt=report.attempt, file=_file(said))
        case "failed":
            return sn.PartFailed(call, report.attempt, said.error.message[:TEXT_CHARACTERS_MAX])
        case "loaded":
            return make_event(sn.Loaded, call, said)
        case _:
            text, unreachable = said.error.message[:TEXT_CHARACTERS_MAX], said.error.code == StorageError.code
            return make_event(sn.LoadFailed, call, said, text=text, unreachable=unreachable)


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


def connections(message: pb.Connections) -> list[pb.Connection]:
    """Return a worker's report of its connections to servers, limited to what is kept."""
    names = ("server_id", "parameters", "transport", "reason", "compression")
    return [
        pb.Connection(**{name: getattr(one, name)[:TEXT_CHARACTERS_MAX] for name in names})
        for one in message.connections[:CONNECTIONS_KEPT]
    ]


def rates(message: pb.WorkerRates) -> pb.WorkerRates:
    """Return a worker's report of its speed; without numbers if they are not plausible."""
    if not 0 <= message.waiting_seconds <= message.seconds < math.inf or len(message.pushes) > PARAMETERS_MAX:
        return pb.WorkerRates()
    # Copied, because a message that is kept must not keep other content from a peer.
    pushes = {name: count for name, count in message.pushes.items() if len(name) <= TEXT_CHARACTERS_MAX}
    return pb.WorkerRates(seconds=message.seconds, waiting_seconds=message.waiting_seconds, pushes=pushes)


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


def event(record: EventRecord) -> pb.EventStatus:
    """Return an event of the run's history as a message."""
    message: pb.EventStatus = make_message(pb.EventStatus, record)
    return message


# --- answers ----------------------------------------------------------------------------------------------------------


def response(cls: Any, value: ef.Value, cluster_map: common.ClusterMap) -> tuple[Any, bool]:
    """Return the answer ``value`` as a response of type ``cls``, and True if it is the last one."""
    match value:
        case ef.Waiting(text) if cls is pb.CreateParametersResponse:
            return cls(state=cls.STATE_WAITING, waiting_for=text), False
        case ef.Waiting(text):
            return cls(waiting_for=text), False
        case ef.Upload():
            return cls(state=cls.STATE_UPLOAD, map=cluster_map), False
        case ef.ParametersReady():
            return make_message(cls, value, state=cls.STATE_READY, map=cluster_map), True
        case ef.Described(spec, layout):
            settings, tensors = convert.spec_to_proto(spec), convert.layout_to_proto(layout)
            return cls(spec=settings, layout=tensors, map=cluster_map), True
        case ef.Done() if cls is pb.BarrierResponse:
            return cls(released=True), True
        case ef.Done() if cls is pb.CommitParametersResponse:
            return cls(epoch=cluster_map.epoch), True
        case ef.Done():
            return cls(), True
        case ef.Withdrawn():
            return cls(withdrawn=True), True
        case ef.Formed(node):
            ranks = {"node_rank": node.node_rank, "first_rank": node.first_rank}
            return make_message(cls, value, formed=True, run_id=cluster_map.run_id, **ranks), True
        case ef.DatasetStanding():
            return dataset(value, cls), True
        case ef.GroupStanding():
            return make_message(cls, value, members=map(convert.worker_to_proto, value.members)), True
        case ef.RangeGiven(None):
            return cls(repeated_ranges=value.repeated, failed_ranges=value.failed, finished=True), True
        case ef.RangeGiven(lease):
            counts = {"repeated_ranges": value.repeated, "failed_ranges": value.failed}
            return make_message(cls, lease, data_epoch=value.data_epoch, range=value.range, **counts), True
        case ef.Draining(text):
            return make_message(cls, value, waiting_for=text), False
        case ef.Drained():
            return make_message(cls, value, drained=True), True
        case ef.ScaleNews():
            return make_message(cls, value), False
        case ef.TraceProgress(text):
            return cls(waiting_for=text), False
        case ef.MemberSpans(member_id, data):
            return cls(member_id=member_id, spans=pb.TraceSpans.FromString(data)), False
        case ef.TracedMember():
            return cls(member=_traced_member(value)), False
        case ef.TraceEnded(reason):
            return cls(reason=reason, ended=True), True
        case sn.Saving(text, done, total):
            return cls(waiting_for=text, bytes_done=done, bytes=total), False
        case sn.Saved(commit, unchanged):
            return cls(committed=info(commit), unchanged=unchanged), True
    return make_message(cls, value), True


def _traced_member(value: ef.TracedMember) -> pb.TraceMember:
    member = value.member
    whole: pb.TraceMember = make_message(
        pb.TraceMember,
        value,
        member_id=member.member_id,
        role=ROLES[member.role],
        incarnation=member.incarnation,
        host=member.host,
        rank=member.rank,
        pid=member.pid,
        offset_ns=value.offset,
        uncertainty_ns=value.uncertainty,
    )
    return whole


def dataset(value: ef.DatasetStanding, cls: Any = pb.DatasetStatus) -> Any:
    """Return the state of a data set as a message of type ``cls``."""
    spec, position = convert.dataset_to_proto(value.spec), convert.position_to_proto(value.position)
    return make_message(cls, value, spec=spec, position=position)


def info(commit: CommitRecord) -> pb.SnapshotInfo:
    info: pb.SnapshotInfo = make_message(pb.SnapshotInfo, commit, steps=dict(commit.steps))
    return info


def command(value: ef.Value | ef.News) -> pb.SessionResponse:
    """Return a command or news for a session, other than a map."""
    message = pb.SessionResponse
    match value:
        case ef.JoinProposal():
            proposal = make_message(message.JoinProposal, value, member=convert.member_to_proto(value.member))
            return message(join_proposal=proposal)
        case ef.WithdrawJoin():
            return message(join_withdrawn=make_message(message.JoinWithdrawn, value))
        case ef.CheckValues():
            return message(check_values=make_message(message.CheckValues, value))
        case ef.MemberLost():
            return message(member_lost=make_message(message.MemberLost, value, role=ROLES[value.role]))
        case ef.RunEnded():
            return message(run_ended=message.RunEnded())
        case ef.ShardsLost():
            return message(shards_lost=make_message(message.ShardsLost, value))
        case sn.RolledBack(directory, lost, text):
            rolled_back = message.RolledBack(directory=directory, text=text)
            for name, first, until in lost:
                # "from" is a Python keyword.
                rolled_back.lost.add(**{"parameters": name, "from": first, "until": until})
            return message(rolled_back=rolled_back)
        case ef.StopCommand(number, "leave", numbers):
            leave = pb.StopCommand.Leave(next=dict(numbers))
            return message(stop=pb.StopCommand(number=number, leave=leave))
        case ef.StopCommand(number, kind):
            return message(stop=pb.StopCommand(number=number, ask=kind == "ask" or None, hold=kind == "hold" or None))
        case ef.Notice(text):
            return message(notice=message.Notice(text=text))
        case ef.TraceCommand(number, "start", steps):
            return message(trace=pb.TraceCommand(number=number, start_steps=steps))
        case ef.TraceCommand(number, "clock"):
            return message(trace=pb.TraceCommand(number=number, clock_ns=time.monotonic_ns()))
        case ef.TraceCommand(number):
            return message(trace=pb.TraceCommand(number=number, end=True))
        case ef.CheckServer(server):
            return message(check_server=convert.replica_to_proto(server))
        case ef.AlignCommand(number, until, release):
            hold = None if release else True
            return message(align=pb.AlignCommand(number=number, until=until, hold=hold, release=release or None))
        case ef.DeadlockFound(sequence, error):
            return message(mutual_wait=pb.MutualWait(sequence=sequence, error=status.to_detail(error)))
        case ef.CheckCall():
            return message(check_call=make_message(pb.CheckCall, value))
        case sn.Prepare() | sn.Mark() | sn.TakeCut() | sn.End():
            return message(snapshot=_snapshot_command(value))
    raise AssertionError(f"{value} is not a session command")


def _snapshot_command(value: sn.SnapshotCommand) -> pb.SnapshotCommand:
    commands = pb.SnapshotCommand
    match value:
        case sn.Prepare(attempt, directory, steps):
            parameters = [commands.Prepare.Parameters(parameters=name, step=step) for name, step in steps]
            return commands(attempt=attempt, prepare=commands.Prepare(parameters=parameters, directory=directory))
        case sn.Mark(attempt, steps):
            return commands(attempt=attempt, mark=commands.Mark(steps=dict(steps)))
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
