"""Cluster of a simulated run: the real scheduler, the real servers and the real client library, one node each.

``World`` starts, kills and restarts these processes as a launcher would. It also holds the workers' script. ``nemesis``
decides which faults happen and when.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
import grpc.aio
import numpy as np

from psdist.client.async_client import AsyncClient
from psdist.client.parameters import AsyncParameters
from psdist.errors import DuplicateMemberError, FencedError, PsdistError, ServerLostError
from psdist.security.tls import Credentials
from psdist.types import ClusterMap, ParametersEntry
from psdist.v1 import scheduler_pb2, scheduler_pb2_grpc
from psdist.wire import status
from psdist_scheduler.decide.cluster import Cluster
from psdist_scheduler.decide.cluster_state import ClusterSettings
from psdist_scheduler.decide.effects import Broadcast, Effect, MemberLost, Publish
from psdist_scheduler.scheduler import Scheduler
from psdist_scheduler.service import Service
from psdist_server.core.replication import BackupReplication
from psdist_server.core.shard import SliceRecord
from psdist_server.server import ParameterServer
from psdist_server.server_session import ServerSession
from psdist_server.service import ServerService
from psdist_server.store.parameter_store import ParameterStore
from tests.simulation import rpc
from tests.simulation.disk import Disk, DiskStore
from tests.simulation.environment import RunLoop
from tests.simulation.loop import Node, where
from tests.simulation.network import Faults, Network
from tests.simulation.options import HARMLESS, Options
from tests.simulation.oracle import Life, Oracle, Push

RUN = "run-sim"
NAME = "p"
SCHEDULER = "10.0.0.1:7000"
KERNEL_THREADS = 2
#: Largest number of times that one cut path may get a worker expelled.
PATH_LOSSES_MAX = 3
#: Number of the read-only worker.
READER = 90


class World:
    """One run. ``options`` configures it; everything else follows from the seed."""

    def __init__(self, loop: RunLoop, options: Options) -> None:
        self.loop = loop
        self.options = options
        self.counts: Counter[str] = Counter()
        faults = Faults(options.delay, options.slow, options.slow_seconds, options.cut)
        loop.network = self.network = Network(loop, options.stream("network"), faults)
        self.network.may_cut = self._may_cut
        loop.entropy = options.stream("entropy")
        loop.kernels = options.stream("kernels")
        self.workload = options.stream("workload")
        self.disk = Disk(options.stream("disk"), RUN, options.disk_seconds)
        noise = np.random.default_rng(options.stream("noise").getrandbits(64))
        self.oracle = Oracle(options.consistency, options.optimizer, options.slices, options.slots, noise)
        loop.oracle = self.oracle
        loop.answered = self.check_tables
        self.scheduler: Scheduler | None = None
        self.scheduler_node: Node | None = None
        self.server_nodes: dict[int, Node] = {}
        self.hosts: dict[int, ParameterServer] = {}
        #: Servers that were drained and stopped.
        self.stopped_servers: set[int] = set()
        self.worker_nodes: dict[int, Node] = {}
        self.lives: list[Life] = []
        #: Lives reserved for workers that are about to be restarted.
        self.promised_lives = 0
        #: Clients by the number of the life that uses them.
        self.clients: dict[int, AsyncClient] = {}
        #: Numbers of workers that have finished their work or are gone for good.
        self.finished: set[int] = set()
        self.created = False
        #: True if the run survives the loss of a server.
        self.lossy = options.replicas > 1
        #: Number of members lost because of a cut path, by member id.
        self._without_path: Counter[str] = Counter()
        #: Errors of workers that learned that the run is lost.
        self.doomed: list[str] = []
        self._changed = asyncio.Event()

    #: Addresses of the schedulers, divided by commas.
    schedulers = SCHEDULER

    # --- starting and ending ------------------------------------------------------------------------------------------

    def start_scheduler(self) -> None:
        """Start a scheduler from the contents of the disk."""
        self.scheduler_node = node = self.loop.node("scheduler", "host-s")
        self.loop.start(node, self.schedule(node, SCHEDULER, DiskStore(self.disk)))

    async def schedule(self, node: Node, address: str, store: DiskStore) -> None:
        """Run a scheduler on ``node``."""
        self.scheduler = scheduler = await self.make_scheduler(store)
        self.counts["scheduler started"] += 1
        carry_out = scheduler.calls.carry_out

        def carry_out_and_tell(effect: Effect) -> None:
            carry_out(effect)
            if isinstance(effect, Publish):
                self.oracle.published(effect.map)
            elif isinstance(effect, Broadcast) and isinstance(effect.news, MemberLost):
                self._check_loss(effect.news)
            if isinstance(effect, Broadcast) and isinstance(effect.news, MemberLost):
                self._note_loss(effect.news)

        scheduler.calls.carry_out = carry_out_and_tell
        rpc.serve(self.network, address, node, Service(scheduler).handler())
        working = [asyncio.create_task(scheduler.tick()), asyncio.create_task(scheduler.run())]
        await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            task.cancel()
        self.scheduler_ended(node, next(error for task in working if task.done() and (error := task.exception())))

    def scheduler_ended(self, node: Node, error: BaseException) -> None:
        """Handle the end of a scheduler by an error."""
        self.oracle.violation(f"{node.name} ended: {error!r}{where(error)}")

    def _note_loss(self, news: MemberLost) -> None:
        """Count a loss caused by a cut path. A worker that cannot reach a server is expelled once and rejoins when it
        can. It may be expelled once more if its server was replaced meanwhile by another one that it cannot reach."""
        if "cannot reach" not in news.reason:
            return
        self.counts[f"{news.role} lost: no path"] += 1
        self._without_path[news.member_id] += 1
        if news.role == "worker" and self._without_path[news.member_id] > PATH_LOSSES_MAX:
            self.oracle.violation(f"{news.member_id} joined again and again without a path: {news.reason}")

    @property
    def only_silences(self) -> bool:
        """True if no fault of this run ends a process, or silences it for longer than its lease."""
        return bool(self.options.faults) and HARMLESS.issuperset(self.options.faults)

    def _check_loss(self, news: MemberLost) -> None:
        """Check that silence alone never causes the loss of a participant."""
        self.counts[f"lost: {news.role}"] += 1
        workers = {life.worker_id for life in self.lives if not life.over}
        assert self.scheduler is not None
        entries = self.scheduler.calls.published.cluster.parameters
        holders = {r.server_id for e in entries if e.ready for s in e.shards for r in (s.primary, *s.backups)}
        runs = news.member_id in workers | holders
        # A member that never opened a session does not participate. ``_note_loss`` checks cut paths.
        runs = runs and not news.reason.startswith("opened no session") and "cannot reach" not in news.reason
        if runs and self.only_silences:
            self.oracle.violation(f"{news.member_id} was expelled though it was only silent: {news.reason}")

    @property
    def settings(self) -> ClusterSettings:
        """Settings of the scheduler."""
        options = self.options
        return ClusterSettings(
            run_id=RUN,
            workers_min=options.workers,
            servers_min=options.servers,
            lease_seconds=options.lease_seconds,
            worker_lease_seconds=options.worker_lease_seconds,
            replicas=options.replicas,
            salt=f"{self.loop.entropy.getrandbits(24):06x}",
        )

    async def make_scheduler(self, store: DiskStore) -> Scheduler:
        """Return a scheduler that resumes from its store."""
        return Scheduler(Cluster(self.settings, store.load(), self.loop.time()), store)

    def start_server(self, number: int) -> None:
        """Start a server, as a new life if this number was used before."""
        self.hosts.pop(number, None)
        self.server_nodes[number] = node = self.loop.node(f"server-{number}", f"host-{number % self.options.hosts}")
        self.loop.start(node, self._serve(node, number))

    async def _serve(self, node: Node, number: int) -> None:
        self.counts["server lives"] += 1
        address = f"10.0.1.{number}:{7000 + self.counts['server lives']}"
        link = ServerSession(
            self.schedulers, Credentials(), address, f"server-{number}" if self.options.replicas == 1 else "", RUN
        )
        try:
            await link.register(60.0)
            host = self.make_host(link)
            self.hosts[number] = host
            rpc.serve(self.network, address, node, ServerService(host).handler())
            self.counts["server started"] += 1
            await link.run(host)
        except PsdistError as error:
            self.counts[f"server ended: {type(error).__name__}"] += 1
            self.judge_server_end(node, error)
            await self.loop.after(0.3)
            self.loop.world_soon(self.server_ended, number, node)

    def judge_server_end(self, node: Node, error: PsdistError) -> None:
        """Check the error that ended a server: it may exit by itself only if the scheduler no longer knows it."""
        if not isinstance(error, FencedError | DuplicateMemberError):
            self.oracle.violation(f"{node.name} ended: {error!r}{where(error)}")

    def make_host(self, link: ServerSession) -> ParameterServer:
        """Return the host of a registered server."""
        return ParameterServer(link.registration, Credentials(), KERNEL_THREADS)

    def server_ended(self, number: int, node: Node) -> None:
        """Restart a server whose process exited by itself, as a launcher would."""
        if not node.dead:
            self.kill(node, silent=False)
            if number not in self.stopped_servers:
                self.start_server(number)

    def can_lose(self, server: int, targeted: set[int]) -> bool:
        """True if ``server`` would be the only loss: all other copies are on live servers that are not ``targeted``. A
        silent server counts as lost even before the scheduler notices."""
        if self.scheduler is None or server not in self.hosts:
            return False
        me = self.hosts[server].me
        good = {
            host.me
            for number, host in self.hosts.items()
            if number != server and number not in targeted and not self.server_nodes[number].dead
        }
        shards = [shard for entry in self.scheduler.cluster.map.parameters for shard in entry.shards]
        left = [{shard.primary, *shard.backups} - {me} for shard in shards]
        return all(others and good.issuperset(others) for others in left)

    def drain(self, server: int) -> bool:
        """Ask the scheduler to drain ``server``, then stop it. Returns False if it cannot be drained now."""
        if len(self.server_nodes) - len(self.stopped_servers) <= self.options.replicas + 1:
            return False
        if server not in self.hosts or server in self.stopped_servers:
            return False
        self.stopped_servers.add(server)
        node = self.loop.node("operator", "host-o")
        self.loop.start(node, self._drain(server, self.hosts[server].me.server_id))
        return True

    async def _drain(self, server: int, server_id: str) -> None:
        stub: Any = scheduler_pb2_grpc.SchedulerServiceStub(rpc.SimChannel(self.network, SCHEDULER))
        while True:
            try:
                async for response in stub.Drain(scheduler_pb2.DrainRequest(run_id=RUN, server_id=server_id)):
                    members = self.scheduler.cluster.members if self.scheduler is not None else None
                    if response.drained and (members is None or not (members.workers or members.staying)):
                        break  # A run whose work is done ends with its last server. Here other workers will return.
                    if response.drained:
                        self.counts["drained"] += 1
                        self.loop.world_soon(self._stop_server, server)
                        return
            except grpc.aio.AioRpcError as error:
                known = status.from_call(error, "scheduler")
                if isinstance(known, ServerLostError) or "no live server" in str(known):  # It was lost meanwhile.
                    self.loop.world_soon(self._stop_server, server)
                    return
            await self.loop.after(0.2)

    def _stop_server(self, server: int) -> None:
        node = self.server_nodes[server]
        if not node.dead:
            self.kill(node, silent=False)

    def kill(self, node: Node, *, silent: bool) -> None:
        """Kill a process (SIGKILL) or, if ``silent``, its host."""
        self.loop.trace(f"kill {node.name}")
        self.loop.crash(node)
        self.network.process_died(node, silent=silent)
        if node is self.scheduler_node:
            self.scheduler = None
        self.disk.crash(node)

    def begin(self) -> None:
        """Start all processes of a new run."""
        self.start_scheduler()
        for number in range(self.options.servers):
            self.start_server(number)
        for worker in range(self.options.workers):
            self.start_worker(worker)

    def start_worker(self, worker: int) -> None:
        """Start a process of this worker."""
        number = len(self.lives)
        steps = self.options.steps
        slots = range(number * steps, (number + 1) * steps)
        life = Life(worker, number, slots)
        self.lives.append(life)
        self.worker_nodes[worker] = node = self.loop.node(f"worker-{worker}", f"host-w{worker}")
        self.loop.start(node, self._work(node, life))

    @property
    def can_start_worker(self) -> bool:
        """True if there are slots for another life."""
        return len(self.lives) + self.promised_lives < self.options.lives

    def steps_left(self, worker: int) -> int:
        """Return the number of steps that a new life of the worker has to make."""
        done = sum(len(life.pushes) for life in self.lives if life.worker == worker)
        return max(1, self.options.steps - done)

    # --- a worker's script --------------------------------------------------------------------------------------------

    async def _work(self, node: Node, life: Life) -> None:
        try:
            await self._train(life)
        except ServerLostError as error:
            self.doomed.append(f"{life.worker_id}: {error}")
            self._end_worker(node, life, for_good=True)
        except PsdistError as error:
            self.oracle.violation(f"{life.worker_id} ended: {error!r}{where(error)}")
            self._end_worker(node, life, for_good=False)
        else:
            self._end_worker(node, life, for_good=True)

    def _end_worker(self, node: Node, life: Life, *, for_good: bool) -> None:
        """End the worker's process. A launcher restarts a failed one."""
        life.over = True
        self.loop.world_soon(self._worker_ended, node, life.worker, for_good)

    def _worker_ended(self, node: Node, worker: int, for_good: bool) -> None:
        if not node.dead:
            self.kill(node, silent=False)
        if not for_good and self.can_start_worker:
            self.start_worker(worker)
        else:
            self.finish(worker)

    def finish(self, worker: int) -> None:
        """Mark this worker as finished."""
        self.finished.add(worker)
        self._changed.set()

    async def all_finished(self) -> None:
        """Wait until every worker is finished."""
        while not {life.worker for life in self.lives} <= self.finished:
            self._changed.clear()
            await self._changed.wait()

    async def _connect(self, worker_id: str) -> AsyncClient:
        while True:
            client = AsyncClient(
                self.schedulers, "", run_id=RUN, worker_id=worker_id, transport="grpc", connect_timeout=300.0
            )
            try:
                return await client.connect()
            except DuplicateMemberError:  # The scheduler does not know yet that the previous life is over.
                self.counts["registered too early"] += 1
                await self.loop.after(0.3)

    async def _open(self, client: AsyncClient) -> AsyncParameters:
        oracle, options = self.oracle, self.options
        return await client.parameters(
            NAME,
            init=self.tensors_of(oracle.initial.reshape(-1)),
            optimizer=options.optimizer,
            consistency=options.consistency,
            slice_elements=oracle.slice_elements,
        )

    def tensors_of(self, vector: Any) -> dict[str, Any]:
        """Return a whole vector as the tensors of the parameter set."""
        return self.oracle.tensors(vector)

    def vector_of(self, tensors: dict[str, Any]) -> Any:
        """Return all tensors as one vector."""
        return self.oracle.joined(tensors)

    async def _train(self, life: Life) -> None:
        steps = self.steps_left(life.worker)
        client = await self._connect(life.worker_id)
        self.clients[life.number] = client
        handle = await self._open(client)
        self._joined(life, client, handle)
        self.created = True
        for _ in range(steps):
            await self.loop.after(self.workload.expovariate(1.0) * self.options.think_seconds)
            await self._step(client, life, handle)
        life.over = True
        await client.close()

    def start_reader(self) -> None:
        """Start a process that does not participate and reads continually."""
        life = Life(READER, -1, range(0))
        self.worker_nodes[READER] = node = self.loop.node(life.worker_id, "host-r")
        self.loop.start(node, self._follow(life))

    async def _follow(self, life: Life) -> None:
        try:
            client = await self._connect(life.worker_id)
            handle = await client.parameters(NAME)
            while True:
                await self.loop.after(self.workload.expovariate(1.0) * 0.15)
                await self._read(client, life, handle)
        except PsdistError as error:
            self.oracle.violation(f"the reader ended: {error!r}{where(error)}")

    def _joined(self, life: Life, client: AsyncClient, handle: AsyncParameters) -> None:
        life.rank, life.incarnation, life.joined = client.rank, _incarnation(handle), True
        life.clock, life.since = self._clock(life), []
        self.counts["joined"] += 1

    def _clock(self, life: Life) -> int | None:
        """Return the clock at which the worker joined, or None if the scheduler no longer knows it."""
        entry = self.scheduler.cluster.map.entry(NAME) if self.scheduler is not None else None
        for member in entry.members if entry is not None else ():
            if (member.worker_id, member.incarnation) == (life.worker_id, life.incarnation):
                return member.first_step
        return None

    async def _step(self, client: AsyncClient, life: Life, handle: AsyncParameters) -> None:
        """Make one push, with the reads and bookkeeping around it."""
        how = self.workload.random()
        if how < self.options.pulls:
            await self._read(client, life, handle)
        await self._before_push(life, handle)
        others, acked = self.members_beside(life, client.session.membership.view.cluster), self.oracle.acked
        before = handle.statistics()
        push = self.oracle.begins(life, handle.step)
        handle.lr_factor, handle.settings = self.oracle.lr_factor(push.step), self.oracle.settings(push.step)
        weights = await self._push(handle, push)
        after = handle.statistics()
        if after.dropped > before.dropped:
            self.counts["dropped"] += 1
            push.dropped = True
            self._joined(life, client, handle)
        else:
            self.counts["resumed"] += after.resumed > before.resumed
            if handle.is_member and life.incarnation != _incarnation(handle):
                self._joined(life, client, handle)
                life.since.append(push)
            self._acked(life, handle, push, after.ignored - before.ignored)
        if weights is not None:
            self._saw(life, handle, weights, others, acked)

    async def _before_push(self, life: Life, handle: AsyncParameters) -> None:
        """Prepare the next push: here it has only a gradient."""

    async def _push(self, handle: AsyncParameters, push: Push) -> Any:
        """Send a push. Returns the new weights, or None if it does not ask for them."""
        gradients, absent = self.tensors_of(self.oracle.gradient(push.slot)), self.oracle.absent(push)
        if self.workload.random() < self.options.bare_pushes:
            await handle.push(gradients, absent=absent)
            return None
        return self.vector_of(await handle.push_pull(gradients, absent=absent))

    def _acked(self, life: Life, handle: AsyncParameters, push: Push, ignored: int) -> None:
        # After a lost answer, a slice answers the repeated push with "ignored" although it has applied the push.
        self.counts["said to be ignored"] += ignored > 0
        self.oracle.answered(push, 0)
        self.counts["resent"] += handle.statistics().resent > 0

    async def _read(self, client: AsyncClient, life: Life, handle: AsyncParameters) -> None:
        others, acked = self.members_beside(life, client.session.membership.view.cluster), self.oracle.acked
        weights = await handle.pull()
        if handle.is_member and life.incarnation != _incarnation(handle):
            self.counts["joined again by a pull"] += 1
            self._joined(life, client, handle)
        self._saw(life, handle, self.vector_of(weights), others, acked)

    def _saw(
        self, life: Life, handle: AsyncParameters, weights: Any, others: list[tuple[Life, int]], acked: list[Push]
    ) -> None:
        # A paused script may look at its weights long after they arrived, when others have rejoined.
        now = self.members_beside(life, self.scheduler.cluster.map) if self.scheduler is not None else []
        still = [other for other, incarnation in others if (other, incarnation) in now]
        self.oracle.saw(life, handle.participation.current.sequence.versions, weights, still, acked)

    def members_beside(self, life: Life, cluster: ClusterMap) -> list[tuple[Life, int]]:
        """Return the other lives that participate according to a map, with their incarnations.

        A worker that reads is promised the pushes of the members of its own map. A server that has not heard of a newer
        member either answers without that member's pushes.
        """
        entry = cluster.entry(NAME)
        now = {member.worker_id: member.incarnation for member in entry.members} if entry is not None else {}
        return [
            (other, other.incarnation)
            for other in self.lives
            if other is not life and other.joined and not other.over and now.get(other.worker_id) == other.incarnation
        ]

    # --- the end ------------------------------------------------------------------------------------------------------

    async def final_read(self) -> None:
        """Read and check the final weights through a client that did not participate."""
        node = self.loop.node("reader", "host-r")
        await self.loop.start(node, self._final_read())
        while self.scheduler is None or (self.options.replicas > 1 and not self.is_whole()):
            await self.loop.after(0.2)
        self.check_copies()

    def is_whole(self) -> bool:
        """True if each shard has all of its copies and all servers follow the current map."""
        if self.scheduler is None:
            return False
        cluster = self.scheduler.cluster.map
        shards = [shard for entry in cluster.parameters for shard in entry.shards]
        whole = all(len(shard.backups) == self.options.replicas - 1 and not shard.filling for shard in shards)
        living = [host for number, host in self.hosts.items() if not self.server_nodes[number].dead]
        holders = {replica for shard in shards for replica in shard.replicas}
        # A server may be dead before the scheduler notices.
        return (
            whole
            and holders <= {host.me for host in living}
            and all(host.admission.map.epoch == cluster.epoch for host in living)
        )

    def check_copies(self) -> None:
        """Check that all copies of a shard, and their tables, are equal byte for byte."""
        self.check_copies_of(NAME)
        for host in self.hosts.values():
            store = host.stores.get(NAME)
            for index in store.router.indices if store is not None else ():
                weights = store.dense.export_weights(index)
                slots = np.flatnonzero(weights[: self.oracle.slots]).tolist()
                lags = store.dense.lags.of(index)
                self.oracle.check_lags(f"at {host.me}", index, slots, lags)

    def check_copies_of(self, name: str) -> None:
        """Compare the copies of one parameter set."""
        assert self.scheduler is not None
        hosts = {host.me: host for number, host in self.hosts.items() if not self.server_nodes[number].dead}
        entry = self.scheduler.cluster.map.entry(name)
        assert entry is not None
        for number, shard in enumerate(entry.shards):
            primary = hosts[shard.primary].admission.store(name)
            for replica in shard.backups:
                copy = hosts[replica].admission.store(name)
                self.counts["copies compared"] += 1
                for index in range(number, entry.slicing.count, len(entry.shards)):
                    if primary.dense.digest(index) != copy.dense.digest(index):
                        self.oracle.violation(f"slice {index} differs between {shard.primary} and {replica}")
                    self._check_records(
                        index, primary.router.machine_of(index).record(index), copy.backups.machines[number], entry
                    )

    def check_tables(self, primary: ParameterStore, index: int) -> None:
        """Compare the records of an idle slice at its primary and at each copy while workers are running. Records must
        agree if both sides have applied the same updates by the same members."""
        number = index % len(primary.entry.shards)
        shard, machine = primary.router.machines[number], primary.replicator.machines[number]
        if shard.slices[index].busy:
            return
        for host in self.hosts.values():
            copy = host.stores.get(primary.entry.spec.name)
            other = copy.backups.machines.get(number) if copy is not None else None
            if copy is None or other is None or copy.entry.members != primary.entry.members:
                continue
            if (other.primary, other.term) != (primary.me, machine.term) or index in other.awaited:
                continue
            mine = shard.record(index)
            if index in other.records and other.records[index].version == mine.version:
                self.counts["tables compared"] += bool(mine.producers or mine.contributors)
                self._check_records(index, mine, other, primary.entry)

    def _check_records(self, index: int, mine: SliceRecord, machine: BackupReplication, entry: ParametersEntry) -> None:
        """Compare the records of two replicas about producers that may continue; those about other producers may
        differ."""
        other = machine.records[index]
        known = entry.producers
        tables = [{key: n for key, n in r.producers.items() if key in known} for r in (mine, other)]
        if (mine.version, mine.contributors, tables[0]) != (other.version, other.contributors, tables[1]):
            self.oracle.violation(f"the record of slice {index} is {mine}, and at a copy {other}")

    async def _final_read(self) -> None:
        client = await self._connect("reader")
        handle = await client.parameters(NAME)
        weights = self.vector_of(await handle.pull())
        self.oracle.check_end(handle.participation.current.sequence.versions, weights)
        await client.close()

    def _may_cut(self, client: str, server: str, method: str) -> bool:
        """True if a stream of this method may be cut. Sessions may not: a session is a membership, and its end frees
        everything that the member holds."""
        if method.endswith("/Session") or client == "reader":
            return False
        return not (method.endswith("/Register") and client.startswith("server"))


def _incarnation(handle: AsyncParameters) -> int:
    """Return the incarnation in which the handle pushes; the client's may already be newer."""
    return handle.participation.incarnation
