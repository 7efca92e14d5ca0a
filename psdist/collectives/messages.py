"""Conversion of calls to and from the frames of a link, and the key of a group, which all of its frames carry.

A key is the digest of the group's name, its epoch, and the digest of its members.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Final

from psdist.collectives.core.machine import COLLECTIVES, CallLane, SendCall, SendFailure, SendPart
from psdist.collectives.core.plans import BufferPosition, Header
from psdist.errors import InvalidArgumentError
from psdist.types import WorkerEntry
from psdist.v1 import worker_pb2 as pb
from psdist.wire import status
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
