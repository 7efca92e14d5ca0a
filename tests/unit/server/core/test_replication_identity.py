"""Identities of replication: (term, lsn) names one state, a filling has a number, and so has each copy on a stream."""

from __future__ import annotations

import pytest

from psdist.errors import StaleCopyError
from psdist.types import Replica, Shard
from psdist_server.core.events import SliceRecord
from psdist_server.core.replication import BackupReplication, PrimaryReplication, ReplicaState, ReplicaUpdate, SendBegin

A, B = Replica("server-1", 1), Replica("server-2", 1)


def update(lsn: int, version: int) -> ReplicaUpdate[str]:
    return ReplicaUpdate(lsn, 0, version, gradient="g", size=4)


def filling(fill: int) -> Shard:
    return Shard(A, 2).with_filling(B, fill)


def backed(fill: int) -> Shard:
    return filling(fill).with_copies((B,), ())


def fill(p: PrimaryReplication[str], b: BackupReplication, now: float) -> None:
    """Carry the copy to ``b`` to its end, without its report to the scheduler."""
    (begin,) = p.opened(B, b.held, now)
    assert isinstance(begin, SendBegin)
    b.start_copy(p.term, begin.lsn, begin.fill, begin.copy)
    b.state(0, SliceRecord(p.lsn))
    p.copied(B, 0)
    p.ended(B, now)
    b.end()
    p.filled(B, b.copy, now)


@pytest.mark.parametrize("numbered", [True, False])
def test_a_replica_that_missed_an_update_is_copied_whatever_late_reports_made_of_it(numbered: bool) -> None:
    """A replica is filled, dropped and filled again by maps that it never applies; in between, the state advances."""
    first, second = (7, 9) if numbered else (0, 0)
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0], base=(1, 244))
    b = BackupReplication(0, [0], filling(first))
    p.adopt_map(filling(first), 0.0)
    fill(p, b, 0.0)
    assert p.peers[B].complete
    p.adopt_map(Shard(A, 2), 3.0)
    p.lsn += 1  # An update while there is no replica.
    p.adopt_map(filling(second), 5.0)
    p.adopt_map(backed(second), 5.1)  # The scheduler believed the report on the first filling.
    assert p.opened(B, b.held, 5.2) == [SendBegin(B, 245, second, 2)]
    assert not p.is_caught_up


def test_every_update_has_a_number_also_without_a_replica() -> None:
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0], base=(1, 244))
    p.adopt_map(Shard(A, 2), 0.0)
    p.lsn += 1
    assert p.lsn == 245
    p.adopt_map(filling(1), 1.0)
    p.opened(B, None, 1.0)
    p.update(update(246, 245), 1.0)
    p.adopt_map(Shard(A, 2), 2.0)
    p.lsn += 1
    p.validate()
    assert p.lsn == 247 and not p.log_bytes


def test_a_copy_of_an_earlier_filling_is_not_resumed() -> None:
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0], base=(1, 5))
    p.adopt_map(backed(3), 0.0)
    assert p.opened(B, ReplicaState(1, 5, True, fill=2), 0.0) == [SendBegin(B, 5, 3, 1)]


def test_a_copy_of_the_same_filling_is_resumed_by_the_next_primary() -> None:
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0], base=(1, 5))
    p.adopt_map(backed(3), 0.0)
    assert p.opened(B, ReplicaState(1, 5, True, fill=3), 0.0) == []


def test_a_replica_with_another_filling_in_the_map_is_copied_again() -> None:
    """The map in which it was not a replica at all was not seen here."""
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0])
    b = BackupReplication(0, [0], filling(1))
    p.adopt_map(filling(1), 0.0)
    fill(p, b, 0.0)
    p.adopt_map(filling(2), 1.0)
    assert not p.peers[B].complete and not p.peers[B].is_open
    assert p.opened(B, b.held, 1.0) == [SendBegin(B, 0, 2, 2)]


def test_an_answer_to_an_earlier_copy_does_not_complete_the_newest() -> None:
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0])
    p.adopt_map(filling(1), 0.0)
    p.opened(B, None, 0.0)
    p.copied(B, 0)
    assert p.replaced(0) == [SendBegin(B, 0, 1, 2)]
    p.copied(B, 0)
    p.filled(B, 1, 0.0)
    assert not p.peers[B].filled
    p.filled(B, 2, 0.0)
    assert p.peers[B].complete


@pytest.mark.parametrize("is_open", [True, False])
def test_a_slice_that_is_replaced_without_an_update_reaches_a_replica_that_holds_the_same_lsn(is_open: bool) -> None:
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0])
    b = BackupReplication(0, [0], filling(1))
    p.adopt_map(filling(1), 0.0)
    fill(p, b, 0.0)
    if not is_open:
        p.closed(B, 1.0)
    effects = p.replaced(0)
    assert not p.peers[B].complete
    assert (effects or p.opened(B, b.held, 2.0)) == [SendBegin(B, 0, 1, 2)]


def stale() -> BackupReplication:
    b = BackupReplication(0, [0], backed(1))
    b.start_copy(2, 7, 1, 1)
    b.state(0, SliceRecord(244))
    b.end()
    with pytest.raises(StaleCopyError, match="version 245 of slice 0 of shard 0, whose copy here is at version 244"):
        b.update(2, update(8, 245))
    return b


def test_a_copy_that_an_update_does_not_fit_is_neither_promoted_nor_resumed_before_it_is_filled_again() -> None:
    b = stale()
    assert not b.complete and not b.held.complete
    # What is on its way behind the refused update is neither refused one by one, nor acknowledged.
    assert b.update(2, update(8, 245)) == b.update(2, update(9, 246)) == "ignore"
    b.start_copy(2, 9, 2, 1)
    assert not b.complete
    b.state(0, SliceRecord(247))
    b.end()
    assert b.complete and b.held == ReplicaState(2, 9, True, fill=2)
    assert b.update(2, update(10, 247)) == "apply"


def test_a_replica_that_refused_an_update_is_reported_and_sent_nothing_more() -> None:
    p: PrimaryReplication[str] = PrimaryReplication(0, 2, [0], base=(1, 7))
    p.adopt_map(backed(1), 0.0)
    p.opened(B, ReplicaState(1, 7, True, fill=1), 0.0)
    p.update(update(8, 245), 0.0)
    assert p.refused_copy(B, "does not fit")
    assert p.unreachable(0.0, 2.0) == [B]
    assert p.update(update(9, 246), 0.0) == []
    assert not p.acknowledged(B, 7, 0.0), "no update may count as replicated by a stale copy"
