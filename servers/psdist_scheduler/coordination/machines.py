"""The machines that make up one run, and what is asked of all of them alike. Pure.

Not here: which event goes to which machine, and in which order they go on (``cluster``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from psdist.errors import RunLostError
from psdist_scheduler.coordination.deferred_losses import DeferredLosses
from psdist_scheduler.coordination.membership_changes import MembershipChanges
from psdist_scheduler.coordination.mutual_waits import MutualWaits
from psdist_scheduler.coordination.rollback import Rollback
from psdist_scheduler.coordination.shutdown import GracefulShutdown
from psdist_scheduler.coordination.silent_members import SilentMembers
from psdist_scheduler.coordination.start import RunStart
from psdist_scheduler.coordination.stops import Stops
from psdist_scheduler.coordination.unreachable_servers import UnreachableServers
from psdist_scheduler.datasets.datasets import Datasets
from psdist_scheduler.events.cluster_events import Persist, Wait
from psdist_scheduler.events.records import ClusterSettings, StoredState
from psdist_scheduler.events.snapshot_events import History
from psdist_scheduler.members.admission import MemberAdmission
from psdist_scheduler.members.barriers import Barriers
from psdist_scheduler.members.membership import Demand, Membership
from psdist_scheduler.members.rendezvous import Rendezvous
from psdist_scheduler.placement.alignment import Alignment
from psdist_scheduler.placement.commits import Commits
from psdist_scheduler.placement.creation import Creation
from psdist_scheduler.placement.join_proposals import Joins
from psdist_scheduler.placement.registry import Registry
from psdist_scheduler.placement.replica_manager import ReplicaManager
from psdist_scheduler.placement.restore_point import Resume
from psdist_scheduler.placement.scaling import Scaling
from psdist_scheduler.snapshots.snapshots import Snapshots

#: Workers that failed are started again sooner by their agent, and new ones come.
_VACANT_SECONDS: Final = 30.0
#: Commands to workers, and proposals to servers, of one epoch; their numbers begin with it.
_COMMANDS_BITS = 20


@dataclass(frozen=True)
class Machines:
    """One run's machines."""

    members: Membership
    demand: Demand
    registry: Registry
    creation: Creation
    replica_manager: ReplicaManager
    scaling: Scaling
    datasets: Datasets
    snapshots: Snapshots
    rollback: Rollback
    shutdown: GracefulShutdown
    stops: Stops
    changes: MembershipChanges
    barriers: Barriers
    mutual_waits: MutualWaits
    rendezvous: Rendezvous

    @classmethod
    def build(
        cls,
        settings: ClusterSettings,
        stored: StoredState | None,
        history: History | None,
        epoch: int,
        now: float,
    ) -> Machines:
        """The machines of a run as the store (None: it begins) and the storage (None: it was not read) know it."""
        begins, stored = stored is None, stored or StoredState(settings.run_id, 0)
        # Whoever was missed before has its time anew.
        resume = Resume(stored.base, now if stored.base.generation else None)
        if history is not None:
            resume.read(history.base)
            if begins and history.newest is not None:
                resume.go_to(history.newest, 0, epoch + 1, None)
        if stored.run_lost:
            resume.fail(RunLostError(stored.run_lost))
        members = Membership(settings, stored.members, now, resume.incarnations)
        demand = Demand(settings, members, stored.servers_wanted)
        registry = Registry(settings, stored.parameters, epoch + 1, resume)
        alignment = Alignment(members, registry, (epoch + 1) << _COMMANDS_BITS)
        joins = Joins(registry, members, alignment, (epoch + 1) << _COMMANDS_BITS)
        creation = Creation(settings, registry, resume, members, demand, joins, Commits(registry, members))
        replica_manager = ReplicaManager(settings, registry, members)
        vacant = max(settings.worker_lease_seconds, _VACANT_SECONDS)
        rendezvous = Rendezvous(stored.nodes, settings.join_grace_seconds, vacant, now)
        scaling = Scaling(settings, registry, members, demand, rendezvous)
        datasets = Datasets(stored.datasets, resume)
        snapshots = Snapshots(settings, registry, members, datasets, alignment, history, now)
        rollback = Rollback(registry, joins, members, datasets, snapshots)
        shutdown = GracefulShutdown(settings, registry, members, snapshots, scaling)
        stops = Stops(members, registry, snapshots, alignment, epoch << _COMMANDS_BITS)
        admission, deferred = MemberAdmission(settings, members), DeferredLosses(registry, members, snapshots)
        unreachable = UnreachableServers(settings, members, registry, deferred)
        silent = SilentMembers(settings, members, deferred)
        start = RunStart.begin(settings, demand, registry, now)
        follow = (deferred, unreachable, silent, start, now)
        changes = MembershipChanges(settings, members, demand, registry, joins, snapshots, stops, admission, *follow)
        barriers = Barriers(members, demand, stored.barriers)
        mutual_waits = MutualWaits(members, registry, barriers)
        held = (members, demand, registry, creation, replica_manager, scaling, datasets, snapshots, rollback, shutdown)
        return cls(*held, stops, changes, barriers, mutual_waits, rendezvous)

    def end(self, call: int) -> None:
        """The call does not wait any more."""
        self.registry.end(call)
        self.creation.commits.end(call)
        self.barriers.end(call)
        self.rendezvous.end(call)
        self.scaling.end(call)
        self.snapshots.waiters.end(call)
        self.shutdown.end(call)
        self.mutual_waits.end(call)

    def waits(self, now: float) -> Iterator[Wait]:
        yield from self.creation.waits(now)
        yield from self.creation.joins.waits()
        yield from self.barriers.waits()
        yield from self.rendezvous.waits(now)
        yield from self.scaling.waits()
        yield from self.changes.deferred.waits()
        yield from self.snapshots.waits()
        yield from self.stops.waits()
        yield from self.changes.unreachable.waits()
        yield from self.creation.joins.alignment.waits()
        yield from self.changes.silent.waits()

    @property
    def has_changed(self) -> bool:
        """Whether anything changed that makes an epoch: what the map shows, or what a restart must know."""
        parameters = self.registry.changed or self.registry.resume.changed
        return bool(self.members.changed or self.demand.changed or parameters or self.rendezvous.changed)

    @property
    def has_changed_aside(self) -> bool:
        """Whether anything changed that a restart must know, and the map does not show."""
        return bool(self.datasets.changed or self.barriers.changed)

    def take_changes(self, epoch: int) -> Persist:
        """All that changed since this was called last."""
        forgotten, parameters = self.registry.take_changes()
        return Persist(
            epoch=epoch,
            members=self.members.take_changes(),
            parameters=parameters,
            nodes=self.rendezvous.take_changes(),
            datasets=self.datasets.take_changes(),
            servers_wanted=self.demand.take_change(),
            forgotten=forgotten,
            base=self.registry.resume.take_change(),
            barriers=self.barriers.take_changes(),
        )

    def validate(self) -> None:
        self.members.validate()
        self.registry.validate(self.members)
        self.creation.joins.validate()
        self.creation.joins.alignment.validate()
        self.creation.commits.validate()
        self.rendezvous.validate()
        self.datasets.validate()
        self.snapshots.validate()
        self.changes.deferred.validate()
        self.barriers.validate()
        self.changes.unreachable.validate()
