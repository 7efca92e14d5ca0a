"""The steps of one handle: each call of the user, in whatever incarnation of this worker it is answered.

``AsyncParameters`` says what the calls mean for the user. Here they are carried out: the gradient is gathered, the push
is sent, and the weights arrive. A call that ends with FencedError is made again after this worker took part again.

Invariants: one call runs at a time. A push that does not go on is counted as dropped once, and reported.

Not here: numbers (``push_sequence``, ``participation``), requests (``exchange``), the buckets of a step
(``bucket_step``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psdist.client.bucket_step import AsyncBucket, BucketStep, StepState, WeightedGradient
from psdist.client.core import partition
from psdist.client.core.buckets import SliceIndex
from psdist.client.core.partition import Flat
from psdist.client.core.push_sequence import PendingRequest, PushSequence
from psdist.client.encoding import EncodedPush, Encoding
from psdist.client.exchange import Exchange
from psdist.client.gradients import GradientVector
from psdist.client.participation import Participation
from psdist.client.results import Results, Wanted
from psdist.client.session.activity import ReportedWait
from psdist.client.session.drops import DropCounter
from psdist.client.session.membership import run_in_incarnation
from psdist.client.session.worker_state import Restore, Save
from psdist.client.stale_buffers import StaleBufferCheck
from psdist.client.transport.buffer_pool import PullTarget
from psdist.client.transport.delivery import all_or_first_error
from psdist.client.transport.requests import EncodedGradient
from psdist.consistency import BSP, SSP, check_weight
from psdist.errors import FencedError, InvalidArgumentError, NotMemberError
from psdist.gpu.device import device_number
from psdist.metrics.phases import Phase
from psdist.off_loop import in_thread, off_loop, until_done
from psdist.types import Layout, ParametersSpec

if TYPE_CHECKING:
    from psdist.compression.gpu.memory import DeviceVector

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CompressionStatistics:
    """What a codec made of the gradients of one handle.

    ratio: their bytes as float32, by the bytes that they were encoded in.
    residual_norm: the L2 norm of what was left out so far, and is added to the next gradient.
    choice: with ``compression="auto"``, the codec that was chosen, and why.
    encodes_on_device: whether gradients in the memory of a CUDA device are encoded there, and only payloads copied to
        the host.
    """

    ratio: float = 1.0
    residual_norm: float = 0.0
    choice: str = ""
    encodes_on_device: bool = False


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of one handle since it was made.

    ignored: slices whose contribution was not used, because it had been taken before or came after its step was closed.
    resent: slices that were sent again after a break.
    dropped: pushes that were dropped because this worker had been expelled, or the run went back to a snapshot.
    resumed: pushes and steps in buckets that were under way when this worker was expelled, and went on in its next
        incarnation.
    rolled_back: how often the parameters went back to a snapshot.
    staleness_mean, staleness_max: over the slices of the last push, in versions.
    push_bytes, pull_bytes: payloads only, those in shared memory too.
    compression: what a codec makes of the gradients.
    transport: "shm", "tcp" or "grpc", "mixed" where it depends on the server.
    transports: by server: "shm", or "tcp: " or "grpc: " and why none before it.
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


class Steps:
    """The calls of one handle. drops: what a dropped push comes to."""

    def __init__(self, exchange: Exchange, layout: Layout, drops: DropCounter) -> None:
        self.counters = Statistics()
        self._spec: ParametersSpec = exchange.participation.entry.spec
        self._elements = layout.total
        self._clips = self._spec.optimizer.max_grad_norm > 0
        #: Whether servers need the norm of the whole gradient with each push.
        self._needs_norm = self._clips and not isinstance(self._spec.consistency, BSP)
        self._exchange = exchange
        self._participation = exchange.participation
        #: What compresses gradients, if something does.
        self.encoding = Encoding.of(exchange.options.codec, layout, self._participation)
        # What a codec leaves out is not in the memory that servers read, so that is not the user's then.
        shared = (lambda: exchange.shared_memory.gradients) if self.encoding is None else lambda: None
        self._gradients = GradientVector(
            layout, exchange.options.cast.dtype, self._spec.non_finite, shared, StaleBufferCheck(self._spec.name),
            lambda: self.encoding is not None and self.encoding.works_on_device,
            casts_on_device=self.encoding is None and exchange.options.cast.dtype != "float32" and not self._needs_norm,
        )  # fmt: skip
        exchange.shared_memory.before_replaced = self._gradients.unregister
        self._results = Results(layout, exchange)
        self._index = SliceIndex(layout, exchange.slicing)
        #: The step that is given in buckets, or was, until the next call.
        self._bucket_step: BucketStep | None = None
        self._calling = asyncio.Lock()
        self.drops = drops

    @property
    def sequence(self) -> PushSequence:
        """The numbers of this worker's pushes: another one in each incarnation."""
        return self._participation.sequence

    @asynccontextmanager
    async def call(self, phase: Phase | None = None) -> AsyncIterator[None]:
        """For each call of the user. All methods are called in it. phase: what a call that is timed does first."""
        with self._exchange.phases.call(phase) if phase is not None else nullcontext():
            async with self._calling:
                if self._bucket_step is not None and self._bucket_step.state is StepState.LOST:
                    await self._drop_step()
                if self.encoding is not None:
                    await self._retry(self.encoding.keep_state)
                if self._participation.is_outdated:
                    self._results.discard()
                yield

    # --- calls --------------------------------------------------------------------------------------------------------

    async def pull(
        self, out: Mapping[str, NDArray[Any]] | None, copy: bool, device: str | None = None
    ) -> dict[str, Any]:
        """See ``AsyncParameters.pull``."""
        wanted = Wanted(out, copy, await self._gradients.on_named(device))

        async def pull_once() -> PullTarget:
            await self._begin()
            target = self._results.target(wanted)
            await self._pull_into(target)
            self._participation.is_outdated = False
            return target

        return await self._result(await self._retry(pull_once), wanted)

    async def push(
        self,
        gradients: Mapping[str, ArrayLike],
        weight: float = 1.0,
        make_target: Callable[[], PullTarget] | None = None,
    ) -> PullTarget | None:
        """Makes one push, again in another incarnation where it goes on there.

        weight: what it counts for in the mean of its step; 0 contributes nothing.
        make_target: says where the new weights go, if they are wanted. Returns where they are; None if the push was
        dropped.
        """
        _check_member(self._participation)
        weight = check_weight(weight, self._spec.consistency)
        if self._participation.is_skipping:
            await self._drop_step(skips=True)
            return None
        gathered: tuple[Flat | DeviceVector | None, float] | None = None
        target: PullTarget | None = None

        async def push_once() -> bool:
            nonlocal gathered, target
            await self._exchange.shared_memory.share_gradients()
            await self._begin()
            target = make_target() if make_target is not None else None
            if gathered is None:
                waits = self._gradients.waits_for_device(gradients)
                gathered = await off_loop(self._elements, lambda: self._gather(gradients, weight), waits=waits)
            await self._reach_first_step()
            await self._send(*gathered, target, weight)
            return True

        return target if await run_in_incarnation(push_once, self._rejoin_or_drop, self._incarnation) else None

    async def push_pull(
        self,
        gradients: Mapping[str, ArrayLike],
        out: Mapping[str, NDArray[Any]] | None,
        copy: bool,
        weight: float,
        device: str | None = None,
    ) -> dict[str, Any]:
        """See ``AsyncParameters.push_pull``."""
        wanted = Wanted(out, copy, await self._gradients.on_named(device))
        if (target := await self.push(gradients, weight, lambda: self._results.target(wanted))) is None:
            return await self.pull(out, copy, device)
        return await self._result(target, wanted)

    async def give_bucket(
        self, gradients: Mapping[str, ArrayLike] | Iterable[str], weight: float, *, reads: bool = True
    ) -> AsyncBucket:
        """See ``AsyncParameters.push_pull_async`` and, for ``reads=False``, ``push_async``."""
        _check_member(self._participation)
        weight = check_weight(weight, self._spec.consistency)
        if self._participation.is_skipping and (self._bucket_step is None or not self._bucket_step.open):
            await self._drop_step(skips=True)
            raise FencedError(f"a step of {self._participation.name!r} was dropped: {self._exchange.expulsion.reason}")
        if self._needs_norm:
            raise InvalidArgumentError(
                f"{self._participation.name!r} clips by max_grad_norm={self._spec.optimizer.max_grad_norm:g} without "
                "common steps: the norm of the whole gradient is needed first, so use push_pull"
            )
        step = await self._retry(lambda: self._current_step(gradients, weight, reads))
        if reads != step.reads:
            raise InvalidArgumentError(
                f"a step of {self._participation.name!r} was begun by push{'_pull' * step.reads}_async: give all of "
                "its buckets by that"
            )
        if weight != step.weight:
            raise InvalidArgumentError(
                f"weight={weight:g} in a step that was begun with weight={step.weight:g}: a gradient has one weight"
            )
        self._gradients.check_bucket(gradients)
        numbers = step.choose(list(gradients))
        is_given = weight > 0
        if self._gradients.waits_for_device(gradients):
            is_given = await in_thread(lambda: self._gradients.gather_there(numbers, gradients)) and is_given
        elements = self._gradients.elements_gathered(numbers)
        is_given = await off_loop(elements, lambda: self._gradients.gather_here(numbers, gradients)) and is_given
        if step.state is StepState.LOST:  # Meanwhile, as another of its buckets has found out.
            await self._drop_step()
            raise step.dropped()
        bucket = step.give(numbers, abstain=not is_given)
        if not step.open:
            self._gradients.on_last_bucket(gradients, step.number)
        self._bucket_step = step
        if not step.open:  # Gradients stand still now.
            await self._exchange.shared_memory.share_gradients()
        return bucket

    async def gradient_buffers(self, device: str | None, is_checked: bool) -> dict[str, Any]:
        """See ``AsyncParameters.gradient_buffers``."""
        number = None if device is None else device_number(device)
        if self._bucket_step is None or not self._bucket_step.open:
            await self._exchange.shared_memory.share_gradients()
        await self._retry(self._exchange.open)
        if number is None:
            return self._gradients.buffers(is_checked=is_checked)
        return await in_thread(lambda: self._gradients.device_buffers(number))

    async def keep_state(self, save: Save, restore: Restore, prefix: str) -> None:
        """See ``AsyncParameters.keep_state``."""
        _check_member(self._participation)
        await self._retry(self._exchange.open)
        await self._participation.keep_state(save, restore, prefix=prefix)

    async def finish(self) -> None:
        """Returns when all that was pushed is applied. Raises InvalidArgumentError where that takes another call."""
        await self._retry(self._begin)
        if self.sequence.unfinished:
            raise InvalidArgumentError(
                f"push {self.sequence.step} of {self._participation.name!r} failed, and servers may have a part of "
                "it: push its gradient again before a snapshot"
            )

    async def release_memory(self, *, shared: bool = True) -> None:
        """See ``AsyncParameters.release_memory``."""
        await self._end_step()
        release = self._gradients.release_memory
        await in_thread(release) if self._gradients.has_device else release()
        self._results.release_memory()
        await self._exchange.shared_memory.release_memory(shared=shared)

    async def close(self) -> None:
        """Ends what is under way, and gives shared memory back."""
        if self._bucket_step is not None:
            await self._bucket_step.close()
        self._results.discard()
        self._gradients.unregister()  # Before the pages of shared memory are replaced.
        await self._exchange.close()

    # --- their parts --------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        await self._exchange.open()
        await self._end_step()

    async def _send(
        self, flat: Flat | DeviceVector | None, norm: float, target: PullTarget | None, weight: float
    ) -> None:
        gradient: Flat | EncodedGradient | None = flat if isinstance(flat, np.ndarray) else None
        try:
            if self.encoding is not None:
                gradient, norm = await self.encoding.encode_push(flat, with_norm=self._needs_norm)
            elif flat is not None and not isinstance(flat, np.ndarray):
                cast = partial(self._gradients.cast, flat, self._exchange.slicing)
                gradient = await in_thread(cast)
            progress = self._participation.begin_push()
            waiting = self._exchange.waiting(push=True, reads=target is not None)
            push = _push(self._exchange, progress, gradient, norm, target, weight or 1.0)
            async with self._exchange.invalidate_on_error():
                await _encoded_meanwhile(push, gradient, waiting)
        except BaseException:  # This includes cancellation.
            if self.encoding is not None:
                self.encoding.discard_unsent()
            raise
        abstained = gradient is None or (isinstance(gradient, EncodedPush) and bool(gradient.abstained))
        self._on_pushed(progress, abstained, seen=target is not None)

    def _on_pushed(self, progress: PendingRequest, abstained: bool, *, seen: bool = True) -> None:
        if self.encoding is not None:
            self.encoding.end_push()
        self._participation.end_push(progress, seen=seen)
        self._exchange.shared_memory.settle()
        self.drops.not_dropped()
        counters = self.counters
        self.counters = replace(
            counters,
            pushes=counters.pushes + 1,
            pulls=counters.pulls + seen,
            abstained=counters.abstained + abstained,
            ignored=counters.ignored + progress.ignored,
            staleness_mean=progress.staleness_mean,
            staleness_max=progress.staleness_max,
        )

    async def _pull_into(self, target: PullTarget) -> None:
        with self._exchange.waiting(push=False, reads=True):
            await self._exchange.pull(target)
        self.counters = replace(self.counters, pulls=self.counters.pulls + 1)

    async def _reach_first_step(self) -> None:
        """A worker that joined and pushes without a pull: waits until the others are at its first step."""
        if self.sequence.before_first_step:
            await self._pull_into(self._results.target(Wanted(None, copy=False)))

    async def _result(self, target: PullTarget, wanted: Wanted) -> dict[str, Any]:
        waits = wanted.there is not None
        return await off_loop(self._elements, lambda: self._results.arrays(target, wanted), waits=waits)

    def _gather(self, gradients: Mapping[str, ArrayLike], weight: float) -> tuple[Flat | DeviceVector | None, float]:
        """The checked gradient and, where the servers need it, its norm; None to abstain."""
        flat = self._gradients.gather(gradients, self.sequence.step)
        if not weight:
            return None, 0.0
        if not isinstance(flat, np.ndarray) or not self._needs_norm or self.encoding is not None:
            return flat, 0.0
        return flat, partition.grad_norm(flat, self._exchange.slicing.slice_elements)

    # --- another incarnation ------------------------------------------------------------------------------------------

    def _incarnation(self) -> int:
        return self._participation.incarnation

    async def _retry(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``, in this incarnation or a later one."""
        return cast(T, await run_in_incarnation(work, self._rejoin_and_retry, self._incarnation))

    async def _rejoin_and_retry(self, fenced: FencedError, incarnation: int) -> bool:
        await self._rejoin(fenced, incarnation)
        if self.encoding is not None:  # A push that failed earlier, and was not made again, may be dropped.
            self.encoding.warn_of_lost()
        return True

    async def _rejoin_or_drop(self, fenced: FencedError, incarnation: int) -> bool:
        """Rejoin, and drop the whole push that was under way unless it continues. Returns True if it does."""
        number = self.sequence.step
        if continues := await self._rejoin(fenced, incarnation):
            return continues
        self._drop(number)
        return False

    async def _rejoin(self, fenced: FencedError, incarnation: int) -> bool:
        """Takes part again, where ``fenced`` ended what was done in ``incarnation``. Returns whether the push under
        way, or next to be made, goes on.

        A step in buckets that does not is dropped; raises FencedError if the user does not know that yet.
        """
        goes_on = await self._exchange.rejoin(fenced, incarnation)
        self._results.discard()
        if not goes_on:
            await self._drop_step()
        return goes_on

    def _drop(self, number: int) -> None:
        """The push of this number is dropped. Raises PushDroppedError as ``on_drop`` says."""
        self._participation.on_dropped()
        expulsion, sequence = self._exchange.expulsion, self.sequence
        what = "step" if sequence.synchronous else "push"
        goes_on = f"this worker takes part again{f' from step {sequence.first_step}' if sequence.synchronous else ''}"
        title = f"{what} {number} of {self._participation.name!r}"
        lost = self.encoding.take_lost() if self.encoding is not None else ""
        self.drops.add(f"{title} was dropped: {expulsion.reason}; {lost}{goes_on}", expulsion)

    # --- a step in buckets --------------------------------------------------------------------------------------------

    async def _current_step(self, gradients: object, weight: float, reads: bool) -> BucketStep:
        """The step that the next bucket, ``gradients``, belongs to. A new one has this weight, and is kept with its
        first bucket."""
        await self._exchange.open()
        if self._bucket_step is not None:
            await self._bucket_step.raise_failure()
            if self._bucket_step.open:
                return self._bucket_step
        await self._end_step()
        await self._reach_first_step()
        # Whose slices are answered only with the whole step: BSP that clips, and SSP where a read waits for all others.
        consistency = self._spec.consistency
        whole = self._clips or (isinstance(consistency, SSP) and consistency.staleness == 0)
        begin = partial(self._gradients.begin_step, gradients)
        vector = await in_thread(begin) if self._gradients.waits_for_device(gradients) else begin()
        gradient = vector if self.encoding is None else await self.encoding.begin(vector)
        assert isinstance(gradient, np.ndarray | EncodedPush)
        weighted, on_finished = WeightedGradient(gradient, weight), partial(self._on_pushed, seen=reads)
        return BucketStep(self._exchange, self._results, self._index, weighted, on_finished, whole=whole, reads=reads)

    async def _end_step(self) -> None:
        """The step in buckets is over, once it is answered."""
        if self._bucket_step is not None:
            await self._bucket_step.finish()
            self._bucket_step.end()
            self._bucket_step = None

    async def _drop_step(self, *, skips: bool = False) -> None:
        """Abandon the step in buckets, if there is one. Raises FencedError if the user was not told yet.

        skips: drop the push that the script makes next, because its iteration has lost a push before it.
        """
        if skips:
            await self._retry(self._begin)
            self._results.discard()
            self._drop(self.sequence.step)
        step, self._bucket_step = self._bucket_step, None
        if step is not None:
            await step.drop()
        if self.encoding is not None:
            self.encoding.drop_push()
        if step is not None and not step.finished:
            self._drop(step.number)
            if not step.told_fenced:
                raise step.dropped()


def _check_member(participation: Participation) -> None:
    if not participation.is_member:
        raise NotMemberError(
            f"{participation.name!r} was opened for reading: pass init and optimizer to client.parameters() to take "
            "part"
        )


async def _push(
    exchange: Exchange,
    progress: PendingRequest,
    gradient: Flat | EncodedGradient | None,
    norm: float,
    target: PullTarget | None,
    weight: float,
) -> None:
    """Sends a gradient. Of one that failed before, when it was given otherwise, some slices may abstain."""
    abstained = gradient.abstained if isinstance(gradient, EncodedPush) else frozenset[int]()
    if not abstained:
        await exchange.push(progress, gradient, norm, target, weight)
        return
    parts = [(progress.part(progress.pending - abstained), gradient), (progress.part(abstained), None)]
    try:
        await all_or_first_error(
            [exchange.push(part, one, norm, target, weight) for part, one in parts if part.pending]
        )
    finally:
        for part, _ in parts:
            progress.absorb(part)


async def _encoded_meanwhile(
    push: Coroutine[Any, Any, None], gradient: Flat | EncodedGradient | None, waiting: ReportedWait
) -> None:
    """Carries ``push`` out, and encodes its gradient meanwhile where that is not done yet. The script is ``waiting``
    from then on."""
    if not isinstance(gradient, EncodedPush) or not gradient.is_encoding:
        with waiting:
            await push
        return
    pushing = asyncio.create_task(push, name="psdist push")
    try:
        await gradient.encoded()
        with waiting:
            await pushing
    finally:
        pushing.cancel()
        try:
            await until_done(pushing)
        finally:  # Where this is cancelled, too: the errors of both tasks are seen, and let go of.
            if not pushing.cancelled():
                pushing.exception()
            gradient.end()
