"""The store in etcd: written state is back for the next leader, only the leader writes, and nothing is guessed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psdist.errors import ConfigurationError, LeadershipLostError, StorageError
from psdist.settings.config import EtcdLocation, store_location
from psdist.types import Layout, TensorSpec
from psdist.v1 import etcd_pb2 as pb
from psdist.wire import limits
from psdist_scheduler import etcd_client, etcd_store
from psdist_scheduler.app import open_store
from psdist_scheduler.decide.cluster_state import EventRecord, StoredState
from psdist_scheduler.decide.effects import Persist
from psdist_scheduler.etcd_client import EtcdClient, delete_range, put
from psdist_scheduler.etcd_store import EtcdStore
from tests.support.certificates import make_ca, write_tls
from tests.support.etcd import Etcd, running
from tests.support.store_records import MEMBER, NODE, RECORD

_PREFIXES = itertools.count()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
def place(etcd: Etcd) -> EtcdLocation:
    """A prefix that no other test uses."""
    found = store_location(etcd.url(f"psdist/test-{next(_PREFIXES)}"))
    assert isinstance(found, EtcdLocation)
    return found


@pytest.fixture
def client(etcd: Etcd) -> Iterator[EtcdClient]:
    client = EtcdClient(etcd.endpoints)
    yield client
    client.close()


def opened(place: EtcdLocation, run_id: str = "run", **options: Any) -> EtcdStore:
    store, _ = open_store(place, run_id, lambda: "new", **options)
    assert isinstance(store, EtcdStore)
    return store


def test_what_was_written_is_loaded(place: EtcdLocation) -> None:
    store = opened(place)
    assert store.load() is None
    store.write(Persist(1, (MEMBER,), (RECORD,), (NODE,)))
    gone = replace(MEMBER, state="lost", reason="silent")
    store.write(Persist(2, (gone,), (replace(RECORD, uploader=""),)))
    store.write_events([EventRecord(1, 5.0, "join", False, "worker-0 joins"), EventRecord(2, 6.0, "loss", True, "x")])
    store.close()
    store = opened(place, "")
    assert store.run_id == "run"
    assert store.load() == StoredState("run", 2, (gone,), (replace(RECORD, uploader=""),), (NODE,))
    assert store.load_events() == [
        EventRecord(1, 5.0, "join", False, "worker-0 joins"), EventRecord(2, 6.0, "loss", True, "x"),
    ]  # fmt: skip
    store.close()


def test_a_large_change_is_stored_in_parts(place: EtcdLocation) -> None:
    """A layout of 100,000 tensors has about 3 MB; etcd takes 1.5 MiB a request."""
    layout = Layout(tuple(TensorSpec(f"layers.{number}.weight.of.some.length", (1,)) for number in range(100_000)))
    large = replace(RECORD, layout=layout)
    store = opened(place)
    store.write(Persist(1, parameters=(large,)))
    store.write(Persist(2, members=(MEMBER,)))
    store.close()
    store = opened(place)
    assert store.load() == StoredState("run", 2, (MEMBER,), (large,))
    store.close()


def test_the_log_is_shortened(place: EtcdLocation, client: EtcdClient) -> None:
    store = opened(place)
    for number in range(etcd_store.LOG_LENGTH + 50):
        store.write(Persist(number + 1, members=(replace(MEMBER, member_id=f"worker-{number % 3}", rank=number),)))
    before = store.load()
    store.close()
    start = f"{place.prefix}/log/".encode()
    assert len(client.range(start, start + b"\xff", 10.0)) < 60
    store = opened(place)
    assert store.load() == before and before is not None and before.epoch == etcd_store.LOG_LENGTH + 50
    store.close()


def test_parts_without_their_end_are_no_change(place: EtcdLocation, client: EtcdClient) -> None:
    """A leader that died in the middle of a large change."""
    store = opened(place)
    store.write(Persist(1, (MEMBER,)))
    store.close()
    client.transact([], [put(f"{place.prefix}/log/{2:012d}/0000".encode(), b"a half")], 10.0)
    store = opened(place)
    assert store.load() == StoredState("run", 1, (MEMBER,))
    store.write(Persist(2, nodes=(NODE,)))
    store.close()
    store = opened(place)
    assert store.load() == StoredState("run", 2, (MEMBER,), nodes=(NODE,))
    store.close()


def test_one_leader_at_a_time(place: EtcdLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(place)
    monkeypatch.setattr(etcd_client, "LEASE_SECONDS", 0)  # So it waits for the end of no lease.
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()} on .* leads the run"):
        opened(place)
    monkeypatch.undo()
    store.close()
    opened(place).close()


def test_a_standby_leads_as_soon_as_the_leader_ends(place: EtcdLocation) -> None:
    store = opened(place)
    store.write(Persist(1, (MEMBER,)))
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            store.close()

    standby = opened(place, standby=True, wait=wait)
    assert standby.load() == StoredState("run", 1, (MEMBER,))
    assert len(waits) == 3
    standby.close()


def test_a_leader_whose_key_was_taken_writes_nothing(place: EtcdLocation, client: EtcdClient) -> None:
    """As after a freeze: its lease has ended, and it does not know that yet."""
    old = opened(place)
    old.write(Persist(1, (MEMBER,)))
    old._leadership._ended.set()  # It renews its lease no more.
    client.transact([], [delete_range(f"{place.prefix}/leader".encode(), f"{place.prefix}/leader\0".encode())], 10.0)
    new = opened(place)
    with pytest.raises(LeadershipLostError, match="another scheduler has taken the leader key"):
        old.write(Persist(2, nodes=(NODE,)))
    old.write_events([EventRecord(1, 5.0, "join", False, "x")])
    old.discard()
    assert new.load_events() == []
    new.write(Persist(2))
    new.close()
    again = opened(place)
    assert again.load() == StoredState("run", 2, (MEMBER,))
    again.close()


def test_a_leader_whose_key_is_deleted_ends(place: EtcdLocation, client: EtcdClient) -> None:
    """By hand, while it has nothing to write: a standby would lead beside it."""
    store = opened(place)
    client.transact([], [delete_range(f"{place.prefix}/leader".encode(), f"{place.prefix}/leader\0".encode())], 10.0)
    store._leadership._renewing.join(60)
    with pytest.raises(LeadershipLostError, match="its leader key was deleted"):
        store.check()
    store.close()


def test_a_leader_ends_if_etcd_has_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an etcd renews leases and refuses writes, so a write would be repeated without end."""
    monkeypatch.setattr(etcd_store, "WRITE_SECONDS", 0.5)
    with running(tmp_path, options=("--quota-backend-bytes", "1000000")) as etcd:
        place = store_location(etcd.url("run"))
        assert isinstance(place, EtcdLocation)
        store = opened(place)
        store.write(Persist(1, (MEMBER,)))
        transact, calls = store._client.transact, []
        with suppress(StorageError):
            for number in range(100):
                transact([], [put(b"other/%d" % number, bytes(100_000))], 10.0)

        def counting(*arguments: Any) -> tuple[bool, int]:
            calls.append(arguments)
            return transact(*arguments)

        monkeypatch.setattr(store._client, "transact", counting)
        with pytest.raises(StorageError, match=r"space exceeded.*alarm disarm"):
            store.write(Persist(2, nodes=(NODE,)))
        assert len(calls) <= 6  # With pauses.
        store.close()


def test_a_standby_outlives_an_outage_of_etcd(place: EtcdLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(place)
    store.write(Persist(1, (MEMBER,)))
    get, waits = EtcdClient.get, []

    def failing(*arguments: Any) -> Any:
        if len(waits) in (1, 2):
            raise StorageError("etcd is away")
        return get(*arguments)

    def wait(seconds: float) -> None:
        if not waits:
            store.close()
        waits.append(seconds)

    monkeypatch.setattr(EtcdClient, "get", failing)
    standby = opened(place, standby=True, wait=wait)
    assert len(waits) == 3 and standby.load() == StoredState("run", 1, (MEMBER,))
    standby.close()


def test_a_leader_stops_when_its_lease_ends_by_its_clock(place: EtcdLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(place)
    store.check()
    now = time.monotonic()
    monkeypatch.setattr(etcd_client.time, "monotonic", lambda: now + etcd_client.LEASE_SECONDS + 1)
    with pytest.raises(LeadershipLostError, match="its lease in etcd ended"):
        store.check()
    monkeypatch.undo()
    store.close()


def test_a_write_whose_answer_was_lost_is_recognized(place: EtcdLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(place)
    transact, failed = store._client.transact, []

    def lossy(*arguments: Any) -> tuple[bool, int]:
        answer = transact(*arguments)
        if len(arguments[0]) == 2 and not failed:  # The one that compares the head.
            failed.append(answer)
            raise StorageError("the answer was lost")
        return answer

    monkeypatch.setattr(store._client, "transact", lossy)
    store.write(Persist(1, (MEMBER,)))
    store.write(Persist(2, nodes=(NODE,)))
    assert failed
    store.close()
    store = opened(place)
    assert store.load() == StoredState("run", 2, (MEMBER,), nodes=(NODE,))
    store.close()


def test_what_is_discarded_is_gone(place: EtcdLocation, client: EtcdClient) -> None:
    store = opened(place)
    store.write(Persist(1, (MEMBER,)))
    store.discard()
    left = client.range(f"{place.prefix}/".encode(), f"{place.prefix}0".encode(), 10.0)
    assert [kv.key for kv in left] == [f"{place.prefix}/ended".encode()]
    assert left[0].lease  # It is deleted by itself.
    store = opened(place, "next")  # The prefix can be used again.
    assert store.load() is None
    store.close()


def test_a_standby_ends_with_the_run(place: EtcdLocation) -> None:
    store = opened(place)
    store.write(Persist(1, (MEMBER,)))
    with pytest.raises(SystemExit, match="0"):
        opened(place, standby=True, wait=lambda seconds: store.discard())
    opened(place).close()


def test_a_standby_of_the_next_run_does_not_end_with_the_one_before(place: EtcdLocation) -> None:
    store = opened(place)
    store.write(Persist(1, (MEMBER,)))
    store.discard()
    store = opened(place, "next")
    store.write(Persist(1, nodes=(NODE,)))
    standby = opened(place, "next", standby=True, wait=lambda seconds: store.close())
    assert standby.load() == StoredState("next", 1, nodes=(NODE,))
    standby.close()


def test_another_run_and_other_content_are_refused(place: EtcdLocation, client: EtcdClient) -> None:
    store = opened(place)
    store.write(Persist(1, (MEMBER,)))
    store.close()
    everything = (f"{place.prefix}/".encode(), f"{place.prefix}0".encode(), 10.0)
    before = client.range(*everything)
    remedy = "belongs to run 'run', not 'other': pass --run-id run, or another prefix"
    for options in ({}, {"standby": True}):
        with pytest.raises(ConfigurationError, match=remedy):
            opened(place, "other", **options)
        assert client.range(*everything) == before
    head = f"{place.prefix}/head".encode()
    found = client.get(head, 10.0)
    assert found is not None
    content = json.loads(found.value)
    log = f"{place.prefix}/log/".encode()
    for value, reason in (
        (json.dumps(content | {"format": 99}).encode(), "has format 99"),
        (b"{", "its head does not parse"),
        (b"[]", "its head does not parse"),
        (json.dumps(content | {"last": 7}).encode(), "change 2 of 1 to 7 is missing"),
    ):
        client.transact([], [put(head, value)], 10.0)
        with pytest.raises(ConfigurationError, match=reason):
            opened(place)
    client.transact([], [put(head, found.value), put(log + b"%012d/0000" % 1, b"\x00")], 10.0)
    with pytest.raises(ConfigurationError, match="change 1: it is not a change"):
        opened(place)


def test_a_store_of_a_newer_release_is_refused_and_stays_as_it_is(place: EtcdLocation, client: EtcdClient) -> None:
    store = opened(place)
    store.write(Persist(1, (MEMBER,)))
    store.write_events([EventRecord(1, 5.0, "join", False, "x")])
    store.close()
    head, log = (f"{place.prefix}/{name}".encode() for name in ("head", "log/"))
    found = client.get(head, 10.0)
    assert found is not None
    newer = json.dumps(json.loads(found.value) | {"format": etcd_store.FORMAT + 1, "unknown": True}).encode()
    client.transact([], [put(head, newer), put(log + b"%012d/0000" % 2, b"of a later form")], 10.0)
    before = client.range(f"{place.prefix}/".encode(), f"{place.prefix}0".encode(), 10.0)
    assert len(before) == 4  # The head, an event and two changes.
    for options in ({}, {"standby": True}):
        with pytest.raises(ConfigurationError, match=f"has format {etcd_store.FORMAT + 1}"):
            opened(place, **options)
        assert client.range(f"{place.prefix}/".encode(), f"{place.prefix}0".encode(), 10.0) == before


@pytest.mark.parametrize("compactions", [1, 3])
def test_a_load_during_a_compaction_restarts_from_its_first_page(
    place: EtcdLocation, client: EtcdClient, monkeypatch: pytest.MonkeyPatch, compactions: int
) -> None:
    """etcd answers OUT_OF_RANGE to the second page, whose revision is gone."""
    monkeypatch.setattr(limits, "ETCD_PAGE_KEYS", 2)
    keys = [f"{place.prefix}/key/{number}".encode() for number in range(5)]
    client.transact([], [put(key, b"old") for key in keys], 10.0)
    call, pages = client._call, []

    def compacting(method: str, request: Any, *arguments: Any, **options: Any) -> Any:
        answer = call(method, request, *arguments, **options)
        if method.endswith("Range"):
            pages.append(request.revision)
            if not request.revision and pages.count(0) <= compactions:
                _, newest = client.transact([], [put(keys[-1], b"new")], 10.0)
                compact(client, newest)
        return answer

    monkeypatch.setattr(client, "_call", compacting)
    found = client.range(f"{place.prefix}/key/".encode(), f"{place.prefix}/key0".encode(), 10.0)
    assert [kv.key for kv in found] == keys and found[-1].value == b"new"
    assert pages.count(0) == compactions + 1


def compact(client: EtcdClient, revision: int) -> None:
    """Let etcd forget all revisions before this one. The request has the revision where this message has the id."""
    request = pb.EtcdLeaseRevokeRequest(id=revision).SerializeToString()
    client._channel(0).unary_unary("/etcdserverpb.KV/Compact")(request, timeout=10.0)


def test_the_members_of_the_cluster_are_tried_in_turn(etcd: Etcd, place: EtcdLocation) -> None:
    """The first endpoint refuses connections."""
    store = opened(replace(place, endpoints=("127.0.0.1:1", *place.endpoints)))
    store.write(Persist(1, (MEMBER,)))
    store.close()


def test_without_etcd_the_scheduler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_client, "START_SECONDS", 0.3)
    with pytest.raises(StorageError, match=r"etcd does not carry out Range \(last asked: 127.0.0.1:1\)"):
        opened(EtcdLocation(("127.0.0.1:1",), "p"))


@pytest.mark.parametrize(
    ("value", "reason"),
    [("etcd://h:1", "names no prefix"), ("etcd://h/p", "'h'"), ("zk://h:1/p", "zk:// is no store")],
)
def test_a_wrong_place_is_refused(value: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        store_location(value)


def test_etcd_with_tls(tmp_path: Path) -> None:
    """Both sides show a certificate; one of another CA is refused, and new files are used for new connections."""
    ca = make_ca()
    files = write_tls(tmp_path / "etcd", ca, "server")
    mine = write_tls(tmp_path / "mine", ca, "scheduler")
    with running(tmp_path / "run", tls=files) as etcd:
        place = store_location(etcd.url("run"))
        assert isinstance(place, EtcdLocation) and place.secure
        store = opened(place, tls=mine)
        store.write(Persist(1, (MEMBER,)))
        write_tls(tmp_path / "mine", ca, "scheduler", days=30)
        store.write(Persist(2, nodes=(NODE,)))
        store.close()
        store = opened(place, tls=mine)
        assert store.load() == StoredState("run", 2, (MEMBER,), nodes=(NODE,))
        store.close()
        stranger = EtcdClient(etcd.endpoints, write_tls(tmp_path / "stranger", make_ca(), "scheduler"))
        with pytest.raises(StorageError, match="UNAVAILABLE"):
            stranger.get(b"run/head", 1.0)
        stranger.close()


@pytest.mark.long
def test_a_cluster_of_three_survives_the_loss_of_a_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nobody writes: the lease is renewed at another member. A write waits while the others elect."""
    monkeypatch.setattr(etcd_client, "LEASE_SECONDS", 30)  # An election may take some seconds on a busy machine.
    with running(tmp_path, 3) as etcd:
        place = store_location(etcd.url("run"))
        assert isinstance(place, EtcdLocation)
        store = opened(place)
        for number, process in enumerate(etcd.processes):
            process.send_signal(signal.SIGKILL)
            store.write(Persist(number + 1, members=(replace(MEMBER, rank=number),)))
            store.check()
            etcd.restart(number)
            etcd.await_ready()
        store.close()
        store = opened(place)
        assert store.load() == StoredState("run", 3, (replace(MEMBER, rank=2),))
        store.close()
    assert not any(thread.name == "leader lease" and thread.is_alive() for thread in threading.enumerate())
