"""When a copy is complete: not before its server has all that workers were answered for while it was made."""

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
)

OLD, NEW = Replica("server-0", 1), Replica("server-1", 1)


def update(lsn: int) -> ReplicaUpdate[None]:
    return ReplicaUpdate(lsn=lsn, index=0, version=lsn - 1)


def test_updates_sent_behind_the_copy_must_be_acknowledged_before_the_replica_is_reported() -> None:
    machine: PrimaryReplication[None] = PrimaryReplication(0, 1, [0])
    machine.adopt_map(Shard(OLD, filling=(NEW,)), 0.0)
    machine.opened(NEW, None, 0.0)
    machine.copied(NEW, 0)
    machine.ended(NEW, 0.0)
    # The worker is answered immediately: no replica is required yet.
    assert Replicated(0, 1) in machine.update(update(1), 0.0)
    machine.filled(NEW, 1, 0.0)
    assert machine.peers[NEW].filled and not machine.peers[NEW].complete
    # From now on answers wait for it, and it is complete as soon as it has what was answered before.
    assert Replicated(0, 2) not in machine.update(update(2), 0.0)
    machine.acknowledged(NEW, 1, 0.0)
    assert machine.peers[NEW].complete
    assert machine.acknowledged(NEW, 2, 0.0) == [Replicated(0, 2)]


def test_one_that_is_copied_again_is_not_reported() -> None:
    machine: PrimaryReplication[None] = PrimaryReplication(0, 1, [0])
    machine.adopt_map(Shard(OLD, filling=(NEW,)), 0.0)
    machine.opened(NEW, None, 0.0)
    machine.copied(NEW, 0)
    machine.filled(NEW, 1, 0.0)
    assert machine.peers[NEW].complete
    machine.closed(NEW, 1.0)
    machine.opened(NEW, ReplicaState(0, 0, False), 1.0)
    assert not machine.peers[NEW].complete


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
