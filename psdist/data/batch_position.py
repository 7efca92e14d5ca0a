"""Place of a sequence of batches in its data, which a snapshot holds from the call that made its last push."""

from __future__ import annotations

import threading
from collections.abc import Mapping
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
    """The current place. Threads may save and restore."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Position()
        self._is_restored = False

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
        with self._lock:
            if self._is_restored:
                return False
            self._now = after
            return True

    def end_pass(self) -> bool:
        """Start the next pass over the data. Returns False if another place was restored meanwhile."""
        with self._lock:
            if not self._is_restored:
                self._now = Position(self._now.data_epoch + 1)
            return not self._is_restored

    def save(self) -> dict[str, NDArray[Any]]:
        """Return the current place, for ``restore``."""
        with self._lock:
            return self._now.to_arrays()

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a saved place. Raises InvalidArgumentError."""
        position = Position.from_arrays(state)
        with self._lock:
            self._now, self._is_restored = position, True
