"""Callers that wait for a snapshot: the attempt that serves each, and their answers. Pure.

A waiting worker makes no push until it is answered. So it is served by a cut that is reachable without one, and that
contains all of its pushes. Any other caller wants the current state: a cut that is agreed after its request.

``attempt`` handles attempts; ``schedule`` decides when one is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from psdist.changes import changes
from psdist.consistency import BSP
from psdist.errors import PsdistError
from psdist.snapshots.format import Manifest
from psdist_scheduler.datasets.datasets import Datasets
from psdist_scheduler.events.cluster_events import Answer, Draining, Effect, Refuse
from psdist_scheduler.events.cluster_state import Member
from psdist_scheduler.events.snapshot_events import CommitFound, Saved, Saving
from psdist_scheduler.placement.registry import ParameterSet
from psdist_scheduler.snapshots.attempt import Attempt, AttemptPhase

#: Interval in seconds at which a waiting caller is notified, so that a wait differs from a dead connection; and the
#: shortest pause between two notifications.
_REPEAT_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.2


@dataclass(slots=True)
class SnapshotWaiter:
    """A call that waits for a snapshot.

    next: next pushes of a waiting worker.
    drains: True for a server's call that wants to leave: it gets the answers of a drain, and continues afterwards.
    """

    call: int
    worker: Member | None
    next: dict[str, int]
    reason: str
    drains: bool = False
    #: Number of the attempt that will answer it; 0 for the next one.
    attempt: int = 0
    told: tuple[str, int, int] = ("", 0, 0)
    told_at: float = float("-inf")


class SnapshotWaiters:
    """All callers that wait for a snapshot."""

    def __init__(self) -> None:
        self._all: dict[int, SnapshotWaiter] = {}

    def __iter__(self) -> Iterator[SnapshotWaiter]:
        return iter(list(self._all.values()))

    def __bool__(self) -> bool:
        return bool(self._all)

    def __contains__(self, call: int) -> bool:
        return call in self._all

    @property
    def workers(self) -> list[SnapshotWaiter]:
        """Callers that make no push until they are answered."""
        return [waiter for waiter in self if waiter.worker is not None]

    def add(self, waiter: SnapshotWaiter, attempt: int) -> None:
        """Add a caller that waits for this attempt; 0 for the next one."""
        waiter.attempt = attempt
        self._all[waiter.call] = waiter

    def end_call(self, call: int) -> None:
        self._all.pop(call, None)

    def assign(self, attempt: int) -> None:
        """Assign all callers to this attempt; 0 for the next one."""
        for waiter in self:
            waiter.attempt = attempt

    def answer(self, waiter: SnapshotWaiter, value: Saved) -> list[Effect]:
        """Answer a caller whose snapshot exists."""
        self.end_call(waiter.call)
        return [] if waiter.drains else [Answer(waiter.call, value)]

    def refuse(self, waiter: SnapshotWaiter, error: PsdistError) -> list[Effect]:
        """Refuse a caller that no snapshot will serve."""
        self.end_call(waiter.call)
        return [] if waiter.drains else [Refuse(waiter.call, error)]

    def answer_all(self, attempt: int, value: Saved) -> list[Effect]:
        """Answer the callers that wait for this attempt."""
        return [effect for waiter in self if waiter.attempt == attempt for effect in self.answer(waiter, value)]

    def refuse_all(self, error: PsdistError, attempt: int | None = None) -> list[Effect]:
        """Refuse the callers that wait for this attempt; None for all."""
        refused = [waiter for waiter in self if attempt in (None, waiter.attempt)]
        return [effect for waiter in refused for effect in self.refuse(waiter, error)]

    def notify(self, text: str, done: int, total: int, now: float) -> list[Effect]:
        """Tell all callers the reason for the wait, and how many of ``total`` bytes are written."""
        effects: list[Effect] = []
        news = (text, done, total)
        for waiter in self:
            pause = now - waiter.told_at
            if pause >= _REPEAT_SECONDS or (news != waiter.told and pause >= _PAUSE_SECONDS):
                waiter.told, waiter.told_at = news, now
                effects.append(Answer(waiter.call, Draining(text, 0, 0) if waiter.drains else Saving(*news)))
        return effects


def place(waiter: SnapshotWaiter, attempt: Attempt) -> Literal["joins", "waits", "supersedes"]:
    """Return whether the attempt in progress serves a new caller ("joins"), precedes ("waits") or obstructs
    ("supersedes") the attempt that will serve it."""
    early = attempt.phase <= AttemptPhase.MARKING
    if waiter.worker is None:
        if attempt.due.ahead and not attempt.reached:
            return "supersedes"
        return "joins" if early else "waits"
    marked = attempt.marks.get(waiter.worker.identity)
    for name in attempt.parameters:
        wanted = waiter.next.get(name)
        step = attempt.steps.get(name)
        if wanted is None:
            continue
        if step is None:
            if not early and (marked is None or marked.get(name, 0) < wanted):
                return "waits"
        elif wanted < step and not attempt.reached:
            return "supersedes"
        elif wanted > step:
            return "supersedes" if early else "waits"
    return "joins"


def is_idle(p: ParameterSet, waiting: Iterable[Mapping[str, int]]) -> bool:
    """Return True if no step of a BSP parameter set is possible while workers wait whose next pushes are
    ``waiting``."""
    consistency = p.entry.spec.consistency
    return isinstance(consistency, BSP) and sum(p.name in next for next in waiting) > consistency.backup_workers


def is_as_saved(manifest: Manifest, parameters: Iterable[ParameterSet], datasets: Datasets) -> bool:
    """Return True if a snapshot that has all steps also matches in everything else.

    A run that resumed from it may have other settings, or have reset an optimizer's state.
    """
    for p in parameters:
        state, entry = manifest.state(p.name), p.entry
        if state is None or state.state_since != entry.state_since or changes(state.spec, entry.spec):
            return False
    return datasets.stand_as_in(manifest)


def serves(found: CommitFound, waiter: SnapshotWaiter, ready: list[ParameterSet], datasets: Datasets) -> bool:
    """Return True if an existing snapshot contains everything that a waiting worker pushed and used."""
    if waiter.worker is None or not waiter.next or {p.name for p in ready} != set(found.commit.steps):
        return False
    worker = waiter.worker.identity
    for name, wanted in waiter.next.items():
        state = found.manifest.state(name)
        if state is None:
            return False
        known = isinstance(state.spec.consistency, BSP) or any((w, i) == worker for w, i, _ in state.next)
        if not known or wanted > state.next_of(worker):
            return False
    return is_as_saved(found.manifest, ready, datasets)
