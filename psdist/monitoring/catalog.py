"""Catalog of the metrics for Prometheus: one declaration each, for the exposition and docs/metrics.md. Pure.

Names follow Prometheus' conventions: prefix ``psdist_``, base units, ``_total`` for counters. No label has an unbounded
set of values: no tensors, steps or addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Role = Literal["scheduler", "server", "worker"]
Kind = Literal["gauge", "counter", "histogram"]

ALL: Final[tuple[Role, ...]] = ("scheduler", "server", "worker")
_SCHEDULER: Final[tuple[Role, ...]] = ("scheduler",)
_SERVER: Final[tuple[Role, ...]] = ("server",)
_WORKER: Final[tuple[Role, ...]] = ("worker",)

#: Upper bounds in seconds: steps of small models take a fraction of a millisecond.
SECONDS_BOUNDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
#: Upper bounds in versions.
VERSIONS_BOUNDS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """Declaration of a metric.

    roles: processes that show it.
    bounds: upper bounds of a histogram's buckets, without infinity.
    """

    name: str
    kind: Kind
    roles: tuple[Role, ...]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


METRICS: Final = (
    # --- every process ---
    Metric("psdist_process_info", "gauge", ALL, "Always 1; the labels identify the process.",
           ("run_id", "role", "member_id", "version")),
    Metric("psdist_event_loop_lag_seconds", "histogram", ALL,
           "Delay of a timer on the event loop, measured ten times a second.", (), SECONDS_BOUNDS),
    Metric("psdist_waits", "gauge", ALL, "Waits in this process that have lasted for more than 10 s."),
    # --- scheduler ---
    Metric("psdist_epoch", "gauge", _SCHEDULER, "Epoch of the published cluster map."),
    Metric("psdist_members", "gauge", _SCHEDULER, "Members by role and state: live, left or lost.", ("role", "state")),
    Metric("psdist_members_wanted", "gauge", _SCHEDULER, "Members that the run waits for or was scaled to.", ("role",)),
    Metric("psdist_heartbeat_age_seconds", "gauge", _SCHEDULER, "Time since the last heartbeat of a live member.",
           ("role", "id")),
    Metric("psdist_shards", "gauge", _SCHEDULER,
           "Shards by state: full (it has all copies that the run wants), short (some are missing or being filled) or "
           "lost.", ("parameters", "state")),
    Metric("psdist_events_total", "counter", _SCHEDULER,
           "Events of the run's history since this scheduler started, by kind (psdist events).", ("kind",)),
    Metric("psdist_rollbacks_total", "counter", _SCHEDULER, "Rollbacks to a snapshot since this scheduler started."),
    Metric("psdist_snapshots", "gauge", _SCHEDULER, "Committed snapshots in the storage."),
    Metric("psdist_snapshot_age_seconds", "gauge", _SCHEDULER,
           "Time since the newest snapshot was committed; absent without one."),
    Metric("psdist_snapshot_bytes", "gauge", _SCHEDULER, "Size of the newest snapshot."),
    Metric("psdist_snapshot_duration_seconds", "gauge", _SCHEDULER, "Time that the newest snapshot took."),
    Metric("psdist_snapshot_failures_total", "counter", _SCHEDULER,
           "Abandoned snapshots since this scheduler started."),
    # --- server ---
    Metric("psdist_version_min", "gauge", _SERVER, "Lowest version of a slice in the primary shards of this server.",
           ("parameters",)),
    Metric("psdist_version_max", "gauge", _SERVER, "Highest version of such a slice.", ("parameters",)),
    Metric("psdist_primary_shards", "gauge", _SERVER, "Primary shards of this server.", ("parameters",)),
    Metric("psdist_backup_shards", "gauge", _SERVER, "Shards that this server backs up or is being filled with.",
           ("parameters",)),
    Metric("psdist_slices_applied_total", "counter", _SERVER, "Updates of slices.", ("parameters",)),
    Metric("psdist_apply_seconds_total", "counter", _SERVER, "Time of kernel threads in updates.", ("parameters",)),
    Metric("psdist_slices_waiting", "gauge", _SERVER,
           "Slices with a contribution that is not applied yet: those of other workers are missing, or it waits for a "
           "thread.", ("parameters",)),
    Metric("psdist_waiting_bytes", "gauge", _SERVER, "Memory of contributions that are not applied yet.",
           ("parameters",)),
    Metric("psdist_worker_slices_total", "counter", _SERVER,
           "Slices pushed by a worker (push), and asked for by calls that only pull (pull).",
           ("parameters", "worker", "direction")),
    Metric("psdist_worker_bytes_total", "counter", _SERVER,
           "Payloads received from a worker (push) or sent to it (pull), as encoded.",
           ("parameters", "worker", "direction")),
    Metric("psdist_worker_slices_unused_total", "counter", _SERVER,
           "Slices of a worker that did not count: late, duplicates, non_finite or rejected.",
           ("parameters", "worker", "reason")),
    Metric("psdist_replicas", "gauge", _SERVER, "Copies of this primary's shards: in sync, filling or unreachable.",
           ("parameters", "state")),
    Metric("psdist_replication_lag_updates", "gauge", _SERVER,
           "Updates that a backup has not acknowledged, over this primary's shards.", ("parameters", "replica")),
    Metric("psdist_replication_lag_bytes", "gauge", _SERVER, "Bytes of these updates.", ("parameters", "replica")),
    Metric("psdist_device_bytes", "gauge", _SERVER, "Memory in use on the device; 0 without one."),
    # --- worker ---
    Metric("psdist_incarnation", "gauge", _WORKER,
           "Registrations of this worker; above 1 it has rejoined or restarted."),
    Metric("psdist_step_seconds", "histogram", _WORKER,
           "Time between two answered pushes, by phase: compute, push, wait and pull add up to it.",
           ("phase",), SECONDS_BOUNDS),
    Metric("psdist_steps_total", "counter", _WORKER, "Answered pushes.", ("parameters",)),
    Metric("psdist_staleness_versions", "histogram", _WORKER,
           "Staleness of each push: the largest over its slices, in versions; 0 in BSP.", (), VERSIONS_BOUNDS),
    Metric("psdist_bytes_total", "counter", _WORKER,
           "Payloads sent (push) and received (pull), as encoded. A change of transport counts from the next scrape.",
           ("parameters", "transport", "codec", "direction")),
    Metric("psdist_pushes_dropped_total", "counter", _WORKER,
           "Pushes that were dropped because this worker was expelled, or the run rolled back.", ("parameters",)),
    Metric("psdist_pushes_abstained_total", "counter", _WORKER,
           "Pushes without (a part of) their gradient: weight 0, or not finite.", ("parameters",)),
    Metric("psdist_slices_ignored_total", "counter", _WORKER, "Pushed slices that the servers did not use.",
           ("parameters",)),
    Metric("psdist_slices_resent_total", "counter", _WORKER, "Slices sent again after a break.", ("parameters",)),
    Metric("psdist_reported", "gauge", _WORKER,
           "Mean of the last interval of a number that the script reports: context.report(loss=...).", ("metric",)),
)  # fmt: skip

BY_NAME: Final = {metric.name: metric for metric in METRICS}
