"""The pushes of one parameter set in their order, in whichever incarnation of this worker they are answered.

``AsyncParameters`` makes them within ``call``. A gradient is gathered and sent; the next call ends the push before it.
Work that ends with FencedError runs again after this worker has rejoined.

Invariants: one call runs at a time. A push that does not continue is counted as dropped once, and reported.

Not here: one push (``push``), its number (``push_sequence``), requests (``participation``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike

from psdist.client.core import flat_vector
from psdist.client.core.flat_vector import Flat
from psdist.client.core.push_sequence import SliceIndex
from psdist.client.encoding import EncodedPush, Encoding
from psdist.client.gradients import GradientVector, StaleBufferCheck
from psdist.client.participation import Participation
from psdist.client.push import AsyncBucket, Gradient, Push
from psdist.client.session.membership import DropCounter, run_in_incarnation
from psdist.client.transport.buffers import PullDestination, PullTarget, Results
from psdist.consistency import BSP, SSP, check_weight
from psdist.errors import FencedError, InvalidArgumentError, WrittenWeightsError
from psdist.monitoring.metrics import Phase
from psdist.monitoring.spans import SpanKind
from psdist.off_loop import in_thread, off_loop
from psdist.settings import launcher_reports
from psdist.types import WORDS

if TYPE_CHECKING:
    from psdist.device.memory import DeviceVector

T = TypeVar("T")

_NO_TENSORS: frozenset[int] = frozenset()


@dataclass(slots=True)
class PushCounters:
    """Counters of one handle's pushes and pulls. See ``Statistics``."""

    pushes: int = 0
    pulls: int = 0
    abstained: int = 0
    ignored: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0


@dataclass(slots=True)
class _Gradients:
    """The gradients of a whole push, over all incarnations in which it is made.

    absent: numbers of the tensors without a gradient.
    gathered: the checked gradient and its norm; None before the gradient was read for the first time.
    """

    given: Mapping[str, ArrayLike]
    weight: float
    absent: frozenset[int]
    gathered: tuple[Flat | DeviceVector | None, float] | None = None


class PushOrder:
    """Pushes of one handle. drops: counts and reports dropped pushes."""

    def __init__(self, part: Participation, drops: DropCounter) -> None:
        self.counters = PushCounters()
        self.drops = drops
        self._part = part
        spec, options, layout = part.current.entry.spec, part.options, part.layout
        self._spec = spec
        clips, consistency = spec.optimizer.max_grad_norm > 0, spec.consistency
        #: True if servers need the norm of the whole gradient with each push.
        self._needs_norm = clips and not isinstance(consistency, BSP)
        #: Slices are answered only with the whole push in BSP that clips, and in SSP if a read waits for all others.
        self._needs_all = clips or (isinstance(consistency, SSP) and consistency.staleness == 0)
        #: Compresses the gradients; None if nothing does.
        self.encoding = Encoding.for_codec(options.codec, part)
        # With a codec servers read decoded gradients, so that memory cannot be the user's.
        shared = (lambda: part.shared_memory.gradients) if self.encoding is None else lambda: None
        dtype = options.cast.dtype if layout.dtype == "float32" else layout.dtype
        self.gradients = GradientVector(
            layout, dtype, spec.non_finite, shared, StaleBufferCheck(spec.name),
            lambda: self.encoding is not None and self.encoding.works_on_device,
            casts_on_device=self.encoding is None and options.cast.dtype != "float32" and not self._needs_norm,
        )  # fmt: skip
        part.shared_memory.before_replaced = self.gradients.unregister
        memory, has_differences = part.shared_memory, bool(spec.pull_compression)
        self.results = Results(
            layout, part.slicing, options.pull_dtype, lambda: memory.weights, has_differences=has_differences
        )
        self._index = SliceIndex(layout, part.slicing)
        #: The push in buckets, until the call after its end.
        self._push: Push | None = None
        self._calling = asyncio.Lock()

    @asynccontextmanager
    async def call(self, phase: Phase | None = None) -> AsyncIterator[None]:
        """Enter a call of the user; all other methods are called within one. phase: first phase of a call that is
        timed."""
        with self._part.phases.call(phase) if phase is not None else nullcontext():
            async with self._calling:
                if self._push is not None and self._push.is_lost:
                    await self._drop_push()
                if self.encoding is not None:
                    await self.retry(self.encoding.keep_state)
                if self._part.is_outdated:
                    self.results.discard()
                if not self._part.writes.is_empty:
                    self._drop_overdue_write()
                yield
                if not self._part.writes.is_empty:
                    self._drop_overdue_write()

    def _drop_overdue_write(self) -> None:
        """Drop weights that the script wrote before a push that this worker no longer makes, and report that."""
        part = self._part
        if (number := part.writes.take_overdue(part.current)) is None:
            return
        reason = part.expulsion.reason or "the other workers made that step without this one"
        self.drops.add_write(
            f"weights that the script wrote before push {number} of {part.name!r} were dropped: {reason}; the next "
            f"push is {part.current.sequence.step}",
            part.expulsion,
        )

    @property
    def open_push(self) -> Push | None:
        """The push in buckets that misses tensors; None if no push does."""
        return self._push if self._push is not None and self._push.is_open else None

    async def begin(self) -> None:
        """Prepare for a request: wait until the push in buckets is answered, and end it."""
        await self._part.open()
        if self._push is not None:
            await self.end_push()

    async def end_push(self) -> None:
        """Wait until the push in buckets is answered, and end it. Raises InvalidArgumentError if it misses tensors."""
        if self._push is not None:
            await self._push.finish()
            self._push.is_over = True
            self._push = None

    async def pull_into(self, target: PullTarget) -> None:
        """Pull the weights into ``target``."""
        with self._part.waiting(push=False, reads=True):
            await self._part.pull(target)
        self.counters.pulls += 1

    async def close(self) -> None:
        """Cancel calls under way, and return shared memory."""
        if self._push is not None:
            await self._push.close()
        self.results.discard()
        self.gradients.unregister()  # Before the pages of shared memory are replaced.
        await self._part.close()

    # --- a whole push -------------------------------------------------------------------------------------------------

    def push(
        self,
        gradients: Mapping[str, ArrayLike],
        weight: float,
        absent: Iterable[str] = (),
        destination: PullDestination | None = None,
    ) -> Coroutine[Any, Any, PullTarget | None]:
        """Return a coroutine that makes one push, again in the next incarnation if it continues there.

        weight: weight of the gradient in the mean of its step; 0 contributes nothing.
        absent: names of the tensors without a gradient.
        destination: asks for the new weights. The coroutine returns their place then, or None if the push was dropped.
        """
        self._part.check_member()
        if type(weight) is not float or weight != 1.0:  # 1.0 is allowed in every mode.
            weight = check_weight(weight, self._spec.consistency)
        if self._part.is_skipping:
            return self._skip_push()
        given = _Gradients(gradients, weight, self._index.named(absent) if absent else _NO_TENSORS)
        origin = self._part.current.origin

        async def rejoin_or_drop(fenced: FencedError, incarnation: int) -> bool:
            number = self._part.current.sequence.step
            await self._rejoin(fenced, incarnation)
            if continues := self._part.current.origin is origin:
                return continues
            await self._drop_push()
            self._drop(number)
            return False

        attempt = partial(self._push_once, given, destination)
        return run_in_incarnation(attempt, rejoin_or_drop, lambda: self._part.incarnation)

    async def _push_once(self, given: _Gradients, destination: PullDestination | None) -> PullTarget | None:
        """Make a push in this incarnation. Returns where the new weights are, if they were asked for."""
        part = self._part
        await part.shared_memory.share_gradients()
        await self.begin()
        target = self.results.target(destination) if destination is not None else None
        if given.gathered is None:
            waits = self.gradients.waits_for_device(given.given)
            with part.phases.work(SpanKind.GATHER, part.name, part.current.sequence.step):
                given.gathered = await off_loop(part.layout.total, partial(self._gather, given), waits=waits)
        if part.current.sequence.before_first_step:
            await self._reach_first_step()
        part.take_state()
        flat, norm = given.gathered
        try:
            values = await self._values(flat)
            push = Push(
                part, self._index, values, given.weight, target, self.results, self._on_answered,
                norm=None if self._needs_norm and self.encoding is not None else norm,
            )  # fmt: skip
            await push.send_whole(abstain=flat is None, absent=given.absent)
        except BaseException as error:
            if self.encoding is not None:
                self.encoding.discard_unsent()
            if not isinstance(error, WrittenWeightsError) or await part.withdraw_push(error):
                raise
            return await self._push_once(given, destination)
        return target

    async def _values(self, flat: Flat | DeviceVector | None) -> Gradient | None:
        """Return a gathered gradient in the form in which it is sent."""
        if self.encoding is not None:
            return await self.encoding.begin(flat)
        if flat is None or isinstance(flat, np.ndarray):
            return flat
        return await in_thread(partial(self.gradients.cast, flat, self._part.slicing))

    def _gather(self, given: _Gradients) -> tuple[Flat | DeviceVector | None, float]:
        """Return the checked gradient and, if the servers need it, its norm; None to abstain."""
        layout = self._part.layout
        flat = self.gradients.gather(given.given, self._part.current.sequence.step, given.absent)
        if not given.weight:
            return None, 0.0
        if not isinstance(flat, np.ndarray) or not self._needs_norm or self.encoding is not None:
            return flat, 0.0
        slice_values = self._part.slicing.slice_elements // WORDS[layout.dtype]
        return flat, flat_vector.grad_norm(flat_vector.values_of(layout, flat), slice_values)

    async def _reach_first_step(self) -> None:
        """Wait until the others are at the first step of this worker, if it joined and pushes without a pull."""
        await self.pull_into(self.results.target(PullDestination(None, copy=False)))

    def _on_answered(self, push: Push) -> None:
        """Retire a push that is given and answered."""
        request, part, counters = push.request, self._part, self.counters
        if self.encoding is not None:
            self.encoding.end_push()
        part.phases.end_step(part.name, request.number)
        part.end_push(request, seen=push.reads)
        self.drops.not_dropped()
        step = request.number + 1 if isinstance(self._spec.consistency, BSP) else None
        launcher_reports.note_step(part.name, step, abstained=push.abstained)
        counters.pushes += 1
        counters.pulls += push.reads
        counters.abstained += push.abstained
        counters.ignored += request.ignored
        counters.staleness_mean = request.staleness_mean
        counters.staleness_max = request.staleness_max

    # --- a push in buckets --------------------------------------------------------------------------------------------

    async def give_bucket(
        self, gradients: Mapping[str, ArrayLike] | Iterable[str], weight: float, absent: Iterable[str], *, reads: bool
    ) -> AsyncBucket:
        """See ``AsyncParameters.push_pull_async`` and, for ``reads=False``, ``push_async``."""
        part = self._part
        part.check_member()
        weight = check_weight(weight, self._spec.consistency)
        if part.is_skipping and self.open_push is None:
            await self._skip_push()
            raise FencedError(f"a step of {part.name!r} was dropped: {part.expulsion.reason}")
        if self._needs_norm:
            raise InvalidArgumentError(
                f"{part.name!r} clips by max_grad_norm={self._spec.optimizer.max_grad_norm:g} without common steps: "
                "the norm of the whole gradient is needed first, so use push_pull"
            )
        push = await self.retry(lambda: self._current_push(gradients, weight, reads))
        if reads != push.reads:
            raise InvalidArgumentError(
                f"a step of {part.name!r} was begun by push{'_pull' * push.reads}_async: give all of its buckets by "
                "that"
            )
        if weight != push.weight:
            raise InvalidArgumentError(
                f"weight={weight:g} in a step that was begun with weight={push.weight:g}: a gradient has one weight"
            )
        self.gradients.check_bucket(gradients)
        numbers = push.choose(list(gradients))
        missing = self._index.named(absent)
        if stray := missing.difference(numbers):
            raise InvalidArgumentError(
                f"tensor {part.layout.tensors[min(stray)].name!r} has no gradient, and is not in this bucket: name it "
                "in the bucket, too"
            )
        is_given = await self._gather_bucket(numbers, gradients, missing) and weight > 0
        if push.is_lost:  # Meanwhile, as another of its buckets has found out.
            await self._drop_push()
            raise push.dropped()
        bucket = push.give(numbers, abstain=not is_given, absent=missing)
        self._push = push
        if not push.is_open:  # No more gradients are written.
            part.take_state()
            self.gradients.on_last_bucket(gradients, push.number)
            await part.shared_memory.share_gradients()
        return bucket

    async def _gather_bucket(
        self, numbers: tuple[int, ...], gradients: Mapping[str, ArrayLike] | Iterable[str], absent: frozenset[int]
    ) -> bool:
        """Gather the gradients of these tensors. Returns False to abstain."""
        part, vector, is_given = self._part, self.gradients, True
        with part.phases.work(SpanKind.GATHER, part.name, part.current.sequence.step):
            if vector.waits_for_device(gradients):
                is_given = await in_thread(lambda: vector.gather_there(numbers, gradients, absent))
            elements = vector.elements_gathered(numbers)
            here = await off_loop(elements, lambda: vector.gather_here(numbers, gradients, absent))
        return here and is_given

    async def _current_push(self, gradients: object, weight: float, reads: bool) -> Push:
        """Return the push of the next bucket, ``gradients``. A new push has this weight, and is stored with its first
        bucket."""
        await self._part.open()
        if self._push is not None:
            await self._push.raise_failure()
            if self._push.is_open:
                return self._push
        await self.end_push()
        if self._part.current.sequence.before_first_step:
            await self._reach_first_step()
        begin = partial(self.gradients.begin_step, gradients)
        vector = await in_thread(begin) if self.gradients.waits_for_device(gradients) else begin()
        values = vector if self.encoding is None else await self.encoding.begin(vector)
        assert isinstance(values, np.ndarray | EncodedPush)
        target = self.results.target(PullDestination(None, copy=False)) if reads else None
        return Push(
            self._part, self._index, values, weight, target, self.results, self._on_answered, needs_all=self._needs_all
        )

    # --- another incarnation ------------------------------------------------------------------------------------------

    async def retry(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``, in this incarnation or a later one. A push in buckets that does not continue
        there is dropped. Raises FencedError if the user was not told of that yet."""
        origin = self._part.current.origin

        async def rejoin(fenced: FencedError, incarnation: int) -> bool:
            nonlocal origin
            await self._rejoin(fenced, incarnation)
            before, origin = origin, self._part.current.origin
            if origin is not before:
                await self._drop_push()
            if self.encoding is not None:  # A push that failed earlier, and was not made again, may be dropped.
                self.encoding.warn_of_lost()
            return True

        result = await run_in_incarnation(work, rejoin, lambda: self._part.incarnation)
        return cast(T, result)

    async def _rejoin(self, fenced: FencedError, incarnation: int) -> None:
        await self._part.rejoin(fenced, incarnation)
        self.results.discard()

    async def _skip_push(self) -> None:
        """Drop the push that the script makes next, because its iteration has lost a push before it."""
        await self.retry(self.begin)
        self.results.discard()
        self._drop(self._part.current.sequence.step)
        await self._drop_push()

    async def _drop_push(self) -> None:
        """Abandon the push in buckets, if there is one. Raises FencedError if the user was not told yet."""
        push, self._push = self._push, None
        if push is not None:
            await push.drop()
        if self.encoding is not None:
            self.encoding.drop_push()
        if push is not None and not push.finished:
            self._drop(push.number)
            if not push.told_fenced:
                raise push.dropped()

    def _drop(self, number: int) -> None:
        """Count the push of this number as dropped. Raises PushDroppedError according to ``on_drop``."""
        part = self._part
        part.on_dropped()
        sequence = part.current.sequence
        what = "step" if sequence.synchronous else "push"
        goes_on = f"this worker takes part again{f' from step {sequence.first_step}' if sequence.synchronous else ''}"
        lost = self.encoding.take_lost() if self.encoding is not None else ""
        title = f"{what} {number} of {part.name!r}"
        self.drops.add(f"{title} was dropped: {part.expulsion.reason}; {lost}{goes_on}", part.expulsion)
