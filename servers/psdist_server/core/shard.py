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

A slice's record is all that a machine needs to continue with a slice. The primary's machine maintains it while it
serves the shard; backups maintain it from the updates that they receive.

A ``token`` stands for one slice of one call. The service that created the event stores the payload and the caller under
that token, and every effect names the tokens that it concerns. Each token is answered exactly once, by ``Reply`` or
``RefuseSlice``, unless its call was ``Cancelled`` before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from psdist.errors import FencedError, NotMemberError, PsdistError
from psdist.types import ParametersMember

# --- records ----------------------------------------------------------------------------------------------------------


#: A worker's sequence of pushes: the worker's id and the incarnation in which the sequence began. A worker that died
#: and rejoined may have two of them in one step.
Producer = tuple[str, int]


@dataclass(slots=True)
class SliceRecord:
    """Version and duplicate table of a slice.

    contributors: BSP: producers that contributed to the step before ``version``.
    producers: SSP and ASP: the next push number of each producer; all its earlier pushes are in the slice. A producer
        without pushes in the slice has no entry, so that equal tables compare equal.
    """

    version: int = 0
    contributors: tuple[Producer, ...] = ()
    producers: dict[Producer, int] = field(default_factory=dict)

    def advance(self, contributors: tuple[Producer, ...], sequence: int | None) -> None:
        """Count one more update: by ``contributors`` (BSP), or push ``sequence`` of its only contributor."""
        self.version += 1
        if sequence is None:
            self.contributors = contributors
        else:
            for producer in contributors:
                self.producers[producer] = sequence + 1

    def retain(self, producers: Collection[Producer]) -> None:
        """Drop all producers but these."""
        self.producers = {known: following for known, following in self.producers.items() if known in producers}


Records = Mapping[int, SliceRecord]

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlicePushed:
    """A contribution to slice ``index`` arrived. Its payload has been checked and is stored under ``token``.

    step: BSP: the step that it belongs to; SSP and ASP: the push's sequence number.
    base_version: version of the weights that the gradient was computed on.
    abstain: the push counts as made but contributes nothing.
    wants_weights: the answer carries the new weights (PushPull), so a read gate applies to it.
    mark: SSP and ASP: the snapshot attempt that excludes this push and all later ones; 0 for none.
    written: digest of the weights that the worker wrote before this push; empty if it wrote none.
    follows_writes: BSP: the worker agrees with the writes of the others.
    attempt: BSP: times that the push was withdrawn.
    withdraws: BSP: withdraw earlier attempts of the push, and make no contribution.
    """

    token: int
    index: int
    worker_id: str
    incarnation: int
    step: int
    base_version: int = 0
    abstain: bool = False
    wants_weights: bool = True
    mark: int = 0
    written: bytes = b""
    follows_writes: bool = False
    attempt: int = 0
    withdraws: bool = False


@dataclass(frozen=True, slots=True)
class PullRequested:
    """A caller wants slice ``index`` at ``min_version`` or later. Readers that are not members have no clock."""

    token: int
    index: int
    worker_id: str
    min_version: int = 0


@dataclass(frozen=True, slots=True)
class SliceLoaded:
    """Slice ``index`` was loaded from a snapshot at ``version``. It has never been updated here."""

    index: int
    version: int


@dataclass(frozen=True, slots=True)
class SliceAggregated:
    """The effect ``Aggregate`` is finished; its parts are no longer needed."""

    index: int


@dataclass(frozen=True, slots=True)
class NormKnown:
    """The global norm of ``step`` is known: aggregated slices may be applied."""

    step: int


@dataclass(frozen=True, slots=True)
class SliceApplied:
    """The effect ``Apply`` is finished; its parts are no longer needed."""

    index: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The call behind ``token``, for slice ``index``, ended. An accepted contribution stays; nothing is answered."""

    token: int
    index: int


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """A new cluster map with the current members, and the departed ones that may still continue their pushes. A
    proposal that became a member is dropped."""

    members: tuple[ParametersMember, ...]
    departed: tuple[ParametersMember, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinProposed:
    """``member`` may join at its first step; the caller checked ``ShardMachine.admits`` of all shards."""

    member: ParametersMember


@dataclass(frozen=True, slots=True)
class JoinWithdrawn:
    """The proposal of this worker is withdrawn."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class CutArmed:
    """SSP and ASP: a snapshot cut is starting: hold pushes with the mark ``attempt``. Pushes held for an earlier
    attempt are released."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SliceCut:
    """Slice ``index`` has everything that belongs in the snapshot: release its held pushes."""

    index: int


@dataclass(frozen=True, slots=True)
class StepsEnded:
    """BSP: the snapshot is cut at ``step``, which some slice has reached, and no worker is left. On the other slices,
    lower steps without a push are empty."""

    step: int


@dataclass(frozen=True, slots=True)
class CutEnded:
    """The cut is over: release all held pushes."""


Event = (
    SlicePushed
    | PullRequested
    | SliceLoaded
    | SliceAggregated
    | NormKnown
    | SliceApplied
    | Cancelled
    | MembersChanged
    | JoinProposed
    | JoinWithdrawn
    | CutArmed
    | SliceCut
    | StepsEnded
    | CutEnded
)

# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Apply:
    """Update slice ``index`` by the mean of the contributions under ``parts``, which are in rank order; then report
    ``SliceApplied``. Without parts only the version advances. After ``Aggregate`` the parts are empty, and the
    aggregated gradient is used if there is one.

    step: number of the update, from 0 (the slice's version before it).
    lr_scale: factor on the learning rate (staleness; workers that joined or left).
    contributors, sequence: entries for the duplicate table: the contributing producers; in SSP and ASP the push's
        number.
    writer: token of the contribution whose written weights the slice is assigned before the update; 0 for none. It may
        be one that abstains, so it is forgotten after this effect.
    """

    index: int
    step: int
    parts: tuple[int, ...]
    lr_scale: float = 1.0
    contributors: tuple[Producer, ...] = ()
    sequence: int | None = None
    writer: int = 0


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Store the mean of ``parts``, its squared norm, and the written weights of ``writer``; then report
    ``SliceAggregated``. ``Apply``, without a writer, follows later."""

    index: int
    step: int
    parts: tuple[int, ...]
    writer: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer ``token``: slice ``index`` is at ``version`` and may be read.

    ignored: the contribution was a duplicate (``late`` False) or arrived after its step was closed (``late`` True).
    """

    token: int
    index: int
    version: int
    ignored: bool = False
    late: bool = False
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class RefuseSlice:
    """Answer ``token`` with an error; it did not change the slice."""

    token: int
    error: PsdistError


@dataclass(frozen=True, slots=True)
class Forget:
    """The contribution under ``token`` will never be used: release its payload."""

    token: int


Effect = Apply | Aggregate | Reply | RefuseSlice | Forget

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
