"""The steps of one handle: every call of the user, in whichever incarnation of this worker it is answered.

``AsyncParameters`` defines the calls. Here they are carried out: the gradient is gathered, the push is sent, and the
weights arrive. A call that ends with FencedError runs again after this worker has rejoined.

Invariants: one call runs at a time. A push that does not continue is counted as dropped once, and reported.

Not here: numbers (``push_sequence``, ``participation``), requests (``server_access``), sending a step (``step``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike

from psdist.client.core import flat_vector
from psdist.client.core.buckets import SliceIndex, StepPlan
from psdist.client.core.flat_vector import Flat
from psdist.client.core.push_sequence import PendingRequest
from psdist.client.core.written_weights import WrittenWeights
from psdist.client.encoding import EncodedPush, Encoding
from psdist.client.gradients import GradientVector
from psdist.client.participation import Participation
from psdist.client.results import Results, Wanted
from psdist.client.server_access import ServerAccess
from psdist.client.session.membership import DropCounter, run_in_incarnation
from psdist.client.stale_buffers import StaleBufferCheck
from psdist.client.step import AsyncBucket, BucketStep, Gradient, PushStep, StepState
from psdist.client.transport.buffers import PullTarget
from psdist.consistency import BSP, SSP, check_weight
from psdist.device.device import device_number
from psdist.errors import FencedError, InvalidArgumentError, NotMemberError, WrittenWeightsError
from psdist.metrics.phases import Phase
from psdist.off_loop import in_thread, off_loop
from psdist.settings import launcher_reports
from psdist.tracing.spans import SpanKind
from psdist.types import WORDS, Layout, ParametersSpec

if TYPE_CHECKING:
    from psdist.compression.device.memory import DeviceVector

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CompressionStatistics:
    """Effect of a codec on the gradients of one handle.

    ratio: bytes of the gradients as float32, divided by their encoded bytes.
    residual_norm: L2 norm of the residual, which is added to the next gradient.
    choice: with ``compression="auto"``, the codec that was chosen, and why.
    encodes_on_device: True if gradients in the memory of a CUDA device are encoded there, and only payloads are copied
        to the host.
    """

    ratio: float = 1.0
    residual_norm: float = 0.0
    choice: str = ""
    encodes_on_device: bool = False


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of one handle since it was made.

    pushes, pulls: completed calls, and steps in buckets.
    abstained: pushes without the gradient, or without a part of it, because the weight was 0, or because it held NaN or
        Inf and ``non_finite`` is "skip".
    ignored: slices whose contribution was not used, because it was a duplicate or arrived after its step was closed.
    resent: slices that were sent again after a break.
    dropped: pushes that were dropped because this worker had been expelled, or the run rolled back to a snapshot.
    resumed: pushes and steps in buckets that were under way when this worker was expelled, and continued in its next
        incarnation.
    rolled_back: rollbacks of the parameters to a snapshot.
    staleness_mean, staleness_max: over the slices of the last push, in versions.
    push_bytes, pull_bytes: payloads only, including those in shared memory.
    compression: effect of the codec on the gradients.
    transport: "shm", "tcp" or "grpc", or "mixed" if it depends on the server.
    transports: by server: "shm", or "tcp: " or "grpc: " and why no transport preferred to it.
    """

    pushes: int = 0
    pulls: int = 0
    abstained: int = 0
    ignored: int = 0
    resent: int = 0
    dropped: int = 0
    resumed: int = 0
    rolled_back: int = 0
    push_bytes: int = 0
    pull_bytes: int = 0
    compression: CompressionStatistics = field(default_factory=CompressionStatistics)
    staleness_mean: float = 0.0
    staleness_max: int = 0
    transport: str = "grpc"
    transports: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _WholePush:
    """A push of a whole gradient, over all incarnations in which it is made.

    absent: numbers of the tensors without a gradient.
    gathered: the checked gradient and its norm; None before the gradient was read for the first time.
    """

    gradients: Mapping[str, ArrayLike]
    weight: float
    wanted: Wanted | None
    absent: frozenset[int] = frozenset()
    gathered: tuple[Flat | DeviceVector | None, float] | None = None


@dataclass(slots=True)
class StepCounters:
    """Counters of one handle's steps. See ``Statistics``."""

    pushes: int = 0
    pulls: int = 0
    abstained: int = 0
    ignored: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0


class Steps:
    """The calls of one handle. drops: counts and reports dropped pushes."""

    def __init__(self, servers: ServerAccess, layout: Layout, drops: DropCounter) -> None:
        self.counters = StepCounters()
        self._spec: ParametersSpec = servers.participation.entry.spec
        self._layout = layout
        self._clips = self._spec.optimizer.max_grad_norm > 0
        #: True if servers need the norm of the whole gradient with each push.
        self._needs_norm = self._clips and not isinstance(self._spec.consistency, BSP)
        self._servers = servers
        self._participation = servers.participation
        #: Compresses the gradients; None if nothing does.
        self.encoding = Encoding.for_codec(servers.options.codec, layout, self._participation)
        # With a codec servers read decoded gradients, so that memory cannot be the user's.
        shared = (lambda: servers.shared_memory.gradients) if self.encoding is None else lambda: None
        dtype = servers.options.cast.dtype if layout.dtype == "float32" else layout.dtype
        self.gradients = GradientVector(
            layout, dtype, self._spec.non_finite, shared, StaleBufferCheck(self._spec.name),
            lambda: self.encoding is not None and self.encoding.works_on_device,
            casts_on_device=self.encoding is None and servers.options.cast.dtype != "float32" and not self._needs_norm,
        )  # fmt: skip
        servers.shared_memory.before_replaced = self.gradients.unregister
        self._results = Results(layout, servers)
        self._index = SliceIndex(layout, servers.slicing)
        #: The step in buckets, until the call after its end.
        self._bucket_step: BucketStep | None = None
        self._calling = asyncio.Lock()
        self.drops = drops

    @asynccontextmanager
    async def call(self, phase: Phase | None = None) -> AsyncIterator[None]:
        """Enter a call of the user; all other methods are called within one. phase: first phase of a call that is
        timed."""
        with self._servers.phases.call(phase) if phase is not None else nullcontext():
            async with self._calling:
                if self._bucket_step is not None and self._bucket_step.state is StepState.LOST:
                    await self._drop_step()
                if self.encoding is not None:
                    await self.retry(self.encoding.keep_state)
                if self._participation.is_outdated:
                    self._results.discard()
                _drop_overdue_write(self._servers, self.drops)
                yield
                _drop_overdue_write(self._servers, self.drops)

    # --- calls --------------------------------------------------------------------------------------------------------

    async def pull(self, wanted: Wanted) -> dict[str, Any]:
        """See ``AsyncParameters.pull``."""

        async def pull_once() -> PullTarget:
            await self._begin()
            target = self._results.target(wanted)
            await _pull_into(target, self._servers, self.counters)
            self._participation.is_outdated = False
            return target

        return await self.result(await self.retry(pull_once), wanted)

    def push(
        self,
        gradients: Mapping[str, ArrayLike],
        weight: float,
        wanted: Wanted | None = None,
        absent: Iterable[str] = (),
    ) -> Coroutine[Any, Any, PullTarget | None]:
        """Return a coroutine that makes one push, again in the next incarnation if it continues there.

        weight: weight of the gradient in the mean of its step; 0 contributes nothing.
        wanted: asks for the new weights. Then the coroutine returns their place, or None if the push was dropped.
        absent: names of the tensors without a gradient.
        """
        check_member(self._participation)
        weight = check_weight(weight, self._spec.consistency)
        if self._participation.is_skipping:
            return self._drop_step(skips=True)
        push_once = partial(self._push_once, _WholePush(gradients, weight, wanted, self._index.named(absent)))
        return run_in_incarnation(push_once, self._rejoin_or_drop, lambda: self._participation.incarnation)

    async def result(self, target: PullTarget, wanted: Wanted) -> dict[str, Any]:
        """Return the arrays for the user once all weights have arrived in ``target``."""
        waits = wanted.there is not None
        return await off_loop(self._layout.total, lambda: self._results.arrays(target, wanted), waits=waits)

    async def give_bucket(
        self,
        gradients: Mapping[str, ArrayLike] | Iterable[str],
        weight: float,
        absent: Iterable[str] = (),
        *,
        reads: bool = True,
    ) -> AsyncBucket:
        """See ``AsyncParameters.push_pull_async`` and, for ``reads=False``, ``push_async``."""
        check_member(self._participation)
        weight = check_weight(weight, self._spec.consistency)
        if self._participation.is_skipping and (self._bucket_step is None or not self._bucket_step.open):
            await self._drop_step(skips=True)
            raise FencedError(f"a step of {self._participation.name!r} was dropped: {self._servers.expulsion.reason}")
        if self._needs_norm:
            raise InvalidArgumentError(
                f"{self._participation.name!r} clips by max_grad_norm={self._spec.optimizer.max_grad_norm:g} without "
                "common steps: the norm of the whole gradient is needed first, so use push_pull"
            )
        step = await self.retry(lambda: self._current_step(gradients, weight, reads))
        if reads != step.reads:
            raise InvalidArgumentError(
                f"a step of {self._participation.name!r} was begun by push{'_pull' * step.reads}_async: give all of "
                "its buckets by that"
            )
        if weight != step.weight:
            raise InvalidArgumentError(
                f"weight={weight:g} in a step that was begun with weight={step.weight:g}: a gradient has one weight"
            )
        self.gradients.check_bucket(gradients)
        numbers = step.choose(list(gradients))
        missing = self._index.named(absent)
        if stray := missing.difference(numbers):
            raise InvalidArgumentError(
                f"tensor {self._layout.tensors[min(stray)].name!r} has no gradient, and is not in this bucket: name it "
                "in the bucket, too"
            )
        is_given = weight > 0
        with self._servers.work(SpanKind.GATHER):
            if self.gradients.waits_for_device(gradients):
                there = await in_thread(lambda: self.gradients.gather_there(numbers, gradients, missing))
                is_given = there and is_given
            elements = self.gradients.elements_gathered(numbers)
            here = await off_loop(elements, lambda: self.gradients.gather_here(numbers, gradients, missing))
            is_given = here and is_given
        if step.state is StepState.LOST:  # Meanwhile, as another of its buckets has found out.
            await self._drop_step()
            raise step.dropped()
        bucket = step.give(numbers, abstain=not is_given, absent=missing)
        if not step.open:
            self._participation.take_state()
            self.gradients.on_last_bucket(gradients, step.number)
        self._bucket_step = step
        if not step.open:  # No more gradients are written.
            await self._servers.shared_memory.share_gradients()
        return bucket

    async def assign(self, values: Mapping[str, ArrayLike] | None) -> None:
        """See ``AsyncParameters.assign``."""
        check_member(self._participation)
        if values is not None:
            self._spec.check_assignable()
        participation, before = self._participation, self._participation.current
        step = self._bucket_step if self._bucket_step is not None and self._bucket_step.open else None
        if step is None:
            await self.retry(self._begin)
        elif not step.is_blank:
            raise InvalidArgumentError(
                f"weights of {self._participation.name!r} are written in the middle of step {step.number}: "
                "gradients of it were pushed already. Write before its first gradient"
            )
        if participation.sequence.partly_applied:
            raise InvalidArgumentError(
                f"some slices of {participation.name!r} have applied step {participation.sequence.step} with the "
                "weights that were assigned before: push its gradient again first"
            )
        written = None
        if values is not None:
            earlier = participation.writes.unrefused(participation.current)
            written = await off_loop(self._layout.total, lambda: WrittenWeights.copied(self._layout, values, earlier))
        # If this worker rejoined above without the push that the values are for, the call drops them at its end.
        is_late = before.origin is not participation.current.origin
        participation.writes.put(written, before if is_late else participation.current)
        if step is not None:
            step.update_options()

    async def gradient_buffers(self, device: str | None, is_checked: bool) -> dict[str, Any]:
        """See ``AsyncParameters.gradient_buffers``."""
        number = None if device is None else device_number(device)
        if self._bucket_step is None or not self._bucket_step.open:
            await self._servers.shared_memory.share_gradients()
        await self.retry(self._servers.open)
        if number is None:
            return self.gradients.buffers(is_checked=is_checked)
        return await in_thread(lambda: self.gradients.device_buffers(number))

    async def finish(self) -> None:
        """Return when every push is applied. Raises InvalidArgumentError if that needs another call."""
        await self.retry(self._begin)
        sequence = self._participation.sequence
        if sequence.unfinished:
            raise InvalidArgumentError(
                f"push {sequence.step} of {self._participation.name!r} failed, and servers may have a part of it: push "
                "its gradient again before a snapshot"
            )

    async def release_memory(self, *, shared: bool = True) -> None:
        """See ``AsyncParameters.release_memory``."""
        await self._end_step()
        release = self.gradients.release_memory
        await in_thread(release) if self.gradients.has_device else release()
        self._results.release_memory()
        await self._servers.shared_memory.release_memory(shared=shared)

    async def close(self) -> None:
        """Cancel calls under way, and return shared memory."""
        if self._bucket_step is not None:
            await self._bucket_step.close()
        self._results.discard()
        self.gradients.unregister()  # Before the pages of shared memory are replaced.
        await self._servers.close()

    # --- parts of calls -----------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        await self._servers.open()
        await self._end_step()

    async def _push_once(self, push: _WholePush) -> PullTarget | None:
        """Make a push in this incarnation. Returns where the new weights are, if they were asked for."""
        await self._servers.shared_memory.share_gradients()
        await self._begin()
        target = self._results.target(push.wanted) if push.wanted is not None else None
        if push.gathered is None:
            waits = self.gradients.waits_for_device(push.gradients)
            with self._servers.work(SpanKind.GATHER):
                push.gathered = await off_loop(self._layout.total, lambda: self._gather(push), waits=waits)
        await self._reach_first_step()
        self._participation.take_state()
        try:
            step = await self._make_step(push, target)
            parts, waiting = step.whole(), self._servers.waiting(push=True, reads=step.reads)
            try:
                if step.is_encoding:
                    await step.send_while_encoding(parts, waiting)
                else:
                    with waiting:
                        await step.send(parts)
            except BaseException:  # This includes cancellation. Servers may still read memory that is the user's again.
                await self._servers.shared_memory.withdraw()
                raise
        except BaseException as error:
            if self.encoding is not None:
                self.encoding.discard_unsent()
            if not isinstance(error, WrittenWeightsError) or await self._servers.withdraw_push(error):
                raise
            return await self._push_once(push)
        step.absorb(parts)
        self._on_pushed(step.progress, step.abstains, seen=step.reads)
        return target

    async def _make_step(self, push: _WholePush, target: PullTarget | None) -> PushStep:
        """Return the step that sends a gathered gradient, encoded as far as that comes before sending."""
        assert push.gathered is not None
        flat, norm = push.gathered
        absent = self._index.ranges_of(push.absent)
        values: Gradient | None = flat if isinstance(flat, np.ndarray) else None
        if self.encoding is not None:
            values, norm = await self.encoding.encode_push(flat, with_norm=self._needs_norm, absent=absent)
        elif flat is not None and not isinstance(flat, np.ndarray):
            values = await in_thread(partial(self.gradients.cast, flat, self._servers.slicing))
        return PushStep(self._servers, values, push.weight, target, norm, absent)

    def _on_pushed(self, progress: PendingRequest, abstained: bool, *, seen: bool = True) -> None:
        if self.encoding is not None:
            self.encoding.end_push()
        self._servers.phases.end_step(self._participation.name, progress.number)
        self._participation.end_push(progress, seen=seen)
        self._servers.shared_memory.on_push_completed()
        self.drops.not_dropped()
        launcher_reports.note_step()
        counters = self.counters
        counters.pushes += 1
        counters.pulls += seen
        counters.abstained += abstained
        counters.ignored += progress.ignored
        counters.staleness_mean = progress.staleness_mean
        counters.staleness_max = progress.staleness_max

    async def _reach_first_step(self) -> None:
        """Wait until the others are at the first step of this worker, if it joined and pushes without a pull."""
        if self._participation.sequence.before_first_step:
            await _pull_into(self._results.target(Wanted(None, copy=False)), self._servers, self.counters)

    def _gather(self, push: _WholePush) -> tuple[Flat | DeviceVector | None, float]:
        """Return the checked gradient and, if the servers need it, its norm; None to abstain."""
        flat = self.gradients.gather(push.gradients, self._participation.sequence.step, push.absent)
        if not push.weight:
            return None, 0.0
        if not isinstance(flat, np.ndarray) or not self._needs_norm or self.encoding is not None:
            return flat, 0.0
        values = flat_vector.values_of(self._layout, flat)
        return flat, flat_vector.grad_norm(values, self._servers.slicing.slice_elements // WORDS[self._layout.dtype])

    # --- another incarnation ------------------------------------------------------------------------------------------

    async def retry(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``, in this incarnation or a later one."""
        result = await run_in_incarnation(work, self._rejoin_and_retry, lambda: self._participation.incarnation)
        return cast(T, result)

    async def _rejoin_and_retry(self, fenced: FencedError, incarnation: int) -> bool:
        await self._rejoin(fenced, incarnation)
        if self.encoding is not None:  # A push that failed earlier, and was not made again, may be dropped.
            self.encoding.warn_of_lost()
        return True

    async def _rejoin_or_drop(self, fenced: FencedError, incarnation: int) -> bool:
        """Rejoin, and drop the whole push that was under way unless it continues. Returns True if it does."""
        number = self._participation.sequence.step
        if continues := await self._rejoin(fenced, incarnation):
            return continues
        self._drop(number)
        return False

    async def _rejoin(self, fenced: FencedError, incarnation: int) -> bool:
        """Rejoin after ``fenced`` ended work of ``incarnation``. Returns True if the current or next push continues.

        A step in buckets that does not continue is dropped. Raises FencedError if the user was not told of that yet.
        """
        goes_on = await self._servers.rejoin(fenced, incarnation)
        self._results.discard()
        if not goes_on:
            await self._drop_step()
        return goes_on

    def _drop(self, number: int) -> None:
        """Drop the push of this number. Raises PushDroppedError according to ``on_drop``."""
        self._participation.on_dropped()
        expulsion, sequence = self._servers.expulsion, self._participation.sequence
        what = "step" if sequence.synchronous else "push"
        goes_on = f"this worker takes part again{f' from step {sequence.first_step}' if sequence.synchronous else ''}"
        title = f"{what} {number} of {self._participation.name!r}"
        lost = self.encoding.take_lost() if self.encoding is not None else ""
        self.drops.add(f"{title} was dropped: {expulsion.reason}; {lost}{goes_on}", expulsion)

    # --- a step in buckets --------------------------------------------------------------------------------------------

    async def _current_step(self, gradients: object, weight: float, reads: bool) -> BucketStep:
        """Return the step of the next bucket, ``gradients``. A new step has this weight, and is stored with its first
        bucket."""
        await self._servers.open()
        if self._bucket_step is not None:
            await self._bucket_step.raise_failure()
            if self._bucket_step.open:
                return self._bucket_step
        await self._end_step()
        await self._reach_first_step()
        # Slices are answered only with the whole step in BSP that clips, and in SSP if a read waits for all others.
        consistency = self._spec.consistency
        whole = self._clips or (isinstance(consistency, SSP) and consistency.staleness == 0)
        begin = partial(self.gradients.begin_step, gradients)
        vector = await in_thread(begin) if self.gradients.waits_for_device(gradients) else begin()
        gradient = vector if self.encoding is None else await self.encoding.begin(vector)
        assert isinstance(gradient, np.ndarray | EncodedPush)
        plan, on_finished = StepPlan(self._index, whole=whole), partial(self._on_pushed, seen=reads)
        return BucketStep(self._servers, gradient, weight, self._results, plan, on_finished, reads=reads)

    async def _end_step(self) -> None:
        """Wait until the step in buckets is answered, and end it."""
        if self._bucket_step is not None:
            await self._bucket_step.finish()
            self._bucket_step.end()
            self._bucket_step = None

    async def _drop_step(self, *, skips: bool = False) -> None:
        """Abandon the step in buckets, if there is one. Raises FencedError if the user was not told yet.

        skips: drop the push that the script makes next, because its iteration has lost a push before it.
        """
        if skips:
            await self.retry(self._begin)
            self._results.discard()
            self._drop(self._participation.sequence.step)
        step, self._bucket_step = self._bucket_step, None
        if step is not None:
            await step.drop()
        if self.encoding is not None:
            self.encoding.drop_push()
        if step is not None and not step.finished:
            self._drop(step.number)
            if not step.told_fenced:
                raise step.dropped()


async def _pull_into(target: PullTarget, servers: ServerAccess, counters: StepCounters) -> None:
    with servers.waiting(push=False, reads=True):
        await servers.pull(target)
    counters.pulls += 1


def check_member(participation: Participation) -> None:
    """Raise NotMemberError if the handle was opened for reading."""
    if not participation.is_member:
        raise NotMemberError(
            f"{participation.name!r} was opened for reading: pass init and optimizer to client.parameters() to take "
            "part"
        )


def _drop_overdue_write(servers: ServerAccess, drops: DropCounter) -> None:
    """Drop weights that the script wrote before a push that this worker no longer makes, and report that."""
    participation = servers.participation
    if (number := participation.writes.take_overdue(participation.current)) is None:
        return
    reason = servers.expulsion.reason or "the other workers made that step without this one"
    drops.add_write(
        f"weights that the script wrote before push {number} of {participation.name!r} were dropped: {reason}; the "
        f"next push is {participation.sequence.step}",
        servers.expulsion,
    )
