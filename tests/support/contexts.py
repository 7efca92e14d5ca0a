"""Contexts of workers that are threads of this process, with real servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psdist
from psdist.client.context import Context
from psdist.launcher.embedded import EmbeddedCluster


@contextmanager
def workers(count: int, *, first_rank: int = 0, transport: Any = "auto", **cluster: Any) -> Iterator[list[Context]]:
    """Yield the contexts of all workers of a run. cluster: arguments of its EmbeddedCluster; one server by default."""
    with closing(EmbeddedCluster(**({"servers": 1} | cluster))) as started, ExitStack() as stack:
        ranks = range(first_rank, first_rank + count)
        clients = [psdist.Client(started.address, started.token, rank=rank, transport=transport) for rank in ranks]
        for client in clients:
            stack.callback(client.close)
        yield [Context(client.rank, count, client.rank, client) for client in clients]


def everywhere(contexts: list[Context], work: Callable[[Context], Any]) -> list[Any]:
    """Do the same in all workers. Return their results."""
    with ThreadPoolExecutor(len(contexts)) as threads:
        return list(threads.map(work, contexts))
