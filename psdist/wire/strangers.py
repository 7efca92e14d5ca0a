"""Connections of strangers to a gRPC port: those on which no call with the run's token has arrived.

gRPC's own limit counts all connections, whoever opens them, so that one address could use them up. Here each address
has a limit of its own: one more connection closes its oldest. Members' connections are never closed, so strangers that
share an address with members keep no connected member out.

gRPC offers no way to close a connection of a server. But its socket is a descriptor of this process: ``shut_down`` ends
the connection on a duplicate of it, and gRPC sees the end. On systems without ``/proc`` nothing is closed.

``Strangers`` decides and is pure.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import unquote

from psdist.wire import limits
from psdist.wire.backoff import LogPacer

logger = logging.getLogger("psdist.auth")

_DESCRIPTORS: Final = "/proc/self/fd"
_MAPPED: Final = "::ffff:"
#: Seconds between two looks at the open connections, and looks between two complete ones if there are few.
_SWEEP_SECONDS: Final = 1.0
_SWEEPS_WHILE_FEW: Final = 60


class RemoteEnd(NamedTuple):
    """The other end of a connection."""

    host: str
    port: int


def parse_peer(text: str) -> RemoteEnd | None:
    """Return the peer that gRPC calls ``ipv4:host:port`` or ``ipv6:[host]:port``; None for another kind."""
    kind, _, address = unquote(text).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _peer(host.strip("[]"), int(port))


def _peer(host: str, port: int) -> RemoteEnd:
    return RemoteEnd(host.removeprefix(_MAPPED), port)


class Strangers:
    """Decides which connections are closed."""

    def __init__(self) -> None:
        #: Members' connections, and the sweep that saw them last.
        self._members: dict[RemoteEnd, int] = {}
        #: Other connections, in order of arrival.
        self._others: dict[RemoteEnd, None] = {}
        self._sweeps = 0

    @property
    def member_count(self) -> int:
        """Number of members' connections, with those that ended since the last sweep."""
        return len(self._members)

    def admit(self, peer: RemoteEnd) -> None:
        """Note a call with the token."""
        self._members[peer] = self._sweeps

    def surplus(self, connected: Sequence[RemoteEnd]) -> list[RemoteEnd]:
        """Return those of the open connections that are to be closed: the oldest of each address with too many."""
        self._sweeps += 1
        is_open = set(connected)
        self._members |= dict.fromkeys(self._members.keys() & is_open, self._sweeps)
        # A connection that was admitted while the open ones were listed may be missing in that list.
        self._members = {peer: seen for peer, seen in self._members.items() if seen >= self._sweeps - 1}
        arrived = dict.fromkeys([*(peer for peer in self._others if peer in is_open), *connected])
        self._others = dict.fromkeys(peer for peer in arrived if peer not in self._members)
        by_host: defaultdict[str, list[RemoteEnd]] = defaultdict(list)
        for peer in self._others:
            by_host[peer.host].append(peer)
        return [peer for peers in by_host.values() for peer in peers[: -limits.STRANGERS_PER_ADDRESS_MAX]]


class ConnectionGuard:
    """Limits the connections of strangers to a port of this process, which ``watch`` names. Belongs to an event
    loop."""

    def __init__(self) -> None:
        self._strangers = Strangers()
        self._task: asyncio.Task[None] | None = None
        self._log = LogPacer(limits.STRANGERS_LOG_SECONDS)

    def admit(self, peer: str) -> None:
        """Note a call with the token. peer: as gRPC names it."""
        if (found := parse_peer(peer)) is not None:
            self._strangers.admit(found)

    def watch(self, port: int) -> None:
        """Guard the connections to ``port``, until ``stop``."""
        self._task = asyncio.create_task(self._run(port))

    def stop(self) -> None:
        """End the guard."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, port: int) -> None:
        sweeps = 0
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            sweeps += 1
            # The connections of a thousand members are not looked at each second: that took a tenth of the scheduler's
            # work at rest.
            unknown = _count_descriptors() - self._strangers.member_count
            if unknown > limits.STRANGERS_PER_ADDRESS_MAX or sweeps % _SWEEPS_WHILE_FEW == 0:
                # In a thread: 16,000 connections take a fraction of a second.
                surplus = self._strangers.surplus(await asyncio.to_thread(peers, port))
                self._note(await asyncio.to_thread(shut_down, port, surplus))

    def _note(self, closed: Sequence[RemoteEnd]) -> None:
        now = asyncio.get_running_loop().time()
        for peer in closed:
            if count := self._log.note(now):
                logger.warning(
                    "closed %d connections without a call with the token of this run, the last from %s: %d of one "
                    "address are the limit", count, peer.host, limits.STRANGERS_PER_ADDRESS_MAX,
                )  # fmt: skip


def peers(port: int) -> list[RemoteEnd]:
    """Return the other ends of the connections to ``port`` of this process."""
    return [peer for _, peer in _connections(port)]


def shut_down(port: int, closing: Collection[RemoteEnd]) -> list[RemoteEnd]:
    """End these connections to ``port``. Returns those that were open."""
    found = []
    wanted = set(closing)
    for connection, peer in _connections(port) if wanted else ():
        if peer in wanted:
            with suppress(OSError):  # It may have ended.
                connection.shutdown(socket.SHUT_RDWR)
            found.append(peer)
    return found


def _count_descriptors() -> int:
    try:
        return len(os.listdir(_DESCRIPTORS))
    except OSError:
        return 0


def _connections(port: int) -> Iterator[tuple[socket.socket, RemoteEnd]]:
    """Yield a duplicate of the socket of each connection to ``port``, and its other end. A descriptor that is reused
    meanwhile is harmless: only the duplicate is asked for its ends."""
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return
    for name in names:
        with suppress(OSError):  # It was closed, is no socket, or is not connected.
            if not os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.getsockname()[1] == port:
                    yield duplicate, _peer(*duplicate.getpeername()[:2])
