"""Configuration values of a process, and the settings of a worker's script: text and environment in, checked values
out.

The command lines of scheduler and server are in ``programs``. Nothing is connected or bound here. The only wait is
``await_address``: for the file in which a scheduler that starts at the same time writes its address.

A token is never taken from a command line, where every user could read it. The first of these that is set counts: an
argument of the library, ``--token-file``, ``PSDIST_TOKEN``, the file named by ``PSDIST_TOKEN_FILE``.

The files of a TLS identity are named by an argument of the library, the flags ``--tls-ca``, ``--tls-cert`` and
``--tls-key``, or ``PSDIST_TLS_CA``, ``PSDIST_TLS_CERT`` and ``PSDIST_TLS_KEY``: all three of them or none.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import socket
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, cast, get_args
from urllib.parse import quote

from psdist.addresses import literal, loopback, parse_address, split_addresses
from psdist.errors import ConfigurationError, InvalidArgumentError, SchedulerUnreachableError
from psdist.security.tls import Credentials, TlsFiles
from psdist.settings.flags import is_switched_on
from psdist.settings.other_launchers import find_task
from psdist.settings.own_process import require_working_directory
from psdist.wire.limits import ADDRESS_FILE_BYTES_MAX, RUN_ID, TOKEN_CHARACTERS_MAX

#: Transport of gradients and weights. "auto": shared memory with servers on this host; TCP to others, or gRPC if a TCP
#: connection fails. "grpc": gRPC only. "shm" and "tcp" fail if the transport is unavailable.
TransportName = Literal["auto", "shm", "tcp", "grpc"]

#: Progress display of the launcher. "auto": in place on a terminal, else plain lines; a script without a launcher shows
#: nothing. "plain": lines everywhere. "off": nothing.
ProgressName = Literal["auto", "plain", "off"]

START_TIMEOUT_SECONDS: Final = 60.0
#: Interval over which a script's reports are aggregated.
METRICS_INTERVAL_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.02
_CONNECT_SECONDS_MIN: Final = 1.0
_STORAGE_SCHEMES: Final = ("file", "s3", "gs", "az")
#: The ``--storage-path`` that means no snapshots. A directory of this name is written ``./none``.
_NO_STORAGE: Final = "none"
_ETCD_FORM: Final = "etcd://HOST:PORT,HOST:PORT/PREFIX"
_PORT_LAST: Final = 65535
_DEVICE: Final = re.compile(r"cpu|cuda(?::\d{1,3})?")


@dataclass(frozen=True, slots=True)
class MetricsEndpoint:
    """Place of a process's metrics for Prometheus.

    port: 0 takes a free one.
    credentials: the process's.
    key: checks readers, if their token is of a role (``psdist.security.tokens``).
    """

    host: str
    port: int
    credentials: Credentials
    key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class DashboardEndpoint:
    """Place of a run's dashboard.

    port: 0 takes a free one.
    credentials: the scheduler's.
    descriptor: an inherited socket that listens there already.
    logs: directory with the members' logs; None shows none.
    key_file: file with the key of links; None for the one that follows from the token.
    advertise: ``host:port`` at which others reach the scheduler; empty for its own address. Links have its host, which
        is the one in a certificate.
    """

    host: str
    port: int
    credentials: Credentials
    descriptor: int | None = None
    logs: Path | None = None
    key_file: Path | None = None
    advertise: str = ""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings that a launcher passes to a worker's script. ``scheduler`` is empty if there is none.

    host: name or address by which other workers reach this one; empty for its own address.
    metrics: None serves none.
    """

    scheduler: str
    credentials: Credentials
    run_id: str
    rank: int | None
    world_size: int
    local_rank: int
    worker_id: str | None
    transport: TransportName
    host: str = ""
    metrics: MetricsEndpoint | None = None


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Destination of the metrics that a script reports.

    pipe: pipe to its launcher, as ``MetricsPipe`` takes it; empty without a launcher.
    interval_seconds: reports are aggregated over this time; with 0 each report is an interval of its own.
    """

    pipe: str = ""
    interval_seconds: float = METRICS_INTERVAL_SECONDS
    progress: ProgressName = "auto"


# --- values -----------------------------------------------------------------------------------------------------------


def device_text(value: str) -> str:
    """Return the device of a server's weights: cpu, cuda or cuda:N, in any case. Raises InvalidArgumentError."""
    name = value.strip().lower()
    if not _DEVICE.fullmatch(name):
        raise InvalidArgumentError(f"{value!r:.40} is neither cpu, cuda nor cuda:N, where N is the number of a device")
    return name


def devices_text(value: str) -> tuple[str, ...]:
    """Return the devices in a comma-separated list, assigned to servers round-robin. Raises InvalidArgumentError."""
    return tuple(map(device_text, value.split(",")))


def address_text(value: str) -> str:
    """Return ``value`` if it is an address; for flags."""
    parse_address(value)
    return value


def scheduler_text(value: str) -> str:
    """Return ``value`` if it is the address of a scheduler, or those of several, divided by commas; for flags."""
    split_addresses(value)
    return value


def check_run_id(value: str) -> str:
    """Return ``value`` if it is 1 to 64 of ``A-Z a-z 0-9 . _ -``, which is safe in a file name."""
    if not RUN_ID.fullmatch(value) or value.startswith("."):
        raise ConfigurationError(f"{value!r:.100} is not a run id: use 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    return value


@dataclass(frozen=True, slots=True)
class EtcdLocation:
    """A store in etcd.

    endpoints: HOST:PORT of members of the etcd cluster.
    prefix: of its keys, without a slash at the end.
    secure: True for mutual TLS, with the files of this process.
    """

    endpoints: tuple[str, ...]
    prefix: str
    secure: bool = False

    def __str__(self) -> str:
        return f"{'etcds' if self.secure else 'etcd'}://{','.join(self.endpoints)}/{self.prefix}"


def store_location(value: str) -> Path | EtcdLocation | None:
    """Return the value of ``--store``: a file or a prefix in etcd; None for ``memory`` and for an empty value. Raises
    ConfigurationError."""
    if value in ("", "memory"):
        return None
    scheme, separator, rest = value.partition("://")
    if not separator:
        return Path(value)
    if scheme not in ("etcd", "etcds"):
        raise ConfigurationError(f"--store {value}: {scheme}:// is no store; use a file, memory or {_ETCD_FORM}")
    hosts, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not prefix:
        raise ConfigurationError(f"--store {value} names no prefix for the keys of this run: use {_ETCD_FORM}")
    for endpoint in hosts.split(","):
        parse_address(endpoint)
    return EtcdLocation(tuple(hosts.split(",")), prefix, scheme == "etcds")


def default_store(environ: Mapping[str, str], run_id: str, port: int) -> Path | None:
    """Return the store of a scheduler that can be restarted under the same identity, i.e. with a given run and port;
    else None.

    Two schedulers that run at the same time differ in run, port or host. Hosts may share a home directory.
    """
    if not run_id or not port:
        return None
    base = environ.get("XDG_STATE_HOME", "")
    directory = Path(base) if os.path.isabs(base) else Path("~/.local/state").expanduser()
    return directory / "psdist" / "schedulers" / f"{socket.gethostname()}-{port}-{quote(run_id, safe='')}.sqlite"


def storage_text(value: str) -> str:
    """Return the value of ``--storage-path`` as an absolute path or a URL; empty for ``none``. Raises
    ConfigurationError."""
    if not value or value == _NO_STORAGE:
        return ""
    scheme, separator, rest = value.partition("://")
    if not separator:
        path = Path(value).expanduser()
        if not path.is_absolute():
            require_working_directory()
        return os.path.abspath(path)
    if scheme not in _STORAGE_SCHEMES or not rest.strip("/"):
        known = ", ".join(f"{each}://" for each in _STORAGE_SCHEMES)
        raise ConfigurationError(f"{value!r:.200} is not a storage for snapshots: use a directory, or one of {known}")
    return value


def check_token(value: str, source: str) -> str:
    """Return the token without surrounding blanks. Raises ConfigurationError, whose message never contains the
    token."""
    token = value.strip()
    if not token or len(token) > TOKEN_CHARACTERS_MAX or not token.isascii() or not token.isprintable():
        raise ConfigurationError(
            f"the token from {source} must be 1 to {TOKEN_CHARACTERS_MAX} printable ASCII characters on one line"
        )
    return token


def find_token(environ: Mapping[str, str], argument: str | None = None, token_file: Path | None = None) -> str:
    """Return the token, by the order in the module's docstring; empty if none is set. Raises ConfigurationError."""
    if argument:
        return check_token(argument, "the argument")
    if token_file is not None:
        return _read_token(token_file, "--token-file")
    if environ.get("PSDIST_TOKEN"):
        return check_token(environ["PSDIST_TOKEN"], "PSDIST_TOKEN")
    if environ.get("PSDIST_TOKEN_FILE"):
        return _read_token(Path(environ["PSDIST_TOKEN_FILE"]), "PSDIST_TOKEN_FILE")
    return ""


def create_token_file(environ: Mapping[str, str], token_file: Path | None = None) -> None:
    """Write a new random token (256 bits) to the file that ``find_token`` would read, unless that file exists. Only
    this user may read it.

    Does nothing if a token in ``PSDIST_TOKEN`` takes precedence. Raises ConfigurationError if no file is named, or it
    cannot be written.
    """
    if token_file is None and environ.get("PSDIST_TOKEN"):
        return
    path = token_file or Path(environ.get("PSDIST_TOKEN_FILE", ""))
    if not path.name:
        raise ConfigurationError("--create-token names no file: add --token-file FILE, or set PSDIST_TOKEN_FILE")
    try:
        if not path.exists():
            _create_token_file(path)
    except OSError as error:
        raise ConfigurationError(
            f"the token file {path} cannot be created: {error.strerror}. Its directory must be writable, and on a file "
            "system with hard links; or write a token into the file yourself"
        ) from None


def _create_token_file(path: Path) -> None:
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # of mode 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{secrets.token_urlsafe(32)}\n")
        # Atomic, and never replaces a file: if several processes start together, all read the first one's token.
        with suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        os.unlink(unfinished)


def _read_token(path: Path, source: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(TOKEN_CHARACTERS_MAX + 64)
    except OSError as error:
        raise ConfigurationError(f"the token file {path} of {source} cannot be read: {error.strerror}") from None
    return check_token(content.decode("ascii", "replace"), f"{source} ({path})")


# --- credentials ------------------------------------------------------------------------------------------------------

#: Variables that name the files of a TLS identity.
TLS_VARIABLES: Final = ("PSDIST_TLS_CA", "PSDIST_TLS_CERT", "PSDIST_TLS_KEY")
#: Switch that permits plaintext beyond this machine.
INSECURE_VARIABLE: Final = "PSDIST_INSECURE"
#: See ``ClientSettings.host``.
LOCAL_ADDRESS_VARIABLE: Final = "PSDIST_LOCAL_ADDR"


def make_tls(ca: Path | str | None, cert: Path | str | None, key: Path | str | None) -> TlsFiles | None:
    """Return the files of a TLS identity; None if none is named. Raises ConfigurationError if some are missing, or for
    the content of the files (see ``TlsFiles.identity``)."""
    if not ca and not cert and not key:
        return None
    if not ca or not cert or not key:
        named = {"--tls-ca": ca, "--tls-cert": cert, "--tls-key": key}
        missing = ", ".join(name for name, file in named.items() if not file)
        raise ConfigurationError(
            f"TLS needs three files, and {missing} is not set: pass --tls-ca, --tls-cert and --tls-key, or set "
            f"{', '.join(TLS_VARIABLES)}, or none of them"
        )
    files = TlsFiles(ca, cert, key)
    files.identity()
    return files


def find_credentials(
    environ: Mapping[str, str], token: str | None = None, tls: TlsFiles | Literal[False] | None = None
) -> Credentials:
    """Return the credentials in ``environ``. Raises ConfigurationError.

    token, tls: arguments of the library, which take precedence. False uses no TLS.
    """
    if tls is None:
        found = make_tls(*(environ.get(name) for name in TLS_VARIABLES))
    else:
        found = tls or None
        if found is not None:
            found.identity()
    return Credentials(find_token(environ, token), found, is_switched_on(environ, INSECURE_VARIABLE))


def given_credentials(given: Namespace, environ: Mapping[str, str]) -> Credentials:
    """Return the credentials that parsed flags name. Raises ConfigurationError."""
    token = find_token(environ, token_file=given.token_file)
    return Credentials(token, make_tls(given.tls_ca, given.tls_cert, given.tls_key), given.insecure)


# --- the scheduler's address ------------------------------------------------------------------------------------------


def read_address(path: Path) -> str:
    """Return the address in a scheduler's address file; empty until the file exists. Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            value = file.read(ADDRESS_FILE_BYTES_MAX).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigurationError(f"the address file {path} cannot be read: {error.strerror}") from None
    if value:
        parse_address(value)
    return value


def await_address(path: Path, timeout_seconds: float = START_TIMEOUT_SECONDS) -> str:
    """Block until a scheduler's address file exists, and return its address.

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
    """Return the scheduler's address from ``PSDIST_SCHEDULER`` or ps-lite's ``DMLC_PS_ROOT_URI`` and ``_PORT``; else
    ""."""
    address = environ.get("PSDIST_SCHEDULER", "")
    if not address and environ.get("DMLC_PS_ROOT_URI") and environ.get("DMLC_PS_ROOT_PORT"):
        address = f"{environ['DMLC_PS_ROOT_URI']}:{environ['DMLC_PS_ROOT_PORT']}"
    return scheduler_text(address) if address else ""


# --- the client -------------------------------------------------------------------------------------------------------


def client_settings(
    environ: Mapping[str, str],
    *,
    scheduler: str | None = None,
    token: str | None = None,
    tls: TlsFiles | Literal[False] | None = None,
    run_id: str | None = None,
    transport: str | None = None,
) -> ClientSettings:
    """Return the settings of a worker's client from ``environ``; arguments take precedence. Raises ConfigurationError.

    A scheduler named only by ``PSDIST_SCHEDULER_FILE`` is not resolved here, since that may take long.
    """
    if scheduler:
        scheduler_text(scheduler)
    chosen_run = run_id or environ.get("PSDIST_RUN_ID", "")
    rank = _integer(environ, ("RANK", "DMLC_WORKER_ID"), 0)
    world_size = _integer(environ, ("WORLD_SIZE", "DMLC_NUM_WORKER"), 1)
    if rank is not None and world_size is not None and rank >= world_size:
        raise ConfigurationError(f"RANK {rank} is not below WORLD_SIZE {world_size}: ranks count from 0")
    local_rank = _integer(environ, ("LOCAL_RANK",), 0)
    # Other launchers than psdist's, such as torchrun, set RANK to their own number, also within srun.
    if rank is None and (task := find_task(environ)) is not None:
        if world_size not in (None, task.count):
            raise ConfigurationError(
                f"WORLD_SIZE is {world_size}, but {task.count_variable} is {task.count}, and RANK is not set: unset "
                "WORLD_SIZE, or set RANK, too"
            )
        rank, world_size = task.rank, task.count
        local_rank = task.local_rank if local_rank is None else local_rank
    credentials = find_credentials(environ, token, tls)
    return ClientSettings(
        scheduler=scheduler or find_scheduler(environ),
        credentials=credentials,
        run_id=check_run_id(chosen_run) if chosen_run else "",
        rank=rank,
        world_size=world_size or 1,
        local_rank=local_rank or 0,
        worker_id=environ.get("PSDIST_WORKER_ID") or None,
        transport=_find_transport(environ, transport),
        host=_find_host(environ),
        metrics=_find_metrics(environ, credentials),
    )


def start_timeout(environ: Mapping[str, str]) -> float:
    """Return a script's time limit in seconds for finding its scheduler: its launcher's, but long enough for one
    attempt.

    Raises ConfigurationError for a wrong value.
    """
    value = _number(environ, "PSDIST_START_TIMEOUT", START_TIMEOUT_SECONDS)
    return max(value, _CONNECT_SECONDS_MIN)


def metrics_settings(environ: Mapping[str, str]) -> MetricsSettings:
    """Return the settings for a script's metrics from ``environ``. Raises ConfigurationError for a wrong value."""
    seconds = _number(environ, "PSDIST_METRICS_INTERVAL", METRICS_INTERVAL_SECONDS)
    progress = environ.get("PSDIST_PROGRESS") or "auto"
    if progress not in get_args(ProgressName):
        known = ", ".join(get_args(ProgressName))
        raise ConfigurationError(f"PSDIST_PROGRESS={progress!r:.80} is unknown: use one of {known}")
    return MetricsSettings(environ.get("PSDIST_METRICS_PIPE", ""), seconds, cast(ProgressName, progress))


def _find_metrics(environ: Mapping[str, str], credentials: Credentials) -> MetricsEndpoint | None:
    port = _integer(environ, ("PSDIST_METRICS_PORT",), 0)
    if port is None:
        return None
    if port > _PORT_LAST:
        raise ConfigurationError(f"PSDIST_METRICS_PORT={port} is no port: use 0 to {_PORT_LAST}; 0 takes a free one")
    return MetricsEndpoint(environ.get("PSDIST_METRICS_HOST") or loopback(), port, credentials)


def _find_host(environ: Mapping[str, str]) -> str:
    host = environ.get(LOCAL_ADDRESS_VARIABLE, "").strip().removeprefix("[").removesuffix("]")
    if ":" in host and literal(host) is None:
        raise ConfigurationError(
            f"{LOCAL_ADDRESS_VARIABLE}={host!r:.200} is no host: write a name or an address, without a port"
        )
    return host


def _find_transport(environ: Mapping[str, str], argument: str | None) -> TransportName:
    source, value = "PSDIST_TRANSPORT", environ.get("PSDIST_TRANSPORT") or "auto"
    if argument is not None:
        source, value = "transport", argument
    if value not in get_args(TransportName):
        raise ConfigurationError(f"{source}={value!r:.80} is unknown: use one of {', '.join(get_args(TransportName))}")
    return cast(TransportName, value)


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or f"{default:g}"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ConfigurationError(f"{name}={text!r:.80} is not a finite number of seconds from 0 on")
    return seconds


def _integer(environ: Mapping[str, str], names: tuple[str, ...], minimum: int) -> int | None:
    for name in names:
        value = environ.get(name)
        if value:
            if not (value.isascii() and value.isdigit()) or int(value) < minimum:
                raise ConfigurationError(f"{name}={value!r:.80} is not a whole number of at least {minimum}")
            return int(value)
    return None
