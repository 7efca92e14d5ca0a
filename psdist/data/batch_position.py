"""Place of a sequence of batches in its data, and the place that belongs in a snapshot.

A snapshot has the weights as they are between two pushes. A batch that was taken, and whose push is not over, must come
again after a restore. So ``PositionKeeper`` remembers the place before the first batch that was taken since the last
push.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from psdist.errors import InvalidArgumentError

#: Prefix of a place's arrays among the states of a worker in a snapshot.
BATCHES: Final = "psdist-batches."
_FIELDS: Final = ("data_epoch", "taken", "digest")


@dataclass(frozen=True, slots=True)
class Position:
    """A place between two batches.

    data_epoch: passes over the data that are over.
    taken: samples that were read in this pass.
    pending: numbers of those that were in no batch yet, ascending.
    digest: digest of the samples that were read, by which another order is noticed.
    """

    data_epoch: int = 0
    taken: int = 0
    pending: tuple[int, ...] = ()
    digest: int = 0

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the place as arrays, for a snapshot or a file."""
        numbers = {name: np.array([getattr(self, name)], np.uint64) for name in _FIELDS}
        return {**numbers, "pending": np.array(self.pending, np.uint64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Position:
        """Return the place of ``to_arrays``; the beginning for an empty dict. Raises InvalidArgumentError."""
        if not arrays:
            return cls()
        try:
            numbers = {name: int(arrays[name].item()) for name in _FIELDS}
            pending = tuple(map(int, arrays["pending"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgumentError(f"the state of a DynamicBatcher is incomplete: {error!r}") from None
        position = cls(**numbers, pending=pending)
        if list(pending) != sorted(set(pending)) or (pending and not 0 <= pending[0] <= pending[-1] < position.taken):
            raise InvalidArgumentError(
                f"the state of a DynamicBatcher is wrong: {len(pending)} of {position.taken} samples are pending, and "
                "their numbers do not ascend below that"
            )
        return position


class PositionKeeper:
    """The current place, and the one that belongs in a snapshot. Threads may save and restore."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Returns the number of the next push.
        self._next_push: Callable[[], int] = lambda: -1
        self._now = self._before = Position()
        #: Number of the push that the newest batch belongs to.
        self._push: int | None = None
        self._is_restored = False

    def count_pushes_by(self, next_push: Callable[[], int]) -> None:
        """Use ``next_push``, which returns the number of the next push, to tell batches that were pushed."""
        self._next_push = next_push

    @property
    def now(self) -> Position:
        """The place after the newest batch."""
        return self._now

    def start(self) -> Position:
        """Return the place from which to continue."""
        with self._lock:
            self._is_restored = False
            return self._now

    def on_batch(self, after: Position) -> bool:
        """Record that a batch is taken, after which the place is ``after``. Returns False if another place was restored
        meanwhile, so that the batch does not come next."""
        push = self._next_push()
        with self._lock:
            if self._is_restored:
                return False
            if push != self._push:
                self._before, self._push = self._now, push
            self._now = after
            return True

    def end_pass(self) -> bool:
        """Start the next pass over the data. Returns False if another place was restored meanwhile."""
        with self._lock:
            if not self._is_restored:
                self._now, self._push = Position(self._now.data_epoch + 1), None
            return not self._is_restored

    def save(self) -> dict[str, NDArray[Any]]:
        """Return the place before the first batch that was not pushed."""
        push = self._next_push()
        with self._lock:
            return (self._before if push == self._push else self._now).to_arrays()

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a saved place. Raises InvalidArgumentError."""
        position = Position.from_arrays(state)
        with self._lock:
            self._now, self._push, self._is_restored = position, None, True
