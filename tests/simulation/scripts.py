"""Scripts of workers in ordinary life, and the delivery of SIGTERM to them.

``Script.call`` wraps each call of the client as the synchronous client does (``psdist.client.session.loop``): a script
that is to end gets SystemExit from it. The handler is the real one, except for the signal, which is a message to the
node. SystemExit is raised in the script at an await. A script may lose the exception, as real scripts do that catch
everything, or in which it is raised inside a finalizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeVar

from psdist.client.async_client import AsyncClient
from psdist.client.session.script import EXIT_STATUS, SigtermHandler

T = TypeVar("T")


class Handler(SigtermHandler):
    """SIGTERM handler of one simulated process. raises: interrupts the script at its current await."""

    def __init__(self, clients: Callable[[], Sequence[Any]], give_up: Callable[[], None], raises: Callable[[], None]):
        super().__init__()
        self._clients = clients
        self._give_up = give_up
        self._raises = raises
        self._is_pending = False

    def send(self) -> None:
        """Send SIGTERM. If the process is busy, its loop learns of the signal before the interpreter does."""
        self._is_pending = True

    def read_signals(self) -> bool:
        """See SigtermHandler."""
        if self._is_pending:
            self._begin()
        return self.asked

    def signal(self) -> None:
        """Deliver SIGTERM to the process, which runs on its loop only."""
        self.asked = True
        self._signals += 1
        self._begin()
        if self._signals > 1 or not self._clients():
            self.raised = True
            self._raises()

    def _signal_again(self) -> None:
        self.signal()

    def _exit(self) -> NoReturn:
        self.raised = True
        raise SystemExit(EXIT_STATUS)


class Script:
    """One process of a worker."""

    def __init__(self) -> None:
        self.client: AsyncClient | None = None
        self.handler = Handler(self._clients, self._give_up, self._raise)
        #: True once the script is closing its client, and raises no more exceptions.
        self.ending = False
        self._call: asyncio.Future[Any] | None = None
        self._main: asyncio.Task[Any] | None = None

    def begin(self) -> None:
        """Register the script's task; call this in it."""
        self._main = asyncio.current_task()

    async def call(self, work: Awaitable[T]) -> T:
        """Make one call of the client."""
        try:
            self.handler.check()
        except SystemExit:
            if asyncio.iscoroutine(work):
                work.close()
            raise
        self._call = call = asyncio.ensure_future(work)
        try:
            await asyncio.wait({call})
        except asyncio.CancelledError:  # Raised by the signal.
            call.cancel()
            await asyncio.wait({call})
            if not call.cancelled():
                call.exception()
            self._exit()
        finally:
            self._call = None
        self.handler.check()
        return await call

    async def compute(self, work: Awaitable[None]) -> None:
        """Wait for work that is not a call of the client."""
        try:
            await work
        except asyncio.CancelledError:
            self._exit()

    def _exit(self) -> NoReturn:
        if self._main is not None:
            self._main.uncancel()
        raise SystemExit(EXIT_STATUS)

    def _clients(self) -> list[AsyncClient]:
        return [self.client] if self.client is not None and not self.client.is_closed else []

    def _give_up(self) -> None:
        if self._call is not None:
            self._call.cancel()

    def _raise(self) -> None:
        if self._main is not None and not self.ending:
            self._main.cancel()
