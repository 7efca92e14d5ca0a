"""Strikes while a copy is filled hit a server that takes part in it, and never the last copy of a shard."""

from __future__ import annotations

from pathlib import Path

import pytest

from psdist import optim
from psdist.consistency import BSP
from psdist.errors import InvalidArgumentError
from psdist.types import ParametersEntry, ParametersSpec, Replica, Shard
from psdist.wire import services
from psdist_server.core.replication import BackupReplication, ReplicaUpdate
from psdist_server.store import replicator
from tests.support.chaos.fills import Chance, Fill, chances, fills_of, is_expendable
from tests.support.chaos.report import GAP, STALE, count_refusals

A, B, C = (Replica(f"server-{name}", 1) for name in "abc")
B_AGAIN = Replica("server-b", 2)


def _entry(*shards: Shard) -> ParametersEntry:
    return ParametersEntry(ParametersSpec("net", optim.SGD(0.1), BSP(), slice_elements=16), 64, shards)


def _filled(primary: Replica, target: Replica, number: int) -> Shard:
    return Shard(primary, 1).with_filling(target, number)


def test_fills_are_read_from_the_map() -> None:
    entry = _entry(Shard(A, 1, (B,)), _filled(B, C, 7))
    assert fills_of([entry]) == [Fill("net", 1, 7, B, C)]


def test_a_server_is_expendable_unless_it_has_a_last_copy() -> None:
    for server, gone, expendable in [
        (A, (), True),
        (B, (), True),
        (C, (), True),
        (A, (B,), False),
        (B, (A,), False),
        (C, (B,), True),
        (B, (C,), True),
    ]:
        assert is_expendable([_entry(Shard(A, 1, (B,)))], server, gone) is expendable


def test_a_copy_that_is_being_filled_is_no_copy() -> None:
    assert not is_expendable([_entry(_filled(A, C, 7))], A, ())
    assert is_expendable([_entry(_filled(A, C, 7))], C, ())


def test_only_the_target_can_be_struck_while_the_source_has_the_last_copy() -> None:
    entry = _entry(_filled(A, C, 7))
    assert chances([entry], ()) == [Chance(C, "target", Fill("net", 0, 7, A, C))]


def test_the_source_can_be_struck_if_there_is_another_copy() -> None:
    entry = _entry(Shard(A, 1, (B,)).with_filling(C, 7))
    assert {(chance.server, chance.role) for chance in chances([entry], ())} == {(A, "source"), (C, "target")}
    # The other copy is on a server that was struck and that the map still shows.
    assert {(chance.server, chance.role) for chance in chances([entry], [B])} == {(C, "target")}


def test_a_target_with_the_last_copy_of_another_shard_is_spared() -> None:
    assert chances([_entry(_filled(A, C, 7), Shard(C, 1))], ()) == []
    other = _entry(Shard(C, 1))
    assert chances([_entry(_filled(A, C, 7)), other], ()) == []


def test_a_struck_server_is_not_struck_again_but_its_next_incarnation_is() -> None:
    entry = _entry(_filled(A, B, 7))
    assert chances([entry], [B]) == []
    again = _entry(_filled(A, B_AGAIN, 8))
    assert [chance.server for chance in chances([again], [B])] == [B_AGAIN]


# --- refused updates --------------------------------------------------------------------------------------------------

_STALE = f"WARNING psdist.server: {STALE} parameters=net reason='update of version 3' server=server-1"
_GAP = f"INFO psdist.server: {GAP}9 of shard 0 comes after 7: open the stream again"


def test_refusals_of_one_update_are_counted_together() -> None:
    first = f"17:00:01 {_STALE}\n17:00:02 INFO psdist.server: promoted\n17:00:03 {_STALE}\n"
    second = f"17:00:02 {_GAP}\n"
    assert dict(count_refusals([first, second])) == {_STALE: 2, _GAP: 1}


def test_a_primary_that_dialed_again_repeats_the_same_update() -> None:
    callers = ("ipv4:127.0.0.1:4711", "ipv4:127.0.0.1:4712", "ipv6:%5B::1%5D:4711")
    lines = (f"17:00:02 {_GAP} (a call from {caller})\n" for caller in callers)
    assert dict(count_refusals(lines)) == {_GAP: 3}
    assert "(a call from %s)" in Path(services.__file__).read_text("utf-8")


def test_what_a_replica_refuses_is_recognized_in_the_log() -> None:
    replica: BackupReplication = BackupReplication(0, [0], Shard(A, 1, (B,)))
    replica.start_copy(1, 7)
    update: ReplicaUpdate[None] = ReplicaUpdate(9, 0, 3)
    with pytest.raises(InvalidArgumentError) as raised:
        replica.update(1, update)
    logged = f"17:00:02 INFO psdist.server: Replicate refused: {raised.value}"
    assert count_refusals([logged]).total() == 1
    assert STALE in Path(replicator.__file__).read_text("utf-8")


def test_other_refusals_are_not_of_updates() -> None:
    logged = "17:00:02 INFO psdist.server: Replicate refused: server-4 (incarnation 2) is not a live server of this run"
    assert not count_refusals([logged])
