"""The count of what was lost and what was repeated: what workers were promised, against the weights at the end.

Each push of a worker has a place in every slice, to which it adds 1 (its share of the mean in BSP). A place that is
too small has lost an acknowledged push; one that is too large has taken a push twice. A push whose worker died before
the answer came may count or not; twice it may not.

Places are used again after ``capacity`` pushes, and then hold sums: a loss and a repeat cancel only where both are of
one worker, of one slice, and a multiple of ``capacity`` apart. Pure: no loop, file, clock or chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

#: What a worker knows of a push. Dropped: its worker was fenced meanwhile, was told so, and does not count on it.
Outcome = Literal["acknowledged", "dropped", "unknown"]

_TOLERANCE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Push:
    """One push. number: its step (BSP), or its place in the worker's sequence over all its incarnations.

    begin, end: monotonic seconds; ``end`` is 0 where nobody knows.
    """

    number: int
    life: int
    outcome: Outcome
    begin: float
    end: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """acknowledged, dropped, unknown: pushes. lost, repeated: updates of slices; both 0, or a promise is broken."""

    acknowledged: int
    dropped: int
    unknown: int
    lost: int
    repeated: int


def place(number: int, rank: int, workers: int, slots: int) -> int:
    """Where in a slice of ``slots`` elements the push of a worker counts."""
    return number % (slots // workers) * workers + rank


def judge(
    pushes: Mapping[int, Sequence[Push]], weights: NDArray[np.float32], workers: int, *, synchronous: bool
) -> Verdict:
    """pushes: by rank. weights: the places, one row for each slice. Raises ValueError where places do not suffice."""
    slots = weights.shape[1]
    if not synchronous:
        lost, repeated = _sums(pushes, weights, workers, 1.0)
    elif all(push.life == 0 and push.outcome == "acknowledged" for push in _all(pushes)):
        lost, repeated = _sums(pushes, weights, workers, 1.0 / workers)
    else:
        if max((push.number for push in _all(pushes)), default=0) >= slots // workers:
            raise ValueError(f"{slots} places do not suffice for these steps of {workers} workers that come and go")
        lost, repeated = _shares(pushes, weights, workers)
    outcomes = [push.outcome for push in _all(pushes)]
    return Verdict(outcomes.count("acknowledged"), outcomes.count("dropped"), outcomes.count("unknown"), lost, repeated)


def _all(pushes: Mapping[int, Sequence[Push]]) -> Iterable[Push]:
    return (push for rank in sorted(pushes) for push in pushes[rank])


def _expected(pushes: Mapping[int, Sequence[Push]], workers: int, slots: int) -> tuple[NDArray[np.int64], ...]:
    """Least and most pushes of each place."""
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
    # What is no whole number was neither lost nor repeated but spoiled: that is both.
    spoiled = int((counts != np.rint(counts)).sum())
    return int(lost) + spoiled, int(repeated) + spoiled


def _shares(pushes: Mapping[int, Sequence[Push]], weights: NDArray[np.float32], workers: int) -> tuple[int, int]:
    """BSP with members that come and go: those who took part in a step share it, each with one part."""
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
