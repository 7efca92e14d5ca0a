"""Membership: the members of the run with their id, rank and incarnation, and the missing ones. Pure.

A member is live from its registration until it leaves or is lost. Then another incarnation may register under its id.

Invariants: There is at most one live member per id, and one live worker per rank. An incarnation is given once. Exactly
the live members have a ``Liveness``.

``member_admission`` decides on registrations, ``losses`` which members are lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from psdist.errors import FencedError, InvalidArgumentError, WrongRunError
from psdist.types import Replica
from psdist_scheduler.decide.cluster_events import Caller, Heartbeat, SessionOpened
from psdist_scheduler.decide.cluster_state import ClusterSettings, Identity, Member, Role
from psdist_scheduler.decide.effects import Answer, Attach, Broadcast, Close, Command, Effect, LogEvent, MemberLost

#: Reason for the end of workers' incarnations when the run rolled back.
WENT_BACK = "the run went back to a snapshot"
_TEXT_CHARACTERS = 500
#: Reasons given by workers that leave when their work is done.
_DONE = ("closed", "done")


class Membership:
    """The members of one run.

    incarnations_given: highest incarnation given by an earlier scheduler of this run. New ids start above it.
    servers_wanted: wanted number of servers; 0 if none was set.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        members: tuple[Member, ...],
        now: float,
        incarnations_given: int = 0,
        servers_wanted: int = 0,
    ) -> None:
        self._settings = settings
        self.incarnations_given = incarnations_given
        self._members = {member.member_id: member for member in members}
        self.sessions = Sessions(settings, (member for member in members if member.live), now)
        #: Live workers by rank, and live servers by id. They are read with every event and change rarely.
        self.workers: list[Member] = []
        self.servers: list[Member] = []
        self._sort()
        #: Members changed since ``take_changes``, in the order of the changes.
        self.changed: dict[str, None] = {}
        #: Time of the last worker's registration.
        self.last_joined = now
        #: Time at which the last worker left whose work was done.
        self.last_done = now
        self.demand = Demand(settings, self, servers_wanted)

    @property
    def all(self) -> tuple[Member, ...]:
        """All members that ever registered, each in its newest incarnation."""
        return tuple(self._members.values())

    @property
    def ranks(self) -> list[int]:
        """Ranks of all workers, live or not."""
        return [member.rank for member in self._members.values() if member.role == "worker"]

    @property
    def next_rank(self) -> int:
        """The rank after the highest that a worker has had."""
        return max(self.ranks, default=-1) + 1

    @property
    def staying(self) -> list[Member]:
        """Live servers, by id, that nobody wants to stop."""
        return [server for server in self.servers if not server.draining]

    def get(self, member_id: str) -> Member | None:
        """Return the member of this id, live or not."""
        return self._members.get(member_id)

    def by_session(self, call: int) -> Member | None:
        return self._members.get(self.sessions.member_of(call))

    def tell(self, member_ids: Iterable[str], command: Command) -> list[Effect]:
        """Send a command to those of the members that have a session, each once."""
        sessions = [self.sessions.call_of(member_id) for member_id in dict.fromkeys(member_ids)]
        return [Answer(session, command) for session in sessions if session]

    def is_live(self, member_id: str, incarnation: int) -> bool:
        member = self._members.get(member_id)
        return member is not None and member.live and member.incarnation == incarnation

    def has(self, replica: Replica) -> bool:
        """Return True if this incarnation of a server is live."""
        return self.is_live(replica.server_id, replica.incarnation)

    def was_lost(self, member_id: str, incarnation: int) -> bool:
        """Return True if this incarnation of the member was lost and did not leave."""
        member = self._members.get(member_id)
        return member is not None and member.incarnation == incarnation and member.state == "lost"

    def check_caller(self, caller: Caller, role: Role | None = "worker") -> Member:
        """Return the live member that the caller is. Raises WrongRunError, FencedError and InvalidArgumentError."""
        self.check_run(caller.run_id)
        member = self._members.get(caller.member_id)
        if member is None:
            raise FencedError(
                f"{caller.member_id!r:.80} is not registered with run {self._settings.run_id!r}: register first",
                member_id=caller.member_id,
            )
        if not member.live or member.incarnation != caller.incarnation:
            raise FencedError(
                f"incarnation {caller.incarnation} of {member.member_id} was fenced: it "
                f"{_fate(member)}; register again",
                member_id=member.member_id,
                incarnation=caller.incarnation,
            )
        if role is not None and member.role != role:
            raise InvalidArgumentError(f"{member.member_id} is a {member.role}: only a {role} can ask for this")
        return member

    def check_run(self, run_id: str) -> None:
        """Raise WrongRunError if ``run_id`` is neither empty nor this run."""
        if run_id and run_id != self._settings.run_id:
            raise WrongRunError(
                f"this scheduler serves run {self._settings.run_id!r}, not {run_id!r:.80}: check PSDIST_SCHEDULER and "
                "PSDIST_RUN_ID, or --scheduler and --run-id (--rdzv-id); without an id its run is taken",
                run_id=run_id,
            )

    def validate(self) -> None:
        live = [member for member in self._members.values() if member.live]
        assert {member.member_id for member in live} == self.sessions.liveness.keys(), "who is live has a liveness"
        self.sessions.validate()
        ranks = [member.rank for member in live if member.role == "worker"]
        assert len(set(ranks)) == len(ranks), f"two live workers have one rank: {ranks}"
        assert all(member.incarnation >= 1 for member in self._members.values())
        assert all(member.role == "server" for member in self._members.values() if member.draining)
        assert all(bool(member.reason) <= (not member.live) for member in self._members.values())

    def add(self, member: Member, now: float) -> None:
        """Add a member that has registered, under a new incarnation."""
        self._put(member)
        self.sessions.add(member, now)
        if member.role == "worker":
            self.last_joined = now

    def on_activity(self, members: Iterable[Identity], when: float) -> None:
        """Record that these members sent something to another member at that time, and so were alive."""
        for member_id, incarnation in members:
            if self.is_live(member_id, incarnation) and self.sessions.was_open(member_id):
                self.sessions.refresh(member_id, when)

    def end(
        self, member_id: str, state: Literal["left", "lost"], reason: str, now: float
    ) -> tuple[Member, list[Effect]]:
        """End a live member, which left or is lost. Returns its new state and the end of its session."""
        member = self._members[member_id]
        if not member.live:
            raise InvalidArgumentError(f"{member_id} is not live, it {_fate(member)}")
        gone = replace(member, state=state, reason=reason[:_TEXT_CHARACTERS])
        self._put(gone)
        if gone.role == "worker" and gone.state == "left" and gone.reason in _DONE:
            self.last_done = now
        session = self.sessions.end(member_id)
        return gone, [Close(session)] if session else []

    def lose(self, member_id: str, reason: str, now: float) -> list[Effect]:
        """End a live member that is lost, and notify everyone."""
        member, closes = self.end(member_id, "lost", reason, now)
        log = LogEvent(f"{member} is lost: {reason}", "warning", kind="loss", peer=member_id)
        return [log, Broadcast(MemberLost(member_id, member.role, reason)), *closes]

    def leave(self, member_id: str, reason: str, now: float) -> list[Effect]:
        """End a live member that leaves in an orderly way."""
        member, closes = self.end(member_id, "left", reason, now)
        return [LogEvent(f"{member} left: {member.reason}", kind="leave", peer=member_id), *closes]

    def open_session(self, event: SessionOpened, now: float) -> tuple[Member, list[Effect]]:
        """Open a member's session after its hello. Raises FencedError."""
        member = self.check_caller(Caller("", event.member_id, event.incarnation), role=None)
        replaced = self.sessions.open(event.call, member.member_id, now)
        return member, [*([Close(replaced)] if replaced else []), Attach(event.call)]

    def leave_late(self, caller: Caller, reason: str) -> bool:
        """Record the departure of a member whose incarnation ended when the run rolled back. Returns False for any
        other.

        It had finished its work, so it will not return and is not missed.
        """
        member = self._members.get(caller.member_id)
        if member is None or member.incarnation != caller.incarnation or member.reason != WENT_BACK:
            return False
        self._put(replace(member, state="left", reason=reason[:_TEXT_CHARACTERS]))
        return True

    def drain(self, member_id: str) -> None:
        """Mark a live server as draining: everything is to be moved away from it."""
        self._put(replace(self._members[member_id], draining=True))

    def take_changes(self) -> tuple[Member, ...]:
        """Return the members that changed since the previous call, in the order of the changes."""
        changed, self.changed = self.changed, {}
        return tuple(self._members[member_id] for member_id in changed)

    def _put(self, member: Member) -> None:
        self._members[member.member_id] = member
        self.changed[member.member_id] = None
        self._sort()

    def _sort(self) -> None:
        live = [member for member in self._members.values() if member.live]
        self.workers = sorted((m for m in live if m.role == "worker"), key=lambda member: member.rank)
        self.servers = sorted((m for m in live if m.role == "server"), key=lambda member: member.member_id)


@dataclass(slots=True)
class Demand:
    """Number of members that one run needs, and those that are missing. ``scaling`` decides who starts and stops them.

    servers_wanted, workers_wanted: wanted numbers; 0 if none was set.
    """

    _settings: ClusterSettings
    _members: Membership
    servers_wanted: int
    changed: bool = False
    workers_wanted: int = 0
    #: Workers that launchers start get ranks from the first on. Ranks from the second on are not assigned.
    first_rank: int = 0
    ranks_used: int = 0

    @property
    def workers_min(self) -> int:
        """Number of workers that the run needs.

        This is the configured number, or the largest world that a live worker names, or fewer if fewer are wanted now.
        """
        world = max((worker.world_size for worker in self._members.workers), default=0)
        least = max(self._settings.workers_min, world)
        return min(least, self.workers_wanted or least)

    @property
    def servers_min(self) -> int:
        """Number of servers that the run needs.

        This is the configured number without drained servers, or fewer if fewer are wanted now, but one per copy of a
        shard.
        """
        least = self._settings.servers_min - sum(member.draining for member in self._members.all)
        return max(min(least, self.servers_wanted or least), self._settings.replicas)

    @property
    def workers_done(self) -> list[Member]:
        """Workers that left when their work was done."""
        gone = (member for member in self._members.all if member.role == "worker" and member.state == "left")
        return [worker for worker in gone if worker.reason in _DONE]

    @property
    def ranks_in_service(self) -> list[int]:
        """Ranks of the live workers, and of those that left when their work was done."""
        return [worker.rank for worker in (*self._members.workers, *self.workers_done)]

    @property
    def ranks_done(self) -> tuple[int, ...]:
        """Ranks of workers that left when their work was done, and that no live worker has."""
        live = {worker.rank for worker in self._members.workers}
        return tuple(sorted({worker.rank for worker in self.workers_done} - live))

    @property
    def workers_to_come(self) -> int:
        """Number of workers that are live, or that a launcher starts: none of those whose work was done."""
        wanted = {*range(self.workers_min), *range(self.first_rank, self.first_rank + self.workers_wanted)}
        return len(self._members.workers) + len(wanted.difference(self.ranks_in_service))

    def shortage(self, begun: bool = False, servers: int | None = None, workers: int | None = None) -> str:
        """Return the missing members as text that begins with "for"; empty if none are missing.

        begun: True once the run has begun. Workers that left because their work was done then count as present.
        servers, workers: required numbers; None for the run's minimum.
        """
        there = len(self.ranks_in_service) if begun else len(self._members.workers)
        servers = self.servers_min if servers is None else servers
        workers = self.workers_min if workers is None else workers
        counts = (("server", servers, len(self._members.staying)), ("worker", workers, there))
        for role, wanted, there in counts:
            if there < wanted:
                return f"for {f'{wanted - there} of {wanted} {role}s' if wanted > 1 else f'a {role}'} to register"
        return ""

    def want_workers(self, workers: int, first_rank: int) -> None:
        """Set the wanted number of workers, under unused ranks from ``first_rank`` on, or higher.

        The same number again keeps its ranks, since a call may be repeated.
        """
        if workers != self.workers_wanted:
            self.workers_wanted = workers
            self.first_rank = max(first_rank, self.ranks_used)
            self.ranks_used = self.first_rank + workers

    def want_servers(self, servers: int) -> None:
        self.servers_wanted, self.changed = servers, True

    def take_change(self) -> int | None:
        """Return the wanted number of servers if it changed since the previous call."""
        changed, self.changed = self.changed, False
        return self.servers_wanted if changed else None


def _fate(member: Member) -> str:
    return f"was replaced by incarnation {member.incarnation}" if member.live else member.state_text


# --- leases and sessions ----------------------------------------------------------------------------------------------
#
# A live member is suspected when it was silent for its lease, when its session ended without a new one, or when it
# opened none soon after it had registered. Workers have a longer lease than servers: a script may hold its
# interpreter for seconds, and is then busy, not gone. A worker whose session ended after a silence may return within
# its lease, and no later.
#
# A session that ends while messages arrive regularly was ended by its member's kernel. After a silence the end proves
# nothing about the member: either side may have given up the connection. The first message after a time in which
# nobody reached the scheduler puts all sessions into that state, and gives everybody time to return.
#
# Invariants: A member has at most one session, and a session belongs to one member.

#: Leases within which members may return after the scheduler was restarted, or nobody could reach it.
RETURN_LEASES: Final = 3
#: Extra time in seconds to open a session, for each registered member that has none yet.
SESSION_SECONDS = 0.05
_WAITS_KEPT = 16


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
        # Without time limits a worker may stand in a debugger, in which its event loop answers nothing.
        liveness.deadline = within if self._settings.time_limits_suspended else min(returns, within)

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
