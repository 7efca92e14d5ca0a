"""The parameter stores of one server process, and the cluster map that they follow.

The map comes from the scheduler (``psdist_server.server_session``). ``psdist_server.admission`` checks the senders
of requests.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random
from typing import Any

import psutil

from psdist.cgroups import usable_cores
from psdist.compression import segments
from psdist.compression.background_compiler import LARGE_ELEMENTS, BackgroundCompiler
from psdist.errors import NoStorageError
from psdist.off_loop import in_thread
from psdist.security.tls import Credentials
from psdist.snapshots.opening import open_storage
from psdist.snapshots.storage import Storage
from psdist.tracing.member import MemberTrace
from psdist.types import ClusterMap, ParametersEntry, ParametersMember, Replica
from psdist.v1 import scheduler_pb2, server_pb2
from psdist_server.admission import Admission
from psdist_server.core.contributions import EqualReport
from psdist_server.device.parameters import DeviceParameters
from psdist_server.device.staging import Lanes
from psdist_server.idle_cores import IdleCores
from psdist_server.kernels import means
from psdist_server.kernels.arrays import DenseParameters
from psdist_server.kernels.double import DoubleParameters
from psdist_server.kernels.pool import KernelPool
from psdist_server.peers import NormGatherer, PeerServers
from psdist_server.snapshot_loader import LoadReport, SnapshotLoader
from psdist_server.snapshot_writer import SnapshotWriter
from psdist_server.store.parameter_store import ParameterStore
from psdist_server.store.replicator import ReplicaReport
from psdist_server.store.rpc_call import Call
from psdist_server.store.statistics import SliceSpans


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
        self._pool: KernelPool[Any, Any] = KernelPool(kernel_threads)
        self._idle_cores = IdleCores()
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
        return [*replicas, *equal, *self.loader.reports()]

    def snapshot_progress(self) -> scheduler_pb2.SnapshotProgress | None:
        """Return the progress of the snapshot being loaded or written, if there is one."""
        return self.loader.progress() or self.snapshot_writer.progress()

    def statistics(self) -> server_pb2.GetStatisticsResponse:
        """Return the counters of all parameter stores."""
        return server_pb2.GetStatisticsResponse(
            server_id=self.me.server_id,
            epoch=self.admission.map.epoch,
            resident_bytes=psutil.Process(os.getpid()).memory_info().rss,
            idle_cores=self._idle_cores.measure(),
            device=self._lanes.device.name if self._lanes is not None else "",
            device_bytes=self._lanes.device.allocated if self._lanes is not None else 0,
            kernel_threads=self._pool.threads,
            cores=usable_cores(),
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
