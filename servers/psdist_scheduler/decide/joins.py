"""Joining BSP or SSP training in progress: one proposal per joiner at a time, until every server accepts. Pure.

A worker may join at step T only if no slice on any server has reached T. So T is proposed to each server that holds
shards. A server that accepts holds its slices at T until the map shows the new member, or the proposal is withdrawn. At
the first refusal the proposal is withdrawn everywhere and a later T is proposed under a new number; the distance
doubles with each attempt. In SSP, T is the clock from which the joiner's pushes are counted, the same on all servers. A
server accepts if its slowest worker is not past T, and holds nothing.

A worker that was expelled while alive is first proposed at the step of the push that it had begun or was computing.
Servers accept if no slice has closed that step without it. Then it continues in place of its earlier incarnation.

Proposals go to the primaries of the map's epoch. If a shard gets another primary while a proposal is open, the new one
does not know of it and may pass T. So the proposal is withdrawn, and T or a later step is proposed to the new
primaries. Once all have accepted, the map shows the member no later than the next change of a primary, so no primary
can miss it. Servers follow the newest map, so a member that ends quickly may be in no map that a server sees. So
servers are notified of the end of each worker that joined by a proposal. Otherwise they would wait for its pushes
forever.

If the script trains several BSP parameter sets in turn, all of them are joined together. The workers are first held at
the start of an iteration (``alignment``), and the steps there are proposed for all sets. The worker becomes a member of
all sets in one epoch, or of none. Otherwise two sets could be joined in different iterations, and the joiner would wait
in one set for workers that wait for it in the other.

If such a script lost all of its workers, those that return would continue at different positions of it, or begin an
iteration where another one is within one. So they too join all sets together, at the current step of each set, where
nobody holds them. Only a worker that is alone continues its pushes.

``parameter_creation`` decides which workers ask to take part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from psdist.consistency import ASP, BSP
from psdist.types import ParametersEntry, ParametersMember, Replica
from psdist_scheduler.decide.alignment import Alignment
from psdist_scheduler.decide.cluster_events import JoinAnswered, ResumePush
from psdist_scheduler.decide.cluster_state import Identity, Member, name_some
from psdist_scheduler.decide.effects import Effect, JoinProposal, LogEvent, Wait, WithdrawJoin
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import ParameterSet, Registry

#: Primary and term of each shard.
Route = tuple[tuple[Replica, int], ...]
#: Steps between the highest known version and the first proposal, to allow for progress while it travels.
FIRST_DISTANCE = 2
DISTANCE_MAX = 1024
#: Prefix of the name under which a joiner has workers held.
_PREFIX = "join "


@dataclass(slots=True)
class Join:
    """One worker's attempt to join one parameter set."""

    parameters: str
    worker: Member
    route: Route
    first_step: int
    #: Push of an earlier incarnation that the worker continues.
    resume: ResumePush | None = None
    #: True if only the step of ``resume`` is acceptable (BSP). Otherwise nothing is continued.
    exact: bool = False
    #: True if this is part of a join of several sets, which are joined together or not at all.
    together: bool = False
    proposal_id: int = 0
    attempt: int = 0
    accepted: dict[str, None] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return self.parameters, self.worker.member_id

    @property
    def proposed_step(self) -> int:
        """Step or clock that servers are asked about."""
        return self.resume.number if self.exact and self.resume is not None else self.first_step

    @property
    def servers(self) -> tuple[str, ...]:
        """Ids of the servers that must accept."""
        return tuple(dict.fromkeys(primary.server_id for primary, _ in self.route))

    @property
    def member(self) -> ParametersMember:
        """Member entry of the worker if all servers accept."""
        return _member(self.worker, self.proposed_step, self.resume)

    @property
    def missing(self) -> list[str]:
        return [server for server in self.servers if server not in self.accepted]

    def ask(self, server: str, members: Membership) -> list[Effect]:
        """Ask one server, unless it has accepted or has no session."""
        proposal = JoinProposal(self.proposal_id, self.parameters, self.member)
        return [] if server in self.accepted else members.tell([server], proposal)

    def withdraw(self, members: Membership) -> list[Effect]:
        """Withdraw the proposal from every server, whether or not it was asked."""
        return members.tell(self.servers, WithdrawJoin(self.proposal_id, self.parameters, self.worker.member_id))


@dataclass(slots=True)
class Joins:
    """All joins in progress. Each proposal has its own number, which identifies late answers."""

    _registry: Registry
    _members: Membership
    alignment: Alignment
    _next_id: int
    _by_worker: dict[tuple[str, str], Join] = field(default_factory=dict)
    #: Joins that all servers have accepted, for as long as their workers are members.
    _admitted: dict[tuple[str, str], Join] = field(default_factory=dict)
    #: Ordered sets that all workers trained when each of these sets last had members; empty if workers differed.
    _shared: tuple[str, ...] = ()
    #: Highest step in a refusal, by ordered set, while none has members. Heartbeats may report it later.
    _passed: dict[str, int] = field(default_factory=dict)

    def validate(self) -> None:
        for join in self._by_worker.values():
            assert self._members.is_live(*join.worker.identity), "a dead worker joins"
            assert self._get(join).entry.ready and (join.missing or join.together), "a join that is over"

    def waits(self) -> Iterator[Wait]:
        for join in self._by_worker.values():
            calls = [call for call, worker in self._get(join).creators.items() if worker == join.worker]
            if not join.missing:
                continue
            reason = f"for {name_some(join.missing)} to agree on step {join.proposed_step} of {join.parameters!r}"
            yield f"join {join.parameters} {join.worker.member_id}", calls, reason
        yield from self._held_waits()

    def _held_waits(self) -> Iterator[Wait]:
        """Yield the waits of workers that join all ordered sets, and are not proposed yet."""
        reason = "for the other workers to reach the start of an iteration"
        if not self.alignment.is_opened:
            reason = "for another worker to join all of its sets, and to reach the start of an iteration"
        for worker_id in [who.removeprefix(_PREFIX) for who in self.alignment.wants(_PREFIX)]:
            if not self._together(worker_id):
                creators = [item for p in self._ordered() for item in p.creators.items()]
                yield f"join {worker_id}", [call for call, worker in creators if worker.member_id == worker_id], reason

    def clear(self) -> None:
        """Drop all joins without notifying the servers, because the parameter sets are no longer placed."""
        self._by_worker.clear()
        self._admitted.clear()
        self._shared, self._passed = (), {}

    def join(self, p: ParameterSet, call: int, worker: Member) -> list[Effect]:
        """Start a join for the worker of ``call``, unless it is a member or is joining already."""
        if p.member(worker) is not None or (p.name, worker.member_id) in self._by_worker:
            return []
        consistency = p.entry.spec.consistency
        resume = _resumable(p, worker, p.resumes.get(call))
        if isinstance(consistency, ASP) or not p.entry.shards:
            return [_admit(p, _member(worker, 0, resume), worker)]
        if self._is_joined_together(p, call, worker):
            self.alignment.want(_PREFIX + worker.member_id)
            return []
        # Only servers know the clocks. The first one to refuse reports the slowest worker's clock.
        start = _common_start(p, p.version)
        first_step = 0
        if isinstance(consistency, BSP):
            first_step = p.version + FIRST_DISTANCE if start is None else start
        exact = isinstance(consistency, BSP) and resume is not None
        join = Join(p.name, worker, _route(p.entry), first_step, resume=resume, exact=exact)
        self._by_worker[p.name, worker.member_id] = join
        return self._propose(join)

    def _is_joined_together(self, p: ParameterSet, call: int, worker: Member) -> bool:
        """Return True if a worker joins all ordered sets together.

        A worker that returns to sets without members joins them one by one if it is alone. Others that return meanwhile
        wait until it has joined all of them, and can then be aligned with it.
        """
        alignment = self.alignment
        is_emptied = not alignment.is_opened and self._shared == alignment.known_names
        if not (is_emptied and p.name in self._shared and call in p.resumes):
            return alignment.applies and p.name in alignment.names
        return len(self._members.workers) > 1 and worker.identity not in self._entering()

    def _entering(self) -> set[Identity]:
        """Return the workers that join the ordered sets one by one, or have joined some, while one has no members."""
        joined = {m.identity for p in self._ordered() for m in p.entry.members}
        pending = (join for join in self._by_worker.values() if join.parameters in self._shared and not join.together)
        return joined | {join.worker.identity for join in pending}

    def on_session(self, server: str) -> list[Effect]:
        """Ask a server with a new session about every join. Its acceptances ended with the previous session."""
        effects: list[Effect] = []
        for join in self._by_worker.values():
            if server in join.servers:
                join.accepted.pop(server, None)
                effects += join.ask(server, self._members)
        return effects

    def on_answer(self, event: JoinAnswered) -> list[Effect]:
        """Process a server's answer. Once all servers have accepted, the worker is a member."""
        server = self._members.sessions.member_of(event.call)
        join = next((join for join in self._by_worker.values() if join.proposal_id == event.proposal_id), None)
        if join is None or server not in join.servers:
            return []
        if not event.accepted:
            return self._on_refused(join, event.version_max)
        join.accepted[server] = None
        joins = self._together(join.worker.member_id) if join.together else [join]
        if any(join.missing for join in joins):
            return []
        for one in joins:
            self._admitted[one.key] = self._by_worker.pop(one.key)
        return [_admit(self._get(one), one.member, one.worker) for one in joins]

    def check(self) -> list[Effect]:
        """Withdraw joins whose worker is gone or no longer asks, and restart those whose shards have other primaries.

        The new primary does not know about proposals that the old one accepted.
        """
        effects: list[Effect] = []
        if self.alignment.is_opened:
            self._shared, self._passed = self.alignment.names if self.alignment.applies else (), {}
        for key, join in list(self._admitted.items()):
            if not self._members.is_live(*join.worker.identity):
                del self._admitted[key]
                effects += join.withdraw(self._members)
        effects += self._check_together()
        for join in [join for join in self._by_worker.values() if not join.together]:
            p = self._get(join)
            if not self._members.is_live(*join.worker.identity) or join.worker not in p.creators.values():
                del self._by_worker[join.parameters, join.worker.member_id]
                effects += join.withdraw(self._members)
            elif join.route != (route := _route(p.entry)):
                effects += self._reroute(join, route, p.version)
        return effects

    def _check_together(self) -> list[Effect]:
        """Propose the position where all workers are held to the servers of all ordered sets, for each joiner."""
        effects: list[Effect] = []
        for worker_id in [who.removeprefix(_PREFIX) for who in self.alignment.wants(_PREFIX)]:
            joins, worker = self._together(worker_id), self._members.get(worker_id)
            missing = [p for p in self._ordered() if worker is not None and p.member(worker) is None]
            is_asked = any(creator == worker for p in missing for creator in p.creators.values())
            if worker is None or not self._members.is_live(*worker.identity) or not is_asked:
                self.alignment.release(_PREFIX + worker_id)
                effects += self._drop(joins)
            elif any(join.worker != worker or join.route != _route(self._get(join).entry) for join in joins):
                effects += self._drop(joins)
            if (vector := self._vector()) is None or self._together(worker_id):
                continue
            if worker is not None and _PREFIX + worker_id in self.alignment.wants(_PREFIX):
                effects += self._propose_together(missing, worker, vector)
        return effects

    def _propose_together(
        self, missing: Sequence[ParameterSet], worker: Member, vector: Mapping[str, int]
    ) -> list[Effect]:
        effects: list[Effect] = []
        for p in missing:
            join = Join(p.name, worker, _route(p.entry), vector[p.name], together=True)
            self._by_worker[join.key] = join
            effects += self._propose(join)
        return effects

    def _vector(self) -> Mapping[str, int] | None:
        """Return the step of each set at which workers may join all of them; None while that is unknown."""
        if self.alignment.is_opened:
            return self.alignment.vector
        if self._entering():
            return None
        starts = {p.name: _common_start(p, max(p.version, self._passed.get(p.name, 0))) for p in self._ordered()}
        known = {name: start for name, start in starts.items() if start is not None}
        return known if len(known) == len(starts) else None

    def _ordered(self) -> list[ParameterSet]:
        names = self.alignment.names if self.alignment.is_opened else self._shared
        return [p for p in self._registry.all if p.name in names]

    def _together(self, worker_id: str) -> list[Join]:
        return [join for join in self._by_worker.values() if join.together and join.worker.member_id == worker_id]

    def _drop(self, joins: Sequence[Join]) -> list[Effect]:
        for join in joins:
            del self._by_worker[join.key]
        return [effect for join in joins for effect in join.withdraw(self._members)]

    def _on_refused(self, join: Join, version_max: int) -> list[Effect]:
        if join.together:
            self._passed[join.parameters] = max(version_max, self._passed.get(join.parameters, 0))
            self.alignment.restart()
            return self._drop(self._together(join.worker.member_id))
        withdrawn = join.withdraw(self._members)
        is_untried = join.exact
        if join.exact:  # A slice passed this step without the push, which is therefore dropped.
            join.exact, join.resume = False, None
        return withdrawn + self._propose_later(join, version_max, is_untried=is_untried)

    def _reroute(self, join: Join, route: Route, version: int) -> list[Effect]:
        withdrawn = join.withdraw(self._members)
        join.route = route
        start = _common_start(self._get(join), version)
        if join.exact or (start is not None and start <= join.first_step):
            return withdrawn + self._propose(join)
        return withdrawn + self._propose_later(join, version)

    def _propose_later(self, join: Join, version_max: int, *, is_untried: bool = False) -> list[Effect]:
        """Propose a later step. is_untried: ``first_step`` was not proposed yet."""
        join.attempt += 1
        start = _common_start(self._get(join), version_max)
        if start is not None and (is_untried or start > join.first_step):
            join.first_step = start
            return self._propose(join)
        # The cap also limits the exponent: an attempt that never succeeds must not grow numbers without bound.
        distance = min(DISTANCE_MAX, 1 << min(join.attempt, DISTANCE_MAX.bit_length()))
        join.first_step = max(version_max, join.first_step - FIRST_DISTANCE) + distance
        return self._propose(join)

    def _propose(self, join: Join) -> list[Effect]:
        self._next_id += 1
        join.proposal_id = self._next_id
        join.accepted.clear()
        # Servers without a session are asked when theirs opens.
        return [effect for server in join.servers for effect in join.ask(server, self._members)]

    def _get(self, join: Join) -> ParameterSet:
        p = self._registry.get(join.parameters)
        assert p is not None, "a placed parameter set is kept"
        return p


def _admit(p: ParameterSet, member: ParametersMember, worker: Member) -> LogEvent:
    departed = tuple(other for other in p.entry.departed if other.worker_id != member.worker_id)
    p.change(members=p.with_member(member), departed=departed)
    continued = f" and continues as incarnation {member.origin}" if member.origin else ""
    text = f"{worker} joins {p.name!r} at step {member.first_step}{continued}"
    return LogEvent(text, kind="join", peer=member.worker_id)


def _common_start(p: ParameterSet, version: int) -> int | None:
    """Return the step at which a joiner and all members begin; None if one has begun already.

    Without members this is ``version``, so that no step is left without pushes. SSP has no such step: its servers hold
    nothing, and a joiner must not be behind workers that continue meanwhile.
    """
    if not isinstance(p.entry.spec.consistency, BSP):
        return None
    start = max((member.first_step for member in p.entry.members), default=version)
    return start if version <= start else None


def _resumable(p: ParameterSet, worker: Member, resume: ResumePush | None) -> ResumePush | None:
    """Return ``resume`` if the servers know their part of that push. In BSP they answer this when they are asked."""
    if resume is None or resume.generation != p.entry.generation:
        return None
    if isinstance(p.entry.spec.consistency, BSP):
        return resume
    wanted = (worker.member_id, resume.origin)
    return resume if any(member.producer == wanted for member in p.entry.departed) else None


def _route(entry: ParametersEntry) -> Route:
    return tuple((shard.primary, shard.term) for shard in entry.shards)


def _member(worker: Member, first_step: int, resume: ResumePush | None) -> ParametersMember:
    """Return the member entry of a worker that joins at ``first_step``, continuing a push if it has one."""
    origin, number = (resume.origin, resume.number) if resume is not None else (0, 0)
    return ParametersMember(worker.member_id, worker.incarnation, worker.rank, first_step, origin, number)
