"""A primary and its replicas under any order of events: streams break at any message, and any backup may be promoted.

Gradient k of a slice is the number k, and applying it appends it, so a slice must always contain 0, 1, 2 ...: a gap is
a lost update, a repetition a duplicate. Acknowledged updates must survive every promotion.
"""

from __future__ import annotations

from collections import deque
from copy import deepcopy
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from psdist.types import Replica, Shard
from psdist_server.core.replication import (
    BackupReplication,
    PrimaryReplication,
    Replicated,
    ReplicaUpdate,
    SendBegin,
    SendUpdate,
)
from psdist_server.core.shard import SliceRecord

SLICES = 3
LIFE = ("worker-0", 1)


class Server:
    """Incarnation of a server: its arrays, and its machine for the shard as primary or replica."""

    def __init__(self, replica: Replica, shard: Shard) -> None:
        self.replica = replica
        self.content: dict[int, list[int]] = {}
        self.backup = BackupReplication(0, range(SLICES), shard)


class Stream:
    """Both directions between the primary and one replica."""

    def __init__(self) -> None:
        self.down: deque[Any] = deque()
        self.up: deque[Any] = deque()
        self.has_ended = False


class Replication(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.lives = 3
        first, second, third = (Replica(f"server-{i}", 1) for i in range(3))
        self.shard = Shard(first, 1, (), (second, third))
        self.servers = {replica: Server(replica, self.shard) for replica in (first, second, third)}
        self.records = {index: SliceRecord() for index in range(SLICES)}
        self.servers[first].content = {index: [] for index in range(SLICES)}
        self.acknowledged = dict.fromkeys(range(SLICES), 0)
        self.busy: set[int] = set()
        self.streams: dict[Replica, Stream] = {}
        self.machine: PrimaryReplication[int] = PrimaryReplication(0, 1, range(SLICES))
        self.carry_out(self.machine.adopt_map(self.shard, 0.0))

    @property
    def content(self) -> dict[int, list[int]]:
        return self.servers[self.shard.primary].content

    def carry_out(self, effects: list[Any]) -> None:
        for effect in effects:
            match effect:
                case Replicated(index, _):
                    assert index in self.busy
                    self.busy.remove(index)
                    self.acknowledged[index] = len(self.content[index])
                case SendBegin(replica, lsn, fill, copy):
                    self.streams[replica].down.append(("begin", lsn, fill, copy))
                    self.streams[replica].has_ended = False
                case SendUpdate(replica, update, whole):
                    self.streams[replica].down.append(("update", update if whole else strip(update)))

    def publish(self, shard: Shard) -> None:
        """Deliver a new map to all servers immediately. Servers without a role drop their state."""
        self.shard = shard
        self.servers = {replica: server for replica, server in self.servers.items() if replica in shard.replicas}
        for replica in shard.replicas[1:]:
            self.servers.setdefault(replica, Server(replica, shard)).backup.adopt_map(shard)
        self.streams = {replica: stream for replica, stream in self.streams.items() if replica in self.servers}
        self.carry_out(self.machine.adopt_map(shard, 0.0))

    # --- updates and copies -------------------------------------------------------------------------------------------

    @rule(index=st.integers(0, SLICES - 1))
    def update(self, index: int) -> None:
        if index in self.busy:
            return
        number = len(self.content[index])
        self.content[index].append(number)
        update = ReplicaUpdate(self.machine.lsn + 1, index, number, (LIFE,), number, number, size=1)
        if not self.machine.needs_gradient(index):
            update = strip(update)
        self.records[index].advance((LIFE,), number)
        self.busy.add(index)
        self.carry_out(self.machine.update(update, 0.0))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.streams, key=str)))
        self.copy_to(replica)

    def copy_to(self, replica: Replica) -> None:
        stream, peer = self.streams[replica], self.machine.peers[replica]
        if not peer.is_copying or stream.has_ended:
            return
        index = self.machine.next_copy(replica)
        if index is None:
            stream.down.append(("end",))
            stream.has_ended = True
            self.machine.ended(replica, 0.0)
            return
        stream.down.append(("state", index, deepcopy(self.records[index]), list(self.content[index])))
        self.machine.copied(replica, index)

    # --- streams ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.streams) < len(self.shard.replicas) - 1)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        closed = [replica for replica in self.shard.replicas[1:] if replica not in self.streams]
        self.open_to(data.draw(st.sampled_from(closed)))

    def open_to(self, replica: Replica) -> None:
        self.streams[replica] = Stream()
        self.carry_out(self.machine.opened(replica, self.servers[replica].backup.held, 0.0))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def break_off(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.streams, key=str)))
        del self.streams[replica]
        self.machine.closed(replica, 0.0)

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), count=st.integers(1, 5))
    def deliver(self, data: st.DataObject, count: int) -> None:
        replica = data.draw(st.sampled_from(sorted(self.streams, key=str)))
        for _ in range(min(count, len(self.streams[replica].down))):
            self.take(replica)

    def take(self, replica: Replica) -> None:
        stream, server = self.streams[replica], self.servers[replica]
        backup, content = server.backup, server.content
        match stream.down.popleft():
            case ("begin", lsn, fill, copy):
                backup.start_copy(self.shard.term, lsn, fill, copy)
            case ("state", index, record, copied):
                content[index] = list(copied)
                backup.state(index, record)
            case ("end",):
                backup.end()
                stream.up.append(("filled", backup.copy))
            case ("update", update):
                verdict = backup.update(self.shard.term, update)
                if verdict == "apply":
                    assert update.gradient is not None
                    content[update.index].append(update.gradient)
                stream.up.append(("ack", backup.applied(self.shard.term, update.lsn)))

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        replica = data.draw(st.sampled_from(sorted(self.streams, key=str)))
        while self.streams[replica].up:
            self.hear(replica)

    def hear(self, replica: Replica) -> None:
        match self.streams[replica].up.popleft():
            case ("ack", lsn):
                self.carry_out(self.machine.acknowledged(replica, lsn, 0.0))
            case ("filled", copy):
                self.carry_out(self.machine.filled(replica, copy, 0.0))

    # --- the scheduler ------------------------------------------------------------------------------------------------

    @rule()
    def make_backups_of_those_filled(self) -> None:
        filled = tuple(replica for replica in self.shard.filling if self.machine.peers[replica].complete)
        filling = tuple(replica for replica in self.shard.filling if replica not in filled)
        self.publish(self.shard.with_copies((*self.shard.backups, *filled), filling))

    @precondition(lambda self: self.shard.backups)
    @rule(last=st.booleans(), survives=st.booleans())
    def promote(self, last: bool, survives: bool) -> None:
        """Lose the primary, or hand over; it returns empty, to be filled."""
        successor = self.shard.backups[-1 if last else 0]
        backup, server = self.servers[successor].backup, self.servers[successor]
        assert backup.complete
        for index in range(SLICES):
            assert len(server.content[index]) >= self.acknowledged[index], "an acknowledged update is lost"
            assert backup.records[index].version == len(server.content[index])
            assert backup.records[index].producers.get(LIFE, 0) == len(server.content[index])
        self.lives += 1
        others = tuple(replica for replica in self.shard.backups if replica != successor)
        old = Replica(self.shard.primary.server_id, self.lives)
        self.records = deepcopy(backup.records)
        self.busy.clear()
        self.streams.clear()
        term = self.shard.term + 1
        self.machine = PrimaryReplication(0, term, range(SLICES), backup.base)
        after = self.shard.with_copies(others, self.shard.filling, primary=successor, term=term)
        self.publish(after.with_filling(old, self.lives) if survives else after)

    @precondition(lambda self: len(self.shard.replicas) < 3)
    @rule()
    def fill_another(self) -> None:
        self.lives += 1
        new = Replica("server-9", self.lives)
        self.publish(self.shard.with_filling(new, self.lives))

    @precondition(lambda self: len(self.shard.backups) > 1)
    @rule()
    def drop_a_backup(self) -> None:
        self.publish(self.shard.with_copies(self.shard.backups[1:], self.shard.filling))

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def machines_are_sound(self) -> None:
        self.machine.validate()

    @invariant()
    def nothing_is_lost_or_applied_twice(self) -> None:
        for server in self.servers.values():
            for content in server.content.values():
                assert content == list(range(len(content)))

    def teardown(self) -> None:
        """Deliver and answer everything. Then all copies are equal, and nobody waits."""
        for _ in range(100):
            for replica in self.shard.replicas[1:]:
                if replica not in self.streams:
                    self.open_to(replica)
                self.copy_to(replica)
                while self.streams[replica].down:
                    self.take(replica)
                while self.streams[replica].up:
                    self.hear(replica)
        assert not self.busy
        for server in self.servers.values():
            assert server.content == self.content
        assert self.machine.log_bytes == 0


def strip(update: ReplicaUpdate[int]) -> ReplicaUpdate[int]:
    return ReplicaUpdate(update.lsn, update.index, update.version, update.contributors, update.sequence)


TestReplication = Replication.TestCase
TestReplication.settings = settings(stateful_step_count=80)
