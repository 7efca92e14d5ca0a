"""Open waits and their reasons: no wait is silent.

A reason completes a sentence that begins with "waiting", such as "for worker-1 (rank 1) to push step 12". Peers may
change it. A reason is logged at INFO when it is first given, and at WARNING when the wait has lasted
``limits.REPORT_WAIT_SECONDS``. It is logged once per reason and again each minute, however many calls wait for it.
Heartbeats carry the open waits, so that ``psdist status`` shows them.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Final, Self

from psdist.client.reporting.phase_timer import PhaseTimer, Subject, TimedRequest
from psdist.client.session.group_calls import GroupCalls
from psdist.tracing.member import MemberTrace
from psdist.wire import limits

logger = logging.getLogger("psdist")

_REPEAT_SECONDS: Final = 60.0
_SENTENCES_MAX: Final = 16


class Wait:
    """One wait, which lasts as long as its ``with`` block. Made by ``WaitTracker.open``."""

    def __init__(
        self, reason: str, tracker: WaitTracker, loop: asyncio.AbstractEventLoop, request: TimedRequest | None = None
    ) -> None:
        self.reason = reason
        self._request = request
        self._tracker = tracker
        self._loop = loop
        self._since = loop.time()
        self._timer = loop.call_later(limits.REPORT_WAIT_SECONDS, self._report)

    def __enter__(self) -> Self:
        self._tracker.open_waits[id(self)] = self
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        del self._tracker.open_waits[id(self)]
        if self._request is not None:
            self._request.close()

    @property
    def seconds(self) -> float:
        """Seconds that the wait has lasted."""
        return self._loop.time() - self._since

    @property
    def sentence(self) -> str:
        """``waiting 12 s for worker-1 (rank 1) to push step 12``."""
        return f"waiting {self.seconds:.0f} s {self.reason}"

    def update_reason(self, reason: str) -> None:
        """Replace the reason, as a peer reported it."""
        if reason == self.reason:
            return
        self.reason = reason
        if self.seconds >= limits.REPORT_WAIT_SECONDS:
            self._warn()
        elif self._is_first(self._tracker.mentioned):
            logger.info("waiting %s", reason)

    def sent(self) -> None:
        """Record that the gradient of the request is handed over."""
        if self._request is not None:
            self._request.sent()

    def held_up(self) -> None:
        """Record that the server takes no more of the gradient for now, and has received all that was sent."""
        if self._request is not None:
            self._request.held_up()

    def resumed(self) -> None:
        """Record that the gradient is sent again. Does nothing unless it was held up."""
        if self._request is not None:
            self._request.resumed()

    def progress(self) -> None:
        """Restart the time limit of silence, because something arrived."""
        if self._request is not None:
            self._request.answered()
        self._since = self._loop.time()
        for logged in (self._tracker.mentioned, self._tracker.reported):
            logged.pop(self.reason, None)

    def _report(self) -> None:
        left = limits.REPORT_WAIT_SECONDS - self.seconds
        if left > 0.001:  # there was progress meanwhile
            self._timer = self._loop.call_later(left, self._report)
            return
        self._warn()
        self._timer = self._loop.call_later(_REPEAT_SECONDS, self._report)

    def _warn(self) -> None:
        if self._is_first(self._tracker.reported):
            logger.warning("%s", self.sentence)

    def _is_first(self, logged: dict[str, float]) -> bool:
        """Return True, and note the time, if no other wait has logged this reason lately."""
        now = self._loop.time()
        # The timers of several waits with one reason end a little after each other.
        if now - logged.get(self.reason, -math.inf) < _REPEAT_SECONDS / 2:
            return False
        for reason in [old for old, at in logged.items() if now - at > _REPEAT_SECONDS]:
            del logged[reason]
        logged[self.reason] = now
        return True


class WaitTracker:
    """Open waits of one client."""

    def __init__(self) -> None:
        #: Waits under way, by their object ids.
        self.open_waits: dict[int, Wait] = {}
        #: When each reason was logged last, at INFO and at WARNING.
        self.mentioned: dict[str, float] = {}
        self.reported: dict[str, float] = {}
        #: Time that the script spends in each phase.
        self.phases = PhaseTimer()
        #: Calls of groups under way.
        self.group_calls = GroupCalls()
        self.trace = MemberTrace(self.phases.add_sink, self.phases.remove_sink)

    def open(self, reason: str) -> Wait:
        """Open a wait, for a ``with`` block, with its first reason."""
        return Wait(reason, self, asyncio.get_running_loop())

    def open_request(self, reason: str, *, sends: bool, subject: Subject | None = None) -> Wait:
        """Open the wait for a server's answer to a request. sends: the request has a gradient. subject: for traces."""
        request = self.phases.open_request(sends=sends, subject=subject)
        return Wait(reason, self, asyncio.get_running_loop(), request)

    def sentences(self) -> list[str]:
        """Return the reasons of long waits with their durations, longest first."""
        long = [wait for wait in self.open_waits.values() if wait.seconds >= limits.REPORT_WAIT_SECONDS]
        long.sort(key=lambda wait: -wait.seconds)
        sentences: dict[str, str] = {}
        for wait in long:
            sentences.setdefault(wait.reason, f"{wait.reason} ({wait.seconds:.0f} s)")
        return list(sentences.values())[:_SENTENCES_MAX]
