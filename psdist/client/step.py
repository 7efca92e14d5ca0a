"""``PushStep``: one push of a worker under one number, whole or in buckets.

A whole push is a step with one bucket, which ``Steps`` sends from the user's call. ``BucketStep`` is given bucket by
bucket while the user still computes the rest, and sends each in a task of its own; ``AsyncBucket`` is the user's handle
of one. Both kinds send their parts by ``PushStep.send``.

Invariants: a step keeps its number until every slice is answered, and uses it up once. A failed whole push is made
again with all slices pending, and servers ignore those that they have. A bucket's failure is raised at least once, by
the bucket or by the next call.

Not here: which slices are ready (``buckets``), checks of values (``gradients``), the order of calls (``steps``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, NoReturn

from psdist.client.core import flat_vector
from psdist.client.core.buckets import ReadySlices, SliceIndex, StepPlan
from psdist.client.core.flat_vector import Arrays, Flat
from psdist.client.core.push_sequence import PendingRequest
from psdist.client.encoding import EncodedPush
from psdist.client.results import Results, Wanted
from psdist.client.server_access import ServerAccess
from psdist.client.session.membership import run_in_incarnation
from psdist.client.session.waits import ReportedWait
from psdist.client.transport.buffers import PullTarget
from psdist.client.transport.delivery import all_or_first_error
from psdist.client.transport.requests import EncodedGradient
from psdist.errors import (
    ClosedError,
    FencedError,
    InternalError,
    InvalidArgumentError,
    NonFiniteGradientError,
    PsdistError,
    WaitTimeoutError,
    WrittenWeightsError,
    copy_error,
)
from psdist.metrics.phases import Phase
from psdist.off_loop import until_done

Gradient = Flat | EncodedGradient
#: A request for some slices of a step, and their gradient; None if they abstain.
Part = tuple[PendingRequest, Gradient | None]


class StepState(Enum):
    """State of a step in buckets: from UNDER_WAY to OVER, directly or by LOST."""

    UNDER_WAY = auto()
    #: This worker was expelled, and its next incarnation does not continue the step.
    LOST = auto()
    #: The next call has begun, or the step was dropped. Weights of its buckets are no longer valid.
    OVER = auto()


class PushStep:
    """One push under one number.

    values: the gradient, raw or encoded; None if all of it abstains.
    weight: weight of the gradient in the mean of its step; 0 if all of it abstains.
    target: destination of the new weights; None if they are not asked for.
    norm: L2 norm of the gradient, for servers that need it with each push.
    absent: elements of the vector without a gradient.
    """

    def __init__(
        self,
        servers: ServerAccess,
        values: Gradient | None,
        weight: float,
        target: PullTarget | None,
        norm: float = 0.0,
        absent: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.progress = servers.participation.begin_push(abstains=values is None or not weight)
        if absent:
            self.leave_out(absent)
        self.values = values
        self.weight = weight
        self.target = target
        self._norm = norm
        self._servers = servers

    def leave_out(self, absent: tuple[tuple[int, int], ...]) -> None:
        """Set the elements without a gradient, in all requests that are made from now on."""
        self.progress.options = replace(self.progress.options, absent=absent)

    @property
    def number(self) -> int:
        """The number of the push."""
        return self.progress.number

    @property
    def reads(self) -> bool:
        """True if the answers carry the new weights."""
        return self.target is not None

    @property
    def abstains(self) -> bool:
        """True if any slice is sent without values."""
        return self.values is None or (isinstance(self.values, EncodedPush) and bool(self.values.abstained))

    def whole(self) -> list[Part]:
        """Return the requests of all slices. Slices that abstained in a failed attempt abstain again."""
        if self.values is None or not isinstance(self.values, EncodedPush) or not self.values.abstained:
            return [(self.progress, self.values)]
        abstaining = self.values.abstained
        return self.parts(ReadySlices(tuple(self.progress.pending - abstaining), tuple(abstaining)))

    def parts(self, ready: ReadySlices) -> list[Part]:
        """Return the requests of ``ready`` slices. ``absorb`` adds up their answers."""
        pairs = [(ready.valued, self.values), (ready.abstaining, None)]
        return [(self.progress.part(slices), values) for slices, values in pairs if slices]

    def absorb(self, parts: Sequence[Part]) -> None:
        """Count what was answered to ``parts`` as answered in this step."""
        for part, _ in parts:
            if part is not self.progress:
                self.progress.absorb(part)

    def send(self, parts: Sequence[Part]) -> Coroutine[Any, Any, None]:
        """Return a coroutine that delivers the unanswered slices of ``parts``."""
        return self._send_part(*parts[0]) if len(parts) == 1 else self._send_all(parts)

    async def _send_all(self, parts: Sequence[Part]) -> None:
        await all_or_first_error([self._send_part(*part) for part in parts])

    def _send_part(self, part: PendingRequest, values: Gradient | None) -> Coroutine[Any, Any, None]:
        return self._servers.push(part, values, self._norm, self.target, self.weight or 1.0)

    @property
    def is_encoding(self) -> bool:
        """True if slices are encoded in the background while others are sent."""
        return isinstance(self.values, EncodedPush) and self.values.is_encoding

    async def send_while_encoding(self, parts: Sequence[Part], waiting: ReportedWait) -> None:
        """Send ``parts`` while they are encoded. waiting: entered once the gradient is encoded, because from then on
        the script only waits for the servers."""
        assert isinstance(self.values, EncodedPush)
        pushing = asyncio.create_task(self.send(parts), name="psdist push")
        try:
            await self.values.encoded()
            with waiting:
                await pushing
        finally:
            pushing.cancel()
            try:
                await until_done(pushing)
            finally:  # If this is cancelled, too: the errors of both tasks are retrieved and released.
                if not pushing.cancelled():
                    pushing.exception()
                self.values.end()


class AsyncBucket:
    """Tensors whose gradients were given together. Made by ``AsyncParameters.push_pull_async``; await it for their new
    weights."""

    def __init__(self, step: BucketStep, index: SliceIndex, numbers: tuple[int, ...]) -> None:
        #: The tensors' names, in the layout's order.
        self.names: tuple[str, ...] = tuple(index.layout.tensors[number].name for number in numbers)
        self.numbers = numbers
        self.slices = index.slices_of_all(numbers)
        self.weights: Arrays | None = None
        self.error: PsdistError | None = None
        self.step = step

    def done(self) -> bool:
        """Return True if ``wait`` would not wait: the weights have arrived, or the bucket failed."""
        return self.weights is not None or self.error is not None

    def __await__(self) -> Generator[Any, None, Arrays]:
        return self.wait().__await__()

    async def wait(self, timeout: float | None = None) -> Arrays:
        """Return the new weights of the bucket's tensors by name: read-only arrays, as by ``pull(copy=False)``.

        Raises WaitTimeoutError after ``timeout`` seconds (call it again to continue); InvalidArgumentError if it would
        wait forever, because slices of these tensors also hold parts of tensors that were not given; MutualWaitError
        (only with ``Client``) if the other workers wait for this one elsewhere; FencedError if the step was dropped:
        begin the next one; and the error with which sending failed. After that, give the bucket's tensors again, and
        those of the buckets that were under way with it.
        """
        return await self.step.wait(self, timeout)

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done() else "under way"
        return f"<{type(self).__name__} {', '.join(self.names[:4])}{', ...' * (len(self.names) > 4)}: {state}>"


class BucketStep(PushStep):
    """A step that is given bucket by bucket.

    values: the vector that holds the given tensors, or its encoder. Tensors are not written again before their slices
        are answered.
    on_finished: called once when the whole step is given and answered, with its progress, and True if any of it
        abstained.
    """

    def __init__(
        self,
        servers: ServerAccess,
        values: Flat | EncodedPush,
        weight: float,
        results: Results,
        plan: StepPlan,
        on_finished: Callable[[PendingRequest, bool], None],
        *,
        reads: bool,
    ) -> None:
        target = results.target(Wanted(None, copy=False)) if reads else None
        super().__init__(servers, values, weight, target)
        self.state = StepState.UNDER_WAY
        #: True once the user was told that this worker was expelled during this step.
        self.told_fenced = False
        self._results = results
        self._on_finished = on_finished
        self._plan = plan
        self._waiting: list[AsyncBucket] = []
        self._failures: list[PsdistError] = []
        #: Error with which the buckets under way are being cancelled.
        self._broken: PsdistError | None = None
        self.tasks: dict[asyncio.Task[None], None] = {}
        self._abstained = False
        #: Numbers of the given tensors that have no gradient.
        self._absent: frozenset[int] = frozenset()
        self._changed = asyncio.Event()

    # --- giving ---

    @property
    def open(self) -> bool:
        """True if tensors are still missing."""
        return bool(self._plan.missing)

    @property
    def is_blank(self) -> bool:
        """True if no tensor is given, because all buckets so far have failed."""
        return len(self._plan.missing) == len(self._plan.index.layout.tensors)

    def choose(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the numbers of tensors that may be given. Raises as ``StepPlan.choose``."""
        return self._plan.choose(names)

    def give(self, numbers: tuple[int, ...], *, abstain: bool, absent: frozenset[int] = frozenset()) -> AsyncBucket:
        """Send the slices that these tensors complete. ``choose`` has accepted them, and their gradients are in the
        vector. absent: those of them without a gradient."""
        if absent or self._absent:
            self._absent = self._absent.difference(numbers) | absent
            self.leave_out(self._plan.index.ranges_of(self._absent))
            if isinstance(self.values, EncodedPush):
                self.values.leave_out(self.progress.options.absent)
        bucket = AsyncBucket(self, self._plan.index, numbers)
        self._waiting.append(bucket)
        self._abstained = self._abstained or abstain
        ready = self._plan.give(numbers, abstain=abstain)
        if isinstance(self.values, EncodedPush):
            ready = self.values.decide(ready)
        self._update_sequence()
        if ready.valued or ready.abstaining:
            task = asyncio.create_task(self._send_bucket(bucket, numbers, ready), name="psdist bucket")
            self.tasks[task] = None
            task.add_done_callback(self._on_task_done)
        else:
            self._update()
        return bucket

    def _update_sequence(self) -> None:
        sequence = self._servers.participation.sequence
        if sequence.step == self.progress.number:
            sequence.set_given(whole=not self.open)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.pop(task, None)

    async def _send_bucket(self, bucket: AsyncBucket, numbers: tuple[int, ...], ready: ReadySlices) -> None:
        parts = self.parts(ready)
        try:
            if isinstance(self.values, EncodedPush):
                parts = self.parts(await self._encode(self.values, ready))
            participation = self._servers.participation
            send = partial(self._send_pending, parts)
            if not await run_in_incarnation(send, self._servers.rejoin, lambda: participation.incarnation):
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
            self.absorb(parts)
            for part, _ in parts:
                self._plan.answer(part.versions)
            if bucket.error is not None:
                self._plan.take_back(numbers, [index for part, _ in parts for index in part.pending])
                self._update_sequence()
            self._update()

    async def _send_pending(self, parts: Sequence[Part]) -> bool:
        """Send what is unanswered of ``parts``. Returns True once all of it is answered."""
        if pending := [part for part in parts if part[0].pending]:
            await self.send(pending)
        return True

    async def _encode(self, push: EncodedPush, ready: ReadySlices) -> ReadySlices:
        """Encode the slices that have values. Returns the slices to send. If the codec cannot hold the values and
        ``non_finite`` is "skip", all of them abstain."""
        try:
            await push.encode(ready.valued)
        except NonFiniteGradientError:
            if self._servers.participation.entry.spec.non_finite == "reject":
                raise
            push.abstain(ready.valued)
            self._abstained = True
            return ReadySlices((), tuple(sorted((*ready.valued, *ready.abstaining))))
        return ready

    def _update(self) -> None:
        """Complete buckets and the step after something was given, answered or failed, and wake the waiting callers."""
        for bucket in self._waiting:
            if bucket.error is None and self._plan.is_complete(bucket.slices):
                target = self.target
                arrays = {} if target is None else self._results.bucket_arrays(target, bucket.numbers, bucket.slices)
                bucket.weights = arrays
        self._waiting = [bucket for bucket in self._waiting if not bucket.done()]
        if self._plan.finished:
            self._on_finished(self.progress, self._abstained)
        self._changed.set()
        self._changed = asyncio.Event()

    # --- waiting ---

    async def wait(self, bucket: AsyncBucket, timeout: float | None) -> Arrays:
        """See ``AsyncBucket.wait``."""
        names = flat_vector.join_names(bucket.names)
        if self.state is StepState.OVER and bucket.error is None:
            raise InvalidArgumentError(
                f"the new weights of {names} are not valid any more: wait for a bucket before the next call on its "
                "parameters"
            )
        try:
            async with asyncio.timeout(timeout):
                waiting = self._servers.waiting(push=True, reads=self.reads, limited=timeout is not None)
                with self._servers.phases.call(Phase.WAIT), waiting:
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
            if refused := next((one for one in self._failures if isinstance(one, WrittenWeightsError)), None):
                await self._raise(refused)  # All buckets of the step were refused with it.
            if missing := self._plan.missing_for(bucket.slices):
                raise InvalidArgumentError(
                    f"waiting for {names} would never end: {missing} must be given first, because they share slices or "
                    "are clipped together"
                )
            await self._changed.wait()

    async def finish(self) -> None:
        """Return when the whole step is answered.

        Raises InvalidArgumentError if tensors are missing, and the first failure of a bucket that was not raised yet.
        """
        while not self._plan.finished:
            await self.raise_failure()
            if missing := self._plan.missing_names():
                raise InvalidArgumentError(
                    f"step {self.progress.number} was begun in buckets and misses {missing}: give them by "
                    "push_pull_async first"
                )
            with self._servers.counted_wait():
                await self._changed.wait()

    async def raise_failure(self) -> None:
        """Raise the error of a failed bucket, unless it was raised before."""
        if self._failures:
            await self._raise(self._failures[0])

    async def _raise(self, error: PsdistError) -> NoReturn:
        """Raise the error of a bucket. The user may then write to its memory, which slices of other buckets may share.
        So the buckets under way end with the same error, and memory that a server may still read is withdrawn."""
        if error in self._failures:
            self._broken = error
            await self._end_tasks()
            self._broken = None
            self._failures.clear()
            await self._servers.shared_memory.withdraw()
            if isinstance(error, WrittenWeightsError):
                await self._withdraw(error)
        raise copy_error(error)

    async def _withdraw(self, error: WrittenWeightsError) -> None:
        """Withdraw the step after servers refused it. All of its tensors must be given again, unless a slice has
        applied it."""
        if await self._servers.withdraw_push(error):
            for bucket in self._waiting:
                bucket.error = bucket.error or error
            self._waiting.clear()
            self._plan.restart()
            self._update_sequence()
            self._update()
        self.update_options()

    def update_options(self) -> None:
        """Push tensors that are given from now on with the script's newest options."""
        options = self._servers.participation.begin_push(abstains=not self.weight).options
        self.progress.options = replace(options, absent=self.progress.options.absent)

    async def _end_tasks(self) -> None:
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def finished(self) -> bool:
        """True if all tensors were given and all slices are answered."""
        return self._plan.finished

    def dropped(self) -> FencedError:
        """Return the error for the user of a worker that was expelled during this step, and rejoins without it."""
        return FencedError(
            f"step {self.progress.number} was dropped, with all of its buckets: {self._servers.expulsion.reason}. "
            "Begin the next one with new gradients: this worker takes part again"
        )

    async def drop(self) -> None:
        """End the buckets under way: this worker was expelled, and rejoins without this step."""
        self.state, self._broken = StepState.OVER, self.dropped()
        await self._end_tasks()
        for bucket in self._waiting:
            bucket.error = bucket.error or self._broken
        self._waiting.clear()
        self._changed.set()

    def end(self) -> None:
        """Mark the step as over, because the next call begins."""
        self.state = StepState.OVER

    async def close(self) -> None:
        """Cancel the buckets under way."""
        under_way = bool(self.tasks)
        await self._end_tasks()
        if under_way or self._failures:
            await self._servers.shared_memory.withdraw()  # The memory is the user's again, as in _raise.
