"""``AsyncClient``: one worker's membership in a run, and access to its parameter sets.

Without arguments the client connects by the launcher's environment. Everything runs on the event loop on which it was
connected, heartbeats included. A script that computes on that loop for longer than its lease (``--worker-timeout``) is
expelled. Run long computations in a thread (``asyncio.to_thread``), or use ``Client``, whose loop has a thread of its
own. All clients of a process must share one loop, because grpc.aio polls for only one (grpc issue 42357).
"""

from __future__ import annotations

import asyncio
import operator
import os
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, get_args

from numpy.typing import ArrayLike

from psdist import machine
from psdist.client.datasets import AsyncDataset
from psdist.client.encoding import check_codec
from psdist.client.handles import Handles, OwnChoice
from psdist.client.parameters import AsyncParameters
from psdist.client.participation import Options
from psdist.client.session import loop, script
from psdist.client.session.barriers import Barrier
from psdist.client.session.loop import ProcessBound
from psdist.client.session.membership import OnDrop, Registration, check_on_drop
from psdist.client.session.scheduler_calls import find_target
from psdist.client.session.worker_session import WorkerSession
from psdist.client.snapshots import SnapshotInfo, SnapshotRequests
from psdist.compression import Codec, resolve
from psdist.compression.specifications import pull_codec_to_text
from psdist.consistency import BSP, Consistency
from psdist.errors import (
    ClosedError,
    DTypeMismatchError,
    InvalidArgumentError,
)
from psdist.optim import Optimizer
from psdist.security.tls import TlsFiles
from psdist.settings.config import TransportName, start_timeout
from psdist.types import WIRE_DTYPES, DatasetSpec, DType, MasterDType, NonFinite, ParametersSpec, check_name
from psdist.v1 import scheduler_pb2
from psdist.v1.scheduler_pb2 import GetStatusResponse
from psdist.version import __version__
from psdist.wire.limits import WORLD_MAX


class AsyncClient(ProcessBound):
    """A worker of a run.

    scheduler: host:port; None reads ``PSDIST_SCHEDULER``, else waits for the file of ``PSDIST_SCHEDULER_FILE``.
    token: the run's join token; None reads ``PSDIST_TOKEN``, else the file of ``PSDIST_TOKEN_FILE``.
    tls: files of this worker's TLS identity; None reads ``PSDIST_TLS_CA``, ``PSDIST_TLS_CERT`` and ``PSDIST_TLS_KEY``,
        and uses no TLS without them; False uses no TLS.
    run_id: refuses to join another run; None reads ``PSDIST_RUN_ID``, and joins any run without it.
    worker_id: None lets the scheduler choose ``worker-<rank>``.
    rank: None reads ``RANK``, else the scheduler gives the lowest free one.
    connect_timeout: seconds for which to look for the scheduler; None reads ``PSDIST_START_TIMEOUT``, which launchers
        set to their ``--start-timeout``, else is 60.
    request_timeout: longest time of one pull, push or push_pull, in seconds; None waits as long as its servers live.
    transport: "auto" shares memory with the servers of this host, and reaches others by direct TCP connections, or by
        gRPC if those are impossible. "grpc" uses gRPC alone. "shm" raises SharingUnavailableError if memory cannot be
        shared, "tcp" raises TcpUnavailableError if there can be no direct connection. None reads ``PSDIST_TRANSPORT``,
        else is "auto".
    rejoin: True lets a client that was taken for dead, because it was frozen or cut off for longer than its lease,
        rejoin automatically, with its parameters (see ``AsyncParameters``). False: every call raises FencedError then.
    """

    def __init__(
        self,
        scheduler: str | None = None,
        token: str | None = None,
        *,
        tls: TlsFiles | Literal[False] | None = None,
        run_id: str | None = None,
        worker_id: str | None = None,
        rank: int | None = None,
        connect_timeout: float | None = None,
        request_timeout: float | None = None,
        transport: TransportName | None = None,
        rejoin: bool = True,
    ) -> None:
        script.install_log()
        machine.keep_buffers()  # As ``LoopThread``, for scripts with a loop of their own.
        self._arguments = (scheduler, token, tls, run_id, worker_id, rank)
        self._transport = transport
        self._rejoin = rejoin
        self._rng = random.Random()
        self._connect_timeout = (
            start_timeout(os.environ) if connect_timeout is None else _positive("connect_timeout", connect_timeout)
        )
        self._request_timeout = None if request_timeout is None else _positive("request_timeout", request_timeout)
        #: The parts of a connected client, for tests and tools, and for ``Client``.
        self.session: WorkerSession | None = None
        self.handles: Handles | None = None
        self._datasets: dict[str, AsyncDataset] = {}
        self.snapshots: SnapshotRequests | None = None
        self._barriers: dict[str, Barrier] = {}
        self._is_alone: Callable[[], bool] = lambda: False
        self._is_awaited: Callable[[asyncio.Task[Any]], bool] = lambda _: False
        self.is_closed = False
        self._pid = os.getpid()
        self.local_rank = 0

    # --- joining and leaving ---

    async def connect(self) -> Self:
        """Join the run.

        Raises InvalidArgumentError and InvalidNameError for an argument, ConfigurationError for the environment;
        SchedulerUnreachableError; and the scheduler's refusal: ProtocolMismatchError (another version of psdist),
        WrongRunError (another run than ``run_id``), DuplicateMemberError (a live worker has this ``worker_id`` or
        rank), UnauthenticatedError (the token is missing or wrong), LimitExceededError (too many members).
        """
        if self.is_closed:
            raise ClosedError("the client is closed: make a new one")
        if self.session is not None:
            return self
        loop.claim(self)
        try:
            target, settings = await find_target(*self._arguments, self._transport, self._connect_timeout)
            self.local_rank, self._transport = settings.local_rank, settings.transport
            session = WorkerSession(target, __version__, self._rng, self._connections, rejoins=self._rejoin)
            self._tell_waits(session)
            self.handles = Handles(session)
            self.snapshots = SnapshotRequests(session, self._quiesce)
            self.session = session
            await session.connect(self._connect_timeout)
            script.identify_log(partial(_log_fields, session, self.handles))
            if settings.metrics is not None:
                self.handles.serve_metrics(settings.metrics)
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self, reason: str = "closed") -> None:
        """Leave the run. Closing again does nothing.

        reason: shown by ``psdist status`` and in logs. "stopped" and "failed" mean that the work was not done: a run
            with a minimum number of workers waits for another.
        """
        if self.is_closed:
            return
        if self.snapshots is not None:  # Also if the script failed: the run can resume there.
            await self.snapshots.take_last(has_failed=reason == "failed")
        self.is_closed = True
        try:
            if self.snapshots is not None:
                self.snapshots.close()
            for data in self._datasets.values():
                await data.close()
            if self.handles is not None:
                await self.handles.close()
            if self.session is not None:
                await self.session.close(reason)
        finally:
            # Their memory is as large as the model, and should end with the last reference to the client.
            script.identify_log(dict)
            self.handles = self.snapshots = None
            loop.release(self)

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- who this is ---

    @property
    def _registration(self) -> Registration:
        return self._opened().membership.registration

    @property
    def rank(self) -> int:
        """This worker's number in the run, from 0."""
        return self._registration.rank

    @property
    def world_size(self) -> int:
        """Workers of the run, as its launcher set it."""
        return max(1, self._registration.world_size)

    @property
    def worker_id(self) -> str:
        """This worker's name in the run."""
        return self._registration.worker_id

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self._registration.run_id

    @property
    def incarnation(self) -> int:
        """Number of registrations under this worker id, including this one."""
        return self._registration.incarnation

    def __repr__(self) -> str:
        if self.is_closed or self.session is None:
            return f"<{type(self).__name__} closed>"
        return f"<{type(self).__name__} {self.worker_id} (rank {self.rank}) of run {self.run_id!r}>"

    # --- parameters ---

    async def parameters(
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
        master_dtype: MasterDType = "float32",
        workers: Iterable[int] | None = None,
    ) -> AsyncParameters:
        """Create parameters, or attach to them after checking that layout and settings agree.

        init: initial values by tensor name; their order, shapes and dtypes are the layout. If several workers create
            concurrently, the lowest rank's values count. None attaches for reading only, once they exist.
        optimizer: one of ``psdist.optim``, which runs on the servers. Needed with ``init``.
        consistency: ``BSP()`` (the default), ``SSP(staleness)`` or ``ASP()``.
        non_finite: reaction to NaN or Inf in a gradient. "reject" raises NonFiniteGradientError; "skip" leaves this
            worker's gradient out of the step, which counts as made (``statistics().abstained``).
        slice_elements: elements of one slice, 1 to 2**20; 0 lets psdist choose. With another size the last bits may
            change if ``max_grad_norm`` clips, and so does the part that ``pull_compression`` leaves out.
        reset_optimizer: True resets the optimizer in a run that resumes from a snapshot. All else is restored, but the
            optimizer starts as a new one of torch, counting its own updates from 0. Schedules continue with the step.
            It happens once in a run: after a rollback only if it had not happened when the snapshot was taken.
        compression: how this worker sends gradients: a codec of ``psdist.compression``, or the name of one with its
            defaults, such as "bfloat16", "int8", "topk" or "chunked_topk"; "auto" chooses by the speed of the links.
            Workers may use different ones. A residual that a codec leaves out is added to the next gradient; it is in
            snapshots, takes three times the memory of the gradients, and is lost with a dropped push.
        pull_dtype: dtype of pulled weights on the wire ("float32", "bfloat16", "float16").
        pull_compression: a codec, or its name, for the differences between the weights and those that the workers hold:
            Int8, Int4, Int2, OneBit, TopK, ChunkedTopK or RandomK. The part that it leaves out is in the next
            difference. So all workers compute on the same approximate weights; a snapshot has both, and servers and
            workers each hold one more vector. With it ``pull_dtype`` is "float32".
        master_dtype: dtype of weights, state and arithmetic on the servers. "float64" takes twice the memory, excludes
            compression, and is updated by numpy; ``slice_elements`` counts each value twice.
        on_drop: reaction if a push is dropped, because this worker had been expelled and the others continued without
            it. "warn" logs a warning, and raises PushDroppedError for the third in a row; "raise" raises it for the
            first; "ignore" logs it. ``statistics().dropped`` counts all. A rollback's drops are always warnings.
        workers: ranks of the workers that train the set; None for all of the run. See ``Context.subset``.

        All workers must agree on ``master_dtype``, ``pull_compression``, ``workers`` and the settings from
        ``optimizer`` to ``slice_elements``. A resumed run may change the latter; a warning lists the differences. A
        change that invalidates the optimizer's state needs ``reset_optimizer``: another kind of optimizer, with or
        without SGD's or RMSprop's momentum, RMSprop's centered, Adagrad's initial_accumulator_value.

        Called again for the same name it returns the same handle; compression, pull_dtype and on_drop may then be left
        out. Returns when all workers of the run's start, or all of ``workers``, have called it.

        Raises LayoutMismatchError, SettingsMismatchError, UnknownCodecError, DTypeMismatchError, InvalidNameError,
        InvalidArgumentError, ServerLostError, ClosedError; FencedError if this worker was expelled and does not rejoin;
        MutualWaitError (only with ``Client``) if the others wait for it elsewhere.
        """
        handles = self._opened_handles()
        choice = OwnChoice(self._options(compression, pull_dtype), on_drop, compression is not None)
        pulls = _pull_codec(pull_compression, pull_dtype)
        check_name(name, "parameters name")
        check_on_drop(on_drop)
        if init is None:
            _check_without_init(name, optimizer, reset_optimizer, pulls, workers)
            return await handles.open_reader(name, choice)
        ranks = _checked_workers(name, workers, self.rank)
        spec = _spec(
            name, optimizer, consistency, non_finite, slice_elements, reset_optimizer, pulls, master_dtype, ranks
        )
        return await handles.open_member(spec, init, choice)

    def _options(self, compression: Codec | str | None, pull_dtype: DType) -> Options:
        if pull_dtype not in WIRE_DTYPES:
            raise DTypeMismatchError(f"pull_dtype={pull_dtype!r:.60} is unknown: use one of {', '.join(WIRE_DTYPES)}")
        return Options(check_codec(resolve(compression)), pull_dtype, self._request_timeout, self._transport or "auto")

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Declare one iteration of a script that trains several BSP parameter sets, by ``with client.iteration():``.

        Snapshots, joins and the end of the run then fall between iterations, for all sets at the same one. A script
        that repeats one order of steps need not declare iterations: see ``Context.iteration``. Raises ClosedError.
        """
        self._opened().alignment.mark_boundary()
        yield  # After an error the iteration is not over.
        self._opened().alignment.mark_boundary()

    # --- data ---

    async def dataset(
        self,
        name: str,
        size: int,
        range_size: int,
        shuffle: bool = True,
        seed: int = 0,
        data_epochs: int = 1,
        retries_max: int = 3,
    ) -> AsyncDataset:
        """Return a data set of ``size`` samples whose ranges are leased to all workers that iterate over it.

        range_size: samples of one range, as an array of indices; each step may use a range, or a part of it.
        shuffle, seed: True orders the samples differently in each data epoch, depending on ``seed``.
        data_epochs: how often all samples are used; 0 repeats forever.
        retries_max: how often a range whose worker was lost is given to another before it is left out.

        All workers must agree on these. Called again for the same name it returns the same handle. Raises
        SettingsMismatchError, InvalidNameError, InvalidArgumentError, LimitExceededError. See ``AsyncDataset``.
        """
        session = self._opened()
        spec = DatasetSpec(name, size, range_size, shuffle, seed, data_epochs, retries_max)
        if name not in self._datasets:
            data = AsyncDataset(session, spec)
            await data.open()
            self._datasets.setdefault(name, data)
        self._datasets[name].check_same(spec)
        return self._datasets[name]

    # --- snapshots ---

    async def snapshot(self, timeout: float | None = None) -> SnapshotInfo:
        """Take a snapshot of the run: all parameters with their optimizers' state, and the positions of data sets.

        Returns when it is committed. It contains every push that this worker has made. Other calls on this client's
        parameters wait until then; other workers may continue. Ranks that call it at the same step share one.

        timeout: seconds; the snapshot may still be committed later.

        Raises NoStorageError if the run has no storage, SnapshotFailedError and StorageError if the snapshot was
        abandoned, which changes nothing else; WaitTimeoutError; FencedError if this worker was taken for dead while it
        waited, or the run rolled back: then call it again. InvalidArgumentError while a step is given in buckets, and
        after a failed push, which has to be made first.
        """
        return await self._snapshots_opened().take(timeout)

    async def request_snapshot(self, timeout: float | None = None) -> None:
        """Request a snapshot of the run, and return once the scheduler has accepted. Training continues meanwhile, and
        the result is logged.

        timeout: seconds to wait for the scheduler's answer.

        Raises NoStorageError, WaitTimeoutError, SnapshotFailedError, StorageError.
        """
        await self._snapshots_opened().request(timeout)

    def _opened_handles(self) -> Handles:
        self._opened()
        assert self.handles is not None
        return self.handles

    def _connections(self) -> Iterable[scheduler_pb2.Connection]:
        return self.handles.connections() if self.handles is not None else ()

    def _snapshots_opened(self) -> SnapshotRequests:
        self._opened()
        assert self.snapshots is not None
        return self.snapshots

    def _quiesce(self) -> Iterator[AbstractAsyncContextManager[None]]:
        """Yield context managers that hold this worker's pushes while a snapshot is taken."""
        for handle in self._opened_handles().members():
            yield handle.quiesce()
        yield _report_done(self._datasets.values())

    # --- the rest ---

    async def barrier(self, name: str = "default", timeout: float | None = None) -> None:
        """Return when all live workers, and no fewer than the run's minimum, have called it with this name.

        Raises WaitTimeoutError after ``timeout`` seconds (None: never): then no worker passes by this call. The message
        names the missing workers. If the scheduler does not confirm within 5 s more, it is unknown if the others have
        passed, and the next call of this barrier finds out. MutualWaitError (only with ``Client``) if the others wait
        for this worker. InvalidNameError, ClosedError, and FencedError if this worker was expelled and does not rejoin.
        """
        session = self._opened()
        await self._barriers.setdefault(check_name(name, "barrier name"), Barrier(session, name)).reach(timeout)

    async def request_stop(self) -> None:
        """End this worker in agreement with the others. Returns when it may leave.

        If all workers of the run are asked to end, the last snapshot is cut at a step that all have made. After this
        call no push may begin: cancel the calls under way, and close the client. ``psdist.init()`` does all of it on
        SIGTERM. A scheduler that is not heard for 5 s is not waited for; nor is a push under way, for longer than 10 s.
        Raises nothing. Returns immediately if the client is not connected.
        """
        if self.session is not None and not self.is_closed and self.session.is_connected:
            self.session.shutdown.request()
            await self.session.shutdown.until_leaving()

    def watch_signals(self, is_asked: Callable[[], bool]) -> None:
        """Call ``is_asked`` before the scheduler is answered if this worker was asked to end."""
        if self.session is not None:
            self.session.shutdown.is_asked = is_asked

    def report_waits(
        self, is_alone: Callable[[], bool], is_awaited: Callable[[asyncio.Task[Any]], bool] = lambda _: False
    ) -> None:
        """Report waits, so that the scheduler can detect workers that wait for each other.

        is_alone: returns True if a single thread makes calls, so that nothing else can end its waits.
        is_awaited: returns True if that thread waits for a task.
        """
        self._is_alone, self._is_awaited = is_alone, is_awaited
        if self.session is not None:
            self._tell_waits(self.session)

    def _tell_waits(self, session: WorkerSession) -> None:
        session.activities.is_alone = self._is_alone
        session.waits.group_calls.is_awaited = self._is_awaited

    async def status(self) -> GetStatusResponse:
        """Return the run as the scheduler sees it: members, parameters, waits and events.

        A protobuf message; ``proto/psdist/v1/scheduler.proto`` documents its fields. Raises SchedulerUnreachableError.
        """
        calls = self._opened().calls
        response: GetStatusResponse = await calls.call(calls.stub.GetStatus, scheduler_pb2.GetStatusRequest())
        return response

    def _opened(self) -> WorkerSession:
        if self._pid != os.getpid():
            raise ClosedError(
                f"this client belongs to process {self._pid} and does not survive a fork: start processes by "
                "spawn, and make a client in each"
            )
        if self.is_closed:
            raise ClosedError("the client is closed: call psdist.init() again, or make a new client")
        if self.session is None:
            raise ClosedError("the client is not connected: use it in a with block, or call connect() first")
        return self.session


def _log_fields(session: WorkerSession, handles: Handles) -> dict[str, str | int | None]:
    """Return the fields of this worker's log lines."""
    mine = session.membership.registration
    step = handles.measure().step
    return {"run": mine.run_id, "id": mine.worker_id, "incarnation": mine.incarnation, "step": step}


def checked_ranks(ranks: Iterable[int]) -> list[int]:
    """Return ranks in ascending order. Raises InvalidArgumentError."""
    try:
        checked = sorted({operator.index(rank) for rank in ranks})
    except TypeError:
        checked = [-1]
    if checked and not 0 <= checked[0] <= checked[-1] < WORLD_MAX:
        raise InvalidArgumentError(f"{ranks!r:.60} are no ranks: give numbers from 0 to {WORLD_MAX - 1}")
    return checked


def _checked_workers(name: str, workers: Iterable[int] | None, mine: int) -> tuple[int, ...]:
    """Return ranks in ascending order; empty for all. Raises InvalidArgumentError unless rank ``mine`` is one."""
    if workers is None:
        return ()
    ranks = checked_ranks(workers)
    if mine not in ranks:
        raise InvalidArgumentError(
            f"{name!r}: rank {mine} is not among workers={ranks}, which train it: leave init out to read it"
        )
    return tuple(ranks)


def _spec(
    name: str,
    optimizer: Optimizer | None,
    consistency: Consistency | None,
    non_finite: NonFinite,
    slice_elements: int,
    reset_optimizer: bool,
    pull_compression: str,
    dtype: MasterDType,
    workers: tuple[int, ...],
) -> ParametersSpec:
    if optimizer is None:
        raise InvalidArgumentError(f"{name!r}: init without an optimizer: pass one, such as psdist.optim.Adam()")
    consistency = BSP() if consistency is None else consistency
    if not isinstance(optimizer, Optimizer):
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        raise InvalidArgumentError(
            f"optimizer is of type {kind}: give one of psdist.optim, such as psdist.optim.Adam(lr=1e-3), which runs on "
            "the servers"
        )
    if not isinstance(consistency, get_args(Consistency)):
        raise InvalidArgumentError(f"consistency={consistency!r:.60} is none of psdist.BSP(), SSP(n), ASP()")
    return ParametersSpec(
        name, optimizer, consistency, non_finite, slice_elements, reset_optimizer, pull_compression, dtype, workers
    )


def _pull_codec(compression: Codec | str | None, dtype: DType) -> str:
    """Return the codec of weights as text. Raises InvalidArgumentError if their dtype on the wire is set, too."""
    pulls = "" if compression is None else pull_codec_to_text(resolve(compression))
    if pulls and dtype != "float32":
        raise InvalidArgumentError(f"pull_compression={pulls} with pull_dtype={dtype!r}: pass one of them")
    return pulls


def _check_without_init(
    name: str, optimizer: Optimizer | None, resets: bool, pulls: str, workers: Iterable[int] | None
) -> None:
    """Raise InvalidArgumentError if settings of a member are given for a handle that only reads."""
    given = {"an optimizer": optimizer is not None, "reset_optimizer=True": resets, "pull_compression": pulls}
    given["workers"] = workers is not None
    for what, is_given in given.items():
        if is_given:
            raise InvalidArgumentError(f"{name!r}: {what} without init: pass the initial values too")


@asynccontextmanager
async def _report_done(datasets: Iterable[AsyncDataset]) -> AsyncIterator[None]:
    """Report the ranges that are done, so that the snapshot has them. Later reports would miss it."""
    for data in datasets:
        await data.report()
    yield


def _positive(name: str, value: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InvalidArgumentError(f"{name}={value!r} is out of range: use a number of seconds above 0")
    return float(value)
