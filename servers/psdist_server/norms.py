"""The global gradient norm of a BSP step: squared norms by slice, own and the other servers'.

Every server adds the squares of all slices in slice order, in float64, so that all get the same norm whatever the
number of servers. The squares of a step are kept until the step after the next one: a server that is late may still
ask for them.
"""

from __future__ import annotations

import asyncio
import math

_STEPS_KEPT = 2


class NormBoard:
    """Squared norms of the slices of one server, by step."""

    def __init__(self, slices: int) -> None:
        self._slices = slices
        self._squares: dict[int, dict[int, float]] = {}
        self._complete: dict[int, asyncio.Event] = {}

    def record(self, step: int, index: int, square: float) -> bool:
        """Notes the square of one slice; True where it was the last of its step."""
        squares = self._squares.setdefault(step, {})
        squares[index] = square
        if len(squares) < self._slices:
            return False
        self._event(step).set()
        self._forget(step - _STEPS_KEPT)
        return True

    async def wait_complete(self, step: int) -> dict[int, float]:
        """The squares of all own slices of ``step``, once they are all there."""
        await self._event(step).wait()
        return dict(self._squares.get(step, {}))

    def _event(self, step: int) -> asyncio.Event:
        return self._complete.setdefault(step, asyncio.Event())

    def _forget(self, step: int) -> None:
        for table in (self._squares, self._complete):
            for old in [key for key in table if key <= step]:
                del table[old]


def global_norm(squares: dict[int, float]) -> float:
    """The L2 norm from the squares of all slices, added in slice order."""
    total = 0.0
    for index in sorted(squares):
        total += squares[index]
    return math.sqrt(total)
