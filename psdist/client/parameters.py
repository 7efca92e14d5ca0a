"""``AsyncParameters``: pull, push and push_pull of one parameter set.

Calls of several tasks on one handle run one after another, so that steps stay in order. Invalid input raises before
anything is sent. A call that fails or is cancelled does not advance the step. Calling again sends under the same
number, and the servers take only the slices that they lack. So give the same gradient again: a different one would
count only for those slices.

A worker that was expelled while it lived (it was silent for longer than ``--worker-timeout``, or cut off) rejoins
automatically. Its next incarnation resumes the push that it was making, or had computed, if it is still valid: in SSP
and ASP always, in BSP while no slice has closed the step without it. Otherwise the other workers have moved past that
step. The push is dropped, counted and reported, and the worker continues at a step that the others have not reached.
When the run rolls back to a snapshot, every worker's push is dropped. The next step then follows the snapshot's cut,
and its number is lower.

Not here: the order of pushes (``push_order``), one push (``push``), requests (``participation``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from numpy.typing import ArrayLike, NDArray

from psdist.client.core.flat_vector import Arrays, WrittenWeights
from psdist.client.encoding import Encoding
from psdist.client.participation import Options, Participation
from psdist.client.push import AsyncBucket
from psdist.client.push_order import PushOrder
from psdist.client.session.loop import ProcessBound
from psdist.client.session.membership import DropCounter, OnDrop
from psdist.client.session.worker_state import (
    RANDOM,
    Restore,
    Save,
    restore_random_generators,
    save_random_generators,
)
from psdist.client.transport.buffers import PullDestination, PullTarget
from psdist.device.device import device_number
from psdist.errors import InvalidArgumentError
from psdist.hyperparameters import by_group
from psdist.monitoring.metrics import Measurements, Phase
from psdist.off_loop import in_thread, off_loop
from psdist.types import ITEM_BYTES, Layout, ParametersSpec


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


class AsyncParameters(ProcessBound):
    """Named tensors that live on the servers. Made by ``AsyncClient.parameters``.

    Calls of several tasks run one after another. A call that fails does not advance the step: call it again with the
    same gradients. A worker that was expelled while it lived rejoins within a call.
    """

    def __init__(self, participation: Participation, on_drop: OnDrop = "warn") -> None:
        self.spec: ParametersSpec = participation.current.entry.spec
        #: Names, shapes and dtypes, in order.
        self.layout: Layout = participation.layout
        #: True if this client takes part in the training; else it only reads.
        self.is_member = participation.is_member
        #: This worker's part in the set, with its requests, for tests and tools.
        self.participation = participation
        self._order = PushOrder(participation, DropCounter(on_drop))
        self._generation = participation.generation

    # --- properties ---

    @property
    def name(self) -> str:
        """Name of the parameter set."""
        return self.spec.name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, in order."""
        return tuple(tensor.name for tensor in self.layout.tensors)

    @property
    def step(self) -> int:
        """Number of the next push: its step in BSP, its sequence number in SSP and ASP."""
        return self.participation.current.sequence.step

    @property
    def first_step(self) -> int:
        """BSP: the first step to which this worker contributes."""
        return self.participation.current.sequence.first_step

    @property
    def restored(self) -> str | None:
        """Directory of the snapshot that the values were loaded from, at the start or at the last rollback. None if
        they come from ``init``."""
        restore = self.participation.current.entry.restore
        return restore.directory if restore is not None else None

    @property
    def version(self) -> int:
        """Version of the weights last pulled, the lowest of any slice: in BSP counted in steps, in SSP and ASP in
        updates."""
        return self.participation.current.sequence.version

    @property
    def staleness(self) -> int:
        """SSP and ASP: versions between the weights that the last gradient was computed on and its use; the most of any
        slice."""
        return self._order.counters.staleness_max

    @property
    def lr_factor(self) -> float | None:
        """Factor on the learning rate of this worker's later pushes, on top of the optimizer's schedule. None leaves
        the choice to the other workers, and is the default.

        It serves rates that are not known in advance, such as after a validation that stopped improving. With FTRL the
        factor scales the gradient.

        BSP: a step has one learning rate, so all workers that set a factor must set the same one. It is that of the
        worker that has taken part longest; pushes of other workers with a different factor raise InvalidArgumentError.
        SSP and ASP: each push has its own. Snapshots do not store the factor: a script that resumes from one, or is
        restarted, sets it again. Setting it raises InvalidArgumentError if it is out of range.
        """
        return self.participation.push_options.lr_factor

    @lr_factor.setter
    def lr_factor(self, factor: float | None) -> None:
        options = self.participation.push_options
        checked = None if factor is None else self.spec.optimizer.check_lr_factor(factor)
        if checked is not None:
            self.spec.optimizer.check_rates(checked, options.settings or ())
        self.participation.push_options = replace(options, lr_factor=checked)

    @property
    def settings(self) -> dict[int, dict[str, float]] | None:
        """Hyperparameters of this worker's later pushes that differ from the specification's, by group. None leaves the
        choice to the other workers, and is the default.

        Group 0 is the optimizer's own, group i that of override number i. Names are those of ``override``, ``lr``
        included, which the schedule and ``lr_factor`` multiply: ``{0: {"momentum": 0.85}, 1: {"weight_decay": 0.1}}``.
        The mapping is complete: numbers that it lacks are as specified, so ``{}`` returns to the specification.

        BSP: as for ``lr_factor``, all workers that set hyperparameters must set the same ones. SSP and ASP: each push
        has its own. Snapshots do not store them: a script that resumes from one, or is restarted, sets them again.

        Setting it raises InvalidArgumentError for a group or name that does not exist, a value out of its range, and a
        hyperparameter that cannot change while training: True or False, one that decides which state exists (momentum
        from or to 0), one that only begins the state, and ``beta1`` and ``momentum_decay`` of NAdam.
        """
        settings = self.participation.push_options.settings
        return None if settings is None else by_group(settings)

    @settings.setter
    def settings(self, settings: Mapping[int, Mapping[str, float]] | None) -> None:
        options = self.participation.push_options
        checked = None if settings is None else self.spec.optimizer.check_settings(settings)
        self.spec.optimizer.check_rates(options.lr_factor or 0.0, checked or ())
        self.participation.push_options = replace(options, settings=checked)

    def measure(self) -> Measurements:
        """Return the counters of ``Context.report``. Reads only a few numbers."""
        sequence, traffic = self.participation.current.sequence, self.participation.traffic
        counters, dropped = self._order.counters, self._order.drops.count
        step = sequence.step if sequence.synchronous else sequence.version
        staleness = counters.staleness_mean, counters.staleness_max
        return Measurements(step, *staleness, traffic.sent, traffic.received, dropped, counters.abstained)

    def statistics(self) -> Statistics:
        """Return the counters of this handle."""
        part = self.participation
        return Statistics(
            **asdict(self._order.counters),
            resent=part.delivery.resent,
            dropped=self._order.drops.count,
            resumed=part.resumed,
            rolled_back=part.generation - self._generation,
            push_bytes=part.traffic.sent,
            pull_bytes=part.traffic.received,
            compression=_compression(part.options, self._order.encoding),
            transport=part.transport(),
            transports=part.transports(),
        )

    def __repr__(self) -> str:
        role = f"step {self.step}" if self.is_member else "reading"
        count = len(self.layout.tensors)
        return (
            f"<{type(self).__name__} {self.name!r}: {count} tensor{'' if count == 1 else 's'}, "
            f"{self.layout.starts[-1]} elements, version {self.version}, {role}>"
        )

    # --- the calls ---

    async def pull(
        self, out: Mapping[str, NDArray[Any]] | None = None, copy: bool = True, device: str | None = None
    ) -> Arrays:
        """Return the weights by name, in their declared dtypes and shapes.

        out: arrays to write into. None returns arrays of the caller's own. After an error the content of ``out`` is
            undefined.
        copy: False returns read-only arrays, valid until the next call on these parameters (in a step in buckets, until
            their tensor is given). They are the servers' own memory if that is shared and does not change between steps
            (BSP without backup workers), else memory that each such call reuses. Neither allocates.
        device: "cuda" or "cuda:N" returns CuPy arrays in the memory of that device, which torch takes without a copy
            (``torch.from_dlpack``). With ``copy=False`` they use the same memory each time.

        BSP: waits until the step before this worker's next one is complete. SSP: waits until no member is further
        behind than the bound.

        Raises ServerLostError, FencedError, ClosedError, WaitTimeoutError, SharingUnavailableError (transport "shm"),
        TcpUnavailableError (transport "tcp"), MutualWaitError (only with ``Client``) if the other workers wait for this
        one elsewhere, InvalidArgumentError for ``out`` together with ``copy=False`` or ``device``, for another device
        than before and while a step is given in buckets; DeviceUnavailableError and DeviceLostError. For ``out``:
        UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError, and InvalidArgumentError for
        anything but writable numpy arrays.
        """
        async with self._order.call(Phase.WAIT):
            return await self._pull(await self._destination(out, copy, device))

    async def push(self, gradients: Mapping[str, ArrayLike], weight: float = 1.0, absent: Iterable[str] = ()) -> None:
        """Send the gradient of the next step. Returns when it is applied, or dropped (``statistics().dropped``) because
        this worker had been expelled and the other workers continued without it.

        gradients: an array for each tensor, by name, in its shape. Exactly the arrays of ``gradient_buffers`` are sent
            from their memory; others are first copied into one vector. Arrays in the memory of a CUDA device (CuPy's,
            torch's, and others by ``__cuda_array_interface__`` or DLPack) are encoded there if the codec has kernels
            for it, so that only payloads are copied to the host. Otherwise the arrays are copied.
        weight: weight in the mean of its step (BSP), such as the number of samples or tokens behind it: 1e-18 to 1e18.
            The applied gradient is sum(weight * gradient) / sum(weight): float32 products, added to zeros in rank
            order, over the sum of the weights. 0 contributes nothing.
        absent: names of the tensors that have no gradient. They count as zeros, whatever their arrays hold. If no
            worker has a gradient for a tensor in a step (SSP and ASP: in this push), its weights, its optimizer state
            and its own count of updates stay as they are, as in torch.

        Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError and NonFiniteGradientError
        before anything is sent; NotMemberError if the set was opened for reading; ServerLostError, FencedError,
        ClosedError, WaitTimeoutError; MutualWaitError as in ``pull``: calling again continues this push;
        PushDroppedError according to ``on_drop``: the worker takes part again, and the next call continues.
        DeviceUnavailableError and DeviceLostError for arrays of a device. Calling it again with the same gradients
        retries the same step.
        """
        async with self._order.call(Phase.PUSH):
            await self._order.push(gradients, weight, absent)

    async def push_pull(
        self,
        gradients: Mapping[str, ArrayLike],
        out: Mapping[str, NDArray[Any]] | None = None,
        copy: bool = True,
        weight: float = 1.0,
        device: str | None = None,
        absent: Iterable[str] = (),
    ) -> Arrays:
        """Make one step: send the gradient, and return the weights that include it, by name.

        If the push was dropped, the weights are those of this worker's new first step. The gradients may be overwritten
        once the call returns.

        gradients, weight, absent: as in ``push``.
        out, copy, device: as in ``pull``.

        BSP: returns when all workers have pushed this step. SSP: waits until no worker is further behind than the
        bound. ASP: waits for no other worker. Raises as ``push`` and ``pull``. Calling it again with the same gradients
        retries the same step.
        """
        async with self._order.call(Phase.PUSH):
            destination = await self._destination(out, copy, device)
            if (target := await self._order.push(gradients, weight, absent, destination)) is None:
                return await self._pull(destination)
            return await self._arrays(target, destination)

    async def _destination(
        self, out: Mapping[str, NDArray[Any]] | None, copy: bool, device: str | None
    ) -> PullDestination:
        there = None if device is None else await self._order.gradients.on_named(device)
        return PullDestination(out, copy, there)

    async def _pull(self, destination: PullDestination) -> Arrays:
        order = self._order

        async def pull_once() -> PullTarget:
            await order.begin()
            target = order.results.target(destination)
            await order.pull_into(target)
            self.participation.set_outdated(False)
            return target

        return await self._arrays(await order.retry(pull_once), destination)

    async def _arrays(self, target: PullTarget, destination: PullDestination) -> Arrays:
        """Return the arrays for the user once all weights have arrived in ``target``."""
        waits, results = destination.there is not None, self._order.results
        return await off_loop(self.layout.total, partial(results.arrays, target, destination), waits=waits)

    async def push_pull_async(
        self, gradients: Mapping[str, ArrayLike] | Iterable[str], weight: float = 1.0, absent: Iterable[str] = ()
    ) -> AsyncBucket:
        """Send a bucket of one step: the gradients of some tensors, while the others are still computed. Returns
        without waiting for the servers; ``await`` the returned bucket for the new weights of these tensors.

        gradients: a bucket by name, copied before this returns; or names, whose gradients are in ``gradient_buffers``
            and must not change until the bucket is done.
        weight: weight of the whole step, as in ``push``; the same in each of its buckets.
        absent: names of the bucket's tensors that have no gradient, as in ``push``.

        The first call begins a step. The step is complete when all tensors were given once, in any order. A slice is
        sent when all tensors that touch it were given. The call after that begins the next step, and first waits until
        this one is answered. While tensors are missing, pull, push and push_pull raise InvalidArgumentError.

        Raises as ``push`` before anything of the bucket is sent; the tensors may then be given again. Each bucket is
        checked for NaN and Inf. With "skip", a bucket that has some abstains, with all slices that it touches. If
        sending a bucket fails, its ``wait`` or the next call raises the error, and the bucket must be given again: its
        unanswered slices are sent again under the same number. If this worker was expelled during a step that the
        others closed without it, the whole step is dropped: FencedError says so once, and the next call begins another
        step. PushDroppedError according to ``on_drop``, from the first call after the drop. InvalidArgumentError also
        for a tensor that was given before, and in SSP and ASP with ``max_grad_norm``, which needs the norm of the whole
        gradient before anything can be sent.
        """
        async with self._order.call(Phase.PUSH):
            return await self._order.give_bucket(gradients, weight, absent, reads=True)

    async def push_async(
        self, gradients: Mapping[str, ArrayLike] | Iterable[str], weight: float = 1.0, absent: Iterable[str] = ()
    ) -> AsyncBucket:
        """Send a bucket as ``push_pull_async`` does, without asking for weights. ``await`` the returned bucket for the
        end of the push, and then ``pull``.

        All buckets of a step are given by the same one of the two methods, else InvalidArgumentError.
        """
        async with self._order.call():
            return await self._order.give_bucket(gradients, weight, absent, reads=False)

    async def assign(self, values: Mapping[str, ArrayLike] | None) -> None:
        """Write weights: the servers set these tensors to ``values`` with this worker's next push, before its update.

        values: arrays of some tensors by name, copied before this returns: finite numbers, in the tensors' shapes.
            Tensors that are not named keep their values. Another ``assign`` before that push adds to them. None writes
            nothing, and agrees in BSP with the writes of the others before that step: for a worker that makes steps
            without the script's loop.

        The optimizer's state stays as it is, so momentum continues, as it does in one process whose script writes to
        its weights. Reads show the values once the push is applied. The values belong to that one push: a worker that
        rejoins continues it with them. If it is dropped, or given up because this worker was expelled or the
        run rolled back to a snapshot, they are dropped, too, and a warning says so.

        BSP: all workers write the same before the same step, or none does: otherwise all of their pushes raise
        WrittenWeightsError, which names the ranks, and none is applied. Only a worker that has just joined, or
        contributes nothing, need not write. After that error the next push has the same values again, or those of
        another ``assign`` in their place; ``assign({})`` takes them back. SSP and ASP: any worker may write, and the
        last write of an element wins.

        A push with values goes by gRPC, not by a faster transport. Raises UnknownTensorError, ShapeMismatchError,
        DTypeMismatchError; InvalidArgumentError for NaN or Inf, for a step whose buckets were begun, and with FTRL,
        which computes weights from its state; NotMemberError; PushDroppedError according to ``on_drop``.
        """
        async with self._order.call():
            await self._assign(values)

    async def _assign(self, values: Mapping[str, ArrayLike] | None) -> None:
        part, before = self.participation, self.participation.current
        part.check_member()
        if values is not None:
            self.spec.check_assignable()
        push = self._order.open_push
        if push is None:
            await self._order.retry(self._order.begin)
        elif not push.is_blank:
            raise InvalidArgumentError(
                f"weights of {self.name!r} are written in the middle of step {push.number}: gradients of it were "
                "pushed already. Write before its first gradient"
            )
        now = part.current
        if now.sequence.partly_applied:
            raise InvalidArgumentError(
                f"some slices of {self.name!r} have applied step {now.sequence.step} with the weights that were "
                "assigned before: push its gradient again first"
            )
        written = None
        if values is not None:
            earlier = part.writes.unrefused(now)
            written = await off_loop(self.layout.total, lambda: WrittenWeights.copied(self.layout, values, earlier))
        # If this worker rejoined above without the push that the values are for, the call drops them at its end.
        is_late = before.origin is not part.current.origin
        part.writes.put(written, before if is_late else part.current)
        if push is not None:
            push.update_options()

    async def release_memory(self, *, shared: bool = True) -> None:
        """Return the memory of gradients and pulled weights to the system, once the current push is answered. Later
        calls allocate it again.

        Arrays of ``gradient_buffers`` and ``pull(copy=False)`` become invalid. For a parameter set that is used for a
        small part of the time. A codec's residual and the base of the servers' differences are kept. Raises as
        ``push``, for a step in buckets that failed or misses tensors.

        shared: True also returns gradient memory in which other parameter sets have theirs (``share_gradient_memory``).
            Their unpushed gradients in it are lost.
        """
        async with self._order.call():
            await self._release_memory(shared=shared)

    async def _release_memory(self, *, shared: bool) -> None:
        order = self._order
        await order.end_push()
        release = order.gradients.release_memory
        await in_thread(release) if order.gradients.has_device else release()
        order.results.release_memory()
        await self.participation.shared_memory.release_memory(shared=shared)

    async def share_gradient_memory(self, other: AsyncParameters | None) -> None:
        """Share ``other``'s gradient arena. None: use memory of its own again.

        other: a parameter set of the same client, size and compression. The two take turns in the memory that servers
            of this host read, so that it is not returned and allocated for each. The turn of one begins with
            ``gradient_buffers`` or its first gradient. It ends when its push has returned, or all of its buckets were
            waited for. Nothing may be written to the gradients of the others in between. If no memory is shared with a
            server, each has its own. Arrays of ``gradient_buffers`` from before become invalid.

        Raises InvalidArgumentError if sizes or dtypes on the wire differ; and as ``push``, for a step in buckets that
        failed or misses tensors.
        """
        async with self._order.call():
            mine, theirs = self.participation.shared_memory, None
            if other is not None:
                theirs = other.participation.shared_memory
                theirs.arena.check_like(mine.arena)
            await self._release_memory(shared=False)
            await mine.take_turns(theirs)

    async def gradient_buffers(self, device: str | None = None, *, is_checked: bool = True) -> dict[str, Any]:
        """Return writable float32 arrays for the gradients, by name, in the tensors' shapes, always the same ones. A
        push of exactly these is sent from their memory. Servers that share memory with this process read them in place,
        unless a codec encodes them first.

        Write the gradients into them for every push: a warning is logged if five pushes in a row found them unchanged.
        torch's ``zero_grad()`` takes its gradients out of them, so use ``zero_grad(set_to_none=False)``. A push of
        other arrays, or in buckets, may overwrite them. Do not write to them while a push of them is under way.

        device: "cuda" or "cuda:N" returns CuPy arrays in the memory of that device, which torch takes without a copy
            (``torch.from_dlpack``). Names in a bucket mean the buffers that were returned last.
        is_checked: False logs no such warning: for a caller that always writes all of them, as psdist.torch does.

        Raises InvalidArgumentError, DeviceUnavailableError and DeviceLostError for ``device``.
        """
        async with self._order.call():
            number, gradients = None if device is None else device_number(device), self._order.gradients
            if self._order.open_push is None:
                await self.participation.shared_memory.share_gradients()
            await self._order.retry(self.participation.open)
            if number is None:
                return gradients.buffers(is_checked=is_checked)
            return await in_thread(lambda: gradients.device_buffers(number))

    async def keep_state(
        self,
        save: Save | None = None,
        restore: Restore | None = None,
        *,
        random_generators: bool = False,
        prefix: str = "",
    ) -> None:
        """Save worker-local state in every snapshot: state that the script changes and no server has, such as its place
        in the data.

        Each snapshot of step S contains pushes 0 to S - 1, and the state from the call that made push S - 1. So S
        batches are taken in it, and work that the script does after a push was not done for push S - 1. A script that
        resumes continues behind that call: it first does this work, then takes the next batch. In SSP and ASP pushes
        are those of this worker.

        save: returns the state as a dict of numpy arrays, which are copied. They have any shape, and numbers of at most
            8 bytes (no complex ones). Called on psdist's loop, in each call that makes a push or gives the last part of
            it: it must be quick and must not call psdist.
        restore: receives the arrays that the worker of this rank handed in: before this returns, if the run resumed
            from a snapshot that has some; and at a rollback, in the call whose push is dropped, with an empty dict if
            the snapshot has none.
        random_generators: save and restore the process's random generators, those of Python's ``random``,
            ``numpy.random`` and torch (with CUDA's), too. ``save`` and ``restore`` may be left out then.
        prefix: prefix of the names, for psdist's own state.

        Register before the first push. A client that closes first has a snapshot taken, if the run takes one at its
        end, because later ones cannot contain its state. A worker that joins later, or again, does not receive state
        that belonged to old pushes.

        Raises NotMemberError, InvalidArgumentError for an invalid result of ``save``, and the errors of reading the
        state.
        """
        async with self._order.call():
            self.participation.check_member()
            if (save is None) != (restore is None) or (save is None and not random_generators):
                raise InvalidArgumentError("keep_state() needs save and restore, or random_generators=True alone")
            part = self.participation
            await self._order.retry(part.open)
            if random_generators:
                await part.keep_state(save_random_generators, restore_random_generators, prefix=RANDOM)
            if save is not None and restore is not None:
                await part.keep_state(save, restore, prefix=prefix)

    @asynccontextmanager
    async def quiesce(self) -> AsyncIterator[None]:
        """Hold pushes for an ``async with`` block, in which every earlier push is applied. For ``snapshot``.

        Raises InvalidArgumentError if that needs another call of the user.
        """
        async with self._order.call():
            await self._order.retry(self._order.begin)
            sequence = self.participation.current.sequence
            if sequence.unfinished:
                raise InvalidArgumentError(
                    f"push {sequence.step} of {self.name!r} failed, and servers may have a part of it: push its "
                    "gradient again before a snapshot"
                )
            yield

    async def open(self) -> None:
        """Register the codec's residual for snapshots. Called by ``AsyncClient.parameters``."""
        async with self._order.call():
            pass

    async def close(self) -> None:
        """Cancel calls under way, and return shared memory. Called when the client closes."""
        await self._order.close()


def _compression(options: Options, encoding: Encoding | None) -> CompressionStatistics:
    if encoding is not None:
        return CompressionStatistics(encoding.ratio, encoding.residual_norm, options.reason, encoding.works_on_device)
    ratio = ITEM_BYTES["float32"] / ITEM_BYTES[options.cast.dtype]
    return CompressionStatistics(ratio, choice=options.reason)
