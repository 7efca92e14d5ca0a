"""Readiness for snapshots: the sets and states to save, and those missing before an attempt can start. Pure.

``snapshots`` makes the attempts; ``schedule`` decides when one is due.
"""

from __future__ import annotations

from dataclasses import dataclass

from psdist.errors import SnapshotFailedError
from psdist_scheduler.events.cluster_state import ClusterSettings
from psdist_scheduler.placement.registry import ParameterSet, Registry
from psdist_scheduler.snapshots.catalog import Catalog
from psdist_scheduler.snapshots.schedule import EndSnapshot, EndState, SnapshotSchedule


@dataclass(slots=True)
class SnapshotReadiness:
    """The preconditions of snapshots of one run. It only reads."""

    _settings: ClusterSettings
    _registry: Registry
    _catalog: Catalog
    _schedule: SnapshotSchedule
    _end_snapshot: EndSnapshot

    @property
    def is_enabled(self) -> bool:
        """True if the run has a storage."""
        return bool(self._settings.storage)

    @property
    def ready(self) -> list[ParameterSet]:
        """Parameter sets that can be saved."""
        return [p for p in self._registry.all if p.state == "ready" and p.entry.shards]

    @property
    def doubt(self) -> str:
        """Why the newest snapshot is not known, as text that begins with "for"; empty if it is known."""
        return self._catalog.doubt if self.is_enabled else ""

    @property
    def obstacle(self) -> str:
        """Why no attempt can start now, as text that begins with "for"; empty if one can."""
        return self._lacking or (self.doubt if self._catalog.committing else "")

    @property
    def saves_at_end(self) -> bool:
        """True if something could be saved when the run ends, and the policy wants that."""
        is_able = self.is_enabled and self._catalog.known and self._settings.policy.at_end
        return is_able and not (self._catalog.replaced or self._lacking or self._registry.lost_text)

    @property
    def has_unsaved(self) -> bool:
        """True if something was trained, or may have been, that no snapshot contains and that is to be saved at the
        end.

        Values that are already lost do not count.
        """
        if not self.is_enabled or not self._settings.policy.at_end or self._registry.lost_text:
            return False
        if self._end_snapshot.state is EndState.TAKEN:
            return False
        return not self._catalog.known or self._schedule.has_trained(self.ready, self._catalog.saved_steps)

    @property
    def is_back(self) -> bool:
        """True if the run rolled back to the newest snapshot, and nothing trainable exists yet."""
        is_gathering = not any(p.record for p in self._registry.all)
        return not self.ready and is_gathering and self._registry.resume.base.restore is not None

    @property
    def hopeless(self) -> SnapshotFailedError | None:
        """Why no snapshot will ever be taken of the current state; None if one may be."""
        if self._catalog.replaced:
            return SnapshotFailedError(self._catalog.replaced)
        if lost := self._registry.lost_text:
            return SnapshotFailedError(f"there is nothing whole to save: {lost}")
        if not self.ready and not any(p.state == "loading" for p in self._registry.all):
            return SnapshotFailedError("there are no parameters to save yet: create them first")
        return None

    @property
    def _lacking(self) -> str:
        """Why there is nothing to save yet, as text that begins with "for"; empty if there is."""
        if not self._catalog.known:
            return self.doubt
        if loading := [p.name for p in self._registry.all if p.state == "loading"]:
            return f"for {loading[0]!r} to be loaded from the snapshot before"
        return "" if self.ready else "for parameters to be ready"
