"""The machines that make up one run, and the operations that all of them share. Pure.

``cluster`` decides which event is handled by which machine, and in which order they advance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from psdist.errors import RunLostError
from psdist_scheduler.decide.alignment import Alignment
from psdist_scheduler.decide.barriers import Barriers
from psdist_scheduler.decide.cluster_state import ClusterSettings, StoredState
from psdist_scheduler.decide.deadlocks import Deadlocks
from psdist_scheduler.decide.deferred_losses import DeferredLosses
from psdist_scheduler.decide.effects import Persist, Wait
from psdist_scheduler.decide.joins import Joins
from psdist_scheduler.decide.leased_datasets import Datasets
from psdist_scheduler.decide.losses import MemberLosses, SilentMembers
from psdist_scheduler.decide.member_admission import MemberAdmission
from psdist_scheduler.decide.members import Membership
from psdist_scheduler.decide.parameter_creation import Commits, Creation
from psdist_scheduler.decide.parameter_sets import Registry
from psdist_scheduler.decide.rendezvous import Rendezvous
from psdist_scheduler.decide.restore_point import Resume
from psdist_scheduler.decide.rollback import Rollback
from psdist_scheduler.decide.run_end import CoordinatedShutdown, ExitRequests, RunStart
from psdist_scheduler.decide.scaling import Scaling
from psdist_scheduler.decide.shard_placement import ReplicaManager
from psdist_scheduler.decide.snapshot_events import History
from psdist_scheduler.decide.snapshots import Snapshots
from psdist_scheduler.decide.unreachable_servers import UnreachableServers

#: Failed workers are restarted sooner than this by their agent, and new ones arrive.
_VACANT_SECONDS: Final = 30.0
#: Number of bits for commands to workers and proposals to servers per epoch. Their numbers begin with the epoch.
_COMMANDS_BITS = 20


@dataclass(frozen=True)
class Machines:
    """All machines of one run."""

    members: Membership
    admission: MemberAdmission
    registry: Registry
    creation: Creation
    replica_manager: ReplicaManager
    scaling: Scaling
    datasets: Datasets
    snapshots: Snapshots
    rollback: Rollback
    exit_requests: ExitRequests
    coordinated_shutdown: CoordinatedShutdown
    losses: MemberLosses
    barriers: Barriers
    deadlocks: Deadlocks
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
        """Create the machines of a run.

        stored: state of the store; None for a new run.
        history: content of the storage; None if it was not read.
        """
        begins, stored = stored is None, stored or StoredState(settings.run_id, 0)
        # Grace periods for missing members start again.
        resume = Resume(stored.base, now if stored.base.generation else None)
        if history is not None:
            resume.read(history.base)
            if begins and history.newest is not None:
                resume.go_to(history.newest, 0, epoch + 1, None)
        if stored.run_lost:
            resume.fail(RunLostError(stored.run_lost))
        numbers = (epoch + 1) << _COMMANDS_BITS
        members = Membership(settings, stored.members, now, resume.incarnations, stored.servers_wanted)
        registry = Registry(settings, stored.parameters, epoch + 1, resume)
        alignment = Alignment(members, registry, numbers)
        joins = Joins(registry, members, alignment, numbers)
        datasets = Datasets(stored.datasets, resume)
        snapshots = Snapshots(settings, registry, members, datasets, alignment, history, now)
        vacant = max(settings.worker_lease_seconds, _VACANT_SECONDS)
        rendezvous = Rendezvous(stored.nodes, settings.join_grace_seconds, vacant, now)
        scaling = Scaling(settings, registry, members, rendezvous)
        barriers = Barriers(members, stored.barriers)
        deferred = DeferredLosses(registry, members, snapshots)
        losses = MemberLosses(
            settings,
            members,
            deferred,
            UnreachableServers(settings, members, registry, deferred),
            SilentMembers(settings, members, deferred),
            RunStart(settings, members, registry, now),
            now,
        )
        return cls(
            members=members,
            admission=MemberAdmission(settings, members),
            registry=registry,
            creation=Creation(settings, registry, resume, members, joins, Commits(registry, members)),
            replica_manager=ReplicaManager(settings, registry, members),
            scaling=scaling,
            datasets=datasets,
            snapshots=snapshots,
            rollback=Rollback(registry, joins, members, datasets, snapshots),
            exit_requests=ExitRequests(settings, registry, members, snapshots, scaling),
            coordinated_shutdown=CoordinatedShutdown(members, registry, snapshots, alignment, epoch << _COMMANDS_BITS),
            losses=losses,
            barriers=barriers,
            deadlocks=Deadlocks(members, registry, barriers),
            rendezvous=rendezvous,
        )

    def end_call(self, call: int) -> None:
        """Remove a call that is over from every machine."""
        self.registry.end_call(call)
        self.creation.commits.end_call(call)
        self.barriers.end_call(call)
        self.rendezvous.end_call(call)
        self.scaling.end_call(call)
        self.snapshots.waiters.end_call(call)
        self.exit_requests.end_call(call)
        self.deadlocks.end_call(call)

    def waits(self, now: float) -> Iterator[Wait]:
        yield from self.creation.waits(now)
        yield from self.creation.joins.waits()
        yield from self.barriers.waits()
        yield from self.rendezvous.waits(now)
        yield from self.scaling.waits()
        yield from self.losses.deferred.waits()
        yield from self.snapshots.waits()
        yield from self.coordinated_shutdown.waits()
        yield from self.losses.unreachable.waits()
        yield from self.creation.joins.alignment.waits()
        yield from self.losses.silent.waits()

    @property
    def has_changed(self) -> bool:
        """True if something changed that makes an epoch: content of the map, or state that a restart needs."""
        parameters = self.registry.changed or self.registry.resume.changed
        return bool(self.members.changed or self.members.demand.changed or parameters or self.rendezvous.changed)

    @property
    def has_changed_aside(self) -> bool:
        """True if something changed that a restart needs and that the map does not show."""
        return bool(self.datasets.changed or self.barriers.changed)

    def take_changes(self, epoch: int) -> Persist:
        """Return everything that changed since the previous call."""
        forgotten, parameters = self.registry.take_changes()
        return Persist(
            epoch=epoch,
            members=self.members.take_changes(),
            parameters=parameters,
            nodes=self.rendezvous.take_changes(),
            datasets=self.datasets.take_changes(),
            servers_wanted=self.members.demand.take_change(),
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
        self.losses.deferred.validate()
        self.barriers.validate()
        self.losses.unreachable.validate()
