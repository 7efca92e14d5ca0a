"""Changes as stores keep them: all fields come back, and the form has a number."""

from __future__ import annotations

from dataclasses import fields, replace

import msgspec
import pytest

from psdist.types import DatasetSpec, Restore
from psdist_scheduler import etcd_store, run_store
from psdist_scheduler.decide.cluster_state import (
    BarrierRecord,
    DataLease,
    DatasetRecord,
    EndStep,
    Member,
    RestorePoint,
    SchedulerProcess,
    StoredState,
)
from psdist_scheduler.decide.effects import Persist
from tests.support.store_records import MEMBER, NODE, RECORD

DATASET = DatasetRecord(DatasetSpec("d", 100, 10), ((3, 10),), (DataLease(4, 2, "worker-0", 1),), ((5, 1),), 1, 2, 4)
EVERYTHING = Persist(
    7,
    (MEMBER,),
    (RECORD,),
    (NODE,),
    3,
    (DATASET,),
    forgotten=("old",),
    base=RestorePoint(Restore("snapshot-1", b"x" * 16), 1, 2, 3, 4),
    barriers=(BarrierRecord("w0", "b", 1, 2),),
    schedulers=(SchedulerProcess("s", 5),),
    run_lost="lost",
    ends=(EndStep("m", 9),),
)


def test_each_field_comes_back() -> None:
    assert all(getattr(EVERYTHING, field.name) for field in fields(Persist))
    assert run_store.decode(run_store.encode(EVERYTHING)) == EVERYTHING
    assert run_store.decode(run_store.encode(Persist(1))) == Persist(1)


def test_the_fields_are_those_of_the_format() -> None:
    """Raise ``etcd_store.FORMAT`` when the stored fields change: an older log lacks them."""
    stored = msgspec.msgpack.decode(run_store.encode(EVERYTHING))
    assert etcd_store.FORMAT == 1
    names = "epoch members parameters nodes servers_wanted datasets forgotten base barriers schedulers run_lost ends"
    assert [*stored] == names.split()
    assert [*stored["parameters"][0]] == ["entry", "layout", "uploader", "committed"]
    assert [*stored["members"][0]] == [field.name for field in fields(Member)]


def test_a_change_without_a_field_is_refused() -> None:
    stored = msgspec.msgpack.decode(run_store.encode(EVERYTHING))
    del stored["barriers"]
    with pytest.raises(ValueError, match="missing required field `barriers`"):
        run_store.decode(msgspec.msgpack.encode(stored))


def test_a_change_of_an_earlier_release_has_no_ends() -> None:
    stored = msgspec.msgpack.decode(run_store.encode(EVERYTHING))
    del stored["ends"]
    assert run_store.decode(msgspec.msgpack.encode(stored)) == replace(EVERYTHING, ends=None)


def test_a_whole_state_is_one_change() -> None:
    state = StoredState("run", 7, (MEMBER,), (RECORD,), (NODE,), servers_wanted=2, run_lost="lost")
    whole = run_store.whole(state, ["old"])
    assert whole.forgotten == ("old",)
    assert {name: getattr(whole, name) for name in vars(state) if name != "run_id"} == {
        name: value for name, value in vars(state).items() if name != "run_id"
    }
