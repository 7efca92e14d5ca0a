"""Store of a run's state: its interface, the forms in which stores keep it, and the store in a file.

A restarted scheduler needs the state, so it is made durable before anybody acts on it.

``SqliteStore`` is one SQLite file (WAL, ``synchronous=FULL``: a commit is on the disk when it returns). A file belongs
to one scheduler at a time: the process holds a lock on it while it is open, which a crash releases.

Entries, layouts and settings are stored as protobuf messages of the wire, which have rules for evolution. Content that
does not parse is refused, not repaired.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import astuple, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_type_hints

import msgspec
from google.protobuf.message import DecodeError

from psdist.errors import ConfigurationError, PsdistError
from psdist.types import Restore, check_directory
from psdist.v1 import common_pb2, scheduler_pb2
from psdist.wire import convert
from psdist.wire.limits import BARRIER_NAMES_MAX, EVENTS_MAX
from psdist_scheduler.decide.cluster_state import (
    BarrierRecord,
    DataLease,
    DatasetRecord,
    EndStep,
    EventRecord,
    Member,
    Node,
    ParametersRecord,
    RestorePoint,
    SchedulerProcess,
    StoredState,
)
from psdist_scheduler.decide.effects import Persist

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger("psdist.scheduler")


class Store:
    """Interface of the store, and a store that keeps nothing. Calls block; only one is made at a time."""

    #: True if ``write_events`` keeps them.
    keeps_events = False

    def load(self) -> StoredState | None:
        """Return the stored state; None if there is none yet."""
        return None

    def write(self, changes: Persist) -> None:
        """Make the changes durable, all or none, before returning."""

    def load_events(self) -> list[EventRecord]:
        """Return the stored history of the run, oldest first."""
        return []

    def write_events(self, records: Sequence[EventRecord]) -> None:
        """Add to the history. A failure is only logged: the run does not depend on it."""

    def discard(self) -> None:
        """Delete the stored state and close the store, because the run has ended."""
        self.close()

    def close(self) -> None:
        """Release the store for another scheduler."""

    def check(self) -> None:
        """Return if this process may still write. Raises LeadershipLostError; does not block."""


def check_format(place: object, version: int, known: int, kind: str) -> None:
    """Raise ConfigurationError if the store at ``place`` has another format. kind: what such a store is in."""
    if version != known:
        raise ConfigurationError(
            f"--store {place} has format {version}, this release of psdist reads {known}: use the release that wrote "
            f"it, or another {kind}"
        )


def check_run(place: object, held: str, run_id: str, kind: str) -> None:
    """Raise ConfigurationError if the store at ``place`` holds another run. An empty ``run_id`` is any."""
    if run_id and held != run_id:
        raise ConfigurationError(
            f"--store {place} belongs to run {held!r}, not {run_id!r}: pass --run-id {held}, or another {kind}",
            run_id=held,
        )


# --- changes ----------------------------------------------------------------------------------------------------------
#
# MessagePack with a fixed form: the fields of ``Persist``, all required but ``ends``. Optimizers, layouts and settings
# are protobuf messages in it, as in the SQLite file. Content that does not parse is refused.


@dataclass(frozen=True, slots=True)
class _Parameters:
    entry: bytes
    layout: bytes
    uploader: str
    committed: bool


_ROWS: Final = {"parameters": tuple[_Parameters, ...], "datasets": tuple[tuple[str, bytes, str], ...]}
_REQUIRED: Final = {name: kind for name, kind in get_type_hints(Persist).items() if name != "ends"} | _ROWS
_Changes: Final[Any] = make_dataclass(
    "_Changes", [*_REQUIRED.items(), ("ends", tuple[EndStep, ...] | None, field(default=None))]
)
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Changes)


def encode(changes: Persist) -> bytes:
    """Return the bytes of ``changes``."""
    rows = {
        "parameters": tuple(map(_parameters_row, changes.parameters)),
        "datasets": tuple(map(dataset_row, changes.datasets)),
    }
    return _ENCODER.encode(_fields(changes) | rows)


def decode(data: bytes) -> Persist:
    """Return the changes that ``data`` holds. Raises ValueError if it is not a change of this form."""
    try:
        read = _DECODER.decode(data)
        rows = {
            "parameters": tuple(parameters_of(p.entry, p.uploader, p.committed, p.layout) for p in read.parameters),
            "datasets": tuple(dataset_of(spec, text) for _, spec, text in read.datasets),
        }
        return Persist(**_fields(read) | rows)
    except (msgspec.MsgspecError, DecodeError, LookupError, TypeError) as error:
        raise ValueError(f"it is not a change of the scheduler's state: {error}") from None


def whole(state: StoredState, forgotten: Sequence[str] = ()) -> Persist:
    """Return ``state`` as one change of nothing."""
    values = _fields(state)
    del values["run_id"]
    return Persist(**values, forgotten=tuple(forgotten))


def _fields(value: DataclassInstance) -> dict[str, Any]:
    return {one.name: getattr(value, one.name) for one in fields(value)}


def _parameters_row(record: ParametersRecord) -> _Parameters:
    layout = convert.layout_to_proto(record.layout).SerializeToString()
    return _Parameters(entry_bytes(record), layout, record.uploader, record.committed)


# --- rows -------------------------------------------------------------------------------------------------------------


def dataset_row(record: DatasetRecord) -> tuple[str, bytes, str]:
    """Return a data set's name, its settings as a protobuf message, and its state as JSON."""
    spec = convert.dataset_to_proto(record.spec).SerializeToString()
    names = [one.name for one in fields(record)]
    state = dict(zip(names, astuple(record), strict=True))
    del state["spec"]
    return record.spec.name, spec, json.dumps(state, separators=(",", ":"))


def dataset_of(spec: bytes, text: str) -> DatasetRecord:
    """Return the data set of a row. Raises DecodeError, ValueError, LookupError or TypeError if it is none."""
    state = json.loads(text)
    stretches = {name: tuple((first, second) for first, second in state[name]) for name in ("free", "attempts")}
    leases = tuple(DataLease(*lease) for lease in state["leases"])
    settings = convert.dataset_from_proto(scheduler_pb2.DatasetSpec.FromString(spec))
    return DatasetRecord(settings, **state | stretches | {"leases": leases})


def entry_bytes(record: ParametersRecord) -> bytes:
    """Return the map entry of a parameter set as a protobuf message."""
    return convert.entry_to_proto(record.entry).SerializeToString()


def parameters_of(entry: bytes, uploader: str, committed: int, layout: bytes) -> ParametersRecord:
    """Return the parameter set of a row. Raises DecodeError if it is none."""
    return ParametersRecord(
        entry=convert.entry_from_proto(common_pb2.ParametersEntry.FromString(entry)),
        layout=convert.layout_from_proto(common_pb2.Layout.FromString(layout)),
        uploader=uploader,
        committed=bool(committed),
    )


# --- SQLite -----------------------------------------------------------------------------------------------------------


#: Raised when an older program could misread the file.
SCHEMA_VERSION = 7

_SCHEMA = """
CREATE TABLE run (
  id INTEGER PRIMARY KEY CHECK (id = 1), run_id TEXT NOT NULL, epoch INTEGER NOT NULL,
  servers_wanted INTEGER NOT NULL, base_directory TEXT NOT NULL, base_digest BLOB NOT NULL,
  generation INTEGER NOT NULL, term INTEGER NOT NULL, base_epoch INTEGER NOT NULL, began INTEGER NOT NULL,
  run_lost TEXT NOT NULL);
CREATE TABLE parameters (
  number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, entry BLOB NOT NULL,
  uploader TEXT NOT NULL, committed INTEGER NOT NULL, layout BLOB NOT NULL);
CREATE TABLE datasets (name TEXT PRIMARY KEY, spec BLOB NOT NULL, state TEXT NOT NULL);
"""
#: Tables whose rows are values of a class, in the order of its fields, and their keys.
_TABLES: Final[dict[str, tuple[type, str]]] = {
    "schedulers": (SchedulerProcess, "scheduler_id"),
    "members": (Member, "member_id"),
    "nodes": (Node, "agent_id"),
    "barriers": (BarrierRecord, "worker_id, name"),
    "events": (EventRecord, "number"),
    "ends": (EndStep, "parameters"),
}
_TYPES: Final[dict[Any, str]] = {int: "INTEGER", bool: "INTEGER", float: "REAL"}
_BASE = "base_directory, base_digest, generation, term, base_epoch, began"
_READ_PARAMETERS = "SELECT entry, uploader, committed, layout FROM parameters ORDER BY number"
_READ_DATASETS = "SELECT spec, state FROM datasets ORDER BY rowid"
#: The settings of a data set never change.
_WRITE_DATASET = "INSERT INTO datasets VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET state = excluded.state"
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
                members=self._read("members"),
                parameters=tuple(parameters_of(*row) for row in self._db.execute(_READ_PARAMETERS)),
                nodes=self._read("nodes"),
                datasets=tuple(dataset_of(*row) for row in self._db.execute(_READ_DATASETS)),
                servers_wanted=servers_wanted,
                base=_base(*base),
                barriers=self._read("barriers"),
                schedulers=self._read("schedulers"),
                run_lost=run_lost,
                ends=self._read("ends"),
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
            self._write("members", changes.members)
            self._write("nodes", changes.nodes)
            self._write("barriers", changes.barriers)
            self._db.executemany(_FORGET_BARRIERS, [(r.worker_id, r.worker_id) for r in changes.barriers])
            self._db.executemany(_WRITE_DATASET, [dataset_row(dataset) for dataset in changes.datasets])
            if (base := changes.base) is not None:
                self._db.execute(f"UPDATE run SET ({_BASE}) = (?, ?, ?, ?, ?, ?)", _base_row(base))
            if changes.schedulers:
                self._db.execute("DELETE FROM schedulers")
                self._write("schedulers", changes.schedulers)
            if changes.ends is not None:
                self._db.execute("DELETE FROM ends")
                self._write("ends", changes.ends)
            if changes.run_lost:
                self._db.execute("UPDATE run SET run_lost = ?", (changes.run_lost,))
            self._db.executemany("DELETE FROM parameters WHERE name = ?", [(name,) for name in changes.forgotten])
            for record in changes.parameters:
                self._write_parameters(record, record.entry.spec.name in changes.forgotten)
        self._known_layouts.difference_update(changes.forgotten)
        self._known_layouts.update(record.entry.spec.name for record in changes.parameters)

    def load_events(self) -> list[EventRecord]:
        try:
            return list(self._read("events"))
        except sqlite3.Error as error:
            raise _unusable(self._path, error) from None

    def write_events(self, records: Sequence[EventRecord]) -> None:
        try:
            # Enough for the death of this process, and it does not wait for the disk.
            self._db.execute("PRAGMA synchronous = NORMAL")
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._write("events", records)
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
        for table in _TABLES:  # Files of some releases have neither events nor ends.
            self._db.execute(_create(table))
        self._db.execute("COMMIT")
        (state,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(f"it is damaged: {' '.join(state.split())}")
        (kept,) = self._db.execute("SELECT run_id FROM run").fetchone()
        check_run(self._path, kept, run_id, "file")
        return str(kept)

    def _read(self, table: str) -> tuple[Any, ...]:
        """Return the rows of a table as values of its class, in the order in which they were added."""
        cls, _ = _TABLES[table]
        hints = get_type_hints(cls)
        rows = self._db.execute(f"SELECT {', '.join(hints)} FROM {table} ORDER BY rowid")
        return tuple(cls(*map(_value, hints.values(), row)) for row in rows)

    def _write(self, table: str, values: Sequence[Any]) -> None:
        """Add or change rows of a table."""
        cls, key = _TABLES[table]
        names = [field.name for field in fields(cls)]
        columns, marks = ", ".join(names), ", ".join("?" * len(names))
        updates = ", ".join(f"{name} = excluded.{name}" for name in names)
        # The newest barriers get the highest rowid. Other rows keep theirs.
        place, update = (
            (" OR REPLACE", "") if table == "barriers" else ("", f"ON CONFLICT ({key}) DO UPDATE SET {updates}")
        )
        self._db.executemany(f"INSERT{place} INTO {table} ({columns}) VALUES ({marks}) {update}", map(astuple, values))

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
    check_format(path, version or SCHEMA_VERSION, SCHEMA_VERSION, "file")
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


def _value(kind: type, value: Any) -> Any:
    return bool(value) if kind is bool else value


def _create(table: str) -> str:
    cls, key = _TABLES[table]
    columns = ", ".join(f"{name} {_TYPES.get(kind, 'TEXT')} NOT NULL" for name, kind in get_type_hints(cls).items())
    return f"CREATE TABLE IF NOT EXISTS {table} ({columns}, PRIMARY KEY ({key}))"


def _base_row(base: RestorePoint) -> tuple[str, bytes, int, int, int, int]:
    restore = base.restore
    directory, digest = (restore.directory, restore.manifest_digest) if restore is not None else ("", b"")
    return directory, digest, base.generation, base.term, base.epoch, base.began


def _base(directory: str, digest: bytes, *numbers: int) -> RestorePoint:
    return RestorePoint(Restore(check_directory(directory), digest) if directory else None, *numbers)
