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
from typing import Any, NoReturn

from psdist.client.core import partition
from psdist.client.core.buckets import ReadySlices, SliceIndex, StepPlan
from psdist.client.core.partition import Arrays, Flat
from psdist.client.core.push_sequence import PendingRequest
from psdist.client.exchange import Exchange
from psdist.client.session.cluster_view import again
from psdist.client.transport.buffer_pool import PullTarget
from psdist.client.transport.data_path import all_or_first_error
from psdist.errors import (
    ClosedError,
    FencedError,
    InternalError,
    InvalidArgumentError,
    PsdistError,
    WaitTimeoutError,
)


class AsyncBucket:
    """Tensors whose gradients were given together. Made by ``AsyncParameters.push_pull_async``; awaiting it gives their
    new weights."""

    def __init__(self, step: BucketStep, numbers: tuple[int, ...], slices: frozenset[int]) -> None:
        tensors = step.cut.layout.tensors
        #: The tensors' names, in the layout's order.
        self.names: tuple[str, ...] = tuple(tensors[number].name for number in numbers)
        self.numbers = numbers
        self.slices = slices
        self.weights: Arrays | None = None
        self.error: PsdistError | None = None
        self._step = step

    def done(self) -> bool:
        """Whether ``wait`` would not wait: the weights are here, or the bucket failed."""
        return self.weights is not None or self.error is not None

    def __await__(self) -> Generator[Any, None, Arrays]:
        return self.wait().__await__()

    async def wait(self, timeout: float | None = None) -> Arrays:
        """The new weights of the bucket's tensors by name: read-only arrays, as by ``pull(copy=False)``.

        Raises WaitTimeoutError after ``timeout`` seconds (waiting again goes on), InvalidArgumentError where it would
        wait for ever: the slices of these tensors hold parts of others, which were not given; MutualWaitError
        (``Client`` alone) where the others wait for this worker elsewhere; FencedError where the step was dropped:
        begin the next one; and whatever the sending failed with. After that, give the bucket's tensors again, and those
        of the buckets that were under way with it.
        """
        return await self._step.wait(self, timeout)

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done() else "under way"
        return f"<{type(self).__name__} {', '.join(self.names[:4])}{', ...' * (len(self.names) > 4)}: {state}>"


class BucketStep:
    """One step that is given bucket by bucket.

    vector: the gradient; given tensors lie in it, and are not written again before their slices are answered.
    on_finished: called once when all is given and answered, with the whole step and whether any of it abstained.
    """

    def __init__(
        self,
        exchange: Exchange,
        cut: SliceIndex,
        vector: Flat,
        arrival: PullTarget,
        converted: Arrays,
        on_finished: Callable[[PendingRequest, bool], None],
        *,
        whole: bool,
    ) -> None:
        self.cut = cut
        #: Set by the next call on the parameters: what the buckets have is not valid any more.
        self.over = False
        #: Whether the user knows that this worker was expelled in this step.
        self.told_fenced = False
        #: Whether this worker was expelled, and the step does not go on in its next incarnation.
        self.lost = False
        self._exchange = exchange
        self._vector = vector
        self._arrival = arrival
        self._converted = converted
        self._on_finished = on_finished
        self._request = exchange.session.begin_push()
        self._plan = StepPlan(cut, whole=whole)
        self._waiting: list[AsyncBucket] = []
        self._failures: list[PsdistError] = []
        #: What ends the buckets under way, while it does.
        self._broken: PsdistError | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._abstained = False
        self._changed = asyncio.Event()

    # --- giving ---

    @property
    def open(self) -> bool:
        """Whether tensors are still to be given."""
        return bool(self._plan.missing)

    def choose(self, names: Sequence[str]) -> tuple[int, ...]:
        """The numbers of tensors that may be given, or the error that says why not. See ``StepPlan.choose``."""
        return self._plan.choose(names)

    def give(self, numbers: tuple[int, ...], *, abstain: bool) -> AsyncBucket:
        """Sends what these tensors make ready; their gradients are in the vector. ``choose`` let them pass."""
        bucket = AsyncBucket(self, numbers, self.cut.slices_of_all(numbers))
        self._waiting.append(bucket)
        self._abstained = self._abstained or abstain
        ready = self._plan.give(numbers, abstain=abstain)
        self._tell_session()
        if ready.valued or ready.abstaining:
            task = asyncio.create_task(self._send(bucket, numbers, ready), name="psdist bucket")
            self._tasks[task] = None
            task.add_done_callback(self._forget)
        else:
            self._notice()
        return bucket

    def _tell_session(self) -> None:
        session = self._exchange.session
        if session.step == self._request.number:
            session.partial, session.given = self.open, not self.open

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)

    async def _send(self, bucket: AsyncBucket, numbers: tuple[int, ...], ready: ReadySlices) -> None:
        parts = [(self._request.part(slices), flat) for slices, flat in self._loads(ready)]
        try:
            self.lost = not await self._until_answered(parts) or self.lost
            if self.lost:
                raise self.dropped()
        except asyncio.CancelledError:
            bucket.error = self._broken or ClosedError("the client was closed before the bucket was answered")
            raise
        except Exception as error:
            bucket.error = error if isinstance(error, PsdistError) else InternalError(f"a bucket failed: {error!r}")
            self._failures.append(bucket.error)
        finally:
            for part, _ in parts:
                self._request.absorb(part)
                self._plan.answer(part.versions)
            if bucket.error is not None:
                self._plan.take_back(numbers, [index for part, _ in parts for index in part.pending])
                self._tell_session()
            self._notice()

    async def _until_answered(self, parts: Sequence[tuple[PendingRequest, Flat | None]]) -> bool:
        """Sends ``parts``, again in another incarnation if the step goes on there. Returns whether it does."""
        while any(part.pending for part, _ in parts):
            incarnation = self._exchange.incarnation
            try:
                await all_or_first_error(
                    [self._exchange.push_pull(part, flat, 0.0, self._arrival) for part, flat in parts if part.pending]
                )
            except FencedError as error:
                if not await self._exchange.rejoin(error, incarnation):
                    return False
        return True

    def _loads(self, ready: ReadySlices) -> list[tuple[tuple[int, ...], Flat | None]]:
        """Slices, and the vector that their gradient is in (None: they abstain)."""
        loads: list[tuple[tuple[int, ...], Flat | None]] = [(ready.valued, self._vector), (ready.abstaining, None)]
        return [load for load in loads if load[0]]

    def _notice(self) -> None:
        """Something was given, answered or failed: completes buckets and the step, and wakes who waits."""
        for bucket in self._waiting:
            if bucket.error is None and self._plan.is_complete(bucket.slices):
                vector = self._arrival.vector(bucket.slices)
                bucket.weights = partition.views(self.cut.layout, bucket.numbers, vector, self._converted)
        self._waiting = [bucket for bucket in self._waiting if not bucket.done()]
        if self._plan.finished:
            self._on_finished(self._request, self._abstained)
        self._changed.set()
        self._changed = asyncio.Event()

    # --- waiting ---

    async def wait(self, bucket: AsyncBucket, timeout: float | None) -> Arrays:
        """See ``AsyncBucket.wait``."""
        names = partition.join_names(bucket.names)
        if self.over and bucket.error is None:
            raise InvalidArgumentError(
                f"the new weights of {names} are not valid any more: wait for a bucket before the next call on its "
                "parameters"
            )
        try:
            async with asyncio.timeout(timeout):
                with self._exchange.waiting(push=True, reads=True, limited=timeout is not None):
                    await self._until_done(bucket, names)
        except TimeoutError:
            raise WaitTimeoutError(f"the new weights of {names} did not come within {timeout:g} s") from None
        if bucket.error is not None:
            self.told_fenced = self.told_fenced or isinstance(bucket.error, FencedError)
            await self._tell(bucket.error)
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

        Raises InvalidArgumentError if tensors are missing, and the failure of a bucket that was not told yet.
        """
        while not self._plan.finished:
            await self.raise_failure()
            if missing := self._plan.missing_names():
                raise InvalidArgumentError(
                    f"step {self._request.number} was begun in buckets and misses {missing}: give them by "
                    "push_pull_async first"
                )
            await self._changed.wait()

    async def raise_failure(self) -> None:
        """Raises what a bucket failed with, if nobody was told yet."""
        if self._failures:
            await self._tell(self._failures[0])

    async def _tell(self, error: PsdistError) -> NoReturn:
        """Raises the error of a bucket. The user may write to its memory then, which slices of other buckets may lie in
        too; so those under way end with the same error, and what a server may read still is not shared any more."""
        if error in self._failures:
            self._broken = error
            await self._end_tasks()
            self._broken = None
            self._failures.clear()
            self._exchange.shared_memory.renew()
        raise again(error)

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def number(self) -> int:
        """The step's number."""
        return self._request.number

    @property
    def finished(self) -> bool:
        """Whether all was given and answered."""
        return self._plan.finished

    def dropped(self) -> FencedError:
        """What the user is told where this worker was expelled in this step, and takes part again without it."""
        return FencedError(
            f"step {self._request.number} was dropped, with all of its buckets: {self._exchange.expulsion.reason}. "
            "Begin the next one with new gradients: this worker takes part again"
        )

    async def drop(self) -> None:
        """This worker was expelled, and takes part again without this step: buckets under way fail."""
        self.over, self._broken = True, self.dropped()
        await self._end_tasks()
        for bucket in self._waiting:
            bucket.error = bucket.error or self._broken
        self._waiting.clear()
        self._changed.set()

    async def close(self) -> None:
        """Ends what is under way."""
        under_way = bool(self._tasks)
        await self._end_tasks()
        if under_way:
            self._exchange.shared_memory.renew()  # the memory is the user's again, as in _tell
