"""A parameter set as the registry keeps it: who asked for it, its state, and how far it is. Pure.

Invariants: all waiting creators have the same settings and layout. ``ready`` is never undone, and ``committed`` only
before ``ready``, except that all parameter sets gather anew when the run rolls back.

Not here: what follows from a request (``creation``), who holds a shard (``replicas``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from psdist.consistency import BSP
from psdist.errors import LayoutMismatchError, SettingsMismatchError
from psdist.types import Layout, ParametersEntry, ParametersMember, ParametersSpec, Shard
from psdist.wire.limits import DEPARTED_MAX
from psdist_scheduler.events.cluster_events import Create, Effect, refuse_older
from psdist_scheduler.events.records import Member, ParametersRecord, group
from psdist_scheduler.events.worker_events import ResumePush
from psdist_scheduler.members.membership import Membership

#: How to go on when shards are lost.
REMEDY = (
    "restart the run; with --replicas 2 a lost server costs nothing, and with --storage-path a run goes back to its "
    "last snapshot by itself"
)


@dataclass(slots=True)
class ParameterSet:
    """One name. ``record`` is None while it is gathering; then ``spec`` and ``layout`` are the first creator's."""

    name: str
    record: ParametersRecord | None = None
    spec: ParametersSpec | None = None
    layout: Layout | None = None
    author: str = ""
    #: Open calls, by the worker behind each.
    creators: dict[int, Member] = field(default_factory=dict)
    #: By call, the push that its worker wants to go on with.
    resumes: dict[int, ResumePush] = field(default_factory=dict)
    describers: dict[int, Member] = field(default_factory=dict)
    #: The call that was told to upload.
    upload_call: int = 0
    #: Values put on servers by a map older than this may be gone with one of them.
    placed_epoch: int = 0
    #: Highest version by server, from heartbeats by a map of ``counted_from`` or later; and the one it began with.
    versions: dict[str, int] = field(default_factory=dict)
    counted_from: int = 0
    first_version: int = 0
    #: Whether the record changed since it was made durable.
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
        """The record; only where the state is not "gathering"."""
        assert self.record is not None
        return self.record

    @property
    def entry(self) -> ParametersEntry:
        """The entry; only where the state is not "gathering"."""
        return self.placed.entry

    @property
    def version(self) -> int:
        """Highest version that a server spoke of."""
        return max(self.versions.values(), default=self.first_version)

    def member(self, worker: Member) -> ParametersMember | None:
        """The worker's part in this parameter set, if it has one."""
        wanted = (worker.member_id, worker.incarnation)
        return next((m for m in self.entry.members if (m.worker_id, m.incarnation) == wanted), None)

    def departed(self, members: Membership) -> tuple[ParametersMember, ...]:
        """Who of the asynchronous modes may go on with its pushes: those that were lost. Who left has finished them."""
        if isinstance(self.entry.spec.consistency, BSP):
            return ()
        lost = [m for m in self.entry.members if members.was_lost(m.worker_id, m.incarnation)]
        return (*self.entry.departed, *lost)[-DEPARTED_MAX:]

    @property
    def lost(self) -> str:
        """A sentence about the shards that are lost with their servers; empty if none are."""
        shards = self.entry.shards if self.record else ()
        gone = group((shard.primary.server_id, number) for number, shard in enumerate(shards) if shard.lost)
        return "; ".join(f"{owner} held {name_shards(n)} of {self.name!r} alone" for owner, n in gone.items())

    @property
    def is_unused(self) -> bool:
        """Whether it is not placed, and nobody asks for it."""
        return self.record is None and not self.creators and not self.describers

    def with_member(self, member: ParametersMember) -> tuple[ParametersMember, ...]:
        return tuple(sorted((*self.entry.members, member), key=lambda m: m.rank))

    def next_uploader(self, members: Sequence[ParametersMember]) -> str:
        """Who is asked for the values where these are the members: as before, if it is one of them; empty for none."""
        if self.placed.uploader in [m.worker_id for m in members]:
            return self.placed.uploader
        return members[0].worker_id if members and self.entry.restore is None else ""

    def has_place(self, members: Membership) -> bool:
        """Whether there are servers that values can be put on: all may have gone before there were any."""
        return all(members.has(shard.primary) for shard in self.entry.shards)

    def check_same(self, event: Create) -> None:
        """Raises LayoutMismatchError or SettingsMismatchError where ``event`` asks for others of this name."""
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
        assert all(members.is_live(m.worker_id, m.incarnation) for m in entry.members), f"{self.name}: a dead member"
        assert len(set(ids)) == len(ids), f"{self.name}: one member twice"
        assert [m.rank for m in entry.members] == sorted(m.rank for m in entry.members), f"{self.name}: order"
        assert entry.spec.slice_elements > 0
        assert self.record.committed or not entry.ready, f"{self.name}: ready without values"
        assert self.record.committed or self.record.uploader in ("", *ids), f"{self.name}: {self.record.uploader}"

    def add_creator(self, event: Create, worker: Member) -> list[Effect]:
        """A worker wants to take part. An earlier call of the same worker is ended."""
        if self.spec is None:
            self.spec, self.layout, self.author = event.spec, event.layout, str(worker)
        if event.resume is not None:
            self.resumes[event.call] = event.resume
        return _add(self.creators, event.call, worker)

    def add_describer(self, call: int, worker: Member) -> list[Effect]:
        """A worker wants to know the settings. An earlier call of the same worker is ended."""
        return _add(self.describers, call, worker)

    def drop_call(self, call: int) -> None:
        for calls in (self.creators, self.resumes, self.describers):
            calls.pop(call, None)
        if self.record is None and not self.creators:
            self.spec = self.layout = None

    def request_upload(self, call: int) -> None:
        """This call is told to upload the values; 0: none is."""
        self.upload_call = call

    def place(self, record: ParametersRecord, counted_from: int, first_version: int) -> None:
        """Its shards have servers. Versions in heartbeats count by maps from ``counted_from`` on."""
        self.record, self.spec, self.is_changed = record, record.entry.spec, True
        self.counted_from, self.first_version = counted_from, first_version

    def commit(self) -> None:
        """All values are on the primaries."""
        self.record, self.is_changed = replace(self.placed, committed=True), True

    def change(self, *, uploader: str | None = None, **changes: object) -> None:
        """Changes fields of the entry, and the uploader."""
        record = self.placed
        entry = replace(record.entry, **changes)  # type: ignore[arg-type]
        self.record = replace(record, entry=entry, uploader=record.uploader if uploader is None else uploader)
        self.is_changed = True

    def replace_shards(self, shards: tuple[Shard, ...], epoch: int) -> None:
        """Values are gone before they were ready: they are asked for again. ``epoch`` shows where they go."""
        assert not self.entry.ready
        self.placed_epoch, self.upload_call = epoch, 0
        self.record = replace(self.placed, committed=False)
        # The uploader may have left, as its values were on the servers.
        self.change(shards=shards, uploader=self.next_uploader(self.entry.members))

    def reset_to_gathering(self) -> None:
        """Starts to gather again: the parameter set is placed by the members that are there or come."""
        self.record, self.upload_call, self.first_version, self.is_changed = None, 0, 0, False
        self.versions.clear()
        if not self.creators:
            self.spec = self.layout = None

    def take_record(self) -> ParametersRecord:
        """The record, which is made durable now."""
        self.is_changed = False
        return self.placed

    def on_version(self, server: str, epoch: int, version: int) -> None:
        """The highest version of its slices on a server, from a heartbeat by the map of ``epoch``."""
        if self.record is not None and epoch >= self.counted_from and server in self.entry.primaries:
            self.versions[server] = version


def _add(calls: dict[int, Member], call: int, worker: Member) -> list[Effect]:
    """Ends an earlier call of the same worker for the same thing: it asks again because that one broke."""
    older = [call for call, other in calls.items() if other.member_id == worker.member_id]
    for call_before in older:
        del calls[call_before]
    calls[call] = worker
    return [refuse_older(call, worker) for call in older]


def name_shards(numbers: Sequence[int]) -> str:
    """ "shard 3", "shards 1, 2", "shards 0, 1, 2, 3 and 12 more"."""
    some = ", ".join(str(number) for number in numbers[:4])
    more = f" and {len(numbers) - 4} more" if numbers[4:] else ""
    return f"shard{'s' if numbers[1:] else ''} {some}{more}"
