"""One set of parameters, as the registry keeps it: who asked for it, what became of it, and how far it is. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from psdist.types import Layout, ParametersEntry, ParametersMember, ParametersSpec
from psdist_scheduler.records import Member, ParametersRecord


@dataclass(slots=True)
class Parameters:
    """One name. ``record`` is None while it is gathering; then ``spec`` and ``layout`` are the first creator's."""

    name: str
    since: float
    record: ParametersRecord | None = None
    spec: ParametersSpec | None = None
    layout: Layout | None = None
    author: str = ""
    #: Open calls, by the worker behind each.
    creators: dict[int, Member] = field(default_factory=dict)
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
