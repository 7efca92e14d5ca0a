"""``Push``: one push of a worker under one number, from its first bucket until it is answered or dropped.

The gradient of a push is given in buckets: a bucket that the user gives while the rest is still computed is sent in a
task of its own, and ``AsyncBucket`` is the user's handle of it. A whole push is a push in one bucket, which is sent
from the user's call.

Invariants: a push keeps its number until every slice is answered, and uses it up once. A whole push that failed is made
again with all slices pending, and servers ignore those that they have. The failure of a bucket is raised at least once,
by the bucket or by the next call.

Not here: which slices are ready (``push_sequence``), checks of values (``gradients``), the order of pushes
(``push_order``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from psdist.client.core import flat_vector
from psdist.client.core.flat_vector import Arrays, Flat
from psdist.client.core.push_sequence import PendingRequest, PushProgress, ReadySlices, SliceIndex
from psdist.client.encoding import EncodedPush
from psdist.client.participation import Participation
from psdist.client.session.membership import run_in_incarnation
from psdist.client.transport.buffers import PullTarget, Results
from psdist.client.transport.delivery import all_or_first_error
from psdist.client.transport.transport import EncodedGradient
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
from psdist.monitoring.metrics import Phase
from psdist.off_loop import until_done
from psdist.settings.debugging import time_limit

Gradient = Flat | EncodedGradient
#: A request for some slices of a push, and their gradient; None if they abstain.
Part = tuple[PendingRequest, Gradient | None]


class AsyncBucket:
    """Tensors whose gradients were given together. Made by ``AsyncParameters.push_pull_async``; await it for their new
    weights."""

    def __init__(self, push: Push, index: SliceIndex, numbers: tuple[int, ...]) -> None:
        #: The tensors' names, in the layout's order.
        self.names: tuple[str, ...] = tuple(index.layout.tensors[number].name for number in numbers)
        self.numbers = numbers
        self.slices = index.slices_of_all(numbers)
        self.weights: Arrays | None = None
        self.error: PsdistError | None = None
        self.push = push

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
        return await self.push.wait(self, timeout)

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done() else "under way"
        return f"<{type(self).__name__} {', '.join(self.names[:4])}{', ...' * (len(self.names) > 4)}: {state}>"


class Push:
    """One push of a worker.

    index: the tensors of the gradient, and the slices that they touch.
    values: the vector that holds the given tensors, raw or encoded, or its encoder. Tensors are not written again
        before their slices are answered. None if all of it abstains.
    weight: weight of the gradient in the mean of its step; 0 if all of it abstains.
    target: destination of the new weights; None if they are not asked for.
    results: makes the arrays of buckets.
    on_answered: called once when the whole push is given and answered.
    needs_all: True if the servers answer no slice before they have the whole push.
    norm: L2 norm of the gradient, for servers that need it with each push; None if it is still to be computed.
    """

    def __init__(
        self,
        part: Participation,
        index: SliceIndex,
        values: Gradient | None,
        weight: float,
        target: PullTarget | None,
        results: Results,
        on_answered: Callable[[Push], None],
        *,
        needs_all: bool = False,
        norm: float | None = 0.0,
    ) -> None:
        #: The push under its number, with all unanswered slices.
        self.request = part.begin_push(abstains=not weight)
        self.weight = weight
        #: True if the answers carry the new weights.
        self.reads = target is not None
        #: True if any slice is sent without values.
        self.abstained = False
        #: True once the next call has begun, or the push was dropped: weights of its buckets are no longer valid.
        self.is_over = False
        #: True once the user was told that this worker was expelled during this push.
        self.told_fenced = False
        self._part = part
        self._origin = part.current.origin
        self._values = values
        self._target = target
        self._results = results
        self._on_answered = on_answered
        self._norm = norm
        self._progress = PushProgress(index, needs_all=needs_all)
        #: Numbers of the given tensors that have no gradient.
        self._absent: frozenset[int] = frozenset()
        self._waiting: list[AsyncBucket] = []
        self._failures: list[PsdistError] = []
        #: Error with which the buckets under way are being cancelled.
        self._broken: PsdistError | None = None
        self.tasks: dict[asyncio.Task[None], None] = {}
        self._changed = asyncio.Event()

    @property
    def number(self) -> int:
        """The number of the push."""
        return self.request.number

    @property
    def is_open(self) -> bool:
        """True if tensors are still missing."""
        return bool(self._progress.missing)

    @property
    def is_blank(self) -> bool:
        """True if no tensor is given, because all buckets so far have failed."""
        return len(self._progress.missing) == len(self._progress.index.layout.tensors)

    @property
    def finished(self) -> bool:
        """True if all tensors were given and all slices are answered."""
        return self._progress.finished

    @property
    def is_lost(self) -> bool:
        """True if this worker was expelled, and its next incarnation does not continue the push."""
        return self._part.current.origin is not self._origin and not self._part.is_rejoining and not self.finished

    # --- giving and sending -------------------------------------------------------------------------------------------

    async def send_whole(self, *, abstain: bool, absent: frozenset[int]) -> None:
        """Give all tensors in one bucket, and return when the push is answered.

        absent: numbers of the tensors without a gradient.
        """
        part, values = self._part, self._values
        if absent or isinstance(values, EncodedPush):  # An earlier attempt may have had other ones.
            self._leave_out(absent)
        ready = self._decide(self._progress.give_all(abstain=abstain))
        if isinstance(values, EncodedPush):
            ready = await self._encode(ready, meanwhile=True)
        if not ready.valued:
            self.request.options = replace(self.request.options, follows_writes=True)
        parts, waiting = self._parts(ready), part.waiting(push=True, reads=self.reads)
        try:
            if isinstance(values, EncodedPush) and values.is_encoding:
                # From the end of the encoding on the script only waits for the servers.
                pushing = asyncio.create_task(self._send(parts), name="psdist push")
                try:
                    await values.encoded()
                    with waiting:
                        await pushing
                finally:
                    await _end(pushing, values)
            else:
                with waiting:
                    await self._send(parts)
        except BaseException:  # This includes cancellation. Servers may still read memory that is the user's again.
            await part.shared_memory.withdraw()
            raise
        self._absorb(parts)
        self._on_answered(self)

    def choose(self, names: Sequence[str]) -> tuple[int, ...]:
        """Return the numbers of tensors that may be given. Raises as ``PushProgress.choose``."""
        return self._progress.choose(names)

    def give(self, numbers: tuple[int, ...], *, abstain: bool, absent: frozenset[int] = frozenset()) -> AsyncBucket:
        """Send the slices that these tensors complete. ``choose`` has accepted them, and their gradients are in the
        vector. absent: those of them without a gradient."""
        if absent or self._absent:
            self._leave_out(self._absent.difference(numbers) | absent)
        bucket = AsyncBucket(self, self._progress.index, numbers)
        self._waiting.append(bucket)
        self.abstained = self.abstained or abstain
        ready = self._decide(self._progress.give(numbers, abstain=abstain))
        self._update_sequence()
        if ready.valued or ready.abstaining:
            task = asyncio.create_task(self._send_bucket(bucket, ready), name="psdist bucket")
            self.tasks[task] = None
            task.add_done_callback(lambda ended: self.tasks.pop(ended, None))
        else:
            self._update()
        return bucket

    def _leave_out(self, absent: frozenset[int]) -> None:
        """Set the tensors without a gradient, in all requests that are made from now on."""
        self._absent = absent
        ranges = self._progress.index.ranges_of(absent)
        self.request.options = replace(self.request.options, absent=ranges)
        if isinstance(self._values, EncodedPush):
            self._values.leave_out(ranges)

    def _decide(self, ready: ReadySlices) -> ReadySlices:
        """Return how ``ready`` slices are sent: those from an earlier attempt as they were then."""
        if isinstance(self._values, EncodedPush):
            ready = self._values.decide(ready)
        self.abstained = self.abstained or bool(ready.abstaining)
        return ready

    async def _encode(self, ready: ReadySlices, *, meanwhile: bool = False) -> ReadySlices:
        """Encode the slices that have values. Returns the slices to send. If the codec cannot hold the values and
        ``non_finite`` is "skip", they abstain.

        meanwhile: the slices may be encoded while others are sent.
        """
        values = self._values
        if not isinstance(values, EncodedPush) or not ready.valued:
            return ready
        if meanwhile and self._norm is not None and values.start(ready.valued):
            return ready
        try:
            await values.encode(ready.valued)
        except NonFiniteGradientError:
            if self._part.current.entry.spec.non_finite == "reject":
                raise
            return self._decide(ReadySlices((), (*ready.valued, *ready.abstaining)))
        if self._norm is None:
            self._norm = await values.norm()
        return ready

    def _parts(self, ready: ReadySlices) -> list[Part]:
        """Return the requests of ``ready`` slices. ``_absorb`` adds up their answers."""
        if len(ready.valued) == self._part.slicing.count:
            return [(self.request, self._values)]
        pairs = [(ready.valued, self._values), (ready.abstaining, None)]
        return [(self.request.part(slices), values) for slices, values in pairs if slices]

    def _absorb(self, parts: Sequence[Part]) -> None:
        """Add the answers of ``parts`` to those of this push."""
        for part, _ in parts:
            if part is not self.request:
                self.request.absorb(part)
            self._progress.answer(part.versions)

    def _send(self, parts: Sequence[Part]) -> Coroutine[Any, Any, None]:
        """Return a coroutine that delivers the unanswered slices of ``parts``."""
        requests = []
        for part, values in parts:
            if part.pending or not self._part.slicing.count:
                norm, weight = self._norm or 0.0, self.weight or 1.0
                requests.append(self._part.push(part, values, norm, self._target, weight))
        return requests[0] if len(requests) == 1 else all_or_first_error(requests)

    async def _send_bucket(self, bucket: AsyncBucket, ready: ReadySlices) -> None:
        parts = self._parts(ready)
        try:
            try:
                parts = self._parts(await self._encode(ready))
                await run_in_incarnation(lambda: self._send(parts), self._rejoin, lambda: self._part.incarnation)
            finally:  # Answers that came before a failure count.
                self._absorb(parts)
            if self.is_over or self._part.current.origin is not self._origin:
                raise self.dropped()
        except asyncio.CancelledError:
            bucket.error = self._broken or ClosedError("the client was closed before the bucket was answered")
            raise
        except Exception as error:
            bucket.error = error if isinstance(error, PsdistError) else InternalError(f"a bucket failed: {error!r}")
            self._failures.append(bucket.error)
        finally:
            if bucket.error is not None:
                self._progress.take_back(bucket.numbers, [index for part, _ in parts for index in part.pending])
                self._update_sequence()
            self._update()

    async def _rejoin(self, fenced: FencedError, incarnation: int) -> bool:
        await self._part.rejoin(fenced, incarnation)
        return self._part.current.origin is self._origin

    def _update_sequence(self) -> None:
        sequence = self._part.current.sequence
        if sequence.step == self.number:
            sequence.set_given(whole=not self.is_open)

    def _update(self) -> None:
        """Complete buckets and the push after something was given, answered or failed, and wake the waiting callers."""
        for bucket in self._waiting:
            if bucket.error is None and self._progress.is_complete(bucket.slices):
                self._complete(bucket)
        self._waiting = [bucket for bucket in self._waiting if not bucket.done()]
        try:
            if self.finished:
                self._on_answered(self)
        finally:
            self._changed.set()
            self._changed = asyncio.Event()

    def _complete(self, bucket: AsyncBucket) -> None:
        """Give a bucket its new weights, or the reason that there are none. Its update was made in either case."""
        target = self._target
        try:
            bucket.weights = (
                {} if target is None else self._results.bucket_arrays(target, bucket.numbers, bucket.slices)
            )
        except Exception as error:  # No memory for a copy, say.
            text = f"the new weights of {flat_vector.join_names(bucket.names)} cannot be returned: {error!r}"
            bucket.error = error if isinstance(error, PsdistError) else InternalError(text)

    # --- waiting ---------------------------------------------------------------------------------------------------

    async def wait(self, bucket: AsyncBucket, timeout: float | None) -> Arrays:
        """See ``AsyncBucket.wait``."""
        names = flat_vector.join_names(bucket.names)
        if self.is_over and bucket.error is None:
            raise InvalidArgumentError(
                f"the new weights of {names} are not valid any more: wait for a bucket before the next call on its "
                "parameters"
            )
        timeout = time_limit(timeout)
        try:
            async with asyncio.timeout(timeout):
                waiting = self._part.waiting(push=True, reads=self.reads, limited=timeout is not None)
                with self._part.phases.call(Phase.WAIT), waiting:
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
                await self._raise(refused)  # All buckets of the push were refused with it.
            if missing := self._progress.missing_for(bucket.slices):
                raise InvalidArgumentError(
                    f"waiting for {names} would never end: {missing} must be given first, because they share slices or "
                    "are clipped together"
                )
            await self._changed.wait()

    async def finish(self) -> None:
        """Return when the whole push is answered.

        Raises InvalidArgumentError if tensors are missing, and the first failure of a bucket that was not raised yet.
        """
        while not self.finished:
            await self.raise_failure()
            if missing := self._progress.missing_names():
                raise InvalidArgumentError(
                    f"step {self.number} was begun in buckets and misses {missing}: give them by push_pull_async first"
                )
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
            await self._part.shared_memory.withdraw()
            if isinstance(error, WrittenWeightsError):
                await self._withdraw(error)
        raise copy_error(error)

    async def _withdraw(self, error: WrittenWeightsError) -> None:
        """Withdraw the push after servers refused it. All of its tensors must be given again, unless a slice has
        applied it."""
        if await self._part.withdraw_push(error):
            for bucket in self._waiting:
                bucket.error = bucket.error or error
            self._waiting.clear()
            self._progress.restart()
            self._update_sequence()
            self._update()
        self.update_options()

    def update_options(self) -> None:
        """Push tensors that are given from now on with the script's newest options."""
        options = self._part.begin_push(abstains=not self.weight).options
        self.request.options = replace(options, absent=self.request.options.absent)

    async def _end_tasks(self) -> None:
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def dropped(self) -> FencedError:
        """Return the error for the user of a worker that was expelled during this push, and rejoins without it."""
        return FencedError(
            f"step {self.number} was dropped, with all of its buckets: {self._part.expulsion.reason}. "
            "Begin the next one with new gradients: this worker takes part again"
        )

    async def drop(self) -> None:
        """End the buckets under way: this worker was expelled, and rejoins without this push."""
        self.is_over, self._broken = True, self.dropped()
        await self._end_tasks()
        for bucket in self._waiting:
            bucket.error = bucket.error or self._broken
        self._waiting.clear()
        self._changed.set()

    async def close(self) -> None:
        """Cancel the buckets under way."""
        under_way = bool(self.tasks)
        await self._end_tasks()
        if under_way or self._failures:
            await self._part.shared_memory.withdraw()  # The memory is the user's again, as in _raise.


async def _end(pushing: asyncio.Task[None], values: EncodedPush) -> None:
    """End a task that sent slices while they were encoded."""
    pushing.cancel()
    try:
        await until_done(pushing)
    finally:  # If this is cancelled, too: the errors of both tasks are retrieved and released.
        if not pushing.cancelled():
            pushing.exception()
        values.end()
