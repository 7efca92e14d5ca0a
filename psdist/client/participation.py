"""One worker's part in one parameter set, over all of its incarnations.

``Incarnation`` is an immutable value: the identity, push sequence and routes of one incarnation. A worker that was
expelled takes part again with a new value, which continues the push under way if that is still valid. After a rollback
it starts over from the snapshot.

Invariants: an incarnation is replaced whole. Each has one push sequence. A push keeps its number, and the incarnation
that it was first numbered in, until it is answered or dropped.

Not here: how pushes reach the servers (``server_access``), what is reported to the user (``steps``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from psdist.client.core import routing
from psdist.client.core.push_sequence import NO_OPTIONS, PendingRequest, PushSequence
from psdist.client.core.routing import RoutingPlan, ServerNews
from psdist.client.core.written_weights import WrittenWeights
from psdist.client.reporting.phase_timer import PhaseTimer
from psdist.client.session.membership import Registration, WorkerMembership
from psdist.client.session.snapshot_participant import fetch_state
from psdist.client.session.waits import ReportedWait
from psdist.client.session.worker_session import WorkerSession
from psdist.client.session.worker_state import OWN, Restore, Save, State, check_state, part_of
from psdist.client.transport.creation import CreatedParameters, ParametersCreator
from psdist.client.transport.requests import RequestIdentity
from psdist.consistency import BSP, SSP
from psdist.data.batch_position import BATCHES
from psdist.errors import FencedError
from psdist.snapshots.model_tensors import BUFFERS
from psdist.types import ClusterMap, ParametersEntry
from psdist.v1 import scheduler_pb2

logger = logging.getLogger("psdist")


class Routes:
    """The routes of one incarnation's requests, by the newest map."""

    def __init__(self, membership: WorkerMembership, name: str, slices: int, incarnation: int) -> None:
        self._membership = membership
        self._name = name
        self._slices = slices
        self._incarnation = incarnation
        self._planned: tuple[ClusterMap, ServerNews, RoutingPlan] | None = None

    def plan(self, slices: Sequence[int]) -> RoutingPlan:
        """Return the routes of ``slices``. The plan of all slices is cached until a newer map or news of a lost server
        arrives.

        Raises FencedError if the incarnation has ended.
        """
        view, planned = self._membership.view, self._planned
        self._membership.raise_if_expelled(self._incarnation)
        every = len(slices) >= self._slices
        if every and planned is not None and planned[0] is view.cluster and planned[1] is view.news:
            return planned[2]
        if view.cluster.entry(self._name) is None:  # The map may arrive before the news.
            raise FencedError(f"the run goes back to a snapshot: {self._name!r} is not placed any more")
        plan = routing.plan(view.cluster, self._name, slices, view.news)
        if every:
            self._planned = view.cluster, view.news, plan
        return plan


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One incarnation of this worker in one parameter set.

    sender: identity of its requests.
    origin: registration under which its pushes began to be numbered. It is another object if they were restarted.
    entry: the parameter set, by the map with which the incarnation began.
    sequence: numbers of its pushes.
    routes: routes of its requests.
    continues: True if it continues the pushes of the incarnation before.
    """

    sender: RequestIdentity
    origin: Registration
    entry: ParametersEntry
    sequence: PushSequence
    routes: Routes
    continues: bool


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

    def follows(self, now: Incarnation) -> bool:
        """Return True if the next push agrees with the writes of other workers."""
        return self._is_due(now) and self.weights(now) is None

    def take_overdue(self, now: Incarnation) -> int | None:
        """Drop weights of a push that this worker no longer makes. Returns the push's number, or None."""
        overdue = self._made
        if overdue is None or self._is_due(now):
            return None
        self._made = None
        return overdue[2] if overdue[0] is not None else None


class Participation:
    """This worker's part in the parameter set that was ``created``. is_member: True if it pushes; else it only
    reads."""

    def __init__(
        self, session: WorkerSession, creator: ParametersCreator, created: CreatedParameters, *, is_member: bool
    ) -> None:
        #: Name of the parameter set.
        self.name = created.entry.spec.name
        self.is_member = is_member
        #: Pushes that were under way when this worker was expelled, and were resumed.
        self.resumed = 0
        self._is_outdated = False
        #: True if the push under way is recorded in the program order.
        self._is_recorded = False
        self._session = session
        self._creator = creator
        self._layout = created.layout
        #: Rollbacks of the values that this worker's state and pushes have followed.
        self.generation = created.entry.generation
        #: Parts of all later pushes besides their gradients, writes and attempts.
        self.options = NO_OPTIONS
        #: Weights that the script wrote before the next push.
        self.writes = PendingWrite()
        #: The incarnation that takes part.
        self.current = self._make_incarnation(created, session.membership.registration, None)

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
            self._session.alignment.enter(spec.name, sequence)
        return Incarnation(
            sender=RequestIdentity(mine.run_id, mine.worker_id, mine.incarnation, spec.name),
            origin=mine if before is None else before.origin,
            entry=entry,
            sequence=sequence,
            routes=Routes(self._session.membership, spec.name, entry.slicing.count, mine.incarnation),
            continues=before is not None,
        )

    @property
    def incarnation(self) -> int:
        """Number of the incarnation that takes part."""
        return self.current.sender.incarnation

    @property
    def phases(self) -> PhaseTimer:
        """Clock of the script's calls."""
        return self._session.waits.phases

    @property
    def sequence(self) -> PushSequence:
        """Numbers of the pushes of the incarnation that takes part."""
        return self.current.sequence

    @property
    def entry(self) -> ParametersEntry:
        """The parameter set, by the map with which the incarnation began."""
        return self.current.entry

    @property
    def is_stable(self) -> bool:
        """True if the weights cannot change between this worker's pushes, because no step closes without it."""
        consistency = self.entry.spec.consistency
        return self.is_member and isinstance(consistency, BSP) and not consistency.backup_workers

    @property
    def is_outdated(self) -> bool:
        """True if the incarnation changed between two pushes, so that the next gradient is of outdated weights."""
        return self._is_outdated

    @is_outdated.setter
    def is_outdated(self, value: bool) -> None:
        self._is_outdated = value
        if not value:
            self._session.alignment.order.lost_course.discard(self.name)
        outdated = self._session.alignment.order.outdated
        if value and self.entry.spec.is_ordered:
            outdated.add(self.name)
        else:
            outdated.discard(self.name)

    # --- another incarnation ------------------------------------------------------------------------------------------

    async def start_incarnation(self, mine: Registration) -> None:
        """Take part as the incarnation ``mine``."""
        if self.is_member:
            created = await self._creator.create(self.entry.spec, self._layout, None, self._resume_push(mine))
        else:
            created = await self._creator.describe(self.name)
        is_rolled_back = created.entry.generation != self.generation
        continues = created.resumed and not is_rolled_back
        self.resumed += continues and self.sequence.unfinished
        if not continues and self.is_member and self.entry.spec.is_ordered:
            self._session.alignment.order.lose_place()
        self.current = self._make_incarnation(created, mine, self.current if continues else None)
        if is_rolled_back:  # The settings may be older ones, too.
            created.announce()
            if self.is_member:
                self._session.alignment.order.lose_course(self.name, mine.incarnation)
        restore = self._session.snapshots.states.start_incarnation(self.name, self.sequence, continues=continues)
        if restore is not None and is_rolled_back:
            restore(await self.state())
        # Last: if this incarnation ends earlier, the next one must roll back, too.
        self.generation = created.entry.generation

    def _resume_push(self, mine: Registration) -> scheduler_pb2.ResumePush | None:
        """Return the push to resume. None in BSP under another rank, because its contribution would be added in another
        place."""
        origin = self.current.origin
        if self.sequence.synchronous and mine.rank != origin.rank:
            return None
        return scheduler_pb2.ResumePush(
            origin=origin.incarnation, number=self.sequence.step, generation=self.generation
        )

    # --- pushes -------------------------------------------------------------------------------------------------------

    async def start_push(self) -> int:
        """Return the snapshot mark of the next push, once it may begin."""
        begins = not self.sequence.unfinished
        if begins:
            await self._session.shutdown.until_allowed()
            await self._session.alignment.until_allowed(self.name)
            begins = not self.sequence.unfinished  # Another bucket of the same push may have been sent meanwhile.
        self._session.snapshots.states.push_started(self.name)
        mark = self.sequence.send(self._session.snapshots.marks.mark)
        if begins:
            self._is_recorded = True
            self._session.alignment.push_began(self.name)
        return mark

    def take_state(self) -> None:
        """Take the script's state, in the call that makes the next push."""
        self._session.snapshots.states.take(self.name)

    def begin_push(self, *, abstains: bool = False) -> PendingRequest:
        """Return the next push, with all slices unanswered. abstains: it has no gradient at all."""
        follows = abstains or self.writes.follows(self.current)
        written, attempt = self.writes.weights(self.current), self.sequence.attempt
        return self.sequence.begin_push(replace(self.options, written=written, follows_writes=follows, attempt=attempt))

    def end_push(self, progress: PendingRequest, *, seen: bool) -> None:
        """Retire an answered push. seen: the answers carried the weights."""
        self.sequence.end_push(progress, seen=seen)
        self.writes.clear()
        self._is_recorded = False
        self._session.activities.throughput.push_ended(self.name, progress.staleness_max)
        self._session.snapshots.states.push_finished(self.name)
        self._session.shutdown.push_ended()

    def on_dropped(self) -> None:
        """Retire a dropped push of this worker, with the weights that it wrote: those of the servers replace them."""
        self.writes.clear()
        self._session.snapshots.marks.dropped += 1
        self._session.alignment.order.drop_push(self.name, has_begun=self._is_recorded)
        self.is_outdated = self._is_recorded = False
        self._session.shutdown.push_ended()

    @property
    def has_begun(self) -> bool:
        """True if a push is under way that is neither answered nor dropped."""
        return self._is_recorded

    @property
    def is_skipping(self) -> bool:
        """True if the script's next push is to be dropped: its iteration does not count for all sets, or its gradient
        is of weights from before a rollback."""
        return self._session.alignment.order.drops_next(self.name)

    def report_wait(self, *, push: bool, reads: bool, limited: bool) -> ReportedWait:
        """Return a report, for a ``with`` block in which the user waits for the answer to the next push, or to a pull.

        reads: True if the answer carries weights.
        limited: True if the wait has a time limit, so that it ends without other workers.
        """
        # The last push of this worker, and of the others, that must be in the weights.
        last = self.sequence.step - (not push)
        consistency, what = self.entry.spec.consistency, dict[str, scheduler_pb2.Activity.Step]()
        if self.is_member and isinstance(consistency, BSP) and last >= 0:
            what["step"] = scheduler_pb2.Activity.Step(parameters=self.name, step=last)
        elif self.is_member and isinstance(consistency, SSP) and reads and (first := self._first_clock()) is not None:
            clock = first + last + 1 - consistency.staleness
            what["clock"] = scheduler_pb2.Activity.Step(parameters=self.name, step=max(0, clock))
        sent = (lambda: self.sequence.step > last or self.sequence.unfinished) if push else (lambda: True)
        return self._session.activities.waits(limited=limited, sent=sent, **what)

    def _first_clock(self) -> int | None:
        """SSP: return this worker's clock minus the number of its next push. None until the map lists the worker."""
        entry = self._session.membership.view.cluster.entry(self.name)
        mine = (self.current.sender.worker_id, self.incarnation)
        members = (m for m in (entry.members if entry is not None else ()) if (m.worker_id, m.incarnation) == mine)
        return next((member.first_step - member.first_push for member in members), None)

    # --- worker state -------------------------------------------------------------------------------------------------

    async def keep_state(self, save: Save, restore: Restore, *, prefix: str = "") -> None:
        """See ``AsyncParameters.keep_state``. prefix: prefix of the names, for psdist's own state."""
        if state := part_of(await self.state(), prefix):
            restore(state)
        elif self.entry.restore is not None and self.is_member and not prefix.startswith((OWN, BUFFERS)):
            what = "the place of a DynamicBatcher" if prefix.startswith(BATCHES) else "the script's state"
            logger.warning(
                "%s for %r is missing at step %d: %s has none of rank %d, which was lost before the snapshot was "
                "taken, kept no state, or joins later",
                what, self.name, self.sequence.step, self.entry.restore.directory, self.current.origin.rank,
            )  # fmt: skip
        check_state(self.name, save())
        self._session.snapshots.states.keep(self.name, save, restore, self.sequence, prefix=prefix)
        self._session.snapshots.report_kept()

    async def state(self) -> State:
        """Return the state that this rank handed in for the restored snapshot. Empty if there is none, and for a worker
        that joins later, since the state belonged to old pushes."""
        membership = self._session.membership
        if self.entry.restore is None or not self.is_member or self.name in membership.ready_before:
            return {}
        return await fetch_state(self._session.calls, membership, self._session.waits, self.name)
