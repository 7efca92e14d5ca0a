"""The user's script, and command lines and environments of a run's processes. Nothing is started here.

A worker gets torchrun's environment (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` ...) in addition to psdist's own. Such
variables of an outer run or a user's shell are replaced or removed, so that a run inside a run finds its own scheduler.
"""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from psdist.errors import ConfigurationError
from psdist.launch.events import ProcessKey
from psdist.launch.metrics.run_metrics import MetricsOptions
from psdist.launch.output import Routing
from psdist.launch.process import ProcessSpec
from psdist.launch.shutdown import STOP_TIMEOUT_SECONDS
from psdist.settings.config import DRAIN_TIMEOUT_SECONDS, START_TIMEOUT_SECONDS, WORKER_TIMEOUT_SECONDS
from psdist.snapshots.policy import DEFAULT_POLICY, SavePolicy

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
#: Variables that define a process's place in a run. None is inherited from outside.
_OWNED: Final = (
    *("PSDIST_SCHEDULER", "PSDIST_SCHEDULER_FILE", "PSDIST_ADDRESS_FILE", "PSDIST_ADVERTISE", "PSDIST_INSECURE"),
    *("PSDIST_WORKER_ID", "PSDIST_SERVER_ID", "PSDIST_CONNECTED_FILE", "PSDIST_LIFELINE_FD", "PSDIST_STORAGE_PATH"),
    *("PSDIST_STORAGE_OPTIONAL", "PSDIST_SAVE_INTERVAL", "PSDIST_KEEP_LAST", "PSDIST_KEEP_EVERY"),
    *("PSDIST_METRICS_PIPE", "PSDIST_NO_SAVE_AT_END", "PSDIST_FRESH", "DMLC_ROLE", "DMLC_WORKER_ID"),
    *("DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"),
)


class ScriptKind(Enum):
    """Meaning of the first word of the command."""

    FILE = "file"
    MODULE = "module"
    PROGRAM = "program"


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """The script that the workers of this machine run, and how they are watched.

    command: a file, module or program (``kind``), then its arguments.
    restarts_max: of each worker.
    signals: those that end the run in order.
    interval_seconds: between two checks of the workers.
    """

    command: tuple[str, ...]
    kind: ScriptKind = ScriptKind.FILE
    processes: int = 1
    restarts_max: int = 3
    role: str = "worker"
    routing: Routing = field(default_factory=Routing)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    signals: tuple[int, ...] = SIGNALS
    interval_seconds: float = 0.1
    start_timeout_seconds: float = START_TIMEOUT_SECONDS
    stop_timeout_seconds: float = STOP_TIMEOUT_SECONDS

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line of a worker: this Python without output buffering, or the program itself."""
        if self.kind is ScriptKind.PROGRAM:
            return self.command
        return (sys.executable, "-u", *(("-m",) if self.kind is ScriptKind.MODULE else ()), *self.command)

    def check(self) -> None:
        """Raise ConfigurationError, with the reason, if the script cannot be run."""
        if not self.command:
            raise ConfigurationError("no script given: name one after the flags, such as train.py")
        checks = {ScriptKind.FILE: _check_file, ScriptKind.MODULE: _check_module, ScriptKind.PROGRAM: _check_program}
        checks[self.kind](self.command[0])


def _check_program(name: str) -> None:
    if shutil.which(name) is None:
        raise ConfigurationError(f"the program {name} does not exist or may not be executed")


def _check_module(name: str) -> None:
    # Look up the first part only: a search for the rest would run the package's own code in the launcher.
    top = name.partition(".")[0]
    if top in sys.builtin_module_names:
        return
    if importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
        raise ConfigurationError(f"there is no module named {top} (--module {name})")


def _check_file(name: str) -> None:
    path = Path(name)
    if not path.exists():
        raise ConfigurationError(f"the script {path.absolute()} does not exist")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigurationError(f"the script {path.absolute()} is a directory without a __main__.py")
    if not os.access(path, os.R_OK):
        raise ConfigurationError(f"the script {path.absolute()} may not be read")


@dataclass(frozen=True, slots=True)
class SchedulerAddress:
    """Address of the scheduler, and the token for it.

    address: its address; empty if ``file`` is given.
    file: the file in which the scheduler writes its address.
    token_file: None if the token is already in the environment of the processes.
    """

    address: str = ""
    file: Path | None = None
    token_file: Path | None = None
    run_id: str = ""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return ``base`` with this scheduler in place of any other."""
        values = {name: value for name, value in base.items() if name not in _OWNED}
        if self.address:
            values["PSDIST_SCHEDULER"] = self.address
        if self.file is not None:
            values["PSDIST_SCHEDULER_FILE"] = str(self.file)
        if self.token_file is not None:
            values.pop("PSDIST_TOKEN", None)
            values["PSDIST_TOKEN_FILE"] = str(self.token_file)
        if self.run_id:
            values["PSDIST_RUN_ID"] = self.run_id
        return values


@dataclass(frozen=True, slots=True)
class WorkersPlan:
    """The workers of one node, and their place in the world."""

    script: ScriptOptions
    link: SchedulerAddress
    connected_directory: Path
    master: tuple[str, int]
    first_rank: int = 0
    world_size: int = 1
    node_rank: int = 0
    #: Variables that workers need to report metrics.
    metrics: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> range:
        """Ranks of this node's workers."""
        return range(self.first_rank, self.first_rank + self.script.processes)

    def limits_threads(self, base: Mapping[str, str]) -> bool:
        """Return True if workers get OMP_NUM_THREADS=1, as under torchrun: several share the cores, and it is not
        set."""
        return self.script.processes > 1 and not base.get("OMP_NUM_THREADS")

    def connected_file(self, rank: int, attempt: int) -> Path:
        """Return the file that the client library creates once it has registered."""
        return self.connected_directory / f"{rank}.{attempt}"

    def spec(self, rank: int, attempt: int, base: Mapping[str, str]) -> ProcessSpec:
        """Return the process of worker ``rank`` at its start number ``attempt``, from 0. Ranks beyond ``ranks`` were
        added while the run trained."""
        local_rank = rank - self.first_rank
        world_size = str(max(self.world_size, rank + 1))
        environment = self.link.environment(base)
        if self.limits_threads(base):
            environment["OMP_NUM_THREADS"] = "1"
        environment |= {
            "RANK": str(rank),
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(max(self.script.processes, local_rank + 1)),
            "GROUP_RANK": str(self.node_rank),
            "ROLE_NAME": self.script.role,
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": world_size,
            "MASTER_ADDR": self.master[0],
            "MASTER_PORT": str(self.master[1]),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.script.restarts_max),
            "TORCHELASTIC_RUN_ID": self.link.run_id,
            "PSDIST_START_TIMEOUT": f"{self.script.start_timeout_seconds:g}",
            "PSDIST_CONNECTED_FILE": str(self.connected_file(rank, attempt)),
            **self.metrics,
        }
        is_program = self.script.kind is ScriptKind.PROGRAM
        return ProcessSpec(ProcessKey("worker", rank), self.script.argv, environment, signals_group=is_program)


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """Location of a run's snapshots, an absolute path or a URL, and when they are taken.

    fresh: True for a new run, whose storage must have no snapshots.
    optional: True if the run takes no snapshots when the storage cannot be written.
    """

    storage: str
    policy: SavePolicy = DEFAULT_POLICY
    fresh: bool = False
    optional: bool = False

    def flags(self) -> tuple[str, ...]:
        """Return the flags of the scheduler's command line."""
        policy = self.policy
        return (
            *("--storage-path", self.storage, "--save-interval", policy.interval or "0"),
            *("--keep-last", str(policy.keep_last), "--keep-every", str(policy.keep_every)),
            *(() if policy.at_end else ("--no-save-at-end",)),
            *(("--fresh",) if self.fresh else ()),
            *(("--storage-optional",) if self.optional else ()),
        )


@dataclass(frozen=True, slots=True)
class ServicesPlan:
    """The scheduler and the servers of a run on this machine."""

    directory: Path
    link: SchedulerAddress
    servers: int
    workers: int
    lifeline: int
    failure_timeout_seconds: float
    start_timeout_seconds: float
    kernel_threads: int
    log_level: str
    replicas: int = 1
    #: Longest wait of a server after SIGTERM for its shards to be moved to others.
    drain_timeout_seconds: float = DRAIN_TIMEOUT_SECONDS
    snapshots: SnapshotPlan | None = None
    worker_timeout_seconds: float = WORKER_TIMEOUT_SECONDS
    #: Devices of weights and optimizer state, assigned to servers round-robin.
    devices: tuple[str, ...] = ("cpu",)
    #: Address on which they listen: this machine's loopback address.
    host: str = "127.0.0.1"

    def scheduler(self, base: Mapping[str, str], port: int = 0) -> ProcessSpec:
        """Return the scheduler's process. It writes its address to the link's file; a restarted one keeps its
        ``port``."""
        argv = (
            *program("psdist_scheduler"),
            *("--host", self.host, "--port", str(port), "--run-id", self.link.run_id),
            *("--min-workers", str(self.workers), "--min-servers", str(self.servers)),
            *("--replicas", str(self.replicas)),
            *("--failure-timeout", f"{self.failure_timeout_seconds:g}"),
            *("--worker-timeout", f"{self.worker_timeout_seconds:g}", "--join-grace", "0"),
            # The launcher sees how its own workers end, and PSDIST_START_TIMEOUT is meant for them.
            *("--start-timeout", "0"),
            *("--store", str(self.directory / "scheduler.sqlite"), "--address-file", str(self.link.file)),
            *(self.snapshots.flags() if self.snapshots is not None else ()),
            *self._shared(),
        )
        return ProcessSpec(ProcessKey("scheduler", 0), argv, self.link.environment(base))

    def server(self, number: int, base: Mapping[str, str]) -> ProcessSpec:
        """Return the process of one server."""
        argv = (
            *program("psdist_server"),
            *("--scheduler-file", str(self.link.file), "--start-timeout", f"{self.start_timeout_seconds:g}"),
            *("--host", self.host, "--port", "0", "--run-id", self.link.run_id),
            *("--server-id", f"server-{number}", "--kernel-threads", str(self.kernel_threads)),
            *("--drain-timeout", f"{self.drain_timeout_seconds:g}"),
            *("--device", self.devices[number % len(self.devices)]),
            *self._shared(),
        )
        return ProcessSpec(ProcessKey("server", number), argv, self.link.environment(base))

    def snapshot(self, base: Mapping[str, str]) -> ProcessSpec:
        """Return the process that requests the last snapshot."""
        return ProcessSpec(
            ProcessKey("snapshot", 0), program("psdist.launch.final_snapshot"), self.link.environment(base)
        )

    def _shared(self) -> tuple[str, ...]:
        return ("--lifeline-fd", str(self.lifeline), "--log-format", "console", "--log-level", self.log_level)


def server_number(server_id: str) -> int | None:
    """Return the number of a server of this plan by its id; None for servers that somebody else started."""
    number = server_id.removeprefix("server-")
    return int(number) if number != server_id and number.isascii() and number.isdigit() else None


def kernel_threads_of_each(servers: int) -> int:
    """Return the kernel threads for each server, so that together they have one for each core."""
    return max(1, len(os.sched_getaffinity(0)) // servers)


def program(module: str) -> tuple[str, ...]:
    """Return the command of one of psdist's own programs, without arguments."""
    # -P: a file in the user's directory that is named like a standard module must not break our programs.
    return (sys.executable, "-P", "-m", module)
