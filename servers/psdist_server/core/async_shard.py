"""The shard machine of SSP and ASP. Pure.

Invariants: The pushes of one producer are applied once each, in the order of their sequence numbers. Unless the slice
came from another server, a gradient is rejected if it is based on a version that the slice has not reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from psdist.errors import InvalidArgumentError, PsdistError, SequenceGapError
from psdist.types import ParametersMember
from psdist_server.core.shard import (
    Apply,
    CutArmed,
    CutEnded,
    Effect,
    Forget,
    Producer,
    PullRequested,
    Records,
    Reply,
    ShardMachine,
    SliceBase,
    SliceCut,
    SlicePushed,
    SliceRecord,
    StepsEnded,
    name_members,
)


@dataclass(slots=True)
class _DuplicateTable:
    """Duplicate table of one producer.

    sequence: all lower pushes have been accepted.
    taken: slices on which push ``sequence`` has been accepted.
    applied: how many of those are in the weights.
    """

    sequence: int = 0
    taken: set[int] = field(default_factory=set)
    applied: int = 0


@dataclass(frozen=True, slots=True)
class _GatedRead:
    worker_id: str
    #: Worker's clock including the answered push; 0 if no weights are wanted (no gate).
    clock: int
    staleness: int
    ignored: bool


@dataclass(frozen=True, slots=True)
class _Push:
    """An accepted contribution, or a repeat of one."""

    event: SlicePushed
    producer: Producer

    @property
    def token(self) -> int:
        return self.event.token

    def is_again(self, other: _Push) -> bool:
        """True if both are the same push."""
        return (self.producer, self.event.step) == (other.producer, other.event.step)


@dataclass(slots=True)
class _AsyncSlice(SliceBase):
    #: Contributions in order of arrival. While ``busy``, the first is being applied.
    queue: list[_Push] = field(default_factory=list)
    #: Contributions held until the slice is cut for a snapshot, in order of arrival.
    held: list[_Push] = field(default_factory=list)
    #: Repeats of queued or held contributions; answered together with them.
    repeats: dict[int, _Push] = field(default_factory=dict)
    #: Accepted contributions whose caller wants weights that it may not read yet.
    reads: dict[int, _GatedRead] = field(default_factory=dict)


class AsyncShard(ShardMachine[_AsyncSlice]):
    """SSP (``staleness`` is the bound) and ASP (None): each push is applied on arrival.

    While a snapshot is being cut, pushes marked as excluded from it are held. They are in the duplicate table, so
    repeats are recognized, but they are not applied before their slice is cut.
    """

    def __init__(
        self,
        indices: Iterable[int],
        members: Iterable[ParametersMember],
        staleness: int | None,
        inverse_lr: bool = False,
        records: Records | None = None,
        departed: tuple[ParametersMember, ...] = (),
    ) -> None:
        super().__init__({index: _AsyncSlice(index) for index in indices}, members, departed)
        self._staleness = staleness
        self._inverse_lr = inverse_lr
        #: Snapshot attempt whose marked pushes are held (0 for none), and the slices not cut yet.
        self._mark = 0
        self._uncut: set[int] = set()
        #: The shard came from another server. Workers may have read updates there that never arrived here.
        self._is_promoted = records is not None
        self.producers: dict[Producer, _DuplicateTable] = {}
        for index, record in (records or {}).items():
            self.slices[index].version = record.version
        if records:
            known = (*self.members.values(), *departed)
            self.producers = {member.producer: _restored(member.producer, records) for member in known}
        self._members_changed()

    def record(self, index: int) -> SliceRecord:
        """See ShardMachine."""
        state = self.slices[index]
        queued = {push.producer for push in (*state.queue, *state.held)}
        producers = {}
        for key, producer in self.producers.items():
            following = producer.sequence + (index in producer.taken and key not in queued)
            if following:  # A backup has no entry for a producer before its first update.
                producers[key] = following
        return SliceRecord(state.version, (), producers)

    @property
    def step_next(self) -> int:
        """The slowest clock. A worker that joined below it would hold the others back."""
        return min(self.clocks.values(), default=0)

    @property
    def clocks(self) -> dict[str, int]:
        """Completed pushes by member, counted from the clock at which it joined."""
        return {worker_id: self._clock(worker_id) for worker_id in self.members}

    def _clock(self, worker_id: str) -> int:
        member = self.members[worker_id]
        return member.first_step + self.producers[member.producer].sequence - member.first_push

    def _refusal(self, event: SlicePushed) -> PsdistError | None:
        if error := super()._refusal(event):
            return error
        expected = self.producers[self.members[event.worker_id].producer].sequence
        if event.step > expected:
            return SequenceGapError(
                f"push {event.step} of {event.worker_id} skips push {expected}, which has not arrived: send that first",
                step=event.step,
            )
        # A worker that shares memory may read an update before this machine learns that it finished.
        newest = self.slices[event.index].version + self.slices[event.index].busy
        if event.base_version > newest and not self._is_promoted:
            return InvalidArgumentError(
                f"base_version={event.base_version} of slice {event.index} is in the future: the slice is at version "
                f"{newest}; give the version of the weights that the gradient was computed on",
                slice=event.index,
            )
        return None

    def _pushed(self, state: _AsyncSlice, event: SlicePushed, producer: Producer) -> list[Effect]:
        table, push = self.producers[producer], _Push(event, producer)
        if event.step < table.sequence or state.index in table.taken:
            if any(push.is_again(known) for known in (*state.queue, *state.held)):
                state.repeats[event.token] = push
                return [Forget(event.token)]
            clock = self._clock(event.worker_id) + (event.step == table.sequence) if event.wants_weights else 0
            state.reads[event.token] = _GatedRead(event.worker_id, clock, 0, ignored=True)
            return [Forget(event.token), *self._serve_reads(state)]
        table.taken.add(state.index)
        if event.mark and event.mark == self._mark and state.index in self._uncut:
            state.held.append(push)
            return []
        state.queue.append(push)
        return self._try_apply(state)

    def _on_cut(self, event: CutArmed | SliceCut | StepsEnded | CutEnded) -> list[Effect]:
        if isinstance(event, StepsEnded):
            return []  # Slices do not wait for each other's steps.
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

    def _try_apply(self, state: _AsyncSlice) -> list[Effect]:
        if state.busy or not state.queue:
            return []
        state.busy, event = True, state.queue[0].event
        pushed_by = (state.queue[0].producer,)
        if event.abstain:
            writer = event.token if event.written else 0
            nothing = Apply(state.index, state.version, (), 1.0, pushed_by, event.step, writer)
            return [nothing, Forget(event.token)]
        staleness = max(0, state.version - event.base_version)
        lr_scale = 1.0 / (1.0 + staleness) if self._inverse_lr else 1.0
        writer = event.token if event.written else 0
        return [Apply(state.index, state.version, (event.token,), lr_scale, pushed_by, event.step, writer)]

    def _applied(self, state: _AsyncSlice) -> list[Effect]:
        first = state.queue.pop(0)
        staleness = max(0, state.version - first.event.base_version)
        state.version, state.busy = state.version + 1, False
        clock, is_whole = self._advance(first)
        repeats = [again for again in state.repeats.values() if again.is_again(first)]
        for push in (first, *repeats):
            state.repeats.pop(push.token, None)
            if push.token not in self._cancelled:
                gate_clock = clock if push.event.wants_weights else 0
                read = _GatedRead(push.event.worker_id, gate_clock, staleness, ignored=push is not first)
                state.reads[push.token] = read
            self._cancelled.discard(push.token)
        # Other slices wait for a clock, not for this slice. Checking all of them each time would be quadratic.
        served = self._serve_all() if is_whole else [*self._serve_reads(state), *self._serve(state)]
        return [*served, *self._try_apply(state)]

    def _advance(self, push: _Push) -> tuple[int, bool]:
        """Count a slice of ``push`` as applied. Returns the clock that its worker has once the whole push is applied,
        and True if it is."""
        table = self.producers.get(push.producer)
        if table is None:
            return 0, False  # It left meanwhile; its push still counts.
        table.applied += 1
        is_whole = table.applied == len(self.slices)
        if is_whole:
            table.sequence, table.taken, table.applied = table.sequence + 1, set(), 0
        member = self.members.get(push.producer[0])
        if member is None or member.producer != push.producer:
            return 0, is_whole  # Departed: its clock does not count.
        return self._clock(member.worker_id) + (not is_whole), is_whole

    def _serve_all(self) -> list[Effect]:
        """Answer all reads that the clocks now allow."""
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
        """Return why a worker that has completed ``clock`` pushes may not read yet: another member is more than the
        staleness bound behind."""
        if self._staleness is None:
            return ""
        least = clock - self._staleness
        behind = [self.members[other] for other in self.members if other != worker_id and self._clock(other) < least]
        return (
            f"for {name_members(behind)} to reach clock {least} (staleness bound {self._staleness})" if behind else ""
        )

    def _is_readable(self, state: _AsyncSlice, pull: PullRequested) -> bool:
        return not self._read_gate(state, pull)

    def _read_gate(self, state: _AsyncSlice, pull: PullRequested) -> str:
        if state.version < pull.min_version:
            return f"for version {pull.min_version} of slice {state.index}"
        return self._clock_gate(pull.worker_id, self._clock(pull.worker_id)) if pull.worker_id in self.members else ""

    def _members_changed(self) -> list[Effect]:
        # A new member's clock comes from the map, not from the local clocks. Shards that chose different starting
        # clocks could make workers wait for each other in a circle.
        known = (*self.members.values(), *self.departed)
        self.producers = {
            member.producer: self.producers.get(member.producer) or _DuplicateTable(member.first_push)
            for member in known
        }
        return self._serve_all()

    def _cancel(self, state: _AsyncSlice, token: int) -> list[Effect]:
        state.pulls.pop(token, None)
        state.reads.pop(token, None)
        state.repeats.pop(token, None)
        if any(push.token == token for push in (*state.queue, *state.held)):
            self._cancelled.add(token)
        return []

    def waiting_for(self, token: int, index: int) -> str:
        """See ShardMachine."""
        state = self.slices[index]
        if token in state.reads:
            return self._clock_gate(state.reads[token].worker_id, state.reads[token].clock)
        if token in state.pulls:
            return self._read_gate(state, state.pulls[token])
        return "for the slice to be cut for a snapshot" if any(push.token == token for push in state.held) else ""

    def validate(self) -> None:
        """See ShardMachine."""
        assert all(not state.held or index in self._uncut for index, state in self.slices.items()), self._uncut
        known = {member.producer for member in (*self.members.values(), *self.departed)}
        assert self.producers.keys() == known, (self.producers, known)
        for state in self.slices.values():
            assert state.busy == bool(state.queue), state
        for producer in self.producers.values():
            assert producer.applied <= len(producer.taken) < max(2, len(self.slices) + 1), producer


def _restored(producer: Producer, records: Records) -> _DuplicateTable:
    """Rebuild a producer's duplicate table from the record of each slice."""
    following = {index: record.producers.get(producer, 0) for index, record in records.items()}
    sequence = min(following.values())
    taken = {index for index, number in following.items() if number > sequence}
    return _DuplicateTable(sequence, taken, len(taken))
