"""Cancellation of work that depends on a peer when the peer ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from psdist.errors import PsdistError, copy_error


@contextmanager
def ending_with(end: asyncio.Future[PsdistError]) -> Iterator[None]:
    """Cancel the enclosing task's block once ``end`` is set, and raise its error instead of CancelledError.

    The block runs in the calling task, not in a task of its own, so its outcome is never lost: cancelled code cleans
    up.
    """
    if end.done():
        raise copy_error(end.result())
    task = asyncio.current_task()
    assert task is not None
    before, is_over, is_cancelled = task.cancelling(), False, False

    def cancel(_: object) -> None:
        nonlocal is_cancelled
        if not is_over:  # The callback may have been scheduled before the block ended.
            is_cancelled = task.cancel()

    end.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if not is_cancelled or task.cancelling() > before + 1:  # The task was cancelled by someone else.
            raise
        raise copy_error(end.result()) from None
    finally:
        is_over = True
        end.remove_done_callback(cancel)
        if is_cancelled:
            task.uncancel()
