"""Tells sending from waiting within a push over TCP.

A worker stops at the window of the server until that releases earlier slices, for which it needs the other workers'
gradients. If this counted as sending, all workers of a run with one slow link would seem to send slowly. So a push is
*sending* while its connection holds bytes that the server's kernel has not acknowledged. At the window it is *held up*
as soon as they are acknowledged. The same holds for the last slices, which are sent once they are acknowledged.

The kernel reports no acknowledgement, so the number of bytes is polled: early at first, so that the time by which this
is late is no longer than the sending was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from psdist.client.session.wait_tracker import Wait
from psdist.link.frame_connection import FrameConnection, unacknowledged_bytes
from psdist.wire.limits import DELIVERED_BYTES

#: First and longest interval between two polls.
_POLL_SECONDS: Final = 0.001
_LONGEST_POLL_SECONDS: Final = 0.02


class SendMonitor:
    """Reports the progress of one push to its wait. ``stop`` ends it."""

    def __init__(self, connection: FrameConnection, wait: Wait) -> None:
        self._connection = connection
        self._wait = wait
        self._timer: asyncio.TimerHandle | None = None

    def hold(self) -> None:
        """Report that the push is held up, once its bytes so far are delivered."""
        self._poll(self._wait.held_up, _POLL_SECONDS)

    def resume(self) -> None:
        """Report that the push may send again."""
        self.stop()
        self._wait.resumed()

    def finish(self) -> None:
        """Report that the push is sent, once its bytes are delivered."""
        self._poll(self._wait.sent, _POLL_SECONDS)

    def stop(self) -> None:
        """Report nothing more, unless asked to again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _poll(self, delivered: Callable[[], None], seconds: float) -> None:
        if unacknowledged_bytes(self._connection) <= DELIVERED_BYTES:
            self._timer = None
            delivered()
            return
        following = min(2 * seconds, _LONGEST_POLL_SECONDS)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._poll, delivered, following)
