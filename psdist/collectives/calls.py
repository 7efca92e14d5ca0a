"""Plans of the collectives: the data that each rank sends, and the memory for data that it receives, by kind of call.

Large arrays are reduced segment by segment: each rank receives the other ranks' contributions to its own segment, adds
them in rank order, and sends the result to all. That moves as few bytes as a ring does, in two steps. Small arrays are
sent whole to all ranks, and each rank reduces them. Both give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from psdist.collectives.core.header import Header
from psdist.collectives.core.plan import Array, Plan, ReducedSegment, ReductionPlan, cut_segment, flat_bytes
from psdist.collectives.core.reductions import name_of
from psdist.wire.limits import EAGER_BYTES, EAGER_REDUCED_BYTES


def _peers(rank: int, size: int) -> list[int]:
    return [other for other in range(size) if other != rank]


def _header(kind: str, array: NDArray[Any], *, op: str = "", root: int = -1) -> Header:
    return Header(kind, op, name_of(array.dtype), array.shape, root)


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
