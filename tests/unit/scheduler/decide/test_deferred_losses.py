"""The scheduler's machine that loses shards while nobody knows which snapshot is the newest."""

from __future__ import annotations

from typing import Any

import pytest

from psdist.errors import DuplicateMemberError, ServerLostError, SnapshotFailedError
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.losses import PATIENCE_SECONDS
from tests.support.saved_runs import DATA, lease, lose, rejoin, saved_run
from tests.support.scheduler_driver import Driver, caller
from tests.support.snapshot_driver import SnapshotDriver, commit_of, history_of


def committing(step: int = 9, **settings: Any) -> SnapshotDriver:
    """A run with a snapshot at step 7 that is committing another one."""
    d = saved_run(7, **settings)
    begin_commit(d, step)
    return d


def begin_commit(d: SnapshotDriver, step: int) -> int:
    """Servers have written another snapshot, and the storage has it in hand. Returns the call that wants it."""
    d.train(step)
    d.storing = False
    call = d.save()
    assert [type(work) for work in d.works] == [sn.WriteCommit]
    return call


def beat(d: Driver, seconds: float) -> None:
    """Time passes, and all who have a session are heard."""
    for _ in range(round(seconds / d.cluster.settings.tick_seconds)):
        d.beat(*d.cluster.members.sessions.by_call)
        d.tick()


def in_hand(d: SnapshotDriver) -> sn.WriteCommit:
    """The commit that the storage has not answered."""
    return next(work for work in d.works if isinstance(work, sn.WriteCommit))


def answer(d: SnapshotDriver, **failure: Any) -> sn.WriteCommit:
    """Answer for the storage: the pending snapshot is committed, or not."""
    work = in_hand(d)
    d.works.remove(work)
    if failure:
        d.on(sn.CommitFailed(work.attempt, "simulated", **failure))
    else:
        d.on(sn.Committed(work.attempt, commit_of(work.manifest, work.sequence), work.manifest))
    return work


def with_newer(d: SnapshotDriver, work: sn.WriteCommit) -> sn.History:
    """Return the content of the storage after it has committed the pending snapshot."""
    commit = commit_of(work.manifest, work.sequence)
    return sn.History((commit, *history_of(d).commits), commit.sequence, sn.CommitFound(commit, work.manifest))


def goes_on(d: SnapshotDriver, step: int, server: str = "server-1") -> None:
    """With a new life of the server and of the worker the run continues from that step."""
    d.storing = True
    d.join("server", member_id=server)
    rejoin(d)
    assert d.entry().ready and d.entry().members[0].first_step == step


def test_a_loss_while_a_snapshot_is_being_committed_waits_and_the_run_goes_back_to_that_one() -> None:
    d = committing(servers_min=2)
    epoch, directory = d.cluster.epoch, in_hand(d).manifest.directory
    lose(d, "server-1")
    assert d.cluster.epoch == epoch and not d.rolled_back and not d.lost and not d.shards_lost
    reason = f"for the storage to say whether snapshot {directory} was committed, to roll back to the newest: server-1"
    assert reason in d.cluster.phase and any(reason in wait for wait in d.cluster.waits)
    beat(d, 10.0)
    assert not d.rolled_back and d.entry().ready, "a lease that ends meanwhile changes nothing"
    answer(d)
    (news,) = d.rolled_back
    assert news.directory == directory and news.lost == (("mlp", 9, 9),)
    assert [loss.member_id for loss in d.lost] == ["server-1"]
    assert not any(directory in wait for wait in d.cluster.waits)
    goes_on(d, 9)


def test_where_it_is_not_committed_the_run_goes_back_to_the_one_before() -> None:
    d = committing(servers_min=2)
    lose(d, "server-1")
    answer(d, replaced=False)
    (news,) = d.rolled_back
    assert news.lost == (("mlp", 7, 9),)
    goes_on(d, 7)


@pytest.mark.parametrize("committed", [False, True])
def test_who_wants_that_snapshot_is_told_what_became_of_it(committed: bool) -> None:
    d = saved_run(7)
    call = begin_commit(d, 9)
    lose(d, "server-1")
    if committed:
        answer(d)
        assert d.saved(call).steps == {"mlp": 9}
    else:
        answer(d, replaced=False)
        assert isinstance(d.state(call), SnapshotFailedError)


def test_where_the_storage_does_not_say_it_is_read() -> None:
    """``late``: the loss comes after the storage's answer."""
    for exists in [False, True]:
        for late in [False, True]:
            d = committing(servers_min=2)
            newer, before = with_newer(d, in_hand(d)), history_of(d)
            if not late:
                lose(d, "server-1")
            answer(d, unsure=True)
            if late:
                lose(d, "server-1")
            assert not d.rolled_back and d.works == [sn.ReadHistory()]
            d.works.clear()
            d.on(sn.HistoryRead(None, "it does not answer"))
            beat(d, 4.0)
            assert d.works == [], "not more often than every five seconds"
            beat(d, 1.5)
            assert not d.rolled_back and d.works == [sn.ReadHistory()]
            d.history, d.storing = newer if exists else before, True
            d.go_on()
            assert len(d.rolled_back) == 1
            goes_on(d, 9 if exists else 7)


def test_a_run_whose_snapshots_are_gone_from_the_storage_ends_and_names_them() -> None:
    """Somebody has emptied the storage meanwhile."""
    d = committing()
    before = history_of(d).commits[0]
    lose(d, "server-1")
    answer(d, unsure=True)
    d.history, d.storing = sn.History(), True
    d.go_on()
    assert isinstance(d.cluster.failed, ServerLostError)
    assert f"{before.directory} ({before.path} is missing)" in str(d.cluster.failed)


def test_what_was_read_before_the_commit_says_nothing_of_it() -> None:
    d = committing()
    lose(d, "server-1")
    d.on(sn.HistoryRead(history_of(d)))
    assert not d.rolled_back
    answer(d)
    assert d.rolled_back[0].lost == (("mlp", 9, 9),)


@pytest.mark.parametrize("committed", [False, True])
def test_the_first_snapshot_is_waited_for_before_shards_are_lost_for_good(committed: bool) -> None:
    d = SnapshotDriver(servers_min=2)
    d.begin()
    d.go_on()
    begin_commit(d, 3)
    lose(d, "server-1")
    assert not d.shards_lost
    if committed:
        answer(d)
        assert len(d.rolled_back) == 1 and not d.shards_lost
        goes_on(d, 3)
    else:
        answer(d, replaced=False)
        assert d.shards_lost and not d.rolled_back


def test_a_server_that_comes_back_meanwhile_is_not_lost() -> None:
    d = committing()
    server = d.cluster.members.get("server-1")
    lose(d, "server-1")
    d.open(server)
    assert "held up" not in d.cluster.phase
    answer(d)
    assert not d.rolled_back and not d.lost and d.entry().ready and d.steps == [{"mlp": 7}, {"mlp": 9}]
    lose(d, "server-1")
    assert len(d.rolled_back) == 1


def test_a_session_that_is_silent_ends_so_that_its_server_opens_another() -> None:
    d = committing()
    session = d.cluster.members.sessions.call_of("server-1")
    others = set(d.cluster.members.sessions.by_call) - {session}
    for _ in range(12):
        d.beat(*others)
        d.tick()
    assert session in d.closed and not d.rolled_back and not d.lost


def test_a_server_that_leaves_meanwhile_is_put_off_too() -> None:
    d = committing()
    server = d.cluster.members.get("server-1")
    call = d.number()
    d.on(ev.Leave(call, caller(server), "done"))
    assert d.state(call) == ef.Done() and not d.rolled_back
    answer(d)
    assert d.rolled_back[0].lost == (("mlp", 9, 9),)


def test_a_worker_that_is_lost_meanwhile_is_lost() -> None:
    d = committing(workers=2)
    lose(d, "worker-1")
    assert [loss.member_id for loss in d.lost] == ["worker-1"]


def test_with_copies_a_loss_waits_only_where_it_is_of_the_last() -> None:
    d = SnapshotDriver(servers_min=2, replicas=2)
    d.begin(3)
    d.fill()
    d.train(7)
    d.saved(d.save())
    begin_commit(d, 9)
    lose(d, "server-1")
    assert [loss.member_id for loss in d.lost] == ["server-1"] and d.entry().ready and not d.shards_lost
    lose(d, "server-2")
    assert len(d.lost) == 1 and not d.rolled_back and not d.shards_lost
    answer(d)
    assert len(d.lost) == 2 and d.rolled_back[0].lost == (("mlp", 9, 9),)


def test_nobody_takes_the_place_of_a_server_whose_loss_would_wait() -> None:
    for place in ["member_id", "address"]:
        for noticed in [False, True]:
            d = committing(servers_min=2)
            server = d.cluster.members.get("server-1")
            who = {place: getattr(server, place)}
            if noticed:
                lose(d, "server-1")
            with pytest.raises(DuplicateMemberError, match=r"waits for the storage to say.*try again"):
                d.register("server", **who)
            answer(d)
            if not noticed:
                lose(d, "server-1")
            assert len(d.rolled_back) == 1
            d.register("server", **who)


def test_a_run_that_goes_back_twice_goes_back_to_the_newest_each_time() -> None:
    """And has its patience each time."""
    d = committing(servers_min=2)
    lose(d, "server-1")
    beat(d, 20.0)
    answer(d)
    goes_on(d, 9)
    begin_commit(d, 11)
    lose(d, "server-0")
    beat(d, 20.0)
    answer(d)
    assert [news.lost for news in d.rolled_back] == [(("mlp", 9, 9),), (("mlp", 11, 11),)]
    goes_on(d, 11, "server-0")


# --- a storage that does not answer -----------------------------------------------------------------------------------


def hung(**settings: Any) -> SnapshotDriver:
    """A run that went back to the snapshot of step 7 because the storage did not say whether that of 9 exists."""
    d = committing(**settings)
    lose(d, "server-1")
    beat(d, PATIENCE_SECONDS - 1)
    assert not d.rolled_back
    beat(d, 1.5)
    assert d.rolled_back[0].lost == (("mlp", 7, 9),)
    return d


def gone_on(**settings: Any) -> SnapshotDriver:
    """One that has gone on from there, and wants the next snapshot."""
    d = hung(**settings)
    d.join("server", member_id="server-1")
    rejoin(d)
    assert d.entry().members[0].first_step == 7
    d.versions["mlp"] = 8
    d.beat_versions()
    return d


def test_a_storage_that_stands_still_does_not_hold_the_run_up_for_ever() -> None:
    d = gone_on()
    assert d.entry().ready
    lose(d, "server-0")
    assert len(d.rolled_back) == 2, "what is lost later is not put off again"


def test_what_is_committed_when_the_run_has_gone_on_is_not_kept() -> None:
    d = gone_on()
    work = answer(d)
    assert len(d.rolled_back) == 1 and d.works == [sn.Prune((commit_of(work.manifest, work.sequence),))]
    d.storing = True
    d.go_on()
    assert d.steps == [{"mlp": 7}]
    assert d.saved(d.save()).sequence == 3 and d.steps == [{"mlp": 7}, {"mlp": 8}]


def test_no_two_commits_are_under_way() -> None:
    """They would have one number, and a scheduler that finds its number taken saves no more."""
    d = gone_on()
    call = d.save()
    d.go_on()
    assert [type(work) for work in d.works] == [sn.WriteCommit]
    assert (
        d.state(call).waiting_for
        == f"for the storage to say whether snapshot {in_hand(d).manifest.directory} was committed"
    )
    d.storing = True
    d.go_on()
    assert d.saved(call).steps == {"mlp": 8}


def test_what_is_committed_before_the_run_has_gone_on_is_gone_back_to_after_all() -> None:
    """Whatever workers have begun meanwhile: their lives end once more."""
    d = hung(servers_min=2)
    (worker,) = rejoin(d)
    d.on(ev.OpenDataset(d.number(), caller(worker), DATA))
    assert lease(d, worker, 7).range == 0
    work = answer(d)
    assert len(d.rolled_back) == 2 and d.rolled_back[1].directory == work.manifest.directory
    assert not d.cluster.members.workers, "its knowledge of leases is no longer true"
    goes_on(d, 9)
    assert d.steps == [{"mlp": 7}, {"mlp": 9}]


def test_a_worker_that_holds_data_and_has_no_session_begins_a_new_life_too() -> None:
    d = hung(servers_min=2)
    (worker,) = rejoin(d)
    d.on(ev.OpenDataset(d.number(), caller(worker), DATA))
    lease(d, worker, 7)
    d.now += d.settings.lease_seconds  # The scheduler stood still, and nobody is lost for hanging up.
    lose(d, "worker-0")
    assert d.cluster.members.workers
    answer(d)
    assert not d.cluster.members.workers


# --- a scheduler that dies --------------------------------------------------------------------------------------------


def again(d: SnapshotDriver, history: sn.History | None) -> SnapshotDriver:
    """The scheduler is started again; all but server-1 come back."""
    new = SnapshotDriver(d.stored, d.now, history=history, servers_min=2)
    for member in (*d.cluster.members.servers, *d.cluster.members.workers):
        if member.member_id != "server-1":
            new.open(member)
    return new


@pytest.mark.parametrize("exists", [False, True])
def test_a_scheduler_that_is_started_again_goes_back_to_what_the_storage_has(exists: bool) -> None:
    d = committing()
    lose(d, "server-1")
    new = again(d, with_newer(d, in_hand(d)) if exists else history_of(d))
    beat(new, 8.0)
    assert len(new.rolled_back) == 1
    goes_on(new, 9 if exists else 7)


def test_a_scheduler_that_cannot_read_the_storage_loses_nothing_before_it_can() -> None:
    d = committing()
    lose(d, "server-1")
    new = again(d, None)
    new.storing = False
    beat(new, 15.0)
    assert not new.shards_lost and not new.rolled_back
    assert new.works == [sn.ReadHistory()], "one at a time"
    assert any("for the storage to be read, to roll back" in wait for wait in new.cluster.waits)
    new.history, new.storing = with_newer(d, in_hand(d)), True
    new.go_on()
    assert len(new.rolled_back) == 1
    goes_on(new, 9)


def test_without_a_storage_nothing_waits() -> None:
    d = Driver()
    servers = [d.join("server")[0] for _ in range(2)]
    worker, _ = d.join()
    d.create(worker)
    d.ask(ev.CommitParameters, worker)
    d.on(ev.SessionClosed(d.cluster.members.sessions.call_of(servers[1].member_id), "its session broke"))
    assert [loss.member_id for loss in d.lost] == ["server-1"] and d.shards_lost
