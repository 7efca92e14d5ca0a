"""Data movement of one call at one rank: data for each peer, and memory for data from each.

Data of up to ``limits.EAGER_BYTES`` for a peer, or ``limits.EAGER_REDUCED_BYTES`` to reduce (less in groups of more
than 33 ranks), travels with the call as part 0. More is sent in parts of ``limits.PART_BYTES`` once the peer has made
the call, and is received where it belongs. The results of a reduction are parts, too: a rank that has reduced a part of
its own segment sends the result to the others.

Invariants: Each part is received once, with its own size. An array that is reduced in place is not overwritten before
it was sent: the result of a part exists only after all ranks' contributions to it have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.collectives.core.header import NOWHERE, Header
from psdist.collectives.core.reductions import combine
from psdist.errors import InvalidArgumentError
from psdist.wire.limits import EAGER_BYTES, EAGER_REDUCED_BYTES, EARLY_BYTES_MAX, PART_BYTES

Array = NDArray[Any]
#: Contiguous array of bytes.
Bytes = NDArray[np.uint8]

_NO_BYTES: Final[Bytes] = np.empty(0, np.uint8)


def flat_bytes(array: Array) -> Bytes:
    """Return the memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)


def count_parts(size: int) -> int:
    """Return the number of parts of ``size`` bytes."""
    return math.ceil(size / PART_BYTES)


def cut_part(array: Bytes, number: int) -> Bytes:
    """Return a part by its number from 0."""
    return array[number * PART_BYTES : (number + 1) * PART_BYTES]


def cut_segment(array: Array, rank: int, size: int) -> Array:
    """Return a rank's segment of an array of one dimension."""
    return array[array.size * rank // size : array.size * (rank + 1) // size]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A part to send."""

    peer: int
    part: int
    data: Bytes


class Plan:
    """Call that only moves data.

    call: the header, without sizes.
    peers: the other ranks that take part.
    gives: by peer, the data for it.
    takes: by peer, the memory for data from it.
    """

    def __init__(
        self, call: Header, peers: Sequence[int], gives: Mapping[int, Bytes], takes: Mapping[int, Bytes]
    ) -> None:
        self.call = call
        self.peers = tuple(peers)
        self.gives, self.takes = gives, takes
        #: Data to reduce here; None if there is none.
        self.segment: ReducedSegment | None = None
        #: Whole arrays of an all-reduce in segments: this rank's, and the memory for the result.
        self.whole: tuple[Array, Array] | None = None
        #: True if this rank can move the data by another route than parts.
        self.shares = False
        #: True if no data travels with the call.
        self.is_bare = False
        #: Position of the array of ``whole`` in a registered buffer, until a rank has announced another one.
        self.position = NOWHERE
        #: By peer, the parts that have not arrived.
        self.missing = {peer: self._expected(peer) for peer in self.peers}

    def _expected(self, peer: int) -> set[int]:
        return {2 * number for number in range(count_parts(self._taken_bytes(peer)))}

    def _given(self, peer: int) -> Bytes:
        return self.gives.get(peer, _NO_BYTES)

    def _taken_bytes(self, peer: int) -> int:
        return self.takes[peer].nbytes if peer in self.takes else 0

    def header(self, peer: int) -> Header:
        """Return the header for a peer."""
        call = self.call
        sizes = self._given(peer).nbytes, self._taken_bytes(peer)
        return Header(call.kind, call.op, call.dtype, call.shape, call.root, *sizes, self.shares, self.position)

    def eager(self, peer: int) -> Bytes:
        """Return the data that travels with the call."""
        return self._given(peer) if self._is_eager(peer) else _NO_BYTES

    def _is_eager(self, peer: int) -> bool:
        return not (self.shares or self.is_bare) and self._given(peer).nbytes <= self._eager_bytes

    @property
    def _eager_bytes(self) -> int:
        return EAGER_BYTES

    def initial(self, peer: int) -> Iterable[Outgoing]:
        """Yield the parts to send once the peer has made the call."""
        given = self._given(peer)
        if not self._is_eager(peer):
            for number in range(count_parts(given.nbytes)):
                yield Outgoing(peer, 2 * number, cut_part(given, number))

    def check(self, peer: int, part: int, size: int) -> None:
        """Raise InvalidArgumentError unless the part is expected and has this size."""
        if part not in self.missing[peer] or self._part_bytes(peer, part) != size:
            raise InvalidArgumentError(f"rank {peer} sent an unexpected part {part} of {size} bytes of {self.call}")

    def _part_bytes(self, peer: int, part: int) -> int:
        return min(PART_BYTES, self._taken_bytes(peer) - part // 2 * PART_BYTES)

    def place(self, peer: int, part: int) -> Bytes:
        """Return the memory for a part that is expected."""
        return cut_part(self.takes[peer], part // 2)

    def start(self) -> None:
        """Do what needs no peer."""

    def received(self, peer: int, part: int) -> Iterable[Outgoing]:
        """Process a part, which is in its place. Returns parts that can now be sent."""
        self.missing[peer].discard(part)
        return ()


@dataclass(frozen=True)
class ReducedSegment:
    """The elements that this rank reduces.

    own: this rank's contribution.
    out: memory for the result; ``own`` itself, or apart from it.
    relays: peers that receive the result.
    results: by peer, memory for the result of that peer's segment.
    """

    own: Array
    out: Array
    relays: tuple[int, ...] = ()
    results: Mapping[int, Bytes] = field(default_factory=dict)


class ReductionPlan(Plan):
    """Call that reduces a segment: all ranks contribute to it, and some receive the result.

    rank: this rank.
    gives: by peer, the contribution to the segment that the peer reduces.
    """

    def __init__(
        self, call: Header, rank: int, peers: Sequence[int], gives: Mapping[int, Bytes], segment: ReducedSegment
    ) -> None:
        self._rank = rank
        self._segment = segment
        self._size = segment.own.nbytes
        #: By part number, the contributions that have arrived, by rank.
        self._arrived: dict[int, dict[int, Bytes]] = {}
        #: Memory of contributions, reused.
        self._spare: list[Bytes] = []
        super().__init__(call, peers, gives, {})
        self.segment = segment

    def _expected(self, peer: int) -> set[int]:
        results = self._segment.results.get(peer, _NO_BYTES)
        return super()._expected(peer) | {2 * number + 1 for number in range(count_parts(results.nbytes))}

    @property
    def _eager_bytes(self) -> int:
        """A rank that has not opened the group yet holds the data of all others, perhaps in several groups."""
        per_rank = EARLY_BYTES_MAX // 4 // max(1, len(self.peers))
        return max(EAGER_BYTES, min(EAGER_REDUCED_BYTES, per_rank))

    def _taken_bytes(self, peer: int) -> int:
        return self._size

    def _part_bytes(self, peer: int, part: int) -> int:
        if part % 2 == 0:
            return super()._part_bytes(peer, part)
        return cut_part(self._segment.results[peer], part // 2).nbytes

    def start(self) -> None:
        if not self.peers:
            combine(self.call.op, [self._segment.own], self._segment.out)

    def place(self, peer: int, part: int) -> Bytes:
        if part % 2:
            return cut_part(self._segment.results[peer], part // 2)
        size = self._part_bytes(peer, part)
        memory = self._spare.pop() if self._spare else np.empty(min(PART_BYTES, self._size), np.uint8)
        self._arrived.setdefault(part // 2, {})[peer] = memory[:size]
        return memory[:size]

    def received(self, peer: int, part: int) -> Iterable[Outgoing]:
        super().received(peer, part)
        if part % 2 or any(part in self.missing[other] for other in self.peers):
            return ()
        return self._reduce(part // 2)

    def _reduce(self, number: int) -> Iterable[Outgoing]:
        """Reduce a part to which all ranks have contributed."""
        segment, contributions = self._segment, self._arrived.pop(number)
        own, out = (cut_part(flat_bytes(array), number) for array in (segment.own, segment.out))
        ranks = sorted((self._rank, *self.peers))
        arrays = [contributions.get(rank, own).view(segment.own.dtype) for rank in ranks]
        combine(self.call.op, arrays, out.view(segment.own.dtype))
        self._spare += [memory.base if memory.base is not None else memory for memory in contributions.values()]
        return [Outgoing(peer, 2 * number + 1, out) for peer in segment.relays]
