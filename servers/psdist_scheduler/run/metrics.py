"""Metrics of the scheduler for Prometheus, read from the state of the machine when a scraper asks."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, get_args

from psdist.monitoring.exporter import Exporter, Readings, target
from psdist.settings.config import MetricsEndpoint
from psdist_scheduler.decide.cluster import Cluster
from psdist_scheduler.decide.effects import EventKind
from psdist_scheduler.decide.parameter_sets import ParameterSet
from psdist_scheduler.run.scheduler import Scheduler


def export(scheduler: Scheduler, endpoint: MetricsEndpoint) -> Exporter:
    """Serve the scheduler's metrics, and the metrics ports of the whole run. Raises ConfigurationError and
    InsecureBindError."""
    run_id = scheduler.cluster.settings.run_id

    def targets() -> list[dict[str, Any]]:
        return [target(exporter.address, run_id, "scheduler", ""), *_member_targets(scheduler, run_id)]

    exporter = Exporter(endpoint, "scheduler", lambda: (run_id, ""), lambda found: read(scheduler, found), targets)
    scheduler.reports.metrics_address = exporter.address
    return exporter


def _member_targets(scheduler: Scheduler, run_id: str) -> list[dict[str, Any]]:
    addresses = {member: report.metrics_address for member, report in scheduler.reports.by_member.items()}
    return [
        target(address, run_id, member.role, member.member_id)
        for member in scheduler.cluster.members.all
        if member.live and (address := addresses.get(member.member_id, ""))
    ]


def read(scheduler: Scheduler, readings: Readings) -> None:
    """Add the scheduler's readings."""
    cluster, now = scheduler.cluster, scheduler.time()
    readings.add("psdist_epoch", cluster.epoch)
    readings.add("psdist_waits", len(cluster.waits))
    _read_members(cluster, readings, now)
    for p in cluster.registry.placed:
        _read_shards(p, cluster.settings.replicas, readings)
    counts = scheduler.history.counts
    for kind in get_args(EventKind):  # From 0 on: Prometheus sees no increase to the first value of a series.
        readings.add("psdist_events_total", counts[kind], kind=kind)
    readings.add("psdist_rollbacks_total", counts["rollback"])
    _read_snapshots(cluster, readings)


def _read_members(cluster: Cluster, readings: Readings, now: float) -> None:
    counts = Counter((member.role, member.state) for member in cluster.members.all)
    for role in ("server", "worker"):
        for state in ("live", "left", "lost"):
            readings.add("psdist_members", counts[role, state], role=role, state=state)
    demand = cluster.demand
    readings.add("psdist_members_wanted", demand.servers_wanted or demand.servers_min, role="server")
    readings.add("psdist_members_wanted", demand.workers_min, role="worker")
    for member in cluster.members.all:
        presence = cluster.members.sessions.liveness.get(member.member_id)
        if member.live and presence is not None:
            age = now - presence.seen
            readings.add("psdist_heartbeat_age_seconds", age, role=member.role, id=member.member_id)


def _read_shards(p: ParameterSet, replicas: int, readings: Readings) -> None:
    counts: Counter[str] = Counter()
    for shard in p.entry.shards:
        is_full = len(shard.backups) + 1 >= replicas
        counts["lost" if shard.lost else "full" if is_full else "short"] += 1
    for state in ("full", "short", "lost"):
        readings.add("psdist_shards", counts[state], parameters=p.name, state=state)


def _read_snapshots(cluster: Cluster, readings: Readings) -> None:
    commits = cluster.snapshots.catalog.commits
    readings.add("psdist_snapshots", len(commits))
    readings.add("psdist_snapshot_failures_total", cluster.snapshots.failures.count)
    if commits:
        newest = max(commits, key=lambda commit: commit.time)
        readings.add("psdist_snapshot_age_seconds", max(0.0, time.time() - newest.time))
        readings.add("psdist_snapshot_bytes", newest.bytes)
        readings.add("psdist_snapshot_duration_seconds", newest.seconds)
