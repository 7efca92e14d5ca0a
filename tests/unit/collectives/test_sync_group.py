"""The synchronous group has the calls of the asyncio one, with the same arguments and texts."""

from __future__ import annotations

import inspect

from psdist.collectives.group import AsyncWorkerGroup
from psdist.collectives.sync_group import WorkerGroup


def test_the_calls_are_the_same() -> None:
    for name, method in vars(AsyncWorkerGroup).items():
        if name.startswith("_") or not inspect.iscoroutinefunction(method) or name == "close":
            continue
        if name in ("reconfigure", "count_newcomers", "finish", "allocate_buffer"):
            given, mine = (inspect.signature(getattr(cls, name)) for cls in (AsyncWorkerGroup, WorkerGroup))
            assert given.parameters == mine.parameters
            continue
        given, mine = (
            inspect.signature(method).parameters,
            dict(inspect.signature(getattr(WorkerGroup, name)).parameters),
        )
        assert mine.pop("async_op").default is False
        assert {key: (one.default, one.kind) for key, one in given.items()} == {
            key: (one.default, one.kind) for key, one in mine.items()
        }, name
        assert getattr(WorkerGroup, name).__doc__ == method.__doc__, name
    assert WorkerGroup.__doc__ and AsyncWorkerGroup.__doc__
    assert AsyncWorkerGroup.__doc__.partition("\n\n")[2].strip() in WorkerGroup.__doc__
