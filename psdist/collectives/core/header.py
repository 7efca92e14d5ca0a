"""Header of a call: its kind, types and sizes, on which all ranks must agree before any of its data is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from psdist.errors import CollectiveMismatchError


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
