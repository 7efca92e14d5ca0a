"""Work with a peer that ends with the peer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from psdist.errors import PsdistError, again


@contextmanager
def ending_with(end: asyncio.Future[PsdistError]) -> Iterator[None]:
    """Cancels what the running task awaits in the block once ``end`` has its error, and raises that instead.

    Nothing that was done in the block is lost, as the outcome of a task of its own would be: whoever is cancelled in
    there cleans up.
    """
    if end.done():
        raise again(end.result())
    task = asyncio.current_task()
    assert task is not None
    before, is_over, is_cancelled = task.cancelling(), False, False

    def cancel(_: object) -> None:
        nonlocal is_cancelled
        if not is_over:  # It may have been scheduled before the block was left.
            is_cancelled = task.cancel()

    end.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if not is_cancelled or task.cancelling() > before + 1:  # Somebody else cancels it.
            raise
        raise again(end.result()) from None
    finally:
        is_over = True
        end.remove_done_callback(cancel)
        if is_cancelled:
            task.uncancel()
