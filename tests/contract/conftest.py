"""Fixtures of the contract of channels: a server in this process, and a worker's end over each transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.support.server_bench import ServerBench, opened_bench
from tests.support.worker_channels import WORKERS, WorkerChannel

Connect = Callable[..., Awaitable[WorkerChannel]]


@pytest.fixture
async def bench() -> AsyncIterator[ServerBench]:
    """A server without a parameter set."""
    async with opened_bench() as bench:
        yield bench


@pytest.fixture(params=WORKERS, ids=lambda kind: kind.name)
def transport(request: pytest.FixtureRequest) -> type[WorkerChannel]:
    """Each transport between a worker and a server."""
    given: type[WorkerChannel] = request.param
    return given


@pytest.fixture
def connect(bench: ServerBench, transport: type[WorkerChannel]) -> Connect:
    """Open a channel of the worker with this number."""

    async def connect(worker: int = 0) -> WorkerChannel:
        return await transport.opened(bench, worker)

    return connect
