"""The store in one SQLite file (WAL, ``synchronous=FULL``: a commit is on the disk when it returns).

A file belongs to one scheduler at a time: the process holds a lock on it while it is open, which a crash releases.

Entries, layouts and settings are stored as protobuf messages of the wire, which have rules for evolution. Content that
does not parse is refused, not repaired.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from psdist.errors import ConfigurationError, PsdistError
from psdist.types import Restore, check_directory
from psdist.wire import convert
from psdist.wire.limits import BARRIER_NAMES_MAX, EVENTS_MAX
from psdist_scheduler.decide.cluster_state import (
    BarrierRecord,
    EventRecord,
    Member,
    Node,
    ParametersRecord,
    RestorePoint,
    SchedulerProcess,
    StoredState,
)
from psdist_scheduler.decide.effects import Persist
from psdist_scheduler.run.run_store import Store, dataset_of, dataset_row, entry_bytes, parameters_of

logger = logging.getLogger("psdist.scheduler")

#: Raised when an older program could misread the file.
SCHEMA_VERSION = 7

_SCHEMA = """
CREATE TABLE run (
  id INTEGER PRIMARY KEY CHECK (id = 1), run_id TEXT NOT NULL, epoch INTEGER NOT NULL,
  servers_wanted INTEGER NOT NULL, base_directory TEXT NOT NULL, base_digest BLOB NOT NULL,
  generation INTEGER NOT NULL, term INTEGER NOT NULL, base_epoch INTEGER NOT NULL, began INTEGER NOT NULL,
  run_lost TEXT NOT NULL);
CREATE TABLE schedulers (scheduler_id TEXT PRIMARY KEY, last_epoch INTEGER NOT NULL);
CREATE TABLE members (
  member_id TEXT PRIMARY KEY, role TEXT NOT NULL, incarnation INTEGER NOT NULL, rank INTEGER NOT NULL,
  world_size INTEGER NOT NULL, address TEXT NOT NULL, host TEXT NOT NULL, pid INTEGER NOT NULL, state TEXT NOT NULL,
  reason TEXT NOT NULL, draining INTEGER NOT NULL);
CREATE TABLE parameters (
  number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, entry BLOB NOT NULL,
  uploader TEXT NOT NULL, committed INTEGER NOT NULL, layout BLOB NOT NULL);
CREATE TABLE nodes (
  agent_id TEXT PRIMARY KEY, host TEXT NOT NULL, processes INTEGER NOT NULL, node_rank INTEGER NOT NULL,
  first_rank INTEGER NOT NULL, nodes_min INTEGER NOT NULL, nodes_max INTEGER NOT NULL,
  master_address TEXT NOT NULL);
CREATE TABLE barriers (
  worker_id TEXT NOT NULL, name TEXT NOT NULL, origin INTEGER NOT NULL, passed INTEGER NOT NULL,
  PRIMARY KEY (worker_id, name));
CREATE TABLE datasets (name TEXT PRIMARY KEY, spec BLOB NOT NULL, state TEXT NOT NULL);
"""
_EVENTS = (
    "CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, "
    "warning INTEGER NOT NULL, text TEXT NOT NULL)"
)
_BASE = "base_directory, base_digest, generation, term, base_epoch, began"
_READ_PARAMETERS = "SELECT entry, uploader, committed, layout FROM parameters ORDER BY number"
_READ_DATASETS = "SELECT spec, state FROM datasets ORDER BY rowid"
#: The settings of a data set never change.
_WRITE_DATASET = "INSERT INTO datasets VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET state = excluded.state"
#: The newest rows get the highest rowid.
_WRITE_BARRIER = "INSERT OR REPLACE INTO barriers (worker_id, name, origin, passed) VALUES (?, ?, ?, ?)"
#: Same rule as in ``Barriers``.
_FORGET_BARRIERS = (
    "DELETE FROM barriers WHERE worker_id = ? AND rowid NOT IN "
    f"(SELECT rowid FROM barriers WHERE worker_id = ? ORDER BY rowid DESC LIMIT {BARRIER_NAMES_MAX})"
)


class SqliteStore(Store):
    """A store in one SQLite file."""

    keeps_events = True

    def __init__(self, path: Path, run_id: str, new_run_id: Callable[[], str] = lambda: "") -> None:
        """Open and lock the file. Raises ConfigurationError if it is in use, unusable, or another run's.

        run_id: run of a new file. If empty, it is read from the file, or for a new file is ``new_run_id()``.
        """
        self._path = path
        _refuse_unread(path)
        # Written from one worker thread at a time, never two.
        self._db = _connect(path)
        try:
            self.run_id = self._prepare(run_id, new_run_id)
            self._known_layouts = {name for (name,) in self._db.execute("SELECT name FROM parameters")}
        except sqlite3.Error as error:
            self.close()
            raise _unusable(path, error) from None
        except PsdistError:
            self.close()
            raise

    def load(self) -> StoredState | None:
        """Return the stored state; None for a new file. Raises ConfigurationError if it cannot be read."""
        try:
            row = self._db.execute(f"SELECT epoch, servers_wanted, run_lost, {_BASE} FROM run").fetchone()
            epoch, servers_wanted, run_lost, *base = row
            if epoch == 0:
                return None
            return StoredState(
                run_id=self.run_id,
                epoch=epoch,
                members=tuple(_member(*row) for row in self._rows("members", Member)),
                parameters=tuple(parameters_of(*row) for row in self._db.execute(_READ_PARAMETERS)),
                nodes=tuple(Node(*row) for row in self._rows("nodes", Node)),
                datasets=tuple(dataset_of(*row) for row in self._db.execute(_READ_DATASETS)),
                servers_wanted=servers_wanted,
                base=_base(*base),
                barriers=tuple(BarrierRecord(*row) for row in self._rows("barriers", BarrierRecord)),
                schedulers=tuple(SchedulerProcess(*row) for row in self._rows("schedulers", SchedulerProcess)),
                run_lost=run_lost,
            )
        except (sqlite3.Error, DecodeError, ValueError, LookupError, TypeError) as error:
            raise _unusable(self._path, error) from None

    def write(self, changes: Persist) -> None:
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute(
                "UPDATE run SET epoch = ?, servers_wanted = coalesce(?, servers_wanted)",
                (changes.epoch, changes.servers_wanted),
            )
            self._db.executemany(_upsert("members", Member), map(astuple, changes.members))
            self._db.executemany(_upsert("nodes", Node), map(astuple, changes.nodes))
            self._db.executemany(_WRITE_BARRIER, map(astuple, changes.barriers))
            self._db.executemany(_FORGET_BARRIERS, [(r.worker_id, r.worker_id) for r in changes.barriers])
            self._db.executemany(_WRITE_DATASET, [dataset_row(dataset) for dataset in changes.datasets])
            if (base := changes.base) is not None:
                self._db.execute(f"UPDATE run SET ({_BASE}) = (?, ?, ?, ?, ?, ?)", _base_row(base))
            if changes.schedulers:
                self._db.execute("DELETE FROM schedulers")
                self._db.executemany("INSERT INTO schedulers VALUES (?, ?)", map(astuple, changes.schedulers))
            if changes.run_lost:
                self._db.execute("UPDATE run SET run_lost = ?", (changes.run_lost,))
            self._db.executemany("DELETE FROM parameters WHERE name = ?", [(name,) for name in changes.forgotten])
            for record in changes.parameters:
                self._write_parameters(record, record.entry.spec.name in changes.forgotten)
        self._known_layouts.difference_update(changes.forgotten)
        self._known_layouts.update(record.entry.spec.name for record in changes.parameters)

    def load_events(self) -> list[EventRecord]:
        try:
            rows = self._db.execute("SELECT number, time, kind, warning, text FROM events ORDER BY number")
            return [EventRecord(number, time, kind, bool(warning), text) for number, time, kind, warning, text in rows]
        except sqlite3.Error as error:
            raise _unusable(self._path, error) from None

    def write_events(self, records: Sequence[EventRecord]) -> None:
        try:
            # Enough for the death of this process, and it does not wait for the disk.
            self._db.execute("PRAGMA synchronous = NORMAL")
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany(_upsert("events", EventRecord), map(astuple, records))
                self._db.execute("DELETE FROM events WHERE number <= ?", (records[-1].number - EVENTS_MAX,))
        except sqlite3.Error as error:
            logger.warning("events of the run's history are not stored (--store %s): %s", self._path, error)
        finally:
            with suppress(sqlite3.Error):
                self._db.execute("PRAGMA synchronous = FULL")

    def discard(self) -> None:
        # Deleted while the lock is held: the file of a scheduler that starts meanwhile must not be deleted. The main
        # file is last, because it holds the lock; after that its name may belong to another one.
        for suffix in ("-wal", "-shm", ""):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        self._db.close()

    def _prepare(self, run_id: str, new_run_id: Callable[[], str]) -> str:
        """Lock the file, create its tables if it is new, and return the run's name."""
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        # The first write transaction takes the lock, which the mode above then keeps.
        self._db.execute("BEGIN EXCLUSIVE")
        if _check_format(self._path, self._db) == 0:
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute("INSERT INTO run VALUES (1, ?, 0, 0, '', x'', 0, 1, 0, 0, '')", (run_id or new_run_id(),))
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        # Releases without this table ignore it.
        self._db.execute(_EVENTS)
        self._db.execute("COMMIT")
        (state,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(f"it is damaged: {' '.join(state.split())}")
        (kept,) = self._db.execute("SELECT run_id FROM run").fetchone()
        if run_id and kept != run_id:
            raise ConfigurationError(
                f"--store {self._path} belongs to run {kept!r}, not {run_id!r}: pass --run-id {kept}, or another file",
                run_id=kept,
            )
        return str(kept)

    def _rows(self, table: str, cls: type) -> sqlite3.Cursor:
        return self._db.execute(f"SELECT {_columns(cls)} FROM {table} ORDER BY rowid")

    def _write_parameters(self, record: ParametersRecord, forgotten: bool) -> None:
        name = record.entry.spec.name
        row = (entry_bytes(record), record.uploader, record.committed)
        if name in self._known_layouts and not forgotten:
            # A layout never changes, and may be large.
            self._db.execute(
                "UPDATE parameters SET entry = ?, uploader = ?, committed = ? WHERE name = ?", (*row, name)
            )
        else:
            layout = convert.layout_to_proto(record.layout).SerializeToString()
            self._db.execute(
                "INSERT INTO parameters (entry, uploader, committed, name, layout) VALUES (?, ?, ?, ?, ?)",
                (*row, name, layout),
            )


def _refuse_unread(path: Path) -> None:
    """Refuse a file of another format and leave it as it is: opened for writing, SQLite would change it.

    A file that cannot be read here is missing, in use or damaged, and opening it for writing fails with the cause.
    """
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with suppress(sqlite3.Error), closing(sqlite3.connect(uri, timeout=0, uri=True)) as db:
        _check_format(path, db)


def _check_format(path: Path, db: sqlite3.Connection) -> int:
    """Return the version of the file's format, 0 for a new file."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version not in (0, SCHEMA_VERSION):
        raise ConfigurationError(
            f"--store {path} has format {version}, this release of psdist reads {SCHEMA_VERSION}: use the release "
            "that wrote it, or another file"
        )
    return int(version)


def _connect(path: Path) -> sqlite3.Connection:
    try:
        return sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: Exception) -> ConfigurationError:
    if "locked" in str(error):
        return ConfigurationError(
            f"--store {path} is in use by another scheduler: stop that one first, or use another file", path=path
        )
    return ConfigurationError(
        f"--store {path} cannot be used: {error}. Put back a copy that is as new as the run, or start afresh under "
        "another --run-id with another file",
        path=path,
    )


def _columns(cls: type) -> str:
    return ", ".join(field.name for field in fields(cls))


def _upsert(table: str, cls: type) -> str:
    marks = ", ".join("?" for _ in fields(cls))
    key, *others = [field.name for field in fields(cls)]
    updates = ", ".join(f"{name} = excluded.{name}" for name in others)
    return f"INSERT INTO {table} ({_columns(cls)}) VALUES ({marks}) ON CONFLICT ({key}) DO UPDATE SET {updates}"


def _base_row(base: RestorePoint) -> tuple[str, bytes, int, int, int, int]:
    restore = base.restore
    directory, digest = (restore.directory, restore.manifest_digest) if restore is not None else ("", b"")
    return directory, digest, base.generation, base.term, base.epoch, base.began


def _base(directory: str, digest: bytes, *numbers: int) -> RestorePoint:
    return RestorePoint(Restore(check_directory(directory), digest) if directory else None, *numbers)


def _member(*row: Any) -> Member:
    member = Member(*row)
    return replace(member, draining=bool(member.draining))
