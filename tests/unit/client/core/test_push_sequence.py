"""Push numbers: every push is made exactly once, even if calls break halfway."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from psdist.client.core import routing
from psdist.client.core.push_sequence import PendingRequest, PushSequence
from psdist.consistency import ASP, BSP, SSP
from psdist.errors import InternalError, ServerLostError, UnknownParametersError
from psdist.optim import SGD
from psdist.types import ClusterMap, ParametersEntry, ParametersSpec, Replica, ServerEntry, Shard
from psdist.wire.limits import LONGEST_SECONDS, Backoff


def _answer_all(request: PendingRequest, version: int, **more: int) -> None:
    for index in sorted(request.pending):
        request.answer(index, version, **more)


def test_unanswered_slices_are_sent_again_in_order() -> None:
    push = PushSequence(5, ASP()).begin_push()
    push.answer(1, 7)
    push.answer(3, 7)
    assert push.unanswered((0, 1, 2, 3, 4)) == (0, 2, 4)
    assert not push.finished


def test_an_answer_nobody_asked_for_is_an_error() -> None:
    push = PushSequence(2, BSP()).begin_push()
    push.answer(1, 1)
    for index in (1, 2):
        with pytest.raises(InternalError):
            push.answer(index, 1)


def test_joiners_start_at_their_first_step() -> None:
    session = PushSequence(2, BSP(), first_step=12)
    assert session.step == session.first_step == session.begin_pull().number == 12


def test_asynchronous_modes_count_from_zero_and_pull_what_is_there() -> None:
    for consistency in (SSP(2), ASP()):
        session = PushSequence(2, consistency, first_step=12)
        assert session.step == 0
        push = session.begin_push()
        _answer_all(push, 40, staleness=3)
        session.end_push(push, seen=False)
        assert (session.step, session.begin_pull().number, session.version) == (1, 0, 0)
        assert (push.staleness_mean, push.staleness_max) == (3.0, 3)


def test_late_workers_go_on_at_the_first_open_step() -> None:
    session = PushSequence(3, BSP(backup_workers=1))
    push = session.begin_push()
    for index, version in enumerate((4, 3, 5)):
        push.answer(index, version, ignored=True)
    session.end_push(push, seen=True)
    assert session.step == session.version == 3
    assert push.ignored == 3


def test_a_pull_that_shows_a_later_version_moves_the_step() -> None:
    session = PushSequence(2, BSP())
    pull = session.begin_pull()
    _answer_all(pull, 2)
    session.end_pull(pull)
    assert session.step == 2


def test_no_slices() -> None:
    session = PushSequence(0, BSP())
    push = session.begin_push()
    assert push.finished
    session.end_push(push, seen=True)
    assert session.step == session.version == 1


def test_attempts_count_withdrawals_of_one_step() -> None:
    sequence = PushSequence(2, BSP(), 5)
    withdrawal = sequence.begin_withdrawal(0)
    assert withdrawal.options.withdraws and (withdrawal.number, withdrawal.options.attempt) == (5, 1)
    for index in range(2):
        withdrawal.answer(index, 5)
    assert sequence.end_withdrawal(withdrawal)
    assert sequence.begin_withdrawal(4).options.attempt == 4, "servers have seen a third one of another worker"
    after = PushSequence(2, BSP(), 5, before=sequence)
    assert after.attempt == 4
    push = after.begin_push()
    for index in range(2):
        push.answer(index, 6)
    after.end_push(push, seen=True)
    assert (after.step, after.attempt) == (6, 0)


def test_a_withdrawal_that_comes_too_late_is_noted() -> None:
    sequence = PushSequence(2, BSP(), 5)
    withdrawal = sequence.begin_withdrawal(0)
    withdrawal.answer(0, 5)
    withdrawal.answer(1, 6, ignored=True)
    assert not sequence.end_withdrawal(withdrawal) and sequence.partly_applied


def test_backoff_doubles_with_jitter_and_ends_at_a_second() -> None:
    backoff = Backoff(random.Random(1))
    ceilings = [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    for ceiling in ceilings:
        assert ceiling / 2 <= backoff.next_seconds() <= ceiling
    backoff.reset()
    assert backoff.next_seconds() <= 0.05 < LONGEST_SECONDS


@pytest.mark.parametrize(("heartbeat", "longest"), [(0.02, 0.02), (0.25, 0.25), (4.0, LONGEST_SECONDS)])
def test_a_member_whose_session_broke_tries_again_within_a_heartbeat(heartbeat: float, longest: float) -> None:
    """Check the time of the retry: a lease lasts four heartbeats."""
    backoff = Backoff.for_session(random.Random(1), heartbeat)
    pauses = [backoff.next_seconds() for _ in range(12)]
    assert longest / 2 <= pauses[-1] <= max(pauses) <= longest
    backoff.reset()
    assert backoff.next_seconds() <= min(0.05, longest)


def test_a_member_of_a_run_with_a_standby_tries_each_of_two_addresses_three_times_a_second() -> None:
    backoff = Backoff.for_session(random.Random(1), 4.0, has_standby=True)
    pauses = [backoff.next_seconds() for _ in range(40)]
    assert max(first + second for first, second in pairwise(pauses)) <= 0.3


def _cluster(*servers: ServerEntry, lost: bool = False) -> ClusterMap:
    spec = ParametersSpec("p", SGD(), BSP(), slice_elements=10)
    a, b = Shard(Replica("a", 1)), Shard(Replica("b", 2), lost=lost)
    return ClusterMap("run", 3, servers, parameters=(ParametersEntry(spec, 55, (a, b, a)),))


A, B = ServerEntry("a", 1, "h:1"), ServerEntry("b", 2, "h:2")


def test_routes_name_servers_and_ascending_slices() -> None:
    plan = routing.plan(_cluster(A, B), "p")
    assert {route.server_id: route.slices for route in plan.routes} == {"a": (0, 2, 3, 5), "b": (1, 4)}
    assert plan.routes[1].peer == "b (h:2)" and plan.routes[1].epoch == 3
    assert plan.routes[1].server == Replica("b", 2)
    assert plan.orphans == () and plan.reason == ""


@pytest.mark.parametrize("servers", [(A,), (A, ServerEntry("b", 3, "h:2"))], ids=["gone", "in another life"])
def test_slices_of_a_server_that_is_gone_wait_for_a_newer_map(servers: tuple[ServerEntry, ...]) -> None:
    plan = routing.plan(_cluster(*servers), "p")
    assert [route.server_id for route in plan.routes] == ["a"] and plan.orphans == (1, 4)
    assert plan.reason == "for a new primary of shard 1 of 'p' in place of b (lost: it left the cluster map)"
    assert routing.plan(_cluster(*servers), "p", [0, 2]).orphans == ()


def test_news_of_a_loss_come_before_the_map() -> None:
    news = routing.ServerNews(gone={Replica("a", 1): "its process was killed"})
    plan = routing.plan(_cluster(A, B), "p", [0, 1, 2], news)
    assert [route.slices for route in plan.routes] == [(1,)] and plan.orphans == (0, 2)
    assert plan.reason == "for a new primary of shards 0, 2 of 'p' in place of a (lost: its process was killed)"
    # Another incarnation of that server.
    assert routing.plan(_cluster(A, B), "p", news=routing.ServerNews(gone={Replica("b", 1): "old"})).orphans == ()


def test_only_the_scheduler_says_that_a_shard_is_lost() -> None:
    with pytest.raises(ServerLostError, match=r"shard 1 of 'p' is lost: b, which held it.*Restart the run"):
        routing.plan(_cluster(A, lost=True), "p")
    with pytest.raises(ServerLostError, match="by the scheduler's word"):
        routing.plan(_cluster(A, B), "p", news=routing.ServerNews(lost={"p": "by the scheduler's word"}))
    assert routing.plan(_cluster(A, B), "p", news=routing.ServerNews(lost={"q": "another's"})).routes


def test_unknown_parameters() -> None:
    with pytest.raises(UnknownParametersError, match="'q'"):
        routing.plan(_cluster(), "q")


@pytest.mark.parametrize("consistency", [BSP(), ASP()])
def test_a_session_that_goes_on_counts_the_push_that_was_begun(consistency: BSP | ASP) -> None:
    before = PushSequence(2, consistency)
    before.send(3)
    after = PushSequence(2, consistency, first_step=0, before=before)
    assert (after.next, after.next_whole, after.send(7)) == (1, 1, 0), "it is below each mark to come"
    assert not after.before_first_step
    if isinstance(consistency, BSP):
        joiner = PushSequence(2, consistency, first_step=5)
        assert joiner.before_first_step and PushSequence(2, consistency, first_step=5, before=joiner).before_first_step
    before.partial = True
    assert PushSequence(2, consistency, before=before).next_whole == 0
    before.partial, before.given = False, True
    assert PushSequence(2, consistency, before=before).given
    nothing = PushSequence(2, consistency, before=PushSequence(2, consistency))
    assert (nothing.next, nothing.send(7)) == (0, 7)
