"""Arguments of ``psdist.ray.run``, and actors of a run: a scheduler or server as a child process, and a worker that
calls the training function.

Everything that an actor needs is an argument of its constructor, so an actor that Ray restarts, perhaps on another
node, starts its process again: under its old server id, or with the scheduler's old port and store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Final

import ray
from ray.util.metrics import Gauge

import psdist
from psdist.addresses import is_loopback, loopback, parse_address
from psdist.client import context
from psdist.errors import ConfigurationError
from psdist.launcher.plan import SchedulerAddress, program
from psdist.launcher.process import Lifeline
from psdist.launcher.run_metrics import MetricsReceiver
from psdist.monitoring.metrics import WorkerInterval, summarize
from psdist.security.tls import TlsFiles
from psdist.settings.config import check_run_id
from psdist.settings.exit_codes import Role, statuses
from psdist.settings.flags import arguments
from psdist.settings.programs import SchedulerSettings, ServerSettings
from psdist.snapshots.policy import parse_interval
from psdist.wire.limits import OUTPUT_LINE_BYTES_MAX, REPLICAS_MAX, WORLD_MAX


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """Arguments of ``psdist.ray.run``, which describes them. Raises ConfigurationError for values out of range.

    machine: address of the cluster's only machine, on whose loopback the run then is; empty for a run in a network.
    """

    run_id: str
    num_workers: int
    num_servers: int
    replicas: int
    resources_per_worker: Mapping[str, float]
    resources_per_server: Mapping[str, float]
    storage_path: str | None
    save_interval: str | None
    max_restarts: int
    placement_timeout: float
    certs: Path | None
    insecure: bool
    machine: str = ""

    def __post_init__(self) -> None:
        check_run_id(self.run_id)
        _check_count("num_workers", self.num_workers, 1, WORLD_MAX)
        _check_count("num_servers", self.num_servers, 1, 1024)
        _check_count("replicas", self.replicas, 1, REPLICAS_MAX)
        _check_count("max_restarts", self.max_restarts, 0, 1_000_000)
        if self.replicas > self.num_servers:
            raise ConfigurationError(
                f"replicas={self.replicas} needs at least as many servers, not num_servers={self.num_servers}: copies "
                "of a shard are on different servers"
            )
        if not self.placement_timeout > 0:
            raise ConfigurationError(
                f"placement_timeout={self.placement_timeout!r:.40} is not possible: pass seconds above 0"
            )
        if self.save_interval is not None and self.storage_path is None:
            raise ConfigurationError(
                f"save_interval={self.save_interval!r:.40} has no effect without snapshots: pass storage_path="
            )
        if self.save_interval is not None:
            _interval(self.save_interval)
        path = self.storage_path
        if path is not None and "://" not in path and not Path(path).is_absolute():
            raise ConfigurationError(
                f"storage_path={path!r:.200} is relative, and actors have working directories of their "
                "own: pass an absolute path that all nodes share, or a URL such as s3://bucket/run"
            )
        if self.certs is not None and self.insecure:
            raise ConfigurationError("certs= encrypts and insecure=True does not: pass one of them")
        _check_resources("resources_per_worker", self.resources_per_worker)
        _check_resources("resources_per_server", self.resources_per_server)

    def on_nodes(self, hosts: set[str]) -> RaySettings:
        """Return these settings for a cluster. On one machine nothing leaves it, without certificates and permission.

        hosts: addresses of the cluster's nodes.

        Raises ConfigurationError if bytes would leave a machine unencrypted without the user's consent.
        """
        is_private = self.certs is not None or self.insecure
        if not is_private and len(hosts) == 1:
            return replace(self, machine=next(iter(hosts)))
        if not is_private and not all(map(is_loopback, hosts)):
            raise ConfigurationError(
                f"the nodes {', '.join(sorted(hosts)[:5])} reach each other over a network, and nothing would be "
                "encrypted: pass certs=, a folder that psdist certs wrote and that all nodes have, or insecure=True "
                "if the network is private"
            )
        return self

    def host(self, node: str) -> str:
        """Return the host for a process of the run on a node. Raises ConfigurationError for a node of another machine
        than that of the run.

        node: its address.
        """
        if not self.machine:
            return node
        if node != self.machine:
            raise ConfigurationError(
                f"the node {node} joined the cluster after the run had begun on {self.machine} alone: pass certs= or "
                "insecure=True, so that the run uses the network"
            )
        return loopback()

    def tls(self, role: str) -> TlsFiles | None:
        """Return the identity of a role, from the folder that ``psdist certs`` wrote; None without TLS."""
        if self.certs is None:
            return None
        return TlsFiles(self.certs / "ca.pem", self.certs / f"{role}.pem", self.certs / f"{role}-key.pem")

    def environment(self, role: str, token: str, scheduler: str, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process: ``base``, with this run in place of any other.

        scheduler: its address.
        """
        link = SchedulerAddress(scheduler, tls=self.tls(role), insecure=self.insecure, run_id=self.run_id)
        return link.environment(base) | {"PSDIST_TOKEN": token}

    def scheduler(self, host: str, port: int, store: Path, lifeline: int) -> tuple[str, ...]:
        """Return the scheduler's command line."""
        flags = arguments(
            SchedulerSettings, None, host=host, port=port, insecure=self._insecure(host), lifeline_fd=lifeline,
            run_id=self.run_id, store=store, storage_path=self.storage_path, workers_min=self.num_workers,
            servers_min=self.num_servers, replicas=self.replicas,
            save_interval=None if self.save_interval is None else _interval(self.save_interval),
        )  # fmt: skip
        return (*program("psdist_scheduler"), *flags)

    def server(self, number: int, host: str, scheduler: str, lifeline: int) -> tuple[str, ...]:
        """Return the command line of a server. A restarted one has the same id."""
        flags = arguments(
            ServerSettings, None, host=host, insecure=self._insecure(host), lifeline_fd=lifeline,
            run_id=self.run_id, scheduler=scheduler, server_id=f"server-{number}",
        )  # fmt: skip
        return (*program("psdist_server"), *flags)

    def _insecure(self, host: str) -> bool:
        return self.certs is None and not is_loopback(host)


def _interval(text: str) -> tuple[int, float]:
    try:
        return parse_interval(text)
    except ValueError as error:
        raise ConfigurationError(f"save_interval={text!r:.40} is not possible: {error}") from None


def _check_count(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigurationError(f"{name}={value!r:.40} is not possible: pass a whole number from {least} to {most}")


def _check_resources(name: str, resources: Mapping[str, float]) -> None:
    for resource, amount in resources.items():
        if not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
            raise ConfigurationError(
                f"{name}={{{resource!r:.40}: {amount!r:.40}}} is not possible: pass a number from 0 on"
            )
    if not any(resources.values()):
        raise ConfigurationError(f'{name} reserves nothing: pass an amount above 0, such as {{"CPU": 1}}')


#: Lines of a process that are quoted if it ends by an error.
_LAST_LINES: Final = 20
#: A process that exits by itself within this time of its first start has a cause that restarts do not mend.
_FIRST_START_SECONDS: Final = 30.0
#: Longest wait for a process to end after SIGTERM.
_STOP_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a scheduler or server for good. status: its exit status. lines: its last lines."""

    status: int
    lines: tuple[str, ...]


class _Service:
    """A scheduler or server as a child process.

    The actor ends with a process that should be restarted, because Ray then restarts the actor. It stays alive after a
    process that ended for good, for ``outcome``.
    """

    def __init__(self, role: Role, command: Callable[[int], tuple[str, ...]], environment: Mapping[str, str]) -> None:
        self._role = role
        self._environment = {**environment, "PSDIST_LOG_FORMAT": "console"}
        self._started = time.monotonic()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._is_stopping = False
        self._ended = threading.Event()
        self._lifeline = Lifeline()
        self._process = subprocess.Popen(
            command(self._lifeline.end_of_children),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            pass_fds=(self._lifeline.end_of_children,),
            start_new_session=True,  # A signal for the actor's group is none for the process.
        )
        self._lifeline.started()
        threading.Thread(target=self._follow, daemon=True).start()

    def outcome(self) -> Ended:
        """Wait for the end of the process, and return it. It does not return if Ray restarts the actor."""
        self._ended.wait()
        return Ended(self._process.returncode, tuple(self._lines))

    def stop(self) -> Ended:
        """End the process in order."""
        self._is_stopping = True
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        if not self._ended.wait(_STOP_SECONDS):
            self._process.kill()
        return self.outcome()

    def _follow(self) -> None:
        """Pass the lines of the process on to Ray's log, until it ends."""
        assert self._process.stdout is not None
        for line in _lines(self._process.stdout):
            self._lines.append(line)
            print(line, flush=True)
        status = self._process.wait()
        if not self._is_stopping and self._should_restart(status):
            print(f"the {self._role} ended with exit status {status}: Ray restarts it", flush=True)
            os._exit(1)
        self._ended.set()

    def _should_restart(self, status: int) -> bool:
        """True unless the process ended for good. A storage or a port that fails the first start fails others, too."""
        if status < 0:
            return True
        is_first = not ray.get_runtime_context().was_current_actor_reconstructed
        if is_first and time.monotonic() - self._started < _FIRST_START_SECONDS:
            return False
        return status in statuses(self._role, "restart")


def _lines(stream: IO[bytes]) -> Iterator[str]:
    while line := stream.readline(OUTPUT_LINE_BYTES_MAX):
        yield line.decode("utf-8", "replace").rstrip()


class SchedulerActor(_Service):
    """The scheduler. A restarted actor, on the same node, finds its store again.

    directory: of the store, with a name that nobody can guess, so nobody else has made it.
    """

    def __init__(self, settings: RaySettings, address: str, directory: Path, token: str) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory = directory
        host, port = parse_address(address)
        super().__init__(
            "scheduler",
            lambda lifeline: settings.scheduler(host, port, directory / "scheduler.sqlite", lifeline),
            settings.environment("scheduler", token, address, os.environ),
        )

    def delete_store(self) -> None:
        """Kill the scheduler if it still runs, and delete its store."""
        self._is_stopping = True  # Ray should not restart it.
        self._process.kill()
        self._ended.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def save(self) -> str:
        """Save a snapshot. Returns the reason if that failed, otherwise an empty text."""
        saved = subprocess.run(
            (*program("psdist.launcher.scheduler_calls"), "save"), env=self._environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        print(saved.stdout, saved.stderr, sep="", end="", flush=True)
        return "" if saved.returncode == 0 else (saved.stdout + saved.stderr).strip().rpartition("\n")[2]


class ServerActor(_Service):
    """A server. scheduler: the address of the scheduler."""

    def __init__(self, settings: RaySettings, number: int, scheduler: str, token: str) -> None:
        host = settings.host(ray.util.get_node_ip_address())
        super().__init__(
            "server",
            lambda lifeline: settings.server(number, host, scheduler, lifeline),
            settings.environment("server", token, scheduler, os.environ),
        )


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker's place in the run.

    local_rank, local_world_size: its number among the workers of its node at the start, and how many these are.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True, slots=True)
class Returned:
    """End of a worker. value: what its function returned. metrics: its last reported values, by name."""

    value: Any
    metrics: Mapping[str, float] = field(default_factory=dict)


class WorkerActor:
    """A worker. A restarted actor calls the function again, which joins the run under the same rank.

    scheduler: the address of the scheduler.
    """

    def __init__(self, settings: RaySettings, scheduler: str, token: str) -> None:
        settings.host(ray.util.get_node_ip_address())  # Raises on a node that this run cannot use.
        self._settings = settings
        self._scheduler = scheduler
        self._token = token

    def node(self) -> str:
        """Return the id of the actor's node."""
        return str(ray.get_runtime_context().get_node_id())

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], place: WorkerPlace) -> Returned:
        """Call the function as a worker of the run, which it joins by ``psdist.init()``."""
        environment = self._settings.environment("worker", self._token, self._scheduler, os.environ)
        environment |= {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
        }
        with _Reports(place.rank) as reports:
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment | reports.environment)
            try:
                value = function(*arguments)
            finally:
                if context.is_open():
                    psdist.init().close()
        return Returned(value, reports.last)


class _Reports:
    """The values that a worker reports, shown as gauges in Ray's metrics. last: the newest ones by name."""

    def __init__(self, rank: int) -> None:
        self.last: dict[str, float] = {}
        self._tags = {"rank": str(rank)}
        self._gauge = Gauge("psdist_report", "value that a script reported", tag_keys=("name", "rank"))
        self._receiver = MetricsReceiver(self._show, lambda error: print(error.message, flush=True))
        self.environment = self._receiver.environment
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> _Reports:
        self._loop.call_soon(self._receiver.start)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._receiver.close()
        self._loop.close()

    def _show(self, interval: WorkerInterval) -> None:
        self.last.update(summarize([interval]))
        for name, value in self.last.items():
            with contextlib.suppress(ValueError):  # Ray refuses some values, and training continues.
                self._gauge.set(value, {**self._tags, "name": name})
