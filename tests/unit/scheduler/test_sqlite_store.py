"""The store: written state is back after a restart, one scheduler at a time, and nothing is guessed."""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from psdist.errors import ConfigurationError, StorageError
from psdist.settings.config import default_store
from psdist.types import (
    Restore,
)
from psdist.wire.limits import BARRIERS_PASSED_MAX
from psdist_scheduler.app import open_store
from psdist_scheduler.decide.cluster_state import (
    BarrierRecord,
    EndStep,
    Member,
    RestorePoint,
    SchedulerProcess,
    StoredState,
)
from psdist_scheduler.decide.effects import Persist
from psdist_scheduler.run_store import SqliteStore, Store
from psdist_scheduler.scheduler import merge
from tests.support.store_records import ENTRY, MEMBER, NODE, RECORD


def loaded(folder: Path, run_id: str = "") -> StoredState | None:
    """Return what another scheduler finds in the store."""
    store = SqliteStore(folder / "s", run_id)
    found = store.load()
    store.close()
    return found


def test_what_was_written_is_loaded(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s", "run")
    assert store.load() is None
    store.write(Persist(1, (MEMBER,), (RECORD,), (NODE,)))
    gone = replace(MEMBER, state="lost", reason="silent")
    changed = replace(RECORD, entry=replace(ENTRY, members=()), uploader="")
    store.write(Persist(2, (gone, replace(MEMBER, member_id="w2", rank=1)), (changed,)))
    store.close()
    assert loaded(tmp_path) == StoredState(
        "run", 2, (gone, replace(MEMBER, member_id="w2", rank=1)), (changed,), (NODE,)
    )


def test_what_is_to_be_loaded_anew_is_forgotten(tmp_path: Path) -> None:
    """The run went back to a snapshot: what was placed is not, in the same write."""
    base = RestorePoint(Restore("000000000007-3-0-abc", b"\1" * 16), 2, 9, 4)
    other = replace(RECORD, entry=replace(ENTRY, spec=replace(ENTRY.spec, name="other")))
    store = SqliteStore(tmp_path / "s", "run")
    store.write(Persist(1, parameters=(RECORD, other)))
    store.write(Persist(2, forgotten=("mlp",), base=base))
    assert store.load() == StoredState("run", 2, parameters=(other,), base=base)
    restored = replace(RECORD, entry=replace(ENTRY, restore=base.restore, generation=2), uploader="")
    store.write(Persist(3, parameters=(restored,)))
    store.write(Persist(4, parameters=(RECORD,), forgotten=("mlp",)))
    store.close()
    assert loaded(tmp_path) == StoredState("run", 4, parameters=(other, RECORD), base=base)


def test_what_became_of_the_run_is_loaded(tmp_path: Path) -> None:
    """Its base, an optimizer that was reset, its schedulers, and the reason why it is lost."""
    place = Restore("000000000007-3-0-abc", b"\1" * 16)
    base = RestorePoint(place, 2, 9, 4, began=3)
    spec = replace(ENTRY.spec, reset_optimizer=True)
    reset = replace(ENTRY, spec=spec, restore=replace(place, weights_only=True), state_since=7)
    record, processes = replace(RECORD, entry=reset), (SchedulerProcess("a", 5), SchedulerProcess("b"))
    store = SqliteStore(tmp_path / "s", "run")
    store.write(Persist(6, parameters=(record,), base=base, schedulers=processes))
    ends = (EndStep("mlp", 4), EndStep("other", 7))
    store.write(Persist(7, run_lost="it is gone", ends=ends))
    wanted = StoredState("run", 7, (), (record,), base=base, schedulers=processes, run_lost="it is gone", ends=ends)
    assert store.load() == wanted
    store.write(Persist(7, ends=()))
    store.close()
    assert loaded(tmp_path) == replace(wanted, ends=())


def test_what_workers_have_passed_is_loaded(tmp_path: Path) -> None:
    """The last record of each worker and name is kept; nothing else is changed by it, nor changes it."""
    first = BarrierRecord("worker-0", "begin", 1, 1)
    other = BarrierRecord("worker-1", "begin", 3, 1)
    last = BarrierRecord("worker-0", "begin", 1, 2)
    renamed = BarrierRecord("worker-0", "end", 2, BARRIERS_PASSED_MAX)
    store = SqliteStore(tmp_path / "s", "run")
    store.write(Persist(1, (MEMBER,), (RECORD,), barriers=(first, other)))
    assert store.load() == StoredState("run", 1, (MEMBER,), (RECORD,), barriers=(first, other))
    store.write(Persist(1, barriers=(last, renamed)))
    store.write(Persist(2, forgotten=("mlp",)))
    store.close()
    found = loaded(tmp_path)
    assert found is not None and set(found.barriers) == {other, last, renamed}
    assert replace(found, barriers=()) == StoredState("run", 2, (MEMBER,))


def test_barriers_that_are_passed_in_one_write(tmp_path: Path) -> None:
    rounds = [Persist(1, barriers=(BarrierRecord("worker-0", "b", 1, number),)) for number in (1, 2, 3)]
    changes = [*rounds, Persist(2, (MEMBER,), barriers=(BarrierRecord("worker-1", "b", 1, 3),)), Persist(3)]
    one, each = (SqliteStore(tmp_path / name, "run") for name in ("one", "each"))
    for change in changes:
        each.write(change)
    one.write(merge(changes))
    found = one.load()
    assert found is not None and found == each.load()
    assert [record.passed for record in found.barriers] == [3, 3]
    one.close()
    each.close()


def test_a_barrier_that_cannot_be_kept_changes_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s", "run")
    store.write(Persist(1, barriers=(BarrierRecord("worker-0", "b", 1, 1),)))
    before = store.load()
    broken = BarrierRecord("worker-1", "b", 1, None)
    with pytest.raises(sqlite3.IntegrityError):
        store.write(Persist(2, (MEMBER,), barriers=(BarrierRecord("worker-0", "b", 1, 2), broken)))
    assert store.load() == before
    store.close()


def test_several_changes_are_one(tmp_path: Path) -> None:
    """Whatever order parameters come and go in, and come back."""
    base = RestorePoint(Restore("000000000007-3-0-abc", b"\1" * 16), 1, 2, 2)
    changes = [Persist(1, parameters=(RECORD,)), Persist(2, forgotten=("mlp",), base=base), Persist(3)]
    for last in ((), (Persist(4, parameters=(replace(RECORD, uploader=""),)),)):
        one, each = (SqliteStore(tmp_path / f"{name}{len(last)}", "run") for name in ("one", "each"))
        for change in (*changes, *last):
            each.write(change)
        one.write(merge([*changes, *last]))
        assert one.load() == each.load()
        one.close()
        each.close()


def test_a_failed_write_changes_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s", "run")
    store.write(Persist(1, (MEMBER,)))
    broken = replace(MEMBER, member_id="x", rank=None)
    with pytest.raises(sqlite3.IntegrityError):
        store.write(Persist(2, (replace(MEMBER, rank=9), broken)))
    assert store.load() == StoredState("run", 1, (MEMBER,))
    store.close()


def test_one_scheduler_at_a_time(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s", "run")
    with pytest.raises(ConfigurationError, match="in use by another scheduler"):
        SqliteStore(tmp_path / "s", "run")
    store.close()
    SqliteStore(tmp_path / "s", "run").close()


def test_another_run_is_refused(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "s", "run").close()
    with pytest.raises(ConfigurationError, match="belongs to run 'run', not 'other'"):
        SqliteStore(tmp_path / "s", "other")


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, and long enough not to be taken for an empty one" * 20)
    for path in (tmp_path / "text", tmp_path, tmp_path / "missing" / "s"):
        with pytest.raises(ConfigurationError, match="cannot be used"):
            SqliteStore(path, "run")


@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
def test_another_format_is_refused_and_left_as_it_is(tmp_path: Path, journal: str) -> None:
    SqliteStore(tmp_path / "s", "run").close()
    db = sqlite3.connect(tmp_path / "s")
    db.execute(f"PRAGMA journal_mode = {journal}")
    db.execute("PRAGMA user_version = 99")
    db.close()
    before = (tmp_path / "s").read_bytes()
    with pytest.raises(ConfigurationError, match="format 99"):
        SqliteStore(tmp_path / "s", "run")
    assert (tmp_path / "s").read_bytes() == before


def test_the_log_of_a_crashed_newer_release_is_left_as_it_is(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "s", "run").close()
    db = sqlite3.connect(tmp_path / "s")
    db.execute("PRAGMA user_version = 99")
    crashed = tmp_path / "crashed"
    names = ("", "-wal")
    for name in names:
        shutil.copy(f"{tmp_path / 's'}{name}", f"{crashed}{name}")
    db.close()
    before = [Path(f"{crashed}{name}").read_bytes() for name in names]
    with pytest.raises(ConfigurationError, match="format 99"):
        SqliteStore(crashed, "run")
    assert [Path(f"{crashed}{name}").read_bytes() for name in names] == before


def test_without_a_path_nothing_is_kept() -> None:
    store, run_id = open_store(None, "run", never)
    assert type(store) is Store
    assert run_id == "run"
    assert open_store(None, "", lambda: "new")[1] == "new"
    store.write(Persist(1, (MEMBER,)))
    assert store.load() is None
    store.close()


def test_a_run_that_nobody_names_keeps_its_name(tmp_path: Path) -> None:
    for choose in (lambda: "new", never):
        store, run_id = open_store(tmp_path / "s", "", choose)
        store.close()
        assert run_id == "new"


def test_a_new_file_whose_name_cannot_be_found_stays_new(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        open_store(tmp_path / "s", "", unreadable)
    store, run_id = open_store(tmp_path / "s", "run", never)
    store.close()
    assert run_id == "run"


def unreadable() -> str:
    raise StorageError("the storage cannot be read")


def never() -> str:
    raise AssertionError("the run has a name")


def test_what_is_discarded_is_gone_with_all_files(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s", "run")
    store.write(Persist(1, (MEMBER,), (RECORD,), (NODE,)))
    store.discard()
    assert list(tmp_path.iterdir()) == []
    assert loaded(tmp_path, "another") is None


def test_a_store_that_is_discarded_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that starts at the same time, as soon as the lock is free, keeps its new file."""
    store = SqliteStore(tmp_path / "s", "run")
    store.write(Persist(1, (MEMBER,)))
    close, others = store.close, []

    def close_and_start() -> None:
        close()
        others.append(SqliteStore(tmp_path / "s", "next"))

    monkeypatch.setattr(store, "close", close_and_start)
    store.discard()
    (other,) = others
    other.write(Persist(1, (MEMBER,)))
    other.close()
    assert loaded(tmp_path) == StoredState("next", 1, (MEMBER,))


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
def test_a_damaged_file_is_refused_with_a_remedy(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "s"
    store = SqliteStore(path, "run")
    for number in range(200):
        store.write(Persist(number + 1, members=(Member(f"server-{number}", "server", 1, address="x" * 200),)))
    store.close()
    data = path.read_bytes()
    half = len(data) // 2
    path.write_bytes(data[:half] if damage == "truncated" else data[:half] + b"\xff" * (len(data) - half))
    with pytest.raises(ConfigurationError, match=r"cannot be used: .*Put back a copy"):
        SqliteStore(path, "run")


def test_a_default_store_is_only_for_schedulers_that_can_be_started_again(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    assert default_store(environ, "", 7000) is None and default_store(environ, "run", 0) is None
    paths = {default_store(environ, run_id, port) for run_id in ("a/b", "a") for port in (7000, 7001)}
    assert len(paths) == 4 and {path.parent for path in paths if path} == {tmp_path / "psdist" / "schedulers"}


def test_a_default_store_without_a_place_is_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "schedulers" / "s.sqlite"
    store, _ = open_store(path, "run", lambda: "", optional=True)
    assert not isinstance(store, SqliteStore)
