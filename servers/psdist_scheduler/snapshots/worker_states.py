"""Workers that save state of their own in snapshots, and their calls about it. Pure.

``state_uploads`` tracks the states that one attempt requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from psdist.errors import SnapshotFailedError
from psdist_scheduler.events import snapshot_events as sn
from psdist_scheduler.events.cluster_events import Answer, Effect
from psdist_scheduler.events.cluster_state import Identity
from psdist_scheduler.events.worker_events import Caller
from psdist_scheduler.members.membership import Membership
from psdist_scheduler.placement.registry import ParameterSet
from psdist_scheduler.snapshots.attempt import Attempt, AttemptPhase


@dataclass(slots=True)
class WorkerStateRegistry:
    """Workers that save state of their own, and the parameter sets that it belongs to."""

    _members: Membership
    _names: dict[Identity, tuple[str, ...]] = field(default_factory=dict)

    def live_owners(self, parameters: Iterable[ParameterSet]) -> list[Identity]:
        """Return live members of these parameter sets that save state for them."""
        self._names = {worker: names for worker, names in self._names.items() if self._members.is_live(*worker)}
        members = [(p.name, (m.worker_id, m.incarnation)) for p in parameters for m in p.entry.members]
        return list(dict.fromkeys(worker for name, worker in members if name in self._names.get(worker, ())))

    def are_new(self, attempt: Attempt) -> bool:
        """Return True if a worker saves state that the attempt did not ask."""
        owners = self.live_owners(attempt.parameters.values()) if self._names else ()
        return any(worker not in attempt.uploads.answers for worker in owners)

    def on_announced(self, event: sn.StatesAnnounced) -> list[Effect]:
        """Record the parameter sets for which a worker saves state."""
        if (member := self._members.by_session(event.call)) is not None:
            self._names[member.identity] = event.parameters
        return []

    def on_upload(self, event: sn.StateOffered | sn.StateWritten, attempt: Attempt | None, now: float) -> list[Effect]:
        """Process a worker's request to hand in a file, or a durable file. Raises FencedError, SnapshotFailedError and
        LimitExceededError."""
        if attempt is not None:
            takes_states = attempt.phase in (AttemptPhase.MARKING, AttemptPhase.CUTTING)
            attempt = attempt if takes_states and event.attempt == attempt.number else None
        if attempt is not None:
            attempt.moved = now
        if isinstance(event, sn.StateWritten):
            if attempt is not None:
                attempt.uploads.on_written(event)
            return []
        worker = self._members.check_caller(Caller(event.run_id, event.worker_id, event.incarnation))
        if attempt is None:
            raise SnapshotFailedError("no snapshot in progress needs the state of this worker")
        return [Answer(event.call, attempt.uploads.place(worker, event, attempt.directory))]

    def get(self, event: sn.GetState, found: sn.CommitFound | None) -> list[Effect]:
        """Return what the worker's rank handed in for the snapshot ``found``. Raises FencedError."""
        worker = self._members.check_caller(Caller(event.run_id, event.worker_id, event.incarnation))
        if found is None:
            return [Answer(event.call, sn.StateSource())]
        state = found.manifest.worker_state(event.parameters, worker.rank)
        return [Answer(event.call, sn.StateSource(found.manifest, state))]
