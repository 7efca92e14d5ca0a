"""The JSON forms of a run's status and of its samples: for ``psdist status --format json`` and the dashboard.

Their keys are stable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from psdist.v1 import common_pb2, scheduler_pb2, server_pb2
from psdist.wire import convert

# --- the status -------------------------------------------------------------------------------------------------------


def status_json(answer: scheduler_pb2.GetStatusResponse) -> dict[str, Any]:
    """Return the scheduler's answer with stable keys: times in seconds, sizes in bytes, elements as numbers."""
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
        "problems": [values(each, "who", "kind", "text") for each in answer.problems],
        "metrics_address": answer.metrics_address,
        "dashboard_address": answer.dashboard_address,
        "certificate_not_after": answer.certificate_not_after or None,
        "events": [values(event, "time", "text", "number", "kind", "warning") for event in answer.events],
    }


def _member(member: scheduler_pb2.MemberStatus) -> dict[str, Any]:
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
        "kernel_threads": None if worker else member.statistics.kernel_threads,
        "cores": None if worker else member.statistics.cores,
        "waiting_for": list(member.waiting_for),
        "steps_per_second": _steps_per_second(member.rates),
        "waiting_share": _waiting_share(member.rates),
        "metrics_address": member.metrics_address,
        "certificate_not_after": member.certificate_not_after or None,
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
        "elements": entry.total // (2 if entry.spec.dtype == common_pb2.DTYPE_FLOAT64 else 1),
        "slices": -(-entry.total // entry.spec.slice_elements) if entry.spec.slice_elements else 0,
        "consistency": entry.spec.consistency.kind,
        **values(entry.spec.consistency, "backup_workers", "staleness"),
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
                "non_finite": _non_finite(counted.values(), member.worker_id),
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


def _non_finite(counted: Iterable[server_pb2.ParametersStatistics], worker_id: str) -> int:
    """Return the slices of a worker that these servers left out or refused because they held NaN or Inf."""
    return sum(worker.non_finite for each in counted for worker in each.workers if worker.worker_id == worker_id)


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


# --- samples ----------------------------------------------------------------------------------------------------------


def sample_json(sample: scheduler_pb2.RunSample) -> dict[str, Any]:
    """Return the activity of a run's members in about a second: rates per second, and shares of the time."""
    return {
        **values(sample, "number"),
        "time": round(sample.time, 3),
        "workers": {one.worker_id: _worker_period(one) for one in sample.workers if one.seconds},
        "servers": {one.server_id: _server_period(one) for one in sample.servers if one.seconds},
    }


def _worker_period(one: scheduler_pb2.WorkerSample) -> dict[str, Any]:
    """Return a worker's period; ``phases`` are shares of it that add up to 1."""
    phases = {phase: getattr(one, f"{phase}_seconds") for phase in ("compute", "push", "wait", "pull")}
    return {
        "seconds": round(one.seconds, 3),
        "phases": {phase: round(seconds / one.seconds, 4) for phase, seconds in phases.items()},
        "steps_per_second": {name: round(count / one.seconds, 3) for name, count in sorted(one.pushes.items())},
        "traffic": [
            {
                **values(each, "transport", "push_codec", "pull_codec"),
                "push_bytes_per_second": round(each.push_bytes / one.seconds),
                "pull_bytes_per_second": round(each.pull_bytes / one.seconds),
            }
            for each in one.traffic
        ],
        **values(one, "dropped", "abstained", "staleness", "reported_step"),
        "reported": {name: number(value) for name, value in sorted(one.reported.items())},
        "samples_per_second": round(one.samples_per_second, 3),
    }


def _server_period(one: scheduler_pb2.ServerSample) -> dict[str, Any]:
    """Return a server's period. ``apply_share`` is above 1 if several threads update slices."""
    return {
        "seconds": round(one.seconds, 3),
        "slices_per_second": round(one.slices_applied / one.seconds, 3),
        "apply_share": round(one.apply_seconds / one.seconds, 4),
        **values(one, "waiting_bytes", "resident_bytes", "lag_updates"),
        "idle_cores": round(one.idle_cores, 2) if one.HasField("idle_cores") else None,
    }


def values(source: object, *names: str) -> dict[str, Any]:
    """Return attributes by name, for a JSON form whose keys are the attribute names."""
    return {name: getattr(source, name) for name in names}


def number(value: float) -> float | str:
    """Return a number as JSON has it: "nan", "inf" and "-inf" are texts."""
    return value if math.isfinite(value) else str(value)
