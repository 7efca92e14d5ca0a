"""End of the synchronous clients' loop, and of its calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import warnings
from collections.abc import Coroutine
from typing import Any

import pytest

from psdist.client.session import loop
from psdist.client.session.loop import LoopThread


class Client:
    """Client that is closed after this many requests for a last snapshot; 0: never."""

    def __init__(self, saving: int) -> None:
        self.saving = saving
        self.asked = 0
        self.closed = False
        self._end = asyncio.Event()

    async def claim(self) -> None:
        """Register as open on the running loop."""
        self._loop = asyncio.get_running_loop()
        loop.claim(self)

    @property
    def snapshots(self) -> Client:
        """See ``Closable``."""
        return self

    @property
    def needs_last(self) -> bool:
        """See ``LastSnapshot``."""
        self.asked += 1
        if self.asked == self.saving:
            self._loop.call_soon_threadsafe(self._end.set)
        return self.saving > 0

    async def close(self, reason: str = "closed") -> None:
        """See ``Closable``."""
        await self._end.wait()
        self.closed = True


@pytest.mark.parametrize(("saving", "asked"), [(3, 3), (0, 1)])
def test_the_end_waits_for_a_snapshot_however_long_and_for_nothing_else(
    saving: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_EXIT_SECONDS", 0.1)
    thread, client = LoopThread(), Client(saving)
    thread.call(client.claim())
    try:
        thread.stop()
        assert client.closed is (saving > 0) and client.asked >= asked
    finally:
        loop.release(client)


class InterruptedLock:
    """Lock whose wait is interrupted just after it has been taken."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.waits = 0

    def acquire(self, timeout: float) -> bool:
        """See ``threading.Lock``."""
        self.waits += 1
        self._lock.acquire()
        raise KeyboardInterrupt

    def release(self) -> None:
        """See ``threading.Lock``."""
        self._lock.release()


def test_an_interrupt_at_the_end_of_a_call_is_raised_without_another_wait() -> None:
    thread = LoopThread()
    try:
        call = thread._made(asyncio.sleep(0), reading=False, ending=True)
        call.ended = interrupted = InterruptedLock(call.ended)  # type: ignore[assignment]  # has the methods used here
        with pytest.raises(KeyboardInterrupt):
            thread._wait(call, reading=False, ending=True, begins=True)
        assert interrupted.waits == 1
    finally:
        thread.stop()


async def test_a_call_that_is_cancelled_before_its_first_step_leaves_no_coroutine_unawaited() -> None:
    async def inner() -> None:
        await asyncio.get_running_loop().create_future()

    async def outer(awaited: Coroutine[Any, Any, None]) -> None:
        await awaited

    call = loop._Call(outer(inner()), asyncio.get_running_loop(), set())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call.begin()
        call.cancel()
        while call.ended.locked():  # noqa: ASYNC110 - yields, and no more
            await asyncio.sleep(0)
        with pytest.raises(concurrent.futures.CancelledError):
            call.result()
        gc.collect()
    assert not found
