"""Settings of the programs and of the client library: command line and environment in, frozen dataclasses out.

``scheduler_settings`` and ``server_settings`` read a command line (wrong input ends the program with status 2),
``client_settings`` the environment of a worker's script (wrong input raises). Nothing is connected or bound here; the
only waiting is ``await_address``, for the file in which a scheduler that starts at the same time leaves its address.

A token is never taken from a command line, where everybody could read it: it comes from an argument of the library,
else from ``--token-file``, ``PSDIST_TOKEN`` or the file named by ``PSDIST_TOKEN_FILE``, in this order.
"""

from __future__ import annotations

import ipaddress
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from psdist.errors import ConfigurationError, InsecureBindError, InvalidArgumentError, SchedulerUnreachableError
from psdist.snapshots.policy import DEFAULT_POLICY, KEEP_MAX, STEPS_MAX, SavePolicy, parse_interval

if TYPE_CHECKING:
    from psdist.settings.flags import CommandLine, Flag

#: How gradients and weights travel: "auto" shares memory with the servers of this host and uses gRPC to all others,
#: "grpc" never shares, "shm" fails where memory cannot be shared.
TransportName = Literal["auto", "grpc", "shm"]

START_TIMEOUT_SECONDS: Final = 60.0
#: Silence of a server, and of a worker, after which it is taken for lost.
FAILURE_TIMEOUT_SECONDS: Final = 2.0
WORKER_TIMEOUT_SECONDS: Final = 30.0
DRAIN_TIMEOUT_SECONDS: Final = 30.0
#: Copies of each shard that the scheduler can be asked for.
REPLICAS_MAX: Final = 2
TOKEN_CHARACTERS_MAX: Final = 4096
_ADDRESS_FILE_BYTES_MAX: Final = 512
_POLL_SECONDS: Final = 0.02
_RUN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_STORAGE_SCHEMES: Final = ("file", "s3", "gs", "az")
#: What ``--storage-path`` is given where there shall be no snapshots; a directory of this name is ./none.
_NO_STORAGE: Final = "none"


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What ``psdist-scheduler`` was told. An empty ``run_id`` lets the scheduler choose; an empty ``token`` is none."""

    host: str
    port: int
    run_id: str
    workers_min: int
    servers_min: int
    replicas: int
    failure_timeout_seconds: float
    worker_timeout_seconds: float
    join_grace_seconds: float
    store_path: Path | None
    address_file: Path | None
    lifeline_fd: int | None
    insecure: bool
    advertise: str
    token: str
    log_format: str
    log_level: str
    #: Where snapshots lie: an absolute path or a URL; empty for none.
    storage: str = ""
    policy: SavePolicy = field(default_factory=SavePolicy)
    #: Begin anew; refused where the storage has snapshots.
    fresh: bool = False
    #: Begin where nothing can be written to the storage, and save nothing; refused otherwise.
    storage_optional: bool = False


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What ``psdist-server`` was told. Where ``scheduler`` is empty, ``scheduler_address`` waits for the file."""

    scheduler: str
    scheduler_file: Path | None
    start_timeout_seconds: float
    host: str
    port: int
    advertise: str
    server_id: str
    kernel_threads: int | None
    #: When it is told to end, it waits at most so long for its shards to be moved to others.
    drain_timeout_seconds: float
    lifeline_fd: int | None
    insecure: bool
    token: str
    run_id: str
    log_format: str
    log_level: str

    def scheduler_address(self) -> str:
        """``host:port`` of the scheduler; blocks until its file is there. Raises SchedulerUnreachableError."""
        if self.scheduler or self.scheduler_file is None:
            return self.scheduler
        return await_address(self.scheduler_file, self.start_timeout_seconds)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What a worker's script was told by its launcher. ``scheduler`` is empty where there is none."""

    scheduler: str
    token: str
    run_id: str
    rank: int | None
    world_size: int
    local_rank: int
    worker_id: str | None
    transport: TransportName


# --- values -----------------------------------------------------------------------------------------------------------


def parse_address(value: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``. Raises ConfigurationError."""
    host, separator, port = value.strip().rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not separator or not bare or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"{value!r:.200} is not an address: write HOST:PORT", address=value[:200])
    if ":" in bare and bare == host:
        raise ConfigurationError(f"{value!r:.200} is ambiguous: write an IPv6 address as [ADDRESS]:PORT")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_run_id(value: str) -> str:
    """Returns ``value`` if it is 1 to 64 of ``A-Z a-z 0-9 . _ -``, which is safe in a file name."""
    if not _RUN_ID.fullmatch(value) or value.startswith("."):
        raise ConfigurationError(f"{value!r:.100} is not a run id: use 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    return value


def storage_text(value: str) -> str:
    """An absolute path, or a URL as it is, of what ``--storage-path`` was given; empty for ``none``.

    Raises ConfigurationError.
    """
    if not value or value == _NO_STORAGE:
        return ""
    scheme, separator, rest = value.partition("://")
    if not separator:
        return os.path.abspath(Path(value).expanduser())
    if scheme not in _STORAGE_SCHEMES or not rest.strip("/"):
        known = ", ".join(f"{each}://" for each in _STORAGE_SCHEMES)
        raise ConfigurationError(f"{value!r:.200} is no storage of snapshots: use a directory, or one of {known}")
    return value


def check_token(value: str, source: str) -> str:
    """Returns the token without surrounding blanks. Raises ConfigurationError, which never shows the token."""
    token = value.strip()
    if not token or len(token) > TOKEN_CHARACTERS_MAX or not token.isascii() or not token.isprintable():
        raise ConfigurationError(
            f"the token from {source} must be 1 to {TOKEN_CHARACTERS_MAX} printable ASCII characters on one line"
        )
    return token


def find_token(environ: Mapping[str, str], argument: str | None = None, token_file: Path | None = None) -> str:
    """The token by the order in the module's text; empty where none is set. Raises ConfigurationError."""
    if argument:
        return check_token(argument, "the argument")
    if token_file is not None:
        return _read_token(token_file, "--token-file")
    if environ.get("PSDIST_TOKEN"):
        return check_token(environ["PSDIST_TOKEN"], "PSDIST_TOKEN")
    if environ.get("PSDIST_TOKEN_FILE"):
        return _read_token(Path(environ["PSDIST_TOKEN_FILE"]), "PSDIST_TOKEN_FILE")
    return ""


def _read_token(path: Path, source: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(TOKEN_CHARACTERS_MAX + 64)
    except OSError as error:
        raise ConfigurationError(f"the token file {path} of {source} cannot be read: {error.strerror}") from None
    return check_token(content.decode("ascii", "replace"), f"{source} ({path})")


# --- the scheduler's address ------------------------------------------------------------------------------------------


def read_address(path: Path) -> str:
    """The address in a scheduler's address file; empty while there is none. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            value = file.read(_ADDRESS_FILE_BYTES_MAX).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigurationError(f"the address file {path} cannot be read: {error.strerror}") from None
    if value:
        parse_address(value)
    return value


def await_address(path: Path, timeout_seconds: float = START_TIMEOUT_SECONDS) -> str:
    """The address in a scheduler's address file; blocks until it is there.

    Raises SchedulerUnreachableError after ``timeout_seconds``.
    """
    deadline = time.monotonic() + timeout_seconds
    while not (address := read_address(path)):
        if time.monotonic() >= deadline:
            raise SchedulerUnreachableError(
                f"no scheduler left its address in {path} within {timeout_seconds:g} s: is it running, with "
                f"--address-file {path}?",
                path=path,
            )
        time.sleep(_POLL_SECONDS)
    return address


def find_scheduler(environ: Mapping[str, str]) -> str:
    """The scheduler's address from ``PSDIST_SCHEDULER`` or ps-lite's ``DMLC_PS_ROOT_URI`` and ``_PORT``; else empty."""
    address = environ.get("PSDIST_SCHEDULER", "")
    if not address and environ.get("DMLC_PS_ROOT_URI") and environ.get("DMLC_PS_ROOT_PORT"):
        address = f"{environ['DMLC_PS_ROOT_URI']}:{environ['DMLC_PS_ROOT_PORT']}"
    if address:
        parse_address(address)
    return address


# --- the client -------------------------------------------------------------------------------------------------------


def client_settings(
    environ: Mapping[str, str] | None = None,
    *,
    scheduler: str | None = None,
    token: str | None = None,
    run_id: str | None = None,
    transport: str | None = None,
) -> ClientSettings:
    """Settings of a worker's client from ``environ`` (default: this process's); arguments count more.

    Blocks for at most ``PSDIST_START_TIMEOUT`` seconds (60) where only ``PSDIST_SCHEDULER_FILE`` names the scheduler.
    Raises ConfigurationError for a value that is wrong, SchedulerUnreachableError where the file does not appear.
    """
    environ = os.environ if environ is None else environ
    if scheduler:
        parse_address(scheduler)
    file = environ.get("PSDIST_SCHEDULER_FILE", "")
    if not scheduler and not environ.get("PSDIST_SCHEDULER") and file:
        address = await_address(Path(file), _number(environ, "PSDIST_START_TIMEOUT", START_TIMEOUT_SECONDS))
    else:
        address = scheduler or find_scheduler(environ)
    chosen_run = run_id or environ.get("PSDIST_RUN_ID", "")
    rank = _integer(environ, ("RANK", "DMLC_WORKER_ID"), 0)
    world_size = _integer(environ, ("WORLD_SIZE", "DMLC_NUM_WORKER"), 1)
    if rank is not None and world_size is not None and rank >= world_size:
        raise ConfigurationError(f"RANK {rank} is not below WORLD_SIZE {world_size}: ranks count from 0")
    return ClientSettings(
        scheduler=address,
        token=find_token(environ, token),
        run_id=check_run_id(chosen_run) if chosen_run else "",
        rank=rank,
        world_size=world_size or 1,
        local_rank=_integer(environ, ("LOCAL_RANK",), 0) or 0,
        worker_id=environ.get("PSDIST_WORKER_ID") or None,
        transport=_find_transport(environ, transport),
    )


def _find_transport(environ: Mapping[str, str], argument: str | None) -> TransportName:
    source, value = "PSDIST_TRANSPORT", environ.get("PSDIST_TRANSPORT") or "auto"
    if argument is not None:
        source, value = "transport", argument
    for choice in get_args(TransportName):
        if value == choice:
            return cast(TransportName, choice)
    raise ConfigurationError(f"{source}={value!r:.80} is unknown: use one of {', '.join(get_args(TransportName))}")


def _integer(environ: Mapping[str, str], names: tuple[str, ...], minimum: int) -> int | None:
    for name in names:
        value = environ.get(name)
        if value:
            if not (value.isascii() and value.isdigit()) or int(value) < minimum:
                raise ConfigurationError(f"{name}={value!r:.80} is not a whole number of at least {minimum}")
            return int(value)
    return None


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    from psdist.settings.flags import seconds

    try:
        return seconds()(environ[name]) if environ.get(name) else default
    except ValueError as error:
        raise ConfigurationError(f"{name}: {error}") from None


# --- the programs -----------------------------------------------------------------------------------------------------


def scheduler_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> SchedulerSettings:
    """Settings of ``psdist-scheduler`` from its command line, without the program's name. Exits with 2 if wrong."""
    environ = os.environ if environ is None else environ
    from psdist.settings.flags import fail

    line = _scheduler_line()
    given = line.parse(argv, environ)
    try:
        policy = save_policy(given, bool(given.storage_path))
    except ConfigurationError as error:
        fail(line.program, str(error))
    return SchedulerSettings(
        host=given.host,
        port=given.port,
        run_id=given.run_id,
        workers_min=given.min_workers,
        servers_min=given.min_servers,
        replicas=given.replicas,
        failure_timeout_seconds=given.failure_timeout,
        worker_timeout_seconds=given.worker_timeout,
        join_grace_seconds=given.join_grace,
        store_path=given.store,
        address_file=given.address_file,
        lifeline_fd=given.lifeline_fd,
        insecure=given.insecure,
        advertise=given.advertise,
        token=_program_token(line.program, given, environ),
        log_format=given.log_format,
        log_level=given.log_level,
        storage=given.storage_path or "",
        policy=policy,
        fresh=given.fresh,
        storage_optional=given.storage_optional,
    )


def server_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> ServerSettings:
    """Settings of ``psdist-server`` from its command line, without the program's name. Exits with 2 if wrong."""
    from psdist.settings.flags import fail

    environ = os.environ if environ is None else environ
    line = _server_line()
    given = line.parse(argv, environ)
    scheduler = given.scheduler
    if not scheduler and given.scheduler_file is None:
        try:
            scheduler = find_scheduler(environ)
        except InvalidArgumentError as error:
            fail(line.program, str(error))
        if not scheduler:
            fail(line.program, "no scheduler: pass --scheduler HOST:PORT or set PSDIST_SCHEDULER")
    return ServerSettings(
        scheduler=scheduler,
        scheduler_file=given.scheduler_file,
        start_timeout_seconds=given.start_timeout,
        host=given.host,
        port=given.port,
        advertise=given.advertise,
        server_id=given.server_id,
        kernel_threads=given.kernel_threads,
        drain_timeout_seconds=given.drain_timeout,
        lifeline_fd=given.lifeline_fd,
        insecure=given.insecure,
        token=_program_token(line.program, given, environ),
        run_id=given.run_id,
        log_format=given.log_format,
        log_level=given.log_level,
    )


def _program_token(program: str, given: Any, environ: Mapping[str, str]) -> str:
    """The token; refuses a bind that is not safe without encryption, or without a token."""
    from psdist.settings.flags import fail

    try:
        token = find_token(environ, token_file=given.token_file)
        if not is_loopback(given.host) and not given.insecure:
            raise InsecureBindError(
                f"--host {given.host} would listen beyond this machine without encryption: bind 127.0.0.1, or add "
                "--insecure if the network is private"
            )
        if not is_loopback(given.host) and not token:
            raise InsecureBindError(
                f"--host {given.host} would let everybody in who can reach it: set PSDIST_TOKEN or --token-file"
            )
    except InvalidArgumentError as error:
        fail(program, str(error))
    return token


def address_text(value: str) -> str:
    """``value`` if it is an address; for flags."""
    parse_address(value)
    return value


def _name_text(value: str) -> str:
    from psdist.types import check_name

    return check_name(value, "the id")


def _shared_flags() -> tuple[Flag, ...]:
    from psdist.settings.flags import Flag, integer, one_of

    return (
        Flag("--advertise", "address that others reach this process by", address_text, "", "HOST:PORT"),
        Flag("--insecure", "allow a --host beyond this machine without encryption (private networks)"),
        # PSDIST_TOKEN_FILE is weaker than PSDIST_TOKEN, so it is no twin of this flag: see find_token.
        Flag("--token-file", "file with the run's token (or set PSDIST_TOKEN)", Path, None, "FILE", twin=False),
        Flag("--lifeline-fd", "inherited pipe; this process ends when it does", integer(0), None, "N"),
        Flag("--log-format", "console or json", one_of("console", "json"), "console", "FORMAT"),
        Flag("--log-level", "least level shown", one_of("debug", "info", "warning", "error"), "info", "LEVEL"),
    )


def timeout_flags() -> tuple[Flag, ...]:
    """Flags on silent members, of every program that starts a scheduler."""
    from psdist.settings.flags import Flag, seconds

    return (
        Flag(
            "--failure-timeout", "silence after which a server is replaced", seconds(0.05), FAILURE_TIMEOUT_SECONDS,
            "SECONDS",
        ),
        Flag(
            "--worker-timeout",
            "silence after which a worker is expelled: longer than its script may hold the interpreter. A worker that "
            "died is noticed at once",
            seconds(0.05),
            WORKER_TIMEOUT_SECONDS,
            "SECONDS",
        ),
    )  # fmt: skip


def storage_flags(default: str) -> tuple[Flag, ...]:
    """Flags on snapshots of every program that starts a scheduler. ``default``: in words, where they lie by default."""
    from psdist.settings.flags import Flag, integer

    return (
        Flag(
            "--storage-path",
            f"directory or URL (s3://, gs://, az://) for snapshots, or none (default: {default}). What is there, a run "
            "of the same --run-id goes on from",
            storage_text,
            None,
            "PATH",
        ),
        Flag(
            "--save-interval",
            "take a snapshot every: 100 (steps), 30s, 5m, 2h; 0 for none but at the end (default: 10m, where there is "
            "a storage)",
            parse_interval,
            None,
            "EVERY",
        ),
        Flag("--keep-last", "newest snapshots that are kept", integer(1, KEEP_MAX), 3, "N"),
        Flag("--keep-every", "keep the first of every so many steps, too", integer(0, STEPS_MAX), 0, "STEPS"),
        Flag("--no-save-at-end", "take no snapshot when the run ends"),
        Flag("--fresh", "begin anew; refused where there are snapshots already"),
    )


def save_policy(given: Any, stored: bool) -> SavePolicy:
    """The policy of the parsed ``storage_flags``. ``stored``: whether there is a storage. Raises ConfigurationError."""
    if given.save_interval and any(given.save_interval) and not stored:
        raise ConfigurationError("--save-interval, and no storage to save in: pass --storage-path DIR or URL")
    default = (DEFAULT_POLICY.steps, DEFAULT_POLICY.seconds) if stored else (0, 0.0)
    steps, every = default if given.save_interval is None else given.save_interval
    return SavePolicy(steps, every, given.keep_last, given.keep_every, not given.no_save_at_end)


def _scheduler_line() -> CommandLine:
    from psdist.settings.flags import CommandLine, Flag, integer, seconds, text

    return CommandLine(
        "psdist-scheduler",
        "Keeps the membership and the cluster map of one run.",
        (
            Flag("--host", "address to listen on", text, "127.0.0.1", "HOST"),
            Flag("--port", "port to listen on; 0 takes a free one", integer(0, 65535), 0, "PORT"),
            Flag("--run-id", "name of the run", check_run_id, "", "NAME"),
            Flag("--min-workers", "workers to wait for", integer(1), 1, "N", variables=("DMLC_NUM_WORKER",)),
            Flag("--min-servers", "servers to wait for", integer(1), 1, "N", variables=("DMLC_NUM_SERVER",)),
            Flag("--replicas", "copies of each shard, each on another server", integer(1, REPLICAS_MAX), 1, "N"),
            *timeout_flags(),
            Flag("--join-grace", "wait for late workers when parameters are made", seconds(), 0.0, "SECONDS"),
            Flag("--store", "SQLite file that keeps the map over a restart", Path, None, "FILE"),
            Flag("--address-file", "file to write HOST:PORT into once listening", Path, None, "FILE"),
            *storage_flags("none"),
            Flag("--storage-optional", "where the storage cannot be written, warn and take no snapshots"),
            *_shared_flags(),
        ),
    )


def _server_line() -> CommandLine:
    from psdist.settings.flags import CommandLine, Flag, integer, seconds, text

    return CommandLine(
        "psdist-server",
        "Holds a share of the parameters and of the optimizer's state.",
        (
            Flag("--scheduler", "the scheduler", address_text, "", "HOST:PORT"),
            Flag("--scheduler-file", "file in which the scheduler leaves its address", Path, None, "FILE"),
            Flag("--start-timeout", "longest wait for that file", seconds(), START_TIMEOUT_SECONDS, "SECONDS"),
            Flag("--host", "address to listen on", text, "127.0.0.1", "HOST"),
            Flag("--port", "port to listen on; 0 takes a free one", integer(0, 65535), 0, "PORT"),
            Flag("--server-id", "id of this server; the scheduler chooses one otherwise", _name_text, "", "ID"),
            Flag("--kernel-threads", "threads that apply updates (default: one per core)", integer(1, 1024), None, "N"),
            Flag(
                "--drain-timeout",
                "when told to end, longest wait for its shards to be moved to other servers",
                seconds(),
                DRAIN_TIMEOUT_SECONDS,
                "SECONDS",
            ),
            Flag("--run-id", "name of the run; refused if the scheduler serves another", check_run_id, "", "NAME"),
            *_shared_flags(),
        ),
    )
