"""``AsyncParameters``: pull, push and push_pull of one named set of tensors.

One call at a time: calls of several tasks on the same handle queue up, so that steps stay in order. What is wrong with
an input is raised before anything is sent. A call that fails or is cancelled does not advance the step: calling again
sends again under the same number, and the servers take only what they do not have yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psdist.client import partition, routing
from psdist.client.connection import SchedulerLink
from psdist.client.creation import Ready
from psdist.client.jobs import PullJob, PushJob, PushPullJob, Sender, Traffic
from psdist.client.partition import Arrays, Flat
from psdist.client.routing import Route
from psdist.client.session import Request, Session
from psdist.client.transfer import DataPath, Job
from psdist.compression import Cast
from psdist.config import Transport
from psdist.errors import NotMemberError, WaitTimeoutError
from psdist.types import DType, Layout, ParametersSpec


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of one handle since it was made.

    ignored: slices whose contribution was not used, because it had been taken before or came after its step was closed.
    resent: slices that were sent again after a break.
    staleness_mean, staleness_max: over the slices of the last push, in versions.
    push_bytes, pull_bytes: payloads only.
    """

    pushes: int = 0
    pulls: int = 0
    abstained: int = 0
    ignored: int = 0
    resent: int = 0
    push_bytes: int = 0
    pull_bytes: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0


@dataclass(frozen=True, slots=True)
class Options:
    """What each worker chooses for itself. ``request_timeout`` is in seconds; None waits as long as it takes."""

    codec: Cast
    pull_dtype: DType
    request_timeout: float | None = None
    transport: Transport = "auto"


class AsyncParameters:
    """Named tensors that live on the servers. Made by ``AsyncClient.parameters``."""

    def __init__(self, link: SchedulerLink, data: DataPath, ready: Ready, options: Options, *, member: bool) -> None:
        mine = link.registration
        self.spec: ParametersSpec = ready.entry.spec
        #: Names, shapes and dtypes, in order.
        self.layout: Layout = ready.layout
        #: Whether this client takes part in the training, or only reads.
        self.member = member
        self._link = link
        self._data = data
        self._options = options
        self._holders = ready.holders
        self._slicing = ready.entry.slicing
        self._session = Session(self._slicing.count, self.spec.consistency if member else None, ready.first_step)
        self._sender = Sender(mine.run_id, mine.worker_id, mine.incarnation, self.spec.name)
        self._traffic = Traffic()
        self._turn = asyncio.Lock()
        self._pushes = self._pulls = self._abstained = self._ignored = 0
        self._staleness = (0.0, 0)

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
    def version(self) -> int:
        """Updates in the weights last pulled (the least of any slice)."""
        return self._session.version

    @property
    def staleness(self) -> int:
        """SSP and ASP: most versions that passed between the weights the last gradient was computed on and its use."""
        return self._staleness[1]

    def statistics(self) -> Statistics:
        """Counters of this handle."""
        return Statistics(
            pushes=self._pushes,
            pulls=self._pulls,
            abstained=self._abstained,
            ignored=self._ignored,
            resent=self._data.resent.get(self.name, 0),
            push_bytes=self._traffic.sent,
            pull_bytes=self._traffic.received,
            staleness_mean=self._staleness[0],
            staleness_max=self._staleness[1],
        )

    def __repr__(self) -> str:
        role = f"step {self.step}" if self.member else "reading"
        return (
            f"<{type(self).__name__} {self.name!r}: {len(self.layout.tensors)} tensors, {self.layout.total} elements, "
            f"version {self.version}, {role}>"
        )

    # --- the calls ---

    async def pull(self, out: Mapping[str, NDArray[Any]] | None = None) -> Arrays:
        """The weights by name, in their declared dtypes and shapes.

        out: arrays to write into; else the arrays are new ones. After an error their content is undefined.
        BSP: waits until the step this worker is at is complete. SSP: waits until no member is further behind than the
        bound.

        Raises ServerLostError, FencedError, ClosedError, WaitTimeoutError, and as ``partition.check_out`` for ``out``.
        """
        async with self._begin():
            target, shared = self._target(out)
            await self._pull_into(target)
            return self._result(target, shared, out)

    async def push(self, gradients: Mapping[str, ArrayLike]) -> None:
        """Sends the gradient of the next step; returns when it is applied.

        Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError and NonFiniteGradientError
        before anything is sent; NotMemberError, ServerLostError, FencedError, ClosedError, WaitTimeoutError.
        """
        async with self._begin():
            flat, norm = self._gradient(gradients)
            await self._reach_first_step()
            request = self._session.begin_push()
            job = PushJob(
                self._sender, request, self._slicing, self._session.versions, flat, self._options.codec, norm,
                self._push_title(request), self._traffic,
            )  # fmt: skip
            await self._deliver(job)
            self._pushed(request, flat, seen=False)

    async def push_pull(
        self, gradients: Mapping[str, ArrayLike], out: Mapping[str, NDArray[Any]] | None = None
    ) -> Arrays:
        """One step: sends the gradient and returns the weights with it in them. Arguments and errors as in ``push`` and
        ``pull``. The gradients may be overwritten once it returns."""
        async with self._begin():
            target, shared = self._target(out)
            flat, norm = self._gradient(gradients)
            await self._reach_first_step()
            request = self._session.begin_push()
            job = PushPullJob(
                self._sender, request, self._slicing, self._session.versions, flat, self._options.codec, norm,
                self._push_title(request), self._traffic, target=target, pull_dtype=self._options.pull_dtype,
            )  # fmt: skip
            await self._deliver(job)
            self._pushed(request, flat, seen=True)
            self._pulls += 1
            return self._result(target, shared, out)

    # --- their parts ---

    @asynccontextmanager
    async def _begin(self) -> AsyncIterator[None]:
        async with self._turn:
            self._link.raise_if_out()
            yield

    def _gradient(self, gradients: Mapping[str, ArrayLike]) -> tuple[Flat | None, float]:
        """The checked vector and, where the servers need it, its norm; None to abstain."""
        if not self.member:
            raise NotMemberError(
                f"{self.name!r} was opened for reading: pass init and optimizer to client.parameters() to take part"
            )
        flat = partition.flatten(self.layout, gradients)
        dtype = self._options.codec.dtype
        if not partition.is_finite(flat, dtype):
            if self.spec.non_finite == "reject":
                raise partition.non_finite(self.layout, flat, dtype)
            return None, 0.0
        clipped = self.spec.optimizer.max_grad_norm > 0 and not self._session.synchronous
        return flat, partition.grad_norm(flat, self._slicing.slice_elements) if clipped else 0.0

    async def _pull_into(self, target: Flat) -> None:
        request = self._session.begin_pull()
        title = f"the pull of {self.name!r}"
        job = PullJob(self._sender, request, self._slicing, target, self._options.pull_dtype, title, self._traffic)
        await self._deliver(job)
        self._session.end_pull(request)
        self._pulls += 1

    async def _reach_first_step(self) -> None:
        """A worker that joined and pushes without a pull: waits until the others are at its first step."""
        if self._session.before_first_step:
            await self._pull_into(np.empty(self.layout.total, np.float32))

    def _target(self, out: Mapping[str, NDArray[Any]] | None) -> tuple[Flat, bool]:
        """The vector to receive into, and whether it is the memory of ``out`` itself."""
        shared = None if out is None else partition.check_out(self.layout, out)
        return (np.empty(self.layout.total, np.float32), False) if shared is None else (shared, True)

    def _result(self, target: Flat, shared: bool, out: Mapping[str, NDArray[Any]] | None) -> Arrays:
        if out is None:
            return partition.unflatten(self.layout, target)
        if not shared:
            partition.copy_out(self.layout, target, out)
        return {name: out[name] for name in self.names}

    def _push_title(self, request: Request) -> str:
        what = "step" if self._session.synchronous else "push"
        return f"{what} {request.number} of {self.name!r}"

    def _pushed(self, request: Request, flat: Flat | None, *, seen: bool) -> None:
        self._session.end_push(request, seen=seen)
        self._pushes += 1
        self._abstained += flat is None
        self._ignored += request.ignored
        self._staleness = (request.staleness_mean, request.staleness_max)

    async def _deliver(self, job: Job) -> None:
        try:
            async with asyncio.timeout(self._options.request_timeout):
                await self._data.deliver(job, self._plan)
        except TimeoutError:
            raise WaitTimeoutError(
                f"{job.title} took longer than request_timeout={self._options.request_timeout:g} s: waiting "
                f"{self._data.last_reason}. The step was not advanced; calling again goes on with it"
            ) from None

    def _plan(self, slices: Sequence[int]) -> tuple[Route, ...]:
        return routing.plan(self._link.watch.cluster, self.name, self._holders, slices)
