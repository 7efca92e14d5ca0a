"""The global gradient norm of a BSP step, from the squares that all servers of a parameter set have of their slices."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc.aio
import structlog

from psdist.errors import PsdistError
from psdist.types import Replica
from psdist.v1 import server_pb2
from psdist_server.admission import Admission
from psdist_server.peers import PeerServers
from psdist_server.store.global_norm import global_norm
from psdist_server.store.parameter_store import ParameterStore

_log = structlog.get_logger("psdist.server")

_RETRY_SECONDS: Final = 0.05


class NormExchange:
    """Finds the norms of steps that are aggregated here, by asking the other servers for their squares."""

    def __init__(self, peers: PeerServers, admission: Admission) -> None:
        self._peers = peers
        self._admission = admission
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    def find(self, store: ParameterStore, step: int) -> None:
        """All slices that ``store`` serves are aggregated for ``step``: it learns the norm once all servers' are."""
        key = (store.entry.spec.name, step)

        def done(task: asyncio.Task[None]) -> None:
            if self._tasks.get(key) is task:
                del self._tasks[key]
            if not task.cancelled() and (error := task.exception()):
                store.fail(f"the gradient norm of step {step}", error)

        if key not in self._tasks:
            task = self._tasks[key] = asyncio.get_running_loop().create_task(self._find(store, step))
            task.add_done_callback(done)

    def cancel(self, parameters: str | None = None) -> None:
        """Nothing of this parameter set, or of all, is to be found any more."""
        for key in [key for key in self._tasks if parameters in (None, key[0])]:
            self._tasks.pop(key).cancel()

    async def _find(self, store: ParameterStore, step: int) -> None:
        while set(range(store.dense.slicing.count)) - store.norms.known(step).keys():
            await self._gather_squares(store, step)
        # A slice that is aggregated again from here on, after a promotion, asks anew.
        self._tasks.pop((store.entry.spec.name, step), None)
        store.norm_known(step, global_norm(store.norms.known(step)))

    async def _gather_squares(self, store: ParameterStore, step: int) -> None:
        """Asks all other servers that have replicas, once, unless there is another map meanwhile."""
        shards = store.entry.shards
        others = sorted({replica for shard in shards for replica in shard.replicas} - {self._peers.me}, key=str)
        asking = asyncio.gather(*(self._fetch_squares(other, store, step) for other in others))
        changed = asyncio.ensure_future(store.norms.wait())
        try:
            waits: set[asyncio.Future[Any]] = {asking, changed}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                asking.result()
                await asyncio.sleep(0)
        finally:
            for waiting in (asking, changed):
                waiting.cancel()
            await asyncio.gather(asking, changed, return_exceptions=True)

    async def _fetch_squares(self, server: Replica, store: ParameterStore, step: int) -> None:
        """Asks until the server answers. Shows as a wait of the workers."""
        name, logged = store.entry.spec.name, ""
        while True:
            known = self._admission.map
            request = server_pb2.FetchNormsRequest(run_id=known.run_id, epoch=known.epoch, parameters=name, step=step)
            try:
                async for part in self._peers.fetch_norms(server, request):
                    store.norms.merge(step, dict(zip(part.slices, part.squares, strict=True)))
                return
            except (grpc.aio.AioRpcError, PsdistError) as error:
                if logged != str(error):
                    logged = str(error)
                    _log.warning("no norms yet", server=str(server), parameters=name, step=step, reason=logged)
                await asyncio.sleep(_RETRY_SECONDS)
