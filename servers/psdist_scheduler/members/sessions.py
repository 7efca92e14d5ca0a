"""Leases and sessions of live members: when each last sent something, and the stream on which it is reached. Pure.

A live member is taken for lost when it sent nothing for its lease, or when it opened no session soon after it
had registered. Workers have a longer lease than servers: a script may hold its interpreter for seconds, and then it is
busy, not gone. A process that died or froze is noticed by its stream.

Invariants: a member has at most one session, and a session belongs to one member.

Not here: who is live (``membership``), what follows from a loss (``cluster``), the streams themselves (``service``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from psdist_scheduler.events.cluster_events import Heartbeat
from psdist_scheduler.events.records import ClusterSettings, Member, Role

#: Leases that servers have to come back after the scheduler was restarted, and workers at least.
RESTART_LEASES = 3
#: Each member that has registered, and has no session, lets those after it have so much longer to open theirs.
SESSION_SECONDS = 0.05
_WAITS_KEPT = 16
_TEXT_CHARACTERS = 500


@dataclass(slots=True)
class Liveness:
    """What is known of a live member only while this process runs. Times are of the caller's clock, in seconds."""

    role: Role
    lease: float
    seen: float
    #: Lost if it sends nothing until then.
    deadline: float
    #: The call that is its session; 0 while it has none.
    session: int = 0
    epoch: int = 0
    waiting_for: tuple[str, ...] = ()
    #: Known from an earlier scheduler, and silent since.
    restored: bool = False

    def silence(self, now: float) -> str:
        """Why the member is taken for lost once its lease is over."""
        if not self.session:
            return f"opened no session within {now - self.seen:.1f} s"
        option = "--worker-timeout" if self.role == "worker" else "--failure-timeout"
        return f"silent for {now - self.seen:.1f} s, and {option} is {self.lease:g} s"


class Sessions(dict[int, str]):
    """Ids of members by their open session, and the liveness of all live members."""

    def __init__(self, settings: ClusterSettings, restored: Iterable[Member], now: float) -> None:
        super().__init__()
        self._settings = settings
        self.liveness: dict[str, Liveness] = {}
        for member in restored:
            lease = settings.lease_of(member.role)
            deadline = now + max(RESTART_LEASES * settings.lease_seconds, lease)
            self.liveness[member.member_id] = Liveness(member.role, lease, now, deadline, restored=True)

    def of(self, member_id: str) -> int:
        """The call that is the member's session; 0 if it has none."""
        liveness = self.liveness.get(member_id)
        return liveness.session if liveness else 0

    def begin(self, member: Member, now: float) -> None:
        """A member has registered. Without a session it takes no part in anything yet, so that the shorter lease harms
        nobody. Where many have none yet, as when all workers of a large run begin at a time, they have longer."""
        others = len(self.liveness) - len(self)
        deadline = now + self._settings.lease_seconds + others * SESSION_SECONDS
        lease = self._settings.lease_of(member.role)
        self.liveness[member.member_id] = Liveness(member.role, lease, now, deadline)

    def open(self, call: int, member_id: str, now: float) -> int:
        """Makes ``call`` the member's session. Returns the session that it replaces; 0 for none."""
        liveness = self.liveness[member_id]
        replaced = liveness.session
        self.pop(replaced, None)
        liveness.session = call
        self[call] = member_id
        self.refresh(member_id, now)
        return replaced

    def refresh(self, member_id: str, when: float) -> None:
        """The member sent something at that time, from which its lease counts now, unless it sent something since."""
        liveness = self.liveness[member_id]
        if when >= liveness.seen:
            liveness.restored, liveness.seen, liveness.deadline = False, when, when + liveness.lease

    def on_heartbeat(self, event: Heartbeat, member_id: str, now: float) -> None:
        self.refresh(member_id, now)
        liveness = self.liveness[member_id]
        liveness.epoch = event.epoch
        liveness.waiting_for = tuple(text[:_TEXT_CHARACTERS] for text in event.waiting_for[:_WAITS_KEPT])

    def detach(self, call: int, now: float) -> None:
        """A session ended by no fault of its member's, which has a lease's time to open another."""
        liveness = self.liveness[self.pop(call)]
        liveness.session = 0
        liveness.deadline = max(liveness.deadline, now + liveness.lease)

    def end(self, member_id: str) -> int:
        """The member is not live any more. Returns the session that it had; 0 for none."""
        session = self.liveness.pop(member_id).session
        self.pop(session, None)
        return session

    def expired(self, now: float) -> list[tuple[str, str]]:
        """Ids of members whose lease is over, and why each is taken for lost."""
        return [(id_, liveness.silence(now)) for id_, liveness in self.liveness.items() if now > liveness.deadline]

    def extend(self, now: float, late: float) -> None:
        """This process itself stood still for ``late`` seconds: nobody's silence in that time counts."""
        for liveness in self.liveness.values():
            fresh = now + liveness.lease if late > liveness.lease else liveness.deadline + late
            liveness.deadline = max(liveness.deadline, fresh)

    def validate(self) -> None:
        held = {liveness.session: id_ for id_, liveness in self.liveness.items() if liveness.session}
        assert held == self, "sessions and members disagree"
