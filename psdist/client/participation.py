"""One worker's part in one parameter set, over all of its incarnations: its requests to the servers.

``Incarnation`` holds everything that ends with a registration: the identity, push sequence and routes of requests. A
worker that was expelled takes part again with a new one, which continues the push under way if that is still valid.
After a rollback it starts over from the snapshot.

Invariants: an incarnation is replaced whole. Each has one push sequence. A push keeps its number, and the incarnation
that it was first numbered in, until it is answered or dropped.

Not here: the order of pushes, and reports to the user (``push_order``); time limits, attempts and retries of a request
(``delivery``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from psdist.client.core import routing
from psdist.client.core.flat_vector import Flat, WrittenWeights
from psdist.client.core.push_sequence import NO_OPTIONS, PendingRequest, PushSequence
from psdist.client.core.routing import RoutingPlan, ServerNews
from psdist.client.session.membership import Expulsion, Registration, WorkerMembership
from psdist.client.session.waits import ReportedWait
from psdist.client.session.worker_session import WorkerSession
from psdist.client.session.worker_state import OWN, Restore, Save, State, check_state, fetch_state, part_of
from psdist.client.transport.buffers import PullTarget
from psdist.client.transport.creation import CreatedParameters, ParametersCreator
from psdist.client.transport.delivery import Delivery, Transports
from psdist.client.transport.grpc import GrpcTransport
from psdist.client.transport.shm import ShmTransport
from psdist.client.transport.tcp import TcpTransport
from psdist.client.transport.transport import (
    ByteCounters,
    EncodedGradient,
    PullRequest,
    PushRequest,
    RequestIdentity,
)
from psdist.compression import Cast, Codec, Float32
from psdist.consistency import BSP, SSP
from psdist.data.samples import BATCHES
from psdist.errors import FencedError, NotMemberError, WaitTimeoutError, WrittenWeightsError
from psdist.settings.config import TransportName
from psdist.settings.debugging import time_limit
from psdist.snapshots.model_tensors import BUFFERS
from psdist.types import ClusterMap, DType, ParametersEntry
from psdist.v1 import scheduler_pb2

logger = logging.getLogger("psdist")


@dataclass(frozen=True, slots=True)
class Options:
    """Choices of each worker for itself.

    request_timeout: seconds; None waits as long as it takes.
    reason: why the codec was chosen, if psdist chose it.
    """

    codec: Codec
    pull_dtype: DType
    request_timeout: float | None = None
    transport: TransportName = "auto"
    reason: str = ""

    @property
    def limit(self) -> float | None:
        """Seconds that a request may take now."""
        return time_limit(self.request_timeout)

    @property
    def cast(self) -> Cast:
        """Cast of gradients for the wire and for shared memory. A codec that compresses starts from float32."""
        return self.codec if isinstance(self.codec, Cast) else Float32()


@dataclass(slots=True, eq=False)
class Incarnation:
    """One incarnation of this worker in one parameter set.

    sender: identity of its requests.
    origin: registration under which its pushes began to be numbered. It is another object if they were restarted.
    entry: the parameter set, by the map with which the incarnation began.
    sequence: numbers of its pushes.
    """

    sender: RequestIdentity
    origin: Registration
    entry: ParametersEntry
    sequence: PushSequence
    _membership: WorkerMembership
    #: Plan of all slices, with the map and the news that it follows from.
    _planned: tuple[ClusterMap, ServerNews, RoutingPlan] | None = field(default=None, init=False)

    def plan(self, slices: Sequence[int]) -> RoutingPlan:
        """Return the routes of ``slices`` by the newest map. Raises FencedError if the incarnation has ended."""
        membership, planned, name = self._membership, self._planned, self.sender.parameters
        membership.raise_if_expelled(self.sender.incarnation)
        view = membership.view
        every = len(slices) >= len(self.sequence.versions)
        if every and planned is not None and planned[0] is view.cluster and planned[1] is view.news:
            return planned[2]
        if view.cluster.entry(name) is None:  # The map may arrive before the news.
            raise FencedError(f"the run goes back to a snapshot: {name!r} is not placed any more")
        plan = routing.plan(view.cluster, name, slices, view.news)
        if every:
            self._planned = view.cluster, view.news, plan
        return plan


class PendingWrite:
    """Weights that the script wrote before its next push. They belong to one push of one sequence."""

    def __init__(self) -> None:
        #: The weights, or None to agree with those of the others; the sequence's origin; the push's number, and its
        #: withdrawn attempts.
        self._made: tuple[WrittenWeights | None, Registration, int, int] | None = None

    def put(self, weights: WrittenWeights | None, now: Incarnation) -> None:
        """Write these weights with the next push; None agrees with the writes of other workers."""
        is_nothing = weights is not None and weights.is_empty
        self._made = None if is_nothing else (weights, now.origin, now.sequence.step, now.sequence.attempt)

    def clear(self) -> None:
        """Forget the weights, because their push was answered or dropped."""
        self._made = None

    def _is_due(self, now: Incarnation) -> bool:
        return self._made is not None and (self._made[1] is now.origin and self._made[2] == now.sequence.step)

    def weights(self, now: Incarnation) -> WrittenWeights | None:
        """Return the weights for the next push; None for none."""
        return self._made[0] if self._made is not None and self._is_due(now) else None

    def unrefused(self, now: Incarnation) -> WrittenWeights | None:
        """Return the same, unless servers refused them: later writes replace them."""
        return self.weights(now) if self._made is not None and self._made[3] == now.sequence.attempt else None

    @property
    def is_empty(self) -> bool:
        """True if nothing is written before the next push, and no agreement with other workers is asked for."""
        return self._made is None

    def follows(self, now: Incarnation) -> bool:
        """Return True if the next push agrees with the writes of other workers."""
        return self._made is not None and self._made[0] is None and self._is_due(now)

    def take_overdue(self, now: Incarnation) -> int | None:
        """Drop weights of a push that this worker no longer makes. Returns the push's number, or None."""
        overdue = self._made
        if overdue is None or self._is_due(now):
            return None
        self._made = None
        return overdue[2] if overdue[0] is not None else None


class Participation:
    """This worker's part in the parameter set that was ``created``.

    grpc: the transport that all handles of a client share.
    is_member: True if it pushes; else it only reads.
    """

    def __init__(
        self,
        session: WorkerSession,
        grpc: GrpcTransport,
        creator: ParametersCreator,
        created: CreatedParameters,
        options: Options,
        *,
        is_member: bool,
    ) -> None:
        entry, layout = created.entry, created.layout
        self.name, self.layout, self.slicing = entry.spec.name, layout, entry.slicing
        self.is_member = is_member
        self.options = options
        #: Parts of all later pushes besides their gradients, writes and attempts.
        self.push_options = NO_OPTIONS
        #: Weights that the script wrote before the next push.
        self.writes = PendingWrite()
        #: Pushes that were under way when this worker was expelled, and were resumed.
        self.resumed = 0
        #: Rollbacks of the values that this worker's state and pushes have followed.
        self.generation = entry.generation
        #: True if the incarnation changed between two pushes, so that the next gradient is of outdated weights.
        self.is_outdated = False
        #: True if a push is under way that is neither answered nor dropped; it is recorded in the program order.
        self.has_begun = False
        #: True if snapshots hold a state of this worker for this set.
        self._keeps_state = False
        self.traffic = ByteCounters()
        #: Clock of the script's calls.
        self.phases = session.waits.phases
        self._session = session
        self._membership = session.membership
        self._alignment = session.alignment
        self._creator = creator
        #: The incarnation that takes part.
        self.current = self._make_incarnation(created, session.membership.registration, None)
        self._connect_transports(grpc)
        self._rejoining = asyncio.Lock()
        #: All handles of this client that take part. They rejoin together: other workers may wait for any of them.
        self.siblings: Callable[[], Iterable[Participation]] = tuple

    def _connect_transports(self, grpc: GrpcTransport) -> None:
        session, options, now = self._session, self.options, self.current
        view, waits, consistency = session.membership.view, session.waits, now.entry.spec.consistency
        # Weights cannot change between this worker's pushes if no step closes without it.
        is_stable = self.is_member and isinstance(consistency, BSP) and not consistency.backup_workers
        self.shared_memory = ShmTransport(
            view, waits, grpc, now.sender, now.entry, options.cast.dtype, required=options.transport == "shm",
            member=self.is_member, stable=is_stable,
        )  # fmt: skip
        self.tcp = TcpTransport(view, waits, grpc, now.sender, now.entry, required=options.transport == "tcp")
        #: Transports besides gRPC, the preferred one first.
        self._negotiated = (self.shared_memory, self.tcp)
        chosen = [transport for transport in self._negotiated if options.transport in ("auto", transport.name)]
        self._transports = Transports(*chosen, grpc)
        pusher = self if self.is_member else None
        self.delivery = Delivery(session, self._transports, pusher, options.request_timeout)

    def _make_incarnation(
        self, created: CreatedParameters, mine: Registration, before: Incarnation | None
    ) -> Incarnation:
        """Return the incarnation ``mine``, which takes part from now on. before: the one that it continues."""
        entry, spec = created.entry, created.entry.spec
        sequence = PushSequence(
            entry.slicing.count,
            spec.consistency if self.is_member else None,
            created.first_step,
            None if before is None else before.sequence,
        )
        if self.is_member:
            self._session.snapshots.marks.enter(spec.name, sequence)
        if self.is_member and spec.is_ordered:
            self._alignment.enter(spec.name, sequence)
        return Incarnation(
            sender=RequestIdentity(mine.run_id, mine.worker_id, mine.incarnation, spec.name),
            origin=mine if before is None else before.origin,
            entry=entry,
            sequence=sequence,
            _membership=self._session.membership,
        )

    @property
    def incarnation(self) -> int:
        """Number of the incarnation that takes part."""
        return self.current.sender.incarnation

    @property
    def expulsion(self) -> Expulsion:
        """Why the previous incarnation ended."""
        return self._membership.expulsion

    def check_member(self) -> None:
        """Raise NotMemberError if the handle was opened for reading."""
        if not self.is_member:
            raise NotMemberError(
                f"{self.name!r} was opened for reading: pass init and optimizer to client.parameters() to take part"
            )

    def set_outdated(self, value: bool) -> None:
        """Record if the script's next gradient is of weights from before the current incarnation."""
        order = self._alignment.order
        self.is_outdated = value
        if not value:
            order.lost_course.discard(self.name)
        if value and self.current.entry.spec.is_ordered:
            order.outdated.add(self.name)
        else:
            order.outdated.discard(self.name)

    # --- another incarnation ------------------------------------------------------------------------------------------

    @property
    def is_rejoining(self) -> bool:
        """True while the next incarnation begins to take part."""
        return self._rejoining.locked()

    async def rejoin(self, fenced: FencedError, incarnation: int) -> None:
        """Take part in the next incarnation of this client, after ``fenced`` ended work of ``incarnation``.

        The current or next push continues if ``current.origin`` stays the same: it is sent again, and slices that have
        it ignore it. Otherwise it is dropped, since its step was closed without it.

        Raises the error that ends the membership for good, and WaitTimeoutError.
        """
        limit = self.options.limit
        try:
            async with asyncio.timeout(limit), self._rejoining:
                if self.incarnation == incarnation:  # Otherwise another call has rejoined.
                    await self._membership.wait_until_rejoined(fenced, incarnation)
                    others = [one for one in self.siblings() if one is not self]
                    mine = self._membership.retry_across_incarnations(self.start_incarnation)
                    await asyncio.gather(mine, *(one.follow_rejoin() for one in others))
        except TimeoutError:
            raise WaitTimeoutError(
                f"taking part in {self.name!r} again took longer than request_timeout={limit:g} s: calling again "
                "continues"
            ) from None

    async def follow_rejoin(self) -> None:
        """Take part in the incarnation in which another handle of this client rejoins."""
        if self._rejoining.locked() or self.incarnation == self._membership.registration.incarnation:
            return
        origin = self.current.origin
        async with self._rejoining:
            await self._membership.retry_across_incarnations(self.start_incarnation)
            # Outdated weights stay so if a later incarnation continues: the script has received no others.
            if self.current.origin is not origin and not self.has_begun:
                self.set_outdated(True)

    async def start_incarnation(self, mine: Registration) -> None:
        """Take part as the incarnation ``mine``."""
        now, order = self.current, self._alignment.order
        if self.is_member:
            created = await self._creator.create(now.entry.spec, self.layout, None, self._resume_push(mine))
        else:
            created = await self._creator.describe(self.name)
        is_rolled_back = created.entry.generation != self.generation
        continues = created.resumed and not is_rolled_back
        self.resumed += continues and now.sequence.unfinished
        if not continues and self.is_member and now.entry.spec.is_ordered:
            order.lose_place()
        self.current = self._make_incarnation(created, mine, now if continues else None)
        if is_rolled_back:  # The settings may be older ones, too.
            created.announce()
            if self.is_member:
                order.lose_course(self.name, mine.incarnation)
        states = self._session.snapshots.states
        restore = states.start_incarnation(self.name, self.current.sequence, continues=continues)
        if restore is not None and is_rolled_back:
            restore(await self.state())
        # If this incarnation ends earlier, the next one must roll back, too.
        self.generation = created.entry.generation
        await self.shared_memory.withdraw()
        for transport in self._negotiated:
            transport.rejoin(self.current.sender, self.current.entry)

    def _resume_push(self, mine: Registration) -> scheduler_pb2.ResumePush | None:
        """Return the push to resume. None in BSP under another rank, because its contribution would be added in another
        place."""
        origin, sequence = self.current.origin, self.current.sequence
        if sequence.synchronous and mine.rank != origin.rank:
            return None
        return scheduler_pb2.ResumePush(origin=origin.incarnation, number=sequence.step, generation=self.generation)

    # --- pushes -------------------------------------------------------------------------------------------------------

    @property
    def is_skipping(self) -> bool:
        """True if the script's next push is to be dropped: its iteration does not count for all sets, or its gradient
        is of weights from before a rollback."""
        return self._alignment.order.drops_next(self.name)

    def take_state(self) -> None:
        """Take the script's state, in the call that makes the next push."""
        if self._keeps_state:
            self._session.snapshots.states.take(self.name)

    def begin_push(self, *, abstains: bool = False) -> PendingRequest:
        """Return the next push, with all slices unanswered. abstains: it has no gradient at all."""
        now, writes = self.current, self.writes
        if writes.is_empty and not abstains and not now.sequence.attempt:
            return now.sequence.begin_push(self.push_options)
        follows = abstains or writes.follows(now)
        written, attempt = writes.weights(now), now.sequence.attempt
        options = replace(self.push_options, written=written, follows_writes=follows, attempt=attempt)
        return now.sequence.begin_push(options)

    async def start_push(self) -> int:
        """Return the snapshot mark of the next push, once it may begin."""
        session, alignment, sequence = self._session, self._alignment, self.current.sequence
        begins = not sequence.unfinished
        if begins:
            await session.shutdown.until_allowed()
            await alignment.until_allowed(self.name)
            sequence = self.current.sequence
            begins = not sequence.unfinished  # Another bucket of the same push may have been sent meanwhile.
        if self._keeps_state:
            session.snapshots.states.push_started(self.name)
        mark = sequence.send(session.snapshots.marks.mark)
        if begins:
            self.has_begun = True
            alignment.push_began(self.name)
        return mark

    def end_push(self, request: PendingRequest, *, seen: bool) -> None:
        """Retire an answered push. seen: the answers carried the weights."""
        session = self._session
        self.current.sequence.end_push(request, seen=seen)
        self.writes.clear()
        self.has_begun = False
        session.activities.pushes.push_ended(self.name, request.staleness_max)
        if self._keeps_state:
            session.snapshots.states.push_finished(self.name)
        session.shutdown.push_ended()
        self.shared_memory.on_push_completed()

    def on_dropped(self) -> None:
        """Retire a dropped push of this worker, with the weights that it wrote: those of the servers replace them."""
        self.writes.clear()
        self._session.snapshots.marks.dropped += 1
        self._alignment.order.drop_push(self.name, has_begun=self.has_begun)
        self.has_begun = False
        self.set_outdated(False)
        self._session.shutdown.push_ended()

    def waiting(self, *, push: bool, reads: bool, limited: bool = False) -> ReportedWait:
        """Return a report, for a ``with`` block in which the user waits for the answer to the next push, or to a pull.

        reads: True if the answer carries weights.
        limited: True if the wait has a time limit besides the client's, so that it ends without other workers.
        """
        sequence, consistency = self.current.sequence, self.current.entry.spec.consistency
        # The last push of this worker, and of the others, that must be in the weights.
        last = sequence.step - (not push)
        what = dict[str, scheduler_pb2.Activity.Step]()
        if self.is_member and isinstance(consistency, BSP) and last >= 0:
            what["step"] = scheduler_pb2.Activity.Step(parameters=self.name, step=last)
        elif self.is_member and isinstance(consistency, SSP) and reads and (first := self._first_clock()) is not None:
            clock = first + last + 1 - consistency.staleness
            what["clock"] = scheduler_pb2.Activity.Step(parameters=self.name, step=max(0, clock))

        def sent() -> bool:
            now = self.current.sequence
            return not push or now.step > last or now.unfinished

        limited = limited or self.options.limit is not None
        return self._session.activities.waits(limited=limited, sent=sent, **what)

    def _first_clock(self) -> int | None:
        """SSP: return this worker's clock minus the number of its next push. None until the map lists the worker."""
        entry = self._membership.view.cluster.entry(self.name)
        mine = (self.current.sender.worker_id, self.incarnation)
        members = (m for m in (entry.members if entry is not None else ()) if (m.worker_id, m.incarnation) == mine)
        return next((member.first_step - member.first_push for member in members), None)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Prepare missing transports. Called before each call.

        Raises the reason if this client is out: FencedError if only this incarnation has ended, see ``rejoin``.
        """
        routes = self.current.plan(range(self.slicing.count)).routes
        if not self._transports.is_missing(routes):
            return
        limit = self.options.limit
        try:
            async with asyncio.timeout(limit):
                await self._transports.prepare(routes)
        except TimeoutError:
            raise WaitTimeoutError(
                f"connecting {self.name!r} to its servers took longer than request_timeout={limit:g} s"
            ) from None

    def push(
        self,
        progress: PendingRequest,
        gradient: Flat | EncodedGradient | None,
        norm: float,
        target: PullTarget | None = None,
        weight: float = 1.0,
    ) -> Coroutine[Any, Any, None]:
        """Return a coroutine that delivers a gradient. It adds no frame of its own to that of ``Delivery.deliver``.

        gradient: None abstains.
        target: where the new weights go; None if they are not asked for.
        weight: weight of the gradient in the mean of its step.
        """
        now = self.current
        flat, encoded = (gradient, None) if isinstance(gradient, np.ndarray) else (None, gradient)
        what = "step" if now.sequence.synchronous else "push"
        request = PushRequest(
            now.sender, progress, self.slicing, f"{what} {progress.number} of {self.name!r}", now.sequence.versions,
            flat, self.options.cast, norm, self.traffic, target, encoded, weight,
        )  # fmt: skip
        return self.delivery.deliver(request, now.plan)

    async def withdraw_push(self, error: WrittenWeightsError) -> bool:
        """Withdraw the push under way from all servers, after some refused it with ``error``.

        Returns False if some slice has applied it, because a worker that wrote differently left meanwhile: the push is
        then completed as it is.
        """
        sequence = self.current.sequence
        withdrawal = sequence.begin_withdrawal(int(error.details.get("attempt", 0)))
        await self.push(withdrawal, None, 0.0)
        return sequence.end_withdrawal(withdrawal)

    async def pull(self, target: PullTarget) -> None:
        """Pull the weights into ``target``."""
        sequence = self.current.sequence
        progress = sequence.begin_pull()
        await self._pull(progress, target, f"the pull of {self.name!r}")
        sequence.end_pull(progress)

    async def _pull(self, progress: PendingRequest, target: PullTarget, title: str) -> None:
        now = self.current
        request = PullRequest(now.sender, progress, self.slicing, title, target, self.traffic)
        await self.delivery.deliver(request, now.plan)

    async def probe(self, slices: Sequence[int], target: PullTarget) -> None:
        """Pull some slices, in any version, to measure the speed of the links."""
        await self._pull(PendingRequest(0, set(slices)), target, f"measuring the links of {self.name!r}")

    def remote_slices(self) -> list[tuple[int, ...]]:
        """Return, by server, the slices of servers that share no memory with this worker."""
        transports, routes = self.transports(), self.current.plan(range(self.slicing.count)).routes
        return [route.slices for route in routes if transports.get(route.server_id) != "shm"]

    def transports(self) -> dict[str, str]:
        """Return, by server, the transport in use, and why preferred ones are not: "shm", "grpc: the transport is
        'grpc'"."""
        entry = self._membership.view.cluster.entry(self.name) or self.current.entry
        # A shard of few slices may have none.
        servers = tuple(dict.fromkeys(entry.primaries[: self.slicing.count]))
        if self.options.transport == "grpc":
            return dict.fromkeys(servers, "grpc: the transport is 'grpc'")
        return self._transports.statuses(servers)

    def transport(self) -> str:
        """Return the one transport to all servers, or "mixed"."""
        kinds = {how.partition(":")[0] for how in self.transports().values()} or {"grpc"}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    def codecs(self) -> tuple[str, str]:
        """Return the names of the codecs of pushes and pulls."""
        pull = self.current.entry.spec.pull_compression.partition("(")[0] or self.options.pull_dtype
        return type(self.options.codec).__name__.lower(), pull.lower()

    async def close(self) -> None:
        """Close this handle's own connections to servers, and withdraw its shared memory."""
        for transport in self._negotiated:
            await transport.close()

    # --- worker state -------------------------------------------------------------------------------------------------

    async def keep_state(self, save: Save, restore: Restore, *, prefix: str = "") -> None:
        """See ``AsyncParameters.keep_state``. prefix: prefix of the names, for psdist's own state."""
        state, now = part_of(await self.state(), prefix), self.current
        if state:
            restore(state)
        elif now.entry.restore is not None and self.is_member and not prefix.startswith((OWN, BUFFERS)):
            what = "the place of a DynamicBatcher" if prefix.startswith(BATCHES) else "the script's state"
            logger.warning(
                "%s for %r is missing at step %d: %s has none of rank %d, which was lost before the snapshot was "
                "taken, kept no state, or joins later",
                what, self.name, now.sequence.step, now.entry.restore.directory, now.origin.rank,
            )  # fmt: skip
        check_state(self.name, save())
        self._session.snapshots.states.keep(self.name, save, restore, self.current.sequence, prefix=prefix)
        self._keeps_state = True
        self._session.snapshots.report_kept()

    async def state(self) -> State:
        """Return the state that this rank handed in for the restored snapshot. Empty if there is none, and for a worker
        that joins later, since the state belonged to old pushes."""
        membership = self._session.membership
        if self.current.entry.restore is None or not self.is_member or self.name in membership.ready_before:
            return {}
        return await fetch_state(self._session.calls, membership, self._session.waits, self.name)
