"""Membership: the members of the run with their id, rank and incarnation, and the missing ones. Pure.

A member is live from its registration until it leaves or is lost. Then another incarnation may register under its id.

Invariants: There is at most one live member per id, and one live worker per rank. An incarnation is given once. Exactly
the live members have a ``Liveness``.

``sessions`` handles leases and sessions, ``admission`` registrations. ``member_losses`` decides which members are lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from psdist.errors import FencedError, InvalidArgumentError, WrongRunError
from psdist.types import Replica
from psdist_scheduler.events.cluster_events import Attach, Broadcast, Close, Effect, LogEvent, MemberLost, SessionOpened
from psdist_scheduler.events.cluster_state import ClusterSettings, Identity, Member, Role
from psdist_scheduler.events.worker_events import Caller
from psdist_scheduler.members.sessions import Sessions

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
        assert sorted(m.member_id for m in live) == sorted(m.member_id for m in (*self.workers, *self.servers))
        assert {member.member_id for member in live} == self.sessions.liveness.keys(), "who is live has a liveness"
        self.sessions.validate()
        ranks = [member.rank for member in live if member.role == "worker"]
        assert len(set(ranks)) == len(ranks), f"two live workers have one rank: {ranks}"
        assert all(member_id == member.member_id for member_id, member in self._members.items())
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

    def end(self, member_id: str, state: str, reason: str, now: float) -> tuple[Member, int]:
        """End a live member, which left or is lost. Returns its new state and its session (0: none)."""
        member = self._members[member_id]
        if not member.live:
            raise InvalidArgumentError(f"{member_id} is not live, it {_fate(member)}")
        gone = replace(member, state="left" if state == "left" else "lost", reason=reason[:_TEXT_CHARACTERS])
        self._put(gone)
        if gone.role == "worker" and gone.state == "left" and gone.reason in _DONE:
            self.last_done = now
        return gone, self.sessions.end(member_id)

    def lose(self, member_id: str, reason: str, now: float) -> list[Effect]:
        """End a live member that is lost, and notify everyone."""
        member, session = self.end(member_id, "lost", reason, now)
        log = LogEvent(f"{member} is lost: {reason}", "warning", kind="loss", peer=member_id)
        news = Broadcast(MemberLost(member_id, member.role, reason))
        return [log, news, *([Close(session)] if session else [])]

    def leave(self, member_id: str, reason: str, now: float) -> list[Effect]:
        """End a live member that leaves in an orderly way."""
        member, session = self.end(member_id, "left", reason, now)
        log = LogEvent(f"{member} left: {member.reason}", kind="leave", peer=member_id)
        return [log, *([Close(session)] if session else [])]

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
