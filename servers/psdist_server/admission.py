"""Checks of a request's sender, and of the map by which it was routed.

A request routed by a newer map waits for that map. A request routed by an older map is refused, and the client routes
it again.

Invariant: A worker incarnation that is not in the newest map is refused, even while that map is still being adopted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from psdist.errors import StaleEpochError, StaleTermError, UnknownParametersError, WrongRunError
from psdist.types import ClusterMap, Identity, Replica
from psdist.v1 import server_pb2
from psdist_server.peers import PeerServers
from psdist_server.store.parameter_store import ParameterStore
from psdist_server.store.rpc_call import fenced

#: Longest time, in seconds, that a request waits for a map that this server does not have yet.
MAP_WAIT_SECONDS: Final = 10.0


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
        #: Time of each worker's last message, of workers heard since ``take_heard``.
        self._heard: dict[tuple[str, int], float] = {}
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
        self.heard(identity)

    def heard(self, identity: Identity) -> None:
        """Record that an admitted worker has sent something."""
        self._heard[identity.worker_id, identity.incarnation] = asyncio.get_running_loop().time()

    def take_heard(self) -> list[tuple[str, int, float]]:
        """Return (id, incarnation, age in seconds) of each worker that has sent something since the previous call."""
        now = asyncio.get_running_loop().time()
        heard, self._heard = self._heard, {}
        return [(*worker, now - when) for worker, when in heard.items()]
