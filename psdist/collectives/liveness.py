"""Signs of life of other workers: their processes, and whether their hosts can be reached.

Slow is not dead: a worker that computes, or whose process is starved, still counts as alive. It counts as silent while
its process is stopped (on this machine), or its host acknowledges nothing. It is gone if it refuses a new link.
"""

from __future__ import annotations

import asyncio
import math
from typing import Final

from psdist.collectives.incoming import Sender
from psdist.link import processes
from psdist.link.peer_links import PeerLink
from psdist.v1 import worker_pb2 as pb

#: Looks per time limit.
LOOKS: Final = 8
#: Pauses between two looks, in intervals, after which this process itself was stopped or starved.
_OWN_STALL: Final = 3.0
#: Pauses between two looks, within which an acknowledgement must arrive.
_ACKNOWLEDGED: Final = 2.0


class PeerSilence:
    """Silence of one peer. interval: seconds between two looks."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._looked: float | None = None
        self._since: float | None = None

    def look(self, now: float, *, is_silent: bool) -> float:
        """Return the seconds of silence at this look.

        Time in which this process did not look does not count: it may have been stopped itself.
        """
        gap = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if not is_silent:
            self._since = None
        elif self._since is None:
            self._since = now - self._interval  # It has been silent since the previous look.
        elif gap > _OWN_STALL * self._interval:
            self._since += gap
        return 0.0 if self._since is None else now - self._since


class PeerLiveness:
    """Signs of life of the workers that one worker has links to."""

    def __init__(self) -> None:
        #: Process ids of workers on this machine, and reasons why workers could not be dialed.
        self._pids: dict[Sender, int] = {}
        self._refusals: dict[Sender, str] = {}
        self._silences: dict[Sender, PeerSilence] = {}

    def on_hello(self, hello: pb.PeerHello) -> None:
        """Record the process of a worker that made a link."""
        if hello.pid and hello.pid_scope and hello.pid_scope == processes.own_scope():
            self._pids[hello.sender.worker_id, hello.sender.incarnation] = hello.pid

    def on_link_ended(self, worker: Sender, link: PeerLink, reason: str) -> None:
        """Record the end of a link that this worker dialed."""
        if not link.is_open:
            self._refusals[worker] = reason

    def forget(self, worker: Sender) -> None:
        """Forget a worker that has left the run."""
        for known in (self._pids, self._refusals, self._silences):
            known.pop(worker, None)

    def check(self, worker: Sender, link: PeerLink, limit: float) -> str:
        """Look at a worker, and ping it. Returns why it is gone or silent for ``limit`` seconds; empty if it is not.

        limit: infinite if silence means nothing; half of it is enough for a stopped process, because that is certain.
        Called every ``limit / LOOKS`` seconds.
        """
        if link.is_open:
            self._refusals.pop(worker, None)
        if refusal := self._refusals.get(worker):
            return refusal
        if math.isinf(limit):
            return ""
        interval = limit / LOOKS
        pid = self._pids.get(worker, 0)
        is_stopped = bool(pid) and processes.is_stopped(pid)
        is_silent = is_stopped or link.is_silent(_ACKNOWLEDGED * interval)
        silence = self._silences.setdefault(worker, PeerSilence(interval))
        seconds = silence.look(asyncio.get_running_loop().time(), is_silent=is_silent)
        link.ping()
        if seconds < (limit / 2 if is_stopped else limit):
            return ""
        cause = "its process is stopped" if is_stopped else "its host acknowledges nothing"
        return f"{worker[0]} was silent for {seconds:.1f} s: {cause}"
