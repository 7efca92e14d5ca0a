"""Calls to etcd: ranges, transactions and leases, at whichever of its endpoints answers.

Calls block; they are made in the store's thread. A call whose answer is lost may have been carried out, so callers only
repeat calls whose effect they can recognize (see ``EtcdStore``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import grpc

from psdist.errors import StorageError
from psdist.security.tls import TlsFiles, TlsIdentity
from psdist.v1 import etcd_pb2 as pb
from psdist.wire import limits

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
