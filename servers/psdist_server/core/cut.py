"""The cut of one snapshot attempt through the slices of a parameter set that this server serves. Pure.

A slice is at the cut when it is what the snapshot must contain: in BSP at the step of the cut; in SSP and ASP when it
has each producer's pushes before the cut, and no others. From then on it must be copied before its next update. The
writer takes slices in the order of the files. It takes the copy of a slice that was copied, and has the others copied.

Invariants, checked by ``validate``: a slice is copied once, when it is at the cut, and before an update changes it.
Copies for updates stay within ``CopyBudget``. An update that exceeds it waits until its slice has been copied for the
writer, or another copy has been written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from psdist_server.core.records import Producer, SliceRecord


@dataclass(slots=True)
class CopyBudget:
    """Bytes for copies that updates ask for, shared by all cuts of a server."""

    limit: int
    used: int = 0
    #: Bytes whose memory was touched before copies use it.
    prefaulted: int = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether another copy must wait. The first one never does, whatever its size."""
        return self.used >= self.limit

    def prefault(self, size: int) -> int:
        """How many of ``size`` bytes may be touched ahead of time."""
        size = min(size, self.limit - self.prefaulted)
        self.prefaulted += size
        return size

    def acquire(self, size: int) -> None:
        """A copy of ``size`` bytes begins."""
        self.used += size

    def release(self, size: int) -> None:
        """A copy is needed no more."""
        self.used -= size


@dataclass(slots=True)
class CutState:
    """Which slices have reached the cut, which of them are being copied, are copied, or are written.

    step: that of the cut in BSP, else None.
    sizes: bytes of each slice's arrays by slice, of all that are to be written.
    """

    step: int | None
    sizes: Mapping[int, int]
    budget: CopyBudget
    #: SSP and ASP, once it is agreed: the first push of each producer that is not in the snapshot.
    following: Mapping[Producer, int] | None = None
    #: Versions at the cut of the slices that have reached it.
    versions: dict[int, int] = field(default_factory=dict)
    #: Slices of which a copy is being made, and those of which there is one.
    copying: set[int] = field(default_factory=set)
    copied: set[int] = field(default_factory=set)
    #: Slices that were written, or that are needed no more.
    done: set[int] = field(default_factory=set)
    #: Slices whose copy counts against the budget.
    _budgeted: set[int] = field(default_factory=set)

    def agree(self, following: Mapping[Producer, int]) -> None:
        """SSP and ASP: the first push of each producer that is not in the snapshot."""
        self.following = following

    def check(self, index: int, record: SliceRecord) -> bool:
        """Whether slice ``index``, of which no update is under way, has reached the cut just now, as ``record`` has it.
        Raises ValueError where it has gone past the cut, so that this cut cannot be taken."""
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
        """Whether an update of slice ``index`` overwrites nothing that the snapshot needs."""
        return index not in self.versions or index in self.copied or index in self.done

    def needs_copy(self, index: int) -> bool:
        """Whether slice ``index`` is at the cut and no copy of it was begun."""
        return not self.is_safe(index) and index not in self.copying

    def blocks_update(self, index: int) -> bool:
        """Whether an update of slice ``index`` must wait: its copy is being made, or has to be and exceeds the
        budget."""
        return not self.is_safe(index) and (index in self.copying or self.budget.is_exhausted)

    def copy_for_update(self, index: int) -> None:
        """Slice ``index`` is being copied for an update that changes it next."""
        self.copying.add(index)
        self._budgeted.add(index)
        self.budget.acquire(self.sizes[index])

    def copy_for_writer(self, index: int) -> None:
        """Slice ``index`` is being copied for the writer, which writes it next."""
        self.copying.add(index)

    def copy_finished(self, index: int) -> None:
        """The copy of slice ``index`` is made."""
        self.copying.discard(index)
        if index in self.sizes and index not in self.done:
            self.copied.add(index)

    def written(self, index: int) -> None:
        """Slice ``index`` is in its file."""
        self._end(index)

    def drop(self, indices: Iterable[int]) -> None:
        """Nothing of these slices is needed any more."""
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
        """Asserts the invariants."""
        assert self.copying | self.copied <= self.versions.keys(), (self.copying, self.copied, self.versions)
        assert not self.copying & self.copied, (self.copying, self.copied)
        assert not self.copied & self.done, (self.copied, self.done)
        assert self._budgeted <= self.copying | self.copied, (self._budgeted, self.copying, self.copied)
