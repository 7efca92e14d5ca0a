"""Runs whose scripts train two or three parameter sets in turn, as GANs, actors and critics, and ensembles do.

They behave like the runs of ``ordinary``: stopped by SIGTERM as a whole or in part, resumed, with every fault of the
other runs. The order of steps repeats, or is drawn for each iteration from a random stream that all workers share.
Scripts with a drawn order declare their iterations, and so do some others; psdist infers the iterations of the rest.
In some runs workers are silent for longer than their lease so often that all of them are lost together, and return.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from psdist import BSP
from psdist.client.async_client import AsyncClient
from psdist.client.parameters import AsyncParameters
from psdist.optim import SGD
from psdist_scheduler.decide.effects import MemberLost
from tests.simulation import ordinary, scenario, snapshots
from tests.simulation.environment import RunLoop
from tests.simulation.loop import Node
from tests.simulation.options import REPLICATED, SINGLE
from tests.simulation.oracle import Life
from tests.simulation.ordinary import OrdinaryOptions, OrdinaryWorld
from tests.simulation.scripts import Script
from tests.simulation.set_oracle import Part, SetPush, SetsOracle
from tests.simulation.set_orders import PATTERNS, Order, Vector
from tests.simulation.snapshots import LOSSES

#: Slots for pushes that do not count, as a multiple of those that do.
_SPARE: Final = 3


@dataclass(frozen=True)
class SetsOptions(OrdinaryOptions):
    """Options of a run with several sets; see also OrdinaryOptions. ``steps`` is the number of iterations of a phase.

    names: names of the sets.
    pattern: the sets of each iteration; empty if iterations are drawn.
    declares: True if scripts declare their iterations.
    """

    names: str = "DG"
    pattern: str = "DG"
    declares: bool = False

    @property
    def order(self) -> Order:
        """Order of steps."""
        return Order(self.names, self.pattern, self.seed)

    @property
    def slots(self) -> int:
        """See Options. The number is for each set."""
        return self.workers * self.steps * (len(self.stops) + 2) * self.order.longest * _SPARE


#: Changes to a seed whose workers are silent for longer than their lease, often all together, and return.
SILENCES: Final[dict[str, Any]] = {"busy": 0.5, "busy_leases": 1.6, "worker_lease_seconds": 3.0, "lives": 40}


def draw(seed: int) -> SetsOptions:
    """Return the options of a seed."""
    options = _draw(seed)
    is_silent = random.Random(f"{seed}/absences").random() < 0.1
    return replace(options, **SILENCES) if is_silent and options.workers > 1 else options


def _draw(seed: int) -> SetsOptions:
    rng = random.Random(f"{seed}/sets")
    replicas, workers = rng.choice((1, 1, 2)), rng.choice((1, 2, 2, 2, 3))
    pattern = rng.choice((*PATTERNS, "", ""))
    names = "".join(sorted(set(pattern))) if pattern else rng.choice(("DG", "DGE"))
    peaceful = rng.random() < 0.4
    stops = tuple(rng.choice(("all", "all", "some", "")) for _ in range(rng.choice((1, 1, 2))))
    kinds = [*SINGLE, *LOSSES * 2, *(REPLICATED if replicas > 1 else ()), *("kill worker", "join worker") * 2]
    save_steps = rng.choice((0, 0, 4))
    return SetsOptions(
        seed=seed,
        servers=rng.choice((1, 2)) if replicas == 1 else rng.choice((2, 3)),
        workers=workers,
        replicas=replicas,
        consistency=BSP(),
        optimizer=SGD(lr=1.0, momentum=rng.choice((0.0, 0.5))),
        steps=rng.choice((3, 4, 6)) if len(pattern) < 6 else 3,
        slices=2,
        lives=workers * (len(stops) + 2) + (1 if peaceful else 5),
        think_seconds=rng.choice((0.005, 0.05, 0.2)),
        pulls=rng.choice((0.0, 0.2)),
        bare_pushes=rng.choice((0.0, 0.3)),
        lease_seconds=rng.choice((1.0, 2.0)),
        worker_lease_seconds=rng.choice((3.0, 8.0)),
        delay=rng.choice(((0.0002, 0.001), (0.0005, 0.005), (0.001, 0.03))),
        cut=rng.choice((0.0, 0.0, 0.05)),
        faults=tuple(sorted(set(rng.choices(kinds, k=rng.choice((1, 2, 3)))))),
        fault_count=0 if peaceful else rng.choice((1, 2, 3)),
        fault_seconds=rng.choice((1.5, 4.0)),
        save_steps=save_steps,
        save_seconds=0.0 if save_steps else rng.choice((0.0, 0.3, 1.0)),
        keep_last=rng.choice((1, 3)),
        saves=rng.choice((0.0, 0.0, 0.1)),
        storage_faults=0.0 if peaceful else rng.choice((0.0, 0.0, 0.05)),
        ends=len(stops),
        busy=rng.choice((0.0, 0.0, 0.1)),
        busy_leases=0.8 if peaceful else rng.choice((0.8, 1.6)),
        stops=stops,
        stop_seconds=rng.choice((1.0, 2.0, 4.0)),
        names=names,
        pattern=pattern,
        declares=not pattern or rng.random() < 0.5,
    )


class SetsWorld(OrdinaryWorld):
    """World whose scripts train several parameter sets."""

    oracle: Any

    options: SetsOptions

    def __init__(self, loop: RunLoop, options: SetsOptions) -> None:
        super().__init__(loop, options)
        noise = np.random.default_rng(options.stream("noise").getrandbits(64))
        self.order = options.order
        oracle: Any = SetsOracle(self.order, options.optimizer, options.slices, options.slots, noise)
        self.oracle = loop.oracle = oracle
        #: Parts of each life, by its number and the set.
        self.parts: dict[int, dict[str, Part]] = {}
        #: Position at which the script of each life started its first iteration.
        self._first: dict[int, Vector] = {}
        #: True if a worker was lost, stopped by itself or joined, so that some steps are not made by all workers.
        self.disturbed = False
        self._is_restarting = False
        #: Phase in which workers were asked to end.
        self._stopped = -1
        #: Nodes that drain a server.
        self._drainers: list[Node] = []

    # --- processes ----------------------------------------------------------------------------------------------------

    def start_worker(self, worker: int) -> None:
        """See World."""
        lives = len(self.lives)
        super().start_worker(worker)
        self.disturbed |= worker >= self.options.workers
        for life in self.lives[lives:]:
            parts = {name: Part(life.worker, life.number, name=name) for name in self.order.names}
            for part in parts.values():
                part.phase = life.phase
            self.parts[life.number] = parts

    def kill(self, node: Node, *, silent: bool) -> None:
        """See World."""
        running = any(not life.over and self.worker_nodes.get(life.worker) is node for life in self.lives)
        self.disturbed |= running and not self._is_restarting
        super().kill(node, silent=silent)

    def restart(self) -> None:
        """See SnapshotWorld. Nodes that drain a server end, too."""
        self._is_restarting = True
        for node in self._drainers:
            if not node.dead:
                self.kill(node, silent=False)
        super().restart()
        self._is_restarting = False

    async def _drain(self, server: int, server_id: str) -> None:
        self._drainers.append(self.loop.current())
        await super()._drain(server, server_id)

    def _stop_server(self, server: int) -> None:
        if server in self.server_nodes:
            super()._stop_server(server)

    async def stop(self, kind: str) -> None:
        """See OrdinaryWorld."""
        self._stopped = self.oracle.phase
        self.disturbed |= kind == "some"
        await super().stop(kind)

    def _check_loss(self, news: MemberLost) -> None:
        super()._check_loss(news)
        self.disturbed |= news.role == "worker"

    def _created(self, path: str) -> None:
        self.oracle.is_excused = self._is_excused()
        super()._created(path)

    def _is_excused(self) -> bool:
        """True if psdist may save the sets in the middle of an iteration now."""
        lives = [life for life in self.lives if life.phase == self.oracle.phase]
        ended = self.stopping or not any(life.joined and not life.over for life in lives)
        if ended and not self.options.peaceful:
            return True
        unknown = not self.options.declares and all(len(life.pushes) < 2 * self.order.period + 2 for life in lives)
        return unknown and (ended or self._stopped == self.oracle.phase)

    # --- a worker's script --------------------------------------------------------------------------------------------

    async def _train(self, life: Life) -> None:
        script = self.scripts[life.number]
        script.client = client = await script.call(self._connect(life.worker_id))
        self.clients[life.number] = client
        client.report_waits(lambda: True)
        client.watch_signals(script.handler.read_signals)
        handles = {name: await script.call(self._open_set(client, name)) for name in self.order.names}
        for name, handle in handles.items():
            self._joined_set(life, name, client, handle)
        self.counts["joined"] += 1
        self.created = True
        await self._iterate(script, life, handles)
        await self._close(life, script, "closed")

    async def _open_set(self, client: AsyncClient, name: str) -> AsyncParameters:
        oracle = self.oracle.by_name[name]
        return await client.parameters(
            name,
            init=oracle.tensors(oracle.initial.reshape(-1)),
            optimizer=self.options.optimizer,
            consistency=self.options.consistency,
            slice_elements=oracle.slice_elements,
        )

    def _joined_set(self, life: Life, name: str, client: AsyncClient, handle: AsyncParameters) -> None:
        part = self.parts[life.number][name]
        for one in (life, part):
            one.rank, one.incarnation, one.joined = client.rank, _incarnation_of(handle), True
        part.since = []

    async def _iterate(self, script: Script, life: Life, handles: dict[str, AsyncParameters]) -> None:
        """Make iterations until those of the phase are done."""
        last = sum(self.order.start(self.options.steps * (1 + self.oracle.phase)))
        while True:
            for name, handle in handles.items():
                await self._pull_some(script, life, name, handle)
            if sum(position := self._position(handles)) >= last:
                return
            if max(one.used_slots for one in self.oracle.by_name.values()) > 0.9 * self.options.slots:
                self.counts["ran out of slots"] += 1
                return
            self._note_start(life, handles, position)
            await self._iteration(script, life, handles, position)
            if self._saving.random() < self.options.saves:
                assert script.client is not None
                await script.call(self._save_in_time(script.client, life))

    def _position(self, handles: dict[str, AsyncParameters]) -> Vector:
        return tuple(handle.step for handle in handles.values())

    def _note_start(self, life: Life, handles: dict[str, AsyncParameters], position: Vector) -> None:
        self._first.setdefault(life.number, position)
        incarnations = {_incarnation_of(handle) for handle in handles.values()}
        if len(incarnations) == 1:  # Otherwise one of them lags behind, and its next push is dropped.
            self.oracle.starts_iteration(life.worker_id, *incarnations, position)

    async def _iteration(
        self, script: Script, life: Life, handles: dict[str, AsyncParameters], position: Vector
    ) -> None:
        self._mark(script)
        steps = dict(zip(self.order.names, position, strict=True))
        for number, name in enumerate(self.order.iteration(self.order.first_from(sum(position)))):
            await script.compute(self._think(life))
            if number:  # Before the first one the script chose the iteration.
                await self._pull_some(script, life, name, handles[name])
            await script.call(self._push_set(script, life, name, handles[name], steps[name]))
            steps[name] += 1
        self._mark(script)

    def _mark(self, script: Script) -> None:
        """Mark the boundary of an iteration, as ``Client.iteration`` does."""
        if self.options.declares:
            assert script.client is not None and script.client.session is not None
            script.client.session.alignment.mark_boundary()

    async def _pull_some(self, script: Script, life: Life, name: str, handle: AsyncParameters) -> None:
        if self.workload.random() < self.options.pulls:
            await script.call(self._pull_set(script, life, name, handle))

    async def _pull_set(self, script: Script, life: Life, name: str, handle: AsyncParameters) -> None:
        assert script.client is not None
        part, oracle = self.parts[life.number][name], self.oracle.by_name[name]
        acked = oracle.acked
        weights = oracle.joined(await handle.pull())
        self._note_incarnation(life, name, script.client, handle)
        oracle.saw(part, handle.participation.current.sequence.versions, weights, (), acked)

    async def _push_set(self, script: Script, life: Life, name: str, handle: AsyncParameters, step: int) -> None:
        """Make one push to a set, with the bookkeeping around it. step: the required step."""
        assert script.client is not None
        client, part, oracle = script.client, self.parts[life.number][name], self.oracle.by_name[name]
        acked, before = oracle.acked, handle.statistics()
        self._note_incarnation(life, name, client, handle)  # The set may have followed a push of another one.
        push = oracle.begins(part, handle.step)
        life.pushes.append(push)
        self.oracle.made.append(SetPush(name, push, step))
        handle.lr_factor, handle.settings = oracle.lr_factor(push.step), oracle.settings(push.step)
        gradients, absent, weights = oracle.tensors(oracle.gradient(push.slot)), oracle.absent(push), None
        if self.workload.random() < self.options.bare_pushes:
            await handle.push(gradients, absent=absent)
        else:
            weights = oracle.joined(await handle.push_pull(gradients, absent=absent))
        push.dropped = handle.statistics().dropped > before.dropped
        self.counts["dropped"] += push.dropped
        if self._note_incarnation(life, name, client, handle) and not push.dropped:
            part.since.append(push)
        if not push.dropped:
            oracle.answered(push, 0)
        if weights is not None:
            oracle.saw(part, handle.participation.current.sequence.versions, weights, (), acked)

    def _note_incarnation(self, life: Life, name: str, client: AsyncClient, handle: AsyncParameters) -> bool:
        """Count a worker that rejoined. Returns True if it did."""
        changed = self.parts[life.number][name].incarnation != _incarnation_of(handle)
        if changed:
            self.counts["joined again"] += 1
            self._joined_set(life, name, client, handle)
        return changed

    def _deadlock_found(self, waits: Mapping[Any, Sequence[Any]]) -> None:
        """See OrdinaryWorld. All workers push all sets in one order, so there are no deadlocks."""
        texts = [f"{wait.worker.member_id} {wait.text}" for wait in waits]
        self.oracle.violation(f"workers are said to wait for each other: {texts}")

    # --- the end ------------------------------------------------------------------------------------------------------

    def check_copies(self) -> None:
        """See World."""
        for name in self.order.names:
            self.check_copies_of(name)

    async def _final_read(self) -> None:
        client = await self._connect("reader")
        weights: dict[str, Any] = {}
        versions: dict[str, Any] = {}
        for name in self.order.names:
            handle = await client.parameters(name)
            weights[name] = self.oracle.by_name[name].joined(await handle.pull())
            versions[name] = handle.participation.current.sequence.versions
        await self.oracle.check_commits(self.loop)
        for name, one in self.oracle.by_name.items():
            one.check_last(versions[name], weights[name])
        self._check_all(weights, {name: min(each) for name, each in versions.items()})
        await client.close()

    def _check_all(self, weights: dict[str, Any], versions: dict[str, int]) -> None:
        oracle, options = self.oracle, self.options
        oracle.check_made(weights)
        if not self.disturbed:
            oracle.check_undisturbed(weights, versions, [f"worker-{number}" for number in range(options.workers)])
        if options.peaceful:
            parts = [part for parts in self.parts.values() for part in parts.values()]
            for phase, commits in self.stopped_phases.items():
                oracle.check_stopped(phase, commits, parts)
            dropped = sorted({push.life.worker_id for push in oracle.pushes.values() if push.dropped})
            self._check_left()
            if dropped:
                oracle.violation(f"pushes of {dropped} were dropped in peace")
        if self.bucket.overwritten:
            oracle.violation(f"written again: {self.bucket.overwritten}")

    def _check_left(self) -> None:
        """Check that workers that were asked to end made whole iterations, if psdist could know them."""
        for life in self.lives:
            first = self._first.get(life.number)
            known = self.options.declares or len(life.pushes) >= 2 * self.order.period + 2
            if first is None or not known or not getattr(life, "stopped", False):
                continue
            parts = self.parts[life.number].values()
            made = [sum(push.acked for push in part.pushes) for part in parts]
            position = tuple(step + count for step, count in zip(first, made, strict=True))
            self.counts["left after whole iterations"] += 1
            if self.order.number(position, first) is None:
                self.oracle.violation(f"{life.worker_id} left within an iteration: it began at {first} and made {made}")


def _incarnation_of(handle: AsyncParameters) -> int:
    """Return the incarnation in which the handle pushes."""
    return handle.participation.incarnation


def run(seed: int, options: SetsOptions | None = None, *, trace: bool = False) -> scenario.Result:
    """Run a seed. The environment must be installed."""
    options = options or draw(seed)
    return snapshots.play(options, SetsWorld, ordinary.play_phases, ordinary.CONVERGE_SECONDS, trace=trace)[0]
