"""Random scripts of calls of groups, messages and barriers, in other orders at some workers, over any network: the
scheduler ends exactly those waits that can never end.

Real: the groups' machines, the workers' reports, and the scheduler. Scripts are deterministic, so that a run in which
everything arrives immediately shows which waits end.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from psdist.client.core.push_sequence import SnapshotMarks
from psdist.client.session.waits import Activities, AwaitedCall, GroupCalls, ReportedWait
from psdist.collectives.core import plans
from psdist.collectives.core.machine import COLLECTIVES, CallDone, CallLane, Effect, GroupMachine, SendCall, SendPart
from psdist.collectives.core.plans import Plan
from psdist.collectives.group_runner import CallCounts
from psdist.errors import MutualWaitError, PsdistError
from psdist.types import WorkerEntry
from psdist.v1 import scheduler_pb2 as pb
from psdist_scheduler import conversions
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.effects import CheckCall, DeadlockFound
from psdist_scheduler.decide.waits import Deadlocks, WaitFor
from tests.support.scheduler_driver import Driver, caller

SEEDS = 120
SIZE = 3


@dataclass(frozen=True)
class Op:
    """Call of a script.

    kind: "barrier" is the client's; "later" is a collective that the script does not wait for; "any" a message that its
        target takes from any rank, and "any later" one that its script does not wait for.
    tag: of a message.
    """

    kind: str
    group: int = 0
    source: int = 0
    target: int = 0
    tag: int = 0


class Group:
    """One group at one worker: all workers, in the order of their ranks."""

    def __init__(self, worker: Worker, number: int) -> None:
        self.worker, self.key = worker, b"%d" % number
        self.machine = GroupMachine(worker.rank, SIZE)
        self.counts = CallCounts(self.machine)
        self.counts.open(self.key, worker.world.members)
        #: Calls that have ended, and waits for messages of any rank.
        self.ended: set[int] = set()
        self.takers: dict[Any, Any] = {}

    def start(self, lane: CallLane, plan: Plan) -> int:
        call_id, effects = self.machine.start(lane, plan)
        self.counts.made(lane, plan)
        self.carry_out(effects)
        return call_id

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, CallDone):
                self.ended.add(effect.call_id)
                continue
            assert isinstance(effect, SendCall | SendPart)
            assert isinstance(effect, SendCall), "the arrays are small"
            self.worker.world.send(self.worker.rank, effect.peer, self.key, effect)
            self.carry_out(self.machine.on_sent(effect.peer, effect.lane, effect.call_id))

    def hear(self, peer: int, call: SendCall) -> None:
        self.counts.heard(call.lane, peer)
        self.carry_out(self.machine.on_call(peer, call.lane, call.number, call.header, call.data))

    def need(self, call_id: int) -> pb.Activity.GroupCall | None:
        if call_id in self.ended:
            return None
        return self.counts.need(call_id)

    def awaited(self, call_id: int) -> AwaitedCall:
        return AwaitedCall(partial(self.need, call_id), self.end)

    def awaited_message(self, tag: int) -> AwaitedCall:
        return AwaitedCall(partial(self.counts.need_message, tag), self.end)

    def end(self, error: PsdistError) -> None:
        raise AssertionError(f"the test ends with the first deadlock: {error}")


class Worker:
    """One worker, and its script."""

    def __init__(self, world: World, rank: int, script: list[Op]) -> None:
        self.world, self.rank, self.script, self.position = world, rank, script, 0
        self.calls = GroupCalls()
        marks = SnapshotMarks()
        self.activities = Activities(lambda: marks, self.calls)
        self.activities.is_alone = lambda: True
        self.calls.is_awaited = lambda task: task is self.waiting
        self.calls.lacks = self.lacks
        self.groups: dict[bytes, Group] = {}
        self.early: list[tuple[int, bytes, SendCall]] = []
        #: Waits for messages of any rank that the script does not wait for.
        self.taking: list[tuple[Group, str, int]] = []
        #: The call that the script waits for: a group with the call's id, or with a tag, or a barrier's wait.
        self.waiting: tuple[Group, int] | tuple[Group, str, int] | ReportedWait | None = None

    def group(self, number: int) -> Group:
        """Return a group, and make it first if it is new."""
        key = b"%d" % number
        if key not in self.groups:
            self.groups[key] = Group(self, number)
            early, self.early = self.early, []
            for frame in early:
                self.hear(*frame)
        return self.groups[key]

    def hear(self, peer: int, key: bytes, call: SendCall) -> None:
        if key in self.groups:
            self.groups[key].hear(peer, call)
        else:
            self.early.append((peer, key, call))

    def lacks(self, check: pb.CheckCall) -> bool:
        group = self.groups.get(check.group)
        return group is None or group.counts.lacks(check, int(check.worker_id.removeprefix("worker-")))

    @property
    def takes_any(self) -> bool:
        """True if the script waits for a message of any rank."""
        return isinstance(self.waiting, tuple) and len(self.waiting) == 3

    @property
    def is_blocked(self) -> bool:
        """True if the script waits. Ends a wait that is over."""
        for taken in list(self.taking):
            if (call_id := self.take(*taken)) is not None:
                self.taking.remove(taken)
                waiting = taken[0], call_id
                self.calls._tasks[waiting] = waiting, taken[0].awaited(call_id)  # type: ignore[index, assignment]  # no task
        if isinstance(self.waiting, tuple) and len(self.waiting) == 3:
            if (call_id := self.take(*self.waiting)) is None:
                return True
            self.wait_for(self.waiting[0], call_id)
        if isinstance(self.waiting, tuple) and len(self.waiting) == 2:
            group, call_id = self.waiting
            if call_id not in group.ended:
                return True
            self.calls._tasks.pop(self.waiting)  # type: ignore[call-overload]  # no task
            self.waiting = None
            self.position += 1
        return self.waiting is not None or self.position == len(self.script)

    def released(self) -> None:
        """End the barrier that the script waits at."""
        assert isinstance(self.waiting, ReportedWait)
        self.activities.ended(self.waiting)
        self.waiting = None
        self.position += 1

    def step(self) -> None:
        """Make the next call."""
        op = self.script[self.position]
        if op.kind == "barrier":
            self.waiting = self.activities.waits(limited=False, call=True)
            self.activities.began(self.waiting)
            self.world.arrive(self, str(op.group), self.waiting.activity)
            return
        group, data = self.group(op.group), np.ones(2, np.float32)
        if op.kind in ("any", "any later") and self.rank == op.target:
            waiting = group, op.kind, op.tag
            self.calls._tasks[waiting] = waiting, group.awaited_message(op.tag)  # type: ignore[index, assignment]  # no task
            group.takers[waiting] = group.counts.taking()
            group.takers[waiting].__enter__()
            if op.kind == "any":
                self.waiting = waiting
            else:
                self.taking.append(waiting)
                self.position += 1
            return
        if op.kind in ("message", "any", "any later"):
            plan = plans.send(data, op.target) if self.rank == op.source else _received(op.source)
            call_id = group.start(CallLane(op.source, op.target, op.tag), plan)
        else:
            call_id = group.start(COLLECTIVES, plans.barrier(self.rank, SIZE))
        self.wait_for(group, call_id)
        if op.kind == "later":
            self.waiting = None
            self.position += 1

    def take(self, group: Group, kind: str, tag: int) -> int | None:
        """Receive a message of any rank. Returns the call's id; None if there is no message."""
        if (source := group.machine.announced(tag)) is None:
            return None
        del self.calls._tasks[group, kind, tag]
        group.takers.pop((group, kind, tag)).__exit__(None, None, None)
        return group.start(CallLane(source, self.rank, tag), _received(source))

    def wait_for(self, group: Group, call_id: int) -> None:
        self.waiting = waiting = group, call_id
        self.calls._tasks[waiting] = waiting, group.awaited(call_id)  # type: ignore[index, assignment]  # no task


def _received(source: int) -> Plan:
    return plans.receive(np.ones(2, np.float32), source)


@dataclass
class World:
    """Workers, links and the scheduler. told: waits that the scheduler has ended, by rank and position."""

    scripts: list[list[Op]]
    told: set[tuple[int, int]] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.driver = Driver(workers_min=SIZE)
        joined = [self.driver.join() for _ in range(SIZE)]
        self.sessions = [session for _, session in joined]
        self.identities = [member for member, _ in joined]
        self.members = [WorkerEntry(one.member_id, one.incarnation, one.rank) for one in self.identities]
        self.workers = [Worker(self, rank, script) for rank, script in enumerate(self.scripts)]
        #: Deliveries in order, by link.
        self.links: dict[Any, deque[Callable[[], None]]] = {}
        self.arrivals: dict[int, Worker] = {}

    def post(self, link: Any, deliver: Callable[[], None]) -> None:
        self.links.setdefault(link, deque()).append(deliver)

    def send(self, rank: int, peer: int, key: bytes, call: SendCall) -> None:
        self.post((rank, peer), lambda: self.workers[peer].hear(rank, key, call))

    def schedule(self, event: ev.Event) -> None:
        """Let the scheduler process an event."""
        for effect in self.driver.cluster.on(event, self.driver.now):
            if isinstance(effect, ef.Refuse):
                assert isinstance(effect.error, MutualWaitError), effect
                self.note(self.arrivals[effect.call].rank)
            elif isinstance(effect, ef.Answer) and isinstance(effect.value, ef.Done):
                self.post(("answer", effect.call), self.arrivals[effect.call].released)
            elif isinstance(effect, ef.Answer) and isinstance(effect.value, DeadlockFound):
                self.note(self.sessions.index(effect.call))
            elif isinstance(effect, ef.Answer) and isinstance(effect.value, CheckCall):
                self.counts["questions"] += 1
                rank = self.sessions.index(effect.call)
                check = conversions.command(effect.value).check_call
                self.post(("down", rank), lambda rank=rank, check=check: self.asked(rank, check))  # type: ignore[misc]

    def note(self, rank: int) -> None:
        self.told.add((rank, self.workers[rank].position))

    def asked(self, rank: int, check: pb.CheckCall) -> None:
        _ = self.workers[rank].is_blocked
        if self.workers[rank].activities.holds(check):
            self.report(rank, pb.SessionRequest(call_checked=check))

    def report(self, rank: int, request: pb.SessionRequest) -> None:
        self.post(("up", rank), lambda: self.schedule(conversions.session_event(self.sessions[rank], request)))

    def beat(self, rank: int) -> None:
        _ = self.workers[rank].is_blocked
        heartbeat = pb.SessionRequest.Heartbeat(activity=self.workers[rank].activities.report())
        self.report(rank, pb.SessionRequest(heartbeat=heartbeat))

    def arrive(self, worker: Worker, name: str, activity: pb.Activity) -> None:
        call = self.driver.number()
        self.arrivals[call] = worker
        who, waits = caller(self.identities[worker.rank]), conversions._activity(activity)
        event = ev.EnterBarrier(call, who, name, 1, 0, activity=waits)
        self.post(("call", call), lambda: self.schedule(event))

    def settle(self) -> None:
        """Continue until nothing moves."""
        moved = True
        while moved:
            moved = False
            for link in list(self.links.values()):
                while link:
                    link.popleft()()
                    moved = True
            for worker in self.workers:
                while not worker.is_blocked:
                    worker.step()
                    moved = True

    @property
    def positions(self) -> list[int]:
        return [worker.position for worker in self.workers]


def draw_scripts(rng: random.Random) -> list[list[Op]]:
    """Return the workers' scripts: the same calls, of which some workers swap some."""
    scripts: list[list[Op]] = [[] for _ in range(SIZE)]
    for number in range(rng.randrange(2, 8)):
        kind = rng.choice(("collective", "collective", "later", "message", "message", "any", "any later", "barrier"))
        source, target = rng.sample(range(SIZE), 2)
        group = number if kind == "barrier" else rng.randrange(3)
        for rank, script in enumerate(scripts):
            if kind not in ("message", "any", "any later") or rank in (source, target):
                # A message of any rank has a tag of its own, so that the course does not depend on the network.
                tag = group if kind == "message" else 100 + number
                script.append(Op(kind, group, source, target, tag))
    for script in scripts:
        for at in range(len(script) - 1):
            if rng.random() < 0.15:
                script[at], script[at + 1] = script[at + 1], script[at]
    return scripts


def run(seed: int) -> tuple[list[str], World]:
    """Run a seed. Returns the violations."""
    rng = random.Random(seed)
    scripts = draw_scripts(rng)
    ideal = World(scripts)
    ideal.settle()
    blocked = {(rank, at) for rank, at in enumerate(ideal.positions) if at < len(scripts[rank])}
    world = World(scripts)
    #: How often a link delivers: some are much slower than the reports.
    speeds: dict[Any, float] = {}
    for _ in range(400):
        match rng.randrange(4):
            case 0:
                worker = rng.choice(world.workers)
                if not worker.is_blocked:
                    worker.step()
            case 1:
                world.beat(rng.randrange(SIZE))
            case 2:
                world.schedule(ev.Tick())
            case _:
                for link, queue in list(world.links.items()):
                    if queue and rng.random() < speeds.setdefault(link, rng.choice((0.02, 0.3, 1.0))):
                        queue.popleft()()
        if world.told:
            break
    for _ in range(4):
        if not world.told:
            world.settle()
            for rank in range(SIZE):
                world.beat(rank)
            world.settle()
            world.schedule(ev.Tick())
    violations = [f"rank {rank} would continue at {at}" for rank, at in world.told - blocked]
    # A script that has ended might still send a message of any rank, for all that the scheduler knows.
    may_continue = len(blocked) < SIZE and any(worker.takes_any for worker in ideal.workers)
    if blocked and not world.told and not may_continue:
        violations.append(f"not found: {sorted(blocked)}")
    world.counts["deadlocks" if blocked else "runs that end"] += 1
    return violations, world


def test_exactly_the_waits_that_never_end_are_ended() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        violations, world = run(seed)
        assert not violations, f"seed {seed}: {violations}"
        counts += world.counts
    assert min(counts[kind] for kind in ("deadlocks", "runs that end", "questions")) > SEEDS / 10, counts


ABLATIONS = {
    "a worker is asked before a wait for its call counts": (Deadlocks, "_unconfirmed", lambda *_: []),
    "messages on the way are counted": (CallCounts, "heard", lambda *_: None),
    "a worker says only that it lacks a call if it has not made it": (CallCounts, "lacks", lambda *_: True),
    "calls in a cycle are ended": (Deadlocks, "on_checked", lambda *_: None),
    "a message of any rank may come from each": (WaitFor, "takes_any", False),
    "a wait beside the script takes messages": (CallCounts, "taking", nullcontext),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_ablations_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*ABLATIONS[name])
    assert any(run(seed)[0] for seed in range(SEEDS)), "no seed has found it"
