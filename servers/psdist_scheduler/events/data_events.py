"""Events and answers of the scheduler's machine for data sets: frozen dataclasses, as in ``cluster_events``."""

from __future__ import annotations

from dataclasses import dataclass

from psdist.types import DataPosition, DatasetSpec
from psdist_scheduler.events.records import DataLease
from psdist_scheduler.events.snapshot_events import Numbers
from psdist_scheduler.events.worker_events import Caller


@dataclass(frozen=True, slots=True)
class OpenDataset:
    """A worker wants a data set to exist with these settings."""

    call: int
    caller: Caller
    spec: DatasetSpec


@dataclass(frozen=True, slots=True)
class LeaseRange:
    """A worker has used the leases ``done``, holds ``held``, and wants another range. ``done_at``: for each of
    ``done``, its next pushes then. ``now``: its next pushes."""

    call: int
    caller: Caller
    dataset: str
    done: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    done_at: tuple[Numbers, ...] = ()
    now: Numbers = ()


@dataclass(frozen=True, slots=True)
class EndRanges:
    """A worker has used the leases ``done``, and gives ``returned`` back unused. The rest as in LeaseRange."""

    call: int
    caller: Caller
    dataset: str
    done: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    done_at: tuple[Numbers, ...] = ()
    now: Numbers = ()


@dataclass(frozen=True, slots=True)
class GetPosition:
    """Somebody wants to know where a data set stands."""

    call: int
    run_id: str
    dataset: str


@dataclass(frozen=True, slots=True)
class SetPosition:
    """A worker wants a data set to go on from there."""

    call: int
    caller: Caller
    dataset: str
    position: DataPosition


DataEvent = OpenDataset | LeaseRange | EndRanges | GetPosition | SetPosition


@dataclass(frozen=True, slots=True)
class DatasetStanding:
    """A data set, where it stands, and how many leases are out."""

    spec: DatasetSpec
    position: DataPosition
    leased: int


@dataclass(frozen=True, slots=True)
class RangeGiven:
    """The range of this lease, or None: none is left to give."""

    lease: DataLease | None
    data_epoch: int
    range: int
    repeated: int
    failed: int
