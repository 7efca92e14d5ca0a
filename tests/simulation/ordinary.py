"""Runs of ordinary life: the effects of scripts and their users on a run, without faults and with some.

Scripts hold the interpreter, or compute for longer than any lease. They meet at barriers, with and without a time
limit. They count by the parameters' step, or by their own loop. The run is stopped at any moment, as by an interrupted
launcher: every worker gets SIGTERM, the last snapshot is requested, and everything ends. Then the same command
continues from that point, perhaps with other settings. Alternatively single workers are stopped, and the others keep
training. A server may end when the workers have left.

In a run without faults, in which nobody is busy for longer than its lease:

* no push is dropped;
* no script sees an error;
* a server that ends leaves its shards to the others, and is not kept waiting;
* a stopped run ends with a snapshot of every answered push, in BSP at a step that all workers have made.

In other runs an error must be true: workers reported as deadlocked are waiting for each other.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import grpc
import grpc.aio

from psdist import ASP, BSP, SSP
from psdist.client.async_client import AsyncClient
from psdist.client.parameters import AsyncParameters
from psdist.consistency import Consistency
from psdist.errors import MutualWaitError, PsdistError, PushDroppedError, WaitTimeoutError
from psdist.optim import SGD, Optimizer
from psdist.v1 import scheduler_pb2, scheduler_pb2_grpc
from psdist_scheduler.decide.cluster_state import ClusterSettings
from psdist_scheduler.decide.effects import MemberLost
from psdist_scheduler.decide.waits import Arrival, WaitFor
from tests.simulation import rpc, scenario, snapshots
from tests.simulation.cluster import NAME, RUN, SCHEDULER
from tests.simulation.environment import RunLoop
from tests.simulation.loop import Node, where
from tests.simulation.options import SINGLE
from tests.simulation.oracle import Life
from tests.simulation.scripts import Script
from tests.simulation.snapshots import LOSSES, SnapshotNemesis, SnapshotOptions, SnapshotWorld

BARRIER: Final = "round"
END: Final = "end"
#: Learning rates of the phases of a run, in turn.
RATES: Final = (1.0, 2.0, 0.5)
#: Virtual seconds within which everything must be over.
CONVERGE_SECONDS: Final = 1500.0
#: Largest number of consecutive barrier calls with a time limit.
_TRIES: Final = 30
#: Virtual seconds within which an idle server in a run without faults hands over its shards.
_DRAIN_SECONDS: Final = 10.0


@dataclass(frozen=True)
class OrdinaryOptions(SnapshotOptions):
    """Options of an ordinary run; see also SnapshotOptions.

    own_loop: scripts count their pushes instead of the parameters' steps.
    busy, long: fraction of steps in which a script holds its interpreter, or computes for long.
    frozen: True if a process that holds its interpreter is stopped whole, as by SIGSTOP.
    busy_leases, long_leases: longest duration of these, in worker leases.
    barrier_every: number of steps between barriers; 0 for never.
    limited: fraction of barrier calls with a time limit.
    end_barrier: True if workers meet at the end.
    stops: by phase of the run "all", "some" or "" (it ends by itself).
    stop_seconds: latest time of a stop.
    lost_exits: fraction of the SystemExits raised in a script that are lost.
    rates: True if phases have learning rates of their own.
    drains: True if a server ends when the workers of a phase have left.
    """

    own_loop: bool = False
    busy: float = 0.0
    frozen: bool = False
    busy_leases: float = 0.8
    long: float = 0.0
    long_leases: float = 2.0
    barrier_every: int = 0
    limited: float = 0.5
    end_barrier: bool = False
    stops: tuple[str, ...] = ()
    stop_seconds: float = 3.0
    lost_exits: float = 0.0
    rates: bool = False
    drains: bool = False

    @property
    def peaceful(self) -> bool:
        """True if nothing can cause the loss of a worker or the failure of a snapshot."""
        return not self.fault_count and not self.storage_faults and self.busy_leases < 1.0

    def optimizer_of(self, phase: int) -> Optimizer:
        """Return the optimizer that scripts request in a phase."""
        if not self.rates:
            return self.optimizer
        return SGD(lr=RATES[phase % len(RATES)], momentum=self.optimizer.values()["momentum"])


def draw(seed: int) -> OrdinaryOptions:
    """Return the options of a seed."""
    rng = random.Random(f"{seed}/ordinary")
    replicas, workers = rng.choice((1, 1, 2)), rng.choice((1, 2, 2, 3, 4))
    consistency: Consistency = rng.choice((BSP(), BSP(), BSP(), SSP(0), SSP(1), ASP()))
    bsp, peaceful = isinstance(consistency, BSP), rng.random() < 0.5
    stops = tuple(rng.choice(("all", "all", "some", "")) for _ in range(rng.choice((1, 2, 3))))
    worker_lease = rng.choice((3.0, 8.0))
    save_steps = rng.choice((0, 0, 1, 3)) if bsp else 0
    return OrdinaryOptions(
        seed=seed,
        servers=rng.choice((1, 2, 3)) if replicas == 1 else rng.choice((2, 3)),
        workers=workers,
        replicas=replicas,
        consistency=consistency,
        optimizer=SGD(lr=1.0, momentum=rng.choice((0.0, 0.5)) if bsp else 0.0),
        steps=rng.choice((4, 6, 8)),
        slices=rng.choice((2, 4, 6)),
        lives=workers * (len(stops) + 2) + (1 if peaceful else 5),
        think_seconds=rng.choice((0.005, 0.05, 0.2)),
        pulls=rng.choice((0.0, 0.3)),
        bare_pushes=rng.choice((0.0, 0.3)),
        lease_seconds=rng.choice((1.0, 2.0)),
        worker_lease_seconds=worker_lease,
        handle_seconds=rng.choice((0.0, 5e-6)),
        delay=rng.choice(((0.0002, 0.001), (0.0005, 0.005), (0.001, 0.03))),
        cut=rng.choice((0.0, 0.0, 0.05)),
        faults=tuple(sorted(set(rng.choices([*SINGLE, *LOSSES], k=rng.choice((1, 2, 3)))))),
        fault_count=0 if peaceful else rng.choice((1, 2, 3)),
        fault_seconds=rng.choice((1.5, 4.0)),
        save_steps=save_steps,
        save_seconds=0.0 if save_steps else rng.choice((0.0, 0.3, 1.0)),
        keep_last=rng.choice((1, 3)),
        saves=rng.choice((0.0, 0.0, 0.2)),
        storage_seconds=rng.choice(((0.0005, 0.003), (0.0005, 0.003), (0.01, 0.1))),
        storage_faults=0.0 if peaceful else rng.choice((0.0, 0.0, 0.05)),
        ends=len(stops),
        own_loop=rng.random() < 0.4,
        busy=rng.choice((0.0, 0.2, 0.5)),
        busy_leases=0.8 if peaceful else rng.choice((0.8, 1.6)),
        long=rng.choice((0.0, 0.0, 0.1)),
        barrier_every=rng.choice((0, 0, 1, 2)),
        limited=rng.choice((0.0, 0.5, 1.0)),
        end_barrier=rng.random() < 0.5,
        stops=stops,
        stop_seconds=rng.choice((1.0, 3.0, 10.0)),
        lost_exits=rng.choice((0.0, 0.0, 0.5)),
        rates=rng.random() < 0.4,
        drains=rng.random() < 0.4,
    )


class OrdinaryWorld(SnapshotWorld):
    """World in which scripts meet at barriers and the run is stopped and continued."""

    options: OrdinaryOptions

    def __init__(self, loop: RunLoop, options: OrdinaryOptions) -> None:
        super().__init__(loop, options)
        self._life_rng = options.stream("ordinary life")
        self.oracle.sets_rates = not options.rates
        self.oracle.rate = lambda phase: float(options.optimizer_of(phase).values()["lr"])
        #: Scripts by the number of their life.
        self.scripts: dict[int, Script] = {}
        #: Barrier at which each life is waiting, until the call is over or withdrawn.
        self._at: dict[int, str] = {}
        #: Number of times that the scheduler has let a life pass a barrier, by life and barrier.
        self._opened: Counter[tuple[int, str]] = Counter()
        #: True while the run is being stopped: nothing is started again.
        self.stopping = False
        #: Number of full restarts that remain, independent of the faults.
        self.restarts_left = options.ends + 1
        #: Phases that were stopped as a whole, with the number of commits when their workers had left.
        self.stopped_phases: dict[int, int] = {}
        loop.barrier_opened = self._barrier_opened
        loop.deadlock_found = self._deadlock_found

    @property
    def only_silences(self) -> bool:
        """See World."""
        return super().only_silences or (self.options.peaceful and not self.options.cut)

    def _check_loss(self, news: MemberLost) -> None:
        # A script that is busy for longer than its lease is expelled: its process shows no other sign of life.
        if self.options.busy_leases < 1.0 or news.role != "worker":
            super()._check_loss(news)

    @property
    def settings(self) -> ClusterSettings:
        """See World."""
        return replace(super().settings, worker_lease_seconds=self.options.worker_lease_seconds)

    @property
    def can_start_worker(self) -> bool:
        """See World. The rest of the run needs lives, too."""
        needed = self.options.workers * self.restarts_left
        return not self.stopping and len(self.lives) + self.promised_lives + needed < self.options.lives

    @property
    def can_restart(self) -> bool:
        """See SnapshotWorld."""
        needed = self.options.workers * (1 + self.restarts_left)
        return not self.stopping and len(self.lives) + self.promised_lives + needed <= self.options.lives

    def start_worker(self, worker: int) -> None:
        """See World."""
        if self.stopping:
            self.finish(worker)
        else:
            super().start_worker(worker)

    def restart(self) -> None:
        """See SnapshotWorld."""
        self.stopping = self.created = False
        self._at.clear()
        super().restart()

    # --- a worker's script --------------------------------------------------------------------------------------------

    async def _work(self, node: Node, life: Life) -> None:
        script = self.scripts[life.number] = Script()
        script.begin()
        try:
            await self._train(life)
        except SystemExit:
            self.counts["a script ended because it was asked to"] += 1
            await self._close(life, script, script.handler.reason())
        except (MutualWaitError, PushDroppedError) as error:
            self.counts[f"a script was told: {type(error).__name__}"] += 1
            if self.options.peaceful:
                self.oracle.violation(f"{life.worker_id} was told in peace: {error!r}{where(error)}")
            await self._close(life, script, "failed")
        except PsdistError as error:
            self.oracle.violation(f"{life.worker_id} ended: {error!r}{where(error)}")
        self._end_worker(node, life, for_good=True)

    async def _close(self, life: Life, script: Script, reason: str) -> None:
        life.over = script.ending = True
        if script.client is not None:
            await script.client.close(reason)

    async def _train(self, life: Life) -> None:
        script = self.scripts[life.number]
        script.client = client = await script.call(self._connect(life.worker_id))
        self.clients[life.number] = client
        client.report_waits(lambda: True)
        client.watch_signals(script.handler.read_signals)
        handle = await script.call(self._open(client))
        self._joined(life, client, handle)
        self.created = True
        made = 0
        while made < len(life.slots) and not self._is_done(handle, made):
            try:
                await self._one_step(script, life, handle, made)
            except SystemExit:
                if self._life_rng.random() >= self.options.lost_exits:
                    raise
                self.counts["an exit was lost"] += 1
                continue
            made = len(life.pushes)
        if self.options.end_barrier:
            await self._reach(script, life, END)
        await self._close(life, script, "closed")

    def _is_done(self, handle: AsyncParameters, made: int) -> bool:
        options = self.options
        if options.own_loop or not isinstance(options.consistency, BSP):
            return made >= options.steps
        return handle.step >= options.steps * (1 + self.oracle.phase)

    async def _one_step(self, script: Script, life: Life, handle: AsyncParameters, made: int) -> None:
        assert script.client is not None
        options = self.options
        await script.compute(self._think(life))
        count = made if options.own_loop or not isinstance(options.consistency, BSP) else handle.step
        if options.barrier_every and count % options.barrier_every == 0:
            await self._reach(script, life, BARRIER)
        before = len(life.pushes)
        await script.call(self._step(script.client, life, handle))
        assert len(life.pushes) == before + 1
        if self._saving.random() < options.saves:
            await script.call(self._save_in_time(script.client, life))

    async def _save_in_time(self, client: AsyncClient, life: Life) -> None:
        """Save a snapshot, with a time limit. It may need steps of others that wait for this worker at a barrier, and
        the scheduler does not detect such a deadlock."""
        try:
            async with asyncio.timeout(20.0):
                await self._save(client, life)
        except TimeoutError:
            self.counts["a snapshot's time limit was over"] += 1

    async def _think(self, life: Life) -> None:
        rng, options = self._life_rng, self.options
        await self.loop.after(self.workload.expovariate(1.0) * options.think_seconds)
        if rng.random() < options.busy:
            seconds = rng.random() * options.busy_leases * options.worker_lease_seconds
            self.counts["busy"] += 1
            self.loop.world_soon(self._hold, self.worker_nodes[life.worker], seconds)
            await self.loop.after(0.0)
        if rng.random() < options.long:
            self.counts["computed for long"] += 1
            await self.loop.after(rng.random() * options.long_leases * options.worker_lease_seconds)

    def _hold(self, node: Node, seconds: float) -> None:
        """Hold the interpreter: nothing of the process runs except the threads that answer for its connections, unless
        it is frozen."""
        if not node.paused and not node.dead:
            self.loop.pause(node)
            if self.options.frozen:
                self.network.watch_silence(node.name, "*")
            else:
                node.paused_since = float("inf")
            self.loop.call_later(seconds, self._let_go, node, context=self.loop.world.context)

    def _let_go(self, node: Node) -> None:
        if node.paused:
            self.loop.resume(node)

    async def _open(self, client: AsyncClient) -> AsyncParameters:
        oracle, options = self.oracle, self.options
        return await client.parameters(
            NAME,
            init=oracle.tensors(oracle.initial.reshape(-1)),
            optimizer=options.optimizer_of(oracle.phase),
            consistency=options.consistency,
            slice_elements=oracle.slice_elements,
        )

    # --- barriers -----------------------------------------------------------------------------------------------------

    async def _reach(self, script: Script, life: Life, name: str) -> None:
        """Wait until the barrier is passed, in one call or many."""
        assert script.client is not None
        rng = self._life_rng
        for calls in itertools.count():
            # Workers that retry forever could wait for each other forever without being noticed.
            limited = calls < _TRIES and rng.random() < self.options.limited
            limit = rng.choice((0.001, 0.01, 0.1, 1.0)) if limited else None
            self._at[life.number] = name
            try:
                await script.call(script.client.barrier(name, timeout=limit))
            except WaitTimeoutError as error:
                self.counts["a barrier's time limit was over"] += 1
                if "not known" in str(error):
                    self.counts["a barrier's outcome was not known"] += 1
                    continue  # It may still pass, and the next call finds out.
                if not self.loop.current().dead:
                    del self._at[life.number]
                if rng.random() < 0.5:  # The script does something else meanwhile.
                    await script.compute(self.loop.after(rng.expovariate(1.0) * 0.1))
                continue
            self._opened[life.number, name] -= 1
            self._at.pop(life.number, None)
            self.counts["passed a barrier"] += 1
            if self._opened[life.number, name] < 0:
                self.oracle.violation(f"{life.worker_id} passed barrier {name!r}, which was not opened for it")
            return

    def _barrier_opened(self, name: str, arrival: Arrival) -> None:
        """Check that all workers have reached a barrier that the scheduler opens."""
        assert self.scheduler is not None
        if passing := self._life_of(arrival.worker.member_id):
            self._opened[passing.number, name] += 1
        for worker in self.scheduler.cluster.members.workers:
            life = self._life_of(worker.member_id)
            if life is None or life.over or self.worker_nodes[life.worker].dead:
                continue
            if self._at.get(life.number) != name and _is_newest(self.clients.get(life.number), worker.incarnation):
                self.oracle.violation(f"barrier {name!r} was opened without {life.worker_id}")

    def _life_of(self, worker_id: str) -> Life | None:
        """Return the newest life of a worker."""
        return next((life for life in reversed(self.lives) if life.worker_id == worker_id), None)

    def _deadlock_found(self, waits: Mapping[WaitFor, Sequence[WaitFor]]) -> None:
        """Check a deadlock that the scheduler reports. No worker in it may already have made the step, or reached the
        barrier, that another one in it waits for.

        waits: with each wait those of the workers that it is for.
        """
        self.counts["a deadlock was found"] += 1
        for wait, awaited in ((wait, awaited) for wait, others in waits.items() for awaited in others):
            life, other = self._life_of(wait.worker.member_id), self._life_of(awaited.worker.member_id)
            if life is None or other is None or other.over or self.worker_nodes[other.worker].dead:
                continue
            step = _step_of(wait)
            if step is not None and _has_sent(other, awaited, step):
                self.oracle.violation(
                    f"{life.worker_id} is said to wait for {other.worker_id} in step {step}, which that has begun"
                )
            if "barrier" in wait.text and f"barrier {self._at.get(other.number)!r}" in wait.text:
                self.oracle.violation(
                    f"{life.worker_id} is said to wait {wait.text} for {other.worker_id}, which has arrived"
                )

    # --- stopping -----------------------------------------------------------------------------------------------------

    async def stop(self, kind: str) -> None:
        """Send SIGTERM to all workers one after another, or to one."""
        running = [life for life in self.lives if not life.over and not self.worker_nodes[life.worker].dead]
        rng = self._life_rng
        if kind == "some":  # Before anything exists, the start waits for all workers.
            running = rng.sample(running, 1) if running and all(life.joined for life in running) else []
        else:
            self.stopping = True
            rng.shuffle(running)
        self.counts[f"stopped {kind}"] += bool(running)
        for life in running:
            script, node = self.scripts.get(life.number), self.worker_nodes[life.worker]
            if script is None:
                self.kill(node, silent=False)  # Python has not started.
                life.over = True
                self.finish(life.worker)
            else:
                script.handler.send()
                self.loop.call_on(node, script.handler.signal)
            await self.loop.after(rng.expovariate(1.0) * 0.02)

    async def end_a_server(self) -> None:
        """Let a server end, if the others can hold its shards, when all workers have left."""
        servers = sorted(set(self.hosts) - self.stopped_servers)
        if not self.options.peaceful or len(servers) <= self.options.replicas:
            return
        server = self._life_rng.choice(servers)
        self.stopped_servers.add(server)
        self.loop.start(self.loop.node("operator", "host-o"), self._drain(server, self.hosts[server].me.server_id))
        until = self.loop.time() + _DRAIN_SECONDS
        while not self.server_nodes[server].dead:
            await self.loop.after(0.1)
            if self.loop.time() > until:
                self.oracle.violation(f"server {server} was not drained within {_DRAIN_SECONDS:g} s")
                return
        self.counts["a server ended without workers"] += 1

    async def save_at_the_end(self) -> None:
        """Request a last snapshot, as a launcher does when the workers have ended."""
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(rpc.SimChannel(self.network, SCHEDULER))
        request = scheduler_pb2.SaveSnapshotRequest(run_id=RUN, reason="at the end")
        try:
            while not await self._asked_to_save(stub, request):
                await self.loop.after(0.1)
        except grpc.aio.AioRpcError as error:
            self.counts["no snapshot at the end"] += 1
            if self.options.peaceful and self.created and "no parameters" not in str(error.details()):
                self.oracle.violation(f"no snapshot was taken at the end: {error.details()}")

    async def _asked_to_save(self, stub: Any, request: scheduler_pb2.SaveSnapshotRequest) -> bool:
        """True if the request reached the scheduler."""
        try:
            async for _ in stub.SaveSnapshot(request):
                pass
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and "refused" in str(error.details()):
                return False
            raise
        return True

    def go_on(self) -> None:
        """Run the same command again."""
        self.restarts_left -= 1
        self.restart()

    def phase_ended(self) -> None:
        """Record that all workers have left a stopped run, and that it was saved."""
        self.stopped_phases[self.oracle.phase] = len(self.oracle.commits)

    async def _final_read(self) -> None:
        await super()._final_read()
        if self.options.peaceful:
            for phase, commits in self.stopped_phases.items():
                self.oracle.check_stopped(phase, commits, self.lives)
        dropped = [push for push in self.oracle.pushes.values() if push.dropped]
        if dropped and (self.options.peaceful or not (self.oracle.exact or self.oracle.went_back)):
            who = sorted({f"{push.life.worker_id} in phase {push.life.phase}" for push in dropped})
            self.oracle.violation(f"{len(dropped)} pushes were dropped, of {who}")


def _is_newest(client: AsyncClient | None, incarnation: int) -> bool:
    """True if the client is in this incarnation, as far as it knows."""
    return client is not None and client.session is not None and client.incarnation == incarnation


async def _faults(world: OrdinaryWorld, nemesis: SnapshotNemesis) -> None:
    await nemesis.run()
    await world.loop.after(world.options.lease_seconds * world.options.stream("heal").random())
    nemesis.heal()


async def play_phases(world: OrdinaryWorld) -> None:
    """Play all phases of a run, and its end."""
    options, loop = world.options, world.loop
    world.begin()
    rng = options.stream("stops")
    for kind in options.stops:
        faults = loop.create_task(_faults(world, SnapshotNemesis(world)))
        await loop.after(rng.random() * options.stop_seconds)
        if kind:
            await world.stop(kind)
        await faults
        await world.all_finished()
        if options.drains:
            await world.end_a_server()
        await world.save_at_the_end()
        if kind == "all":
            world.phase_ended()
        world.go_on()
    await world.all_finished()
    world.go_on()
    await world.all_finished()
    await world.final_read()


def run(seed: int, options: OrdinaryOptions | None = None, *, trace: bool = False) -> scenario.Result:
    """Run a seed. The environment must be installed."""
    options = options or draw(seed)
    return snapshots.play(options, OrdinaryWorld, play_phases, CONVERGE_SECONDS, trace=trace)[0]


def _has_sent(life: Life, wait: WaitFor, step: int) -> bool:
    """True if the push of a step is in flight. A worker that joined reads the previous step, and then sends its first
    push."""
    before = _step_of(wait)
    push = life.pushes[-1] if life.pushes and (before is None or before >= step) else None
    return push is not None and not push.acked and push.step >= step and push.incarnation == wait.worker.incarnation


def _step_of(wait: WaitFor) -> int | None:
    """Return the awaited step, or None if the wait is not for a step."""
    _, found, after = wait.text.partition(" step ")
    return int(after.split()[0]) if found else None
