"""Simulated links between workers: stand-ins for ``PeerLink``, its accepted end, and the listener.

A frame's payload is read when it leaves, at any time after it was queued. It arrives in two halves, between which other
things happen. The host of a stopped process still acknowledges. A cut link holds everything back, and acknowledges
nothing.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psdist.errors import PeerUnreachableError, PsdistError
from psdist.link.connecting import CONNECT_SECONDS
from psdist.security.tls import Credentials
from psdist.v1 import worker_pb2 as pb
from tests.simulation.environment import RunLoop, running
from tests.simulation.loop import Node

#: Seconds between two attempts to connect over a cut link, and between two looks at one that is held back.
_RETRY_SECONDS = 0.05


@dataclass
class _Item:
    """A frame on the way, or the end of the link (no header). whole: False if the sender closed it in the middle."""

    header: bytes
    payload: bytes = b""
    whole: bool = True


class PeerNetwork:
    """All links of a run. rng: decides delays. delay: shortest and longest, in seconds."""

    def __init__(self, loop: RunLoop, rng: random.Random, delay: tuple[float, float]) -> None:
        self.loop = loop
        self.rng = rng
        self._delay = delay
        self.longest_delay = delay[1]
        self.counts: Counter[str] = Counter()
        self.listeners: dict[str, SimListener] = {}
        #: Directed pairs of hosts between which nothing passes.
        self.cuts: set[tuple[str, str]] = set()
        self.links: list[SimPeerLink] = []

    def delay(self) -> float:
        return self.rng.uniform(*self._delay)

    def is_cut(self, source: str, target: str) -> bool:
        return (source, target) in self.cuts

    def on_crash(self, node: Node) -> None:
        """Close all connections of a process that was killed."""
        for link in list(self.links):
            if link.node is node:
                link.on_crash_of_sender()
            elif link.peer_node is node:
                link.on_crash_of_receiver()


class SimListener:
    """Port of one worker. address: of other workers' dials."""

    credentials = Credentials()

    def __init__(self, network: PeerNetwork, node: Node, address: str) -> None:
        self.node = node
        self.consumer: Any = None
        self._waiting: list[Callable[[], None]] = []
        network.listeners[address] = self

    def serve(self, consumer: Any) -> None:
        """See PeerListener."""
        self.consumer = consumer
        waiting, self._waiting = self._waiting, []
        for accept in waiting:
            accept()

    def accept(self, accept: Callable[[], None]) -> None:
        """Accept a link, once there is a consumer."""
        if self.consumer is None:
            self._waiting.append(accept)
        else:
            accept()


class AcceptedEnd:
    """Stand-in for the FrameConnection of an accepted link."""

    is_local = False

    def __init__(self, link: SimPeerLink) -> None:
        self._link = link
        self.receiver: Any = None
        self.is_closed = False
        self.discards = False

    def set_receiver(self, receiver: Any) -> None:
        """See FrameConnection."""
        self.receiver = receiver

    def allow_stalls(self) -> None:
        """See FrameConnection. Simulated connections have no limit on stalls."""

    def discard_payload(self) -> None:
        """See FrameConnection."""
        self.discards = True

    def abort(self) -> None:
        """See FrameConnection."""
        if not self.is_closed:
            self.is_closed = True
            self._link.closed_by_receiver()

    def send(self, header: bytes) -> None:
        """Drop the answer: nothing is shared."""

    send_soon = send


class SimPeerLink:
    """See ``psdist.link.peer_links.PeerLink``."""

    def __init__(
        self, hello: pb.PeerHello, tls: None, ended: Callable[[PsdistError], None], *, shares: bool = True
    ) -> None:
        loop = running()
        self.peer = hello.receiver.worker_id
        self.node = loop.current()
        self.peer_node: Node | None = None
        self.is_open = False
        self._network: PeerNetwork = loop.peers
        self._hello = hello
        self._ended: Callable[[PsdistError], None] | None = ended
        self._queue: deque[tuple[bytes, Any, Any, object]] = deque()
        self._current: tuple[bytes, Any, Any, object] | None = None
        self._wire: deque[_Item] = deque()
        self._is_moving = False
        self._accepted: AcceptedEnd | None = None
        #: Items that the peer's host has not acknowledged, and when it acknowledged one last.
        self._unacknowledged = 0
        self._acknowledged = loop.time()
        #: True once the peer's host has taken the connection. Its process accepts the link later.
        self._is_connected = False
        self._network.links.append(self)
        self._later(self._dial, loop.time() + CONNECT_SECONDS)

    def _later(self, call: Callable[..., None], *args: Any, node: Node | None = None, seconds: float = -1.0) -> None:
        """Call in the sender's process, or that of ``node``, after a delay."""
        loop, delay = self._network.loop, self._network.delay() if seconds < 0 else seconds
        loop.call_later(delay, call, *args, context=(node or self.node).context)

    @property
    def _hosts(self) -> tuple[str, str]:
        assert self.peer_node is not None
        return self.node.host, self.peer_node.host

    # --- the sender ---------------------------------------------------------------------------------------------------

    def _dial(self, until: float) -> None:
        network, address = self._network, self._hello.receiver.address
        if self._ended is None:
            return
        listener = network.listeners[address]
        self.peer_node = listener.node
        if any(network.is_cut(*pair) for pair in (self._hosts, self._hosts[::-1])):
            if network.loop.time() >= until:
                self._end(PeerUnreachableError(f"{self.peer} did not answer"))
            else:
                self._later(self._dial, until, seconds=_RETRY_SECONDS)
        elif listener.node.dead:
            self._end(PeerUnreachableError(f"no link to {self.peer}: refused"))
        else:
            self._is_connected, self._acknowledged = True, network.loop.time()
            self._later(listener.accept, self._accept, node=listener.node)

    def _welcomed(self) -> None:
        if self._ended is not None:
            self.is_open, self._acknowledged = True, self._network.loop.time()
            self._pump()

    def send(self, header: bytes, payload: Any = b"", sent: Any = None, owner: object = None) -> None:
        """See PeerLink."""
        self._queue.append((header, payload, sent, owner))
        self._pump()

    def ping(self) -> None:
        """See PeerLink."""
        if self.is_open:
            self._put(_Item(pb.PeerFrame(ping=True).SerializeToString()))

    def is_silent(self, seconds: float) -> bool:
        """See PeerLink."""
        if not self._is_connected:
            return True
        return self._unacknowledged > 0 and self._network.loop.time() - self._acknowledged > seconds

    def drop(self, owner: object) -> None:
        """See PeerLink."""
        self._queue = deque(frame for frame in self._queue if frame[3] is not owner)
        current = self._current
        if current is not None and current[3] is owner and len(current[1]):
            self._network.counts["a link ended in the middle of a frame"] += 1
            self._wire.append(_Item(current[0], bytes(current[1]), whole=False))
            self._end(PeerUnreachableError(f"a call ended while its data was sent to {self.peer}"))

    def close(self) -> None:
        """See PeerLink."""
        self._ended = None
        self._stop()

    def _pump(self) -> None:
        if self.is_open and self._current is None and self._queue and self._ended is not None:
            self._current = self._queue.popleft()
            self._later(self._leave)

    def _leave(self) -> None:
        if self._current is None or self._ended is None:
            return
        (header, payload, sent, _), self._current = self._current, None
        self._put(_Item(header, bytes(payload)))
        if sent is not None:
            sent()
        self._pump()

    def _end(self, error: PsdistError) -> None:
        ended, self._ended = self._ended, None
        self._stop()
        if ended is not None:
            ended(error)

    def _stop(self) -> None:
        self._queue.clear()
        self._current = None
        if self._network.rng.random() < 0.3 and not self._is_moving:  # A reset overtakes what is under way.
            self._wire.clear()
        self._put(_Item(b""))

    def on_crash_of_sender(self) -> None:
        """End the link as the kernel does."""
        self._ended = None
        self._stop()

    def on_crash_of_receiver(self) -> None:
        """End the link as the kernel does."""
        self._later(self._reset)

    def closed_by_receiver(self) -> None:
        """Learn that the receiver closed the link."""
        self._later(self._reset)

    def _reset(self) -> None:
        if self.peer_node is not None and self._network.is_cut(*self._hosts[::-1]):
            self._later(self._reset, seconds=_RETRY_SECONDS)
        else:
            self._end(PeerUnreachableError(f"{self.peer} closed its link"))

    # --- the wire -----------------------------------------------------------------------------------------------------

    def _put(self, item: _Item) -> None:
        self._wire.append(item)
        self._unacknowledged += 1
        self._acknowledge_after(self._network.longest_delay)
        if not self._is_moving:
            self._is_moving = True
            self._move(self._network.delay())

    def _acknowledge_after(self, seconds: float) -> None:
        loop = self._network.loop
        loop.call_later(seconds, self._acknowledge, context=loop.world.context)

    def _acknowledge(self) -> None:
        """Let the peer's host acknowledge an item, which its process may not have received yet: it may be slow."""
        if self.peer_node is None or self.peer_node.dead:
            return
        if any(self._network.is_cut(*pair) for pair in (self._hosts, self._hosts[::-1])):
            self._acknowledge_after(_RETRY_SECONDS)
            return
        self._unacknowledged -= 1
        self._acknowledged = self._network.loop.time()

    def _move(self, seconds: float) -> None:
        loop = self._network.loop
        loop.call_later(seconds, self._arrive, context=loop.world.context)

    def _arrive(self) -> None:
        """Let the oldest item reach the receiver's host."""
        network = self._network
        if self.peer_node is None:
            self._is_moving = False
        elif network.is_cut(*self._hosts):
            self._move(_RETRY_SECONDS)
        elif not self.peer_node.dead:
            network.loop.call_on(self.peer_node, self._receive)
        else:
            self._wire.clear()
            self._is_moving = False

    # --- the receiver -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self.peer_node is not None
        listener = self._network.listeners[self._hello.receiver.address]
        self._accepted = end = AcceptedEnd(self)
        try:
            listener.consumer.accepted(self._hello, end)
        except PsdistError:
            end.abort()
            return
        self._later(self._welcomed)

    def _receive(self) -> None:
        end = self._accepted
        if not self._wire or end is None or end.is_closed:
            self._wire.clear()
            self._is_moving = False
            return
        item = self._wire[0]
        if not item.header:
            self._finish(end, None)
            return
        message = pb.PeerFrame.FromString(item.header)
        end.discards = False
        try:
            buffer = end.receiver.payload_buffer(message, len(item.payload))
        except PsdistError as error:
            self._finish(end, error)
            return
        half = len(item.payload) // 2
        buffer[:half] = item.payload[:half]
        self._later(self._complete, item, message, buffer, node=self.peer_node)

    def _complete(self, item: _Item, message: pb.PeerFrame, buffer: Any) -> None:
        end = self._accepted
        if end is None or end.is_closed:
            self._receive()
            return
        self._wire.popleft()
        if item.whole:
            half = len(item.payload) // 2
            if not end.discards:
                buffer[half:] = item.payload[half:]
            try:
                end.receiver.on_message(message)
            except PsdistError as error:
                self._finish(end, error)
                return
        if self._wire:
            self._move(self._network.delay())
        else:
            self._is_moving = False

    def _finish(self, end: AcceptedEnd, error: PsdistError | None) -> None:
        self._wire.clear()
        self._is_moving = False
        if error is not None:
            self._network.counts[f"a frame was refused: {type(error).__name__}"] += 1
            self._network.loop.failures.append(f"a frame was refused: {error}")
        end.is_closed = True
        if error is not None:
            self.closed_by_receiver()
        end.receiver.connection_ended(error)
