"""Creation of parameter sets (gathering, uploading or loading, ready), and how workers become members. Pure.

* gathering: no shard is placed. Callers wait until the servers and workers of the run are present and every live worker
  has asked for this parameter set. So "the values of the lowest rank count" means the same in every order of arrival.
* uploading: placed and in the map. The creator with the lowest rank uploads its values to the servers and commits, and
  the servers confirm them (``commits``). If that worker is lost, the next one takes over. Then every shard gets its
  backups. A parameter set of the snapshot that the run resumes from is *loading* instead: its primaries load it, and
  all creators wait (``restore_point``).
* ready: later creators join, in ASP immediately, otherwise at a step or clock agreed by all servers
  (``join_proposals``).

A parameter set with a lost shard is lost, and its callers get an error. When the run rolls back, all parameter sets
gather again; nothing else returns to that state.

Invariant: Members are live workers.

Other modules choose the server of a shard (``placement``), its later holders (``replicas``), and epochs (``cluster``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from psdist.consistency import BSP
from psdist.errors import (
    InvalidArgumentError,
    NotMemberError,
    PsdistError,
    ServerLostError,
    StaleEpochError,
    UnknownParametersError,
    WorkerLeftError,
)
from psdist.types import ParametersEntry, ParametersMember, Replica, Shard, check_name
from psdist_scheduler.events import cluster_events as ev
from psdist_scheduler.events.cluster_state import ClusterSettings, Member, ParametersRecord, name_some
from psdist_scheduler.events.snapshot_events import Loaded
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement import placement
from psdist_scheduler.placement.commits import Commits
from psdist_scheduler.placement.join_proposals import Joins
from psdist_scheduler.placement.registry import ParameterSet, Registry, awaited_workers, may_train, name_shards
from psdist_scheduler.placement.restore_point import SERVERS_GRACE_SECONDS, WORKERS_GRACE_SECONDS, Resume

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

    def create(self, event: ev.Create, worker: Member) -> list[ev.Effect]:
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
            self._check_lost(p)
            p.check_same(event)
        self._resume.check(event.spec, event.layout, self._registry.names)
        if p is None or p.spec is None:
            placement.check_overrides(event.layout, event.spec.optimizer.overrides)
            placement.choose_slicing(event.layout.total, event.spec.slice_elements)
        return self._registry.open(event.spec.name).add_creator(event, worker)

    def describe(self, event: ev.Describe, worker: Member) -> list[ev.Effect]:
        """Add a worker's request for a description. Raises InvalidNameError, LimitExceededError and ServerLostError."""
        p = self._registry.open(check_name(event.parameters, "parameters name"))
        self._check_lost(p)
        return p.add_describer(event.call, worker)

    def commit(self, event: ev.CommitParameters, worker: Member) -> list[ev.Effect]:
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
            return [ev.Answer(event.call, ev.Done())]
        if event.epoch < p.placed_epoch:
            p.upload_call = 0
            text = f"a server is gone that had values of {name!r} since epoch {event.epoch}: upload them again"
            return [ev.Refuse(event.call, StaleEpochError(text, epoch=p.placed_epoch))]
        return self.commits.start(p, event, worker)

    def _check_commits(self) -> list[ev.Effect]:
        """Continue the commits in progress, and restart those whose parameter set has changed."""
        effects, changed = self.commits.check()
        for commit in changed:
            try:  # A worker that was expelled meanwhile gets only this error.
                effects += self.commit(commit.event, self._members.check_caller(commit.event.caller))
            except PsdistError as error:
                effects.append(ev.Refuse(commit.event.call, error))
        return effects

    def on_loaded(self, event: Loaded) -> list[ev.Effect]:
        p, server = self._registry.get(event.parameters), self._members.sessions.member_of(event.call)
        if p is None or p.record is None:
            return []
        # Servers report once per session, so count this even if it is needed only after another server is lost.
        are_loaded = self._resume.on_loaded(event, server, p.entry)
        if p.record.committed or not are_loaded:
            return []
        p.commit()
        return [ev.LogEvent(f"parameters {p.name!r} are loaded", kind="parameters")]

    # --- progress -----------------------------------------------------------------------------------------------------

    def progress(self, epoch: int, now: float) -> list[ev.Effect]:
        """Advance every parameter set as far as the current members and calls allow.

        epoch: the epoch that will show the changes.
        """
        effects: list[ev.Effect] = []
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

    def waits(self, now: float) -> Iterator[ev.Wait]:
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
        workers = None if now - since < WORKERS_GRACE_SECONDS else 1
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

    def _gather(self, p: ParameterSet, epoch: int) -> list[ev.Effect]:
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
            ev.LogEvent(f"parameters {p.name!r} placed: {text}", kind="parameters"),
            *([ev.LogEvent(notice)] if notice else []),
        ]

    def _entry(self, p: ParameterSet, creators: list[Member]) -> ParametersEntry:
        """Return the map entry of a parameter set that is placed now."""
        assert p.spec is not None and p.layout is not None
        servers = {server.member_id: server.incarnation for server in self._members.staying}
        saved, base = self._resume.state(p.name), self._resume.base
        hosts = {member.host for member in (*self._members.staying, *creators)}
        slicing = placement.choose_slicing(
            p.layout.total,
            (saved.spec if saved else p.spec).slice_elements,
            # Sets compressed both ways are limited by the interpreter's cost per slice, not by bytes.
            between_hosts=len(hosts) > 1 and not p.spec.pull_compression,
        )
        owners = placement.place(slicing, list(servers), placement.held_elements(self._registry.entries))
        first, resets = self._resume.first_step(p.spec), self._resume.resets(p.spec)
        return ParametersEntry(
            spec=replace(p.spec, slice_elements=slicing.slice_elements),
            total=p.layout.total,
            shards=tuple(Shard(Replica(owner, servers[owner]), base.term) for owner in owners),
            members=tuple(ParametersMember(w.member_id, w.incarnation, w.rank, first) for w in creators),
            ranges=placement.group_ranges(p.layout, p.spec.optimizer.overrides),
            layout_digest=p.layout.digest,
            reference_workers=len(creators) if saved is None else saved.reference_workers,
            restore=None if saved is None or base.restore is None else replace(base.restore, weights_only=resets),
            generation=base.generation,
            state_since=0 if saved is None else saved.version_min if resets else saved.state_since,
        )

    # --- uploading, loading, and after --------------------------------------------------------------------------------

    def _prepare(self, p: ParameterSet) -> list[ev.Effect]:
        """Add creators as members from the first step on, since nothing was trained yet (or since the snapshot).

        If nothing is loaded, the uploader is asked to upload.
        """
        effects: list[ev.Effect] = []
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
                effects.append(ev.Answer(call, ev.Upload()))
        return effects

    def _complete(self, p: ParameterSet) -> list[ev.Effect]:
        """Mark a parameter set as ready once it has its values, in as many copies as wanted."""
        if p.entry.ready or not p.placed.committed:
            return []
        if self._registry.missing_replicas(p) or not p.has_place(self._members):
            return []
        p.change(ready=True)
        return [ev.LogEvent(f"parameters {p.name!r} are ready", kind="parameters")]

    def _serve(self, p: ParameterSet) -> list[ev.Effect]:
        """Answer the callers of a ready parameter set, or let them join it."""
        if not p.describers and not p.creators:
            return []
        described = ev.Described(p.entry.spec, p.placed.layout)
        effects: list[ev.Effect] = [ev.Answer(call, described) for call in p.describers]
        effects += [effect for call, worker in p.creators.items() for effect in self.joins.join(p, call, worker)]
        answered = list(p.describers)
        for call, worker in p.creators.items():
            if member := p.member(worker):
                answered.append(call)
                ready = ev.ParametersReady(member.first_step, bool(member.origin), self._resume.notice(p.entry))
                effects.append(ev.Answer(call, ready))
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
        left = tuple(m for m in p.entry.members if live(m.worker_id, m.incarnation))
        if left == p.entry.members:
            return
        uploader = None if p.placed.committed else p.next_uploader(left)
        p.change(members=left, departed=p.departed(self._members), uploader=uploader)

    def _refuse(self, error: PsdistError, calls: Iterable[int]) -> list[ev.Effect]:
        """Refuse these calls with ``error``."""
        refused = list(calls)
        for call in refused:
            self._registry.end_call(call)
        return [ev.Refuse(call, error) for call in refused]

    def _check_lost(self, p: ParameterSet) -> None:
        if p.lost:
            raise self._lost_error(p)

    def _lost_error(self, p: ParameterSet) -> ServerLostError:
        return ServerLostError(f"{p.lost} and was lost with these values: {self._registry.remedy}")
