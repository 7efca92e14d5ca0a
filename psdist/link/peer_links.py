"""Links between workers: the dialing end, and the port on which a worker accepts them.

A worker dials each worker that it sends to. A link carries frames of the dialing worker alone, so that one that leaves
after its last frame loses none of them. The first frame proves that its sender is a worker of the run; the answer is
``welcome``. With TLS both workers have shown certificates before.

Between workers of one host, payloads travel in memory that the dialing worker shares, and their frames in order on the
TCP connection. A payload is copied into a free place, and out of it by the receiver, which then releases the place. If
memory cannot be shared, payloads follow their frames on the connection.

Invariants: Frames are sent in order, once the link is accepted. A payload's memory is borrowed until ``sent`` is called
or the link ends. A place is written to only while it is free. Nothing but the first frame is read before its proof was
compared in constant time. A link that was accepted before this worker uses it is not read, and waits.

``psdist.collectives`` uses the links.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from psdist import addresses
from psdist.errors import (
    ClosedError,
    LimitExceededError,
    PeerUnreachableError,
    PsdistError,
    SharingUnavailableError,
    WrongRunError,
)
from psdist.link import processes
from psdist.link.arenas import GradientArena, MemoryOffer
from psdist.link.connecting import CONNECT_SECONDS, Listener, connect, time_limit
from psdist.link.frame_connection import FrameConnection, MessageReceiver, certificate_names, is_unanswered
from psdist.security import roles
from psdist.security.roles import Role
from psdist.security.tls import Credentials, TlsFiles
from psdist.security.tokens import Audience, Verifier
from psdist.v1 import worker_pb2 as pb
from psdist.wire import auth, limits

logger = logging.getLogger("psdist")

_NOTHING: Final = memoryview(b"")
_PING: Final = pb.PeerFrame(ping=True).SerializeToString()
#: Smaller payloads follow their frame.
_SMALL_BYTES: Final = 16 << 10
#: Elements and dtype of the shared memory.
ARENA: Final = (limits.SHARED_PARTS * limits.PART_BYTES // 4, "float32")
#: Time limit for a connection to the scheduler, to find out where it listens.
_PROBE_SECONDS: Final = 1.0


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
            async with MemoryOffer(arena, "worker") as offer:
                self.connection.send(pb.PeerFrame(offer=offer.name).SerializeToString())
                async with asyncio.timeout(processes.HANDOVER_SECONDS):
                    taken = await self._taken
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


# --- the accepting end ------------------------------------------------------------------------------------------------


class PeerFrames(Protocol):
    """Consumer of accepted links."""

    def accepted(self, hello: pb.PeerHello, connection: FrameConnection) -> None:
        """Take over a link. Raises PsdistError to refuse it."""

    def close(self, error: PsdistError) -> None:
        """End all links, because of ``error``."""


class PeerListener(Listener[pb.PeerFrame]):
    """Port of a worker for links of other workers. With neither a token nor TLS it accepts all (loopback only)."""

    message_type = pb.PeerFrame
    opening_bytes = limits.PEER_OPENING_BYTES

    def __init__(self, credentials: Credentials) -> None:
        super().__init__(credentials.tls)
        #: host:port for other workers; empty if there is none.
        self.address = ""
        self.credentials = credentials
        self.verifier = Verifier(credentials.token, Audience.WORKER)
        self._consumer: PeerFrames | None = None
        #: Links that nobody uses yet, by worker.
        self._waiting: dict[str, tuple[pb.PeerHello, FrameConnection]] = {}
        #: Links that arrived before the key that their proofs are checked by. The others learn this worker's address
        #: from the map, which may be quicker than the answer to its registration.
        self._unchecked: list[tuple[pb.PeerHello, FrameConnection]] = []

    async def open_towards(self, scheduler: str, *, spans_hosts: bool, name: str = "") -> None:
        """Listen at the address by which this host reaches ``scheduler`` (host:port, or several).

        spans_hosts: True if other hosts have workers, which cannot reach a loopback address.
        name: name or address by which they reach it instead, such as that in its certificate.

        Raises OSError if the scheduler's name does not resolve now, or if it has to be asked and does not answer.
        """
        peer = (await addresses.look_up_any(scheduler))[0]
        host = addresses.route_source(peer) or addresses.loopback()
        if spans_hosts and addresses.is_loopback(host) and (own := await _beyond_loopback(scheduler)):
            host = own
        if not addresses.is_loopback(host) and self.credentials.tls is None:
            if not self.credentials.token:
                self.log_unavailable(host, "beyond loopback the run needs a token or TLS")
                return
            if not self.credentials.insecure:
                self.log_unavailable(host, "beyond loopback a token needs TLS, or --insecure (PSDIST_INSECURE=1)")
                return
        await self.open(host)
        self.address = addresses.format_address(name or host, self.port) if self.port else ""

    def serve(self, consumer: PeerFrames) -> None:
        """Hand accepted links, including those that wait, to ``consumer``."""
        self._consumer = consumer
        waiting, self._waiting = self._waiting, {}
        for hello, connection in waiting.values():
            connection.set_receiver(_Refused())
            self._hand_over(hello, connection)
            connection.release()

    def close(self) -> None:
        """Stop accepting links, and close all."""
        super().close()
        if self._consumer is not None:
            self._consumer.close(ClosedError("the client is closed"))
        for _, connection in (*self._waiting.values(), *self._unchecked):
            connection.abort()
        self._waiting.clear()
        self._unchecked.clear()

    def identify(self, opening: pb.PeerFrame) -> Callable[[FrameConnection], None]:
        """Check that a link comes from a worker. Raises UnauthenticatedError and PermissionDeniedError."""
        hello = opening.hello
        if not self.verifier.is_ready:
            if len(self._unchecked) >= limits.UNIDENTIFIED_MAX:
                raise LimitExceededError(f"{limits.UNIDENTIFIED_MAX} links wait for this worker to be registered")
            return lambda connection: self._hold_unchecked(hello, connection)
        role = self._check(hello)
        return lambda connection: self._take(hello, role, connection)

    def _check(self, hello: pb.PeerHello) -> Role:
        role = self.verifier.role(hello.token)
        roles.check(role, roles.PEER_LINK)
        hello.token = ""
        return role

    def _take(self, hello: pb.PeerHello, role: Role, connection: FrameConnection) -> None:
        """Keep a link whose token proved ``role``, if its certificate does not state another one. Raises
        PermissionDeniedError."""
        auth.certificate_role(certificate_names(connection), role, roles.PEER_LINK, hello.run_id)
        self._keep(hello, connection)

    def _hold_unchecked(self, hello: pb.PeerHello, connection: FrameConnection) -> None:
        self._unchecked.append((hello, connection))
        connection.set_receiver(_Refused())
        connection.hold()

    def registered(self) -> None:
        """Check the links that arrived before this worker had its key."""
        unchecked, self._unchecked = self._unchecked, []
        for hello, connection in unchecked:
            try:
                self._take(hello, self._check(hello), connection)
            except PsdistError as error:
                self.note_stranger(error.message)
                connection.abort()
            else:
                connection.release()

    def _keep(self, hello: pb.PeerHello, connection: FrameConnection) -> None:
        if self._consumer is not None:
            self._hand_over(hello, connection)
            return
        name = hello.sender.worker_id
        if name not in self._waiting and len(self._waiting) >= limits.MEMBERS_MAX:
            raise LimitExceededError(f"{len(self._waiting)} links of other workers wait to be used, which is the limit")
        if name in self._waiting:
            self._waiting.pop(name)[1].abort()
        self._waiting[name] = hello, connection
        connection.set_receiver(_Refused())
        connection.hold()

    def _hand_over(self, hello: pb.PeerHello, connection: FrameConnection) -> None:
        assert self._consumer is not None
        try:
            self._consumer.accepted(hello, connection)
        except PsdistError as error:
            self.note_stranger(error.message)
            connection.abort()
            return
        connection.send(pb.PeerFrame(welcome=True).SerializeToString())

    def log_unavailable(self, host: str, reason: str) -> None:
        logger.warning("this worker accepts no links of other workers (%s: %s): it has no collectives", host, reason)

    def log_strangers(self, count: int, reason: str) -> None:
        logger.info("closed %d links that were not of this run's workers; the last: %s", count, reason)


async def _beyond_loopback(scheduler: str) -> str:
    """Return this host's address for other hosts; empty if the scheduler listens on loopback alone. Then all members
    are on this host, and none of them needs to be reached from outside. Raises OSError if no scheduler answers yet."""
    own = addresses.own_address()
    for host, port in map(addresses.parse_address, addresses.split_addresses(scheduler)):
        if await _accepts(host, port):
            return own if await _accepts(own, port) else ""
    raise ConnectionRefusedError(f"no scheduler answers at {scheduler}")


async def _accepts(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # TimeoutError is an OSError.
        return False
    writer.close()
    return True


def check_hello(hello: pb.PeerHello, run_id: str, worker_id: str, incarnation: int) -> None:
    """Raise WrongRunError or PeerUnreachableError unless a link means this worker."""
    if hello.run_id != run_id:
        raise WrongRunError(f"a link is of run {hello.run_id!r:.80}, and this is run {run_id!r}")
    meant = hello.receiver
    if (meant.worker_id, meant.incarnation) != (worker_id, incarnation):
        raise PeerUnreachableError(
            f"a link is for {meant.worker_id!r:.80} in incarnation {meant.incarnation}, and this is {worker_id} in "
            f"incarnation {incarnation}"
        )


class _Refused(MessageReceiver[pb.PeerFrame]):
    """Receiver of a link that nobody uses."""

    message_type = pb.PeerFrame

    def on_message(self, message: pb.PeerFrame) -> None:
        raise ClosedError("the link is not in use")

    def connection_ended(self, error: PsdistError | None) -> None:
        pass
