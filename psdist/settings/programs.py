"""Command lines of ``psdist-scheduler`` and ``psdist-server``, and flags that other programs share with them.

``scheduler_settings`` and ``server_settings`` turn a command line and the environment into a frozen dataclass. Wrong
input ends the program with status 2. Nothing is connected or bound here.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args

from psdist.errors import ConfigurationError, InsecureBindError, InvalidArgumentError
from psdist.settings import exit_codes, preflight
from psdist.settings.config import (
    DRAIN_TIMEOUT_SECONDS,
    FAILURE_TIMEOUT_SECONDS,
    START_TIMEOUT_SECONDS,
    WORKER_TIMEOUT_SECONDS,
    TransportName,
    address_text,
    await_address,
    check_run_id,
    create_token_file,
    default_store,
    device_text,
    find_scheduler,
    find_token,
    is_loopback,
    storage_text,
    store_file,
)
from psdist.settings.flags import CommandLine, Flag, fail, grouped, integer, one_of, seconds, text
from psdist.snapshots.policy import DEFAULT_POLICY, KEEP_MAX, STEPS_MAX, SavePolicy, parse_interval
from psdist.wire.limits import REPLICAS_MAX

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings:
    """Settings of both programs.

    run_id: empty to take the scheduler's.
    token: empty for none.
    """

    host: str
    port: int
    run_id: str
    lifeline_fd: int | None
    insecure: bool
    advertise: str
    token: str
    log_format: str
    log_level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings(ProgramSettings):
    """Settings of ``psdist-scheduler``. An empty ``run_id`` lets the scheduler choose."""

    workers_min: int
    servers_min: int
    replicas: int
    failure_timeout_seconds: float
    worker_timeout_seconds: float
    join_grace_seconds: float
    idle_timeout_seconds: float
    start_timeout_seconds: float
    #: File of the store; None keeps it in memory.
    store_path: Path | None
    address_file: Path | None
    #: Location of snapshots: an absolute path or a URL; empty for none.
    storage: str = ""
    policy: SavePolicy = field(default_factory=SavePolicy)
    #: Start a new run; refused if the storage has snapshots.
    fresh: bool = False
    #: If the storage cannot be written, start anyway and save nothing.
    storage_optional: bool = False
    #: The store is the default one: if its directory cannot be created, only warn.
    store_optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(ProgramSettings):
    """Settings of ``psdist-server``. If ``scheduler`` is empty, ``scheduler_address`` waits for the file."""

    scheduler: str
    scheduler_file: Path | None
    start_timeout_seconds: float
    server_id: str
    kernel_threads: int | None
    #: Longest wait after SIGTERM for its shards to be moved to other servers.
    drain_timeout_seconds: float
    #: Transport of updates between servers.
    transport: TransportName = "auto"
    #: Port of the TCP transport; 0 takes a free one.
    data_port: int = 0
    #: Device of weights and optimizer state: "cpu", "cuda" or "cuda:N".
    device: str = "cpu"

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


def check_machine(program: str) -> None:
    """End the program with status 69 if this machine's limits do not allow a service to run."""
    try:
        preflight.require_for_service()
    except ConfigurationError as error:
        fail(program, str(error), exit_codes.UNAVAILABLE)


def scheduler_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> SchedulerSettings:
    """Return the settings of ``psdist-scheduler`` from its command line, without the program's name. Exits with 2 if
    wrong."""
    environ = os.environ if environ is None else environ
    line = scheduler_line()
    given = line.parse(argv, environ)
    try:
        policy = save_policy(given, bool(given.storage_path))
        if given.create_token:
            create_token_file(environ, given.token_file)
    except ConfigurationError as error:
        fail(line.program, str(error))
    return _settings(
        SchedulerSettings,
        given,
        workers_min=given.min_workers,
        servers_min=given.min_servers,
        failure_timeout_seconds=given.failure_timeout,
        worker_timeout_seconds=given.worker_timeout,
        join_grace_seconds=given.join_grace,
        idle_timeout_seconds=given.idle_timeout,
        start_timeout_seconds=given.start_timeout,
        store_path=default_store(environ, given.run_id, given.port) if given.store is None else store_file(given.store),
        store_optional=given.store is None,
        token=_program_token(line.program, given, environ),
        storage=given.storage_path or "",
        policy=policy,
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
    return _settings(
        ServerSettings,
        given,
        scheduler=scheduler,
        start_timeout_seconds=given.start_timeout,
        drain_timeout_seconds=given.drain_timeout,
        token=_program_token(line.program, given, environ),
    )


def _settings(cls: type[T], given: Namespace, **others: Any) -> T:
    """Build the settings. Those not in ``others`` have the name of their flag."""
    names = {field.name for field in fields(cls)} - others.keys()
    return cls(**{name: getattr(given, name) for name in names}, **others)


def _program_token(program: str, given: Namespace, environ: Mapping[str, str]) -> str:
    """Return the token. Refuses to bind beyond this machine without ``--insecure``, or without a token."""
    try:
        token = find_token(environ, token_file=given.token_file)
        if not is_loopback(given.host) and not given.insecure:
            raise InsecureBindError(
                f"--host {given.host} would listen beyond this machine without encryption: bind 127.0.0.1, or add "
                "--insecure if the network is private"
            )
        if not is_loopback(given.host) and not token:
            raise InsecureBindError(
                f"--host {given.host} would admit everybody who can reach it: set PSDIST_TOKEN or --token-file"
            )
    except InvalidArgumentError as error:
        fail(program, str(error))
    return token


def _name_text(value: str) -> str:
    from psdist.types import check_name  # only a server needs the optimizers that come with it

    return check_name(value, "the id")


SCHEDULER_FLAG: Final = Flag("--scheduler", "the scheduler", address_text, "", "HOST:PORT")
SCHEDULER_FILE_FLAG: Final = Flag(
    "--scheduler-file", "file in which the scheduler writes its address", Path, None, "FILE"
)
# PSDIST_TOKEN takes precedence over PSDIST_TOKEN_FILE, so that variable does not set this flag: see find_token.
TOKEN_FILE_FLAG: Final = Flag(
    "--token-file", "file with the run's token (or set PSDIST_TOKEN)", Path, None, "FILE", twin=False
)
FORMAT_FLAG: Final = Flag("--format", "table or json", one_of("table", "json"), "table", "FORMAT")

#: Headings of flags that several programs share.
TIMEOUTS_TITLE: Final = "timeouts"
_NETWORK_TITLE: Final = "network and security"

_LISTEN_FLAGS: Final = grouped(
    _NETWORK_TITLE,
    Flag("--host", "address to listen on", text, "127.0.0.1", "HOST"),
    Flag("--port", "port to listen on; 0 takes a free one", integer(0, 65535), 0, "PORT"),
)


def run_id_flag(help_text: str = "name of the run; refused if the scheduler serves another") -> Flag:
    """Return the flag for a run's name."""
    return Flag("--run-id", help_text, check_run_id, "", "NAME")


def log_level_flag(help_text: str, default: str) -> Flag:
    """Return the flag for the least level that is logged."""
    return Flag("--log-level", help_text, one_of("debug", "info", "warning", "error"), default, "LEVEL")


def _process_flags() -> tuple[Flag, ...]:
    return (
        *grouped(
            _NETWORK_TITLE,
            Flag("--advertise", "address at which others reach this process", address_text, "", "HOST:PORT"),
            Flag("--insecure", "allow a --host beyond this machine without encryption (private networks)"),
            TOKEN_FILE_FLAG,
        ),
        *grouped(
            "output",
            Flag("--log-format", "console or json", one_of("console", "json"), "console", "FORMAT"),
            log_level_flag("least level shown", "info"),
        ),
        Flag("--lifeline-fd", "inherited pipe; this process ends when it does", integer(0), None, "N"),
    )


def timeout_flags() -> tuple[Flag, ...]:
    """Return the lease flags, for every program that starts a scheduler."""
    return grouped(
        TIMEOUTS_TITLE,
        Flag("--failure-timeout", "silence after which a server is replaced", seconds(0.05), FAILURE_TIMEOUT_SECONDS,
             "SECONDS"),
        Flag("--worker-timeout", "silence after which a worker is expelled; must be longer than a script holds the "
             "interpreter. The death of a worker is noticed immediately", seconds(0.05), WORKER_TIMEOUT_SECONDS,
             "SECONDS"),
    )  # fmt: skip


def storage_flags(default: str) -> tuple[Flag, ...]:
    """Return the snapshot flags, for every program that starts a scheduler.

    default: the default storage, for the help.
    """
    return grouped(
        "snapshots",
        Flag("--storage-path", f"directory or URL (s3://, gs://, az://) for snapshots, or none (default: {default}). "
             "A run of the same --run-id resumes from the newest snapshot there", storage_text, None, "PATH"),
        Flag("--save-interval", "time between snapshots: 100 (steps), 30s, 5m, 2h; 0 takes one at the end only "
             "(default: 10m if there is a storage)", parse_interval, None, "EVERY"),
        Flag("--keep-last", "number of newest snapshots to keep", integer(1, KEEP_MAX), 3, "N"),
        Flag("--keep-every", "also keep the first snapshot of every STEPS steps", integer(0, STEPS_MAX), 0, "STEPS"),
        Flag("--no-save-at-end", "take no snapshot when the run ends"),
        Flag("--fresh", "start a new run; refused if the storage has snapshots"),
    )  # fmt: skip


def save_policy(given: Namespace, stored: bool) -> SavePolicy:
    """Return the policy in the parsed ``storage_flags``. Raises ConfigurationError.

    stored: True if there is a storage.
    """
    if given.save_interval and any(given.save_interval) and not stored:
        raise ConfigurationError("--save-interval needs a storage: pass --storage-path with a directory or URL")
    default = (DEFAULT_POLICY.steps, DEFAULT_POLICY.seconds) if stored else (0, 0.0)
    steps, every = default if given.save_interval is None else given.save_interval
    return SavePolicy(steps, every, given.keep_last, given.keep_every, not given.no_save_at_end)


def scheduler_line() -> CommandLine:
    """Return the command line of ``psdist-scheduler``."""
    return CommandLine(
        "psdist-scheduler",
        "Keeps the membership and the cluster map of one run.",
        (
            *_LISTEN_FLAGS,
            run_id_flag("name of the run"),
            Flag("--min-workers", "workers to wait for", integer(1), 1, "N", variables=("DMLC_NUM_WORKER",)),
            Flag("--min-servers", "servers to wait for", integer(1), 1, "N", variables=("DMLC_NUM_SERVER",)),
            Flag("--replicas", "copies of each shard, each on another server", integer(1, REPLICAS_MAX), 1, "N"),
            *timeout_flags(),
            *grouped(
                TIMEOUTS_TITLE,
                Flag("--join-grace", "wait for late workers when parameters are created", seconds(), 0.0, "SECONDS"),
                Flag("--idle-timeout", "end the run, servers first, after this time without workers, once there were "
                     "some; a last snapshot is saved first. Must be longer than a worker's restart; 0 never ends",
                     seconds(), 0.0, "SECONDS"),
                Flag("--start-timeout", "end the run everywhere if the required workers and servers have not joined "
                     "within this time, as when scripts fail before psdist.init(); 0 waits for ever", seconds(), 0.0,
                     "SECONDS"),
            ),
            Flag("--store", "SQLite file from which a restarted scheduler continues the run, or memory for none "
                 "(default: a file below $XDG_STATE_HOME/psdist if --run-id and --port are given, otherwise none). It "
                 "is deleted when the run ends in order", str, None, "FILE"),
            Flag("--address-file", "file to write HOST:PORT into once listening", Path, None, "FILE"),
            *storage_flags("none"),
            Flag("--storage-optional", "if the storage cannot be written, warn and take no snapshots"),
            *_process_flags(),
            Flag("--create-token", "if the token's file does not exist, write a new random token to it"),
        ),
        first=("--host", "--port", "--min-workers", "--min-servers", "--storage-path"),
    )  # fmt: skip


def server_line() -> CommandLine:
    """Return the command line of ``psdist-server``."""
    return CommandLine(
        "psdist-server",
        "Holds a share of the parameters and of the optimizer's state.",
        (
            SCHEDULER_FLAG,
            SCHEDULER_FILE_FLAG,
            *_LISTEN_FLAGS,
            *grouped(
                _NETWORK_TITLE,
                Flag("--data-port", "port of the TCP transport; 0 takes a free one",
                     integer(0, 65535), 0, "PORT"),
            ),
            Flag("--server-id", "id of this server (default: its host's name, with a number appended from the second "
                 "server of a host on; server-N on loopback)", _name_text, "", "ID"),
            Flag("--kernel-threads", "threads that apply updates (default: one per core, shared with servers already "
                 "on this host)", integer(1, 1024), None, "N"),
            Flag("--transport", "transport of updates to copies of shards: auto, shm, tcp or grpc, the fallback if the "
                 "others are unavailable", one_of(*get_args(TransportName)), "auto", "NAME"),
            Flag("--device", "device that holds weights and optimizer state and applies updates: cpu, cuda or cuda:N",
                 device_text, "cpu", "NAME"),
            *grouped(
                TIMEOUTS_TITLE,
                Flag("--start-timeout", "longest wait for the scheduler: its address file, its name, its answer",
                     seconds(), START_TIMEOUT_SECONDS, "SECONDS"),
                Flag("--drain-timeout", "after SIGTERM, longest wait for its shards to be moved to other servers",
                     seconds(), DRAIN_TIMEOUT_SECONDS, "SECONDS"),
            ),
            run_id_flag(),
            *_process_flags(),
        ),
        first=("--scheduler", "--host", "--port", "--server-id", "--token-file"),
    )  # fmt: skip
