"""Frames of groups on links between workers: their messages, the key of a group, and the link that receives them.

A key is the digest of the group's name, its epoch, and the digest of its members.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable
from typing import Final, Protocol

import numpy as np

from psdist.collectives.core.machine import COLLECTIVES, CallLane, SendCall, SendFailure, SendPart
from psdist.collectives.core.plans import BufferPosition, Bytes, Header
from psdist.errors import InvalidArgumentError, LimitExceededError, PsdistError, SharingUnavailableError
from psdist.link.arenas import take_arena
from psdist.link.frame_connection import FrameConnection, MessageReceiver
from psdist.link.peer_links import ARENA
from psdist.types import WorkerEntry
from psdist.v1 import scheduler_pb2
from psdist.v1 import worker_pb2 as pb
from psdist.wire import limits, status
from psdist.wire.limits import DIMENSIONS_MAX

_DIGEST_BYTES: Final = 8
_EPOCH_BYTES: Final = 8


def make_key(name: str, epoch: int, members: Iterable[WorkerEntry]) -> bytes:
    """Return the key of a group. epoch: counts the groups of a name."""
    return _digest(name) + epoch.to_bytes(_EPOCH_BYTES, "big") + _digest(name_members(members))


def name_members(members: Iterable[WorkerEntry]) -> str:
    """Return the members, in order, as text."""
    return json.dumps([[worker.worker_id, worker.incarnation] for worker in members])


def series_of(key: bytes) -> bytes:
    """Return the part of a key that all groups of a name share."""
    return key[:_DIGEST_BYTES]


def epoch_of(key: bytes) -> int:
    """Return the epoch in a key."""
    return int.from_bytes(key[_DIGEST_BYTES : _DIGEST_BYTES + _EPOCH_BYTES], "big")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def encode(group: bytes, effect: SendCall | SendPart | SendFailure) -> bytes:
    """Return the header of the frame that carries out an effect. group: key of the group."""
    match effect:
        case SendCall(_, _, lane, number, header):
            call = pb.CollectiveCall(
                lane=_lane(group, lane, number), kind=header.kind, op=header.op, dtype=header.dtype,
                shape=header.shape, root=header.root, gives=header.gives, takes=header.takes, shares=header.shares,
                buffer=header.position.number, offset=header.position.offset,
            )  # fmt: skip
            return pb.PeerFrame(call=call).SerializeToString()
        case SendPart(_, lane, number, outgoing):
            part = pb.CollectivePart(lane=_lane(group, lane, number), part=outgoing.part)
            return pb.PeerFrame(part=part).SerializeToString()
        case SendFailure(_, error, completed):
            failure = pb.CollectiveFailure(group=group, error=status.to_detail(error), completed=completed)
            return pb.PeerFrame(failure=failure).SerializeToString()


def _lane(group: bytes, lane: CallLane, number: int) -> pb.CollectiveLane:
    return pb.CollectiveLane(group=group, source=lane.source, tag=lane.tag, number=number)


def lane_of(message: pb.CollectiveLane, peer: int, rank: int) -> CallLane:
    """Return the lane of a message from ``peer`` to ``rank``. Raises InvalidArgumentError."""
    if message.source == peer:
        return CallLane(peer, rank, message.tag)
    if message.source == rank:
        return CallLane(rank, peer, message.tag)
    if message.source != COLLECTIVES.source:
        raise InvalidArgumentError(f"rank {peer} names a lane of rank {message.source}")
    return COLLECTIVES


def header_of(call: pb.CollectiveCall) -> Header:
    """Return the header of a peer's call. Raises InvalidArgumentError."""
    if len(call.shape) > DIMENSIONS_MAX:
        raise InvalidArgumentError(f"an array of {len(call.shape)} dimensions is announced, over {DIMENSIONS_MAX}")
    shape, position = tuple(call.shape), BufferPosition(call.buffer, call.offset)
    return Header(call.kind, call.op, call.dtype, shape, call.root, call.gives, call.takes, call.shares, position)


#: Id and incarnation of a worker.
Sender = tuple[str, int]


class GroupFrames(Protocol):
    """A group that receives frames."""

    ranks: tuple[int, ...]

    @property
    def has_ended(self) -> bool:
        """True if the group can make no more calls."""

    def open(self, key: bytes, members: list[WorkerEntry]) -> None:
        """Start to exchange frames with the members, by rank in the group."""

    def end(self, error: PsdistError) -> None:
        """End the group at all ranks."""

    def abandon(self, error: PsdistError) -> None:
        """End the group here. The other ranks learn of it by the end of their links."""

    def farewell(self, key: bytes) -> bytes:
        """Return the frame by which a member learns that the group has ended here. key: of the group."""

    def place(self, sender: Sender, part: pb.CollectivePart, size: int) -> Bytes | None:
        """Return the memory for a part, or None if it is not needed any more."""

    def on_frame(self, sender: Sender, frame: pb.PeerFrame, data: Bytes) -> None:
        """Process a frame."""

    def lacks(self, check: scheduler_pb2.CheckCall) -> bool:
        """Return True if this worker has not made the call that another one waits for."""

    def on_lost(self, worker: Sender, reason: str) -> None:
        """Process the loss of a worker, of this group or not."""


class LinkOwner(Protocol):
    """Groups of this worker, to which a link delivers frames."""

    def open_group(self, key: bytes) -> GroupFrames | None:
        """Return the open group with this key."""

    def on_frame(self, sender: Sender, frame: pb.PeerFrame, data: Bytes) -> None:
        """Process a frame, whose payload is complete. Raises PsdistError for one that makes no sense."""

    def link_ended(self, sender: Sender, used: set[bytes], reason: str) -> None:
        """Process the end of an accepted link. used: keys of the groups whose frames it has carried."""


def key_of(frame: pb.PeerFrame) -> bytes:
    """Return the key of the group that a frame names. Raises InvalidArgumentError."""
    match frame.WhichOneof("kind"):
        case "call":
            return frame.call.lane.group
        case "part":
            return frame.part.lane.group
        case "failure":
            return frame.failure.group
        case "memory":
            return frame.memory.group
    raise InvalidArgumentError("a link carries calls, parts, failures and memory after its first frame")


class IncomingLink(MessageReceiver[pb.PeerFrame]):
    """Accepted link of one worker."""

    message_type = pb.PeerFrame

    def __init__(self, mesh: LinkOwner, sender: Sender, connection: FrameConnection) -> None:
        self.connection = connection
        self._mesh = mesh
        self._sender = sender
        self._data: Bytes = np.empty(0, np.uint8)
        #: Memory that the sender shares, by place.
        self._arena: Bytes | None = None
        self._taking: asyncio.Task[None] | None = None
        #: Keys of the groups whose frames it has carried.
        self.used: set[bytes] = set()
        #: Group whose memory is being written to.
        self.receiving: GroupFrames | None = None
        connection.set_receiver(self)
        connection.allow_stalls()  # The sender's script may hold its interpreter while half of a frame is sent.

    def payload_buffer(self, message: pb.PeerFrame, size: int) -> memoryview:
        self.receiving = None
        if message.HasField("shared"):
            self._copy_shared(message, size)
            return memoryview(b"")
        self._data = self._memory_for(message, size)
        return self._data.data

    def _memory_for(self, message: pb.PeerFrame, size: int) -> Bytes:
        """Return the memory for a payload. Raises LimitExceededError."""
        limit = limits.PART_BYTES
        if message.WhichOneof("kind") == "part":
            group = self._mesh.open_group(key_of(message))
            data = group.place(self._sender, message.part, size) if group is not None else None
            if data is not None:
                self.receiving = group
                return data
            # Sent before the sender knew that the call had ended.
        else:
            is_collective = message.WhichOneof("kind") == "call" and message.call.lane.source == COLLECTIVES.source
            limit = limits.EAGER_REDUCED_BYTES if is_collective else limits.EAGER_BYTES
        if size > limit:
            raise LimitExceededError(f"a payload has {size} bytes, over {limit}")
        return np.empty(size, np.uint8)

    def _copy_shared(self, message: pb.PeerFrame, size: int) -> None:
        """Copy a payload out of shared memory, and release its place."""
        place, shared = message.shared.place, message.shared.size
        if self._arena is None or size or place >= limits.SHARED_PARTS or shared > limits.PART_BYTES:
            raise InvalidArgumentError(f"a frame names {shared} bytes at place {place}, which is not shared")
        self._data = self._memory_for(message, shared)
        self._data[:] = self._arena[place, :shared]
        self.connection.send_soon(pb.PeerFrame(released=place + 1).SerializeToString())

    def on_message(self, message: pb.PeerFrame) -> None:
        data, self._data, self.receiving = self._data, np.empty(0, np.uint8), None
        if message.HasField("ping"):
            return
        if message.WhichOneof("kind") != "offer":
            if len(self.used) < limits.GROUPS_MAX:
                self.used.add(key_of(message))
            self._mesh.on_frame(self._sender, message, data)
        elif self._taking is None:
            self._taking = asyncio.create_task(self._take(message.offer), name="psdist shared memory")

    async def _take(self, name: str) -> None:
        """Map the memory that the sender offers, and answer."""
        nonce = b""
        try:
            arena, connected = await take_arena(name, *ARENA)
            connected.close()
            nonce, self._arena = arena.nonce, arena.flat.view(np.uint8).reshape(limits.SHARED_PARTS, -1)
        except SharingUnavailableError:
            pass  # The sender is on another host, or in another container, and goes without.
        self.connection.send(pb.PeerFrame(taken=nonce).SerializeToString())

    def close(self) -> None:
        """End the link without a report."""
        self.connection.abort()
        if self._taking is not None:
            self._taking.cancel()

    def connection_ended(self, error: PsdistError | None) -> None:
        if self._taking is not None:
            self._taking.cancel()
        name = self._sender[0]
        reason = f"{name} closed its link" if error is None else f"{name}: {error.message}"
        self._mesh.link_ended(self._sender, self.used, reason)
