"""Creating parameters: awaited workers, refused settings, the size of slices, and commits of uploaded values."""

from __future__ import annotations

import pytest

from psdist import errors
from psdist.consistency import BSP
from psdist.optim import SGD, override
from psdist.types import SLICE_ELEMENTS_MAX, SLICE_ELEMENTS_MIN, Layout, Slicing, TensorSpec, choose_slice_elements
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_state import Member
from psdist_scheduler.decide.parameter_creation import RETURN_GRACE_SECONDS
from tests.support.scheduler_driver import Driver, caller, spec


def started() -> tuple[Driver, list[Member], list[int]]:
    """A driver with two workers, a server, and the sessions of all."""
    d = Driver(workers_min=2)
    _, server_session = d.join("server")
    workers, sessions = zip(*(d.join() for _ in range(2)), strict=True)
    return d, list(workers), [server_session, *sessions]


@pytest.mark.parametrize(("reason", "is_over"), [("closed", True), ("failed", False), ("stopped", False)])
def test_the_wait_for_a_worker_ends_where_its_script_has_ended(reason: str, is_over: bool) -> None:
    d, workers, sessions = started()
    call = d.create(workers[0])
    assert d.state(call) == ef.Waiting("for worker-1 (rank 1) to create 'mlp'")
    d.on(ev.Leave(d.number(), caller(workers[1]), reason))
    assert d.state(call) == ef.Waiting("for 1 of 2 workers to register")  # It may return immediately.
    d.now += RETURN_GRACE_SECONDS
    d.beat(*sessions)
    d.tick()
    if is_over:
        assert isinstance(d.errors[call], errors.WorkerLeftError)
        assert "worker-1 (rank 1) ended without asking for 'mlp'" in str(d.errors[call])
    else:  # It comes again.
        assert d.state(call) == ef.Waiting("for 1 of 2 workers to register")


def test_workers_that_ended_before_this_one_came_are_no_reason() -> None:
    d = Driver(workers_min=2)
    d.join("server")
    for worker in [d.join()[0] for _ in range(2)]:
        d.on(ev.Leave(d.number(), caller(worker), "closed"))
    d.now += 60
    late, session = d.join()
    server = d.join("server")[1]
    call = d.create(late)
    d.now += RETURN_GRACE_SECONDS
    d.beat(session, server)
    d.tick()
    assert d.state(call) == ef.Waiting("for 1 of 2 workers to register")


def test_others_that_have_not_come_yet_are_waited_for() -> None:
    d = Driver(workers_min=3)
    d.join("server")
    first, _ = d.join()
    second, _ = d.join()
    call = d.create(first)
    d.on(ev.Leave(d.number(), caller(second), "closed"))
    assert d.state(call) == ef.Waiting("for 2 of 3 workers to register")
    d.join()  # In the place of the one that ended.
    assert d.state(call) == ef.Waiting("for 1 of 3 workers to register")
    d.join()
    assert "to create 'mlp'" in d.state(call).waiting_for


def test_an_override_that_matches_no_tensor_is_refused() -> None:
    d, workers, _ = started()
    call = d.create(workers[0], optimizer=SGD(lr=0.1, overrides=(override("w", lr=0.2), override("*.bias", lr=0.0))))
    assert isinstance(d.errors[call], errors.InvalidArgumentError)
    assert "override '*.bias' matches no tensor of w, b" in str(d.errors[call])
    assert d.cluster.registry.all == ()
    # One that another takes everything from does match.
    d.create(workers[0], optimizer=SGD(lr=0.1, overrides=(override("*", lr=0.2), override("b", lr=0.0))))
    assert d.cluster.registry.all != ()


@pytest.mark.parametrize("backup", [1, 2])
def test_backup_workers_leave_one_to_wait_for(backup: int) -> None:
    d, workers, _ = started()
    calls = [d.create(worker, consistency=BSP(backup_workers=backup)) for worker in workers]
    if backup < 2:
        assert d.state(calls[0]) == ef.Upload()
        return
    for call in calls:
        assert isinstance(d.errors[call], errors.InvalidArgumentError)
        assert "there are 2 workers, so use at most 1" in str(d.errors[call])
    assert d.cluster.registry.all == ()


def test_uncompressed_slices_between_hosts_are_smaller() -> None:
    for hosts, settings, elements in [
        (("a", "a", "a"), {}, 1 << 20),
        (("a", "a", "b"), {}, 1 << 18),
        (("b", "a", "a"), {}, 1 << 18),
        (("a", "a", "b"), {"pull_compression": "Int8()"}, 1 << 20),
        (("a", "a", "b"), {"slice_elements": 1 << 19}, 1 << 19),
    ]:
        d = Driver(workers_min=2)
        d.join("server", host=hosts[0])
        workers = [d.join(host=host)[0] for host in hosts[1:]]
        for worker in workers:
            d.create(worker, Layout((TensorSpec("w", (25_000_000,)),)), **settings)
        assert d.map.parameters[0].slicing == Slicing(25_000_000, elements)


def test_slices_are_a_power_of_two_and_enough() -> None:
    for between_hosts in [False, True]:
        for bits in range(44):
            for total in ((1 << bits) - 1, 1 << bits, (1 << bits) + 1):
                if not total:
                    continue
                elements = choose_slice_elements(total, between_hosts=between_hosts)
                assert elements.bit_count() == 1
                assert SLICE_ELEMENTS_MIN <= elements <= SLICE_ELEMENTS_MAX
                if elements > 1 << 18:
                    assert Slicing(total, elements).count >= (80 if between_hosts else 20)


def test_a_set_of_some_workers_waits_for_these_alone() -> None:
    d = Driver(workers_min=3)
    d.join("server")
    first, second, third = (d.join()[0] for _ in range(3))
    call = d.create(first, workers=(0, 2))
    assert d.state(call) == ef.Waiting(f"for {third} to create 'mlp'")
    refused = d.create(second, workers=(0, 2))
    assert isinstance(d.errors[refused], errors.InvalidArgumentError)
    assert "has rank 1, and workers=[0, 2] train 'mlp'" in str(d.errors[refused])
    other = d.create(third)
    assert isinstance(d.errors[other], errors.SettingsMismatchError)
    assert "workers is (), not (0, 2)" in str(d.errors[other])
    d.create(third, workers=(0, 2))
    (entry,) = d.cluster.registry.entries
    assert [member.rank for member in entry.members] == [0, 2]


def test_a_set_waits_for_a_rank_that_has_not_registered() -> None:
    d, workers, _ = started()
    call = d.create(workers[0], workers=(0, 5))
    assert d.state(call) == ef.Waiting("for a worker of rank 5 to register, which trains 'mlp'")


@pytest.mark.parametrize("ranks", [(1, 0), (0, 0), (-1, 2)])
def test_ranks_of_a_set_are_in_ascending_order(ranks: tuple[int, ...]) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="are not ranks in ascending order"):
        spec(workers=ranks)


# --- commits of uploaded values ---------------------------------------------------------------------------------------


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
    d.answer_check(installed=1)
    error = d.errors[commit]
    assert isinstance(error, errors.InvalidArgumentError)
    assert "server-0 has initial values of 1 of its 2 slices of 'mlp': Install all of them" in error.message
    assert d.map.epoch == epoch
    d.answer_check()  # The other's answer is too late, and changes nothing.
    assert d.map.epoch == epoch and d.state(call) == ef.Upload()
    d.has_values = True
    assert d.state(d.ask(ev.CommitParameters, worker)) == ef.Done()


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
