"""Raw ``grpc.aio``: the bytes of a step travel to servers that return the same messages. No psdist in it.

Roles: ``server`` echoes; ``client`` (the worker) opens a stream to every server, writes its share of the bytes in
messages of 1 MiB and reads equally many, all concurrently. ``unary`` and ``stream`` send one small message to one
server and wait for its return, by a separate call or on an open stream. Peer ``echo`` has gRPC's default options except
for the message size. ``echo_tuned`` has psdist's options for channels and servers, and its tuning of malloc, in clients
and servers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from benchmarks import turns
from psdist.security.tls import Credentials

MESSAGE_BYTES = 1 << 20
STREAM, UNARY = "Echo", "Answer"
SERVICE = "benchmarks.Echo"
TUNED = "tuned"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DEFAULT_OPTIONS = [("grpc.max_receive_message_length", 4 << 20), ("grpc.max_send_message_length", 4 << 20)]


def messages(settings: turns.Settings) -> list[list[bytes]]:
    """Return the messages that a client sends to each server."""
    total = settings.params * ITEM_BYTES[settings.wire_dtype]
    block = bytes(MESSAGE_BYTES)
    sizes = [min(MESSAGE_BYTES, total - start) for start in range(0, total, MESSAGE_BYTES)]
    return [[block[:size] for size in sizes[server :: settings.servers]] for server in range(settings.servers)]


async def _echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def _answer(request: bytes, context: Any) -> bytes:
    return request


def make_server(tuned: bool) -> grpc.aio.Server:
    """Return a server that echoes streams and single messages."""
    if tuned:
        from psdist.wire import channels

        server = channels.make_server(Credentials())
    else:
        server = grpc.aio.server(options=_DEFAULT_OPTIONS)
    handlers = {
        STREAM: grpc.stream_stream_rpc_method_handler(_echo),
        UNARY: grpc.unary_unary_rpc_method_handler(_answer),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    return server


def open_channel(address: str, tuned: bool) -> grpc.aio.Channel:
    """Return a channel to an echo server."""
    if tuned:
        from psdist.wire import channels

        return channels.open_channel(address, Credentials())
    return grpc.aio.insecure_channel(address, options=_DEFAULT_OPTIONS)


def address_file(number: int) -> Path:
    """Return the file to which server ``number`` writes its address."""
    return turns.directory() / f"server-{number}"


async def serve_echo(settings: turns.Settings) -> None:
    """Run an echo server until the benchmark ends the process, or its directory disappears."""
    server = make_server(settings.role.endswith(TUNED))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    path = address_file(settings.rank)
    draft = path.with_suffix(".draft")
    draft.write_text(f"127.0.0.1:{port}")
    draft.rename(path)
    # The connection to the benchmark is only held: it ends with the benchmark.
    await asyncio.to_thread(turns.serve, lambda steps: [])
    await server.stop(None)


async def await_address(number: int) -> str:
    """Wait for the address of server ``number``."""
    path = address_file(number)
    while not path.exists():  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.02)
    return path.read_text()


async def exchange(call: Any, parts: list[bytes]) -> None:
    """Write all messages and read equally many, concurrently."""

    async def write() -> None:
        for part in parts:
            await call.write(part)
        await call.done_writing()

    writing = asyncio.ensure_future(write())
    for _ in parts:
        await call.read()
    await writing
    assert await call.read() is grpc.aio.EOF


def make_step(settings: turns.Settings, channels: list[grpc.aio.Channel]) -> Callable[[], Awaitable[object]]:
    """One step of the client."""
    parts = messages(settings)
    streams = [channel.stream_stream(f"/{SERVICE}/{STREAM}") for channel in channels]
    if settings.role == "unary":
        call, message = channels[0].unary_unary(f"/{SERVICE}/{UNARY}"), parts[0][0]
        return partial(_call, call, message)
    if settings.role == "stream":
        return partial(_round_trip, streams[0](), parts[0][0])

    async def step() -> None:
        await asyncio.gather(*(exchange(open_(), mine) for open_, mine in zip(streams, parts, strict=True)))

    return step


async def _call(call: Any, message: bytes) -> None:
    await call(message)


async def _round_trip(stream: Any, message: bytes) -> None:
    await stream.write(message)
    await stream.read()


async def take_turns(settings: turns.Settings) -> None:
    """Run the client."""
    tuned = settings.role.endswith(TUNED)
    channels = [open_channel(await await_address(number), tuned) for number in range(settings.servers)]
    step = make_step(settings, channels)
    loop = asyncio.get_running_loop()

    async def turn(steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            await step()
            times.append(time.perf_counter() - begin)
        return times

    await asyncio.to_thread(turns.serve, lambda steps: asyncio.run_coroutine_threadsafe(turn(steps), loop).result(), {})
    for channel in channels:
        await channel.close()


def main() -> None:
    """Take turns until the benchmark ends."""
    settings = turns.settings()
    work = serve_echo if settings.role.startswith("server") else take_turns
    if not settings.role.endswith(TUNED):
        asyncio.run(work(settings))
        return
    import uvloop

    from psdist import machine

    machine.keep_buffers()
    uvloop.run(work(settings))


if __name__ == "__main__":
    main()
