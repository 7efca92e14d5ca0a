"""Numbers of this worker's next pushes, over all of its parameter sets, and the mark that the pushes carry. Pure.

A snapshot in SSP and ASP divides each worker's pushes in two. Those below the number in the worker's answer to Mark are
in the snapshot. Later ones carry the attempt as their mark, and wait at the servers until the cut is copied. Reports on
leased data carry the same numbers, so a snapshot knows the ranges whose samples are in its weights.

Invariants: Numbers and mark change together: a push either is numbered below an answer and has no mark, or above it and
has the mark. Repeated requests for one attempt get the same answer.

Not here: the numbers themselves (``push_sequence``), the wire (``worker_session``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from psdist.client.core.push_sequence import PushSequence


@dataclass(frozen=True)
class MarkAnswer:
    """Answer to Mark, by parameter set.

    next: number of the next push.
    keeps: lowest push for which this worker still has its state from before the push.
    """

    next: dict[str, int]
    keeps: dict[str, int]


class SnapshotMarks:
    """Push sequences of one incarnation of this worker, by parameter set. The next incarnation has another object.

    dropped: pushes of this worker that were dropped, in all of its incarnations.
    """

    def __init__(self, dropped: int = 0) -> None:
        #: Newest snapshot attempt whose Mark was answered; 0 for none.
        self.mark = 0
        self.dropped = dropped
        self.sequences: dict[str, PushSequence] = {}
        self._answer: MarkAnswer | None = None

    def enter(self, parameters: str, sequence: PushSequence) -> None:
        """Add the push sequence of a parameter set that this worker trains."""
        self.sequences[parameters] = sequence

    def next(self) -> dict[str, int]:
        """Return the number of each set's next push; one under way counts as made."""
        return {name: sequence.next for name, sequence in self.sequences.items()}

    def next_whole(self) -> dict[str, int]:
        """Return the number of each set's next push that was not sent completely."""
        return {name: sequence.next_whole for name, sequence in self.sequences.items()}

    def partial(self) -> list[str]:
        """Return the parameter sets whose next push was sent in part."""
        return [name for name, sequence in self.sequences.items() if sequence.unfinished and sequence.partial]

    def answer(self, attempt: int, keeps: Callable[[], dict[str, int]] = dict) -> MarkAnswer | None:
        """Return the answer to Mark, or None if the request is late. Pushes carry the mark from now on.

        keeps: called once per attempt.
        """
        if attempt > self.mark:
            self.mark, self._answer = attempt, MarkAnswer(self.next(), keeps())
        return self._answer if attempt == self.mark else None

    def end(self, attempt: int) -> None:
        """Forget the answer to a finished attempt."""
        if attempt >= self.mark:
            self._answer = None

    @property
    def pending_answer(self) -> tuple[int, MarkAnswer] | None:
        """Attempt under way and its answer. A new session repeats it, because the previous one may have lost it."""
        return None if self._answer is None else (self.mark, self._answer)
