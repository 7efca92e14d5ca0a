"""Ends of links by hand: a worker's link to a server beside a silent gRPC stream, and a worker that others link to."""

from __future__ import annotations

import asyncio
from typing import Any

from psdist.errors import PsdistError
from psdist.link.connecting import Link
from psdist.link.frame_connection import FrameConnection, MessageReceiver
from psdist.link.peer_links import PeerListener
from psdist.v1 import server_pb2, worker_pb2
from psdist.v1.common_pb2 import WorkerEntry


class SilentStream:
    """A gRPC stream that is silent until ``outcome`` is set."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.is_cancelled = False

    async def read(self) -> Any:
        return await asyncio.shield(self.outcome)

    def cancel(self) -> None:
        self.is_cancelled = True


class ServerLink(Link[server_pb2.ShareResponse]):
    """A link that keeps its messages."""

    message_type = server_pb2.ShareResponse

    def __init__(self, stream: SilentStream) -> None:
        super().__init__(stream, "server-0", has_payloads=True)
        self.responses: list[server_pb2.ShareResponse] = []

    def on_message(self, response: server_pb2.ShareResponse) -> None:
        self.responses.append(response)


class PeerConsumer(MessageReceiver[worker_pb2.PeerFrame]):
    """Accepts links, and collects what arrives."""

    message_type = worker_pb2.PeerFrame

    def __init__(self) -> None:
        self.hellos: list[worker_pb2.PeerHello] = []
        self.received: list[bytes] = []
        self.has_arrived = asyncio.Event()
        self.has_ended = asyncio.Event()
        self.data = bytearray()
        self.connection: FrameConnection | None = None

    def accepted(self, hello: worker_pb2.PeerHello, connection: FrameConnection) -> None:
        self.hellos.append(hello)
        self.connection = connection
        connection.set_receiver(self)

    def close(self, error: PsdistError) -> None:
        if self.connection is not None:
            self.connection.abort()

    def payload_buffer(self, message: worker_pb2.PeerFrame, size: int) -> memoryview:
        self.data = bytearray(size)
        return memoryview(self.data)

    def on_message(self, message: worker_pb2.PeerFrame) -> None:
        self.received.append(bytes(self.data))
        self.has_arrived.set()

    def connection_ended(self, error: PsdistError | None) -> None:
        self.has_ended.set()


def peer_hello(listener: PeerListener, token: str = "secret", number: int = 1) -> worker_pb2.PeerHello:
    """Return what worker ``number`` says first to the worker of a listener."""
    receiver = WorkerEntry(worker_id="worker-0", incarnation=1, address=listener.address)
    sender = WorkerEntry(worker_id=f"worker-{number}", incarnation=1)
    return worker_pb2.PeerHello(token=token, run_id="run", sender=sender, receiver=receiver)
