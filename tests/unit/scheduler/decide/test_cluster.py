"""The scheduler's machine: registration, sessions, leases, and the life of parameters, event by event."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest

from psdist import errors
from psdist.consistency import ASP
from psdist.optim import Adam
from psdist.types import Layout, ParametersMember, TensorSpec
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide.cluster_events import EqualContributions
from psdist_scheduler.decide.cluster_state import Member
from psdist_scheduler.decide.effects import Notice
from tests.support.replicated_run import Run
from tests.support.scheduler_driver import LAYOUT, Driver, caller


def started(workers: int = 2, servers: int = 2, **settings: int) -> tuple[Driver, list[Member], list[int], list[int]]:
    """A driver with live members; the workers, their sessions, and the servers' sessions."""
    d = Driver(workers_min=workers, servers_min=servers)
    server_sessions = [d.join("server")[1] for _ in range(servers)]
    joined = [d.join() for _ in range(workers)]
    return d, [member for member, _ in joined], [session for _, session in joined], server_sessions


def trained(workers: int = 2, **settings: Any) -> tuple[Driver, list[Member], list[int], list[int]]:
    """The same with ready parameters "mlp"."""
    d, members, sessions, server_sessions = started(workers)
    for worker in members:
        d.create(worker, **settings)
    d.ask(ev.CommitParameters, members[0])
    return d, members, sessions, server_sessions


# --- registration -----------------------------------------------------------------------------------------------------


def test_ids_and_ranks_are_chosen() -> None:
    d = Driver()
    assert [d.register("server").member_id for _ in range(2)] == ["server-0", "server-1"]
    first, second = d.register(), d.register()
    assert [(m.member_id, m.rank, m.incarnation) for m in (first, second)] == [("worker-0", 0, 1), ("worker-1", 1, 1)]
    assert d.register(rank=5).member_id == "worker-5"
    assert d.register(member_id="eve").rank == 2


def test_a_returning_worker_has_its_rank_and_a_new_incarnation() -> None:
    d = Driver()
    worker, session = d.join(rank=3)
    d.on(ev.SessionClosed(session, "its session broke"))
    for scheduler in (Driver(d.stored), d):
        again = scheduler.register(member_id=worker.member_id)
        assert (again.rank, again.incarnation) == (3, 2), "also after a restart"


def test_refused_registrations_change_nothing() -> None:
    for fields, error, text in [
        ({"protocol_version": 7}, errors.ProtocolMismatchError, "version 7,.*speaks 6: .* of the scheduler"),
        ({"protocol_version": 5}, errors.ProtocolMismatchError, "version 5,.*speaks 6: .* of this member"),
        (
            {"protocol_version": 8, "oldest_protocol": 7},
            errors.ProtocolMismatchError,
            "version 7 to 8,.*speaks 6: .* of the scheduler",
        ),
        ({"run_id": "other"}, errors.WrongRunError, "'run', not 'other'"),
        ({"member_id": "a b"}, errors.InvalidNameError, "'a b'"),
        ({"member_id": "worker-0"}, errors.DuplicateMemberError, "process 42 on box.*30 s"),
        ({"rank": 0, "member_id": "other"}, errors.DuplicateMemberError, "rank 0 is taken by worker-0"),
        ({"rank": 4, "world_size": 4}, errors.InvalidArgumentError, "rank 4"),
        ({"world_size": 10**6}, errors.LimitExceededError, "1000000"),
        ({"role": "server", "member_id": "worker-0"}, errors.DuplicateMemberError, "worker-0"),
    ]:
        d = Driver()
        d.register(host="box", pid=42)
        epoch = d.cluster.epoch
        with pytest.raises(error, match=text):
            d.register(**fields)
        assert d.cluster.epoch == epoch


def test_world_size_raises_the_minimum() -> None:
    d = Driver()
    d.register(world_size=3, rank=1)
    assert d.cluster.demand.workers_min == 3
    assert d.cluster.phase == "waiting for a server to register"


# --- sessions and leases ----------------------------------------------------------------------------------------------


def test_a_server_at_the_address_of_another_ends_its_life() -> None:
    """It is its successor, or the same one, whose first answer was lost: no shard may be placed on the life before."""
    d = Driver()
    d.register("server", address="10.0.0.1:7")
    d.join("server", address="10.0.0.2:7")
    d.join("server", address="10.0.0.1:7")
    assert [server.server_id for server in d.map.servers] == ["server-1", "server-2"]
    assert d.lost == [ef.MemberLost("server-0", "server", "server-2 registered at its address")]


def test_a_broken_session_is_a_loss_at_once() -> None:
    d, workers, sessions, _ = started()
    epoch = d.map.epoch
    d.on(ev.SessionClosed(sessions[1], "its session broke"))
    assert d.map.epoch == epoch + 1
    assert [w.worker_id for w in d.map.workers] == ["worker-0"]
    assert d.lost == [ef.MemberLost("worker-1", "worker", "its session broke")]
    with pytest.raises(errors.FencedError, match="expelled"):
        d.open(workers[1])


def test_silence_is_a_loss_after_the_lease() -> None:
    d, _, sessions, server_sessions = started()
    for _ in range(8):
        d.beat(server_sessions[0])
        d.tick(0.5)
    assert [news.member_id for news in d.lost] == ["server-1"]
    assert re.fullmatch(r"silent for 2\.\d s, and --failure-timeout is 2 s", d.lost[0].reason)
    for _ in range(60):
        d.beat(sessions[0], server_sessions[0])
        d.tick(0.5)
    assert len(d.lost) == 1, "a worker whose connection answers pings is busy"


def test_a_worker_that_sends_to_servers_is_alive() -> None:
    d, workers, sessions, server_sessions = started()
    lives = tuple((worker.member_id, worker.incarnation) for worker in workers)
    for _ in range(80):
        d.on(ev.Heartbeat(server_sessions[0], d.map.epoch, heard=((*lives[0], 0.4),)))
        d.on(ev.Heard((("worker-1", 7), ("worker-9", 1))))  # Neither is a live incarnation.
        d.beat(server_sessions[1])
        d.tick(0.5)
    waits = " ".join(d.cluster.waits)
    assert "for worker-1 to be heard again" in waits and "worker-0" not in waits
    d.on(ev.SessionClosed(sessions[0], "its session broke"))
    assert [news.member_id for news in d.lost] == ["worker-0"], "its stream counts more than what it sends"
    d.on(ev.SessionClosed(sessions[1], "its connection answers no pings"))
    d.tick(0.5)
    assert [news.member_id for news in d.lost] == ["worker-0", "worker-1"]
    d.on(ev.Heard(lives))


def test_a_lease_counts_from_when_the_worker_sent_something() -> None:
    """Not from when a server reports it, which is up to a heartbeat later."""
    d, workers, sessions, server_sessions = started()
    lives = tuple((worker.member_id, worker.incarnation) for worker in workers)
    d.beat(*sessions)
    for _ in range(59):
        d.tick(0.5)
        d.beat(*server_sessions)
    d.on(ev.Heartbeat(server_sessions[0], d.map.epoch, heard=((*lives[0], 1.5), (*lives[1], 40.0))))
    for age in (1e9, math.inf):  # What makes no sense takes nothing back.
        d.on(ev.Heartbeat(server_sessions[0], d.map.epoch, heard=((*lives[0], age),)))
    leases = d.cluster.members.sessions.liveness
    assert leases["worker-0"].deadline - leases["worker-1"].deadline == pytest.approx(29.5 - 1.5, abs=0.3)


def test_a_member_without_a_session_is_dropped() -> None:
    d = Driver()
    d.register()
    d.tick(2.5)
    assert "opened no session" in d.lost[0].reason
    assert d.map.workers == ()


def test_leaving_is_no_loss() -> None:
    d, workers, sessions, _ = started()
    d.on(ev.Leave(d.number(), caller(workers[0]), "finished"))
    assert not d.lost
    assert d.closed == [sessions[0]]
    d.on(ev.SessionClosed(sessions[0], "its session broke"))
    assert not d.lost
    assert [w.worker_id for w in d.map.workers] == ["worker-1"]


def test_a_newer_session_replaces_the_older() -> None:
    d, workers, sessions, _ = started()
    newer = d.open(workers[0])
    assert d.closed == [sessions[0]]
    d.on(ev.SessionClosed(sessions[0], "its session broke"))
    assert not d.lost
    d.on(ev.SessionClosed(newer, "its session broke"))
    assert [news.member_id for news in d.lost] == ["worker-0"]


def test_a_scheduler_that_stood_still_expels_nobody() -> None:
    d, _, sessions, server_sessions = started()
    d.tick(0.5)
    d.now += 30
    d.on(ev.Tick())
    assert not d.lost
    d.beat(*sessions, server_sessions[0])
    d.tick_and_beat(2.5, *sessions, server_sessions[0])
    assert [news.member_id for news in d.lost] == ["server-1"]


# --- restart ----------------------------------------------------------------------------------------------------------


def test_a_restart_keeps_everything() -> None:
    d, workers, _, _ = trained()
    again = Driver(d.stored, workers_min=2, servers_min=2)
    assert again.map.epoch == d.map.epoch + 1
    assert again.map.parameters == d.map.parameters
    assert again.map.servers == d.map.servers
    assert again.map.workers == d.map.workers
    again.tick(60)
    assert not again.lost, "nobody has reached this scheduler, which may be cut off"
    session = again.open(workers[0])
    again.tick_and_beat(5.75, session)
    assert not again.lost
    again.tick_and_beat(0.5, session)
    assert again.lost[0].role == "server" and isinstance(again.cluster.failed, errors.ServerLostError)


def test_after_a_restart_members_have_their_leases_to_return() -> None:
    d, workers, _, _ = started()
    again = Driver(d.stored, workers_min=2, servers_min=2)
    session = again.open(workers[0])
    again.tick_and_beat(6.25, session)
    assert sorted(news.member_id for news in again.lost) == ["server-0", "server-1"]
    again.tick_and_beat(24, session)
    assert [news.member_id for news in again.lost[2:]] == ["worker-1"]
    assert again.register(member_id="worker-1").incarnation == 2


def test_a_restart_while_uploading_asks_the_same_uploader() -> None:
    d, workers, _, _ = started()
    for worker in workers:
        d.create(worker)
    again = Driver(d.stored, workers_min=2, servers_min=2)
    late, first = again.create(workers[1]), again.create(workers[0])
    assert again.state(first) == ef.Upload()
    assert "worker-0 to upload" in again.state(late).waiting_for


# --- creating ---------------------------------------------------------------------------------------------------------


def test_parameters_wait_for_everybody_in_any_order() -> None:
    d = Driver(workers_min=2, servers_min=2)
    one, _ = d.join(rank=1)
    call = d.create(one)
    assert d.state(call) == ef.Waiting("for 2 of 2 servers to register")
    d.join("server")
    assert d.state(call) == ef.Waiting("for 1 of 2 servers to register")
    d.join("server")
    assert d.state(call) == ef.Waiting("for 1 of 2 workers to register")
    zero, _ = d.join(rank=0)
    assert d.state(call) == ef.Waiting("for worker-0 (rank 0) to create 'mlp'")
    assert d.map.parameters == ()
    upload = d.create(zero)
    assert d.state(upload) == ef.Upload()
    assert d.state(call) == ef.Waiting("for worker-0 to upload the initial values of 'mlp'")
    (entry,) = d.map.parameters
    assert not entry.ready
    assert entry.members == (ParametersMember("worker-0", 1, 0), ParametersMember("worker-1", 1, 1))
    assert entry.total == LAYOUT.total
    assert entry.layout_digest == LAYOUT.digest
    assert set(entry.primaries) == {"server-0", "server-1"}
    commit = d.ask(ev.CommitParameters, zero)
    assert d.state(commit) == ef.Done()
    assert d.state(call) == d.state(upload) == ef.ParametersReady(0)
    assert d.map.parameters[0].ready
    assert d.cluster.phase == "training 'mlp' at version 0"
    assert d.state(d.create(one)) == ef.ParametersReady(0)


def test_another_layout_is_refused_and_the_others_wait_on() -> None:
    d, workers, _, _ = started()
    call = d.create(workers[0])
    other = Layout((TensorSpec("w", (100, 10)), TensorSpec("b", (100,))))
    refused = d.create(workers[1], layout=other)
    assert isinstance(d.errors[refused], errors.LayoutMismatchError)
    assert "worker-0" in str(d.errors[refused]) and "(100, 10)" in str(d.errors[refused])
    assert d.state(call) == ef.Waiting("for worker-1 (rank 1) to create 'mlp'")
    d.create(workers[1])
    assert d.state(call) == ef.Upload()


def test_other_settings_are_refused_before_and_after_creation() -> None:
    d, workers, _, _ = started()
    d.create(workers[0])
    refused = d.create(workers[1], consistency=ASP())
    assert isinstance(d.errors[refused], errors.SettingsMismatchError)
    assert "consistency is ASP" in str(d.errors[refused])
    d.create(workers[1])
    d.ask(ev.CommitParameters, workers[0])
    late, _ = d.join()
    refused = d.create(late, non_finite="skip")
    assert "non_finite is 'skip'" in str(d.errors[refused])
    assert "slice_elements" in str(d.errors[d.create(late, slice_elements=1)])
    assert "optimizer is Adam, not SGD;" in str(d.errors[d.create(late, optimizer=Adam())])


def test_the_next_uploader_follows_a_lost_one() -> None:
    d, workers, sessions, _ = started()
    first, second = d.create(workers[0]), d.create(workers[1])
    assert d.state(first) == ef.Upload()
    d.on(ev.SessionClosed(sessions[0], "its session broke"))
    assert d.state(second) == ef.Upload()
    assert isinstance(d.errors[first], errors.FencedError)
    assert isinstance(d.errors[d.ask(ev.CommitParameters, workers[0])], errors.FencedError)
    d.ask(ev.CommitParameters, workers[1])
    assert d.state(second) == ef.ParametersReady(0)


def test_a_creator_that_gives_up_is_waited_for() -> None:
    d, workers, _, _ = started()
    call = d.create(workers[0])
    d.on(ev.CallEnded(call))
    assert d.cluster.registry.all == ()
    other = d.create(workers[1])
    assert d.state(other) == ef.Waiting("for worker-0 (rank 0) to create 'mlp'")


def test_commit_is_for_the_uploader_and_may_be_repeated() -> None:
    d, workers, _, _ = started()
    assert isinstance(d.errors[d.ask(ev.CommitParameters, workers[0])], errors.UnknownParametersError)
    for worker in workers:
        d.create(worker)
    assert isinstance(d.errors[d.ask(ev.CommitParameters, workers[1])], errors.NotMemberError)
    assert d.state(d.ask(ev.CommitParameters, workers[0])) == ef.Done()
    epoch = d.map.epoch
    assert d.state(d.ask(ev.CommitParameters, workers[0])) == ef.Done()
    assert d.map.epoch == epoch


def test_describing_waits_and_makes_no_member() -> None:
    d, workers, _, _ = started()
    reader = d.ask(ev.Describe, workers[1])
    assert d.state(reader) == ef.Waiting("for worker-0 (rank 0) to create 'mlp'")
    assert d.state(d.create(workers[0])) == ef.Upload()
    assert d.state(reader) == ef.Waiting("for worker-0 to upload the initial values of 'mlp'")
    d.ask(ev.CommitParameters, workers[0])
    described = d.state(reader)
    assert described.layout == LAYOUT
    assert described.spec.slice_elements > 0
    assert [m.worker_id for m in d.map.parameters[0].members] == ["worker-0"]


def test_an_empty_vector_has_no_shards() -> None:
    d, workers, _, _ = started(workers=1)
    call = d.create(workers[0], layout=Layout(()))
    assert d.state(call) == ef.Upload()
    d.has_values = False
    d.ask(ev.CommitParameters, workers[0])
    assert not d.checks, "no server has anything to confirm"
    assert d.state(call) == ef.ParametersReady(0)
    assert d.map.parameters[0].shards == ()
    assert d.state(d.create(d.join()[0], layout=Layout(()))) == ef.ParametersReady(0)


def test_unregistered_and_fenced_callers_are_refused() -> None:
    d, workers, sessions, _ = started()
    stranger = Member("eve", "worker", 1)
    assert "not registered" in str(d.errors[d.create(stranger)])
    d.on(ev.SessionClosed(sessions[0], "its session broke"))
    d.register(member_id="worker-0")
    error = d.errors[d.create(workers[0])]
    assert isinstance(error, errors.FencedError)
    assert "replaced by incarnation 2" in str(error)
    server = d.cluster.members.servers[0]
    assert isinstance(d.errors[d.create(server)], errors.InvalidArgumentError)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_lost_server_loses_its_shards_and_everybody_hears_it() -> None:
    d, workers, _, server_sessions = trained()
    d.on(ev.Heartbeat(server_sessions[1], versions=(("mlp", 41),)))
    d.on(ev.SessionClosed(server_sessions[1], "its session broke"))
    assert [s.server_id for s in d.map.servers] == ["server-0"]
    lost = [number for number, shard in enumerate(d.map.parameters[0].shards) if shard.lost]
    assert lost and [d.map.parameters[0].primaries[number] for number in lost] == ["server-1"] * len(lost)
    (news,) = d.shards_lost
    assert (news.parameters, news.shards, news.server_id, news.version) == ("mlp", tuple(lost), "server-1", 41)
    assert "server-1 is gone" in news.text and "restart the run" in news.text and "--replicas 2" in news.text
    assert d.cluster.phase.startswith("lost: server-1 held shard")
    assert "'mlp'" in d.cluster.phase and "restart the run" in d.cluster.phase
    assert d.lost[0].role == "server"
    assert d.kinds.count("loss") == 1 and d.kinds.count("shard_loss") == 1, "an alert counts lost members"
    for role in ("server", "worker"):
        with pytest.raises(errors.ServerLostError, match="restart the run"):
            d.register(role)
    assert isinstance(d.errors[d.ask(ev.Describe, workers[0])], errors.ServerLostError)
    assert isinstance(d.errors[server_sessions[0]], errors.ServerLostError), "the other server ends, too"


def test_a_server_lost_before_placement_is_replaced() -> None:
    d, workers, _, server_sessions = started()
    call = d.create(workers[0])
    d.on(ev.SessionClosed(server_sessions[0], "its session broke"))
    assert d.register("server").member_id == "server-0"
    d.create(workers[1])
    assert d.state(call) == ef.Upload()


# --- joining ----------------------------------------------------------------------------------------------------------


def proposals(d: Driver, session: int) -> list[ef.JoinProposal]:
    return [value for value in d.told[session] if isinstance(value, ef.JoinProposal)]


def answer(d: Driver, session: int, accepted: bool, version_max: int = 0) -> None:
    d.on(ev.JoinAnswered(session, proposals(d, session)[-1].proposal_id, accepted, version_max))


def test_a_joiner_begins_where_all_servers_agree() -> None:
    d, _, _, (s0, s1) = trained()
    d.on(ev.Heartbeat(s0, versions=(("mlp", 40),)))
    d.on(ev.Heartbeat(s1, versions=(("mlp", 41), ("other", 7))))
    late, _ = d.join()
    call = d.create(late)
    assert [p.member for p in proposals(d, s0)] == [ParametersMember("worker-2", 1, 2, 43)]
    assert d.state(call) == ef.Waiting("for server-0, server-1 to agree on step 43 of 'mlp'")
    answer(d, s0, True, 41)
    assert len(d.map.parameters[0].members) == 2
    answer(d, s1, True, 42)
    assert d.state(call) == ef.ParametersReady(43)
    assert d.map.parameters[0].members[-1] == ParametersMember("worker-2", 1, 2, 43)
    assert d.cluster.phase == "training 'mlp' at version 41"


def test_a_refusal_leads_to_a_later_step() -> None:
    d, _, _, (s0, s1) = trained()
    late, _ = d.join()
    call = d.create(late)
    answer(d, s0, True)
    answer(d, s1, False, 50)
    assert isinstance(d.told[s0][-2], ef.WithdrawJoin)
    first, second = proposals(d, s0)
    assert second.proposal_id != first.proposal_id
    assert second.member.first_step == 52
    d.on(ev.JoinAnswered(s0, first.proposal_id, True, 0))
    answer(d, s0, False, 60)
    assert proposals(d, s1)[-1].member.first_step == 64
    answer(d, s0, True)
    answer(d, s1, True)
    assert d.state(call) == ef.ParametersReady(64)


def test_a_distance_grows_only_so_far() -> None:
    d, _, _, (s0, _) = trained()
    d.create(d.join()[0])
    for _ in range(30):
        answer(d, s0, False, 0)
    steps = [p.member.first_step for p in proposals(d, s0)]
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 1024


@pytest.mark.parametrize("how", ["lost", "call ended", "left"])
def test_a_joiner_that_goes_away_is_withdrawn(how: str) -> None:
    d, _, _, (s0, s1) = trained()
    late, session = d.join()
    call = d.create(late)
    answer(d, s0, True)
    if how == "lost":
        d.on(ev.SessionClosed(session, "its session broke"))
    elif how == "left":
        d.on(ev.Leave(d.number(), caller(late)))
    else:
        d.on(ev.CallEnded(call))
    for server in (s0, s1):
        withdrawn = d.told[server][-1]
        assert isinstance(withdrawn, ef.WithdrawJoin)
        assert withdrawn.proposal_id == proposals(d, server)[-1].proposal_id
    answer(d, s1, True)
    assert len(d.map.parameters[0].members) == 2


def test_a_server_that_came_back_is_asked_again() -> None:
    d, _, _, _ = trained()
    again = Driver(d.stored, workers_min=2, servers_min=2)
    late, _ = again.join()
    call = again.create(late)
    sessions = [again.open(server) for server in again.cluster.members.servers]
    for session in sessions:
        answer(again, session, True)
    assert again.state(call) == ef.ParametersReady(0)
    assert proposals(again, sessions[0])[0].proposal_id > d.map.epoch


# --- limits -----------------------------------------------------------------------------------------------------------


def test_waits_of_one_member_are_limited() -> None:
    d, workers, _, _ = started()
    calls = [d.ask(ev.Describe, workers[0], f"p{i}") for i in range(65)]
    assert isinstance(d.errors[calls[-1]], errors.LimitExceededError)
    assert calls[0] not in d.errors


def test_a_newer_call_replaces_the_older() -> None:
    d, workers, _, _ = started()
    older, newer = d.create(workers[0]), d.create(workers[0])
    assert isinstance(d.errors[older], errors.ClosedError)
    d.on(ev.CallEnded(older))
    d.create(workers[1])
    assert d.state(newer) == ef.Upload()


def test_too_many_slices_are_refused() -> None:
    d, workers, _, _ = started()
    huge = Layout((TensorSpec("w", (1 << 30,)),))
    refused = d.create(workers[0], layout=huge, slice_elements=1)
    assert isinstance(d.errors[refused], errors.LimitExceededError)
    assert d.cluster.registry.all == ()


def test_a_scheduler_that_stood_still_waits_for_the_members_that_hung_up() -> None:
    """Members' keepalive ends their sessions meanwhile, which says nothing about them."""
    d, _, worker_sessions, server_sessions = started()
    epoch = d.cluster.epoch
    d.now += 5.0  # No tick came: this process was frozen.
    for session in (*worker_sessions, *server_sessions):
        d.on(ev.SessionClosed(session, "keepalive"))
    d.on(ev.Tick())
    assert d.cluster.epoch == epoch and not d.lost and len(d.map.servers) == 2
    back = d.cluster.members.servers[0]
    session = d.open(back)
    for _ in range(12):  # three seconds, longer than the lease
        d.tick()
        d.beat(session)
    assert [server.server_id for server in d.map.servers] == [back.member_id]
    assert {news.member_id for news in d.lost} == {"server-1"}
    for _ in range(140):  # The workers' lease, and the time of the suspension.
        d.tick()
        d.beat(session)
    assert {news.member_id for news in d.lost} == {"server-1", "worker-0", "worker-1"}
    d.on(ev.SessionClosed(session, "killed"))
    assert not d.map.servers, "a session that ends while the scheduler runs is an immediate loss"


# --- texts of the log and the status ----------------------------------------------------------------------------------


def leave(d: Driver, member: Member, reason: str) -> None:
    """A member goes politely."""
    d.on(ev.Leave(d.number(), caller(member), reason))


def test_after_a_restart_the_version_is_not_known_until_a_server_reports_it() -> None:
    d, *_ = trained(workers=1)
    assert "'mlp' at version 0" in d.cluster.phase
    again = Driver(d.stored, servers_min=2)
    assert "'mlp' at a version that no server has reported yet" in again.cluster.phase
    again.on(ev.Heartbeat(again.open(d.cluster.members.servers[0]), again.map.epoch, versions=(("mlp", 41),)))
    assert "'mlp' at version 41" in again.cluster.phase


def test_servers_that_leave_at_the_end_of_a_run_are_no_loss() -> None:
    d, *_ = trained(workers=1)
    for member in (*d.cluster.members.workers, *d.cluster.members.servers):
        leave(d, member, "stopped")
    assert "server-0 left: stopped" in " ".join(d.notes)
    assert not any("alone" in note for note in d.notes), d.notes


def test_a_server_that_dies_after_the_end_of_a_run_is_noted() -> None:
    d, workers, _, servers = trained(workers=1)
    leave(d, workers[0], "closed")
    d.on(ev.SessionClosed(servers[0], "its session broke"))
    assert any("alone; no worker is left to miss it" in note for note in d.notes), d.notes


# --- workers with equal gradients -------------------------------------------------------------------------------------


def report_equal(run: Run, *ranks: int, parameters: str = "mlp") -> None:
    session = next(iter(run.sessions.values()))
    ids = tuple(run.workers[rank].member_id for rank in ranks)
    run.d.on(EqualContributions(session, parameters, ids, 2))


def notices(run: Run) -> list[tuple[int, str]]:
    """Return the notices that workers got, with their ranks."""
    told = [(rank, run.d.told[session]) for rank, session in enumerate(run.beats)]
    return [(rank, value.text) for rank, values in told for value in values if isinstance(value, Notice)]


def test_the_lowest_rank_is_told_the_ranks_and_the_remedy_once() -> None:
    run = Run(workers=3)
    epoch = run.d.map.epoch
    report_equal(run, 2, 1)
    report_equal(run, 2, 1)
    ((rank, text),) = notices(run)
    assert rank == 1 and "ranks 1 and 2 push the same gradients of 'mlp'" in text and "DistributedSampler" in text
    assert any(text in note for note in run.d.notes), "the scheduler's log and psdist status show it, too"
    assert run.d.map.epoch == epoch


def test_a_report_about_workers_that_left_or_unknown_parameters_is_ignored() -> None:
    run = Run(workers=2)
    report_equal(run, 0)
    report_equal(run, 0, 1, parameters="other")
    assert not notices(run)


def test_workers_that_push_the_mean_are_not_warned() -> None:
    run = Run(workers=2)
    for worker in run.workers:
        run.d.create(worker, name="mlp/means", slice_elements=400)
    report_equal(run, 0, 1)
    assert not notices(run)
