"""The scheduler's process: settings in, exit status out.

It binds, serves SchedulerService with the standard health service (and reflection on loopback), and writes its address
into a file for processes that start at the same time. It ends at SIGTERM, at SIGINT, or when the lifeline, a pipe held
by its launcher, breaks. This changes nothing for the members: they continue, and rejoin when a scheduler with the same
store is back. With ``--idle-timeout`` it also ends, and its servers before it, when no worker is left.

Here are also the choice of the store (a file, memory, or a prefix in etcd, whose leader it becomes), and the metrics
for Prometheus, read from the state of the machine when a scraper asks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import select
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import uvloop
from grpc_health.v1 import health

from psdist import addresses, logs
from psdist.addresses import is_loopback
from psdist.errors import ConfigurationError, LeadershipLostError, PsdistError, StorageError
from psdist.machine import make_directory
from psdist.monitoring.dashboard import dashboard_link, make_key, require_dashboard, view_key
from psdist.settings import exit_codes, own_process
from psdist.settings.config import DashboardEndpoint, EtcdLocation, MetricsEndpoint
from psdist.settings.programs import SchedulerSettings
from psdist.snapshots.opening import DirectoryClaim, open_storage
from psdist.snapshots.storage import Storage
from psdist.wire import channels, limits
from psdist.wire.auth import ConnectionGuard
from psdist.wire.services import add_standard_services, set_ready
from psdist_scheduler.decide.cluster import Cluster
from psdist_scheduler.decide.cluster_events import Stop
from psdist_scheduler.decide.cluster_state import ClusterSettings, StoredState
from psdist_scheduler.decide.effects import Done, EventKind
from psdist_scheduler.decide.parameter_sets import ParameterSet
from psdist_scheduler.decide.snapshot_events import History
from psdist_scheduler.run_status import SummaryKeeper, SummaryWriter, load
from psdist_scheduler.run_store import SqliteStore, Store
from psdist_scheduler.scheduler import Scheduler
from psdist_scheduler.service import SERVICE, Service
from psdist_scheduler.snapshot_io import check_fresh, check_readable, check_writable, read_history

if TYPE_CHECKING:
    from psdist.monitoring.exporter import Exporter, Readings
    from psdist.security.tls import TlsFiles
    from psdist_scheduler.dashboard import DashboardServer

logger = logging.getLogger("psdist.scheduler")

#: Grace period in seconds for answers in progress at the end.
_STOP_SECONDS = 0.25
#: Time in seconds for which a run that cannot continue is answered: members whose sessions broke retry at least every
#: second.
_FAREWELL_SECONDS = 5.0


def main(settings: SchedulerSettings) -> int:
    """Run the scheduler to its end. Returns the exit status."""
    channels.raise_open_files_limit()
    logs.configure("scheduler", run_id=settings.run_id, log_format=settings.log_format, level=settings.log_level)
    try:
        store, run_id = open_store(
            settings.store_place,
            settings.run_id,
            partial(_new_run_id, settings.storage),
            optional=settings.store_optional,
            standby=settings.standby,
            wait=partial(_wait, settings.lifeline_fd),
            tls=settings.credentials.tls,
        )
        logs.identify(run=run_id)
        status: int = uvloop.run(own_process.ignored_after(_serve(settings, store, run_id)))
        return status
    except (ConfigurationError, StorageError) as error:
        print(f"psdist-scheduler: {error}", file=sys.stderr)
        return exit_codes.UNAVAILABLE
    except PsdistError as error:
        print(f"psdist-scheduler: {error}", file=sys.stderr)
        return exit_codes.USAGE


async def _serve(settings: SchedulerSettings, store: Store, run_id: str) -> int:
    stored = store.load()
    try:
        opened = await _open_storage(settings, run_id, stored)
        claim = _claim(opened.storage, run_id)
    except ConfigurationError as error:
        print(f"psdist-scheduler: {error}", file=sys.stderr)
        return exit_codes.USAGE  # The storage belongs to another run, also at the next start.
    try:
        return await _serve_run(settings, store, run_id, stored, opened)
    finally:
        claim.release()


async def _serve_run(
    settings: SchedulerSettings, store: Store, run_id: str, stored: StoredState | None, opened: _Opened
) -> int:
    now = asyncio.get_running_loop().time()
    cluster = Cluster(_cluster_settings(settings, run_id, opened), stored, now, opened.history)
    scheduler = Scheduler(cluster, store, opened.storage)
    scheduler.reports.certificate_not_after = settings.credentials.certificate_not_after
    writer = await _keep_summary(scheduler, opened)
    writing = asyncio.create_task(writer.run() if writer is not None else asyncio.sleep(0))
    for text in opened.history.skipped if opened.history is not None else ():
        logger.warning("skipped unreadable snapshot: %s", text)
    guard = ConnectionGuard()
    server = channels.make_server(
        settings.credentials, limits.CONTROL_MESSAGE_BYTES, silence_seconds=cluster.settings.silence_seconds
    )
    server.add_generic_rpc_handlers((Service(scheduler, settings.credentials.token).handler(guard.admit),))
    probe = await add_standard_services(server, SERVICE, reflects=is_loopback(settings.host))
    readiness = asyncio.create_task(_follow_readiness(scheduler, probe))
    exporter = dashboard = None
    try:
        if settings.metrics is not None:
            pass  # A run without metrics starts without their library.

            exporter = export_metrics(scheduler, settings.metrics)
        if settings.dashboard is not None:
            dashboard = _serve_dashboard(scheduler, settings.dashboard, optional=stored is not None)
        port = channels.bind(server, settings.host, settings.port, settings.credentials)
        await server.start()
        guard.watch(port)
        address = settings.advertise or _own_address(settings.host, port)
        return await _until_the_end(settings, scheduler, address)
    finally:
        guard.stop()
        readiness.cancel()
        writing.cancel()
        if writer is not None:
            await writer.write_last()
        if exporter is not None:
            exporter.close()
        if dashboard is not None:
            dashboard.close()
        scheduler.stop()
        await server.stop(_STOP_SECONDS)
        scheduler.close()


async def _keep_summary(scheduler: Scheduler, opened: _Opened) -> SummaryWriter | None:
    """Keep a summary of the run, and continue the one in its storage.

    Returns its writer; None if the run saves nothing.
    """
    run_id, storage = scheduler.cluster.settings.run_id, opened.storage
    previous = await load(storage, run_id) if storage is not None else None
    keeper = scheduler.reports.summary = SummaryKeeper(run_id, time.time(), previous)
    policy = scheduler.cluster.settings.policy
    if storage is None or not (policy.steps or policy.seconds or policy.at_end):
        return None  # A run that saves nothing leaves no files.

    def document(last: bool) -> bytes | None:
        if last:
            scheduler.reports.tick(scheduler.cluster, scheduler.time(), last=True)
        failed = scheduler.cluster.failed
        state = "lost" if failed is not None else "ended" if scheduler.has_ended else "stopped" if last else "running"
        return None if keeper.is_empty else scheduler.summary(state, str(failed or ""))

    return SummaryWriter(storage, run_id, document)


def _serve_dashboard(scheduler: Scheduler, endpoint: DashboardEndpoint, *, optional: bool) -> DashboardServer | None:
    """Serve the dashboard of a run until it is closed.

    optional: if the port cannot be bound, warn and return None, as the scheduler of a run that trains already.
    Otherwise raises ConfigurationError and InsecureBindError.
    """
    require_dashboard()
    from psdist_scheduler import dashboard  # It needs the libraries of an extra.

    settings = scheduler.cluster.settings

    def read(after: int) -> dashboard.Reading:
        began = time.perf_counter()
        status, samples = scheduler.status(), scheduler.reports.samples.after(after)
        curves = scheduler.reports.summary.curves() if scheduler.reports.summary is not None and not after else None
        return dashboard.Reading(status, samples, time.perf_counter() - began, curves)

    try:
        if endpoint.key_file is not None:
            make_key(endpoint.key_file)
        key = view_key(endpoint.credentials.token, settings.run_id)
        server = dashboard.DashboardServer(endpoint, key, read)
    except ConfigurationError as error:
        if not optional:
            raise
        logger.warning("the run continues without its dashboard: %s", error)
        return None
    scheduler.reports.dashboard_address = server.address
    logger.info("dashboard: %s", dashboard_link(server.address, "", secure=server.is_secure))
    return server


async def _follow_readiness(scheduler: Scheduler, probe: health.aio.HealthServicer) -> None:
    """Keep ``psdist.ready`` up to date, forever."""
    while True:
        await set_ready(probe, ready=scheduler.cluster.is_ready)
        await asyncio.sleep(scheduler.cluster.settings.tick_seconds)


async def _until_the_end(settings: SchedulerSettings, scheduler: Scheduler, address: str) -> int:
    """Serve until the end is requested, the run is over, or the store fails."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    own_process.handle(ended.set)
    if settings.lifeline_fd is not None:
        loop.add_reader(settings.lifeline_fd, _watch_lifeline, settings.lifeline_fd, ended)
    waiting = asyncio.create_task(ended.wait())
    over = asyncio.create_task(_end_when_idle(scheduler))
    failed = asyncio.create_task(_end_when_failed(scheduler))
    working = [asyncio.create_task(one) for one in (scheduler.run(), scheduler.tick(), scheduler.watch())]
    if settings.address_file is not None:
        _write_address(settings.address_file, address)
    logger.info("run %s: listening at %s", scheduler.cluster.settings.run_id, address)
    await asyncio.wait([waiting, over, failed, *working], return_when=asyncio.FIRST_COMPLETED)
    if waiting.done() and not over.done():
        over.cancel()
        ended.clear()
        saving, again = asyncio.create_task(_save_at_end(scheduler)), asyncio.create_task(ended.wait())
        await asyncio.wait([saving, again, *working], return_when=asyncio.FIRST_COMPLETED)
        saving.cancel()
        again.cancel()
        await asyncio.gather(saving, again, return_exceptions=True)
    if settings.address_file is not None:
        settings.address_file.unlink(missing_ok=True)
    done = [task for task in (over, *working) if task.done() and not task.cancelled()]
    failures = [error for task in done if (error := task.exception())]
    lost = scheduler.cluster.failed
    scheduler.has_ended = not failures and lost is None and (over in done or scheduler.all_have_left)
    for task in (waiting, over, failed, *working):
        task.cancel()
    await asyncio.gather(waiting, over, failed, *working, return_exceptions=True)
    for failure in failures:
        place = None if isinstance(failure, LeadershipLostError) else failure  # That one is no defect.
        logger.error("the scheduler exits because it cannot continue safely: %s", failure, exc_info=place)
    if failures:
        deposed = any(isinstance(failure, LeadershipLostError) for failure in failures)
        return exit_codes.UNAVAILABLE if deposed else exit_codes.INFRASTRUCTURE
    return exit_codes.OK if lost is None else exit_codes.status_of_ended_run(lost)


async def _end_when_idle(scheduler: Scheduler) -> None:
    """Return when the run is over, everything is saved, and servers have exited. A signal ends this.

    The run continues while a worker is back, or if the snapshot fails.
    """
    while True:
        await scheduler.is_over.wait()
        logger.info("idle timeout reached (--idle-timeout): the run ends, and the servers with it")
        try:
            return await _save_at_end(scheduler, servers=True)
        except PsdistError as error:
            logger.warning("the run continues after the idle timeout: %s", error)
            scheduler.is_over.clear()


async def _end_when_failed(scheduler: Scheduler) -> None:
    """Return when the run cannot continue, and members have had time to be notified."""
    while True:
        await asyncio.sleep(scheduler.cluster.settings.tick_seconds)
        if scheduler.cluster.failed is not None:
            return await asyncio.sleep(_FAREWELL_SECONDS)


async def _save_at_end(scheduler: Scheduler, servers: bool = False) -> None:
    """Return when the training progress is saved and, with ``servers``, these have exited.

    Another signal, or the machine's patience, ends this. Raises PsdistError if nothing is saved.
    """
    with scheduler.calls.call() as (number, outbox):
        scheduler.post(Stop(number, servers))
        async for value in outbox:
            if isinstance(value, Done):
                return


def _new_run_id(storage: str) -> str:
    """Return a run id for a run without a name: that of the snapshots in the storage, which it resumes, or a new one.

    Raises StorageError.
    """
    history = asyncio.run(read_history(open_storage(storage))) if storage else None
    return history.commits[0].run_id if history and history.commits else f"run-{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class _Opened:
    """The opened storage.

    storage: the run's storage; None if it has none.
    history: its content; None if that is not known yet.
    unwritable: why nothing is saved there, if the run continues without snapshots.
    """

    storage: Storage | None = None
    history: History | None = None
    unwritable: str = ""


async def _open_storage(settings: SchedulerSettings, run_id: str, stored: StoredState | None) -> _Opened:
    """Open and read the run's storage, and test whether it can be written.

    A restarted scheduler continues if that fails. A new one does not, unless it is a default storage that nobody asked
    for. Raises StorageError and ConfigurationError.
    """
    if not settings.storage:
        return _Opened()
    storage = open_storage(settings.storage)
    restore = stored.base.restore if stored is not None else None
    found, refusal = await asyncio.gather(
        read_history(storage, run_id, restore.directory if restore is not None else ""),
        check_writable(storage),
        return_exceptions=True,
    )
    unwritable = _judge(settings, refusal, begins=stored is None)
    if isinstance(found, StorageError) and (stored is not None or unwritable):
        after = "the run starts without its snapshots" if stored is None else "will be read again later"
        logger.warning("the storage cannot be read, and %s: %s", after, found)
        return _Opened(storage, History() if stored is None else None, unwritable)
    if isinstance(found, BaseException):
        raise found
    if stored is None and settings.fresh:
        check_fresh(found, storage.url)
    if stored is None:
        check_readable(found, storage.url)
    return _Opened(storage, found, unwritable)


def _claim(storage: Storage | None, run_id: str) -> DirectoryClaim:
    """Claim the storage for this run, if it is a directory.

    Another scheduler of the same run is only warned about: this one may replace it, and then it is frozen or cut off.
    Raises ConfigurationError if another run holds the claim.
    """
    directory = storage.url if storage is not None and os.path.isabs(storage.url) else ""
    claim = DirectoryClaim(directory, run_id)
    holder = claim.take() if directory else None
    if holder is None:
        return claim
    by = f"process {holder.pid} on {holder.host}"
    if holder.run_id != run_id:
        raise ConfigurationError(
            f"the storage {directory} is in use by the run {holder.run_id!r} ({by}), whose snapshots would be mixed "
            f"with those of {run_id!r}: pass another --storage-path, or end that run",
            run_id=holder.run_id,
        )
    logger.warning(
        "another scheduler of this run (%s) uses the storage %s, too: end it if it does not end by itself",
        by, directory,
    )  # fmt: skip
    return claim


def _judge(settings: SchedulerSettings, refusal: BaseException | None, *, begins: bool) -> str:
    """Return why the run continues without snapshots, because the storage cannot be written; empty if it takes them.

    Raises ``refusal`` if the run must not continue.
    """
    if refusal is None:
        return ""
    if not isinstance(refusal, StorageError):
        raise refusal
    if settings.storage_optional:
        logger.warning("no snapshots are taken, and training continues without: %s", refusal)
        return f"no snapshot can be taken: {refusal.message}"
    if begins:
        raise StorageError(f"{refusal.message}. With --storage-path none a run takes no snapshots") from None
    logger.warning("the storage cannot be written now; the next snapshot tries again: %s", refusal)
    return ""


def _cluster_settings(settings: SchedulerSettings, run_id: str, opened: _Opened) -> ClusterSettings:
    policy = settings.policy
    if opened.unwritable:
        policy = replace(policy, steps=0, seconds=0.0, at_end=False)
    return ClusterSettings(
        run_id=run_id,
        workers_min=settings.workers_min,
        servers_min=settings.servers_min,
        lease_seconds=settings.failure_timeout_seconds,
        worker_lease_seconds=math.inf if settings.suspend_time_limits else settings.worker_timeout_seconds,
        time_limits_suspended=settings.suspend_time_limits,
        join_grace_seconds=settings.join_grace_seconds,
        replicas=settings.replicas,
        storage=opened.storage.url if opened.storage is not None else "",
        unwritable=opened.unwritable,
        policy=policy,
        idle_timeout_seconds=settings.idle_timeout_seconds,
        start_timeout_seconds=settings.start_timeout_seconds,
        salt=secrets.token_hex(6),
        store=str(settings.store_place) if settings.store_optional and settings.store_place is not None else "",
    )


def _own_address(host: str, port: int) -> str:
    """Return the address at which others reach a scheduler that listens at ``host``."""
    return addresses.format_address(addresses.own_address() if addresses.is_wildcard(host) else host, port)


def _write_address(path: Path, address: str) -> None:
    """Write the file atomically. Raises ConfigurationError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(f"{address}\n")
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise ConfigurationError(
            f"the address file {path} cannot be written: {error.strerror}. Choose another --address-file, or free some "
            "space there (psdist run: set TMPDIR to a directory on another disk)"
        ) from None


def _wait(lifeline_fd: int | None, seconds: float) -> None:
    """Wait, unless the lifeline breaks: then the process ends."""
    broken, _, _ = select.select([] if lifeline_fd is None else [lifeline_fd], [], [], seconds)
    if broken:
        raise SystemExit(exit_codes.OK)


def _watch_lifeline(fd: int, ended: asyncio.Event) -> None:
    try:
        held = os.read(fd, 4096)
    except BlockingIOError:
        return
    except OSError:
        held = b""
    if not held:
        asyncio.get_running_loop().remove_reader(fd)
        ended.set()


# --- store ------------------------------------------------------------------------------------------------------------


def open_store(
    place: Path | EtcdLocation | None,
    run_id: str,
    new_run_id: Callable[[], str],
    *,
    optional: bool = False,
    standby: bool = False,
    wait: Callable[[float], None] = time.sleep,
    tls: TlsFiles | None = None,
) -> tuple[Store, str]:
    """Open the store at ``place`` (None: memory). Returns it with the run's name.

    That is ``run_id`` or, if that is empty, the store's or ``new_run_id()``.

    optional: True to use memory if the directory cannot be created or written.
    standby: True to wait, in etcd, until no other scheduler leads the run. False waits only as long as the lease of one
        that has died may last.
    wait: waits some seconds, or raises what ends the process.
    tls: identity for etcd, if the place needs one.

    Raises ConfigurationError, StorageError; SystemExit if the run ended in order while this process waited.
    """
    if isinstance(place, EtcdLocation):
        from psdist_scheduler.etcd_store import open_etcd_store  # Other runs start without it.

        held = open_etcd_store(place, tls if place.secure else None, run_id, new_run_id, standby=standby, wait=wait)
        return held, held.run_id
    if place is not None and optional and (refusal := _make_directory(place.parent)):
        logger.warning(
            "this scheduler cannot be restarted without losing the run (choose a file with --store): %s", refusal
        )
        place = None
    if place is None:
        return Store(), run_id or new_run_id()
    store = SqliteStore(place, run_id, new_run_id)
    return store, store.run_id


def _make_directory(path: Path) -> str:
    """Create a directory for stores, for this user only. Returns why it cannot be used; empty if it can."""
    try:
        make_directory(path, 0o700)
    except OSError as error:
        return f"{path} cannot be made: {error.strerror}"
    return "" if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written"


# --- metrics ----------------------------------------------------------------------------------------------------------


def export_metrics(scheduler: Scheduler, endpoint: MetricsEndpoint) -> Exporter:
    """Serve the scheduler's metrics, and the metrics ports of the whole run. Raises ConfigurationError and
    InsecureBindError."""
    from psdist.monitoring.exporter import Exporter, target  # A run without metrics starts without their library.

    run_id, has_tls = scheduler.cluster.settings.run_id, endpoint.credentials.tls is not None

    def targets() -> list[dict[str, Any]]:
        own = target(exporter.address, run_id, "scheduler", "", has_tls=has_tls)
        return [own, *_member_targets(scheduler, run_id, has_tls=has_tls)]

    exporter = Exporter(
        endpoint, "scheduler", lambda: (run_id, ""), lambda found: read_metrics(scheduler, found), targets
    )
    scheduler.reports.metrics_address = exporter.address
    return exporter


def _member_targets(scheduler: Scheduler, run_id: str, *, has_tls: bool) -> list[dict[str, Any]]:
    from psdist.monitoring.exporter import target

    metrics_addresses = {member: report.metrics_address for member, report in scheduler.reports.by_member.items()}
    return [
        target(address, run_id, member.role, member.member_id, has_tls=has_tls)
        for member in scheduler.cluster.members.all
        if member.live and (address := metrics_addresses.get(member.member_id, ""))
    ]


def read_metrics(scheduler: Scheduler, readings: Readings) -> None:
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
