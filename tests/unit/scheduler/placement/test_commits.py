"""Commits of uploaded values: servers are asked again on a new session, missing slices are named, changed sets
restart."""

from __future__ import annotations

from psdist import errors
from psdist.types import Layout
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_state import Member
from tests.support.scheduler_driver import Driver, caller


def uploading(servers: int = 2) -> tuple[Driver, Member, list[int], int]:
    """A driver whose worker was told to upload; that worker, the servers' sessions, and the call that creates."""
    d = Driver(servers_min=servers)
    sessions = [d.join("server")[1] for _ in range(servers)]
    worker, _ = d.join()
    call = d.create(worker)
    assert d.state(call) == ef.Upload()
    d.has_values = False
    return d, worker, sessions, call


def test_every_primary_is_asked_before_the_values_count() -> None:
    d, worker, sessions, call = uploading()
    epoch = d.map.epoch
    commit = d.ask(ev.CommitParameters, worker)
    assert [session for session, _ in d.checks] == sessions
    d.answer_check()
    assert d.state(commit) is None and d.map.epoch == epoch
    d.answer_check()
    assert d.state(commit) == ef.Done()
    assert d.state(call) == ef.ParametersReady(0)


def test_a_server_without_values_refuses_and_a_later_commit_counts() -> None:
    d, worker, _, call = uploading()
    epoch = d.map.epoch
    commit = d.ask(ev.CommitParameters, worker)
    d.answer_check(installed=0)
    error = d.errors[commit]
    assert isinstance(error, errors.InvalidArgumentError)
    assert "server-0 has initial values of 0 of its 2 slices of 'mlp': Install all of them" in error.message
    assert d.map.epoch == epoch
    d.answer_check()  # The other's answer is too late, and changes nothing.
    assert d.map.epoch == epoch and d.state(call) == ef.Upload()
    d.has_values = True
    assert d.state(d.ask(ev.CommitParameters, worker)) == ef.Done()


def test_some_values_are_not_all() -> None:
    d, worker, _, _ = uploading()
    commit = d.ask(ev.CommitParameters, worker)
    d.answer_check()
    d.answer_check(installed=0)
    assert "server-1 has initial values of 0 of its 1 slices" in d.errors[commit].message


def test_a_server_is_asked_again_on_a_new_session() -> None:
    d, worker, sessions, _ = uploading(servers=1)
    commit = d.ask(ev.CommitParameters, worker)
    d.checks.clear()
    again = d.open(d.cluster.members.servers[0])
    (session, _), *more = d.checks
    assert (session, more) == (again, []) and session not in sessions
    d.answer_check()
    assert d.state(commit) == ef.Done()


def test_values_that_went_with_a_server_are_uploaded_again() -> None:
    d, worker, sessions, call = uploading()
    commit = d.ask(ev.CommitParameters, worker)
    answered = d.checks[0]
    d.on(ev.SessionClosed(sessions[1], "its session broke"))
    assert isinstance(d.errors[commit], errors.StaleEpochError)
    assert d.told[call].count(ef.Upload()) == 2
    d.on(ev.ValuesAnswered(answered[0], answered[1].number, 1 << 30))
    assert not d.map.parameters[0].ready
    d.checks.clear()
    d.has_values = True
    assert d.state(d.ask(ev.CommitParameters, worker)) == ef.Done()


def test_a_commit_of_a_worker_that_is_lost_is_over() -> None:
    d, worker, _, _ = uploading()
    commit = d.ask(ev.CommitParameters, worker)
    d.on(ev.Leave(d.number(), caller(worker)))
    assert isinstance(d.errors[commit], errors.FencedError), "a client joins again only after this error"
    while d.checks:
        d.answer_check()
    assert not d.map.parameters[0].ready


def test_a_call_that_broke_is_replaced_by_the_next() -> None:
    d, worker, _, _ = uploading()
    broken, commit = d.ask(ev.CommitParameters, worker), d.ask(ev.CommitParameters, worker)
    assert isinstance(d.errors[broken], errors.ClosedError)
    d.on(ev.CallEnded(broken))
    while d.checks:
        d.answer_check()
    assert d.state(commit) == ef.Done()


def test_a_commit_whose_call_ended_is_forgotten() -> None:
    d, worker, _, _ = uploading()
    commit = d.ask(ev.CommitParameters, worker)
    d.on(ev.CallEnded(commit))
    while d.checks:
        d.answer_check()
    assert d.state(commit) is None and not d.map.parameters[0].ready


def test_others_learn_who_is_asked() -> None:
    d, worker, _, _ = uploading()
    other = d.create(d.join()[0])
    d.ask(ev.CommitParameters, worker)
    assert d.state(other) == ef.Waiting("for server-0 to confirm the initial values of 'mlp'")


def test_nobody_is_asked_about_an_empty_vector() -> None:
    d = Driver()
    d.join("server")
    worker, _ = d.join()
    d.create(worker, layout=Layout(()))
    d.has_values = False
    assert d.state(d.ask(ev.CommitParameters, worker)) == ef.Done()
