"""All parameter stores of one server process, the cluster map that they follow, and who may talk to them.

The map comes from the scheduler (``psdist_server.scheduler_session``). A request that was routed by a newer map waits
for that map. One that was routed by an older map is refused, and the client routes it anew.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Final

import grpc.aio
import psutil
import structlog

from psdist.errors import (
    NoStorageError,
    PsdistError,
    ServerUnreachableError,
    StaleEpochError,
    StaleTermError,
    UnknownParametersError,
    WrongRunError,
)
from psdist.snapshots.opening import open_storage
from psdist.snapshots.storage import Storage
from psdist.types import ClusterMap, Identity, ParametersEntry, ParametersMember, Replica
from psdist.v1 import scheduler_pb2, server_pb2, server_pb2_grpc
from psdist.wire import auth, channels
from psdist_server.kernels import kernels, memory
from psdist_server.kernels.pool import KernelPool
from psdist_server.snapshot_loader import LoadReport, SnapshotLoader
from psdist_server.snapshot_writer import SnapshotWriter
from psdist_server.store.global_norm import global_norm
from psdist_server.store.parameter_store import ParameterStore
from psdist_server.store.replicator import ReplicaReport
from psdist_server.store.rpc_call import Call, fenced

_log = structlog.get_logger("psdist.server")

#: A request routed by a map that this server has not got waits so long for it.
MAP_WAIT_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 0.05


def compile_kernels() -> None:
    """Compiles the kernels that all parameters need, or loads them from the cache; again does nothing. In a thread."""
    kernels.warm_up()
    memory.release_compiler()


class ParameterServer:
    """What this server holds.

    server_id, run_id, token, incarnation, lease_seconds, storage: as registered. kernel_threads: threads that apply
    updates. opener: opens a storage by its URL.
    """

    def __init__(
        self,
        server_id: str,
        run_id: str,
        token: str,
        kernel_threads: int,
        *,
        incarnation: int = 1,
        lease_seconds: float = 2.0,
        rng: Random | None = None,
        storage: str = "",
        opener: Callable[[str], Storage] = open_storage,
    ) -> None:
        self.server_id = server_id
        self.me = Replica(server_id, incarnation)
        self.lease_seconds = lease_seconds
        self.rng = rng or Random()
        self.map = ClusterMap(run_id, 0)
        #: Called when there is something new to report to the scheduler.
        self.report: Callable[[], None] = lambda: None
        self._token = token
        self._pool: KernelPool[Any, Any] = KernelPool(kernel_threads)
        self._kernels_ready = self._pool.prepare(compile_kernels)
        self._stores: dict[str, ParameterStore] = {}
        #: The map that is being taken over, or was last.
        self._newest = self.map
        #: Incarnation of each live worker.
        self._live: dict[str, int] = {}
        #: Workers that have sent something since somebody asked last.
        self._heard: dict[tuple[str, int], None] = {}
        self._map_changed = asyncio.Condition()
        self._peers: dict[str, grpc.aio.Channel] = {}
        self._numbers = itertools.count()
        self._on_end: dict[int, Callable[[], None]] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._storage_url = storage
        self._opener = opener
        self._storage: Storage | None = None
        #: Has a report about a snapshot told to the scheduler, in the session that stands.
        self.tell: Callable[[scheduler_pb2.SnapshotReport], None] = lambda report: None
        self.snapshot_writer = SnapshotWriter(self._stores.get, self._open_storage, lambda report: self.tell(report))
        self.loader = SnapshotLoader(self._open_storage, lambda: self.report(), self.rng)

    # --- the cluster map ----------------------------------------------------------------------------------------------

    async def follow(self, cluster: ClusterMap) -> None:
        """Takes a newer cluster map over: shards are held, served and given up, changed members reach the machines."""
        if cluster.epoch <= self._newest.epoch:
            return
        self._newest = cluster
        self._live = {worker.worker_id: worker.incarnation for worker in cluster.workers}
        for entry in cluster.parameters:
            name = entry.spec.name
            if name in self._stores and _begins_anew(self._stores[name].entry, entry):
                await self._close_holding(name)
            if name not in self._stores and any(self.me in shard.replicas for shard in entry.shards):
                self._stores[name] = ParameterStore(entry, self.me, self._pool, self, self._share_norm)
            if name in self._stores:
                # First, since the end of a membership ends what its worker waits for too: it would read past the bound.
                self._stores[name].router.calls.fence(self._live)
                await self._stores[name].update(entry, cluster.epoch)
        for gone in sorted(self._stores.keys() - {entry.spec.name for entry in cluster.parameters}):
            await self._close_holding(gone)
        self.map = cluster
        self.loader.follow(self._stores.values())
        async with self._map_changed:
            self._map_changed.notify_all()

    async def _close_holding(self, name: str) -> None:
        for key in [key for key in self._tasks if key[0] == name]:
            self._tasks.pop(key).cancel()
        await self._stores.pop(name).close()

    async def admit(self, identity: Identity) -> ParameterStore:
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
        store = self.store(identity.parameters)
        # Compiling takes seconds where there is no cache yet; on the event loop it would cost the lease.
        for compiled in (self._kernels_ready, store.ready):
            if compiled.done():
                compiled.result()
            else:
                await asyncio.wrap_future(compiled)
        return store

    def check_live(self, identity: Identity) -> None:
        """Raises FencedError for a worker, or an incarnation of one, that is not in the map."""
        if self._live.get(identity.worker_id) != identity.incarnation:
            raise fenced(identity)
        self.heard(identity)

    def heard(self, identity: Identity) -> None:
        """A worker that was admitted has sent something."""
        self._heard[identity.worker_id, identity.incarnation] = None

    def take_heard(self) -> list[tuple[str, int]]:
        """Workers, by id and incarnation, that have sent something since the last call."""
        heard, self._heard = list(self._heard), {}
        return heard

    async def admit_server(self, run_id: str, epoch: int, parameters: str) -> ParameterStore:
        """The holding that another server asks about."""
        self._check_run(run_id)
        await self._wait_for_epoch(epoch)
        store = self.store(parameters)
        for compiled in (self._kernels_ready, store.ready):
            await asyncio.wrap_future(compiled)
        return store

    async def admit_primary(self, hello: server_pb2.ReplicateRequest.Hello) -> tuple[Replica, ParameterStore]:
        """Who says ``hello``, and the store that it may send updates for. Raises StaleTermError for an incarnation of a
        server that is over."""
        sender = Replica(hello.server_id, hello.incarnation)
        store = await self.admit_server(hello.run_id, hello.epoch, hello.parameters)
        server = self._newest.server(sender.server_id)
        if server is None or server.incarnation != sender.incarnation:
            raise StaleTermError(f"{sender} (incarnation {sender.incarnation}) is not a live server of this run")
        return sender, store

    def store(self, parameters: str) -> ParameterStore:
        """The holding of this name. Raises UnknownParametersError."""
        if parameters not in self._stores:
            raise UnknownParametersError(
                f"{self.server_id} holds nothing of parameters {parameters!r:.80}: create them, or route by the "
                "cluster map",
                parameters=parameters,
            )
        return self._stores[parameters]

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
        store = self._stores.get(parameters)
        if store is None:
            return True, 0
        accepted = store.router.propose(member)
        return accepted, store.router.step_next

    def withdraw(self, parameters: str, worker_id: str) -> None:
        """Forgets a proposal that was accepted."""
        if parameters in self._stores:
            self._stores[parameters].router.withdraw(worker_id)

    @property
    def proposals(self) -> set[tuple[str, str]]:
        """Parameters and worker of every proposal that was accepted and is no member yet."""
        return {(name, worker_id) for name, store in self._stores.items() for worker_id in store.router.proposed}

    # --- calls --------------------------------------------------------------------------------------------------------

    def waiting_for(self, call: Call) -> str:
        """Whom the call is waiting for; "" where that is only its own sender."""
        store = self._stores.get(call.identity.parameters)
        return store.waiting_for(call) if store else ""

    def end(self, call: Call) -> None:
        """The call is over, whatever the reason."""
        if store := self._stores.get(call.identity.parameters):
            store.router.cancel(call)

    # --- clipping by the global norm ----------------------------------------------------------------------------------

    def _share_norm(self, store: ParameterStore, step: int) -> None:
        key = (store.entry.spec.name, step)

        def done(task: asyncio.Task[None]) -> None:
            if self._tasks.get(key) is task:
                del self._tasks[key]
            if not task.cancelled() and (error := task.exception()):
                store.fail(f"the gradient norm of step {step}", error)

        if key not in self._tasks:
            task = self._tasks[key] = asyncio.get_running_loop().create_task(self._find_norm(store, step))
            task.add_done_callback(done)

    async def _find_norm(self, store: ParameterStore, step: int) -> None:
        """Asks the other servers for their squares, then lets the step be applied."""
        name = store.entry.spec.name
        while self._stores.get(name) is store:
            missing = set(range(store.dense.slicing.count)) - store.norms.known(step).keys()
            if not missing:
                # A slice that is aggregated again from here on, after a promotion, asks anew.
                self._tasks.pop((name, step), None)
                store.norm_known(step, global_norm(store.norms.known(step)))
                return
            await self._gather_squares(store, step)

    async def _gather_squares(self, store: ParameterStore, step: int) -> None:
        """Asks everybody who holds something, once, unless there is another map meanwhile."""
        shards = store.entry.shards
        others = sorted({replica for shard in shards for replica in shard.replicas} - {self.me}, key=str)
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
        name, said = store.entry.spec.name, ""
        while True:
            request = server_pb2.FetchNormsRequest(
                run_id=self.map.run_id, epoch=self.map.epoch, parameters=name, step=step
            )
            try:
                stub = server_pb2_grpc.ServerServiceStub(self._channel(server))
                async for part in stub.FetchNorms(request, metadata=auth.metadata(self._token)):
                    store.norms.merge(step, dict(zip(part.slices, part.squares, strict=True)))
                return
            except (grpc.aio.AioRpcError, PsdistError) as error:
                if said != str(error):
                    said = str(error)
                    _log.warning("no norms yet", server=str(server), parameters=name, step=step, reason=said)
                await asyncio.sleep(_RETRY_SECONDS)

    # --- other servers ------------------------------------------------------------------------------------------------

    def _channel(self, replica: Replica) -> grpc.aio.Channel:
        server = self._newest.server(replica.server_id)
        if server is None or server.incarnation != replica.incarnation:
            raise ServerUnreachableError(f"{replica} (incarnation {replica.incarnation}) is not a live server")
        if server.address not in self._peers:
            self._peers[server.address] = channels.open_channel(server.address)
        return self._peers[server.address]

    def method(self, replica: Replica, name: str) -> Callable[..., Any]:
        """See Network."""
        return partial(self._channel(replica).stream_stream(name), metadata=auth.metadata(self._token))

    def hello(self, parameters: str) -> server_pb2.ReplicateRequest:
        """See Network."""
        hello = server_pb2.ReplicateRequest.Hello(
            run_id=self._newest.run_id,
            server_id=self.me.server_id,
            incarnation=self.me.incarnation,
            epoch=self._newest.epoch,
            parameters=parameters,
        )
        return server_pb2.ReplicateRequest(hello=hello)

    def reports(self) -> list[ReplicaReport | LoadReport]:
        """What the scheduler must hear about replicas, and about values that are loaded."""
        replicas = [told for store in self._stores.values() for told in store.replicator.reports(store.entry)]
        return [*replicas, *self.loader.reports()]

    def on_end(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Has ``callback`` called when the server ends, unless what is returned was called before."""
        number = next(self._numbers)
        self._on_end[number] = callback

        def forget() -> None:
            self._on_end.pop(number, None)

        return forget

    def disconnect(self) -> None:
        """Ends the streams of other servers, which would keep the server from ending."""
        for callback in list(self._on_end.values()):
            callback()

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def _open_storage(self) -> Storage:
        """The run's storage; in a thread, as what it needs may have to be loaded. Raises NoStorageError and what
        ``open_storage`` does."""
        if not self._storage_url:
            raise NoStorageError("the scheduler told this server of no storage")
        if self._storage is None:
            self._storage = self._opener(self._storage_url)
        return self._storage

    def snapshot_progress(self) -> scheduler_pb2.SnapshotProgress | None:
        """How far this server is with a snapshot that it loads from or writes."""
        return self.loader.progress() or self.snapshot_writer.progress()

    # --- the rest -----------------------------------------------------------------------------------------------------

    def statistics(self) -> server_pb2.GetStatisticsResponse:
        """Counters of all holdings."""
        return server_pb2.GetStatisticsResponse(
            server_id=self.server_id,
            epoch=self.map.epoch,
            resident_bytes=psutil.Process(os.getpid()).memory_info().rss,
            parameters=[store.statistics() for store in self._stores.values()],
        )

    async def close(self) -> None:
        """Ends what runs in the background."""
        await self.loader.close()
        await self.snapshot_writer.close()
        for task in list(self._tasks.values()):
            task.cancel()
        for store in self._stores.values():
            await store.close()
        for channel in self._peers.values():
            await channel.close()
        self._pool.close()


def _begins_anew(before: ParametersEntry, after: ParametersEntry) -> bool:
    """Whether nothing that is held of the parameters counts any more."""
    if after.generation != before.generation:
        return after.generation > before.generation
    return not after.ready and after.restore != before.restore
