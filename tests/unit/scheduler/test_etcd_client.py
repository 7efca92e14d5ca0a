"""Answers of an etcd that is none: the store refuses them with a typed error, after a bounded number of calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from psdist.errors import ConfigurationError, StorageError
from psdist.v1 import etcd_pb2 as pb
from psdist_scheduler.etcd_client import EtcdClient, Leader, Leadership
from tests.fuzz.etcd import PlainEtcd, filled, fuzz, open_plainly


class _Repeating(EtcdClient):
    """A client of an etcd that gives one answer to each range."""

    def __init__(self, answer: pb.EtcdRangeResponse) -> None:
        super().__init__(("etcd:1",))
        self._given = answer

    def _call(self, *_: object, **__: Any) -> Any:
        return self._given


def test_stores_survive_any_answers() -> None:
    """Short run of ``python -m tests.fuzz.etcd``."""
    outcomes = fuzz(range(60), seed=3)
    assert outcomes.total() == 60 and outcomes["worked"] and outcomes["storage"] and outcomes["configuration"]


def test_a_range_that_never_ends_is_refused() -> None:
    for keys in [[], [b"b"], [b"a/2", b"a/1"], [b"a/1", b"a/1"]]:
        client = _Repeating(pb.EtcdRangeResponse(kvs=[pb.EtcdKeyValue(key=key) for key in keys], more=True))
        with pytest.raises(StorageError, match="is it etcd"):
            client.range(b"a/", b"a0", 1.0)


def test_a_page_that_repeats_is_refused() -> None:
    client = _Repeating(pb.EtcdRangeResponse(kvs=[pb.EtcdKeyValue(key=b"a/1")], more=True))
    with pytest.raises(StorageError, match="is it etcd"):
        client.range(b"a/", b"a0", 1.0)


def test_a_head_with_wrong_numbers_is_refused() -> None:
    for change, reason in [
        ({"last": 1 << 40}, "change 3 of 1 to"),
        ({"last": "2"}, "head does not parse"),
        ({"first": None}, "head does not parse"),
        ({"format": []}, "head does not parse"),
    ]:
        etcd = filled()
        head = json.loads(etcd.range(pb.EtcdRangeRequest(key=b"fuzzed/head")).kvs[0].value)
        _write(etcd, b"fuzzed/head", json.dumps(head | change).encode())
        with pytest.raises(ConfigurationError, match=reason):
            open_plainly(etcd)


def test_a_foreign_key_in_the_log_is_refused() -> None:
    etcd = filled()
    _write(etcd, b"fuzzed/log/000000000001x/0000", b"")
    with pytest.raises(ConfigurationError, match="no key of its log"):
        open_plainly(etcd)


def test_an_event_of_another_form_is_refused() -> None:
    for event in [b"[]", b'["1", 5.0, "join", false, "x"]', b"{}", b"\xff"]:
        etcd = filled()
        _write(etcd, b"fuzzed/events/000000000002", event)
        store = open_plainly(etcd)
        with pytest.raises(ConfigurationError, match="an event does not parse"):
            store.load_events()
        store.close()


@pytest.mark.parametrize("ttl", [-1, 0, 1 << 60])
def test_a_lease_is_believed_for_a_bounded_time(ttl: int) -> None:
    class Renewing(EtcdClient):
        def keep_alive(self, lease: int, seconds: float) -> int:
            return ttl

        def get(self, key: bytes, seconds: float) -> pb.EtcdKeyValue:
            return pb.EtcdKeyValue(create_revision=0)

    claim = Leadership(Renewing(("etcd:1",)), b"leader", Leader("box", 1))
    assert claim.renew() is (ttl > 0)
    assert claim.seconds_left <= 100


def _write(etcd: PlainEtcd, key: bytes, value: bytes) -> None:
    etcd.transact(pb.EtcdTxnRequest(success=[pb.EtcdOperation(put=pb.EtcdPut(key=key, value=value))]))
