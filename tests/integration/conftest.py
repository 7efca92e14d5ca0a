"""Fixtures of tests for scripts that have no launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import psdist
from psdist.client.context import Context
from psdist.launcher.embedded import EmbeddedCluster


@pytest.fixture(scope="module")
def alone() -> Iterator[Context]:
    """Context of a script without a launcher."""
    with psdist.init() as context:
        assert context.world_size == 1
        yield context


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Name of a parameter set for this test."""
    return "".join(letter if letter.isalnum() else "-" for letter in request.node.name)


@pytest.fixture(scope="module")
def contexts() -> Iterator[list[Context]]:
    """Contexts of two workers in threads of this process, with two servers."""
    cluster = EmbeddedCluster(servers=2)
    clients = [psdist.Client(cluster.address, cluster.token, rank=rank) for rank in range(2)]
    yield [Context(rank, 2, rank, client) for rank, client in enumerate(clients)]
    for client in clients:
        client.close()
    cluster.close()


@pytest.fixture
def both(contexts: list[Context]) -> Callable[[Callable[[Context], Any]], list[Any]]:
    """Do the same in both workers. Returns their results."""

    def run(work: Callable[[Context], Any]) -> list[Any]:
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(work, contexts))

    return run


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[EmbeddedCluster]:
    """Scheduler and servers: two of them, or as many as the module's ``SERVERS``."""
    started = EmbeddedCluster(servers=getattr(request.module, "SERVERS", 2))
    yield started
    started.close()
