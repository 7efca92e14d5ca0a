"""Runs with snapshots: the cluster of ``cluster`` with a storage, losses that it rolls back from, and restarts.

There are three faults beyond those of ``nemesis``: a server with the only copy of its shards may be lost; all processes
may end together and restart with an empty store and another number of servers; every operation of the storage may fail.
Finally everything ends once more, and the restarted run must load the newest committed snapshot.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final

import numpy as np

from psdist import ASP, BSP, SSP
from psdist.client.async_client import AsyncClient
from psdist.client.datasets import Range
from psdist.client.parameters import AsyncParameters
from psdist.consistency import Consistency
from psdist.errors import FencedError, SnapshotFailedError, StorageError
from psdist.optim import SGD
from psdist.security.tls import Credentials
from psdist.snapshots.policy import SavePolicy
from psdist_scheduler.decide.cluster import Cluster
from psdist_scheduler.decide.cluster_state import ClusterSettings
from psdist_scheduler.decide.effects import MemberLost
from psdist_scheduler.decide.snapshot_events import History
from psdist_scheduler.scheduler import Scheduler
from psdist_scheduler.snapshot_io import read_history
from psdist_server.server import ParameterServer
from psdist_server.server_session import ServerSession
from tests.simulation import scenario
from tests.simulation.cluster import KERNEL_THREADS, NAME, RUN, World
from tests.simulation.disk import Disk, DiskStore
from tests.simulation.environment import RunLoop
from tests.simulation.loop import Deadlock, Failed, Node, TooLong, where
from tests.simulation.nemesis import Nemesis
from tests.simulation.options import SINGLE, Options
from tests.simulation.oracle import Life, Push
from tests.simulation.snapshot_oracle import SnapshotOracle
from tests.simulation.storage import LIES, WRITING, Bucket, Operation, SimStorage

URL: Final = "sim://bucket"
#: Faults of runs with snapshots, besides those of other runs.
LOSSES: Final = ("lose server", "restart everything")
_TOLD: Final = ("error before", "error after", "torn, error", "slow")
_CRASHES: Final = ("crash before", "crash after", "torn, crash", "error after")
#: Virtual seconds within which a run that has to load must be over, once all faults have ended.
CONVERGE_SECONDS: Final = 150.0


@dataclass(frozen=True)
class SnapshotOptions(Options):
    """Options of a run with snapshots; see also Options.

    saves: fraction of steps after which the worker requests a snapshot.
    storage_faults: fraction of the storage's operations with a fault, of ``storage_kinds``.
    ends: number of times that everything ends and restarts at the end.
    """

    save_steps: int = 0
    save_seconds: float = 0.0
    keep_last: int = 2
    saves: float = 0.2
    storage_seconds: tuple[float, float] = (0.0005, 0.005)
    storage_faults: float = 0.0
    storage_kinds: tuple[str, ...] = _TOLD
    ends: int = 1
    #: True if each push is made with a leased range of data.
    data: bool = False
    #: True if scripts keep state in snapshots.
    keeps: bool = False

    @property
    def policy(self) -> SavePolicy:
        """Policy by which the scheduler takes snapshots by itself."""
        return SavePolicy(self.save_steps, self.save_seconds, self.keep_last)


def draw(seed: int) -> SnapshotOptions:
    """Return the options of a seed."""
    rng = random.Random(f"{seed}/snapshots")
    replicas, workers = rng.choice((1, 1, 1, 2)), rng.choice((1, 2, 2, 3))
    consistency: Consistency = rng.choice((BSP(), BSP(), SSP(1), ASP()))
    kinds = [*SINGLE, *LOSSES * 5]
    ends = rng.choice((1, 1, 2))
    save_steps = rng.choice((0, 1, 2)) if isinstance(consistency, BSP) else 0
    return SnapshotOptions(
        seed=seed,
        servers=rng.choice((1, 2, 3)) if replicas == 1 else rng.choice((2, 3)),
        workers=workers,
        replicas=replicas,
        consistency=consistency,
        optimizer=SGD(lr=1.0, momentum=rng.choice((0.0, 0.5)) if isinstance(consistency, BSP) else 0.0),
        steps=rng.choice((4, 6, 8)),
        slices=rng.choice((2, 4, 6)),
        lives=workers * (ends + 3) + 6,
        think_seconds=rng.choice((0.02, 0.1, 0.4)),
        pulls=rng.choice((0.0, 0.3)),
        bare_pushes=rng.choice((0.0, 0.3)),
        lease_seconds=rng.choice((1.0, 2.0)),
        handle_seconds=rng.choice((0.0, 5e-6)),
        delay=rng.choice(((0.0002, 0.001), (0.0005, 0.005), (0.001, 0.03))),
        cut=rng.choice((0.0, 0.0, 0.05)),
        faults=tuple(sorted(set(rng.choices(kinds, k=rng.choice((1, 2, 3)))))),
        fault_count=rng.choice((0, 1, 2, 3)),
        fault_seconds=rng.choice((1.5, 4.0)),
        save_steps=save_steps,
        save_seconds=0.0 if save_steps else rng.choice((0.0, 0.3, 1.0)),
        keep_last=rng.choice((1, 2, 3)),
        saves=rng.choice((0.0, 0.1, 0.4)),
        storage_seconds=rng.choice(((0.0005, 0.003), (0.0005, 0.003), (0.01, 0.1))),
        storage_faults=rng.choice((0.0, 0.0, 0.02, 0.1)),
        ends=ends,
        data=rng.random() < 0.4,
        storage_kinds=rng.choice((_TOLD, _TOLD, _CRASHES, LIES)),
        keeps=rng.random() < 0.4,
    )


@dataclass
class Script:
    """State that one worker's script keeps: batches taken before pushes, those learned after them, and the slot of the
    newest push."""

    taken: int = 0
    learned: int = 0
    slot: int = -1

    def save(self) -> dict[str, Any]:
        return {"numbers": np.array([self.taken, self.learned, self.slot])}

    def restore(self, arrays: dict[str, Any]) -> None:
        self.taken, self.learned, self.slot = map(int, arrays["numbers"]) if arrays else (0, 0, -1)

    def learn(self) -> None:
        """Do what follows a push, also after a restore."""
        self.learned = min(self.learned + 1, self.taken)


class SnapshotWorld(World):
    """World with a storage of snapshots, which can be restarted as a whole."""

    options: SnapshotOptions
    oracle: SnapshotOracle

    def __init__(self, loop: RunLoop, options: SnapshotOptions) -> None:
        super().__init__(loop, options)
        noise = np.random.default_rng(options.stream("noise").getrandbits(64))
        make: Any = SnapshotOracle
        self.oracle = make(NAME, options.consistency, options.optimizer, options.slices, options.slots, noise)
        loop.oracle = self.oracle
        self._saving = options.stream("saving")
        self._chance = options.stream("storage faults")
        self.bucket = Bucket(options.stream("storage"), options.storage_seconds)
        self.bucket.fault = self._fault
        self.bucket.crash = self._storage_crash
        self.bucket.created = self._created
        self.bucket.deleting = self._deleting
        self._was_loadable = False
        self._restarts = 0
        self.restarted_at = math.inf
        #: By the life's number.
        self._scripts: dict[int, Script] = {}
        self._servers = options.servers
        #: True once a storage operation has killed a process.
        self._has_crashed = False
        #: True once no operation of the storage fails any more.
        self.healed = False
        #: Time at which the first worker finished. If a server is lost after that, this worker's lost pushes are not
        #: repeated. The run then rightly waits for another worker.
        self.trained_at = math.inf
        #: Snapshots reported to workers: the life, the snapshot's directory, and the slots that must be in it.
        self.promises: list[tuple[str, str, list[int]]] = []

    # --- processes ----------------------------------------------------------------------------------------------------

    def finish(self, worker: int) -> None:
        """See World."""
        if not self.finished:
            self.trained_at = self.loop.time()
        super().finish(worker)

    @property
    def settings(self) -> ClusterSettings:
        """See World."""
        return replace(super().settings, servers_min=self._servers, storage=URL, policy=self.options.policy)

    async def make_scheduler(self, store: DiskStore) -> Scheduler:
        """See World."""
        storage, stored = self.open_storage(URL), store.load()
        restore = stored.base.restore if stored is not None else None
        history = None
        while True:
            try:
                history = await read_history(storage, RUN, restore.directory if restore is not None else "")
                break
            except StorageError:
                self.counts["the storage could not be read at the beginning"] += 1
                if stored is not None:
                    break  # It is read again later.
                await self.loop.after(0.3)
        self.check_history(history, begins=stored is None)
        return Scheduler(Cluster(self.settings, stored, self.loop.time(), history), store, storage)

    def check_history(self, history: History | None, *, begins: bool) -> None:
        """Check the stored history. Subclasses may refuse to start a scheduler. history: content of the storage.
        begins: True if the store is empty."""

    def make_host(self, link: ServerSession) -> ParameterServer:
        """See World."""
        return ParameterServer(link.registration, Credentials(), KERNEL_THREADS, opener=self.open_storage)

    def open_storage(self, url: str) -> SimStorage:
        """Return the run's storage."""
        return SimStorage(self.loop, self.bucket)

    def restart(self) -> None:
        """End everything, lose the scheduler's store, and run the same command again with other servers."""
        self.counts["restart everything"] += 1
        self.restarted_at = min(self.restarted_at, self.loop.time())
        self.end_everything()
        self.lose_store()
        self.start_scheduler()
        self._servers = max(self.options.replicas, 1 + (self.options.servers + self._restarts) % 3)
        self.start_members()

    def end_everything(self) -> None:
        """Kill every process, and mark all workers as finished."""
        for node in (self.scheduler_node, *self.server_nodes.values(), *self.worker_nodes.values()):
            if node is not None and not node.dead:
                self.kill(node, silent=False)
        for life in self.lives:
            life.over = True
            self.finished.add(life.worker)
        self.hosts.clear()
        self.server_nodes.clear()
        self.stopped_servers.clear()

    def lose_store(self) -> None:
        """Start the next scheduler with an empty store."""
        self.disk = Disk(self.options.stream(f"disk {self._restarts}"), RUN, self.options.disk_seconds)
        self.oracle.new_phase()
        self._restarts += 1

    def start_members(self) -> None:
        """Start all servers and workers, and mark the workers as unfinished."""
        for number in range(self._servers):
            self.start_server(number)
        for worker in range(self.options.workers):
            self.finished.discard(worker)
            self.start_worker(worker)

    @property
    def can_restart(self) -> bool:
        """True if enough lives are left for all workers, including those at the end."""
        needed = self.options.workers * (1 + self.options.ends)
        return len(self.lives) + needed <= self.options.lives

    def start_worker(self, worker: int) -> None:
        """See World."""
        super().start_worker(worker)
        self.lives[-1].phase = self.oracle.phase
        self.finished.discard(worker)

    def _check_loss(self, news: MemberLost) -> None:
        """See World."""
        if self._has_crashed:
            self.counts[f"lost: {news.role}"] += 1
        else:
            super()._check_loss(news)

    # --- the storage --------------------------------------------------------------------------------------------------

    def _fault(self, operation: Operation) -> str:
        if self.healed or self._chance.random() >= self.options.storage_faults:
            return ""
        kind = self._chance.choice(self.options.storage_kinds)
        if "," in kind and operation.kind not in WRITING:
            return ""
        if "crash" in kind and operation.node != "scheduler" and not self.oracle.commits:
            return ""  # The loss of a server that dies now would be permanent.
        self.counts[f"storage {operation.kind}: {kind}"] += 1
        return kind

    def _created(self, path: str) -> None:
        if path.startswith("commits/"):
            self.oracle.committed(path, self.bucket)

    def _deleting(self, is_done: bool) -> None:
        if not is_done:
            self._was_loadable = self.bucket.is_loadable
        elif self._was_loadable and not self.bucket.is_loadable:
            self.oracle.violation("the last snapshot that could be loaded was deleted")

    def _storage_crash(self, node: Node) -> None:
        if node.dead:
            return
        self._has_crashed = True
        self.kill(node, silent=False)
        if node is self.scheduler_node:
            self.loop.call_later(0.3, self._again, node, context=self.loop.world.context)
            return
        number = next(number for number, other in self.server_nodes.items() if other is node)
        self.loop.call_later(0.3, self._server_again, number, context=self.loop.world.context)

    def _again(self, node: Node) -> None:
        if self.scheduler_node is node:
            self.start_scheduler()

    def _server_again(self, number: int) -> None:
        if number in self.server_nodes and self.server_nodes[number].dead:
            self.start_server(number)

    # --- a worker's script --------------------------------------------------------------------------------------------

    async def _train(self, life: Life) -> None:
        steps = self.steps_left(life.worker)
        client = await self._connect(life.worker_id)
        self.clients[life.number] = client
        data = await client.dataset("data", size=self.options.slots, range_size=1) if self.options.data else None
        handle = await self._open(client)
        self._joined(life, client, handle)
        held: Range | None = None
        script = self._scripts[life.number] = Script()
        if self.options.keeps:
            await handle.keep_state(script.save, script.restore)
            script.learn()
        for _ in range(steps):
            script.taken += 1
            await self.loop.after(self.workload.expovariate(1.0) * self.options.think_seconds)
            if data is not None:
                held = await data.next(held)
            await self._step(client, life, handle)
            script.learn()
            if held is not None:
                self.oracle.used(life.pushes[-1], held.number)
            if self._saving.random() < self.options.saves:
                await self._save(client, life)
        life.over = True
        if data is not None:
            data.done()
        await client.close()

    async def _push(self, handle: AsyncParameters, push: Push) -> Any:
        """See World."""
        if (script := self._scripts.get(push.life.number)) is not None:
            script.slot = push.slot
        return await super()._push(handle, push)

    async def _save(self, client: AsyncClient, life: Life) -> None:
        era = len(self.oracle.eras)
        mine = [push.slot for push in life.since if push.acked and not push.dropped]
        try:
            info = await client.snapshot()
        except (SnapshotFailedError, StorageError, FencedError) as error:
            self.counts[f"a worker was told: {type(error).__name__}"] += 1
            return
        self.counts["a worker was told of a snapshot"] += 1
        self.counts["a worker was told: unchanged"] += info.unchanged
        if era == len(self.oracle.eras):
            self.promises.append((life.worker_id, info.directory, mine))

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _final_read(self) -> None:
        client = await self._connect("reader")
        handle = await client.parameters(NAME)
        weights = self.vector_of(await handle.pull())
        await self.oracle.check_commits(self.loop)
        self._check_promises()
        self.oracle.check_last(handle.participation.current.sequence.versions, weights)
        if self.bucket.overwritten:
            self.oracle.violation(f"written again: {self.bucket.overwritten}")
        await client.close()

    def _check_promises(self) -> None:
        slots = {saved.directory: saved.slots for saved in self.oracle.commits}
        for worker_id, directory, mine in self.promises:
            if directory not in slots:
                self.oracle.violation(f"{worker_id} was told of {directory}, which was not committed")
            elif missing := [slot for slot in mine if slot not in slots[directory]]:
                self.oracle.violation(f"{worker_id} was told of {directory}, which lacks its pushes {missing}")


class SnapshotNemesis(Nemesis):
    """Nemesis that also causes the losses."""

    _world: SnapshotWorld

    def heal(self) -> None:
        """See Nemesis."""
        self._world.healed = True
        super().heal()

    def _bring(self, kind: str) -> None:
        if kind == "kill worker":
            self._world.counts[kind] += self._kill_worker()
        elif kind not in LOSSES:
            super()._bring(kind)
        elif self._world.oracle.commits:
            done = self._lose_server() if kind == "lose server" else self._restart_everything()
            self._loop.trace(f"nemesis {kind} {done}")
            self._world.counts["lose server"] += done and kind == "lose server"

    def _kill_worker(self, silent: bool = False) -> bool:
        """Kill a worker only while lives are left: after a rollback, a run would wait forever for a worker that cannot
        return."""
        return self._world.can_start_worker and super()._kill_worker(silent)

    def _restart_worker(self, worker: int) -> None:
        node = self._world.worker_nodes.get(worker)
        if node is None or node.dead:
            super()._restart_worker(worker)

    def _lose_server(self) -> bool:
        server = self._server()
        if server is None or not self._may_be_short(0.0):
            return False
        self._world.kill(self._world.server_nodes[server], silent=self._rng.random() < 0.3)
        self._later(self._rng.uniform(0.1, 2.0), self._restart_server, server)
        return True

    def _restart_server(self, server: int) -> None:
        if server in self._world.server_nodes:
            super()._restart_server(server)

    def _restart_everything(self) -> bool:
        if not self._world.can_restart:
            return False
        self._world.restart()
        return True


async def _main(world: SnapshotWorld) -> None:
    options, loop = world.options, world.loop
    world.begin()
    nemesis = SnapshotNemesis(world)
    await nemesis.run()
    await loop.after(options.lease_seconds * options.stream("heal").random())
    nemesis.heal()
    await world.all_finished()
    for _ in range(options.ends):
        world.restart()
        await world.all_finished()
    await world.final_read()


def run(seed: int, options: SnapshotOptions | None = None, *, trace: bool = False) -> scenario.Result:
    """Run a seed. The environment must be installed."""
    return play(options or draw(seed), trace=trace)[0]


def play(
    options: SnapshotOptions,
    make: type[SnapshotWorld] = SnapshotWorld,
    main: Callable[[Any], Coroutine[Any, Any, None]] = _main,
    seconds: float = CONVERGE_SECONDS,
    *,
    trace: bool = False,
) -> tuple[scenario.Result, list[Operation]]:
    """Run a world by ``main`` to its end, at most ``seconds`` of virtual time after the faults. Returns the result and
    the storage's operations. The environment must be installed."""
    started = time.process_time()
    loop = RunLoop(options.stream("schedule"), options.handle_seconds)
    loop.lines = [] if trace else None
    result, operations = _play(loop, make(loop, options), main, options.fault_seconds + seconds)
    scenario.tear_down(loop)
    result.violations += loop.failures
    result.cpu_seconds = time.process_time() - started
    return result, operations


def _play(
    loop: RunLoop, world: SnapshotWorld, main: Callable[[Any], Coroutine[Any, Any, None]], seconds: float
) -> tuple[scenario.Result, list[Operation]]:
    options = world.options
    violations, begun = list[str](), loop.time()
    try:
        loop.run(main(world), seconds)
    except (Deadlock, TooLong) as error:
        violations.append(f"no end: {error}; {scenario.state(world)}")
    except Failed:
        pass
    except Exception as error:
        violations.append(f"the run failed: {error!r}{where(error)}")
    violations = [*world.oracle.violations, *world.doomed, *violations]
    counts = world.counts + world.network.counts + world.oracle.counts
    result = scenario.Result(
        options.seed, options, violations, loop.trace_hash, counts, loop.time() - begun, loop.steps, 0.0,
        loop.lines or [],
    )  # fmt: skip
    operations = world.bucket.operations
    again = [op for op in operations if op.time >= world.restarted_at]
    reads = takewhile(lambda op: op.kind in ("read", "list"), again)  # The run resumes; then it saves.
    # Each worker makes a push after these operations, by which it learns that a server is gone.
    until = world.trained_at - options.think_seconds
    return result, [*(op for op in operations if op.time <= until), *reads]
