"""A server that took a shard over tells nobody of what only it has: the backups get it first."""

from __future__ import annotations

from typing import Any

from psdist.types import Replica, Shard
from psdist_server.core.replication import PrimaryReplication, ReplicaState, SendBegin

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
