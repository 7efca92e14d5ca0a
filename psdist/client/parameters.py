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

Not here: how a call is carried out (``steps``), requests (``exchange``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from numpy.typing import ArrayLike, NDArray

from psdist.client.core.partition import Arrays
from psdist.client.encoding import Encoding
from psdist.client.exchange import Exchange
from psdist.client.process.process_bound import ProcessBound
from psdist.client.results import Wanted
from psdist.client.session.drops import DropCounter, OnDrop
from psdist.client.session.worker_state import Restore, Save
from psdist.client.step import AsyncBucket
from psdist.client.steps import CompressionStatistics, Statistics, Steps, check_member
from psdist.metrics.interval import Measurements
from psdist.metrics.phases import Phase
from psdist.types import ITEM_BYTES, Layout, ParametersSpec


class AsyncParameters(ProcessBound):
    """Named tensors that live on the servers. Made by ``AsyncClient.parameters``."""

    def __init__(self, exchange: Exchange, layout: Layout, on_drop: OnDrop = "warn") -> None:
        self.spec: ParametersSpec = exchange.participation.entry.spec
        #: Names, shapes and dtypes, in order.
        self.layout: Layout = layout
        #: Whether this client takes part in the training, or only reads.
        self.is_member = exchange.participation.is_member
        #: The way to the servers, for tests and tools.
        self.exchange = exchange
        self._steps = Steps(exchange, layout, DropCounter(on_drop))
        self._generation = exchange.participation.generation

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
        return self.exchange.participation.sequence.step

    @property
    def first_step(self) -> int:
        """BSP: the first step that this worker contributes to."""
        return self.exchange.participation.sequence.first_step

    @property
    def restored(self) -> str | None:
        """Directory of the snapshot that the values were loaded from when they began, or last went back; None where
        they began with ``init``."""
        restore = self.exchange.participation.entry.restore
        return restore.directory if restore is not None else None

    @property
    def version(self) -> int:
        """Version of the weights last pulled (the least of any slice): in BSP steps, in SSP and ASP updates."""
        return self.exchange.participation.sequence.version

    @property
    def staleness(self) -> int:
        """SSP and ASP: most versions that passed between the weights the last gradient was computed on and its use."""
        return self._steps.counters.staleness_max

    @property
    def lr_factor(self) -> float | None:
        """A factor on the learning rate of this worker's later pushes, beside the optimizer's schedule: for rates that
        are not known in advance, such as after a validation that stopped improving. With FTRL it is on the gradient.
        None, as at first, leaves it to the others.

        BSP: a step has one learning rate, so all workers that set a factor set the same. It is that of the worker that
        has taken part longest; the pushes of others with another one raise InvalidArgumentError. SSP and ASP: each push
        has its own. Snapshots do not have it: a script that goes on from one, or is started again, sets it again.
        Setting it raises InvalidArgumentError for a factor that is out of range.
        """
        return self.exchange.participation.lr_factor

    @lr_factor.setter
    def lr_factor(self, factor: float | None) -> None:
        checked = None if factor is None else self.spec.optimizer.check_lr_factor(factor)
        self.exchange.participation.lr_factor = checked

    def measure(self) -> Measurements:
        """What is counted for ``Context.report``, by reading a few numbers."""
        sequence, traffic = self.exchange.participation.sequence, self.exchange.traffic
        counters = self._steps.counters
        step = sequence.step if sequence.synchronous else sequence.version
        return Measurements(step, counters.staleness_mean, counters.staleness_max, traffic.sent, traffic.received)

    def statistics(self) -> Statistics:
        """Counters of this handle."""
        exchange, transports = self.exchange, self.exchange.transports()
        kinds = {how.partition(":")[0] for how in transports.values()} or {"grpc"}
        return replace(
            self._steps.counters,
            resent=exchange.delivery.resent,
            dropped=self._steps.drops.count,
            resumed=exchange.participation.resumed,
            rolled_back=exchange.participation.generation - self._generation,
            push_bytes=exchange.traffic.sent,
            pull_bytes=exchange.traffic.received,
            compression=_compression(exchange, self._steps.encoding),
            transport=kinds.pop() if len(kinds) == 1 else "mixed",
            transports=transports,
        )

    def __repr__(self) -> str:
        role = f"step {self.step}" if self.is_member else "reading"
        return (
            f"<{type(self).__name__} {self.name!r}: {len(self.layout.tensors)} tensors, {self.layout.total} elements, "
            f"version {self.version}, {role}>"
        )

    # --- the calls ---

    async def pull(
        self, out: Mapping[str, NDArray[Any]] | None = None, copy: bool = True, device: str | None = None
    ) -> Arrays:
        """The weights by name, in their declared dtypes and shapes.

        out: arrays to write into; else the arrays are the caller's own. After an error their content is undefined.
        copy: False gives read-only arrays instead, which are valid until the next call on these parameters (in a step
            in buckets, until their tensor is given). They are the servers' own memory where that is shared and stands
            still between steps (BSP without backup workers), else memory that each such call uses again; either way
            none is allocated.
        device: "cuda" or "cuda:N" gives CuPy's arrays in the memory of that device, also by ``copy=False``, which uses
            the same memory each time.
        BSP: waits until the step this worker is at is complete. SSP: waits until no member is further behind than the
        bound.

        Raises ServerLostError, FencedError, ClosedError, WaitTimeoutError, SharingUnavailableError (transport "shm"),
        TcpUnavailableError (transport "tcp"), MutualWaitError (``Client`` alone) where the others wait for this worker
        elsewhere, InvalidArgumentError for ``out`` together with ``copy=False`` or ``device``, for another device than
        before and while a step is given in buckets, DeviceUnavailableError and DeviceLostError, and as
        ``partition.check_out`` for ``out``.
        """
        async with self._steps.call(Phase.WAIT):
            wanted = Wanted(out, copy, await self._steps.gradients.on_named(device))
            return await self._steps.pull(wanted)

    async def push(self, gradients: Mapping[str, ArrayLike], weight: float = 1.0) -> None:
        """Sends the gradient of the next step; returns when it is applied, or dropped (``statistics().dropped``)
        because this worker had been expelled and the others had gone on without it.

        gradients: an array for each tensor. Arrays in the memory of a CUDA device (CuPy's, torch's, and others by
            ``__cuda_array_interface__`` or DLPack) are encoded there where the codec has kernels for it, so that only
            payloads are copied to the host; else they are copied.
        weight: what it counts for in the mean of its step (BSP), such as the number of samples or tokens that it is
            the mean of: 1e-18 to 1e18. The gradient that is applied is sum(weight * gradient) / sum(weight): float32
            products, added to zeros in rank order, over the sum of the weights. 0 contributes nothing.

        Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError and NonFiniteGradientError
        before anything is sent; NotMemberError, ServerLostError, FencedError, ClosedError, WaitTimeoutError;
        MutualWaitError as in ``pull``: calling again goes on with this push; PushDroppedError as ``on_drop`` says: the
        worker takes part again, and the next call goes on. DeviceUnavailableError and DeviceLostError for arrays of a
        device.
        """
        async with self._steps.call(Phase.PUSH):
            await self._steps.push(gradients, weight)

    async def push_pull(
        self,
        gradients: Mapping[str, ArrayLike],
        out: Mapping[str, NDArray[Any]] | None = None,
        copy: bool = True,
        weight: float = 1.0,
        device: str | None = None,
    ) -> Arrays:
        """Make one step: send the gradient, and return the weights that include it, by name.

        If the push was dropped, the weights are those of this worker's new first step. The gradients may be overwritten
        once the call returns.

        gradients, weight: as in ``push``.
        out, copy, device: as in ``pull``.

        BSP: returns when all workers have pushed this step. SSP: waits until no worker is further behind than the
        bound. ASP: waits for no other worker. Raises as ``push`` and ``pull``. Calling it again with the same gradients
        retries the same step.
        """
        async with self._steps.call(Phase.PUSH):
            wanted = Wanted(out, copy, await self._steps.gradients.on_named(device))
            if (target := await self._steps.push(gradients, weight, wanted)) is None:
                return await self._steps.pull(wanted)
            return await self._steps.result(target, wanted)

    async def push_pull_async(
        self, gradients: Mapping[str, ArrayLike] | Iterable[str], weight: float = 1.0
    ) -> AsyncBucket:
        """One step in buckets: sends these tensors' gradients while the others are still computed. Returns at once;
        ``await`` what it returns for the new weights of these tensors.

        gradients: a bucket by name, copied before this returns; or names, whose gradients are in ``gradient_buffers``
            and stay as they are until the bucket is done.
        weight: of the whole step, as in ``push``; the same in each of its buckets.

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
        async with self._steps.call(Phase.PUSH):
            return await self._steps.give_bucket(gradients, weight)

    async def push_async(self, gradients: Mapping[str, ArrayLike] | Iterable[str], weight: float = 1.0) -> AsyncBucket:
        """As ``push_pull_async``, but no weights are asked for: ``await`` what it returns for the end of the push, and
        then ``pull``. All buckets of a step are given by the same of the two, else InvalidArgumentError."""
        async with self._steps.call():
            return await self._steps.give_bucket(gradients, weight, reads=False)

    async def release_memory(self, *, shared: bool = True) -> None:
        """Gives the memory of gradients and of pulled weights back to the system, once the push under way is answered;
        later calls take it anew. Arrays of ``gradient_buffers`` and ``pull(copy=False)`` are not valid after it.

        For a parameter set that is used for a small part of the time. What a codec left out of gradients, and what
        servers send differences to, is kept. Raises as ``push``, for a step in buckets that failed or misses tensors.

        shared: gives memory of gradients back even if other parameter sets have theirs there, too
            (``share_gradient_memory``). What they wrote to it is lost.
        """
        async with self._steps.call():
            await self._steps.release_memory(shared=shared)

    async def share_gradient_memory(self, other: AsyncParameters | None) -> None:
        """Has the gradients in the memory from now on in which ``other``, of the same client, has those that servers of
        this host read. None: in memory of its own again. For parameter sets of the same size and compression that take
        turns, so that memory is not given back and taken anew for each.

        One of them has its turn from ``gradient_buffers``, or the first gradient that is given, until its push has
        returned, or all of its buckets were waited for. Meanwhile nothing is written to the gradients of the others.
        Where no memory is shared with a server, each has its own. Arrays of ``gradient_buffers`` that were got before
        are not valid any more.

        Raises InvalidArgumentError where sizes or dtypes on the wire differ; and as ``push``, for a step in buckets
        that failed or misses tensors.
        """
        async with self._steps.call():
            mine, theirs = self.exchange.shared_memory, None if other is None else other.exchange.shared_memory
            if theirs is not None:
                mine.check_turns(theirs)
            await self._steps.release_memory(shared=False)
            await mine.take_turns(theirs)

    async def gradient_buffers(self, device: str | None = None, *, is_checked: bool = True) -> dict[str, Any]:
        """Writable float32 arrays, always the same, for the gradients: pushing exactly these copies nothing in this
        process, and where memory is shared, not to the servers either.

        Gradients must be written into them for every push; a warning is logged where five pushes in a row found nothing
        new in them. torch's ``zero_grad()`` takes its gradients out of them: use ``zero_grad(set_to_none=False)``.
        A push of other arrays, or in buckets, may overwrite them. Not to be written while a push of them is under way.

        device: "cuda" or "cuda:N" gives CuPy's arrays in the memory of that device, which torch takes without a copy
            (``torch.from_dlpack``). Names in a bucket mean the buffers that were asked for last.
        is_checked: False logs no such warning: for a caller that always writes all of them, as psdist.torch does.
        Raises InvalidArgumentError, DeviceUnavailableError and DeviceLostError for ``device``.
        """
        async with self._steps.call():
            return await self._steps.gradient_buffers(device, is_checked)

    async def keep_state(self, save: Save, restore: Restore, *, prefix: str = "") -> None:
        """Has something of this worker in every snapshot: what its pushes change and no server knows, such as the rest
        that a codec left out of gradients so far.

        save: gives it as a dict of numpy arrays, which stay as they are until the push is over that begins next. They
            have any shape, and numbers of at most 8 bytes (no complex ones). Called whenever a push begins and between
            pushes, on psdist's loop: quick, and without calls of psdist.
        restore: gets the arrays that the worker of this rank handed in: before this returns, where the run goes on from
            a snapshot that has some; and where the run goes back to a snapshot, then an empty dict if that has none.

        prefix: of names, for what psdist itself keeps beside it.

        Register before the first push. A client that is closed has a snapshot taken first, where the run takes one at
        its end: later ones cannot have what it keeps. A worker that joins later, or again, is not given what belonged
        to pushes of long ago.
        Raises NotMemberError, InvalidArgumentError for what ``save`` gives, and what reading it back fails with.
        """
        async with self._steps.call():
            check_member(self.exchange.participation)
            await self._steps.retry(self.exchange.open)
            await self.exchange.participation.keep_state(save, restore, prefix=prefix)

    @asynccontextmanager
    async def quiesce(self) -> AsyncIterator[None]:
        """Nothing is pushed as long as it lasts, and all that was pushed before is applied. For ``snapshot``.

        Raises InvalidArgumentError where that cannot be had without another call of the user.
        """
        async with self._steps.call():
            await self._steps.finish()
            yield

    async def open(self) -> None:
        """Has what compression leaves out of gradients in snapshots. ``AsyncClient.parameters`` does it."""
        async with self._steps.call():
            pass

    async def close(self) -> None:
        """Ends what is under way, and gives shared memory back. The client does it when it is closed."""
        await self._steps.close()


def _compression(exchange: Exchange, encoding: Encoding | None) -> CompressionStatistics:
    options = exchange.options
    if encoding is not None:
        return CompressionStatistics(encoding.ratio, encoding.residual_norm, options.reason, encoding.works_on_device)
    ratio = ITEM_BYTES["float32"] / ITEM_BYTES[options.cast.dtype]
    return CompressionStatistics(ratio, choice=options.reason)
