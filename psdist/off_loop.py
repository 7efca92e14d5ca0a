"""Work on large vectors, and on devices, which must not keep the event loop from heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")
#: Vectors of more elements are looked at and copied in a thread, so that heartbeats go on.
LARGE_ELEMENTS: Final = 1 << 22


async def off_loop(elements: int, work: Callable[[], T], *, waits: bool = False) -> T:
    """What ``work`` returns, which touches ``elements`` numbers: in a thread where these are many, or it ``waits``."""
    return await in_thread(work) if waits or elements >= LARGE_ELEMENTS else work()


async def in_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns, which may wait: for a device, which first does all that the script gave to it.

    At the end of the process, when Python starts no thread any more, it runs in this one: then a client is closed that
    its script left open. Executors refuse work earlier than that, while the main thread still waits for their threads.
    """
    try:
        running = asyncio.get_running_loop().run_in_executor(None, work)
    except RuntimeError:
        return work()
    try:
        await until_done(running)
    except asyncio.CancelledError:
        running.exception()
        raise
    return running.result()


async def until_done(future: asyncio.Future[Any]) -> None:
    """Returns when ``future`` is done. Where this task is cancelled meanwhile, however often, that is raised then: the
    call gives the user's arrays back, and nobody may touch them any more."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
