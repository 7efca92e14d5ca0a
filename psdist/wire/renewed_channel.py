"""gRPC channel over TLS whose calls use the newest certificates.

A gRPC channel keeps the certificates that it was made with. This one makes another once the files have changed. Calls
in progress stay on the channel that they began on; it is closed after the last of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Self

import grpc.aio

from psdist.security.tls import TlsFiles, TlsIdentity

#: Time for calls in progress to end, which nothing limits: a session lasts as long as its run.
_UNLIMITED_SECONDS: Final = 1e9


class RenewedChannel:
    """The part of ``grpc.aio.Channel`` that stubs need.

    open_channel: makes a channel with the given identity.
    """

    def __init__(self, files: TlsFiles, open_channel: Callable[[TlsIdentity], grpc.aio.Channel]) -> None:
        self._files = files
        self._open_channel = open_channel
        self._identity: TlsIdentity = files.identity()
        self._channel = open_channel(self._identity)
        #: Earlier channels with calls in progress, and the tasks that close them.
        self._retiring: dict[grpc.aio.Channel, asyncio.Task[None]] = {}
        self._is_closed = False

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio."""
        return self._method("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio."""
        return self._method("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio."""
        return self._method("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio."""
        return self._method("stream_stream", args, kwargs)

    def _method(self, kind: str, made_with: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
        """Return a function that starts a call on the channel of the newest certificates."""
        channel, method = None, None

        def start(*args: Any, **kwargs: Any) -> Any:
            nonlocal channel, method
            if channel is not (current := self._current()):
                channel, method = current, getattr(current, kind)(*made_with, **options)
            assert method is not None
            return method(*args, **kwargs)

        return start

    def _current(self) -> grpc.aio.Channel:
        identity = self._files.identity()
        if identity is not self._identity and not self._is_closed:
            earlier, self._identity = self._channel, identity
            self._channel = self._open_channel(identity)
            task = asyncio.create_task(earlier.close(_UNLIMITED_SECONDS), name="psdist earlier channel")
            self._retiring[earlier] = task
            task.add_done_callback(lambda _: self._retiring.pop(earlier, None))
        return self._channel

    async def channel_ready(self) -> None:
        """See grpc.aio."""
        await self._current().channel_ready()

    async def close(self) -> None:
        """Close the channel, and end all calls."""
        self._is_closed = True
        retiring = dict(self._retiring)
        for task in retiring.values():
            task.cancel()
        await asyncio.gather(*retiring.values(), return_exceptions=True)
        for channel in (self._channel, *retiring):
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
