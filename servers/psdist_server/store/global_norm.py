"""The global gradient norm of a BSP step: squared norms by slice, of this server and the others.

Every server adds the squares of all slices in slice order, in float64. So all servers compute the same norm, whatever
their number. The squares of a step are stored until no server can ask for them any more: a slice of step t + 2 can
be aggregated only when every server knew the norm of step t.

A server records three kinds of squares: those of its own slices when they are aggregated; those of its backup shards as
they arrive with the updates, for the case that it is promoted; and those that other servers send.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

_STEPS_KEPT: Final = 2


class NormBoard:
    """Known squared norms of slices, by step."""

    def __init__(self) -> None:
        self._squares: dict[int, dict[int, float]] = {}
        self._changed = asyncio.Event()

    def record(self, step: int, index: int, square: float) -> None:
        """Record the square of one slice."""
        self.merge(step, {index: square})

    def merge(self, step: int, squares: Mapping[int, float]) -> None:
        """Record the squares of several slices."""
        if step not in self._squares:
            for old in [key for key in self._squares if key < step - _STEPS_KEPT]:
                del self._squares[old]
        self._squares.setdefault(step, {}).update(squares)

    def known(self, step: int) -> Mapping[int, float]:
        """Return the known squares of ``step``, by slice."""
        return self._squares.get(step, {})

    def wake(self) -> None:
        """Make waiters check again, after a step became complete here or a new map arrived."""
        self._changed.set()
        self._changed = asyncio.Event()

    def wait(self) -> Coroutine[Any, Any, bool]:
        """Wait for the next ``wake`` from now on, even if the result is awaited later."""
        return self._changed.wait()


class Aggregation:
    """Tracks the slices served here that have yet to be aggregated, by step.

    version: returns the version of a slice that is served here.
    complete: called with a step when all slices served here are aggregated.
    """

    def __init__(self, board: NormBoard, version: Callable[[int], int], complete: Callable[[int], None]) -> None:
        self._board = board
        self._version = version
        self._complete = complete
        self._indices: tuple[int, ...] = ()
        self._missing: dict[int, set[int]] = {}

    def serve(self, indices: tuple[int, ...]) -> None:
        """Set the slices served here."""
        self._indices = indices
        self._missing.clear()

    def is_complete(self, step: int) -> bool:
        """Return True if every slice is aggregated for ``step``."""
        return not self._find_missing(step)

    def aggregated(self, step: int, index: int) -> None:
        """Record that slice ``index``, whose square is recorded, is aggregated for ``step``."""
        if step not in self._missing:
            self._missing = {old: left for old, left in self._missing.items() if old >= step - 1}
            self._missing[step] = self._find_missing(step)
        self._missing[step].discard(index)
        if not self._missing[step]:
            self._board.wake()
            self._complete(step)

    def _find_missing(self, step: int) -> set[int]:
        known = self._board.known(step)
        return {index for index in self._indices if index not in known and self._version(index) <= step}


def global_norm(squares: Mapping[int, float]) -> float:
    """Return the L2 norm from the squares of all slices, added in slice order."""
    total = 0.0
    for index in sorted(squares):
        total += squares[index]
    return math.sqrt(total)
