"""Events into, and effects out of, the shard machines: frozen dataclasses.

A ``token`` stands for one slice of one call. The service that made the event keeps the payload and the caller under
that token, and every effect names the tokens that it is about. Each token is answered exactly once, by ``Reply`` or
``RefuseSlice``, unless its call was ``Cancelled`` before.
"""

from __future__ import annotations

from dataclasses import dataclass

from psdist.errors import PsdistError
from psdist.types import ParametersMember
from psdist_server.core.records import Producer

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlicePushed:
    """A contribution to slice ``index`` arrived. Its payload was checked and is kept under ``token``.

    step: BSP: the step it belongs to; SSP and ASP: the push's sequence number.
    base_version: version of the weights that the gradient was computed on.
    abstain: it counts as made but contributes nothing.
    wants_weights: the answer is the new weights (PushPull), so a read gate holds for it.
    mark: SSP and ASP: the snapshot attempt that this push is the first one not to be in, or comes after; 0 for none.
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


@dataclass(frozen=True, slots=True)
class PullRequested:
    """Somebody wants slice ``index`` at ``min_version`` or later. Readers that are no members have no clock."""

    token: int
    index: int
    worker_id: str
    min_version: int = 0


@dataclass(frozen=True, slots=True)
class SliceLoaded:
    """Slice ``index`` was filled from a snapshot, in which it has ``version``; it was never updated here."""

    index: int
    version: int


@dataclass(frozen=True, slots=True)
class SliceAggregated:
    """The effect ``Aggregate`` is done; the parts are no longer needed."""

    index: int


@dataclass(frozen=True, slots=True)
class NormKnown:
    """The global norm of ``step`` is known: aggregated slices may be applied."""

    step: int


@dataclass(frozen=True, slots=True)
class SliceApplied:
    """The effect ``Apply`` is done; the parts are no longer needed."""

    index: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The call behind ``token``, about slice ``index``, ended. A contribution that was taken stays; nothing is
    answered."""

    token: int
    index: int


@dataclass(frozen=True, slots=True)
class MembersChanged:
    """A new cluster map: these are the members from now on, and those that were lost and may continue their pushes. A
    proposal that became a member is no proposal any more."""

    members: tuple[ParametersMember, ...]
    departed: tuple[ParametersMember, ...] = ()


@dataclass(frozen=True, slots=True)
class JoinProposed:
    """``member`` may join at its first step; the caller checked ``ShardMachine.admits`` of all shards."""

    member: ParametersMember


@dataclass(frozen=True, slots=True)
class JoinWithdrawn:
    """The proposal of this worker will not happen."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class CutArmed:
    """SSP and ASP: a snapshot is to be cut: pushes with the mark ``attempt`` are held back. What was held for an
    earlier one is released."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SliceCut:
    """Slice ``index`` has all that the snapshot is to have of it: what is held back is released."""

    index: int


@dataclass(frozen=True, slots=True)
class StepsEnded:
    """BSP: the snapshot is cut at ``step``, where some slice is, and no worker is left: lower steps that nobody pushed
    to a slice are empty there."""

    step: int


@dataclass(frozen=True, slots=True)
class CutEnded:
    """There is no snapshot to be cut any more: what is held back is released."""


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
    """Update slice ``index`` by the mean of the contributions under ``parts``, which are in rank order; then say
    ``SliceApplied``. Without parts nothing is updated. After ``Aggregate`` the parts are empty and the aggregated
    gradient is used if it had any.

    step: number of the update, from 0 (the slice's version before it).
    lr_scale: factor on the learning rate (staleness; workers that came or went).
    contributors, sequence: what the duplicate table learns by it: who contributed; in SSP and ASP the push's number.
    """

    index: int
    step: int
    parts: tuple[int, ...]
    lr_scale: float = 1.0
    contributors: tuple[Producer, ...] = ()
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Keep the mean of ``parts`` and its squared norm; then say ``SliceAggregated``. ``Apply`` follows later."""

    index: int
    step: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer ``token``: slice ``index`` is at ``version`` and may be read.

    ignored: the contribution had been taken before (``late`` False) or came after its step was closed (``late`` True).
    """

    token: int
    index: int
    version: int
    ignored: bool = False
    late: bool = False
    staleness: int = 0


@dataclass(frozen=True, slots=True)
class RefuseSlice:
    """Answer ``token`` with an error; its slice was not changed by it."""

    token: int
    error: PsdistError


@dataclass(frozen=True, slots=True)
class Forget:
    """The contribution under ``token`` will never be used: its payload can go."""

    token: int


Effect = Apply | Aggregate | Reply | RefuseSlice | Forget
