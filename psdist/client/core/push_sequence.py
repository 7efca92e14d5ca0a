"""Pushes of one worker to one parameter set: the next number, and the slices that are still unanswered. Pure.

Together with the servers' duplicate tables this makes a push exactly-once: a push keeps its number until every slice of
it is answered, and every retry carries that number.

Invariants, checked by ``PendingRequest.answer`` and the tests:

* A step (BSP) or sequence number (SSP, ASP) is used by one finished push, never by two.
* The number grows only when a push is finished. After an error or a cancelled call the next push has the same number,
and the servers apply only the slices that they lack.
* A slice is answered at most once per push. An answer for a slice that was not requested is an error.
* A push carries the snapshot mark that was the newest when its first slice was sent, in all retries.
* An expelled worker that resumes keeps its numbers. Marks from before its expulsion have no meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from psdist.client.core.written_weights import WrittenWeights
from psdist.consistency import BSP, Consistency
from psdist.errors import InternalError
from psdist.hyperparameters import Settings


@dataclass(frozen=True, slots=True)
class PushOptions:
    """The part of a push besides its gradient.

    lr_factor: factor on the learning rate of the update; None if other workers set it.
    settings: hyperparameters of the update that differ from the specification's; None if other workers set them.
    written: weights that the script wrote before this push; None if it wrote none.
    absent: (start, stop): elements of the vector that this worker has no gradient for, ascending.
    follows_writes: this worker agrees with the writes of the others.
    attempt: times that this push was withdrawn.
    withdraws: withdraw earlier attempts, instead of making one.
    """

    lr_factor: float | None = None
    settings: Settings | None = None
    written: WrittenWeights | None = None
    absent: tuple[tuple[int, int], ...] = ()
    follows_writes: bool = False
    attempt: int = 0
    withdraws: bool = False


NO_OPTIONS: Final = PushOptions()


@dataclass(slots=True)
class PendingRequest:
    """One push or pull under way, with its unanswered slices."""

    #: BSP: the step; SSP and ASP: the sequence number. Pulls: the smallest version wanted.
    number: int
    pending: set[int]
    versions: dict[int, int] = field(default_factory=dict)
    ignored: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    #: Pushes: their part besides gradients.
    options: PushOptions = NO_OPTIONS

    @property
    def finished(self) -> bool:
        """True if every slice is answered."""
        return not self.pending

    def unanswered(self, slices: Iterable[int]) -> tuple[int, ...]:
        """Return those of ``slices`` that are still to be sent, in their order."""
        return tuple(index for index in slices if index in self.pending)

    def answer(self, index: int, version: int, staleness: int = 0, ignored: bool = False) -> None:
        """Record the answer for slice ``index``. Raises InternalError if it is not pending."""
        if index not in self.pending:
            raise InternalError(f"a server answered slice {index}, which is not asked for or was answered before")
        self.pending.discard(index)
        self.versions[index] = version
        self.ignored += ignored
        self.staleness_sum += staleness
        self.staleness_max = max(self.staleness_max, staleness)

    def part(self, slices: Iterable[int]) -> PendingRequest:
        """Return a request of the same number for the unanswered ones of ``slices``. ``absorb`` merges it back."""
        return PendingRequest(self.number, self.pending.intersection(slices), options=self.options)

    def absorb(self, part: PendingRequest) -> None:
        """Record the answers of ``part`` as answers of this request."""
        self.pending.difference_update(part.versions)
        self.versions.update(part.versions)
        self.ignored += part.ignored
        self.staleness_sum += part.staleness_sum
        self.staleness_max = max(self.staleness_max, part.staleness_max)

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the answered slices."""
        return self.staleness_sum / len(self.versions) if self.versions else 0.0


class PushSequence:
    """Steps and versions of one worker in a parameter set of ``slices`` slices.

    consistency: None for a reader, which never pushes.
    first_step: BSP: the first step to which this worker contributes.
    before: sequence of the previous incarnation, if this one continues its pushes.
    """

    def __init__(
        self, slices: int, consistency: Consistency | None, first_step: int = 0, before: PushSequence | None = None
    ) -> None:
        #: True if pushes are steps that all members make together.
        self.synchronous = isinstance(consistency, BSP)
        self.first_step = first_step if self.synchronous else 0
        #: Number of the next push.
        self.step: int = self.first_step if before is None else before.step
        #: Version of each slice as last seen by the user.
        self.versions: list[int] = [0] * slices if before is None else before.versions
        #: Mark of the unfinished push; None if there is none. A push that a previous incarnation started counts as new,
        #: so its mark is below every future one.
        self._mark: int | None = 0 if before is not None and before.unfinished else None
        #: True if the push under way is given in pieces and some are missing: it needs more calls of the script.
        self.partial: bool = before is not None and before.partial
        #: True if the push was given in pieces and none is missing: it completes without the script.
        self.given: bool = before is not None and before.given
        #: Times that the push under way was withdrawn because servers refused its writes.
        self.attempt: int = 0 if before is None else before.attempt
        #: True if it was refused by some slices after others had applied it. It is then completed as it is.
        self.partly_applied: bool = before is not None and before.partly_applied
        #: True if nothing of the first step was sent, so the others may not have reached it.
        self._joins = not self.unfinished

    @property
    def version(self) -> int:
        """Lowest version of any slice as last seen."""
        return min(self.versions, default=self.step)

    @property
    def before_first_step(self) -> bool:
        """True if, as far as the user has seen, the others may not have reached this joiner's first step yet."""
        return self._joins and self.synchronous and self.step == self.first_step > self.version

    @property
    def next(self) -> int:
        """Number of the next push without any part on a server. An unfinished push counts as made."""
        return self.step + self.unfinished

    @property
    def next_whole(self) -> int:
        """Number of the next push that was not sent completely."""
        return self.step + (self.given or (self.unfinished and not self.partial))

    @property
    def unfinished(self) -> bool:
        """True if a push was started and is not answered: it is under way, or must be retried."""
        return self._mark is not None

    def send(self, mark: int) -> int:
        """Return the snapshot mark for a slice that is about to be sent. mark: the newest one."""
        if self._mark is None:
            self._mark = mark
        return self._mark

    def set_given(self, *, whole: bool) -> None:
        """Record how much of a push under way was given in pieces. whole: none is missing."""
        self.partial, self.given = not whole, whole

    def begin_push(self, options: PushOptions = NO_OPTIONS) -> PendingRequest:
        """Return the next push, with all slices unanswered. A retry after a failure gets the same number."""
        return PendingRequest(self.step, set(range(len(self.versions))), options=options)

    def begin_withdrawal(self, attempt: int) -> PendingRequest:
        """Return the withdrawal of the push under way. attempt: lowest number of its next attempt."""
        self.attempt = max(self.attempt + 1, attempt)
        options = PushOptions(attempt=self.attempt, withdraws=True)
        return PendingRequest(self.step, set(range(len(self.versions))), options=options)

    def end_withdrawal(self, answered: PendingRequest) -> bool:
        """Return True if no slice has applied the push."""
        self.partly_applied = self.partly_applied or max(answered.versions.values(), default=0) > answered.number
        return not self.partly_applied

    def begin_pull(self) -> PendingRequest:
        """Return a pull of all slices. BSP members wait for their current step; others take the available version."""
        return PendingRequest(self.step if self.synchronous else 0, set(range(len(self.versions))))

    def end_push(self, push: PendingRequest, *, seen: bool) -> None:
        """Use up the number of ``push``, which is answered completely.

        seen: the answers carried the weights, so the next gradient is computed on their versions.
        BSP: if others continued without this worker (backup workers), the next step is the first that is still open on
        some slice. It is never a step that was already pushed.
        """
        assert push.finished and push.number == self.step
        if seen:
            self._see(push)
        self._go_to(self.step + 1)
        if self.synchronous:
            self._go_to(min(push.versions.values(), default=0))

    def end_pull(self, pull: PendingRequest) -> None:
        """Adopt the versions of ``pull``, which is answered completely.

        BSP: skip a step that is closed on all slices.
        """
        assert pull.finished
        self._see(pull)
        if self.synchronous:
            self._go_to(self.version)

    def _go_to(self, step: int) -> None:
        if step > self.step:
            self.step, self._mark, self.partial, self.given = step, None, False, False
            self.attempt, self.partly_applied = 0, False

    def _see(self, request: PendingRequest) -> None:
        for index, version in request.versions.items():
            self.versions[index] = version
