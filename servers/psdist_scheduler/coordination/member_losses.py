"""Losses of members: collects the evidence, and ends those that are lost. Pure.

A member whose lease expired, or whose session ended, is suspected, and lost only on evidence (``silent_members``). A
worker whose session ended while its messages arrived regularly is lost immediately: its kernel ended the session. A
loss that must wait for the storage is deferred (``deferred_losses``). Missing members are awaited, or end the run
(``start``).

``membership`` ends a member. Losses of shards are handled by ``replica_manager``, of data by ``datasets``, and of the
run by ``rollback``. They need the members, so this cannot be part of ``membership``.
"""

from __future__ import annotations

from dataclasses import dataclass

from psdist_scheduler.coordination.deferred_losses import DeferredLosses, Losses
from psdist_scheduler.coordination.silent_members import SilentMembers
from psdist_scheduler.coordination.start import RunStart
from psdist_scheduler.coordination.unreachable_servers import UnreachableServers
from psdist_scheduler.events import cluster_events as ev
from psdist_scheduler.events.cluster_state import ClusterSettings, Member
from psdist_scheduler.events.worker_events import ServerChecked
from psdist_scheduler.members.membership import Membership


@dataclass(slots=True)
class MemberLosses:
    """Decides which members of one run are lost, and when their losses count."""

    _settings: ClusterSettings
    _members: Membership
    deferred: DeferredLosses
    unreachable: UnreachableServers
    silent: SilentMembers
    start: RunStart
    _ticked: float

    def on_register(self, event: ev.Register, now: float) -> None:
        """Take a registration as evidence on the member whose place it requests. Raises DuplicateMemberError."""
        self.silent.on_wanted(event, now)
        self.deferred.check(event, now)

    def replace_at_address(self, member: Member, now: float) -> list[ev.Effect]:
        """Replace the server registered at this address (a restart, or a retried registration).

        An address belongs to one process. Otherwise shards could be placed on the old incarnation, and their calls
        would reach the new one. The address of a worker replaces nobody: nothing is placed on workers.
        """
        if member.role == "worker":
            return []
        before = [m.member_id for m in self._members.servers if m.address == member.address and m is not member]
        return self._lose([(member_id, f"{member} registered at its address") for member_id in before], now)

    def close_session(self, event: ev.SessionClosed, now: float) -> list[ev.Effect]:
        """Judge a member whose session ended."""
        member_id = self._members.sessions.member_of(event.call)
        member = self._members.get(member_id or "")
        if member is None:
            return []
        steady = self._members.sessions.was_steady(member.member_id, now) and not self._was_suspended(now)
        if steady and member.role == "worker":
            return self._lose([(member.member_id, event.reason)], now)
        self._members.sessions.detach(event.call, now, by_member=steady)
        if member.role == "server":
            return self.silent.probe(member)
        return [ev.LogEvent(f"the session of {member} ended after a silence; waiting for it to return")]

    def on_probed(self, event: ev.Probed, now: float) -> list[ev.Effect]:
        """Process the result of a probe of a server's port."""
        return self._lose(self.silent.on_probed(event, now), now)

    def on_checked(self, event: ServerChecked, now: float) -> list[ev.Effect]:
        """Process a worker's answer whether it reached a server."""
        if (worker := self._members.by_session(event.call)) is not None:
            self.unreachable.on_checked(worker, event.server, reached=event.reached, now=now)
            if event.reached:
                self.silent.on_reached(event.server, now)
        return []

    def leave(self, event: ev.Leave, now: float) -> list[ev.Effect]:
        """Remove a member that leaves in an orderly way. Raises FencedError."""
        done, reason = ev.Answer(event.call, ev.Done()), event.reason or "done"
        if self._members.leave_late(event.caller, reason):
            return [done]
        member = self._members.check_caller(event.caller, role=None)
        counts, effects = self.deferred.defer([(member.member_id, reason)], now)
        return [*effects, *(self._members.leave(member.member_id, reason, now) if counts else ()), done]

    def tick(self, now: float) -> list[ev.Effect]:
        """Judge the suspects, and probe again them and broken paths between members."""
        late = now - self._ticked - self._settings.tick_seconds
        if late > self._settings.tick_seconds:
            self._members.sessions.extend(now, late)
        self._ticked = now
        lost, effects = self.silent.tick(now)
        effects += self._lose(lost, now)
        effects += self.unreachable.progress(now)
        return effects + self._lose(self.unreachable.expelled(now), now)

    def progress(self, now: float) -> list[ev.Effect]:
        """Apply deferred losses that count now."""
        return self._end(self.deferred.due(now), now)

    def _was_suspended(self, now: float) -> bool:
        """Return True if this process may have been suspended until members hung up."""
        return now - self._ticked >= self._settings.lease_seconds / 2

    def _lose(self, gone: Losses, now: float) -> list[ev.Effect]:
        """Lose members, each for its reason: now, or once it is known to which snapshot the run rolls back."""
        counts, effects = self.deferred.defer(gone, now)
        return effects + self._end(counts, now)

    def _end(self, gone: Losses, now: float) -> list[ev.Effect]:
        return [effect for member_id, reason in gone for effect in self._members.lose(member_id, reason, now)]
