"""The parameter stores of one server process, and the cluster map that they follow.

The map comes from the scheduler (``psdist_server.server_session``). ``Admission`` checks the sender of each request,
and the map by which it was routed: a request routed by a newer map waits for that map; one routed by an older map is
refused, and the client routes it again.

Invariant: A worker incarnation that is not in the newest map is refused, even while that map is still being adopted.

Here are also the channels to the other servers of the newest map, and the global gradient norm computed with them.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final

import grpc.aio
import psutil
import structlog

from psdist.addresses import parse_address
from psdist.compression import segments
from psdist.compression.kernel_runtime import LARGE_ELEMENTS, BackgroundCompiler
from psdist.errors import (
    NoStorageError,
    PsdistError,
    ServerUnreachableError,
    StaleEpochError,
    StaleTermError,
    UnknownParametersError,
    WrongRunError,
)
from psdist.machine import usable_cores
from psdist.monitoring.tracing import MemberTrace
from psdist.off_loop import in_thread
from psdist.security.tls import Credentials
from psdist.security.tokens import Audience
from psdist.snapshots.opening import open_storage
from psdist.snapshots.storage import Storage
from psdist.types import ClusterMap, Identity, ParametersEntry, ParametersMember, Replica
from psdist.v1 import scheduler_pb2, server_pb2, server_pb2_grpc
from psdist.wire import auth, channels
from psdist_server.core.contributions import EqualReport
from psdist_server.kernels import means
from psdist_server.kernels.arrays import DenseParameters
from psdist_server.kernels.device_parameters import DeviceParameters, Lanes
from psdist_server.kernels.double import DoubleParameters
from psdist_server.kernels.pool import KernelPool
from psdist_server.snapshots import LoadReport, SnapshotLoader, SnapshotWriter
from psdist_server.store.gradients import global_norm
from psdist_server.store.parameter_store import ParameterStore
from psdist_server.store.replicator import ReplicaReport
from psdist_server.store.rpc_call import Call, fenced
from psdist_server.store.statistics import SliceSpans

logger = structlog.get_logger("psdist.server")

#: Longest time, in seconds, that a request waits for a map that this server does not have yet.
MAP_WAIT_SECONDS: Final = 10.0
#: A shorter period says little: the kernel counts in hundredths of a second.
_SECONDS_MIN: Final = 0.25
#: Interval at which the usable cores are counted: a container's quota may change while it runs.
_COUNT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class ServerRegistration:
    """This server's registered identity and its lease. The scheduler assigns empty ids.

    storage: URL of the run's snapshots; "" for none.
    """

    run_id: str
    server_id: str
    incarnation: int = 1
    lease_seconds: float = 2.0
    heartbeat_seconds: float = 0.5
    storage: str = ""


class Admission:
    """Checks the senders of requests.

    stores: the parameter stores by name.
    kernels_loaded: waits for kernels that are being loaded.
    """

    def __init__(
        self,
        run_id: str,
        stores: Mapping[str, ParameterStore],
        peers: PeerServers,
        kernels_loaded: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._kernels_loaded = kernels_loaded
        #: The map that was adopted last.
        self.map = ClusterMap(run_id, 0)
        #: Incarnation of each live worker.
        self.live: Mapping[str, int] = {}
        self._stores = stores
        self._peers = peers
        #: Time of the last message of each worker (id, incarnation) that was admitted and heard since ``take_heard``.
        self.heard: dict[tuple[str, int], float] = {}
        self._map_changed = asyncio.Condition()

    def adopt_workers(self, cluster: ClusterMap) -> None:
        """Refuse workers that are not in this newer map from now on."""
        self.live = {worker.worker_id: worker.incarnation for worker in cluster.workers}

    async def adopt_map(self, cluster: ClusterMap) -> None:
        """Resume the requests that waited for this map; all stores have adopted it."""
        self.map = cluster
        async with self._map_changed:
            self._map_changed.notify_all()

    async def _wait_for_epoch(self, epoch: int) -> None:
        if epoch <= self.map.epoch:
            return
        try:
            async with asyncio.timeout(MAP_WAIT_SECONDS), self._map_changed:
                await self._map_changed.wait_for(lambda: epoch <= self.map.epoch)
        except TimeoutError:
            raise StaleEpochError(
                f"{self._peers.me.server_id} has map {self.map.epoch} and did not get map {epoch} from the scheduler "
                f"within {MAP_WAIT_SECONDS:.0f} s",
                epoch=self.map.epoch,
            ) from None

    def store(self, parameters: str) -> ParameterStore:
        """Return the parameter store of this name. Raises UnknownParametersError."""
        if parameters not in self._stores:
            raise UnknownParametersError(
                f"{self._peers.me.server_id} holds nothing of parameters {parameters!r:.80}: create them, or route by "
                "the cluster map",
                parameters=parameters,
            )
        return self._stores[parameters]

    async def admit(self, identity: Identity) -> ParameterStore:
        """Return the parameter store that ``identity`` may use. Raises WrongRunError, FencedError, StaleEpochError or
        UnknownParametersError, in this order of checks."""
        self._check_run(identity.run_id)
        await self._wait_for_epoch(identity.epoch)
        self.check_live(identity)
        if identity.epoch < self.map.epoch:
            raise StaleEpochError(
                f"the request was routed by epoch {identity.epoch}, the cluster is at {self.map.epoch}: fetch the map, "
                "route again and resend",
                epoch=self.map.epoch,
            )
        return await self._ready_store(identity.parameters)

    async def admit_server(self, run_id: str, epoch: int, parameters: str) -> ParameterStore:
        """Return the parameter store that another server asks about."""
        self._check_run(run_id)
        await self._wait_for_epoch(epoch)
        return await self._ready_store(parameters)

    async def admit_primary(self, hello: server_pb2.ReplicateRequest.Hello) -> tuple[Replica, ParameterStore]:
        """Return the sender of ``hello``, and the store that it may send updates for. Raises StaleTermError if this
        server incarnation is not live."""
        sender = Replica(hello.server_id, hello.incarnation)
        store = await self.admit_server(hello.run_id, hello.epoch, hello.parameters)
        if not self._peers.is_live(sender):
            raise StaleTermError(f"{sender} (incarnation {sender.incarnation}) is not a live server of this run")
        return sender, store

    def _check_run(self, run_id: str) -> None:
        if run_id != self.map.run_id:
            raise WrongRunError(f"this server belongs to run {self.map.run_id!r}, not {run_id!r:.80}")

    async def _ready_store(self, parameters: str) -> ParameterStore:
        store = self.store(parameters)
        if self._kernels_loaded is not None:
            await self._kernels_loaded()
        return store

    def check_live(self, identity: Identity) -> None:
        """Raise FencedError for a worker, or a worker's incarnation, that is not in the map."""
        if self.live.get(identity.worker_id) != identity.incarnation:
            raise fenced(identity)
        self.heard[identity.worker_id, identity.incarnation] = asyncio.get_running_loop().time()

    def take_heard(self) -> list[tuple[str, int, float]]:
        """Return (id, incarnation, age in seconds) of each worker that has sent something since the previous call."""
        now = asyncio.get_running_loop().time()
        heard, self.heard = self.heard, {}
        return [(*worker, now - when) for worker, when in heard.items()]


class ParameterServer:
    """The parameter stores of this server, and the parts that they share.

    kernel_threads: number of threads that apply updates.
    opener: opens a storage by its URL.
    compiler: compiles the kernels of updates; without one, each is compiled by the first update that needs it.
    carriers: transports of updates between servers besides gRPC: "shm", "tcp".
    lanes: lanes of the device that stores weights and optimizer state; None if host memory does.
    """

    def __init__(
        self,
        registration: ServerRegistration,
        credentials: Credentials,
        kernel_threads: int,
        rng: Random | None = None,
        opener: Callable[[str], Storage] = open_storage,
        compiler: BackgroundCompiler | None = None,
        carriers: Collection[str] = (),
        lanes: Lanes | None = None,
    ) -> None:
        run_id, rng = registration.run_id, rng or Random()
        self.me = Replica(registration.server_id, registration.incarnation)
        self._report: Callable[[], None] = lambda: None
        self._report_snapshot: Callable[[scheduler_pb2.SnapshotReport], None] = lambda report: None
        self._pool = KernelPool(kernel_threads)
        self._cores = Cores()
        self._compiler = compiler
        self._lanes = lanes
        # On Linux it reads the monotonic clock, the one that ``clock_id`` is about.
        self._spans = SliceSpans(time.perf_counter)
        self.trace = MemberTrace(self._spans.start, self._spans.stop, self._spans.clock)
        self.stores: dict[str, ParameterStore] = {}
        self.peers = PeerServers(
            self.me, run_id, credentials, rng, registration.lease_seconds, lambda: self._report(), carriers
        )
        self.admission = Admission(run_id, self.stores, self.peers, compiler.loaded if compiler is not None else None)
        self._norm_exchange = NormGatherer(self.peers, lambda: self.admission.map)
        opened = _opened_once(registration.storage, opener)
        self.snapshot_writer = SnapshotWriter(self.stores.get, opened, lambda report: self._report_snapshot(report))
        self.loader = SnapshotLoader(opened, lambda: self._report(), rng)

    def report_to(
        self, report: Callable[[], None], report_snapshot: Callable[[scheduler_pb2.SnapshotReport], None]
    ) -> None:
        """Set the receivers of reports: ``report`` is called when ``reports`` has something new, ``report_snapshot``
        with each report about a snapshot."""
        self._report, self._report_snapshot = report, report_snapshot

    async def adopt_map(self, cluster: ClusterMap) -> None:
        """Adopt a newer cluster map: change roles, and pass changed members to the machines."""
        if not self.peers.adopt(cluster):
            return
        self.admission.adopt_workers(cluster)
        for entry in cluster.parameters:
            name = entry.spec.name
            if name in self.stores and _is_obsolete(self.stores[name].entry, entry):
                await self._close_store(name)
            if name not in self.stores and any(self.me in shard.replicas for shard in entry.shards):
                self.stores[name] = self._open_store(entry)
            if name in self.stores:
                self.stores[name].fence(self.admission.live)
                await self.stores[name].update(entry, cluster.epoch)
        for gone in sorted(self.stores.keys() - {entry.spec.name for entry in cluster.parameters}):
            await self._close_store(gone)
        self.loader.update_loads(self.stores.values())
        await self.admission.adopt_map(cluster)

    def _open_store(self, entry: ParametersEntry) -> ParameterStore:
        dense = self._make_dense(entry)
        store = ParameterStore(
            entry, dense, self.me, self._pool, self.peers, self._norm_exchange.find, self._prepare_sums, self._spans
        )
        if self._compiler is not None:
            if type(dense) is DenseParameters:
                self._compiler.add(tuple(dict.fromkeys(dense.rule.kernels)), entry.spec.optimizer.kind)
            if store.dense.published is not None:
                self._compiler.add(segments.KERNELS, "compressed weights")
            if entry.slicing.total >= LARGE_ELEMENTS:
                self._compiler.start_compiling()
        return store

    def _make_dense(self, entry: ParametersEntry) -> DenseParameters:
        if entry.spec.dtype == "float64":  # Also on a server with a device.
            return DoubleParameters(entry)
        return DenseParameters(entry) if self._lanes is None else DeviceParameters(entry, self._lanes)

    def _prepare_sums(self) -> None:
        if self._compiler is not None:
            self._compiler.add(means.ENCODED_KERNELS, "compressed or weighted gradients")

    async def _close_store(self, name: str) -> None:
        self._norm_exchange.cancel(name)
        await self.stores.pop(name).close()

    def propose(self, parameters: str, member: ParametersMember) -> tuple[bool, int]:
        """Propose that ``member`` joins. Returns True if it may, and the highest version of any slice here."""
        store = self.stores.get(parameters)
        if store is None:
            return True, 0
        accepted = store.router.propose(member)
        return accepted, store.router.step_next

    def installed_slices(self, parameters: str) -> int:
        """Return the number of slices served here that have their initial values."""
        store = self.stores.get(parameters)
        return store.installed_slices if store is not None else 0

    def withdraw(self, parameters: str, worker_id: str) -> None:
        """Withdraw an accepted proposal."""
        if parameters in self.stores:
            self.stores[parameters].router.withdraw(worker_id)

    @property
    def proposals(self) -> set[tuple[str, str]]:
        """(parameters, worker) of every accepted proposal that is not a member yet."""
        return {(name, worker_id) for name, store in self.stores.items() for worker_id in store.router.proposed}

    def waiting_for(self, call: Call) -> str:
        """Return the reason why the call is waiting, or "" if that is only its own sender."""
        store = self.stores.get(call.identity.parameters)
        return store.waiting_for(call) if store else ""

    def cancel_call(self, call: Call) -> None:
        """Stop answering the call."""
        if store := self.stores.get(call.identity.parameters):
            store.router.cancel(call)

    def reports(self) -> list[ReplicaReport | LoadReport | EqualReport]:
        """Return the current reports to the scheduler about replicas, loaded values and equal contributions."""
        stores = self.stores.values()
        replicas = [report for store in stores for report in store.replicator.reports(store.entry)]
        equal = [report for store in stores if (report := store.gradients.comparison.report) is not None]
        return [*replicas, *equal, *(self.loader.reports() if self.loader.loads else ())]

    def snapshot_progress(self) -> scheduler_pb2.SnapshotProgress | None:
        """Return the progress of the snapshot being loaded or written, if there is one."""
        loading = self.loader.progress() if self.loader.loads else None
        if loading is None and self.snapshot_writer.attempt is not None:
            return self.snapshot_writer.progress()
        return loading

    def statistics(self) -> server_pb2.GetStatisticsResponse:
        """Return the counters of all parameter stores."""
        idle_cores = self._cores.idle()
        return server_pb2.GetStatisticsResponse(
            server_id=self.me.server_id,
            epoch=self.admission.map.epoch,
            resident_bytes=psutil.Process(os.getpid()).memory_info().rss,
            idle_cores=idle_cores,
            device=self._lanes.device.name if self._lanes is not None else "",
            device_bytes=self._lanes.device.allocated if self._lanes is not None else 0,
            kernel_threads=self._pool.threads,
            cores=self._cores.usable,
            parameters=[store.statistics() for store in self.stores.values()],
        )

    async def close(self) -> None:
        """End all background work."""
        await self.loader.close()
        await self.snapshot_writer.close()
        self._norm_exchange.cancel()
        for store in self.stores.values():
            await store.close()
        await self.peers.close()
        await in_thread(self._pool.close)  # Waits for running kernels.


class Cores:
    """Cores that this process may use, and how many do nothing: that predicts what more kernel threads would do."""

    def __init__(self) -> None:
        self.usable = usable_cores()
        psutil.cpu_percent()  # Starts the first period.
        self._since = self._counted = time.monotonic()
        self._newest: float | None = None

    def idle(self) -> float | None:
        """Return the mean number of this host's idle cores in the last period of a quarter of a second or more, at most
        the usable ones; None before the first one has passed."""
        now = time.monotonic()
        if now - self._counted >= _COUNT_SECONDS:
            self.usable, self._counted = usable_cores(), now
        if now - self._since >= _SECONDS_MIN:
            self._since = now
            idle = (psutil.cpu_count() or 1) * (1 - psutil.cpu_percent() / 100)
            self._newest = min(idle, self.usable)
        return self._newest


def _opened_once(url: str, opener: Callable[[str], Storage]) -> Callable[[], Storage]:
    """Return a function that opens the run's storage and caches it on success. Call it in a thread, because it may have
    to load libraries. It raises NoStorageError and the errors of ``opener``."""

    @functools.cache
    def opened() -> Storage:
        if not url:
            raise NoStorageError("the scheduler gave this server no storage")
        return opener(url)

    return opened


def _is_obsolete(before: ParametersEntry, after: ParametersEntry) -> bool:
    """True if this server's content of the parameter set is obsolete."""
    if after.generation != before.generation:
        return after.generation > before.generation
    return not after.ready and after.restore != before.restore


# --- other servers ----------------------------------------------------------------------------------------------------


_RETRY_SECONDS: Final = 0.05


class PeerServers:
    """Channels to the servers that ``me`` replicates to and queries. See ``ReplicaNetwork``.

    report: called when there is news to report to the scheduler.
    credentials: for calls and TCP connections.
    carriers: transports of updates, besides gRPC.
    """

    def __init__(
        self,
        me: Replica,
        run_id: str,
        credentials: Credentials,
        rng: Random,
        lease_seconds: float,
        report: Callable[[], None],
        carriers: Collection[str] = (),
    ) -> None:
        self.me = me
        self.rng = rng
        self.lease_seconds = lease_seconds
        self.report = report
        self.carriers = carriers
        self.credentials = credentials
        self._metadata = auth.metadata(credentials.token, Audience.SERVER)
        #: Newest map.
        self._map = ClusterMap(run_id, 0)
        self._channels: dict[str, grpc.aio.Channel] = {}

    def adopt(self, cluster: ClusterMap) -> bool:
        """Adopt a map. Return True if it is newer than the previous one."""
        is_newer = cluster.epoch > self._map.epoch
        self._map = cluster if is_newer else self._map
        return is_newer

    def is_live(self, replica: Replica) -> bool:
        """True if the newest map lists this incarnation of a server."""
        server = self._map.server(replica.server_id)
        return server is not None and server.incarnation == replica.incarnation

    def _address(self, replica: Replica) -> str:
        server = self._map.server(replica.server_id)
        if server is None or not self.is_live(replica):
            raise ServerUnreachableError(f"{replica} (incarnation {replica.incarnation}) is not a live server")
        return server.address

    def host(self, replica: Replica) -> str:
        """See ReplicaNetwork."""
        return parse_address(self._address(replica))[0]

    def _channel(self, replica: Replica) -> grpc.aio.Channel:
        address = self._address(replica)
        if address not in self._channels:
            self._channels[address] = channels.open_channel(
                address, self.credentials, silence_seconds=self.lease_seconds
            )
        return self._channels[address]

    def fetch_norms(self, replica: Replica, request: server_pb2.FetchNormsRequest) -> Any:
        """Call FetchNorms of another server. Return a stream of answers. Raises ServerUnreachableError."""
        stub = server_pb2_grpc.ServerServiceStub(self._channel(replica))
        return stub.FetchNorms(request, metadata=self._metadata)

    def method(self, replica: Replica, name: str) -> Callable[..., Any]:
        """See ReplicaNetwork."""
        return partial(self._channel(replica).stream_stream(name), metadata=self._metadata)

    def hello(self, parameters: str) -> server_pb2.ReplicateRequest:
        """See ReplicaNetwork."""
        hello = server_pb2.ReplicateRequest.Hello(
            run_id=self._map.run_id,
            server_id=self.me.server_id,
            incarnation=self.me.incarnation,
            epoch=self._map.epoch,
            parameters=parameters,
        )
        return server_pb2.ReplicateRequest(hello=hello)

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            await channel.close()


class NormGatherer:
    """Computes the global gradient norms of steps aggregated here (BSP), by asking the parameter set's other servers
    for the squared norms of their slices.

    followed: returns the map that all stores have adopted.
    """

    def __init__(self, peers: PeerServers, followed: Callable[[], ClusterMap]) -> None:
        self._peers = peers
        self._followed = followed
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    def find(self, store: ParameterStore, step: int) -> None:
        """Compute the norm of ``step``, whose slices ``store`` has all aggregated. The store receives it once all
        servers have answered."""
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
        """Stop computing norms of this parameter set, or of all."""
        for key in [key for key in self._tasks if parameters in (None, key[0])]:
            self._tasks.pop(key).cancel()

    async def _find(self, store: ParameterStore, step: int) -> None:
        while set(range(store.dense.slicing.count)) - store.norms.known(step).keys():
            await self._gather_squares(store, step)
        # A slice that is aggregated again after a promotion asks again.
        self._tasks.pop((store.entry.spec.name, step), None)
        store.norm_known(step, global_norm(store.norms.known(step)))

    async def _gather_squares(self, store: ParameterStore, step: int) -> None:
        """Ask all other servers with replicas once, or until the map changes."""
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
        """Ask a server until it answers. Shows as a wait of the workers."""
        name, logged = store.entry.spec.name, ""
        while True:
            known = self._followed()
            request = server_pb2.FetchNormsRequest(run_id=known.run_id, epoch=known.epoch, parameters=name, step=step)
            try:
                async for part in self._peers.fetch_norms(server, request):
                    store.norms.merge(step, dict(zip(part.slices, part.squares, strict=True)))
                return
            except (grpc.aio.AioRpcError, PsdistError) as error:
                if logged != str(error):
                    logged = str(error)
                    logger.warning(
                        "could not fetch gradient norms", peer=str(server), parameters=name, step=step, reason=logged
                    )
                await asyncio.sleep(_RETRY_SECONDS)
