"""Movement of a call's data through memory that all ranks of a group map, if they are on one host.

Each rank writes to its own memory alone, and reads the others' in place. A call is cut into pieces, small enough that
they stay in the caches. Every piece goes through three stages:

1. A rank writes its data for the others to its memory.
2. It takes data for itself from the others' memory. For a reduction it combines all contributions to its segment, and
   writes the result to its memory.
3. It takes the results of the others' segments.

The ranks advance step by step: step s is stage 1 of piece s, stage 2 of piece s - 1 and stage 3 of piece s - 2. A rank
takes step s when all others have completed step s - 1. So two slots for each kind of data are enough.

If the arrays of all ranks are at one position of one registered buffer, stage 1 is left out: stage 2 reads the
contributions in place. Registered buffers are arrays of equal size, one at each rank, which all ranks of the host map.
Each rank announces the position of its array with the call, and all of them compare the announcements.

Invariants: A slot is written only after all ranks have read its last piece. A rank that writes anything else, or at
another time, changes only its own contribution and the result of its own segment. Offsets follow from the call, on
which all ranks agree; none is read from memory. A part of a registered buffer is overwritten only by the result of all
ranks' contributions to this part, which exists once the only rank that reads them has done so.

A buffer has one number at all ranks, and is registered at all of them or at none. It stays registered at a rank as long
as any array there refers to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from psdist.collectives.core.plans import (
    NOWHERE,
    Array,
    BufferPosition,
    Bytes,
    Plan,
    ReducedSegment,
    combine,
    cut_segment,
    flat_bytes,
)
from psdist.wire.limits import HOST_MEMORY_BYTES_MIN, IN_PLACE_PIECE_BYTES, LARGE_GROUP_PIECE_BYTES, PIECE_BYTES

#: Beginning of the slots in a rank's memory. Before it there is the number of steps that the rank has completed.
_HEADER_BYTES: Final = 64
_SLOTS: Final = 4
#: Calls in which a rank has the same data for all that take it.
_SAME_FOR_ALL: Final = frozenset({"all_gather", "broadcast", "gather", "reduce"})
#: Other calls in which all ranks have equal amounts of data.
_EVEN: Final = frozenset({"all_reduce", "reduce_scatter", "scatter"})
_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One buffer. address, size: of this rank's memory. others: that of the other ranks."""

    address: int
    size: int
    others: dict[int, Bytes]


class RegisteredBuffers:
    """Buffers of one group at ``rank``. They may end in any thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._buffers: dict[int, _Buffer] = {}

    def __len__(self) -> int:
        return len(self._buffers)

    def register(self, number: int, memories: Sequence[Bytes]) -> None:
        """Register a buffer until no array refers to this rank's memory. memories: by rank, of equal sizes."""
        own = memories[self._rank]
        others = {rank: memory for rank, memory in enumerate(memories) if rank != self._rank}
        self._buffers[number] = _Buffer(own.ctypes.data, own.nbytes, others)
        weakref.finalize(_owner(own), self._buffers.pop, number, None).atexit = False

    def position_of(self, array: Array) -> BufferPosition:
        """Return the position of a contiguous array; ``NOWHERE`` unless it lies wholly in a registered buffer."""
        address = array.ctypes.data
        for number, buffer in list(self._buffers.items()):
            offset = address - buffer.address
            if array.nbytes and 0 <= offset <= buffer.size - array.nbytes:
                return BufferPosition(number, offset)
        return NOWHERE

    def contributions(self, position: BufferPosition, own: Array) -> list[Array]:
        """Return the arrays at a position by rank. own: this rank's, of one dimension."""
        others = self._buffers[position.number].others
        part = slice(position.offset, position.offset + own.nbytes)
        arrays = {rank: memory[part].view(own.dtype) for rank, memory in others.items()}
        return [arrays.get(rank, own) for rank in range(len(others) + 1)]

    def clear(self) -> None:
        """Forget all buffers, which remain ordinary memory."""
        self._buffers.clear()


def _owner(array: Bytes) -> Array:
    """Return the array that all views of some memory refer to."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def fits(plan: Plan) -> bool:
    """True if a call's data may move through memory: it is large, and all ranks cut it alike."""
    sizes = {data.nbytes for data in (*plan.gives.values(), *plan.takes.values())}
    kind = plan.call.kind
    is_even = kind in _SAME_FOR_ALL or kind in _EVEN or (kind == "all_to_all" and len(sizes) == 1)
    is_whole = kind == "all_reduce" and plan.segment is not None and not plan.segment.relays
    return is_even and not is_whole and largest(plan) >= HOST_MEMORY_BYTES_MIN


def largest(plan: Plan) -> int:
    """Return the size of the largest data of one rank for one or all others, which is the same at all ranks."""
    moved = [data.nbytes for data in (*plan.gives.values(), *plan.takes.values())]
    if plan.segment is not None:
        moved += [plan.segment.own.nbytes, *(data.nbytes for data in plan.segment.results.values())]
    return max(moved, default=0)


def memory_bytes(size: int) -> int:
    """Return the size of one rank's memory in a group of ``size`` ranks."""
    return _HEADER_BYTES + _SLOTS * _piece_bytes(size)


def _piece_bytes(size: int) -> int:
    return PIECE_BYTES if size <= 4 else LARGE_GROUP_PIECE_BYTES


class HostMemory:
    """Memory of all ranks of a group. memories: by rank, ``memory_bytes`` each; only that of ``rank`` is writable."""

    def __init__(self, rank: int, memories: Sequence[Bytes], buffers: RegisteredBuffers) -> None:
        self.rank = rank
        self.buffers = buffers
        self.size = len(memories)
        #: Steps of all calls so far, those of the current one included.
        self.planned = 0
        #: Address of each rank's number of completed steps, whose low 32 bits come first.
        self.addresses = [memory.ctypes.data for memory in memories]
        self._completed = [memory[:8].view("<u8") for memory in memories]
        self.piece_bytes = _piece_bytes(self.size)
        starts = [_HEADER_BYTES + slot * self.piece_bytes for slot in range(_SLOTS)]
        self._slots = [[memory[start : start + self.piece_bytes] for start in starts] for memory in memories]

    def fits(self, plan: Plan) -> bool:
        return fits(plan)

    def moves(self, plan: Plan) -> HostMoves:
        return HostMoves(plan, self)

    def completed(self, rank: int) -> int:
        """Return the number of steps that a rank has completed, over all calls."""
        return int(self._completed[rank][0])

    def publish(self, completed: int) -> None:
        """Set the number of steps that this rank has completed."""
        self._completed[self.rank][0] = completed

    def given(self, rank: int, piece: int) -> Bytes:
        """Return the slot for a rank's data."""
        return self._slots[rank][piece % 2]

    def result(self, rank: int, piece: int) -> Bytes:
        """Return the slot for the result of a rank's segment."""
        return self._slots[rank][2 + piece % 2]


class HostMoves:
    """One call through ``memory`` at one rank. All ranks make an object for each of these calls, in the same order."""

    def __init__(self, plan: Plan, memory: HostMemory) -> None:
        self.peers = plan.peers
        self._memory = memory
        self._plan = plan
        self._is_same = plan.call.kind in _SAME_FOR_ALL
        #: By rank, the contributions to this rank's segment, if they are read in place.
        self._in_place: list[Array] = []
        if plan.whole is not None and plan.position != NOWHERE:
            arrays = memory.buffers.contributions(plan.position, plan.whole[0])
            self._in_place = [cut_segment(array, memory.rank, memory.size) for array in arrays]
        columns = 1 if self._is_same or self.is_in_place else memory.size
        longest = IN_PLACE_PIECE_BYTES if self.is_in_place else memory.piece_bytes
        #: Bytes of one piece for one rank.
        self._width = min(longest, memory.piece_bytes // columns // _ALIGNMENT * _ALIGNMENT)
        pieces = -(-largest(plan) // self._width)
        #: Completed steps of a rank that has begun this call, and of one that has completed it.
        self.first = memory.planned
        stages = 2 + (plan.call.kind == "all_reduce") - self.is_in_place
        self.last = memory.planned = self.first + pieces + stages - 1

    @property
    def is_in_place(self) -> bool:
        """True if contributions are read in place."""
        return bool(self._in_place)

    def needs(self, peer: int) -> bool:
        return self._memory.completed(peer) < self.last

    def slowest(self) -> list[int]:
        completed = {peer: self._memory.completed(peer) for peer in self.peers}
        return [peer for peer, steps in completed.items() if steps == min(completed.values())]

    def advance(self, step: int) -> None:
        """Take a step, ``first`` at first. All ranks must have completed ``step`` steps."""
        piece = step - self.first
        if not self.is_in_place:
            self._give(piece)
            piece -= 1
        if piece >= 0:
            self._take(piece)
        if piece >= 1:
            self._take_results(piece - 1)
        self._memory.publish(step + 1)

    def _cut(self, data: Bytes, piece: int) -> Bytes:
        return data[piece * self._width : (piece + 1) * self._width]

    def _column(self, rank: int, taker: int, piece: int, size: int) -> Bytes:
        """Return ``size`` bytes of a rank's slot: those for ``taker``."""
        start = 0 if self._is_same else taker * self._width
        return self._memory.given(rank, piece)[start : start + size]

    def _give(self, piece: int) -> None:
        rank, gives = self._memory.rank, self._plan.gives
        for peer, data in list(gives.items())[: 1 if self._is_same else None]:
            part = self._cut(data, piece)
            self._column(rank, peer, piece, part.size)[:] = part

    def _take(self, piece: int) -> None:
        rank, plan = self._memory.rank, self._plan
        for peer, data in plan.takes.items():
            part = self._cut(data, piece)
            part[:] = self._column(peer, rank, piece, part.size)
        if plan.segment is not None:
            self._reduce(plan.segment, piece)

    def _reduce(self, segment: ReducedSegment, piece: int) -> None:
        memory, dtype = self._memory, segment.own.dtype
        out = self._cut(flat_bytes(segment.out), piece)
        arrays = self._contributions(segment, piece, out.size)
        result = memory.result(memory.rank, piece)[: out.size]
        if out.size:
            combine(self._plan.call.op, [array.view(dtype) for array in arrays], result.view(dtype))
            out[:] = result

    def _contributions(self, segment: ReducedSegment, piece: int, size: int) -> list[Bytes]:
        """Return ``size`` bytes of each rank's contribution to this rank's segment."""
        if self.is_in_place:
            return [self._cut(flat_bytes(array), piece) for array in self._in_place]
        own, rank = self._cut(flat_bytes(segment.own), piece), self._memory.rank
        ranks = range(self._memory.size)
        return [own if other == rank else self._column(other, rank, piece, size) for other in ranks]

    def _take_results(self, piece: int) -> None:
        segment = self._plan.segment
        for peer, data in segment.results.items() if segment is not None else ():
            part = self._cut(data, piece)
            part[:] = self._memory.result(peer, piece)[: part.size]
