"""A step in buckets: parts of its gradient are sent while the user still computes the rest.

``BucketStep`` is one such step, and ``AsyncBucket`` is the user's handle of one bucket. The slices of each bucket
travel in a task of their own.

Invariants: the step's number is used up once, when every slice is answered. A failure is raised at least once, by the
bucket or by the next call.

Not here: which slices are ready (``buckets``), checks of values (``parameters``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, NoReturn

from psdist.client.core import partition
from psdist.client.core.buckets import ReadySlices, SliceIndex, StepPlan
from psdist.client.core.partition import Arrays, Flat
from psdist.client.core.push_sequence import PendingRequest
from psdist.client.encoding import EncodedPush
from psdist.client.exchange import Exchange
from psdist.client.results import Results, Wanted
from psdist.client.session.membership import run_in_incarnation
from psdist.client.transport.delivery import all_or_first_error
from psdist.errors import (
    ClosedError,
    FencedError,
    InternalError,
    InvalidArgumentError,
    NonFiniteGradientError,
    PsdistError,
    WaitTimeoutError,
    again,
)
from psdist.metrics.phases import Phase

Gradient = Flat | EncodedPush


class StepState(Enum):
    """Where a step in buckets is. It goes from UNDER_WAY to OVER, or by LOST."""

    UNDER_WAY = auto()
    #: This worker was expelled, and the step does not go on in its next incarnation.
    LOST = auto()
    #: The next call has begun, or the step was dropped: what its buckets have is not valid any more.
    OVER = auto()


class AsyncBucket:
    """Tensors whose gradients were given together. Made by ``AsyncParameters.push_pull_async``; awaiting it gives their
    new weights."""

    def __init__(self, step: BucketStep, index: SliceIndex, numbers: tuple[int, ...]) -> None:
        #: The tensors' names, in the layout's order.
        self.names: tuple[str, ...] = tuple(index.layout.tensors[number].name for number in numbers)
        self.numbers = numbers
        self.slices = index.slices_of_all(numbers)
        self.weights: Arrays | None = None
        self.error: PsdistError | None = None
        self.step = step

    def done(self) -> bool:
        """Whether ``wait`` would not wait: the weights are here, or the bucket failed."""
        return self.weights is not None or self.error is not None

    def __await__(self) -> Generator[Any, None, Arrays]:
        return self.wait().__await__()

    async def wait(self, timeout: float | None = None) -> Arrays:
        """The new weights of the bucket's tensors by name: read-only arrays, as by ``pull(copy=False)``.

        Raises WaitTimeoutError after ``timeout`` seconds (call it again to go on); InvalidArgumentError where it would
        wait for ever, because slices of these tensors also hold parts of tensors that were not given; MutualWaitError
        (``Client`` alone) where the others wait for this worker elsewhere; FencedError where the step was dropped:
        begin the next one; and the error with which sending failed. After that, give the bucket's tensors again, and
        those of the buckets that were under way with it.
        """
        return await self.step.wait(self, timeout)

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done() else "under way"
        return f"<{type(self).__name__} {', '.join(self.names[:4])}{', ...' * (len(self.names) > 4)}: {state}>"


class WeightedGradient(NamedTuple):
    """A vector, or what encodes it; and what it counts for in the mean of its step, 0 where all of it abstains."""

    values: Gradient
    weight: float


class BucketStep:
    """One step that is given bucket by bucket.

    gradient: the tensors that were given lie in its vector, and are not written again before their slices are answered.
    on_finished: called once when the whole step is given and answered, with its progress and whether any of it
    abstained.
    reads: whether the new weights are asked for.
    """

    def __init__(
        self,
        exchange: Exchange,
        results: Results,
        index: SliceIndex,
        gradient: WeightedGradient,
        on_finished: Callable[[PendingRequest, bool], None],
        *,
        whole: bool,
        reads: bool,
    ) -> None:
        self.state = StepState.UNDER_WAY
        #: Whether the user knows that this worker was expelled in this step.
        self.told_fenced = False
        self._exchange = exchange
        self._results = results
        self._gradient = gradient
        self._target = results.target(Wanted(None, copy=False)) if reads else None
        self._on_finished = on_finished
        self._progress = exchange.participation.begin_push()
        self._plan = StepPlan(index, whole=whole)
        self._waiting: list[AsyncBucket] = []
        self._failures: list[PsdistError] = []
        #: What ends the buckets under way, while it does.
        self._broken: PsdistError | None = None
        self.tasks: dict[asyncio.Task[None], None] = {}
        self._abstained = False
        self._changed = asyncio.Event()

    # --- giving ---

    @property
    def weight(self) -> float:
        """What the gradient counts for in the mean of the step."""
        return self._gradient.weight

    @property
    def reads(self) -> bool:
        """Whether the answers have the new weights."""
        return self._target is not None

    @property
    def open(self) -> bool:
        """Whether tensors are still to be given."""
        return bool(self._plan.missing)

    def choose(self, names: Sequence[str]) -> tuple[int, ...]:
        """The numbers of tensors that may be given, or the error that says why not. See ``StepPlan.choose``."""
        return self._plan.choose(names)

    def give(self, numbers: tuple[int, ...], *, abstain: bool) -> AsyncBucket:
        """Sends the slices that these tensors complete. Their gradients are in the vector, and ``choose`` has accepted
        them."""
        bucket = AsyncBucket(self, self._plan.index, numbers)
        self._waiting.append(bucket)
        self._abstained = self._abstained or abstain
        ready = self._plan.give(numbers, abstain=abstain)
        if isinstance(self._gradient.values, EncodedPush):
            ready = self._gradient.values.decide(ready)
        self._update_sequence()
        if ready.valued or ready.abstaining:
            task = asyncio.create_task(self._send(bucket, numbers, ready), name="psdist bucket")
            self.tasks[task] = None
            task.add_done_callback(self._on_task_done)
        else:
            self._update()
        return bucket

    def _update_sequence(self) -> None:
        sequence = self._exchange.participation.sequence
        if sequence.step == self._progress.number:
            sequence.set_given(whole=not self.open)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.pop(task, None)

    async def _send(self, bucket: AsyncBucket, numbers: tuple[int, ...], ready: ReadySlices) -> None:
        parts = self._parts(ready)
        try:
            if isinstance(self._gradient.values, EncodedPush):
                parts = self._parts(await self._encode(self._gradient.values, ready))
            participation = self._exchange.participation
            send = partial(self._send_pending, parts)
            if not await run_in_incarnation(send, self._exchange.rejoin, lambda: participation.incarnation):
                self.state = StepState.LOST
            if self.state is not StepState.UNDER_WAY:
                raise self.dropped()
        except asyncio.CancelledError:
            bucket.error = self._broken or ClosedError("the client was closed before the bucket was answered")
            raise
        except Exception as error:
            bucket.error = error if isinstance(error, PsdistError) else InternalError(f"a bucket failed: {error!r}")
            self._failures.append(bucket.error)
        finally:
            for part, _ in parts:
                self._progress.absorb(part)
                self._plan.answer(part.versions)
            if bucket.error is not None:
                self._plan.take_back(numbers, [index for part, _ in parts for index in part.pending])
                self._update_sequence()
            self._update()

    async def _send_pending(self, parts: Sequence[tuple[PendingRequest, Gradient | None]]) -> bool:
        """Send what is unanswered of ``parts``. Returns True once all of it is answered."""
        weight = self._gradient.weight or 1.0
        pushes = [self._exchange.push(part, flat, 0.0, self._target, weight) for part, flat in parts if part.pending]
        await all_or_first_error(pushes)
        return True

    async def _encode(self, push: EncodedPush, ready: ReadySlices) -> ReadySlices:
        """Encodes the slices that have values. Returns what is sent: where the codec cannot hold them and
        ``non_finite`` is "skip", all abstain."""
        try:
            await push.encode(ready.valued)
        except NonFiniteGradientError:
            if self._exchange.participation.entry.spec.non_finite == "reject":
                raise
            push.abstain(ready.valued)
            self._abstained = True
            return ReadySlices((), tuple(sorted((*ready.valued, *ready.abstaining))))
        return ready

    def _parts(self, ready: ReadySlices) -> list[tuple[PendingRequest, Gradient | None]]:
        """Requests for slices, and what their gradient is in (None: they abstain)."""
        parts: list[tuple[tuple[int, ...], Gradient | None]] = [
            (ready.valued, self._gradient.values),
            (ready.abstaining, None),
        ]
        return [(self._progress.part(slices), gradient) for slices, gradient in parts if slices]

    def _update(self) -> None:
        """Completes buckets and the step after something was given, answered or failed, and wakes those who wait."""
        for bucket in self._waiting:
            if bucket.error is None and self._plan.is_complete(bucket.slices):
                target = self._target
                arrays = {} if target is None else self._results.bucket_arrays(target, bucket.numbers, bucket.slices)
                bucket.weights = arrays
        self._waiting = [bucket for bucket in self._waiting if not bucket.done()]
        if self._plan.finished:
            self._on_finished(self._progress, self._abstained)
        self._changed.set()
        self._changed = asyncio.Event()

    # --- waiting ---

    async def wait(self, bucket: AsyncBucket, timeout: float | None) -> Arrays:
        """See ``AsyncBucket.wait``."""
        names = partition.join_names(bucket.names)
        if self.state is StepState.OVER and bucket.error is None:
            raise InvalidArgumentError(
                f"the new weights of {names} are not valid any more: wait for a bucket before the next call on its "
                "parameters"
            )
        try:
            async with asyncio.timeout(timeout):
                waiting = self._exchange.waiting(push=True, reads=self.reads, limited=timeout is not None)
                with self._exchange.phases.call(Phase.WAIT), waiting:
                    await self._until_done(bucket, names)
        except TimeoutError:
            raise WaitTimeoutError(f"the new weights of {names} did not come within {timeout:g} s") from None
        if bucket.error is not None:
            self.told_fenced = self.told_fenced or isinstance(bucket.error, FencedError)
            await self._raise(bucket.error)
        assert bucket.weights is not None
        return bucket.weights

    async def _until_done(self, bucket: AsyncBucket, names: str) -> None:
        while not bucket.done():
            if missing := self._plan.missing_for(bucket.slices):
                raise InvalidArgumentError(
                    f"waiting for {names} would never end: {missing} must be given first, because they share slices or "
                    "are clipped together"
                )
            await self._changed.wait()

    async def finish(self) -> None:
        """Returns when the whole step is answered.

        Raises InvalidArgumentError if tensors are missing, and the failure of a bucket that was not raised yet.
        """
        while not self._plan.finished:
            await self.raise_failure()
            if missing := self._plan.missing_names():
                raise InvalidArgumentError(
                    f"step {self._progress.number} was begun in buckets and misses {missing}: give them by "
                    "push_pull_async first"
                )
            with self._exchange.counted_wait():
                await self._changed.wait()

    async def raise_failure(self) -> None:
        """Raises the error of a bucket that failed, unless it was raised before."""
        if self._failures:
            await self._raise(self._failures[0])

    async def _raise(self, error: PsdistError) -> NoReturn:
        """Raises the error of a bucket. After that the user may write to its memory, which slices of other buckets may
        share. So the buckets under way end with the same error, and memory that a server may still read is not shared
        any more."""
        if error in self._failures:
            self._broken = error
            await self._end_tasks()
            self._broken = None
            self._failures.clear()
            await self._exchange.shared_memory.withdraw()
        raise again(error)

    async def _end_tasks(self) -> None:
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def number(self) -> int:
        """The step's number."""
        return self._progress.number

    @property
    def finished(self) -> bool:
        """Whether all was given and answered."""
        return self._plan.finished

    def dropped(self) -> FencedError:
        """The error for the user of a worker that was expelled in this step, and takes part again without it."""
        return FencedError(
            f"step {self._progress.number} was dropped, with all of its buckets: {self._exchange.expulsion.reason}. "
            "Begin the next one with new gradients: this worker takes part again"
        )

    async def drop(self) -> None:
        """Ends the buckets under way: this worker was expelled, and takes part again without this step."""
        self.state, self._broken = StepState.OVER, self.dropped()
        await self._end_tasks()
        for bucket in self._waiting:
            bucket.error = bucket.error or self._broken
        self._waiting.clear()
        self._changed.set()

    def end(self) -> None:
        """Marks the step as over, because the next call begins."""
        self.state = StepState.OVER

    async def close(self) -> None:
        """Ends the buckets under way."""
        under_way = bool(self.tasks)
        await self._end_tasks()
        if under_way or self._failures:
            await self._exchange.shared_memory.withdraw()  # the memory is the user's again, as in _raise
