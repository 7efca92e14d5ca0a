"""``Client`` and ``Parameters``: the synchronous API over ``AsyncClient``.

Every call runs on the one background loop of the process (``loop``) and blocks until it is done. Ctrl-C cancels the
call. Several threads may call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psdist.client import loop
from psdist.client.async_client import AsyncClient
from psdist.client.bucket_step import AsyncBucket
from psdist.client.core.partition import Arrays
from psdist.client.datasets import Dataset
from psdist.client.parameters import AsyncParameters
from psdist.client.process_bound import ProcessBound
from psdist.client.session.drops import OnDrop
from psdist.client.session.worker_state import Restore, Save
from psdist.client.sigterm import sigterm
from psdist.client.snapshots import SnapshotInfo
from psdist.client.steps import Statistics
from psdist.compression import Cast
from psdist.consistency import Consistency
from psdist.optim import Optimizer
from psdist.settings.config import TransportName
from psdist.types import DType, Layout, NonFinite, ParametersSpec
from psdist.v1.scheduler_pb2 import GetStatusResponse


class Client(ProcessBound):
    """A worker of a run; joins it when made. Arguments and errors are those of ``AsyncClient``."""

    def __init__(
        self,
        scheduler: str | None = None,
        token: str | None = None,
        *,
        run_id: str | None = None,
        worker_id: str | None = None,
        rank: int | None = None,
        connect_timeout: float = 60.0,
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

    def __repr__(self) -> str:
        return repr(self._client).replace("AsyncClient", "Client")

    def parameters(
        self,
        name: str,
        init: Mapping[str, ArrayLike] | None = None,
        optimizer: Optimizer | None = None,
        consistency: Consistency | None = None,
        compression: Cast | str | None = None,
        pull_dtype: DType = "float32",
        non_finite: NonFinite = "reject",
        slice_elements: int = 0,
        on_drop: OnDrop = "warn",
        reset_optimizer: bool = False,
    ) -> Parameters:
        """Creates parameters, or attaches to them. See ``AsyncClient.parameters``."""
        settings = (optimizer, consistency, compression, pull_dtype, non_finite, slice_elements, on_drop)
        handle = loop.shared().call(self._client.parameters(name, init, *settings, reset_optimizer))
        return self._handles.setdefault(id(handle), Parameters(handle))

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
        """A data set whose ranges are handed out to all workers. See ``AsyncClient.dataset``."""
        settings = (name, size, range_size, shuffle, seed, data_epochs, retries_max)
        return Dataset(loop.shared().call(self._client.dataset(*settings)))

    def snapshot(self, timeout: float | None = None) -> SnapshotInfo:
        """Takes a snapshot of the run. See ``AsyncClient.snapshot``."""
        return loop.shared().call(self._client.snapshot(timeout))

    def request_snapshot(self, timeout: float | None = None) -> None:
        """Asks for a snapshot of the run, and does not wait for it. See ``AsyncClient.request_snapshot``."""
        loop.shared().call(self._client.request_snapshot(timeout))

    def barrier(self, name: str = "default", timeout: float | None = None) -> None:
        """Returns when all live workers have called it with this name. See ``AsyncClient.barrier``."""
        loop.shared().call(self._client.barrier(name, timeout))

    def status(self) -> GetStatusResponse:
        """The run as the scheduler sees it. See ``AsyncClient.status``."""
        return loop.shared().call(self._client.status(), reading=True)


class Parameters(ProcessBound):
    """Named tensors that live on the servers. Made by ``Client.parameters``; see ``AsyncParameters``."""

    def __init__(self, handle: AsyncParameters) -> None:
        self._handle = handle

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

    def statistics(self) -> Statistics:
        """Counters of this handle."""
        return self._handle.statistics()

    def __repr__(self) -> str:
        return repr(self._handle).replace("AsyncParameters", "Parameters")

    def pull(self, out: Mapping[str, NDArray[Any]] | None = None, copy: bool = True) -> Arrays:
        """The weights by name. See ``AsyncParameters.pull``."""
        return loop.shared().call(self._handle.pull(out, copy), reading=True)

    def push(self, gradients: Mapping[str, ArrayLike]) -> None:
        """Sends the gradient of the next step; returns when it is applied. See ``AsyncParameters.push``."""
        loop.shared().call(self._handle.push(gradients))

    def push_pull(
        self, gradients: Mapping[str, ArrayLike], out: Mapping[str, NDArray[Any]] | None = None, copy: bool = True
    ) -> Arrays:
        """One step: gradient up, new weights down. See ``AsyncParameters.push_pull``."""
        return loop.shared().call(self._handle.push_pull(gradients, out, copy))

    def push_pull_async(self, gradients: Mapping[str, ArrayLike] | Iterable[str]) -> Bucket:
        """One step in buckets: sends these tensors' gradients and returns at once; ``wait`` on what it returns. See
        ``AsyncParameters.push_pull_async``."""
        return Bucket(loop.shared().call(self._handle.push_pull_async(gradients)))

    def keep_state(self, save: Save, restore: Restore) -> None:
        """Has something of this worker in every snapshot. See ``AsyncParameters.keep_state``."""
        loop.shared().call(self._handle.keep_state(save, restore))

    def gradient_buffers(self) -> dict[str, NDArray[np.float32]]:
        """Writable arrays for gradients, which are pushed without a copy. See ``AsyncParameters.gradient_buffers``."""
        return loop.shared().call(self._handle.gradient_buffers())


class Bucket(ProcessBound):
    """Tensors of one step that were given together. Made by ``Parameters.push_pull_async``; see ``AsyncBucket``."""

    def __init__(self, bucket: AsyncBucket) -> None:
        self._bucket = bucket

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in the layout's order."""
        return self._bucket.names

    def done(self) -> bool:
        """Whether ``wait`` would not wait."""
        return self._bucket.done()

    def wait(self, timeout: float | None = None) -> Arrays:
        """The new weights of the bucket's tensors. See ``AsyncBucket.wait``."""
        return loop.shared().call(self._bucket.wait(timeout))

    def __repr__(self) -> str:
        return repr(self._bucket).replace("AsyncBucket", "Bucket")
