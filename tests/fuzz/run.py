"""A live run to fuzz: scheduler, two servers and a trainer as processes, and a member of this process to speak for.

Each process writes to a log of its own, in which tracebacks are looked for. All of them serve their HTTP ports.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from grpc.aio import AioRpcError, Channel
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import psdist
from psdist.errors import SchedulerUnreachableError
from psdist.launcher.plan import SchedulerAddress, ServicesPlan, ServicesSettings
from psdist.launcher.process import Lifeline, ProcessSpec
from psdist.monitoring.dashboard import listen
from psdist.security.roles import Role, service_name
from psdist.security.tls import Credentials, TlsFiles
from psdist.security.tokens import Audience
from psdist.settings.config import TLS_VARIABLES, await_address
from psdist.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, server_pb2
from psdist.wire import auth, channels
from tests.fuzz import trainer
from tests.fuzz.callers import Caller, every_caller, write_certificates
from tests.fuzz.http2 import Http2Connection, connect, request_block
from tests.fuzz.messages import Known, floats
from tests.fuzz.recording import Recording, recording
from tests.support.channels import open_channel

#: A busy machine needs it; a hang still ends.
START_SECONDS: Final = 240.0
#: No member is to be lost on a busy machine.
_LEASE_SECONDS: Final = 60.0
MEMBER: Final = "fuzz-member"
_SLICE: Final = 1024
#: Sets of the member that the fuzzing speaks for.
SETS: Final[dict[str, dict[str, Any]]] = {
    "fuzz-bsp": {"optimizer": psdist.optim.SGD(lr=0.01, max_grad_norm=1.0)},
    "fuzz-ssp": {"optimizer": psdist.optim.Adam(lr=0.01), "consistency": psdist.SSP(2)},
    "fuzz-asp": {
        "optimizer": psdist.optim.SGD(lr=0.01, momentum=0.9),
        "consistency": psdist.ASP(),
        "non_finite": "skip",
    },
}
DATASET: Final = "fuzz-data"
_TROUBLE: Final = re.compile(r"Traceback \(most recent call last\)|Fatal Python error|exception was never retrieved")


class FuzzedRun:
    """One run with its processes. ``open`` starts them; ``close`` ends them.

    has_tls: True for mutual TLS, with a certificate of its role for each process, and calls of every role.
    servers: servers, each with a copy of all shards.
    """

    def __init__(self, *, has_tls: bool = False, servers: int = 2) -> None:
        self._servers_count = servers
        self.directory = Path(tempfile.mkdtemp(prefix="psdist-fuzz-"))
        self.token = secrets.token_urlsafe(32)
        self.run_id = "fuzzed"
        self.certificates: dict[Role, TlsFiles] = write_certificates(self.directory / "tls") if has_tls else {}
        self._contexts = {role: _context(files) for role, files in self.certificates.items()}
        #: Callers of the RPCs: without TLS, the holder of the run's own token.
        self.callers = every_caller(self.token, self.certificates) if has_tls else [Caller(self.token)]
        self.known = Known()
        self.requests: Recording = {}
        self.address = ""
        #: By server id: host:port.
        self.servers: dict[str, str] = {}
        self.worker_ports: list[int] = []
        #: Ports for TCP connections.
        self.tcp_ports: list[int] = []
        self.metrics_ports: list[int] = []
        self.dashboard_port = 0
        self.workers: dict[str, common_pb2.WorkerEntry] = {}
        self.epoch = 0
        self.client: psdist.AsyncClient | None = None
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._lifeline = Lifeline()
        self._channels: dict[str, Channel] = {}
        self._connections: dict[tuple[str, Role | None], Http2Connection] = {}
        self._blocks: dict[tuple[str, str, Caller], bytes] = {}
        self._stack = AsyncExitStack()
        self._read: dict[str, int] = {}
        self._connecting = asyncio.Lock()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return auth.metadata(self.token)

    # --- starting ---

    async def open(self) -> FuzzedRun:
        """Start the processes, and join as the member."""
        with listen("127.0.0.1", 0) as dashboard:
            self.dashboard_port = dashboard.getsockname()[1]
            plan = self._plan(dashboard.fileno())
            servers = [plan.server(number, self._environment) for number in range(self._servers_count)]
            for spec in (plan.scheduler(self._environment), *servers):
                self._start(f"{spec.key.role}-{spec.key.number}", spec)
        self._lifeline.started()
        self.address = await self._await_address()
        training = (sys.executable, "-m", "tests.fuzz.trainer", self.address)
        self._start("trainer", ProcessSpec(plan.scheduler({}).key, training, self._environment), Role.WORKER)
        self.worker_ports = (await self._told("trainer"))["ports"]
        await self._join()
        return self

    async def _await_address(self) -> str:
        """Return the scheduler's address. Raises RuntimeError if a process ends instead, SchedulerUnreachableError."""
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                return await asyncio.to_thread(await_address, self.directory / "scheduler", 1.0)
            except SchedulerUnreachableError:
                if trouble := self.trouble():
                    raise RuntimeError("\n".join(trouble)) from None
                if time.monotonic() > until:
                    raise

    def _plan(self, dashboard: int) -> ServicesPlan:
        """Return the processes. dashboard: descriptor of its socket."""
        settings = ServicesSettings(
            servers=self._servers_count,
            replicas=self._servers_count,
            failure_timeout_seconds=_LEASE_SECONDS,
            worker_timeout_seconds=_LEASE_SECONDS,
            storage_path=str(self.directory / "storage"),
            log_level="warning",
        )
        link = SchedulerAddress(file=self.directory / "scheduler", run_id=self.run_id)
        return ServicesPlan(
            settings, self.directory, link, self._lifeline.end_of_children,
            workers=len(trainer.WORKERS), metrics_port=0, dashboard=dashboard,
        )  # fmt: skip

    @property
    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PSDIST_", "RANK"))}
        tests = {name: value for name, value in os.environ.items() if "TEST" in name}
        return kept | tests | {"PSDIST_TOKEN": self.token, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}

    def _start(self, name: str, spec: ProcessSpec, role: Role | None = None) -> None:
        """Start a process. role: of its certificate; None for that of its name."""
        environment, inherited = dict(spec.environment), spec.descriptors
        if (files := self.certificates.get(role or Role(spec.key.role))) is not None:
            environment |= zip(TLS_VARIABLES, map(str, (files.ca, files.cert, files.key)), strict=True)
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                spec.argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                text=True, pass_fds=(self._lifeline.end_of_children, *inherited) if role is None else (),
                cwd=Path(__file__).parents[2],
            )  # fmt: skip

    async def _told(self, name: str) -> Any:
        """Return the next line that the process prints, as JSON. Raises RuntimeError if it has ended."""
        output = self._processes[name].stdout
        assert output is not None
        line = await asyncio.wait_for(asyncio.to_thread(output.readline), START_SECONDS)
        if not line:
            raise RuntimeError(f"{name} has ended: {self.log(name)[-3000:]}")
        return json.loads(line)

    async def _join(self) -> None:
        """Join as a member, with sets of every kind, and record its calls."""
        with recording() as self.requests:
            self.client = psdist.AsyncClient(
                self.address, self.token, tls=self.certificates.get(Role.WORKER), worker_id=MEMBER, transport="grpc",
                connect_timeout=START_SECONDS,
            )  # fmt: skip
            self._stack.push_async_callback(self.client.close)
            await self.client.connect()
            init = {"w": np.zeros((33, 77), np.float32), "b": np.zeros((), np.float32)}
            grads = {name: np.ones_like(values) for name, values in init.items()}
            for name, settings in SETS.items():
                handle = await self.client.parameters(
                    name, init, slice_elements=_SLICE, workers=[self.client.rank], **settings
                )
                for _ in range(2):
                    await handle.push_pull(grads)
                await handle.push(grads)
                await handle.pull()
            data = await self.client.dataset(DATASET, 1000, range_size=10)
            await anext(aiter(data))
            await self.client.snapshot(START_SECONDS)
            await self.client.status()
            await self.refresh()

    async def refresh(self) -> None:
        """Learn the current members, epoch and addresses."""
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self.channel(self.address))
        request = scheduler_pb2.GetClusterMapRequest()
        try:
            answer = await stub.GetClusterMap(request, metadata=self.metadata, timeout=START_SECONDS)
        except AioRpcError:  # The scheduler may have closed the connection at this moment, which was idle.
            answer = await stub.GetClusterMap(request, metadata=self.metadata, timeout=START_SECONDS)
        self.known = _known(answer.map, self.run_id)
        self.servers = {server.server_id: server.address for server in answer.map.servers}
        self.workers = {worker.worker_id: worker for worker in answer.map.workers}
        self.epoch = answer.map.epoch
        if not self.tcp_ports:
            status = await stub.GetStatus(
                scheduler_pb2.GetStatusRequest(), metadata=self.metadata, timeout=START_SECONDS
            )
            pages = (status.metrics_address, *(member.metrics_address for member in status.members))
            self.metrics_ports = [int(page.rpartition(":")[2]) for page in pages if page]
            self.tcp_ports = self._tcp_ports()

    def _tcp_ports(self) -> list[int]:
        """Return the listening ports of the servers that are neither of gRPC nor of metrics."""
        known = {int(address.rpartition(":")[2]) for address in self.servers.values()} | {*self.metrics_ports}
        listening = {
            connection.laddr.port
            for name, process in self._processes.items()
            if name.startswith("server")
            for connection in psutil.Process(process.pid).net_connections("tcp")
            if connection.status == "LISTEN"
        }
        return sorted(listening - known)

    def channel(self, address: str) -> Channel:
        """Return a worker's channel to a process."""
        if address not in self._channels:
            worker = Credentials(self.token, self.certificates.get(Role.WORKER))
            self._channels[address] = channels.open_channel(address, worker) if worker.tls else open_channel(address)
        return self._channels[address]

    def tls(self, host: str, role: Role | None, *, is_service: bool = True) -> dict[str, Any]:
        """Return the arguments that secure a connection, for asyncio; none without TLS.

        role: of the certificate. is_service: a scheduler or server is dialed, not a worker.
        """
        if role is None or not self._contexts:
            return {}
        return {"ssl": self._contexts[role], "server_hostname": service_name(host) if is_service else host}

    async def connection(self, address: str, caller: Caller) -> Http2Connection:
        """Return a caller's connection to a process. Raises ConnectionError."""
        key = address, caller.stated
        async with self._connecting:
            found = self._connections.get(key)
            if found is None or not found.is_open:
                host, port = address.split(":")
                found = self._connections[key] = await connect(host, int(port), **self.tls(host, caller.stated))
        return found

    def request_block(self, address: str, path: str, caller: Caller) -> bytes:
        """Return the headers of a call with a caller's token."""
        if (key := (address, path, caller)) not in self._blocks:
            audience = Audience.SCHEDULER if address == self.address else Audience.SERVER
            shown = auth.metadata(caller.token, audience)
            self._blocks[key] = request_block(path, address, shown, "https" if self.certificates else "http")
        return self._blocks[key]

    # --- observing ---

    def log(self, name: str) -> str:
        """Return everything that a process has logged."""
        return (self.directory / f"{name}.log").read_text("utf-8", "replace")

    def trouble(self) -> list[str]:
        """Return the failures since the last call: processes that have ended, and tracebacks in the logs."""
        found = [f"{name} ended with status {p.poll()}" for name, p in self._processes.items() if p.poll() is not None]
        for name in self._processes:
            new = self._new_log(name)
            if match := _TROUBLE.search(new):
                found.append(f"{name} logged {new[max(0, match.start() - 500) : match.start() + 4000]}")
        return found

    def _new_log(self, name: str) -> str:
        with (self.directory / f"{name}.log").open("rb") as log:
            log.seek(self._read.get(name, 0))
            new = log.read()
        self._read[name] = self._read.get(name, 0) + len(new)
        return new.decode("utf-8", "replace")

    def resident_mib(self) -> dict[str, int]:
        """Return the memory of each process."""
        return {name: psutil.Process(p.pid).memory_info().rss >> 20 for name, p in self._processes.items()}

    def files(self) -> dict[str, int]:
        """Return the number of open files of each process."""
        return {name: psutil.Process(p.pid).num_fds() for name, p in self._processes.items()}

    # --- ending ---

    async def end_training(self) -> int:
        """End the trainer, which compares each step itself. Return its steps. Raises RuntimeError if it has failed."""
        feed = self._processes["trainer"].stdin
        assert feed is not None
        feed.close()
        steps: int = (await self._told("trainer"))["steps"]
        await asyncio.to_thread(self._processes["trainer"].wait, START_SECONDS)
        return steps

    async def close(self) -> None:
        """End everything."""
        for channel in self._channels.values():
            await channel.close()
        for connection in self._connections.values():
            connection.close()
        try:
            async with asyncio.timeout(30):
                await self._stack.aclose()
        except (TimeoutError, psdist.PsdistError):
            pass  # What was fuzzed may have ended.
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            await asyncio.to_thread(process.wait)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        self._lifeline.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _context(files: TlsFiles) -> ssl.SSLContext:
    """Return a context that dials gRPC and TCP ports."""
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["h2"])
    return context


def _known(cluster: common_pb2.ClusterMap, run_id: str) -> Known:
    """Return the values of fields that mean something in a run."""
    workers = [(worker.worker_id, worker.incarnation) for worker in cluster.workers]
    servers = [(server.server_id, server.incarnation) for server in cluster.servers]
    mine = [one for one in workers if one[0] == MEMBER]
    sets = [*SETS, trainer.NAME]
    ids = [member_id for member_id, _ in (*workers, *servers)]
    dtypes = (common_pb2.DTYPE_FLOAT32, common_pb2.DTYPE_FLOAT32, common_pb2.DTYPE_FLOAT16)
    values: dict[str, Any] = {
        "run_id": (run_id, run_id, run_id, ""),
        "epoch": (cluster.epoch, cluster.epoch, cluster.epoch, cluster.epoch + 1, 1),
        "incarnation": [incarnation for _, incarnation in (*workers, *servers)],
        "origin": [0, *(incarnation for _, incarnation in workers)],
        "parameters": sets,
        "name": (*sets, DATASET, "w", "b", "lr", "momentum", "default"),
        "dataset": (DATASET,),
        "scheduler_id": (cluster.scheduler_id,),
        "address": [server.address for server in cluster.servers],
        "slice": range(4), "slices": range(3), "shard": range(2), "shards": range(2),
        "term": (1, 1, 2), "terms": (1, 1, 2), "step": range(6), "generation": (0, 0, 1), "array": range(3),
        "lsn": range(6), "slice_elements": (_SLICE, 0), "dtype": dtypes, "pull_dtype": dtypes,
        "codec": (common_pb2.CODEC_RAW, common_pb2.CODEC_RAW, common_pb2.CODEC_SEGMENTS),
        "kind": ("sgd", "adam", "bsp", "ssp", "asp", "constant", "linear"),
        "payload": (floats(_SLICE), floats(2542 % _SLICE), floats(_SLICE, float("nan")), bytes(2 * _SLICE), b""),
        "protocol_version": (6, 6, 6, 5, 7), "role": (scheduler_pb2.ROLE_WORKER, scheduler_pb2.ROLE_SERVER),
        "call_id": (0, 0, 1), "attempt": range(4), "digest": (bytes(16),), "written": (b"", b"", bytes(16)),
        "rank": (0, 2, 3, 4, 50), "weight": (1.0, 0.5), "lr_factor": (1.0, 0.5), "grad_norm": (1.0,),
        "size": (1000, 10), "range_size": (10,), "data_epochs": (0, 1), "servers": (1, 2), "workers": (2, 3),
    }  # fmt: skip
    values |= dict.fromkeys(("worker_id", "member_id", "server_id", "worker_ids"), ids)
    return Known(mine * 6 + workers + servers, values)


#: By the process that is called.
SERVICES: Final = {
    "scheduler": (
        scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
    ),
    "server": (
        server_pb2.DESCRIPTOR.services_by_name["ServerService"],
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
    ),
}
