"""Plans of calls: the header that all ranks agree on, the data for and from each peer, and reductions of arrays.

16-bit floats are added and multiplied in float32 and rounded once. Other dtypes are reduced in their own arithmetic.
Overflow and NaN are results as others: whatever numpy was told about them, no rank raises an error.

Data of up to ``limits.EAGER_BYTES`` for a peer, or ``limits.EAGER_REDUCED_BYTES`` to reduce (less in groups of more
than 33 ranks), travels with the call as part 0. More is sent in parts of ``limits.PART_BYTES`` once the peer has made
the call, and is received where it belongs. The results of a reduction are parts, too: a rank that has reduced a part of
its own segment sends the result to the others.

Large arrays are reduced segment by segment: each rank receives the other ranks' contributions to its own segment, adds
them in rank order, and sends the result to all. That moves as few bytes as a ring does, in two steps. Small arrays are
sent whole to all ranks, and each rank reduces them. Both give the same bytes.

Invariants: Each part is received once, with its own size. An array that is reduced in place is not overwritten before
it was sent: the result of a part exists only after all ranks' contributions to it have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from psdist.errors import CollectiveMismatchError, DTypeMismatchError, InvalidArgumentError
from psdist.wire.limits import EAGER_BYTES, EAGER_REDUCED_BYTES, EARLY_BYTES_MAX, PART_BYTES

Array = NDArray[Any]

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
_OPS: Final[dict[str, Callable[..., Any]]] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
OPS: Final = tuple(_OPS)
#: Names of the dtypes that arrays may have.
DTYPES: Final = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
_NAMES: Final = {np.dtype(name): name for name in DTYPES}
_KINDS: Final = {"avg": "fc", "min": "biuf", "max": "biuf", "band": "biu", "bor": "biu", "bxor": "biu"}


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return numpy's letter for the kind of a dtype, and "f" for bfloat16, for which numpy has none."""
    return "f" if dtype == BFLOAT16 else dtype.kind


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Raise DTypeMismatchError for arrays that collectives do not carry."""
    if dtype not in _NAMES:
        raise DTypeMismatchError(f"dtype {dtype!s:.60} cannot be sent: use one of {', '.join(DTYPES)}")


def check_op(op: str, dtype: np.dtype[Any]) -> None:
    """Raise InvalidArgumentError for an unknown operation, DTypeMismatchError if it has no meaning for ``dtype``."""
    if op not in _OPS:
        raise InvalidArgumentError(f"op={op!r:.60} is unknown: use one of {', '.join(OPS)}")
    if kind_of(dtype) not in _KINDS.get(op, "biufc"):
        raise DTypeMismatchError(f"op={op!r} has no meaning for {dtype.name}: convert the array first")


#: Decorator of functions whose arithmetic neither warns nor raises errors.
QUIET: Final = np.errstate(all="ignore")


@QUIET
def combine(op: str, arrays: Sequence[Array], out: Array) -> None:
    """Reduce ``arrays`` from the first to the last into ``out``.

    arrays: one per rank. ``out`` may be the memory of one of them; the first may be overwritten if it is not that one.
    """
    reduce = _OPS[op]
    if out.dtype in (np.float16, BFLOAT16) and op in ("sum", "avg", "product"):
        total = arrays[0].astype(np.float32)
        for array in arrays[1:]:
            reduce(total, array.astype(np.float32), out=total)
        out[...] = _averaged(op, total, len(arrays))
        return
    # ``out`` may be a later one of the arrays. The first one was received, then, and is overwritten instead.
    last = max((number for number, array in enumerate(arrays) if np.may_share_memory(array, out)), default=0)
    total = arrays[0]
    for number, array in enumerate(arrays[1:], start=2):
        total = reduce(total, array, out=total if number <= last else out)
    if total is not out:
        out[...] = total
    _averaged(op, out, len(arrays))


def _averaged(op: str, total: Array, count: int) -> Array:
    if op == "avg":
        np.true_divide(total, count, out=total)
    return total


@dataclass(frozen=True, slots=True)
class BufferPosition:
    """Position of an array in a registered buffer. number: of the buffer, from 1. offset: in bytes."""

    number: int = 0
    offset: int = 0


#: Position of an array outside of all registered buffers.
NOWHERE: Final = BufferPosition()


@dataclass(frozen=True, slots=True)
class Header:
    """One rank's call, as one of its peers sees it.

    kind: "all_reduce" and the like.
    op: "sum" and the like; empty if nothing is reduced.
    dtype: name of numpy's dtype.
    shape: the shape that all ranks must agree on.
    root: the rank that the call names, -1 for none.
    gives, takes: bytes to the peer and from the peer.
    shares: True if the rank can move the data by another route than parts. Ranks may differ in that.
    position: of the rank's array. Ranks may differ in that.
    """

    kind: str
    op: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    root: int = -1
    gives: int = 0
    takes: int = 0
    shares: bool = False
    position: BufferPosition = NOWHERE

    def __str__(self) -> str:
        named = {"op": self.op, "dtype": self.dtype, "shape": str(self.shape) if self.dtype else ""}
        parts = [f"{name}={value}" for name, value in named.items() if value]
        parts += [f"root={self.root}"] if self.root >= 0 else []
        return f"{self.kind}({', '.join(parts)})"


def mismatch(mine: Header, theirs: Header, rank: int, peer: int) -> CollectiveMismatchError | None:
    """Return the error if two ranks made different calls, else None.

    rank: this rank.
    peer: the rank that made ``theirs``.
    """
    same = (mine.kind, mine.op, mine.dtype, mine.shape, mine.root) == (
        theirs.kind, theirs.op, theirs.dtype, theirs.shape, theirs.root,
    )  # fmt: skip
    if not same and {mine.kind, theirs.kind} != {"send", "recv"}:
        return CollectiveMismatchError(
            f"rank {peer} calls {theirs}, and rank {rank} calls {mine}: all ranks of a group must make the same calls "
            "in the same order"
        )
    if mine.dtype != theirs.dtype or (mine.gives, mine.takes) != (theirs.takes, theirs.gives):
        return CollectiveMismatchError(
            f"rank {peer} calls {theirs} with {theirs.gives} bytes for rank {rank} and expects {theirs.takes}; rank "
            f"{rank} calls {mine} with {mine.gives} bytes for rank {peer} and expects {mine.takes}: sizes must agree"
        )
    return None


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


def _peers(rank: int, size: int) -> list[int]:
    return [other for other in range(size) if other != rank]


def _header(kind: str, array: NDArray[Any], *, op: str = "", root: int = -1) -> Header:
    return Header(kind, op, _NAMES[array.dtype], array.shape, root)  # Numpy's ``name`` takes microseconds.


def rows_of(array: Array) -> list[Array]:
    """Return a view of each row. An index, and iteration, would copy a row that is a single number."""
    return [array[row : row + 1] for row in range(len(array))]


def all_reduce(rank: int, size: int, array: Array, out: Array, op: str) -> Plan:
    """array, out: contiguous, of one shape, and the same memory or apart."""
    header, peers = _header("all_reduce", array, op=op), _peers(rank, size)
    flat, result = array.reshape(-1), out.reshape(-1)
    # Two ranks move as many bytes by whole arrays as by segments, with fewer messages.
    if array.nbytes <= (EAGER_REDUCED_BYTES if size == 2 else EAGER_BYTES):
        # A copy, because the result may be complete, and overwrite the array, before this rank's own data was sent.
        given = flat_bytes(array).copy()
        return ReductionPlan(header, rank, peers, dict.fromkeys(peers, given), ReducedSegment(flat, result))
    gives = {peer: flat_bytes(cut_segment(flat, peer, size)) for peer in peers}
    results = {peer: flat_bytes(cut_segment(result, peer, size)) for peer in peers}
    segment = ReducedSegment(cut_segment(flat, rank, size), cut_segment(result, rank, size), tuple(peers), results)
    plan = ReductionPlan(header, rank, peers, gives, segment)
    plan.whole = flat, result
    return plan


def broadcast(rank: int, size: int, array: Array, root: int) -> Plan:
    """array: contiguous; sent by the root, and received into by the others."""
    peers = _peers(rank, size)
    data = flat_bytes(array)
    if rank == root:
        return Plan(_header("broadcast", array, root=root), peers, dict.fromkeys(peers, data), {})
    return Plan(_header("broadcast", array, root=root), peers, {}, {root: data})


def all_gather(rank: int, size: int, array: Array, out: Array) -> Plan:
    """array: contiguous. out: one row of its shape for each rank."""
    peers = _peers(rank, size)
    out[rank] = array
    rows = rows_of(out)
    takes = {peer: flat_bytes(rows[peer]) for peer in peers}
    return Plan(_header("all_gather", array), peers, dict.fromkeys(peers, flat_bytes(array)), takes)


def gather_segments(rank: int, size: int, array: Array) -> Plan:
    """array: of one dimension; each rank has its segment of it, and receives the others' in their places."""
    peers = _peers(rank, size)
    own = flat_bytes(cut_segment(array, rank, size))
    takes = {peer: flat_bytes(cut_segment(array, peer, size)) for peer in peers}
    return Plan(_header("all_gather", array), peers, dict.fromkeys(peers, own), takes)


def barrier(rank: int, size: int) -> Plan:
    """Move nothing."""
    return Plan(Header("barrier"), _peers(rank, size), {}, {})


def allocate_buffer(rank: int, size: int, shape: tuple[int, ...], dtype: str) -> Plan:
    """Move nothing. All ranks agree on the shape and the dtype of a buffer."""
    return Plan(Header("allocate_buffer", "", dtype, shape), _peers(rank, size), {}, {})


def reduce(rank: int, size: int, array: Array, out: Array, op: str, root: int) -> Plan:
    """array, out: contiguous, of one shape; ``out`` is written to at the root only."""
    header, peers = _header("reduce", array, op=op, root=root), _peers(rank, size)
    if rank != root:
        return Plan(header, peers, {root: flat_bytes(array)}, {})
    return ReductionPlan(header, rank, peers, {}, ReducedSegment(array.reshape(-1), out.reshape(-1)))


def reduce_scatter(rank: int, size: int, array: Array, out: Array, op: str) -> Plan:
    """array: one row for each rank, contiguous. out: memory for one row, apart from the others."""
    rows = [array[other].reshape(-1) for other in range(size)]
    peers = _peers(rank, size)
    gives = {peer: flat_bytes(rows[peer]) for peer in peers}
    segment = ReducedSegment(rows[rank], out.reshape(-1))
    return ReductionPlan(_header("reduce_scatter", array, op=op), rank, peers, gives, segment)


def gather(rank: int, size: int, array: Array, out: Array | None, root: int) -> Plan:
    """array: contiguous. out: one row of its shape for each rank, at the root."""
    header, peers = _header("gather", array, root=root), _peers(rank, size)
    if out is None:
        return Plan(header, peers, {root: flat_bytes(array)}, {})
    out[rank] = array
    rows = rows_of(out)
    return Plan(header, peers, {}, {peer: flat_bytes(rows[peer]) for peer in peers})


def scatter(rank: int, size: int, array: Array | None, out: Array, root: int) -> Plan:
    """array: one row for each rank, at the root. out: contiguous memory for one row."""
    header, peers = _header("scatter", out, root=root), _peers(rank, size)
    if array is None:
        return Plan(header, peers, {}, {root: flat_bytes(out)})
    out[...] = array[rank]
    return Plan(header, peers, {peer: flat_bytes(array[peer]) for peer in peers}, {})


def all_to_all(rank: int, gives: Sequence[Array], takes: Sequence[Array]) -> Plan:
    """gives, takes: one contiguous array for each rank, of any sizes. ``takes`` are apart from ``gives``."""
    size = len(gives)
    takes[rank][...] = gives[rank].reshape(takes[rank].shape)
    header = Header("all_to_all", dtype=gives[rank].dtype.name)
    sent = {peer: flat_bytes(gives[peer]) for peer in _peers(rank, size)}
    return Plan(header, _peers(rank, size), sent, {peer: flat_bytes(takes[peer]) for peer in _peers(rank, size)})


def send(array: Array, target: int) -> Plan:
    """array: contiguous."""
    return Plan(Header("send", dtype=array.dtype.name), [target], {target: flat_bytes(array)}, {})


def receive(out: Array, source: int) -> Plan:
    """out: contiguous."""
    return Plan(Header("recv", dtype=out.dtype.name), [source], {}, {source: flat_bytes(out)})
