"""The dashboard's server: a thread with an event loop of its own, beside the scheduler's.

Invariant: Nothing in this thread, and nobody who looks at the page, can hold up the scheduler's loop for longer than
one reading. Connections are bounded in number, and those that make no progress are broken.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from psdist import addresses
from psdist.errors import ConfigurationError, InsecureBindError
from psdist.monitoring.dashboard_link import listen
from psdist.settings.config import DashboardEndpoint
from psdist.wire import limits
from psdist_scheduler.dashboard.access import Access
from psdist_scheduler.dashboard.feed import Feed, Reading
from psdist_scheduler.dashboard.pages import application

logger = logging.getLogger("psdist.scheduler")

_ANSWER_SECONDS: Final = 2.0
_CLOSE_SECONDS: Final = 1.0


class DashboardServer:
    """The dashboard at an endpoint. Made and closed on the scheduler's event loop.

    read: returns a reading with the samples after a number; runs on that loop.
    key: opens the dashboard, besides the endpoint's token.

    Raises ConfigurationError if the port cannot be bound, InsecureBindError for a host beyond this machine without a
    token.
    """

    def __init__(self, endpoint: DashboardEndpoint, key: str, read: Callable[[int], Reading]) -> None:
        if not addresses.is_loopback(endpoint.host) and not endpoint.token:
            raise InsecureBindError(
                f"--dashboard-host {endpoint.host} would show the run to everybody who can reach it: set PSDIST_TOKEN, "
                "or leave the dashboard on this machine"
            )
        self._scheduler_loop = asyncio.get_running_loop()
        self._read = read
        self._socket = _listening(endpoint)
        port = self._socket.getsockname()[1]
        host = addresses.own_address() if addresses.is_wildcard(endpoint.host) else endpoint.host
        self.address = addresses.format_address(host, port)
        self._access = Access(endpoint.token, key, port)
        self._server: uvicorn.Server | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="dashboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. A server that does not stop ends with the process."""
        self._closed.set()
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
        self._thread.join(_CLOSE_SECONDS)

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception:  # The run continues without its dashboard.
            logger.exception("the dashboard ended")
        finally:
            self._socket.close()

    async def _run(self) -> None:
        feed = Feed(self._ask)
        config = uvicorn.Config(
            application(feed, self._access),
            http=_BrowserConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(limits.DASHBOARD_STALL_SECONDS),
            h11_max_incomplete_event_size=limits.DASHBOARD_REQUEST_BYTES_MAX,
        )
        self._server = uvicorn.Server(config)
        reading = asyncio.create_task(feed.run())
        try:
            if not self._closed.is_set():
                await self._server.serve(sockets=[self._socket])
        finally:
            reading.cancel()

    async def _ask(self, after: int) -> Reading:
        """Return a reading from the scheduler's loop. Raises TimeoutError if that does not answer."""
        answer: concurrent.futures.Future[Reading] = concurrent.futures.Future()

        def call() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(self._read(after))
                except Exception as error:  # The dashboard's thread raises it.
                    answer.set_exception(error)

        try:
            self._scheduler_loop.call_soon_threadsafe(call)
        except RuntimeError:  # The loop is closed: the process ends.
            raise TimeoutError from None
        return await asyncio.wait_for(asyncio.wrap_future(answer), _ANSWER_SECONDS)


def _listening(endpoint: DashboardEndpoint) -> socket.socket:
    if endpoint.descriptor is None:
        return listen(endpoint.host, endpoint.port)
    try:
        return socket.socket(fileno=endpoint.descriptor)
    except OSError as error:
        raise ConfigurationError(f"--dashboard-fd {endpoint.descriptor} is no socket: {error.strerror}") from None


class _BrowserConnection(H11Protocol):
    """One connection of a browser. It is broken if it is one too many, makes no progress, or sends a malformed body."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > limits.DASHBOARD_CONNECTIONS_MAX:
            transport.abort()
            return
        self._watch(0, None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed bytes. The request before them may be answered already, or at this moment: uvicorn would log
        a traceback for both."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # The answer has begun.
            self.transport.close()

    def _watch(self, unsent_before: int, awaiting_before: tuple[bool, Any] | None) -> None:
        """Look whether the connection makes progress.

        unsent_before: bytes that it had not sent at the last look; 0 at the first one. awaiting_before: whether it
        awaited a request then, and after which one; a request that never ends must not hold its place.
        """
        unsent: int = self.transport.get_write_buffer_size()
        awaiting = (not unsent and (self.cycle is None or self.cycle.response_complete), self.cycle)
        if unsent >= unsent_before > 0 or (awaiting[0] and awaiting == awaiting_before):
            self.transport.abort()
            return
        self._timer = self.loop.call_later(limits.DASHBOARD_STALL_SECONDS, self._watch, unsent, awaiting)
