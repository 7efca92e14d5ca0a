"""Lineage: the successive scheduler processes of this run, and the cluster maps that they published. Pure.

Each process continues from the state that its predecessor made durable, and numbers its epochs above that state's. So a
map, named by its process and epoch, belongs to this run's past exactly if that process is on record and had reached the
epoch when the next one took over. A member with any other map has seen a state that this scheduler does not know,
because the scheduler's store is gone or is an older copy. Numbers that the member relies on (incarnations, terms,
leases, versions) may be given a second time here, so the member must not be accepted.

Invariant: A map is published only after its epoch is durable, so every map that a member holds is in the store.
"""

from __future__ import annotations

from typing import Final

from psdist.errors import RunLostError
from psdist_scheduler.decide.cluster_events import SessionOpened
from psdist_scheduler.decide.cluster_state import SchedulerProcess, StoredState

#: Older processes are forgotten. A member that missed this many restarts is gone.
PROCESSES_KEPT: Final = 1000


class Lineage:
    """The part of the run that this scheduler has on record.

    stored: the state that it continues from; None for a new store.
    """

    def __init__(self, scheduler_id: str, stored: StoredState | None) -> None:
        self.scheduler_id = scheduler_id
        past = stored.schedulers[-PROCESSES_KEPT:] if stored is not None else ()
        if past and stored is not None:
            past = (*past[:-1], SchedulerProcess(past[-1].scheduler_id, stored.epoch))
        self._past = {process.scheduler_id: process.last_epoch for process in past}
        self._changed = True

    def missing(self, event: SessionOpened, epoch: int) -> str:
        """Return why the member's map is not on record; empty if it is.

        epoch: the current epoch.
        """
        if not event.scheduler_id:  # It holds no map, or its release does not report it.
            return ""
        whose = f"{event.member_id} holds cluster map {event.epoch}"
        if event.scheduler_id == self.scheduler_id:
            return "" if event.epoch <= epoch else f"{whose}, and this scheduler has published {epoch} at most"
        last = self._past.get(event.scheduler_id)
        if last is None:
            return f"{whose} of a scheduler that the store of this one does not know"
        return "" if event.epoch <= last else f"{whose}, and the store knew the run up to {last} when it was opened"

    @property
    def is_first(self) -> bool:
        """True if this scheduler began with an empty store."""
        return not self._past

    def knows(self, scheduler_id: str) -> bool:
        """Return True if the process is on record."""
        return scheduler_id == self.scheduler_id or scheduler_id in self._past

    def take_change(self) -> tuple[SchedulerProcess, ...]:
        """Return all processes, this one last, if that is not durable yet."""
        if not self._changed:
            return ()
        self._changed = False
        past = [SchedulerProcess(*item) for item in self._past.items()]
        return (*past, SchedulerProcess(self.scheduler_id))


def lost(why: str, remedy: str, **details: str) -> RunLostError:
    """Return the error for members whose part of the run is not on record."""
    return RunLostError(f"the scheduler's record of this run is gone: {why}. {remedy}", **details)
