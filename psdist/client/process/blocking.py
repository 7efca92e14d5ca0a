"""Base of the synchronous API, whose objects forward to asyncio ones on psdist's loop thread.

The classes of ``sync_client`` derive from it. Their methods are generated from the asyncio API.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from psdist.client.process.process_bound import ProcessBound
from psdist.client.reporting.phase_timer import PhaseTimer

T = TypeVar("T")


class Blocking(ProcessBound, Generic[T]):
    """Object whose methods run those of ``wrapped`` on the loop thread and wait for them.

    phases: clock of the calls of the script's threads.
    """

    def __init__(self, wrapped: T, phases: PhaseTimer) -> None:
        self._async = wrapped
        self._phases = phases

    def __repr__(self) -> str:
        return repr(self._async).replace("<Async", "<", 1)


async def on_loop(call: Callable[[], T]) -> T:
    """Make an ordinary call on the loop, for objects that only the loop's thread may use."""
    return call()
