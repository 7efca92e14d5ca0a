"""Counts lost and repeated updates: compares the weights at the end with the acknowledgements of the workers. Pure.

Each push of a worker has a place in every slice, to which it adds 1 (its share of the mean in BSP). A place that is too
small has lost an acknowledged push; one that is too large has taken a push twice. A push whose worker died before the
answer may count once or not at all.

Places are reused after ``slots / workers`` pushes, and then hold sums. A loss and a repeat cancel only if they are of
the same worker and slice, and a multiple of that number of pushes apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

#: A push's outcome for its worker. "dropped": the worker was fenced meanwhile, and the push was discarded.
Outcome = Literal["acknowledged", "dropped", "unknown"]

_TOLERANCE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Push:
    """A push.

    number: its step (BSP), or its place in the worker's sequence over all its incarnations.
    start: which start of the worker's process made it, from 0.
    begin, end: monotonic seconds; ``end`` is 0 if unknown.
    """

    number: int
    start: int
    outcome: Outcome
    begin: float
    end: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Counts of pushes by outcome, and of the updates of slices that were lost or repeated, which must both be 0."""

    acknowledged: int
    dropped: int
    unknown: int
    lost: int
    repeated: int


def place(number: int, rank: int, workers: int, slots: int) -> int:
    """Return the place of a worker's push in a slice of ``slots`` elements."""
    return number % (slots // workers) * workers + rank


def judge(
    pushes: Mapping[int, Sequence[Push]], weights: NDArray[np.float32], workers: int, *, synchronous: bool
) -> Verdict:
    """Compare pushes with weights. Raises ValueError if there are too few places.

    pushes: by rank.
    weights: float32[slices, slots], the places.
    """
    slots = weights.shape[1]
    if not synchronous:
        lost, repeated = _sums(pushes, weights, workers, 1.0)
    elif all(push.start == 0 and push.outcome == "acknowledged" for push in _all(pushes)):
        lost, repeated = _sums(pushes, weights, workers, 1.0 / workers)
    else:
        if max((push.number for push in _all(pushes)), default=0) >= slots // workers:
            raise ValueError(f"{slots} places are too few for the steps of {workers} workers that come and go")
        lost, repeated = _shares(pushes, weights, workers)
    outcomes = [push.outcome for push in _all(pushes)]
    return Verdict(outcomes.count("acknowledged"), outcomes.count("dropped"), outcomes.count("unknown"), lost, repeated)


def _all(pushes: Mapping[int, Sequence[Push]]) -> Iterable[Push]:
    return (push for rank in sorted(pushes) for push in pushes[rank])


def _expected(pushes: Mapping[int, Sequence[Push]], workers: int, slots: int) -> tuple[NDArray[np.int64], ...]:
    """Return the least and most pushes of each place."""
    least, most = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    for rank, mine in pushes.items():
        for push in mine:
            where = place(push.number, rank, workers, slots)
            least[where] += push.outcome == "acknowledged"
            most[where] += 1
    return least, most


def _sums(
    pushes: Mapping[int, Sequence[Push]], weights: NDArray[np.float32], workers: int, unit: float
) -> tuple[int, int]:
    least, most = _expected(pushes, workers, weights.shape[1])
    counts = weights.astype(np.float64) / unit
    counts = np.where(np.abs(counts - np.rint(counts)) <= _TOLERANCE * np.maximum(1, counts), np.rint(counts), counts)
    lost = np.ceil(np.maximum(0, least - counts)).sum()
    repeated = np.ceil(np.maximum(0, counts - most)).sum()
    # A value that is not a whole number is damaged, which counts as lost and as repeated.
    damaged = int((counts != np.rint(counts)).sum())
    return int(lost) + damaged, int(repeated) + damaged


def _shares(pushes: Mapping[int, Sequence[Push]], weights: NDArray[np.float32], workers: int) -> tuple[int, int]:
    """Count losses and repeats of BSP with members that leave and join: each participant of a step has an equal share
    of it."""
    slices, slots = weights.shape
    steps = slots // workers
    least, most = _expected(pushes, workers, slots)
    values = weights[:, : steps * workers].astype(np.float64).reshape(slices, steps, workers)
    needed, possible = (np.minimum(1, one[: steps * workers]).reshape(steps, workers) for one in (least, most))
    took_part = values > _TOLERANCE
    parts = values * took_part.sum(axis=2, keepdims=True)
    lost = np.maximum(0, needed - took_part).sum() + (values < -_TOLERANCE).sum()
    extra = np.ceil(np.maximum(0, parts - np.maximum(1, took_part) * possible - _TOLERANCE * workers))
    return int(lost), int(extra.sum())
