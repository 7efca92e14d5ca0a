"""Conversion of calls to and from the frames of a link."""

from __future__ import annotations

from psdist.collectives.core.header import BufferPosition, Header
from psdist.collectives.core.machine import COLLECTIVES, CallLane, SendCall, SendFailure, SendPart
from psdist.errors import InvalidArgumentError
from psdist.v1 import worker_pb2 as pb
from psdist.wire import status
from psdist.wire.limits import DIMENSIONS_MAX


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
