"""A real run for chaos tests: scheduler, servers and workers as processes that can be restarted at any time.

Each server can be put behind two proxies, one before the address at which workers and servers reach it and one between
it and the scheduler, or into a network namespace. The output of a process goes into a file of the run's directory.
Nothing outlives ``close``, nor the process that created it: a reaper kills the remaining processes, frozen or not.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from psdist.addresses import free_port, parse_address
from psdist.errors import InternalError, SchedulerUnreachableError
from psdist.launcher.plan import SchedulerAddress, ServicesPlan, ServicesSettings
from psdist.launcher.process import ReaperProcess
from psdist.security.tls import Credentials, TlsFiles
from psdist.settings.config import TLS_VARIABLES, TransportName, read_address
from psdist.v1 import scheduler_pb2, scheduler_pb2_grpc
from psdist.wire import auth, limits
from psdist.wire.channels import open_channel
from tests.support.chaos.faults import WorkerNetwork
from tests.support.chaos.proxy import FaultProxy
from tests.support.chaos.workload import WorkloadSettings
from tests.support.tree import ROOT

_START_SECONDS: Final = 60.0
_STATUS_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.02
_LOOPBACK: Final = "127.0.0.1"
_SETTINGS_FILE: Final = "workload.json"
#: Prefix of a command line that gives a namespace its own shared memory, as on a separate host.
_OWN_MEMORY: Final = ("sh", "-c", 'mount -t tmpfs psdist /dev/shm && exec "$@"', "sh")


class Reach(Enum):
    """Path by which the others reach a server."""

    DIRECT = "direct"
    #: Through proxies of its own.
    PROXY = "proxy"
    #: In a network namespace of its own, as is each worker.
    NAMESPACE = "namespace"


@dataclass(frozen=True, slots=True)
class ChaosClusterSettings:
    """The processes of a chaos run and their connections.

    lease_seconds, worker_lease_seconds: the scheduler's ``--failure-timeout`` and ``--worker-timeout``.
    reach: how servers are reached.
    transport: of workers, and of updates between servers.
    certificates: folder that ``psdist certs init`` made, for TLS; None for plaintext.
    """

    servers: int = 3
    workers: int = 2
    replicas: int = 2
    lease_seconds: float = 2.0
    worker_lease_seconds: float = ServicesSettings.worker_timeout_seconds
    reach: Reach = Reach.DIRECT
    transport: TransportName = "auto"
    certificates: Path | None = None

    def tls(self, role: str) -> TlsFiles | None:
        """Return the identity of a role."""
        if (place := self.certificates) is None:
            return None
        return TlsFiles(place / "ca.pem", place / f"{role}.pem", place / f"{role}-key.pem")

    @property
    def used_transport(self) -> TransportName:
        """``transport``, unless it would bypass the proxies or namespaces of the servers."""
        passes = self.reach is Reach.DIRECT or (self.reach is Reach.NAMESPACE and self.transport == "tcp")
        return self.transport if passes else "grpc"

    @property
    def worker_transport(self) -> TransportName:
        """The workers' ``--transport``. "tcp" would be an error without TCP; these cases test the fallback to gRPC."""
        return "auto" if self.reach is Reach.NAMESPACE and self.transport == "tcp" else self.used_transport


@dataclass(slots=True)
class Process:
    """One process of the run. ``starts`` counts its starts."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    starts: int = 0
    running: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The id of the running process."""
        assert self.running is not None
        return self.running.pid

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return None if self.running is None else self.running.poll()


@dataclass(slots=True)
class Proxies:
    """The proxies of one server: before its own address, and between it and the scheduler."""

    data: FaultProxy
    scheduler: FaultProxy
    addresses: dict[str, str] = field(default_factory=dict)


class ChaosCluster:
    """The processes of one run. ``start`` creates them; ``close`` ends them all."""

    def __init__(self, settings: ChaosClusterSettings, directory: Path, rng: random.Random) -> None:
        self.settings = settings
        self.directory = directory
        self.processes: dict[str, Process] = {}
        #: Processes whose end is being awaited. Whoever waits starts them again.
        self.awaited: set[str] = set()
        self.proxies: dict[str, Proxies] = {}
        self.network: WorkerNetwork | None = None
        self._rng = rng
        self._token = secrets.token_urlsafe(32)
        self._lifeline, self._lifeline_end = os.pipe()
        self._reaper = ReaperProcess()
        self._channel: grpc.aio.Channel | None = None
        host = _LOOPBACK
        if settings.reach is Reach.NAMESPACE:
            self.network = WorkerNetwork(settings.servers + settings.workers)
            host = self.network.gateway
        self.address = f"{host}:{free_port(host)}"

    # --- starting ---

    async def start(self, workload: WorkloadSettings) -> None:
        """Start everything. Raises SchedulerUnreachableError if the scheduler does not come up."""
        for number in range(self.settings.servers):
            await self._add_server(number)
        self._add_scheduler()
        workload.save(self.directory / _SETTINGS_FILE)
        for rank in range(self.settings.workers):
            inside = () if self.network is None else (*self.network.inside(self.host_of_worker(rank)), *_OWN_MEMORY)
            arguments = (str(self.directory / _SETTINGS_FILE), str(rank))
            script = (sys.executable, "-m", "tests.support.chaos.workload", *arguments)
            command = (*inside, *script)
            self.processes[f"worker-{rank}"] = Process(
                f"worker-{rank}", command, self._environment() | self._tls_variables()
            )
        self.launch("scheduler")
        await self.scheduler_up()
        for name in self.processes:
            if name != "scheduler":
                self.launch(name)

    def host_of_worker(self, rank: int) -> int:
        """Return the number of a worker's namespace: those of the servers come first."""
        return self.settings.servers + rank

    def launch(self, name: str) -> Process:
        """Start or restart a process."""
        process = self.processes[name]
        log = self.directory / f"{name}.log"
        with log.open("ab") as output:
            process.running = subprocess.Popen(
                process.command,
                cwd=ROOT,  # Workers run a module of the tests.
                env=process.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(self._lifeline,),
                start_new_session=True,
            )
        process.starts += 1
        self._reaper.add(process.pid)
        return process

    async def scheduler_up(self) -> None:
        """Return when the scheduler answers."""
        file = self.directory / "scheduler"
        deadline = asyncio.get_running_loop().time() + _START_SECONDS
        while not read_address(file) or await self.fetch() is None:
            if asyncio.get_running_loop().time() > deadline or self.processes["scheduler"].status is not None:
                raise SchedulerUnreachableError(f"the scheduler does not come up:\n{self.tail('scheduler')}")
            await asyncio.sleep(_POLL_SECONDS)

    def _plan(self) -> ServicesPlan:
        return ServicesPlan(
            settings=ServicesSettings(
                servers=self.settings.servers,
                replicas=self.settings.replicas,
                failure_timeout_seconds=self.settings.lease_seconds,
                worker_timeout_seconds=self.settings.worker_lease_seconds,
                log_level="info",
            ),
            directory=self.directory,
            link=SchedulerAddress(file=self.directory / "scheduler", insecure=self.network is not None, run_id="chaos"),
            lifeline=self._lifeline,
            workers=self.settings.workers,
            start_timeout_seconds=_START_SECONDS,
        )

    def _environment(self) -> dict[str, str]:
        foreign = ("PSDIST_", "DMLC_", "PET_", "RANK", "WORLD_SIZE")
        # The tests mark their processes with a variable that is not a setting.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign) or "TEST" in name}
        insecure = {} if self.network is None else {"PSDIST_INSECURE": "1"}
        return kept | insecure | {"PSDIST_TOKEN": self._token, "OMP_NUM_THREADS": "1"}

    def _tls_variables(self) -> dict[str, str]:
        """Return the variables of a worker, whose script takes no flags."""
        return dict(zip(TLS_VARIABLES, self._tls_words("worker")[1::2], strict=False))

    def _tls_words(self, role: str) -> tuple[str, ...]:
        if (tls := self.settings.tls(role)) is None:
            return ()
        return ("--tls-ca", str(tls.ca), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key))

    def _add_scheduler(self) -> None:
        host, port = parse_address(self.address)
        spec = self._plan().scheduler(self._environment(), port)
        command = (*spec.argv, "--host", host, *self._insecure(), *self._tls_words("scheduler"))
        self.processes["scheduler"] = Process("scheduler", command, dict(spec.environment))

    async def _add_server(self, number: int) -> None:
        name = f"server-{number}"
        spec = self._plan().server(number, self._environment())
        command = spec.argv
        if self.network is not None:
            host = self.network.address(number)
            # All servers have this machine's name: the scheduler would number them in the order in which they join.
            command = (*self.network.inside(number), *command, "--host", host, "--server-id", name, *self._insecure())
            command = (*command, "--scheduler", self.address)
        elif self.settings.reach is Reach.PROXY:
            port = free_port(_LOOPBACK)
            proxies = self.proxies[name] = Proxies(
                FaultProxy((_LOOPBACK, port), self._rng), FaultProxy(parse_address(self.address), self._rng)
            )
            data, scheduler = await proxies.data.start(), await proxies.scheduler.start()
            command = (*command, "--port", str(port), "--advertise", data, "--scheduler", scheduler)
        command = (*command, "--transport", self.settings.used_transport, *self._tls_words("server"))
        self.processes[name] = Process(name, command, dict(spec.environment))

    def _insecure(self) -> tuple[str, ...]:
        return () if self.network is None else ("--insecure",)

    # --- observing ---

    async def fetch(self) -> scheduler_pb2.GetStatusResponse | None:
        """Return the scheduler's report; None if it does not answer within a second."""
        if self._channel is None:
            self._channel = open_channel(
                self.address, Credentials(tls=self.settings.tls("admin")), limits.CONTROL_MESSAGE_BYTES
            )
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        try:
            answer: scheduler_pb2.GetStatusResponse = await stub.GetStatus(
                scheduler_pb2.GetStatusRequest(), metadata=auth.metadata(self._token), timeout=_STATUS_SECONDS
            )
        except grpc.aio.AioRpcError:
            return None
        return answer

    async def ended(self, name: str, seconds: float) -> int:
        """Wait for the end of a process. Returns its exit status. Raises InternalError if it does not end."""
        deadline = asyncio.get_running_loop().time() + seconds
        self.awaited.add(name)
        try:
            while (status := self.processes[name].status) is None:
                if asyncio.get_running_loop().time() > deadline:
                    raise InternalError(f"{name} did not end within {seconds:g} s:\n{self.tail(name)}")
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            self.awaited.remove(name)
        self._reaper.remove(self.processes[name].pid)
        return status

    def tail(self, name: str, lines: int = 12) -> str:
        """Return the last lines that a process printed."""
        path = self.directory / f"{name}.log"
        text = path.read_text("utf-8", "replace") if path.exists() else ""
        return "\n".join(f"  {name}: {line}" for line in text.splitlines()[-lines:])

    # --- the end ---

    async def close(self) -> None:
        """Kill all processes, and remove the network namespaces. The directory stays."""
        for process in self.processes.values():
            if process.running is not None and process.status is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
        for process in self.processes.values():
            if process.running is not None:
                process.running.wait()
        for proxies in self.proxies.values():
            await proxies.data.close()
            await proxies.scheduler.close()
        if self._channel is not None:
            await self._channel.close()
        if self.network is not None:
            self.network.close()
        self._reaper.close()
        os.close(self._lifeline)
        os.close(self._lifeline_end)
