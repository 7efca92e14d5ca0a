"""The life of parameter sets: gathering, uploading, ready; and which workers take part in them. Pure.

* gathering: no shard is placed. Callers wait until the servers and workers of the run are there and every live worker
  has asked for this parameter set. So "the values of the lowest rank count" means the same in every order of arrival.
* uploading: placed and in the map. The creator of the lowest rank uploads its values to the servers and commits. If it
  is lost, the next one does. Then every shard gets its backups. A parameter set of the snapshot from which the run goes
  on is loading instead: its primaries load it, and all creators wait (``restore_point``).
* ready: later creators join: in ASP at once, else at a step or clock to which all servers agree (``join_proposals``).

A parameter set with a lost shard is lost, and its callers get an error. When the run rolls back, all parameter sets
gather again; nothing else returns to that state.

Invariants: all waiting creators have the same settings and layout. Members are live workers. Otherwise ``ready`` is
never undone, and ``committed`` only before ``ready``.

Not here: who holds a shard (``replicas``, ``replica_manager``), epochs (``cluster``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from psdist.consistency import ASP, BSP
from psdist.errors import (
    ClosedError,
    LimitExceededError,
    NotMemberError,
    PsdistError,
    ServerLostError,
    StaleEpochError,
    UnknownParametersError,
)
from psdist.types import ParametersEntry, ParametersMember, Replica, Shard, check_name
from psdist.wire.limits import PARAMETERS_MAX
from psdist_scheduler.events.cluster_events import (
    Answer,
    CommitParameters,
    Create,
    Describe,
    Described,
    Done,
    Effect,
    LogEvent,
    ParametersReady,
    Refuse,
    Upload,
)
from psdist_scheduler.events.records import ClusterSettings, Member, ParametersRecord, name_some
from psdist_scheduler.events.snapshot_events import Loaded
from psdist_scheduler.events.worker_events import ResumePush
from psdist_scheduler.members.demand import Demand
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement import join_proposals, placement, replicas
from psdist_scheduler.placement.join_proposals import FIRST_DISTANCE, Join, Joins, Route
from psdist_scheduler.placement.parameters import ParameterSet
from psdist_scheduler.placement.restore_point import SERVERS_GRACE_SECONDS, WORKERS_GRACE_SECONDS, Resume

#: How to go on when shards are lost.
REMEDY = (
    "restart the run; with --replicas 2 a lost server costs nothing, and with --storage-path a run goes back to its "
    "last snapshot by itself"
)
#: A restarted scheduler numbers its proposals from its epoch on, so that no earlier number comes again.
_PROPOSALS_PER_EPOCH = 1 << 20


class Registry:
    """All parameters of the run."""

    def __init__(
        self,
        settings: ClusterSettings,
        records: tuple[ParametersRecord, ...],
        epoch: int,
        now: float,
        demand: Demand,
        resume: Resume,
    ) -> None:
        self._demand = demand
        self.resume = resume
        self._all: dict[str, ParameterSet] = {}
        for record in records:
            name = record.entry.spec.name
            self._all[name] = ParameterSet(name, now, record, record.entry.spec, record.layout, placed_epoch=epoch - 1)
        #: In the order in which they were placed, which is the map's and the store's.
        self._placed = [record.entry.spec.name for record in records]
        self._join_grace = settings.join_grace_seconds
        self._replicas = settings.replicas
        self._joins = Joins(epoch * _PROPOSALS_PER_EPOCH)
        #: Names of placed parameters that changed since the cluster last took them.
        self.changed: dict[str, None] = {}
        #: Names of parameters that went back to gathering since then.
        self.forgotten: dict[str, None] = {}

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def all(self) -> tuple[ParameterSet, ...]:
        """Parameters in the order in which they were first asked for."""
        return tuple(self._all.values())

    @property
    def entries(self) -> tuple[ParametersEntry, ...]:
        """What the cluster map shows."""
        return tuple(self._all[name].entry for name in self._placed)

    def get(self, name: str) -> ParameterSet | None:
        """The parameters of this name, if anybody asked for them."""
        return self._all.get(name)

    def record(self, name: str) -> ParametersRecord:
        """The record of placed parameters."""
        return self._all[name].placed

    def lost(self, p: ParameterSet) -> str:
        """A sentence about the shards that are lost with their servers; empty if none are."""
        gone: dict[str, list[int]] = {}
        for number, shard in enumerate(p.entry.shards if p.record else ()):
            if shard.lost:
                gone.setdefault(shard.primary.server_id, []).append(number)
        return "; ".join(f"{owner} held {name_shards(numbers)} of {p.name!r} alone" for owner, numbers in gone.items())

    @property
    def lost_text(self) -> str:
        """One sentence about all that is lost and how to go on; empty if nothing is."""
        lost = [text for p in self._all.values() if (text := self.lost(p))]
        return f"lost: {'; '.join(lost)}; {REMEDY}" if lost else ""

    @property
    def base_in_use(self) -> str:
        """Directory of the snapshot that parameters are still to be loaded from; empty if there is none."""
        restore, found = self.resume.base.restore, self.resume.found
        if restore is None:
            return ""
        names = found.manifest.steps if found is not None else [entry.spec.name for entry in self.entries]
        states = [self._all[name].state if name in self._all else "" for name in names]
        return "" if found is not None and all(state == "ready" for state in states) else restore.directory

    @property
    def lost_owners(self) -> frozenset[str]:
        """Ids of servers that lost shards lay on."""
        return frozenset(shard.primary.server_id for entry in self.entries for shard in entry.shards if shard.lost)

    def shorthanded(self, p: ParameterSet) -> dict[str, list[int]]:
        """Shards with fewer complete copies than wanted, by the server that is to hold the next; "" if none is."""
        short: dict[str, list[int]] = {}
        for number, shard in enumerate(p.entry.shards if p.record else ()):
            if not shard.lost and len(replicas.complete(shard)) < self._replicas:
                short.setdefault(shard.filling[0].server_id if shard.filling else "", []).append(number)
        return short

    # --- requests -----------------------------------------------------------------------------------------------------

    def create(self, event: Create, worker: Member, now: float) -> list[Effect]:
        """A worker wants to take part. Raises LayoutMismatchError, SettingsMismatchError, LimitExceededError,
        ServerLostError."""
        p = self._all.get(event.spec.name)
        if p is not None:
            self._check_lost(p)
            p.check_same(event)
        self.resume.check(event.spec, event.layout)
        if p is None or p.spec is None:
            placement.choose_slicing(event.layout.total, event.spec.slice_elements)
            p = p or self._open(event.spec.name, now)
            p.spec, p.layout, p.author = event.spec, event.layout, str(worker)
        effects = _end_older(p.creators, worker)
        p.creators[event.call] = worker
        if event.resume is not None:
            p.resumes[event.call] = event.resume
        return effects

    def describe(self, event: Describe, worker: Member, now: float) -> list[Effect]:
        """A worker wants to know the parameters. Raises InvalidNameError, LimitExceededError, ServerLostError."""
        name = check_name(event.parameters, "parameters name")
        p = self._all.get(name)
        if p is not None:
            self._check_lost(p)
        else:
            p = self._open(name, now)
        effects = _end_older(p.describers, worker)
        p.describers[event.call] = worker
        return effects

    def commit(self, event: CommitParameters, worker: Member, now: float) -> list[Effect]:
        """The values are uploaded. Raises UnknownParametersError, NotMemberError."""
        name = event.parameters
        p = self._all.get(name)
        if p is None or p.record is None:
            raise UnknownParametersError(f"no parameters {name!r:.80} wait for values: create them first", name=name)
        if p.record.uploader != worker.member_id or p.member(worker) is None:
            raise NotMemberError(
                f"{worker} was not asked for the values of {name!r}: {p.record.uploader or 'nobody'} was", name=name
            )
        if not p.record.committed and event.epoch < p.placed_epoch:
            p.upload_call = 0
            text = f"a server is gone that had values of {name!r} since epoch {event.epoch}: upload them again"
            return [Refuse(event.call, StaleEpochError(text, epoch=p.placed_epoch))]
        effects: list[Effect] = [Answer(event.call, Done())]
        if not p.record.committed:
            p.record = replace(p.record, committed=True)
            self.changed[p.name] = None
            p.since = now
            effects.append(LogEvent(f"{worker} uploaded the values of {name!r}"))
        return effects

    def loaded(self, event: Loaded, server: str, now: float) -> list[Effect]:
        """A server has loaded shards from the snapshot."""
        p = self._all.get(event.parameters)
        if p is None or p.record is None or p.record.committed or not self.resume.loaded(event, server, p.entry):
            return []
        p.record = replace(p.record, committed=True)
        self.changed[p.name] = None
        p.since = now
        return [LogEvent(f"parameters {p.name!r} are loaded")]

    def reset_to_gathering(self) -> None:
        """All parameters are to be placed anew, by those who are there or come: the run went back to a snapshot."""
        for name in self._placed:
            p = self._all[name]
            p.record, p.upload_call, p.first_version = None, 0, 0
            p.versions.clear()
            self.forgotten[name] = None
        self._placed.clear()
        self.changed.clear()
        self._joins.clear()
        for p in list(self._all.values()):
            if p.record is None and not p.creators:
                p.spec = p.layout = None
                if not p.describers:
                    del self._all[p.name]

    def replace_shards(self, name: str, shards: tuple[Shard, ...], epoch: int) -> None:
        """Values are gone before they were ready: they are asked for again. ``epoch`` shows where they go."""
        p = self._all[name]
        assert not p.entry.ready
        p.placed_epoch, p.upload_call = epoch, 0
        p.record = replace(p.placed, committed=False)
        self._change(p, shards=shards)

    def set_shards(self, name: str, shards: tuple[Shard, ...]) -> None:
        """Other servers hold what the parameters have."""
        self._change(self._all[name], shards=shards)

    def end(self, call: int) -> None:
        """The call does not wait any more."""
        for p in list(self._all.values()):
            p.creators.pop(call, None)
            p.resumes.pop(call, None)
            p.describers.pop(call, None)
            if p.record is None and not p.creators:
                p.spec = p.layout = None
                if not p.describers:
                    del self._all[p.name]

    # --- what servers say ---------------------------------------------------------------------------------------------

    def versions(self, server: str, epoch: int, versions: tuple[tuple[str, int], ...]) -> None:
        """Highest versions by parameters, from a server's heartbeat by the map of ``epoch``."""
        for name, version in versions:
            p = self._all.get(name)
            if p is None or p.record is None or epoch < p.counted_from:
                continue
            if server in p.entry.primaries:
                p.versions[server] = version

    def server_session(self, server: str, members: Membership) -> list[Effect]:
        """A server's session opened: it is asked about every join. What it had accepted ended with its last session."""
        effects: list[Effect] = []
        for join in self._joins:
            if server in join.servers:
                join.accepted.pop(server, None)
                effects += join.ask(server, members)
        return effects

    def join_answered(
        self, server: str, proposal_id: int, accepted: bool, version_max: int, members: Membership
    ) -> list[Effect]:
        """A server's answer to a proposal."""
        join, effects = self._joins.answered(server, proposal_id, accepted, version_max, members)
        if join is not None:
            effects.append(self._admit(self._all[join.parameters], join.member, join.worker))
        return effects

    # --- progress -----------------------------------------------------------------------------------------------------

    def progress(self, members: Membership, epoch: int, now: float) -> list[Effect]:
        """Whatever the present members and calls allow. ``epoch``: the one that will show it."""
        effects: list[Effect] = []
        for p in list(self._all.values()):
            if members.changed:
                self._drop_members(p, members)
            if lost := self.lost(p):
                effects += self._refuse_all(p, lost)
            elif p.record is None:
                effects += self._gather(p, members, epoch, now)
        effects += self._check_joins(members)
        for p in self._all.values():
            if p.record is not None and not self.lost(p):
                effects += self._complete(p, members)
                if p.entry.ready:
                    effects += self._serve(p, members, now)
                else:
                    effects += self._upload(p, members) if p.entry.restore is None else self._load(p)
        return effects

    def waits(self, members: Membership, now: float) -> Iterator[tuple[str, list[int], str]]:
        """Key, calls and reason of each wait."""
        for p in self._all.values():
            calls = [call for call in (*p.creators, *p.describers) if call != p.upload_call]
            if p.record is None:
                yield f"parameters {p.name}", calls, self._missing(p, members, now)
            elif p.record.committed and not p.entry.ready:
                yield f"parameters {p.name}", [*p.creators, *p.describers], self._copies_text(p)
            elif not p.entry.ready and not _has_place(p, members):
                shortage = self._demand.shortage() or f"for a server to register that can hold {p.name!r}"
                yield f"parameters {p.name}", [*p.creators, *p.describers], shortage
            elif p.state == "loading":
                yield f"parameters {p.name}", calls, self._load_text(p)
            elif not p.entry.ready and calls:
                who = p.record.uploader or "a worker"
                yield f"parameters {p.name}", calls, f"for {who} to upload the initial values of {p.name!r}"
        for join in self._joins:
            calls = [c for c, w in self._all[join.parameters].creators.items() if w == join.worker]
            servers = name_some(join.missing)
            reason = f"for {servers} to agree on step {join.proposed_step} of {join.parameters!r}"
            yield f"join {join.parameters} {join.worker.member_id}", calls, reason

    def validate(self, members: Membership) -> None:
        """Asserts the invariants of the module's text."""
        for p in self._all.values():
            assert p.record is not None or p.creators or p.describers, f"{p.name} is kept for nobody"
            assert (p.spec is None) == (p.record is None and not p.creators), f"{p.name} has nobody's settings"
            if p.record is None:
                continue
            entry, ids = p.entry, [m.worker_id for m in p.entry.members]
            assert all(members.is_live(m.worker_id, m.incarnation) for m in entry.members), f"{p.name}: a dead member"
            assert len(set(ids)) == len(ids), f"{p.name}: one member twice"
            assert [m.rank for m in entry.members] == sorted(m.rank for m in entry.members), f"{p.name}: order"
            assert entry.spec.slice_elements > 0
            assert p.record.committed or not entry.ready, f"{p.name}: ready without values"
            assert p.record.committed or p.record.uploader in ("", *ids), f"{p.name}: uploader {p.record.uploader}"
            assert (p.name in self._placed) == (p.record is not None)
        for join in self._joins:
            assert members.is_live(join.worker.member_id, join.worker.incarnation), "a dead worker joins"
            assert self._all[join.parameters].entry.ready and join.missing, "a join that is over"

    # --- inner: requests ----------------------------------------------------------------------------------------------

    def _open(self, name: str, now: float) -> ParameterSet:
        if len(self._all) >= PARAMETERS_MAX:
            raise LimitExceededError(f"{PARAMETERS_MAX} parameters exist, which is the limit: put tensors together")
        return self._all.setdefault(name, ParameterSet(name, now))

    def _check_lost(self, p: ParameterSet) -> None:
        if lost := self.lost(p):
            raise _lost_error(lost)

    def _change(self, p: ParameterSet, *, uploader: str | None = None, **changes: object) -> None:
        record = p.placed
        entry = replace(record.entry, **changes)  # type: ignore[arg-type]
        p.record = replace(record, entry=entry, uploader=record.uploader if uploader is None else uploader)
        self.changed[p.name] = None

    # --- inner: gathering ---------------------------------------------------------------------------------------------

    def _missing(self, p: ParameterSet, members: Membership, now: float) -> str:
        if self.resume.unread:
            return "for the storage to be read"
        if shortage := self._shortage(members, now):
            return shortage
        called = {worker.member_id for worker in (*p.creators.values(), *p.describers.values())}
        if absent := [worker for worker in members.workers if worker.member_id not in called]:
            return f"for {name_some(absent)} to create {p.name!r}"
        if not p.creators:
            return f"for a worker to create {p.name!r}"
        if now - members.last_joined < self._join_grace:
            return f"for more workers to register (join grace {self._join_grace:g} s)"
        return ""

    def _shortage(self, members: Membership, now: float) -> str:
        """Members that are missed. Who was done when the run went back to a snapshot does not come again; others are
        waited for a while, then those count that are there."""
        since = self.resume.since
        if since is None:
            return self._demand.shortage()
        servers = None if now - since < SERVERS_GRACE_SECONDS else self._replicas
        workers = None if now - since < WORKERS_GRACE_SECONDS else 1
        return self._demand.shortage(begun=True, servers=servers, workers=workers)

    def _gather(self, p: ParameterSet, members: Membership, epoch: int, now: float) -> list[Effect]:
        if p.spec is None or p.layout is None or self._missing(p, members, now):
            return []
        try:  # It may be another snapshot than when they asked, or none was known.
            self.resume.check(p.spec, p.layout)
        except PsdistError as error:
            return self._refuse_creators(p, error)
        servers = {server.member_id: server.incarnation for server in members.staying}
        saved = self.resume.state(p.name)
        slicing = placement.choose_slicing(p.layout.total, (saved.spec if saved else p.spec).slice_elements)
        owners = placement.place(slicing, list(servers), placement.held_elements(self.entries))
        base = self.resume.base
        shards = tuple(Shard(Replica(owner, servers[owner]), base.term) for owner in owners)
        first, resets = self.resume.first_step(p.spec), self.resume.resets(p.spec)
        creators = sorted(p.creators.values(), key=lambda worker: worker.rank)
        entry = ParametersEntry(
            spec=replace(p.spec, slice_elements=slicing.slice_elements),
            total=p.layout.total,
            shards=shards,
            members=tuple(ParametersMember(w.member_id, w.incarnation, w.rank, first) for w in creators),
            ranges=placement.group_ranges(p.layout, p.spec.optimizer.overrides),
            layout_digest=p.layout.digest,
            reference_workers=len(creators) if saved is None else saved.reference_workers,
            restore=None if saved is None or base.restore is None else replace(base.restore, weights_only=resets),
            generation=base.generation,
            state_since=0 if saved is None else saved.version_min if resets else saved.state_since,
        )
        p.record = ParametersRecord(entry, p.layout, creators[0].member_id if saved is None else "")
        p.spec, p.since = entry.spec, now
        # Servers may still speak of what they held before the run went back.
        p.counted_from = epoch if base.generation else 0
        p.first_version = 0 if saved is None else saved.step
        self._placed.append(p.name)
        self.changed[p.name] = None
        text = (
            f"{p.layout.total} elements in {slicing.count} slices, {len(shards)} shards on {len(set(owners))} servers"
        )
        text = f"{text}, {len(creators)} members"
        if saved is not None and base.restore is not None:
            text = f"{text}; they go on from step {saved.step} of snapshot {base.restore.directory}"
        notice = self.resume.notice(entry)
        return [LogEvent(f"parameters {p.name!r} placed: {text}"), *([LogEvent(notice)] if notice else [])]

    # --- inner: uploading and after -----------------------------------------------------------------------------------

    def _complete(self, p: ParameterSet, members: Membership) -> list[Effect]:
        """Ready is what has its values, and these in as many copies as wanted."""
        if p.entry.ready or not p.placed.committed or self.shorthanded(p) or not _has_place(p, members):
            return []
        self._change(p, ready=True)
        return [LogEvent(f"parameters {p.name!r} are ready")]

    def _copies_text(self, p: ParameterSet) -> str:
        short = self.shorthanded(p)
        server, numbers = next(iter(short.items()), ("", []))
        who = server or "another server"
        return f"for {who} to hold a copy of {name_shards(numbers)} of {p.name!r}"

    def _upload(self, p: ParameterSet, members: Membership) -> list[Effect]:
        """Nothing was trained yet: whoever comes now is a member from the first step on."""
        effects: list[Effect] = []
        for call, worker in p.creators.items():
            if p.member(worker) is None:
                member = ParametersMember(worker.member_id, worker.incarnation, worker.rank)
                self._change(p, members=_with(p.entry.members, member))
            if not p.placed.uploader:
                self._change(p, uploader=p.entry.members[0].worker_id)
            asked = call == p.upload_call or p.placed.committed or not _has_place(p, members)
            if worker.member_id == p.placed.uploader and not asked:
                p.upload_call = call
                effects.append(Answer(call, Upload()))
        return effects

    def _load(self, p: ParameterSet) -> list[Effect]:
        """Nothing was trained since the snapshot: whoever comes now is a member from its step on."""
        if not self.resume.unread:
            for worker in p.creators.values():
                if p.member(worker) is None:
                    first = self.resume.first_step(p.entry.spec)
                    member = ParametersMember(worker.member_id, worker.incarnation, worker.rank, first)
                    self._change(p, members=_with(p.entry.members, member))
        return []

    def _load_text(self, p: ParameterSet) -> str:
        server, numbers = next(iter(self.resume.missing(p.entry).items()), ("", []))
        return f"for {server} to load {name_shards(numbers)} of {p.name!r} from the snapshot"

    def _serve(self, p: ParameterSet, members: Membership, now: float) -> list[Effect]:
        described = Described(p.entry.spec, p.placed.layout)
        effects: list[Effect] = [Answer(call, described) for call in p.describers]
        p.describers.clear()
        for call, worker in list(p.creators.items()):
            if p.member(worker) is None and not self._joins.has(p.name, worker.member_id):
                effects += self._join(p, call, worker, members, now)
        for call, worker in list(p.creators.items()):
            if member := p.member(worker):
                del p.creators[call]
                ready = ParametersReady(member.first_step, bool(member.origin), self.resume.notice(p.entry))
                effects.append(Answer(call, ready))
        return effects

    def _join(self, p: ParameterSet, call: int, worker: Member, members: Membership, now: float) -> list[Effect]:
        consistency = p.entry.spec.consistency
        resume = self._resumable(p, worker, p.resumes.get(call))
        if isinstance(consistency, ASP) or not p.entry.shards:
            return [self._admit(p, join_proposals.make_member(worker, 0, resume), worker)]
        # Without members nobody moves the slices on: the joiner begins as early as it can.
        distance = FIRST_DISTANCE if p.entry.members else 1
        # Clocks are known to the servers alone: the first to refuse says where the slowest is.
        first_step = p.version + distance if isinstance(consistency, BSP) else 0
        exact = isinstance(consistency, BSP) and resume is not None
        join = Join(p.name, worker, _route(p.entry), first_step, now, resume=resume, exact=exact)
        return self._joins.start(join, members)

    @staticmethod
    def _resumable(p: ParameterSet, worker: Member, resume: ResumePush | None) -> ResumePush | None:
        """``restore_point`` if the servers know what they have of that push: in BSP they say so when they are asked."""
        if resume is None or resume.generation != p.entry.generation:
            return None
        if isinstance(p.entry.spec.consistency, BSP):
            return resume
        wanted = (worker.member_id, resume.origin)
        return resume if any(member.producer == wanted for member in p.entry.departed) else None

    def _admit(self, p: ParameterSet, member: ParametersMember, worker: Member) -> LogEvent:
        departed = tuple(other for other in p.entry.departed if other.worker_id != member.worker_id)
        self._change(p, members=_with(p.entry.members, member), departed=departed)
        goes_on = f", and goes on as incarnation {member.origin}" if member.origin else ""
        return LogEvent(f"{worker} joins {p.name!r} at step {member.first_step}{goes_on}")

    def _check_joins(self, members: Membership) -> list[Effect]:
        """Joins whose worker is gone, or asks no more, are withdrawn; those whose shards have other primaries now begin
        anew: what the old primary accepted, the new one does not know."""
        effects: list[Effect] = []
        for join in self._joins:
            if not self._wanted(join, members):
                effects += self._joins.stop(join, members)
            elif join.route != (route := _route(self._all[join.parameters].entry)):
                effects += self._joins.reroute(join, route, self._all[join.parameters].version, members)
        return effects

    def _wanted(self, join: Join, members: Membership) -> bool:
        alive = members.is_live(join.worker.member_id, join.worker.incarnation)
        return alive and join.worker in self._all[join.parameters].creators.values()

    # --- inner: losses ------------------------------------------------------------------------------------------------

    def _drop_members(self, p: ParameterSet, members: Membership) -> None:
        """Removes workers that are gone, and calls of theirs."""
        for calls in (p.creators, p.describers):
            for call, worker in list(calls.items()):
                if not members.is_live(worker.member_id, worker.incarnation):
                    self.end(call)
        if p.record is None:
            return
        left = tuple(m for m in p.entry.members if members.is_live(m.worker_id, m.incarnation))
        if left == p.entry.members:
            return
        gone = p.placed.uploader not in {m.worker_id for m in left}
        next_uploader = left[0].worker_id if left and p.entry.restore is None else ""
        uploader = next_uploader if gone and not p.placed.committed else None
        self._change(p, members=left, departed=p.departed(members), uploader=uploader)

    def _refuse_creators(self, p: ParameterSet, error: PsdistError) -> list[Effect]:
        """They cannot have what they asked for; others may."""
        effects: list[Effect] = [Refuse(call, error) for call in p.creators]
        for call in list(p.creators):
            self.end(call)
        return effects

    def _refuse_all(self, p: ParameterSet, lost: str) -> list[Effect]:
        effects: list[Effect] = [Refuse(call, _lost_error(lost)) for call in (*p.creators, *p.describers)]
        p.creators.clear()
        p.describers.clear()
        return effects


def _has_place(p: ParameterSet, members: Membership) -> bool:
    """Whether there are servers that values can be put on: all may have gone before there were any."""
    return all(members.is_live(s.primary.server_id, s.primary.incarnation) for s in p.entry.shards)


def _route(entry: ParametersEntry) -> Route:
    return tuple((shard.primary, shard.term) for shard in entry.shards)


def _with(members: tuple[ParametersMember, ...], member: ParametersMember) -> tuple[ParametersMember, ...]:
    return tuple(sorted((*members, member), key=lambda m: m.rank))


def _end_older(calls: dict[int, Member], worker: Member) -> list[Effect]:
    """Ends an earlier call of the same worker for the same thing: it asks again because that one broke."""
    older = [call for call, other in calls.items() if other.member_id == worker.member_id]
    for call in older:
        del calls[call]
    text = f"{worker} asked again on a newer call, which replaces this one"
    return [Refuse(call, ClosedError(text)) for call in older]


def _lost_error(lost: str) -> ServerLostError:
    return ServerLostError(f"{lost} and is gone, and with it what it held: {REMEDY}")


def name_shards(numbers: Sequence[int]) -> str:
    """ "shard 3", "shards 1, 2", "shards 0, 1, 2, 3 and 12 more"."""
    some = ", ".join(str(number) for number in numbers[:4])
    more = f" and {len(numbers) - 4} more" if numbers[4:] else ""
    return f"shard{'s' if numbers[1:] else ''} {some}{more}"
