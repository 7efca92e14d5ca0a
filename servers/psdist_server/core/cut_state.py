"""The cut of one snapshot attempt through the slices of a parameter set that this server serves. Pure.

A slice is at the cut when it has exactly the content for the snapshot. In BSP: it is at the step of the cut. In SSP
and ASP: it has each producer's pushes before the cut, and no others. From then on it must be copied before its next
update. The writer takes slices in file order: it uses an existing copy, or requests one.

Invariants, checked by ``validate``: A slice is copied once, when it is at the cut and before an update changes it.
Copies for updates stay within ``CopyBudget``. An update that would exceed the budget waits until its slice has been
copied for the writer, or another copy has been written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from psdist_server.core.shard import Producer, SliceRecord


@dataclass(slots=True)
class CopyBudget:
    """Byte budget for copies that updates ask for, shared by all cuts of a server."""

    limit: int
    used: int = 0
    #: Bytes of copy memory touched in advance.
    prefaulted: int = 0

    @property
    def is_exhausted(self) -> bool:
        """True if another copy must wait. The first copy never waits, whatever its size."""
        return self.used >= self.limit

    def prefault(self, size: int) -> int:
        """Reserve up to ``size`` bytes for prefaulting. Returns the number of bytes granted."""
        size = min(size, self.limit - self.prefaulted)
        self.prefaulted += size
        return size

    def acquire(self, size: int) -> None:
        """Charge a copy of ``size`` bytes that is starting."""
        self.used += size

    def release(self, size: int) -> None:
        """Release a copy of ``size`` bytes."""
        self.used -= size


@dataclass(slots=True)
class CutState:
    """State of each slice in the cut: reached, being copied, copied, or written.

    step: step of the cut in BSP, else None.
    sizes: bytes of all arrays of each slice, for every slice to be written.
    """

    step: int | None
    sizes: Mapping[int, int]
    budget: CopyBudget
    #: SSP and ASP, once agreed: the first push of each producer that is not in the snapshot.
    following: Mapping[Producer, int] | None = None
    #: Versions at the cut of the slices that have reached it.
    versions: dict[int, int] = field(default_factory=dict)
    #: Slices being copied, and slices with a complete copy.
    copying: set[int] = field(default_factory=set)
    copied: set[int] = field(default_factory=set)
    #: Slices that were written, or are no longer needed.
    done: set[int] = field(default_factory=set)
    #: Slices whose copy counts against the budget.
    _budgeted: set[int] = field(default_factory=set)

    def agree(self, following: Mapping[Producer, int]) -> None:
        """SSP and ASP: set the first push of each producer that is not in the snapshot."""
        self.following = following

    def check(self, index: int, record: SliceRecord) -> bool:
        """Return True if slice ``index``, which has no update in progress and whose state is ``record``, has just
        reached the cut.

        Raises ValueError if the slice has passed the cut, so that this cut cannot be taken.
        """
        if index not in self.sizes or index in self.versions or index in self.done:
            return False
        if not self._at_cut(index, record):
            return False
        self.versions[index] = record.version
        return True

    def _at_cut(self, index: int, record: SliceRecord) -> bool:
        if self.step is not None:
            if record.version > self.step:
                raise ValueError(f"slice {index} is at step {record.version}, past the cut at step {self.step}")
            return record.version == self.step
        if self.following is None:
            return False
        behind = False
        for life, following in self.following.items():
            known = record.producers.get(life, 0)
            if known > following:
                raise ValueError(f"slice {index} has push {known - 1} of {life[0]}, past the cut at push {following}")
            behind = behind or known < following
        return not behind

    def is_safe(self, index: int) -> bool:
        """True if an update of slice ``index`` overwrites nothing that the snapshot needs."""
        return index not in self.versions or index in self.copied or index in self.done

    def needs_copy(self, index: int) -> bool:
        """True if slice ``index`` is at the cut and no copy of it has been started."""
        return not self.is_safe(index) and index not in self.copying

    def blocks_update(self, index: int) -> bool:
        """True if an update of slice ``index`` must wait: its copy is in progress, or is needed and exceeds the
        budget."""
        return not self.is_safe(index) and (index in self.copying or self.budget.is_exhausted)

    def copy_for_update(self, index: int) -> None:
        """Start copying slice ``index`` for an update that changes it next. Charged to the budget."""
        self.copying.add(index)
        self._budgeted.add(index)
        self.budget.acquire(self.sizes[index])

    def copy_for_writer(self, index: int) -> None:
        """Start copying slice ``index`` for the writer, which writes it next."""
        self.copying.add(index)

    def copy_finished(self, index: int) -> None:
        """Record that the copy of slice ``index`` is complete."""
        self.copying.discard(index)
        if index in self.sizes and index not in self.done:
            self.copied.add(index)

    def written(self, index: int) -> None:
        """Record that slice ``index`` is in its file."""
        self._end(index)

    def drop(self, indices: Iterable[int]) -> None:
        """Release these slices; the snapshot no longer needs them."""
        for index in indices:
            self._end(index)

    def _end(self, index: int) -> None:
        self.copied.discard(index)
        self.done.add(index)
        if index in self._budgeted:
            self._budgeted.discard(index)
            self.budget.release(self.sizes[index])

    @property
    def copied_bytes(self) -> int:
        """Bytes of copies that updates asked for."""
        return sum(self.sizes[index] for index in self._budgeted)

    def validate(self) -> None:
        """Assert the invariants."""
        assert self.copying | self.copied <= self.versions.keys(), (self.copying, self.copied, self.versions)
        assert not self.copying & self.copied, (self.copying, self.copied)
        assert not self.copied & self.done, (self.copied, self.done)
        assert self._budgeted <= self.copying | self.copied, (self._budgeted, self.copying, self.copied)
