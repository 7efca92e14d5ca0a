"""Checks of the storage of a run, and of the machine, before a launcher starts anything.

The scheduler checks the same, and more, but only once it has been imported. The launcher imports neither numpy nor an
object-store client, so it reads a directory's records as plain JSON, and leaves buckets to the scheduler.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, get_args

from psdist import addresses
from psdist.errors import ConfigurationError, StorageError
from psdist.settings.config import TransportName

_SHARED_MEMORY: Final = "/dev/shm"
_LOOPBACK_SECONDS: Final = 10.0
#: A storage with less space cannot even hold the records of a snapshot.
_FREE_BYTES: Final = 1 << 16


def check_storage(storage: str, run_id: str, *, must_be_empty: bool, optional: bool) -> None:
    """Raise StorageError if a directory cannot be written, unless the run continues without it, and ConfigurationError
    if its snapshots are not for this run."""
    if not storage or "://" in storage:
        return
    if not optional and (reason := _why_unwritable(Path(os.path.realpath(storage)))):
        raise StorageError(
            f"the storage {storage} cannot be written: {reason}. With --storage-path none a run takes no snapshots",
            path=storage,
        )
    commits = list(_commits(storage))
    for commit in commits:
        if (other := commit.get("run_id", run_id)) != run_id:
            raise ConfigurationError(
                f"the storage {storage} has snapshots of run {other!r}, not of {run_id!r}: pass --run-id {other}, or "
                "another --storage-path"
            )
    if commits and must_be_empty:
        steps = ", ".join(f"{name} at step {step}" for name, step in sorted(commits[0].get("steps", {}).items()))
        raise ConfigurationError(
            f"--require-empty-storage, but {storage} has {len(commits)} snapshots, the newest of them with {steps}: "
            "leave the flag out to resume from there, pass another --run-id or --storage-path, or remove the "
            f"snapshots: psdist snapshot delete {storage}"
        )


def _why_unwritable(path: Path) -> str:
    """Return why a directory cannot be made or written; empty if it can."""
    above = path
    while not os.path.lexists(above) and above != above.parent:
        above = above.parent
    if not above.is_dir():
        return f"{above} is no directory"
    system = os.statvfs(above)
    if system.f_flag & os.ST_RDONLY:
        return f"{os.strerror(errno.EROFS)}; use another --storage-path"
    if not os.access(above, os.W_OK | os.X_OK):
        return f"{os.strerror(errno.EACCES)}: {above}; grant this user access, or use another --storage-path"
    # Some file systems, such as those of networks, do not tell their size.
    if system.f_blocks and (free := system.f_bavail * system.f_frsize) < _FREE_BYTES:
        return f"{os.strerror(errno.ENOSPC)}: {free} bytes are free; free some space"
    return ""


def _commits(storage: str) -> Iterator[Mapping[str, Any]]:
    """Yield the readable records of snapshots, the newest first."""
    with suppress(OSError):
        for path in sorted(Path(storage, "commits").iterdir(), reverse=True):
            with suppress(OSError, ValueError):
                record = json.loads(path.read_bytes())
                if isinstance(record, dict) and isinstance(record.get("steps", {}), dict):
                    yield record


def check_loopback() -> None:
    """Raise ConfigurationError if processes of this machine cannot connect to each other."""
    host = addresses.loopback()
    try:
        with (
            socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listening,
            socket.create_connection(listening.getsockname()[:2], timeout=_LOOPBACK_SECONDS),
        ):
            return
    except OSError as error:
        raise ConfigurationError(
            f"processes of this machine cannot connect to each other by {host}: {error.strerror or error}. Bring the "
            "loopback interface up (ip link set lo up), as in a container without a network"
        ) from None


def why_unservable(host: str, port: int) -> str:
    """Return why metrics cannot be served at this address; empty if they can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return str(addresses.unbound("metrics", "--metrics", host, port, error))
    return ""


def check_shared_memory(transport: str) -> str:
    """Return a warning if workers and servers cannot share memory; empty if they can. Raises ConfigurationError if they
    must. transport: the transport that the user asks for; empty for none."""
    if transport and transport not in (names := get_args(TransportName)):
        raise ConfigurationError(f"PSDIST_TRANSPORT is {transport!r}: set one of {', '.join(names)}, or unset it")
    if transport not in ("", "auto", "shm") or os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        return ""
    if transport == "shm":
        raise ConfigurationError(
            f"PSDIST_TRANSPORT is shm, but {_SHARED_MEMORY} cannot be written: mount it writable, or unset the variable"
        )
    return (
        f"{_SHARED_MEMORY} cannot be written, so that workers and servers use TCP, which is slower: mount it writable"
    )


# --- snapshots to resume from -----------------------------------------------------------------------------------------


def has_commits(storage: str) -> bool:
    """Return True if the storage is a directory with snapshots. Buckets count as empty: the launcher cannot list
    them."""
    with suppress(OSError):
        return storage != "" and "://" not in storage and any(Path(storage, "commits").iterdir())
    return False


def holds_weights(storage: str) -> bool:
    """Return False if the newest snapshot has only averages and shared values, but no weights that servers trained.

    A run counts as resumable if its snapshots cannot be read: then the scheduler reports the problem. Scripts that keep
    their own weights have such snapshots: those with ``psdist.torch.DistributedDataParallel`` or
    ``psdist.jax.average``.
    """
    try:
        newest = max(Path(storage, "commits").iterdir())
        directory = json.loads(newest.read_bytes())["directory"]
        manifest = json.loads(Path(storage, "snapshots", directory, "manifest.json").read_bytes())
        return any(map(_is_trained, manifest["parameters"]))
    except (OSError, ValueError, LookupError, TypeError):
        return True


def _is_trained(parameters: Any) -> bool:
    optimizer = parameters["spec"]["optimizer"]
    rates = [optimizer["values"]["lr"], *(item["values"].get("lr", 0.0) for item in optimizer["overrides"])]
    return optimizer["kind"] != "mean" and any(rates)


def how_to_resume(storage: str, run_id: str) -> str:
    """Return the last line about an interrupted run: how to resume it."""
    if holds_weights(storage):
        return f"snapshots are in {storage}; to resume: psdist run --run-id {run_id}, with the same arguments"
    return (
        f"the snapshots in {storage} have no weights, because this script keeps its own (DistributedDataParallel, "
        "psdist.jax.average): to resume, start it again from its own checkpoint"
    )
