"""Admission: decides which registrations are accepted, and under which id, rank and incarnation. Pure.

Invariants: A refused registration changes nothing. A live member is replaced only by a later incarnation of itself, and
only if it is certain to be gone.

``members`` holds the members; ``cluster`` handles the other consequences of a registration.

The lineage is the successive scheduler processes of this run, and the cluster maps that they published. Each process
continues from the state that its predecessor made durable, and numbers its epochs above that state's. So a map, named
by its process and epoch, belongs to this run's past exactly if that process is on record and had reached the epoch when
the next one took over. A member with any other map has seen a state that this scheduler does not know, because the
scheduler's store is gone or is an older copy. Numbers that the member relies on (incarnations, terms, leases, versions)
may be given a second time here, so the member must not be accepted.

Invariant: A map is published only after its epoch is durable, so every map that a member holds is in the store.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from psdist.errors import (
    DuplicateMemberError,
    InvalidArgumentError,
    LimitExceededError,
    ProtocolMismatchError,
    RunLostError,
)
from psdist.types import check_name
from psdist.wire.limits import KNOWN_IDS_MAX, MEMBERS_MAX, OLDEST_PROTOCOL, PROTOCOL_VERSION, WORLD_MAX
from psdist_scheduler.decide.cluster_events import Register, SessionOpened
from psdist_scheduler.decide.cluster_state import ClusterSettings, Member, SchedulerProcess, StoredState
from psdist_scheduler.decide.effects import Answer, Effect, LogEvent, Registered
from psdist_scheduler.decide.members import Membership

#: A label of a host name that can serve as an id.
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
#: Ids of workers, which may be host names, too.
_WORKER: Final = re.compile(r"worker-\d+")


@dataclass(slots=True)
class MemberAdmission:
    """Decides on registrations with one run."""

    _settings: ClusterSettings
    _members: Membership
    #: Oldest and newest protocol version of each member that registered with this process, by id.
    _spoken: dict[str, tuple[int, int]] = field(default_factory=dict)

    def register(self, event: Register, reserved: frozenset[str], now: float) -> tuple[Member, list[Effect]]:
        """Register a server or a worker. Raises the errors of ``accept``.

        reserved: ids of servers that are named as owners of lost shards.
        """
        member = self.accept(event, reserved)
        version = self._common_protocol(event, member.member_id)
        self._spoken[member.member_id] = _spoken_by(event)
        self._members.add(member, now)
        workers_min = self._members.demand.workers_min
        world_size = max(workers_min, member.rank + 1) if member.role == "worker" else 0
        incarnation = f", incarnation {member.incarnation}" if member.incarnation > 1 else ""
        where = f" at {member.address}" if member.address else f" on {member.host or 'an unknown host'}"
        workers = max(workers_min, len(self._members.workers))
        lease, heartbeat = self._settings.lease_of(member.role), self._settings.heartbeat_of(member.role, workers)
        suspended = self._settings.time_limits_suspended
        answer = Answer(event.call, Registered(member, version, world_size, lease, heartbeat, suspended))
        log = LogEvent(f"{member} registered{where}{incarnation}", kind="join", peer=member.member_id)
        return member, [log, answer]

    def accept(self, event: Register, reserved: frozenset[str]) -> Member:
        """Return the new incarnation of a member. Raises ProtocolMismatchError, WrongRunError, InvalidArgumentError,
        DuplicateMemberError and LimitExceededError.

        reserved: ids of servers that are named as owners of lost shards.
        """
        self._check(event)
        if event.role == "worker":
            rank = self._choose_rank(event)
            member_id = event.member_id or f"worker-{rank}"
        else:
            rank = 0
            member_id = event.member_id or self._server_id(event, reserved)
        before = self._members.get(member_id)
        self._check_free(member_id, event, before)
        return Member(
            member_id=member_id,
            role=event.role,
            incarnation=(before.incarnation if before else self._members.incarnations_given) + 1,
            rank=rank,
            world_size=event.world_size if event.role == "worker" else 0,
            address=event.address,
            host=event.host,
            pid=event.pid,
        )

    def _check(self, event: Register) -> None:
        _check_protocol(event)
        self._members.check_run(event.run_id)
        if event.member_id:
            check_name(event.member_id, "member id")
        if event.world_size > WORLD_MAX:
            raise LimitExceededError(f"a world of {event.world_size} workers is larger than the limit of {WORLD_MAX}")
        if event.rank is not None and not 0 <= event.rank < (event.world_size or WORLD_MAX):
            raise InvalidArgumentError(
                f"rank {event.rank} is out of range: ranks count from 0 and are below the world's size, "
                f"{event.world_size or WORLD_MAX}"
            )
        if len(self._members.sessions.liveness) >= MEMBERS_MAX:
            raise LimitExceededError(f"{MEMBERS_MAX} members are registered, which is the limit")

    def _common_protocol(self, event: Register, member_id: str) -> int:
        """Return the newest version that this member, all others and this process speak. Raises ProtocolMismatchError
        if there is none: members call each other, too."""
        oldest, newest = _spoken_by(event)
        live = self._members.sessions.liveness.keys() - {member_id}
        others = {other_id: spoken for other_id, spoken in self._spoken.items() if other_id in live}
        for other_id, (other_oldest, other_newest) in others.items():
            if oldest > other_newest or newest < other_oldest:
                given, other = _versions(oldest, newest), _versions(other_oldest, other_newest)
                behind = member_id if newest < other_oldest else other_id
                raise ProtocolMismatchError(
                    f"{member_id} speaks protocol version {given}, and {other_id} speaks {other}, so they cannot call "
                    f"each other: upgrade psdist of {behind}",
                    given=given,
                    expected=other,
                )
        # Ranges of which any two overlap have a version in common.
        return min([newest, PROTOCOL_VERSION, *(spoken for _, spoken in others.values())])

    def _choose_rank(self, event: Register) -> int:
        taken = {worker.rank: worker for worker in self._members.workers}
        if event.rank is not None:
            if event.rank in taken and not self._may_replace(taken[event.rank], event):
                self._refuse(f"rank {event.rank}", taken[event.rank])
            return event.rank
        before = self._members.get(event.member_id)
        if before is not None and before.role == "worker" and before.rank not in taken:
            return before.rank
        return next(rank for rank in range(MEMBERS_MAX + 1) if rank not in taken)

    def _server_id(self, event: Register, reserved: frozenset[str]) -> str:
        """Return the id of a server that asks for none: the name of its host, by which operators know it.

        Further servers of a host get a number appended. A restarted server gets its previous id. On loopback all
        servers are on one host, so they get numbers only.
        """
        host = event.host.partition(".")[0]
        if _is_loopback(event.address) or not _HOST.fullmatch(host) or _WORKER.fullmatch(host):
            return self._numbered_id(reserved)
        names = [host, *(f"{host}-{number}" for number in range(2, MEMBERS_MAX + 2))]
        held = {member.member_id: member for name in names if (member := self._members.get(name)) is not None}
        ended = {name: member for name, member in held.items() if member.role == "server" and not member.live}
        here = [name for name in ended if held[name].address == event.address]
        # A drained server counts as one that the run needs no more. Its id is kept for it, unless all servers of this
        # host were drained: the successor of another one must not take it.
        if not all(member.draining for member in held.values()):
            ended = {name: member for name, member in ended.items() if not member.draining}
        return next(name for name in (*here, *names) if name in here or name not in held or name in ended)

    def _numbered_id(self, reserved: frozenset[str]) -> str:
        for number in range(KNOWN_IDS_MAX + 1):
            member_id = f"server-{number}"
            member = self._members.get(member_id)
            # Keep the id of a drained server free unless it is asked for by name: it means that one server fewer is
            # needed.
            ended = member is not None and member.role == "server" and not member.live and not member.draining
            if member_id not in reserved and (member is None or ended):
                return member_id
        raise LimitExceededError(f"all server ids up to server-{KNOWN_IDS_MAX} are taken")

    def _check_free(self, member_id: str, event: Register, before: Member | None) -> None:
        if before is None:
            if len(self._members.all) >= KNOWN_IDS_MAX:
                raise LimitExceededError(f"{KNOWN_IDS_MAX} ids were used in this run, which is the limit: reuse some")
            return
        if before.live and not self._is_abandoned(before, event):
            self._refuse(f"the id {member_id!r}", before)
        if before.role != event.role:
            raise InvalidArgumentError(f"the id {member_id!r} was a {before.role}'s: choose another for a {event.role}")

    def _may_replace(self, holder: Member, event: Register) -> bool:
        """Return True if the worker that holds the rank is an earlier incarnation of the one that registers."""
        if holder.member_id == event.member_id:
            return True
        return not event.member_id and holder.member_id == f"worker-{holder.rank}" and self._is_abandoned(holder, event)

    def _is_abandoned(self, member: Member, event: Register) -> bool:
        """Return True if a live member is certain to be gone.

        It has sent nothing since the scheduler was restarted, and now a process of its host takes its place. Or it is
        the registering process itself, to which the answer to its first attempt came too late.
        """
        sessions = self._members.sessions
        silent = sessions.liveness[member.member_id].restored
        unanswered = not sessions.was_open(member.member_id) and member.pid == event.pid != 0
        same = bool(event.host) and member.host == event.host and member.role == event.role
        return same and (silent or unanswered)

    def _refuse(self, what: str, holder: Member) -> None:
        raise DuplicateMemberError(
            f"{what} is taken by {holder.member_id}, process {holder.pid} on {holder.host or 'an unknown host'}: use "
            "the client that exists there, or, if that process died, wait up to "
            f"{self._settings.lease_of(holder.role):g} s for its lease to end",
            member_id=holder.member_id,
            host=holder.host,
            pid=holder.pid,
        )


def _spoken_by(event: Register) -> tuple[int, int]:
    """Return the oldest and the newest version that a member speaks."""
    return event.oldest_protocol or event.protocol_version, event.protocol_version


def _check_protocol(event: Register) -> None:
    """Raise ProtocolMismatchError if the member and this process speak no common version."""
    oldest, newest = _spoken_by(event)
    if min(newest, PROTOCOL_VERSION) >= max(oldest, OLDEST_PROTOCOL):
        return
    side = "this member" if newest < OLDEST_PROTOCOL else "the scheduler"
    given, expected = _versions(oldest, newest), _versions(OLDEST_PROTOCOL, PROTOCOL_VERSION)
    raise ProtocolMismatchError(
        f"you speak protocol version {given}, this scheduler speaks {expected}: upgrade psdist of {side}",
        given=given,
        expected=expected,
    )


def _versions(oldest: int, newest: int) -> str:
    return str(newest) if oldest == newest else f"{oldest} to {newest}"


def _is_loopback(address: str) -> bool:
    """Return True if only its own host can reach ``address`` (host:port)."""
    host = address.rpartition(":")[0].strip("[]")
    return host in ("", "localhost", "::1") or host.startswith("127.")


# --- lineage ----------------------------------------------------------------------------------------------------------


#: Older processes are forgotten. A member that missed this many restarts is gone.
PROCESSES_KEPT: Final = 1000


class Lineage:
    """The part of the run that this scheduler has on record.

    stored: the state that it continues from; None for a new store.
    """

    def __init__(self, scheduler_id: str, stored: StoredState | None) -> None:
        self.scheduler_id = scheduler_id
        past = stored.schedulers[-PROCESSES_KEPT:] if stored is not None else ()
        if past and stored is not None:
            past = (*past[:-1], SchedulerProcess(past[-1].scheduler_id, stored.epoch))
        self._past = {process.scheduler_id: process.last_epoch for process in past}
        self._changed = True

    def missing(self, event: SessionOpened, epoch: int) -> str:
        """Return why the member's map is not on record; empty if it is.

        epoch: the current epoch.
        """
        if not event.scheduler_id:  # It holds no map, or its release does not report it.
            return ""
        whose = f"{event.member_id} holds cluster map {event.epoch}"
        if event.scheduler_id == self.scheduler_id:
            return "" if event.epoch <= epoch else f"{whose}, and this scheduler has published {epoch} at most"
        last = self._past.get(event.scheduler_id)
        if last is None:
            return f"{whose} of a scheduler that the store of this one does not know"
        return "" if event.epoch <= last else f"{whose}, and the store knew the run up to {last} when it was opened"

    @property
    def is_first(self) -> bool:
        """True if this scheduler began with an empty store."""
        return not self._past

    def knows(self, scheduler_id: str) -> bool:
        """Return True if the process is on record."""
        return scheduler_id == self.scheduler_id or scheduler_id in self._past

    def take_change(self) -> tuple[SchedulerProcess, ...]:
        """Return all processes, this one last, if that is not durable yet."""
        if not self._changed:
            return ()
        self._changed = False
        past = [SchedulerProcess(*item) for item in self._past.items()]
        return (*past, SchedulerProcess(self.scheduler_id))


def lost(why: str, remedy: str, **details: str) -> RunLostError:
    """Return the error for members whose part of the run is not on record."""
    return RunLostError(f"the scheduler's record of this run is gone: {why}. {remedy}", **details)
