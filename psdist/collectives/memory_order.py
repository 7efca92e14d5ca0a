"""Order of the calls of one group that share memory.

A call that writes to memory of an earlier one, or reads memory that it writes, begins after the earlier one has ended.
Later calls of its lane begin after it, though they share no memory with it: all ranks make the calls of a lane in one
order, and other calls may share memory there. A lane is any key of calls that begin in order.

Invariant: A call waits only for earlier ones, so that no two calls wait for each other at one rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

#: Addresses of an array's first byte, and of the one after its last.
Span = tuple[int, int]


class Turn:
    """One call, from when it was made until it has ended."""

    __slots__ = ("_given", "after", "alone", "awaited", "begun", "ended", "first", "lane", "reads", "writes")

    def __init__(self, lane: Hashable, reads: Sequence[Any], writes: Sequence[Any], alone: bool) -> None:
        self.lane = lane
        self.alone = alone
        self._given = reads, writes
        #: Memory that is read, memory that is written to, and the smallest span with both, once it is compared.
        self.reads: Sequence[Span] = ()
        self.writes: Sequence[Span] = ()
        self.first = self.after = 0
        #: Earlier calls that it waits for: those whose end, and the one whose beginning.
        self.awaited: tuple[list[Turn], Turn | None] | None = None
        #: Set once others wait for it.
        self.begun: asyncio.Event | None = None
        self.ended: asyncio.Event | None = None

    def locate(self, find: Callable[[Any], Span]) -> None:
        """Find the memory of the call's arrays."""
        self.reads, self.writes = ([span for span in map(find, given) if span[0] < span[1]] for given in self._given)
        if both := [*self.reads, *self.writes]:
            self.first, self.after = min(first for first, _ in both), max(after for _, after in both)

    def conflicts(self, earlier: Turn) -> bool:
        """True if one of two calls writes to memory of the other."""
        return (
            _overlap(self.writes, earlier.writes)
            or _overlap(self.writes, earlier.reads)
            or _overlap(self.reads, earlier.writes)
        )


def _overlap(some: Iterable[Span], others: Sequence[Span]) -> bool:
    return any(first < end and begin < after for first, after in some for begin, end in others)


class MemoryOrder:
    """See the module.

    find: returns the span of an array; empty if it has no memory.
    wait: waits for earlier calls, up to a time limit.
    """

    def __init__(
        self, find: Callable[[Any], Span], wait: Callable[[Awaitable[None], float | None], Awaitable[None]]
    ) -> None:
        self._find = find
        self._wait = wait
        self._turns: dict[Turn, None] = {}
        #: By lane, the newest call that waits, or that begins no other before its end.
        self._waiting: dict[Hashable, Turn] = {}

    def enter(self, lane: Hashable, reads: Sequence[Any], writes: Sequence[Any], *, alone: bool = False) -> Turn:
        """Note a call that is made now. alone: later calls of the lane begin after its end."""
        turn = Turn(lane, reads, writes, alone)
        if self._turns:
            if len(self._turns) == 1:  # It had nothing to be compared with.
                next(iter(self._turns)).locate(self._find)
            turn.locate(self._find)
            first, after = turn.first, turn.after
            near = [other for other in self._turns if other.first < after and first < other.after]
            conflicts = [other for other in near if turn.conflicts(other)]
            before = self._waiting.get(lane)
            if conflicts or before is not None:
                turn.awaited = conflicts, before
        if alone or turn.awaited is not None:
            turn.begun = asyncio.Event()
            self._waiting[lane] = turn
        self._turns[turn] = None
        return turn

    async def make(self, turn: Turn, timeout: float | None, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call once its turn has come."""
        try:
            if turn.awaited is not None:
                await self.wait_for(turn, timeout)
            return await call()  # It begins without another wait.
        finally:
            self.leave(turn)

    async def wait_for(self, turn: Turn, timeout: float | None) -> None:
        """Wait until the turn of a call has come."""
        await self._wait(self._until_turn(turn), timeout)

    async def _until_turn(self, turn: Turn) -> None:
        assert turn.awaited is not None
        conflicts, before = turn.awaited
        for other in conflicts:
            if other in self._turns:
                if other.ended is None:
                    other.ended = asyncio.Event()
                await other.ended.wait()
        if before is not None and before.begun is not None:
            await before.begun.wait()
        turn.awaited = None
        if not turn.alone:
            self._begin(turn)

    def _begin(self, turn: Turn) -> None:
        assert turn.begun is not None
        turn.begun.set()
        if self._waiting.get(turn.lane) is turn:
            del self._waiting[turn.lane]

    def leave(self, turn: Turn) -> None:
        """Note that a call has ended."""
        self._turns.pop(turn, None)
        if turn.begun is not None:
            self._begin(turn)
        if turn.ended is not None:
            turn.ended.set()
