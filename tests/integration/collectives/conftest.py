"""A cluster for workers that use collectives, which servers take no part in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from psdist import AsyncClient
from psdist.launcher.embedded import EmbeddedCluster
from tests.support.collective_run import SIZE, Run


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedCluster]:
    started = EmbeddedCluster(servers=1)
    yield started
    started.close()


@pytest.fixture
async def run(cluster: EmbeddedCluster) -> AsyncIterator[Run]:
    clients = [AsyncClient(cluster.address, cluster.token, rank=rank) for rank in range(SIZE)]
    for client in clients:
        await client.connect()
    yield Run(clients)
    for client in clients:
        await client.close()
