"""The store in etcd: a log of changes below a prefix, which only the leading scheduler writes.

Keys below the prefix:

* ``leader``: who leads (``etcd_client``).
* ``head``: JSON; the run, and the first and last number of the log. It is written by the same transaction as the last
  part of a change, so that a change is stored whole or not at all.
* ``log/NUMBER/PART``: a change (``run_store``), in parts that fit a request. The first one is the whole state.
* ``events/NUMBER``: the history of the run.
* ``ended``: for a minute after the run has ended in order, so that a scheduler that waits to lead it ends, too.

Each transaction compares the leader key: a scheduler that has lost its lease writes nothing. The head names its writer,
so that the writer recognizes a transaction whose answer was lost. After ``LOG_LENGTH`` changes the whole state is
written as one, and older ones are deleted.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from psdist.errors import ConfigurationError, PsdistError, StorageError
from psdist.security.tls import TlsFiles
from psdist.settings import exit_codes
from psdist.settings.config import EtcdLocation, check_run_id
from psdist.v1 import etcd_pb2 as pb
from psdist.wire.limits import ETCD_OPERATIONS_MAX, ETCD_VALUE_BYTES, EVENTS_MAX
from psdist_scheduler import etcd_client
from psdist_scheduler import run_store as log
from psdist_scheduler.decide.cluster_state import EventRecord, StoredState
from psdist_scheduler.decide.effects import Persist
from psdist_scheduler.etcd_client import (
    ATTEMPT_SECONDS,
    POLL_SECONDS,
    START_SECONDS,
    EtcdClient,
    Leader,
    Leadership,
    delete_range,
    put,
    written_at,
)
from psdist_scheduler.run_store import SqliteStore, Store

logger = logging.getLogger("psdist.scheduler")
T = TypeVar("T")

#: Raised when an older program could misread the log.
FORMAT: Final = 1
#: Name of the key that says that the run has ended, and for how long.
ENDED: Final = b"ended"
_ENDED_SECONDS: Final = 60
#: Length of the log, in changes, at which it is shortened.
LOG_LENGTH: Final = 256
#: Longest time for which a write that etcd refuses is repeated while the lease holds.
WRITE_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Head:
    """first, last: numbers of the log; none if last is smaller. writer: leadership that wrote it."""

    run_id: str
    first: int = 1
    last: int = 0
    writer: int = 0
    format: int = FORMAT

    @property
    def value(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class _Format:
    """The part of a head that all formats share."""

    format: int


#: An event, as JSON: the fields of EventRecord.
_EVENT: Final = tuple[int, float, str, bool, str]


class EtcdStore(Store):
    """A store below a prefix of etcd. The caller leads the run."""

    keeps_events = True

    def __init__(
        self,
        client: EtcdClient,
        location: EtcdLocation,
        leadership: Leadership,
        run_id: str,
        new_run_id: Callable[[], str] = lambda: "",
    ) -> None:
        """Read the state. Raises ConfigurationError if it is unusable or another run's, StorageError.

        run_id: run of a new store. If empty, it is read from the store, or for a new one is ``new_run_id()``.
        """
        self._client = client
        self._location = location
        self._leadership = leadership
        self._prefix = location.prefix.encode() + b"/"
        #: The state that the log leads to.
        self._state = SqliteStore(Path(":memory:"), "run")
        self._head, self._head_revision = self._read_head(run_id)
        self.run_id = self._head.run_id or run_id or new_run_id()
        if self._head.last:
            self._replay()
        else:
            self._head = _Head(self.run_id)
        ended = self._prefix + ENDED
        # Parts of a change that an earlier leader did not complete would be taken for parts of the next one. The run
        # that ended under this prefix was an earlier one.
        self._guarded(
            [
                delete_range(self._log_key(self._head.last + 1), _end(self._prefix + b"log/")),
                delete_range(ended, ended + b"\0"),
            ]
        )

    def load(self) -> StoredState | None:
        """Return the stored state; None for a new store."""
        state = self._state.load()
        return replace(state, run_id=self.run_id) if state is not None else None

    def write(self, changes: Persist) -> None:
        self._state.write(changes)
        self._append(log.encode(changes))
        if self._head.last - self._head.first >= LOG_LENGTH:
            self._shorten()

    def check(self) -> None:
        self._leadership.check()

    def load_events(self) -> list[EventRecord]:
        start = self._prefix + b"events/"
        try:
            return [
                EventRecord(*msgspec.json.decode(kv.value, type=_EVENT))
                for kv in self._client.range(start, _end(start), START_SECONDS)
            ]
        except (ValueError, msgspec.MsgspecError) as error:  # Texts that are not UTF-8 raise the first.
            raise self._unusable(f"an event does not parse: {error}") from None

    def write_events(self, records: Sequence[EventRecord]) -> None:
        oldest = self._prefix + b"events/"
        operations = [put(self._event_key(r.number), json.dumps(astuple(r)).encode()) for r in records]
        operations.append(delete_range(oldest, self._event_key(max(1, records[-1].number - EVENTS_MAX + 1))))
        try:
            for start in range(0, len(operations), ETCD_OPERATIONS_MAX):
                self._guarded(operations[start : start + ETCD_OPERATIONS_MAX])
        except PsdistError as error:  # Those of a scheduler that does not lead any more are lost.
            logger.warning("%d events of the run's history are not stored: %s", len(records), error)

    def discard(self) -> None:
        with suppress(PsdistError):
            lease = self._client.grant(_ENDED_SECONDS, START_SECONDS)
            self._guarded([put(self._prefix + ENDED, self.run_id.encode(), lease)])
            everything = [self._prefix + name for name in (b"events/", b"log/")]
            head = self._prefix + b"head"
            self._guarded([delete_range(head, head + b"\0"), *(delete_range(key, _end(key)) for key in everything)])
        self.close()

    def close(self) -> None:
        self._leadership.resign()
        self._client.close()
        self._state.close()

    # --- the log ------------------------------------------------------------------------------------------------------

    def _read_head(self, run_id: str) -> tuple[_Head, int]:
        found = self._client.get(self._prefix + b"head", START_SECONDS)
        if found is None:
            return _Head(""), 0
        try:
            log.check_format(self._location, msgspec.json.decode(found.value, type=_Format).format, FORMAT, "prefix")
            head = msgspec.json.decode(found.value, type=_Head)
        except (ValueError, msgspec.MsgspecError) as error:
            raise self._unusable(f"its head does not parse: {error}") from None
        log.check_run(self._location, head.run_id, run_id, "prefix")
        check_run_id(head.run_id)
        return head, found.mod_revision

    def _replay(self) -> None:
        first, last = self._head.first, self._head.last
        parts: dict[int, list[bytes]] = {}
        for kv in self._client.range(self._log_key(first), self._log_key(last + 1), START_SECONDS):
            name = kv.key.removeprefix(self._prefix + b"log/").partition(b"/")[0]
            if not name.isdigit():
                raise self._unusable(f"{kv.key!r:.200} is no key of its log")
            parts.setdefault(int(name), []).append(kv.value)
        # The head may claim any number of changes: stop at the first that does not exist.
        missing = next((number for number in range(first, last + 1) if number not in parts), None)
        if missing is not None:
            raise self._unusable(f"change {missing} of {first} to {last} is missing")
        try:
            for number in range(first, last + 1):
                self._state.write(log.decode(b"".join(parts[number])))
        except ValueError as error:
            raise self._unusable(f"change {number}: {error}") from None

    def _append(self, record: bytes, first: int = 0) -> None:
        """Store the next change. first: where the log starts from now on; 0 for where it does."""
        number = self._head.last + 1
        *before, last = (
            put(self._log_key(number) + b"%04d" % index, part) for index, part in enumerate(_parts(record))
        )
        for part in before:
            self._guarded([part])
        self._move_head(replace(self._head, first=first or self._head.first, last=number), last)

    def _shorten(self) -> None:
        """Write the whole state as one change, and delete those before it."""
        state = self._state.load()
        assert state is not None, "a log without a state"
        number = self._head.last + 1
        self._append(log.encode(log.whole(state)), number)
        with suppress(StorageError):  # Next time.
            self._guarded([delete_range(self._prefix + b"log/", self._log_key(number))])

    def _move_head(self, head: _Head, change: pb.EtcdOperation) -> None:
        """Write the head and the last part of a change. Raises as ``_repeat``."""
        head = replace(head, writer=self._leadership.revision)
        key = self._prefix + b"head"
        operations = [change, put(key, head.value)]
        compare = [self._leadership.guard, written_at(key, self._head_revision)]

        def move() -> int:
            done, revision = self._client.transact(compare, operations, ATTEMPT_SECONDS)
            if not done:  # Unless an attempt was carried out whose answer was lost.
                found = self._client.get(key, ATTEMPT_SECONDS)
                if found is None or found.value != head.value:
                    raise self._leadership.lost("another scheduler has taken the leader key")
                revision = found.mod_revision
            return revision

        self._head_revision = self._repeat(move)
        self._head = head

    def _guarded(self, operations: Sequence[pb.EtcdOperation]) -> None:
        """Carry out operations that may be repeated. Raises as ``_repeat``."""

        def carry_out() -> None:
            done, _ = self._client.transact([self._leadership.guard], operations, ATTEMPT_SECONDS)
            if not done:
                raise self._leadership.lost("another scheduler has taken the leader key")

        self._repeat(carry_out)

    def _repeat(self, attempt: Callable[[], T]) -> T:
        """Return what ``attempt`` returns, once it raises no StorageError.

        Raises LeadershipLostError if the lease ends meanwhile, or the last StorageError after ``WRITE_SECONDS``: an
        etcd without space renews leases, and writes nothing.
        """
        until = time.monotonic() + WRITE_SECONDS
        while True:
            try:
                return attempt()
            except StorageError as error:
                self._leadership.check(str(error))
                if time.monotonic() >= until:
                    raise
            time.sleep(_PAUSE_SECONDS)  # In the store's thread.

    def _log_key(self, number: int) -> bytes:
        return self._prefix + b"log/%012d/" % number

    def _event_key(self, number: int) -> bytes:
        return self._prefix + b"events/%012d" % number

    def _unusable(self, reason: str) -> ConfigurationError:
        return ConfigurationError(
            f"--store {self._location} cannot be used: {reason}. Start afresh under another --run-id with another "
            "prefix"
        )


def _parts(record: bytes) -> Iterator[bytes]:
    for start in range(0, len(record), ETCD_VALUE_BYTES):
        yield record[start : start + ETCD_VALUE_BYTES]


def _end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with ``prefix``."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def open_etcd_store(
    place: EtcdLocation,
    tls: TlsFiles | None,
    run_id: str,
    new_run_id: Callable[[], str],
    *,
    standby: bool,
    wait: Callable[[float], None],
) -> EtcdStore:
    """Open the store of a run at ``place``, and lead the run. Arguments and errors as for ``app.open_store``."""
    client = EtcdClient(place.endpoints, tls)
    mine = Leader(socket.gethostname(), os.getpid())
    claim = Leadership(client, f"{place.prefix}/leader".encode(), mine)
    until = time.monotonic() + 2 * etcd_client.LEASE_SECONDS

    before: Leader | None = None
    try:
        while True:
            try:
                leader = claim.take()
            except StorageError as error:
                # The leader ends, too, if etcd does not answer for long: a standby that ended could not follow it.
                if not standby or before is None:
                    raise
                logger.warning("still waiting to lead the run at %s: %s", place, error)
                leader = before
            if leader is None:
                break
            if leader != before:
                logger.info("waiting to lead the run at %s: %s leads it", place, leader)
            before = leader
            if not standby and time.monotonic() > until:
                raise ConfigurationError(
                    f"{leader} leads the run at --store {place}: end that scheduler first, or wait for its end with "
                    "--standby"
                )
            wait(POLL_SECONDS)
        if before and client.get(f"{place.prefix}/".encode() + ENDED, START_SECONDS) is not None:
            logger.info("the run at %s has ended", place)
            raise SystemExit(exit_codes.OK)
        return EtcdStore(client, place, claim, run_id, new_run_id)
    except BaseException:  # Also at a signal: the next scheduler need not wait for the end of the lease.
        claim.resign()
        client.close()
        raise
