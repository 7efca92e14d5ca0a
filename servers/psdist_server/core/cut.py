"""The cut of one snapshot attempt through the slices of a parameter set that this server serves. Pure.

A slice is ``at_cut`` when it is what the snapshot must contain: in BSP at the step of the cut; in SSP and ASP when it
has each producer's pushes before the cut, and no others. From then on it must be copied before its next update. The
writer takes slices in the order of the files. It takes the copy of a slice that was copied, and has the others copied.

Invariants, checked by ``validate``: a slice is copied once, when it is at the cut, and before an update changes it.
Copies for updates stay within ``CopyBudget``. An update that finds no room waits until its slice has been copied for
the writer, or another copy has been written.
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
    #: Bytes that were made ready for copies before they are used.
    prepared: int = 0

    @property
    def is_full(self) -> bool:
        """Whether another copy must wait. The first one never does, whatever its size."""
        return self.used >= self.limit

    def prepare(self, size: int) -> int:
        """How many of ``size`` bytes may be made ready."""
        size = min(size, self.limit - self.prepared)
        self.prepared += size
        return size

    def take(self, size: int) -> None:
        """A copy of ``size`` bytes is begun."""
        self.used += size

    def give_back(self, size: int) -> None:
        """A copy is not needed any more."""
        self.used -= size


@dataclass(slots=True)
class SnapshotCut:
    """What is known of each slice. ``step`` is that of the cut in BSP, else None.

    sizes: bytes of each slice's arrays by slice, of all that are to be written.
    """

    step: int | None
    sizes: Mapping[int, int]
    room: CopyBudget
    #: SSP and ASP, once it is agreed: the first push of each producer that is not in the snapshot.
    following: Mapping[Producer, int] | None = None
    #: By ripe slice its version at the cut.
    versions: dict[int, int] = field(default_factory=dict)
    #: Slices of which a copy is being made, and those of which there is one.
    copying: set[int] = field(default_factory=set)
    aside: set[int] = field(default_factory=set)
    #: Slices that were written, or that are served elsewhere now.
    done: set[int] = field(default_factory=set)
    #: Slices whose copy takes room.
    _in_room: set[int] = field(default_factory=set)

    def look(self, index: int, record: SliceRecord) -> bool:
        """Slice ``index``, of which no update is under way, is what ``record`` says; whether it is ripe by that now and
        was not before. Raises ValueError where it has gone past the cut, which then cannot be had."""
        if index not in self.sizes or index in self.versions or index in self.done:
            return False
        if not self._is_ripe(index, record):
            return False
        self.versions[index] = record.version
        return True

    def _is_ripe(self, index: int, record: SliceRecord) -> bool:
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
        """Whether an update of slice ``index`` changes nothing that the snapshot needs and nobody copied."""
        return index not in self.versions or index in self.aside or index in self.done

    def is_untouched(self, index: int) -> bool:
        """Whether slice ``index`` is ripe and nobody has begun to copy it."""
        return not self.is_safe(index) and index not in self.copying

    def blocks_update(self, index: int) -> bool:
        """Whether an update of slice ``index`` must wait: it is being copied for the writer, or has to be copied and
        there is no room."""
        return not self.is_safe(index) and (index in self.copying or self.room.is_full)

    def copy_for_update(self, index: int) -> None:
        """An update copies slice ``index`` aside, and then changes it."""
        self.copying.add(index)
        self._in_room.add(index)
        self.room.take(self.sizes[index])

    def copy_for_writer(self, index: int) -> None:
        """Slice ``index`` stands still and is being copied for the writer, who is at it."""
        self.copying.add(index)

    def copied(self, index: int) -> None:
        """The copy of slice ``index`` is made."""
        self.copying.discard(index)
        if index in self.sizes and index not in self.done:
            self.aside.add(index)

    def written(self, index: int) -> None:
        """Slice ``index`` is in its file."""
        self._end(index)

    def drop(self, indices: Iterable[int]) -> None:
        """These slices are served elsewhere, or the attempt is over: nothing of them is needed any more."""
        for index in indices:
            self._end(index)

    def _end(self, index: int) -> None:
        self.aside.discard(index)
        self.done.add(index)
        if index in self._in_room:
            self._in_room.discard(index)
            self.room.give_back(self.sizes[index])

    @property
    def bytes_aside(self) -> int:
        """Bytes of copies that updates asked for."""
        return sum(self.sizes[index] for index in self._in_room)

    def validate(self) -> None:
        """Asserts the invariants."""
        assert self.copying | self.aside <= self.versions.keys(), (self.copying, self.aside, self.versions)
        assert not self.copying & self.aside, (self.copying, self.aside)
        assert not self.aside & self.done, (self.aside, self.done)
        assert self._in_room <= self.copying | self.aside, (self._in_room, self.copying, self.aside)
