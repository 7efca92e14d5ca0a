"""Workers that were expelled while alive, and want to continue the push that they were making."""

from __future__ import annotations

import pytest

from psdist import ASP, BSP, SSP
from psdist.consistency import Consistency
from psdist.types import ParametersMember
from psdist.wire.limits import DEPARTED_MAX
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_state import Member
from tests.support.scheduler_driver import Driver, caller

Started = tuple[Driver, list[Member], list[int], list[int]]


def started(consistency: Consistency, workers: int = 2) -> Started:
    """Ready parameters on two servers: the driver, workers, their sessions, and the servers'."""
    d = Driver(workers_min=workers, servers_min=2)
    servers = [d.join("server")[1] for _ in range(2)]
    joined = [d.join() for _ in range(workers)]
    for worker, _ in joined:
        d.create(worker, consistency=consistency)
    d.ask(ev.CommitParameters, joined[0][0])
    return d, [worker for worker, _ in joined], [session for _, session in joined], servers


def expel(d: Driver, worker: Member, session: int) -> Member:
    """The worker's session breaks, and it registers again."""
    d.on(ev.SessionClosed(session, "its session broke"))
    again, _ = d.join(member_id=worker.member_id, rank=worker.rank)
    return again


def proposed(d: Driver, session: int) -> ParametersMember:
    proposals = [value for value in d.told[session] if isinstance(value, ef.JoinProposal)]
    return proposals[-1].member


def answer(d: Driver, sessions: list[int], *accepted: bool, version_max: int = 0) -> None:
    """The servers' answers to the newest proposal."""
    proposal = [value for value in d.told[sessions[0]] if isinstance(value, ef.JoinProposal)][-1].proposal_id
    for session, one in zip(sessions, accepted, strict=True):
        d.on(ev.JoinAnswered(session, proposal, one, version_max))


def test_bsp_goes_on_at_the_same_step_where_all_servers_accept() -> None:
    d, workers, sessions, servers = started(BSP())
    again = expel(d, workers[1], sessions[1])
    call = d.create(again, resume=ev.ResumePush(1, 7))
    member = ParametersMember("worker-1", 2, 1, first_step=7, origin=1, first_push=7)
    assert proposed(d, servers[0]) == member
    assert d.state(call) == ef.Waiting("for server-0, server-1 to agree on step 7 of 'mlp'")
    answer(d, servers, True, True)
    assert d.state(call) == ef.ParametersReady(7, resumed=True)
    assert d.map.parameters[0].members[1] == member and not d.map.parameters[0].departed


@pytest.mark.parametrize("consistency", [BSP(), SSP(2)])
def test_servers_are_told_where_one_that_joined_ends(consistency: Consistency) -> None:
    """Servers follow the newest of several maps, in which it may no longer be a member: their proposal would stay."""
    d, workers, sessions, servers = started(consistency)
    again = expel(d, workers[1], sessions[1])
    d.create(again, consistency=consistency, resume=ev.ResumePush(1, 7))
    answer(d, servers, True, True)
    assert not any(isinstance(one, ef.WithdrawJoin) for session in servers for one in d.told[session])
    d.on(ev.Leave(d.number(), caller(again), "stopped"))
    for session in servers:
        (withdrawn,) = [one for one in d.told[session] if isinstance(one, ef.WithdrawJoin)]
        assert (withdrawn.parameters, withdrawn.worker_id) == ("mlp", "worker-1")
    d.on(ev.Leave(d.number(), caller(workers[0]), "stopped"))
    assert sum(isinstance(one, ef.WithdrawJoin) for one in d.told[servers[0]]) == 1, "it had joined by no proposal"


def test_bsp_begins_later_where_a_slice_went_on_without_it() -> None:
    d, workers, sessions, servers = started(BSP())
    again = expel(d, workers[1], sessions[1])
    call = d.create(again, resume=ev.ResumePush(1, 7))
    answer(d, servers, True, False, version_max=9)
    assert isinstance(d.told[servers[0]][-2], ef.WithdrawJoin)
    assert proposed(d, servers[1]) == ParametersMember("worker-1", 2, 1, first_step=11)
    answer(d, servers, True, True)
    assert d.state(call) == ef.ParametersReady(11, resumed=False)


def test_bsp_asks_the_new_primary_about_the_same_step() -> None:
    d = Driver(workers_min=1, servers_min=3, replicas=2)
    servers = [d.join("server")[1] for _ in range(3)]
    worker, session = d.join()
    d.create(worker)
    d.ask(ev.CommitParameters, worker)
    d.fill()
    again = expel(d, worker, session)
    call = d.create(again, resume=ev.ResumePush(1, 4))
    d.on(ev.JoinAnswered(servers[0], d.told[servers[0]][-1].proposal_id, True, 0))
    d.on(ev.SessionClosed(servers[0], "killed"))
    assert proposed(d, servers[1]).first_step == 4 and proposed(d, servers[1]).origin == 1
    answer(d, servers[1:], True, True)
    assert d.state(call) == ef.ParametersReady(4, resumed=True)


@pytest.mark.parametrize("consistency", [BSP(), ASP()])
def test_a_push_from_before_a_roll_back_does_not_go_on(consistency: Consistency) -> None:
    d, workers, sessions, servers = started(consistency)
    again = expel(d, workers[1], sessions[1])
    call = d.create(again, consistency=consistency, resume=ev.ResumePush(1, 0, generation=1))
    if isinstance(consistency, BSP):
        assert not proposed(d, servers[0]).origin
    else:
        assert d.state(call) == ef.ParametersReady(0, resumed=False)


def test_asp_goes_on_at_once() -> None:
    d, _, sessions, _ = started(ASP())
    departed = d.map.parameters[0].members[1]
    d.on(ev.SessionClosed(sessions[1], "its session broke"))
    for scheduler in (d, Driver(d.stored, workers_min=2, servers_min=2)):
        assert scheduler.map.parameters[0].departed == (departed,)
    again, _ = d.join(member_id="worker-1", rank=1)
    assert d.state(d.create(again, consistency=ASP(), resume=ev.ResumePush(1, 3))) == ef.ParametersReady(
        0, resumed=True
    )
    entry = d.map.parameters[0]
    assert entry.members[1] == ParametersMember("worker-1", 2, 1, origin=1, first_push=3) and not entry.departed
    assert entry.members[1].producer == ("worker-1", 1)


def test_ssp_goes_on_from_a_clock_that_servers_agree_on() -> None:
    d, workers, sessions, servers = started(SSP(2))
    again = expel(d, workers[1], sessions[1])
    call = d.create(again, consistency=SSP(2), resume=ev.ResumePush(1, 3))
    answer(d, servers, True, False, version_max=40)
    assert proposed(d, servers[0]) == ParametersMember("worker-1", 2, 1, first_step=42, origin=1, first_push=3)
    answer(d, servers, True, True)
    assert d.state(call) == ef.ParametersReady(42, resumed=True)


@pytest.mark.parametrize("consistency", [SSP(1), ASP()])
def test_a_chain_of_incarnations_is_one_producer(consistency: Consistency) -> None:
    d, workers, sessions, servers = started(consistency)
    session, worker = sessions[1], workers[1]
    for number in (3, 3, 5):
        d.on(ev.SessionClosed(session, "its session broke"))
        worker, session = d.join(member_id="worker-1", rank=1)
        d.create(worker, consistency=consistency, resume=ev.ResumePush(1, number))
        if isinstance(consistency, SSP):
            answer(d, servers, True, True)
    member = d.map.parameters[0].members[1]
    assert (member.incarnation, member.producer, member.first_push) == (4, ("worker-1", 1), 5)


def test_a_process_that_was_started_again_begins_anew() -> None:
    d, workers, sessions, _ = started(ASP())
    again = expel(d, workers[1], sessions[1])
    assert d.state(d.create(again, consistency=ASP())) == ef.ParametersReady(0)
    entry = d.map.parameters[0]
    assert entry.members[1].producer == ("worker-1", 2) and not entry.departed, "nobody can continue its pushes"
    late = expel(d, again, d.cluster.members.sessions.call_of("worker-1"))
    assert d.state(d.create(late, consistency=ASP(), resume=ev.ResumePush(1, 3))) == ef.ParametersReady(0)


def test_who_leaves_has_finished_its_pushes() -> None:
    d, workers, _, _ = started(ASP())
    d.on(ev.Leave(d.number(), caller(workers[1]), "closed"))
    assert not d.map.parameters[0].departed


def test_departed_workers_are_kept_up_to_a_limit() -> None:
    d, _, _, _ = started(ASP(), workers=1)
    for number in range(DEPARTED_MAX + 3):
        worker, session = d.join(member_id=f"passing-{number}")
        d.create(worker, consistency=ASP())
        d.on(ev.SessionClosed(session, "its session broke"))
    departed = [member.worker_id for member in d.map.parameters[0].departed]
    assert departed == [f"passing-{number}" for number in range(3, DEPARTED_MAX + 3)]


# --- nobody is left ---------------------------------------------------------------------------------------------------


def all_died(version: int) -> tuple[Driver, list[Member], list[int]]:
    """All workers died, and registered again; the servers had told of this version. Workers, sessions of servers."""
    d, workers, sessions, servers = started(BSP())
    for session in servers:
        d.on(ev.Heartbeat(session, versions=(("mlp", version),)))
    for session in sessions:
        d.on(ev.SessionClosed(session, "killed"))
    again = [d.join(member_id=worker.member_id, rank=worker.rank)[0] for worker in workers]
    return d, again, servers


def test_a_step_that_nobody_pushed_to_is_not_left_out() -> None:
    d, workers, servers = all_died(7)
    calls = []
    for worker in workers:
        calls.append(d.create(worker))
        assert proposed(d, servers[0]).first_step == 7
    for worker in workers:
        for session in servers:
            for proposal in [value for value in d.told[session] if isinstance(value, ef.JoinProposal)]:
                if proposal.member.worker_id == worker.member_id:
                    d.on(ev.JoinAnswered(session, proposal.proposal_id, True, 7))
    assert [d.state(call) for call in calls] == [ef.ParametersReady(7)] * 2


def test_a_worker_begins_with_members_that_have_not_begun() -> None:
    d, workers, servers = all_died(7)
    d.create(workers[0])
    answer(d, servers, True, True)
    call = d.create(workers[1])
    assert proposed(d, servers[0]).first_step == 7
    for session in servers:
        d.on(ev.Heartbeat(session, versions=(("mlp", 8),)))
    answer(d, servers[:1], False, version_max=8)
    assert proposed(d, servers[0]).first_step == 10
    answer(d, servers, True, True)
    assert d.state(call) == ef.ParametersReady(10)
    d.create(d.join()[0])
    assert proposed(d, servers[0]).first_step == 10  # A present member has not begun.


def test_in_ssp_a_joiner_does_not_begin_with_others() -> None:
    """Servers hold nothing: the present members would continue meanwhile, and read without its pushes."""
    d, _, _, servers = started(SSP(0))
    d.create(d.join()[0], consistency=SSP(0))
    answer(d, servers[:1], False, version_max=1)
    answer(d, servers, True, True)
    assert d.map.parameters[0].members[2].first_step == 3
    d.create(d.join()[0], consistency=SSP(0))
    assert proposed(d, servers[0]).first_step == 0
    answer(d, servers[:1], False, version_max=2)
    assert proposed(d, servers[0]).first_step == 4


def test_where_nobody_is_left_the_first_step_is_the_one_that_the_servers_are_at() -> None:
    d, (worker, _), servers = all_died(7)
    call = d.create(worker)
    answer(d, servers[:1], False, version_max=8)
    assert proposed(d, servers[1]).first_step == 8
    answer(d, servers[:1], False, version_max=8)  # This makes no sense: it would be asked again for ever.
    assert proposed(d, servers[1]).first_step > 8
    answer(d, servers, True, True)
    assert isinstance(d.state(call), ef.ParametersReady)
