"""The server program: one event loop with the data path, the standard services and the session with the scheduler.

A server may start before or after the other programs. It serves once it is registered. It ends on SIGTERM or SIGINT,
when its launcher's lifeline breaks, when the scheduler reports the end of the run, or when the scheduler no longer
knows this server. Its metrics for Prometheus are read from the parameter stores when a scraper asks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

import grpc.aio
import structlog
import uvloop
from grpc_health.v1.health import aio as health

from psdist import addresses, logs, machine
from psdist.addresses import is_loopback
from psdist.compression.kernel_runtime import BackgroundCompiler
from psdist.device.device import open_device
from psdist.errors import (
    RUN_ENDING,
    ConfigurationError,
    DeviceLostError,
    DeviceUnavailableError,
    PermissionDeniedError,
    PsdistError,
    UnauthenticatedError,
)
from psdist.link.connecting import TcpListener
from psdist.machine import usable_cores
from psdist.security.tokens import Audience, Verifier
from psdist.settings import exit_codes, own_process
from psdist.settings.config import MetricsEndpoint
from psdist.settings.programs import ServerSettings
from psdist.types import ClusterMap
from psdist.v1 import server_pb2
from psdist.wire import channels, limits
from psdist.wire.auth import ConnectionGuard
from psdist.wire.limits import LogPacer
from psdist.wire.services import add_standard_services, set_ready
from psdist_server.kernels import means
from psdist_server.kernels.device_parameters import Lanes
from psdist_server.server import ParameterServer
from psdist_server.server_session import ServerSession
from psdist_server.service import SERVICE, ServerService
from psdist_server.store.parameter_store import ParameterStore

if TYPE_CHECKING:
    from psdist.monitoring.exporter import Exporter, Readings

logger = structlog.get_logger("psdist.server")

_GRACE_SECONDS: Final = 1.0
#: Errors that a restart would meet again.
_RECURRING: Final = (UnauthenticatedError, PermissionDeniedError, ConfigurationError, DeviceUnavailableError)

T = TypeVar("T")


def main(settings: ServerSettings) -> int:
    """Run a server until a signal or its launcher stops it. Returns the exit status."""
    machine.keep_buffers()
    channels.raise_open_files_limit()
    logs.configure("server", run_id=settings.run_id, log_format=settings.log_format, level=settings.log_level)
    try:
        # Before registration, because compiling the device's kernels takes longer than a heartbeat interval.
        lanes = None if settings.device == "cpu" else Lanes(open_device(settings.device), _end_without_device)
        address = settings.scheduler_address()
        code: int = uvloop.run(own_process.ignored_after(_serve(settings, address, lanes)))
        return code
    except PsdistError as error:
        print(f"psdist-server: {error}", file=sys.stderr)
        if isinstance(error, RUN_ENDING):
            return exit_codes.status_of_ended_run(error)
        recurs = isinstance(error, _RECURRING) and "port" not in error.details  # A taken port may be free later.
        return exit_codes.CONFIGURATION if recurs else exit_codes.UNAVAILABLE


def _end_without_device(error: DeviceLostError) -> None:
    """Exit the process immediately, from any thread. No pending answer can be trusted, and to its peers the server
    looks killed."""
    logger.error("the device is lost, with all parameters on it; exiting", reason=str(error))
    logging.shutdown()
    os._exit(exit_codes.DEVICE_LOST)


def default_kernel_threads(cluster: ClusterMap, advertise: str) -> int:
    """Return the number of kernel threads: the usable cores, shared with the servers already on this host; at least
    one.

    Servers that start later are not counted. Launchers know the number of servers and pass ``--kernel-threads``.
    """
    host = advertise.rpartition(":")[0]
    others = [server for server in cluster.servers if server.address != advertise]
    here = 1 + sum(server.address.rpartition(":")[0] == host for server in others)
    return max(1, usable_cores() // here)


async def _serve(settings: ServerSettings, scheduler: str, lanes: Lanes | None) -> int:
    stop = asyncio.Event()
    _stop_on_signals(stop, settings.lifeline_fd)
    guard = ConnectionGuard()
    verifier = Verifier(settings.credentials.token, Audience.SERVER)
    server = channels.make_server(settings.credentials, verifier=verifier)
    port = channels.bind(server, settings.host, settings.port, settings.credentials)
    deadline = asyncio.get_running_loop().time() + settings.start_timeout_seconds
    advertise = await _unless(stop, _own_address(settings, scheduler, port))
    if not advertise:
        return exit_codes.OK
    compiler = BackgroundCompiler(logging.getLogger("psdist.server"))
    compiler.add(means.KERNELS, "all optimizers")
    link = ServerSession(
        scheduler, settings.credentials, advertise, settings.server_id, settings.run_id, verifier=verifier
    )
    exporter = None
    try:
        listener = TcpListener(settings.credentials.tls)
        await listener.open(settings.host, settings.data_port)
        left = max(0.0, deadline - asyncio.get_running_loop().time())
        first_map = await _unless(stop, link.register(left))
        if first_map is None:
            return 0
        threads = settings.kernel_threads or default_kernel_threads(first_map, advertise)
        me = link.registration
        host = ParameterServer(
            me, settings.credentials, threads, compiler=compiler, carriers=settings.carriers, lanes=lanes
        )
        logs.identify(id=me.server_id, run=me.run_id, incarnation=me.incarnation)
        if settings.metrics is not None:
            exporter = export_metrics(host, me.run_id, replace(settings.metrics, key=verifier.key))
            link.metrics_address = exporter.address
        # The session adopts the map, because allocating memory for large shards takes longer than the scheduler waits
        # for a registration. Requests wait for the map.
        service = ServerService(host, listener)
        server.add_generic_rpc_handlers((service.handler(guard.admit),))
        probe = await add_standard_services(server, SERVICE, reflects=is_loopback(settings.host))
        await server.start()
        guard.watch(port)
        logger.info(
            "serving",
            address=advertise,
            scheduler=scheduler,
            incarnation=me.incarnation,
            tcp_port=listener.port,
            kernel_threads=threads,
            device=lanes.device.name if lanes is not None else "cpu",
        )
        return await _until_stopped(stop, link, host, service, server, probe, settings.drain_timeout_seconds)
    finally:
        guard.stop()
        if exporter is not None:
            exporter.close()
        compiler.close()
        await link.close()


async def _until_stopped(
    stop: asyncio.Event,
    link: ServerSession,
    host: ParameterServer,
    service: ServerService,
    server: grpc.aio.Server,
    probe: health.HealthServicer,
    drain_timeout_seconds: float,
) -> int:
    session = asyncio.create_task(link.run(host))
    stopped = asyncio.create_task(stop.wait())
    run_ended = asyncio.create_task(link.run_ended.wait())
    readiness = asyncio.create_task(_follow_readiness(link, probe))
    await asyncio.wait({session, stopped, run_ended}, return_when=asyncio.FIRST_COMPLETED)
    code = 0
    if session.done() and (error := session.exception()):
        logger.error("the scheduler ended the membership of this server", reason=str(error))
        code = exit_codes.status_of_ended_run(error)
    if code == 0 and not run_ended.done():
        draining = asyncio.create_task(link.drain(drain_timeout_seconds))
        await asyncio.wait({draining, session}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
    readiness.cancel()
    await probe.enter_graceful_shutdown()
    if code == 0:
        await link.leave("stopped")
    for task in (session, stopped, run_ended):
        task.cancel()
    await asyncio.gather(session, stopped, run_ended, readiness, return_exceptions=True)
    service.disconnect()
    await server.stop(_GRACE_SECONDS)
    await host.close()
    return code


async def _follow_readiness(link: ServerSession, probe: health.HealthServicer) -> None:
    """Keep ``psdist.ready`` up to date, forever."""
    while True:
        link.session_changed.clear()
        await set_ready(probe, ready=link.in_session)
        await link.session_changed.wait()


async def _own_address(settings: ServerSettings, scheduler: str, port: int) -> str:
    """Return the address at which others reach this server.

    Raises SchedulerUnreachableError if the scheduler's name does not resolve; with TLS ServerUnreachableError if this
    server's does not, ConfigurationError if its certificate lacks it: the workers would wait for it forever.
    """
    tls = settings.credentials.tls
    now, pacers = (
        asyncio.get_running_loop().time,
        defaultdict[str, LogPacer](lambda: LogPacer(limits.REPORT_WAIT_SECONDS)),
    )

    def on_failure(reason: str) -> None:
        if pacers[reason].note(now()):
            logger.warning("cannot resolve a name", scheduler=scheduler, reason=reason)

    bound = addresses.format_address(settings.host, port)
    address = await addresses.advertised_address(
        settings.advertise,
        bound,
        scheduler,
        settings.start_timeout_seconds,
        on_failure,
        is_verified=tls is not None,
    )
    if tls is not None:
        tls.require_host(addresses.parse_address(address)[0])
    return address


async def _unless(stop: asyncio.Event, work: Coroutine[None, None, T]) -> T | None:
    """Return the result of ``work``, or None if ``stop`` is set first."""
    working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopped.cancel()


def _stop_on_signals(stop: asyncio.Event, lifeline_fd: int | None) -> None:
    own_process.handle(stop.set)
    if lifeline_fd is not None:
        asyncio.get_running_loop().add_reader(lifeline_fd, _lifeline_broken, stop, lifeline_fd)


def _lifeline_broken(stop: asyncio.Event, lifeline_fd: int) -> None:
    if os.read(lifeline_fd, 1) == b"":
        asyncio.get_running_loop().remove_reader(lifeline_fd)
        stop.set()


# --- metrics ----------------------------------------------------------------------------------------------------------


#: Counters of slices that did not count, which are the values of the label ``reason``.
_UNUSED = ("late", "duplicates", "non_finite", "rejected")


def export_metrics(server: ParameterServer, run_id: str, endpoint: MetricsEndpoint) -> Exporter:
    """Serve the server's metrics. Raises ConfigurationError and InsecureBindError."""
    from psdist.monitoring.exporter import Exporter  # A server without metrics starts without their library.

    return Exporter(
        endpoint, "server", lambda: (run_id, server.me.server_id), lambda found: read_metrics(server, found)
    )


def read_metrics(server: ParameterServer, readings: Readings) -> None:
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
