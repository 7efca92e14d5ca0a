"""The scheduler's machine where workers keep something that snapshots have: asked, waited for, found again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psdist.consistency import ASP, Consistency
from psdist.errors import FencedError, PsdistError, SnapshotFailedError
from psdist.snapshots.format import WorkerState
from psdist.snapshots.policy import SavePolicy
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.cluster_state import Member
from tests.support.saved_runs import DATA, lease
from tests.support.scheduler_driver import caller
from tests.support.snapshot_driver import DIGEST, SnapshotDriver, history_of


class KeeperDriver(SnapshotDriver):
    """Workers that save a state of "mlp", available before push ``lowest``, and hand it in while ``handing``."""

    def __init__(
        self, workers: int = 1, consistency: Consistency | None = None, *, announces: bool = True, **settings: Any
    ) -> None:
        self.lowest, self.handing = 0, True
        #: Files come before the answers that name them, of the push so much later.
        self.early: int | None = None
        #: Hands its file in, and never answers.
        self.unheard = ""
        self.places: list[sn.StatePlace] = []
        super().__init__(**settings)
        self.workers = self.begin(workers=workers, consistency=consistency)
        for worker in self.workers if announces else ():
            self.on(sn.StatesAnnounced(self.cluster.members.sessions.call_of(worker.member_id), ("mlp", "another")))

    def obey(self, session: int, command: Any) -> bool:
        if not isinstance(command, sn.Mark):
            return super().obey(session, command)
        pushes = (("mlp", self.versions.get("mlp", 0)),)
        keeps = (("mlp", self.lowest),) if command.steps else pushes
        before = dict(command.steps or pushes)["mlp"]
        worker = self.cluster.members.get(self.cluster.members.sessions.by_call[session])
        if self.early is not None:
            self.hand_in(worker, command.attempt, before + self.early)
        if worker.member_id == self.unheard:
            self.hand_in(worker, command.attempt, before)
            return True
        self.on(sn.Marked(session, command.attempt, pushes, keeps))
        if self.handing and self.lowest <= before:
            self.hand_in(worker, command.attempt, before)
        return True

    def turn(self) -> None:
        """Let a tick pass, and everybody do its work."""
        self.tick()
        self.go_on()

    def hand_in(self, worker: Member, attempt: int, before: int, name: str = "mlp") -> None:
        """Asks where a file goes, and writes it. Raises how that was refused."""
        call = self.number()
        self.on(sn.StateOffered(call, caller(worker), attempt, name, before, 100))
        if call in self.errors:
            raise self.errors[call]
        place = self.told[call][-1]
        self.places.append(place)
        state = WorkerState(name, place.rank, before, place.file or "again", 100, DIGEST)
        self.on(sn.StateWritten(attempt, (worker.member_id, worker.incarnation), state))

    @property
    def states(self) -> tuple[WorkerState, ...]:
        """Return the worker states of the newest snapshot."""
        newest = self.cluster.snapshots.catalog.newest
        return newest.manifest.states

    @property
    def attempt(self) -> int:
        """The one under way."""
        return self.cluster.snapshots.attempt.number


@pytest.mark.parametrize("consistency", [None, ASP()])
def test_what_workers_keep_is_in_the_snapshot(consistency: Consistency | None) -> None:
    driver = KeeperDriver(2, consistency)
    driver.train(5)
    commit = driver.saved(driver.save())
    assert [(state.parameters, state.rank, state.next) for state in driver.states] == [("mlp", 0, 5), ("mlp", 1, 5)]
    assert [place.file for place in driver.places] == [state.file for state in driver.states]
    assert driver.places[0].directory == commit.directory and commit.bytes > 200


def test_a_file_may_come_before_the_answer_that_names_it() -> None:
    """They are two calls. One that is not of the push that is answered then counts for nothing."""
    for consistency in [None, ASP()]:
        for later in [0, 1]:
            driver = KeeperDriver(2, consistency)
            driver.early, driver.handing = later, later > 0
            driver.train(5)
            driver.saved(driver.save())
            assert [(state.parameters, state.rank, state.next) for state in driver.states] == [
                ("mlp", 0, 5),
                ("mlp", 1, 5),
            ]
            assert [bool(place.file) for place in driver.places] == [True] * (4 if later else 2)


def test_a_worker_that_leaves_after_its_files_are_written_is_in_the_snapshot() -> None:
    """Check pushes that are marked, and an attempt that waits for a report about data, which the worker takes back."""
    driver = KeeperDriver(2, ASP())
    driver.on(ev.OpenDataset(driver.number(), caller(driver.workers[1]), DATA))
    lease(driver, driver.workers[1], 0)
    driver.train(5)
    call = driver.save()
    driver.go_on()
    assert driver.cluster.snapshots.attempt is not None and driver.cluster.snapshots.attempt.is_whole
    driver.ask(ev.Leave, driver.workers[1])
    driver.turn()
    driver.saved(call)
    assert [(state.rank, state.next) for state in driver.states] == [(0, 5), (1, 5)]


def test_states_that_are_announced_after_the_request_for_marks_are_in_the_snapshot() -> None:
    driver = KeeperDriver(2, ASP(), announces=False)
    driver.train(5)
    driver.saved(driver.save())
    assert [(state.rank, state.next) for state in driver.states] == [(0, 5), (1, 5)]


def test_it_is_waited_for() -> None:
    driver = KeeperDriver()
    driver.handing = False
    driver.train(5)
    call = driver.save()
    attempt, worker = driver.attempt, driver.workers[0]
    driver.tick(1.0)
    assert not driver.steps and driver.told[call][-1].waiting_for == "for worker-0 to hand in its state"
    with pytest.raises(SnapshotFailedError, match=r"'mlp' before push 4 is not the one that the snapshot needs"):
        driver.hand_in(worker, attempt, 4)
    with pytest.raises(SnapshotFailedError, match="'another' before push 5 is not"):
        driver.hand_in(worker, attempt, 5, "another")
    with pytest.raises(FencedError):
        driver.hand_in(replace(worker, incarnation=worker.incarnation - 1), attempt, 5)
    driver.hand_in(worker, attempt, 5)
    driver.turn()
    assert driver.saved(call).steps == {"mlp": 5}
    with pytest.raises(SnapshotFailedError, match="no snapshot in progress"):
        driver.hand_in(worker, attempt, 5)


def test_a_file_that_is_there_is_not_written_again() -> None:
    driver = KeeperDriver()
    driver.writing = False
    driver.train(5)
    driver.save()
    driver.hand_in(driver.workers[0], driver.attempt, 5)
    assert [place.file for place in driver.places] == ["parameters-0000-worker-00000.safetensors", ""]
    driver.writing = True
    driver.go_on()
    driver.turn()
    assert [state.file for state in driver.states] == ["parameters-0000-worker-00000.safetensors"]


def test_a_worker_that_has_gone_on_gets_a_later_cut() -> None:
    driver = KeeperDriver()
    driver.train(5)
    driver.lowest = 7
    call = driver.save()
    assert not driver.steps
    driver.train(7)
    driver.turn()
    assert driver.saved(call).steps == {"mlp": 7} and driver.states[0].next == 7


def test_what_is_kept_since_a_cut_was_armed_is_in_it_too() -> None:
    """A cut by steps is armed when parameters are ready, before any worker can say that it keeps something."""
    driver = KeeperDriver(2, policy=SavePolicy(steps=10))
    driver.go_on()
    driver.train(10)
    driver.turn()
    assert driver.steps == [{"mlp": 10}] and [state.rank for state in driver.states] == [0, 1]


@pytest.mark.parametrize("answering", [False, True])
def test_a_worker_that_is_lost_is_not_waited_for(answering: bool) -> None:
    driver = KeeperDriver(2)
    driver.handing = False
    driver.train(5)
    driver.answering = answering
    call = driver.save()
    driver.answering = True
    driver.on(ev.SessionClosed(driver.cluster.members.sessions.call_of("worker-1"), "its session broke"))
    driver.go_on()
    driver.hand_in(driver.workers[0], driver.attempt, 5)
    driver.turn()
    assert driver.saved(call).steps == {"mlp": 5} and [state.rank for state in driver.states] == [0]


def test_a_file_that_no_answer_named_is_not_in_the_snapshot_where_its_worker_is_lost() -> None:
    driver = KeeperDriver(2)
    driver.train(5)
    driver.unheard = "worker-1"
    call = driver.save()
    assert [place.rank for place in driver.places] == [0, 1] and not driver.steps
    driver.on(ev.SessionClosed(driver.cluster.members.sessions.call_of("worker-1"), "its session broke"))
    driver.go_on()
    driver.turn()
    assert driver.saved(call).steps == {"mlp": 5} and [state.rank for state in driver.states] == [0]


def test_a_state_that_cannot_be_had_fails_the_snapshot() -> None:
    driver = KeeperDriver()
    driver.handing = False
    driver.train(5)
    call = driver.save()
    session = driver.cluster.members.sessions.call_of("worker-0")
    driver.on(sn.PartFailed(session, driver.attempt, "the state of 'mlp' cannot be had"))
    assert isinstance(driver.errors[call], SnapshotFailedError) and "cannot be had" in driver.errors[call].message
    assert not driver.steps


def test_a_resumed_run_gives_it_back_by_rank() -> None:
    before = KeeperDriver(2)
    before.train(5)
    before.save()
    driver = SnapshotDriver(history=history_of(before))
    for worker in driver.begin(workers=2):
        call = driver.number()
        driver.on(sn.GetState(call, caller(worker), "mlp"))
        source = driver.told[call][-1]
        assert source.state.rank == worker.rank and source.manifest.states == before.states
    call = driver.number()
    driver.on(sn.GetState(call, caller(worker), "other"))
    assert driver.told[call][-1].state is None
    call = driver.number()
    driver.on(sn.GetState(call, replace(caller(worker), incarnation=worker.incarnation + 1), "mlp"))
    assert isinstance(driver.errors[call], PsdistError)


@pytest.mark.parametrize("at_end", [False, True])
def test_a_worker_that_leaves_has_its_snapshot_if_the_run_takes_one_at_its_end(at_end: bool) -> None:
    driver = KeeperDriver(policy=SavePolicy(at_end=at_end))
    driver.train(5)
    worker, call = driver.workers[0], driver.number()
    driver.on(sn.Save(call, "", "at the end", caller(worker), (("mlp", 5),)))
    driver.go_on()
    assert driver.steps == [{"mlp": 5}] * at_end
    assert at_end or "no snapshot at its end" in driver.errors[call].message
