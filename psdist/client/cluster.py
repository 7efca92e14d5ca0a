"""What the client knows of the cluster: the newest map, and who was lost.

Maps and news come from the scheduler's session (``connection``); calls under way wait here for a newer map or for
the end of the server that they wait on. Not here: any network.

Invariants: the epoch never goes down. A server of one incarnation that was lost stays lost.
"""

from __future__ import annotations

import asyncio

from psdist.errors import PsdistError, ServerLostError
from psdist.types import ClusterMap


class ClusterWatch:
    """The newest map and the losses, with futures for those who wait."""

    def __init__(self, cluster: ClusterMap) -> None:
        self.cluster = cluster
        #: Set once: nothing this client sends counts any more.
        self.fatal: PsdistError | None = None
        self._changed: asyncio.Future[None] | None = None
        self._watched: dict[tuple[str, int], asyncio.Future[PsdistError]] = {}
        self._reasons: dict[str, str] = {}

    def see_map(self, cluster: ClusterMap) -> None:
        """A map arrived; an older one than the newest is ignored."""
        if cluster.epoch < self.cluster.epoch:
            return
        self.cluster = cluster
        for server in cluster.servers:
            self._reasons.pop(server.server_id, None)
        for (server_id, incarnation), future in self._watched.items():
            server_now = cluster.server(server_id)
            if server_now is None or server_now.incarnation != incarnation:
                self._settle(future, _lost(server_id, self._reasons.get(server_id, "it left the cluster map")))
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None

    def see_loss(self, server_id: str, reason: str) -> None:
        """News that a server is gone, before or after the map that lacks it."""
        self._reasons[server_id] = reason
        for (watched, _), future in self._watched.items():
            if watched == server_id:
                self._settle(future, _lost(server_id, reason))

    def see_fatal(self, error: PsdistError) -> None:
        """This client is out: calls under way and to come fail with ``error``."""
        self.fatal = self.fatal or error
        for future in self._watched.values():
            self._settle(future, self.fatal)

    def loss_of(self, server_id: str, incarnation: int) -> asyncio.Future[PsdistError]:
        """A future that gets the error to raise when this server is lost or this client is out. Never cancel it."""
        key = (server_id, incarnation)
        future = self._watched.get(key)
        if future is None:
            future = self._watched[key] = asyncio.get_running_loop().create_future()
            server = self.cluster.server(server_id)
            if self.fatal is not None:
                future.set_result(self.fatal)
            elif server is None or server.incarnation != incarnation or server_id in self._reasons:
                future.set_result(_lost(server_id, self._reasons.get(server_id, "it left the cluster map")))
        return future

    async def newer_than(self, epoch: int, timeout: float) -> None:
        """Returns when the map is newer than ``epoch``, or after ``timeout`` seconds."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self.cluster.epoch <= epoch:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._changed}, timeout=left)

    @staticmethod
    def _settle(future: asyncio.Future[PsdistError], error: PsdistError) -> None:
        if not future.done():
            future.set_result(error)


def _lost(server_id: str, reason: str) -> ServerLostError:
    return ServerLostError(
        f"{server_id} is lost with the parameters it held: {reason}. Restart the run", server=server_id
    )


def again(error: PsdistError) -> PsdistError:
    """A copy to raise: one error may end many calls, and each has a traceback of its own."""
    return type(error)(error.message, **error.details)
