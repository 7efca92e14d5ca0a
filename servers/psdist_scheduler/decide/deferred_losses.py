"""Deferred losses of servers, which wait until it is known which snapshot is the newest. Pure.

The loss of a server that held the only copy of shards rolls the run back to the newest snapshot. While the storage is
committing one, or has not said whether it did, nobody knows which one that is. The run would resume from the previous
one, and the content of the newer one would be lost. So such a loss is deferred until the storage has answered, as if it
were noticed later. Meanwhile the server counts as unresponsive: it stays in the map, no shard is placed again, and
clients retry. If it returns with its shards, nothing is lost. If the scheduler dies in that time, the next one reads
the storage first and then finds the server missing.

A storage that does not answer delays the run for at most ``PATIENCE_SECONDS``. Then the losses count, and the run
continues from what is known. ``rollback`` describes the treatment of a snapshot that is committed after that.

``catalog`` knows what is in doubt; ``replica_manager`` and ``rollback`` handle the losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from psdist.errors import DuplicateMemberError
from psdist.types import Replica, Shard
from psdist_scheduler.decide.cluster_events import Register
from psdist_scheduler.decide.cluster_state import Member
from psdist_scheduler.decide.effects import Close, Effect, LogEvent, Wait
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import Registry
from psdist_scheduler.decide.shard_placement import after_loss
from psdist_scheduler.decide.snapshots import Snapshots

#: Longest time in seconds that a loss is deferred. Servers that register wait longer for an address to become free.
PATIENCE_SECONDS: Final = 30.0

#: Ids of members, and the reason for the loss of each.
Losses = list[tuple[str, str]]


@dataclass(slots=True)
class DeferredLosses:
    """Servers of one run that are gone and still count as members."""

    _registry: Registry
    _members: Membership
    _snapshots: Snapshots
    #: Incarnation and reason of each deferred loss, by member id.
    _deferred: dict[str, tuple[Member, str]] = field(default_factory=dict)
    #: Time of the first deferral since the newest snapshot was last known.
    _since: float | None = None

    @property
    def wait(self) -> str:
        """Reason for the wait, as text that begins with "for"; empty if nothing is deferred."""
        if not self._deferred:
            return ""
        who = "; ".join(
            f"{member}, which had the only copy of shards, is gone ({why})" for member, why in self._deferred.values()
        )
        return f"{self._snapshots.readiness.doubt}, to roll back to the newest: {who}"

    def waits(self) -> Iterator[Wait]:
        if self._deferred:
            yield "lost shards", [], self.wait

    def validate(self) -> None:
        assert all(self._is_gone(member) for member, _ in self._deferred.values()), "a present server is deferred"
        assert not self._deferred or self._snapshots.readiness.doubt, "a loss is deferred for nothing"

    def check(self, event: Register, now: float) -> None:
        """Raise DuplicateMemberError if a server would replace one whose loss must wait. Registering it would end that
        one."""
        if event.role != "server" or not self._must_wait(now):
            return
        for member in self._members.servers:
            same = event.member_id == member.member_id or (event.address and event.address == member.address)
            if same and self.has_last_copy(member):
                raise DuplicateMemberError(
                    f"this takes the place of {member} at {member.address}, which had the only copy of shards. Its "
                    f"loss waits {self._snapshots.readiness.doubt}: try again",
                    member_id=member.member_id,
                )

    def defer(self, gone: Losses, now: float) -> tuple[Losses, list[Effect]]:
        """Defer the losses that must wait. Returns those that count now."""
        counts: Losses = []
        effects: list[Effect] = []
        for member_id, reason in gone:
            member = self._members.get(member_id)
            if member_id in self._deferred:
                continue
            if member is None or not self._must_wait(now) or not self.has_last_copy(member):
                counts.append((member_id, reason))
                continue
            self._since = now if self._since is None else self._since
            self._deferred[member_id] = member, reason
            level: Literal["info", "warning"] = "warning" if self._members.workers else "info"
            effects.append(LogEvent(f"{member} is gone: {reason}; waiting {self.wait}", level))
            if session := self._members.sessions.call_of(member_id):
                self._members.sessions.detach(session, now)
                effects.append(Close(session))
        return counts, effects

    def due(self, now: float) -> Losses:
        """Return the deferred losses that count now."""
        back = [id_ for id_, (member, _) in self._deferred.items() if not self._is_gone(member)]
        for member_id in back:
            del self._deferred[member_id]
        if not self._snapshots.readiness.doubt:
            self._since = None
        if not self._deferred or self._must_wait(now):
            return []
        due = [(member_id, reason) for member_id, (_, reason) in self._deferred.items()]
        self._deferred.clear()
        return due

    def _is_gone(self, member: Member) -> bool:
        return self._members.is_live(*member.identity) and not self._members.sessions.call_of(member.member_id)

    def _must_wait(self, now: float) -> bool:
        patient = self._since is None or now - self._since < PATIENCE_SECONDS
        return bool(self._snapshots.readiness.doubt) and patient

    def has_last_copy(self, member: Member, but: frozenset[str] = frozenset()) -> bool:
        """Return True for a server with values that nobody else has, apart from the servers ``but``."""

        def is_left(replica: Replica) -> bool:
            there = self._members.has(replica) and replica.server_id != member.member_id
            return there and replica.server_id not in but

        def is_holder(shard: Shard) -> bool:
            return member.replica in (shard.primary, *shard.backups)

        if member.role != "server":
            return False
        shards = (s for p in self._registry.all if p.record is not None and p.entry.ready for s in p.entry.shards)
        return any(is_holder(shard) and after_loss(shard, is_left).lost and not shard.lost for shard in shards)
