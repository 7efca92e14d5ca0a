"""Between ``snapshot_events`` and the messages of ``SchedulerService``.

Names, lengths and digests of files that servers report go into manifests, so they are checked here.
"""

from __future__ import annotations

from typing import Any

from psdist.errors import InvalidArgumentError, LimitExceededError
from psdist.snapshots.format import CommitRecord, ShardFile
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import server_pb2
from psdist.wire import convert
from psdist.wire.limits import LEASES_MAX, NAMES_MAX, TEXT_CHARACTERS_MAX
from psdist_scheduler.events import snapshot_events as sn

_DIGEST_BYTES = 16


def save_event(call: int, request: pb.SaveSnapshotRequest) -> sn.Save:
    """Raises LimitExceededError."""
    worker = (request.worker_id, request.incarnation) if request.worker_id else ("", 0)
    reason = request.reason[:TEXT_CHARACTERS_MAX]
    return sn.Save(call, request.run_id, reason, *worker, _numbers(request.next))


def report_event(call: int, report: pb.SnapshotReport) -> sn.SnapshotReport:
    """A member's report. Raises InvalidArgumentError, InvalidNameError, LimitExceededError."""
    match report.WhichOneof("kind"):
        case "prepared":
            prepared = report.prepared
            return sn.Prepared(call, report.attempt, prepared.accepted, _numbers(prepared.steps_next))
        case "marked":
            return sn.Marked(call, report.attempt, _numbers(report.marked.next), _numbers(report.marked.keeps))
        case "keeps":
            return sn.Keeps(call, tuple(report.keeps.parameters[:NAMES_MAX]))
        case "written":
            written = report.written
            file, names = _file(written), tuple(written.state_names)
            return sn.Written(call, report.attempt, written.parameters, written.shard, written.term, file, names)
        case "failed":
            return sn.PartFailed(call, report.attempt, report.failed.error.message[:TEXT_CHARACTERS_MAX])
        case "loaded":
            loaded = report.loaded
            shards, terms = tuple(loaded.shards), tuple(loaded.terms)
            return sn.Loaded(call, loaded.parameters, loaded.generation, shards, terms)
        case "load_failed":
            failed = report.load_failed
            restore = convert.restore_from_proto(failed.restore)
            text, code = failed.error.message[:TEXT_CHARACTERS_MAX], failed.error.code
            corrupt = code in ("snapshot_corrupt", "unknown_snapshot")
            return sn.LoadFailed(call, failed.parameters, failed.generation, restore, text, corrupt)
    raise InvalidArgumentError("a report about a snapshot says nothing")


def hand_in_event(call: int, header: pb.HandInStateRequest.Header) -> sn.HandIn:
    """A worker has what it keeps ready."""
    who = (header.run_id, header.worker_id, header.incarnation)
    return sn.HandIn(call, *who, header.attempt, header.parameters, header.next, header.length)


def get_state_event(call: int, request: pb.GetStateRequest) -> sn.GetState:
    """A worker wants it back."""
    return sn.GetState(call, request.run_id, request.worker_id, request.incarnation, request.parameters)


def progress(message: pb.SnapshotProgress) -> sn.AttemptProgress:
    """How far a server is."""
    return sn.AttemptProgress(
        message.attempt,
        message.bytes_done,
        message.bytes,
        message.bytes_aside,
        message.waiting_for[:TEXT_CHARACTERS_MAX],
        message.loading,
    )


def command(value: sn.SnapshotCommand) -> pb.SnapshotCommand:
    """A command to a session."""
    commands = pb.SnapshotCommand
    match value:
        case sn.Prepare(attempt, directory, steps):
            parameters = [commands.Prepare.Parameters(parameters=name, step=step) for name, step in steps]
            prepare = commands.Prepare(parameters=parameters, directory=directory)
            return commands(attempt=attempt, prepare=prepare)
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
        case sn.End(attempt, committed, reason):
            return commands(attempt=attempt, end=commands.End(committed=committed, reason=reason))


def rolled_back(news: sn.RolledBack) -> pb.SessionResponse.RolledBack:
    """The run went back to a snapshot."""
    message = pb.SessionResponse.RolledBack(directory=news.directory, text=news.text)
    for name, first, until in news.lost:
        # "from" is a keyword of Python.
        message.lost.add(**{"parameters": name, "from": first, "until": until})
    return message


def saved(value: object, maps: object) -> tuple[pb.SaveSnapshotResponse, bool]:
    """The answer to SaveSnapshot, and whether it is the last."""
    match value:
        case sn.Saving(text, done, total):
            return pb.SaveSnapshotResponse(waiting_for=text, bytes_done=done, bytes=total), False
        case sn.Saved(commit, unchanged):
            return pb.SaveSnapshotResponse(committed=info(commit), unchanged=unchanged), True
    raise AssertionError(f"{value} is no answer to SaveSnapshot")


def next_pushes(request: pb.LeaseRangeRequest | pb.EndRangesRequest) -> dict[str, Any]:
    """A worker's next pushes: when it was done with leases, and now. Raises LimitExceededError."""
    if len(request.done_at) > LEASES_MAX:
        raise LimitExceededError(f"{len(request.done_at)} leases in one request are over the limit of {LEASES_MAX}")
    return {"done_at": tuple(_numbers(at.next) for at in request.done_at), "now": _numbers(request.now.next)}


def info(commit: CommitRecord) -> pb.SnapshotInfo:
    """A committed snapshot."""
    return pb.SnapshotInfo(
        directory=commit.directory,
        sequence=commit.sequence,
        steps=dict(commit.steps),
        bytes=commit.bytes,
        time=commit.time,
        seconds=commit.seconds,
        reason=commit.reason,
    )


def _numbers(numbers: Any) -> sn.Numbers:
    if len(numbers) > NAMES_MAX:
        raise LimitExceededError(f"{len(numbers)} parameters in one message are over the limit of {NAMES_MAX}")
    return tuple(sorted(numbers.items()))


def _file(written: pb.SnapshotReport.Written) -> ShardFile:
    data = bytes(written.digests)
    if len(data) != _DIGEST_BYTES * len(written.versions):
        raise InvalidArgumentError(
            f"{len(data)} bytes of digests for {len(written.versions)} slices of {written.file!r:.80}: give "
            f"{_DIGEST_BYTES} for each"
        )
    digests = tuple(data[at : at + _DIGEST_BYTES].hex() for at in range(0, len(data), _DIGEST_BYTES))
    return ShardFile(written.file, written.length, written.digest.hex(), tuple(written.versions), digests)
