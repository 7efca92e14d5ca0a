"""Groups of workers for collectives that outlive their members: who is in the next group of a name. Pure.

Workers of a group whose call has failed ask for its successor, and ask again until it is formed. The first group of a
name forms when ``size`` workers have asked. A successor forms when every live worker of the group has asked, except for
those that others cannot reach, which have ``GRACE_SECONDS`` to ask, too, and those that have closed the group or given
up a call, which have ``CLOSED_SECONDS``. Of workers that cannot reach each other, those that the fewest others can
reach are left out. New workers are added if all others admit them, or if fewer than ``size_min`` are left.

A slow worker is waited for: it is unreachable only if its host, or its process, does not run.

Nothing is durable. After a restart of the scheduler, requests name the group of the caller, also those that only ask
about waiting workers. A group that an earlier scheduler formed may have a successor already, unknown to this one. So
live members are then waited for even if others cannot reach them, and a first group needs all live workers.

A group may lack workers whose scripts have ended, and which nobody starts again. If it would be complete with them,
and ``RETURN_SECONDS`` have passed, nobody waits any longer. Other missing workers may still be started by somebody.

Invariants: Each epoch of a name has one list of members. Its members were live, and had asked for it. A worker that was
left out learns of it when it asks, and may join again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from psdist.errors import (
    ExcludedError,
    InvalidArgumentError,
    LateWorkerError,
    LimitExceededError,
    PsdistError,
    WorkerLeftError,
)
from psdist.types import WorkerEntry, check_name
from psdist.wire.limits import GROUP_NAMES_MAX, MEMBERS_MAX
from psdist_scheduler.decide.cluster_events import FormGroup
from psdist_scheduler.decide.cluster_state import Identity, Member, name_some
from psdist_scheduler.decide.effects import Answer, Effect, GroupStanding
from psdist_scheduler.decide.members import Membership

#: Time in which a worker that others cannot reach may still ask, after the last change.
GRACE_SECONDS: Final = 0.1
#: The same for a worker that has ended the group by itself. It may be slow.
CLOSED_SECONDS: Final = 2.0
#: Time after which a worker that asks no more does not count as waiting.
_ABSENT_SECONDS: Final = 5.0
#: Time after the last worker's end, and after the last registration, in which workers that have ended may start again.
RETURN_SECONDS: Final = 30.0

#: Ticket of a member that has left the group.
_LEFT: Final = -1


@dataclass(slots=True)
class _Asking:
    worker: Member
    event: FormGroup
    heard: float


@dataclass(slots=True)
class _Formation:
    """The newest group of a name, and the workers that ask for the next one. epoch: 0 before the first."""

    epoch: int = 0
    members: tuple[WorkerEntry, ...] = ()
    #: By member, the ticket of its request; absent for members of a group that an earlier scheduler formed.
    tickets: dict[Identity, int] = field(default_factory=dict)
    asking: dict[Identity, _Asking] = field(default_factory=dict)
    #: True if an earlier scheduler formed it.
    is_adopted: bool = False
    #: True once a member has said that the group's work is complete.
    is_over: bool = False
    #: When a request last came that differs from those before.
    changed: float = 0.0

    def is_without(self, event: FormGroup, identity: Identity) -> bool:
        """True if the caller's group has continued without it. Two groups may have one epoch: a scheduler restarted
        before all members had its answer."""
        return 0 < event.epoch < self.epoch or (event.epoch == self.epoch > 0 and not self.includes(identity))

    def includes(self, identity: Identity) -> bool:
        return any(entry.identity == identity for entry in self.members)

    def is_answer(self, event: FormGroup, identity: Identity) -> bool:
        """Return True if this group is the one that ``event`` asks for."""
        if event.epoch >= self.epoch or not self.includes(identity):
            return False
        return self.tickets.get(identity, event.ticket if event.epoch else 0) == event.ticket


class GroupFormations:
    """The groups of a run, by name. is_restored: True if the run had an earlier scheduler."""

    def __init__(self, members: Membership, *, is_restored: bool = False) -> None:
        self._members = members
        self._is_restored = is_restored
        self._formations: dict[str, _Formation] = {}

    def form(self, event: FormGroup, worker: Member, now: float) -> list[Effect]:
        """Process a worker's request.

        Raises ExcludedError, LateWorkerError, WorkerLeftError, InvalidNameError, InvalidArgumentError and
        LimitExceededError.
        """
        formation = self._formation_of(event)
        identity = worker.identity
        self._adopt(formation, event, identity)
        if event.finishes and formation.includes(identity):
            formation.is_over = True
            formation.tickets[identity] = _LEFT
        elif event.ticket and not formation.is_answer(event, identity):
            self._note(formation, _Asking(worker, event, now), identity)
        waiting_for, needed = self._advance(formation, now)
        formed = bool(event.ticket) and formation.is_answer(event, identity)
        if not formed and event.ticket and formation.is_without(event, identity):
            raise _excluded(event, worker)
        if (
            not event.finishes
            and identity in formation.asking
            and (error := self._never_forms(formation, needed, event, now))
        ):
            del formation.asking[identity]
            raise error
        waiting = [asking for asking in formation.asking.values() if not asking.event.epoch]
        standing = GroupStanding(
            formation.epoch, formation.members, formed, "" if formed else waiting_for, len(waiting)
        )
        return [Answer(event.call, standing)]

    def _formation_of(self, event: FormGroup) -> _Formation:
        name = check_name(event.name, "group name")
        counts = len(event.members), len(event.unreachable), len(event.closed), event.size, event.size_min
        if max(counts) > MEMBERS_MAX:
            raise LimitExceededError(f"group {name!r} has more than {MEMBERS_MAX} workers, which is the limit")
        if bool(event.epoch) != bool(event.members) or any(
            rank >= len(event.members) for rank in (*event.unreachable, *event.closed)
        ):
            raise InvalidArgumentError(f"epoch {event.epoch} of group {name!r} does not fit its members")
        if name not in self._formations:
            while len(self._formations) >= GROUP_NAMES_MAX:
                self._forget_one()
            self._formations[name] = _Formation()
        return self._formations[name]

    def _forget_one(self) -> None:
        """Forget the oldest group without live members. Raises LimitExceededError if there is none."""
        for name, formation in self._formations.items():
            if not formation.asking and not any(map(self._is_live, formation.members)):
                del self._formations[name]
                return
        raise LimitExceededError(f"{GROUP_NAMES_MAX} groups of workers have names, which is the limit")

    def _adopt(self, formation: _Formation, event: FormGroup, identity: Identity) -> None:
        """Continue from a group that an earlier scheduler formed."""
        if event.epoch <= formation.epoch:
            return
        if identity not in [entry.identity for entry in event.members]:
            raise InvalidArgumentError(f"the caller is not in the group {event.name!r} that it names")
        formation.epoch, formation.members = event.epoch, event.members
        formation.is_adopted = True
        joining = {key: one for key, one in formation.asking.items() if not one.event.epoch and key != identity}
        formation.asking = joining
        # A member that asks to join has left the group. The caller names it as its own, whatever it asked before.
        formation.tickets = {key: _LEFT for key in joining if formation.includes(key)}

    def _note(self, formation: _Formation, asking: _Asking, identity: Identity) -> None:
        event = asking.event
        if formation.is_without(event, identity):
            return
        if not event.epoch and formation.includes(identity):  # It has left the group, and joins again.
            formation.tickets[identity] = _LEFT
        elif not event.epoch and formation.is_over:
            raise LateWorkerError(
                f"{asking.worker} asks to join group {event.name!r}, whose members have completed their work"
            )
        before = formation.asking.get(identity)
        formation.asking[identity] = asking
        if before is None or before.event.unreachable != event.unreachable:
            formation.changed = asking.heard

    def _advance(self, formation: _Formation, now: float) -> tuple[str, int]:
        """Form the next group if it is time. Returns the reason if not, and how many workers it needs if it has too
        few."""
        self._drop_absent(formation, now)
        former = [asking for asking in formation.asking.values() if asking.event.epoch]
        joining = [asking for asking in formation.asking.values() if not asking.event.epoch]
        expected = self._expected(formation)
        if not expected:
            chosen = joining
            needed = max((asking.event.size for asking in joining), default=1)
            if self._is_restored and not formation.epoch:
                needed = max(needed, len(self._members.workers))
        else:
            if waiting_for := self._missing(formation, expected, former, now):
                return waiting_for, 0
            chosen = _reachable(former)
            needed = max(asking.event.size_min for asking in chosen)
            chosen += joining if _takes_in(chosen, needed) else []
        if len(chosen) < needed:
            ended = f"; {name_some(self._done)} ended" if self._lacks_ended(needed) else ""
            return f"for {needed - len(chosen)} of {needed} workers{ended}", needed
        if chosen:
            self._form(formation, chosen)
        return "", 0

    @property
    def _done(self) -> list[Member]:
        return self._members.demand.workers_done

    def _lacks_ended(self, needed: int) -> bool:
        """Return True if ``needed`` workers cannot come without those that have ended.

        If all of them together are too few, somebody must start others, who may come at any time.
        """
        can_come = self._members.demand.workers_to_come
        return can_come < needed <= can_come + len(self._done)

    def _never_forms(self, formation: _Formation, needed: int, event: FormGroup, now: float) -> PsdistError | None:
        """Return an error if too few of ``needed`` workers can come for the next group, since others have ended."""
        group = f"group {event.name!r}"
        if needed and event.epoch and formation.is_over:
            return LateWorkerError(f"the other members of {group} have completed their work, and {needed} are needed")
        quiet = now - max(self._members.last_done, self._members.last_joined)
        if quiet < RETURN_SECONDS or not self._lacks_ended(needed):
            return None
        can_come = self._members.demand.workers_to_come
        text = f"{group} needs {needed} workers, and {can_come} can come: {name_some(self._done)} ended"
        if formation.epoch and not event.epoch:
            return LateWorkerError(f"{text}, and no member is left. To train again, start all workers again")
        return WorkerLeftError(f"{text}. Let each worker stay until the others have no more calls, or lower the size")

    def _drop_absent(self, formation: _Formation, now: float) -> None:
        formation.asking = {
            identity: asking
            for identity, asking in formation.asking.items()
            if self._members.is_live(*identity) and now - asking.heard < _ABSENT_SECONDS
        }

    def _is_live(self, entry: WorkerEntry) -> bool:
        return self._members.is_live(*entry.identity)

    def _expected(self, formation: _Formation) -> dict[Identity, int]:
        """Return the live members of the newest group that have not left it, with their ranks."""
        return {
            entry.identity: rank
            for rank, entry in enumerate(formation.members)
            if self._is_live(entry) and formation.tickets.get(entry.identity) != _LEFT
        }

    def _missing(
        self, formation: _Formation, expected: dict[Identity, int], former: Iterable[_Asking], now: float
    ) -> str:
        closed = {rank for asking in former for rank in asking.event.closed}
        unreachable = set[int]()
        if not formation.is_adopted:
            unreachable = {rank for asking in former for rank in asking.event.unreachable}
        absent = {identity: rank for identity, rank in expected.items() if identity not in formation.asking}
        awaited = [identity for identity, rank in absent.items() if rank not in closed | unreachable]
        if awaited:
            named = [member for identity in awaited if (member := self._members.get(identity[0])) is not None]
            return f"for {name_some(named)} to reconfigure the group, too"
        if absent and now < formation.changed + GRACE_SECONDS:
            return "for workers that the others cannot reach"
        if set(absent.values()) - unreachable and now < formation.changed + CLOSED_SECONDS:
            return "for workers that have closed the group, or given up a call of it"
        return ""

    def _form(self, formation: _Formation, chosen: list[_Asking]) -> None:
        chosen.sort(key=lambda asking: asking.worker.rank)
        formation.epoch += 1
        formation.is_adopted = formation.is_over = False
        formation.members = tuple(
            WorkerEntry(worker.member_id, worker.incarnation, worker.rank, worker.address)
            for worker in (asking.worker for asking in chosen)
        )
        formation.tickets = {asking.worker.identity: asking.event.ticket for asking in chosen}
        members = formation.tickets.keys()
        formation.asking = {
            identity: asking
            for identity, asking in formation.asking.items()
            if identity not in members and not asking.event.epoch
        }

    def validate(self) -> None:
        for formation in self._formations.values():
            identities = [entry.identity for entry in formation.members]
            assert len(set(identities)) == len(identities), "a worker is in a group twice"
            assert bool(formation.epoch) == bool(identities), "a group without members"
            assert all(one.event.epoch in (0, formation.epoch) for one in formation.asking.values())


def _takes_in(former: list[_Asking], needed: int) -> bool:
    """Return True if these members of the newest group take in new workers."""
    return len(former) < needed or all(asking.event.admits for asking in former)


def _reachable(former: list[_Asking]) -> list[_Asking]:
    """Leave out workers until all others reach each other: first those with the most broken paths, then the highest
    rank."""
    kept = {asking.worker.identity: asking for asking in former}
    broken = {
        frozenset((asking.worker.identity, asking.event.members[rank].identity))
        for asking in former
        for rank in asking.event.unreachable
    }
    while paths := [path for path in broken if len(path) == 2 and path <= kept.keys()]:
        counts = {identity: sum(identity in path for path in paths) for identity in kept}
        del kept[max(kept, key=lambda identity: (counts[identity], kept[identity].worker.rank))]
    return list(kept.values())


def _excluded(event: FormGroup, worker: Member) -> ExcludedError:
    return ExcludedError(
        f"the other workers of group {event.name!r} continued without {worker}, which they could not reach, which was "
        "stopped, or which had closed the group or given up a call: join the group again",
        worker_id=worker.member_id,
        rank=worker.rank,
    )
