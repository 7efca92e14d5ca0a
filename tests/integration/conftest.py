"""Fixtures of tests for scripts that have no launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

import psdist
from psdist.client.context import Context
from psdist.launcher.embedded import EmbeddedCluster
from tests.support.contexts import everywhere, workers
from tests.support.launched import Run


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
    with workers(2, servers=2) as made:
        yield made


@pytest.fixture
def both(contexts: list[Context]) -> Callable[[Callable[[Context], Any]], list[Any]]:
    """Do the same in both workers. Returns their results."""
    return partial(everywhere, contexts)


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[EmbeddedCluster]:
    """Scheduler and servers: two of them, or as many as the module's ``SERVERS``."""
    with closing(EmbeddedCluster(servers=getattr(request.module, "SERVERS", 2))) as started:
        yield started


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """Runs that a test starts, which end with it."""
    made: list[Run] = []
    yield made
    for run in made:
        run.stop()
