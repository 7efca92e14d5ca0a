"""Replication machines: one test per rule."""

from __future__ import annotations

import pytest

from psdist.errors import InvalidArgumentError
from psdist.types import Replica, Shard
from psdist_server.core.events import SliceRecord
from psdist_server.core.replication import (
    BackupReplication,
    PrimaryReplication,
    ReplicaState,
    Replicated,
    ReplicaUpdate,
    SendBegin,
    SendUpdate,
)

P, B, C = Replica("server-0", 1), Replica("server-1", 1), Replica("server-2", 1)
LIFE = ("worker-0", 1)


def primary(shard: Shard, base: tuple[int, int] = (0, 0)) -> PrimaryReplication[str]:
    machine: PrimaryReplication[str] = PrimaryReplication(0, shard.term, [0, 1], base)
    machine.adopt_map(shard, 0.0)
    return machine


def update(lsn: int, index: int = 0, version: int = 0) -> ReplicaUpdate[str]:
    return ReplicaUpdate(lsn, index, version, (LIFE,), gradient="g", size=4)


def filled() -> PrimaryReplication[str]:
    machine = primary(Shard(P, 1, (), (B,)))
    machine.opened(B, None, 0.0)
    while (index := machine.next_copy(B)) is not None:
        machine.copied(B, index)
    machine.filled(B, 1, 0.0)
    return machine


def backup(shard: Shard | None = None) -> BackupReplication:
    machine = BackupReplication(0, [0, 1], shard or Shard(P, 1, (B,)))
    machine.start_copy(1, 0)
    for index in range(2):
        machine.state(index, SliceRecord())
    machine.end()
    return machine


def test_an_update_is_replicated_when_the_backup_acknowledged_it() -> None:
    machine = filled()
    sent = machine.update(update(1), 1.0)
    assert sent == [SendUpdate(B, update(1), True)]
    assert machine.acknowledged(B, 1, 2.0) == [Replicated(0, 1)]
    assert machine.log_bytes == 0


def test_a_replica_that_is_only_being_filled_holds_nobody_up_and_gets_no_gradient_before_its_slice() -> None:
    machine = primary(Shard(P, 1, (), (B,)))
    assert machine.opened(B, None, 0.0) == [SendBegin(B, 0, fill=0, copy=1)]
    assert not machine.needs_gradient(0)
    assert machine.update(update(1), 0.0) == [SendUpdate(B, update(1), False), Replicated(0, 1)]
    machine.copied(B, 0)
    assert machine.needs_gradient(0) and not machine.needs_gradient(1)


def test_what_is_under_way_when_a_replica_is_filled_waits_for_it() -> None:
    machine = primary(Shard(P, 1, (C,), (B,)))
    machine.opened(C, ReplicaState(0, 0, True), 0.0)
    machine.opened(B, None, 0.0)
    for index in range(2):
        machine.copied(B, index)
    machine.update(update(1), 0.0)
    machine.filled(B, 1, 0.0)
    assert machine.acknowledged(C, 1, 0.0) == []
    assert machine.acknowledged(B, 1, 0.0) == [Replicated(0, 1)]


def test_a_backup_that_the_map_removes_is_not_waited_for_any_more() -> None:
    machine = filled()
    machine.adopt_map(Shard(P, 1, (B,)), 0.0)
    machine.update(update(1), 0.0)
    assert machine.adopt_map(Shard(P, 1), 0.0) == [Replicated(0, 1)]


def test_what_was_not_acknowledged_is_sent_again_on_a_new_stream() -> None:
    machine = filled()
    machine.update(update(1), 0.0)
    machine.update(update(2, 1), 0.0)
    machine.closed(B, 0.0)
    assert machine.opened(B, ReplicaState(1, 1, True), 0.0) == [SendUpdate(B, update(2, 1), True), Replicated(0, 1)]


def test_a_copy_that_broke_off_begins_anew() -> None:
    machine = primary(Shard(P, 1, (), (B,)))
    machine.opened(B, None, 0.0)
    machine.copied(B, 0)
    machine.closed(B, 0.0)
    assert machine.opened(B, ReplicaState(1, 0, True), 0.0) == [SendBegin(B, 0, fill=0, copy=2)]
    assert machine.next_copy(B) == 0


@pytest.mark.parametrize(("held", "adopted"), [(ReplicaState(1, 7, True), True), (ReplicaState(1, 8, True), False)])
def test_a_promoted_primary_goes_on_with_backups_that_hold_the_same(held: ReplicaState, adopted: bool) -> None:
    machine = primary(Shard(B, 2, (C,)), base=(1, 7))
    effects = machine.opened(C, held, 0.0)
    assert effects == ([] if adopted else [SendBegin(C, 7, fill=0, copy=1)])


def test_who_owes_an_answer_for_too_long_is_unreachable() -> None:
    machine = filled()
    assert machine.unreachable(100.0, 2.0) == []
    machine.update(update(1), 100.0)
    assert machine.unreachable(102.0, 2.0) == [] and machine.unreachable(102.1, 2.0) == [B]
    machine.acknowledged(B, 1, 102.2)
    assert machine.unreachable(200.0, 2.0) == []
    machine.closed(B, 200.0)
    assert machine.unreachable(202.1, 2.0) == [B]


def test_a_replica_takes_updates_in_order_and_acknowledges_repeats() -> None:
    machine = backup()
    assert machine.update(1, update(1)) == "apply"
    assert machine.update(1, update(2, 1)) == "apply"
    assert machine.applied(1, 2) == 0  # The kernel of the first has not ended.
    assert machine.applied(1, 1) == 2
    assert machine.update(1, update(2, 1)) == "repeat"
    with pytest.raises(InvalidArgumentError, match="open the stream again"):
        machine.update(1, update(4))
    assert machine.records[0].contributors == (LIFE,)


def test_a_copy_without_all_slices_is_not_complete() -> None:
    machine = BackupReplication(0, [0, 1], Shard(P, 1, (), (B,)))
    machine.start_copy(1, 5)
    machine.state(1, SliceRecord(3))
    assert machine.update(1, update(6)) == "skip"
    with pytest.raises(InvalidArgumentError, match="without slices"):
        machine.end()
    assert not machine.held.complete


def test_while_it_is_copied_again_by_a_new_primary_a_replica_can_still_be_promoted() -> None:
    machine = backup()
    machine.adopt_map(Shard(C, 2, (B,)))
    machine.start_copy(2, 9)
    assert machine.complete and not machine.held.complete
