"""The end of all workers together: agreed on, cut where all have been, and nothing saved after it."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.consistency import ASP, BSP, Consistency
from psdist.errors import SnapshotFailedError
from psdist.snapshots.policy import SavePolicy
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.alignment import RETRY_SECONDS
from psdist_scheduler.decide.cluster import Cluster
from psdist_scheduler.decide.cluster_events import AlignReported, StopReported
from psdist_scheduler.decide.cluster_state import EndStep, Member
from psdist_scheduler.decide.effects import AlignCommand, StopCommand
from psdist_scheduler.decide.run_end import COLLECT_SECONDS, SAVE_SECONDS, UNKNOWN_SECONDS
from tests.support.scheduler_driver import Driver, caller
from tests.support.snapshot_driver import SnapshotDriver


class Run(SnapshotDriver):
    """Ready parameters "mlp" of ``workers``, which are asked to end."""

    def __init__(self, workers: int = 2, consistency: Consistency | None = None, **settings: Any) -> None:
        super().__init__(workers_min=workers, **settings)
        self.workers = self.begin(workers=workers, consistency=consistency or BSP())
        self.go_on()

    def session(self, worker: Member) -> int:
        return self.cluster.members.sessions.call_of(worker.member_id)

    def asked(self, *workers: Member) -> None:
        """These were asked to end, and say so."""
        for worker in workers:
            self.on(StopReported(self.session(worker), 0, True))

    def told_to(self, worker: Member) -> list[str]:
        """Kinds of the commands that a worker was sent in its session."""
        return [value.kind for value in self.told[self.session(worker)] if isinstance(value, StopCommand)]

    def last(self, worker: Member) -> StopCommand:
        return [value for value in self.told[self.session(worker)] if isinstance(value, StopCommand)][-1]

    def holds(self, worker: Member, **next_pushes: int) -> None:
        """The worker begins no more pushes, and says how far it is."""
        numbers = tuple(next_pushes.items())
        self.on(StopReported(self.session(worker), self.last(worker).number, True, numbers))

    def all_hold(self, **next_pushes: int) -> None:
        for worker in self.workers:
            self.holds(worker, **next_pushes)

    def answers(self, worker: Member, *, stopping: bool) -> None:
        self.on(StopReported(self.session(worker), self.last(worker).number, stopping))

    def held(self, worker: Member) -> AlignCommand:
        """The last command by which a worker was held."""
        return [value for value in self.told[self.session(worker)] if isinstance(value, AlignCommand)][-1]

    def stands(self, worker: Member, start: int | None, **next_pushes: int) -> None:
        """A held worker whose iterations have two pushes reports where it is."""
        position, period = sum(next_pushes.values()), 0 if start is None else 2
        numbers = tuple(next_pushes.items())
        session = self.session(worker)
        self.on(AlignReported(session, self.held(worker).number, position, start, period, next=numbers))

    def all_stand(self, start: int | None, **next_pushes: int) -> None:
        for worker in self.workers:
            self.stands(worker, start, **next_pushes)

    def all_leave(self) -> None:
        for worker in list(self.workers):
            self.leaves(worker)

    def leaves(self, worker: Member) -> None:
        self.on(ev.Leave(self.number(), caller(worker), "stopped"))
        self.go_on()


def test_the_cut_is_where_the_least_far_worker_stands() -> None:
    run = Run()
    zero, one = run.workers
    run.train(7)
    run.asked(zero)
    assert run.told_to(zero) == [], "it trains on until it is known who ends with it"
    run.asked(one)
    assert run.told_to(zero) == run.told_to(one) == ["hold"]
    run.holds(zero, mlp=8)  # Its push of step 7 waits for the other's.
    assert run.told_to(zero) == ["hold"]
    run.holds(one, mlp=7)
    assert dict(run.cluster.snapshots.attempt.steps) == {"mlp": 7}
    run.writing = False
    run.go_on()
    assert run.last(zero) == StopCommand(run.last(one).number, "leave", (("mlp", 7),))
    # Servers keep the data that the snapshot needs: nobody waits until it is written.
    run.leaves(zero)
    run.train(8)  # What is left of step 7 is applied as one leaves after the other.
    run.leaves(one)
    run.writing = True
    run.go_on()
    assert run.steps == [{"mlp": 7}]
    # The launcher's snapshot at the end is this one, and so it is for servers and a scheduler that end.
    assert run.saved(run.save()).steps == {"mlp": 7}
    stop = run.number()
    run.on(ev.Stop(stop))
    run.tick(3)
    run.go_on()
    assert run.state(stop) == ef.Done() and run.steps == [{"mlp": 7}]
    assert any("stopping: 'mlp' at step 7" in note for note in run.notes)


def test_several_sets_are_cut_where_an_iteration_starts() -> None:
    run = Run()
    for worker in run.workers:
        run.create(worker, name="b")
    run.ask(ev.CommitParameters, run.workers[0], "b")
    run.train(5)
    run.train(5, "b")
    zero, one = run.workers
    run.asked(zero, one)
    held = run.held(zero)
    assert held.until is None and run.told_to(zero) == [], "they are held at the start of an iteration"
    # Both are between the steps of the two sets.
    run.stands(zero, start=10, mlp=6, b=5)
    run.stands(one, start=10, mlp=6, b=5)
    assert run.held(zero).until == run.held(one).until == 12
    assert run.cluster.snapshots.attempt is None, "the iteration is finished first"
    run.stands(zero, start=12, mlp=6, b=6)
    assert run.cluster.snapshots.attempt is None, "by all of them"
    run.stands(one, start=12, mlp=6, b=6)
    assert dict(run.cluster.snapshots.attempt.steps) == {"mlp": 6, "b": 6}
    run.train(6)
    run.train(6, "b")
    assert dict(run.last(zero).next) == {"mlp": 6, "b": 6} and run.steps == [{"mlp": 6, "b": 6}]
    assert any("'b' at step 6, 'mlp' at step 6" in note for note in run.notes)


def asked_with_unknown_iterations() -> Run:
    """Return a run of two sets that is stopped before its workers know where an iteration starts."""
    run = Run()
    for worker in run.workers:
        run.create(worker, name="b")
    run.ask(ev.CommitParameters, run.workers[0], "b")
    run.asked(*run.workers)
    run.all_stand(start=None, mlp=6, b=5)
    assert any("with context.iteration()" in note for note in run.notes)
    assert run.told_to(run.workers[0]) == [], "they train on"
    return run


def pass_unknown_seconds(run: Run) -> None:
    """Pass the time in which workers may learn where an iteration starts. They are busy at the end of it."""
    beats = list(run.cluster.members.sessions.by_call)
    run.tick_and_beat(UNKNOWN_SECONDS / 2, *beats)
    run.tick_and_beat(UNKNOWN_SECONDS, *beats)
    assert run.told_to(run.workers[0]) == [], "one of them may have learned it"


def test_sets_without_iterations_are_saved_with_a_warning() -> None:
    run = asked_with_unknown_iterations()
    pass_unknown_seconds(run)
    run.all_stand(start=None, mlp=8, b=6)
    assert run.told_to(run.workers[0]) == ["hold"], "they end as scripts with one set do"


def test_workers_that_were_busy_meanwhile_finish_their_iteration() -> None:
    run = asked_with_unknown_iterations()
    pass_unknown_seconds(run)
    run.all_stand(start=12, mlp=7, b=6)
    assert [run.held(worker).until for worker in run.workers] == [14, 14]


def test_iterations_that_become_known_while_a_run_stops_are_finished() -> None:
    """An interrupt in the first moments of a run must not leave one set a step ahead of another."""
    run = asked_with_unknown_iterations()
    run.tick_and_beat(RETRY_SECONDS + 0.5, *run.cluster.members.sessions.by_call)
    run.all_stand(start=12, mlp=7, b=6)
    assert [run.held(worker).until for worker in run.workers] == [14, 14]
    run.all_stand(start=14, mlp=7, b=7)
    assert dict(run.cluster.snapshots.attempt.steps) == {"mlp": 7, "b": 7}


def test_a_busy_worker_is_waited_for_once_another_knows_the_iterations() -> None:
    run = asked_with_unknown_iterations()
    zero, one = run.workers
    beats = list(run.cluster.members.sessions.by_call)
    run.tick_and_beat(RETRY_SECONDS + 0.5, *beats)
    run.stands(one, start=12, mlp=7, b=6)
    run.tick_and_beat(UNKNOWN_SECONDS, *beats)
    assert run.told_to(zero) == run.told_to(one) == []
    run.stands(zero, start=12, mlp=7, b=6)
    assert [run.held(worker).until for worker in run.workers] == [14, 14]


def test_workers_that_are_held_where_they_are_stay_there() -> None:
    """They could not run up to a start that becomes known afterwards, and the run would never end."""
    run = asked_with_unknown_iterations()
    zero, one = run.workers
    pass_unknown_seconds(run)
    run.all_stand(start=None, mlp=7, b=5)
    assert run.told_to(zero) == run.told_to(one) == ["hold"] and run.held(zero).release
    run.stands(zero, start=12, mlp=7, b=6)
    run.all_hold(mlp=7, b=6)
    assert dict(run.cluster.snapshots.attempt.steps) == {"mlp": 7, "b": 6}


def test_a_restarted_scheduler_leaves_held_workers_where_they_are() -> None:
    run = asked_with_unknown_iterations()
    zero, one = run.workers
    run.on(StopReported(run.session(zero), 0, True, (("mlp", 7), ("b", 6))))
    assert run.told_to(zero) == run.told_to(one) == ["hold"] and run.held(one).release
    run.all_hold(mlp=7, b=6)
    assert dict(run.cluster.snapshots.attempt.steps) == {"mlp": 7, "b": 6}


def test_a_worker_of_which_nothing_is_known_has_begun_nothing() -> None:
    run = Run()
    run.asked(*run.workers)
    run.holds(run.workers[0], mlp=1)
    run.holds(run.workers[1])  # Its parameters are not open yet.
    run.go_on()
    assert run.last(run.workers[0]).next == (("mlp", 0),) and run.steps == [{"mlp": 0}]
    # What their leaving makes of the step that one had begun is not saved.
    run.train(1)
    assert run.saved(run.save()).steps == {"mlp": 0}


@pytest.mark.parametrize("policy", [SavePolicy(at_end=False), None])
def test_without_a_last_snapshot_they_leave_at_once(policy: SavePolicy | None) -> None:
    run = Run(policy=policy or SavePolicy())
    if policy is None:
        run.cluster.snapshots.catalog.replaced = "another scheduler saves"
    run.train(3)
    run.asked(*run.workers)
    run.holds(run.workers[0], mlp=4)
    run.holds(run.workers[1], mlp=3)
    assert [run.last(worker).kind for worker in run.workers] == ["leave", "leave"]


def test_nothing_new_is_not_saved_again() -> None:
    run = Run()
    run.train(3)
    first = run.saved(run.save())
    run.asked(*run.workers)
    run.all_hold(mlp=3)
    assert run.last(run.workers[0]).kind == "leave" and run.cluster.snapshots.catalog.commits == (first,)
    run.train(4)
    assert run.saved(run.save()) == first, "step 3 was not made by all"


@pytest.mark.parametrize("trains", [True, False])
def test_a_step_of_some_is_not_saved_where_the_last_snapshot_fails(trains: bool) -> None:
    run = Run()
    run.train(7)
    run.asked(*run.workers)
    run.writing = False
    run.holds(run.workers[0], mlp=8)
    run.holds(run.workers[1], mlp=7)
    attempt = run.cluster.snapshots.attempt
    run.go_on()
    server = run.cluster.members.sessions.call_of("server-0")
    run.on(sn.PartFailed(server, attempt.number, "the disk is full"))
    run.writing = True
    run.all_leave()
    assert run.stored.ends == (EndStep("mlp", 7),)
    for step, text in ((7, ""), (8, "ended together at step 7 of 'mlp', which is at step 8")):
        restarted = Cluster(run.settings, run.stored, run.now)
        assert text in (found := restarted.snapshots.end_snapshot.check({"mlp": step})) and bool(text) == bool(found)
    if trains:
        run.train(8)  # Of worker-0 alone.
        error = run.state(run.save())
        assert isinstance(error, SnapshotFailedError)
        assert "ended together at step 7 of 'mlp', which is at step 8" in error.message and run.steps == []
    else:
        assert run.saved(run.save()).steps == {"mlp": 7}
        run.begin()
        assert run.stored.ends == ()


def test_asynchronous_workers_leave_after_their_pushes() -> None:
    run = Run(consistency=ASP())
    run.train(9)
    run.asked(*run.workers)
    run.all_hold(mlp=5)
    run.go_on()
    assert run.last(run.workers[0]) == StopCommand(run.last(run.workers[1]).number, "leave")


# --- who does not end, or is busy -------------------------------------------------------------------------------------


def test_some_leave_and_the_others_train_on() -> None:
    run = Run(workers=3)
    zero, one, two = run.workers
    run.asked(zero)
    run.tick(COLLECT_SECONDS + 0.5)
    assert (run.told_to(zero), run.told_to(one)) == ([], ["ask"])
    run.answers(one, stopping=False)
    assert run.told_to(zero) == [], "worker-2 may be busy, and asked to end"
    run.answers(two, stopping=False)
    assert run.last(zero).kind == "leave" and run.last(zero).next == ()
    assert run.told_to(one) == ["ask"]
    run.leaves(zero)
    assert run.map.parameters[0].members[0].worker_id == "worker-1"
    # And the next time is like the first.
    run.asked(one, two)
    assert run.told_to(one)[-1] == run.told_to(two)[-1] == "hold"


def test_a_busy_worker_is_waited_for() -> None:
    run = Run()
    zero, one = run.workers
    run.train(4)
    run.asked(zero)
    for _ in range(20):
        run.tick(0.5)
        run.beat(*(run.session(worker) for worker in run.workers), *run.server_sessions())
    assert run.told_to(zero) == [] and run.told_to(one) == ["ask"]
    assert "for worker-1 (rank 1) to confirm shutdown" in run.cluster.waits
    run.answers(one, stopping=True)
    assert run.told_to(zero) == ["hold"]
    assert "for worker-0 (rank 0) and 0 more" not in str(run.cluster.waits)


@pytest.mark.parametrize("phase", ["asking", "holding"])
def test_who_dies_is_not_waited_for(phase: str) -> None:
    run = Run(workers=3)
    zero, one, two = run.workers
    run.asked(zero, one)
    if phase == "asking":
        run.tick(COLLECT_SECONDS + 0.5)
        for _ in range(10):  # The end of a session soon after a silence would say nothing.
            run.tick()
            run.beat(*run.server_sessions(), *(run.session(worker) for worker in run.workers))
    else:
        run.asked(two)
        run.holds(zero, mlp=1)
        run.holds(one, mlp=1)
    run.on(ev.SessionClosed(run.session(two), "killed"))
    if phase == "asking":
        assert run.told_to(zero) == ["hold"]
    else:
        run.go_on()
        assert run.last(zero).kind == "hold" or run.last(zero).next == (("mlp", 1),)


@pytest.mark.parametrize("phase", ["ask", "hold", "leave"])
def test_a_new_session_is_told_again(phase: str) -> None:
    run = Run(policy=SavePolicy(at_end=False))
    zero, one = run.workers
    run.asked(zero)
    if phase == "ask":
        run.tick(COLLECT_SECONDS + 0.5)
    else:
        run.asked(one)
        if phase == "leave":
            run.holds(zero, mlp=0)
            run.holds(one, mlp=0)
    before = run.last(one)
    assert before.kind == phase
    run.open(one)
    assert run.last(one) == before
    run.beat(run.session(one))
    assert run.told_to(one) == [phase], "once in each session"


def test_a_worker_that_comes_later_trains_on_and_is_saved() -> None:
    run = Run()
    run.train(3)
    run.asked(*run.workers)
    run.all_hold(mlp=3)
    run.go_on()
    run.all_leave()
    assert run.saved(run.save()).steps == {"mlp": 3}
    late, _ = run.join()
    run.create(late)
    for session in run.server_sessions():
        proposal = [value for value in run.told[session] if isinstance(value, ef.JoinProposal)][-1]
        run.on(ev.JoinAnswered(session, proposal.proposal_id, True, 3))
    run.train(6)
    assert run.saved(run.save()).steps == {"mlp": 6}


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [True, False])
def test_servers_that_do_not_answer_or_fail_keep_nobody(fails: bool) -> None:
    run = Run()
    run.train(3)
    run.answering = False
    run.asked(*run.workers)
    run.all_hold(mlp=3)
    assert run.last(run.workers[0]).kind == "hold"
    if fails:
        attempt = run.cluster.snapshots.attempt
        run.on(sn.PartFailed(run.server_sessions()[0], attempt.number, "the disk is full"))
    for _ in range(0 if fails else int(SAVE_SECONDS) + 2):
        run.beat(*(run.session(worker) for worker in run.workers), *run.server_sessions())
        run.tick(1.0)
    assert run.last(run.workers[0]).kind == "leave"


@pytest.mark.parametrize("phase", ["cutting", "committing"])
def test_a_snapshot_under_way_gives_way_or_is_finished_first(phase: str) -> None:
    run = Run()
    run.train(3)
    run.writing, run.storing = phase == "committing", False
    run.save()
    assert run.cluster.snapshots.attempt.phase.name == phase.upper()
    run.train(5)
    run.asked(*run.workers)
    run.all_hold(mlp=5)
    run.writing = run.storing = True
    run.go_on()
    assert run.steps[-1] == {"mlp": 5} and len(run.steps) == 1 + (phase == "committing")
    assert run.last(run.workers[0]).kind == "leave"


def test_a_run_that_goes_back_forgets_its_last_snapshot() -> None:
    run = Run(workers=1)
    run.train(3)
    run.asked(*run.workers)
    run.holds(run.workers[0], mlp=3)
    run.go_on()
    assert run.cluster.snapshots.end_snapshot.commit is not None
    run.on(ev.SessionClosed(run.server_sessions()[0], "killed"))
    assert run.cluster.snapshots.end_snapshot.commit is None


def test_words_without_a_session_mean_nothing() -> None:
    d = Driver()
    d.on(StopReported(7, 0, True))
    _, session = d.join("server")
    d.on(StopReported(session, 0, True))
    d.tick(3)
    assert not d.told[session] or not isinstance(d.told[session][-1], StopCommand)


def test_with_backup_workers_the_cut_is_where_enough_of_them_stand() -> None:
    run = Run(3, consistency=BSP(backup_workers=1))
    run.train(6)
    run.asked(*run.workers)
    for worker, step in zip(run.workers, (6, 6, 4), strict=True):
        run.holds(worker, mlp=step)
    run.go_on()
    assert run.steps == [{"mlp": 6}]


def test_who_leaves_already_does_not_hold_up_the_others() -> None:
    run = Run(3)
    zero, one, two = run.workers
    run.train(5)
    run.asked(zero)
    run.tick(COLLECT_SECONDS + 0.5)
    for worker in (one, two):
        run.answers(worker, stopping=False)
    assert run.told_to(zero) == ["leave"]
    run.asked(one, two)  # Worker-0 is still busy with its own end.
    assert run.last(zero).kind == "hold"
    run.all_hold(mlp=5)
    run.go_on()
    assert run.steps == [{"mlp": 5}] and run.told_to(two)[-1] == "leave"


def test_who_comes_while_others_hold_trains_on_and_is_saved() -> None:
    run = Run(policy=SavePolicy(seconds=100))
    zero, one = run.workers
    run.train(7)
    run.asked(zero, one)
    run.holds(zero, mlp=7)
    run.join()
    assert run.told_to(zero)[-1] == run.told_to(one)[-1] == "leave"
    run.leaves(zero)
    run.leaves(one)
    run.train(9)
    assert run.saved(run.save()).steps == {"mlp": 9}
