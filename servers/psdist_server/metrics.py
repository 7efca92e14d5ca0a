"""Metrics of a server for Prometheus, read from its parameter stores when a scraper asks."""

from __future__ import annotations

from collections import Counter, defaultdict

from psdist.monitoring.exporter import Exporter, Readings
from psdist.settings.config import MetricsEndpoint
from psdist.v1 import server_pb2
from psdist_server.server import ParameterServer
from psdist_server.store.parameter_store import ParameterStore

#: Counters of slices that did not count, which are the values of the label ``reason``.
_UNUSED = ("late", "duplicates", "non_finite", "rejected")


def export(server: ParameterServer, run_id: str, endpoint: MetricsEndpoint) -> Exporter:
    """Serve the server's metrics. Raises ConfigurationError and InsecureBindError."""
    return Exporter(endpoint, "server", lambda: (run_id, server.me.server_id), lambda found: read(server, found))


def read(server: ParameterServer, readings: Readings) -> None:
    """Add the server's readings."""
    statistics = server.statistics()
    readings.add("psdist_device_bytes", statistics.device_bytes)
    readings.add("psdist_waits", len({wait for one in statistics.parameters for wait in one.waiting_for}))
    for one in statistics.parameters:
        _read_store(server.stores[one.parameters], one, readings)
        _read_workers(one, readings)
        _read_replicas(one, readings)


def _read_store(store: ParameterStore, one: server_pb2.ParametersStatistics, readings: Readings) -> None:
    values = {
        "psdist_version_min": one.version_min,
        "psdist_version_max": one.version_max,
        "psdist_primary_shards": len(one.primary_of),
        "psdist_backup_shards": len(one.backup_of),
        "psdist_slices_applied_total": one.applied_slices,
        "psdist_apply_seconds_total": one.apply_seconds,
        "psdist_slices_waiting": len({gradient.index for gradient in store.gradients.by_token.values()}),
        "psdist_waiting_bytes": one.bytes_held,
    }
    for name, value in values.items():
        readings.add(name, value, parameters=one.parameters)


def _read_workers(one: server_pb2.ParametersStatistics, readings: Readings) -> None:
    for worker in one.workers:
        labels = {"parameters": one.parameters, "worker": worker.worker_id}
        readings.add("psdist_worker_slices_total", worker.pushes, **labels, direction="push")
        readings.add("psdist_worker_slices_total", worker.pulls, **labels, direction="pull")
        readings.add("psdist_worker_bytes_total", worker.push_bytes, **labels, direction="push")
        readings.add("psdist_worker_bytes_total", worker.pull_bytes, **labels, direction="pull")
        for reason in _UNUSED:
            readings.add("psdist_worker_slices_unused_total", getattr(worker, reason), **labels, reason=reason)


def _read_replicas(one: server_pb2.ParametersStatistics, readings: Readings) -> None:
    states: Counter[str] = Counter()
    lags: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for replica in one.replicas:
        states[replica.state] += 1
        lags[replica.server_id][0] += replica.lag_updates
        lags[replica.server_id][1] += replica.lag_bytes
    for state in ("in sync", "filling", "unreachable"):
        readings.add("psdist_replicas", states[state], parameters=one.parameters, state=state)
    for server_id, (updates, size) in sorted(lags.items()):
        readings.add("psdist_replication_lag_updates", updates, parameters=one.parameters, replica=server_id)
        readings.add("psdist_replication_lag_bytes", size, parameters=one.parameters, replica=server_id)
