"""What a worker's script does in ordinary life, and how SIGTERM comes to it.

``Script.call`` does around each call of the client what the synchronous client does (``psdist.client.process.loop``): a
script that is to end gets SystemExit from it. The handler is the real one, but for the signal, which here is a message
to the node; SystemExit is raised in the script where it awaits something. A script may lose it, as one does that
catches everything, or in which it is raised inside a finalizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeVar

from psdist.client.async_client import AsyncClient
from psdist.client.process.sigterm import EXIT_STATUS, SigtermHandler

T = TypeVar("T")


class Handler(SigtermHandler):
    """SIGTERM of one simulated process. raises: makes the script raise where it is."""

    def __init__(self, clients: Callable[[], Sequence[Any]], give_up: Callable[[], None], raises: Callable[[], None]):
        super().__init__()
        self._clients = clients
        self._give_up = give_up
        self._raises = raises
        self._is_pending = False

    def send(self) -> None:
        """SIGTERM is sent. The process may be busy; then its loop learns of it before the interpreter does."""
        self._is_pending = True

    def read_signals(self) -> bool:
        """See SigtermHandler."""
        if self._is_pending:
            self._begin()
        return self.asked

    def signal(self) -> None:
        """SIGTERM comes to the process, which runs on its loop alone."""
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
        #: It closes its client, and raises nothing any more.
        self.ending = False
        self._call: asyncio.Future[Any] | None = None
        self._main: asyncio.Task[Any] | None = None

    def begin(self) -> None:
        """Runs in the task of the script."""
        self._main = asyncio.current_task()

    async def call(self, work: Awaitable[T]) -> T:
        """One call of the client."""
        try:
            self.handler.check()
        except SystemExit:
            if asyncio.iscoroutine(work):
                work.close()
            raise
        self._call = call = asyncio.ensure_future(work)
        try:
            await asyncio.wait({call})
        except asyncio.CancelledError:  # The signal raises in the script.
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
        """What is no call."""
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
