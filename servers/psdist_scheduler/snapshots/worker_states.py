"""States that workers keep themselves and add to snapshots: who keeps one, and what an attempt waits for. Pure.

A worker that keeps a state is asked before the cut is final, as are those whose pushes are marked. It answers before
which push the state can be taken. Then its file is written while servers write theirs, and the snapshot is committed
when all of them are there. An attempt does not wait for a worker that is lost meanwhile.

Invariants: there is at most one file for each parameter set and rank. A state that is accepted was asked for, comes
from the incarnation that was asked, and is from before the push that the cut names.

Not here: the files (``snapshot_io``).
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
from psdist_scheduler.events.records import Identity, Member, name_some
from psdist_scheduler.events.worker_events import Caller
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.registry import ParameterSet

if TYPE_CHECKING:
    from psdist_scheduler.snapshots.attempt import Attempt


@dataclass(slots=True)
class WorkerStateUploads:
    """What one attempt asks of those who keep states, and what it has got.

    answers: by worker that is asked, whether it has answered. numbers: of the parameter sets, by name, in the manifest.
    """

    answers: dict[Identity, bool] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    #: By worker and parameter set, the push before which the state is taken.
    _wanted: dict[tuple[Identity, str], int] = field(default_factory=dict)
    _taken: dict[tuple[Identity, str], WorkerState] = field(default_factory=dict)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(worker for worker, _ in self.answers)

    @property
    def missing(self) -> bool:
        """Whether something is still to be handed in."""
        return not self._wanted.keys() <= self._taken.keys()

    @property
    def waiting_for(self) -> str:
        """Whom it waits for, as a sentence that begins with "for"."""
        workers = {worker for (worker, _), _ in self._wanted.keys() - self._taken.keys()}
        return f"for {name_some(sorted(workers))} to hand in what it keeps"

    @property
    def files(self) -> tuple[WorkerState, ...]:
        """For the manifest."""
        return tuple(sorted(self._taken.values(), key=lambda state: state.file))

    def on_marked(self, worker: Identity, event: sn.Marked, steps: Mapping[str, int]) -> dict[str, int]:
        """A worker that was asked has answered. steps: of the cut, by BSP parameters.

        Returns the steps that are needed instead, where the worker has gone on from before the cut.
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
        """Stops waiting for workers that are gone. States that they have sent stay, if an answer named them."""
        for worker in [worker for worker in self.answers if not is_live(*worker)]:
            del self.answers[worker]
            for key in [key for key in self._wanted if key[0] == worker and key not in self._taken]:
                del self._wanted[key]
            for key in [key for key in self._taken if key[0] == worker and key not in self._wanted]:
                del self._taken[key]

    def place(self, worker: Member, event: sn.HandIn, directory: str) -> sn.StatePlace:
        """Where a file is to be written; nowhere if it is there. Raises SnapshotFailedError where it is not wanted, and
        LimitExceededError."""
        if event.length > limits.STATE_BYTES_MAX:
            raise LimitExceededError(
                f"a state of {event.length} bytes is over the limit of {limits.STATE_BYTES_MAX}: keep less"
            )
        key = worker.identity, event.parameters
        if not self._takes(key, event.next):
            raise SnapshotFailedError(
                f"the state of {event.parameters!r} before push {event.next} is not what the snapshot wants"
            )
        file = state_file_name(self.numbers[event.parameters], worker.rank)
        return sn.StatePlace(directory, "" if key in self._taken else file, worker.rank)

    def on_handed_in(self, event: sn.HandedIn) -> None:
        key = event.worker, event.state.parameters
        if self._takes(key, event.state.next):
            self._taken.setdefault(key, event.state)

    def _takes(self, key: tuple[Identity, str], before: int) -> bool:
        """Whether the state before this push is wanted, or may be: a file may come before the answer that names it, as
        these are two calls."""
        is_early = self.answers.get(key[0]) is False and key[1] in self.numbers
        return is_early or self._wanted.get(key) == before


@dataclass(slots=True)
class WorkerStateRegistry:
    """The workers that keep states, and of which parameter sets."""

    _members: Membership
    _names: dict[Identity, tuple[str, ...]] = field(default_factory=dict)

    def of(self, parameters: Iterable[ParameterSet]) -> list[Identity]:
        """Live members of these parameter sets that keep states of them."""
        self._names = {worker: names for worker, names in self._names.items() if self._members.is_live(*worker)}
        members = [(p.name, (m.worker_id, m.incarnation)) for p in parameters for m in p.entry.members]
        return list(dict.fromkeys(worker for name, worker in members if name in self._names.get(worker, ())))

    def are_new(self, attempt: Attempt) -> bool:
        """Whether somebody keeps a state that the attempt did not ask."""
        return bool(self._names) and any(w not in attempt.kept.answers for w in self.of(attempt.cut.parameters))

    def on(self, event: sn.Keeps | sn.HandIn | sn.HandedIn, attempt: Attempt | None, now: float) -> list[Effect]:
        """A worker's report, and what became of its file. Raises FencedError, SnapshotFailedError,
        LimitExceededError."""
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
            raise SnapshotFailedError("no snapshot is under way that wants what this worker keeps")
        return [Answer(event.call, attempt.kept.place(worker, event, attempt.directory))]

    def get(self, event: sn.GetState, found: sn.CommitFound | None) -> list[Effect]:
        """A worker wants what its rank handed in for the snapshot ``found``. Raises FencedError."""
        worker = self._members.check_caller(Caller(event.run_id, event.worker_id, event.incarnation))
        if found is None:
            return [Answer(event.call, sn.StateSource())]
        state = found.manifest.worker_state(event.parameters, worker.rank)
        return [Answer(event.call, sn.StateSource(found.manifest, state))]
