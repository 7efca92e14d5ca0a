"""The client's view of the cluster: the newest map, the news since, and the end of its membership.

Maps and news come from ``worker_session``. Calls under way wait here for a newer map, or for the end of the server
that they use.

Invariants: the epoch never decreases within one incarnation. News that a server is gone ends attempts on it, and
nothing else: only the scheduler decides that something is lost.
"""

from __future__ import annotations

import asyncio

from psdist.client.core import routing
from psdist.client.core.routing import ServerNews
from psdist.errors import FencedError, PsdistError, ServerUnreachableError
from psdist.types import ClusterMap, Replica


class ClusterView:
    """The newest map and the news, with futures for waiting calls. Empty until this client is registered."""

    def __init__(self) -> None:
        self.cluster = ClusterMap("", 0)
        #: Replaced, never changed, so that a caller can compare it with its own copy.
        self.news = ServerNews()
        #: Set once, when the membership ends for good.
        self.fatal: PsdistError | None = None
        #: Set while the incarnation has ended, and the next has not begun.
        self.fenced: FencedError | None = None
        self._changed: asyncio.Future[None] | None = None
        self._watched: dict[Replica, asyncio.Future[PsdistError]] = {}

    # --- maps and news ------------------------------------------------------------------------------------------------

    def on_map(self, cluster: ClusterMap) -> None:
        """Replace the map, unless the new one is older."""
        if cluster.epoch < self.cluster.epoch:
            return
        self.cluster = cluster
        self.news = ServerNews(
            lost={name: text for name, text in self.news.lost.items() if cluster.entry(name) is not None}
        )
        self._wake()

    def on_server_lost(self, server_id: str, reason: str) -> None:
        """Record that a server is gone, before or after the map without it."""
        server = self.cluster.server(server_id)
        if server is not None:
            gone = {**self.news.gone, Replica(server_id, server.incarnation): reason}
            self.news = ServerNews(gone, self.news.lost)
            self._wake()

    def on_shards_lost(self, parameters: str, text: str) -> None:
        """Record that a part of some parameters is lost for good."""
        self.news = ServerNews(self.news.gone, {**self.news.lost, parameters: text})
        self._wake()

    def on_fatal(self, error: PsdistError) -> None:
        """End the membership: current and later calls fail with ``error``."""
        self.fatal = self.fatal or error
        self._wake()

    def on_fenced(self, error: FencedError) -> None:
        """End this incarnation: calls fail with ``error`` until the next one begins."""
        self.fenced = error
        self._wake()

    def start_incarnation(self, cluster: ClusterMap) -> None:
        """Start a new incarnation with the map of its registration."""
        self.fenced = None
        self.cluster, self.news = cluster, ServerNews()
        self._wake()

    # --- waiting calls ------------------------------------------------------------------------------------------------

    def loss_of(self, server_id: str, incarnation: int) -> asyncio.Future[PsdistError]:
        """Return a future for the error that ends attempts on this server: ServerUnreachableError once it is gone,
        another error once this client is out. Never cancel it."""
        server = Replica(server_id, incarnation)
        future = self._watched.get(server)
        if future is None:
            future = self._watched[server] = asyncio.get_running_loop().create_future()
            if error := self._end_of(server):
                future.set_result(error)
        return future

    async def changed(self, timeout: float | None = None) -> None:
        """Return when a map or news has arrived, or after ``timeout`` seconds."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._changed}, timeout=timeout)

    async def newer_than(self, epoch: int, timeout: float) -> None:
        """Return when the map is newer than ``epoch``, when this client is out, or after ``timeout`` seconds."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self.cluster.epoch <= epoch and self._out is None:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return
            await self.changed(left)

    # --- inner --------------------------------------------------------------------------------------------------------

    @property
    def _out(self) -> PsdistError | None:
        return self.fatal or self.fenced

    def _end_of(self, server: Replica) -> PsdistError | None:
        """Return the error that ends attempts on a server; None if it is alive."""
        if self._out is not None:
            return self._out
        if reason := routing.why_gone(self.cluster, self.news, server):
            return ServerUnreachableError(f"{server} is gone: {reason}", server=server)
        return None

    def _wake(self) -> None:
        """Wake the waiting calls. A server that is gone is no longer watched, because a newer map may list it again."""
        for server, future in list(self._watched.items()):
            error = self._end_of(server)
            if error is not None and not future.done():
                future.set_result(error)
            if future.done():
                del self._watched[server]
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None
