"""Runs of groups for collectives whose members die, freeze, lose their links, and are added.

Each worker has the real mesh, exchanges and machines, over simulated links (``peer_links``). The scheduler's part is
the real ``GroupFormations`` over the real membership. Workers make calls that follow from the seed, the epoch of their
group and a number. After an error they reconfigure the group, and join it again if the others continued without them.

Checked: A call that returns a result has exactly the reduction over the members of its group. All members of an epoch
know the same members. An error names a rank that a fault has hit. Memory of a failed call is not written to again, and
later values in it reach nobody. Once the faults are over, all live workers are in one group, and make calls in it. If
others have ended their scripts, so that too few can come for a group, they end with an error that says so. Nothing is
left over of groups and links that have ended.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from psdist.client.session.membership import Registration, WorkerMembership
from psdist.client.session.waits import WaitTracker
from psdist.collectives.group import AsyncWorkerGroup
from psdist.collectives.workers import AsyncCollectives
from psdist.errors import (
    ClosedError,
    CollectiveMismatchError,
    ExcludedError,
    FencedError,
    LateWorkerError,
    PsdistError,
    WaitTimeoutError,
    WorkerLeftError,
    WorkerLostError,
)
from psdist.types import ClusterMap, WorkerEntry
from psdist.v1 import scheduler_pb2 as pb
from psdist_scheduler import conversions
from psdist_scheduler.decide.cluster_state import ClusterSettings, Member
from psdist_scheduler.decide.formations import RETURN_SECONDS, GroupFormations
from psdist_scheduler.decide.members import Membership
from tests.simulation import group_stand_ins
from tests.simulation.environment import RunLoop
from tests.simulation.group_calls import KINDS, SIZES, data_of, expected_result, make_call
from tests.simulation.group_options import END, TELLING, GroupOptions, draw
from tests.simulation.group_requests import LossyCalls
from tests.simulation.loop import Deadlock, Failed, Node, TooLong
from tests.simulation.peer_links import PeerNetwork, SimListener
from tests.simulation.scenario import Result, tear_down

#: Virtual seconds within which all live workers make calls in one group, once all faults are over.
CONVERGE_SECONDS: Final = 25.0
#: Calls that every worker must make then.
_CALLS_AT_END: Final = 4
#: Seconds without a sign of life after which the scheduler expels a worker, and after which peers count it as lost.
_LEASE_SECONDS: Final = 3.0
_SILENCE_SECONDS: Final = 0.4
#: Every so many calls the members agree on whether new workers wait.
_ADMIT_EVERY: Final = 3
_GARBAGE: Final = -12345
#: Longest pauses before a call, in seconds, if the script does not think: in a group of one, whose calls take no time,
#: and once all faults are over, when the workers wait for leases and not for calls.
_PAUSE_ALONE: Final = 0.005
_PAUSE_AT_END: Final = 0.02


def run(seed: int, options: GroupOptions | None = None, *, trace: bool = False) -> Result:
    """Run a seed. The environment must be installed."""
    options = options or draw(seed)
    started = time.process_time()
    loop = RunLoop(options.stream("schedule"), options.handle_seconds)
    loop.lines = [] if trace else None
    undo = group_stand_ins.install()
    from tests.simulation.group_steps import StepWorld  # It imports this module.

    world = (StepWorld if options.steps else GroupWorld)(loop, options)
    violations: list[str] = []
    begun = loop.time()
    try:
        loop.run(world.main(), options.fault_seconds + 10 + 2 * world.converge_seconds)
    except (Deadlock, TooLong) as error:
        violations.append(f"no end: {error}; {world.state()}")
    except Failed:
        pass
    except Exception as error:
        violations.append(f"the run failed: {error!r}")
    result = Result(
        seed, options, [*world.violations, *violations], loop.trace_hash, world.counts + world.network.counts,
        loop.time() - begun, loop.steps, 0.0, loop.lines or [],
    )  # fmt: skip
    tear_down(loop)
    result.violations += loop.failures
    undo()
    result.cpu_seconds = time.process_time() - started
    return result


async def _no_stop() -> None:
    """Stand-in for ``WorkerSession.outlast_stop``: workers of these runs are not asked to end."""


@dataclass(eq=False)
class _Life:
    """One process of a worker. number: of its process."""

    number: int
    node: Node
    member: Member
    membership: WorkerMembership
    heard: float
    collectives: AsyncCollectives | None = None
    group: AsyncWorkerGroup | None = None
    #: Results since the faults ended.
    calls_at_end: int = 0
    #: True if its script has ended, and the scheduler knows it.
    has_left: bool = False
    #: True if it makes a call that the others do not make, gives its next call up, or limits its time.
    odd: str = ""

    @property
    def is_live(self) -> bool:
        return not self.node.dead


class GroupWorld:
    """One run: workers, the scheduler's part, faults, and checks."""

    def __init__(self, loop: RunLoop, options: GroupOptions) -> None:
        self.loop, self.options = loop, options
        self.network = PeerNetwork(loop, options.stream("links"), options.delay)
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.lives: list[_Life] = []
        self.is_healed = False
        self.converge_seconds = CONVERGE_SECONDS + (RETURN_SECONDS if END in options.faults else 0.0)
        self._rng = options.stream("world")
        self._settings = ClusterSettings("run")
        self._members = Membership(self._settings, (), loop.time())
        self._formations = GroupFormations(self._members)
        self._is_scheduler_up = True
        self._epoch = 0
        #: Members of each epoch, as the first of them knew it; and workers that a fault has hit, by id.
        self._known: dict[tuple[str, int], tuple[tuple[str, int], ...]] = {}
        self._struck: dict[str, float] = {}
        #: Groups, by name and epoch, in which a script made an odd call.
        self._odd: set[tuple[str, int]] = set()
        loop.peers = self.network
        loop.nodes_by_pid = {}
        loop.network = SimpleNamespace(counts=self.counts)  # type: ignore[assignment]
        loop.entropy = options.stream("entropy")

    def state(self) -> str:
        """Progress of all live workers."""
        lines = []
        for life in self.lives:
            if life.is_live:
                waits = (
                    [wait.sentence for wait in life.collectives._session.waits.open_waits.values()]
                    if life.collectives
                    else []
                )
                epoch = life.group.epoch if life.group else None
                lines.append(f"{life.member} epoch {epoch}, {life.calls_at_end} calls at the end, {waits}")
        return "; ".join(lines)

    async def main(self) -> None:
        """Faults while the workers make calls, then none, and calls of all workers in one group."""
        for rank in range(self.options.workers):
            self.start(rank)
        expelling = self.loop.create_task(self._expel_silent(), context=self.loop.world.context)
        await self.loop.after(self._rng.random() * 0.3)
        nemesis = self.options.stream("nemesis")
        for _ in range(self.options.fault_count):
            await self._strike(nemesis.choice(self.options.faults), nemesis)
            await self.loop.after(nemesis.random() * self.options.fault_seconds / max(1, self.options.fault_count))
        self._heal()
        until = self.loop.time() + self.converge_seconds
        while not self._has_converged():
            if self.loop.time() > until:
                self.violations.append(f"no calls of all workers in one group: {self.state()}")
                break
            await self.loop.after(0.05)
        expelling.cancel()
        self._check_leftovers()

    # --- workers ------------------------------------------------------------------------------------------------------

    def start(self, rank: int) -> None:
        """Start a worker's process."""
        number = len(self.lives)
        host = f"host-{number % 2}" if self.options.pairs else f"host-{number}"
        node = self.loop.node(f"worker-{rank}/{number}", host)
        self.loop.nodes_by_pid[number] = node
        member = self._register(rank, number)
        membership = WorkerMembership("the scheduler", WaitTracker(), rejoins=True)
        life = _Life(number, node, member, membership, self.loop.time())
        self.lives.append(life)
        self.loop.start(node, self._script(life))

    def _register(self, rank: int, number: int) -> Member:
        former = [member for member in self._members.all if member.member_id == f"worker-{rank}"]
        incarnation = former[0].incarnation + 1 if former else 1
        if former and former[0].live:
            self._members.lose(former[0].member_id, "another one registered", self.loop.time())
        member = Member(f"worker-{rank}", "worker", incarnation, rank, self.options.workers, f"a:{number}")
        self._members.add(member, self.loop.time())
        self._publish()
        return member

    def _publish(self) -> None:
        """Send the map to all workers."""
        self._epoch += 1
        workers = tuple(WorkerEntry(m.member_id, m.incarnation, m.rank, m.address) for m in self._members.workers)
        cluster = ClusterMap("run", self._epoch, workers=workers)
        for life in self.lives:
            if life.is_live:
                self._send_map(life, cluster)

    def _send_map(self, life: _Life, cluster: ClusterMap) -> None:
        def deliver() -> None:
            if self.network.is_cut("scheduler", life.node.host):
                self.loop.call_later(0.05, deliver, context=self.loop.world.context)
            else:
                self.loop.call_on(life.node, self._on_map, life, cluster)

        self.loop.call_later(self.network.delay(), deliver, context=self.loop.world.context)

    def _on_map(self, life: _Life, cluster: ClusterMap) -> None:
        mine = life.member.member_id, life.member.incarnation
        if life.membership.view.fenced is None and mine not in [(w.worker_id, w.incarnation) for w in cluster.workers]:
            if self._members.is_live(*mine) or cluster.epoch < life.membership.view.cluster.epoch:
                return  # Older than its registration.
            life.membership.on_expelled(FencedError(f"{life.member} was fenced; register again"), "silent")
            self.counts["a worker was expelled"] += 1
            self.loop.create_task(self._rejoin(life), context=life.node.context)
        else:
            life.membership.view.on_map(cluster)

    async def _rejoin(self, life: _Life) -> None:
        await self.loop.after(self.network.delay())
        while self.network.is_cut(life.node.host, "scheduler") or self.network.is_cut("scheduler", life.node.host):
            await self.loop.after(0.05)
        life.member, life.heard = self._register(life.member.rank, life.number), self.loop.time()
        self._begin(life)

    def _begin(self, life: _Life) -> None:
        """Begin the incarnation that was registered."""
        member = life.member
        life.membership._registration = Registration(
            "run", member.member_id, member.incarnation, member.rank, self.options.workers, _LEASE_SECONDS, 0.2
        )
        workers = tuple(WorkerEntry(m.member_id, m.incarnation, m.rank, m.address) for m in self._members.workers)
        life.membership.view.start_incarnation(ClusterMap("run", self._epoch, workers=workers))

    async def _script(self, life: _Life) -> None:
        await self.loop.after(self.network.delay())
        self._begin(life)
        waits, listener = WaitTracker(), SimListener(self.network, life.node, life.member.address)
        registrar, calls = SimpleNamespace(listener=listener), LossyCalls(self, life)
        session: Any = SimpleNamespace(
            membership=life.membership, waits=waits, calls=calls, registrar=registrar,
            outlast_stop=_no_stop,
        )  # fmt: skip
        life.collectives = AsyncCollectives(session)
        self.loop.create_task(self._beat(life), context=life.node.context)
        try:
            await self.work(life)
        except (LateWorkerError, WorkerLeftError) as error:
            self._judge(life, error)
            self.loop.call_later(0.0, self._end, life, "failed", context=self.loop.world.context)

    def _end(self, life: _Life, reason: str = "closed") -> None:
        """End a worker's script and its process. The scheduler learns of it if the worker reaches it."""
        life.has_left = self.is_reachable(life) and self._members.is_live(
            life.member.member_id, life.member.incarnation
        )
        if life.has_left:
            self._members.leave(life.member.member_id, reason, self.loop.time())
            self._publish()
        self.loop.crash(life.node)
        self.network.on_crash(life.node)

    async def work(self, life: _Life) -> None:
        """Make calls, forever."""
        while True:
            try:
                life.group = await self.join(life)
                self._entered(life)
                while True:
                    await self._calls_of_group(life)
                    assert life.group is not None
                    life.group = await life.group.reconfigure(admit=self._rng.random() < 0.8)
                    self._entered(life)
            except (ExcludedError, FencedError) as error:
                self._judge(life, error)
            except ClosedError:  # The mesh of an incarnation that has ended.
                await self.loop.after(0.01)

    async def join(self, life: _Life) -> AsyncWorkerGroup:
        """Join the group, or form it with others."""
        assert life.collectives is not None
        life.group, size = None, self.options.workers
        return await life.collectives.join_group(
            "g", size=size, size_min=min(self.options.size_min, size), silence=_SILENCE_SECONDS
        )

    async def _beat(self, life: _Life) -> None:
        """Heartbeats to the scheduler."""
        while True:
            if not self.network.is_cut(life.node.host, "scheduler"):
                life.heard = self.loop.time()
            await self.loop.after(0.2)

    async def _expel_silent(self) -> None:
        """The scheduler's leases, and the ends of sessions of processes that have died."""
        while True:
            await self.loop.after(0.05)
            if not self._is_scheduler_up:
                continue
            now = self.loop.time()
            for life in self.lives:
                member, is_dead = life.member, life.node.dead and not self.network.is_cut(life.node.host, "scheduler")
                if not self._members.is_live(member.member_id, member.incarnation):
                    continue
                if is_dead or now - life.heard > _LEASE_SECONDS:
                    self._members.lose(member.member_id, "silent", now)
                    self._publish()

    # --- calls --------------------------------------------------------------------------------------------------------

    def _entered(self, life: _Life) -> None:
        """Check that all members of an epoch know the same members."""
        group = life.group
        assert group is not None
        members = tuple((m.worker_id, m.incarnation) for m in group._runner.members)
        known = self._known.setdefault(("g", group.epoch), members)
        if known != members:
            self.violations.append(f"epoch {group.epoch} has members {known}, and at {life.member} {members}")
        self.counts[f"groups of {group.size}"] += 1
        self.loop.trace(f"{life.node.name} is in epoch {group.epoch} of {members}")

    async def _calls_of_group(self, life: _Life) -> None:
        """Make calls until an error, or until all members admit new workers. Checks each result."""
        group = life.group
        assert group is not None
        number = 0
        try:
            while True:
                await self.think(group)
                if number % _ADMIT_EVERY == _ADMIT_EVERY - 1 and await self._agree_to_admit(life, group):
                    self.counts["all members admitted new workers"] += 1
                    return
                await self._call(life, group, number)
                number += 1
                life.calls_at_end += self.is_healed
        except (WorkerLostError, CollectiveMismatchError, WaitTimeoutError, ClosedError) as error:
            self.loop.trace(f"{life.node.name}: {error}")
            self._judge(life, error)
            if life.membership.view.fenced is not None:
                raise life.membership.view.fenced from None

    async def think(self, group: AsyncWorkerGroup) -> None:
        """Pause before a call."""
        at_least = _PAUSE_AT_END if self.is_healed else _PAUSE_ALONE if group.size == 1 else 0.0
        if seconds := max(self.options.think_seconds, at_least):
            await self.loop.after(self._rng.random() * seconds)

    async def _agree_to_admit(self, life: _Life, group: AsyncWorkerGroup) -> bool:
        waiting = 0
        if group.rank == 0:
            try:
                waiting = await group.count_newcomers()
            except PsdistError:
                waiting = 0
        return bool((await group.all_reduce(np.array([waiting]), "max"))[0])

    async def _call(self, life: _Life, group: AsyncWorkerGroup, number: int) -> None:
        rng = random.Random(f"{self.options.seed}/call {group.epoch}/{number}")
        kind, size = rng.choice(KINDS), rng.choice(SIZES)
        odd, life.odd = life.odd, ""
        timeout = None
        if odd:
            self._odd.add(("g", group.epoch))
            self.counts[f"a script made an odd call: {odd}"] += 1
            kind = "gather" if odd == "other call" else kind
            timeout = 0.02 if odd in ("time limit", TELLING) else None
        given = data_of(group.epoch, number, group.rank, size, group.size)
        out = np.zeros_like(expected_result(kind, group.epoch, number, group.rank, size, group.size))
        sent = given if kind == "reduce_scatter" else given[0].copy() if group.size else given
        work = make_call(group, kind, sent, out, timeout)
        try:
            if odd == "give up":
                async with asyncio.timeout(0.0005):
                    await work
            else:
                await work
        except (PsdistError, TimeoutError) as error:
            if odd == TELLING:
                await self._die_telling(life)
            sent[...] = _GARBAGE
            out[...] = _GARBAGE
            await self.loop.after(self._rng.random() * 0.05)
            if (out != _GARBAGE).any():
                self.violations.append(f"{life.member}: memory of a failed {kind} was written to")
            if isinstance(error, TimeoutError) and not isinstance(error, PsdistError):
                raise ClosedError("given up") from None
            raise
        expected = expected_result(kind, group.epoch, number, group.rank, size, group.size)
        self.counts[f"results of {kind}"] += 1
        if out.tobytes() != expected.tobytes():
            self.violations.append(f"{life.member}: {kind} {number} of epoch {group.epoch} has a wrong result")

    async def _die_telling(self, life: _Life) -> None:
        """Kill a worker whose group has ended, while it tells the others, and start it again later."""
        await self.loop.after(self._rng.random() * 2 * self.options.delay[1])
        self._hit(life)
        self.loop.call_later(0.5, self.start, life.member.rank, context=self.loop.world.context)
        self.loop.crash(life.node)
        self.network.on_crash(life.node)
        await self.loop.after(0.0)

    def _judge(self, life: _Life, error: PsdistError) -> None:
        """Check that an error has a cause."""
        self.counts[f"raised: {type(error).__name__}"] += 1
        now = self.loop.time()
        struck = {name for name, at in self._struck.items() if now - at < 15.0}
        match error:
            case WorkerLostError():
                assert life.group is not None
                lost = life.group._runner.members[int(error.details["rank"])]
                if lost.worker_id not in struck:
                    self.violations.append(f"{life.member}: {error}, and no fault has hit {lost.worker_id}")
            case CollectiveMismatchError() | WaitTimeoutError():
                assert life.group is not None
                if ("g", life.group.epoch) not in self._odd:
                    self.violations.append(f"{life.member}: {error} without a cause")
            case LateWorkerError() | WorkerLeftError():
                if self._could_come() >= max(self.options.workers, self.options.size_min):
                    self.violations.append(f"{life.member}: {error}, and enough workers can come")
            case ExcludedError() | FencedError():
                if life.member.member_id not in struck:
                    self.violations.append(f"{life.member}: {error}, and no fault has hit it")

    # --- faults -------------------------------------------------------------------------------------------------------

    def _hit(self, *lives: _Life) -> None:
        for life in lives:
            self._struck[life.member.member_id] = self.loop.time() + 5.0

    async def _strike(self, kind: str, rng: random.Random) -> None:
        live = [life for life in self.lives if life.is_live and not life.node.paused]
        if not live:
            return
        victim, other = rng.choice(live), rng.choice(live)
        self.counts[f"fault: {kind}"] += 1
        self.loop.trace(f"{kind} {victim.node.name}")
        match kind:
            case "kill" | "kill and start again":
                if kind == "kill" and len(live) <= max(1, self.options.size_min):
                    return
                self._hit(victim)
                self.loop.crash(victim.node)
                self.network.on_crash(victim.node)
                if kind != "kill":
                    await self.loop.after(rng.choice((0.01, 0.5)))
                    self.start(victim.member.rank)
            case "end of script":
                self._hit(victim)
                self._end(victim)
            case "freeze" | "freeze briefly":
                self._hit(victim)
                self.loop.pause(victim.node)
                seconds = 0.1 if kind != "freeze" else rng.choice((1.0, 2 * _LEASE_SECONDS))
                self.loop.call_later(seconds, self._thaw, victim, context=self.loop.world.context)
            case "starve":
                victim.node.starved_seconds = 0.02
                self.loop.call_later(1.0, self._feed, victim, context=self.loop.world.context)
            case "cut host off":
                hosts = {life.node.host for life in self.lives} | {"scheduler"}
                self._cut([(victim.node.host, host) for host in sorted(hosts)], rng)
            case "cut from scheduler":
                self._cut([(victim.node.host, "scheduler")], rng)
            case "cut one path":
                self._cut([(victim.node.host, other.node.host)], rng)
            case "cut one direction":
                self._cut([(victim.node.host, other.node.host)], rng, both=False)
            case "restart scheduler":
                self._is_scheduler_up = False
                await self.loop.after(rng.choice((0.01, 0.6)))
                self._formations = GroupFormations(self._members, is_restored=True)
                for life in self.lives:
                    life.heard = self.loop.time()
                self._is_scheduler_up = True
            case "join":
                rank = 1 + max(life.member.rank for life in self.lives)
                if rank < self.options.workers + 2:
                    self.start(rank)
            case _:
                victim.odd = kind

    def _cut(self, pairs: list[tuple[str, str]], rng: random.Random, both: bool = True) -> None:
        cut = {pair for pair in pairs if pair[0] != pair[1]}
        cut |= {(target, source) for source, target in cut} if both else set()
        hosts = {host for pair in cut for host in pair}
        self._hit(*(life for life in self.lives if life.node.host in hosts))
        self.network.cuts |= cut
        seconds = rng.choice((0.2, 1.0, 2 * _LEASE_SECONDS))
        self.loop.call_later(seconds, self._mend, cut, context=self.loop.world.context)

    def _mend(self, cut: set[tuple[str, str]]) -> None:
        self.network.cuts -= cut

    def _thaw(self, victim: _Life) -> None:
        self._hit(victim)
        if victim.node.paused:
            self.loop.resume(victim.node)

    def _feed(self, victim: _Life) -> None:
        victim.node.starved_seconds = 0.0

    def _heal(self) -> None:
        """End all faults."""
        self.network.cuts.clear()
        for life in self.lives:
            life.odd = ""
            if life.is_live:
                self._thaw(life)
                self._feed(life)
        self.is_healed = True
        for life in self.lives:
            life.calls_at_end = 0

    # --- the end ------------------------------------------------------------------------------------------------------

    def _has_converged(self) -> bool:
        live = [life for life in self.lives if life.is_live]
        if len(live) < self.options.size_min:
            return not live or self._could_come() >= self.options.size_min
        if len(live) < self.options.workers and all(life.group is None for life in live):
            # A first group, also after the loss of all members, needs as many workers as the run had.
            return not live or self._could_come() >= self.options.workers
        epochs = {life.group.epoch if life.group is not None else -1 for life in live}
        sizes = {life.group.size for life in live if life.group is not None}
        return len(epochs) == 1 and sizes == {len(live)} and all(life.calls_at_end >= _CALLS_AT_END for life in live)

    def _could_come(self) -> int:
        """Return how many workers a group could have if launchers start all again that were killed."""
        newest = {life.member.rank: life for life in self.lives}
        return sum(not life.has_left for life in newest.values())

    def _check_leftovers(self) -> None:
        for life in self.lives:
            if not life.is_live or life.collectives is None or self.violations:
                continue
            mesh = life.collectives._former.mesh
            kept = {
                "groups": len(mesh._groups), "early frames": len(mesh._early), "links": len(mesh._outgoing),
                "accepted links": len(mesh._incoming), "tasks": sum(not task.done() for task in life.node.tasks),
            }  # fmt: skip
            most = {"groups": 3, "early frames": 40, "links": 8, "accepted links": 8, "tasks": 12}
            for name, count in kept.items():
                if count > most[name]:
                    self.violations.append(f"{life.member} keeps {count} {name}")

    # --- the scheduler ------------------------------------------------------------------------------------------------

    def is_reachable(self, life: _Life) -> bool:
        """True if a worker's request reaches the scheduler, and the answer comes back."""
        host = life.node.host
        return self._is_scheduler_up and not (
            self.network.is_cut(host, "scheduler") or self.network.is_cut("scheduler", host)
        )

    def form(self, request: pb.FormGroupRequest) -> pb.FormGroupResponse:
        """Carry out a request at the scheduler."""
        event: Any = conversions.REQUESTS["FormGroup"](1, request)
        worker = self._members.check_caller(event.caller)
        (answer,) = self._formations.form(event, worker, self.loop.time())
        self._formations.validate()
        response: pb.FormGroupResponse = conversions.response(pb.FormGroupResponse, answer.value, None)
        return response
