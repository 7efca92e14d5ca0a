"""Pushes of a whole step in one call and in buckets, for runs whose weights are known to the byte."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from psdist import AsyncParameters
from psdist.compression import Codec, Float32
from psdist.launcher.embedded import EmbeddedCluster
from psdist.optim import Optimizer
from psdist.settings.config import TransportName
from tests.support.compressed_runs import ADAM, WORKERS, Workers
from tests.support.exact_runs import gradient, joined, split

PLAIN = (Float32(), Float32())


async def in_buckets(handle: AsyncParameters, values: dict[str, np.ndarray], weight: float = 1.0) -> bytes:
    """Make a step in buckets: the last layers first."""
    buckets = [await handle.push_pull_async({name: values[name]}, weight) for name in reversed(values)]
    weights: dict[str, np.ndarray] = {}
    for bucket in buckets:
        weights |= {name: array.copy() for name, array in (await bucket).items()}
    return joined(weights)


async def in_one(handle: AsyncParameters, values: dict[str, np.ndarray], weight: float = 1.0) -> bytes:
    """Make a step of the gradient buffers, which stay unchanged."""
    buffers = await handle.gradient_buffers()
    for name, array in buffers.items():
        array[...] = values[name]
    result = await handle.push_pull(buffers, weight=weight)
    assert all((buffers[name] == values[name]).all() for name in buffers)
    return joined(result)


Prepare = Callable[[AsyncParameters, int], Awaitable[None]]


async def unprepared(handle: AsyncParameters, step: int) -> None:
    """Let the pushes of a step carry nothing but gradients."""


async def make_step(
    workers: Workers, step: int, prepare: Prepare = unprepared, weights: Sequence[float] = (1.0,) * WORKERS
) -> list[bytes]:
    """Make a step of all workers, in buckets or in one call. prepare: called with each worker's handle before."""
    push = in_buckets if step % 2 and not workers.handles[0].spec.optimizer.max_grad_norm else in_one
    for handle in workers.handles:
        await prepare(handle, step)
    return await asyncio.gather(
        *(push(handle, split(gradient(step, rank)), weights[rank]) for rank, handle in enumerate(workers.handles))
    )


async def check_run(
    workers: Workers,
    expected: Sequence[bytes],
    prepare: Prepare = unprepared,
    optimizer: Optimizer = ADAM,
    weights: Sequence[Sequence[float]] = (),
    killed: int = -1,
    codecs: Sequence[Codec] = PLAIN,
    pull: Codec | None = None,
) -> None:
    """Check that each step of a run has the bytes of one process, and close it.

    weights: of each step's gradients.
    killed: step in which a server is killed.
    """
    async with workers:
        await workers.open(codecs, optimizer=optimizer, pull=pull)
        for step, wanted in enumerate(expected):
            given = weights[step] if weights else (1.0,) * WORKERS
            stepping = asyncio.ensure_future(make_step(workers, step, prepare, given))
            if step == killed:
                await asyncio.sleep(0)
                workers.cluster.processes[2].kill()
            assert await stepping == [wanted] * WORKERS, f"step {step}"


async def check_run_of_copies(
    expected: Sequence[bytes], transport: TransportName = "tcp", killed: int = 3, **run: Any
) -> None:
    """Check a run of three servers with two copies that loses one. run: arguments of ``check_run``."""
    with closing(await asyncio.to_thread(EmbeddedCluster, 3, replicas=2)) as cluster:
        await check_run(Workers(cluster, transport), expected, killed=killed, **run)
