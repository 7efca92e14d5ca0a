"""One worker's part in one parameter set: the numbers of its pushes, over all of its incarnations.

A worker that was expelled takes part again as its next incarnation, and goes on with the push that it was making where
that is still right. After a rollback it begins anew, from the snapshot.

Invariants: each incarnation has one push sequence. A push keeps its number, and the incarnation that it was first
numbered in, until it is answered or dropped.

Not here: how pushes reach the servers (``exchange``), what is reported to the user (``steps``).
"""

from __future__ import annotations

from psdist.client.core.push_sequence import PendingRequest, PushSequence
from psdist.client.session.activity import ReportedWait
from psdist.client.session.registration import Registration
from psdist.client.session.scheduler_session import WorkerSession
from psdist.client.session.worker_state import Restore, Save, State, check_state, fetch, part_of
from psdist.client.transport.creation import CreatedParameters, ParametersCreator
from psdist.client.transport.requests import RequestIdentity
from psdist.consistency import BSP, SSP
from psdist.types import ParametersEntry
from psdist.v1 import scheduler_pb2


class Participation:
    """A worker's part in the parameter set that was ``created``. is_member: it pushes; else it only reads."""

    def __init__(
        self, session: WorkerSession, creator: ParametersCreator, created: CreatedParameters, *, is_member: bool
    ) -> None:
        self.entry: ParametersEntry = created.entry
        self.is_member = is_member
        #: Pushes that were under way when this worker was expelled, and went on.
        self.resumed = 0
        #: Whether this incarnation goes on with the pushes of the one before.
        self.goes_on = False
        self._is_outdated = False
        #: The push under way is recorded in the order of the script.
        self._is_recorded = False
        self._session = session
        self._creator = creator
        self._layout = created.layout
        #: Who this worker was when its pushes began to be numbered.
        self._origin = session.membership.registration
        #: How often the values began anew from a snapshot, as far as this worker's state and pushes have followed.
        self.generation = created.entry.generation
        self.sender = self._make_sender(self._origin)
        #: On the learning rate of the pushes that begin from now on; None where others say it.
        self.lr_factor: float | None = None
        #: Another one in each incarnation of this worker.
        self.sequence = self._make_sequence(created, None)

    def _make_sender(self, mine: Registration) -> RequestIdentity:
        return RequestIdentity(mine.run_id, mine.worker_id, mine.incarnation, self.name)

    def _make_sequence(self, created: CreatedParameters, before: PushSequence | None) -> PushSequence:
        consistency = self.entry.spec.consistency if self.is_member else None
        sequence = PushSequence(self.entry.slicing.count, consistency, created.first_step, before)
        if self.is_member:
            self._session.snapshots.marks.enter(self.name, sequence)
        if self.is_member and self.entry.spec.is_ordered:
            self._session.iterations.enter(self.name, sequence)
        return sequence

    @property
    def name(self) -> str:
        """The parameter set's name."""
        return self.entry.spec.name

    @property
    def incarnation(self) -> int:
        """The incarnation of this worker that takes part."""
        return self.sender.incarnation

    @property
    def origin(self) -> Registration:
        """Who this worker was when its pushes began to be numbered. Another object where they began anew."""
        return self._origin

    @property
    def is_stable(self) -> bool:
        """Whether the weights stand still between this worker's pushes, because nobody goes on without it."""
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
            self._session.iterations.order.lost_course.discard(self.name)
        outdated = self._session.iterations.order.outdated
        if value and self.entry.spec.is_ordered:
            outdated.add(self.name)
        else:
            outdated.discard(self.name)

    # --- another incarnation ------------------------------------------------------------------------------------------

    async def start_incarnation(self, mine: Registration) -> None:
        """Takes part as the incarnation ``mine``, and sets ``goes_on``."""
        if self.is_member:
            created = await self._creator.create(self.entry.spec, self._layout, None, self._resume_push(mine))
        else:
            created = await self._creator.describe(self.name)
        is_rolled_back = created.entry.generation != self.generation
        self.goes_on = created.resumed and not is_rolled_back
        self.resumed += self.goes_on and self.sequence.unfinished
        if not self.goes_on:
            self._origin = mine
            if self.is_member and self.entry.spec.is_ordered:
                self._session.iterations.order.lose_place()
        self.entry = created.entry
        self.sender = self._make_sender(mine)
        self.sequence = self._make_sequence(created, self.sequence if self.goes_on else None)
        if is_rolled_back:  # Perhaps to before its settings were changed.
            created.announce()
            if self.is_member:
                self._session.iterations.order.lose_course(self.name)
        restore = self._session.snapshots.states.start_incarnation(self.name, self.sequence)
        if restore is not None and is_rolled_back:
            restore(await self.state())
        # Last: where this incarnation ends before, the next one has to roll back, too.
        self.generation = created.entry.generation

    def _resume_push(self, mine: Registration) -> scheduler_pb2.ResumePush | None:
        """The push that this worker would go on with. In BSP, under another rank, its contribution would be added in
        another place."""
        if self.sequence.synchronous and mine.rank != self._origin.rank:
            return None
        return scheduler_pb2.ResumePush(
            origin=self._origin.incarnation, number=self.sequence.step, generation=self.generation
        )

    # --- pushes -------------------------------------------------------------------------------------------------------

    async def start_push(self) -> int:
        """Returns the snapshot mark of the next push, when it may be begun."""
        begins = not self.sequence.unfinished
        if begins:
            await self._session.stopping.until_allowed()
            await self._session.iterations.until_allowed(self.name)
            begins = not self.sequence.unfinished  # Else another bucket of the same push was sent meanwhile.
        self._session.snapshots.states.push_started(self.name)
        mark = self.sequence.send(self._session.snapshots.marks.mark)
        if begins:
            self._is_recorded = True
            self._session.iterations.push_began(self.name)
        return mark

    def begin_push(self) -> PendingRequest:
        """The next push, with all slices unanswered."""
        return self.sequence.begin_push(self.lr_factor)

    def end_push(self, progress: PendingRequest, *, seen: bool) -> None:
        """All of a push is answered. seen: the answers carried the weights."""
        self.sequence.end_push(progress, seen=seen)
        self._is_recorded = False
        self._session.activities.throughput.push_ended(self.name)
        self._session.snapshots.states.push_finished(self.name)
        self._session.stopping.push_ended()

    def on_dropped(self) -> None:
        """A push of this worker was dropped."""
        self._session.snapshots.marks.dropped += 1
        self._session.iterations.order.drop_push(self.name, has_begun=self._is_recorded)
        self.is_outdated = self._is_recorded = False
        self._session.stopping.push_ended()

    @property
    def has_begun(self) -> bool:
        """True if a push is under way that is neither answered nor dropped."""
        return self._is_recorded

    @property
    def is_skipping(self) -> bool:
        """True if the script's next push is to be dropped: its iteration does not count for all sets, or it is of
        weights from before the run went back to a snapshot."""
        return self._session.iterations.order.drops_next(self.name)

    def report_wait(self, *, push: bool, reads: bool, limited: bool) -> ReportedWait:
        """For a ``with`` block in which the user waits for the answer to the next push, or to a pull.

        reads: the answer has weights. limited: the wait ends by itself.
        """
        # The last of this worker's pushes that must be in the weights, and with it those of the others.
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
        """SSP: this worker's clock, less the number of its next push; None while the map does not have it."""
        entry = self._session.membership.view.cluster.entry(self.name)
        mine = (self.sender.worker_id, self.sender.incarnation)
        members = (m for m in (entry.members if entry is not None else ()) if (m.worker_id, m.incarnation) == mine)
        return next((member.first_step - member.first_push for member in members), None)

    # --- state that the worker keeps ----------------------------------------------------------------------------------

    async def keep_state(self, save: Save, restore: Restore, *, prefix: str = "") -> None:
        """See ``AsyncParameters.keep_state``. prefix: of what psdist keeps itself."""
        if state := part_of(await self.state(), prefix):
            restore(state)
        check_state(self.name, save())
        self._session.snapshots.states.keep(self.name, save, restore, self.sequence, prefix=prefix)
        self._session.snapshots.report_kept()

    async def state(self) -> State:
        """What this rank handed in for the snapshot that the values came from. Empty where there is none, and for who
        joins later: what it belonged to was pushed long ago."""
        membership = self._session.membership
        if self.entry.restore is None or not self.is_member or self.name in membership.ready_before:
            return {}
        return await fetch(self._session.calls, membership, self._session.waits, self.name)
