"""Servers that refused a connection. They are asked again after a while, beside the calls, which use another transport
until one agrees: a firewall was opened, or a server was asked by too many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Set
from typing import Any, Generic, TypeVar

from psdist.client.transport.negotiated.calls import CallConnection
from psdist.types import Replica

ConnectionT = TypeVar("ConnectionT", bound=CallConnection[Any])


class Refusals(Generic[ConnectionT]):
    """Incarnations of servers that refused, and negotiations with those that are asked again.

    retry_seconds: pause before a server is asked again; infinite if its incarnation will give the same answer.
    """

    def __init__(self, retry_seconds: float) -> None:
        self._retry_seconds = retry_seconds
        #: Loop time at which each may be asked again.
        self._refused: dict[Replica, float] = {}
        self.under_way: dict[Replica, asyncio.Task[ConnectionT]] = {}

    def add(self, server: Replica) -> None:
        """Record that a server refused."""
        self._refused[server] = asyncio.get_running_loop().time() + self._retry_seconds

    def may_agree(self, server: Replica, negotiate: Callable[[], Coroutine[Any, Any, ConnectionT]]) -> bool:
        """Return False for a server that refused, until it agrees. Asks it again by ``negotiate`` if it is time."""
        if server not in self._refused:
            return True
        again = self.under_way.get(server)
        if again is None and asyncio.get_running_loop().time() >= self._refused[server]:
            self.under_way[server] = asyncio.create_task(negotiate(), name=f"psdist asks {server.server_id} again")
        elif again is not None and again.done():
            if not again.cancelled() and again.exception() is None:
                return True
            del self.under_way[server]
            self.add(server)
        return False

    def take(self, server: Replica) -> asyncio.Task[ConnectionT] | None:
        """Remove a server, and return the negotiation with it if it was asked again."""
        self._refused.pop(server, None)
        return self.under_way.pop(server, None)

    def keep(self, servers: Set[Replica]) -> None:
        """Forget all others, with their negotiations and the connections that came of them."""
        for server in self._refused.keys() - servers:
            again = self.take(server)
            if again is None:
                continue
            if not again.done():
                again.cancel()
            elif not again.cancelled() and again.exception() is None:
                again.result().close()
