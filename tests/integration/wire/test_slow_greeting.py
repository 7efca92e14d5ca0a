"""A process on a busy machine takes a while to greet a new connection: the attempt to connect waits for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc
import grpc.aio

from psdist.security.tls import Credentials
from psdist.wire import channels

#: Longer than any pause between two attempts to connect.
GREETING_SECONDS = 1.5


async def copy_bytes(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(1 << 16):
            to.write(data)
    to.close()


async def test_connects_to_a_peer_that_greets_late() -> None:
    async def answer(_request: bytes, _context: object) -> bytes:
        return b"answer"

    async def accept(near: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        held = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(GREETING_SECONDS):
                while data := await near.read(1 << 16):
                    held += data
            near_writer.close()  # The client has given up.
            return
        far, far_writer = await asyncio.open_connection("127.0.0.1", port)
        far_writer.write(held)
        await asyncio.gather(copy_bytes(near, far_writer), copy_bytes(far, near_writer))

    server = channels.make_server(Credentials())
    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Slow", handlers),))
    port = channels.bind(server, "127.0.0.1", 0, Credentials())
    await server.start()
    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        async with channels.open_channel(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}", Credentials()) as channel:
            assert await channel.unary_unary("/test.Slow/Ask")(b"", wait_for_ready=True, timeout=30) == b"answer"
    finally:
        proxy.close()
        await server.stop(0)
