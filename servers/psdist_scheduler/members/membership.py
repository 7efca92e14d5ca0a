"""Membership: ids, ranks, incarnations, leases and sessions. Pure.

A member is live from its registration until it leaves or is lost. It is lost when its session stream breaks, when
nothing was heard of it for its lease, or when it opened no session soon after it had registered. Workers have a longer
lease than servers: a script may hold its interpreter for seconds, and then it is busy, not gone. A process that died or
froze is noticed by its stream.

Invariants: there is at most one live member per id, and one live worker per rank. An incarnation is given once. Exactly
the live members have a ``Liveness``. A session belongs to one live member.

Not here: what follows from a loss (``registry``, ``cluster``), the streams themselves (``service``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from psdist.errors import (
    DuplicateMemberError,
    FencedError,
    InvalidArgumentError,
    LimitExceededError,
    ProtocolMismatchError,
    WrongRunError,
)
from psdist.types import check_name
from psdist.wire.limits import MEMBERS_MAX, PROTOCOL_VERSION, WORLD_MAX
from psdist_scheduler.events.cluster_events import Heartbeat, Register
from psdist_scheduler.events.records import ClusterSettings, Member, Role
from psdist_scheduler.events.worker_events import Caller

#: Ids that are remembered, so that their incarnations are never given twice.
KNOWN_IDS_MAX = 4 * MEMBERS_MAX
#: Leases that servers have to come back after the scheduler was restarted, and workers at least.
RESTART_LEASES = 3
_WAITS_KEPT = 16
#: Why workers' incarnations ended when the run rolled back.
WENT_BACK = "the run went back to a snapshot"
#: What workers say that leave when their work is done.
_DONE = ("closed", "done")
_TEXT_CHARACTERS = 500


@dataclass(slots=True)
class Liveness:
    """What is known of a live member only while this process lives. Times are of the caller's clock, in seconds."""

    seen: float
    #: Lost if nothing is heard until then.
    deadline: float
    #: The call that is its session; 0 while it has none.
    session: int = 0
    epoch: int = 0
    waiting_for: tuple[str, ...] = ()
    #: Known from an earlier scheduler, and not heard of since.
    restored: bool = False


class Membership:
    """The members of one run."""

    def __init__(self, settings: ClusterSettings, members: tuple[Member, ...], servers_wanted: int, now: float) -> None:
        self._settings = settings
        #: Ids that are new here have higher incarnations: an earlier scheduler of this run gave those up to it.
        self.incarnations_given = 0
        self._members = {member.member_id: member for member in members}
        grace = RESTART_LEASES * settings.lease_seconds
        self._presence = {
            member.member_id: Liveness(now, now + max(grace, self._lease(member)), restored=True)
            for member in members
            if member.live
        }
        self._sessions: dict[int, str] = {}
        self._count()
        #: Servers that the run shall have; 0 if nobody said so.
        self.servers_wanted = servers_wanted
        #: Whether that changed since the cluster last asked.
        self.scaled = False
        #: Changed since the cluster last took them, in the order of the changes.
        self.changed: dict[str, None] = {}
        #: When the last worker registered.
        self.last_joined = now

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def all(self) -> tuple[Member, ...]:
        """All members that ever were, each in its newest incarnation."""
        return tuple(self._members.values())

    @property
    def workers(self) -> list[Member]:
        """Live workers by rank."""
        return self._workers

    @property
    def workers_known(self) -> int:
        """Workers that are or were there, by id."""
        return self._workers_known

    @property
    def ranks_used(self) -> int:
        """The highest rank that a worker ever had, and one."""
        return max((member.rank + 1 for member in self._members.values() if member.role == "worker"), default=0)

    @property
    def workers_in_service(self) -> int:
        """Workers that live, and those that left when their work was done."""
        members = (member for member in self._members.values() if member.role == "worker")
        return sum(member.live or (member.state == "left" and member.reason in _DONE) for member in members)

    @property
    def servers(self) -> list[Member]:
        """Live servers by id."""
        return self._servers

    @property
    def workers_min(self) -> int:
        """Workers that the run needs: what the scheduler was told, or the largest world that a live worker names."""
        return max(self._settings.workers_min, self._world_size)

    @property
    def servers_min(self) -> int:
        """Servers that the run needs: what the scheduler was told without those that were drained, or fewer if fewer
        are wanted by now, and one for each copy of a shard."""
        least = self._settings.servers_min - self._drained
        return max(min(least, self.servers_wanted or least), self._settings.replicas)

    @property
    def staying(self) -> list[Member]:
        """Live servers by id that nobody wants to stop."""
        return [server for server in self._servers if not server.draining]

    @property
    def sessions(self) -> dict[int, str]:
        """Ids of members by their open session."""
        return self._sessions

    def get(self, member_id: str) -> Member | None:
        """The member of this id, live or not."""
        return self._members.get(member_id)

    def presence(self, member_id: str) -> Liveness | None:
        """What is known of a live member."""
        return self._presence.get(member_id)

    @property
    def presences(self) -> dict[str, Liveness]:
        """What is known of the live members, by id."""
        return self._presence

    def is_live(self, member_id: str, incarnation: int) -> bool:
        """Whether this incarnation of the member is live."""
        member = self._members.get(member_id)
        return member is not None and member.live and member.incarnation == incarnation

    def was_lost(self, member_id: str, incarnation: int) -> bool:
        """Whether this incarnation of the member ended without its having left."""
        member = self._members.get(member_id)
        return member is not None and member.incarnation == incarnation and member.state == "lost"

    def session_of(self, member_id: str) -> int:
        """The call that is the member's session; 0 if it has none."""
        presence = self._presence.get(member_id)
        return presence.session if presence else 0

    def shortage(self, begun: bool = False, servers: int | None = None, workers: int | None = None) -> str:
        """What is missing before anything can begin, as a sentence that begins with "for"; empty if nothing is. Once a
        run has begun, workers that left when they were done are not missed. ``servers``, ``workers``: so few are
        enough."""
        there = self.workers_in_service if begun else len(self.workers)
        servers = self.servers_min if servers is None else servers
        workers = self.workers_min if workers is None else workers
        counts = (("server", servers, len(self.staying)), ("worker", workers, there))
        for role, wanted, there in counts:
            if there < wanted:
                return f"for {f'{wanted - there} of {wanted} {role}s' if wanted > 1 else f'a {role}'} to register"
        return ""

    def check_caller(self, caller: Caller, role: Role | None = "worker") -> Member:
        """The live member that the caller is. Raises WrongRunError, FencedError, InvalidArgumentError."""
        self.check_run(caller.run_id)
        member = self._members.get(caller.member_id)
        if member is None:
            raise FencedError(
                f"{caller.member_id!r:.80} is not registered with run {self._settings.run_id!r}: register first",
                member_id=caller.member_id,
            )
        if not member.live or member.incarnation != caller.incarnation:
            raise FencedError(
                f"incarnation {caller.incarnation} of {member.member_id} does not count any more: it "
                f"{self._fate(member)}; register again",
                member_id=member.member_id,
                incarnation=caller.incarnation,
            )
        if role is not None and member.role != role:
            raise InvalidArgumentError(f"{member.member_id} is a {member.role}: only a {role} can ask for this")
        return member

    def check_run(self, run_id: str) -> None:
        """Raises WrongRunError if ``run_id`` is neither empty nor this run."""
        if run_id and run_id != self._settings.run_id:
            raise WrongRunError(
                f"this scheduler serves run {self._settings.run_id!r}, not {run_id!r:.80}: check PSDIST_SCHEDULER and "
                "PSDIST_RUN_ID",
                run_id=run_id,
            )

    # --- changes ------------------------------------------------------------------------------------------------------

    def register(self, event: Register, reserved: frozenset[str], now: float) -> Member:
        """A new incarnation of a member. ``reserved`` has ids of servers that are named as owners of lost shards.

        Raises ProtocolMismatchError, WrongRunError, InvalidArgumentError, DuplicateMemberError, LimitExceededError.
        """
        self._check_register(event)
        if event.role == "worker":
            rank = self._choose_rank(event)
            member_id = event.member_id or f"worker-{rank}"
        else:
            rank = 0
            member_id = event.member_id or self._free_server_id(reserved)
        before = self._members.get(member_id)
        self._check_free(member_id, event, before)
        member = Member(
            member_id=member_id,
            role=event.role,
            incarnation=(before.incarnation if before else self.incarnations_given) + 1,
            rank=rank,
            world_size=event.world_size if event.role == "worker" else 0,
            address=event.address,
            host=event.host,
            pid=event.pid,
        )
        self._put(member)
        # Without a session it takes no part in anything yet, so that the short lease harms nobody.
        self._presence[member_id] = Liveness(now, now + self._settings.lease_seconds)
        if event.role == "worker":
            self.last_joined = now
        return member

    def open_session(self, call: int, caller: Caller, now: float) -> tuple[Member, int]:
        """Makes ``call`` the member's session. Returns the member, and the session that it replaces (0: none)."""
        member = self.check_caller(caller, role=None)
        presence = self._presence[member.member_id]
        replaced = presence.session
        self._sessions.pop(replaced, None)
        presence.session = call
        self._sessions[call] = member.member_id
        self._refresh(member, now)
        return member, replaced

    def heartbeat(self, event: Heartbeat, now: float) -> Member | None:
        """Records that a member was heard; None if the session has ended."""
        member_id = self._sessions.get(event.call)
        if member_id is None:
            return None
        member, presence = self._members[member_id], self._presence[member_id]
        self._refresh(member, now)
        presence.epoch = event.epoch
        presence.waiting_for = tuple(text[:_TEXT_CHARACTERS] for text in event.waiting_for[:_WAITS_KEPT])
        return member

    def heard(self, lives: Iterable[tuple[str, int]], now: float) -> None:
        """These members, by id and incarnation, have sent something to somebody. Who sends is alive."""
        for member_id, incarnation in lives:
            member = self._members.get(member_id)
            if member is not None and member.live and member.incarnation == incarnation and self.session_of(member_id):
                self._refresh(member, now)

    def detach(self, call: int, now: float) -> None:
        """A session ended by no fault of its member's, which has a lease's time to open another."""
        member_id = self._sessions.pop(call)
        presence = self._presence[member_id]
        presence.session = 0
        presence.deadline = max(presence.deadline, now + self._lease(self._members[member_id]))

    def end(self, member_id: str, state: str, reason: str) -> tuple[Member, int]:
        """A live member left or is lost. Returns it as it is now, and the session that it had (0: none)."""
        member = self._members[member_id]
        if not member.live:
            raise InvalidArgumentError(f"{member_id} is not live, it {self._fate(member)}")
        gone = replace(member, state="left" if state == "left" else "lost", reason=reason[:_TEXT_CHARACTERS])
        session = self._presence.pop(member_id).session
        self._sessions.pop(session, None)
        self._put(gone)
        return gone, session

    def leave_late(self, caller: Caller, reason: str) -> bool:
        """A member leaves whose incarnation ended when the run rolled back: whether it is that one's word. It had done
        its work, does not come again, and is not missed."""
        member = self._members.get(caller.member_id)
        late = member is not None and member.incarnation == caller.incarnation and member.reason == WENT_BACK
        if late and member is not None and not member.live:
            self._put(replace(member, state="left", reason=reason[:_TEXT_CHARACTERS]))
        return late

    def want_servers(self, servers: int) -> None:
        """The run shall have so many servers."""
        self.servers_wanted, self.scaled = servers, True

    def drain(self, member_id: str) -> None:
        """Everything is to be moved away from a live server."""
        self._put(replace(self._members[member_id], draining=True))

    def expired(self, now: float) -> list[tuple[str, str]]:
        """Ids of live members whose lease is over, and why each is taken for lost."""
        late = [(id_, p) for id_, p in self._presence.items() if now > p.deadline]
        return [(id_, self._silence(self._members[id_], p, now)) for id_, p in late]

    def extend(self, now: float, late: float) -> None:
        """This process itself stood still for ``late`` seconds: nobody's silence in that time counts."""
        for member_id, presence in self._presence.items():
            lease = self._lease(self._members[member_id])
            fresh = now + lease if late > lease else presence.deadline + late
            presence.deadline = max(presence.deadline, fresh)

    def validate(self) -> None:
        """Asserts the invariants of the module's text."""
        live = self._live()
        assert sorted(m.member_id for m in live) == sorted(m.member_id for m in (*self._workers, *self._servers))
        assert {member.member_id for member in live} == self._presence.keys(), "a presence without a life"
        ranks = [member.rank for member in live if member.role == "worker"]
        assert len(set(ranks)) == len(ranks), f"two live workers have one rank: {ranks}"
        held = {p.session: id_ for id_, p in self._presence.items() if p.session}
        assert held == self._sessions, "sessions and members disagree"
        assert all(member_id == member.member_id for member_id, member in self._members.items())
        assert all(member.incarnation >= 1 for member in self._members.values())
        assert all(member.role == "server" for member in self._members.values() if member.draining)
        assert all(bool(member.reason) <= (not member.live) for member in self._members.values())

    # --- inner --------------------------------------------------------------------------------------------------------

    def _live(self) -> list[Member]:
        return [member for member in self._members.values() if member.live]

    def _put(self, member: Member) -> None:
        self._members[member.member_id] = member
        self.changed[member.member_id] = None
        self._count()

    def _count(self) -> None:
        """What is asked for with every event, and changes seldom."""
        live = self._live()
        self._workers = sorted((m for m in live if m.role == "worker"), key=lambda member: member.rank)
        self._servers = sorted((m for m in live if m.role == "server"), key=lambda member: member.member_id)
        self._world_size = max((worker.world_size for worker in self._workers), default=0)
        self._workers_known = sum(member.role == "worker" for member in self._members.values())
        self._drained = sum(member.draining for member in self._members.values())

    def _lease(self, member: Member) -> float:
        return self._settings.lease_of(member.role)

    def _refresh(self, member: Member, now: float) -> None:
        presence = self._presence[member.member_id]
        presence.restored = False
        presence.seen = now
        presence.deadline = now + self._lease(member)

    def _check_register(self, event: Register) -> None:
        if event.protocol_version != PROTOCOL_VERSION:
            raise ProtocolMismatchError(
                f"you speak protocol version {event.protocol_version}, this scheduler speaks {PROTOCOL_VERSION}: use "
                "the same release of psdist everywhere",
                given=event.protocol_version,
                expected=PROTOCOL_VERSION,
            )
        self.check_run(event.run_id)
        if event.role not in ("server", "worker"):
            raise InvalidArgumentError(f"role {event.role!r} is unknown: use server or worker")
        if event.member_id:
            check_name(event.member_id, "member id")
        if event.world_size > WORLD_MAX:
            raise LimitExceededError(f"a world of {event.world_size} workers is larger than the limit of {WORLD_MAX}")
        if event.rank is not None and not 0 <= event.rank < (event.world_size or WORLD_MAX):
            raise InvalidArgumentError(
                f"rank {event.rank} is out of range: ranks count from 0 and are below the world's size, "
                f"{event.world_size or WORLD_MAX}"
            )
        if len(self._presence) >= MEMBERS_MAX:
            raise LimitExceededError(f"{MEMBERS_MAX} members are registered, which is the limit")

    def _choose_rank(self, event: Register) -> int:
        taken = {worker.rank: worker for worker in self.workers}
        if event.rank is not None:
            if event.rank in taken and not self._may_replace(taken[event.rank], event):
                self._refuse(f"rank {event.rank}", taken[event.rank])
            return event.rank
        before = self._members.get(event.member_id)
        if before is not None and before.role == "worker" and before.rank not in taken:
            return before.rank
        return next(rank for rank in range(MEMBERS_MAX + 1) if rank not in taken)

    def _free_server_id(self, reserved: frozenset[str]) -> str:
        for number in range(KNOWN_IDS_MAX + 1):
            member_id = f"server-{number}"
            member = self._members.get(member_id)
            # The id of one that was drained says, as long as nobody takes it by name, that a server less is needed.
            ended = member is not None and member.role == "server" and not member.live and not member.draining
            if member_id not in reserved and (member is None or ended):
                return member_id
        raise LimitExceededError(f"all server ids up to server-{KNOWN_IDS_MAX} are taken")

    def _check_free(self, member_id: str, event: Register, before: Member | None) -> None:
        if before is None:
            if len(self._members) >= KNOWN_IDS_MAX:
                raise LimitExceededError(f"{KNOWN_IDS_MAX} ids were used in this run, which is the limit: reuse some")
            return
        if before.live and not self._is_abandoned(before, event):
            self._refuse(f"the id {member_id!r}", before)
        if before.role != event.role:
            raise InvalidArgumentError(f"the id {member_id!r} was a {before.role}'s: choose another for a {event.role}")

    def _may_replace(self, holder: Member, event: Register) -> bool:
        """Whether the worker that has a rank is an earlier incarnation of the one that registers."""
        if holder.member_id == event.member_id:
            return True
        return not event.member_id and holder.member_id == f"worker-{holder.rank}" and self._is_abandoned(holder, event)

    def _is_abandoned(self, member: Member, event: Register) -> bool:
        """Whether a live member surely is not there any more: nothing was heard of it since the scheduler was started
        again, and now a process of its host takes its place."""
        presence = self._presence[member.member_id]
        return presence.restored and bool(event.host) and member.host == event.host and member.role == event.role

    def _refuse(self, what: str, holder: Member) -> None:
        raise DuplicateMemberError(
            f"{what} is taken by {holder.member_id}, process {holder.pid} on {holder.host or 'an unknown host'}: use "
            "the client that exists there, or, if that process died, wait up to "
            f"{self._lease(holder):g} s for its lease to end",
            member_id=holder.member_id,
            host=holder.host,
            pid=holder.pid,
        )

    def _silence(self, member: Member, presence: Liveness, now: float) -> str:
        """Why a member whose lease is over is taken for lost."""
        if not presence.session:
            return f"opened no session within {now - presence.seen:.1f} s"
        option = "--worker-timeout" if member.role == "worker" else "--failure-timeout"
        return f"silent for {now - presence.seen:.1f} s, and {option} is {self._lease(member):g} s"

    def _fate(self, member: Member) -> str:
        return f"was replaced by incarnation {member.incarnation}" if member.live else member.state_text
