"""gRPC servers and channels for tests that talk to a program by hand."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from psdist.security.tls import Credentials
from psdist.wire import channels


@asynccontextmanager
async def serving(
    credentials: Credentials, *adds: Callable[[grpc.aio.Server], object], **options: Any
) -> AsyncIterator[str]:
    """Serve the services that ``adds`` add to a server on loopback. Yields its address.

    options: those of ``make_server``.
    """
    server = channels.make_server(credentials, **options)
    for add in adds:
        if inspect.isawaitable(added := add(server)):
            await added
    address = f"127.0.0.1:{channels.bind(server, '127.0.0.1', 0, credentials)}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


def open_channel(address: str, message_bytes: int = 256 << 20) -> grpc.aio.Channel:
    """Return a channel that refuses nothing by itself.

    psdist's own channels rely on callers that retry; this one gives a busy machine twenty seconds to connect.
    """
    options = [
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address, options=options)
