"""Records of the runs on this machine, by which ``psdist status`` finds them: one JSON file for each run.

A launcher removes its record at its end. Records are in ``$XDG_STATE_HOME/psdist/runs`` (else
``~/.local/state/psdist/runs``), mode 0600, as ``RUN_ID.json``. A record is stale if its launcher is dead: its pid is
gone, or belongs to a process that started at another time. The first process that reads a stale record removes it, and
the private directory of its run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from psdist.errors import ConfigurationError
from psdist.wire.limits import RUN_RECORD_BYTES_MAX

DIRECTORY_PREFIX: Final = "psdist-"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run on this machine. ``address`` is empty until the scheduler listens."""

    run_id: str
    address: str
    token_file: str
    directory: str
    pid: int
    pid_started: int


def records_directory(environ: Mapping[str, str]) -> Path:
    """The directory of the records of this user."""
    home = environ.get("XDG_STATE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~")) / ".local" / "state"
    return base / "psdist" / "runs"


class RunRegistry:
    """The records in one directory. Where that cannot be written, runs are not found by ``psdist status``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def claim(self, run_id: str, token_file: Path, directory: Path) -> RunRecord:
        """Records a run of this process. Raises ConfigurationError if a live one on this machine has the name."""
        with contextlib.suppress(OSError):
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
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
        """Adds the scheduler's address."""
        listening = replace(record, address=address)
        self._write(listening)
        return listening

    def remove(self, run_id: str) -> None:
        """Removes a record."""
        with contextlib.suppress(OSError):
            self._path(run_id).unlink()

    def live(self) -> list[RunRecord]:
        """Runs whose launcher lives, by name; stale records are swept."""
        found = []
        for path, record in self._records():
            if record is not None and record.pid_started == _started(record.pid) != 0:
                found.append(record)
            else:
                _sweep(path, record)
        return sorted(found, key=lambda record: record.run_id)

    def _records(self) -> Iterator[tuple[Path, RunRecord | None]]:
        for path in self._directory.glob("*.json"):
            try:
                with path.open("rb") as file:
                    values = json.loads(file.read(RUN_RECORD_BYTES_MAX))
                record = RunRecord(**values)
                well_formed = all(type(getattr(record, f)) is type(v) for f, v in _SAMPLE.items())
                yield path, record if well_formed and path.stem == record.run_id else None
            except FileNotFoundError:
                continue
            except (ValueError, TypeError):
                yield path, None

    def _path(self, run_id: str) -> Path:
        return self._directory / f"{run_id}.json"

    def _write(self, record: RunRecord) -> None:
        draft = self._directory / f".{record.run_id}.{os.getpid()}.draft"
        with contextlib.suppress(OSError):
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(record), file)
            draft.replace(self._path(record.run_id))


_SAMPLE: Final = asdict(RunRecord("", "", "", "", 0, 0))


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
    """When a process started, in clock ticks since boot; 0 if there is none, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The command's name, in parentheses, may hold anything.
            values = file.read().rpartition(")")[2].split()
        return 0 if values[0] in "ZX" else int(values[19])
    except (OSError, IndexError, ValueError):
        return 0
