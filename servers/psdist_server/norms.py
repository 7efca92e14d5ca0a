"""The global gradient norm of a BSP step: squared norms by slice, own and the other servers'.

Every server adds the squares of all slices in slice order, in float64, so that all get the same norm whatever the
number of servers. The squares of a step are kept until no server can ask for them any more: a slice of step t + 2 can
be aggregated only when every server knew the norm of step t.

A server records the squares of the slices that it is the primary of when they are aggregated, and those of its backups'
slices as they come with the updates, so that it can tell them once it is promoted. So who asks says which slices are
meant.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection

_STEPS_KEPT = 2


class NormBoard:
    """Squared norms of slices, by step."""

    def __init__(self) -> None:
        self._squares: dict[int, dict[int, float]] = {}
        self._changed: asyncio.Future[None] | None = None

    def record(self, step: int, index: int, square: float) -> None:
        """Notes the square of one slice."""
        self._squares.setdefault(step, {})[index] = square
        for old in [key for key in self._squares if key < step - _STEPS_KEPT]:
            del self._squares[old]
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None

    def is_complete(self, step: int, indices: Collection[int]) -> bool:
        """Whether the squares of all ``indices`` are there."""
        known = self._squares.get(step, {})
        return len(known) >= len(indices) and known.keys() >= set(indices)

    async def wait_complete(self, step: int, indices: Collection[int]) -> dict[int, float]:
        """The squares of ``indices`` in ``step``, once they are all there."""
        while not self.is_complete(step, indices):
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._changed)
        known = self._squares.get(step, {})
        return {index: known[index] for index in indices}


def global_norm(squares: dict[int, float]) -> float:
    """The L2 norm from the squares of all slices, added in slice order."""
    total = 0.0
    for index in sorted(squares):
        total += squares[index]
    return math.sqrt(total)
