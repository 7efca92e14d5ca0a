"""Settings of ``psdist-scheduler`` and ``psdist-server``, and those that other programs share with them.

Each setting is declared once, as a field with its flag (``flags.setting``). A program takes the settings of its class
and of the class's bases. ``scheduler_settings`` and ``server_settings`` read a command line and the environment. Wrong
input ends the program with status 2. Nothing is connected or bound here.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, get_args

from psdist.addresses import is_loopback, loopback, parse_address
from psdist.errors import ConfigurationError, InsecureBindError, InsecureConnectError, InvalidArgumentError
from psdist.security.tls import Credentials
from psdist.security.tokens import require_root
from psdist.settings import exit_codes, own_process
from psdist.settings.config import (
    START_TIMEOUT_SECONDS,
    DashboardEndpoint,
    EtcdLocation,
    MetricsEndpoint,
    TransportName,
    address_text,
    await_address,
    check_run_id,
    create_token_file,
    default_store,
    device_text,
    find_scheduler,
    given_credentials,
    scheduler_text,
    storage_text,
    store_location,
)
from psdist.settings.flags import (
    CONFIG_FLAG,
    CommandLine,
    Flag,
    fail,
    flags_of,
    integer,
    one_of,
    read,
    seconds,
    setting,
    text,
)
from psdist.settings.foreign_flags import OF_SCHEDULER
from psdist.snapshots.policy import DEFAULT_POLICY, KEEP_MAX, STEPS_MAX, SavePolicy, parse_interval
from psdist.wire.limits import REPLICAS_MAX

#: Headings of flags that several programs share.
TIMEOUTS_TITLE: Final = "timeouts"
OUTPUT_TITLE: Final = "output"
SERVERS_TITLE: Final = "servers"
_NETWORK_TITLE: Final = "network and security"
_HOST: Final = "127.0.0.1"
_SNAPSHOTS_TITLE: Final = "snapshots"
MONITORING_TITLE: Final = "monitoring"
_STORAGE: Final = ("--storage-path",)

# --- settings that several programs declare with their own help or default --------------------------------------------


def run_id_setting(help_text: str) -> Any:
    """Declare the name of a run."""
    return setting(help_text, check_run_id, "", "NAME")


def log_level_setting(help_text: str, default: str) -> Any:
    """Declare the least level that is logged."""
    levels = one_of("debug", "info", "warning", "error")
    return setting(help_text, levels, default, "LEVEL", group=OUTPUT_TITLE)


def log_format_setting(default: str, note: str = "") -> Any:
    """Declare the form of log lines. note: appended to the help."""
    return setting(
        f"console, json (one object per line), or auto: console on a terminal, else json{note}",
        one_of("auto", "console", "json"), default, "FORMAT", group=OUTPUT_TITLE,
    )  # fmt: skip


def storage_path_setting(default_text: str, *, has_default: bool = False) -> Any:
    """Declare the storage of snapshots: an absolute path or a URL; empty for none.

    default_text: the meaning of None, for the help.
    has_default: True if None is a storage, too.
    """
    return setting(
        f"directory or URL (s3://, gs://, az://) for snapshots, or none (default: {default_text}). A run of the same "
        "--run-id resumes from the newest snapshot there",
        storage_text,
        None,
        "PATH",
        group=_SNAPSHOTS_TITLE,
        acts_unset=has_default,
    )


def scheduler_setting() -> Any:
    """Declare the scheduler's address."""
    return setting(
        "the scheduler; with a standby the addresses of both, divided by a comma", scheduler_text, "", "HOST:PORT",
        file_yields_to=("PSDIST_SCHEDULER_FILE", "DMLC_PS_ROOT_URI"),
    )  # fmt: skip


def scheduler_file_setting(group: str = "") -> Any:
    """Declare the file to read the scheduler's address from."""
    return setting(
        "file in which the scheduler writes its address", Path, None, "FILE", group=group,
        file_yields_to=("PSDIST_SCHEDULER", "DMLC_PS_ROOT_URI"),
    )  # fmt: skip


def token_file_setting() -> Any:
    """Declare the file with the run's token.

    PSDIST_TOKEN takes precedence over PSDIST_TOKEN_FILE, so that variable does not set this flag: see ``find_token``.
    """
    return setting(
        "file with the run's token (or set PSDIST_TOKEN)", Path, None, "FILE", twin=False, group=_NETWORK_TITLE,
        file_yields_to=("PSDIST_TOKEN", "PSDIST_TOKEN_FILE"),
    )  # fmt: skip


def start_timeout_setting(help_text: str, default: float = START_TIMEOUT_SECONDS) -> Any:
    """Declare a program's longest wait at its start."""
    return setting(help_text, seconds(), default, group=TIMEOUTS_TITLE)


# --- shared settings --------------------------------------------------------------------------------------------------


def _write_interval(interval: tuple[int, float]) -> str:
    return SavePolicy(*interval).interval or "0"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of every program that starts a scheduler."""

    replicas: int = setting(
        "copies of each shard, on different servers: with 2 nothing is lost when a server dies",
        integer(1, REPLICAS_MAX), 1, "N", group=SERVERS_TITLE,
    )  # fmt: skip
    failure_timeout_seconds: float = setting(
        "silence after which a server is replaced", seconds(0.05), 2.0, group=TIMEOUTS_TITLE
    )
    worker_timeout_seconds: float = setting(
        "silence after which a worker is expelled whose process is stopped or cut off. A busy one answers pings; the "
        "death of a worker is noticed immediately", seconds(0.05), 30.0, group=TIMEOUTS_TITLE,
    )  # fmt: skip
    storage_path: str | None = storage_path_setting("none")
    save_interval: tuple[int, float] | None = setting(
        "time between snapshots: 100 (steps), 30s, 5m, 2h; 0 takes one at the end only (default: 10m if there is a "
        "storage)", parse_interval, None, "EVERY", group=_SNAPSHOTS_TITLE, write=_write_interval,
    )  # fmt: skip
    keep_last: int = setting(
        "number of newest snapshots to keep", integer(1, KEEP_MAX), 3, "N",
        group=_SNAPSHOTS_TITLE, needs=_STORAGE,
    )  # fmt: skip
    keep_every: int = setting(
        "also keep the first snapshot of every STEPS steps", integer(0, STEPS_MAX), 0, "STEPS",
        group=_SNAPSHOTS_TITLE, needs=_STORAGE,
    )  # fmt: skip
    no_save_at_end: bool = setting("take no snapshot when the run ends", group=_SNAPSHOTS_TITLE, needs=_STORAGE)
    fresh: bool = setting(
        "refuse to start if the storage has snapshots, instead of resuming from them", name="--require-empty-storage",
        former="--fresh", group=_SNAPSHOTS_TITLE, needs=_STORAGE,
    )  # fmt: skip

    @property
    def has_storage(self) -> bool:
        """True if there is a storage for snapshots."""
        return bool(self.storage_path)

    @property
    def policy(self) -> SavePolicy:
        """When snapshots are taken. Raises ConfigurationError for an interval without a storage."""
        interval, is_stored = self.save_interval, self.has_storage
        if interval and any(interval) and not is_stored:
            raise ConfigurationError("--save-interval needs a storage: pass --storage-path with a directory or URL")
        if interval is None:
            interval = (DEFAULT_POLICY.steps, DEFAULT_POLICY.seconds) if is_stored else (0, 0.0)
        return SavePolicy(*interval, self.keep_last, self.keep_every, not self.no_save_at_end)


@dataclass(frozen=True, kw_only=True)
class MonitoringSettings:
    """Place of a program's metrics for Prometheus. metrics_port: None serves none."""

    metrics_port: int | None = setting(
        "serve metrics for Prometheus on this port; 0 takes a free one, which psdist status shows (default: none)",
        integer(0, 65535), None, "PORT", group=MONITORING_TITLE,
    )  # fmt: skip
    metrics_host: str = setting(
        "address of the metrics; beyond this machine they need a token, and TLS or --insecure (default: loopback)",
        text, "", "HOST", group=MONITORING_TITLE, needs=("--metrics-port",),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DashboardSettings:
    """Place of a run's dashboard. dashboard_port: None serves none."""

    dashboard_port: int | None = setting(
        "serve the dashboard, a page that shows the run live, on this port of the scheduler; 0 takes a free one "
        "(default: none)", integer(0, 65535), None, "PORT", group=MONITORING_TITLE,
    )  # fmt: skip
    dashboard_host: str = setting(
        "address of the dashboard; beyond this machine it needs a token, and TLS or --insecure (default: loopback)",
        text, "", "HOST", group=MONITORING_TITLE, needs=("--dashboard", "--dashboard-port", "--dashboard-fd"),
    )  # fmt: skip
    dashboard_key_file: Path | None = setting(
        "file with the key of the dashboard's links, which is written if it does not exist; replace or delete it to "
        "revoke them (default: a key that follows from the token)", Path, None, "FILE", group=MONITORING_TITLE,
        needs=("--dashboard", "--dashboard-port", "--dashboard-fd"),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """TLS identity of every program that connects to others: all three files or none. Without them ``insecure`` permits
    plaintext beyond this machine."""

    tls_ca: Path | None = setting(
        "the CA's certificate, in PEM; with --tls-cert and --tls-key all connections use mutual TLS", Path, None,
        "FILE", group=_NETWORK_TITLE,
    )  # fmt: skip
    tls_cert: Path | None = setting(
        "certificate of this process, in PEM; read again when the files change", Path, None, "FILE",
        group=_NETWORK_TITLE,
    )  # fmt: skip
    tls_key: Path | None = setting(
        "private key of --tls-cert, in PEM, not encrypted", Path, None, "FILE", group=_NETWORK_TITLE
    )
    insecure: bool = setting(
        "allow traffic with other machines without encryption (private networks)", group=_NETWORK_TITLE
    )


@dataclass(frozen=True, kw_only=True)
class ProgramSettings(MonitoringSettings, TlsSettings):
    """Settings of scheduler and server."""

    host: str = setting(
        "address to listen on; ::1 by default where only that exists", text, _HOST, "HOST", group=_NETWORK_TITLE
    )
    port: int = setting("port to listen on; 0 takes a free one", integer(0, 65535), 0, "PORT", group=_NETWORK_TITLE)
    run_id: str = run_id_setting("name of the run; refused if the scheduler serves another")
    advertise: str = setting(
        "address at which others reach this process", address_text, "", "HOST:PORT", group=_NETWORK_TITLE
    )
    token_file: Path | None = token_file_setting()
    log_format: str = log_format_setting("auto")
    log_level: str = log_level_setting("least level shown", "info")
    lifeline_fd: int | None = setting("inherited pipe; this process ends when it does", integer(0), None, "N")
    credentials: Credentials = field(default_factory=Credentials)

    @property
    def metrics(self) -> MetricsEndpoint | None:
        """Place of this process's metrics; None serves none."""
        if self.metrics_port is None:
            return None
        return MetricsEndpoint(self.metrics_host or loopback(), self.metrics_port, self.credentials)


# --- psdist-scheduler -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(RunSettings, DashboardSettings, ProgramSettings):
    """Settings of ``psdist-scheduler``. An empty ``run_id`` lets the scheduler choose."""

    run_id: str = run_id_setting("name of the run")
    workers_min: int = setting(
        "workers to wait for", integer(1), 1, "N", name="--min-workers", variables=("DMLC_NUM_WORKER",)
    )
    servers_min: int = setting(
        "servers to wait for", integer(1), 1, "N", name="--min-servers", variables=("DMLC_NUM_SERVER",)
    )
    join_grace_seconds: float = setting(
        "wait for late workers when parameters are created", seconds(), 0.0, group=TIMEOUTS_TITLE
    )
    idle_timeout_seconds: float = setting(
        "end the run, servers first, after this time without workers, once there were some; a last snapshot is saved "
        "first. Must be longer than a worker's restart; 0 never ends", seconds(), 0.0, group=TIMEOUTS_TITLE,
    )  # fmt: skip
    start_timeout_seconds: float = start_timeout_setting(
        "end the run everywhere if the required workers and servers have not joined within this time, as when scripts "
        "fail before psdist.init(); 0 waits for ever", 0.0,
    )  # fmt: skip
    suspend_time_limits: bool = setting(
        "for a run whose worker stands in a debugger: no worker is expelled for silence, and calls have no time limits",
        group=TIMEOUTS_TITLE,
    )  # fmt: skip
    store: str | None = setting(
        "SQLite file from which a restarted scheduler continues the run, or etcd://HOST:PORT,.../PREFIX (etcds:// with "
        "TLS), where another scheduler can take over, or memory for none (default: a file below "
        "$XDG_STATE_HOME/psdist if --run-id and --port are given, otherwise none). It is deleted when the run ends in "
        "order", str, None, "FILE|URL",
    )  # fmt: skip
    standby: bool = setting("wait until no other scheduler leads the run, then lead it (needs --store etcd://...)")
    address_file: Path | None = setting("file to write HOST:PORT into once listening", Path, None, "FILE")
    #: If the storage cannot be written, start anyway and save nothing.
    storage_optional: bool = setting(
        "if the storage cannot be written, warn and take no snapshots",
        group=_SNAPSHOTS_TITLE,
        needs=_STORAGE,
    )
    create_token: bool = setting(
        "if the token's file does not exist, write a new random token to it", group=_NETWORK_TITLE
    )
    dashboard_fd: int | None = setting(
        "inherited socket that listens for the dashboard", integer(0), None, "N", twin=False, group=MONITORING_TITLE
    )
    dashboard_logs: Path | None = setting(
        "directory with MEMBER.log and scheduler.log, whose last lines the dashboard shows", Path, None, "DIR",
        twin=False, group=MONITORING_TITLE, needs=("--dashboard-port", "--dashboard-fd"),
    )  # fmt: skip
    #: Place of the store; None keeps it in memory.
    store_place: Path | EtcdLocation | None = None

    @property
    def dashboard(self) -> DashboardEndpoint | None:
        """Place of the dashboard; None serves none."""
        if self.dashboard_port is None and self.dashboard_fd is None:
            return None
        host = self.dashboard_host or loopback()
        port, files = self.dashboard_port or 0, (self.dashboard_logs, self.dashboard_key_file)
        return DashboardEndpoint(host, port, self.credentials, self.dashboard_fd, *files, self.advertise)

    @property
    def storage(self) -> str:
        """Location of snapshots: an absolute path or a URL; empty for none."""
        return self.storage_path or ""

    @property
    def store_optional(self) -> bool:
        """True for the default store: if its directory cannot be created, only warn."""
        return self.store is None


def scheduler_line() -> CommandLine:
    """Return the command line of ``psdist-scheduler``."""
    return CommandLine(
        "psdist-scheduler",
        "Keeps the membership and the cluster map of one run.",
        (*flags_of(SchedulerSettings), CONFIG_FLAG),
        first=("--host", "--port", "--min-workers", "--min-servers", "--storage-path"),
        elsewhere=OF_SCHEDULER,
    )


def scheduler_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> SchedulerSettings:
    """Return the settings of ``psdist-scheduler`` from its command line, without the program's name. Exits with 2 if
    wrong."""
    environ = os.environ if environ is None else environ
    line = scheduler_line()
    given = line.parse(argv, environ)
    try:
        store = default_store(environ, given.run_id, given.port) if given.store is None else store_location(given.store)
        _ = read(SchedulerSettings, given).policy  # Raises if it is wrong.
        if given.create_token:
            create_token_file(environ, given.token_file)
    except ConfigurationError as error:
        fail(line.program, str(error))
    credentials = _program_credentials(line.program, given, environ)
    try:
        require_root(credentials.token)
        _check_store(store, given.standby, credentials)
    except InvalidArgumentError as error:
        fail(line.program, str(error))
    return read(SchedulerSettings, given, store_place=store, host=_host(given), credentials=credentials)


def _check_store(store: Path | EtcdLocation | None, standby: bool, credentials: Credentials) -> None:
    """Raise ConfigurationError or InsecureBindError if the store does not fit the other settings."""
    if not isinstance(store, EtcdLocation):
        if standby:
            raise ConfigurationError(
                "--standby needs a store that two schedulers can reach: --store etcd://HOST:PORT/PREFIX"
            )
        return
    if store.secure and credentials.tls is None:
        raise ConfigurationError(
            f"--store {store} needs --tls-ca, --tls-cert and --tls-key: etcd asks for a certificate"
        )
    for endpoint in store.endpoints if not store.secure else ():
        if not is_loopback(parse_address(endpoint)[0]) and not credentials.insecure:
            raise InsecureBindError(
                f"--store {store} sends the state of the run to another machine without encryption: use etcds:// with "
                "--tls-ca, --tls-cert and --tls-key, or pass --insecure on a private network"
            )


# --- psdist-server ----------------------------------------------------------------------------------------------------


def _server_id(value: str) -> str:
    from psdist.types import check_name  # only a server needs the optimizers that come with it

    return check_name(value, "the id")


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ProgramSettings):
    """Settings of ``psdist-server``. If ``scheduler`` is empty, ``scheduler_address`` waits for the file."""

    scheduler: str = scheduler_setting()
    scheduler_file: Path | None = scheduler_file_setting()
    data_port: int = setting(
        "port of the TCP transport; 0 takes a free one", integer(0, 65535), 0, "PORT", group=_NETWORK_TITLE
    )
    server_id: str = setting(
        "id of this server (default: its host's name, with a number appended from the second server of a host on; "
        "server-N on loopback)", _server_id, "", "ID",
    )  # fmt: skip
    kernel_threads: int | None = setting(
        "threads that apply updates (default: one per core, shared with servers already on this host)",
        integer(1, 1024), None, "N",
    )  # fmt: skip
    transport: TransportName = setting(
        "transport of updates to copies of shards: auto, shm, tcp or grpc, the fallback if the others are unavailable",
        one_of(*get_args(TransportName)), "auto", "NAME",
    )  # fmt: skip
    device: str = setting(
        "device that holds weights and optimizer state and applies updates: cpu, cuda or cuda:N",
        device_text, "cpu", "NAME",
    )  # fmt: skip
    start_timeout_seconds: float = start_timeout_setting(
        "longest wait for the scheduler: its address file, its name, its answer"
    )
    drain_timeout_seconds: float = setting(
        "after SIGTERM, longest wait for its shards to be moved to other servers", seconds(), 30.0, group=TIMEOUTS_TITLE
    )

    @property
    def carriers(self) -> tuple[str, ...]:
        """Transports for updates between servers in order of preference, besides gRPC."""
        return tuple(name for name in ("shm", "tcp") if self.transport in ("auto", name))

    def scheduler_address(self) -> str:
        """Return ``host:port`` of the scheduler; blocks until its address file exists. Raises
        SchedulerUnreachableError."""
        if self.scheduler or self.scheduler_file is None:
            return self.scheduler
        return await_address(self.scheduler_file, self.start_timeout_seconds)


def server_line() -> CommandLine:
    """Return the command line of ``psdist-server``."""
    return CommandLine(
        "psdist-server",
        "Holds a share of the parameters and of the optimizer's state.",
        (*flags_of(ServerSettings), CONFIG_FLAG),
        first=("--scheduler", "--host", "--port", "--server-id", "--token-file"),
    )


def server_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> ServerSettings:
    """Return the settings of ``psdist-server`` from its command line, without the program's name. Exits with 2 if
    wrong."""
    environ = os.environ if environ is None else environ
    line = server_line()
    given = line.parse(argv, environ)
    scheduler = given.scheduler
    if not scheduler and given.scheduler_file is None:
        try:
            scheduler = find_scheduler(environ)
        except InvalidArgumentError as error:
            fail(line.program, str(error))
        if not scheduler:
            fail(line.program, "no scheduler: pass --scheduler HOST:PORT or set PSDIST_SCHEDULER")
    credentials = _program_credentials(line.program, given, environ)
    try:
        credentials.require_private_route(scheduler)
    except InsecureConnectError as error:
        fail(line.program, str(error))
    return read(ServerSettings, given, scheduler=scheduler, host=_host(given), credentials=credentials)


# --- both -------------------------------------------------------------------------------------------------------------


def check_machine(program: str) -> None:
    """End the program with status 69 if this machine's limits do not allow a service to run."""
    try:
        own_process.require_for_service()
    except ConfigurationError as error:
        fail(program, str(error), exit_codes.UNAVAILABLE)


def _host(given: Namespace) -> str:
    """Return the address to listen on: by default the loopback address, which is ``::1`` on a host without IPv4."""
    is_default = given.host == _HOST and "host" not in given.explicit
    return loopback() if is_default else str(given.host)


def _program_credentials(program: str, given: Namespace, environ: Mapping[str, str]) -> Credentials:
    """Return the credentials. Refuses to bind beyond this machine without TLS or ``--insecure``, and without TLS or a
    token."""
    try:
        credentials = given_credentials(given, environ)
        credentials.require_private(given.host, f"--host {given.host} listens")
        if credentials.tls is None and not is_loopback(given.host) and not credentials.token:
            raise InsecureBindError(
                f"--host {given.host} would admit everybody who can reach it: set PSDIST_TOKEN or --token-file"
            )
    except InvalidArgumentError as error:
        fail(program, str(error))
    return credentials


# --- flags of commands that talk to a scheduler -----------------------------------------------------------------------

_SERVER_FLAGS: Final = {flag.name: flag for flag in flags_of(ServerSettings)}
SCHEDULER_FLAG: Final = _SERVER_FLAGS["--scheduler"]
TOKEN_FILE_FLAG: Final = _SERVER_FLAGS["--token-file"]
#: How a command shows who it is.
CREDENTIAL_FLAGS: Final = (TOKEN_FILE_FLAG, *flags_of(TlsSettings))
FORMAT_FLAG: Final = Flag("--format", "table or json", one_of("table", "json"), "table", "FORMAT")


def run_id_flag(help_text: str = _SERVER_FLAGS["--run-id"].help) -> Flag:
    """Return the flag for a run's name."""
    return replace(_SERVER_FLAGS["--run-id"], help=help_text)
