"""Pushes of one worker to one parameter set: the next number, the slices that are still unanswered, the buckets in
which the gradient is given, and the mark of a snapshot. Pure.

Together with the servers' duplicate tables the numbers make a push exactly-once: a push keeps its number until every
slice of it is answered, and every retry carries that number. A slice of a push in buckets is ready when every tensor
that touches it was given, so slices are sent while the rest of the gradient is still computed.

A snapshot in SSP and ASP divides each worker's pushes in two. Those below the number in the worker's answer to Mark are
in the snapshot. Later ones carry the attempt as their mark, and wait at the servers until the cut is copied. Reports on
leased data carry the same numbers, so a snapshot knows the ranges whose samples are in its weights.

Invariants, checked by ``PendingRequest.answer`` and the tests:

* A step (BSP) or sequence number (SSP, ASP) is used by one finished push, never by two.
* The number grows only when a push is finished. After an error or a cancelled call the next push has the same number,
and the servers apply only the slices that they lack.
* A slice is answered at most once per push. An answer for a slice that was not requested is an error.
* A slice becomes ready once, after the last of its tensors was given. If its bucket fails before the slice is answered,
the slice becomes ready again when all of its tensors are given again.
* A push carries the snapshot mark that was the newest when its first slice was sent, in all retries: it either is
numbered below an answer and has no mark, or above it and has the mark. Repeated requests for one attempt get the same
answer.
* An expelled worker that resumes keeps its numbers. Marks from before its expulsion have no meaning.

Not here: values (``flat_vector``), sending (``push``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from psdist.client.core.flat_vector import WrittenWeights, join_names, tensor_names
from psdist.consistency import BSP, Consistency
from psdist.errors import InternalError, InvalidArgumentError, UnknownTensorError
from psdist.hyperparameters import Settings
from psdist.types import Layout, Slicing


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


# --- a push in buckets ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SliceIndex:
    """Mapping between tensors and the slices that they touch."""

    layout: Layout
    slicing: Slicing

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each tensor by its name."""
        return {tensor.name: number for number, tensor in enumerate(self.layout.tensors)}

    def slices_of(self, number: int) -> range:
        """Return the slices that hold elements of a tensor; none for an empty tensor."""
        start, stop = self.layout.offsets[number], self.layout.offsets[number + 1]
        return range(
            start // self.slicing.slice_elements, -(-stop // self.slicing.slice_elements) if stop > start else 0
        )

    def named(self, names: Iterable[str]) -> frozenset[int]:
        """Return the numbers of tensors. Raises UnknownTensorError."""
        numbers = set()
        for name in names:
            if name not in self.numbers:
                raise UnknownTensorError(
                    f"tensor {name!r:.100} is unknown: these parameters have {tensor_names(self.layout)}"
                )
            numbers.add(self.numbers[name])
        return frozenset(numbers)

    def ranges_of(self, numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Return the elements of tensors as ranges: (start, stop), ascending; neighbours as one range."""
        ranges: list[tuple[int, int]] = []
        for number in sorted(numbers):
            start, stop = self.layout.offsets[number], self.layout.offsets[number + 1]
            if ranges and ranges[-1][1] == start:
                ranges[-1] = ranges[-1][0], stop
            elif stop > start:
                ranges.append((start, stop))
        return tuple(ranges)

    def slices_of_all(self, numbers: Iterable[int]) -> frozenset[int]:
        """Return the slices that hold elements of any of these tensors."""
        return frozenset(index for number in numbers for index in self.slices_of(number))

    def tensors_of(self, index: int) -> list[int]:
        """Return the tensors with elements in a slice, ascending."""
        start, stop = self.slicing.bounds(index)
        offsets = self.layout.offsets
        around = range(bisect_right(offsets, start) - 1, bisect_left(offsets, stop))
        return [number for number in around if offsets[number + 1] > offsets[number]]

    @cached_property
    def touching(self) -> tuple[int, ...]:
        """Number of tensors that touch each slice."""
        counts = [0] * self.slicing.count
        for number in range(len(self.layout.tensors)):
            for index in self.slices_of(number):
                counts[index] += 1
        return tuple(counts)


@dataclass(frozen=True, slots=True)
class ReadySlices:
    """Slices to be sent now, ascending.

    valued: slices that are sent with their values.
    abstaining: slices that are sent without values, because one of their tensors abstains.
    """

    valued: tuple[int, ...]
    abstaining: tuple[int, ...]


class PushProgress:
    """Progress of one push: the tensors given, the slices under way, and those answered.

    needs_all: True if the servers answer no slice before they have the whole push (clipping by the global norm), so
        every slice needs all tensors.
    """

    def __init__(self, index: SliceIndex, *, needs_all: bool) -> None:
        self.index = index
        self._needs_all = needs_all
        #: Given tensors; True if the tensor abstains.
        self._given: dict[int, bool] = {}
        #: Number of tensors that each slice still needs.
        self._needs = list(index.touching)
        self._under_way: set[int] = set()
        self._unanswered = set(range(index.slicing.count))

    def give_all(self, *, abstain: bool) -> ReadySlices:
        """Add all tensors, of which none was given. Returns all slices."""
        self._given = dict.fromkeys(range(len(self.index.layout.tensors)), abstain)
        self._needs = [0] * len(self._needs)
        self._under_way = set(self._unanswered)
        every = tuple(range(len(self._needs)))
        return ReadySlices((), every) if abstain else ReadySlices(every, ())

    def choose(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the numbers of tensors that may be given, ascending.

        Raises UnknownTensorError, and InvalidArgumentError for a tensor that was given before, or for an empty list.
        """
        if not names:
            raise InvalidArgumentError("the bucket names no tensor: give at least one")
        chosen: set[int] = set()
        for name in names:
            number = self.index.numbers.get(name) if isinstance(name, str) else None
            if number is None:
                raise UnknownTensorError(
                    f"tensor {name!r:.100} is unknown: these parameters have {tensor_names(self.index.layout)}"
                )
            if number in self._given or number in chosen:
                raise InvalidArgumentError(
                    f"tensor {name!r} was given twice in one step, which still misses {self.missing_names() or 'none'}"
                )
            chosen.add(number)
        return tuple(sorted(chosen))

    def give(self, numbers: Iterable[int], *, abstain: bool) -> ReadySlices:
        """Add tensors that ``choose`` has accepted. Returns the slices that can be sent now."""
        ready = []
        for number in numbers:
            self._given[number] = abstain
            for index in self.index.slices_of(number):
                self._needs[index] -= 1
                if not self._needs[index] and index in self._unanswered and index not in self._under_way:
                    ready.append(index)
        self._under_way.update(ready)
        abstaining = {index for index in ready if self._abstains(index)}
        return ReadySlices(tuple(sorted(set(ready) - abstaining)), tuple(sorted(abstaining)))

    def answer(self, slices: Iterable[int]) -> None:
        """Mark slices as answered."""
        answered = set(slices)
        assert answered <= self._under_way
        self._unanswered -= answered
        self._under_way -= answered

    def take_back(self, numbers: Iterable[int], slices: Iterable[int]) -> None:
        """Mark tensors, and slices of them that were under way, as missing again."""
        self._under_way.difference_update(slices)
        for number in numbers:
            del self._given[number]
            for index in self.index.slices_of(number):
                self._needs[index] += 1

    def restart(self) -> None:
        """Mark all tensors and slices as missing again."""
        self.take_back(list(self._given), list(self._under_way))

    def _abstains(self, index: int) -> bool:
        return any(self._given[number] for number in self.index.tensors_of(index))

    @property
    def missing(self) -> list[int]:
        """Tensors that were not given, ascending."""
        return [number for number in range(len(self.index.layout.tensors)) if number not in self._given]

    @property
    def finished(self) -> bool:
        """True if every tensor was given and every slice answered."""
        return not self._unanswered and len(self._given) == len(self.index.layout.tensors)

    def missing_names(self) -> str:
        """Return the names of the tensors that were not given, for a message."""
        return join_names([self.index.layout.tensors[number].name for number in self.missing])

    def is_complete(self, slices: Iterable[int]) -> bool:
        """Return True if all of ``slices`` are answered."""
        return self._unanswered.isdisjoint(slices)

    def missing_for(self, slices: Iterable[int]) -> str:
        """Return the missing tensors that block ``slices``, for a message; empty if all slices are on their way."""
        waited = self._unanswered.intersection(slices)
        if waited and self._needs_all:
            return self.missing_names()
        needed = {number for index in waited - self._under_way for number in self.index.tensors_of(index)}
        tensors = self.index.layout.tensors
        return join_names([tensors[number].name for number in sorted(needed - self._given.keys())])


# --- snapshot marks ---------------------------------------------------------------------------------------------------


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
