"""Contents of a store's slices: which of them kernels are writing, and the record that describes each slice's arrays.

The applier reports each write. The replicator copies a slice when it is quiescent: its content is complete and no
kernel is writing it. An update can be in the arrays before the shard's machine counts it, namely until the replicas
have acknowledged it. The record of such a slice is ahead of the machine's by that update.

Invariant: the record of a quiescent slice describes exactly the content of its arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from psdist_server.core.events import Apply, SliceRecord
from psdist_server.kernels.arrays import DenseParameters


class SliceContents:
    """Tracks writes to the slices of one parameter store.

    counted: returns the machine's record of a slice that is served here.
    """

    def __init__(self, dense: DenseParameters, counted: Callable[[int], SliceRecord]) -> None:
        self._dense = dense
        self._counted = counted
        self._writing: set[int] = set()
        #: Updates that are in the arrays and not yet counted by the machine.
        self._ahead: dict[int, Apply] = {}
        self._callbacks: dict[int, list[Callable[[], None]]] = {}

    def write_started(self, index: int) -> None:
        """Record that a kernel is about to write slice ``index``."""
        self._writing.add(index)

    def write_ended(self, effect: Apply) -> None:
        """Record that an update is in the arrays. ``notify`` comes next."""
        self._writing.discard(effect.index)
        self._ahead[effect.index] = effect

    def update_counted(self, index: int) -> None:
        """Record that the machine is about to count the update in the arrays of slice ``index``."""
        self._ahead.pop(index, None)

    def when_quiescent(self, index: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` as soon as slice ``index`` is quiescent: now, or after the current write."""
        is_missing = index in self._dense.held and index not in self._dense.installed
        if is_missing or index in self._writing:
            self._callbacks.setdefault(index, []).append(callback)
        else:
            callback()

    def notify(self, index: int) -> None:
        """Run the callbacks of slice ``index``, which has become quiescent or was dropped."""
        for callback in self._callbacks.pop(index, ()):
            callback()

    def record(self, index: int) -> SliceRecord:
        """Return the record of a quiescent slice that is served here."""
        record = self._counted(index)
        if (effect := self._ahead.get(index)) is not None:
            record.advance(effect.contributors, effect.sequence)
        return record

    def drop(self, indices: Collection[int]) -> None:
        """Forget the writes of slices that are no longer updated here."""
        for index in indices:
            self._ahead.pop(index, None)
            self._writing.discard(index)
            self.notify(index)
