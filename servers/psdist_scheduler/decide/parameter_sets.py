"""Registry of parameter sets: callers, state and progress of each. Pure.

Invariants: Placed parameter sets are in the map and in the store, in the order in which they were placed. A name is
kept only while it is placed or somebody asks for it. All waiting creators of a parameter set have the same settings and
layout. ``ready`` is never undone, and ``committed`` only before ``ready``, except that all parameter sets gather again
when the run rolls back.

Requests are handled by ``parameter_creation``, shard holders by ``shard_placement``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from psdist.consistency import BSP
from psdist.errors import LayoutMismatchError, LimitExceededError, SettingsMismatchError
from psdist.types import Layout, ParametersEntry, ParametersMember, ParametersSpec, Shard
from psdist.wire.limits import DEPARTED_MAX, PARAMETERS_MAX
from psdist_scheduler.decide.cluster_events import Create, ResumePush
from psdist_scheduler.decide.cluster_state import ClusterSettings, Member, ParametersRecord, group
from psdist_scheduler.decide.effects import Effect, refuse_older
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.snapshot_catalog import Resume


def _remedy(settings: ClusterSettings) -> str:
    """Return the remedy for lost shards that no snapshot contains."""
    copies = "with --replicas 2 a lost server costs nothing"
    if settings.replicas > 1:
        copies = f"the {settings.replicas} copies do not outlive the loss of as many servers together"
    if not settings.storage or settings.unwritable:
        other = (
            f" under another --run-id, or without {settings.store}, which records the loss" if settings.store else ""
        )
        return f"restart the run{other}; {copies}, and with --storage-path a run rolls back to its last snapshot"
    return (
        f"no snapshot has all parameter sets yet: snapshots are taken {settings.policy.when}. Restart the run; a "
        f"shorter --save-interval takes the first one sooner, and {copies}"
    )


@dataclass(slots=True)
class ParameterSet:
    """One parameter set: its callers, state and progress.

    record: None while it is gathering. Then ``spec`` and ``layout`` are the first creator's.
    """

    name: str
    record: ParametersRecord | None = None
    spec: ParametersSpec | None = None
    layout: Layout | None = None
    author: str = ""
    #: Open calls, with the worker behind each.
    creators: dict[int, Member] = field(default_factory=dict)
    #: Push that the worker of each call wants to continue.
    resumes: dict[int, ResumePush] = field(default_factory=dict)
    describers: dict[int, Member] = field(default_factory=dict)
    #: Call that was asked to upload; 0 for none.
    upload_call: int = 0
    #: Values installed by a map older than this may be gone with a server.
    placed_epoch: int = 0
    #: Highest version per server, from heartbeats that name a map of ``counted_from`` or later.
    versions: dict[str, int] = field(default_factory=dict)
    counted_from: int = 0
    first_version: int = 0
    #: True if an earlier scheduler placed it: its current version is unknown until servers report.
    is_restored: bool = False
    #: True if the record changed since it was last made durable.
    is_changed: bool = False

    @property
    def state(self) -> str:
        """ "gathering", "uploading", "loading" or "ready"."""
        if self.record is None:
            return "gathering"
        if self.record.entry.ready:
            return "ready"
        return "uploading" if self.record.entry.restore is None else "loading"

    @property
    def placed(self) -> ParametersRecord:
        """The record. Only available if the state is not "gathering"."""
        assert self.record is not None
        return self.record

    @property
    def entry(self) -> ParametersEntry:
        """The map entry. Only available if the state is not "gathering"."""
        return self.placed.entry

    @property
    def version(self) -> int:
        """Highest version reported by a server."""
        return max(self.versions.values(), default=self.first_version)

    @property
    def version_text(self) -> str:
        """The version in words. A restarted scheduler does not know it before servers have reported."""
        is_unknown = self.is_restored and not self.versions
        return "a version that no server has reported yet" if is_unknown else f"version {self.version}"

    def member(self, worker: Member) -> ParametersMember | None:
        """Return the worker's member entry, or None if it is no member."""
        wanted = (worker.member_id, worker.incarnation)
        return next((m for m in self.entry.members if m.identity == wanted), None)

    def departed(self, members: Membership) -> tuple[ParametersMember, ...]:
        """Return the producers whose pushes may be continued (asynchronous modes): those of lost workers.

        Workers that left have finished their pushes.
        """
        if isinstance(self.entry.spec.consistency, BSP):
            return ()
        lost = [m for m in self.entry.members if members.was_lost(*m.identity)]
        return (*self.entry.departed, *lost)[-DEPARTED_MAX:]

    @property
    def lost(self) -> str:
        """Sentence about the shards lost with their servers; empty if none are lost."""
        if self.record is None or not self.record.entry.has_lost_shards:
            return ""  # Every event asks this of each of up to 1,024 sets.
        shards = enumerate(self.entry.shards)
        gone = group((shard.primary.server_id, number) for number, shard in shards if shard.lost)
        version = f" (at {self.version_text})" if gone else ""
        return "; ".join(f"{owner} held {name_shards(n)} of {self.name!r} alone{version}" for owner, n in gone.items())

    @property
    def is_unused(self) -> bool:
        """True if it is not placed and nobody asks for it."""
        return self.record is None and not self.creators and not self.describers

    @property
    def is_stepped(self) -> bool:
        """True if the set is cut at a step, and False if by marks on pushes."""
        return isinstance(self.entry.spec.consistency, BSP)

    def with_member(self, member: ParametersMember) -> tuple[ParametersMember, ...]:
        return tuple(sorted((*self.entry.members, member), key=lambda m: m.rank))

    def next_uploader(self, members: Sequence[ParametersMember]) -> str:
        """Return the worker to ask for the values, given these members; empty for none.

        The current uploader is kept if it is one of them.
        """
        if self.placed.uploader in [m.worker_id for m in members]:
            return self.placed.uploader
        return members[0].worker_id if members and self.entry.restore is None else ""

    def has_place(self, members: Membership) -> bool:
        """True if values can be installed: all primaries are live."""
        return all(members.has(shard.primary) for shard in self.entry.shards)

    def check_same(self, event: Create) -> None:
        """Raise LayoutMismatchError or SettingsMismatchError if ``event`` asks for a different layout or settings."""
        if self.spec is None or self.layout is None:
            return
        whose = f"{self.name!r} as {self.author} creates it" if self.record is None else f"{self.name!r} as it exists"
        remedy = "give the same on every worker, or choose another name"
        if self.layout != event.layout:
            raise LayoutMismatchError(f"layout differs from {whose}: {self.layout.difference(event.layout)}; {remedy}")
        if difference := self.spec.difference(event.spec):
            raise SettingsMismatchError(f"settings differ from {whose}: {difference}; {remedy}")

    def validate(self, members: Membership) -> None:
        assert not self.is_unused, f"{self.name} is kept for nobody"
        assert (self.spec is None) == (self.record is None and not self.creators), f"{self.name} has nobody's settings"
        if self.record is None:
            return
        entry, ids = self.entry, [m.worker_id for m in self.entry.members]
        assert all(members.is_live(*m.identity) for m in entry.members), f"{self.name}: a dead member"
        assert len(set(ids)) == len(ids), f"{self.name}: one member twice"
        assert [m.rank for m in entry.members] == sorted(m.rank for m in entry.members), f"{self.name}: order"
        assert entry.spec.slice_elements > 0
        assert self.record.committed or not entry.ready, f"{self.name}: ready without values"
        assert self.record.committed or self.record.uploader in ("", *ids), f"{self.name}: {self.record.uploader}"

    def add_creator(self, event: Create, worker: Member) -> list[Effect]:
        """Add a worker's request to take part. An earlier call of the same worker is refused."""
        if self.spec is None:
            self.spec, self.layout, self.author = event.spec, event.layout, str(worker)
        if event.resume is not None:
            self.resumes[event.call] = event.resume
        return _add(self.creators, event.call, worker)

    def add_describer(self, call: int, worker: Member) -> list[Effect]:
        """Add a worker's request for the settings. An earlier call of the same worker is refused."""
        return _add(self.describers, call, worker)

    def drop_call(self, call: int) -> None:
        for calls in (self.creators, self.resumes, self.describers):
            calls.pop(call, None)
        if self.record is None and not self.creators:
            self.spec = self.layout = None

    def place(self, record: ParametersRecord, counted_from: int, first_version: int) -> None:
        """Record that its shards were placed. Versions in heartbeats count from epoch ``counted_from`` on."""
        self.record, self.spec, self.is_changed = record, record.entry.spec, True
        self.counted_from, self.first_version = counted_from, first_version

    def commit(self) -> None:
        """Record that all values are on the primaries."""
        self.record, self.is_changed = replace(self.placed, committed=True), True

    def change(self, *, uploader: str | None = None, **changes: Any) -> None:
        """Change fields of the entry, and the uploader."""
        record = self.placed
        entry = replace(record.entry, **changes)
        self.record = replace(record, entry=entry, uploader=record.uploader if uploader is None else uploader)
        self.is_changed = True

    def replace_shards(self, shards: tuple[Shard, ...], epoch: int) -> None:
        """Place shards again whose values were lost before the set was ready. Values are requested again.

        epoch: the epoch that shows the new shards.
        """
        assert not self.entry.ready
        self.placed_epoch, self.upload_call = epoch, 0
        self.record = replace(self.placed, committed=False)
        # The uploader may have left, since its values were on the servers.
        self.change(shards=shards, uploader=self.next_uploader(self.entry.members))

    def reset_to_gathering(self) -> None:
        """Return to gathering. The set is then placed by the members that are present or still to come."""
        self.record, self.upload_call, self.first_version, self.is_changed = None, 0, 0, False
        self.versions.clear()
        self.is_restored = False
        if not self.creators:
            self.spec = self.layout = None

    def on_version(self, server: str, epoch: int, version: int) -> None:
        """Record the highest version of a server's slices, from a heartbeat that names the map of ``epoch``."""
        if self.record is not None and epoch >= self.counted_from and server in self.entry.primaries:
            self.versions[server] = version


class Registry:
    """All parameter sets of the run."""

    def __init__(
        self, settings: ClusterSettings, records: tuple[ParametersRecord, ...], epoch: int, resume: Resume
    ) -> None:
        self.resume = resume
        self._replicas = settings.replicas
        #: Remedy for lost shards.
        self.remedy = _remedy(settings)
        self._all: dict[str, ParameterSet] = {}
        for record in records:
            spec = record.entry.spec
            self._all[spec.name] = ParameterSet(
                spec.name, record, spec, record.layout, placed_epoch=epoch - 1, is_restored=True
            )
        self._placed = list(self._all)
        #: Names of parameter sets that returned to gathering since ``take_changes``.
        self._forgotten: dict[str, None] = {}

    @property
    def all(self) -> tuple[ParameterSet, ...]:
        """Parameter sets in the order in which they were first requested."""
        return tuple(self._all.values())

    @property
    def placed(self) -> list[ParameterSet]:
        """Placed parameter sets, in the order in which they were first requested."""
        return [p for p in self._all.values() if p.record is not None]

    @property
    def has_begun(self) -> bool:
        """True if a parameter set is ready: the run trains."""
        return any(entry.ready for entry in self.entries)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all requested parameter sets."""
        return tuple(self._all)

    @property
    def entries(self) -> tuple[ParametersEntry, ...]:
        """Entries of the cluster map."""
        return tuple(self._all[name].entry for name in self._placed)

    @property
    def changed(self) -> bool:
        """True if there are changes that must be made durable."""
        return bool(self._forgotten) or any(p.is_changed for p in self._all.values())

    def get(self, name: str) -> ParameterSet | None:
        return self._all.get(name)

    @property
    def lost_text(self) -> str:
        """Sentence about everything that is lost and the remedy; empty if nothing is lost."""
        if self.resume.failed is not None:
            return self.resume.failed.message
        lost = [text for p in self._all.values() if (text := p.lost)]
        return f"lost: {'; '.join(lost)}; {self.remedy}" if lost else ""

    @property
    def base_in_use(self) -> str:
        """Directory of the snapshot that parameter sets are still to be loaded from; empty for none."""
        restore, found = self.resume.base.restore, self.resume.found
        if restore is None:
            return ""
        names = found.manifest.steps if found is not None else [entry.spec.name for entry in self.entries]
        states = [self._all[name].state if name in self._all else "" for name in names]
        return "" if found is not None and all(state == "ready" for state in states) else restore.directory

    @property
    def lost_owners(self) -> frozenset[str]:
        return frozenset(shard.primary.server_id for entry in self.entries for shard in entry.shards if shard.lost)

    def missing_replicas(self, p: ParameterSet) -> dict[str, list[int]]:
        """Return shards with fewer complete copies than wanted, by the server that is to hold the next copy ("" if none
        is)."""
        return group(
            (shard.filling[0].server_id if shard.filling else "", number)
            for number, shard in enumerate(p.entry.shards if p.record else ())
            if not shard.lost and 1 + len(shard.backups) < self._replicas
        )

    def validate(self, members: Membership) -> None:
        for p in self._all.values():
            p.validate(members)
            assert (p.name in self._placed) == (p.record is not None)

    def open(self, name: str) -> ParameterSet:
        """Return the parameter set of this name, creating it if necessary. Raises LimitExceededError."""
        if name not in self._all and len(self._all) >= PARAMETERS_MAX:
            raise LimitExceededError(f"{PARAMETERS_MAX} parameters exist, which is the limit: put tensors together")
        return self._all.setdefault(name, ParameterSet(name))

    def end_call(self, call: int) -> None:
        for p in list(self._all.values()):
            p.drop_call(call)
            if p.is_unused:
                del self._all[p.name]

    def place(self, p: ParameterSet, record: ParametersRecord, counted_from: int, first_version: int) -> None:
        """Record that a parameter set was placed."""
        p.place(record, counted_from, first_version)
        self._placed.append(p.name)

    def reset_to_gathering(self) -> None:
        """Return all placed parameter sets to gathering, because the run rolled back to a snapshot."""
        for name in self._placed:
            self._all[name].reset_to_gathering()
            self._forgotten[name] = None
        self._placed.clear()
        self._all = {name: p for name, p in self._all.items() if not p.is_unused}

    def take_changes(self) -> tuple[tuple[str, ...], tuple[ParametersRecord, ...]]:
        """Return the names that went back to gathering and the changed records, since the previous call."""
        changed = [p for name in self._placed if (p := self._all[name]).is_changed]
        for p in changed:
            p.is_changed = False
        forgotten, self._forgotten = tuple(self._forgotten), {}
        return forgotten, tuple(p.placed for p in changed)


def awaited_workers(p: ParameterSet, members: Membership) -> list[Member]:
    """Return the live workers that are to create a set, or to ask for its description, before it is placed."""
    return [worker for worker in members.workers if p.spec is None or may_train(p.spec, worker)]


def may_train(spec: ParametersSpec, worker: Member) -> bool:
    """True if a worker's rank is one of those that train a set."""
    return not spec.workers or worker.rank in spec.workers


def _add(calls: dict[int, Member], call: int, worker: Member) -> list[Effect]:
    """Add a call, and refuse an earlier one of the same worker: it asks again because that call broke."""
    older = [call for call, other in calls.items() if other.member_id == worker.member_id]
    for call_before in older:
        del calls[call_before]
    calls[call] = worker
    return [refuse_older(call, worker) for call in older]


def name_shards(numbers: Sequence[int]) -> str:
    """Name shards: "shard 3", "shards 1, 2", "shards 0, 1, 2, 3 and 12 more"."""
    some = ", ".join(str(number) for number in numbers[:4])
    more = f" and {len(numbers) - 4} more" if numbers[4:] else ""
    return f"shard{'s' if numbers[1:] else ''} {some}{more}"
