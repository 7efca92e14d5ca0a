"""Leadership of a run: one scheduler at a time holds the run's leader key in etcd, by a lease that it renews.

A lease alone gives no mutual exclusion: its holder may be frozen, and resume after the lease has ended
(https://etcd.io/docs/v3.4/learning/why/). So every write of the store is a transaction that compares the leader key
(``guard``), and this process takes part in the run only while the lease holds by its own clock (``check``), counted
from when it asked for the renewal.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Final

from psdist.errors import LeadershipLostError, StorageError
from psdist.v1 import etcd_pb2 as pb
from psdist_scheduler.stores.etcd_client import ATTEMPT_SECONDS, EtcdClient, created_at, put

logger = logging.getLogger("psdist.scheduler")

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


def await_leadership(
    take: Callable[[], Leader | None], wait: Callable[[Leader], None], on_leader: Callable[[Leader], None]
) -> None:
    """Return once ``take`` has returned None. wait: waits a little while another scheduler leads, or raises what ends
    this one. on_leader: called with the leader when it is another one than before."""
    before = None
    while (leader := take()) is not None:
        if leader != before:
            on_leader(leader)
            before = leader
        wait(leader)


def _leader(value: bytes) -> Leader:
    """Return the leader that a leader key names. Somebody else may have written it."""
    try:
        named = json.loads(value)
        return Leader(str(named["host"])[:256], int(named["pid"]))
    except (ValueError, LookupError, TypeError):
        return Leader("an unknown host", 0)
