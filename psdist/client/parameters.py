"""``AsyncParameters``: pull, push and push_pull of one parameter set.

Calls of several tasks on one handle run one after another, so that steps stay in order. Invalid input raises before
anything is sent. A call that fails or is cancelled does not advance the step. Calling again sends under the same
number, and the servers take only the slices that they lack. So give the same gradient again: a different one would
count only for those slices.

A worker that was expelled while it lived (it was silent for longer than ``--worker-timeout``, or cut off) rejoins by
itself. Its next incarnation resumes the push that it was making, or had computed, where that is still right: in SSP and
ASP always, in BSP while no slice has closed the step without it. Otherwise the others have gone on, and the push
belongs to no step: it is dropped, counted and reported, and the worker continues at a step that the others have not
reached. When the run rolls back to a snapshot, every worker's push is dropped, and the next step is the one that
follows the snapshot's cut, which is lower.

Not here: requests (``exchange``), a step in buckets (``bucket_step``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psdist.client.bucket_step import AsyncBucket, BucketStep
from psdist.client.core import partition
from psdist.client.core.buckets import SliceIndex
from psdist.client.core.partition import Arrays, Flat
from psdist.client.core.push_sequence import PendingRequest, PushSequence
from psdist.client.exchange import Exchange, Options
from psdist.client.session.drops import DropCounter, OnDrop
from psdist.client.session.scheduler_session import WorkerSession
from psdist.client.session.worker_state import Restore, Save
from psdist.client.transport.buffer_pool import BufferPool, PullTarget
from psdist.client.transport.creation import CreatedParameters
from psdist.client.transport.data_path import DataPath
from psdist.consistency import SSP
from psdist.errors import FencedError, InvalidArgumentError, NotMemberError
from psdist.types import Layout, ParametersSpec

T = TypeVar("T")
#: Vectors of more elements are looked at and copied in a thread, so that heartbeats go on.
_LARGE_ELEMENTS: Final = 1 << 22


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
    transport: "shm" or "grpc", "mixed" where it depends on the server.
    transports: by server: "shm", or "grpc: " and why.
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
    staleness_mean: float = 0.0
    staleness_max: int = 0
    transport: str = "grpc"
    transports: dict[str, str] = field(default_factory=dict)


class AsyncParameters:
    """Named tensors that live on the servers. Made by ``AsyncClient.parameters``."""

    def __init__(
        self,
        link: WorkerSession,
        data: DataPath,
        ready: CreatedParameters,
        options: Options,
        *,
        member: bool,
        on_drop: OnDrop = "warn",
    ) -> None:
        self.spec: ParametersSpec = ready.entry.spec
        #: Names, shapes and dtypes, in order.
        self.layout: Layout = ready.layout
        #: Whether this client takes part in the training, or only reads.
        self.member = member
        self._exchange = Exchange(link, data, ready, options, member=member)
        self._codec_dtype = options.codec.dtype
        self._cut = SliceIndex(self.layout, self._exchange.slicing)
        self._buffer_pool = BufferPool(self.layout)
        self._buffers: dict[str, NDArray[np.float32]] = {}
        #: What the last result without a copy was made of, and that result: mostly the next one too.
        self._viewed: tuple[Flat, Arrays] | None = None
        #: The step that is given in buckets, or was, until the next call.
        self._step: BucketStep | None = None
        self._turn = asyncio.Lock()
        self._drops = DropCounter(on_drop)
        self._pushes = self._pulls = self._abstained = self._ignored = 0
        self._staleness = (0.0, 0)
        self._generation = ready.entry.generation

    @property
    def _session(self) -> PushSequence:
        return self._exchange.session

    # --- what there is to know ---

    @property
    def name(self) -> str:
        """The parameters' name."""
        return self.spec.name

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in order."""
        return tuple(tensor.name for tensor in self.layout.tensors)

    @property
    def step(self) -> int:
        """Number of the next push: its step in BSP, its sequence number in SSP and ASP."""
        return self._session.step

    @property
    def first_step(self) -> int:
        """BSP: the first step that this worker contributes to."""
        return self._session.first_step

    @property
    def restored(self) -> str:
        """Directory of the snapshot that the values were loaded from when they began, or last went back; empty where
        they began with ``init``."""
        restore = self._exchange.restore
        return restore.directory if restore is not None else ""

    @property
    def version(self) -> int:
        """Version of the weights last pulled (the least of any slice): in BSP steps, in SSP and ASP updates."""
        return self._session.version

    @property
    def staleness(self) -> int:
        """SSP and ASP: most versions that passed between the weights the last gradient was computed on and its use."""
        return self._staleness[1]

    def statistics(self) -> Statistics:
        """Counters of this handle."""
        transports = self._exchange.shared_memory.transports()
        kinds = {how == "shm" for how in transports.values()} or {False}
        return Statistics(
            pushes=self._pushes,
            pulls=self._pulls,
            abstained=self._abstained,
            ignored=self._ignored,
            resent=self._exchange.resent,
            dropped=self._drops.count,
            resumed=self._exchange.resumed,
            rolled_back=self._exchange.generation - self._generation,
            push_bytes=self._exchange.traffic.sent,
            pull_bytes=self._exchange.traffic.received,
            staleness_mean=self._staleness[0],
            staleness_max=self._staleness[1],
            transport="mixed" if len(kinds) > 1 else "shm" if True in kinds else "grpc",
            transports=transports,
        )

    def __repr__(self) -> str:
        role = f"step {self.step}" if self.member else "reading"
        return (
            f"<{type(self).__name__} {self.name!r}: {len(self.layout.tensors)} tensors, {self.layout.total} elements, "
            f"version {self.version}, {role}>"
        )

    # --- the calls ---

    async def pull(self, out: Mapping[str, NDArray[Any]] | None = None, copy: bool = True) -> Arrays:
        """The weights by name, in their declared dtypes and shapes.

        out: arrays to write into; else the arrays are the caller's own. After an error their content is undefined.
        copy: False gives read-only arrays instead, which are valid until the next call on these parameters (in a step
            in buckets, until their tensor is given). They are the servers' own memory where that is shared and stands
            still between steps (BSP without backup workers), else memory that each such call uses again; either way
            none is allocated.
        BSP: waits until the step this worker is at is complete. SSP: waits until no member is further behind than the
        bound.

        Raises ServerLostError, FencedError, ClosedError, WaitTimeoutError, SharingUnavailableError (transport "shm"),
        MutualWaitError (``Client`` alone) where the others wait for this worker elsewhere, InvalidArgumentError for
        ``out`` together with ``copy=False`` and while a step is given in buckets, and as ``partition.check_out`` for
        ``out``.
        """
        async with self._call():
            return await self._pull(out, copy)

    async def push(self, gradients: Mapping[str, ArrayLike]) -> None:
        """Sends the gradient of the next step; returns when it is applied, or dropped (``statistics().dropped``)
        because this worker had been expelled and the others had gone on without it.

        Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError and NonFiniteGradientError
        before anything is sent; NotMemberError, ServerLostError, FencedError, ClosedError, WaitTimeoutError;
        MutualWaitError as in ``pull``: calling again goes on with this push; PushDroppedError as ``on_drop`` says: the
        worker takes part again, and the next call goes on.
        """
        async with self._call():
            await self._push(gradients)

    async def push_pull(
        self, gradients: Mapping[str, ArrayLike], out: Mapping[str, NDArray[Any]] | None = None, copy: bool = True
    ) -> Arrays:
        """One step: sends the gradient and returns the weights with it in them, or those of its new first step where
        the push was dropped. Arguments and errors as in ``push`` and ``pull``. The gradients may be overwritten once it
        returns."""
        async with self._call():
            if (arrival := await self._push(gradients, lambda: self._arrival(out, copy))) is None:
                return await self._pull(out, copy)
            return await self._result(arrival, out, copy)

    async def push_pull_async(self, gradients: Mapping[str, ArrayLike] | Iterable[str]) -> AsyncBucket:
        """One step in buckets: sends these tensors' gradients while the others are still computed. Returns at once;
        ``await`` what it returns for the new weights of these tensors.

        gradients: a bucket by name, copied before this returns; or names, whose gradients are in ``gradient_buffers``
            and stay as they are until the bucket is done.

        The first call begins a step, and the step is complete when all tensors were given once, in any order. A slice
        is sent when all tensors that touch it were given. The call after that begins the next step, and first waits
        until this one is answered. While tensors are missing, pull, push and push_pull raise InvalidArgumentError.

        Raises as ``push`` before anything of the bucket is sent; the tensors may then be given again. NaN and Inf are
        looked for in each bucket: with "skip" a bucket that has some abstains, with all slices that it touches. A
        bucket that failed on its way (its ``wait`` says so, or the next call) is to be given again too: what is
        unanswered is sent again under the same number. Where this worker was expelled in the middle of a step that the
        others closed without it, the whole step is dropped: FencedError says so, once, and the next call begins another
        one. PushDroppedError as ``on_drop`` says, from the first call after the drop.
        InvalidArgumentError also for a tensor that was given before, and in SSP and ASP with ``max_grad_norm``, where
        the norm of the whole gradient is needed before anything can be sent.
        """
        async with self._call():
            self._check_buckets()
            step = await self._current_bucket_step()
            numbers = self._choose(step, gradients)
            bucket = step.give(numbers, abstain=not self._is_usable(numbers))
            self._step = step
            return bucket

    async def gradient_buffers(self) -> dict[str, NDArray[np.float32]]:
        """Writable float32 arrays, always the same, for the gradients: pushing exactly these copies nothing in this
        process, and where memory is shared, not to the servers either.

        A push of other arrays, or in buckets, may overwrite them. Not to be written while a push of them is under way.
        """
        async with self._call():
            await self._open()
            self._buffers = self._buffers or partition.split(self.layout, self._vector)
            return dict(self._buffers)

    async def keep_state(self, save: Save, restore: Restore) -> None:
        """Has something of this worker in every snapshot: what its pushes change and no server knows, such as the rest
        that a codec left out of gradients so far.

        save: gives it as a dict of numpy arrays, which stay as they are until the push is over that begins next. Called
            whenever a push begins and between pushes, on psdist's loop: quick, and without calls of psdist.
        restore: gets the arrays that the worker of this rank handed in: before this returns, where the run goes on from
            a snapshot that has some; and where the run goes back to a snapshot, then an empty dict if that has none.

        Register before the first push. A client that is closed has a snapshot taken first, where the run takes one at
        its end: later ones cannot have what it keeps. A worker that joins later, or again, is not given what belonged
        to pushes of long ago.
        Raises NotMemberError, InvalidArgumentError for what ``save`` gives, and what reading it back fails with.
        """
        self._check_member()
        async with self._call():
            await self._open()
            await self._exchange.keep_state(save, restore)

    @asynccontextmanager
    async def is_quiesced(self) -> AsyncIterator[None]:
        """Nothing is pushed as long as it lasts, and all that was pushed before is applied. For ``snapshot``.

        Raises InvalidArgumentError where that cannot be had without another call of the user.
        """
        async with self._call():
            while True:
                incarnation = self._exchange.incarnation
                try:
                    await self._begin()
                    break
                except FencedError as error:
                    await self._rejoin(error, incarnation)
            if self._session.unfinished:
                raise InvalidArgumentError(
                    f"push {self.step} of {self.name!r} failed, and servers may have a part of it: push its gradient "
                    "again before a snapshot"
                )
            yield

    async def close(self) -> None:
        """Ends what is under way, and gives shared memory back. The client does it when it is closed."""
        if self._step is not None:
            await self._step.close()
        await self._exchange.shared_memory.close()

    # --- their parts ---

    async def _pull(self, out: Mapping[str, NDArray[Any]] | None, copy: bool) -> Arrays:
        while True:
            incarnation = self._exchange.incarnation
            try:
                await self._begin()
                arrival = self._arrival(out, copy)
                await self._pull_into(arrival)
                return await self._result(arrival, out, copy)
            except FencedError as error:
                await self._rejoin(error, incarnation)

    async def _push(
        self, gradients: Mapping[str, ArrayLike], arrive: Callable[[], PullTarget] | None = None
    ) -> PullTarget | None:
        """Makes one push, again in another incarnation where it goes on there.

        arrive: says where the new weights arrive, if they are wanted. Returns where they are, None if the push was
        dropped.
        """
        checked: tuple[Flat | None, float] | None = None
        while True:
            incarnation = self._exchange.incarnation
            try:
                await self._begin()
                arrival = arrive() if arrive is not None else None
                checked = checked or await self._gradient(gradients)
                await self._reach_first_step()
                await self._send(checked, arrival)
                return arrival
            except FencedError as error:
                number = self._session.step
                if not await self._rejoin(error, incarnation):
                    self._drop(number)
                    return None

    async def _send(self, checked: tuple[Flat | None, float], arrival: PullTarget | None) -> None:
        flat, norm = checked
        request = self._session.begin_push()
        with self._exchange.invalidate_on_error(), self._exchange.waiting(push=True, reads=arrival is not None):
            if arrival is None:
                await self._exchange.push(request, flat, norm)
            else:
                await self._exchange.push_pull(request, flat, norm, arrival)
        self._pushed(request, seen=arrival is not None, abstained=flat is None)

    async def _begin(self) -> None:
        await self._exchange.open()
        await self._end_step()

    async def _open(self) -> None:
        """For what belongs to no step."""
        while True:
            incarnation = self._exchange.incarnation
            try:
                return await self._exchange.open()
            except FencedError as error:
                await self._rejoin(error, incarnation)

    async def _end_step(self) -> None:
        """The step in buckets is over, once it is answered."""
        if self._step is not None:
            await self._step.finish()
            self._step.over = True
            self._step = None

    @cached_property
    def _vector(self) -> Flat:
        """Where gradients are put together: in shared memory, if there is some when it is first needed."""
        shared = self._exchange.shared_memory.gradients
        return np.zeros(self.layout.total, np.float32) if shared is None else shared

    # --- another incarnation ---

    async def _rejoin(self, fenced: FencedError, incarnation: int) -> bool:
        """Takes part again, where ``fenced`` ended what was done in ``incarnation``. Returns whether the push under
        way, or next to be made, goes on.

        A step in buckets that does not is dropped; raises FencedError if the user does not know that yet.
        """
        goes_on = await self._exchange.rejoin(fenced, incarnation)
        self._viewed = None
        if not goes_on:
            await self._drop_step()
        return goes_on

    async def _drop_step(self) -> None:
        """A step in buckets, if there is one, does not go on. Raises FencedError if the user does not know that."""
        step, self._step = self._step, None
        if step is None:
            return
        await step.drop()
        if not step.finished:
            self._drop(step.number)
            if not step.told_fenced:
                raise step.dropped()

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        """One call of the user at a time."""
        async with self._turn:
            if self._step is not None and self._step.lost:
                await self._drop_step()
            yield

    def _drop(self, number: int) -> None:
        """The push of this number is dropped. Raises PushDroppedError as ``on_drop`` says."""
        self._exchange.dropped()
        expulsion, session = self._exchange.expulsion, self._session
        what = "step" if session.synchronous else "push"
        again = f"this worker takes part again{f' from step {session.first_step}' if session.synchronous else ''}"
        self._drops.add(f"{what} {number} of {self.name!r} was dropped: {expulsion.reason}; {again}", expulsion)

    def _check_member(self) -> None:
        if not self.member:
            raise NotMemberError(
                f"{self.name!r} was opened for reading: pass init and optimizer to client.parameters() to take part"
            )

    async def _gradient(self, gradients: Mapping[str, ArrayLike]) -> tuple[Flat | None, float]:
        """The checked vector and, where the servers need it, its norm; None to abstain."""
        self._check_member()
        return await self._off_loop(lambda: self._check_gradient(gradients))

    async def _off_loop(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, which touches the whole vector: in a thread where that is large."""
        if self.layout.total < _LARGE_ELEMENTS:
            return work()
        task = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            # The call gives the user's arrays back: nobody may touch them any more.
            await asyncio.wait({task})
            task.exception()
            raise
        return task.result()

    def _check_gradient(self, gradients: Mapping[str, ArrayLike]) -> tuple[Flat | None, float]:
        flat = self._vector
        if not self._are_buffers(gradients):
            flat = partition.flatten(self.layout, gradients, self._vector)
        if not partition.is_finite(flat, self._codec_dtype):
            if self.spec.non_finite == "reject":
                raise partition.non_finite(self.layout, flat, self._codec_dtype)
            return None, 0.0
        clipped = self._clips and not self._session.synchronous
        return flat, partition.grad_norm(flat, self._exchange.slicing.slice_elements) if clipped else 0.0

    def _are_buffers(self, gradients: Mapping[str, ArrayLike]) -> bool:
        """Whether these are the very arrays of ``gradient_buffers``, about which nothing is to be checked."""
        mine = self._buffers
        return (
            isinstance(gradients, Mapping)
            and 0 < len(gradients) == len(mine)
            and all(gradients.get(name) is array for name, array in mine.items())
        )

    @property
    def _clips(self) -> bool:
        return self.spec.optimizer.max_grad_norm > 0

    async def _pull_into(self, arrival: PullTarget) -> None:
        with self._exchange.waiting(push=False, reads=True):
            await self._exchange.pull(arrival)
        self._pulls += 1

    async def _reach_first_step(self) -> None:
        """A worker that joined and pushes without a pull: waits until the others are at its first step."""
        if self._session.before_first_step:
            await self._pull_into(self._arrival(None, copy=False))

    def _pushed(self, request: PendingRequest, *, seen: bool, abstained: bool) -> None:
        self._exchange.end_push(request, seen=seen)
        self._exchange.shared_memory.settle()
        self._drops.not_dropped()
        self._pushes += 1
        self._pulls += seen
        self._abstained += abstained
        self._ignored += request.ignored
        self._staleness = (request.staleness_mean, request.staleness_max)

    # --- where weights arrive ---

    def _arrival(self, out: Mapping[str, NDArray[Any]] | None, copy: bool) -> PullTarget:
        """Where the weights of a call with these arguments arrive."""
        slicing = self._exchange.slicing
        if out is not None:
            if not copy:
                raise InvalidArgumentError("out and copy=False exclude each other: pass one of them")
            mine = partition.check_out(self.layout, out)
            if mine is not None:
                return PullTarget(slicing, mine)
        elif copy:
            return PullTarget(slicing, self._buffer_pool.fresh())
        # Weights that are asked for in fewer bits are rounded, so they cannot be read where they lie.
        shared = self._exchange.shared_memory.weights if self._exchange.options.pull_dtype == "float32" else None
        return PullTarget(slicing, self._buffer_pool.kept, shared)

    async def _result(self, arrival: PullTarget, out: Mapping[str, NDArray[Any]] | None, copy: bool) -> Arrays:
        return await self._off_loop(lambda: self._arrays(arrival, out, copy))

    def _arrays(self, arrival: PullTarget, out: Mapping[str, NDArray[Any]] | None, copy: bool) -> Arrays:
        if out is None and copy:
            return partition.unflatten(self.layout, arrival.target)
        vector = arrival.vector(range(self._exchange.slicing.count))
        if out is not None:
            if arrival.target is self._buffer_pool.kept:
                partition.copy_out(self.layout, vector, out)
            return {name: out[name] for name in self.names}
        if self._viewed is None or self._viewed[0] is not vector or self._buffer_pool.converted:
            every = range(len(self.layout.tensors))
            self._viewed = vector, partition.views(self.layout, every, vector, self._buffer_pool.converted)
        return {name: array.view() for name, array in self._viewed[1].items()}

    # --- buckets ---

    def _check_buckets(self) -> None:
        self._check_member()
        if self._clips and not self._session.synchronous:
            raise InvalidArgumentError(
                f"{self.name!r} clips by max_grad_norm={self.spec.optimizer.max_grad_norm:g} without common steps: the "
                "norm of the whole gradient is needed first, so use push_pull"
            )

    async def _current_bucket_step(self) -> BucketStep:
        while True:
            incarnation = self._exchange.incarnation
            try:
                return await self._bucket_step()
            except FencedError as error:
                await self._rejoin(error, incarnation)

    async def _bucket_step(self) -> BucketStep:
        """The step that the next bucket belongs to. A new one is kept only with its first bucket."""
        await self._exchange.open()
        if self._step is not None:
            await self._step.raise_failure()
            if self._step.open:
                return self._step
        await self._end_step()
        await self._reach_first_step()
        # Whose slices are answered only with the whole step: BSP that clips, and SSP where a read waits for all others.
        consistency = self.spec.consistency
        whole = self._clips or (isinstance(consistency, SSP) and consistency.staleness == 0)
        return BucketStep(
            self._exchange, self._cut, self._vector, self._arrival(None, copy=False), self._buffer_pool.converted,
            self._bucket_step_finished, whole=whole,
        )  # fmt: skip

    def _bucket_step_finished(self, request: PendingRequest, abstained: bool) -> None:
        self._pushed(request, seen=True, abstained=abstained)

    def _choose(self, step: BucketStep, gradients: Mapping[str, ArrayLike] | Iterable[str]) -> tuple[int, ...]:
        """The numbers of the bucket's tensors, whose gradients are in the vector then."""
        if isinstance(gradients, str) or not isinstance(gradients, Iterable):
            raise InvalidArgumentError(f"a bucket is a dict of arrays or a list of names, not {gradients!r:.80}")
        if not isinstance(gradients, Mapping) and not self._buffers:
            raise InvalidArgumentError("a bucket of names means gradient_buffers(): call that first, and fill them")
        numbers = step.choose(list(gradients))
        if isinstance(gradients, Mapping):
            partition.flatten_some(self.layout, numbers, gradients, self._vector)
        return numbers

    def _is_usable(self, numbers: tuple[int, ...]) -> bool:
        """Whether the bucket is finite; where not, the policy decides between an error and False."""
        for number in numbers:
            part = self._vector[self.layout.offsets[number] : self.layout.offsets[number + 1]]
            if not partition.is_finite(part, self._codec_dtype):
                if self.spec.non_finite == "reject":
                    raise partition.non_finite(self.layout, self._vector, self._codec_dtype, numbers)
                return False
        return True
