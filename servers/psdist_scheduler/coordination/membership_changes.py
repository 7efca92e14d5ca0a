"""Consequences of members registering, opening sessions, leaving, and being lost. Pure.

A member whose lease expired, or whose session ended, is suspected, and lost only on evidence (``silent_members``). A
worker whose session ended while its messages arrived regularly is lost immediately: its kernel ended the session. A
loss that must wait for the storage is deferred (``deferred_losses``). Missing members are awaited, or end the run
(``start``).

``membership`` knows who is a member. Losses of shards are handled by ``replica_manager``, of data by ``datasets``, and
of the run by ``rollback``.
"""

from __future__ import annotations

from dataclasses import dataclass

from psdist_scheduler.coordination.coordinated_shutdown import CoordinatedShutdown
from psdist_scheduler.coordination.deferred_losses import DeferredLosses, Losses
from psdist_scheduler.coordination.silent_members import SilentMembers
from psdist_scheduler.coordination.start import RunStart
from psdist_scheduler.coordination.unreachable_servers import UnreachableServers
from psdist_scheduler.events import cluster_events as ev
from psdist_scheduler.events.cluster_state import ClusterSettings, Member
from psdist_scheduler.events.worker_events import Caller, ServerChecked
from psdist_scheduler.members.admission import MemberAdmission
from psdist_scheduler.members.membership import Demand, Membership
from psdist_scheduler.placement.join_proposals import Joins
from psdist_scheduler.placement.registry import Registry
from psdist_scheduler.snapshots.snapshots import Snapshots


@dataclass(slots=True)
class MembershipChanges:
    """Passes membership changes of one run on to the other machines."""

    _settings: ClusterSettings
    _members: Membership
    _demand: Demand
    _registry: Registry
    _joins: Joins
    _snapshots: Snapshots
    _coordinated_shutdown: CoordinatedShutdown
    _admission: MemberAdmission
    deferred: DeferredLosses
    unreachable: UnreachableServers
    silent: SilentMembers
    start: RunStart
    _ticked: float

    def register(self, event: ev.Register, now: float) -> list[ev.Effect]:
        """Register a server or a worker. Raises the errors of ``MemberAdmission.accept``."""
        self.silent.on_wanted(event, now)
        self.deferred.check(event, now)
        member = self._admission.accept(event, self._registry.lost_owners)
        self._members.add(member, now)
        world_size = max(self._demand.workers_min, member.rank + 1) if member.role == "worker" else 0
        incarnation = f", incarnation {member.incarnation}" if member.incarnation > 1 else ""
        where = f" at {member.address}" if member.address else f" on {member.host or 'an unknown host'}"
        workers = max(self._demand.workers_min, len(self._members.workers))
        lease, heartbeat = self._settings.lease_of(member.role), self._settings.heartbeat_of(member.role, workers)
        return [
            ev.LogEvent(f"{member} registered{where}{incarnation}"),
            *self._replace_at_address(member, now),
            ev.Answer(event.call, ev.Registered(member, world_size, lease, heartbeat)),
        ]

    def open_session(self, event: ev.SessionOpened, epoch: int, now: float) -> list[ev.Effect]:
        """Open a member's session after its hello. Raises FencedError."""
        member = self._members.check_caller(Caller("", event.member_id, event.incarnation), role=None)
        replaced = self._members.sessions.open(event.call, member.member_id, now)
        effects: list[ev.Effect] = [ev.Close(replaced)] if replaced else []
        effects.append(ev.Attach(event.call))
        if member.role == "server":
            effects += self._joins.on_session(member.member_id)
        else:
            self._coordinated_shutdown.on_session(member)
            self._joins.alignment.on_session(member)
        return effects + self._snapshots.on_session(member, epoch, now)

    def close_session(self, event: ev.SessionClosed, now: float) -> list[ev.Effect]:
        member_id = self._members.sessions.get(event.call)
        member = self._members.get(member_id or "")
        if member is None:
            return []
        steady = self._members.sessions.was_steady(member.member_id, now) and not self._stood_still(now)
        if steady and not member.address:
            return self._lose([(member.member_id, event.reason)], now)
        self._members.sessions.detach(event.call, now, by_member=steady)
        if member.address:
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
        if not counts:
            return [*effects, done]
        gone, session = self._members.end(member.member_id, "left", reason, now)
        effects = [ev.LogEvent(f"{gone} left: {gone.reason}"), done]
        return [*effects, ev.Close(session)] if session else effects

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

    def _stood_still(self, now: float) -> bool:
        """Return True if this process may have been suspended for so long that members hung up."""
        return now - self._ticked >= self._settings.lease_seconds / 2

    def _replace_at_address(self, member: Member, now: float) -> list[ev.Effect]:
        """Replace the server registered at this address (a restart, or a retried registration).

        An address belongs to one process. Otherwise shards could be placed on the old incarnation, and their calls
        would reach the new one.
        """
        before = [m.member_id for m in self._members.servers if m.address == member.address and m is not member]
        return self._lose([(member_id, f"{member} registered at its address") for member_id in before], now)

    def _lose(self, gone: Losses, now: float) -> list[ev.Effect]:
        """Lose members, each for its reason: now, or once it is known to which snapshot the run rolls back."""
        counts, effects = self.deferred.defer(gone, now)
        return effects + self._end(counts, now)

    def _end(self, gone: Losses, now: float) -> list[ev.Effect]:
        notes: list[ev.Effect] = []
        news: list[ev.Effect] = []
        for member_id, reason in gone:
            member, session = self._members.end(member_id, "lost", reason, now)
            notes.append(ev.LogEvent(f"{member} is lost: {reason}", "warning"))
            news.append(ev.Broadcast(ev.MemberLost(member_id, member.role, reason)))
            if session:
                news.append(ev.Close(session))
        return [*notes, *news]
