"""The scheduler's process: settings in, exit status out.

Binds, serves SchedulerService with the standard health service (and reflection on loopback), writes its address into
a file for those that start at the same time, and ends at SIGTERM, at SIGINT, or when the lifeline, a pipe held by its
launcher, ends. Its end changes nothing for the members: they go on, and find their places again when a scheduler with
the same store is back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from pathlib import Path

import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from psdist import logs
from psdist.cli import exit_codes
from psdist.config import SchedulerSettings, is_loopback
from psdist.errors import ConfigurationError, PsdistError
from psdist.wire import channels, limits
from psdist_scheduler.cluster import Cluster
from psdist_scheduler.records import ClusterSettings
from psdist_scheduler.service import SERVICE, Scheduler, Service
from psdist_scheduler.store import Store, open_store

log = logging.getLogger("psdist.scheduler")

_WILDCARDS = ("0.0.0.0", "::", "[::]")
#: Answers in progress may be finished for so long after the end was asked for.
_STOP_SECONDS = 0.25


def main(settings: SchedulerSettings) -> int:
    """Runs the scheduler to its end. Returns the exit status."""
    try:
        store, run_id = open_store(settings.store_path, settings.run_id or f"run-{secrets.token_hex(4)}")
        logs.configure("scheduler", run_id=run_id, log_format=settings.log_format, level=settings.log_level)
        status: int = uvloop.run(_serve(settings, store, run_id))
        return status
    except ConfigurationError as error:
        print(f"psdist-scheduler: {error}", file=sys.stderr)
        return exit_codes.UNAVAILABLE
    except PsdistError as error:
        print(f"psdist-scheduler: {error}", file=sys.stderr)
        return exit_codes.USAGE


async def _serve(settings: SchedulerSettings, store: Store, run_id: str) -> int:
    now = asyncio.get_running_loop().time()
    scheduler = Scheduler(Cluster(_cluster_settings(settings, run_id), store.load(), now), store)
    server = channels.make_server(settings.token, limits.CONTROL_MESSAGE_BYTES)
    server.add_generic_rpc_handlers((Service(scheduler).handler(),))
    await _add_standard_services(server, settings.host)
    try:
        port = channels.bind(server, settings.host, settings.port, settings.insecure)
        await server.start()
        address = settings.advertise or _local_address(settings.host, port)
        return await _until_the_end(settings, scheduler, address)
    finally:
        scheduler.stop()
        await server.stop(_STOP_SECONDS)
        scheduler.close()


async def _until_the_end(settings: SchedulerSettings, scheduler: Scheduler, address: str) -> int:
    """Serves until somebody wants the end, or the store fails."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if settings.lifeline_fd is not None:
        loop.add_reader(settings.lifeline_fd, _watch_lifeline, settings.lifeline_fd, ended)
    waiting = asyncio.create_task(ended.wait())
    working = [asyncio.create_task(scheduler.run()), asyncio.create_task(scheduler.tick())]
    if settings.address_file is not None:
        _write_address(settings.address_file, address)
    log.info("run %s: listening at %s", scheduler.cluster.settings.run_id, address)
    await asyncio.wait([waiting, *working], return_when=asyncio.FIRST_COMPLETED)
    if settings.address_file is not None:
        settings.address_file.unlink(missing_ok=True)
    failures = [task.exception() for task in working if task.done() and not task.cancelled()]
    for task in (waiting, *working):
        task.cancel()
    await asyncio.gather(waiting, *working, return_exceptions=True)
    for failure in failures:
        log.error("the scheduler ends, because it cannot go on safely: %s", failure, exc_info=failure)
    return exit_codes.INFRASTRUCTURE if failures else exit_codes.OK


def _cluster_settings(settings: SchedulerSettings, run_id: str) -> ClusterSettings:
    return ClusterSettings(
        run_id=run_id,
        workers_min=settings.workers_min,
        servers_min=settings.servers_min,
        lease_seconds=settings.failure_timeout_seconds,
        join_grace_seconds=settings.join_grace_seconds,
        replicas=settings.replicas,
    )


async def _add_standard_services(server: grpc.aio.Server, host: str) -> None:
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in ("", SERVICE.full_name):
        await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    if is_loopback(host):
        names = (SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)


def _local_address(host: str, port: int) -> str:
    """Where processes of this machine reach a server that listens at ``host``."""
    return f"{'127.0.0.1' if host in _WILDCARDS else host}:{port}"


def _write_address(path: Path, address: str) -> None:
    """Writes the file in one step: whoever sees it sees all of it."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(f"{address}\n")
    unfinished.replace(path)


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
