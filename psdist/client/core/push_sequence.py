"""The pushes of one worker to one parameter set: the next number, and which slices are still unanswered. Pure.

Together with the servers' duplicate tables this makes a push exactly-once: a push keeps its number until every slice of
it is answered, and whatever is sent again carries that number.

Invariants, checked by ``PendingRequest.answer`` and the tests:

* A step (BSP) or sequence number (SSP, ASP) is used by one finished push, never by two.
* The number grows only when a push is finished. After an error or a cancelled call the next push has the same number,
  and the servers take from it only what they lack.
* A slice is answered at most once per push. An answer for a slice that was not asked for is an error.
* A push carries the snapshot mark that was the newest when its first slice was sent, however often it is sent again.
* An expelled worker that resumes keeps its numbers. Marks from before its expulsion have no meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from psdist.consistency import BSP, Consistency
from psdist.errors import InternalError


@dataclass(slots=True)
class PendingRequest:
    """One push or pull under way: what was asked for and has not been answered."""

    #: BSP: the step; SSP and ASP: the sequence number. Pulls: the least version wanted.
    number: int
    pending: set[int]
    versions: dict[int, int] = field(default_factory=dict)
    ignored: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    #: Pushes: on the learning rate of the update; None where others say it.
    lr_factor: float | None = None

    @property
    def finished(self) -> bool:
        """Whether every slice is answered."""
        return not self.pending

    def unanswered(self, slices: Iterable[int]) -> tuple[int, ...]:
        """Those of ``slices`` that are to be sent (again), in their order."""
        return tuple(index for index in slices if index in self.pending)

    def answer(self, index: int, version: int, staleness: int = 0, ignored: bool = False) -> None:
        """Slice ``index`` was answered. Raises InternalError for one that is not pending."""
        if index not in self.pending:
            raise InternalError(f"a server answered slice {index}, which is not asked for or was answered before")
        self.pending.discard(index)
        self.versions[index] = version
        self.ignored += ignored
        self.staleness_sum += staleness
        self.staleness_max = max(self.staleness_max, staleness)

    def part(self, slices: Iterable[int]) -> PendingRequest:
        """A request of the same number for those of ``slices`` that are unanswered; ``absorb`` brings it back."""
        return PendingRequest(self.number, self.pending.intersection(slices), lr_factor=self.lr_factor)

    def absorb(self, part: PendingRequest) -> None:
        """Counts what was answered to ``part`` as answered here."""
        self.pending.difference_update(part.versions)
        self.versions.update(part.versions)
        self.ignored += part.ignored
        self.staleness_sum += part.staleness_sum
        self.staleness_max = max(self.staleness_max, part.staleness_max)

    @property
    def staleness_mean(self) -> float:
        """Mean over the answered slices."""
        return self.staleness_sum / len(self.versions) if self.versions else 0.0


class PushSequence:
    """Steps and versions of one worker in a parameter set of ``slices`` slices.

    consistency: None for a reader, which never pushes.
    first_step: BSP: the first step this worker contributes to.
    before: the session of the incarnation before, whose pushes this one goes on with.
    """

    def __init__(
        self, slices: int, consistency: Consistency | None, first_step: int = 0, before: PushSequence | None = None
    ) -> None:
        self.consistency = consistency
        self.first_step = first_step if self.synchronous else 0
        #: Number of the next push.
        self.step: int = self.first_step if before is None else before.step
        #: Version of each slice as last seen by the user.
        self.versions: list[int] = [0] * slices if before is None else before.versions
        #: The mark of the push that was begun and not finished; None where none was. One that was begun before counts
        #: as made from now on, so that it is below every mark to come.
        self._mark: int | None = 0 if before is not None and before.unfinished else None
        #: The push under way is given in pieces, and some are missing: it takes more calls of the script.
        self.partial: bool = before is not None and before.partial
        #: The push was given in pieces, and none is missing: it goes on its way by itself.
        self.given: bool = before is not None and before.given
        #: Nothing of the first step was sent, so that the others may be before it.
        self._joins = not self.unfinished

    @property
    def synchronous(self) -> bool:
        """Whether pushes are steps that all members make together."""
        return isinstance(self.consistency, BSP)

    @property
    def version(self) -> int:
        """Lowest version of any slice as last seen."""
        return min(self.versions, default=self.step)

    @property
    def before_first_step(self) -> bool:
        """Whether the others may not have reached this joiner's first step yet, as far as the user has seen."""
        return self._joins and self.synchronous and self.step == self.first_step > self.version

    @property
    def next(self) -> int:
        """Number of the next push that no server has anything of: one under way, or broken off, counts as made."""
        return self.step + self.unfinished

    @property
    def next_whole(self) -> int:
        """Number of the next push that is not sent as a whole."""
        return self.step + (self.given or (self.unfinished and not self.partial))

    @property
    def unfinished(self) -> bool:
        """Whether a push was begun that is not answered: it is under way, or to be made again."""
        return self._mark is not None

    def send(self, mark: int) -> int:
        """Returns the snapshot mark for a slice that is about to be sent. ``mark`` is the newest one."""
        if self._mark is None:
            self._mark = mark
        return self._mark

    def set_given(self, *, whole: bool) -> None:
        """Says how much of a push under way was given in pieces. whole: none is missing."""
        self.partial, self.given = not whole, whole

    def begin_push(self, lr_factor: float | None = None) -> PendingRequest:
        """The next push, with all slices unanswered. Beginning it again after a failure gives the same number.
        lr_factor: see PendingRequest."""
        return PendingRequest(self.step, set(range(len(self.versions))), lr_factor=lr_factor)

    def begin_pull(self) -> PendingRequest:
        """A pull of all slices. BSP members wait for the step they are at; others take what is there."""
        return PendingRequest(self.step if self.synchronous else 0, set(range(len(self.versions))))

    def end_push(self, push: PendingRequest, *, seen: bool) -> None:
        """Uses up the number of ``push``, all of which is answered.

        seen: the answers carried the weights, so that the next gradient is computed on their versions.
        BSP: where others went on without this worker (backup workers), the next step is the first that is still open on
        some slice. It is never a step that was already pushed.
        """
        assert push.finished and push.number == self.step
        if seen:
            self._see(push)
        self._go_to(self.step + 1)
        if self.synchronous:
            self._go_to(min(push.versions.values(), default=0))

    def end_pull(self, pull: PendingRequest) -> None:
        """Takes over the versions of ``pull``, all of which is answered. BSP: a step that is over everywhere is
        skipped."""
        assert pull.finished
        self._see(pull)
        if self.synchronous:
            self._go_to(self.version)

    def _go_to(self, step: int) -> None:
        if step > self.step:
            self.step, self._mark, self.partial, self.given = step, None, False, False

    def _see(self, request: PendingRequest) -> None:
        for index, version in request.versions.items():
            self.versions[index] = version
