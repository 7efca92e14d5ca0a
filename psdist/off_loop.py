"""Work outside the event loop, so that heartbeats continue, and work of other threads on it."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")
#: Vectors with at least this many elements are processed in a thread.
LARGE_ELEMENTS: Final = 1 << 22


async def off_loop(elements: int, work: Callable[[], T], *, waits: bool = False) -> T:
    """Return ``work()``, run in a thread if it is long.

    elements: number of elements that ``work`` touches.
    waits: True if ``work`` may block for other reasons.
    """
    return await in_thread(work) if waits or elements >= LARGE_ELEMENTS else work()


async def in_thread(work: Callable[[], T]) -> T:
    """Return ``work()``, run in a thread. It may block, for example until a device has done the script's earlier work.

    At interpreter shutdown, when Python no longer starts threads, ``work`` runs in the calling thread: the process is
    closing a client that its script left open. Executors refuse work earlier than that, while the main thread still
    joins their threads.
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
    """Wait until ``future`` is done. If this task is cancelled meanwhile, raise CancelledError only then.

    The call returns the user's arrays to the user, so nothing may touch them afterwards.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def on_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run ``work`` on the event loop of another thread, unless the returned future is cancelled before. Raises
    TimeoutError if the loop is closed, because the process ends."""
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def call() -> None:
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(work())
            except Exception as error:  # The thread that waits for the answer raises it.
                answer.set_exception(error)

    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        raise TimeoutError from None
    return answer
