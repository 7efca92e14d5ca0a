"""A parameter set as the registry keeps it: who asked for it, its state, and how far it is. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from psdist.consistency import BSP
from psdist.errors import LayoutMismatchError, SettingsMismatchError
from psdist.types import Layout, ParametersEntry, ParametersMember, ParametersSpec
from psdist.wire.limits import DEPARTED_MAX
from psdist_scheduler.events.cluster_events import Create
from psdist_scheduler.events.records import Member, ParametersRecord
from psdist_scheduler.events.worker_events import ResumePush
from psdist_scheduler.members.membership import Membership


@dataclass(slots=True)
class ParameterSet:
    """One name. ``record`` is None while it is gathering; then ``spec`` and ``layout`` are the first creator's."""

    name: str
    since: float
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
        """The worker's part in these parameters, if it has one."""
        wanted = (worker.member_id, worker.incarnation)
        return next((m for m in self.entry.members if (m.worker_id, m.incarnation) == wanted), None)

    def departed(self, members: Membership) -> tuple[ParametersMember, ...]:
        """Who of the asynchronous modes may go on with its pushes: those that were lost. Who left has finished them."""
        if isinstance(self.entry.spec.consistency, BSP):
            return ()
        lost = [m for m in self.entry.members if members.was_lost(m.worker_id, m.incarnation)]
        return (*self.entry.departed, *lost)[-DEPARTED_MAX:]

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
