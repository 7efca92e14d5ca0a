"""Workers of a script with several sets, held by the scheduler at any moment, with arbitrary message delays.

All sets stop at the start of the same iteration, and nobody waits forever. SEEDS is the number of runs; a failure
names its seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from psdist.client.core import program_order
from psdist.client.core.program_order import ProgramOrder
from psdist.client.core.push_sequence import PushSequence
from psdist.consistency import BSP
from psdist_scheduler.decide import alignment
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_events import AlignReported
from psdist_scheduler.decide.cluster_state import Member
from psdist_scheduler.decide.effects import AlignCommand
from tests.support.scheduler_driver import Driver, caller

SEEDS = int(os.environ.get("SEEDS", "60"))
#: Repeating orders, given as the sets of an iteration; None is an order that depends on data, and is declared.
ORDERS = ("DG", "DDDDDG", "DGE", "DDGDGE", None)


def iteration_of(seed: int, order: str | None, number: int) -> str:
    """Return the sets of an iteration, in the order of their steps."""
    rng = random.Random(f"{seed}/{number}")
    return order or "".join(rng.choice("DGE") for _ in range(rng.randrange(1, 6)))


@dataclass
class Worker:
    """Script of one worker, up to its unanswered push."""

    member: Member
    order: ProgramOrder
    iteration: int
    pushes: list[str]
    waits: str = ""
    held: int = 0
    until: int | None = None
    commands: list[AlignCommand] = field(default_factory=list)
    reports: list[AlignReported] = field(default_factory=list)

    def allows(self) -> bool:
        """See ``WorkerAlignment._allows``."""
        if not self.held:
            return True
        return self.order.is_inside if self.until is None else self.order.position < self.until

    def report(self, session: int) -> None:
        s = self.order.standing
        steps = tuple(sorted(s.next.items()))
        self.reports.append(AlignReported(session, self.held, s.position, s.start, s.period, s.is_declared, steps))


class Run(Driver):
    """Run whose servers are one vector of versions: a step is applied once all members have pushed it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.rng = seed, random.Random(seed)
        self.kind = self.rng.choice(ORDERS)
        self.names = sorted(set(self.kind or "DGE"))
        self.join("server")
        self.versions = dict.fromkeys(self.names, 0)
        members = [self.join()[0] for _ in range(self.rng.choice((1, 2, 3)))]
        for name in self.names:
            for member in members:
                self.create(member, name=name)
            self.ask(ev.CommitParameters, members[0], name)
        self.workers = [self.begin(member, dict.fromkeys(self.names, 0), 0) for member in members]
        self.counts: Counter[str] = Counter()
        #: By vector of steps, the iteration that starts there.
        self.starts = {self.key(self.versions): 0}
        self._seen: Counter[int] = Counter()

    def key(self, steps: dict[str, int]) -> tuple[int, ...]:
        return tuple(steps[name] for name in self.names)

    def begin(self, member: Member, steps: dict[str, int], iteration: int) -> Worker:
        order = ProgramOrder()
        for name in self.names:
            order.enter(name, PushSequence(1, BSP(), steps[name]))
        return Worker(member, order, iteration, [])

    def session(self, worker: Worker) -> int:
        return self.cluster.members.sessions.call_of(worker.member.member_id)

    def deliver(self) -> None:
        """Deliver the commands that were sent."""
        for worker in self.workers:
            session = self.session(worker)
            news = [value for value in self.told[session] if isinstance(value, AlignCommand)]
            worker.commands += news[self._seen[session] :]
            self._seen[session] = len(news)

    def move(self, worker: Worker) -> bool:
        """Let this worker do one thing. Return False if there is nothing to do."""
        if worker.commands and self.rng.random() < 0.5:
            command = worker.commands.pop(0)
            worker.held, worker.until = (0, None) if command.release else (command.number, command.until)
            if not command.release:
                worker.report(self.session(worker))
            return True
        if worker.reports and self.rng.random() < 0.5:
            self.on(worker.reports.pop(0))
            return True
        return self.step(worker) or bool(worker.commands or worker.reports)

    def step(self, worker: Worker) -> bool:
        """Move the script to its next push, or answer its push."""
        order = worker.order
        if worker.waits:
            sequence = order.sequences[worker.waits]
            if self.versions[worker.waits] <= sequence.step:
                return False
            push = sequence.begin_push()
            push.answer(0, push.number + 1)
            sequence.end_push(push, seen=True)
            worker.waits = ""
            return True
        if not worker.pushes:
            if self.kind is None:
                order.mark_boundary()
                if worker.held:
                    worker.report(self.session(worker))
            worker.pushes = list(iteration_of(self.seed, self.kind, worker.iteration))
            worker.iteration += 1
            return True
        if not worker.allows():
            return False
        worker.waits = worker.pushes.pop(0)
        order.begin_push(worker.waits)
        order.sequences[worker.waits].send(0)
        if not worker.pushes:
            self.starts[self.key({name: one.next for name, one in order.sequences.items()})] = worker.iteration
        if worker.held and not worker.allows():
            worker.report(self.session(worker))
        self.apply()
        return True

    def apply(self) -> None:
        for name in self.names:
            if self.workers and all(w.order.sequences[name].next > self.versions[name] for w in self.workers):
                self.versions[name] += 1

    def churn(self) -> None:
        """Add or lose a worker, or request a cut."""
        what = self.rng.choice(("join", "lose", "cut"))
        align = self.cluster.alignment
        if what == "join" and len(self.workers) < 5 and not self.joining:
            member, _ = self.join()
            self.create(member, name=self.names[0])
            self.joining = member
        elif what == "lose" and len(self.workers) > 1:
            worker = self.workers.pop(self.rng.randrange(len(self.workers)))
            self.counts["lost within an iteration"] += bool(worker.pushes or worker.waits)
            self.on(ev.Leave(self.number(), caller(worker.member), "failed"))
            self.apply()
        elif what == "cut":
            align.want("cut")
            self.on(ev.Tick())

    joining: Member | None = None

    def check(self) -> None:
        """Check that the agreed steps start an iteration, and that nothing after them is applied."""
        align = self.cluster.alignment
        vector = align.vector
        if vector is None:
            return
        assert self.key(vector) in self.starts, (self.seed, vector)
        assert self.versions == vector, (self.seed, self.versions, vector)
        self.counts["aligned"] += 1
        self.counts[f"aligned in {self.kind or 'a declared order'}"] += 1
        if self.joining is not None:
            member = self.joining
            session = self.cluster.members.sessions.call_of("server-0")
            for proposal in [v for v in self.told[session] if isinstance(v, ef.JoinProposal)][-len(self.names) :]:
                self.on(ev.JoinAnswered(session, proposal.proposal_id, True, 0))
            firsts = {
                entry.spec.name: m.first_step
                for entry in self.map.parameters
                for m in entry.members
                if m.worker_id == member.member_id
            }
            if firsts:
                assert firsts == vector, (self.seed, firsts, vector)
                self.counts["joined"] += 1
                self.workers.append(self.begin(member, vector, self.starts[self.key(vector)]))
                self.joining = None
        align.release("cut")
        self.on(ev.Tick())

    def play(self) -> None:
        for turn in range(600):
            if turn < 500 and self.rng.random() < 0.02:
                self.churn()
            self.deliver()
            self.rng.shuffle(self.workers)
            moved = [self.move(worker) for worker in list(self.workers) if self.rng.random() < 0.7]
            self.check()
            if moved and not any(moved):
                self.tick(alignment.RETRY_SECONDS + 0.25)


@pytest.mark.parametrize("first", [0])
def test_all_sets_stop_at_one_start_of_an_iteration(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + SEEDS):
        run = Run(seed)
        before = dict(run.versions)
        run.play()
        assert sum(run.versions.values()) > sum(before.values()) + 20, f"seed {seed} is stuck at {run.versions}"
        counts += run.counts
    print(dict(counts))
    kinds = [f"aligned in {kind or 'a declared order'}" for kind in ORDERS]
    missing = [what for what in ("joined", "lost within an iteration", *kinds) if not counts[what]]
    assert not missing, f"no run came across {missing}"


def _keeps_members(put: pytest.MonkeyPatch) -> None:
    current = alignment.Alignment._current_participants
    put.setattr(alignment.Alignment, "_current_participants", lambda self: self._participants or current(self))


def _accepts_at_once(put: pytest.MonkeyPatch) -> None:
    def accept(self: Any) -> None:
        period = self.count - self._borders[-1]
        if self.count > period:
            self.pattern, self._names, self._borders = tuple(self._names[:period]), [], []

    put.setattr(program_order.PeriodFinder, "_accept", accept)


def _stops_anywhere(put: pytest.MonkeyPatch) -> None:
    put.setattr(alignment.Alignment, "_choose", lambda self: min(r.position for r in self._reports.values()))


@pytest.mark.parametrize(
    "take_away", [pytest.param(_keeps_members, marks=pytest.mark.long), _accepts_at_once, _stops_anywhere]
)
def test_a_missing_safeguard_is_seen(take_away: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(150):
            run = Run(seed)
            run.play()
            assert sum(run.versions.values()) > 20, f"seed {seed} is stuck"
