"""Work on large vectors, which must not keep the event loop from heartbeats."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")
#: Vectors of more elements are looked at and copied in a thread, so that heartbeats go on.
LARGE_ELEMENTS: Final = 1 << 22


async def off_loop(elements: int, work: Callable[[], T]) -> T:
    """What ``work`` returns, which touches ``elements`` numbers: in a thread where these are many."""
    if elements < LARGE_ELEMENTS:
        return work()
    task = asyncio.ensure_future(in_thread(work))
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        # The call gives the user's arrays back: nobody may touch them any more.
        await asyncio.wait({task})
        task.exception()
        raise
    return task.result()


async def in_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns, in a thread. At the end of the process, when Python starts none any more, in this one:
    then a client is closed that its script left open."""
    if not threading.main_thread().is_alive():
        return work()
    return await asyncio.to_thread(work)
