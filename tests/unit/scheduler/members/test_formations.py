"""Members of the next group of a name: survivors, unreachable ones, new workers, and restarts of the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.errors import ExcludedError, InvalidArgumentError, LimitExceededError
from psdist.types import WorkerEntry
from psdist_scheduler.events import cluster_events as ev
from psdist_scheduler.events import worker_events as we
from psdist_scheduler.events.cluster_state import Member
from psdist_scheduler.members import formations
from tests.support.scheduler_driver import Driver, caller


class Run:
    """Workers of a run that ask for groups."""

    def __init__(self, size: int = 3) -> None:
        self.d = Driver()
        self.size = size
        self.workers = [self.d.register(rank=rank) for rank in range(size)]
        self.tickets: dict[str, int] = {}

    def ask(self, worker: Member, before: Any = None, *, ticket: int = 0, **others: Any) -> Any:
        call = self.d.number()
        epoch, members = (before.epoch, before.members) if before is not None else (0, ())
        others.setdefault("size", self.size)
        event = we.FormGroup(
            call, caller(worker), "g", ticket or 1 + worker.rank + 100 * epoch, epoch, members, **others
        )
        self.d.on(event)
        return self.d.errors.get(call) or self.d.told[call][0]

    def form(self) -> we.GroupStanding:
        """Form the first group."""
        for worker in self.workers:
            last = self.ask(worker)
        assert last.formed and last.epoch == 1
        return last

    def lose(self, worker: Member) -> None:
        self.d.on(ev.Leave(self.d.number(), caller(worker), "killed"))


def ranks(standing: we.GroupStanding) -> list[int]:
    return [member.rank for member in standing.members]


def test_the_first_group_waits_for_its_size() -> None:
    run = Run()
    assert run.ask(run.workers[2]).waiting_for == "for 2 of 3 workers"
    assert not run.ask(run.workers[0]).formed
    assert ranks(run.ask(run.workers[1])) == [0, 1, 2]
    assert run.ask(run.workers[2]).formed, "an answer that was lost is given again"


def test_a_successor_waits_for_all_live_members() -> None:
    run = Run()
    first = run.form()
    run.lose(run.workers[1])
    waiting = run.ask(run.workers[0], first)
    assert not waiting.formed and waiting.waiting_for.startswith("for worker-2 (rank 2) to reconfigure")
    second = run.ask(run.workers[2], first)
    assert second.formed and second.epoch == 2 and ranks(second) == [0, 2]
    assert run.ask(run.workers[0], first) == second


def test_an_unreachable_member_has_a_moment_to_ask() -> None:
    run = Run()
    first = run.form()
    for worker in run.workers[:2]:
        assert not run.ask(worker, first, unreachable=(2,)).formed
    run.d.now += formations.GRACE_SECONDS
    assert ranks(run.ask(run.workers[0], first, unreachable=(2,))) == [0, 1]
    error = run.ask(run.workers[2], first)
    assert isinstance(error, ExcludedError) and "worker-2 (rank 2)" in error.message


@pytest.mark.parametrize(
    ("broken", "left"), [([(0, 1), (0, 2)], [1, 2]), ([(0, 1)], [0, 2]), ([(0, 1), (1, 2), (0, 2)], [0])]
)
def test_of_members_that_cannot_reach_each_other_the_fewest_are_left_out(
    broken: list[tuple[int, int]], left: list[int]
) -> None:
    run = Run()
    first = run.form()
    for worker in run.workers:
        rank = worker.rank
        seen = tuple(b if rank == a else a for a, b in broken if rank in (a, b))
        run.ask(worker, first, unreachable=seen)
    standing = run.ask(run.workers[left[0]], first)
    assert standing.formed and ranks(standing) == left


def test_new_workers_wait_until_all_members_admit_them() -> None:
    run = Run()
    first = run.form()
    new = run.d.register(rank=3)
    assert not run.ask(new).formed
    run.ask(run.workers[0], first, admits=True)
    run.ask(run.workers[1], first)
    second = run.ask(run.workers[2], first, admits=True)
    assert ranks(second) == [0, 1, 2] and second.newcomers == 1
    for worker in run.workers:
        third = run.ask(worker, second, admits=True)
    assert ranks(third) == [0, 1, 2, 3] and ranks(run.ask(new)) == [0, 1, 2, 3]


def test_a_group_below_its_minimum_waits_for_new_workers() -> None:
    run = Run(2)
    first = run.form()
    run.lose(run.workers[1])
    assert run.ask(run.workers[0], first, admits=True, size_min=2).waiting_for == "for 1 of 2 workers"
    again = run.d.register(rank=1)
    assert ranks(run.ask(again)) == [0, 1]


def test_workers_form_a_first_group_again_once_all_members_are_gone() -> None:
    run = Run(2)
    run.form()
    for worker in run.workers:
        run.lose(worker)
    run.workers = [run.d.register(rank=rank) for rank in range(2)]
    assert not run.ask(run.workers[0]).formed, "it waits for the others, too"
    assert run.ask(run.workers[1]).epoch == 2


def test_another_scheduler_continues_from_the_groups_that_callers_name() -> None:
    run = Run()
    members = tuple(WorkerEntry(w.member_id, w.incarnation, w.rank, w.address) for w in run.workers)
    first = we.GroupStanding(7, members, True)
    assert not run.ask(run.workers[0], first).formed
    run.lose(run.workers[2])
    assert run.ask(run.workers[1], first).epoch == 8


def test_a_worker_that_joins_again_is_not_taken_for_its_former_self() -> None:
    run = Run(2)
    first = run.form()
    assert not run.ask(run.workers[1], ticket=99).formed, "it has left the group"
    second = run.ask(run.workers[0], first, admits=True)
    assert ranks(second) == [0, 1] and run.ask(run.workers[1], ticket=99) == second


def test_bad_requests_and_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(1)
    first = run.form()
    assert isinstance(run.ask(run.workers[0], first, unreachable=(1,)), InvalidArgumentError)
    assert isinstance(run.ask(run.workers[0], size=1 << 30), LimitExceededError)
    stranger = we.GroupStanding(5, (WorkerEntry("x", 1, 0),), True)
    assert isinstance(run.ask(run.workers[0], stranger), InvalidArgumentError)
    monkeypatch.setattr(formations, "GROUP_NAMES_MAX", 1)
    call = run.d.number()
    run.d.on(we.FormGroup(call, caller(run.workers[0]), "h", 1))
    assert "limit" in run.d.errors[call].message
