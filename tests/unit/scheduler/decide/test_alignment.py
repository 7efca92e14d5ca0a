"""Workers of several sets are held at one start of an iteration, and join all sets there or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from psdist.consistency import ASP, BSP
from psdist.optim import SGD
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.alignment import Alignment
from psdist_scheduler.decide.cluster_events import AlignReported, ResumePush
from psdist_scheduler.decide.cluster_state import Member
from psdist_scheduler.decide.effects import AlignCommand
from tests.support.scheduler_driver import Driver, caller


@dataclass(frozen=True)
class At:
    """A worker's progress. The script makes a step of D and one of G in each iteration."""

    d: int
    g: int
    period: int = 2
    declared: bool = False

    @property
    def start(self) -> int | None:
        position = self.d + self.g
        return position - position % 2 if self.period or self.declared else None


class Run(Driver):
    """A run of two servers and ``workers`` workers that train D and G."""

    def __init__(self, workers: int = 2, **settings: Any) -> None:
        super().__init__(workers_min=workers)
        self.servers = [self.join("server") for _ in range(2)]
        self.workers = [self.join()[0] for _ in range(workers)]
        for name in ("D", "G"):
            for worker in self.workers:
                self.create(worker, name=name, **settings)
            self.ask(ev.CommitParameters, self.workers[0], name)

    def session(self, worker: Member) -> int:
        return self.cluster.members.sessions.call_of(worker.member_id)

    def commands(self, worker: Member) -> list[AlignCommand]:
        return [value for value in self.told[self.session(worker)] if isinstance(value, AlignCommand)]

    def stands(self, worker: Member, at: At) -> None:
        """A worker reports where it is."""
        number = self.commands(worker)[-1].number
        report = AlignReported(
            self.session(worker), number, at.d + at.g, at.start, at.period, at.declared, (("D", at.d), ("G", at.g))
        )
        self.on(report)

    def all_stand(self, at: At) -> None:
        for worker in self.workers:
            self.stands(worker, at)

    def joins(self) -> Member:
        """A worker registers and creates D."""
        worker, _ = self.join()
        self.asked = self.create(worker, name="D")
        return worker

    def expel(self, *workers: Member) -> list[Member]:
        """These workers are lost, and register again."""
        for worker in workers:
            self.on(ev.SessionClosed(self.session(worker), "its session broke"))
        return [self.join(member_id=worker.member_id, rank=worker.rank)[0] for worker in workers]

    def returns(self, worker: Member, name: str, step: int) -> int:
        """An expelled worker asks for one of its sets, to continue its push."""
        return self.create(worker, name=name, resume=ResumePush(1, step))

    def proposals(self, session: int) -> list[ef.JoinProposal]:
        return [value for value in self.told[session] if isinstance(value, ef.JoinProposal)]

    def answer(self, count: int = 2, *, accepted: bool = True) -> None:
        """Servers answer their newest ``count`` proposals."""
        for _, session in self.servers:
            for proposal in self.proposals(session)[-count:]:
                self.on(ev.JoinAnswered(session, proposal.proposal_id, accepted, 0 if accepted else 9))

    def first_steps(self, worker: Member) -> dict[str, int]:
        return {
            entry.spec.name: member.first_step
            for entry in self.map.parameters
            for member in entry.members
            if member.worker_id == worker.member_id
        }


def test_a_joiner_becomes_a_member_of_all_sets_in_one_epoch() -> None:
    run = Run()
    zero, one = run.workers
    joiner = run.joins()
    assert run.state(run.asked) == ef.Waiting("for the other workers to reach the start of an iteration")
    assert run.commands(zero) == run.commands(one) == [AlignCommand(run.commands(zero)[0].number)]
    run.stands(zero, At(8, 7))
    assert len(run.commands(zero)) == 1, "the other has not said where it is"
    run.stands(one, At(7, 7))  # The pushes of `zero` wait for it: nothing of its iteration is applied.
    assert run.commands(zero)[-1].until == 14
    assert run.state(run.asked) == ef.Waiting("for server-0, server-1 to agree on step 7 of 'D'")
    session = run.servers[0][1]
    assert {(p.parameters, p.member.first_step) for p in run.proposals(session)} == {("D", 7), ("G", 7)}
    proposal = run.proposals(session)[0]
    for _, server in run.servers:
        run.on(ev.JoinAnswered(server, proposal.proposal_id, True, 0))
    assert not run.first_steps(joiner), "all or none"
    run.answer()
    assert run.first_steps(joiner) == {"D": 7, "G": 7}
    assert run.commands(zero)[-1].release and run.commands(one)[-1].release
    assert any("joins 'G' at step 7" in note for note in run.notes)
    # The script creates G next, and is answered without another word to the others.
    call = run.create(joiner, name="G")
    assert run.state(call).first_step == 7 and run.commands(zero)[-1].release


def test_workers_that_are_all_inside_an_iteration_finish_it() -> None:
    """One worker that knows the order is enough."""
    run = Run()
    joiner = run.joins()
    for worker, period in zip(run.workers, (0, 2), strict=True):
        run.stands(worker, At(8, 7, period))
    assert [run.commands(worker)[-1].until for worker in run.workers] == [16, 16]
    assert not run.proposals(run.servers[0][1])
    run.all_stand(At(8, 8))
    run.answer()
    assert run.first_steps(joiner) == {"D": 8, "G": 8}


def test_declared_iterations_are_waited_for() -> None:
    run = Run()
    joiner = run.joins()
    run.all_stand(At(8, 7, 0, declared=True))
    assert run.commands(run.workers[0])[-1].until is None, "nobody knows where the iteration ends"
    run.stands(run.workers[0], At(8, 8, 0, declared=True))
    assert run.commands(run.workers[1])[-1].until == 16
    run.stands(run.workers[1], At(8, 8, 0, declared=True))
    run.answer()
    assert run.first_steps(joiner) == {"D": 8, "G": 8}


def test_an_order_without_iterations_is_refused_with_its_remedy() -> None:
    run = Run()
    joiner = run.joins()
    run.all_stand(At(8, 7, 0))
    assert any("with context.iteration()" in note for note in run.notes)
    assert not run.first_steps(joiner) and not run.proposals(run.servers[0][1])


def test_another_set_that_is_trained_makes_them_choose_again() -> None:
    run = Run()
    alignment = run.cluster.alignment
    alignment.want("test")
    run.tick()
    run.all_stand(At(4, 4))
    assert alignment.vector == {"D": 4, "G": 4} and alignment.is_opened
    for worker in run.workers:
        run.create(worker, name="E")
    run.ask(ev.CommitParameters, run.workers[0], "E")
    assert alignment.names == ("D", "G", "E") and alignment.vector is None, "it says nothing of E"


def test_a_refusal_withdraws_all_sets_and_looks_for_another_start() -> None:
    run = Run()
    joiner = run.joins()
    run.all_stand(At(7, 7))
    first = run.proposals(run.servers[0][1])[0]
    run.on(ev.JoinAnswered(run.servers[0][1], first.proposal_id, False, 8))
    withdrawn = [value for value in run.told[run.servers[1][1]] if isinstance(value, ef.WithdrawJoin)]
    assert {news.parameters for news in withdrawn} == {"D", "G"}
    run.all_stand(At(8, 8))
    run.answer()
    assert run.first_steps(joiner) == {"D": 8, "G": 8}


def test_a_worker_that_is_lost_changes_the_choice() -> None:
    run = Run()
    zero, one = run.workers
    run.joins()
    run.stands(zero, At(8, 7))
    number = run.commands(zero)[-1].number
    run.on(ev.Leave(run.number(), caller(one), "failed"))
    # Without it the push that `zero` has begun is applied.
    assert run.commands(zero)[-1].number > number and run.commands(zero)[-1].until is None
    run.stands(zero, At(8, 7))
    assert run.commands(zero)[-1].until == 16
    assert not run.proposals(run.servers[0][1])


def test_a_joiner_that_is_gone_releases_the_others() -> None:
    run = Run()
    joiner = run.joins()
    run.on(ev.Leave(run.number(), caller(joiner), "failed"))
    assert run.commands(run.workers[0])[-1].release


def test_workers_that_return_to_empty_sets_join_all_of_them_where_they_are() -> None:
    """Each set by itself could accept one worker at its push and another one later, in different iterations."""
    run = Run()
    zero, one = run.expel(*run.workers)
    server = run.servers[0][1]
    run.on(ev.Heartbeat(server, versions=(("D", 3), ("G", 1))))
    run.returns(one, "D", 2)
    run.tick()
    first, second = run.proposals(server)[-2:]
    assert {(p.parameters, p.member.first_step, p.member.origin) for p in (first, second)} == {("D", 3, 0), ("G", 1, 0)}
    run.on(ev.JoinAnswered(server, first.proposal_id, False, 4))  # The server's heartbeat is older.
    assert {(p.parameters, p.member.first_step) for p in run.proposals(server)[-2:]} == {("D", 4), ("G", 1)}
    run.answer()
    assert run.first_steps(one) == {"D": 4, "G": 1}
    run.returns(zero, "G", 1)
    assert not run.first_steps(zero) and run.commands(one)[-1].until is None, "it follows at the start of an iteration"


def test_a_worker_that_returns_alone_continues_its_pushes() -> None:
    run = Run()
    zero, one = run.workers
    run.on(ev.SessionClosed(run.session(one), "its session broke"))
    (zero,) = run.expel(zero)
    run.returns(zero, "D", 3)
    run.answer(1)
    assert run.first_steps(zero) == {"D": 3}
    one, _ = run.join(member_id=one.member_id, rank=one.rank)
    asked = len(run.proposals(run.servers[0][1]))
    call = run.returns(one, "D", 3)
    assert len(run.proposals(run.servers[0][1])) == asked, "it waits until the other one has joined all sets"
    assert run.state(call).waiting_for.startswith("for another worker to join all of its sets")
    run.returns(zero, "G", 2)
    run.answer(1)
    assert run.first_steps(zero) == {"D": 3, "G": 2} and not run.first_steps(one)
    run.stands(zero, At(3, 2))
    run.stands(zero, At(3, 3))
    run.answer()
    assert run.first_steps(one) == {"D": 3, "G": 3}


def test_workers_of_different_sets_return_each_to_its_own() -> None:
    """Nobody would push for a worker that was made a member of a set that it does not train."""
    run = Run()
    zero, one = run.workers
    run.create(zero, name="E")
    run.ask(ev.Describe, one, "E")
    run.ask(ev.CommitParameters, zero, "E")
    assert len(run.map.parameters) == 3
    zero, one = run.expel(zero, one)
    run.returns(one, "D", 0)
    run.tick()
    run.answer(1)
    assert run.first_steps(one) == {"D": 0}


def test_an_outdated_report_is_answered_by_a_release() -> None:
    run = Run()
    worker = run.workers[0]
    run.on(AlignReported(run.session(worker), 7, 3, 2, 2, next=(("D", 2), ("G", 1))))
    assert run.commands(worker) == [AlignCommand(7, release=True)]


@pytest.mark.parametrize("position", [-1, 1 << 62])
def test_a_report_that_makes_no_sense_knows_no_start(position: int) -> None:
    run = Run()
    run.joins()
    for worker in run.workers:
        number = run.commands(worker)[-1].number
        next_steps = (("D", 8), ("G", 7))
        run.on(AlignReported(run.session(worker), number, 15, 15 - position, 2, next=next_steps))
    assert run.commands(run.workers[0])[-1].until is None


@pytest.mark.parametrize(
    "settings", [{"consistency": ASP()}, {"consistency": BSP(backup_workers=1)}, {"optimizer": SGD(lr=0.0)}]
)
def test_workers_that_do_not_wait_for_each_other_are_not_held(settings: dict[str, Any]) -> None:
    run = Run(**settings)
    worker, _ = run.join()
    run.create(worker, name="D", **settings)
    assert not run.commands(run.workers[0])


class Parts(Run):
    """A run of four workers, which train two parts of a model by twos."""

    def __init__(self) -> None:
        Driver.__init__(self, workers_min=4)
        self.servers = [self.join("server")]
        self.workers = [self.join()[0] for _ in range(4)]
        for part in (0, 1):
            members = self.workers[2 * part : 2 * part + 2]
            for worker in members:
                self.create(worker, name=f"part/{part}", workers=(2 * part, 2 * part + 1))
            self.ask(ev.CommitParameters, members[0], f"part/{part}")
        self.alignment.want("test")
        self.tick()

    @property
    def alignment(self) -> Alignment:
        return self.cluster.alignment

    def reports(self, *steps: int) -> None:
        """All workers report their next steps, which start iterations."""
        for worker, step in zip(self.workers, steps, strict=True):
            number, next_steps = self.commands(worker)[-1].number, ((f"part/{worker.rank // 2}", step),)
            self.on(AlignReported(self.session(worker), number, step, step, 0, False, next_steps))


def test_workers_of_parts_are_held_at_a_start_that_none_has_passed() -> None:
    run = Parts()
    run.reports(8, 8, 7, 7)  # Step 7 of part 0 needs nobody of part 1.
    assert [run.commands(worker)[-1].until for worker in run.workers] == [8, 8, 8, 8]
    assert run.alignment.vector is None
    run.reports(8, 8, 8, 7)
    assert run.alignment.vector is None
    run.reports(8, 8, 8, 8)
    assert run.alignment.vector == {"part/0": 8, "part/1": 8} and run.alignment.is_even


def test_workers_of_parts_that_train_on_are_asked_again() -> None:
    run = Parts()
    run.reports(8, 8, 7, 7)
    run.reports(9, 9, 8, 8)  # They had lost the scheduler.
    run.tick()
    assert run.alignment.vector is None and run.commands(run.workers[3])[-1].until is None
    run.reports(9, 9, 8, 8)
    run.reports(9, 9, 9, 9)
    assert run.alignment.vector == {"part/0": 9, "part/1": 9}


def test_workers_that_are_iterations_apart_are_not_held() -> None:
    run = Parts()
    run.reports(90, 90, 7, 7)
    assert all(run.commands(worker)[-1].release for worker in run.workers)
    assert not run.alignment.applies and run.alignment.vector is None


def test_a_worker_joins_its_part_alone() -> None:
    run = Parts()
    run.alignment.release("test")
    (lost,) = run.expel(run.workers[3])
    run.create(lost, name="part/1", workers=(2, 3))
    assert [p.parameters for p in run.proposals(run.servers[0][1])] == ["part/1"]
