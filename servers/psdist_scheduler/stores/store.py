"""Interface of the store: state that a restarted scheduler needs, made durable before anybody acts on it."""

from __future__ import annotations

from collections.abc import Sequence

from psdist_scheduler.events.cluster_events import Persist
from psdist_scheduler.events.cluster_state import EventRecord, StoredState


class Store:
    """Interface of the store, and a store that keeps nothing. Calls block; only one is made at a time."""

    #: True if ``write_events`` keeps them.
    keeps_events = False

    def load(self) -> StoredState | None:
        """Return the stored state; None if there is none yet."""
        return None

    def write(self, changes: Persist) -> None:
        """Make the changes durable, all or none, before returning."""

    def load_events(self) -> list[EventRecord]:
        """Return the stored history of the run, oldest first."""
        return []

    def write_events(self, records: Sequence[EventRecord]) -> None:
        """Add to the history. A failure is only logged: the run does not depend on it."""

    def discard(self) -> None:
        """Delete the stored state and close the store, because the run has ended."""
        self.close()

    def close(self) -> None:
        """Release the store for another scheduler."""

    def check(self) -> None:
        """Return if this process may still write. Raises LeadershipLostError; does not block."""
