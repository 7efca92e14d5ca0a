"""Registrations: which are admitted, under which id and version, and how often members are to be heard."""

from __future__ import annotations

from dataclasses import replace

import pytest

from psdist import errors
from psdist.errors import DuplicateMemberError, FencedError
from psdist.types import ClusterMap
from psdist.wire.limits import PROTOCOL_VERSION
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import member_admission
from psdist_scheduler.decide.cluster_events import Caller
from psdist_scheduler.decide.cluster_state import ClusterSettings
from tests.support.scheduler_driver import Driver


def test_workers_that_register_together_share_an_epoch() -> None:
    d = Driver()
    for _ in range(2):
        d.join()
    epoch = d.map.epoch
    # Rank 1 is taken, and so is 9 by then.
    together = [ev.Register(d.number(), PROTOCOL_VERSION, "", "worker", rank=rank) for rank in (9, 7, 1, 9, None)]
    calls = [event.call for event in together]
    d.on_all(*together)
    assert d.map.epoch == epoch + 1
    assert [worker.rank for worker in d.map.workers] == [0, 1, 2, 7, 9]
    told = [d.told[call][-1].member.member_id for call in calls if call in d.told]
    assert told == ["worker-9", "worker-7", "worker-2"]
    assert {call: type(error) for call, error in d.errors.items()} == dict.fromkeys(
        calls[2:4], errors.DuplicateMemberError
    )


@pytest.mark.parametrize(
    ("oldest", "newest", "common"),
    [(6, 7, 7), (5, 6, 6), (7, 8, 7), (0, 6, 6), (0, 7, 7), (4, 5, None), (8, 9, None), (0, 5, None), (7, 6, None)],
)
def test_the_newest_common_protocol_version_counts(
    oldest: int, newest: int, common: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_admission, "OLDEST_PROTOCOL", 6)
    monkeypatch.setattr(member_admission, "PROTOCOL_VERSION", 7)
    d = Driver()
    d.on(ev.Register(call := d.number(), newest, "", "worker", oldest_protocol=oldest))
    if common is None:
        assert "speaks 6 to 7: upgrade psdist of" in str(d.errors[call]) and not d.map.workers
    else:
        assert d.told[call][-1].protocol_version == common


def test_members_without_a_common_protocol_version_are_not_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one in common with the scheduler."""
    monkeypatch.setattr(member_admission, "OLDEST_PROTOCOL", 5)
    monkeypatch.setattr(member_admission, "PROTOCOL_VERSION", 8)
    d = Driver()

    def register(oldest: int, newest: int, member_id: str) -> int | str:
        d.on(ev.Register(call := d.number(), newest, "", "worker", member_id=member_id, oldest_protocol=oldest))
        return d.told[call][-1].protocol_version if call in d.told else str(d.errors.get(call))

    assert register(5, 6, "a") == 6
    assert register(6, 7, "b") == 6
    epoch = d.map.epoch
    assert "c speaks protocol version 7 to 8, and a speaks 5 to 6" in str(register(7, 8, "c"))
    assert "upgrade psdist of a" in str(register(7, 8, "c"))
    assert "upgrade psdist of c" in str(register(5, 5, "c")) and d.map.epoch == epoch
    d.on(ev.Leave(d.number(), Caller("", "a", 1), "done"))
    assert register(7, 8, "c") == 7
    assert "upgrade psdist of a" in str(register(5, 6, "a"))


def test_a_registration_whose_answer_came_too_late_is_repeated() -> None:
    d = Driver()

    def register(pid: int, host: str = "here") -> int:
        d.on(ev.Register(call := d.number(), PROTOCOL_VERSION, "", "worker", member_id="w", rank=0, host=host, pid=pid))
        return d.told[call][-1].member.incarnation if call in d.told else 0

    assert [register(7), register(8), register(7, "there"), register(7)] == [1, 0, 0, 2]
    d.on(ev.SessionOpened(d.number(), "w", 2))
    assert register(7) == 0, "it is in use"


def test_nothing_is_committed_where_all_are_refused() -> None:
    d = Driver()
    d.join()
    epoch = d.map.epoch
    d.on_all(*(ev.Register(d.number(), PROTOCOL_VERSION, "", "worker", rank=0) for _ in range(2)))
    assert d.map.epoch == epoch and len(d.errors) == 2


def test_many_workers_beat_less_often() -> None:
    settings = ClusterSettings("run")
    assert [settings.heartbeat_of("worker", workers) for workers in (1, 75, 600, 4096)] == [0.5, 0.5, 4.0, 7.5]
    assert settings.heartbeat_of("server", 4096) == 0.5
    assert replace(settings, worker_lease_seconds=1.0).heartbeat_of("worker", 4096) == 0.25
    d = Driver(workers_min=600)
    for role, expected in (("worker", 4.0), ("server", 0.5)):
        d.on(ev.Register(call := d.number(), PROTOCOL_VERSION, "", role))
        assert d.told[call][-1].heartbeat_seconds == expected


def test_idle_workers_are_pinged_only_after_an_overdue_heartbeat() -> None:
    settings = ClusterSettings("run")
    assert [replace(settings, workers_min=workers).silence_seconds for workers in (1, 200, 600)] == [2.0, 2.0, 6.0]
    assert replace(settings, lease_seconds=60.0).silence_seconds == 15.0, "a stopped worker is noticed within its lease"


def test_early_workers_of_a_large_run_do_not_count_as_silent_between_two_heartbeats() -> None:
    d = Driver(workers_min=600)
    (worker, session), (_, other) = d.join(), d.join("server")
    for _ in range(3):
        d.tick_and_beat(4.0, other)
        d.beat(session)
    assert d.cluster.members.sessions.was_steady(worker.member_id, d.now)


def server_at(d: Driver, host: str, address: str) -> str:
    """The id of a server that registers from a host, without asking for one."""
    return d.register("server", host=host, address=address).member_id


def lose(d: Driver, member_id: str) -> None:
    member = d.cluster.members.get(member_id)
    d.on(ev.Leave(d.number(), Caller("", member_id, member.incarnation), "killed"))


def test_servers_are_named_by_their_hosts() -> None:
    d = Driver()
    assert server_at(d, "gpu-a.cluster.local", "10.0.0.1:5000") == "gpu-a"
    assert server_at(d, "gpu-b", "10.0.0.2:5000") == "gpu-b"
    assert [server_at(d, "gpu-a.cluster.local", f"10.0.0.1:{port}") for port in (5001, 5002)] == ["gpu-a-2", "gpu-a-3"]


def test_a_server_that_is_started_again_has_its_name_again() -> None:
    d = Driver()
    for host, port in (("a", 1), ("b", 2), ("b", 3)):
        server_at(d, host, f"10.0.0.9:{port}")
    for name in ("b", "b-2"):
        lose(d, name)
    # The second one first: its address tells them apart.
    assert [server_at(d, "b", f"10.0.0.9:{port}") for port in (3, 2)] == ["b-2", "b"]
    lose(d, "b-2")
    assert server_at(d, "b", "10.0.0.9:77") == "b-2", "at another port it has the free name of its host"
    member = d.cluster.members.get("b-2")
    assert member is not None and member.incarnation == 3


def test_servers_of_one_machine_or_of_hosts_that_name_nothing_have_numbers() -> None:
    for host, address in [
        ("box", "127.0.0.1:5"),
        ("box", "[::1]:5"),
        ("box", "localhost:5"),
        ("", "10.0.0.1:5"),
        ("worker-1", "10.0.0.1:5"),
        ("two words", "10.0.0.1:5"),
        ("x" * 80, "10.0.0.1:5"),
    ]:
        assert server_at(Driver(), host, address) == "server-0"


def test_a_host_with_the_name_of_a_member_gets_a_number_behind_it() -> None:
    d = Driver()
    d.register("worker", member_id="box")
    assert server_at(d, "box", "10.0.0.1:5") == "box-2"


def test_a_successor_does_not_take_the_name_of_a_drained_server() -> None:
    d = Driver(servers_min=3)
    for port in (1, 2, 3):
        server_at(d, "b", f"10.0.0.9:{port}")
    d.on(ev.Drain(d.number(), "", "b"))
    lose(d, "b")
    # b-2 was killed and started again, before the scheduler has noticed.
    assert server_at(d, "b", "10.0.0.9:4") == "b-4"
    lose(d, "b-2")
    assert d.cluster.demand.shortage(workers=0) == ""


def test_a_drained_server_that_comes_back_has_its_name_again() -> None:
    d = Driver()
    server_at(d, "a", "10.0.0.8:1")
    server_at(d, "b", "10.0.0.9:1")
    d.on(ev.Drain(d.number(), "", "b"))
    lose(d, "b")
    assert server_at(d, "b", "10.0.0.9:2") == "b"


# --- servers that return with an old address --------------------------------------------------------------------------


def map_of(d: Driver) -> tuple[ClusterMap, int]:
    return d.cluster.map, d.cluster.epoch


def test_a_second_server_under_a_live_id_is_refused_whatever_its_address() -> None:
    d = Driver()
    d.join("server", member_id="ps", address="10.0.0.1:7", host="a", pid=41)
    before = map_of(d)
    for fields in ({"address": "10.0.0.2:7", "host": "b"}, {"address": "10.0.0.1:7", "host": "a"}):
        with pytest.raises(DuplicateMemberError, match=r"'ps' is taken by ps, process 41 on a: .* 2 s") as caught:
            d.register("server", member_id="ps", pid=42, **fields)
        assert caught.value.details["pid"] == "41"
        assert map_of(d) == before and not d.lost


def test_the_old_process_of_a_server_that_moved_is_fenced() -> None:
    d = Driver()
    old, _ = d.join("server", member_id="ps", address="10.0.0.1:7")
    d.on(ev.Leave(d.number(), ev.Caller("", "ps", old.incarnation), "closed"))
    new, _ = d.join("server", member_id="ps", address="10.0.0.2:7")
    assert [(s.address, s.incarnation) for s in d.cluster.map.servers] == [("10.0.0.2:7", old.incarnation + 1)]
    before = map_of(d)
    with pytest.raises(FencedError, match="ps"):
        d.open(old)
    assert map_of(d) == before and d.cluster.members.is_live("ps", new.incarnation)


def test_a_server_whose_address_another_one_took_cannot_return() -> None:
    d = Driver()
    old, _ = d.join("server", member_id="ps", address="10.0.0.1:7")
    d.join("server", member_id="other", address="10.0.0.1:7")
    before = map_of(d)
    assert [server.server_id for server in before[0].servers] == ["other"]
    with pytest.raises(FencedError, match=r"other registered at its address"):
        d.open(old)
    assert map_of(d) == before
