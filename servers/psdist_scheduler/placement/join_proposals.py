"""Joining BSP or SSP training that has begun: one proposal at a time per joiner, until every server accepts. Pure.

A worker may join at step T only if no slice on any server has reached T. So T is proposed to each server that holds
shards. A server that accepts holds its slices at T until the map shows the new member, or the proposal is withdrawn. At
the first refusal the proposal is withdrawn everywhere and a later T is proposed under a new number; the distance
doubles with each attempt. In SSP, T is the clock from which the joiner's pushes are counted, the same on all servers. A
server accepts if its slowest worker is not past T, and holds nothing.

A worker that was expelled while it lived is first proposed at the step of the push that it had begun, or was computing.
Servers accept if no slice has closed that step without it. Then it continues in the place of its earlier incarnation.

Proposals go to the primaries of the map's epoch. If a shard gets another primary while a proposal is open, the new one
does not know of it and may pass T. So the proposal is withdrawn, and T or a later step is proposed to the new
primaries. Once all have accepted, the map shows the member no later than the next change of a primary, so no primary
can miss it.

Not here: who may join, and what a finished join changes (``registry``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from psdist.types import ParametersMember, Replica
from psdist_scheduler.events.cluster_events import Answer, Effect, JoinProposal, WithdrawJoin
from psdist_scheduler.events.records import Member
from psdist_scheduler.events.worker_events import ResumePush
from psdist_scheduler.members.membership import Membership

#: Primary and term of each shard.
Route = tuple[tuple[Replica, int], ...]
#: Steps between the highest version known and the first proposal: room for what happens while it travels.
FIRST_DISTANCE = 2
DISTANCE_MAX = 1024


@dataclass(slots=True)
class Join:
    """One worker's attempt to join one set of parameters."""

    parameters: str
    worker: Member
    route: Route
    first_step: int
    since: float
    #: The push of an earlier incarnation that the worker goes on with.
    resume: ResumePush | None = None
    #: Only the step of ``restore_point`` will do, else nothing is gone on with (BSP).
    exact: bool = False
    proposal_id: int = 0
    attempt: int = 0
    accepted: dict[str, None] = field(default_factory=dict)

    @property
    def proposed_step(self) -> int:
        """The step or clock that servers are asked about."""
        return self.resume.number if self.exact and self.resume is not None else self.first_step

    @property
    def servers(self) -> tuple[str, ...]:
        """Ids of those that must accept."""
        return tuple(dict.fromkeys(primary.server_id for primary, _ in self.route))

    @property
    def member(self) -> ParametersMember:
        """What the worker becomes if all accept."""
        return make_member(self.worker, self.proposed_step, self.resume)

    @property
    def missing(self) -> list[str]:
        """Servers that have not accepted."""
        return [server for server in self.servers if server not in self.accepted]

    def propose(self, members: Membership) -> list[Effect]:
        """Asks every server that has a session; the others are asked when theirs opens."""
        return [effect for server in self.servers for effect in self.ask(server, members)]

    def ask(self, server: str, members: Membership) -> list[Effect]:
        """Asks one server, unless it has accepted or has no session."""
        session = members.sessions.of(server)
        if not session or server in self.accepted:
            return []
        return [Answer(session, JoinProposal(self.proposal_id, self.parameters, self.member))]

    def withdraw(self, members: Membership) -> list[Effect]:
        """Takes the proposal back from every server, asked or not."""
        news = WithdrawJoin(self.proposal_id, self.parameters, self.worker.member_id)
        sessions = [members.sessions.of(server) for server in self.servers]
        return [Answer(session, news) for session in sessions if session]


class Joins:
    """All joins in progress."""

    def __init__(self, first_proposal_id: int) -> None:
        self._next_id = first_proposal_id
        self._by_worker: dict[tuple[str, str], Join] = {}

    def __iter__(self) -> Iterator[Join]:
        return iter(list(self._by_worker.values()))

    def clear(self) -> None:
        """Nobody joins any more, nor is told: what they would have joined is not there."""
        self._by_worker.clear()

    def has(self, parameters: str, worker_id: str) -> bool:
        """Whether this worker is joining these parameters."""
        return (parameters, worker_id) in self._by_worker

    def start(self, join: Join, members: Membership) -> list[Effect]:
        """Begins with the first proposal."""
        self._by_worker[join.parameters, join.worker.member_id] = join
        return self._propose(join, members)

    def answered(
        self, server: str, proposal_id: int, accepted: bool, version_max: int, members: Membership
    ) -> tuple[Join | None, list[Effect]]:
        """A server's answer. Returns the join if it is now accepted by all; it is in progress no more then."""
        join = next((join for join in self._by_worker.values() if join.proposal_id == proposal_id), None)
        if join is None or server not in join.servers:
            return None, []
        if not accepted:
            return None, self._again(join, version_max, members)
        join.accepted[server] = None
        if join.missing:
            return None, []
        del self._by_worker[join.parameters, join.worker.member_id]
        return join, []

    def reroute(self, join: Join, route: Route, version: int, members: Membership) -> list[Effect]:
        """Shards have other primaries: those are asked."""
        withdrawn = join.withdraw(members)
        join.route = route
        return withdrawn + (self._propose(join, members) if join.exact else self._propose_later(join, version, members))

    def stop(self, join: Join, members: Membership) -> list[Effect]:
        """The joiner is gone, or does not want any more."""
        del self._by_worker[join.parameters, join.worker.member_id]
        return join.withdraw(members)

    def _again(self, join: Join, version_max: int, members: Membership) -> list[Effect]:
        withdrawn = join.withdraw(members)
        if join.exact:  # A slice has gone on without the push, so that it is dropped.
            join.exact, join.resume = False, None
        return withdrawn + self._propose_later(join, version_max, members)

    def _propose_later(self, join: Join, version_max: int, members: Membership) -> list[Effect]:
        join.attempt += 1
        # The cap holds for the exponent too: an attempt that never succeeds must not grow numbers without end.
        distance = min(DISTANCE_MAX, 1 << min(join.attempt, DISTANCE_MAX.bit_length()))
        join.first_step = max(version_max, join.first_step - FIRST_DISTANCE) + distance
        return self._propose(join, members)

    def _propose(self, join: Join, members: Membership) -> list[Effect]:
        self._next_id += 1
        join.proposal_id = self._next_id
        join.accepted.clear()
        return join.propose(members)


def make_member(worker: Member, first_step: int, resume: ResumePush | None) -> ParametersMember:
    """What a worker becomes that joins at ``first_step``, and goes on with a push where it has one."""
    origin, number = (resume.origin, resume.number) if resume is not None else (0, 0)
    return ParametersMember(worker.member_id, worker.incarnation, worker.rank, first_step, origin, number)
