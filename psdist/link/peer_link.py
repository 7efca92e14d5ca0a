"""Dialing end of a link to another worker.

Between workers of one host, payloads travel in memory that the dialing worker shares, and their frames in order on the
TCP connection. A payload is copied into a free place, and out of it by the receiver, which then releases the place. If
memory cannot be shared, payloads follow their frames on the connection.

Invariants: Frames are sent in order, once the link is accepted. A payload's memory is borrowed until ``sent`` is called
or the link ends. A place is written to only while it is free.

``peers`` is the accepting end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from psdist import addresses
from psdist.errors import PeerUnreachableError, PsdistError, SharingUnavailableError
from psdist.link import fd_passing
from psdist.link.dialing import CONNECT_SECONDS, connect, time_limit
from psdist.link.frame_connection import FrameConnection, MessageReceiver, is_unanswered
from psdist.v1 import worker_pb2 as pb
from psdist.wire import limits
from psdist.wire.shm import GradientArena

if TYPE_CHECKING:
    from psdist.security.tls import TlsFiles

logger = logging.getLogger("psdist")

_NOTHING: Final = memoryview(b"")
_PING: Final = pb.PeerFrame(ping=True).SerializeToString()
#: Smaller payloads follow their frame.
_SMALL_BYTES: Final = 16 << 10
#: Elements and dtype of the shared memory.
ARENA: Final = (limits.SHARED_PARTS * limits.PART_BYTES // 4, "float32")


@dataclass(slots=True)
class _Frame:
    """Unsent frame. header: empty if it was handed over, and only its end is waited for."""

    header: bytes
    payload: memoryview
    sent: Callable[[], None] | None
    owner: object


class SharedPlaces:
    """Memory that this worker shares with the receiver, in places for one payload each."""

    def __init__(self, arena: GradientArena) -> None:
        self._memory = arena.flat.view(np.uint8).reshape(limits.SHARED_PARTS, -1)
        self._free = list(range(limits.SHARED_PARTS))
        self._released = asyncio.Event()

    async def put(self, payload: memoryview) -> bytes:
        """Copy a payload into a free place. Returns the part of the frame's header that names it."""
        while not self._free:
            self._released.clear()
            await self._released.wait()
        place = self._free.pop()
        self._memory[place, : payload.nbytes] = np.frombuffer(payload, np.uint8)
        shared = pb.SharedPayload(place=place, size=payload.nbytes)
        return pb.PeerFrame(shared=shared).SerializeToString()

    def release(self, place: int) -> None:
        """Mark a place as free. Raises PeerUnreachableError for one that is not in use."""
        if place >= limits.SHARED_PARTS or place in self._free:
            raise PeerUnreachableError(f"the peer released place {place} of shared memory, which was not in use")
        self._free.append(place)
        self._released.set()


class PeerLink(MessageReceiver[pb.PeerFrame]):
    """Dialing end of a link to one worker. Frames are sent in order, once the link is accepted.

    hello: the first frame, which names both workers; the receiver's address is dialed.
    ended: called once with the reason if the link ends before ``close``.
    shares: False sends all payloads on the connection.
    """

    message_type = pb.PeerFrame

    def __init__(
        self, hello: pb.PeerHello, tls: TlsFiles | None, ended: Callable[[PsdistError], None], *, shares: bool = True
    ) -> None:
        self.peer = hello.receiver.worker_id
        self._tls = tls
        self.connection = FrameConnection(self, queued_bytes=0)
        self._hello = hello
        self._ended: Callable[[PsdistError], None] | None = ended
        self._queue: deque[_Frame] = deque()
        #: Frame whose payload may be borrowed by the connection.
        self._current: _Frame | None = None
        self._wake = asyncio.Event()
        self._welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shares = shares
        self._places: SharedPlaces | None = None
        #: Answer to the offer of shared memory.
        self._taken: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._is_idle = False
        self._task = asyncio.create_task(self._run(), name=f"psdist link to {self.peer}")

    def send(
        self,
        header: bytes,
        payload: memoryview = _NOTHING,
        sent: Callable[[], None] | None = None,
        owner: object = None,
    ) -> None:
        """Queue a frame.

        sent: called when the payload's memory is no longer needed; never after the link has ended.
        owner: see ``drop``.
        """
        frame = _Frame(header, payload, sent, owner)
        if not self._is_idle or self._queue or self._is_shared(frame):
            self._queue.append(frame)
            self._wake.set()
            return
        self.connection.send(header, payload)  # Small calls would wait for the task's turn of the loop.
        if self.connection.is_full:
            frame.header = b""
            self._queue.append(frame)
            self._current = frame
            self._wake.set()
        elif sent is not None:
            sent()

    @property
    def is_open(self) -> bool:
        """True once the peer has accepted the link."""
        return self._welcome.done() and not self._welcome.cancelled()

    def is_silent(self, seconds: float) -> bool:
        """True if the peer's host has acknowledged nothing for ``seconds``, though something was sent to it.

        A host that has taken the connection is not silent, though its worker may not accept the link for long: other
        code may hold its interpreter.
        """
        return is_unanswered(self.connection, seconds)

    def ping(self) -> None:
        """Send something that the peer's host acknowledges."""
        if self.is_open and not self.connection.is_full:
            self.connection.send(_PING)

    def drop(self, owner: object) -> None:
        """Send no more frames of ``owner``: their memory belongs to the caller again. If a frame is being sent, this
        ends the link, because nothing else takes it back."""
        self._queue = deque(frame for frame in self._queue if frame.owner is not owner)
        if self._current is not None and self._current.owner is owner and self._current.payload.nbytes:
            self._end(PeerUnreachableError(f"a call ended while its data was sent to {self.peer}"))

    def close(self) -> None:
        """End the link without a report."""
        self._ended = None
        self._stop()

    async def _run(self) -> None:
        try:
            await self._dial()
            await self._share()
            await self._send_all()
        except PsdistError as error:
            self._end(error)

    async def _dial(self) -> None:
        address = self._hello.receiver.address
        host, port = addresses.parse_address(address)
        try:
            async with time_limit(CONNECT_SECONDS):
                await connect(self.connection, host, port, self._tls)
        except TimeoutError:
            raise PeerUnreachableError(
                f"{self.peer} at {address} did not answer within {CONNECT_SECONDS:g} s: a firewall must let workers "
                "connect to any port of workers"
            ) from None
        except OSError as error:
            raise PeerUnreachableError(f"no link to {self.peer} at {address}: {error.strerror or error}") from None
        self.connection.send(pb.PeerFrame(hello=self._hello).SerializeToString())
        await self._welcome

    async def _share(self) -> None:
        """Offer memory to a worker of this host. Without it payloads follow their frames."""
        if not self._shares or not self.connection.is_local:
            return
        try:
            arena = await asyncio.to_thread(GradientArena.create, *ARENA)
            with fd_passing.listening() as (name, listener):
                sending = asyncio.create_task(fd_passing.accept_and_send(listener, arena.fd))
                try:
                    self.connection.send(pb.PeerFrame(offer=name).SerializeToString())
                    async with asyncio.timeout(fd_passing.HANDOVER_SECONDS):
                        taken = await self._taken
                finally:
                    _close_connection(sending)
                if taken != arena.nonce:
                    return
        except (OSError, SharingUnavailableError) as error:
            logger.info("no memory is shared with %s: %s", self.peer, error, extra={"peer": str(self.peer)})
            return
        self._places = SharedPlaces(arena)

    def _is_shared(self, frame: _Frame) -> bool:
        return self._places is not None and _SMALL_BYTES <= frame.payload.nbytes <= limits.PART_BYTES

    async def _send_all(self) -> None:
        while True:
            while not self._queue:
                self._is_idle = True
                self._wake.clear()
                await self._wake.wait()
            self._is_idle = False
            frame = self._current = self._queue.popleft()
            if self._places is not None and self._is_shared(frame):
                self.connection.send(frame.header + await self._places.put(frame.payload))
            elif frame.header:
                self.connection.send(frame.header, frame.payload)
            await self.connection.drain()
            self._current = None
            if self._ended is None:
                return
            if frame.sent is not None:
                frame.sent()

    def on_message(self, message: pb.PeerFrame) -> None:
        match message.WhichOneof("kind"):
            case "welcome" if not self._welcome.done():
                self._welcome.set_result(None)
            case "taken" if not self._taken.done():
                self._taken.set_result(message.taken)
            case "released" if self._places is not None:
                self._places.release(message.released - 1)

    def connection_ended(self, error: PsdistError | None) -> None:
        self._end(PeerUnreachableError(f"{self.peer} closed its link{f': {error.message}' if error else ''}"))

    def _end(self, error: PsdistError) -> None:
        ended, self._ended = self._ended, None
        self._stop()
        if ended is not None:
            ended(error)

    def _stop(self) -> None:
        self._is_idle = False
        self.connection.abort()
        self._queue.clear()
        if asyncio.current_task() is not self._task:
            self._task.cancel()


def _close_connection(sending: asyncio.Task[socket.socket]) -> None:
    """Close the connection over which a file was sent, now or once it is made."""
    sending.cancel()
    sending.add_done_callback(lambda task: None if task.cancelled() or task.exception() else task.result().close())
