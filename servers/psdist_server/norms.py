"""The global gradient norm of a BSP step: squared norms by slice, own and the other servers'.

Every server adds the squares of all slices in slice order, in float64, so that all get the same norm whatever the
number of servers. The squares of a step are kept until no server can ask for them any more: a slice of step t + 2 can
be aggregated only when every server knew the norm of step t.

A server records the squares of the slices that it is the primary of when they are aggregated, those of its copies as they
come with the updates, so that it can tell them once it is promoted, and what other servers told it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

_STEPS_KEPT = 2


class NormBoard:
    """Squared norms of slices that this server knows of, by step."""

    def __init__(self) -> None:
        self._squares: dict[int, dict[int, float]] = {}
        self._changed = asyncio.Event()

    def record(self, step: int, index: int, square: float) -> None:
        """Notes the square of one slice."""
        self.merge(step, {index: square})

    def merge(self, step: int, squares: Mapping[int, float]) -> None:
        """Notes squares of several slices."""
        if step not in self._squares:
            for old in [key for key in self._squares if key < step - _STEPS_KEPT]:
                del self._squares[old]
        self._squares.setdefault(step, {}).update(squares)

    def known(self, step: int) -> Mapping[int, float]:
        """The squares of ``step`` by slice, as far as they are known."""
        return self._squares.get(step, {})

    def wake(self) -> None:
        """A step is complete here, or there is another map: who waits shall look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Returns at the next ``wake``."""
        await self._changed.wait()


def global_norm(squares: Mapping[int, float]) -> float:
    """The L2 norm from the squares of all slices, added in slice order."""
    total = 0.0
    for index in sorted(squares):
        total += squares[index]
    return math.sqrt(total)
