"""A hostile etcd: ``python -m tests.fuzz.etcd``. The scheduler's store gets changed answers to its calls.

Each opens, loads, writes and closes a store. Any mixture of answers must end it in order, or with a typed error, and
within a bounded number of calls: an etcd whose answers never end must not hold the scheduler.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import grpc
from google.protobuf.message import DecodeError

from psdist.errors import PsdistError
from psdist.settings.config import EtcdLocation
from psdist.v1 import etcd_pb2 as pb
from psdist_scheduler import etcd_client, etcd_store
from psdist_scheduler.decide.cluster_state import EventRecord
from psdist_scheduler.decide.effects import Persist
from psdist_scheduler.etcd_client import EtcdClient, Leader, Leadership
from psdist_scheduler.etcd_store import EtcdStore
from tests.fuzz.messages import Known, MessageGenerator, mutate_bytes, mutate_message
from tests.support.store_records import MEMBER, NODE, RECORD

_PREFIX: Final = "fuzzed"
_LOCATION: Final = EtcdLocation(("etcd:1",), _PREFIX)
#: More than a store with these few changes ever makes.
_CALLS_MAX: Final = 400
_CODES: Final = tuple(grpc.StatusCode)
_SECONDS: Final = 1e-9
_NUMBERS: Final = (-1, 0, 1, 2, 3, 1.5, 1e300, 1 << 40, 1 << 70, True, None, "1", "", [], {}, [1, 2])


class EtcdFuzzFailure(Exception):
    """The store did not end as it should."""


class _Refusal(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details


class PlainEtcd:
    """An etcd with the calls that the store makes, in memory."""

    def __init__(self) -> None:
        self._keys: dict[bytes, pb.EtcdKeyValue] = {}
        self._revision = 1

    def range(self, request: pb.EtcdRangeRequest) -> pb.EtcdRangeResponse:
        """Return a page of keys."""
        end = request.range_end or request.key + b"\0"
        found = [self._keys[key] for key in sorted(self._keys) if request.key <= key < end]
        page = found[: request.limit or len(found)]
        return pb.EtcdRangeResponse(header=self._header(), kvs=page, more=len(page) < len(found))

    def transact(self, request: pb.EtcdTxnRequest) -> pb.EtcdTxnResponse:
        """Carry out a transaction."""
        is_due = all(map(self._is_true, request.compare))
        if is_due:
            self._revision += 1
            for operation in request.success:
                self._carry_out(operation)
        return pb.EtcdTxnResponse(header=self._header(), succeeded=is_due)

    def _is_true(self, compare: pb.EtcdCompare) -> bool:
        found = self._keys.get(compare.key, pb.EtcdKeyValue())
        if compare.target == pb.EtcdCompare.TARGET_CREATE_REVISION:
            return bool(found.create_revision == compare.create_revision)
        return bool(found.mod_revision == compare.mod_revision)

    def _carry_out(self, operation: pb.EtcdOperation) -> None:
        if operation.HasField("put"):
            put, old = operation.put, self._keys.get(operation.put.key)
            created = old.create_revision if old is not None else self._revision
            self._keys[put.key] = pb.EtcdKeyValue(
                key=put.key, value=put.value, lease=put.lease, create_revision=created, mod_revision=self._revision
            )
        else:
            start, end = operation.delete_range.key, operation.delete_range.range_end
            for key in [key for key in self._keys if start <= key < end]:
                del self._keys[key]

    def _header(self) -> pb.EtcdHeader:
        return pb.EtcdHeader(revision=self._revision)

    def answer(self, method: str, request: Any) -> Any:
        """Answer any call."""
        match method.rpartition("/")[2]:
            case "Range":
                return self.range(request)
            case "Txn":
                return self.transact(request)
            case "LeaseGrant":
                return pb.EtcdLeaseGrantResponse(id=7, ttl=3)
            case "LeaseKeepAlive":
                return pb.EtcdLeaseKeepAliveResponse(id=7, ttl=3)
        self._keys = {key: kv for key, kv in self._keys.items() if not kv.lease}
        return pb.EtcdLeaseRevokeResponse()


class HostileChannel:
    """A channel to an etcd that changes answers. share: of the answers that it changes."""

    def __init__(self, etcd: PlainEtcd, rng: random.Random, share: float) -> None:
        self._etcd = etcd
        self._rng = rng
        self._share = share
        self._stuck = rng.random() < 0.1
        self.calls = 0

    def close(self) -> None:
        """Do nothing."""

    def unary_unary(self, method: str, _: object, parse: Callable[[bytes], Any]) -> Callable[..., Any]:
        return lambda request, timeout: self._answer(method, request, parse)

    def stream_stream(self, method: str, _: object, parse: Callable[[bytes], Any]) -> Callable[..., Any]:
        def call(requests: Iterator[Any], timeout: float) -> Iterator[Any]:
            if self._rng.random() < 0.9:
                yield self._answer(method, next(requests), parse)

        return call

    def _answer(self, method: str, request: Any, parse: Callable[[bytes], Any]) -> Any:
        self.calls += 1
        if self.calls > _CALLS_MAX:
            raise EtcdFuzzFailure(f"more than {_CALLS_MAX} calls, the last {method}")
        answer = self._etcd.answer(method, request)
        if self._rng.random() >= self._share:
            return answer
        if self._rng.random() < 0.1:
            raise _Refusal(self._rng.choice(_CODES), self._rng.choice(("", "etcdserver: no leader", "space exceeded")))
        try:
            return parse(self._changed(answer))
        except DecodeError as error:  # As gRPC reports it.
            raise _Refusal(grpc.StatusCode.INTERNAL, f"Exception deserializing response! {error}") from None

    def _changed(self, answer: Any) -> bytes:
        rng, copy = self._rng, type(answer)()
        copy.CopyFrom(answer)
        generator = MessageGenerator(rng, Known(values={"key": [kv.key for kv in getattr(answer, "kvs", ())]}))
        if isinstance(answer, pb.EtcdRangeResponse) and rng.random() < 0.7:
            self._change_range(copy)
        elif rng.random() < 0.5:
            mutate_message(rng, generator, copy)
        elif rng.random() < 0.5:
            return bytes(generator.message(answer.DESCRIPTOR).SerializeToString())
        else:
            return mutate_bytes(rng, answer.SerializeToString())
        return bytes(copy.SerializeToString())

    def _change_range(self, answer: pb.EtcdRangeResponse) -> None:
        rng = self._rng
        if self._stuck or rng.random() < 0.1:
            answer.more = True
        if not answer.kvs:
            answer.kvs.add(key=rng.choice((b"", b"fuzzed/head", b"x")), value=b"{}", create_revision=1, mod_revision=1)
        chosen = rng.choice(answer.kvs)
        match rng.randrange(7):
            case 0:
                chosen.value = mutate_bytes(rng, chosen.value)
            case 1:
                chosen.key = rng.choice((b"", b"/", b"a/b/c", mutate_bytes(rng, chosen.key), chosen.key + b"/9/9"))
            case 2:
                answer.kvs.remove(chosen)
            case 3:
                answer.kvs.append(chosen)
            case 4:
                del answer.kvs[:]
            case 5:
                chosen.mod_revision, chosen.lease = rng.choice((0, -1, 5, 1 << 62)), rng.choice((0, 7, -7))
            case _:
                chosen.value = _changed_json(rng, chosen.value)


def _changed_json(rng: random.Random, data: bytes) -> bytes:
    """Return JSON with one value of another kind; other bytes as they are."""
    try:
        read = json.loads(data)
    except ValueError:
        return data
    if isinstance(read, dict | list) and read:
        read[rng.choice(list(read) if isinstance(read, dict) else range(len(read)))] = rng.choice(_NUMBERS)
    else:
        read = rng.choice(_NUMBERS)
    return json.dumps(read).encode()


class _Client(EtcdClient):
    """A client with a channel that is given."""

    def __init__(self, channel: Any) -> None:
        super().__init__(_LOCATION.endpoints)
        self._given = channel

    def _channel(self, index: int) -> Any:
        return self._given


@contextmanager
def without_waiting() -> Iterator[None]:
    """Make pauses and limits of the store tiny, and renew no lease by itself."""
    with ExitStack() as stack:
        for module, names in (
            (etcd_client, ("_PAUSE_SECONDS",)),
            (etcd_store, ("_PAUSE_SECONDS", "WRITE_SECONDS", "START_SECONDS")),
            (etcd_client, ("START_SECONDS", "_END_SECONDS")),
        ):
            stack.enter_context(mock.patch.multiple(module, **dict.fromkeys(names, _SECONDS)))
        stack.enter_context(mock.patch.object(etcd_client, "_RENEW_SECONDS", 1e6))
        yield


def _use(channel: Any) -> str:
    """Open, load, write and close a store. Return the outcome."""
    client = _Client(channel)
    claim = Leadership(client, f"{_PREFIX}/leader".encode(), Leader("box", 1))
    try:
        if claim.take() is not None:
            return "another leads"
        store = EtcdStore(client, _LOCATION, claim, "run")
        try:
            store.load()
            store.load_events()
            store.write(Persist(3, (replace(MEMBER, member_id="w3", rank=3),)))
            store.write_events([EventRecord(9, 5.0, "join", False, "x")])
            claim.renew()
            store.check()
        finally:
            store.close()
    except PsdistError as error:
        return error.code
    finally:
        claim.resign()
    return "worked"


def open_plainly(etcd: PlainEtcd) -> EtcdStore:
    """Open the store in an etcd that changes no answers."""
    client = _Client(HostileChannel(etcd, random.Random(0), 0.0))
    claim = Leadership(client, f"{_PREFIX}/leader".encode(), Leader("box", 1))
    assert claim.take() is None
    return EtcdStore(client, _LOCATION, claim, "run")


def filled() -> PlainEtcd:
    """Return an etcd with a store in it."""
    etcd = PlainEtcd()
    store = open_plainly(etcd)
    store.write(Persist(1, (MEMBER,), (RECORD,), (NODE,)))
    store.write(Persist(2, (replace(MEMBER, member_id="w2", rank=2),)))
    store.write_events([EventRecord(number, 5.0, "join", False, "worker-0 joins") for number in range(1, 4)])
    store.close()
    return etcd


def fuzz(numbers: range, seed: int) -> Counter[str]:
    """Use a store once for each number. Return the outcomes. Raises EtcdFuzzFailure with the number."""
    outcomes: Counter[str] = Counter()
    with without_waiting():
        for number in numbers:
            rng = random.Random(f"{seed}/{number}")
            channel = HostileChannel(filled(), rng, rng.choice((0.05, 0.2, 0.5)))
            try:
                outcomes[_use(channel)] += 1
            except Exception as error:  # Any: a typed end is none, so each of these is a find.
                again = f"again: python -m tests.fuzz.etcd --seed {seed} --first {number} --inputs 1"
                raise EtcdFuzzFailure(f"{type(error).__name__}: {error}\n{again}") from error
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.etcd", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    options = parser.parse_args()
    logging.disable()
    outcomes = fuzz(range(options.first, options.first + options.inputs), options.seed)
    print(f"{outcomes.total()} stores with a hostile etcd: {dict(outcomes.most_common())}; seed {options.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
