"""What one handle and its servers exchange: the requests of its push sequence, over shared memory or gRPC.

A call gets its step, its routes and its time limit here.

Not here: the order of calls and what the user is given (``parameters``), the streams (``data_path``), the shared memory
(``attachment``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from psdist.client.core import routing
from psdist.client.core.partition import Flat
from psdist.client.core.push_sequence import PendingRequest, PushSequence
from psdist.client.core.routing import RoutingPlan, ServerNews
from psdist.client.session.activity import ReportedWait
from psdist.client.session.registration import Registration
from psdist.client.session.scheduler_session import Expulsion, WorkerSession
from psdist.client.session.worker_state import Restore, Save, State, check_state, fetch
from psdist.client.transport import creation
from psdist.client.transport.buffer_pool import PullTarget
from psdist.client.transport.creation import CreatedParameters
from psdist.client.transport.data_path import DataPath, Job
from psdist.client.transport.requests import ByteCounters, PullJob, PushJob, PushPullJob, RequestIdentity
from psdist.client.transport.shm.attachment import SharedMemory
from psdist.compression import Cast
from psdist.consistency import BSP, SSP
from psdist.errors import FencedError, NotMemberError, WaitTimeoutError
from psdist.settings.config import Transport
from psdist.types import ClusterMap, DType, Slicing
from psdist.v1 import scheduler_pb2


@dataclass(frozen=True, slots=True)
class Options:
    """What each worker chooses for itself. ``request_timeout`` is in seconds; None waits as long as it takes."""

    codec: Cast
    pull_dtype: DType
    request_timeout: float | None = None
    transport: Transport = "auto"


class Exchange:
    """The way of one handle's calls to the servers."""

    def __init__(
        self, link: WorkerSession, data: DataPath, ready: CreatedParameters, options: Options, *, member: bool
    ) -> None:
        spec = ready.entry.spec
        self.slicing: Slicing = ready.entry.slicing
        #: Where the values came from, and how often they began anew from a snapshot.
        self.restore, self.generation = ready.entry.restore, ready.entry.generation
        self.options = options
        self.traffic = ByteCounters()
        self._name = spec.name
        self._link = link
        self._data = data
        self._every = range(self.slicing.count)
        self._planned: tuple[ClusterMap, ServerNews, RoutingPlan] | None = None
        self._spec, self._layout, self._member = spec, ready.layout, member
        #: Another one in each incarnation of this worker.
        self.session = self._make_session(ready)
        #: Who this worker was when its pushes began to be numbered.
        self._origin = link.registration
        #: Whether this incarnation goes on with the pushes of the one before.
        self._resumed = False
        #: Pushes that were under way when this worker was expelled, and went on.
        self.resumed = 0
        self._rejoining = asyncio.Lock()
        self._sender = self._make_sender(link.registration)
        # Between its own pushes a member's weights stand still, if nobody goes on without it.
        stable = member and isinstance(spec.consistency, BSP) and not spec.consistency.backup_workers
        self.shared_memory = SharedMemory(
            link, data, self._sender, ready.entry, options.codec.dtype, options.transport, member=member, stable=stable
        )

    def _make_sender(self, mine: Registration) -> RequestIdentity:
        return RequestIdentity(mine.run_id, mine.worker_id, mine.incarnation, self._name)

    def _make_session(self, ready: CreatedParameters, before: PushSequence | None = None) -> PushSequence:
        consistency = self._spec.consistency if self._member else None
        session = PushSequence(self.slicing.count, consistency, ready.first_step, before)
        if self._member:
            self._link.pushes.enter(self._name, session)
        return session

    @property
    def incarnation(self) -> int:
        """The incarnation of this worker that takes part."""
        return self._sender.incarnation

    async def rejoin(self, fenced: FencedError, incarnation: int) -> bool:
        """After ``fenced`` ended a call of ``incarnation``: takes part anew, in the next one of this client.

        Returns whether the push that was under way, or was to be made next, goes on: it is to be sent again, and slices
        that have it ignore it. Else its place is taken, and it is dropped.
        Raises what ends the membership for good, and WaitTimeoutError.
        """
        limit = self.options.request_timeout
        try:
            async with asyncio.timeout(limit), self._rejoining:
                if self.incarnation == incarnation:  # Else another call has done it.
                    await self._link.wait_until_rejoined(fenced, incarnation)
                    await self._link.retry_across_incarnations(self._start_incarnation)
        except TimeoutError:
            raise WaitTimeoutError(
                f"taking part in {self._name!r} again took longer than request_timeout={limit:g} s: calling again goes "
                "on with it"
            ) from None
        return self._resumed

    async def _start_incarnation(self, mine: Registration) -> None:
        if self._member:
            ready = await creation.create(
                self._link, self._data, self._spec, self._layout, None, self._resume_push(mine)
            )
        else:
            ready = await creation.describe(self._link, self._name)
        self._resumed = ready.resumed and ready.entry.generation == self.generation
        self.resumed += self._resumed and self.session.unfinished
        if not self._resumed:
            self._origin = mine
        self._sender = self._make_sender(mine)
        self._planned = None
        self.session = self._make_session(ready, self.session if self._resumed else None)
        if ready.entry.generation != self.generation:  # The run went back, perhaps to before its settings were changed.
            ready.announce()
        self.restore = ready.entry.restore
        restore = self._link.states.start_incarnation(self._name, self.session)
        if restore is not None and ready.entry.generation != self.generation:
            restore(await self.state())
        self.generation = ready.entry.generation
        self.shared_memory.rejoin(self._sender, ready.entry)

    def _resume_push(self, mine: Registration) -> scheduler_pb2.ResumePush | None:
        """What this worker would go on with. In BSP, under another rank, its contribution would be added in another
        place."""
        if self.session.synchronous and mine.rank != self._origin.rank:
            return None
        return scheduler_pb2.ResumePush(
            origin=self._origin.incarnation, number=self.session.step, generation=self.generation
        )

    def end_push(self, request: PendingRequest, *, seen: bool) -> None:
        """All of a push is answered. seen: the answers carried the weights."""
        self.session.end_push(request, seen=seen)
        self._link.states.ended(self._name)
        self._link.stopping.push_ended()

    async def keep_state(self, save: Save, restore: Restore) -> None:
        """See ``AsyncParameters.keep_state``."""
        if state := await self.state():
            restore(state)
        check_state(self._name, save())
        self._link.states.keep(self._name, save, restore, self.session)
        self._link.tell_kept()

    async def state(self) -> State:
        """What this rank handed in for the snapshot that the values came from. Empty where there is none, and for who
        joins later: what it belonged to was pushed long ago."""
        if self.restore is None or not self._member or self._name in self._link.ready_before:
            return {}
        return await fetch(self._link, self._name)

    def dropped(self) -> None:
        """A push of this worker was dropped."""
        self._link.pushes.dropped += 1
        self._link.stopping.push_ended()

    def waiting(self, *, push: bool, reads: bool, limited: bool = False) -> ReportedWait:
        """For a ``with`` block in which the user waits for the answer to the next push, or to a pull. reads: the answer
        has weights. limited: the wait ends by itself, whatever the client's time limit."""
        # The last of this worker's pushes that must be in the weights, and with it those of the others.
        last = self.session.step - (not push)
        consistency, what = self._spec.consistency, dict[str, scheduler_pb2.Activity.Step]()
        if self._member and isinstance(consistency, BSP) and last >= 0:
            what["step"] = scheduler_pb2.Activity.Step(parameters=self._name, step=last)
        elif self._member and isinstance(consistency, SSP) and reads and (first := self._first_clock()) is not None:
            clock = first + last + 1 - consistency.staleness
            what["clock"] = scheduler_pb2.Activity.Step(parameters=self._name, step=max(0, clock))
        sent = (lambda: self.session.step > last or self.session.unfinished) if push else (lambda: True)
        limited = limited or self.options.request_timeout is not None
        return self._link.activities.waits(limited=limited, sent=sent, **what)

    def _first_clock(self) -> int | None:
        """SSP: this worker's clock, less the number of its next push; None while the map does not have it."""
        entry = self._link.watch.cluster.entry(self._name)
        mine = (self._sender.worker_id, self._sender.incarnation)
        members = (m for m in (entry.members if entry is not None else ()) if (m.worker_id, m.incarnation) == mine)
        return next((member.first_step - member.first_push for member in members), None)

    @property
    def expulsion(self) -> Expulsion:
        """How the incarnation before this one ended."""
        return self._link.expulsion

    @property
    def resent(self) -> int:
        """Slices that were sent again after a break."""
        return self._data.resent.get(self._name, 0)

    async def open(self) -> None:
        """Before each call: raises if this client is out (FencedError if only this incarnation has ended, see
        ``rejoin``), and shares memory with servers where that was not tried."""
        routes = self._plan(self._every).routes
        if not self.shared_memory.is_missing(routes):
            return
        try:
            async with asyncio.timeout(self.options.request_timeout):
                await self.shared_memory.ensure(routes)
        except TimeoutError:
            raise WaitTimeoutError(
                f"sharing memory for {self._name!r} took longer than request_timeout={self.options.request_timeout:g} s"
            ) from None

    async def push(self, request: PendingRequest, flat: Flat | None, norm: float) -> None:
        """Sends a gradient (None: abstains)."""
        job = PushJob(
            self._sender, request, self.slicing, self.session.versions, flat, self.options.codec, norm,
            self._push_title(request), self.traffic, shared_memory=self.shared_memory,
        )  # fmt: skip
        await self._deliver(job)

    async def push_pull(self, request: PendingRequest, flat: Flat | None, norm: float, arrival: PullTarget) -> None:
        """Sends a gradient (None: abstains); the new weights arrive."""
        job = PushPullJob(
            self._sender, request, self.slicing, self.session.versions, flat, self.options.codec, norm,
            self._push_title(request), self.traffic, shared_memory=self.shared_memory, target=arrival.target,
            pull_dtype=self.options.pull_dtype, in_place=arrival.shared is not None, received=arrival.received,
        )  # fmt: skip
        await self._deliver(job)

    async def pull(self, arrival: PullTarget) -> None:
        """Weights arrive."""
        request = self.session.begin_pull()
        job = PullJob(
            self._sender, request, self.slicing, arrival.target, self.options.pull_dtype,
            f"the pull of {self._name!r}", self.traffic, shared_memory=self.shared_memory,
            in_place=arrival.shared is not None, received=arrival.received,
        )  # fmt: skip
        await self._deliver(job)
        self.session.end_pull(request)

    def _push_title(self, request: PendingRequest) -> str:
        what = "step" if self.session.synchronous else "push"
        return f"{what} {request.number} of {self._name!r}"

    @contextmanager
    def invalidate_on_error(self) -> Iterator[None]:
        """For a push in one call: where it ends badly a server may read the gradient still, from memory that is the
        user's again, so that memory is not shared any more."""
        try:
            yield
        except BaseException:
            self.shared_memory.renew()
            raise

    async def _deliver(self, job: Job) -> None:
        """Gets a job answered. A push begins only while the run has enough workers."""
        if self.options.request_timeout is None:
            await self._deliver_in_time(job)
            return
        try:
            async with asyncio.timeout(self.options.request_timeout):
                await self._deliver_in_time(job)
        except TimeoutError:
            raise WaitTimeoutError(
                f"{job.title} took longer than request_timeout={self.options.request_timeout:g} s: waiting "
                f"{self._data.last_reason}. The step was not advanced; calling again goes on with it"
            ) from None

    async def _deliver_in_time(self, job: Job) -> None:
        if isinstance(job, PushJob):
            if self._link.watch.cluster.paused:
                await self._until_resumed(job)
            if not self.session.unfinished:
                await self._link.stopping.until_allowed()
            self._link.states.begins(self._name)
            job.mark = self.session.send(self._link.pushes.mark)
        try:
            await self._data.deliver(job, self._plan)
        except NotMemberError:
            if self._member:  # A server says so too of one that was expelled after its call had begun.
                await self._link.confirm_membership(job.sender.incarnation)
            raise

    async def _until_resumed(self, job: Job) -> None:
        watch = self._link.watch
        with self._link.waits.open(f"{watch.cluster.paused}, for {job.title}") as wait:
            while watch.cluster.paused:
                self._link.raise_if_expelled(self._sender.incarnation)
                wait.hear(f"{watch.cluster.paused}, for {job.title}")
                self._data.last_reason = wait.reason
                await watch.changed()

    def _plan(self, slices: Sequence[int]) -> RoutingPlan:
        """Where ``slices`` go; for all of them that is kept as long as nothing is heard."""
        link, watch = self._link, self._link.watch
        link.raise_if_expelled(self._sender.incarnation)
        if watch.cluster.entry(self._name) is None:  # The map may be here before the news.
            raise FencedError(f"the run goes back to a snapshot: {self._name!r} is not placed any more")
        if len(slices) < self.slicing.count:
            return routing.plan(watch.cluster, self._name, slices, watch.news)
        if self._planned is None or self._planned[0] is not watch.cluster or self._planned[1] is not watch.news:
            plan = routing.plan(watch.cluster, self._name, slices, watch.news)
            self._planned = watch.cluster, watch.news, plan
        return self._planned[2]
