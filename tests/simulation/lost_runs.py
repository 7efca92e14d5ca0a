"""Runs that lose the scheduler's record or their snapshots: they end everywhere with the documented error, or continue
from a snapshot, and nothing in between.

Members train, and at some moment a loss happens (``KINDS``). Either the scheduler is killed and restarted with an empty
store or an older copy of it. Or snapshots become unreadable (``DAMAGES``) and the run needs one, because the servers
with the only copies die or everything is restarted. Faults of other runs come before that.

A run that cannot continue must have ended everywhere within ``END_SECONDS``. Afterwards it is started again. A
scheduler whose store is empty must remember why it ended. A run whose store or files are restored must continue from
the newest snapshot. ``snapshot_oracle`` checks the runs that continue.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass, replace
from typing import Any, Final

from psdist import BSP
from psdist.client.session.script import status_of
from psdist.errors import (
    RUN_ENDING,
    ConfigurationError,
    PsdistError,
    RunLostError,
    ServerLostError,
    SnapshotCorruptError,
)
from psdist.settings import exit_codes
from psdist.snapshots.policy import SavePolicy
from psdist_scheduler import app, snapshot_io
from psdist_scheduler.decide.cluster import Cluster
from psdist_scheduler.decide.cluster_state import ClusterSettings
from psdist_scheduler.decide.snapshot_events import History
from psdist_scheduler.scheduler import Scheduler
from tests.simulation import scenario, snapshots
from tests.simulation.disk import Disk, DiskStore
from tests.simulation.environment import RunLoop
from tests.simulation.loop import Node, where
from tests.simulation.oracle import Life
from tests.simulation.snapshot_oracle import Saved
from tests.simulation.snapshots import URL, SnapshotNemesis, SnapshotOptions, SnapshotWorld
from tests.simulation.storage import DAMAGES

#: Lost things, and the moment at which a snapshot is needed.
KINDS: Final = (
    "store lost",
    "older store",
    "servers lost, snapshots damaged",
    "started again, snapshots damaged",
    "started again with its store, snapshots damaged",
)
#: Seconds from the restart of its scheduler, or the death of its servers, within which a run that cannot continue has
#: ended everywhere.
END_SECONDS: Final = 10.0
#: Faults before the loss: none of them keeps a member from the scheduler for long.
_FAULTS: Final = (
    "kill worker", "kill scheduler", "pause worker", "pause server", "break connections", "break session of worker",
    "join worker", "lose server",
)  # fmt: skip
#: Longest wait for a moment at which the loss can happen.
_PATIENCE_SECONDS: Final = 20.0


@dataclass(frozen=True)
class LostOptions(SnapshotOptions):
    """Options of a run with a loss; see also SnapshotOptions.

    lost: one of KINDS.
    how: one of DAMAGES.
    newest: number of snapshots that are damaged, from the newest on.
    storage: False if no snapshots are configured.
    pushes, commits: smallest numbers of these before the loss.
    """

    lost: str = ""
    how: str = ""
    newest: int = 1
    storage: bool = True
    pushes: int = 0
    commits: int = 1

    @property
    def damages(self) -> bool:
        """True if snapshots become unreadable."""
        return self.lost.endswith("damaged")

    @property
    def end_seconds(self) -> float:
        """Seconds within which a run that cannot continue has ended. A scheduler that kept its store considers a worker
        alive for its lease, and lets no other one in."""
        return END_SECONDS + self.worker_lease_seconds * ("with its store" in self.lost)


def draw(seed: int) -> LostOptions:
    """Return the options of a seed."""
    base = snapshots.draw(seed)
    rng = random.Random(f"{seed}/lost")
    lost = rng.choice(KINDS)
    storage = lost.endswith("damaged") or rng.random() < 0.5
    # A running scheduler knows its commits, so damage to their records changes nothing.
    damages = [how for how in DAMAGES if how != "flipped record" or not lost.startswith("servers lost")]
    save_steps = rng.choice((0, 1, 2)) if storage and isinstance(base.consistency, BSP) else 0
    return LostOptions(
        **vars(base)
        | {
            "steps": rng.choice((8, 12, 20)),
            "lives": base.workers * (base.ends + 6) + 8,
            "faults": tuple(sorted(set(rng.choices(_FAULTS, k=rng.choice((1, 2)))))),
            "fault_count": rng.choice((0, 0, 1, 2)),
            "fault_seconds": 2.0,
            "save_steps": save_steps,
            "save_seconds": 0.0 if save_steps or not storage else rng.choice((0.3, 1.0)),
            "saves": base.saves if storage else 0.0,
            "storage_faults": rng.choice((0.0, 0.0, 0.05)),
            "storage_kinds": ("error before", "error after"),  # A torn record is damage.
            "data": base.data and lost != "older store",
            "lost": lost,
            "how": rng.choice(damages),
            "newest": rng.choice((1, 1, 2, 99)),
            "storage": storage,
            "pushes": rng.choice((0, rng.randrange(4 * base.workers))),
            "commits": rng.choice((0, 1, 2, 3)),
            "think_seconds": rng.choice((0.05, 0.1, 0.4)),
        }
    )


@dataclass(frozen=True)
class End:
    """The end of a process. seconds: time between the loss and this end."""

    name: str
    error: PsdistError
    seconds: float


class LostWorld(SnapshotWorld):
    """World that loses the scheduler's store or snapshots."""

    options: LostOptions

    def __init__(self, loop: RunLoop, options: LostOptions) -> None:
        super().__init__(loop, options)
        self.ends: list[End] = []
        #: Time of the loss.
        self.lost_at = math.inf
        #: Damaged snapshots, as their directories with the paths of their records; and directories of the readable
        #: ones.
        self.damaged: dict[str, str] = {}
        #: True if the scheduler knew one of the damaged snapshots.
        self._knew_damaged = False
        self.readable: set[str] = set()
        #: Names of the processes that must end, and numbers of the lives that have ended with an error.
        self._alive: set[str] = set()
        self._told: set[int] = set()
        #: Number of commits before the loss, and the era of the loss.
        self._commits = self._era = 0
        #: Lives of workers that were training at the loss.
        self._needing: set[int] = set()
        self._kept_files: dict[str, tuple[bytes, float]] = {}
        self._newest_disk = self.disk
        self._chance_of_loss = options.stream("loss")
        self._phases: dict[Node, int] = {}
        self._watches: set[asyncio.Task[None]] = set()
        phases, oracle = self._phases, self.oracle  # The loop outlives the world.
        oracle.acting_phase = lambda: phases.get(loop.current(), oracle.phase)

    # --- processes ----------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> ClusterSettings:
        """See World."""
        settings = super().settings
        return settings if self.options.storage else replace(settings, storage="", policy=SavePolicy(0, 0.0))

    async def make_scheduler(self, store: DiskStore) -> Scheduler:
        """See World. The scheduler ends as the program does."""
        if self.options.storage:
            scheduler = await super().make_scheduler(store)
        else:
            scheduler = Scheduler(Cluster(self.settings, store.load(), self.loop.time()), store)
        watch = asyncio.create_task(self._end_when_failed(self.loop.current(), scheduler))
        self._watches.add(watch)
        return scheduler

    async def _end_when_failed(self, node: Node, scheduler: Scheduler) -> None:
        await app._end_when_failed(scheduler)
        assert scheduler.cluster.failed is not None
        self._ended("scheduler", scheduler.cluster.failed)
        self.loop.world_soon(self._kill_if_alive, node)

    def check_history(self, history: History | None, *, begins: bool) -> None:
        """See SnapshotWorld."""
        if begins and history is not None:
            snapshot_io.check_readable(history, URL)

    async def schedule(self, node: Node, address: str, store: DiskStore) -> None:
        """See World."""
        try:
            await super().schedule(node, address, store)
        except ConfigurationError as error:  # A launcher gives up.
            self._ended("scheduler", error)
            self.loop.world_soon(self.end_everything)

    def start_server(self, number: int) -> None:
        """See World."""
        super().start_server(number)
        self._phases[self.server_nodes[number]] = self.oracle.phase

    def start_worker(self, worker: int) -> None:
        """See World."""
        super().start_worker(worker)
        self._phases[self.worker_nodes[worker]] = self.oracle.phase

    def judge_server_end(self, node: Node, error: PsdistError) -> None:
        """See World."""
        if isinstance(error, RUN_ENDING):
            self._ended(node.name, error)
            return
        super().judge_server_end(node, error)
        if not self.options.damages:  # All its maps are on record, but its registration is not.
            self._alive.discard(node.name)

    def server_ended(self, number: int, node: Node) -> None:
        """See World."""
        if self.is_over:
            self._kill_if_alive(node)
        else:
            super().server_ended(number, node)

    async def _work(self, node: Node, life: Life) -> None:
        try:
            await self._train(life)
        except RUN_ENDING as error:
            self._ended(life.worker_id, error, life.number)
            self._end_worker(node, life, for_good=self.is_over or status_of(error) == exit_codes.INFRASTRUCTURE)
        except PsdistError as error:
            self.oracle.violation(f"{life.worker_id} ended: {error!r}{where(error)}")
            self._end_worker(node, life, for_good=True)
        else:
            self._end_worker(node, life, for_good=True)

    def _ended(self, name: str, error: PsdistError, life: int = -1) -> None:
        self.counts[f"{name.partition('-')[0]} ended: {type(error).__name__}"] += 1
        self._told.add(life)
        self.ends.append(End(name, error, self.loop.time() - self.lost_at))

    def _kill_if_alive(self, node: Node) -> None:
        if not node.dead:
            self.kill(node, silent=False)

    @property
    def is_over(self) -> bool:
        """True if the scheduler reports, or has reported, that the run cannot continue."""
        failed = self.scheduler is not None and self.scheduler.cluster.failed is not None
        return failed or any(end.name == "scheduler" for end in self.ends)

    @property
    def running(self) -> list[str]:
        """Names of the processes that have not ended."""
        nodes = (self.scheduler_node, *self.server_nodes.values(), *self.worker_nodes.values())
        return [node.name for node in nodes if node is not None and not node.dead]

    # --- the loss -----------------------------------------------------------------------------------------------------

    async def until_it_may_happen(self) -> bool:
        """Wait until members exist that would notice the loss. Returns False if that never happens."""
        rng, until = self._chance_of_loss, self.loop.time() + _PATIENCE_SECONDS
        while not self._may_happen():
            if self.finished or self.loop.time() > until:
                return False
            await self.loop.after(rng.uniform(0.0, 0.05))
        return True

    def _may_happen(self) -> bool:
        options = self.options
        commits = options.commits if options.damages or options.storage else 0
        if self.finished or len(self.oracle.acked) < options.pushes or len(self.oracle.commits) < commits:
            return False
        if options.damages:
            return 0 < len(self.bucket.directories) <= options.keep_last
        return self._older_copies() > 0 if options.lost == "older store" else self._newest_epoch > 0

    @property
    def _newest_epoch(self) -> int:
        """Epoch of the newest map at a live server."""
        alive = [host for number, host in self.hosts.items() if not self.server_nodes[number].dead]
        return max((host.admission.map.epoch for host in alive if host.admission.map.scheduler_id), default=0)

    def _older_copies(self) -> int:
        """Return the number of states that the disk went through before a live server received a newer one."""
        durable, newest = self.disk.durable, self._newest_epoch
        return next((n for n, change in enumerate(durable) if change.epoch >= newest), len(durable))

    def lose(self) -> None:
        """Cause the loss."""
        options = self.options
        self.healed, self.lost_at, self.ends = True, self.loop.time(), []
        self._alive = {*self.running} - {"scheduler"}
        self._commits, self._era = len(self.oracle.commits), len(self.oracle.eras) - 1
        self._needing = {life.number for life in self.lives if not life.over}
        self.readable = set(self.bucket.directories)
        self.counts[options.lost] += 1
        self.loop.trace(options.lost)
        if options.damages:
            self._damage()
        if options.lost.startswith("servers lost"):
            self._lose_servers()
        elif options.lost.startswith("started again"):
            self.end_everything()
            if "with its store" not in options.lost:
                self.lose_store()
            self.start_everything()
        else:
            self._lose_record()

    def start_everything(self) -> None:
        """Start all processes, with the contents of the disk."""
        self.lost_at, self.ends = self.loop.time(), []
        self.start_scheduler()
        self.start_members()
        self._alive = {*self.running} - {"scheduler"}

    def _lose_record(self) -> None:
        rng, down = self._chance_of_loss, self._chance_of_loss.uniform(0.05, 1.0)
        copies = self._older_copies()
        if self.scheduler_node is not None and not self.scheduler_node.dead:
            self.kill(self.scheduler_node, silent=False)
        self._newest_disk = self.disk
        if self.options.lost == "store lost":
            self.lose_store()
        else:
            self.disk = Disk(self.options.stream("older disk"), self.disk.run_id, self.disk.seconds)
            self.disk.durable = self._newest_disk.durable[: rng.randint(1, copies)]
            self.oracle.is_paused = True
        self.lost_at += down
        self._later(down, self._restart_scheduler)

    def _restart_scheduler(self) -> None:
        if self.scheduler_node is not None and self.scheduler_node.dead:
            self.start_scheduler()

    def _later(self, seconds: float, callback: Any, *args: object) -> None:
        self.loop.call_later(seconds, callback, *args, context=self.loop.world.context)

    def _lose_servers(self) -> None:
        """Lose all copies of some shards: kill one server, or all of them if there are several copies."""
        rng, alive = self._chance_of_loss, [n for n, node in sorted(self.server_nodes.items()) if not node.dead]
        for number in alive if self.options.replicas > 1 else rng.sample(alive, min(1, len(alive))):
            self._alive.discard(self.server_nodes[number].name)
            self.kill(self.server_nodes[number], silent=False)
            self._later(rng.uniform(0.05, 1.0), self._server_again, number)

    def _damage(self) -> None:
        self._kept_files = dict(self.bucket.files)
        self.damaged = self.bucket.damage(self.options.how, self.options.newest, self._chance_of_loss)
        self.readable -= self.damaged.keys()
        catalog = self.scheduler.cluster.snapshots.catalog if self.scheduler is not None else None
        self._knew_damaged = catalog is not None and any(c.directory in self.damaged for c in catalog.commits)
        self.oracle.only_readable(self.readable)
        self.counts[f"damaged snapshots: {self.options.how}"] += len(self.damaged)

    def _created(self, path: str) -> None:
        super()._created(path)
        if self.oracle.commits and not self._is_whole(self.oracle.commits[-1]):
            self.oracle.spoilt = True

    # --- after the loss -----------------------------------------------------------------------------------------------

    @property
    def must_end(self) -> bool:
        """True if the run cannot continue."""
        options = self.options
        if options.lost == "older store":
            return True
        if options.lost == "store lost":
            return not self.readable
        if self.readable:
            return False
        if options.lost.startswith("servers lost") and (self._was_under_way or self.is_done):
            return False
        # In this case nothing shows that there was a run.
        return not (options.how == "emptied" and options.lost == "started again, snapshots damaged")

    @property
    def _was_under_way(self) -> bool:
        """True if a snapshot of the lost servers was still committed after the loss."""
        return any(saved.era == self._era and self._is_whole(saved) for saved in self.oracle.commits[self._commits :])

    def _is_whole(self, saved: Saved) -> bool:
        """Return False if the storage was emptied between the snapshot's files and its record."""
        return f"snapshots/{saved.directory}/manifest.json" in self.bucket.files

    @property
    def is_done(self) -> bool:
        """True if all workers had finished their work, and none needs the lost servers."""
        return all(life.over for life in self.lives) and self._told.isdisjoint(self._needing)

    @property
    def is_unknown(self) -> bool:
        """True if nobody knows that there were snapshots; a launcher must then end the servers and the scheduler."""
        return self.options.how == "emptied" and self.options.lost == "started again with its store, snapshots damaged"

    @property
    def _is_unheard(self) -> bool:
        """True if the storage was emptied before a scheduler had heard of any snapshot in it: the only one was still
        being confirmed, or the scheduler was down."""
        return self.options.how == "emptied" and not self._knew_damaged

    @property
    def _to_end(self) -> list[str]:
        """Processes that end by themselves and have not ended yet."""
        return [name for name in self.running if not self.is_unknown or name.startswith("worker")]

    async def until_ended(self) -> None:
        """Wait until every process has ended, or should have."""
        while self._to_end and self.must_end and self.loop.time() <= self.lost_at + self.options.end_seconds:
            await self.loop.after(0.05)
        if not self.must_end:
            return
        if self.is_unknown and not any(name.startswith("worker") for name in self.running):
            self.end_everything()
        elif self.running:
            limit = f"{self.options.end_seconds:g} s after: {self.options.lost}"
            self.oracle.violation(f"{self.running} have not ended, {limit}")
            self.end_everything()
        self.counts["ended everywhere"] += 1
        for end in self.ends:
            self._check_end(end)
        if not self.is_unknown and not any(isinstance(end.error, ConfigurationError) for end in self.ends):
            ended = {end.name for end in self.ends}
            finished = {life.worker_id for life in self.lives if life.over and life.number not in self._told}
            if missing := (self._alive | {"scheduler"}) - ended - finished:
                self.oracle.violation(f"{missing} ended without an error, after: {self.options.lost}")

    def _check_end(self, end: End) -> None:
        wanted: tuple[type[PsdistError], ...] = (RunLostError,)
        named = ["the scheduler's record of this run is gone"]
        if self.options.damages:
            wanted = (ServerLostError, SnapshotCorruptError, ConfigurationError)
            named = ["held shard"] if self.is_unknown else [*self.damaged, *self.damaged.values()]
            if self.options.lost.startswith("servers lost") and self._is_unheard:
                named.append("held")
            named += [saved.directory for saved in self.oracle.commits[self._commits :] if not self._is_whole(saved)]
        if not isinstance(end.error, wanted) or not any(name in str(end.error) for name in named):
            self.oracle.violation(f"{end.name} ended with {end.error!r}, after: {self.options.lost}")
        if end.seconds > self.options.end_seconds:
            self.oracle.violation(f"{end.name} ended {end.seconds:.1f} s after: {self.options.lost}")

    async def until_left(self) -> None:
        """Wait until the members of a lost record have ended; the others begin from a snapshot without them."""
        while self.loop.time() <= self.lost_at + self.options.end_seconds and (left := self._left()):
            await self.loop.after(0.05)
        if left:
            self.oracle.violation(f"{left} still run, {self.options.end_seconds:g} s after: {self.options.lost}")
        for end in self.ends:
            if "snapshot" not in end.error.details:
                self._check_end(end)
        self.counts["continued without the members of a lost record"] += 1

    def check_continued(self) -> None:
        """Check that no process of a continuing run ended because the run could not continue."""
        self.counts["continued from an older snapshot"] += bool(self.damaged and not self._told)
        if ends := [end for end in self.ends if "snapshot" not in end.error.details]:
            self.oracle.violation(f"{ends[0].name} ended with {ends[0].error!r}, though a snapshot is readable")

    def _left(self) -> list[str]:
        nodes = (*self.server_nodes.values(), *self.worker_nodes.values())
        return [node.name for node in nodes if not node.dead and self._phases[node] < self.oracle.phase]

    def start_the_missing(self) -> None:
        """Start the workers again that had finished when the run rolled back to a snapshot."""
        for worker in sorted(self.finished):
            if worker < self.options.workers:
                self.start_worker(worker)

    def put_back(self) -> bool:
        """Start a run that ended again, with its lost store or files if copies of them were kept. Returns True if it
        must continue."""
        options = self.options
        if options.damages:
            self.bucket.files = self._kept_files
            self.oracle.only_readable(self.bucket.directories, again=self.oracle.eras[-1].base in self.damaged)
        elif options.lost == "older store":
            self.disk, self.oracle.is_paused = self._newest_disk, False
            if not self.bucket.directories:
                return False
        self.counts[f"started once more after: {options.lost}"] += 1
        self.start_everything()
        return options.lost != "store lost"


class LostNemesis(SnapshotNemesis):
    """Nemesis that causes no faults after the loss."""

    _world: LostWorld

    def _bring(self, kind: str) -> None:
        if math.isinf(self._world.lost_at):
            super()._bring(kind)


async def _main(world: LostWorld) -> None:
    world.begin()
    nemesis = LostNemesis(world)
    faults = world.loop.create_task(nemesis.run())
    happened = await world.until_it_may_happen()
    if happened:
        world.lose()
    else:
        world.counts["nothing was lost"] += 1
    await faults
    if happened and not await _continues(world):
        await world.oracle.check_commits(world.loop)
        return
    if not happened:
        nemesis.heal()
    await world.all_finished()
    if happened:
        world.check_continued()
    for _ in range(world.options.ends if world.options.storage else 0):
        world.restart()
        await world.all_finished()
    await world.final_read()


async def _continues(world: LostWorld) -> bool:
    """Wait for the end of the run, if it must end, and then start it again. Returns True if it continues."""
    if world.must_end:
        await world.until_ended()
    if world.must_end:
        if not world.put_back():
            if world.running:
                await world.until_ended()
            return False
    elif world.options.lost == "store lost":
        await world.until_left()
        world.start_the_missing()
    return bool(world.readable) or not world.is_done  # Otherwise there is nothing to begin from.


def run(seed: int, options: LostOptions | None = None, *, trace: bool = False) -> scenario.Result:
    """Run a seed. The environment must be installed."""
    return snapshots.play(options or draw(seed), LostWorld, _main, trace=trace)[0]
