"""Number of psdist's coroutines that are nested between ``push_pull`` and the write to a connection."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest

import psdist
from psdist.client.session.waits import Wait
from psdist.client.transport.transport import PushRequest
from psdist.launcher.embedded import EmbeddedCluster

#: From the user's call to the coroutine that writes to the connection, including both.
DEPTH_MAX = 8
PRODUCT = str(Path(psdist.__file__).parent)


class Nesting:
    """Count the coroutines that wait for the running one, across the tasks that they started."""

    def __init__(self) -> None:
        self._at_start: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self.deepest = 0

    def start_task(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **more: Any) -> Any:
        """Start a task, as a task factory."""
        task = asyncio.Task(work, loop=loop, **more)
        self._at_start[task] = self.depth()
        return task

    def depth(self) -> int:
        task, frame = asyncio.current_task(), sys._getframe()
        depth = 0 if task is None else self._at_start.get(task, 0)
        while frame is not None:
            code = frame.f_code
            depth += bool(code.co_flags & inspect.CO_COROUTINE) and code.co_filename.startswith(PRODUCT)
            frame = frame.f_back
        return depth

    def note(self) -> None:
        self.deepest = max(self.deepest, self.depth())

    def note_in(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        """Count at each call of a method, which is not a coroutine."""
        plain = getattr(owner, method)

        def noted(*args: Any) -> Any:
            self.note()
            return plain(*args)

        monkeypatch.setattr(owner, method, noted)


async def inner(nesting: Nesting) -> None:
    nesting.note()


async def test_tasks_count_from_where_they_were_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PRODUCT", __file__)
    nesting, loop = Nesting(), asyncio.get_running_loop()
    loop.set_task_factory(nesting.start_task)
    try:
        await inner(nesting)
        assert nesting.deepest == 2
        await asyncio.create_task(inner(nesting))
        assert nesting.deepest == 2
        await asyncio.gather(asyncio.create_task(_outer(nesting)))
        assert nesting.deepest == 3
    finally:
        loop.set_task_factory(None)


async def _outer(nesting: Nesting) -> None:
    await asyncio.create_task(inner(nesting))


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_few_coroutines_lie_between_a_push_and_its_connection(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    nesting, loop = Nesting(), asyncio.get_running_loop()
    async with psdist.AsyncClient(cluster.address, cluster.token, transport=transport) as client:
        init = {"w": np.zeros(4096, np.float32)}
        handle = await client.parameters(transport, init, psdist.optim.SGD(), slice_elements=1024)
        await handle.push_pull(init)
        assert handle.statistics().transport == transport and len(handle.statistics().transports) == 2
        nesting.note_in(monkeypatch, Wait, "sent")
        nesting.note_in(monkeypatch, PushRequest, "_encode")
        loop.set_task_factory(nesting.start_task)
        try:
            await handle.push_pull(init)
        finally:
            loop.set_task_factory(None)
    assert 1 < nesting.deepest <= DEPTH_MAX
