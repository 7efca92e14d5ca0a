"""``psdist status``: asks a run's scheduler what is going on, and shows it as tables or as JSON.

Without ``--scheduler`` the run is the one of the environment, else the one that runs on this machine. The keys of the
JSON form are stable: they are those of ``as_json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psdist.cli.exit_codes import FAILURE, OK, UNAVAILABLE, USAGE
from psdist.cli.flags import CommandLine, Flag, fail, one_of, seconds
from psdist.config import address_text, check_run_id, find_scheduler, find_token, read_address
from psdist.errors import InvalidArgumentError, PsdistError, SchedulerUnreachableError
from psdist.launch.runfile import RunNote, RunRegistry, notes_directory

if TYPE_CHECKING:
    from psdist.v1 import common_pb2, scheduler_pb2, server_pb2


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask. ``origin`` says how it was found, for messages."""

    address: str
    token: str
    origin: str


def command_line() -> CommandLine:
    """The flags of ``psdist status``."""
    return CommandLine(
        "psdist status",
        "Shows what a run is doing. Without flags: the run on this machine.",
        (
            Flag("--scheduler", "the scheduler", address_text, "", "HOST:PORT"),
            Flag("--run-id", "which of the runs on this machine", check_run_id, "", "NAME"),
            Flag("--token-file", "file with the run's token (or set PSDIST_TOKEN)", Path, None, "FILE", twin=False),
            Flag("--format", "table or json", one_of("table", "json"), "table", "FORMAT"),
            Flag("--timeout", "longest wait for the answer", seconds(0.01), 5.0, "SECONDS"),
        ),
    )


def main(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    environ = os.environ if environ is None else environ
    line = command_line()
    given = line.parse(argv, environ)
    try:
        target = find_target(given.scheduler, given.run_id, given.token_file, environ)
        answer = fetch(target, given.timeout)
    except SchedulerUnreachableError as error:
        fail(line.program, str(error), UNAVAILABLE)
    except InvalidArgumentError as error:
        fail(line.program, str(error), USAGE)
    except PsdistError as error:
        fail(line.program, str(error), FAILURE)
    if given.format == "json":
        print(json.dumps(as_json(answer), indent=2))
    else:
        from psdist.cli.status_table import show

        show(as_json(answer), sys.stdout)
    return OK


def find_target(scheduler: str, run_id: str, token_file: Path | None, environ: Mapping[str, str]) -> Target:
    """The scheduler to ask. Raises InvalidArgumentError, or SchedulerUnreachableError where there is no run."""
    address = scheduler or find_scheduler(environ)
    if not address and environ.get("PSDIST_SCHEDULER_FILE") and not run_id:
        address = read_address(Path(environ["PSDIST_SCHEDULER_FILE"]))
    if address:
        return Target(address, find_token(environ, token_file=token_file), "--scheduler or PSDIST_SCHEDULER")
    note = _choose(RunRegistry(notes_directory(environ)).live(), run_id)
    token = find_token({"PSDIST_TOKEN_FILE": note.token_file}, token_file=token_file)
    return Target(note.address, token, f"run {note.run_id} on this machine, pid {note.pid}")


def _choose(notes: list[RunNote], run_id: str) -> RunNote:
    names = ", ".join(note.run_id for note in notes)
    matching = [note for note in notes if run_id in ("", note.run_id)]
    if not matching:
        what = f"no run named {run_id} is" if run_id else "no run is"
        others = f"; there are {names}" if names else ""
        raise SchedulerUnreachableError(f"{what} running on this machine{others}: pass --scheduler HOST:PORT")
    if len(matching) > 1:
        raise InvalidArgumentError(f"several runs are running on this machine: choose one of {names} by --run-id")
    if not matching[0].address:
        raise SchedulerUnreachableError(f"the scheduler of run {matching[0].run_id} is not up yet: try again")
    return matching[0]


def fetch(target: Target, timeout_seconds: float) -> scheduler_pb2.GetStatusResponse:
    """The scheduler's answer. Raises SchedulerUnreachableError, which says what was tried, and what it answers."""
    import asyncio

    return asyncio.run(_fetch(target, timeout_seconds))


async def _fetch(target: Target, timeout_seconds: float) -> scheduler_pb2.GetStatusResponse:
    import grpc

    from psdist.v1 import scheduler_pb2, scheduler_pb2_grpc
    from psdist.wire import auth, limits, status
    from psdist.wire.channels import open_channel

    unreachable = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    async with open_channel(target.address, limits.CONTROL_MESSAGE_BYTES) as channel:
        try:
            answer: scheduler_pb2.GetStatusResponse = await scheduler_pb2_grpc.SchedulerServiceStub(channel).GetStatus(
                scheduler_pb2.GetStatusRequest(), metadata=auth.metadata(target.token), timeout=timeout_seconds
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in unreachable:
                raise SchedulerUnreachableError(
                    f"no scheduler answers at {target.address} ({target.origin}; tried for {timeout_seconds:g} s): "
                    f"{error.details()}"
                ) from None
            raise status.from_call(error, f"scheduler {target.address}") from None
    return answer


# --- the JSON form ----------------------------------------------------------------------------------------------------


def as_json(answer: scheduler_pb2.GetStatusResponse) -> dict[str, Any]:
    """The answer with stable keys: times in seconds, sizes in bytes, elements as numbers."""
    statistics = _statistics_by_server(answer)
    return {
        "run_id": answer.run_id,
        "version": answer.psdist_version,
        "epoch": answer.epoch,
        "phase": answer.phase,
        "uptime_seconds": round(answer.uptime_seconds, 3),
        "workers_min": answer.workers_min,
        "servers_min": answer.servers_min,
        "members": [_member(member) for member in answer.members],
        "parameters": [_parameters(one, statistics) for one in answer.parameters],
        "waiting_for": list(answer.waiting_for),
        "events": [{"time": event.time, "text": event.text} for event in answer.events],
    }


def _member(member: scheduler_pb2.MemberStatus) -> dict[str, Any]:
    from psdist.v1 import scheduler_pb2

    worker = member.role == scheduler_pb2.ROLE_WORKER
    return {
        "id": member.member_id,
        "role": "worker" if worker else "server",
        "rank": member.rank if worker else None,
        "incarnation": member.incarnation,
        "state": member.state,
        "reason": member.reason,
        "address": member.address,
        "host": member.host,
        "pid": member.pid,
        "heartbeat_age_seconds": round(member.heartbeat_age_seconds, 3),
        "epoch": member.epoch,
        "resident_bytes": None if worker else member.statistics.resident_bytes,
        "waiting_for": list(member.waiting_for),
        "connections": [
            {
                "server": one.server_id,
                "parameters": one.parameters,
                "transport": one.transport,
                "reason": one.reason,
            }
            for one in member.connections
        ],
    }


def _statistics_by_server(
    answer: scheduler_pb2.GetStatusResponse,
) -> dict[tuple[str, str], server_pb2.ParametersStatistics]:
    return {
        (member.member_id, one.parameters): one
        for member in answer.members
        if member.state == "live"
        for one in member.statistics.parameters
    }


def _parameters(
    one: scheduler_pb2.ParametersStatus, statistics: dict[tuple[str, str], server_pb2.ParametersStatistics]
) -> dict[str, Any]:
    entry, name = one.entry, one.entry.spec.name
    servers = list(dict.fromkeys(shard.primary.server_id for shard in entry.shards))
    counted = {server: statistics[server, name] for server in servers if (server, name) in statistics}
    return {
        "name": name,
        "state": one.state,
        "tensors": one.tensors,
        "elements": entry.total,
        "slices": _slices(entry),
        "consistency": entry.spec.consistency.kind,
        "optimizer": entry.spec.optimizer.kind,
        "version_min": min((each.version_min for each in counted.values()), default=0),
        "version_max": max((each.version_max for each in counted.values()), default=0),
        "servers": [
            {
                "id": server,
                "shards": sum(shard.primary.server_id == server for shard in entry.shards),
                "weight_bytes": _weight_bytes(entry, server),
                "waiting_bytes": counted[server].bytes_held if server in counted else None,
            }
            for server in servers
        ],
        "members": [
            {"id": member.worker_id, "rank": member.rank, "first_step": member.first_step} for member in entry.members
        ],
    }


def _weight_bytes(entry: common_pb2.ParametersEntry, server: str) -> int:
    """Bytes of the weights (float32, without optimizer state) that the server holds."""
    from psdist.wire import convert

    parameters = convert.entry_from_proto(entry)
    slices = parameters.slices_of(server) if entry.spec.slice_elements else ()
    return 4 * sum(parameters.slicing.size(index) for index in slices)


def _slices(entry: common_pb2.ParametersEntry) -> int:
    size = entry.spec.slice_elements
    return -(-entry.total // size) if size else 0
