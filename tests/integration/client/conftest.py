"""Clients of a test's cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest_asyncio

import psdist
from psdist.launcher.embedded import EmbeddedCluster

Join = Callable[..., Awaitable[psdist.AsyncClient]]


@pytest_asyncio.fixture(loop_scope="session")
async def join(cluster: EmbeddedCluster) -> AsyncIterator[Join]:
    """Factory of clients of the cluster; all are closed at the end."""
    async with AsyncExitStack() as stack:

        async def join(**arguments: Any) -> psdist.AsyncClient:
            client = psdist.AsyncClient(cluster.address, cluster.token, **({"connect_timeout": 60.0} | arguments))
            stack.push_async_callback(client.close)
            return await client.connect()

        yield join
