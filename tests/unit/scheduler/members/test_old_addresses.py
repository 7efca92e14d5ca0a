"""Servers that return with an old address, or under a known id at a new one: typed errors that change nothing."""

from __future__ import annotations

import pytest

from psdist.errors import DuplicateMemberError, FencedError
from psdist.types import ClusterMap
from psdist_scheduler.decide import cluster_events as ev
from tests.support.scheduler_driver import Driver


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
