"""Reads of weights that are sent to workers: each between two updates of its slice, so that none is torn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from psdist.errors import PsdistError
from psdist.v1 import server_pb2
from psdist.wire import frames
from psdist_server.kernels.arrays import DenseParameters
from psdist_server.store.replica_stream import not_primary
from psdist_server.store.rpc_call import Call, SliceAnswer
from psdist_server.store.shard_router import ShardRouter
from psdist_server.store.statistics import Counters

#: So many encoded answers are kept for the other workers of the step.
ENCODED_MAX: Final = 4


class SliceReads:
    """Reads slices of one parameter set, at once or when the update under way is done."""

    def __init__(self, router: ShardRouter, dense: DenseParameters, counters: Counters) -> None:
        self._router = router
        self._dense = dense
        self._counters = counters
        self._waiting: dict[int, list[tuple[asyncio.Future[tuple[int, bytes]], str]]] = {}
        self._encoded: dict[tuple[SliceAnswer, int, str], bytes] = {}

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
