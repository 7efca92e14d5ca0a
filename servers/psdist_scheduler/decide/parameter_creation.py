"""Creation of parameter sets (gathering, uploading or loading, ready), and how workers become members. Pure.

* gathering: no shard is placed. Callers wait until the servers and workers of the run are present and every live worker
  has asked for this parameter set. So "the values of the lowest rank count" means the same in every order of arrival.
* uploading: placed and in the map. The creator with the lowest rank uploads its values to the servers and commits, and
  the servers confirm them (``Commits``). If that worker is lost, the next one takes over. Then every shard gets its
  backups. A parameter set of the snapshot that the run resumes from is *loading* instead: its primaries load it, and
  all creators wait (``snapshot_catalog``).
* ready: later creators join, in ASP immediately, otherwise at a step or clock agreed by all servers
  (``joins``).

A parameter set with a lost shard is lost, and its callers get an error. When the run rolls back, all parameter sets
gather again; nothing else returns to that state.

Invariant: Members are live workers.

``shard_placement`` chooses the later holders of a shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from psdist.consistency import BSP
from psdist.errors import (
    InvalidArgumentError,
    LimitExceededError,
    NotMemberError,
    PsdistError,
    ServerLostError,
    StaleEpochError,
    UnknownParametersError,
    WorkerLeftError,
)
from psdist.optim import Override, group_of
from psdist.types import (
    SHARDS_PER_SERVER,
    GroupRange,
    Layout,
    ParametersEntry,
    ParametersMember,
    Replica,
    Shard,
    Slicing,
    check_name,
    choose_slice_elements,
)
from psdist.wire.limits import SLICES_MAX
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_events import CommitParameters, ValuesAnswered
from psdist_scheduler.decide.cluster_state import ClusterSettings, Member, ParametersRecord, name_some
from psdist_scheduler.decide.effects import Answer, CheckValues, Done, Effect, LogEvent, Refuse, refuse_older
from psdist_scheduler.decide.joins import Joins
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_sets import ParameterSet, Registry, awaited_workers, may_train, name_shards
from psdist_scheduler.decide.shard_placement import shard_elements
from psdist_scheduler.decide.snapshot_catalog import SERVERS_GRACE_SECONDS, WORKERS_GRACE_SECONDS, Resume
from psdist_scheduler.decide.snapshot_events import Loaded

#: Grace period in seconds for a worker that ended its script: it may be about to create another client.
RETURN_GRACE_SECONDS: Final = 10.0


@dataclass(slots=True)
class Creation:
    """Workers' requests for parameter sets of one run."""

    _settings: ClusterSettings
    _registry: Registry
    _resume: Resume
    _members: Membership
    joins: Joins
    commits: Commits

    # --- requests -----------------------------------------------------------------------------------------------------

    def create(self, event: ev.Create, worker: Member) -> list[ef.Effect]:
        """Add a worker's request to take part. Raises LayoutMismatchError, SettingsMismatchError, LimitExceededError
        and ServerLostError, InvalidArgumentError for a layout of another dtype and for a worker that does not train it.
        """
        if not may_train(event.spec, worker):
            raise InvalidArgumentError(
                f"{worker} has rank {worker.rank}, and workers={[*event.spec.workers]} train {event.spec.name!r}"
            )
        if event.layout.dtype != event.spec.dtype:
            raise InvalidArgumentError(f"a layout of {event.layout.dtype} for parameters of {event.spec.dtype}")
        p = self._registry.get(event.spec.name)
        if p is not None:
            if p.lost:
                raise self._lost_error(p)
            p.check_same(event)
        self._resume.check(event.spec, event.layout, self._registry.names)
        if p is None or p.spec is None:
            check_overrides(event.layout, event.spec.optimizer.overrides)
            choose_slicing(event.layout.total, event.spec.slice_elements)
        return self._registry.open(event.spec.name).add_creator(event, worker)

    def describe(self, event: ev.Describe, worker: Member) -> list[ef.Effect]:
        """Add a worker's request for a description. Raises InvalidNameError, LimitExceededError and ServerLostError."""
        p = self._registry.open(check_name(event.parameters, "parameters name"))
        if p.lost:
            raise self._lost_error(p)
        return p.add_describer(event.call, worker)

    def commit(self, event: ev.CommitParameters, worker: Member) -> list[ef.Effect]:
        """Start a commit: ask the servers to confirm the uploaded values. Raises UnknownParametersError and
        NotMemberError."""
        name = event.parameters
        p = self._registry.get(name)
        if p is None or p.record is None:
            raise UnknownParametersError(f"no parameters {name!r:.80} wait for values: create them first", name=name)
        if p.record.uploader != worker.member_id or p.member(worker) is None:
            raise NotMemberError(
                f"{worker} was not asked for the values of {name!r}: {p.record.uploader or 'nobody'} was", name=name
            )
        if p.record.committed:
            return [ef.Answer(event.call, ef.Done())]
        if event.epoch < p.placed_epoch:
            p.upload_call = 0
            text = f"a server is gone that had values of {name!r} since epoch {event.epoch}: upload them again"
            return [ef.Refuse(event.call, StaleEpochError(text, epoch=p.placed_epoch))]
        return self.commits.start(p, event, worker)

    def _check_commits(self) -> list[ef.Effect]:
        """Continue the commits in progress, and restart those whose parameter set has changed."""
        effects, changed = self.commits.check()
        for commit in changed:
            try:  # A worker that was expelled meanwhile gets only this error.
                effects += self.commit(commit.event, self._members.check_caller(commit.event.caller))
            except PsdistError as error:
                effects.append(ef.Refuse(commit.event.call, error))
        return effects

    def on_loaded(self, event: Loaded) -> list[ef.Effect]:
        p, server = self._registry.get(event.parameters), self._members.sessions.member_of(event.call)
        if p is None or p.record is None:
            return []
        # Servers report once per session, so count this even if it is needed only after another server is lost.
        are_loaded = self._resume.on_loaded(event, server, p.entry)
        if p.record.committed or not are_loaded:
            return []
        p.commit()
        return [ef.LogEvent(f"parameters {p.name!r} are loaded", kind="parameters")]

    # --- progress -----------------------------------------------------------------------------------------------------

    def progress(self, epoch: int, now: float) -> list[ef.Effect]:
        """Advance every parameter set as far as the current members and calls allow.

        epoch: the epoch that will show the changes.
        """
        effects: list[ef.Effect] = []
        for p in self._registry.all:
            if self._members.changed:
                self._drop_members(p)
            if p.lost:
                effects += self._refuse(self._lost_error(p), (*p.creators, *p.describers))
            elif p.record is None and not self._missing(p, now):
                effects += self._gather(p, epoch)
            elif p.record is None and (error := self._worker_left(p, now)):
                effects += self._refuse(error, (*p.creators, *p.describers))
        effects += self.joins.check() + self._check_commits()
        for p in self._registry.all:
            if p.record is not None and not p.lost:
                effects += self._complete(p)
                if p.entry.ready:
                    effects += self._serve(p)
                elif not self._resume.unread or p.entry.restore is None:
                    effects += self._prepare(p)
        return effects

    def waits(self, now: float) -> Iterator[ef.Wait]:
        for p in self._registry.all:
            key, calls = f"parameters {p.name}", [*p.creators, *p.describers]
            others = [call for call in calls if call != p.upload_call]
            if p.record is None:
                yield key, others, self._missing(p, now)
            elif p.entry.ready:
                continue
            elif p.record.committed:
                server, numbers = next(iter(self._registry.missing_replicas(p).items()), ("", []))
                yield (
                    key,
                    calls,
                    f"for {server or 'another server'} to hold a copy of {name_shards(numbers)} of {p.name!r}",
                )
            elif not p.has_place(self._members):
                shortage = self._members.demand.shortage()
                yield key, calls, shortage or f"for a server to register that can hold {p.name!r}"
            elif p.entry.restore is not None:
                server, numbers = next(iter(self._resume.missing(p.entry).items()), ("", []))
                yield key, others, f"for {server} to load {name_shards(numbers)} of {p.name!r} from the snapshot"
            elif others and (server := self.commits.waiting_for(p.name)):
                yield key, others, f"for {server} to confirm the initial values of {p.name!r}"
            elif others:
                who = p.record.uploader or "a worker"
                yield key, others, f"for {who} to upload the initial values of {p.name!r}"

    # --- gathering ----------------------------------------------------------------------------------------------------

    def _missing(self, p: ParameterSet, now: float) -> str:
        """Return why a parameter set cannot be placed yet, as text that begins with "for"; empty if it can."""
        if self._resume.unread:
            return "for the storage to be read"
        if shortage := self._shortage(now):
            return shortage
        called = {worker.member_id for worker in (*p.creators.values(), *p.describers.values())}
        awaited = awaited_workers(p, self._members)
        if absent := [worker for worker in awaited if worker.member_id not in called]:
            return f"for {name_some(absent)} to create {p.name!r}"
        named = p.spec.workers if p.spec is not None and self._resume.since is None else ()
        if ranks := set(named) - {worker.rank for worker in awaited}:
            return f"for a worker of rank {min(ranks)} to register, which trains {p.name!r}"
        if not p.creators:
            return f"for a worker to create {p.name!r}"
        grace = self._settings.join_grace_seconds
        waits = now - self._members.last_joined < grace
        return f"for more workers to register (join grace {grace:g} s)" if waits else ""

    def _shortage(self, now: float) -> str:
        """Return the missing members as text that begins with "for"; empty if none are missing.

        After a rollback, workers that had finished before it are not expected back. The others are awaited for a grace
        period; after that the run continues with the members that are present.
        """
        since = self._resume.since
        if since is None:
            return self._members.demand.shortage()
        servers = None if now - since < SERVERS_GRACE_SECONDS else self._settings.replicas
        patient = self._settings.time_limits_suspended or now - since < WORKERS_GRACE_SECONDS
        workers = None if patient else 1
        return self._members.demand.shortage(begun=True, servers=servers, workers=workers)

    def _worker_left(self, p: ParameterSet, now: float) -> WorkerLeftError | None:
        """Return an error if enough workers will never ask for a parameter set.

        This is so once the missing workers closed their clients after all present ones had registered, and have not
        come back.
        """
        if self._resume.since is not None:  # Workers that had finished before the rollback are not missed.
            return None
        ended = self._members.last_done
        if ended < self._members.last_joined or now - ended < RETURN_GRACE_SECONDS:
            return None
        demand = self._members.demand
        live, done, wanted = len(self._members.workers), demand.workers_done, demand.workers_min
        if not live < wanted <= live + len(done):
            return None
        names = name_some(done)
        return WorkerLeftError(
            f"{names} ended without asking for {p.name!r}, which waits for all {wanted} workers of this run: create it "
            "in every worker, before any of them ends",
            parameters=p.name,
        )

    def _gather(self, p: ParameterSet, epoch: int) -> list[ef.Effect]:
        assert p.spec is not None and p.layout is not None
        try:  # The snapshot may be another one than when they asked, or none was known then.
            self._resume.check(p.spec, p.layout, self._registry.names)
        except PsdistError as error:
            return self._refuse(error, p.creators)
        saved, base = self._resume.state(p.name), self._resume.base
        creators = sorted(p.creators.values(), key=lambda worker: worker.rank)
        backup = p.spec.consistency.backup_workers if isinstance(p.spec.consistency, BSP) and saved is None else 0
        if backup >= len(creators):
            return self._refuse(
                InvalidArgumentError(
                    f"backup_workers={backup} of {p.name!r} leaves no worker to wait for: there are {len(creators)} "
                    f"workers, so use at most {len(creators) - 1}"
                ),
                p.creators,
            )
        entry = self._entry(p, creators)
        uploader = creators[0].member_id if saved is None else ""
        # Servers may still report versions from before the rollback.
        counted_from, first_version = epoch if base.generation else 0, 0 if saved is None else saved.step
        self._registry.place(p, ParametersRecord(entry, p.layout, uploader), counted_from, first_version)
        text = f"elements {entry.total}, slices {entry.slicing.count}, shards {len(entry.shards)}"
        text = f"{text}, servers {len(set(entry.primaries))}, members {len(creators)}"
        if saved is not None and base.restore is not None:
            text = f"{text}; resuming from step {saved.step} of snapshot {base.restore.directory}"
        notice = self._resume.notice(entry)
        return [
            ef.LogEvent(f"parameters {p.name!r} placed: {text}", kind="parameters"),
            *([ef.LogEvent(notice)] if notice else []),
        ]

    def _entry(self, p: ParameterSet, creators: list[Member]) -> ParametersEntry:
        """Return the map entry of a parameter set that is placed now."""
        assert p.spec is not None and p.layout is not None
        servers = {server.member_id: server.incarnation for server in self._members.staying}
        saved, base = self._resume.state(p.name), self._resume.base
        hosts = {member.host for member in (*self._members.staying, *creators)}
        slicing = choose_slicing(
            p.layout.total,
            (saved.spec if saved else p.spec).slice_elements,
            # Sets compressed both ways are limited by the interpreter's cost per slice, not by bytes.
            between_hosts=len(hosts) > 1 and not p.spec.pull_compression,
        )
        owners = place(slicing, list(servers), held_elements(self._registry.entries))
        first, resets = self._resume.first_step(p.spec), self._resume.resets(p.spec)
        return ParametersEntry(
            spec=replace(p.spec, slice_elements=slicing.slice_elements),
            total=p.layout.total,
            shards=tuple(Shard(Replica(owner, servers[owner]), base.term) for owner in owners),
            members=tuple(ParametersMember(w.member_id, w.incarnation, w.rank, first) for w in creators),
            ranges=group_ranges(p.layout, p.spec.optimizer.overrides),
            layout_digest=p.layout.digest,
            reference_workers=len(creators) if saved is None else saved.reference_workers,
            restore=None if saved is None or base.restore is None else replace(base.restore, weights_only=resets),
            generation=base.generation,
            state_since=0 if saved is None else saved.version_min if resets else saved.state_since,
        )

    # --- uploading, loading, and after --------------------------------------------------------------------------------

    def _prepare(self, p: ParameterSet) -> list[ef.Effect]:
        """Add creators as members from the first step on, since nothing was trained yet (or since the snapshot).

        If nothing is loaded, the uploader is asked to upload.
        """
        effects: list[ef.Effect] = []
        loads = p.entry.restore is not None
        for call, worker in p.creators.items():
            if p.member(worker) is None:
                first = self._resume.first_step(p.entry.spec) if loads else 0
                member = ParametersMember(worker.member_id, worker.incarnation, worker.rank, first)
                p.change(members=p.with_member(member))
            if loads:
                continue
            if not p.placed.uploader:
                p.change(uploader=p.entry.members[0].worker_id)
            asked = call == p.upload_call or p.placed.committed or not p.has_place(self._members)
            if worker.member_id == p.placed.uploader and not asked:
                p.upload_call = call
                effects.append(ef.Answer(call, ef.Upload()))
        return effects

    def _complete(self, p: ParameterSet) -> list[ef.Effect]:
        """Mark a parameter set as ready once it has its values, in as many copies as wanted."""
        if p.entry.ready or not p.placed.committed:
            return []
        if self._registry.missing_replicas(p) or not p.has_place(self._members):
            return []
        p.change(ready=True)
        return [ef.LogEvent(f"parameters {p.name!r} are ready", kind="parameters")]

    def _serve(self, p: ParameterSet) -> list[ef.Effect]:
        """Answer the callers of a ready parameter set, or let them join it."""
        if not p.describers and not p.creators:
            return []
        described = ef.Described(p.entry.spec, p.placed.layout)
        effects: list[ef.Effect] = [ef.Answer(call, described) for call in p.describers]
        effects += [effect for call, worker in p.creators.items() for effect in self.joins.join(p, call, worker)]
        answered = list(p.describers)
        for call, worker in p.creators.items():
            if member := p.member(worker):
                answered.append(call)
                ready = ef.ParametersReady(member.first_step, bool(member.origin), self._resume.notice(p.entry))
                effects.append(ef.Answer(call, ready))
        for call in answered:
            p.drop_call(call)
        return effects

    # --- losses -------------------------------------------------------------------------------------------------------

    def _drop_members(self, p: ParameterSet) -> None:
        """Remove workers that are gone, and their calls."""
        live = self._members.is_live
        for call, worker in (*p.creators.items(), *p.describers.items()):
            if not live(*worker.identity):
                self._registry.end_call(call)
        if p.record is None:
            return
        left = tuple(m for m in p.entry.members if live(*m.identity))
        if left == p.entry.members:
            return
        uploader = None if p.placed.committed else p.next_uploader(left)
        p.change(members=left, departed=p.departed(self._members), uploader=uploader)

    def _refuse(self, error: PsdistError, calls: Iterable[int]) -> list[ef.Effect]:
        """Refuse these calls with ``error``."""
        refused = list(calls)
        for call in refused:
            self._registry.end_call(call)
        return [ef.Refuse(call, error) for call in refused]

    def _lost_error(self, p: ParameterSet) -> ServerLostError:
        return ServerLostError(f"{p.lost} and was lost with these values: {self._registry.remedy}")


# --- commits of initial values ----------------------------------------------------------------------------------------
#
# A worker reports by CommitParameters that it uploaded the initial values. The scheduler then asks each primary, on
# its current session, how many slices have values. If slices are missing, the call is refused and nothing changes:
# the worker can install the rest and commit again. If a shard moves to another primary meanwhile, its values may be
# gone with the old one, so the caller of ``check`` restarts the commit.


@dataclass(slots=True)
class Commit:
    """A CommitParameters call in progress.

    asked: servers that have not answered, with the session on which each was asked (0: not asked yet).
    """

    event: CommitParameters
    worker: Member
    number: int
    primaries: tuple[Replica, ...]
    asked: dict[str, int]


@dataclass(slots=True)
class Commits:
    """All commits in progress, at most one for each parameter set. Their numbers identify late answers."""

    _registry: Registry
    _members: Membership
    _number: int = 0
    _by_name: dict[str, Commit] = field(default_factory=dict)

    def start(self, p: ParameterSet, event: CommitParameters, worker: Member) -> list[Effect]:
        """Ask the primaries of a parameter set whose values are not committed. An earlier call for the same set is
        refused."""
        older = self._by_name.pop(p.name, None)
        effects: list[Effect] = [refuse_older(older.event.call, older.worker)] if older is not None else []
        self._number += 1
        primaries = tuple(shard.primary for shard in p.entry.shards)
        asked = dict.fromkeys((primary.server_id for primary in primaries), 0)
        commit = self._by_name[p.name] = Commit(event, worker, self._number, primaries, asked)
        return [*effects, *(self._ask(commit) if asked else self._end(p, commit))]

    def on_answer(self, event: ValuesAnswered) -> list[Effect]:
        """Process a server's count of initialized slices. Commits the parameter set once every server has all of its
        slices."""
        server = self._members.sessions.member_of(event.call)
        commit = next((commit for commit in self._by_name.values() if commit.number == event.number), None)
        if commit is None or server not in commit.asked:
            return []
        p = self._registry.get(commit.event.parameters)
        assert p is not None, "a placed parameter set is kept"
        if event.installed < (wanted := _slices_of(p.entry, server)):
            del self._by_name[p.name]
            text = (
                f"{server} has initial values of {event.installed} of its {wanted} slices of {p.name!r}: Install all "
                "of them, then call CommitParameters again"
            )
            return [Refuse(commit.event.call, InvalidArgumentError(text, parameters=p.name, server=server))]
        del commit.asked[server]
        return [] if commit.asked else self._end(p, commit)

    def check(self) -> tuple[list[Effect], list[Commit]]:
        """Ask the servers for confirmation of the uploaded values, each once per session.

        Returns the effects and the commits to restart, which are removed: those whose parameter set changed, and those
        whose worker is gone.
        """
        changed = [commit for commit in self._by_name.values() if self._has_changed(commit)]
        for commit in changed:
            del self._by_name[commit.event.parameters]
        return [effect for commit in self._by_name.values() for effect in self._ask(commit)], changed

    def end_call(self, call: int) -> None:
        """Remove the call, which is over."""
        self._by_name = {name: commit for name, commit in self._by_name.items() if commit.event.call != call}

    def waiting_for(self, name: str) -> str:
        """Return a server that has not answered; empty if this parameter set has no commit in progress."""
        commit = self._by_name.get(name)
        return next(iter(commit.asked)) if commit is not None else ""

    def validate(self) -> None:
        for name, commit in self._by_name.items():
            p = self._registry.get(name)
            assert p is not None and not p.placed.committed and commit.asked, f"{name}: a commit that is over"

    def _ask(self, commit: Commit) -> list[Effect]:
        effects: list[Effect] = []
        for server, before in commit.asked.items():
            session = self._members.sessions.call_of(server)
            if session not in (0, before):
                commit.asked[server] = session
                effects.append(Answer(session, CheckValues(commit.number, commit.event.parameters)))
        return effects

    def _end(self, p: ParameterSet, commit: Commit) -> list[Effect]:
        del self._by_name[p.name]
        p.commit()
        return [
            Answer(commit.event.call, Done()),
            LogEvent(f"{commit.worker} uploaded the values of {p.name!r}", kind="parameters"),
        ]

    def _has_changed(self, commit: Commit) -> bool:
        p = self._registry.get(commit.event.parameters)
        if p is None or p.record is None or p.record.committed or p.member(commit.worker) is None:
            return True
        return tuple(shard.primary for shard in p.entry.shards) != commit.primaries


def _slices_of(entry: ParametersEntry, server: str) -> int:
    """Return the number of slices whose primary ``server`` is."""
    shards, count = len(entry.shards), entry.slicing.count
    own = [number for number, shard in enumerate(entry.shards) if shard.primary.server_id == server]
    return sum(len(range(number, count, shards)) for number in own)


# --- placement of new shards ------------------------------------------------------------------------------------------
#
# Slices do not depend on the number of servers (``psdist.types.Slicing``). Slice i is in shard i % shards. Shards go
# to servers by the longest-processing-time rule (Graham 1969): the largest shard next, to the server that holds the
# fewest elements, counting all other parameter sets. Ties go to the smaller server id.
#
# Balance: Servers that held equally many elements before hold the same number afterwards, to within one slice. In
# general the gap between the fullest and the emptiest server is at most the larger of the previous gap and one shard.


def choose_slicing(total: int, slice_elements: int, *, between_hosts: bool = False) -> Slicing:
    """Return the slicing of ``total`` elements. Raises LimitExceededError.

    slice_elements: elements per slice; 0 lets psdist choose.
    between_hosts: True if uncompressed slices travel between hosts.
    """
    slicing = Slicing(total, slice_elements or choose_slice_elements(total, between_hosts=between_hosts))
    if slicing.count > SLICES_MAX:
        raise LimitExceededError(
            f"{total} elements in slices of {slice_elements} are {slicing.count} slices, more than the limit of "
            f"{SLICES_MAX}: leave slice_elements at 0",
            slices=slicing.count,
            limit=SLICES_MAX,
        )
    return slicing


def held_elements(entries: Iterable[ParametersEntry]) -> dict[str, int]:
    """Return the number of elements of ``entries`` that each server holds."""
    held: dict[str, int] = {}
    for entry in entries:
        if entry.shards:
            for owner, elements in zip(entry.primaries, shard_elements(entry.slicing, len(entry.shards)), strict=True):
                held[owner] = held.get(owner, 0) + elements
    return held


def place(slicing: Slicing, servers: Sequence[str], held: Mapping[str, int]) -> tuple[str, ...]:
    """Return the owner of each shard; empty for an empty vector.

    held: elements that servers hold already.
    """
    shards = min(slicing.count, SHARDS_PER_SERVER * len(servers))
    if shards == 0:
        return ()
    sizes = shard_elements(slicing, shards)
    load = {server: held.get(server, 0) for server in sorted(servers)}
    owners = [""] * shards
    for number in sorted(range(shards), key=lambda shard: -sizes[shard]):
        owner = min(load, key=lambda server: (load[server], server))
        owners[number] = owner
        load[owner] += sizes[number]
    return tuple(owners)


def check_overrides(layout: Layout, overrides: Sequence[Override]) -> None:
    """Raise InvalidArgumentError if an override's pattern matches no tensor."""
    unmatched = list(overrides)
    for tensor in layout.tensors:
        if not unmatched:
            return
        unmatched = [item for item in unmatched if not group_of(tensor.name, [item])]
    if unmatched:
        names, pattern = name_some([tensor.name for tensor in layout.tensors]), unmatched[0].pattern
        raise InvalidArgumentError(
            f"override {pattern!r} matches no tensor of {names}: correct the pattern or leave it out", pattern=pattern
        )


def group_ranges(layout: Layout, overrides: Sequence[Override]) -> tuple[GroupRange, ...]:
    """Return the element ranges with an override, ascending. Adjacent ranges of one group are merged."""
    ranges: list[GroupRange] = []
    if not overrides:
        return ()
    for tensor, start, stop in zip(layout.tensors, layout.offsets, layout.offsets[1:], strict=False):
        group = group_of(tensor.name, overrides) if start < stop else 0
        if group == 0:
            continue
        if ranges and ranges[-1].stop == start and ranges[-1].group == group:
            start = ranges.pop().start
        ranges.append(GroupRange(start, stop, group))
    return tuple(ranges)
