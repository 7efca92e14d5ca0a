"""The cut of one attempt: which pushes of which parameter sets are in the snapshot. Pure.

A BSP parameter set is cut at a step. In SSP and ASP each member marks its pushes: it says from which one on they are
not in the snapshot. So a cut holds as long as the primaries stay and, where pushes are marked, the members.

Not here: who has agreed to the cut, and which files are written (``attempt``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from psdist.consistency import BSP
from psdist.errors import SnapshotFailedError
from psdist.snapshots.format import ParametersState
from psdist_scheduler.events.records import Identity, name_some
from psdist_scheduler.events.snapshot_events import Producers, Written
from psdist_scheduler.placement.registry import ParameterSet

#: With so few steps made it is not known whether parameter sets are trained in step.
_UNEVEN_STEPS: Final = 2


@dataclass(slots=True)
class AgreedCut:
    """parameters: what is saved, in the manifest's order. steps: of the cut, by BSP parameter set."""

    parameters: tuple[ParameterSet, ...]
    steps: dict[str, int]
    #: By worker whose pushes are marked, its next pushes; None until it answers.
    marks: dict[Identity, dict[str, int] | None] = field(init=False)
    #: Versions when the attempt began.
    _began: dict[str, int] = field(init=False)
    #: By parameter set, primary and term of each shard when the attempt began.
    _routes: dict[str, tuple[object, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._began = {p.name: p.version for p in self.parameters}
        self._routes = {p.name: _route(p) for p in self.parameters}
        self.marks = dict.fromkeys(self._members())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters)

    @property
    def marked(self) -> tuple[str, ...]:
        """Names of those whose pushes are marked."""
        return tuple(name for name in self.names if name not in self.steps)

    @property
    def step(self) -> int:
        """The highest step, for people."""
        return max((self.steps.get(p.name, p.version) for p in self.parameters), default=0)

    @property
    def servers(self) -> dict[str, None]:
        """Ids of the primaries, each once."""
        return {server: None for p in self.parameters for server in p.entry.primaries}

    @property
    def shards(self) -> list[tuple[str, int]]:
        """All shards, by parameter set and number."""
        return [(name, number) for name in self.names for number in range(len(self._routes[name]))]

    @property
    def ahead(self) -> tuple[str, ...]:
        """Names of the parameter sets of which no slice was seen at the cut."""
        return tuple(p.name for p in self.parameters if p.version < self.steps.get(p.name, 0))

    @property
    def is_uneven(self) -> bool:
        """Whether parameter sets that were to reach the cut together are not trained in step: some have made less than
        half the steps of others since. Reports of servers are not of the same moment."""
        began = self._began
        made = [p.version - began[p.name] for p in self.parameters if self.steps.get(p.name, 0) > began[p.name]]
        return bool(made) and max(made) > _UNEVEN_STEPS and 2 * min(made) < max(made)

    @property
    def changed(self) -> str:
        """What the cut rests on and is not there any more; empty if all is."""
        for p in self.parameters:
            if p.record is None or _route(p) != self._routes[p.name]:
                return f"shards of {p.name!r} have other primaries"
        if differing := self._members().keys() ^ self.marks.keys():
            who = name_some(sorted({worker for worker, _ in differing}))
            return f"{who} joined or left, whose pushes are marked"
        return ""

    def primary(self, name: str, number: int) -> str:
        """The server that writes a shard, for people."""
        p = self._get(name)
        return p.entry.primaries[number] if p.record is not None else "a server"

    def is_primary(self, server: str, event: Written) -> bool:
        """Whether a server is the primary, in this term, of the shard that it has written."""
        if event.parameters not in self.names:
            return False
        shards = self._get(event.parameters).entry.shards
        shard = shards[event.shard] if 0 <= event.shard < len(shards) else None
        return shard is not None and shard.primary.server_id == server and shard.term == event.term

    def mark(self, worker: Identity, next_pushes: Mapping[str, int]) -> None:
        """A worker marks its pushes from ``next_pushes`` on. Its first answer counts."""
        if worker in self.marks and self.marks[worker] is None:
            self.marks[worker] = dict(next_pushes)

    def bound(self, worker: Identity) -> dict[str, int]:
        """By parameter set, the push of this worker below which its pushes are in the snapshot."""
        marks = self.marks.get(worker) or {}
        return {name: self.steps.get(name, marks.get(name, 0)) for name in self.names}

    def producers(self, name: str, *, by_origin: bool) -> Producers:
        """The next push of each member of a parameter set whose pushes are marked, by its id and its incarnation or, as
        servers know pushes, by its origin."""
        return tuple(
            (
                m.worker_id,
                m.producer[1] if by_origin else m.incarnation,
                (self.marks[m.worker_id, m.incarnation] or {}).get(name, 0),
            )
            for m in self._get(name).entry.members
        )

    def states(self, written: Mapping[tuple[str, int], Written]) -> tuple[ParametersState, ...]:
        """What the manifest says of the parameter sets, of which all shards are ``written``. Raises
        InvalidArgumentError and SnapshotFailedError where what servers reported cannot be a snapshot."""
        return tuple(
            self._state(p, [written[p.name, number] for number in range(len(self._routes[p.name]))])
            for p in self.parameters
        )

    def _state(self, p: ParameterSet, parts: list[Written]) -> ParametersState:
        names = {part.state_names for part in parts}
        if len(names) > 1:
            raise SnapshotFailedError(f"servers disagree on the optimizer's arrays of {p.name!r}: {sorted(names)}")
        versions = [version for part in parts for version in part.file.versions]
        step = self.steps.get(p.name)
        if step is not None and any(version != step for version in versions):
            raise SnapshotFailedError(
                f"slices of {p.name!r} were written at versions {min(versions)} to {max(versions)}, not at the cut's "
                f"step {step}"
            )
        return ParametersState(
            spec=p.entry.spec,
            layout=p.placed.layout,
            reference_workers=p.entry.reference_workers,
            state_names=parts[0].state_names,
            step=max(versions, default=0) if step is None else step,
            next=self.producers(p.name, by_origin=False) if step is None else (),
            shards=tuple(part.file for part in parts),
            state_since=p.entry.state_since,
        )

    def _get(self, name: str) -> ParameterSet:
        return next(p for p in self.parameters if p.name == name)

    def _members(self) -> dict[Identity, None]:
        """Workers whose pushes are marked, as they are now, each once."""
        marked = (p for p in self.parameters if p.name not in self.steps)
        return {(m.worker_id, m.incarnation): None for p in marked for m in p.entry.members}


def is_stepped(p: ParameterSet) -> bool:
    """Whether a parameter set is cut at a step, and not by marks on pushes."""
    return isinstance(p.entry.spec.consistency, BSP)


def is_trained(p: ParameterSet) -> bool:
    """Whether pushes change the weights of a parameter set. With a learning rate of 0 they never do: workers only share
    its values, and need not push at all."""
    return p.entry.spec.is_trained


def floor(cut: AgreedCut | None, ready: Iterable[ParameterSet], worker: Identity) -> dict[str, int]:
    """By parameter set, the push of a worker that no later cut is below, while ``cut`` is under way. Parameter sets
    that are not named have no such push."""
    steps: dict[str, int] = {}
    for p in ready:
        under_way = cut is not None and p.name in cut.names
        if is_stepped(p):
            steps[p.name] = min(p.version, cut.steps[p.name]) if cut and under_way else p.version
        elif cut and under_way:
            steps[p.name] = (cut.marks.get(worker) or {}).get(p.name, 0)
    return steps


def _route(p: ParameterSet) -> tuple[object, ...]:
    return tuple((shard.primary, shard.term, shard.lost) for shard in p.entry.shards)
