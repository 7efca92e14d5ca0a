"""``Client`` and ``Parameters``: the synchronous API over ``AsyncClient``.

Every call runs on the one background loop of the process (``loop``) and blocks until it is done. Ctrl-C cancels the
call. Several threads may call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from numpy.typing import ArrayLike, NDArray

from psdist.client.async_client import AsyncClient
from psdist.client.bucket_step import AsyncBucket
from psdist.client.core.partition import Arrays
from psdist.client.datasets import Dataset
from psdist.client.parameters import AsyncParameters
from psdist.client.process import loop
from psdist.client.process.process_bound import ProcessBound
from psdist.client.process.sigterm import sigterm
from psdist.client.reporting.phase_timer import PhaseTimer
from psdist.client.session.drops import OnDrop
from psdist.client.session.worker_state import Restore, Save
from psdist.client.snapshots import SnapshotInfo
from psdist.client.steps import Statistics
from psdist.compression import Codec
from psdist.consistency import Consistency
from psdist.metrics.interval import Measurements
from psdist.metrics.phases import Phase
from psdist.optim import Optimizer
from psdist.settings.config import TransportName
from psdist.types import DType, Layout, NonFinite, ParametersSpec
from psdist.v1.scheduler_pb2 import GetStatusResponse


class Client(ProcessBound):
    """A worker of a run, which joins it when it is made.

    scheduler: host:port; None reads ``PSDIST_SCHEDULER``, else waits for the file of ``PSDIST_SCHEDULER_FILE``.
    token: the run's join token; None reads ``PSDIST_TOKEN``, else the file of ``PSDIST_TOKEN_FILE``.
    run_id: refuses to join another run; None reads ``PSDIST_RUN_ID``, and joins whatever run there is without it.
    worker_id: None lets the scheduler choose ``worker-<rank>``.
    rank: None reads ``RANK``, else the scheduler gives the lowest free one.
    connect_timeout: seconds for which to look for the scheduler; None reads ``PSDIST_START_TIMEOUT``, which launchers
        set to their ``--start-timeout``, else is 60.
    request_timeout: longest time of one pull, push or push_pull, in seconds; None waits as long as its servers live.
    transport: "auto" shares memory with the servers of this host, and reaches others by direct TCP connections, or by
        gRPC where there can be none. "grpc" uses gRPC alone. "shm" raises SharingUnavailableError where memory cannot
        be shared, "tcp" raises TcpUnavailableError where there can be no direct connection. None reads
        ``PSDIST_TRANSPORT``, else is "auto".
    rejoin: whether a worker that was expelled, because it was silent for longer than its lease, joins again by itself.
        False: every call raises FencedError then.

    Raises ConfigurationError, SchedulerUnreachableError, and what the scheduler refuses with: ProtocolMismatchError,
    WrongRunError, DuplicateMemberError, UnauthenticatedError, LimitExceededError.
    """

    def __init__(
        self,
        scheduler: str | None = None,
        token: str | None = None,
        *,
        run_id: str | None = None,
        worker_id: str | None = None,
        rank: int | None = None,
        connect_timeout: float | None = None,
        request_timeout: float | None = None,
        transport: TransportName | None = None,
        rejoin: bool = True,
    ) -> None:
        self._client = AsyncClient(
            scheduler,
            token,
            run_id=run_id,
            worker_id=worker_id,
            rank=rank,
            connect_timeout=connect_timeout,
            request_timeout=request_timeout,
            transport=transport,
            rejoin=rejoin,
        )
        self._handles: dict[int, Parameters] = {}
        self._client.report_waits(lambda: loop.shared().has_one_caller)
        loop.shared().call(self._client.connect())
        self._client.watch_signals(sigterm.read_signals)

    def close(self) -> None:
        """Leaves the run. Closing again does nothing."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        loop.shared().call(self._client.close(sigterm.reason(error)), ending=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    @property
    def rank(self) -> int:
        """This worker's number in the run, from 0."""
        return self._client.rank

    @property
    def world_size(self) -> int:
        """Workers of the run, as its launcher said."""
        return self._client.world_size

    @property
    def local_rank(self) -> int:
        """This worker's number on its machine, from 0."""
        return self._client.local_rank

    @property
    def worker_id(self) -> str:
        """This worker's name in the run."""
        return self._client.worker_id

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self._client.run_id

    @property
    def incarnation(self) -> int:
        """The number of registrations under this worker id, this one included."""
        return self._client.incarnation

    def joins_late(self, name: str) -> bool:
        """Whether the parameter set was in use before this worker was registered: by ``parameters`` it would join a
        training under way."""
        assert self._client.session is not None  # As in ``phases``.
        return name in self._client.session.membership.ready_before

    @property
    def phases(self) -> PhaseTimer:
        """The clock that divides this worker's time into computing, pushing, waiting and pulling."""
        assert self._client.session is not None  # It is there once the client is connected, and stays.
        return self._client.session.waits.phases

    def measure(self) -> Measurements:
        """What is counted for ``Context.report``, by reading a few numbers."""
        handles = self._client.handles
        return handles.measure() if handles is not None else Measurements()

    def __repr__(self) -> str:
        return repr(self._client).replace("AsyncClient", "Client")

    def parameters(
        self,
        name: str,
        init: Mapping[str, ArrayLike] | None = None,
        optimizer: Optimizer | None = None,
        consistency: Consistency | None = None,
        compression: Codec | str | None = None,
        pull_dtype: DType = "float32",
        non_finite: NonFinite = "reject",
        slice_elements: int = 0,
        on_drop: OnDrop = "warn",
        reset_optimizer: bool = False,
        pull_compression: Codec | str | None = None,
    ) -> Parameters:
        """Creates a parameter set, or attaches to it after checking that layout and settings agree.

        init: initial values by tensor name; their order, shapes and dtypes are the layout. Where several workers
            create at once, the lowest rank's values count. None attaches for reading only, once the set exists.
        optimizer: one of ``psdist.optim``, which runs on the servers. Needed with ``init``.
        consistency: ``BSP()`` (the default), ``SSP(staleness)`` or ``ASP()``.
        compression: how gradients are sent: a codec of ``psdist.compression``, or the name of one with its defaults:
            "float32" (the default), "bfloat16", "float16", "int8", "topk" and others. Workers may use different ones.
        pull_dtype: dtype of weights on the wire: "float32", "bfloat16" or "float16".
        pull_compression: a codec, or its name, by which all workers get what the weights have over those that they
            hold: Int8, Int4, Int2, OneBit, TopK, ChunkedTopK or RandomK. What it leaves out is in the next difference.
            Workers compute on these weights, which are the same for all. With it ``pull_dtype`` is "float32".
        non_finite: what NaN and Inf in a gradient do: "reject" raises NonFiniteGradientError, "skip" leaves this
            worker out of the step.
        slice_elements: elements of one slice, at most 2**20. 0 lets psdist choose; it chooses smaller slices where the
            run has several hosts, which are told apart by their names. Another size may change the last bits of the
            weights with ``max_grad_norm``, and what is left out of them with ``pull_compression``.
        on_drop: what happens where a push of this worker is dropped: "warn" logs, and raises PushDroppedError for the
            third in a row; "raise" raises it for the first; "ignore" logs it as information.
        reset_optimizer: begins the optimizer's state anew where the run goes on from a snapshot.

        Optimizer, consistency, non_finite, slice_elements, reset_optimizer and pull_compression must be the same in all
        workers. Called again for the same name it returns the same handle: compression, pull_dtype and on_drop may be
        left out then, and others raise SettingsMismatchError. Returns when all workers of the run's start have called
        it. Raises LayoutMismatchError, SettingsMismatchError, UnknownCodecError, DTypeMismatchError, InvalidNameError,
        InvalidArgumentError, ServerLostError, ClosedError; FencedError where this worker was expelled and does not
        rejoin; MutualWaitError where the others wait for it elsewhere.
        """
        settings = (optimizer, consistency, compression, pull_dtype, non_finite, slice_elements, on_drop)
        handle = loop.shared().call(self._client.parameters(name, init, *settings, reset_optimizer, pull_compression))
        return self._handles.setdefault(id(handle), Parameters(handle))

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Declare one iteration of the script: see ``Context.iteration``."""
        loop.shared().call(self._mark_iteration())
        yield  # After an error the iteration is not over.
        loop.shared().call(self._mark_iteration())

    async def _mark_iteration(self) -> None:
        assert self._client.session is not None  # As in ``phases``.
        self._client.session.iterations.mark_boundary()

    def dataset(
        self,
        name: str,
        size: int,
        range_size: int,
        shuffle: bool = True,
        seed: int = 0,
        data_epochs: int = 1,
        retries_max: int = 3,
    ) -> Dataset:
        """A data set of ``size`` samples whose ranges are handed out to all workers that iterate over it.

        range_size: samples of one range, which comes as an int64 array of indices.
        shuffle, seed: whether the samples come in another order in each data epoch, which depends on ``seed``.
        data_epochs: how often all samples are used; 0 goes on for ever.
        retries_max: how often a range whose worker was lost is given to another before it is left out.

        All workers must agree on these. Called again for the same name it returns the same handle. Raises
        SettingsMismatchError, InvalidNameError, InvalidArgumentError, LimitExceededError.
        """
        settings = (name, size, range_size, shuffle, seed, data_epochs, retries_max)
        return Dataset(loop.shared().call(self._client.dataset(*settings)))

    def snapshot(self, timeout: float | None = None) -> SnapshotInfo:
        """Takes a snapshot of the run: all parameter sets with their optimizers' state, and where data sets stand.

        Returns when it is committed. It holds every push that this worker has made. Ranks that call it at the same step
        share one.

        timeout: seconds; the snapshot may be committed later all the same.
        Raises NoStorageError where the run has no storage; SnapshotFailedError and StorageError where the snapshot was
        given up, which changes nothing else; WaitTimeoutError; FencedError if this worker was expelled while it waited,
        or the run went back to a snapshot: then call it again. InvalidArgumentError while a step is given in buckets,
        and after a push that failed, which has to be made first.
        """
        with self.phases.call(Phase.WAIT):
            return loop.shared().call(self._client.snapshot(timeout))

    def request_snapshot(self, timeout: float | None = None) -> None:
        """Asks for a snapshot of the run, and returns once the scheduler knows of it. Training goes on meanwhile, and
        the log tells how it ended.

        timeout: seconds to wait for the scheduler's answer.
        Raises NoStorageError, WaitTimeoutError, SnapshotFailedError, StorageError.
        """
        loop.shared().call(self._client.request_snapshot(timeout))

    def barrier(self, name: str = "default", timeout: float | None = None) -> None:
        """Returns when all live workers, and no fewer than the run's minimum, have called it with this name.

        timeout: seconds; None waits for ever.
        Raises WaitTimeoutError, which names the missing workers: then this arrival is withdrawn and lets nobody pass,
        or the message says that this is not known. MutualWaitError where the others wait for this worker elsewhere.
        InvalidNameError, ClosedError, and FencedError where this worker was expelled and does not rejoin.
        """
        with self.phases.call(Phase.WAIT):
            loop.shared().call(self._client.barrier(name, timeout))

    def status(self) -> GetStatusResponse:
        """The run as the scheduler sees it: members, parameter sets, waits and events.

        A protobuf message; ``proto/psdist/v1/scheduler.proto`` says what its fields are. Raises
        SchedulerUnreachableError.
        """
        return loop.shared().call(self._client.status(), reading=True)


class Parameters(ProcessBound):
    """Named tensors that live on the servers. Made by ``Client.parameters``.

    Calls of several threads run one after another. A call that fails does not advance the step: call it again with the
    same gradients. A worker that was expelled rejoins by itself within a call.
    """

    def __init__(self, handle: AsyncParameters) -> None:
        self._handle = handle
        self._phases = handle.exchange.phases

    @property
    def name(self) -> str:
        """The parameters' name."""
        return self._handle.name

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in order."""
        return self._handle.names

    @property
    def layout(self) -> Layout:
        """Names, shapes and dtypes, in order."""
        return self._handle.layout

    @property
    def spec(self) -> ParametersSpec:
        """The settings that all workers agree on."""
        return self._handle.spec

    @property
    def is_member(self) -> bool:
        """Whether this client takes part in the training, or only reads."""
        return self._handle.is_member

    @property
    def step(self) -> int:
        """Number of the next push."""
        return self._handle.step

    @property
    def first_step(self) -> int:
        """BSP: the first step that this worker contributes to."""
        return self._handle.first_step

    @property
    def restored(self) -> str | None:
        """Directory of the snapshot that the values came from; None where they began with ``init``."""
        return self._handle.restored

    @property
    def version(self) -> int:
        """Version of the weights last pulled (the least of any slice): in BSP steps, in SSP and ASP updates."""
        return self._handle.version

    @property
    def staleness(self) -> int:
        """SSP and ASP: staleness of the last gradient, in versions."""
        return self._handle.staleness

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
        return self._handle.lr_factor

    @lr_factor.setter
    def lr_factor(self, factor: float | None) -> None:
        self._handle.lr_factor = factor

    def statistics(self) -> Statistics:
        """Counters of this handle."""
        return self._handle.statistics()

    def __repr__(self) -> str:
        return repr(self._handle).replace("AsyncParameters", "Parameters")

    def pull(
        self, out: Mapping[str, NDArray[Any]] | None = None, copy: bool = True, device: str | None = None
    ) -> Arrays:
        """The weights by name, in their declared dtypes and shapes.

        out: arrays to write into; else the arrays are the caller's own. After an error their content is undefined.
        copy: False gives read-only arrays instead, which are valid until the next call on this parameter set (in a step
            in buckets, until their tensor is given). None are allocated: they are the servers' own memory, or memory
            that each such call uses again.
        device: "cuda" or "cuda:N" gives CuPy's arrays in the memory of that device; with ``copy=False`` in memory that
            each such call uses again. torch takes them without a copy (``torch.from_dlpack``).

        BSP: waits until the step that this worker is at is complete. SSP: waits until no worker is further behind than
        the bound.
        Raises ServerLostError, FencedError, ClosedError, WaitTimeoutError; SharingUnavailableError and
        TcpUnavailableError with transport "shm" and "tcp"; MutualWaitError where the others wait for this worker
        elsewhere; InvalidArgumentError for ``out`` together with ``copy=False`` or ``device``, for another device than
        before and while a step is given in buckets; UnknownTensorError, MissingTensorError, ShapeMismatchError and
        DTypeMismatchError for ``out``; DeviceUnavailableError, which names what is missing, and DeviceLostError.
        """
        with self._phases.call(Phase.WAIT):
            return loop.shared().call(self._handle.pull(out, copy, device), reading=True)

    def push(self, gradients: Mapping[str, ArrayLike], weight: float = 1.0) -> None:
        """Sends the gradient of the next step. Returns when it is applied, or dropped (``statistics().dropped``)
        because this worker had been expelled and the others had gone on without it.

        gradients: an array for each tensor, by name, in its shape. The arrays of ``gradient_buffers`` are sent without
            a copy. Arrays in the memory of a CUDA device (CuPy's, torch's, and others by ``__cuda_array_interface__``
            or DLPack) are encoded there where the codec has kernels for it, so that only payloads are copied to the
            host; else they are copied.
        weight: what it counts for in the mean of its step (BSP), such as the number of samples or tokens that it is
            the mean of. The gradient that is applied is sum(weight * gradient) / sum(weight), in rank order and
            float32. 0 contributes nothing.

        Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError and NonFiniteGradientError
        before anything is sent; NotMemberError for a parameter set that was opened for reading; ServerLostError,
        FencedError, ClosedError, WaitTimeoutError; MutualWaitError where the others wait for this worker elsewhere;
        PushDroppedError as ``on_drop`` of ``Client.parameters`` says; DeviceUnavailableError and DeviceLostError for
        arrays of a device. Calling again with the same gradients goes on with the same step.
        """
        with self._phases.call(Phase.PUSH):
            loop.shared().call(self._handle.push(gradients, weight))

    def push_pull(
        self,
        gradients: Mapping[str, ArrayLike],
        out: Mapping[str, NDArray[Any]] | None = None,
        copy: bool = True,
        weight: float = 1.0,
        device: str | None = None,
    ) -> Arrays:
        """One step: sends the gradient, and returns the weights with it in them by name.

        gradients: an array for each tensor, by name, in its shape. They may be overwritten once the call returns. The
            arrays of ``gradient_buffers`` are sent without a copy.
        out: arrays to write the weights into; else the arrays are the caller's own.
        copy: False gives read-only arrays instead, which are valid until the next call on this parameter set.
        weight: what it counts for in the mean of its step, as in ``push``.
        device: "cuda" or "cuda:N" gives the weights as CuPy's arrays in the memory of that device, as in ``pull``.

        BSP: returns when all workers have pushed this step. SSP: waits until no worker is further behind than the
        bound. ASP: waits for no other worker. Where the push was dropped, the weights are those of this worker's new
        first step.
        Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError and NonFiniteGradientError
        before anything is sent; NotMemberError, ServerLostError, FencedError, ClosedError, WaitTimeoutError;
        SharingUnavailableError with transport "shm", TcpUnavailableError with "tcp"; MutualWaitError where the others
        wait for this worker elsewhere; PushDroppedError as ``on_drop`` of ``Client.parameters`` says;
        InvalidArgumentError for ``out`` together with ``copy=False`` or ``device``, for another device than before and
        while a step is given in buckets; DeviceUnavailableError and DeviceLostError. Calling again with the same
        gradients goes on with the same step.
        """
        with self._phases.call(Phase.PUSH):
            return loop.shared().call(self._handle.push_pull(gradients, out, copy, weight, device))

    def push_pull_async(self, gradients: Mapping[str, ArrayLike] | Iterable[str], weight: float = 1.0) -> Bucket:
        """One step in buckets: sends these tensors' gradients while the others are still computed. Returns at once;
        ``wait`` on what it returns gives the new weights of these tensors.

        gradients: a bucket of arrays by name, copied before this returns; or names, whose gradients are in
            ``gradient_buffers`` and stay as they are until the bucket is done.
        weight: of the whole step, as in ``push``; the same in each of its buckets.

        The first call begins a step, which is complete when all tensors were given once, in any order. The next step
        begins with the call after that, which first waits until this one is answered. While tensors are missing, pull,
        push and push_pull raise InvalidArgumentError.

        Raises as ``push`` before anything of the bucket is sent; the tensors may then be given again.
        InvalidArgumentError for a tensor that was given before, and in SSP and ASP with ``max_grad_norm``. FencedError
        once where the whole step was dropped, because this worker was expelled and the others closed the step without
        it.
        """
        with self._phases.call(Phase.PUSH):
            return Bucket(loop.shared().call(self._handle.push_pull_async(gradients, weight)), self._phases)

    def push_async(self, gradients: Mapping[str, ArrayLike] | Iterable[str], weight: float = 1.0) -> Bucket:
        """As ``push_pull_async``, but no weights are asked for: ``wait`` on what it returns gives an empty dict when
        the bucket is answered, and ``pull`` has the weights. All buckets of a step are given by the same of the two,
        else InvalidArgumentError."""
        with self._phases.call(Phase.PUSH):
            return Bucket(loop.shared().call(self._handle.push_async(gradients, weight)), self._phases)

    def start_pull(self, out: Mapping[str, NDArray[Any]] | None = None, copy: bool = True) -> loop.StartedCall[Arrays]:
        """Begins a ``pull``, and returns at once: ``result()`` of what it returns waits for the weights. Until then
        ``out`` is psdist's."""
        return loop.shared().start(self._handle.pull(out, copy), reading=True)

    def release_memory(self, *, shared: bool = True) -> None:
        """Gives the memory of gradients and of pulled weights back to the system, once the push under way is answered;
        later calls take it anew. Arrays of ``gradient_buffers`` and ``pull(copy=False)`` are not valid after it.

        For a parameter set that is used for a small part of the time. What a codec left out of gradients is kept.
        Raises as ``push``, for a step in buckets that failed or misses tensors.

        shared: gives memory of gradients back even if other parameter sets have theirs there, too
            (``share_gradient_memory``). What they wrote to it is lost.
        """
        loop.shared().call(self._handle.release_memory(shared=shared))

    def share_gradient_memory(self, other: Parameters | None) -> None:
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
        handle = None if other is None else other._handle
        loop.shared().call(self._handle.share_gradient_memory(handle))

    def keep_state(self, save: Save, restore: Restore, *, prefix: str = "") -> None:
        """Has something of this worker in every snapshot: what its pushes change and no server knows, such as the rest
        that a codec left out of gradients so far. Register before the first push.

        save: gives it as a dict of numpy arrays. Called whenever a push begins and between pushes, on psdist's thread:
            it must be quick and make no calls of psdist.
        restore: gets the arrays that the worker of this rank had in the snapshot that the run goes on from; an empty
            dict where the run goes back to a snapshot that has none.
        prefix: of names, for what psdist itself keeps beside it.

        Raises NotMemberError, InvalidArgumentError for what ``save`` gives, and what reading it back fails with.
        """
        loop.shared().call(self._handle.keep_state(save, restore, prefix=prefix))

    def gradient_buffers(self, device: str | None = None, *, is_checked: bool = True) -> dict[str, Any]:
        """Writable float32 arrays in the tensors' shapes, by name, always the same: pushing exactly these copies
        nothing in this process, and where memory is shared, not to the servers either.

        Gradients must be written into them for every push; a warning is logged where five pushes in a row found nothing
        new in them. torch's ``zero_grad()`` takes its gradients out of them: use ``zero_grad(set_to_none=False)``. Do
        not write to them while a push of them is under way. A push of other arrays, or in buckets, may overwrite them.

        device: "cuda" or "cuda:N" gives CuPy's arrays in the memory of that device, which torch takes without a copy
            (``torch.from_dlpack``). Names in a bucket mean the buffers that were asked for last.
        is_checked: False logs no such warning: for a caller that always writes all of them, as psdist.torch does.
        Raises InvalidArgumentError, DeviceUnavailableError and DeviceLostError for ``device``.
        """
        return loop.shared().call(self._handle.gradient_buffers(device, is_checked=is_checked))


class Bucket(ProcessBound):
    """Tensors of one step that were given together. Made by ``Parameters.push_pull_async``."""

    def __init__(self, bucket: AsyncBucket, phases: PhaseTimer) -> None:
        self._bucket = bucket
        self._phases = phases

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in the layout's order."""
        return self._bucket.names

    def done(self) -> bool:
        """Whether ``wait`` would not wait."""
        return self._bucket.done()

    def wait(self, timeout: float | None = None) -> Arrays:
        """The new weights of the bucket's tensors by name: read-only arrays, as by ``pull(copy=False)``.

        timeout: seconds; None waits for ever. After WaitTimeoutError call it again to go on.
        Raises InvalidArgumentError where it would wait for ever, because slices of these tensors also hold parts of
        tensors that were not given; MutualWaitError where the others wait for this worker elsewhere; FencedError where
        the step was dropped: begin the next one; and the error with which sending failed: then give the bucket's
        tensors again, and those of the buckets that were under way with it.
        """
        with self._phases.call(Phase.WAIT):
            return loop.shared().call(self._bucket.wait(timeout))

    def __repr__(self) -> str:
        return repr(self._bucket).replace("AsyncBucket", "Bucket")
