"""Members that are silent: who is lost, who is waited for, and who comes back, event by event."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from psdist import errors
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide.cluster_events import ServerChecked
from psdist_scheduler.decide.cluster_state import ProbeResult
from psdist_scheduler.decide.effects import CheckServer
from psdist_scheduler.decide.losses import HEARD_LEASES, LAST_COPY_LEASES, Evidence, excuse, is_lost
from tests.support.replicated_run import Run
from tests.support.scheduler_driver import Driver


def pass_time(run: Run, seconds: float, silent: Collection[str] = ()) -> None:
    """Members beat twice a second, but for ``silent`` servers; "workers" are silent, too, if they are named."""
    for _ in range(round(seconds / 0.25)):
        run.d.tick(0.25)
        run.d.beat(*(session for id_, session in run.sessions.items() if id_ not in silent))
        run.d.beat(*(() if "workers" in silent else run.beats))


def break_sessions(run: Run, *server_ids: str) -> None:
    for server_id in server_ids:
        run.d.on(ev.SessionClosed(run.sessions.pop(server_id), "its session broke"))


def come_back(run: Run, *server_ids: str) -> None:
    for server in run.servers:
        if server.member_id in server_ids:
            run.sessions[server.member_id] = run.d.open(server)


ALL = ("server-0", "server-1", "server-2")


def test_a_scheduler_that_nobody_reaches_expels_nobody() -> None:
    """Its network is down. (A firewall that rejects connections looks like a kernel that refuses them.)"""
    probed: Any
    for seconds in [3.0, 8.0, 60.0]:
        for probed in ["silent", "refused"]:
            run = Run(workers=2)
            epoch = run.d.map.epoch
            run.d.probed = probed
            pass_time(run, 4.0, silent=(*ALL, "workers"))
            break_sessions(run, *ALL)
            for session in run.beats:
                run.d.on(ev.SessionClosed(session, "its session broke"))
            pass_time(run, seconds, silent=(*ALL, "workers"))
            assert not run.d.lost
            run.d.probed = "accepted"
            run.beats = [run.d.open(run.workers[0])]
            pass_time(run, 5.0)
            run.beats.append(run.d.open(run.workers[1]))
            come_back(run, *ALL)
            pass_time(run, 30.0)
            assert not run.d.lost and run.d.map.epoch == epoch, "nobody was expelled"


def test_who_does_not_come_back_to_a_scheduler_that_was_cut_off_is_lost() -> None:
    run = Run(workers=2)
    run.d.probed = "silent"
    pass_time(run, 4.0, silent=(*ALL, "workers"))
    break_sessions(run, *ALL)
    pass_time(run, 60.0, silent=(*ALL, "workers"))
    come_back(run, "server-0", "server-1")
    pass_time(run, 5.75)
    assert not run.d.lost
    pass_time(run, 1.0)
    assert [news.member_id for news in run.d.lost] == ["server-2"]


@pytest.mark.parametrize("frozen", [ALL, ALL[:2], ALL[1:]])
def test_servers_that_together_have_the_last_copy_of_a_shard_are_waited_for(frozen: tuple[str, ...]) -> None:
    run = Run()
    epoch = run.d.map.epoch
    run.d.probed = "accepted"
    pass_time(run, 10.0, silent=frozen)
    assert not run.d.lost and run.d.map.epoch == epoch
    waits = " ".join(run.d.cluster.waits)
    assert f"for {frozen[0]} to be heard again" in waits and "its host accepts connections" in waits
    assert f"{frozen[0]} has been silent for 10." in run.d.cluster.phase
    pass_time(run, 30.0)
    assert not run.d.lost and run.d.map.epoch == epoch
    assert "silent" not in run.d.cluster.phase and "heard again" not in " ".join(run.d.cluster.waits)


def test_servers_that_were_stopped_together_need_not_come_back_in_the_same_moment() -> None:
    run = Run()
    run.d.probed = "accepted"
    pass_time(run, 6.0, silent=ALL)
    pass_time(run, 1.75, silent=ALL[1:])
    pass_time(run, 10.0)
    assert not run.d.lost


def test_a_last_copy_is_given_up_after_the_declared_limit() -> None:
    run = Run(replicas=1, servers=1)
    run.d.probed = "silent"
    pass_time(run, 2.0 * LAST_COPY_LEASES - 0.5, silent=ALL)
    assert not run.d.lost
    pass_time(run, 1.5, silent=ALL)
    assert [news.member_id for news in run.d.lost] == ["server-0"]


def test_a_server_with_the_last_copy_that_is_killed_is_lost_at_once() -> None:
    run = Run(replicas=1, servers=1)
    pass_time(run, 3.0)
    break_sessions(run, "server-0")
    assert [news.member_id for news in run.d.lost] == ["server-0"]


def test_a_frozen_server_whose_shards_have_other_copies_is_replaced_after_its_lease() -> None:
    run = Run()
    run.d.probed = "accepted"
    pass_time(run, 2.5, silent=ALL[:1])
    assert [news.member_id for news in run.d.lost] == ["server-0"]


def test_a_server_that_workers_reach_has_longer() -> None:
    run = Run()
    run.d.probed = "silent"
    for _ in range(round(2.0 * HEARD_LEASES / 0.5) - 1):
        pass_time(run, 0.5, silent=ALL[:1])
        asked = [v.server for v in run.d.told[run.beats[0]] if isinstance(v, CheckServer)]
        for server in asked[:1]:
            run.d.on(ServerChecked(run.beats[0], server, reached=True))
    assert not run.d.lost
    pass_time(run, 1.0, silent=ALL[:1])
    assert [news.member_id for news in run.d.lost] == ["server-0"]


@pytest.mark.parametrize("probed", ["accepted", "silent", None])
def test_a_session_that_breaks_is_no_loss_if_its_server_opens_another(probed: ProbeResult | None) -> None:
    run = Run()
    epoch = run.d.map.epoch
    run.d.probed = probed
    pass_time(run, 3.0)
    break_sessions(run, "server-0")
    pass_time(run, 1.5)
    come_back(run, "server-0")
    pass_time(run, 10.0)
    assert not run.d.lost and run.d.map.epoch == epoch


def test_an_answer_about_an_earlier_silence_means_nothing() -> None:
    run = Run()
    run.d.probed = None
    pass_time(run, 3.0)
    break_sessions(run, "server-0")
    come_back(run, "server-0")
    run.d.on(ev.Probed("server-0", 1, "refused"))
    run.d.on(ev.Probed("server-9", 1, "refused"))
    pass_time(run, 3.0)
    assert not run.d.lost


def test_a_busy_worker_is_awaited_and_a_stopped_one_is_lost_once_its_connection_breaks() -> None:
    run = Run(workers=2)
    pass_time(run, 120.0, silent=("workers",))
    assert not run.d.lost
    assert "for worker-0 to be heard again: its process answers pings" in " ".join(run.d.cluster.waits)
    run.d.on(ev.SessionClosed(run.beats.pop(0), "its connection answers no pings"))
    pass_time(run, 0.5)
    assert [(news.member_id, news.reason[:14]) for news in run.d.lost] == [("worker-0", "silent for 120")]
    pass_time(run, 4.0, silent=("workers",))
    run.d.on(ev.SessionClosed(run.beats[0], "its connection answers no pings"))
    pass_time(run, 5.5, silent=("workers",))
    assert len(run.d.lost) == 1
    pass_time(run, 1.0, silent=("workers",))
    assert [news.member_id for news in run.d.lost] == ["worker-0", "worker-1"]


def until_admitted(run: Run, seconds: float, silent: Collection[str], role: str, **fields: Any) -> float | None:
    """Register a process again and again. Returns the seconds until it is admitted, None if it never is."""
    for tries in range(round(seconds / 0.5)):
        try:
            run.d.register(role, **fields)
        except errors.DuplicateMemberError:
            pass_time(run, 0.5, silent=silent)
        else:
            return 0.5 * tries
    return None


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_successor_is_evidence_where_nobody_else_reaches_the_scheduler(replicas: int) -> None:
    """A node with everything but the scheduler is lost, and a StatefulSet starts its server elsewhere, under its id."""
    run = Run(replicas=replicas, servers=replicas)
    run.d.probed = "silent"
    if replicas == 1:
        with pytest.raises(errors.ServerLostError):  # It held shards alone.
            until_admitted(run, 20.0, (*ALL, "workers"), "server", member_id="server-0")
    else:
        took = until_admitted(run, 20.0, (*ALL, "workers"), "server", member_id="server-0")
        assert took is not None and 2.0 <= took <= 5.0
    assert [news.member_id for news in run.d.lost] == ["server-0"]


@pytest.mark.parametrize("fields", [{"member_id": "worker-0"}, {"rank": 0}])
def test_a_successor_of_a_worker_is_evidence_too(fields: dict[str, Any]) -> None:
    run = Run(replicas=1, servers=1)
    run.d.probed = "silent"
    lease = run.d.settings.lease_of("worker")
    took = until_admitted(run, 2 * lease, (*ALL, "workers"), "worker", **fields)
    assert took is not None and took <= lease + 5.0


def test_a_server_that_is_heard_keeps_its_id() -> None:
    run = Run(replicas=1, servers=1)
    run.d.probed = "silent"
    assert until_admitted(run, 20.0, (), "server", member_id="server-0") is None
    pass_time(run, 1.5, silent=ALL)
    assert not run.d.lost, "what was asked before this silence means nothing"
    assert until_admitted(run, 1.0, ALL, "server", member_id="server-0") is None
    pass_time(run, 5.0, silent=ALL)
    assert not run.d.lost, "one that asks no more may have been a late call"


# --- sessions that end ------------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_while_the_scheduler_stands_still_is_lost_once_somebody_else_is_heard() -> None:
    d = Driver()
    killed, other = [d.open(d.register("server")) for _ in range(2)]
    d.now += 1.75
    d.on(ev.SessionClosed(killed, "killed"))
    d.on(ev.Tick())
    assert not d.lost, "this process may be cut off"
    d.beat(other)
    d.tick()
    assert len(d.lost) == 1 and len(d.map.servers) == 1


@pytest.mark.parametrize("lease", [2.0, 10.0, 600.0])
def test_however_long_the_lease_is_a_server_that_is_killed_between_two_ticks_is_lost_at_once(lease: float) -> None:
    d = Driver(lease_seconds=lease)
    sessions = [d.open(d.register("server")) for _ in range(3)]
    step = d.cluster.settings.tick_seconds
    for lost, session in enumerate(sessions, 1):
        d.tick(3 * step)
        d.beat(*sessions[lost - 1 :])
        d.now += 0.9 * step
        d.on(ev.SessionClosed(session, "killed"))
        assert len(d.lost) == lost


# --- the rule, by table -----------------------------------------------------------------------------------------------


LEASE = 2.0

#: What is known, and after how many leases of silence the member is lost; None for never.
CASES: list[tuple[dict[str, Any], float | None]] = [
    ({}, 1),
    ({"probe": "accepted"}, 1),
    ({"probe": "silent"}, 1),
    ({"probe": "refused"}, 0),
    ({"probe": "refused", "ended": True, "others": False}, 0),
    ({"others": False}, None),
    ({"others": False, "last_copy": True}, None),
    ({"others": False, "probe": "refused"}, None),
    ({"heard": True}, HEARD_LEASES),
    ({"heard": True, "probe": "silent"}, HEARD_LEASES),
    ({"last_copy": True}, LAST_COPY_LEASES),
    ({"last_copy": True, "probe": "accepted"}, LAST_COPY_LEASES),
    ({"last_copy": True, "probe": "silent"}, LAST_COPY_LEASES),
    ({"last_copy": True, "probe": "refused"}, 0),
    ({"last_copy": True, "heard": True}, None),
    ({"last_copy": True, "ended": True, "probe": "silent"}, LAST_COPY_LEASES),
    ({"last_copy": True, "ended": True, "probe": "accepted"}, LAST_COPY_LEASES),
    ({"last_copy": True, "others": False, "asked_for": LEASE}, 1),
    ({"last_copy": True, "heard": True, "asked_for": LEASE}, 1),
    ({"others": False, "asked_for": 0.9 * LEASE}, None),
    ({"answers": True}, None),
    ({"answers": True, "asked_for": LEASE}, 1),
]


@pytest.mark.parametrize(("known", "leases"), CASES)
def test_when_a_silent_member_is_lost(known: dict[str, Any], leases: float | None) -> None:
    evidence = Evidence(overdue=-LEASE, lease=LEASE, **known)
    if leases == 0:
        assert is_lost(evidence)
        return
    assert not is_lost(replace(evidence, overdue=0.0))
    if leases is None:
        assert not is_lost(replace(evidence, overdue=1e6))
        return
    limit = (leases - 1) * LEASE
    assert not is_lost(replace(evidence, overdue=limit)) and is_lost(replace(evidence, overdue=limit + 0.01))


def test_an_excuse_names_the_reason_and_the_limit() -> None:
    assert "may be cut off itself" in excuse(Evidence(1.0, LEASE, others=False))
    assert excuse(Evidence(1.0, LEASE, heard=True)) == "others hear from it; it is expelled after 6 s"
    assert excuse(Evidence(1.0, LEASE, heard=True, last_copy=True)) == "others hear from it; the run waits for it"
    text = excuse(Evidence(8.0, LEASE, last_copy=True, probe="accepted"))
    assert text == "it may have the last copy of a shard, and its host accepts connections; it is expelled after 60 s"
