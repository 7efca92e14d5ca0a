"""Shard machines: what happens to the slices of one shard, as events in and effects out.

A machine holds versions, contributions and duplicate tables; it never touches an array, a clock or the network. The
service carries its effects out and feeds the results back. Invariants, checked by ``validate``:

* A slice's version never goes down, and grows by one per update.
* At most one ``Aggregate`` or ``Apply`` per slice is under way.
* Each token is answered at most once.
* BSP: a step of a slice takes at most one contribution per worker, and is applied in rank order.
* SSP and ASP: the pushes of one incarnation are applied once each, in the order of their sequence numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from psdist.consistency import BSP, SSP, Consistency
from psdist.errors import FencedError, FutureStepError, NotMemberError, PsdistError, SequenceGapError
from psdist.types import ParametersMember
from psdist_server import gates
from psdist_server.events import (
    Aggregate,
    Apply,
    Cancelled,
    CutArmed,
    CutEnded,
    Effect,
    Event,
    Forget,
    JoinProposed,
    JoinWithdrawn,
    MembersChanged,
    NormKnown,
    PullRequested,
    Refuse,
    Reply,
    SliceAggregated,
    SliceApplied,
    SliceCut,
    SlicePushed,
    StepsEnded,
)
from psdist_server.records import Life, Records, SliceRecord


@dataclass(slots=True)
class _SliceBase:
    index: int
    version: int = 0
    #: An Aggregate or Apply is under way, or (BSP, clipping) the aggregated gradient waits for the norm.
    busy: bool = False
    pulls: dict[int, PullRequested] = field(default_factory=dict)


S = TypeVar("S", bound=_SliceBase)


class ShardMachine(ABC, Generic[S]):
    """What BSP and the asynchronous modes share: members, fencing, versions, pulls."""

    def __init__(self, slices: dict[int, S], members: Iterable[ParametersMember]) -> None:
        self.slices = slices
        self.members: dict[str, ParametersMember] = {member.worker_id: member for member in members}
        self.proposals: dict[str, ParametersMember] = {}
        self._cancelled: set[int] = set()

    @property
    def version_min(self) -> int:
        """Lowest version of any slice."""
        return min((state.version for state in self.slices.values()), default=0)

    @property
    def version_max(self) -> int:
        """Highest version of any slice."""
        return max((state.version for state in self.slices.values()), default=0)

    @property
    def step_next(self) -> int:
        """The step or clock that a member may join at, or at a later one."""
        return max((state.version + state.busy for state in self.slices.values()), default=0)

    def on(self, event: Event) -> list[Effect]:
        """The effects of ``event``, in the order in which they must be carried out."""
        match event:
            case SlicePushed():
                error = self._refusal(event)
                return [Refuse(event.token, error)] if error else self._pushed(self.slices[event.index], event)
            case PullRequested():
                self.slices[event.index].pulls[event.token] = event
                return self._serve(self.slices[event.index])
            case SliceApplied():
                return self._applied(self.slices[event.index])
            case Cancelled():
                return self._cancel(self.slices[event.index], event.token)
            case MembersChanged():
                self.members = {member.worker_id: member for member in event.members}
                self.proposals = {k: v for k, v in self.proposals.items() if k not in self.members}
                return self._members_changed()
            case JoinProposed():
                self.proposals[event.member.worker_id] = event.member
                return self._members_changed()
            case JoinWithdrawn():
                self.proposals.pop(event.worker_id, None)
                return self._members_changed()
            case SliceAggregated() | NormKnown():
                return self._on_clipping(event)
            case CutArmed() | SliceCut() | StepsEnded() | CutEnded():
                return self._on_cut(event)

    @abstractmethod
    def record(self, index: int) -> SliceRecord:
        """What another machine needs to go on with slice ``index`` as it is: an update under way is not in it."""

    @abstractmethod
    def waiting_for(self, token: int, index: int) -> str:
        """Why ``token`` (of slice ``index``) is not answered yet; "" if it waits for nobody but this server."""

    @abstractmethod
    def _pushed(self, state: S, event: SlicePushed) -> list[Effect]: ...

    @abstractmethod
    def _applied(self, state: S) -> list[Effect]: ...

    @abstractmethod
    def _read_gate(self, state: S, pull: PullRequested) -> str: ...

    @abstractmethod
    def _members_changed(self) -> list[Effect]: ...

    @abstractmethod
    def _cancel(self, state: S, token: int) -> list[Effect]: ...

    @abstractmethod
    def validate(self) -> None:
        """Asserts the invariants."""

    def _on_clipping(self, event: SliceAggregated | NormKnown) -> list[Effect]:
        raise AssertionError(f"{event} without an Aggregate")

    @abstractmethod
    def _on_cut(self, event: CutArmed | SliceCut | StepsEnded | CutEnded) -> list[Effect]: ...

    def _refusal(self, event: SlicePushed) -> PsdistError | None:
        member = self.members.get(event.worker_id)
        if member is None:
            return NotMemberError(
                f"{event.worker_id} takes no part in these parameters: create or attach them with init=..., or it was "
                "expelled and must start anew",
                worker_id=event.worker_id,
            )
        if event.incarnation != member.incarnation:
            return FencedError(
                f"{event.worker_id} has incarnation {member.incarnation} now, not {event.incarnation}: it was replaced",
                incarnation=event.incarnation,
            )
        return None

    def _serve(self, state: S) -> list[Effect]:
        ready = [pull for pull in state.pulls.values() if not self._read_gate(state, pull)]
        for pull in ready:
            del state.pulls[pull.token]
        return [Reply(pull.token, state.index, state.version) for pull in ready]


# --- BSP --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Contribution:
    token: int
    rank: int
    abstain: bool


@dataclass(slots=True)
class _BspSlice(_SliceBase):
    #: Contributions to the open step.
    open: dict[Life, _Contribution] = field(default_factory=dict)
    #: While busy: who contributed to the step that is being applied, in rank order.
    applying: tuple[Life, ...] = ()
    #: Who contributed to the step before ``version``.
    closed: tuple[Life, ...] = ()
    #: Tokens to answer when the step that was open at their time is applied, and whether they were ignored and late.
    waiters: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    next_waiters: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    aggregated: bool = False

    @property
    def step(self) -> int:
        """The step that contributions are taken for."""
        return self.version + self.busy


class BspShard(ShardMachine[_BspSlice]):
    """Step by step: a slice at version v takes contributions for step v, one per member."""

    def __init__(
        self,
        indices: Iterable[int],
        members: Iterable[ParametersMember],
        rule: BSP,
        clipping: bool = False,
        reference_workers: int = 0,
        records: Records | None = None,
    ) -> None:
        super().__init__({index: _BspSlice(index) for index in indices}, members)
        self._rule = rule
        self._clipping = clipping
        self._reference_workers = reference_workers
        self._everyone = tuple(self.members.values())
        #: See StepsEnded; 0 where there is no such snapshot.
        self._final_step = 0
        for index, record in (records or {}).items():
            self.slices[index].version, self.slices[index].closed = record.version, record.contributors

    def record(self, index: int) -> SliceRecord:
        """See ShardMachine."""
        return SliceRecord(self.slices[index].version, self.slices[index].closed)

    def _refusal(self, event: SlicePushed) -> PsdistError | None:
        if error := super()._refusal(event):
            return error
        state, first_step = self.slices[event.index], self.members[event.worker_id].first_step
        if event.step > state.step:
            return FutureStepError(
                f"slice {event.index} is at step {state.step}; step {event.step} has not begun: pull, then push step "
                f"{state.step}",
                step=event.step,
            )
        if state.step <= event.step < first_step:
            return NotMemberError(
                f"{event.worker_id} joins at step {first_step}, not {event.step}: pull first", step=event.step
            )
        return None

    def _pushed(self, state: _BspSlice, event: SlicePushed) -> list[Effect]:
        life = (event.worker_id, event.incarnation)
        if event.step < state.version:
            late = not (event.step == state.version - 1 and life in state.closed)
            reply = Reply(event.token, state.index, state.version, ignored=True, late=late)
            return [Forget(event.token), reply]
        if event.step < state.step:  # The step is being applied right now.
            state.waiters[event.token] = (True, life not in state.applying)
            return [Forget(event.token)]
        waiters = state.next_waiters if state.busy else state.waiters
        if life in state.open:
            waiters[event.token] = (True, False)
            return [Forget(event.token)]
        rank = self.members[event.worker_id].rank
        state.open[life] = _Contribution(event.token, rank, event.abstain)
        waiters[event.token] = (False, False)
        return self._try_apply(state)

    def _try_apply(self, state: _BspSlice) -> list[Effect]:
        backup, final = self._rule.backup_workers, self._final_step
        if state.busy or not gates.bsp_complete(state.step, self._everyone, state.open, backup, final):
            return []
        ordered = sorted(state.open.items(), key=lambda item: (item[1].rank, item[0]))
        parts = tuple(part.token for _, part in ordered if not part.abstain)
        forgotten = [Forget(part.token) for _, part in ordered if part.abstain]
        state.applying, state.open, state.busy = tuple(life for life, _ in ordered), {}, True
        if self._clipping:
            return [*forgotten, Aggregate(state.index, state.version, parts)]
        return [*forgotten, self._apply(state, parts)]

    def _apply(self, state: _BspSlice, parts: tuple[int, ...]) -> Apply:
        lr_scale = self._rule.lr_scale(len(state.applying), self._reference_workers)
        return Apply(state.index, state.version, parts, lr_scale, state.applying)

    def _on_clipping(self, event: SliceAggregated | NormKnown) -> list[Effect]:
        if isinstance(event, SliceAggregated):
            self.slices[event.index].aggregated = True
            return []
        ready = [s for s in self.slices.values() if s.aggregated and s.version == event.step]
        for state in ready:
            state.aggregated = False
        return [self._apply(state, ()) for state in ready]

    def _applied(self, state: _BspSlice) -> list[Effect]:
        state.version, state.busy = state.version + 1, False
        state.closed, state.applying = state.applying, ()
        effects: list[Effect] = [
            Reply(token, state.index, state.version, ignored, late) for token, (ignored, late) in state.waiters.items()
        ]
        state.waiters, state.next_waiters = state.next_waiters, {}
        return [*effects, *self._serve(state), *self._try_apply(state)]

    def _apply_gate(self, state: _BspSlice) -> str:
        return gates.bsp_apply(state.step, self._everyone, state.open, self._rule.backup_workers, self._final_step)

    def _read_gate(self, state: _BspSlice, pull: PullRequested) -> str:
        if state.version >= pull.min_version:
            return ""
        return self._apply_gate(state) or f"for step {state.step} to be applied"

    def _members_changed(self) -> list[Effect]:
        self._everyone = (*self.members.values(), *self.proposals.values())
        return [effect for state in self.slices.values() for effect in self._try_apply(state)]

    def _on_cut(self, event: CutArmed | SliceCut | StepsEnded | CutEnded) -> list[Effect]:
        # A slice is cut between two steps, which never mix: nothing is held back.
        if isinstance(event, SliceCut):
            return []
        self._final_step = event.step if isinstance(event, StepsEnded) else 0
        return self._members_changed()

    def _cancel(self, state: _BspSlice, token: int) -> list[Effect]:
        state.pulls.pop(token, None)
        state.waiters.pop(token, None)
        state.next_waiters.pop(token, None)
        return []

    def waiting_for(self, token: int, index: int) -> str:
        """See ShardMachine."""
        state = self.slices[index]
        if state.aggregated:
            return f"for the other slices of step {state.version} (clipping by the global norm)"
        return "" if state.busy else self._apply_gate(state)

    def validate(self) -> None:
        """See ShardMachine."""
        for state in self.slices.values():
            assert not state.aggregated or state.busy, state
            assert not state.next_waiters or state.busy, state
            tokens = [part.token for part in state.open.values()]
            assert len(tokens) == len(set(tokens)), state


# --- SSP and ASP ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Producer:
    """The duplicate table of one worker: all pushes below ``sequence`` were taken; of ``sequence`` the slices in
    ``taken``; ``applied`` of those are in the weights. ``clock`` counts the pushes that are wholly in."""

    incarnation: int
    clock: int
    sequence: int = 0
    taken: set[int] = field(default_factory=set)
    applied: int = 0


@dataclass(frozen=True, slots=True)
class _GatedRead:
    worker_id: str
    #: Completed pushes of the worker, the one that is answered among them; 0 where no weights are wanted (no gate).
    clock: int
    staleness: int
    ignored: bool


@dataclass(slots=True)
class _AsyncSlice(_SliceBase):
    #: Contributions in order of arrival; the first is the one being applied while ``busy``.
    queue: list[SlicePushed] = field(default_factory=list)
    #: Contributions that wait until the slice is cut for a snapshot, in order of arrival.
    held: list[SlicePushed] = field(default_factory=list)
    #: Repeats of contributions that are queued or held, answered with them.
    repeats: dict[int, SlicePushed] = field(default_factory=dict)
    #: Taken contributions whose caller wants weights that it may not read yet.
    reads: dict[int, _GatedRead] = field(default_factory=dict)


class AsyncShard(ShardMachine[_AsyncSlice]):
    """SSP (``staleness`` is the bound) and ASP (None): each push is applied on arrival.

    While a snapshot is cut, pushes that are marked as not in it are held: they were taken, so that repeats of them are
    known, but no update has them before their slice is cut.
    """

    def __init__(
        self,
        indices: Iterable[int],
        members: Iterable[ParametersMember],
        staleness: int | None,
        inverse_lr: bool = False,
        records: Records | None = None,
    ) -> None:
        super().__init__({index: _AsyncSlice(index) for index in indices}, members)
        self._staleness = staleness
        self._inverse_lr = inverse_lr
        #: The attempt whose marked pushes are held, 0 for none, and the slices that are not cut yet.
        self._mark = 0
        self._uncut: set[int] = set()
        self.producers: dict[str, _Producer] = {}
        for index, record in (records or {}).items():
            self.slices[index].version = record.version
        if records:
            self.producers = {worker_id: self._restored(member, records) for worker_id, member in self.members.items()}
        self._members_changed()

    def _restored(self, member: ParametersMember, records: Records) -> _Producer:
        """A member's place in the duplicate table, from what each slice has of its pushes."""
        life = (member.worker_id, member.incarnation)
        following = {index: record.producers.get(life, 0) for index, record in records.items()}
        sequence = min(following.values())
        taken = {index for index, number in following.items() if number > sequence}
        return _Producer(member.incarnation, member.first_step + sequence, sequence, taken, len(taken))

    def record(self, index: int) -> SliceRecord:
        """See ShardMachine."""
        state = self.slices[index]
        queued = {(event.worker_id, event.incarnation) for event in (*state.queue, *state.held)}
        producers = {}
        for worker_id, producer in self.producers.items():
            life = (worker_id, producer.incarnation)
            producers[life] = producer.sequence + (index in producer.taken and life not in queued)
        return SliceRecord(state.version, (), producers)

    @property
    def step_next(self) -> int:
        """The slowest clock: who joins at less would hold the others back."""
        return min(self.clocks.values(), default=0)

    @property
    def clocks(self) -> dict[str, int]:
        """Completed pushes by worker, counted from the clock that it joined at."""
        return {worker_id: producer.clock for worker_id, producer in self.producers.items()}

    def _refusal(self, event: SlicePushed) -> PsdistError | None:
        if error := super()._refusal(event):
            return error
        expected = self.producers[event.worker_id].sequence
        if event.step > expected:
            return SequenceGapError(
                f"push {event.step} of {event.worker_id} skips push {expected}, which has not arrived: send that first",
                step=event.step,
            )
        return None

    def _pushed(self, state: _AsyncSlice, event: SlicePushed) -> list[Effect]:
        producer = self.producers[event.worker_id]
        if event.step < producer.sequence or state.index in producer.taken:
            if any(self._same(event, known) for known in (*state.queue, *state.held)):
                state.repeats[event.token] = event
                return [Forget(event.token)]
            clock = producer.clock + (event.step == producer.sequence) if event.wants_weights else 0
            state.reads[event.token] = _GatedRead(event.worker_id, clock, 0, ignored=True)
            return [Forget(event.token), *self._serve_reads(state)]
        producer.taken.add(state.index)
        if event.mark and event.mark == self._mark and state.index in self._uncut:
            state.held.append(event)
            return []
        state.queue.append(event)
        return self._try_apply(state)

    def _on_cut(self, event: CutArmed | SliceCut | StepsEnded | CutEnded) -> list[Effect]:
        if isinstance(event, StepsEnded):
            return []  # Slices wait for no step of another.
        if isinstance(event, SliceCut):
            self._uncut.discard(event.index)
            return self._let_go(self.slices[event.index])
        is_armed = isinstance(event, CutArmed)
        self._mark = event.attempt if isinstance(event, CutArmed) else 0
        self._uncut = set(self.slices) if is_armed else set()
        return [effect for state in self.slices.values() for effect in self._let_go(state)]

    def _let_go(self, state: _AsyncSlice) -> list[Effect]:
        state.queue += state.held
        state.held = []
        return self._try_apply(state)

    @staticmethod
    def _same(one: SlicePushed, other: SlicePushed) -> bool:
        return (one.worker_id, one.incarnation, one.step) == (other.worker_id, other.incarnation, other.step)

    def _try_apply(self, state: _AsyncSlice) -> list[Effect]:
        if state.busy or not state.queue:
            return []
        state.busy, event = True, state.queue[0]
        pushed_by = ((event.worker_id, event.incarnation),)
        if event.abstain:
            nothing = Apply(state.index, state.version, (), contributors=pushed_by, sequence=event.step)
            return [Forget(event.token), nothing]
        staleness = max(0, state.version - event.base_version)
        lr_scale = 1.0 / (1.0 + staleness) if self._inverse_lr else 1.0
        return [Apply(state.index, state.version, (event.token,), lr_scale, pushed_by, event.step)]

    def _applied(self, state: _AsyncSlice) -> list[Effect]:
        event = state.queue.pop(0)
        staleness = max(0, state.version - event.base_version)
        state.version, state.busy = state.version + 1, False
        clocks = self.clocks
        clock = self._advance(event)
        repeats = [again for again in state.repeats.values() if self._same(event, again)]
        for push in (event, *repeats):
            state.repeats.pop(push.token, None)
            if push.token not in self._cancelled:
                gate_clock = clock if push.wants_weights else 0
                state.reads[push.token] = _GatedRead(push.worker_id, gate_clock, staleness, ignored=push is not event)
            self._cancelled.discard(push.token)
        # Other slices wait for a clock, not for this slice: looking at all of them each time would be quadratic.
        served = self._serve_all() if self.clocks != clocks else [*self._serve_reads(state), *self._serve(state)]
        return [*served, *self._try_apply(state)]

    def _advance(self, event: SlicePushed) -> int:
        """Counts the slice as applied; the clock that the worker has, or will have, with this push wholly in."""
        producer = self.producers.get(event.worker_id)
        if producer is None or producer.incarnation != event.incarnation:
            return 0  # It left meanwhile; its push counts, its clock does not.
        producer.applied += 1
        if producer.applied < len(self.slices):
            return producer.clock + 1
        producer.clock, producer.sequence = producer.clock + 1, producer.sequence + 1
        producer.taken, producer.applied = set(), 0
        return producer.clock

    def _serve_all(self) -> list[Effect]:
        """Answers all reads that the clocks allow now."""
        effects: list[Effect] = []
        for state in self.slices.values():
            if state.reads:
                effects += self._serve_reads(state)
            if state.pulls:
                effects += self._serve(state)
        return effects

    def _serve_reads(self, state: _AsyncSlice) -> list[Effect]:
        allowed = {t: read for t, read in state.reads.items() if not self._clock_gate(read.worker_id, read.clock)}
        for token in allowed:
            del state.reads[token]
        return [
            Reply(token, state.index, state.version, read.ignored, staleness=read.staleness)
            for token, read in allowed.items()
        ]

    def _clock_gate(self, worker_id: str, clock: int) -> str:
        return gates.ssp_read(clock, worker_id, self.members, self.clocks, self._staleness)

    def _read_gate(self, state: _AsyncSlice, pull: PullRequested) -> str:
        if state.version < pull.min_version:
            return f"for version {pull.min_version} of slice {state.index}"
        producer = self.producers.get(pull.worker_id)
        return self._clock_gate(pull.worker_id, producer.clock) if producer else ""

    def _members_changed(self) -> list[Effect]:
        kept: dict[str, _Producer] = {}
        for worker_id, member in self.members.items():
            producer = self.producers.get(worker_id)
            same = producer is not None and producer.incarnation == member.incarnation
            # A newcomer's clock comes with the map, not from the clocks here: shards that began to count it from
            # different clocks could each let another worker wait, in a circle.
            kept[worker_id] = producer if same and producer else _Producer(member.incarnation, member.first_step)
        self.producers = kept
        return self._serve_all()

    def _cancel(self, state: _AsyncSlice, token: int) -> list[Effect]:
        state.pulls.pop(token, None)
        state.reads.pop(token, None)
        state.repeats.pop(token, None)
        if any(event.token == token for event in (*state.queue, *state.held)):
            self._cancelled.add(token)
        return []

    def waiting_for(self, token: int, index: int) -> str:
        """See ShardMachine."""
        state = self.slices[index]
        if token in state.reads:
            return self._clock_gate(state.reads[token].worker_id, state.reads[token].clock)
        if token in state.pulls:
            return self._read_gate(state, state.pulls[token])
        return "for the slice to be cut for a snapshot" if any(e.token == token for e in state.held) else ""

    def validate(self) -> None:
        """See ShardMachine."""
        assert all(not state.held or index in self._uncut for index, state in self.slices.items()), self._uncut
        assert self.producers.keys() == self.members.keys(), (self.producers, self.members)
        for state in self.slices.values():
            assert state.busy == bool(state.queue), state
        for producer in self.producers.values():
            assert producer.applied <= len(producer.taken) < max(2, len(self.slices) + 1), producer


def make_shard(
    indices: Iterable[int],
    members: Iterable[ParametersMember],
    consistency: Consistency,
    clipping: bool,
    reference_workers: int = 0,
    records: Records | None = None,
) -> BspShard | AsyncShard:
    """The machine for one shard of parameters with this consistency.

    clipping: BSP only: a step is aggregated first and applied when its global norm is known.
    reference_workers: BSP only: what ``BSP.resize_lr`` compares with.
    records: what is known of each slice, where the shard was another's before; else all slices are new.
    """
    if isinstance(consistency, BSP):
        return BspShard(indices, members, consistency, clipping, reference_workers, records)
    staleness = consistency.staleness if isinstance(consistency, SSP) else None
    return AsyncShard(indices, members, staleness, consistency.staleness_lr == "inverse", records)
