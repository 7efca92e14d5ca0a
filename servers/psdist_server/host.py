"""The host: all holdings of one server process, the cluster map they follow, and who may talk to them.

The map comes from the scheduler (``psdist_server.link``). A request that was routed by a newer map waits for it; one
that was routed by an older map is refused, and the client routes it anew.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

import grpc.aio
import psutil
import structlog

from psdist.errors import PsdistError, StaleEpochError, UnknownParametersError, WrongRunError
from psdist.types import ClusterMap, Identity, ParametersMember
from psdist.v1 import server_pb2, server_pb2_grpc
from psdist.wire import auth, channels
from psdist_server import kernels, memory
from psdist_server.calls import Call
from psdist_server.events import Aggregate, Apply
from psdist_server.holding import Holding, Outcome, fenced
from psdist_server.norms import global_norm
from psdist_server.pool import KernelPool

_log = structlog.get_logger("psdist.server")

#: A request routed by a map that this server has not got waits so long for it.
MAP_WAIT_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 0.05


def compile_kernels() -> None:
    """Compiles the kernels that all parameters need, or loads them from the cache; again does nothing. In a thread."""
    kernels.warm_up()
    memory.release_compiler()


class Host:
    """What this server holds.

    server_id, run_id, token: as registered. kernel_threads: threads that apply updates.
    """

    def __init__(self, server_id: str, run_id: str, token: str, kernel_threads: int) -> None:
        self.server_id = server_id
        self.map = ClusterMap(run_id, 0)
        self._token = token
        self._pool: KernelPool[Apply | Aggregate, Outcome] = KernelPool(kernel_threads)
        self._kernels_ready = self._pool.prepare(compile_kernels)
        self._holdings: dict[str, Holding] = {}
        #: Incarnation of each live worker.
        self._live: dict[str, int] = {}
        self._map_changed = asyncio.Condition()
        self._peers: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- the cluster map ----------------------------------------------------------------------------------------------

    async def follow(self, cluster: ClusterMap) -> None:
        """Takes a newer cluster map over: new parameters get memory, changed members reach the machines."""
        if cluster.epoch <= self.map.epoch:
            return
        self.map = cluster
        for entry in cluster.parameters:
            name = entry.spec.name
            if name in self._holdings:
                self._holdings[name].update(entry)
            elif self.server_id in entry.primaries:
                self._holdings[name] = Holding(entry, self.server_id, self._pool, self._share_norm)
                _log.info("holding", parameters=name, elements=self._holdings[name].dense.total, epoch=cluster.epoch)
        for gone in self._holdings.keys() - {entry.spec.name for entry in cluster.parameters}:
            self._holdings.pop(gone).close()
        self._live = {worker.worker_id: worker.incarnation for worker in cluster.workers}
        for holding in self._holdings.values():
            holding.fence(self._live)
        async with self._map_changed:
            self._map_changed.notify_all()

    async def admit(self, identity: Identity) -> Holding:
        """The holding that ``identity`` may use. Raises WrongRunError, FencedError, StaleEpochError or
        UnknownParametersError, in this order."""
        self._check_run(identity.run_id)
        await self._wait_for_epoch(identity.epoch)
        self.check_live(identity)
        if identity.epoch < self.map.epoch:
            raise StaleEpochError(
                f"the request was routed by epoch {identity.epoch}, the cluster is at {self.map.epoch}: fetch the map, "
                "route anew and send again",
                epoch=self.map.epoch,
            )
        holding = self.holding(identity.parameters)
        # Compiling takes seconds where there is no cache yet; on the event loop it would cost the lease.
        for compiled in (self._kernels_ready, holding.ready):
            if compiled.done():
                compiled.result()
            else:
                await asyncio.wrap_future(compiled)
        return holding

    def check_live(self, identity: Identity) -> None:
        """Raises FencedError for a worker, or a life of one, that the map does not have (any more)."""
        if self._live.get(identity.worker_id) != identity.incarnation:
            raise fenced(identity)

    async def admit_server(self, run_id: str, epoch: int, parameters: str) -> Holding:
        """The holding that another server asks about."""
        self._check_run(run_id)
        await self._wait_for_epoch(epoch)
        return self.holding(parameters)

    def holding(self, parameters: str) -> Holding:
        """The holding of this name. Raises UnknownParametersError."""
        if parameters not in self._holdings:
            raise UnknownParametersError(
                f"{self.server_id} holds nothing of parameters {parameters!r:.80}: create them, or route by the "
                "cluster map",
                parameters=parameters,
            )
        return self._holdings[parameters]

    def _check_run(self, run_id: str) -> None:
        if run_id != self.map.run_id:
            raise WrongRunError(f"this server belongs to run {self.map.run_id!r}, not {run_id!r:.80}")

    async def _wait_for_epoch(self, epoch: int) -> None:
        if epoch <= self.map.epoch:
            return
        try:
            async with asyncio.timeout(MAP_WAIT_SECONDS), self._map_changed:
                await self._map_changed.wait_for(lambda: epoch <= self.map.epoch)
        except TimeoutError:
            raise StaleEpochError(
                f"{self.server_id} has map {self.map.epoch} and did not get map {epoch} from the scheduler within "
                f"{MAP_WAIT_SECONDS:.0f} s",
                epoch=self.map.epoch,
            ) from None

    # --- joins --------------------------------------------------------------------------------------------------------

    def propose(self, parameters: str, member: ParametersMember) -> tuple[bool, int]:
        """Whether ``member`` may join, and the highest version of any slice here."""
        holding = self._holdings.get(parameters)
        if holding is None:
            return True, 0
        accepted = holding.propose(member)
        return accepted, max((shard.step_next for shard in holding.shards.values()), default=0)

    def withdraw(self, parameters: str, worker_id: str) -> None:
        """Forgets a proposal that was accepted."""
        if parameters in self._holdings:
            self._holdings[parameters].withdraw(worker_id)

    @property
    def proposals(self) -> set[tuple[str, str]]:
        """Parameters and worker of every proposal that was accepted and is no member yet."""
        return {(name, worker_id) for name, holding in self._holdings.items() for worker_id in holding.proposed}

    # --- calls --------------------------------------------------------------------------------------------------------

    def waiting_for(self, call: Call) -> str:
        """Whom the call is waiting for; "" where that is only its own sender."""
        holding = self._holdings.get(call.identity.parameters)
        return holding.waiting_for(call) if holding else ""

    def end(self, call: Call) -> None:
        """The call is over, whatever the reason."""
        if holding := self._holdings.get(call.identity.parameters):
            holding.cancel(call)

    # --- clipping by the global norm ----------------------------------------------------------------------------------

    def _share_norm(self, holding: Holding, step: int) -> None:
        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()):
                holding.fail(f"the gradient norm of step {step}", error)

        task = asyncio.get_running_loop().create_task(self._find_norm(holding, step))
        self._tasks.add(task)
        task.add_done_callback(done)

    async def _find_norm(self, holding: Holding, step: int) -> None:
        """Asks the other servers for their squares, then lets the step be applied."""
        others = sorted(set(holding.entry.primaries) - {self.server_id})
        fetched = await asyncio.gather(*(self._fetch_squares(other, holding, step) for other in others))
        squares = await holding.norms.wait_complete(step, holding.dense.indices)
        for part in fetched:
            squares |= part
        holding.norm_known(step, global_norm(squares))

    async def _fetch_squares(self, server_id: str, holding: Holding, step: int) -> dict[int, float]:
        """Asks until the server answers: without its squares the step cannot go on. Shows as a wait of the workers."""
        name, said = holding.entry.spec.name, ""
        while self._holdings.get(name) is holding:
            request = server_pb2.FetchNormsRequest(
                run_id=self.map.run_id, epoch=self.map.epoch, parameters=name, step=step
            )
            squares: dict[int, float] = {}
            try:
                stub = server_pb2_grpc.ServerServiceStub(self._channel(server_id))
                async for part in stub.FetchNorms(request, metadata=auth.metadata(self._token)):
                    squares |= dict(zip(part.slices, part.squares, strict=True))
                return squares
            except (grpc.aio.AioRpcError, PsdistError) as error:
                if said != str(error):
                    said = str(error)
                    _log.warning("no norms yet", server=server_id, parameters=name, step=step, reason=said)
                await asyncio.sleep(_RETRY_SECONDS)
        raise asyncio.CancelledError

    def _channel(self, server_id: str) -> grpc.aio.Channel:
        server = self.map.server(server_id)
        if server is None:
            raise UnknownParametersError(f"{server_id} is not a live server")
        if server.address not in self._peers:
            self._peers[server.address] = channels.open_channel(server.address)
        return self._peers[server.address]

    # --- the rest -----------------------------------------------------------------------------------------------------

    def statistics(self) -> server_pb2.GetStatisticsResponse:
        """Counters of all holdings."""
        return server_pb2.GetStatisticsResponse(
            server_id=self.server_id,
            epoch=self.map.epoch,
            resident_bytes=psutil.Process(os.getpid()).memory_info().rss,
            parameters=[holding.statistics() for holding in self._holdings.values()],
        )

    async def close(self) -> None:
        """Ends what runs in the background."""
        for task in list(self._tasks):
            task.cancel()
        for channel in self._peers.values():
            await channel.close()
        self._pool.close()
        for holding in self._holdings.values():
            holding.close()
