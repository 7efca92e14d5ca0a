"""``psdist status``: shows a scheduler's report on its run, as tables or as JSON.

Without ``--scheduler`` the run is the one of the environment, else the one that runs on this machine. The keys of the
JSON form are those of ``as_json``, and stable.
"""

from __future__ import annotations

import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from psdist.cli.commands import show, values
from psdist.cli.target import SchedulerChoice, ask, find_target, target_flags, time_limit
from psdist.errors import SchedulerUnreachableError
from psdist.settings.exit_codes import OK, SIGNAL_BASE
from psdist.settings.flags import CommandLine, Flag

if TYPE_CHECKING:
    from psdist.v1 import common_pb2, scheduler_pb2, server_pb2

_WATCH_SECONDS: Final = 1.0


def command_line() -> CommandLine:
    """Return the command line of ``psdist status``."""
    return CommandLine(
        "psdist status",
        "Shows the state of a run. Without flags: the run on this machine.",
        (*target_flags(), Flag("--watch", "show it again every second, until Ctrl-C", twin=False)),
    )


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Print the status, with --watch every second; returns the exit status."""
    target = find_target(given, environ)
    if not given.watch:
        _print(given.format, fetch(target, given.timeout))
        return OK
    if sys.stdout.isatty() and given.format == "table":
        return _watch(target, given.timeout)
    try:
        while True:
            _print(given.format, fetch(target, given.timeout))
            print(flush=True)
            time.sleep(_WATCH_SECONDS)
    except KeyboardInterrupt:
        return OK


def _watch(target: SchedulerChoice, timeout_seconds: float) -> int:
    """Show the status on a terminal until Ctrl-C. If the scheduler stops answering, it may be restarting: the last
    status stays, below a notice."""
    from psdist.cli.status_screen import Screen

    answer: scheduler_pb2.GetStatusResponse | None = fetch(target, timeout_seconds)
    since = time.monotonic()
    # Otherwise SIGTERM would leave the terminal on its alternate screen.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(SIGNAL_BASE + number))
    try:
        with Screen() as screen:
            while True:
                if answer is not None:
                    since = time.monotonic()
                    screen.show(as_json(answer))
                time.sleep(_WATCH_SECONDS)
                try:
                    answer = fetch(target, timeout_seconds)
                except SchedulerUnreachableError as error:
                    answer = None
                    screen.show_trouble(f"no answer for {time.monotonic() - since:.0f} s: {error}")
    except KeyboardInterrupt:
        return OK


def _print(form: str, answer: scheduler_pb2.GetStatusResponse) -> None:
    def table(status: dict[str, Any]) -> None:
        from psdist.cli.status_table import print_status

        print_status(status)

    show(form, as_json(answer), table)


def fetch(target: SchedulerChoice, timeout_seconds: float) -> scheduler_pb2.GetStatusResponse:
    """Return the scheduler's answer. Raises SchedulerUnreachableError, which says what was tried, or the scheduler's
    error."""
    with time_limit(target, timeout_seconds):
        from psdist.v1 import scheduler_pb2

        request = scheduler_pb2.GetStatusRequest()
        answer: scheduler_pb2.GetStatusResponse = ask(
            target, timeout_seconds, lambda call: call("GetStatus", request, timeout_seconds)
        )
    return answer


# --- the JSON form ----------------------------------------------------------------------------------------------------


def as_json(answer: scheduler_pb2.GetStatusResponse) -> dict[str, Any]:
    """Return the answer with stable keys: times in seconds, sizes in bytes, elements as numbers."""
    statistics = _statistics_by_server(answer)
    return {
        "run_id": answer.run_id,
        "version": answer.psdist_version,
        **values(answer, "epoch", "phase"),
        "uptime_seconds": round(answer.uptime_seconds, 3),
        **values(answer, "workers_min", "servers_min", "servers_wanted", "replicas"),
        "members": [_member(member) for member in answer.members],
        "parameters": [
            {**_parameters(one, statistics), "steps_per_second": _versions_per_second(one, answer.members)}
            for one in answer.parameters
        ],
        "datasets": [_dataset(one) for one in answer.datasets],
        "snapshots": _snapshots(answer.snapshots) if answer.HasField("snapshots") else None,
        "waiting_for": list(answer.waiting_for),
        "metrics_address": answer.metrics_address,
        "events": [values(event, "time", "text", "number", "kind", "warning") for event in answer.events],
    }


def _member(member: scheduler_pb2.MemberStatus) -> dict[str, Any]:
    from psdist.v1 import scheduler_pb2

    worker = member.role == scheduler_pb2.ROLE_WORKER
    return {
        "id": member.member_id,
        "role": "worker" if worker else "server",
        "rank": member.rank if worker else None,
        **values(member, "incarnation", "state", "draining", "reason", "address", "host", "pid"),
        "heartbeat_age_seconds": round(member.heartbeat_age_seconds, 3),
        "epoch": member.epoch,
        "resident_bytes": None if worker else member.statistics.resident_bytes,
        "device": None if worker else member.statistics.device or "cpu",
        "device_bytes": None if worker else member.statistics.device_bytes,
        "waiting_for": list(member.waiting_for),
        "steps_per_second": _steps_per_second(member.rates),
        "waiting_share": _waiting_share(member.rates),
        "metrics_address": member.metrics_address,
        "connections": [
            {"server": one.server_id, **values(one, "parameters", "transport", "reason", "compression")}
            for one in member.connections
        ],
    }


def _steps_per_second(rates: scheduler_pb2.WorkerRates) -> dict[str, float]:
    """Return, by parameter set, a worker's answered pushes per second; empty if it has not reported any."""
    if not rates.seconds:
        return {}
    return {name: round(count / rates.seconds, 3) for name, count in sorted(rates.pushes.items())}


def _waiting_share(rates: scheduler_pb2.WorkerRates) -> float | None:
    """Return the fraction of time, from 0 to 1, in which a worker's script waited; None if unknown."""
    return round(rates.waiting_seconds / rates.seconds, 3) if rates.seconds else None


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
    from psdist.v1.common_pb2 import DTYPE_FLOAT64

    entry, name = one.entry, one.entry.spec.name
    counted = {server: each for (server, parameters), each in statistics.items() if parameters == name}
    holders = {shard.primary.server_id for shard in entry.shards if not shard.lost}
    primaries = [each for server, each in counted.items() if server in holders]
    # If no server has reported yet: after a restart of the scheduler the version may be any.
    unknown = None if one.state == "ready" else 0
    return {
        "name": name,
        "state": one.state,
        "tensors": one.tensors,
        "elements": entry.total // (2 if entry.spec.dtype == DTYPE_FLOAT64 else 1),
        "slices": -(-entry.total // entry.spec.slice_elements) if entry.spec.slice_elements else 0,
        "consistency": entry.spec.consistency.kind,
        "optimizer": entry.spec.optimizer.kind,
        "version_min": min((each.version_min for each in primaries), default=unknown),
        "version_max": max((each.version_max for each in primaries), default=unknown),
        "servers": _holders(entry, counted),
        "shards": [_shard(number, shard) for number, shard in enumerate(entry.shards)],
        "replicas": [_replica(server, each) for server, one in counted.items() for each in one.replicas],
        "members": [
            {
                "id": member.worker_id,
                "rank": member.rank,
                "first_step": member.first_step,
                "compression": _compression(counted.values(), member.worker_id),
            }
            for member in entry.members
        ],
    }


def _compression(counted: Iterable[server_pb2.ParametersStatistics], worker_id: str) -> float | None:
    """Return the float32 size of a worker's pushes to these servers divided by their encoded size; None if none was
    encoded."""
    found = [worker for each in counted for worker in each.workers if worker.worker_id == worker_id]
    pushed, saved = sum(one.push_bytes for one in found), sum(one.saved_bytes for one in found)
    return round((pushed + saved) / pushed, 2) if pushed and saved else None


def _versions_per_second(one: scheduler_pb2.ParametersStatus, members: Iterable[scheduler_pb2.MemberStatus]) -> float:
    """Return the growth rate of the version: in BSP the fastest worker's step rate, otherwise the push rate of all
    workers."""
    spec = one.entry.spec
    rates = [_steps_per_second(member.rates).get(spec.name, 0.0) for member in members]
    return max(rates, default=0.0) if spec.consistency.kind == "bsp" else round(sum(rates), 3)


def _holders(
    entry: common_pb2.ParametersEntry, counted: Mapping[str, server_pb2.ParametersStatistics]
) -> list[dict[str, Any]]:
    """Return the servers that hold a part of the parameter set, primaries first."""
    primaries = [shard.primary.server_id for shard in entry.shards if not shard.lost]
    copies = [each.server_id for shard in entry.shards for each in (*shard.backups, *shard.filling)]
    return [
        {
            "id": server,
            "shards": primaries.count(server),
            "copies": copies.count(server),
            "weight_bytes": _weight_bytes(entry, server),
            "waiting_bytes": counted[server].bytes_held if server in counted else None,
            "estimate_bytes": counted[server].estimate_bytes if server in counted else None,
        }
        for server in dict.fromkeys((*primaries, *copies))
    ]


def _shard(number: int, shard: common_pb2.Shard) -> dict[str, Any]:
    return {
        "number": number,
        "primary": shard.primary.server_id,
        "term": shard.term,
        "backups": [each.server_id for each in shard.backups],
        "filling": [each.server_id for each in shard.filling],
        "lost": shard.lost,
    }


def _replica(primary: str, one: server_pb2.ReplicaStatistics) -> dict[str, Any]:
    """Return a copy as the shard's primary sees it."""
    return {
        "shard": one.shard,
        "primary": primary,
        "server": one.server_id,
        **values(one, "state", "lag_updates", "lag_bytes", "slices_filled", "slices", "digests", "carrier"),
    }


def _weight_bytes(entry: common_pb2.ParametersEntry, server: str) -> int:
    """Return the bytes of the weights (float32, without optimizer state) of all shards that the server has a copy
    of."""
    from psdist.wire import convert

    if not entry.spec.slice_elements:
        return 0
    parameters = convert.entry_from_proto(entry)
    held = [any(each.server_id == server for each in shard.replicas) for shard in parameters.shards]
    slicing = parameters.slicing
    return 4 * sum(slicing.size(index) for index in range(slicing.count) if held[index % len(held)])


def _dataset(one: scheduler_pb2.DatasetStatus) -> dict[str, Any]:
    spec, position = one.spec, one.position
    return {
        **values(spec, "name", "size", "range_size", "data_epochs"),
        "data_epoch": position.data_epoch,
        "ranges": -(-spec.size // spec.range_size) if spec.range_size else 0,
        "done_ranges": sum(span.count for span in position.done),
        "leased_ranges": one.leased,
        **values(position, "repeated_ranges", "failed_ranges"),
    }


def _snapshots(one: scheduler_pb2.SnapshotsStatus) -> dict[str, Any]:
    attempt = {"number": one.attempt, **values(one, "phase", "waiting_for", "bytes_done", "bytes")}
    return {
        **values(one, "storage", "policy"),
        "committed": [snapshot_info(each) for each in one.committed],
        "attempt": attempt if one.phase else None,
        **values(one, "failed", "last_failure", "last_failure_time"),
        "restored": snapshot_info(one.restored) if one.HasField("restored") else None,
    }


def snapshot_info(one: scheduler_pb2.SnapshotInfo) -> dict[str, Any]:
    """Return a committed snapshot."""
    return {
        **values(one, "directory", "sequence"),
        "steps": dict(sorted(one.steps.items())),
        **values(one, "bytes", "time"),
        "seconds": round(one.seconds, 3),
        "reason": one.reason,
    }
