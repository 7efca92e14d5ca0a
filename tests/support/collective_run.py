"""Workers of a run, in this process, and a group of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np

from psdist import AsyncClient
from psdist.collectives.group import AsyncWorkerGroup
from psdist.collectives.workers import AsyncCollectives

SIZE: Final = 3


class Run:
    """Workers and their collectives."""

    def __init__(self, clients: list[AsyncClient], size: int = SIZE) -> None:
        self.clients = clients
        self.workers = [AsyncCollectives(client._opened()) for client in clients]
        self.groups = [one.new_group(range(size)) for one in self.workers]

    async def all(self, call: Callable[[AsyncWorkerGroup], Awaitable[Any]]) -> list[Any]:
        """Make a call at all ranks. Returns their results, and errors in place of results."""
        return await asyncio.gather(*map(call, self.groups), return_exceptions=True)


def arrays(count: int, dtype: Any = np.float32) -> list[Any]:
    return [(np.random.default_rng(rank).standard_normal(count) * 9).astype(dtype) for rank in range(SIZE)]
