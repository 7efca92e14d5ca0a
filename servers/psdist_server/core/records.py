"""What is known of a slice besides its arrays, and what one update of it consists of. Both travel with the shard.

A record is all that a shard machine needs to continue with a slice: its version and its duplicate table. The primary's
machine keeps it while it serves. Backups keep it from the updates that they receive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

G = TypeVar("G")
#: A producer: a worker's sequence of pushes, by its id and the incarnation in which it began. A worker that died and
#: came back may have two of them in one step.
Producer = tuple[str, int]


@dataclass(slots=True)
class SliceRecord:
    """Version and duplicate table of a slice.

    contributors: BSP: who contributed to the step before ``version``.
    producers: SSP and ASP: pushes below this number of each producer are in the slice. One of which none is has no
        entry, so that equal tables are equal values.
    """

    version: int = 0
    contributors: tuple[Producer, ...] = ()
    producers: dict[Producer, int] = field(default_factory=dict)

    def advance(self, contributors: tuple[Producer, ...], sequence: int | None) -> None:
        """One more update is in: of ``contributors`` (BSP), or push ``sequence`` of its only contributor."""
        self.version += 1
        if sequence is None:
            self.contributors = contributors
        else:
            for producer in contributors:
                self.producers[producer] = sequence + 1

    def retain(self, producers: Collection[Producer]) -> None:
        """Only these may still push."""
        self.producers = {known: following for known, following in self.producers.items() if known in producers}


Records = Mapping[int, SliceRecord]


@dataclass(frozen=True, slots=True)
class ReplicaUpdate(Generic[G]):
    """An update of one slice as it goes to replicas.

    lsn: number of the shard's update under one term, from 1.
    version: of the slice before the update.
    contributors, sequence: what the duplicate table learns by it; ``sequence`` is None in BSP.
    gradient: what is applied; None where nobody contributed.
    square: the slice's sum of squares (clipping).
    size: bytes of the gradient.
    """

    lsn: int
    index: int
    version: int
    contributors: tuple[Producer, ...] = ()
    sequence: int | None = None
    gradient: G | None = None
    lr_scale: float = 1.0
    square: float = 0.0
    size: int = 0
