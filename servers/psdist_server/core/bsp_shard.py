"""The shard machine of BSP: a slice at version v accepts contributions for step v, one per member. Pure.

A step does not wait for a member that has left. Contributions that the member had made still count.

Weights that scripts wrote are assigned with the step of their pushes. Each contribution carries one digest of all
that its worker wrote, for the whole parameter set. If digests differ, every slice of the step finds it out for itself,
and refuses all contributions. A refused worker withdraws its push from all slices before its script learns of it, and
numbers its attempts, so nothing of a refused attempt is applied later.

Invariants: A step of a slice accepts at most one contribution per producer, and is applied in rank order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from psdist.consistency import BSP
from psdist.errors import FutureStepError, NotMemberError, PsdistError, WrittenWeightsError
from psdist.types import ParametersMember
from psdist_server.core.shard import (
    Aggregate,
    Apply,
    CutArmed,
    CutEnded,
    Effect,
    Forget,
    NormKnown,
    Producer,
    PullRequested,
    Records,
    RefuseSlice,
    Reply,
    ShardMachine,
    SliceAggregated,
    SliceBase,
    SliceCut,
    SlicePushed,
    SliceRecord,
    StepsEnded,
    name_members,
)

#: Ranks that an error names in each of its lists.
_RANKS_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class _Contribution:
    """A contribution to a step.

    written, follows_writes, attempt: see SlicePushed.
    is_first: the step is its member's first one, before which the member could not write if others were there.
    repeats: tokens of later calls with the same contribution.
    """

    token: int
    rank: int
    abstain: bool
    written: bytes = b""
    follows_writes: bool = False
    attempt: int = 0
    is_first: bool = False
    repeats: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _BspSlice(SliceBase):
    #: Contributions to the open step.
    open: dict[Producer, _Contribution] = field(default_factory=dict)
    #: While busy: contributors to the step being applied, in rank order.
    applying: tuple[Producer, ...] = ()
    #: Contributors to the step before ``version``.
    closed: tuple[Producer, ...] = ()
    #: Tokens to answer once the step that was open when they arrived is applied, with their flags (ignored, late).
    waiters: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    next_waiters: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    #: Lowest attempt at the open step that is still accepted, of producers that withdrew some.
    attempts: dict[Producer, int] = field(default_factory=dict)
    #: Errors of the producers whose latest attempt was refused. A connection may break before its worker reads it.
    refusals: dict[Producer, PsdistError] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The step for which contributions are accepted."""
        return self.version + self.busy

    def has_last(self, step: int, producer: Producer) -> bool:
        """True if ``step`` is the last one closed here, and ``producer`` contributed to it."""
        return step == self.step - 1 and producer in (self.applying if self.busy else self.closed)


class BspShard(ShardMachine[_BspSlice]):
    """Step by step: a slice at version v accepts contributions for step v, one per member."""

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
        self._everyone: tuple[ParametersMember, ...] = ()
        #: Producer and first step of each of them.
        self._awaited: list[tuple[Producer, int]] = []
        #: See StepsEnded; 0 if there is no such snapshot.
        self._final_step = 0
        for index, record in (records or {}).items():
            self.slices[index].version, self.slices[index].closed = record.version, record.contributors
        self._await_everyone()

    def record(self, index: int) -> SliceRecord:
        """See ShardMachine."""
        return SliceRecord(self.slices[index].version, self.slices[index].closed)

    def _refusal(self, event: SlicePushed) -> PsdistError | None:
        if error := super()._refusal(event):
            return error
        step, first_step = self.slices[event.index].step, self.members[event.worker_id].first_step
        if event.step > step:
            return FutureStepError(
                f"slice {event.index} is at step {step}; step {event.step} has not begun: pull, then push step {step}",
                step=event.step,
            )
        if step <= event.step < first_step:
            return NotMemberError(
                f"{event.worker_id} joins at step {first_step}, not {event.step}: pull first", step=event.step
            )
        return None

    def admits(self, member: ParametersMember) -> bool:
        """See ShardMachine. A member that continues earlier pushes may also join at the last closed step of some
        slices, if those have its contribution to that step."""
        return all(
            state.step <= member.first_step or state.has_last(member.first_step, member.producer)
            for state in self.slices.values()
        )

    def _pushed(self, state: _BspSlice, event: SlicePushed, producer: Producer) -> list[Effect]:
        if event.step < state.version:
            late = not (event.step == state.version - 1 and producer in state.closed)
            reply = Reply(event.token, state.index, state.version, ignored=True, late=late)
            return [Forget(event.token), reply]
        if event.step < state.step:  # Being applied right now.
            state.waiters[event.token] = (True, producer not in state.applying)
            return [Forget(event.token)]
        known = state.open.get(producer)
        if event.withdraws:
            return self._withdraw(state, event, producer)
        if event.attempt < state.attempts.get(producer, 0):
            return [RefuseSlice(event.token, state.refusals.get(producer) or _withdrawn(event))]
        waiters = state.next_waiters if state.busy else state.waiters
        if known is not None and (known.written, known.attempt) == (event.written, event.attempt):
            waiters[event.token] = (True, False)
            known.repeats.append(event.token)
            return [Forget(event.token)]
        # A push whose call was cancelled may be repeated with other writes.
        replaced = [Forget(known.token)] if known is not None else []
        member = self.members[event.worker_id]
        is_first = event.step == member.first_step
        state.open[producer] = _Contribution(
            event.token, member.rank, event.abstain, event.written, event.follows_writes, event.attempt, is_first
        )
        waiters[event.token] = (False, False)
        return [*replaced, *self._try_apply(state)]

    def _withdraw(self, state: _BspSlice, event: SlicePushed, producer: Producer) -> list[Effect]:
        """Drop the contribution of earlier attempts at the open step, and refuse them from now on."""
        answer: list[Effect] = [Forget(event.token), Reply(event.token, state.index, state.version)]
        known = state.open.get(producer)
        state.attempts[producer] = max(event.attempt, state.attempts.get(producer, 0))
        if known is None or known.attempt >= event.attempt:
            return answer
        del state.open[producer]
        return [Forget(known.token), *answer]

    def _try_apply(self, state: _BspSlice) -> list[Effect]:
        if state.busy or not self._is_complete(state):
            return []
        contributions: list[_Contribution] = []
        producers: list[Producer] = []
        parts: list[int] = []
        abstained: list[Effect] = []
        writer = 0
        for _, producer in sorted([(part.rank, producer) for producer, part in state.open.items()]):
            part = state.open[producer]
            contributions.append(part)
            producers.append(producer)
            if part.abstain:
                abstained.append(Forget(part.token))
            else:
                parts.append(part.token)
            if part.written and not writer:
                writer = part.token
        if writer:
            compared = _compared(contributions)
            if len({part.written for part in compared}) > 1:
                return self._refuse_writes(state, contributions, compared)
        state.applying, state.open, state.busy = tuple(producers), {}, True
        state.attempts, state.refusals = {}, {}
        if self._clipping:
            return [Aggregate(state.index, state.version, tuple(parts), writer), *abstained]
        return [self._apply(state, tuple(parts), writer), *abstained]

    def _is_complete(self, state: _BspSlice) -> bool:
        """True if the open step of a slice that is not busy waits for no more contributions.

        A contribution counts even if its worker has left. Members whose first step is later are not waited for. A step
        without contributions is complete if no worker can contribute to it, and a later step is awaited.
        """
        allowed = self._rule.backup_workers if state.open else 0
        missing = 0
        for producer, first_step in self._awaited:
            if first_step <= state.version and producer not in state.open:
                missing += 1
                if missing > allowed:
                    return False
        return bool(state.open or self._awaited) or state.version < self._final_step

    def _refuse_writes(
        self, state: _BspSlice, contributions: list[_Contribution], compared: list[_Contribution]
    ) -> list[Effect]:
        """Refuse the contributions to the open step, because the workers of those ``compared`` wrote different values.

        Workers learn of a refusal one after the other. If some of them have made their next attempt, only the earlier
        attempts of the others are refused.
        """
        newest = max(part.attempt for part in compared)
        refused = [part for part in compared if part.attempt < newest]
        error = _different_writes(state.step, compared, attempt=newest + (not refused))
        tokens = dict.fromkeys(token for part in refused or contributions for token in (part.token, *part.repeats))
        if not refused:
            tokens |= dict.fromkeys(state.waiters)
        for producer, part in list(state.open.items()):
            if part.token in tokens:
                del state.open[producer]
                state.attempts[producer], state.refusals[producer] = newest + (not refused), error
        state.waiters = {token: flags for token, flags in state.waiters.items() if token not in tokens}
        return [RefuseSlice(token, error) for token in tokens]

    def _apply(self, state: _BspSlice, parts: tuple[int, ...], writer: int = 0) -> Apply:
        lr_scale = 1.0
        if self._rule.resize_lr != "none":
            lr_scale = self._rule.lr_scale(len(state.applying), self._reference_workers)
        return Apply(state.index, state.version, parts, lr_scale, state.applying, writer=writer)

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
        if state.pulls:
            effects += self._serve(state)
        return [*effects, *self._try_apply(state)]

    def _apply_gate(self, state: _BspSlice) -> str:
        if self._is_complete(state):
            return ""
        missing = [one for one in self._everyone if one.first_step <= state.step and one.producer not in state.open]
        return f"for {name_members(missing) or 'a worker'} to push step {state.step}"

    def _is_readable(self, state: _BspSlice, pull: PullRequested) -> bool:
        return state.version >= pull.min_version

    def _members_changed(self) -> list[Effect]:
        self._await_everyone()
        return [effect for state in self.slices.values() for effect in self._try_apply(state)]

    def _await_everyone(self) -> None:
        self._everyone = (*self.members.values(), *self.proposals.values())
        self._awaited = [(member.producer, member.first_step) for member in self._everyone]

    def _on_cut(self, event: CutArmed | SliceCut | StepsEnded | CutEnded) -> list[Effect]:
        # A slice is cut between two steps, which never mix, so nothing needs to be held.
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


def _compared(contributions: Sequence[_Contribution]) -> list[_Contribution]:
    """Return the contributions whose writes must be equal. A worker without writes is left out if it follows the
    others, or has joined them with this step."""
    has_earlier = any(not part.is_first for part in contributions)
    return [one for one in contributions if one.written or not (one.follows_writes or (one.is_first and has_earlier))]


def _withdrawn(event: SlicePushed) -> WrittenWeightsError:
    return WrittenWeightsError(
        f"attempt {event.attempt} of {event.worker_id} at step {event.step} was withdrawn: push the next attempt",
        step=event.step,
    )


def _different_writes(step: int, contributions: Iterable[_Contribution], attempt: int) -> WrittenWeightsError:
    """Return the error that names the ranks with equal writes, group by group. attempt: the next one of the workers
    that are refused."""
    groups: dict[bytes, list[int]] = {}
    for part in contributions:
        groups.setdefault(part.written, []).append(part.rank)
    silent = groups.pop(b"", [])
    verbs = ("wrote one thing", *["wrote another"] * (len(groups) - 1), "wrote nothing")
    ranks = [*groups.values(), silent] if silent else list(groups.values())
    found = ", ".join(f"{_ranks_text(some)} {verb}" for some, verb in zip(ranks, verbs, strict=False))
    return WrittenWeightsError(
        f"the workers wrote different values to the weights before step {step}: {found}. In BSP all of them must write "
        "the same: let each worker make the change, from equal seeds or from a file that all of them read",
        step=step,
        attempt=attempt,
    )


def _ranks_text(ranks: list[int]) -> str:
    """Return ranks for a message, or the first ones of many."""
    left = len(ranks) - _RANKS_SHOWN
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN])) + (f" and {left} more" if left > 0 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
