"""Reads of weights: weights sent to workers, and the workers that read them in place.

A sent read happens between two updates of its slice, so none is torn. If a slice cannot change until a worker pushes it
again, that worker's answer need not be a copy. This is so in BSP without backup workers, as long as the worker is a
member; a fenced worker is sent nothing more before the others continue without it. A worker that holds an earlier
version is sent the differences from it, if they are known (``kernels.published``).

A worker on this host reads the weights of its last calls in place until its next calls. So the weights of moved slices
stay until every such worker has made a call by the map of the move, or a newer one; after that it reads none of them
(``psdist.client.transport.shm``). They stay for at least a minute, for workers whose stream broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Protocol

from psdist.consistency import BSP, Consistency
from psdist.errors import PsdistError
from psdist.off_loop import off_loop
from psdist.types import Identity
from psdist.v1 import server_pb2
from psdist.wire import frames
from psdist_server.core.replication import not_primary
from psdist_server.kernels.arrays import DenseParameters
from psdist_server.store.rpc_call import Call, SliceAnswer
from psdist_server.store.shard_router import ShardRouter
from psdist_server.store.statistics import Counters

#: Encoded answers cached for the other workers of the step.
ENCODED_MAX: Final = 4
RECLAIM_SECONDS: Final = 60.0


class Weights(NamedTuple):
    """Payload of a slice. differences: the parts of the payload; None if it is the weights."""

    version: int
    payload: bytes | memoryview
    differences: server_pb2.Differences | None = None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Requested form of a slice. held: the version to which differences may be sent, or None."""

    index: int
    dtype: str
    held: int | None


def _wanted(index: int, call: Call) -> _Wanted:
    return _Wanted(index, call.wanted.dtype, call.wanted.held.get(index))


class SliceReads:
    """Reads slices of one parameter set, immediately or after the current update."""

    def __init__(
        self, router: ShardRouter, dense: DenseParameters, counters: Counters, consistency: Consistency
    ) -> None:
        self._router = router
        #: True if an update waits for the pushes of all members.
        self._waits_for_all = isinstance(consistency, BSP) and not consistency.backup_workers
        self._dense = dense
        self._counters = counters
        #: By slice: reads that wait for the end of an update.
        self.waiting: dict[int, list[tuple[asyncio.Future[Weights], _Wanted]]] = {}
        self._encoded: dict[tuple[SliceAnswer, int, _Wanted], bytes] = {}
        self._copies: dict[tuple[int, _Wanted], Weights] = {}

    async def read(self, index: int, call: Call) -> Weights:
        """Read a slice for the answer to a call. The payload is valid until the next await. Raises StaleEpochError if
        the slice is no longer served here."""
        return await self._read(_wanted(index, call))

    async def _read(self, wanted: _Wanted) -> Weights:
        machine = self._router.get(wanted.index)
        if machine is None:
            raise not_primary(self._router.shard_of(wanted.index))
        state = machine.slices[wanted.index]
        if not state.is_written:
            return self._now(wanted, state.version)
        future: asyncio.Future[Weights] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(wanted.index, []).append((future, wanted))
        return await future

    def _now(self, wanted: _Wanted, version: int) -> Weights:
        """Read a slice that is not being written."""
        published = self._dense.published
        if published is not None and wanted.held is not None:
            found = published.differences(wanted.index, wanted.held, version)
            if found is not None:
                return Weights(version, b"".join(found), server_pb2.Differences(bytes=map(len, found)))
        return Weights(version, self._dense.read(wanted.index, wanted.dtype))

    async def encode(self, answer: SliceAnswer, call: Call) -> bytes:
        """Return the PushPullResponse with the slice's weights. The last few are cached, since in BSP all workers get
        the same."""
        wanted = _wanted(answer.index, call)
        weights = await self._read(wanted)
        self._counters.workers[call.identity.worker_id].pull_bytes += len(weights.payload)
        key = (answer, weights.version, wanted)
        if key not in self._encoded:
            header = server_pb2.PushPullResponse(
                slice=answer.index,
                version=weights.version,
                ignored=answer.ignored,
                staleness=answer.staleness,
                differences=weights.differences,
            )
            self._encoded[key] = frames.pack(header, weights.payload)
            if len(self._encoded) > ENCODED_MAX:
                del self._encoded[next(iter(self._encoded))]
        return self._encoded[key]

    async def lasting(self, answer: SliceAnswer, call: Call) -> Weights:
        """Read a slice for the answer to a call of a member, or of a worker that reads. The payload is valid until that
        worker pushes the slice again, or is fenced. Raises StaleEpochError if the slice is no longer served here."""
        return self.in_place(answer, call) or await self._copy(_wanted(answer.index, call))

    def in_place(self, answer: SliceAnswer, call: Call) -> Weights | None:
        """Return as ``lasting``, without a copy; None if the slice may change too early, or is encoded."""
        wanted = _wanted(answer.index, call)
        if wanted.dtype == "float32" and self._stands_still(answer, call):
            return self._now(wanted, answer.version)
        return None

    def _stands_still(self, answer: SliceAnswer, call: Call) -> bool:
        """Return True if the next update of the slice waits for another push of the call's worker."""
        machine = self._router.get(answer.index)
        if not self._waits_for_all or not call.is_push or answer.ignored or machine is None:
            return False
        state = machine.slices[answer.index]
        return not state.is_written and state.version == answer.version

    async def _copy(self, wanted: _Wanted) -> Weights:
        """Read a slice into a payload that never changes. The last few are cached, as in ``encode``."""
        weights = await self._read(wanted)
        key = (weights.version, wanted)
        if key not in self._copies:
            self._copies[key] = weights._replace(payload=bytes(weights.payload))
            if len(self._copies) > ENCODED_MAX:
                del self._copies[next(iter(self._copies))]
        return self._copies[key]

    def updated(self, index: int, version: int) -> None:
        """Serve the reads that wait for slice ``index``, which is at ``version``. Its next update has not started."""
        for future, wanted in self.waiting.pop(index, ()):
            if not future.done():
                weights = self._now(wanted, version)
                future.set_result(weights._replace(payload=bytes(weights.payload)))

    def fail(self, indices: Iterable[int], error: PsdistError) -> None:
        """Fail the reads of these slices, which are no longer served here."""
        for index in indices:
            for future, _ in self.waiting.pop(index, ()):
                if not future.done():
                    future.set_exception(error)


class Reader(Protocol):
    """A worker that can read the weights in place, or is sent them from there.

    admitted: the identity of its last call.
    """

    @property
    def admitted(self) -> Identity: ...

    def fenced(self) -> None:
        """Stop sending to the worker, which is fenced."""


class InPlaceReaders:
    """The workers that read the weights of one parameter store in place, or are sent them from there."""

    def __init__(self, dense: DenseParameters) -> None:
        self._readers: list[Reader] = []
        self._dense = dense
        #: Epoch of the map that last moved a slice to another server.
        self._released: dict[int, int] = {}
        self._reclaiming: asyncio.Future[None] | None = None

    def add(self, reader: Reader) -> None:
        """Add a worker."""
        self._readers.append(reader)

    def remove(self, reader: Reader) -> None:
        """Remove a worker, which reads nothing in place any more."""
        self._readers.remove(reader)

    def fence(self, live: Mapping[str, int]) -> None:
        """Stop the readers whose incarnation is not ``live`` in a new map, before any slice is updated by it."""
        for reader in list(self._readers):
            if live.get(reader.admitted.worker_id) != reader.admitted.incarnation:
                reader.fenced()

    async def release(self, indices: Sequence[int], epoch: int) -> None:
        """Release slices that were moved by the map of ``epoch``: their state now, and their weights when nothing reads
        them any more."""
        await off_loop(len(indices) * self._dense.slicing.slice_elements, partial(self._dense.release, indices))
        self._released.update(dict.fromkeys(indices, epoch))
        self._reclaim_later(indices, epoch)

    def _reclaim_later(self, indices: Sequence[int], epoch: int) -> None:
        asyncio.get_running_loop().call_later(RECLAIM_SECONDS, self._reclaim, indices, epoch)

    def _reclaim(self, indices: Sequence[int], epoch: int) -> None:
        if any(reader.admitted.epoch < epoch for reader in self._readers):
            self._reclaim_later(indices, epoch)
        else:
            unread = [index for index in indices if self._released.get(index) == epoch]
            elements = len(unread) * self._dense.slicing.slice_elements
            self._reclaiming = asyncio.ensure_future(off_loop(elements, partial(self._dense.reclaim, unread)))
