"""The user's script, and command lines and environments of a run's processes. Nothing is started here.

A worker gets torchrun's environment (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` ...) in addition to psdist's own. Such
variables of an outer run or a user's shell are replaced or removed, so that a run inside a run finds its own scheduler.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from psdist.addresses import is_loopback
from psdist.errors import ConfigurationError
from psdist.launcher.events import ProcessKey
from psdist.launcher.output import Routing
from psdist.launcher.process import ProcessSpec
from psdist.launcher.run_metrics import MetricsOptions
from psdist.launcher.script_checks import ScriptKind, check_script
from psdist.launcher.shutdown import STOP_TIMEOUT_SECONDS
from psdist.machine import python, usable_cores
from psdist.security.tls import TlsFiles
from psdist.settings.config import (
    INSECURE_VARIABLE,
    LOCAL_ADDRESS_VARIABLE,
    START_TIMEOUT_SECONDS,
    TLS_VARIABLES,
    devices_text,
)
from psdist.settings.debugging import BREAKPOINT_FUNCTION, HAS_TERMINAL_VARIABLE
from psdist.settings.flags import arguments, integer, one_of, seconds, setting, text, torchrun_setting
from psdist.settings.programs import (
    OUTPUT_TITLE,
    SERVERS_TITLE,
    TIMEOUTS_TITLE,
    MonitoringSettings,
    RunSettings,
    SchedulerSettings,
    ServerSettings,
    log_format_setting,
    log_level_setting,
    run_id_setting,
    start_timeout_setting,
)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
WORKERS: Final = "workers"
#: The launcher reads UTF-8. In a locale of another encoding, print() of a name with an accent would end a script.
_ENCODING: Final = "PYTHONIOENCODING"
#: Variables that define a process's place in a run. None is inherited from outside.
_OWNED: Final = (
    *TLS_VARIABLES,
    "PSDIST_CONFIG",
    *("PSDIST_SCHEDULER", "PSDIST_SCHEDULER_FILE", "PSDIST_ADDRESS_FILE", "PSDIST_ADVERTISE", INSECURE_VARIABLE),
    LOCAL_ADDRESS_VARIABLE,
    *("PSDIST_WORKER_ID", "PSDIST_SERVER_ID", "PSDIST_CONNECTED_FILE", "PSDIST_LIFELINE_FD", "PSDIST_STORAGE_PATH"),
    *("PSDIST_STORAGE_OPTIONAL", "PSDIST_SAVE_INTERVAL", "PSDIST_KEEP_LAST", "PSDIST_KEEP_EVERY"),
    *(
        "PSDIST_METRICS_PORT",
        "PSDIST_METRICS_HOST",
        "PSDIST_METRICS_PIPE",
        "PSDIST_NO_SAVE_AT_END",
        "PSDIST_FRESH",
        "PSDIST_REQUIRE_EMPTY_STORAGE",
        HAS_TERMINAL_VARIABLE,
        "DMLC_ROLE",
        "DMLC_WORKER_ID",
    ),
    *("DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"),
)


def processes_text(value: str) -> int:
    """Convert torchrun's --nproc-per-node: a number, or ``auto`` or ``cpu`` for the cores this process may use."""
    if value in ("auto", "cpu"):
        return usable_cores()
    if value == "gpu":
        raise ValueError("gpu is not supported: give a number, or auto for one process per core")
    return integer(1, 4096)(value)


def signals_text(value: str) -> tuple[int, ...]:
    """Convert signal names, separated by commas."""
    numbers = []
    for name in value.split(","):
        try:
            number = signal.Signals[name.strip().upper()]
        except KeyError:
            raise ValueError(f"{name.strip()!r} is not the name of a signal, such as SIGTERM") from None
        if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise ValueError(f"{number.name} cannot be handled")
        numbers.append(int(number))
    return tuple(dict.fromkeys(numbers))


@dataclass(frozen=True, kw_only=True)
class ScriptSettings(MetricsOptions, MonitoringSettings, Routing):
    """The script that the workers of this machine run, and how they are watched.

    ``psdist run`` and ``psdist-worker`` share these settings. Flags are spelled as torchrun spells them. Raises
    ConfigurationError for flags that exclude each other.

    command: a file, module or program (``kind``), then its arguments.
    """

    command: tuple[str, ...] = ()
    role: str = torchrun_setting(
        "--role", "name of the workers in the prefix of their lines", text, "worker", "NAME", group=OUTPUT_TITLE
    )
    processes: int = torchrun_setting(
        "--nproc-per-node",
        "workers on this machine: a number, auto or cpu",
        processes_text,
        1,
        "N",
        group=WORKERS,
    )
    restarts_max: int = torchrun_setting(
        "--max-restarts",
        "restarts of each worker whose script fails; none after wrong settings or arguments of psdist",
        integer(0), 3, "N", group=WORKERS,
    )  # fmt: skip
    interval_seconds: float = torchrun_setting(
        "--monitor-interval", "time between two checks of the workers", seconds(0.001), 0.1, group=WORKERS
    )
    signals: tuple[int, ...] = torchrun_setting(
        "--signals-to-handle", "signals that end the run in order", signals_text, SIGNALS, "NAMES", group=WORKERS,
        shown_default=",".join(signal.Signals(number).name for number in SIGNALS),
    )  # fmt: skip
    start_method: str = torchrun_setting(
        "--start-method", "spawn is the only one", one_of("spawn"), "spawn", "METHOD", group=WORKERS
    )
    module: bool = torchrun_setting("--module", "the script is a module, as for python -m", short="-m", group=WORKERS)
    no_python: bool = torchrun_setting("--no-python", "the script is a program of its own", group=WORKERS)
    stop_timeout_seconds: float = setting(
        "longest wait for workers to end after SIGTERM", seconds(), STOP_TIMEOUT_SECONDS, group=TIMEOUTS_TITLE
    )
    start_timeout_seconds: float = start_timeout_setting(
        "longest wait for the scheduler, by this program and by scripts"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.module and self.no_python:
            raise ConfigurationError("--module and --no-python exclude each other: a module needs Python")

    @property
    def kind(self) -> ScriptKind:
        """The kind of the script."""
        kinds = {(True, False): ScriptKind.MODULE, (False, True): ScriptKind.PROGRAM}
        return kinds.get((self.module, self.no_python), ScriptKind.FILE)

    @property
    def argv(self) -> tuple[str, ...]:
        """The command line of a worker: this Python without output buffering, or the program itself."""
        if self.kind is ScriptKind.PROGRAM:
            return self.command
        return (python(), "-u", *(("-m",) if self.kind is ScriptKind.MODULE else ()), *self.command)

    def check(self) -> None:
        """Raise ConfigurationError, with the reason, if the script cannot be run."""
        if not self.command:
            raise ConfigurationError("no script given: name one after the flags, such as train.py")
        check_script(self.kind, self.command[0])


@dataclass(frozen=True, slots=True)
class SchedulerAddress:
    """Address of the scheduler, and the credentials for it.

    address: its address; empty if ``file`` is given.
    file: the file in which the scheduler writes its address.
    token_file: None if the token is already in the environment of the processes.
    tls: TLS identity of the processes; None for plaintext.
    insecure: True permits plaintext beyond this machine.
    """

    address: str = ""
    file: Path | None = None
    token_file: Path | None = None
    tls: TlsFiles | None = None
    insecure: bool = False
    run_id: str = ""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return ``base`` with this scheduler in place of any other."""
        values = {name: value for name, value in base.items() if name not in _OWNED}
        if not values.get(_ENCODING):
            values[_ENCODING] = "utf-8:surrogateescape"
        if self.address:
            values["PSDIST_SCHEDULER"] = self.address
        if self.file is not None:
            values["PSDIST_SCHEDULER_FILE"] = str(self.file)
        if self.token_file is not None:
            values.pop("PSDIST_TOKEN", None)
            values["PSDIST_TOKEN_FILE"] = str(self.token_file)
        if self.tls is not None:
            files = (self.tls.ca, self.tls.cert, self.tls.key)
            values |= {name: os.path.abspath(file) for name, file in zip(TLS_VARIABLES, files, strict=True)}
        if self.insecure:
            values[INSECURE_VARIABLE] = "1"
        if self.run_id:
            values["PSDIST_RUN_ID"] = self.run_id
        return values


@dataclass(frozen=True, slots=True)
class WorkersPlan:
    """The workers of one node, and their place in the world.

    first_local_rank, local_world_size: differ from 0 and the number of workers if several agents share a machine.
    host: name or address by which workers of other nodes reach these; empty for their own address.
    """

    script: ScriptSettings
    link: SchedulerAddress
    connected_directory: Path
    master: tuple[str, int]
    first_rank: int = 0
    world_size: int = 1
    node_rank: int = 0
    first_local_rank: int = 0
    local_world_size: int = 1
    host: str = ""
    #: Variables that workers need to report metrics.
    metrics: Mapping[str, str] = field(default_factory=dict)
    #: Rank of the worker that has the terminal.
    debugged: int | None = None

    @property
    def ranks(self) -> range:
        """Ranks of this node's workers."""
        return range(self.first_rank, self.first_rank + self.script.processes)

    def limits_threads(self, base: Mapping[str, str]) -> bool:
        """Return True if workers get OMP_NUM_THREADS=1, as under torchrun: several share the cores, and it is not
        set."""
        return self.script.processes > 1 and not base.get("OMP_NUM_THREADS")

    def connected_file(self, rank: int, attempt: int) -> Path:
        """Return the file that the client library creates once it has registered. Its other reports are beside it: see
        ``launcher_reports``."""
        return self.connected_directory / f"{rank}.{attempt}"

    def spec(self, rank: int, attempt: int, base: Mapping[str, str]) -> ProcessSpec:
        """Return the process of worker ``rank`` at its start number ``attempt``, from 0. Ranks beyond ``ranks`` were
        added while the run trained."""
        local_rank = rank - self.first_rank + self.first_local_rank
        world_size = str(max(self.world_size, rank + 1))
        environment = self.link.environment(base)
        if self.limits_threads(base):
            environment["OMP_NUM_THREADS"] = "1"
        environment |= {
            "RANK": str(rank),
            "WORLD_SIZE": world_size,
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(max(self.script.processes, self.local_world_size, local_rank + 1)),
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
        if self.host:
            environment[LOCAL_ADDRESS_VARIABLE] = self.host
        if self.script.metrics_port is not None:
            port = self.script.metrics_port and self.script.metrics_port + local_rank
            environment |= {"PSDIST_METRICS_PORT": str(port), "PSDIST_METRICS_HOST": self.script.metrics_host}
        environment.setdefault("PYTHONBREAKPOINT", BREAKPOINT_FUNCTION)
        if has_terminal := rank == self.debugged:
            environment[HAS_TERMINAL_VARIABLE] = "1"
        is_program = self.script.kind is ScriptKind.PROGRAM
        key = ProcessKey("worker", rank)
        return ProcessSpec(key, self.script.argv, environment, is_program, terminal=has_terminal)


@dataclass(frozen=True, kw_only=True)
class ServicesSettings(RunSettings):
    """Settings of the scheduler and the servers that a launcher starts on this machine."""

    run_id: str = run_id_setting("name of the run (default: the time and a random number)")
    servers: int = setting(
        "servers that share the parameters", integer(1, 1024), 2, "N", name="--nservers", group=SERVERS_TITLE
    )
    kernel_threads: int | None = setting(
        "threads of each server (default: the cores divided by --nservers)", integer(1, 1024), None, "N",
        group=SERVERS_TITLE,
    )  # fmt: skip
    devices: tuple[str, ...] = setting(
        "device of weights and optimizer state: cpu, cuda or cuda:N. A comma-separated list is assigned to servers "
        "round-robin", devices_text, ("cpu",), "NAMES", name="--server-device", shown_default="cpu",
        group=SERVERS_TITLE,
    )  # fmt: skip
    log_level: str = log_level_setting("least level shown of servers and scheduler", "warning")
    log_format: str = log_format_setting("console", ". Holds for all processes")


@dataclass(frozen=True, slots=True)
class ServicesPlan:
    """The scheduler and the servers of a run on this machine.

    workers: workers that the scheduler waits for.
    start_timeout_seconds: the servers' longest wait for the scheduler.
    drain_timeout_seconds: longest wait of a server after SIGTERM for its shards to be moved to others.
    storage_optional: True if the run takes no snapshots when the storage cannot be written.
    host: address on which they listen: this machine's loopback address.
    metrics_port: port of the scheduler's metrics; servers take free ones. None serves none.
    metrics_host: address of the metrics; empty for loopback.
    dashboard: listening socket of the dashboard, which a restarted scheduler inherits again; None serves none.
    dashboard_host: address of the dashboard; empty for loopback.
    dashboard_logs: directory with the processes' logs, which the dashboard shows; None without one.
    idle_timeout_seconds: time without workers after which the scheduler ends, servers first; 0 leaves it running.
    """

    settings: ServicesSettings
    directory: Path
    link: SchedulerAddress
    lifeline: int
    workers: int
    start_timeout_seconds: float = START_TIMEOUT_SECONDS
    drain_timeout_seconds: float = ServerSettings.drain_timeout_seconds
    storage_optional: bool = False
    host: str = "127.0.0.1"
    metrics_port: int | None = None
    metrics_host: str = ""
    dashboard: int | None = None
    dashboard_host: str = ""
    dashboard_logs: Path | None = None
    idle_timeout_seconds: float = 0.0

    def scheduler(self, base: Mapping[str, str], port: int = 0) -> ProcessSpec:
        """Return the scheduler's process. It writes its address to the link's file; a restarted one keeps its
        ``port``."""
        stores = bool(self.settings.storage_path)
        flags = arguments(
            SchedulerSettings,
            self.settings,
            **self._shared,
            port=port,
            workers_min=self.workers,
            servers_min=self.settings.servers,
            join_grace_seconds=0.0,
            idle_timeout_seconds=self.idle_timeout_seconds or None,
            # The launcher sees how its own workers end, and PSDIST_START_TIMEOUT is meant for them.
            start_timeout_seconds=0.0,
            store=self.directory / "scheduler.sqlite",
            address_file=self.link.file,
            storage_path=self.settings.storage_path or None,
            metrics_port=self.metrics_port,
            dashboard_fd=self.dashboard,
            dashboard_host=self.dashboard_host or None if self.dashboard is not None else None,
            dashboard_logs=self.dashboard_logs if self.dashboard is not None else None,
            storage_optional=self.storage_optional and stores,
            # Variables may have set them for another run.
            **({} if self.dashboard is not None else {"dashboard_key_file": None}),
            **({} if stores else dict.fromkeys(("keep_last", "keep_every", "no_save_at_end", "fresh"))),
        )
        argv = (*program("psdist_scheduler"), *flags)
        descriptors = () if self.dashboard is None else (self.dashboard,)
        return ProcessSpec(ProcessKey("scheduler", 0), argv, self.link.environment(base), descriptors=descriptors)

    def server(self, number: int, base: Mapping[str, str]) -> ProcessSpec:
        """Return the process of one server."""
        devices = self.settings.devices
        flags = arguments(
            ServerSettings,
            self.settings,
            **self._shared,
            port=0,
            scheduler_file=self.link.file,
            start_timeout_seconds=self.start_timeout_seconds,
            server_id=f"server-{number}",
            kernel_threads=self.settings.kernel_threads or _kernel_threads_of_each(self.settings.servers),
            drain_timeout_seconds=self.drain_timeout_seconds,
            device=devices[number % len(devices)],
            # The given port is the scheduler's, which lists those of all others.
            metrics_port=None if self.metrics_port is None else 0,
        )
        argv = (*program("psdist_server"), *flags)
        return ProcessSpec(ProcessKey("server", number), argv, self.link.environment(base))

    def snapshot(self, base: Mapping[str, str]) -> ProcessSpec:
        """Return the process that requests the last snapshot."""
        return ProcessSpec(
            ProcessKey("snapshot", 0),
            (*program("psdist.launcher.scheduler_calls"), "save"),
            self.link.environment(base),
        )

    @property
    def _shared(self) -> dict[str, Any]:
        """Settings of scheduler and servers."""
        return {
            "host": self.host,
            "insecure": self.link.insecure or not is_loopback(self.host),  # Whoever chose the host has allowed it.
            "metrics_host": self.metrics_host or None if self.metrics_port is not None else None,
            "run_id": self.link.run_id,
            "lifeline_fd": self.lifeline,
            "log_format": self.settings.log_format,
        }


def server_number(server_id: str) -> int | None:
    """Return the number of a server of this plan by its id; None for servers that somebody else started."""
    number = server_id.removeprefix("server-")
    return int(number) if number != server_id and number.isascii() and number.isdigit() else None


def _kernel_threads_of_each(servers: int) -> int:
    """Return the kernel threads for each server, so that together they have one for each core."""
    return max(1, usable_cores() // servers)


def program(module: str) -> tuple[str, ...]:
    """Return the command of one of psdist's own programs, without arguments. Raises ConfigurationError."""
    # -P: a file in the user's directory that is named like a standard module must not break our programs.
    return (python(), "-P", "-m", module)
