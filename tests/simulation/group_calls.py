"""Calls of simulated groups: kinds and sizes, the data that each rank gives, and the expected results."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from psdist.collectives.group import AsyncWorkerGroup
from psdist.collectives.sync_group import WorkerGroup

SIZES: Final = (0, 1, 5, 30, 200)
KINDS: Final = ("all_reduce", "all_reduce", "all_reduce", "all_gather", "broadcast", "reduce_scatter", "barrier")


def make_call(
    group: AsyncWorkerGroup | WorkerGroup, kind: str, given: Any, out: Any, timeout: float | None, **options: Any
) -> Any:
    """Return the coroutine of a call, or the result of a synchronous group. out: memory for its result."""
    options["timeout"] = timeout
    match kind:
        case "all_reduce":
            return group.all_reduce(given, out=out, **options)
        case "all_gather":
            return group.all_gather(given, out=out, **options)
        case "broadcast":
            return group.broadcast(given, group.size - 1, out=out, **options)
        case "reduce_scatter":
            return group.reduce_scatter(given, out=out, **options)
        case "gather":
            return group.gather(given, 0, **options)
        case _:
            return group.barrier(**options)


def data_of(epoch: int, number: int, rank: int, size: int, world: int) -> Any:
    """Return the rows that a rank gives in a call: one for each rank."""
    return np.random.default_rng([epoch, number, rank]).integers(-1000, 1000, (world, size), dtype=np.int64)


def expected_result(kind: str, epoch: int, number: int, rank: int, size: int, world: int) -> Any:
    """Return the result of a call at a rank."""
    rows = [data_of(epoch, number, other, size, world) for other in range(world)]
    match kind:
        case "all_reduce":
            return sum(row[0] for row in rows)
        case "all_gather":
            return np.stack([row[0] for row in rows])
        case "broadcast":
            return rows[world - 1][0]
        case "reduce_scatter":
            return sum(row[rank] for row in rows)
    return np.zeros(0, np.int64)
