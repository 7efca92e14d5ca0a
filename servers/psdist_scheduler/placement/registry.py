"""Which parameter sets there are, in which order they were placed, and what is lost of them. Pure.

Invariants: what is placed is in the map, and in the store, in the order in which it was placed. A name is kept only
while it is placed or somebody asks for it.

Not here: how a parameter set comes to be (``creation``), who holds a shard (``replicas``, ``replica_manager``).
"""

from __future__ import annotations

from psdist.errors import LimitExceededError
from psdist.types import ParametersEntry
from psdist.wire.limits import PARAMETERS_MAX
from psdist_scheduler.events.records import ClusterSettings, ParametersRecord, group
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement import replicas
from psdist_scheduler.placement.parameters import REMEDY, ParameterSet
from psdist_scheduler.placement.restore_point import Resume


class Registry:
    """All parameter sets of the run."""

    def __init__(
        self, settings: ClusterSettings, records: tuple[ParametersRecord, ...], epoch: int, resume: Resume
    ) -> None:
        self.resume = resume
        self._replicas = settings.replicas
        self._all: dict[str, ParameterSet] = {}
        for record in records:
            spec = record.entry.spec
            self._all[spec.name] = ParameterSet(spec.name, record, spec, record.layout, placed_epoch=epoch - 1)
        self._placed = list(self._all)
        #: Names of parameter sets that went back to gathering since the cluster last took the changes.
        self._forgotten: dict[str, None] = {}

    @property
    def all(self) -> tuple[ParameterSet, ...]:
        """Parameter sets in the order in which they were first asked for."""
        return tuple(self._all.values())

    @property
    def entries(self) -> tuple[ParametersEntry, ...]:
        """What the cluster map shows."""
        return tuple(self._all[name].entry for name in self._placed)

    @property
    def changed(self) -> bool:
        """Whether anything changed that must be durable."""
        return bool(self._forgotten) or any(p.is_changed for p in self._all.values())

    def get(self, name: str) -> ParameterSet | None:
        return self._all.get(name)

    @property
    def lost_text(self) -> str:
        """One sentence about all that is lost and how to go on; empty if nothing is."""
        lost = [text for p in self._all.values() if (text := p.lost)]
        return f"lost: {'; '.join(lost)}; {REMEDY}" if lost else ""

    @property
    def base_in_use(self) -> str:
        """Directory of the snapshot that parameter sets are still to be loaded from; empty if there is none."""
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
        """Shards with fewer complete copies than wanted, by the server that is to hold the next; "" if none is."""
        return group(
            (shard.filling[0].server_id if shard.filling else "", number)
            for number, shard in enumerate(p.entry.shards if p.record else ())
            if not shard.lost and len(replicas.complete(shard)) < self._replicas
        )

    def validate(self, members: Membership) -> None:
        for p in self._all.values():
            p.validate(members)
            assert (p.name in self._placed) == (p.record is not None)

    def open(self, name: str) -> ParameterSet:
        """The parameter set of this name, made if nobody asked for it before. Raises LimitExceededError."""
        if name not in self._all and len(self._all) >= PARAMETERS_MAX:
            raise LimitExceededError(f"{PARAMETERS_MAX} parameters exist, which is the limit: put tensors together")
        return self._all.setdefault(name, ParameterSet(name))

    def end(self, call: int) -> None:
        for p in list(self._all.values()):
            p.drop_call(call)
            if p.is_unused:
                del self._all[p.name]

    def place(self, p: ParameterSet, record: ParametersRecord, counted_from: int, first_version: int) -> None:
        """A parameter set has servers for its shards."""
        p.place(record, counted_from, first_version)
        self._placed.append(p.name)

    def reset_to_gathering(self) -> None:
        """All are to be placed anew, by those who are there or come: the run went back to a snapshot."""
        for name in self._placed:
            self._all[name].reset_to_gathering()
            self._forgotten[name] = None
        self._placed.clear()
        self._all = {name: p for name, p in self._all.items() if not p.is_unused}

    def take_changes(self) -> tuple[tuple[str, ...], tuple[ParametersRecord, ...]]:
        """Names that went back to gathering, and records that changed, since this was called last."""
        changed = [p for name in self._placed if (p := self._all[name]).is_changed]
        forgotten, self._forgotten = tuple(self._forgotten), {}
        return forgotten, tuple(p.take_record() for p in changed)
