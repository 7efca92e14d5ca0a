"""The numbers of this worker's next pushes, over all of its parameter sets, and the mark that they carry. Pure.

A snapshot in SSP and ASP divides each worker's pushes in two. Those below the number that the worker answers to Mark
are in the snapshot. Later ones carry the attempt as their mark, and wait at the servers until the cut is copied.
Reports on leased data carry the same numbers, so that a snapshot knows which ranges are in its weights.

Invariants: numbers and mark change together, so a push is either numbered below an answer and has no mark, or above it
and has the mark. Asked again about one attempt, the answer is the same.

Not here: the numbers themselves (``push_sequence``), the wire (``scheduler_session``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from psdist.client.core.push_sequence import PushSequence


@dataclass(frozen=True)
class MarkAnswer:
    """The answer to Mark. next: the next push, by parameter set. keeps: the lowest push before which the state can be
    had that this worker keeps."""

    next: dict[str, int]
    keeps: dict[str, int]


class SnapshotMarks:
    """The push sequences of one incarnation of this worker, by parameter set."""

    def __init__(self) -> None:
        #: The newest snapshot attempt whose Mark was answered; 0 for none.
        self.mark = 0
        #: Pushes of this worker that were dropped, in all of its incarnations.
        self.dropped = 0
        self.sessions: dict[str, PushSequence] = {}
        self._answer: MarkAnswer | None = None

    def start_incarnation(self) -> None:
        """Discards the sequences and marks of the incarnation before: the attempts that they were for were given up."""
        self.mark, self._answer = 0, None
        self.sessions.clear()

    def enter(self, parameters: str, session: PushSequence) -> None:
        """Adds the push sequence of a parameter set in which this worker takes part."""
        self.sessions[parameters] = session

    def next(self) -> dict[str, int]:
        """By parameters, the number of the next push, where one under way counts as made."""
        return {name: session.next for name, session in self.sessions.items()}

    def next_whole(self) -> dict[str, int]:
        """By parameters, the number of the next push that is not wholly on its way."""
        return {name: session.next_whole for name, session in self.sessions.items()}

    def partial(self) -> list[str]:
        """The parameter sets of whose next push a part was sent."""
        return [name for name, session in self.sessions.items() if session.unfinished and session.partial]

    def answer(self, attempt: int, keeps: Callable[[], dict[str, int]] = dict) -> MarkAnswer | None:
        """The answer to Mark; None if it comes late. Pushes that begin from now on carry the mark.

        keeps: called once for an attempt.
        """
        if attempt > self.mark:
            self.mark, self._answer = attempt, MarkAnswer(self.next(), keeps())
        return self._answer if attempt == self.mark else None

    def end(self, attempt: int) -> None:
        """Forgets the answer to an attempt that is over."""
        if attempt >= self.mark:
            self._answer = None

    @property
    def pending_answer(self) -> tuple[int, MarkAnswer] | None:
        """The attempt under way and its answer, which a new session sends again: the one before may have lost it."""
        return None if self._answer is None else (self.mark, self._answer)
