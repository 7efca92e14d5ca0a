"""Channels to the other servers of the newest map, and the global gradient norm computed with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from random import Random
from typing import Any, Final

import grpc.aio
import structlog

from psdist.addresses import parse_address
from psdist.errors import PsdistError, ServerUnreachableError
from psdist.security.tls import Credentials
from psdist.security.tokens import Audience
from psdist.types import ClusterMap, Replica
from psdist.v1 import server_pb2, server_pb2_grpc
from psdist.wire import auth, channels
from psdist_server.store.global_norm import global_norm
from psdist_server.store.parameter_store import ParameterStore

logger = structlog.get_logger("psdist.server")

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
