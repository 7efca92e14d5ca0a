"""Oracle of runs with several parameter sets: one ``snapshot_oracle`` per set, and the relations between them.

Each script reports the position, a step of every set, at which it starts an iteration. That must be a position at which
an iteration starts, whether the script begins, joins, resumes, or has lost pushes before. A push that counts must be of
the step given by its place in the iteration. Every snapshot must be cut where an iteration starts for all sets, and all
sets must roll back to the same snapshot. If nobody was lost, each step of each set has one push of every worker, so the
weights are those of an undisturbed run.

Three cases are excused, because psdist makes no promise about them:

* a run that is stopped before its script has repeated an order, without declared iterations
* the end of a run that is disturbed while it ends
* sets that have lost all of their members
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psdist import BSP
from psdist.optim import Optimizer
from psdist.types import ClusterMap
from tests.simulation.oracle import Array, Life, Push
from tests.simulation.set_orders import Order, Vector
from tests.simulation.snapshot_oracle import Saved, SnapshotOracle
from tests.simulation.storage import Bucket


@dataclass
class Part(Life):
    """One life of a worker in one parameter set. slots: slots of its pushes so far."""

    name: str = ""
    slots: Any = field(default_factory=list)


@dataclass
class SetPush:
    """A push of a script. step: the required step, from its place in an iteration."""

    name: str
    push: Push
    step: int


@dataclass
class Start:
    """Start of an iteration by a script, in one incarnation."""

    worker_id: str
    phase: int
    incarnation: int
    position: Vector


@dataclass
class Cut:
    """Creation of a commit record. number: index of the commit. is_excused: True if it may be cut within an
    iteration."""

    number: int
    is_excused: bool


@dataclass
class Emptied:
    """Loss of all members of a set in this era."""

    era: int


class SetOracle(SnapshotOracle):
    """Oracle of one parameter set."""

    def __init__(self, name: str, optimizer: Optimizer, slices: int, slots: int, noise: np.random.Generator) -> None:
        super().__init__(name, BSP(), optimizer, slices, slots, noise)
        self._free = itertools.count()
        self.used_slots = 0
        #: True if the newest map has members of this set.
        self.members = False

    def begins(self, life: Life, step: int) -> Push:
        """See Oracle. The push takes the next free slot, independent of the worker."""
        part: Any = life
        part.slots.append(next(self._free))
        self.used_slots += 1
        return super().begins(life, step)

    def _lacks(self, saved: Saved) -> None:
        """See SnapshotOracle. A snapshot taken before the set was created holds the others at step 0."""
        if any(slot in self.pushes for slot in saved.acked):
            super()._lacks(saved)
        self.counts["snapshots before a set was created"] += 1

    def era_of_member(self, start: Start) -> int | None:
        """Return the era that a script participates in, or None if it never was a member."""
        return self._era_of.get((start.phase, start.worker_id, start.incarnation))

    def base_of(self, phase: int, worker_id: str, incarnation: int) -> Saved | str | None:
        """Return the snapshot that this member began from; "" for the initial weights, None if unknown."""
        era = self._era_of.get((phase, worker_id, incarnation))
        return self.base_of_era(era) if era is not None else None

    def base_of_era(self, era: int) -> Saved | str | None:
        """Return the snapshot that an era began from; "" for the initial weights, None if unknown."""
        directory = self.eras[era].base
        return next((saved for saved in self.commits if saved.directory == directory), None) if directory else ""

    def contributors(self, weights: Array, version: int) -> list[list[str]]:
        """Return the workers whose pushes are in the first slice of ``weights``, by step."""
        steps: list[list[str]] = [[] for _ in range(version)]
        for slot in np.flatnonzero(weights[: self.slots]):
            push = self.pushes.get(int(slot))
            if push is not None and push.step < version:
                steps[push.step].append(push.life.worker_id)
        return steps


class SetsOracle:
    """Oracle of all sets of a run. The rest of the simulation uses it like the oracle of one set."""

    exact = True

    def __init__(self, order: Order, optimizer: Optimizer, slices: int, slots: int, noise: np.random.Generator) -> None:
        self.order = order
        self.by_name = {name: SetOracle(name, optimizer, slices, slots, noise) for name in order.names}
        self._first = next(iter(self.by_name.values()))
        self.slice_elements = self._first.slice_elements
        self.counts = self._first.counts
        #: Starts, cuts and losses of all members, in order.
        self.events: list[Start | Cut | Emptied] = []
        self.made: list[SetPush] = []
        #: True if a snapshot that is committed now may be cut within an iteration.
        self.is_excused = False

    # --- the interface of one oracle ----------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)

    @property
    def violations(self) -> list[str]:
        """Violations of all sets."""
        return [f"{name}: {text}" for name, one in self.by_name.items() for text in one.violations]

    @property
    def pushes(self) -> dict[tuple[str, int], Push]:
        """Pushes of all sets, by set and slot."""
        return {(name, slot): push for name, one in self.by_name.items() for slot, push in one.pushes.items()}

    @property
    def spoilt(self) -> bool:
        """See SnapshotOracle."""
        return self._first.spoilt

    @spoilt.setter
    def spoilt(self, value: bool) -> None:
        for one in self.by_name.values():
            one.spoilt = value

    def new_phase(self) -> None:
        """See SnapshotOracle."""
        for one in self.by_name.values():
            one.new_phase()

    def published(self, cluster: ClusterMap) -> None:
        """See Oracle."""
        for name, one in self.by_name.items():
            had = one.members
            one.published(cluster)
            entry = cluster.entry(name)
            one.members = bool(entry is not None and entry.members)
            if had and not one.members:
                self.events.append(Emptied(len(self._first.eras) - 1))
                self.counts["all members were lost, or left"] += 1

    def committed(self, record: str, bucket: Bucket) -> None:
        """See SnapshotOracle."""
        self.events.append(Cut(len(self._first.commits), self.is_excused))
        for one in self.by_name.values():
            one.committed(record, bucket)

    async def check_commits(self, loop: Any) -> None:
        """See SnapshotOracle. Afterwards, check that the sets of each snapshot agree."""
        for one in self.by_name.values():
            await one.check_commits(loop)
        self._check_events()
        self._check_eras()

    def check_stopped(self, phase: int, commits: int, lives: Sequence[Any]) -> None:
        """See SnapshotOracle. lives: the parts of all lives."""
        for name, one in self.by_name.items():
            one.check_stopped(phase, commits, [part for part in lives if part.name == name])

    # --- iterations ---------------------------------------------------------------------------------------------------

    def starts_iteration(self, worker_id: str, incarnation: int, position: Vector) -> None:
        """Record that a script starts an iteration."""
        self.events.append(Start(worker_id, self._first.phase, incarnation, position))
        self.counts["iterations started"] += 1

    def _check_events(self) -> None:
        """Check that scripts start iterations, and snapshots are cut, at valid positions.

        After all members of an era were lost, each of its sets stays at its own step. The next script begins there.
        """
        emptied: set[int] = set()
        #: Eras whose next snapshot may have been cut while nobody participated.
        unsaved: set[int] = set()
        moved: dict[int, Vector] = {}
        for event in self.events:
            if isinstance(event, Emptied):
                emptied.add(event.era)
                unsaved.add(event.era)
            elif isinstance(event, Cut):
                self._check_cut(event, emptied | unsaved, moved)
                unsaved -= {self._first.commits[event.number].era} - emptied
            elif (era := self._first.era_of_member(event)) is not None:
                if era in emptied:
                    emptied.discard(era)
                    moved[era] = event.position
                self._check_start(event, moved.get(era))

    def _check_cut(self, cut: Cut, emptied: set[int], moved: dict[int, Vector]) -> None:
        saved = [one.commits[cut.number] for one in self.by_name.values()]
        if not all(one.directory for one in saved):
            return  # One is unreadable, which was reported.
        position, era = tuple(one.step for one in saved), saved[0].era
        bases = [oracle.base_of_era(one.era) for oracle, one in zip(self.by_name.values(), saved, strict=True)]
        base = self._base(bases)
        if base is None:
            self._first.violation(f"{saved[0].record}: its sets began from different snapshots")
        elif any(self.order.number(position, start) is not None for start in (base, moved.get(era, base))):
            self.counts["cuts where an iteration starts"] += 1
        elif cut.is_excused or era in emptied or self._is_lost(moved.get(era, base)):
            self.counts["cuts within an iteration, excused"] += 1
        else:
            self._first.violation(f"{saved[0].record} is cut at {position}, within an iteration; it began at {base}")

    def _base(self, found: Iterable[Saved | str | None]) -> Vector | None:
        """Return the position that all sets began from, or None if they began from different snapshots."""
        bases = list(found)
        directories = {base.directory if isinstance(base, Saved) else base for base in bases}
        position = tuple(base.step if isinstance(base, Saved) else 0 for base in bases)
        return None if len(directories) > 1 and any(position) else position

    def _is_lost(self, base: Vector) -> bool:
        """True if a script that draws its iterations begins within one."""
        return not self.order.pattern and self.order.number(base) is None

    def _check_start(self, start: Start, moved: Vector | None) -> None:
        key = start.phase, start.worker_id, start.incarnation
        found = [one.base_of(*key) for one in self.by_name.values()]
        if None in found:
            return  # As far as anybody knows, it never was a member of all sets.
        base = moved or self._base(found)
        if base is None:
            self._first.violation(f"{start.worker_id} takes part in sets that began from different snapshots")
        elif self.order.number(start.position, base) is None and not self._is_lost(base):
            self._first.violation(
                f"{start.worker_id} in phase {start.phase} starts an iteration at {start.position}, within one of the "
                f"others; the run began at {base}"
            )

    def _check_eras(self) -> None:
        """Check that all sets rolled back together, to snapshots that contain all of them."""
        known = [{saved.directory for saved in one.commits} for one in self.by_name.values()]
        whole = set.intersection(*known)
        begun = {name: [era.base for era in one.eras if era.base in whole] for name, one in self.by_name.items()}
        # A set may be placed more than once before all of them have loaded the snapshot.
        bases = {name: [base for base, _ in itertools.groupby(each)] for name, each in begun.items()}
        if any(each != bases[self.order.names[0]] for each in bases.values()):
            self._first.violation(f"the sets went back to different snapshots: {bases}")

    # --- the end ------------------------------------------------------------------------------------------------------

    def check_made(self, weights: dict[str, Array]) -> None:
        """Check that each push in the final weights is of the step that its script intended."""
        for made in self.made:
            if made.push.step != made.step and weights[made.name][made.push.slot] != 0.0:
                self._first.violation(
                    f"a push of {made.push.life.worker_id} is step {made.push.step} of {made.name}, and was made for "
                    f"step {made.step}"
                )

    def check_undisturbed(self, weights: dict[str, Array], versions: dict[str, int], workers: Sequence[str]) -> None:
        """Check that each step of each set has one push of every worker."""
        self.counts["weights as of a run that nobody disturbed"] += 1
        for name, one in self.by_name.items():
            for step, who in enumerate(one.contributors(weights[name], versions[name])):
                if sorted(who) != sorted(workers):
                    self._first.violation(f"step {step} of {name} has pushes of {who}, though nobody was lost")
