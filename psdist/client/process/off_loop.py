"""Work on large vectors, which must not keep the event loop from heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")
#: Vectors of more elements are looked at and copied in a thread, so that heartbeats go on.
LARGE_ELEMENTS: Final = 1 << 22


async def off_loop(elements: int, work: Callable[[], T]) -> T:
    """What ``work`` returns, which touches ``elements`` numbers: in a thread where these are many."""
    if elements < LARGE_ELEMENTS:
        return work()
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        # The call gives the user's arrays back: nobody may touch them any more.
        await asyncio.wait({task})
        task.exception()
        raise
    return task.result()
