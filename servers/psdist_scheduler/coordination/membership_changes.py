"""What follows when members register, open sessions, leave, or are lost. Pure.

A member is lost when its session breaks or its lease is over, unless this process itself stood still for so long that
its members hung up: they are alive, and will be back. A loss that must wait is deferred (``deferred_losses``).

Not here: who is a member (``membership``), what becomes of shards (``replica_manager``), data (``datasets``) and the
run (``rollback``).
"""

from __future__ import annotations

from dataclasses import dataclass

from psdist.wire.limits import KEEPALIVE_SECONDS
from psdist_scheduler.coordination.deferred_losses import DeferredLosses, Losses
from psdist_scheduler.coordination.stops import Stops
from psdist_scheduler.coordination.unreachable_servers import UnreachableServers
from psdist_scheduler.events import cluster_events as ev
from psdist_scheduler.events.records import ClusterSettings, Member
from psdist_scheduler.events.worker_events import Caller
from psdist_scheduler.members.admission import MemberAdmission
from psdist_scheduler.members.membership import Demand, Membership
from psdist_scheduler.placement.join_proposals import Joins
from psdist_scheduler.placement.registry import Registry
from psdist_scheduler.snapshots.snapshots import Snapshots


@dataclass(slots=True)
class MembershipChanges:
    """Carries changes of the membership of one run to all who must know."""

    _settings: ClusterSettings
    _members: Membership
    _demand: Demand
    _registry: Registry
    _joins: Joins
    _snapshots: Snapshots
    _stops: Stops
    _admission: MemberAdmission
    deferred: DeferredLosses
    unreachable: UnreachableServers
    _ticked: float
    #: Until then a session may end because this process itself was silent.
    _forgiving_until: float = float("-inf")

    def register(self, event: ev.Register, now: float) -> list[ev.Effect]:
        """A server or a worker wants to take part. Raises what ``MemberAdmission.accept`` raises."""
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
        """A member's stream said hello. Raises FencedError."""
        member = self._members.check_caller(Caller("", event.member_id, event.incarnation), role=None)
        replaced = self._members.sessions.open(event.call, member.member_id, now)
        effects: list[ev.Effect] = [ev.Close(replaced)] if replaced else []
        effects.append(ev.Attach(event.call))
        if member.role == "server":
            effects += self._joins.on_session(member.member_id)
        else:
            self._stops.on_session(member)
            self._joins.alignment.on_session(member)
        return effects + self._snapshots.runner.on_session(member, epoch, now)

    def close_session(self, event: ev.SessionClosed, now: float) -> list[ev.Effect]:
        member_id = self._members.sessions.get(event.call)
        if not member_id:
            return []
        if now < self._forgiving_until or self._was_hung_up_on(now):
            self._members.sessions.detach(event.call, now)
            return [
                ev.LogEvent(f"the session of {member_id} ended while the scheduler stood still: waiting for its return")
            ]
        return self._lose([(member_id, event.reason)], now)

    def leave(self, event: ev.Leave, now: float) -> list[ev.Effect]:
        """A member goes politely. Raises FencedError."""
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
        """Time has passed: members are lost whose lease is over, and those without a path to where they are needed."""
        late = now - self._ticked - self._settings.tick_seconds
        if late > self._settings.tick_seconds:
            self._members.sessions.extend(now, late)
        if self._was_hung_up_on(now):
            self._forgiving_until = now + self._settings.lease_seconds
        self._ticked = now
        effects = self._lose(self._members.sessions.expired(now), now) + self.unreachable.progress(now)
        return effects + self._lose(self.unreachable.expelled(now), now)

    def progress(self, now: float) -> list[ev.Effect]:
        """Losses that were deferred and count now."""
        return self._end(self.deferred.due(now), now)

    def _was_hung_up_on(self, now: float) -> bool:
        """Whether this process may have stood still for so long that members hung up. After a shorter time a session
        that broke is its member's end: a killed server would be waited for until its lease is over."""
        return now - self._ticked >= KEEPALIVE_SECONDS

    def _replace_at_address(self, member: Member, now: float) -> list[ev.Effect]:
        """An address has one process: a server that is another's successor there, or the same, whose first answer was
        lost, ends the incarnation before it. Else shards could be placed on that one, and their calls reach this
        one."""
        before = [m.member_id for m in self._members.servers if m.address == member.address and m is not member]
        return self._lose([(member_id, f"{member} registered at its address") for member_id in before], now)

    def _lose(self, gone: Losses, now: float) -> list[ev.Effect]:
        """Members are lost, each for its reason: now, or when it is known to which snapshot the run goes back then."""
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
