"""Replication machines: one test per rule. (term, lsn) names one state; fillings and copies have numbers."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.errors import InvalidArgumentError, StaleCopyError
from psdist.types import Replica, Shard
from psdist_server.core.replication import (
    BackupReplication,
    PrimaryReplication,
    ReplicaState,
    Replicated,
    ReplicaUpdate,
    SendBegin,
    SendUpdate,
)
from psdist_server.core.shard import SliceRecord

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


# --- a promoted primary -----------------------------------------------------------------------------------------------


_ME, _BACKUP, _NEW = Replica("server-2", 2), Replica("server-1", 1), Replica("server-0", 1)


def _promoted() -> PrimaryReplication[Any]:
    """Term 2 of a shard of slices 0 and 3, taken over with 188 updates of term 1, with one backup."""
    machine: PrimaryReplication[Any] = PrimaryReplication(0, 2, (0, 3), base=(1, 188))
    machine.adopt_map(Shard(_ME, 2, backups=(_BACKUP,)), 0.0)
    return machine


def test_a_backup_with_the_same_is_level_at_once() -> None:
    machine = _promoted()
    assert not machine.is_caught_up
    assert machine.opened(_BACKUP, ReplicaState(1, 188, True), 1.0) == []
    assert machine.is_caught_up


def test_a_backup_with_less_is_copied_before_anybody_hears() -> None:
    machine = _promoted()
    assert machine.opened(_BACKUP, ReplicaState(1, 186, True), 1.0) == [SendBegin(_BACKUP, 188, fill=0, copy=1)]
    while (index := machine.next_copy(_BACKUP)) is not None:
        assert not machine.is_caught_up
        machine.copied(_BACKUP, index)
    assert not machine.is_caught_up
    machine.filled(_BACKUP, 1, 2.0)
    assert machine.is_caught_up


def test_a_backup_that_the_map_took_away_is_not_waited_for() -> None:
    machine = _promoted()
    machine.adopt_map(Shard(_ME, 2), 1.0)
    assert machine.is_caught_up


def test_one_that_is_being_filled_is_not_waited_for() -> None:
    machine = _promoted()
    machine.opened(_BACKUP, ReplicaState(1, 188, True), 1.0)
    machine.adopt_map(Shard(_ME, 2, backups=(_BACKUP,), filling=(_NEW,)), 1.0)
    assert machine.is_caught_up
    machine.opened(_NEW, None, 1.0)
    assert machine.is_caught_up


def test_while_a_backup_is_copied_again_nobody_hears_of_what_it_has_not() -> None:
    machine = _promoted()
    machine.opened(_BACKUP, ReplicaState(1, 188, True), 1.0)
    machine.closed(_BACKUP, 2.0)
    assert machine.is_caught_up
    assert machine.opened(_BACKUP, ReplicaState(0, 0, False), 3.0) == [SendBegin(_BACKUP, 188, fill=0, copy=1)]
    assert not machine.is_caught_up


# --- when a copy is complete ------------------------------------------------------------------------------------------


OLD, NEW = Replica("server-0", 1), Replica("server-1", 1)


def update_after(lsn: int) -> ReplicaUpdate[None]:
    return ReplicaUpdate(lsn=lsn, index=0, version=lsn - 1)


def test_updates_sent_behind_the_copy_must_be_acknowledged_before_the_replica_is_reported() -> None:
    machine: PrimaryReplication[None] = PrimaryReplication(0, 1, [0])
    machine.adopt_map(Shard(OLD, filling=(NEW,)), 0.0)
    machine.opened(NEW, None, 0.0)
    machine.copied(NEW, 0)
    machine.ended(NEW, 0.0)
    # The worker is answered immediately: no replica is required yet.
    assert Replicated(0, 1) in machine.update(update_after(1), 0.0)
    machine.filled(NEW, 1, 0.0)
    assert machine.peers[NEW].filled and not machine.peers[NEW].complete
    # From now on answers wait for it. It is complete once it has all updates that were answered before.
    assert Replicated(0, 2) not in machine.update(update_after(2), 0.0)
    machine.acknowledged(NEW, 1, 0.0)
    assert machine.peers[NEW].complete
    assert machine.acknowledged(NEW, 2, 0.0) == [Replicated(0, 2)]


def test_a_backup_that_was_removed_and_is_to_be_filled_by_the_next_map_seen_is_copied() -> None:
    """A map in between may not have been seen here: the scheduler was started again. The replica has seen it, perhaps,
    and has nothing any more; without a copy it would be sent updates without gradients."""
    machine: PrimaryReplication[None] = PrimaryReplication(0, 2, [0], base=(1, 5))
    machine.adopt_map(Shard(OLD, 2, backups=(NEW,)), 0.0)
    machine.opened(NEW, ReplicaState(1, 5, True), 0.0)
    machine.adopt_map(Shard(OLD, 2, filling=(NEW,)), 1.0)
    assert not machine.peers[NEW].is_open
    assert machine.opened(NEW, None, 1.0) == [SendBegin(NEW, 5, fill=0, copy=1)]
    assert not machine.peers[NEW].required


def test_what_is_promoted_while_it_is_copied_again_is_like_nobody_else() -> None:
    """Some of its slices are older than its lsn says, those of another replica at the same lsn are not."""
    machine = BackupReplication(0, [0, 1], Shard(OLD, 1, (NEW,)))
    machine.start_copy(1, 4)
    for index in range(2):
        machine.state(index, SliceRecord())
    machine.end()
    assert machine.base == (1, 4)
    machine.start_copy(2, 6)
    machine.state(0, SliceRecord(3))
    successor: PrimaryReplication[None] = PrimaryReplication(0, 3, [0, 1], machine.base)
    successor.adopt_map(Shard(NEW, 3, (OLD,)), 0.0)
    assert successor.opened(OLD, ReplicaState(2, 6, True), 0.0) == [SendBegin(OLD, 6, fill=0, copy=1)]


def test_a_copy_of_which_the_beginning_was_not_heard_is_not_complete() -> None:
    """The replica had an older map then."""
    machine = BackupReplication(0, [0, 1], Shard(OLD, 1, (), (NEW,)))
    with pytest.raises(InvalidArgumentError, match="without slices"):
        machine.end()


# --- identities -------------------------------------------------------------------------------------------------------


ONE, TWO = Replica("server-1", 1), Replica("server-2", 1)


def update_at(lsn: int, version: int) -> ReplicaUpdate[str]:
    return ReplicaUpdate(lsn, 0, version, gradient="g", size=4)


def filling(fill: int) -> Shard:
    return Shard(ONE, 2).with_filling(TWO, fill)


def backed(fill: int) -> Shard:
    return filling(fill).with_copies((TWO,), ())


def fill(p: PrimaryReplication[str], b: BackupReplication, now: float) -> None:
    """Carry the copy to ``b`` to its end, without its report to the scheduler."""
    (begin,) = p.opened(TWO, b.held, now)
    assert isinstance(begin, SendBegin)
    b.start_copy(p.term, begin.lsn, begin.fill, begin.copy)
    b.state(0, SliceRecord(p.lsn))
    p.copied(TWO, 0)
    p.ended(TWO, now)
    b.end()
    p.filled(TWO, b.copy, now)


@pytest.mark.parametrize("numbered", [True, False])
def test_a_replica_that_missed_an_update_is_copied_whatever_late_reports_made_of_it(numbered: bool) -> None:
    """A replica is filled, dropped and filled again by maps that it never applies; in between, the state advances."""
    first, second = (7, 9) if numbered else (0, 0)
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0], base=(1, 244))
    b = BackupReplication(0, [0], filling(first))
    p.adopt_map(filling(first), 0.0)
    fill(p, b, 0.0)
    assert p.peers[TWO].complete
    p.adopt_map(Shard(ONE, 2), 3.0)
    p.lsn += 1  # An update_at while there is no replica.
    p.adopt_map(filling(second), 5.0)
    p.adopt_map(backed(second), 5.1)  # The scheduler believed the report on the first filling.
    assert p.opened(TWO, b.held, 5.2) == [SendBegin(TWO, 245, second, 2)]
    assert not p.is_caught_up


def test_every_update_has_a_number_also_without_a_replica() -> None:
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0], base=(1, 244))
    p.adopt_map(Shard(ONE, 2), 0.0)
    p.lsn += 1
    assert p.lsn == 245
    p.adopt_map(filling(1), 1.0)
    p.opened(TWO, None, 1.0)
    p.update(update_at(246, 245), 1.0)
    p.adopt_map(Shard(ONE, 2), 2.0)
    p.lsn += 1
    p.validate()
    assert p.lsn == 247 and not p.log_bytes


@pytest.mark.parametrize(("fill", "effects"), [(3, []), (2, [SendBegin(TWO, 5, 3, 1)])])
def test_only_a_copy_of_the_same_filling_is_resumed_by_the_next_primary(fill: int, effects: list[object]) -> None:
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0], base=(1, 5))
    p.adopt_map(backed(3), 0.0)
    assert p.opened(TWO, ReplicaState(1, 5, True, fill=fill), 0.0) == effects


def test_a_replica_with_another_filling_in_the_map_is_copied_again() -> None:
    """The map in which it was not a replica at all was not seen here."""
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0])
    b = BackupReplication(0, [0], filling(1))
    p.adopt_map(filling(1), 0.0)
    fill(p, b, 0.0)
    p.adopt_map(filling(2), 1.0)
    assert not p.peers[TWO].complete and not p.peers[TWO].is_open
    assert p.opened(TWO, b.held, 1.0) == [SendBegin(TWO, 0, 2, 2)]


def test_an_answer_to_an_earlier_copy_does_not_complete_the_newest() -> None:
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0])
    p.adopt_map(filling(1), 0.0)
    p.opened(TWO, None, 0.0)
    p.copied(TWO, 0)
    assert p.replaced(0) == [SendBegin(TWO, 0, 1, 2)]
    p.copied(TWO, 0)
    p.filled(TWO, 1, 0.0)
    assert not p.peers[TWO].filled
    p.filled(TWO, 2, 0.0)
    assert p.peers[TWO].complete


@pytest.mark.parametrize("is_open", [True, False])
def test_a_slice_that_is_replaced_without_an_update_reaches_a_replica_that_holds_the_same_lsn(is_open: bool) -> None:
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0])
    b = BackupReplication(0, [0], filling(1))
    p.adopt_map(filling(1), 0.0)
    fill(p, b, 0.0)
    if not is_open:
        p.closed(TWO, 1.0)
    effects = p.replaced(0)
    assert not p.peers[TWO].complete
    assert (effects or p.opened(TWO, b.held, 2.0)) == [SendBegin(TWO, 0, 1, 2)]


def stale() -> BackupReplication:
    b = BackupReplication(0, [0], backed(1))
    b.start_copy(2, 7, 1, 1)
    b.state(0, SliceRecord(244))
    b.end()
    with pytest.raises(StaleCopyError, match="version 245 of slice 0 of shard 0, whose copy here is at version 244"):
        b.update(2, update_at(8, 245))
    return b


def test_a_copy_that_an_update_does_not_fit_is_neither_promoted_nor_resumed_before_it_is_filled_again() -> None:
    b = stale()
    assert not b.complete and not b.held.complete
    # What is on its way behind the refused update_at is neither refused one by one, nor acknowledged.
    assert b.update(2, update_at(8, 245)) == b.update(2, update_at(9, 246)) == "ignore"
    b.start_copy(2, 9, 2, 1)
    assert not b.complete
    b.state(0, SliceRecord(247))
    b.end()
    assert b.complete and b.held == ReplicaState(2, 9, True, fill=2)
    assert b.update(2, update_at(10, 247)) == "apply"


def test_a_replica_that_refused_an_update_is_reported_and_sent_nothing_more() -> None:
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0], base=(1, 7))
    p.adopt_map(backed(1), 0.0)
    p.opened(TWO, ReplicaState(1, 7, True, fill=1), 0.0)
    p.update(update_at(8, 245), 0.0)
    assert p.refused_copy(TWO, "does not fit")
    assert p.unreachable(0.0, 2.0) == [TWO]
    assert p.update(update_at(9, 246), 0.0) == []
    assert not p.acknowledged(TWO, 7, 0.0), "no update_at may count as replicated by a stale copy"
