"""Servers that this worker cannot reach although the scheduler counts them as live.

The data path reports an attempt that broke. From then on the server is called again and again, on the same channel as
requests, until it answers or is gone. So a server counts as unreachable exactly as long as calls to it fail, whatever
requests wait for. Heartbeats report such servers, and the scheduler names them and decides what follows; it also has
other workers call the server (``check``).

Not here: attempts to send a request (``delivery``), the consequences (the scheduler's ``losses``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from psdist.client.session.membership import ClusterView
from psdist.errors import InternalError, PsdistError
from psdist.types import Replica
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import convert, limits

#: Longest pause between two calls to a server that was not reached.
_PAUSE_SECONDS: Final = 1.0
#: Calls within a worker's lease, at the least: a single call that failed must not expel anybody.
_CALLS_IN_A_LEASE: Final = 4


async def _no_transport(address: str) -> None:
    raise InternalError(f"no transport can call {address} yet")


@dataclass(slots=True)
class _Unreachable:
    """A server that did not answer.

    since: time of the attempt that broke.
    reason: why the newest call failed; empty before the first one.
    """

    since: float
    reason: str = ""


class Reachability:
    """Servers that one client cannot reach. call: calls the server at an address; raises PsdistError if it does not
    answer."""

    def __init__(self, view: ClusterView) -> None:
        self.call: Callable[[str], Coroutine[Any, Any, None]] = _no_transport
        self._view = view
        self._pause_seconds = _PAUSE_SECONDS
        self._unreachable: dict[Replica, _Unreachable] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def set_lease(self, lease_seconds: float) -> None:
        """Derive the pause between calls from this worker's lease."""
        self._pause_seconds = min(_PAUSE_SECONDS, lease_seconds / _CALLS_IN_A_LEASE)

    def attempt_broke(self, server: Replica) -> None:
        """Find out whether a server can be reached after an attempt on it broke."""
        if server not in self._unreachable:
            self._unreachable[server] = _Unreachable(asyncio.get_running_loop().time())
            self._run(self._watch(server, self._unreachable[server]))

    def reason(self, server: Replica) -> str:
        """Return why the newest call to a server failed; empty if none has. It names the cause of failed TLS, which the
        error of an attempt does not."""
        unreachable = self._unreachable.get(server)
        return "" if unreachable is None else unreachable.reason

    def restart(self) -> None:
        """Restart the counts: a new incarnation must not be expelled for reports of the previous one."""
        now = asyncio.get_running_loop().time()
        for one in self._unreachable.values():
            one.since, one.reason = now, ""

    def reports(self) -> list[pb.UnreachableServer]:
        """The servers that did not answer the last call, for a heartbeat."""
        now = asyncio.get_running_loop().time()
        return [
            pb.UnreachableServer(server=convert.replica_to_proto(server), seconds=now - one.since, reason=one.reason)
            for server, one in self._unreachable.items()
            if one.reason
        ][: limits.UNREACHABLE_REPORTED_MAX]

    def check(self, server: Replica, answer: Callable[[bool], None]) -> None:
        """Call the server, and pass True to ``answer`` if it was reached."""

        async def run() -> None:
            answer(not await self.why_unreachable(server))

        self._run(run())

    async def why_unreachable(self, server: Replica) -> str:
        """Call a server. Returns why it was not reached; empty if it was, or if the newest map does not list it."""
        entry = self._view.cluster.server(server.server_id)
        if entry is None or entry.incarnation != server.incarnation:
            return ""
        try:
            await self.call(entry.address)
        except PsdistError as error:
            return error.message
        return ""

    async def close(self) -> None:
        """End all calls."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, server: Replica, unreachable: _Unreachable) -> None:
        try:
            while reason := await self.why_unreachable(server):
                unreachable.reason = reason
                await asyncio.sleep(self._pause_seconds)
        finally:
            del self._unreachable[server]
