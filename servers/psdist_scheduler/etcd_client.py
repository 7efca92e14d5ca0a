"""Calls to etcd at whichever of its endpoints answers, and the leadership of a run by a lease there.

Calls block; they are made in the store's thread. A call whose answer is lost may have been carried out, so callers only
repeat calls whose effect they can recognize (see ``EtcdStore``).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Final, TypeVar

import grpc

from psdist.errors import LeadershipLostError, StorageError
from psdist.security.tls import TlsFiles, TlsIdentity
from psdist.v1 import etcd_pb2 as pb
from psdist.wire import limits

logger = logging.getLogger("psdist.scheduler")

T = TypeVar("T")
#: Time in seconds for one endpoint to answer. Without an answer the next one is asked.
ATTEMPT_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.05
#: Number of times that a range restarts from its first page.
_RESTARTS: Final = 5
_KV: Final = "/etcdserverpb.KV/"
_LEASE: Final = "/etcdserverpb.Lease/"
#: Another endpoint may answer, or the same one a little later. An endpoint without a leader of its own says UNKNOWN.
_PASSING: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
_OPTIONS: Final = [
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", limits.ETCD_ANSWER_BYTES),
]


class EtcdClient:
    """A client of one etcd cluster.

    endpoints: HOST:PORT of its members, at least one.
    tls: files of the identity to show; None for plaintext. New ones are used for new connections.
    """

    def __init__(self, endpoints: Sequence[str], tls: TlsFiles | None = None) -> None:
        self.endpoints = tuple(endpoints)
        self._tls = tls
        self._identity: TlsIdentity | None = None
        self._channels: list[grpc.Channel] = []
        self._next = 0
        self._opening = threading.Lock()

    def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            channel.close()

    def _channel(self, index: int) -> grpc.Channel:
        with self._opening:
            identity = self._tls.identity() if self._tls is not None else None
            if not self._channels or identity is not self._identity:
                self.close()
                self._identity = identity
                self._channels = [_open(endpoint, identity) for endpoint in self.endpoints]
            return self._channels[index]

    def get(self, key: bytes, seconds: float) -> pb.EtcdKeyValue | None:
        """Return a key with its value and revisions, or None. Raises StorageError after ``seconds``."""
        request = pb.EtcdRangeRequest(key=key)
        answer = self._call(_KV + "Range", request, pb.EtcdRangeResponse, seconds)
        _check_page(answer, key, key + b"\0")
        return answer.kvs[0] if answer.kvs else None

    def range(self, start: bytes, end: bytes, seconds: float) -> list[pb.EtcdKeyValue]:
        """Return the keys from ``start`` up to, and without, ``end``, all of one revision, in order. Raises
        StorageError."""
        for _ in range(_RESTARTS):
            try:
                return self._pages(start, end, seconds)
            except StorageError as error:
                # Somebody has compacted the revision of the first page. The next first page has a newer one.
                if error.details.get("status") != grpc.StatusCode.OUT_OF_RANGE.name:
                    raise
        return self._pages(start, end, seconds)

    def _pages(self, start: bytes, end: bytes, seconds: float) -> list[pb.EtcdKeyValue]:
        request = pb.EtcdRangeRequest(key=start, range_end=end, limit=limits.ETCD_PAGE_KEYS)
        found: list[pb.EtcdKeyValue] = []
        while True:
            answer = self._call(_KV + "Range", request, pb.EtcdRangeResponse, seconds)
            _check_page(answer, request.key, end)
            found += answer.kvs
            if not answer.more:
                return found
            request.key = found[-1].key + b"\0"
            request.revision = request.revision or answer.header.revision

    def transact(
        self, compare: Iterable[pb.EtcdCompare], success: Iterable[pb.EtcdOperation], seconds: float
    ) -> tuple[bool, int]:
        """Carry out all operations if all comparisons are true.

        Returns whether they were, and etcd's revision, which is then that of the written keys. Raises StorageError;
        then it is not known.
        """
        request = pb.EtcdTxnRequest(compare=compare, success=success)
        # One attempt: the comparisons of a second one would fail.
        answer = self._call(_KV + "Txn", request, pb.EtcdTxnResponse, min(seconds, ATTEMPT_SECONDS), repeats=False)
        return answer.succeeded, answer.header.revision

    def grant(self, ttl: int, seconds: float) -> int:
        """Return the id of a new lease of ``ttl`` seconds. Raises StorageError."""
        request = pb.EtcdLeaseGrantRequest(ttl=ttl)
        return int(self._call(_LEASE + "LeaseGrant", request, pb.EtcdLeaseGrantResponse, seconds).id)

    def revoke(self, lease: int, seconds: float) -> None:
        """End a lease, and delete its keys. Raises StorageError."""
        request = pb.EtcdLeaseRevokeRequest(id=lease)
        self._call(_LEASE + "LeaseRevoke", request, pb.EtcdLeaseRevokeResponse, seconds)

    def keep_alive(self, lease: int, seconds: float) -> int:
        """Renew a lease. Returns the seconds that it now lasts; 0 if it has ended. Raises StorageError."""
        request = pb.EtcdLeaseKeepAliveRequest(id=lease)

        def start(channel: grpc.Channel, timeout: float) -> pb.EtcdLeaseKeepAliveResponse:
            method = channel.stream_stream(
                _LEASE + "LeaseKeepAlive", _serialized, pb.EtcdLeaseKeepAliveResponse.FromString
            )
            answer: pb.EtcdLeaseKeepAliveResponse = next(iter(method(iter((request,)), timeout=timeout)))
            return answer

        return int(self._attempt("LeaseKeepAlive", start, seconds).ttl)

    def _call(self, method: str, request: Any, answer: Any, seconds: float, *, repeats: bool = True) -> Any:
        def start(channel: grpc.Channel, timeout: float) -> Any:
            return channel.unary_unary(method, _serialized, answer.FromString)(request, timeout=timeout)

        return self._attempt(method, start, seconds, repeats=repeats)

    def _attempt(
        self, method: str, start: Callable[[grpc.Channel, float], T], seconds: float, *, repeats: bool = True
    ) -> T:
        """Make a call at one endpoint after the other, for ``seconds``. Raises StorageError."""
        until = time.monotonic() + seconds
        while True:
            left = until - time.monotonic()
            try:
                return start(self._channel(self._next), max(0.01, min(left, ATTEMPT_SECONDS)))
            except (grpc.RpcError, StopIteration) as error:
                failed = self.endpoints[self._next]
                self._next = (self._next + 1) % len(self.endpoints)
                code = error.code() if isinstance(error, grpc.RpcError) else grpc.StatusCode.UNAVAILABLE
                reason = error.details() if isinstance(error, grpc.RpcError) else "no answer"
            if code not in _PASSING or not repeats or until - time.monotonic() <= _PAUSE_SECONDS:
                raise StorageError(
                    f"etcd does not carry out {method.rpartition('/')[2]} (last asked: {failed}): {code.name}: "
                    f"{reason}{_remedy(reason)}",
                    status=code.name,
                )
            time.sleep(_PAUSE_SECONDS)  # In the thread of the store or of the lease.


def _check_page(answer: pb.EtcdRangeResponse, start: bytes, end: bytes) -> None:
    """Raise StorageError unless the keys of an answer belong to its request, in order: others might never end."""
    for kv in answer.kvs:
        if not start <= kv.key < end:
            raise StorageError(f"etcd answered a range from {start!r:.200} with the key {kv.key!r:.200}: is it etcd?")
        start = kv.key + b"\0"
    if answer.more and not answer.kvs:
        raise StorageError(
            f"etcd answered a range from {start!r:.200} with no key, and says that more follow: is it etcd?"
        )


def _remedy(reason: str | None) -> str:
    if "space exceeded" not in (reason or ""):
        return ""
    return (
        ". etcd keeps each earlier revision of a key: call etcdctl compact, defrag and alarm disarm, and start etcd "
        "with --auto-compaction-retention=1h"
    )


def _open(endpoint: str, identity: TlsIdentity | None) -> grpc.Channel:
    if identity is None:
        return grpc.insecure_channel(endpoint, options=_OPTIONS)
    return grpc.secure_channel(endpoint, identity.channel_credentials(), options=_OPTIONS)


def put(key: bytes, value: bytes, lease: int = 0) -> pb.EtcdOperation:
    """Return the operation that writes a key."""
    return pb.EtcdOperation(put=pb.EtcdPut(key=key, value=value, lease=lease))


def delete_range(start: bytes, end: bytes) -> pb.EtcdOperation:
    """Return the operation that deletes the keys from ``start`` up to, and without, ``end``."""
    return pb.EtcdOperation(delete_range=pb.EtcdDeleteRange(key=start, range_end=end))


def created_at(key: bytes, revision: int) -> pb.EtcdCompare:
    """Return the comparison that is true for a key created at ``revision``; 0: for one that does not exist."""
    return pb.EtcdCompare(target=pb.EtcdCompare.TARGET_CREATE_REVISION, key=key, create_revision=revision)


def written_at(key: bytes, revision: int) -> pb.EtcdCompare:
    """Return the comparison that is true for a key last written at ``revision``; 0: for one that does not exist."""
    return pb.EtcdCompare(target=pb.EtcdCompare.TARGET_MOD_REVISION, key=key, mod_revision=revision)


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


# --- leadership -------------------------------------------------------------------------------------------------------
#
# One scheduler at a time holds the run's leader key in etcd, by a lease that it renews. A lease alone gives no mutual
# exclusion: its holder may be frozen, and resume after the lease has ended (https://etcd.io/docs/v3.4/learning/why/).
# So every write of the store is a transaction that compares the leader key (``guard``), and this process takes part
# in the run only while the lease holds by its own clock (``check``), counted from when it asked for the renewal.

#: Seconds that the lease of a dead leader lasts. etcd makes shorter ones longer.
LEASE_SECONDS: Final = 3
#: Longest lease to believe in: etcd gives the requested time, or its election timeout of at most 50 s if longer.
_LEASE_MAX_SECONDS: Final = 75
_RENEW_SECONDS: Final = 1.0
#: Renewals between two looks at this process's own leader key, which only somebody who edits etcd deletes.
_LOOK_EVERY: Final = 3
#: Pause between two looks at the leader key.
POLL_SECONDS: Final = 0.25
#: Longest time for etcd to answer before this process leads, and when it ends.
START_SECONDS: Final = 10.0
_END_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Leader:
    """The scheduler that holds the leader key: its process, for messages."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Leadership:
    """This process's claim to the leader key ``key``. mine: this process."""

    def __init__(self, client: EtcdClient, key: bytes, mine: Leader) -> None:
        self._client = client
        self._key = key
        self._mine = mine
        self._lease = 0
        #: Revision in which this process created the leader key; 0 before.
        self.revision = 0
        self._until = 0.0
        #: Why the lease ended before its time.
        self._cause = ""
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew_repeatedly, name="leader lease", daemon=True)

    def take(self) -> Leader | None:
        """Try to become the leader. Returns None if this process leads now, otherwise the leader. Raises
        StorageError."""
        held = self._client.get(self._key, START_SECONDS)
        if held is None:
            asked = time.monotonic()
            self._lease = self._client.grant(LEASE_SECONDS, START_SECONDS)
            value = json.dumps(asdict(self._mine)).encode()
            with suppress(StorageError):  # The answer may be lost: the key tells.
                self._client.transact([created_at(self._key, 0)], [put(self._key, value, self._lease)], START_SECONDS)
            held = self._client.get(self._key, START_SECONDS)
            if held is not None and held.lease == self._lease:
                self.revision, self._until = held.create_revision, asked + LEASE_SECONDS
                self._renewing.start()
                return None
        return _leader(held.value) if held is not None else Leader("nobody", 0)

    @property
    def guard(self) -> pb.EtcdCompare:
        """The comparison that is true while this process leads."""
        return created_at(self._key, self.revision)

    @property
    def seconds_left(self) -> float:
        """Time for which the lease holds by this process's clock; negative after its end."""
        return self._until - time.monotonic()

    def check(self, reason: str = "") -> None:
        """Return if the lease holds. reason: what went wrong meanwhile. Raises LeadershipLostError."""
        late = -self.seconds_left
        if late >= 0 or self._ended.is_set():
            raise self.lost(self._cause or reason or f"its lease in etcd ended {max(late, 0.0):.1f} s ago")

    def lost(self, reason: str) -> LeadershipLostError:
        """Return the error for a leadership that has ended."""
        self._ended.set()
        return LeadershipLostError(
            f"this scheduler does not lead the run any more: {reason}. Another one may lead it now; the members go to "
            "it by themselves. Start this one again with --standby"
        )

    def _renew_repeatedly(self) -> None:
        for number in count(1):
            if self._ended.wait(_RENEW_SECONDS):
                return
            try:
                if not self.renew(looks=number % _LOOK_EVERY == 0):
                    return
            except StorageError as error:
                logger.warning("the lease of the leading scheduler could not be renewed: %s", error)

    def renew(self, *, looks: bool = True) -> bool:
        """Renew the lease. looks: also look at the leader key. False if the leadership has ended. Raises
        StorageError."""
        asked = time.monotonic()
        ttl = self._client.keep_alive(self._lease, max(_RENEW_SECONDS, self._until - asked))
        if ttl <= 0:
            return self._end(asked, "its lease ended in etcd")
        self._until = asked + min(ttl, _LEASE_MAX_SECONDS)
        if looks and self._is_key_gone():
            return self._end(asked, "its leader key was deleted")
        return True

    def _is_key_gone(self) -> bool:
        """Return True if the leader key is not this process's. The lease outlives a key that somebody deletes, and
        another scheduler would lead beside this one. Raises StorageError."""
        held = self._client.get(self._key, ATTEMPT_SECONDS)
        return held is None or held.create_revision != self.revision

    def _end(self, when: float, cause: str) -> bool:
        self._cause, self._until = cause, min(self._until, when)
        return False

    def resign(self) -> None:
        """Give up the leader key, so that another scheduler can lead immediately."""
        was_running = self._renewing.is_alive()
        self._ended.set()
        if was_running:
            self._renewing.join(_END_SECONDS)
        if self._lease:
            with suppress(StorageError):  # It ends by itself.
                self._client.revoke(self._lease, _END_SECONDS)


def _leader(value: bytes) -> Leader:
    """Return the leader that a leader key names. Somebody else may have written it."""
    try:
        named = json.loads(value)
        return Leader(str(named["host"])[:256], int(named["pid"]))
    except (ValueError, LookupError, TypeError):
        return Leader("an unknown host", 0)
