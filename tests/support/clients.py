"""Clients of a cluster, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

from psdist import AsyncClient
from psdist.launcher.embedded import EmbeddedCluster

Leave = Callable[[AsyncClient], Awaitable[None]]


@asynccontextmanager
async def connected(
    cluster: EmbeddedCluster, *members: str | dict[str, Any], leave: Leave = AsyncClient.close, **settings: Any
) -> AsyncIterator[list[AsyncClient]]:
    """Connect one client for each member, whose rank is its position.

    members: each a transport, or arguments of its client.
    settings: arguments of all clients.
    """
    clients = [
        AsyncClient(
            cluster.address,
            cluster.token,
            **({"rank": rank} | settings | (member if isinstance(member, dict) else {"transport": member})),
        )
        for rank, member in enumerate(members)
    ]
    try:
        await asyncio.gather(*(client.connect() for client in clients))
        yield clients
    finally:
        await asyncio.gather(*(leave(client) for client in clients))


@asynccontextmanager
async def cluster_of(
    *members: str | dict[str, Any], leave: Leave = AsyncClient.close, **settings: Any
) -> AsyncIterator[tuple[EmbeddedCluster, list[AsyncClient]]]:
    """Start a cluster with clients as in ``connected``.

    settings: of the cluster.
    """
    with closing(await asyncio.to_thread(lambda: EmbeddedCluster(**settings))) as cluster:
        async with connected(cluster, *members, leave=leave) as clients:
            yield cluster, clients


async def until(condition: Callable[[], bool]) -> None:
    """Run the event loop until ``condition`` holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the condition sets no event
            await asyncio.sleep(0)


async def leave_unsaved(client: AsyncClient) -> None:
    """Leave without another snapshot."""
    if client.snapshots is not None:
        client.snapshots.close()
    await client.close()
