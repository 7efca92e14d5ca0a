"""The shard machines: state machines for the slices of one shard, with events in and effects out. Pure.

A machine tracks versions, contributions and duplicate tables. The service executes its effects and reports the results
as events. Invariants, checked by ``validate``:

* A slice's version never decreases, and grows by one per update.
* At most one ``Aggregate`` or ``Apply`` per slice is in progress.
* Each token is answered at most once.

A *gate* is the reason why a slice may not be updated or read yet; the empty reason means that it may. Any other reason
completes a sentence that begins with "waiting", such as "for worker-1 (rank 1) to push step 12".

The machines are ``BspShard`` and ``AsyncShard``. Their modules state further invariants.

A producer is a worker's sequence of pushes, identified by the worker's id and the incarnation in which the sequence
began. A worker that was expelled while still alive continues its producer in its next incarnation. So a push that had
reached some slices is completed on the others and counts once. Entries of a departed worker are kept as long as the map
names it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from psdist.errors import FencedError, NotMemberError, PsdistError
from psdist.types import ParametersMember
from psdist_server.core.events import (
    Cancelled,
    CutArmed,
    CutEnded,
    Effect,
    Event,
    JoinProposed,
    JoinWithdrawn,
    MembersChanged,
    NormKnown,
    Producer,
    PullRequested,
    RefuseSlice,
    Reply,
    SliceAggregated,
    SliceApplied,
    SliceCut,
    SliceLoaded,
    SlicePushed,
    SliceRecord,
    StepsEnded,
)

_NAMED_MAX: Final = 4


@dataclass(slots=True)
class SliceBase:
    """Mode-independent state of one slice."""

    index: int
    version: int = 0
    #: An Aggregate or Apply is in progress, or the aggregated gradient is waiting for the norm.
    busy: bool = False
    #: BSP with clipping, while busy: the aggregated gradient is waiting for the norm and no kernel uses the slice.
    aggregated: bool = False
    pulls: dict[int, PullRequested] = field(default_factory=dict)

    @property
    def is_written(self) -> bool:
        """True if a kernel may be writing the slice."""
        return self.busy and not self.aggregated


S = TypeVar("S", bound=SliceBase)


class ShardMachine(ABC, Generic[S]):
    """Base of the BSP and the asynchronous machine: members, fencing, versions, pulls."""

    def __init__(
        self, slices: dict[int, S], members: Iterable[ParametersMember], departed: tuple[ParametersMember, ...] = ()
    ) -> None:
        self.slices = slices
        self.members: dict[str, ParametersMember] = {member.worker_id: member for member in members}
        self.departed = departed
        self.proposals: dict[str, ParametersMember] = {}
        self._cancelled: set[int] = set()

    @property
    def version_max(self) -> int:
        """Highest version of any slice."""
        return max((state.version for state in self.slices.values()), default=0)

    @property
    def step_next(self) -> int:
        """Lowest step or clock at which a new member may join."""
        return max((state.version + state.busy for state in self.slices.values()), default=0)

    def admits(self, member: ParametersMember) -> bool:
        """Return True if ``member`` may join at its first step or clock."""
        return self.step_next <= member.first_step

    def on(self, event: Event) -> list[Effect]:
        """Handle ``event``. Returns the effects, in the order in which they must be carried out."""
        match event:
            case SlicePushed():
                if error := self._refusal(event):
                    return [RefuseSlice(event.token, error)]
                return self._pushed(self.slices[event.index], event, self.members[event.worker_id].producer)
            case PullRequested():
                self.slices[event.index].pulls[event.token] = event
                return self._serve(self.slices[event.index])
            case SliceApplied():
                return self._applied(self.slices[event.index])
            case SliceLoaded():
                self.slices[event.index].version = event.version
                return []
            case Cancelled():
                return self._cancel(self.slices[event.index], event.token)
            case MembersChanged():
                self.members = {member.worker_id: member for member in event.members}
                self.departed = event.departed
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
        """Return the state that another machine needs to take over slice ``index``. An update in progress is not
        included."""

    @abstractmethod
    def waiting_for(self, token: int, index: int) -> str:
        """Return why ``token`` (of slice ``index``) is unanswered, or "" if it waits only for this server."""

    @abstractmethod
    def _pushed(self, state: S, event: SlicePushed, producer: Producer) -> list[Effect]: ...

    @abstractmethod
    def _applied(self, state: S) -> list[Effect]: ...

    @abstractmethod
    def _is_readable(self, state: S, pull: PullRequested) -> bool: ...

    @abstractmethod
    def _members_changed(self) -> list[Effect]: ...

    @abstractmethod
    def _cancel(self, state: S, token: int) -> list[Effect]: ...

    @abstractmethod
    def validate(self) -> None:
        """Assert the invariants."""

    def _on_clipping(self, event: SliceAggregated | NormKnown) -> list[Effect]:
        raise AssertionError(f"{event} without an Aggregate")

    @abstractmethod
    def _on_cut(self, event: CutArmed | SliceCut | StepsEnded | CutEnded) -> list[Effect]: ...

    def _refusal(self, event: SlicePushed) -> PsdistError | None:
        member = self.members.get(event.worker_id)
        if member is None:
            return NotMemberError(
                f"{event.worker_id} is not a member of these parameters: create or attach them with init=...; "
                "if it was expelled, restart it",
                worker_id=event.worker_id,
            )
        if event.incarnation != member.incarnation:
            return FencedError(
                f"{event.worker_id} has incarnation {member.incarnation} now; {event.incarnation} was replaced",
                incarnation=event.incarnation,
            )
        return None

    def _serve(self, state: S) -> list[Effect]:
        ready = [pull for pull in state.pulls.values() if self._is_readable(state, pull)]
        for pull in ready:
            del state.pulls[pull.token]
        return [Reply(pull.token, state.index, state.version) for pull in ready]


def name_members(members: Collection[ParametersMember]) -> str:
    """Format members as ``worker-1 (rank 1), worker-3 (rank 3)``, in rank order. At most four are named."""
    ordered = sorted(members, key=lambda member: member.rank)
    named = ", ".join(f"{member.worker_id} (rank {member.rank})" for member in ordered[:_NAMED_MAX])
    return named + (f" and {len(ordered) - _NAMED_MAX} more" if len(ordered) > _NAMED_MAX else "")
