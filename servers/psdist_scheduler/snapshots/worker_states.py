"""Worker-local states in snapshots: which workers have one, and what an attempt still waits for. Pure.

A worker with state of its own is asked before the cut is final, as are those whose pushes are marked. It answers with
the push before which the state can be taken. Its file is written while servers write theirs, and the snapshot is
committed when all of them are durable. An attempt does not wait for a worker that is lost meanwhile.

Invariants: There is at most one file per parameter set and rank. An accepted state was requested, comes from the
incarnation that was asked, and is from before the push that the cut names.

Files are written by ``snapshot_io``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from psdist.errors import LimitExceededError, SnapshotFailedError
from psdist.snapshots.format import WorkerState, state_file_name
from psdist.wire import limits
from psdist_scheduler.events import snapshot_events as sn
from psdist_scheduler.events.cluster_events import Answer, Effect
from psdist_scheduler.events.cluster_state import Identity, Member, name_some
from psdist_scheduler.events.worker_events import Caller
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.registry import ParameterSet

if TYPE_CHECKING:
    from psdist_scheduler.snapshots.attempt import Attempt


@dataclass(slots=True)
class WorkerStateUploads:
    """Worker states that one attempt requests, and those that arrived.

    answers: True by worker once it has answered.
    numbers: position of each parameter set in the manifest, by name.
    """

    answers: dict[Identity, bool] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    #: Push before which the state is taken, by worker and parameter set.
    _wanted: dict[tuple[Identity, str], int] = field(default_factory=dict)
    _taken: dict[tuple[Identity, str], WorkerState] = field(default_factory=dict)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(worker for worker, _ in self.answers)

    @property
    def missing(self) -> bool:
        """True if a state is still to be handed in."""
        return not self._wanted.keys() <= self._taken.keys()

    @property
    def waiting_for(self) -> str:
        """Reason for the wait, as text that begins with "for"."""
        workers = {worker for (worker, _), _ in self._wanted.keys() - self._taken.keys()}
        return f"for {name_some(sorted(workers))} to hand in its state"

    @property
    def files(self) -> tuple[WorkerState, ...]:
        """States for the manifest."""
        return tuple(sorted(self._taken.values(), key=lambda state: state.file))

    def on_marked(self, worker: Identity, event: sn.Marked, steps: Mapping[str, int]) -> dict[str, int]:
        """Record a worker's answer. Returns the steps to use instead if the worker has already passed the cut.

        steps: step of the cut, by BSP parameter set.
        """
        if self.answers.get(worker, True):
            return {}
        self.answers[worker] = True
        early = {key: self._taken.pop(key) for key in list(self._taken) if key[0] == worker}
        pushes, later = dict(event.next), dict[str, int]()
        for name, lowest in event.keeps:
            before = steps.get(name, pushes.get(name, 0))
            if name in self.numbers:
                self._wanted[worker, name] = before
                if (state := early.get((worker, name))) is not None and state.next == before:
                    self._taken[worker, name] = state
            if lowest > before and name in steps:
                later[name] = lowest
        return later

    def forget(self, is_live: Callable[[str, int], bool]) -> None:
        """Stop waiting for workers that are gone. States that they sent are kept if an answer named them."""
        for worker in [worker for worker in self.answers if not is_live(*worker)]:
            del self.answers[worker]
            for key in [key for key in self._wanted if key[0] == worker and key not in self._taken]:
                del self._wanted[key]
            for key in [key for key in self._taken if key[0] == worker and key not in self._wanted]:
                del self._taken[key]

    def place(self, worker: Member, event: sn.HandIn, directory: str) -> sn.StatePlace:
        """Return where to write a file; nowhere if it exists already. Raises LimitExceededError, and
        SnapshotFailedError if it is not wanted."""
        if event.length > limits.STATE_BYTES_MAX:
            raise LimitExceededError(
                f"a state of {event.length} bytes is over the limit of {limits.STATE_BYTES_MAX}: save less"
            )
        key = worker.identity, event.parameters
        if not self._takes(key, event.next):
            raise SnapshotFailedError(
                f"the state of {event.parameters!r} before push {event.next} is not the one that the snapshot needs"
            )
        file = state_file_name(self.numbers[event.parameters], worker.rank)
        return sn.StatePlace(directory, "" if key in self._taken else file, worker.rank)

    def on_handed_in(self, event: sn.HandedIn) -> None:
        key = event.worker, event.state.parameters
        if self._takes(key, event.state.next):
            self._taken.setdefault(key, event.state)

    def _takes(self, key: tuple[Identity, str], before: int) -> bool:
        """Return True if the state before this push is wanted, or may be.

        A file may arrive before the answer that names it, since these are two calls.
        """
        is_early = self.answers.get(key[0]) is False and key[1] in self.numbers
        return is_early or self._wanted.get(key) == before


@dataclass(slots=True)
class WorkerStateRegistry:
    """Workers that save state of their own, and the parameter sets that it belongs to."""

    _members: Membership
    _names: dict[Identity, tuple[str, ...]] = field(default_factory=dict)

    def of(self, parameters: Iterable[ParameterSet]) -> list[Identity]:
        """Return live members of these parameter sets that save state for them."""
        self._names = {worker: names for worker, names in self._names.items() if self._members.is_live(*worker)}
        members = [(p.name, (m.worker_id, m.incarnation)) for p in parameters for m in p.entry.members]
        return list(dict.fromkeys(worker for name, worker in members if name in self._names.get(worker, ())))

    def are_new(self, attempt: Attempt) -> bool:
        """Return True if a worker saves state that the attempt did not ask."""
        return bool(self._names) and any(w not in attempt.kept.answers for w in self.of(attempt.cut.parameters))

    def on(self, event: sn.Keeps | sn.HandIn | sn.HandedIn, attempt: Attempt | None, now: float) -> list[Effect]:
        """Process a worker's announcement, its request to hand in a file, or a file that was handed in. Raises
        FencedError, SnapshotFailedError and LimitExceededError."""
        if isinstance(event, sn.Keeps):
            member = self._members.by_session(event.call)
            if member is not None:
                self._names[member.identity] = event.parameters
            return []
        if attempt is not None and not attempt.is_handed_to(event.attempt):
            attempt = None
        if attempt is not None:
            attempt.touch(now)
        if isinstance(event, sn.HandedIn):
            if attempt is not None:
                attempt.kept.on_handed_in(event)
            return []
        worker = self._members.check_caller(Caller(event.run_id, event.worker_id, event.incarnation))
        if attempt is None:
            raise SnapshotFailedError("no snapshot in progress needs the state of this worker")
        return [Answer(event.call, attempt.kept.place(worker, event, attempt.directory))]

    def get(self, event: sn.GetState, found: sn.CommitFound | None) -> list[Effect]:
        """Return what the worker's rank handed in for the snapshot ``found``. Raises FencedError."""
        worker = self._members.check_caller(Caller(event.run_id, event.worker_id, event.incarnation))
        if found is None:
            return [Answer(event.call, sn.StateSource())]
        state = found.manifest.worker_state(event.parameters, worker.rank)
        return [Answer(event.call, sn.StateSource(found.manifest, state))]
