"""Leases and sessions of live members: the time each was last heard, and the stream on which it is reached. Pure.

A live member is suspected when it was silent for its lease, when its session ended without a new one, or when it opened
none soon after it had registered. Workers have a longer lease than servers: a script may hold its interpreter for
seconds, and is then busy, not gone. A worker whose session ended after a silence may return within its lease, and no
later.

A session that ends while messages arrive regularly was ended by its member's kernel. After a silence the end proves
nothing about the member: either side may have given up the connection. The first message after a time in which nobody
reached the scheduler puts all sessions into that state, and gives everybody time to return.

Invariants: A member has at most one session, and a session belongs to one member.

``membership`` knows who is live, ``suspicion`` which suspects are lost, ``service`` the streams themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from psdist_scheduler.events.cluster_events import Heartbeat
from psdist_scheduler.events.cluster_state import ClusterSettings, Member, Role
from psdist_scheduler.members.suspicion import RETURN_LEASES

#: Extra time in seconds to open a session, for each registered member that has none yet.
SESSION_SECONDS = 0.05
_WAITS_KEPT = 16
_TEXT_CHARACTERS = 500


@dataclass(slots=True)
class Liveness:
    """State of a live member that is known only while this process runs. Times are in seconds of the caller's clock."""

    role: Role
    lease: float
    seen: float
    #: The member is suspected if it is silent until then.
    deadline: float
    #: Seconds between two heartbeats.
    heartbeat: float = 0.0
    #: Call that is its session; 0 while it has none.
    session: int = 0
    epoch: int = 0
    waiting_for: tuple[str, ...] = ()
    #: True if it is known from an earlier scheduler, and silent since.
    restored: bool = False
    #: Until then the end of its session proves nothing, because the member, or everybody, was silent before.
    unsteady_until: float = float("-inf")
    #: Time at which its session ended, and True if its own side ended it. None while it has one, or never had any.
    ended: float | None = None
    ended_by_member: bool = False

    def silence(self, now: float) -> str:
        """Return why the member is taken for lost once its lease has expired."""
        if self.ended is not None and (self.ended_by_member or now - self.seen <= self.lease):
            gone = f" {now - self.ended:.1f} s ago, and it is not back"
            return f"its session broke{'' if self.ended_by_member else gone}"
        if not self.session and self.ended is None:
            return f"opened no session within {now - self.seen:.1f} s"
        option = "--worker-timeout" if self.role == "worker" else "--failure-timeout"
        return f"silent for {now - self.seen:.1f} s, and {option} is {self.lease:g} s"


class Sessions:
    """Open sessions, and the liveness of all live members."""

    def __init__(self, settings: ClusterSettings, restored: Iterable[Member], now: float) -> None:
        self._settings = settings
        self._ping_seconds = settings.silence_seconds
        #: Ids of members by the call that is their open session.
        self.by_call: dict[int, str] = {}
        self.liveness: dict[str, Liveness] = {}
        for member in restored:
            lease = settings.lease_of(member.role)
            deadline = now + max(RETURN_LEASES * settings.lease_seconds, lease)
            self.liveness[member.member_id] = Liveness(member.role, lease, now, deadline, restored=True)
        #: Time at which anybody last reached this process.
        self.reached = now

    def member_of(self, call: int) -> str:
        """Return the id of the session's member; empty if it is no open session."""
        return self.by_call.get(call, "")

    def call_of(self, member_id: str) -> int:
        """Return the call that is the member's session; 0 if it has none."""
        liveness = self.liveness.get(member_id)
        return liveness.session if liveness else 0

    def was_open(self, member_id: str) -> bool:
        """Return True if the member has a session, or had one."""
        liveness = self.liveness[member_id]
        return bool(liveness.session) or liveness.ended is not None

    def add(self, member: Member, now: float) -> None:
        """Add a member that has registered.

        Until it has a session it takes part in nothing, so the shorter lease is harmless. If many members have none
        yet, as at the start of a large run, they get more time.
        """
        others = len(self.liveness) - len(self.by_call)
        deadline = now + self._settings.lease_seconds + others * SESSION_SECONDS
        lease = self._settings.lease_of(member.role)
        self._somebody_came(now)
        workers = sum(liveness.role == "worker" for liveness in self.liveness.values())
        heartbeat = self._settings.heartbeat_of(member.role, max(self._settings.workers_min, workers + 1))
        self.liveness[member.member_id] = Liveness(member.role, lease, now, deadline, heartbeat)

    def open(self, call: int, member_id: str, now: float) -> int:
        """Make ``call`` the member's session. Returns the session that it replaces; 0 for none."""
        liveness = self.liveness[member_id]
        replaced = liveness.session
        self.by_call.pop(replaced, None)
        liveness.session = call
        self.by_call[call] = member_id
        self._came(liveness, now)
        liveness.ended, liveness.ended_by_member = None, False
        return replaced

    def refresh(self, member_id: str, when: float) -> None:
        """Record that the member sent something to another member at that time. Its lease counts from then on, unless
        it was heard later."""
        liveness = self.liveness[member_id]
        if when >= liveness.seen:
            liveness.restored, liveness.seen = False, when
            liveness.deadline = max(liveness.deadline, when + liveness.lease)

    def _came(self, liveness: Liveness, now: float) -> None:
        """Record a message on a member's session.

        If its lease had expired, other members that were silent with it may be about to return as well, and get another
        lease.
        """
        self._somebody_came(now)
        if now > liveness.deadline or (liveness.ended is not None and not liveness.ended_by_member):
            for other in self.liveness.values():
                other.deadline = max(other.deadline, now + self._settings.lease_seconds)
        if now - liveness.seen > self._gap(liveness):
            liveness.unsteady_until = now + self._settings.lease_seconds
        liveness.restored, liveness.seen, liveness.deadline = False, now, now + liveness.lease

    def _gap(self, liveness: Liveness) -> float:
        """Return the time in seconds without a message after which a member counts as silent. It is shorter than the
        one after which this side gives up a connection."""
        return min(max(self._settings.lease_seconds / 2, 2.5 * liveness.heartbeat), self._ping_seconds)

    def _somebody_came(self, now: float) -> None:
        """Give everybody time to return, after a time in which nobody reached this process."""
        if now - self.reached > self._settings.lease_seconds / 2:
            for liveness in self.liveness.values():
                own = liveness.lease if liveness.session or liveness.restored else 0.0
                liveness.deadline = max(liveness.deadline, now + max(RETURN_LEASES * self._settings.lease_seconds, own))
                liveness.unsteady_until = now + self._settings.lease_seconds
        self.reached = now

    def on_heartbeat(self, event: Heartbeat, member_id: str, now: float) -> None:
        liveness = self.liveness[member_id]
        self._came(liveness, now)
        liveness.epoch = event.epoch
        liveness.waiting_for = tuple(text[:_TEXT_CHARACTERS] for text in event.waiting_for[:_WAITS_KEPT])

    def was_steady(self, member_id: str, now: float) -> bool:
        """Return True if messages of the member came regularly until now.

        Then only its own side can have ended its session: this side gives up a connection only after a longer silence.
        """
        liveness = self.liveness[member_id]
        recent = now - liveness.seen <= self._gap(liveness) and now - self.reached <= self._settings.lease_seconds / 2
        return recent and now >= liveness.unsteady_until

    def detach(self, call: int, now: float, *, by_member: bool = False) -> None:
        """End a session, whose member may open another. by_member: True if its own side ended it."""
        liveness = self.liveness[self.by_call.pop(call)]
        liveness.session, liveness.ended, liveness.ended_by_member = 0, now, by_member
        returns = now + (1 if by_member else RETURN_LEASES) * self._settings.lease_seconds
        within = max(now, liveness.deadline) if liveness.role == "worker" else returns
        liveness.deadline = min(returns, within)

    def end(self, member_id: str) -> int:
        """Remove a member that is no longer live. Returns the session that it had; 0 for none."""
        session = self.liveness.pop(member_id).session
        self.by_call.pop(session, None)
        return session

    def suspects(self, now: float) -> list[str]:
        """Return ids of members whose lease has expired, or whose session ended."""
        return [id_ for id_, known in self.liveness.items() if now > known.deadline or known.ended is not None]

    def is_silent(self, member_id: str, now: float) -> bool:
        """Return True if the member was silent for longer than its pause between heartbeats."""
        liveness = self.liveness[member_id]
        return not liveness.session or now - liveness.seen > self._gap(liveness)

    def somebody_beside(self, member_id: str, now: float) -> bool:
        """Return True if somebody else has recently reached this process, and later than that member."""
        recent = max(now - self._settings.lease_seconds / 2, self.liveness[member_id].seen)
        return any(known.seen > recent for id_, known in self.liveness.items() if id_ != member_id)

    def extend(self, now: float, late: float) -> None:
        """Extend all leases, because this process itself was suspended for ``late`` seconds.

        Silence in that time does not count, and members that hung up meanwhile may return.
        """
        self.reached = max(self.reached, min(now, self.reached + late))
        for liveness in self.liveness.values():
            if late > self._settings.lease_seconds / 2:
                liveness.unsteady_until = now + self._settings.lease_seconds
            fresh = now + liveness.lease if late > liveness.lease else liveness.deadline + late
            liveness.deadline = max(liveness.deadline, fresh)

    def validate(self) -> None:
        held = {liveness.session: id_ for id_, liveness in self.liveness.items() if liveness.session}
        assert held == self.by_call, "sessions and members disagree"
