"""Records of the runs on this machine, with which ``psdist status`` finds them: one JSON file for each run.

A launcher removes its record at its end. Records are in ``$XDG_RUNTIME_DIR/psdist/runs``, as ``RUN_ID.json``, mode
0600. If this user has no such directory, they are in ``psdist-runs-UID`` in the directory for temporary files. They
name the file with the token. A record is stale if its launcher is dead: its pid is gone, or belongs to a process that
started at another time. The first process that reads a stale record removes it, and the private directory of its run.

Anybody may create names in the directory for temporary files. So nothing is read or written unless directory and file
belong to this user and are accessible to nobody else.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from psdist.errors import ConfigurationError
from psdist.machine import make_directory
from psdist.wire.limits import RUN_RECORD_BYTES_MAX

DIRECTORY_PREFIX: Final = "psdist-"
#: In a run's private directory, the file in which the scheduler writes its address.
ADDRESS_FILE: Final = "scheduler"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run on this machine. ``address`` is empty until the scheduler listens."""

    run_id: str
    address: str
    token_file: str
    directory: str
    pid: int
    pid_started: int

    @property
    def address_file(self) -> Path:
        """The file in which the scheduler writes its address."""
        return Path(self.directory, ADDRESS_FILE)


def records_directory(environ: Mapping[str, str]) -> Path:
    """Return the directory of this user's records."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(base):
        # After su it belongs to another user.
        with contextlib.suppress(OSError):
            if os.stat(base).st_uid == os.geteuid():
                return Path(base, "psdist", "runs")
    return Path(environ.get("TMPDIR") or tempfile.gettempdir(), f"psdist-runs-{os.geteuid()}")


class RunRegistry:
    """The records in one directory. If it cannot be written, or is not private, runs are not found by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def claim(self, run_id: str, token_file: Path, directory: Path) -> RunRecord:
        """Record a run of this process. Raises ConfigurationError if a live one on this machine has the name."""
        with contextlib.suppress(OSError):
            make_directory(self.directory, 0o700)
        for other in self.live():
            if other.run_id == run_id:
                raise ConfigurationError(
                    f"--run-id {run_id}: a run of this name is running on this machine (pid {other.pid}): stop it or "
                    "choose another name"
                )
        record = RunRecord(run_id, "", str(token_file), str(directory), os.getpid(), _started(os.getpid()))
        self._write(record)
        return record

    def listening(self, record: RunRecord, address: str) -> RunRecord:
        """Add the scheduler's address."""
        listening = replace(record, address=address)
        self._write(listening)
        return listening

    def remove(self, run_id: str) -> None:
        """Remove a record."""
        with contextlib.suppress(OSError):
            if self._is_private():
                self._path(run_id).unlink()

    def live(self) -> list[RunRecord]:
        """Return the runs whose launcher is alive, sorted by name. Stale records are removed."""
        found = []
        for path, record in self._records():
            if record is not None and record.pid_started == _started(record.pid) != 0:
                found.append(record)
            else:
                _sweep(path, record)
        return sorted(found, key=lambda record: record.run_id)

    def _records(self) -> Iterator[tuple[Path, RunRecord | None]]:
        for path in self.directory.glob("*.json") if self._is_private() else ():
            try:
                values = json.loads(_read_private(path))
                record = RunRecord(**values)
                well_formed = all(type(getattr(record, f)) is type(v) for f, v in _SAMPLE.items())
                yield path, record if well_formed and path.stem == record.run_id else None
            except OSError:
                continue
            except (ValueError, TypeError):
                yield path, None

    def _is_private(self) -> bool:
        try:
            info = self.directory.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(info.st_mode) and _is_mine(info)

    def _path(self, run_id: str) -> Path:
        return self.directory / f"{run_id}.json"

    def _write(self, record: RunRecord) -> None:
        if not self._is_private():
            return
        draft = self.directory / f".{record.run_id}.{os.getpid()}.draft"
        with contextlib.suppress(OSError):
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(record), file)
            draft.replace(self._path(record.run_id))


_SAMPLE: Final = asdict(RunRecord("", "", "", "", 0, 0))


def _is_mine(info: os.stat_result) -> bool:
    """Return True if a file belongs to this user and is accessible to nobody else."""
    return info.st_uid == os.geteuid() and not info.st_mode & 0o077


def _read_private(path: Path) -> bytes:
    """Return the content of a record. Raises OSError, also if the file is not this user's alone."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        info = os.fstat(file.fileno())
        if not (stat.S_ISREG(info.st_mode) and _is_mine(info)):
            raise PermissionError(f"{path} is not a file of this user alone")
        return file.read(RUN_RECORD_BYTES_MAX)


def _sweep(path: Path, record: RunRecord | None) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    if record is None:
        return
    directory = Path(record.directory)
    with contextlib.suppress(OSError):
        info = directory.lstat()
        if directory.name.startswith(DIRECTORY_PREFIX) and stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid():
            shutil.rmtree(directory, ignore_errors=True)


def _started(pid: int) -> int:
    """Return a process's start time in clock ticks since boot; 0 if it does not exist or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The command's name, in parentheses, may contain anything.
            values = file.read().rpartition(")")[2].split()
        return 0 if values[0] in "ZX" else int(values[19])
    except (OSError, IndexError, ValueError):
        return 0
