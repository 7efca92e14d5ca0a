"""Worker states that one attempt at a snapshot requests: the expected ones, and those that arrived. Pure.

A worker with state of its own is asked before the cut is final, as are those whose pushes are marked. It answers with
the push before which the state can be taken. Its file is written while servers write theirs, and the snapshot is
committed when all of them are durable. An attempt does not wait for a worker that is lost meanwhile.

Invariants: There is at most one file per parameter set and rank. An accepted state was requested, comes from the
incarnation that was asked, and is from before the push that the cut names.

``worker_states`` knows which workers have state; files are written by ``snapshot_io``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from psdist.errors import LimitExceededError, SnapshotFailedError
from psdist.snapshots.format import WorkerState, state_file_name
from psdist.wire import limits
from psdist_scheduler.events import snapshot_events as sn
from psdist_scheduler.events.cluster_state import Identity, Member, name_some


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

        A worker that was asked for its marks alone, because it had not announced its states yet, may name some.

        steps: step of the cut, by BSP parameter set.
        """
        if self.answers.get(worker, not event.keeps):
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

    def place(self, worker: Member, event: sn.StateOffered, directory: str) -> sn.StatePlace:
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

    def on_written(self, event: sn.StateWritten) -> None:
        key = event.worker, event.state.parameters
        if self._takes(key, event.state.next):
            self._taken.setdefault(key, event.state)

    def _takes(self, key: tuple[Identity, str], before: int) -> bool:
        """Return True if the state before this push is wanted, or may be.

        A file may arrive before the answer that names it, since these are two calls.
        """
        is_early = self.answers.get(key[0]) is False and key[1] in self.numbers
        return is_early or self._wanted.get(key) == before
