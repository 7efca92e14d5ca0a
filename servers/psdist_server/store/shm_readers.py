"""Workers on this host that may read a server's weights in place, and weights that have moved to another server.

A worker reads the weights of its last calls until its next ones. So the weights of slices that moved stay until every
worker that shares memory has made a call by the map of the move, or a newer one, after which it reads none of them
(``psdist.client.transport.shm.attachment``). They stay for at least a minute, for workers whose stream broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

from psdist_server.kernels.arrays import DenseParameters

RECLAIM_SECONDS: Final = 60.0


class Reader(Protocol):
    """A worker that can read the weights in place. epoch: of the map by which it made its last call."""

    @property
    def epoch(self) -> int: ...


class ShmReaders:
    """The workers that read the weights of one parameter store in place."""

    def __init__(self, dense: DenseParameters) -> None:
        self._readers: list[Reader] = []
        self._dense = dense
        #: The epoch of the map by which a slice was moved to another server last.
        self._released: dict[int, int] = {}

    def add(self, reader: Reader) -> None:
        """One more worker reads weights in place."""
        self._readers.append(reader)

    def remove(self, reader: Reader) -> None:
        """A worker reads nothing in place any more."""
        self._readers.remove(reader)

    def release(self, indices: Sequence[int], epoch: int) -> None:
        """These slices were moved by the map of ``epoch``: gives their state back now, and their weights when nothing
        reads them any more."""
        self._dense.release(indices)
        self._released.update(dict.fromkeys(indices, epoch))
        self._reclaim_later(indices, epoch)

    def _reclaim_later(self, indices: Sequence[int], epoch: int) -> None:
        asyncio.get_running_loop().call_later(RECLAIM_SECONDS, self._reclaim, indices, epoch)

    def _reclaim(self, indices: Sequence[int], epoch: int) -> None:
        if any(reader.epoch < epoch for reader in self._readers):
            self._reclaim_later(indices, epoch)
        else:
            self._dense.reclaim(index for index in indices if self._released.get(index) == epoch)
