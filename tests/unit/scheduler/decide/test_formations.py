"""Groups that outlive their members: who is left out, when new workers are taken in, and restarts of the scheduler."""

from __future__ import annotations

import pytest

from psdist.errors import ExcludedError, LateWorkerError, WorkerLeftError
from psdist.types import WorkerEntry
from psdist_scheduler.decide.cluster_events import Caller, FormGroup
from psdist_scheduler.decide.cluster_state import ClusterSettings, Member
from psdist_scheduler.decide.effects import GroupStanding
from psdist_scheduler.decide.formations import CLOSED_SECONDS, GRACE_SECONDS, RETURN_SECONDS, GroupFormations
from psdist_scheduler.decide.members import Membership


class Run:
    """Workers that ask for groups named "g".

    size_min: of these groups.
    world: workers that the run was started with.
    """

    def __init__(self, workers: int, size_min: int = 1, world: int = 8) -> None:
        self.size_min, self.world = size_min, world
        self.members = Membership(ClusterSettings("run"), (), 0.0)
        self.formations = GroupFormations(self.members)
        self.workers = [self.register(rank) for rank in range(workers)]
        self._standing = GroupStanding(0, (), False, "", 0)

    def register(self, rank: int, incarnation: int = 1) -> Member:
        worker = Member(f"worker-{rank}", "worker", incarnation, rank, self.world, f"host:{rank}")
        self.members.add(worker, 0.0)
        return worker

    def lose(self, worker: Member) -> None:
        self.members.lose(worker.member_id, "killed", 0.0)

    def end(self, worker: Member, reason: str = "closed") -> None:
        """End a worker's script, without ``finish``."""
        self.members.leave(worker.member_id, reason, 0.0)

    def ask(
        self, worker: Member, now: float = 1.0, *, group: GroupStanding | None = None, admits: bool = False,
        size: int = 1, unreachable: tuple[int, ...] = (), closed: tuple[int, ...] = (), ticket: int = 7,
        finishes: bool = False,
    ) -> GroupStanding:  # fmt: skip
        """Ask for the group after ``group``, or to join."""
        epoch, members = (group.epoch, group.members) if group is not None else (0, ())
        event = FormGroup(
            1, Caller("run", worker.member_id, worker.incarnation), "g", ticket, epoch, members,
            unreachable=unreachable, closed=closed, admits=admits, size=size, size_min=self.size_min, finishes=finishes,
        )  # fmt: skip
        (answer,) = self.formations.form(event, worker, now)
        self.formations.validate()
        standing = answer.value
        assert isinstance(standing, GroupStanding)
        return standing

    def restart_scheduler(self) -> None:
        self.formations = GroupFormations(self.members, is_restored=True)

    def first(self) -> GroupStanding:
        """Form the first group, of all workers."""
        for worker in self.workers:
            standing = self.ask(worker, size=len(self.workers))
        return standing


def ranks(members: tuple[WorkerEntry, ...]) -> list[int]:
    return [member.rank for member in members]


def test_fewer_members_than_the_group_needs_take_in_a_new_worker() -> None:
    run = Run(2, size_min=2)
    group = run.first()
    run.lose(run.workers[1])
    alone = run.ask(run.workers[0], group=group)
    assert not alone.formed and alone.waiting_for == "for 1 of 2 workers"
    new = run.register(1, incarnation=2)
    joined = run.ask(new)
    assert joined.formed and ranks(joined.members) == [0, 1] and joined.epoch == 2
    assert run.ask(run.workers[0], group=group).formed


def test_enough_members_take_in_a_new_worker_if_all_of_them_admit_it() -> None:
    run = Run(2)
    group = run.first()
    new = run.register(2)
    assert not run.ask(new).formed
    run.ask(run.workers[0], group=group, admits=True)
    second = run.ask(run.workers[1], group=group)
    assert ranks(second.members) == [0, 1], "one member does not admit new workers"
    for worker in run.workers:
        third = run.ask(worker, group=second, admits=True)
    assert ranks(third.members) == [0, 1, 2] and run.ask(new).formed


def test_a_member_that_others_cannot_reach_is_left_out_after_its_time_to_ask() -> None:
    run = Run(3)
    group = run.first()
    for worker in run.workers[:2]:
        waiting = run.ask(worker, group=group, unreachable=(2,))
    assert not waiting.formed and waiting.waiting_for == "for workers that the others cannot reach"
    second = run.ask(run.workers[0], 1.0 + 2 * GRACE_SECONDS, group=group, unreachable=(2,))
    assert ranks(second.members) == [0, 1]
    with pytest.raises(ExcludedError, match="continued without worker-2"):
        run.ask(run.workers[2], 2.0, group=group)


def test_a_member_that_gave_up_a_call_may_be_slow_to_ask() -> None:
    run = Run(3)
    group = run.first()
    for now in (1.0, 1.0 + 2 * GRACE_SECONDS):
        waiting = run.ask(run.workers[0], now, group=group, closed=(2,))
        run.ask(run.workers[1], now, group=group)
    assert not waiting.formed and "given up a call" in waiting.waiting_for
    second = run.ask(run.workers[1], 1.1 + CLOSED_SECONDS, group=group, closed=(2,))
    assert ranks(second.members) == [0, 1], "it may also do something else for ever"


def test_of_two_groups_of_one_epoch_the_newer_one_goes_on() -> None:
    run = Run(2)
    first = run.first()
    both = [run.ask(worker, group=first) for worker in run.workers][1]
    run.restart_scheduler()  # Worker 0 had no answer, and asks again after worker 1 was lost for a while.
    second = run.ask(run.workers[0], 2.0, group=GroupStanding(1, first.members[:1], True, "", 0))
    assert second.formed and second.epoch == both.epoch and ranks(second.members) == [0]
    with pytest.raises(ExcludedError, match="continued without worker-1"):
        run.ask(run.workers[1], 2.1, group=both)


def test_a_slow_member_is_waited_for() -> None:
    run = Run(3)
    group = run.first()
    for worker in run.workers[:2]:
        waiting = run.ask(worker, 60.0, group=group)
    assert not waiting.formed and "worker-2" in waiting.waiting_for


def test_a_restarted_scheduler_learns_of_a_group_whose_members_ask_about_newcomers() -> None:
    run = Run(3)
    first = run.first()
    for now in (1.0, 1.0 + 2 * GRACE_SECONDS):
        for worker in run.workers[:2]:
            second = run.ask(worker, now, group=first, unreachable=(2,))
    run.restart_scheduler()
    left_out = run.workers[2]
    assert "to reconfigure the group" in run.ask(left_out, 2.0, group=first, unreachable=(0, 1)).waiting_for
    assert run.ask(run.workers[0], 2.1, group=second, ticket=0).newcomers == 0
    with pytest.raises(ExcludedError, match="continued without worker-2"):
        run.ask(left_out, 2.2, group=first)
    run.ask(left_out, 2.3)
    assert run.ask(run.workers[0], 2.4, group=second, ticket=0).newcomers == 1


def test_a_restarted_scheduler_learns_that_the_work_of_a_group_is_complete() -> None:
    run = Run(2)
    group = run.first()
    run.restart_scheduler()
    for worker in run.workers:
        assert not run.ask(worker, group=group, finishes=True).formed
    with pytest.raises(LateWorkerError):
        run.ask(run.register(2))


def test_a_restarted_worker_does_not_wait_for_members_that_have_ended() -> None:
    run = Run(3, world=3)
    run.first()
    run.lose(run.workers[2])
    again = run.register(2, incarnation=2)
    for worker in run.workers[:2]:
        run.end(worker)
    waiting = run.ask(again, size=3).waiting_for
    assert waiting == "for 2 of 3 workers; worker-0 (rank 0), worker-1 (rank 1) ended"
    assert not run.ask(again, RETURN_SECONDS - 0.1, size=3).formed, "they may start again"
    with pytest.raises(LateWorkerError, match=r"'g' needs 3 workers, and 1 can come: worker-0 .*, worker-1 .* ended"):
        run.ask(again, RETURN_SECONDS, size=3)
    for worker in (run.register(0, incarnation=2), run.register(1, incarnation=2), again):
        standing = run.ask(worker, RETURN_SECONDS + 0.1, size=3)
    assert standing.formed and ranks(standing.members) == [0, 1, 2], "all of them started again"


@pytest.mark.parametrize("ended", [0, 1])
def test_a_group_waits_for_workers_that_somebody_starts_later(ended: int) -> None:
    run = Run(1 + ended, world=1)
    for worker in run.workers[1:]:
        run.end(worker)
    for now in (1.0, RETURN_SECONDS, 100 * RETURN_SECONDS):
        assert run.ask(run.workers[0], now, size=3).waiting_for == "for 2 of 3 workers"


def test_a_first_group_does_not_wait_for_workers_that_have_ended_without_it() -> None:
    run = Run(2, world=2)
    run.ask(run.workers[0], size=2)
    run.end(run.workers[1])
    with pytest.raises(WorkerLeftError, match=r"needs 2 workers, and 1 can come: worker-1 .* ended\. Let each"):
        run.ask(run.workers[0], RETURN_SECONDS, size=2)


def test_the_last_members_do_not_wait_for_others_that_have_ended() -> None:
    run = Run(2, size_min=2, world=2)
    group = run.first()
    run.end(run.workers[1])
    assert not run.ask(run.workers[0], group=group).formed
    with pytest.raises(WorkerLeftError, match="needs 2 workers, and 1 can come"):
        run.ask(run.workers[0], RETURN_SECONDS, group=group)


@pytest.mark.parametrize("reason", ["failed", "stopped"])
def test_workers_that_are_started_again_are_waited_for(reason: str) -> None:
    run = Run(2, world=2)
    run.first()
    for worker in run.workers:
        run.end(worker, reason)
    assert run.ask(run.register(1, incarnation=2), 100.0, size=2).waiting_for == "for 1 of 2 workers"


def test_too_few_members_learn_that_the_others_have_completed_the_work() -> None:
    run = Run(2, size_min=2, world=2)
    group = run.first()
    run.ask(run.workers[1], group=group, finishes=True)
    with pytest.raises(LateWorkerError, match="the other members of group 'g' have completed their work"):
        run.ask(run.workers[0], group=group)
    assert not run.ask(run.workers[0], group=group, finishes=True).formed


def test_a_worker_that_asks_to_join_may_name_an_earlier_group_without_a_request() -> None:
    run = Run(1)
    run.ask(run.workers[0], size=3)
    entries = tuple(WorkerEntry(one.member_id, one.incarnation, one.rank, one.address) for one in run.workers)
    group = GroupStanding(5, entries, False, "", 0)
    assert not run.ask(run.workers[0], group=group, ticket=0).formed
    assert run.ask(run.workers[0], group=group).formed
