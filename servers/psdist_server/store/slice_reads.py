"""Reads of weights: those that are sent to workers, and workers that are sent them, or read them, from where they lie.

A read that is sent happens between two updates of its slice, so that none is torn. Where a slice stands still until a
worker pushes it again, that worker's answer need not be a copy. This is so in BSP without backup workers, as long as it
is a member; a worker that is fenced is sent nothing more before others go on without it.

A worker of this host reads the weights of its last calls in place until its next ones. So the weights of slices that
moved stay until every such worker has made a call by the map of the move, or a newer one, after which it reads none
of them (``psdist.client.transport.shm.attachment``). They stay for at least a minute, for workers whose stream broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from psdist.consistency import BSP, Consistency
from psdist.errors import PsdistError
from psdist.types import Identity
from psdist.v1 import server_pb2
from psdist.wire import frames
from psdist_server.kernels.arrays import DenseParameters
from psdist_server.store.rpc_call import Call, SliceAnswer
from psdist_server.store.shard_router import ShardRouter
from psdist_server.store.statistics import Counters
from psdist_server.store.stream_to_replica import not_primary

#: So many encoded answers are kept for the other workers of the step.
ENCODED_MAX: Final = 4
RECLAIM_SECONDS: Final = 60.0


class SliceReads:
    """Reads slices of one parameter set, at once or when the update under way is done."""

    def __init__(
        self, router: ShardRouter, dense: DenseParameters, counters: Counters, consistency: Consistency
    ) -> None:
        self._router = router
        #: Whether an update waits for the pushes of all members.
        self._waits_for_all = isinstance(consistency, BSP) and not consistency.backup_workers
        self._dense = dense
        self._counters = counters
        self._waiting: dict[int, list[tuple[asyncio.Future[tuple[int, bytes]], str]]] = {}
        self._encoded: dict[tuple[SliceAnswer, int, str], bytes] = {}
        self._copies: dict[tuple[int, int, str], bytes] = {}

    async def read(self, index: int, dtype: str) -> tuple[int, bytes | memoryview]:
        """Version and payload of a slice. The payload is valid until the next await. Raises StaleEpochError where the
        slice is not served here any more."""
        machine = self._router.get(index)
        if machine is None:
            raise not_primary(self._router.shard_of(index))
        state = machine.slices[index]
        if not state.is_written:
            return state.version, self._dense.read(index, dtype)
        future: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(index, []).append((future, dtype))
        return await future

    async def encode(self, answer: SliceAnswer, call: Call) -> bytes:
        """The PushPullResponse with the slice's weights; the last few are kept, as in BSP all workers get the same."""
        version, payload = await self.read(answer.index, call.pull_dtype)
        self._counters.of(call.identity.worker_id).pull_bytes += len(payload)
        key = (answer, version, call.pull_dtype)
        if key not in self._encoded:
            header = server_pb2.PushPullResponse(
                slice=answer.index, version=version, ignored=answer.ignored, staleness=answer.staleness
            )
            self._encoded[key] = frames.pack(header, payload)
            if len(self._encoded) > ENCODED_MAX:
                del self._encoded[next(iter(self._encoded))]
        return self._encoded[key]

    async def lasting(self, answer: SliceAnswer, call: Call) -> tuple[int, bytes | memoryview]:
        """Version and payload of a slice for the answer to a call of a member, or of a worker that reads. The payload
        stays as it is until that worker pushes the slice again, or is fenced. Raises StaleEpochError where the slice is
        not served here any more."""
        if call.pull_dtype == "float32" and self._stands_still(answer, call):
            return answer.version, self._dense.read(answer.index, call.pull_dtype)
        return await self._copy(answer.index, call.pull_dtype)

    def _stands_still(self, answer: SliceAnswer, call: Call) -> bool:
        """Whether the next update of the slice waits for another push of the call's worker."""
        machine = self._router.get(answer.index)
        if not self._waits_for_all or not call.is_push or answer.ignored or machine is None:
            return False
        state = machine.slices[answer.index]
        return not state.is_written and state.version == answer.version

    async def _copy(self, index: int, dtype: str) -> tuple[int, bytes]:
        """Version and payload of a slice, which stays as it is; the last few are kept, as in ``encode``."""
        version, payload = await self.read(index, dtype)
        key = (index, version, dtype)
        if key not in self._copies:
            self._copies[key] = bytes(payload)
            if len(self._copies) > ENCODED_MAX:
                del self._copies[next(iter(self._copies))]
        return version, self._copies[key]

    def updated(self, index: int, version: int) -> None:
        """Slice ``index`` is at ``version``, and its next update has not begun: serves the reads that wait for it."""
        for future, dtype in self._waiting.pop(index, ()):
            if not future.done():
                future.set_result((version, bytes(self._dense.read(index, dtype))))

    def fail(self, indices: Iterable[int], error: PsdistError) -> None:
        """These slices are not served here any more."""
        for index in indices:
            for future, _ in self._waiting.pop(index, ()):
                if not future.done():
                    future.set_exception(error)


class Reader(Protocol):
    """A worker that can read the weights in place, or is sent them from there. admitted: by which it made its last
    call."""

    @property
    def admitted(self) -> Identity: ...

    def fenced(self) -> None:
        """The worker is fenced: sends it nothing more."""


class InPlaceReaders:
    """The workers that read the weights of one parameter store in place, or are sent them from there."""

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

    def fence(self, live: Mapping[str, int]) -> None:
        """A new map, by which these incarnations of workers are live, and which no slice was updated by yet."""
        for reader in list(self._readers):
            if live.get(reader.admitted.worker_id) != reader.admitted.incarnation:
                reader.fenced()

    def release(self, indices: Sequence[int], epoch: int) -> None:
        """These slices were moved by the map of ``epoch``: gives their state back now, and their weights when nothing
        reads them any more."""
        self._dense.release(indices)
        self._released.update(dict.fromkeys(indices, epoch))
        self._reclaim_later(indices, epoch)

    def _reclaim_later(self, indices: Sequence[int], epoch: int) -> None:
        asyncio.get_running_loop().call_later(RECLAIM_SECONDS, self._reclaim, indices, epoch)

    def _reclaim(self, indices: Sequence[int], epoch: int) -> None:
        if any(reader.admitted.epoch < epoch for reader in self._readers):
            self._reclaim_later(indices, epoch)
        else:
            self._dense.reclaim(index for index in indices if self._released.get(index) == epoch)
