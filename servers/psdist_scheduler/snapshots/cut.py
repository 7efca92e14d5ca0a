"""The cut of one attempt: which pushes of which parameter sets are in the snapshot. Pure.

A BSP parameter set is cut at a step. In SSP and ASP each member marks its pushes: it names the first push that is not
in the snapshot. So a cut stays valid while the primaries and, if pushes are marked, the members stay the same.

``attempt`` tracks who has agreed to the cut, and which files are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from psdist.consistency import BSP
from psdist.errors import SnapshotFailedError
from psdist.snapshots.format import ParametersState
from psdist_scheduler.events.cluster_state import Identity, name_some
from psdist_scheduler.events.snapshot_events import Producers, Written
from psdist_scheduler.placement.registry import ParameterSet

#: Up to this number of steps it is not clear whether parameter sets are trained in step.
_UNEVEN_STEPS: Final = 2


@dataclass(slots=True)
class AgreedCut:
    """Content of a snapshot.

    parameters: parameter sets that are saved, in the manifest's order.
    steps: step of the cut, by BSP parameter set.
    """

    parameters: tuple[ParameterSet, ...]
    steps: dict[str, int]
    #: Next pushes of each worker whose pushes are marked; None until it answers.
    marks: dict[Identity, dict[str, int] | None] = field(init=False)
    #: Versions at the start of the attempt.
    _began: dict[str, int] = field(init=False)
    #: Primary and term of each shard at the start of the attempt, by parameter set.
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
        """Names of the parameter sets whose pushes are marked."""
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
        """True if parameter sets that were to reach the cut together are not trained in step.

        Some have then made less than half the steps of others since. The servers' reports are not simultaneous.
        """
        began = self._began
        made = [p.version - began[p.name] for p in self.parameters if self.steps.get(p.name, 0) > began[p.name]]
        return bool(made) and max(made) > _UNEVEN_STEPS and 2 * min(made) < max(made)

    @property
    def changed(self) -> str:
        """Why the cut is no longer valid; empty if it is."""
        for p in self.parameters:
            if p.record is None or _route(p) != self._routes[p.name]:
                return f"shards of {p.name!r} have other primaries"
        if differing := self._members().keys() ^ self.marks.keys():
            who = name_some(sorted({worker for worker, _ in differing}))
            return f"{who} joined or left, whose pushes are marked"
        return ""

    def primary(self, name: str, number: int) -> str:
        """Return the server that writes a shard, for people."""
        p = self._get(name)
        return p.entry.primaries[number] if p.record is not None else "a server"

    def is_primary(self, server: str, event: Written) -> bool:
        """Return True if a server is the primary, in this term, of the shard that it has written."""
        if event.parameters not in self.names:
            return False
        shards = self._get(event.parameters).entry.shards
        shard = shards[event.shard] if 0 <= event.shard < len(shards) else None
        return shard is not None and shard.primary.server_id == server and shard.term == event.term

    def mark(self, worker: Identity, next_pushes: Mapping[str, int]) -> None:
        """Record a worker's next pushes, from which on its pushes are marked. Its first answer counts."""
        if worker in self.marks and self.marks[worker] is None:
            self.marks[worker] = dict(next_pushes)

    def bound(self, worker: Identity) -> dict[str, int]:
        """Return the number below which this worker's pushes are in the snapshot, by parameter set."""
        marks = self.marks.get(worker) or {}
        return {name: self.steps.get(name, marks.get(name, 0)) for name in self.names}

    def producers(self, name: str, *, by_origin: bool) -> Producers:
        """Return the next push of each member of a parameter set whose pushes are marked.

        by_origin: True to name members by origin, as servers know pushes; False to name them by incarnation.
        """
        return tuple(
            (
                m.worker_id,
                m.producer[1] if by_origin else m.incarnation,
                (self.marks[m.worker_id, m.incarnation] or {}).get(name, 0),
            )
            for m in self._get(name).entry.members
        )

    def states(self, written: Mapping[tuple[str, int], Written]) -> tuple[ParametersState, ...]:
        """Return the manifest entries of the parameter sets, whose shards must all be ``written``. Raises
        InvalidArgumentError and SnapshotFailedError if the servers' reports are not a consistent snapshot."""
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
        """Return the workers whose pushes are marked, as of now, each once."""
        marked = (p for p in self.parameters if p.name not in self.steps)
        return {(m.worker_id, m.incarnation): None for p in marked for m in p.entry.members}


def is_stepped(p: ParameterSet) -> bool:
    """Return True if a parameter set is cut at a step, and False if by marks on pushes."""
    return isinstance(p.entry.spec.consistency, BSP)


def is_trained(p: ParameterSet) -> bool:
    """Return True if pushes change the weights of a parameter set.

    With a learning rate of 0 they never do. Workers then only share its values, and need not push at all.
    """
    return p.entry.spec.is_trained


def floor(cut: AgreedCut | None, ready: Iterable[ParameterSet], worker: Identity) -> dict[str, int]:
    """Return the number of a worker's push that no later cut can be below, by parameter set.

    cut: the cut in progress, if any.
    """
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
