"""When a copy is complete: not before its server has all that workers were answered for while it was made."""

from __future__ import annotations

from psdist.types import Replica, Shard
from psdist_server.records import ReplicaUpdate
from psdist_server.replication import PrimaryReplication, Replicated

OLD, NEW = Replica("server-0", 1), Replica("server-1", 1)


def update(lsn: int) -> ReplicaUpdate[None]:
    return ReplicaUpdate(lsn=lsn, index=0, version=lsn - 1)


def test_updates_sent_behind_the_copy_must_be_acknowledged_before_the_replica_is_reported() -> None:
    machine: PrimaryReplication[None] = PrimaryReplication(0, 1, [0])
    machine.follow(Shard(OLD, filling=(NEW,)), 0.0)
    machine.opened(NEW, None, 0.0)
    machine.copied(NEW, 0)
    machine.ended(NEW, 0.0)
    # The worker is answered at once: so far nobody else counts.
    assert Replicated(0, 1) in machine.update(update(1), 0.0)
    machine.filled(NEW, 0.0)
    assert machine.peers[NEW].filled and not machine.peers[NEW].complete
    # From now on answers wait for it, and it is complete as soon as it has what was answered before.
    assert Replicated(0, 2) not in machine.update(update(2), 0.0)
    machine.acknowledged(NEW, 1, 0.0)
    assert machine.peers[NEW].complete
    assert machine.acknowledged(NEW, 2, 0.0) == [Replicated(0, 2)]
