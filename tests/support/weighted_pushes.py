"""Pushes of a whole step in one call and in buckets, for runs whose weights are known to the byte."""

from __future__ import annotations

import numpy as np

from psdist import AsyncParameters
from psdist.compression import Float32
from tests.support.exact_runs import joined

PLAIN = (Float32(), Float32())


async def in_buckets(handle: AsyncParameters, values: dict[str, np.ndarray], weight: float) -> bytes:
    """Make a step in buckets: the last layers first."""
    buckets = [await handle.push_pull_async({name: values[name]}, weight) for name in reversed(values)]
    weights: dict[str, np.ndarray] = {}
    for bucket in buckets:
        weights |= {name: array.copy() for name, array in (await bucket).items()}
    return joined(weights)


async def in_one(handle: AsyncParameters, values: dict[str, np.ndarray], weight: float) -> bytes:
    """Make a step of the gradient buffers, which stay unchanged."""
    buffers = await handle.gradient_buffers()
    for name, array in buffers.items():
        array[...] = values[name]
    result = await handle.push_pull(buffers, weight=weight)
    assert all((buffers[name] == values[name]).all() for name in buffers)
    return joined(result)
