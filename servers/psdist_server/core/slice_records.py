"""Per-slice records (version and duplicate table) and updates, as both travel with a shard.

A record is all that a shard machine needs to continue with a slice. The primary's machine maintains it while it serves
the shard. Backups maintain it from the updates that they receive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from psdist.hyperparameters import Settings
from psdist_server.core.lags import Ranges

G = TypeVar("G")
#: A worker's sequence of pushes: the worker's id and the incarnation in which the sequence began. A worker that died
#: and rejoined may have two of them in one step.
Producer = tuple[str, int]


@dataclass(slots=True)
class SliceRecord:
    """Version and duplicate table of a slice.

    contributors: BSP: producers that contributed to the step before ``version``.
    producers: SSP and ASP: the next push number of each producer; all its earlier pushes are in the slice. A producer
        without pushes in the slice has no entry, so that equal tables compare equal.
    """

    version: int = 0
    contributors: tuple[Producer, ...] = ()
    producers: dict[Producer, int] = field(default_factory=dict)

    def advance(self, contributors: tuple[Producer, ...], sequence: int | None) -> None:
        """Count one more update: by ``contributors`` (BSP), or push ``sequence`` of its only contributor."""
        self.version += 1
        if sequence is None:
            self.contributors = contributors
        else:
            for producer in contributors:
                self.producers[producer] = sequence + 1

    def retain(self, producers: Collection[Producer]) -> None:
        """Drop all producers but these."""
        self.producers = {known: following for known, following in self.producers.items() if known in producers}


Records = Mapping[int, SliceRecord]


@dataclass(frozen=True, slots=True)
class ReplicaUpdate(Generic[G]):
    """An update of one slice, as sent to replicas.

    lsn: number of the shard's update under one term, from 1.
    version: of the slice before the update.
    contributors, sequence: entries for the duplicate table; ``sequence`` is None in BSP.
    gradient: the gradient to apply; None if nobody contributed.
    settings: hyperparameters that differ from the specification's.
    square: the slice's sum of squares (clipping).
    assigned: weights that the slice is set to before the update; None if it keeps its own.
    size: bytes of the gradient and of these weights.
    absent: elements that the update skips.
    """

    lsn: int
    index: int
    version: int
    contributors: tuple[Producer, ...] = ()
    sequence: int | None = None
    gradient: G | None = None
    lr_scale: float = 1.0
    square: float = 0.0
    assigned: G | None = None
    size: int = 0
    settings: Settings = ()
    absent: Ranges = ()
